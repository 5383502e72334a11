"""`python -m mhc_compile`: what each command prints, and its exit code."""

from __future__ import annotations

import inspect
import io
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mhc_compile
from mhc_compile import compat, docs, passes, progress
from mhc_compile.command_line import environment, main, measuring
from mhc_compile.passes.report import Report
from tests.fuzz.plants import planted
from tests.passes.forms import GateOfChannels
from tests.test_breaks import Broken
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
HERE = "tests.test_command_line"
COMMANDS = ("explain", "verify", "env", "ops", "bench")
SHAPE = (2, 3, 4, 6)
BOTH = ["generate_mix_and_aggregate", "expand_combine"]


class Asks(Sublayer):
    """Takes its streams by name, and the gradient mode with them."""

    graded: bool | None = None

    def forward(self, *, streams: torch.Tensor) -> torch.Tensor:
        Asks.graded = torch.is_grad_enabled()
        return super().forward(streams)


def model() -> Sublayer:
    return Sublayer(4, 6, 3, 2)


def make() -> Any:
    sys.stdout.write("the factory is at work\n")
    return model(), (torch.randn(SHAPE),)


def by_name() -> Any:
    return Asks(4, 6, 3, 2), (), {"streams": torch.randn(SHAPE)}


def cut() -> Any:
    return Broken(4, 6, 3, 2), (torch.randn(SHAPE),)


def declined() -> Any:
    return GateOfChannels(), (torch.randn(SHAPE),)


def fails() -> Any:
    raise ValueError("the width is\nwrong")


def leaves() -> Any:
    raise SystemExit("not as a script")


def wrong_shape() -> Any:
    return model(), (torch.randn(2, 3, 5, 6),)


def tensor_alone() -> Any:
    return model(), torch.randn(SHAPE)


def function() -> Any:
    return lambda x: x + 1, (torch.ones(2),)


MODEL = Sublayer(4, 6, 3, 2)
PAIR = (MODEL, (torch.ones(SHAPE),))


def run(*arguments: str) -> int:
    torch._dynamo.reset()
    return main(list(arguments))


@pytest.mark.parametrize("program", ["make", "by_name", "PAIR"])
def test_explain_prints_the_report(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", f"{HERE}:{program}") == 0
    out = capsys.readouterr().out
    assert "mhc: 2 of 2 hyper-connection sites rewritten in 1 graph" in out
    assert "  1 x expand_combine               tests/zoo/near.py:" in out


def test_the_model_is_the_same_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(mhc_compile, "explain", lambda model, x: seen.extend([model.phi, x]) or Report())
    assert run("explain", f"{HERE}:make") == run("explain", f"{HERE}:make") == 0
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])


def test_json_is_all_that_stdout_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", f"{HERE}:make", "--json") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == "the factory is at work\n"
    fields = ["format", "program", "sites", "called", "cut", "fusions", "advice", "graphs", "seconds", "errors"]
    assert list(found) == fields
    assert all(f"| `{name}` |" in PAGE for name in fields)
    assert (found["format"], found["program"], found["graphs"]) == (1, f"{HERE}:make", 1)
    assert [site["op"] for site in found["sites"]] == BOTH
    assert [site["reason"] for site in found["sites"]] == [None, None]
    assert list(found["sites"][0]) == ["op", "location", "detail", "reason", "own"]
    assert list(found["sites"][0]["location"]) == ["file", "line", "code"]
    assert found["sites"][0]["location"]["file"] == inspect.getsourcefile(Sublayer)
    assert found["errors"] == found["cut"] == []


def test_strict_fails_for_what_is_declined(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", f"{HERE}:declined") == 0
    assert run("explain", f"{HERE}:declined", "--strict", "--json") == 1
    out, err = capsys.readouterr()
    found = json.loads(out[out.index("{\n") :])
    assert err == "explain --strict: 1 declined\n"
    (left,) = [site for site in found["sites"] if site["reason"] is not None]
    assert left["op"] == "aggregate"
    assert "a gate for each channel" in left["reason"]


def test_strict_fails_for_what_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", f"{HERE}:cut", "--strict") == 1
    assert capsys.readouterr().err == "explain --strict: 2 cut or not compiled\n"
    assert run("explain", f"{HERE}:make", "--strict") == 0


def test_verbose_has_every_detail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Report, "details", lambda report: f"all {len(report.sites)} sites")
    assert run("explain", f"{HERE}:PAIR", "-v") == 0
    assert capsys.readouterr().out == "all 2 sites\n"


@pytest.mark.parametrize(("options", "graded"), [((), True), (("--no-grad",), False)])
def test_gradients_can_be_left_out(options: tuple[str, ...], graded: bool) -> None:
    assert run("explain", f"{HERE}:by_name", *options) == 0
    assert Asks.graded is graded


@pytest.mark.parametrize("program", ["model", "MODEL"])
def test_inputs_are_made_of_their_shape_and_dtype(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(mhc_compile, "explain", lambda *args: given.extend(args) or Report())
    inputs = ("--input", "2x3:int64", "--input", "4", "--input", "1x2:bfloat16", "--input", "2:bool")
    assert run("explain", f"{HERE}:{program}", *inputs) == 0
    assert isinstance(given[0], Sublayer)
    assert [tuple(one.shape) for one in given[1:]] == [(2, 3), (4,), (1, 2), (2,)]
    assert [one.dtype for one in given[1:]] == [torch.int64, torch.float32, torch.bfloat16, torch.bool]
    assert set(given[1].flatten().tolist()) <= {0, 1}


RESULTS = "(model, args), (model, args, kwargs), or a model alone with --input"
PLACES = "module:factory or path/to/file.py:factory"
USAGE_ERRORS = {
    "no colon": (["models"], f"'models' came; expected {PLACES}"),
    "no module": (
        ["no_such_module:make"],
        f"the import of no_such_module failed with ModuleNotFoundError: No module named 'no_such_module'; "
        f"expected {PLACES} (-v shows the traceback)",
    ),
    "no file": (
        ["no/such.py:make"],
        f"the import of no/such.py failed with FileNotFoundError: there is no file {Path('no/such.py')}; "
        f"expected {PLACES} (-v shows the traceback)",
    ),
    "no factory": ([f"{HERE}:mak"], f"{HERE} has no mak; expected one of Asks, model, make, by_name, "),
    "it raises": (
        [f"{HERE}:fails"],
        f"the factory {HERE}:fails failed with ValueError: the width is wrong; expected it to return {RESULTS} (-v",
    ),
    "it exits": ([f"{HERE}:leaves"], f"the factory {HERE}:leaves failed with SystemExit: not as a script; expected"),
    "a model alone": ([f"{HERE}:model"], f"{HERE}:model gives an object of type Sublayer; expected {RESULTS}"),
    "no tuple of arguments": (
        [f"{HERE}:tensor_alone"],
        f"{HERE}:tensor_alone gives a tuple (Sublayer, Tensor); expected {RESULTS}",
    ),
    "inputs twice": (
        [f"{HERE}:PAIR", "--input", "2"],
        f"{HERE}:PAIR gives a tuple (Sublayer, tuple) and --input was given; expected a model alone with --input",
    ),
    "the model raises": (
        [f"{HERE}:wrong_shape"],
        f"explain of {HERE}:wrong_shape failed with RuntimeError: mat1 and mat2 shapes ",
    ),
}


@pytest.mark.parametrize("case", USAGE_ERRORS)
def test_a_usage_error_is_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = USAGE_ERRORS[case]
    assert run("explain", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"python -m mhc_compile explain: {message}")
    assert err.count("\n") == 1


def test_verbose_shows_the_traceback_of_the_factory(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", f"{HERE}:fails", "-v") == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):\n")
    assert 'raise ValueError("the width is\\nwrong")' in err
    assert "-v shows" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "a:b", "--input", "2y16"], "'2y16' came; expected SHAPE[:DTYPE], such as 2x16:int64"),
        (["explain", "a:b", "--input", "2x16:int63"], "'2x16:int63' came; expected SHAPE[:DTYPE]"),
        (["bench", "--tokens", "0"], "argument --tokens: '0' came; expected a whole number above 0"),
        (["no_such_command"], "invalid choice: 'no_such_command'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_argparse_refuses_with_the_same_code(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_file_is_a_module_that_dynamo_can_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its name is that of a module of the standard library, and it imports what stands beside it."""
    (tmp_path / "beside_a_program.py").write_text(f"from {HERE} import make, Sublayer\n", encoding="utf-8")
    (tmp_path / "json.py").write_text(
        "import torch\nfrom beside_a_program import Sublayer\nSCALE = torch.ones(())\n"
        "class Scaled(Sublayer):\n"
        "    def forward(self, x):\n        return super().forward(x * SCALE)\n"
        f"def make():\n    return Scaled(4, 6, 3, 2), (torch.randn({SHAPE}),)\n",
        encoding="utf-8",
    )
    before = list(sys.path)
    try:
        assert run("explain", f"{tmp_path / 'json.py'}:make", "--strict") == 0
    finally:
        sys.path[:] = before
    assert "2 of 2 hyper-connection sites rewritten" in capsys.readouterr().out
    assert sys.modules["json"] is json


@pytest.mark.usefixtures("passes_only")
def test_verify_says_what_it_runs_and_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", f"{HERE}:make", "--no-inductor") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "the factory is at work",
        "verify: runs the model in float64, eagerly, compiled by mhc",
        "verify: float64 ...",
    ]
    assert lines[-1] == "ok: as accurate as eager"
    assert [line for line in lines if line.startswith("gradient of ")]


@pytest.mark.usefixtures("passes_only")
def test_verify_compares_outputs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", f"{HERE}:by_name", "--no-inductor", "--no-grad") == 0
    assert "gradient of" not in capsys.readouterr().out


@pytest.mark.usefixtures("passes_only")
def test_verify_fails_for_a_wrong_rewriting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(passes, "run", planted("transposed mixing"))
    assert run("verify", f"{HERE}:make", "--no-inductor") == 1
    assert "FAILED" in capsys.readouterr().out.splitlines()[-1]


def test_verify_names_the_option_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def verify(*args: Any, say: Any, **kwargs: Any) -> Any:
        say("verify: a first compilation may take minutes; inductor=False leaves out plain Inductor's")
        raise MemoryError("model: too large")

    monkeypatch.setattr(mhc_compile, "verify", verify)
    assert run("verify", f"{HERE}:PAIR") == 2
    out, err = capsys.readouterr()
    assert out == "verify: a first compilation may take minutes; --no-inductor leaves out plain Inductor's\n"
    assert f"verify of {HERE}:PAIR failed with MemoryError: model: too large; expected" in err


def test_verify_wants_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", f"{HERE}:function") == 2
    assert "TypeError: model: expected a torch.nn.Module, got function" in capsys.readouterr().err


def test_env_has_what_a_report_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCH_LOGS", "mhc_compile")
    monkeypatch.setenv("PASSWORD", "secret")
    assert run("env", "--json") == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert all(f"| `{name}` |" in PAGE for name in found)
    assert found["mhc_compile"] == mhc_compile.__version__
    assert found["torch"]["version"] == torch.__version__
    assert found["torch"]["newest_tested"] == compat.NEWEST_TESTED
    assert found["python"] == platform.python_version()
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert found["settings"]["TORCH_LOGS"] == "mhc_compile"
    assert "secret" not in text
    compiler = found["cpp_compiler"]
    assert (compiler is None) == (compat.cpp_compiler() is None)
    assert (compiler is None) == found["fast_path"]["cpu"].startswith("none")


def test_env_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = {"name": "Some GPU", "capability": "7.5", "memory_gib": 15.0, "kernels": False}
    monkeypatch.setattr(environment, "_gpus", lambda: [gpu])
    monkeypatch.setattr(compat, "cpp_compiler", lambda: None)
    monkeypatch.setattr(compat, "is_newer_than_tested", lambda: True)
    assert run("env") == 0
    lines = [re.sub(" {2,}", "  ", line) for line in capsys.readouterr().out.splitlines()]
    tested = f"(tested: 2.11 to {compat.NEWEST_TESTED}, which this one is newer than)"
    assert f"torch  {torch.__version__} {tested}" in lines
    assert "GPU  Some GPU, capability 7.5, 15.0 GiB" in lines
    assert "C++ compiler  none" in lines
    assert "fast path, CPU  none: torch.compile needs a C++ compiler, and there is none" in lines


@pytest.mark.parametrize(
    ("kernels", "triton", "told"),
    [
        ([], "3.6.0", "none: torch sees no GPU"),
        ([True, True], "3.6.0", "Triton kernels"),
        ([True, False], "3.6.0", "Triton kernels need capability 8.0; operators run in plain torch on the other GPUs"),
        ([False], None, "none: Triton is not installed, and operators run in plain torch"),
    ],
)
def test_env_says_which_gpus_have_kernels(
    kernels: list[bool], triton: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_version", lambda package: triton)
    assert environment._path_on_gpus([{"kernels": one} for one in kernels]) == told


def test_the_tested_range_begins_with_the_oldest_torch_that_is_taken() -> None:
    assert f'"torch>={compat.OLDEST}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_ops_lists_all_with_equation_and_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ops") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines[:-1] if not line.startswith(" ")] == docs.registered()
    about = dict(zip(lines[0:-1:3], zip(lines[1:-1:3], lines[2:-1:3], strict=True), strict=True))
    assert about["aggregate"] == (
        "  out = sum_i h_pre[i] * x[i]",
        "  mhc::aggregate(Tensor x, Tensor h_pre, *, ScalarType? out_dtype=None) -> Tensor",
    )
    assert all(" = " in equation for name, (equation, _) in about.items() if not name.endswith("_backward"))
    assert about["scale"][0].startswith("  l = r * h * scale + bias, r from ms as in `mhc_compile.forms.Rms`; h_pre = ")
    assert about["head_backward"][0] == "  the gradient of head"
    assert "float eps=1e-06, float start_eps=1e-06" in about["sinkhorn"][1]


@pytest.mark.parametrize("name", ["expand_combine", "mhc::expand_combine"])
def test_ops_prints_the_docstring_of_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ops", name) == 0
    out = capsys.readouterr().out
    assert str(inspect.getdoc(mhc_compile.ops.expand_combine)) in out
    assert out.startswith("mhc::expand_combine(Tensor f, Tensor? layer_bias, Tensor h_post, Tensor x, Tensor? h_res, *")
    assert "Its gradient: mhc::expand_combine_backward(Tensor d_x_new, " in out


def test_ops_of_a_gradient_and_of_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ops", "head_backward") == 0
    assert "the gradient of head." in capsys.readouterr().out
    assert run("ops", "hed") == 2
    assert "'hed' came; expected one of aggregate, aggregate_backward, boundary," in capsys.readouterr().err


@pytest.mark.parametrize("inductor", [True, False])
def test_bench_says_what_it_measures(
    inductor: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backends: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda model, backend: backends.append(backend) or model)
    monkeypatch.setattr(measuring, "ROUNDS", 3)
    monkeypatch.setattr(measuring, "_SECONDS", 0.001)
    sizes = ("--device", "cpu", "--layers", "1", "--tokens", "3", "--width", "8")
    assert run("bench", *sizes, *([] if inductor else ["--no-inductor"])) == 0
    assert backends == (["inductor", "mhc"] if inductor else ["mhc"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("bench: 1 hyper-connection, n = 4, C = 8, float32, 3 tokens; ")
    assert "eager, Inductor and mhc take turns in 3 rounds" in lines[2] if inductor else "eager and mhc" in lines[2]
    rows = [line.split() for line in lines[lines.index("milliseconds       forward        step") + 1 :][: 2 + inductor]]
    assert [row[0] for row in rows] == ["eager", *(["Inductor"] if inductor else []), "mhc"]
    assert all(float(time) > 0 for row in rows for time in row[1:])
    assert lines[-1].endswith("on this machine. Results were not compared: `verify` does that.")


def test_bench_takes_turns_and_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is timed once to find how many of it fill a turn; a slow round does not count."""
    seconds = {"eager": iter([0.02, 0.02, 0.5, 0.03]), "mhc": iter([0.01, 0.011, 0.012, 0.01])}
    turns: list[tuple[str, int]] = []

    class Clock:
        def __init__(self, stmt: str, globals: dict[str, Any], num_threads: int) -> None:
            assert num_threads == torch.get_num_threads()
            self.name = globals["call"]()

        def timeit(self, number: int) -> Any:
            turns.append((self.name, number))
            return SimpleNamespace(mean=next(seconds[self.name]))

    monkeypatch.setattr(measuring, "Timer", Clock)
    monkeypatch.setattr(measuring, "ROUNDS", 3)
    found = measuring._medians({"eager": lambda: "eager", "mhc": lambda: "mhc"})
    assert found == {"eager": 0.03, "mhc": 0.011}
    assert turns == [("eager", 1), ("mhc", 1), *[("eager", 2), ("mhc", 5)] * 3]


def test_bench_without_a_gpu_or_a_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(model: Any, backend: str) -> Any:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("bench", "--device", "cuda") == 2
    assert "--device cuda came, and torch sees no GPU; expected --device cpu" in capsys.readouterr().err
    monkeypatch.setattr(torch, "compile", fail)
    assert run("bench", "--width", "8", "--tokens", "3") == 2
    assert "bench failed with RuntimeError: no C++ compiler; expected" in capsys.readouterr().err


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_that_stays_replaces_the_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_SILENT", 0.0)
    assert run("env", "--json") == 0
    shown = terminal.getvalue()
    assert shown.startswith("\renv: looks at compilers and GPUs, 0 s\x1b[K")
    assert "\r\x1b[K{\n" in shown


@pytest.mark.parametrize(
    "arguments", ["explain examples/snapshot_a_model.py:Model --input 2x8x32", "ops contract", "explain models.py:mak"]
)
def test_the_page_shows_what_is_printed(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """But for times, and lines of the sources."""
    shown = PAGE.split(f"$ python -m mhc_compile {arguments}\n")[1].split("```")[0]
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(ROOT)
    if "models.py" in arguments:
        monkeypatch.chdir(tmp_path)
        Path("models.py").write_text(PAGE.split("```python\n")[1].split("```")[0], encoding="utf-8")
    run(*arguments.split())
    printed = "".join(capsys.readouterr())
    varying = r"\(\d+\.\d+ s\)|:\d+"
    assert re.sub(varying, "", printed) == re.sub(varying, "", shown)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert f"examples:\n  python -m mhc_compile {command}" in out
    assert re.search(r"exit codes:\n  0  .*\n  1  .*\n.*\n  2  ", out)
    assert f"\n## {command}\n" in PAGE


def test_a_process_of_its_own() -> None:
    """Its exit code is that of the command, and it waits for nothing that the command does not need."""
    command = [sys.executable, "-X", "importtime", "-m", "mhc_compile", "ops", "no_such"]
    around = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=around, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "mhc_compile.command_line.commands" in imported
    assert not {"torch._dynamo", "mhc_compile.guard", "mhc_compile.passes"} & imported
    assert "python -m mhc_compile ops: 'no_such' came; expected one of aggregate, " in done.stderr
