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


# --- Writes


class Overwritten(Sublayer):
    """y is z0 z1 w2 w3: of what is written first, nothing is left."""

    def forward(self, x: Tensor) -> Any:
        z, w = (x * self.per_channel).sin(), (x * self.per_channel).cos()
        y = torch.zeros_like(x)
        y[..., 2:4, :] = z[..., 2:4, :]
        y[..., 0:4, :] = w
        y[..., 0:2, :] = z[..., 0:2, :]
        return self.body(y)


class OverwrittenInPart(Sublayer):
    """y is w0 z1 z2 z3."""

    def forward(self, x: Tensor) -> Any:
        z, w = (x * self.per_channel).sin(), (x * self.per_channel).cos()
        y = torch.zeros_like(x)
        y[..., 0:2, :] = w[..., 0:2, :]
        y[..., 1:4, :] = z[..., 1:4, :]
        y[..., 4:, :] = z[..., 4:, :]
        return self.body(y)


class WrittenTwice(Sublayer):
    """y is z; w is written first, where it is written over."""

    def forward(self, x: Tensor) -> Any:
        z, w = (x * self.per_channel).sin(), (x * self.per_channel).cos()
        y = torch.zeros_like(x)
        y[..., 0:1, :] = w[..., 0:1, :]
        y[..., 0:2, :] = z[..., 0:2, :]
        y[..., -2:, :] = z[..., -2:, :]
        return self.body(y)


@pytest.mark.parametrize("kind", [Overwritten, OverwrittenInPart, WrittenTwice])
def test_a_piece_counts_where_no_later_write_covers_it(kind: type[Sublayer]) -> None:
    assert "2 of 2" in _rewritten(kind)


# --- Integers


class SumOfIntegers(Sublayer):
    def rms(self, flat: Tensor) -> Tensor:
        return torch.rsqrt(flat.square().sum(-1, keepdim=True, dtype=torch.int64) / flat.shape[-1] + 1e-6)


def test_a_sum_that_rounds_to_integers_is_no_sum_of_squares() -> None:
    model: Any = SumOfIntegers(4, 6, 3, 2)
    program, report = check.rewriting(model)
    x = torch.randn(SHAPE)
    with torch.no_grad():
        torch.testing.assert_close(program(x), model(x))
    assert "rms eps" not in str(report)


# --- Places


class FarToken(Sublayer):
    """No RMS norm from the 601st token on: the squares that a norm is judged by are fewer."""

    def rms(self, flat: Tensor) -> Tensor:
        mean = flat.square().mean(-1, keepdim=True)
        return torch.rsqrt(mean + 1e-6) + 0.5 * (torch.ones_like(mean).cumsum(1) > 600)


def test_every_token_is_seen_where_a_token_may_have_its_own_norm() -> None:
    model: Any = FarToken(4, 6, 1000, 1)
    program, report = check.rewriting(model)
    x = torch.randn(1, 1000, 4, 6)
    torch.testing.assert_close(program(x), model(x))
    assert "rms eps" not in str(report)


class NothingOfTheAddend(Sublayer):
    """With a beta of 0, torch does not read what it would add, which is NaN here."""

    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        product = (h_post.unsqueeze(-1) * torch.log(f - 2).unsqueeze(-2)).flatten(0, 1)
        return torch.baddbmm(product, h_res.mT.flatten(0, 1), x.flatten(0, 1), beta=0).view_as(x)


def test_what_is_multiplied_by_no_beta_is_not_read() -> None:
    outcome = check.run(NothingOfTheAddend(4, 6, 3, 2), (torch.randn(2, 3, 4, 6),), backward=False, repeats=1)
    assert outcome.rewritten["output 0"].isfinite().all(), str(outcome.report)
    check.assert_equal_to_eager(outcome)
