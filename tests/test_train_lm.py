"""`examples/train_lm.py`: every division of the work trains as one process does, and gradients are judged."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

from mhc_compile import passes
from tests import needs
from tests.fuzz.plants import PLANTS, planted
from tests.jobs import environment_of

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
STEPS = 3
# Float32, and sums over rows, tokens and channels in another order; Adam's first steps divide small gradients.
CLOSE = {"loss": 1e-4, "gradient_norm": 1e-3}

Rows = list[dict[str, float]]
Train = Callable[..., tuple[Rows, str]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, job_device: str) -> Train:
    """Run the example: what `losses.csv` says, and what was printed."""

    def run(*arguments: str, processes: int = 1, out: Path | None = None, steps: int = STEPS) -> tuple[Rows, str]:
        if any("tp" in re.split("[,=]", argument) for argument in arguments):
            needs.flattened_shards()
        out = out or tmp_path_factory.mktemp("train_lm")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        fixed = ["--batch", "8", "--dtype", "float32", "--steps", str(steps), "--out", str(out)]
        done = subprocess.run(
            [sys.executable, *launcher * (processes > 1), str(EXAMPLES / "train_lm.py"), *fixed, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=environment_of(job_device, processes),
        )
        assert done.returncode == 0, done.stderr[-3000:]
        summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        assert summary["processes"] == processes
        assert summary["tokens_per_second"] > 0
        with (out / "losses.csv").open() as file:
            return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)], done.stdout

    return run


def _assert_equal(rows: Rows, wanted: Rows) -> None:
    assert len(rows) == len(wanted)
    for row, other in zip(rows, wanted, strict=True):
        assert row["step"] == other["step"]
        for name, relative in CLOSE.items():
            assert row[name] == pytest.approx(other[name], rel=relative), (row, other)


EAGER = ("--compile", "eager")
# All that go together.
PAIRS = ["fsdp=2,tp=2", "fsdp=2,cp=2", "ddp=2,cp=2", "pp=2,fsdp=2", "pp=2,ddp=2", "tp=2,cp=2", "tp=2,pp=2", "cp=2,pp=2"]


@pytest.fixture(scope="module")
def alone(train: Train) -> Rows:
    """The losses of one process."""
    rows, _ = train(*EAGER)
    assert rows[-1]["loss"] < rows[0]["loss"]
    return rows


@pytest.mark.parametrize("parallel", ["fsdp", "tp", "cp", "pp", pytest.param("ddp", marks=pytest.mark.thorough)])
def test_two_processes_train_as_one(train: Train, alone: Rows, parallel: str) -> None:
    _assert_equal(train(*EAGER, "--parallel", parallel, processes=2)[0], alone)


@pytest.mark.thorough
@pytest.mark.parametrize("parallel", PAIRS)
def test_four_processes_train_as_one(train: Train, alone: Rows, parallel: str) -> None:
    _assert_equal(train(*EAGER, "--parallel", parallel, processes=4)[0], alone)


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
def test_schedules_of_stages_that_hand_gates_on(train: Train, schedule: str) -> None:
    given = (*EAGER, "--variant", "v41", "--layers", "4")
    divided = train(*given, "--parallel", "pp", "--schedule", schedule, processes=2)
    _assert_equal(divided[0], train(*given)[0])


@pytest.mark.thorough
@pytest.mark.parametrize("parallel", ["tp", "pp", "cp"])
def test_compiled_blocks_train_as_one_process(train: Train, alone: Rows, parallel: str) -> None:
    rows, told = train("--compile", "mhc", "--parallel", parallel, processes=2)
    _assert_equal(rows, alone)
    assert "mhc: 4 of 4 hyper-connection sites rewritten" in told or "mhc: 8 of 8" in told, told


@pytest.mark.thorough
def test_plain_residual_connections_to_compare_with(train: Train) -> None:
    rows, told = train("--variant", "plain")
    alone, _ = train(*EAGER, "--variant", "plain")
    _assert_equal(rows, alone)
    assert "mhc: 0 of 0" in told, told
    _assert_equal(train(*EAGER, "--variant", "plain", "--parallel", "pp", processes=2)[0], alone)


@pytest.mark.thorough
@pytest.mark.parametrize("division", [("", 1), ("pp", 2)], ids=lambda division: division[0] or "one")
def test_a_run_goes_on_under_another_division(
    train: Train, alone: Rows, tmp_path: Path, division: tuple[str, int]
) -> None:
    train(*EAGER, "--parallel", "fsdp", "--save-every", "2", processes=2, out=tmp_path, steps=2)
    parallel, processes = division
    rows, _ = train(*EAGER, "--parallel", parallel, "--resume", processes=processes, out=tmp_path)
    _assert_equal(rows, alone[2:])


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example as a module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_lm

    return train_lm


@pytest.mark.parametrize(
    ("text", "world", "sizes"),
    [
        ("fsdp", 4, {"fsdp": 4}),
        ("fsdp=2,tp=2", 4, {"fsdp": 2, "tp": 2}),
        ("pp=2,fsdp", 8, {"pp": 2, "fsdp": 4}),
        ("pp=2,tp=2,cp=2", 8, {"pp": 2, "tp": 2, "cp": 2}),
    ],
)
def test_sizes(example: Any, text: str, world: int, sizes: dict[str, int]) -> None:
    from language_model.parallel import sizes_of

    assert sizes_of(text, world) == sizes


@pytest.mark.parametrize(
    ("text", "world", "told"),
    [
        ("zero", 2, "expected different ones of pp, ddp, fsdp, cp, tp, got 'zero'"),
        ("tp,tp", 2, "expected different ones"),
        ("fsdp=3", 4, "'fsdp=3' does not divide 4 processes"),
        ("fsdp=2", 4, "does not divide 4 processes"),
        ("fsdp,tp", 4, "does not divide 4 processes"),
        ("ddp=2,tp=2", 4, "ddp goes with neither fsdp nor tp"),
    ],
)
def test_divisions_that_are_none(example: Any, text: str, world: int, told: str) -> None:
    from language_model.parallel import sizes_of

    with pytest.raises(ValueError, match=told):
        sizes_of(text, world)


def _scale_detached(graph: fx.Graph, node: fx.Node) -> None:
    """The operators' gradient of scale is lost."""
    if "generate_mix" in str(node.target):
        with graph.inserting_before(node):
            node.update_arg(2, graph.call_method("detach", (node.args[2],)))


MUTANTS = {"none": None, "no gradient of scale": _scale_detached, "h_res transposed": PLANTS["transposed mixing"]}


@pytest.mark.thorough
@pytest.mark.parametrize("mutant", MUTANTS)
def test_gradients_are_judged(example: Any, mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the step that the weights are then at; a rewrite that is wrong does not pass."""
    monkeypatch.setattr("sys.argv", ["train_lm.py", "--layers", "1", "--batch", "2", "--out", str(tmp_path)])
    trainer = example.Trainer(example.arguments(), "cpu")
    plant = MUTANTS[mutant]
    plants = {mutant: plant} if plant else {}
    with mock.patch.dict(PLANTS, plants), mock.patch.object(passes, "run", planted(mutant) if plant else passes.run):
        found = trainer.judge()
    assert found.ok is (plant is None), str(found)
    if plant is None:
        assert found.report.rewritten
    torch._dynamo.reset()
