"""On two GPUs: training steps in which the boundary's single pass runs beside communication end, with the same bits.

BESIDE_STEPS says how many steps. docs/distributed.md says which scenarios were run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import Seen, run_job

pytestmark = [pytest.mark.gpu, pytest.mark.large]
BESIDE = ("two communicators", "delays", "held")
GATHERED = ("gathered, two passes", "gathered and reordered")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder: Path = tmp_path_factory.mktemp("beside")
    return run_job(
        "tests.beside", folder, 2, "two passes", "one pass", "traced", *BESIDE, *GATHERED, seconds=1800, device="cuda"
    )


@pytest.mark.parametrize(("alone", "passes"), [("two passes", "one pass"), GATHERED])
def test_losses_are_those_of_two_passes(alone: str, passes: str, two: Seen) -> None:
    for of_two, of_one in zip(two[alone], two[passes], strict=True):
        assert of_two["passes"] == 0
        assert of_one["passes"] > 0
        assert of_one["losses"][: len(of_two["losses"])] == of_two["losses"]
        assert of_one["losses"][-1] < of_one["losses"][0]


@pytest.mark.parametrize("scenario", BESIDE)
def test_what_runs_beside_changes_no_bit(scenario: str, two: Seen) -> None:
    for usual, seen in zip(two["one pass"], two[scenario], strict=True):
        assert seen == usual


def test_a_trace_shows_the_pass_beside_communication(two: Seen) -> None:
    """On one rank at least: one that comes late to a collective finds the other there, and ends it at once."""
    ranks = two["traced"]
    assert any(rank["beside"] > 0 for rank in ranks), ranks
