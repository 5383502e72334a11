"""`env`, `ops` and `bench`, the commands that need no model: what each prints, and its exit code."""

from __future__ import annotations

import inspect
import json
import platform
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mhc_compile
from mhc_compile import compat, generated_pages
from mhc_compile.command_line import environment, measuring
from tests.test_command_line import PAGE, ROOT, run

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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
    assert [line for line in lines[:-1] if not line.startswith(" ")] == generated_pages.registered()
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
    assert "got 'hed'; expected one of aggregate, aggregate_backward, aggregate_and_norm," in capsys.readouterr().err


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
    assert "got --device cuda, and torch sees no GPU; expected --device cpu" in capsys.readouterr().err
    monkeypatch.setattr(torch, "compile", fail)
    assert run("bench", "--width", "8", "--tokens", "3") == 2
    assert "bench failed with RuntimeError: no C++ compiler; expected" in capsys.readouterr().err
