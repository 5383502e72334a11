"""The examples run on their own, each in a process of its own, and show what they say."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from dataclasses import field, make_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def _run(name: str, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _assert_it_learned(told: str) -> None:
    ((before, after),) = re.findall(r"loss before ([\d.]+), after ([\d.]+)", told)
    assert float(after) < 0.7 * float(before)


def _assert_all_rewritten(told: str, sites: int) -> None:
    assert f"mhc: {sites} of {sites} hyper-connection sites rewritten" in told


def test_calling_the_operators_trains() -> None:
    _assert_it_learned(_run("call_the_operators.py"))


@pytest.mark.slow
def test_the_snapshot_holds() -> None:
    assert "expand_combine" in _run("snapshot_a_model.py")


@pytest.mark.slow
def test_a_checkpoint_is_moved() -> None:
    told = _run("move_a_checkpoint.py")
    (difference,) = re.findall(r"largest difference between the modules: (\S+)", told)
    # Two float32 evaluations of sums of 256 terms and 39 half-steps.
    assert float(difference) < 1e-5
    assert "the way back gives the same bits: True" in told
    assert "to Liger: no order of the parameters makes them equal" in told


@pytest.mark.parametrize("release", ["0.3.0", "main"])
def test_the_configs_for_torchtitan_name_the_backend(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    """With stand-ins of torchtitan's modules, whose `CompileConfig` has lost a field after the release."""
    more = [("enable", bool, field(default=False))] if release == "0.3.0" else []
    config = make_dataclass("CompileConfig", [("backend", str), ("components", list), *more])
    registry = SimpleNamespace(
        **{f"deepseek_v4_{size}": lambda: SimpleNamespace(compile=None) for size in ("debugmodel", "flash", "pro")}
    )
    stands_in = {"config": SimpleNamespace(CompileConfig=config), "models.deepseek_v4": registry}
    registry.config_registry = registry
    monkeypatch.setitem(sys.modules, "torchtitan", SimpleNamespace())
    for name, module in stands_in.items():
        monkeypatch.setitem(sys.modules, f"torchtitan.{name}", module)
    made = runpy.run_path(str(EXAMPLES / "torchtitan_deepseek_v4.py"))
    for name in ("debugmodel", "flash", "pro"):
        compiled = made[name]().compile
        assert (compiled.backend, compiled.components) == ("mhc", ["model"])
        assert getattr(compiled, "enable", True)


# Inductor compiles in earnest in the others, as it does for their readers. Each takes half a minute to two minutes.


@pytest.mark.thorough
def test_a_trainer_of_transformers() -> None:
    """On one process; `test_distributed_trainer.py` has two."""
    _assert_all_rewritten(_run("train_with_trainer.py"), 4)


@pytest.mark.thorough
def test_a_gpt_is_trained() -> None:
    told = _run("gpt.py")
    _assert_it_learned(told)
    _assert_all_rewritten(told, 9)


@pytest.mark.thorough
def test_own_gates_are_named_and_compiled() -> None:
    told = _run("own_gates.py")
    assert "4 of 4 hyper-connection sites rewritten, 4 with gates of their own" in told
    assert "its own: h_res" in told
    assert "compiled" in told.splitlines()[-1]


@pytest.mark.thorough
def test_deepseek_v4_is_trained_and_generates() -> None:
    told = _run("train_deepseek_v4.py")
    _assert_it_learned(told)
    assert f"generated {list(range(5, 19))}" in told
    assert "declined" not in told


@pytest.mark.thorough
def test_layers_are_compiled_once() -> None:
    """Six layers: a graph for the first, whose streams have no gradient, and one for the others; then one for all."""
    told = _run("compile_each_layer.py")
    _assert_all_rewritten(told, 8)
    _assert_all_rewritten(told, 24)


@pytest.mark.thorough
def test_an_exported_model_takes_any_length() -> None:
    told = _run("export_a_model.py")
    differences = re.findall(r"tokens: largest difference (\S+)", told)
    # Values of about 1 in float32, in other orders.
    assert len(differences) == 2
    assert max(map(float, differences)) < 1e-5
    _assert_all_rewritten(told, 3)


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_train(way: str) -> None:
    told = _run("train_on_two_processes.py", way, launcher=TORCHRUN)
    assert "parameters are equal on all ranks: True" in told
    losses = dict(re.findall(r"(rank \d, step \d+): loss ([\d.]+)", told))
    for rank in range(2):
        assert float(losses[f"rank {rank}, step 19"]) < 0.9 * float(losses[f"rank {rank}, step 0"])
    assert "hyper-connection sites rewritten" in told


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_is_run_and_listed(path: Path) -> None:
    tests = _text("tests/test_examples.py") + _text("tests/test_train_lm.py")
    assert f'"{path.name}"' in tests or f"examples/{path.name}" in _text("Makefile")
    assert f"| `{path.name}` |" in _text("examples/README.md")
