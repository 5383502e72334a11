"""Programs whose streams are DTensors, rewritten and compiled in a job of two processes."""

from __future__ import annotations

import pytest

from tests import needs
from tests.jobs import Seen, run_job
from tests.ops.calls import OPERATORS

pytestmark = pytest.mark.slow
MIX, COMBINE = "generate_mix_and_aggregate", "expand_combine"
PENDING = "its result is a pending sum, (Partial(sum),), which the operators do not leave open"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, job_device: str) -> Seen:
    scenarios = ("first", "sequence parallel", "as placed")
    return run_job("tests.dtensors", tmp_path_factory.mktemp("two"), 2, *scenarios, device=job_device)


def test_operators(two: Seen) -> None:
    for seen in two["first"]:
        assert seen == {"far": {}, "collectives": {}, "misplaced": [], "operators": len(OPERATORS)}


def test_tensor_and_sequence_parallelism(two: Seen) -> None:
    """All sites in one full graph, fused; the result and 16 gradients are as accurate as in one process."""
    needs.flattened_shards()
    expected = {"rewritten": 2 * [COMBINE] + 2 * [MIX], "fused": 1, "errors": [], "findings": [], "results": 17}
    assert two["sequence parallel"] == 2 * [expected]


@pytest.mark.parametrize("place", ["R R", "S(0) R", "S(1) R", "S(0) S(0)", "P(sum) R"])
def test_values_and_placements_are_those_of_eager_code(two: Seen, place: str) -> None:
    """The sublayer works on this rank's part of its input, so another placement would be another result."""
    if place == "S(1) R":
        needs.flattened_shards()
    if place == "S(0) S(0)":
        needs.torch_at_least("2.13", "fake DTensors cannot be redistributed, as aten.detach_ has no sharding strategy")
    if place == "P(sum) R":
        needs.torch_at_least("2.13", "the program's own result is no pending sum")
    for seen in two["as placed"]:
        close, same_placements, rewritten, reasons, errors = seen[place]
        assert (close, same_placements, errors) == (True, True, [])
        assert rewritten == ([] if place == "P(sum) R" else [COMBINE, MIX])
        assert reasons == (2 * [PENDING] if place == "P(sum) R" else [])
