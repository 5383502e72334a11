"""FSDP2 by way of libraries: transformers' `Trainer`, as an example has it, and float8 weights of torchao."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import run_job

LAYER = ["expand_combine", "generate_mix_and_aggregate"]


@pytest.mark.thorough
def test_weights_that_are_gathered_in_float8(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    seen = run_job("tests.trainer", tmp_path, 2, "float8", seconds=240)["float8"]
    assert seen == [{"unequal": [], "rewritten": sorted(LAYER * 2)}] * 2


@pytest.mark.thorough
def test_the_example_with_a_trainer_of_transformers(tmp_path: Path) -> None:
    for needed in ("transformers", "accelerate"):
        pytest.importorskip(needed)
    (alone,) = run_job("tests.trainer", tmp_path, 1, "trainer", seconds=240)["trainer"]
    assert not alone["all are DTensors"]
    for rank in run_job("tests.trainer", tmp_path, 2, "trainer", seconds=240)["trainer"]:
        assert rank["all are DTensors"]
        # Phi, scale and bias of two connections in each of two layers, and of the head.
        assert rank["whole"] == 3 * (2 * 2 + 1)
        # Sums of float32 numbers in another order, in two steps.
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert rank["rewritten"] == alone["rewritten"] == LAYER
        assert rank["left"] == alone["left"] == []
