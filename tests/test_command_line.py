"""`python -m mhc_compile`: what each command prints, and its exit code."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mhc_compile
from mhc_compile import passes, progress
from mhc_compile.command_line import main
from mhc_compile.passes.report import Report
from tests.fuzz.plants import planted
from tests.passes.forms import GateOfChannels
from tests.test_breaks import Broken
from tests.test_given_up import broken
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


def harmless() -> Any:
    return broken, (torch.randn(SHAPE),)


def declined() -> Any:
    return GateOfChannels(), (torch.randn(SHAPE),)


def has_children() -> Any:
    os.system("echo a child is at work")
    return make()


def fails() -> Any:
    raise ValueError("the width is\nwrong")


def leaves() -> Any:
    raise SystemExit("not as a script")


def wrong_shape() -> Any:
    return model(), (torch.randn(2, 3, 5, 6),)


def tensor_alone() -> Any:
    return model(), torch.randn(SHAPE)


def class_of_a_model() -> Any:
    return Sublayer, (torch.randn(SHAPE),)


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
    fields = [
        "format",
        "program",
        "sites",
        "called",
        "cut",
        "fusions",
        "fused",
        "excerpts",
        "advice",
        "graphs",
        "functions",
    ]
    fields += ["seconds", "errors"]
    assert list(found) == fields
    assert all(f"| `{name}` |" in PAGE for name in fields)
    assert (found["format"], found["program"], found["graphs"]) == (1, f"{HERE}:make", 1)
    assert [site["op"] for site in found["sites"]] == BOTH
    assert [site["reason"] for site in found["sites"]] == [None, None]
    keys = ["op", "location", "detail", "reason", "own", "module", "before", "after", "excerpt", "node"]
    assert list(found["sites"][0]) == keys
    assert all(f"`{key}`" in PAGE or f'"{key}"' in PAGE for key in keys)
    assert {site["excerpt"] for site in found["sites"]} == found["excerpts"].keys()
    assert all(isinstance(site["node"], int) for site in found["sites"])
    assert list(found["sites"][0]["location"]) == ["file", "line", "code"]
    assert found["sites"][0]["location"]["file"] == inspect.getsourcefile(Sublayer)
    assert found["errors"] == found["cut"] == []


def test_a_page_is_written_beside_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.html"
    assert run("explain", f"{HERE}:declined", "--html", str(path), "--strict") == 1
    assert "declined: " in capsys.readouterr().out
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "✗ declined" in page


def test_a_page_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mhc_compile, "explain", lambda *args: Report())
    path = tmp_path / "no folder" / "report.html"
    assert run("explain", f"{HERE}:make", "--html", str(path)) == 2
    assert f"explain: --html {path} failed with FileNotFoundError" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert run("explain", f"{HERE}:make", "--html", str(tmp_path / "report.html")) == 2
    assert "explain: report.html() needs jinja2: pip install 'mhc-compile[html]'" in capsys.readouterr().err


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


def test_strict_accepts_a_function_without_streams(capsys: pytest.CaptureFixture[str]) -> None:
    """Dynamo gives up on it."""
    assert run("explain", f"{HERE}:harmless", "--strict") == 0
    assert "  not compiled, cannot hold a site: 1 x function at tests/test_given_up.py" in capsys.readouterr().out


def test_verbose_has_every_detail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Report, "details", lambda report: f"all {len(report.sites)} sites")
    assert run("explain", f"{HERE}:PAIR", "-v") == 0
    assert capsys.readouterr().out == "all 2 sites\n"


def test_the_report_names_the_option_that_prints_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(errors=[f"error {number}" for number in range(9)], graphs=1)
    monkeypatch.setattr(mhc_compile, "explain", lambda *args, **kwargs: report)
    assert run("explain", f"{HERE}:PAIR") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "  5 more errors: add -v"
    assert str(report).splitlines()[-1] == "  5 more errors: print(report.details())"


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
    "no colon": (["models"], f"got 'models'; expected {PLACES}"),
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
    "an input of a dtype that cannot be filled": (
        [f"{HERE}:model", "--input", "2x8:quint8"],
        "--input 2x8:quint8 failed with ",
    ),
    "an input without end": (
        [f"{HERE}:model", "--input", "9999999999x9999999999"],
        "--input 9999999999x9999999999:float32 failed with ",
    ),
    "inputs twice": (
        [f"{HERE}:PAIR", "--input", "2"],
        f"{HERE}:PAIR gives a tuple (Sublayer, tuple) and --input was given; expected a model alone with --input",
    ),
    "a class": (
        [f"{HERE}:class_of_a_model"],
        f"explain of {HERE}:class_of_a_model failed with TypeError: model: got the class Sublayer; expected",
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
        (["explain", "a:b", "--input", "2y16"], "got '2y16'; expected SHAPE[:DTYPE], such as 2x16:int64"),
        (
            ["explain", "a:b", "--input", "2x16:in64"],
            "got the dtype 'in64'; expected a dtype of torch, such as bool, int32",
        ),
        (["explain", "a:b", "--stric"], "python -m mhc_compile explain: error: unrecognized arguments: --stric"),
        (["explain", "a:b", "c:d"], "usage: python -m mhc_compile explain [-h]"),
        (["--versio", "ops"], "error: unrecognized arguments: --versio"),
        (["bench", "--tokens", "0"], "argument --tokens: got '0'; expected a whole number above 0"),
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
    """Its name is that of a module of the standard library, and it imports files from its own folder."""
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
        "verify: eager ...",
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
    assert "python -m mhc_compile ops: got 'no_such'; expected one of aggregate, " in done.stderr


def test_json_is_all_that_stdout_has_with_child_processes_too() -> None:
    command = [sys.executable, "-m", "mhc_compile", "explain", f"{HERE}:has_children", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["graphs"] == 1
    assert "a child is at work\n" in done.stderr


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--strict",), 1)])
def test_the_exit_code_is_the_commands_if_nobody_reads_its_output(options: tuple[str, ...], code: int) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "mhc_compile", "explain", f"{HERE}:declined", *options]
    done = subprocess.run(command, cwd=ROOT, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert (done.returncode, "BrokenPipe" in done.stderr) == (code, False)
