"""Programs that are nearly a form: what an operator is given besides its tensors, and what shows only in some runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.zoo import check
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SHAPE = (2, 3, 4, 6)


# --- Random numbers


class Scattered(torch.autograd.Function):
    """The identity, with gradients of which some are dropped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * (torch.rand_like(gradient) > 1e-7)


class Dropout(Sublayer):
    """A dropout so small that it mostly drops nothing."""

    def post(self, logits: Tensor) -> Tensor:
        return 2 * torch.sigmoid(F.dropout(logits, 1e-7))


class Noise(Sublayer):
    def post(self, logits: Tensor) -> Tensor:
        return 2 * torch.sigmoid(logits * (torch.rand_like(logits) > 1e-7))


class RandomBackward(Sublayer):
    def post(self, logits: Tensor) -> Tensor:
        return 2 * torch.sigmoid(Scattered.apply(logits))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize(("kind", "grad"), [(Dropout, True), (Dropout, False), (Noise, True), (RandomBackward, True)])
def test_a_gate_that_draws_random_numbers_stays_the_programs_own(kind: type[Sublayer], grad: bool) -> None:
    model: Any = kind(4, 6, 3, 2)
    x = torch.randn(SHAPE)
    program, report = check.rewriting(model)
    with torch.set_grad_enabled(grad):
        program(x)
    owned = [site.own for site in report.rewritten if "h_post" in site.own]
    assert owned, str(report)
    assert "draws random numbers" in owned[0]


# --- Arguments


class ScaledSubtrahend(Sublayer):
    def post(self, logits: Tensor) -> Tensor:
        return 2 * torch.sigmoid(torch.rsub(logits, 1.0, alpha=3.0))


class ScaledNumberAdded(Sublayer):
    def post(self, logits: Tensor) -> Tensor:
        return 2 * torch.sigmoid(torch.ops.aten.add.Scalar(logits, 1.0, 3.0))


class ScaledNumberSubtracted(Sublayer):
    def post(self, logits: Tensor) -> Tensor:
        return 2 * torch.sigmoid(torch.ops.aten.sub.Scalar(logits, 1.0, 3.0))


def _rewritten(kind: type[Sublayer]) -> str:
    """The report on a sublayer that computes what its eager code does."""
    model: Any = kind(4, 6, 3, 2)
    outcome = check.run(model, (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    return str(outcome.report)


@pytest.mark.parametrize("kind", [ScaledSubtrahend, ScaledNumberAdded, ScaledNumberSubtracted])
def test_alpha_is_read_where_it_is_positional(kind: type[Sublayer]) -> None:
    assert "2 of 2" in _rewritten(kind)
