"""The same sublayer in many spellings, each of which must become the same operators."""

from __future__ import annotations

import pytest
import torch

from tests.zoo import check, spellings

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FULL = ["expand_combine", "generate_mix_and_aggregate"]
DRAWS = 40
# So many that every choice is drawn together with others; each alone is tested as well.
FEW = 20


def _run(choices: dict[str, str]) -> check.Outcome:
    return check.run(spellings.Spelled(choices, n=4, width=6), (torch.randn(2, 3, 4, 6),), repeats=2)


def _assert_complete(outcome: check.Outcome) -> None:
    assert outcome.operators == FULL, str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)
    assert any("sinkhorn" in site.detail for site in outcome.report.rewritten), str(outcome.report)


@pytest.mark.parametrize(
    ("place", "choice"), spellings.alone(), ids=[f"{p}-{c}".replace(" ", "_") for p, c in spellings.alone()]
)
def test_each_spelling_becomes_the_same_operators(place: str, choice: str) -> None:
    outcome = _run({place: choice})
    _assert_complete(outcome)
    check.assert_as_accurate(outcome)


@pytest.mark.parametrize(
    "seed", [*range(FEW), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(FEW, DRAWS))]
)
def test_drawn_spellings_become_the_same_operators(seed: int) -> None:
    """Every place spelled at random."""
    choices = spellings.draw(seed)
    outcome = _run(choices)
    check.assert_as_accurate(outcome)
    _assert_complete(outcome)
