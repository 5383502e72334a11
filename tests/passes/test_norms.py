"""How streams are normalised in front of a projection, in every way that programs have of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import check
from tests.zoo.common import random_parameter
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, WIDTH, LENGTH, BATCH = 4, 6, 3, 2
FULL = ["expand_combine", "generate_mix_and_aggregate"]
# The normed streams are a tensor of the program's own, which is projected, and not read.
APART = ["aggregate", "expand_combine", "projection", "sinkhorn"]


class Normed(Sublayer):
    """The streams are normalised before they are projected."""

    def __init__(self) -> None:
        super().__init__(N, WIDTH, LENGTH, BATCH)
        self.gamma = random_parameter(N, WIDTH, mean=1.0, std=0.3)
        self.gain = random_parameter(1, mean=1.0, std=0.3)
        self.norms = nn.ParameterList([random_parameter(N * WIDTH, mean=1.0, std=0.3) for _ in range(3)])

    def normed(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def mixes(self, x: Tensor) -> Tensor:
        return self.project(self.flat(self.normed(x)))

    def factor(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.square().mean((-2, -1), keepdim=True) + 1e-6)


class WeightOfChannels(Normed):
    def normed(self, x: Tensor) -> Tensor:
        return x * self.factor(x) * self.per_channel


class WeightOfStreams(Normed):
    def normed(self, x: Tensor) -> Tensor:
        return x * self.factor(x) * self.per_stream.unsqueeze(-1)


class WeightOfElements(Normed):
    def normed(self, x: Tensor) -> Tensor:
        return x * self.factor(x) * self.gamma


class OneWeight(Normed):
    def normed(self, x: Tensor) -> Tensor:
        return x * self.factor(x) * self.gain


class WeightBefore(Normed):
    """The norm is of the weighted streams."""

    def normed(self, x: Tensor) -> Tensor:
        weighted = x * self.gamma
        return weighted * self.factor(weighted)


class WeightWithoutFactor(Normed):
    """The weight is applied before the projection, and the factor after it."""

    def mixes(self, x: Tensor) -> Tensor:
        return self.project(self.flat(x * self.gamma)) * self.factor(x).squeeze(-1)


class TwoWeights(Normed):
    def normed(self, x: Tensor) -> Tensor:
        return x * self.factor(x) * self.gamma * self.per_channel


class NegatedFactor(Normed):
    def normed(self, x: Tensor) -> Tensor:
        return x * -self.factor(x)


class FactorOfEachElement(Normed):
    """What streams are scaled by beside the norm is no weight."""

    def normed(self, x: Tensor) -> Tensor:
        return x * self.factor(x) * torch.sigmoid(x.roll(1, -1))


class FactorOfEachStream(Normed):
    def normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), self.per_channel, 1e-6)


class LayerNorm(Normed):
    def normed(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.flatten(-2), (N * WIDTH,), self.gamma.flatten()).unflatten(-1, (N, WIDTH))


class LayerNormOfEachStream(Normed):
    def normed(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), self.per_channel)


class NoNorm(Normed):
    def normed(self, x: Tensor) -> Tensor:
        return x


class ThreeNorms(Normed):
    """A weight of its own for each of three projections, which read the streams together."""

    def mixes(self, x: Tensor) -> Tensor:
        normed = self.flat(x) * self.factor(x).squeeze(-1)
        parts = self.phi.split((N, N, N * N))
        return torch.cat([F.linear(normed * w, p) for w, p in zip(self.norms, parts, strict=True)], -1)


class ThreeProjections(Normed):
    """Three projections of streams that nothing scales; the factor comes after them."""

    def forward(self, x: Tensor) -> Any:
        return self.body(x.sin())

    def mixes(self, x: Tensor) -> Tensor:
        parts = self.phi.split((N, N, N * N))
        return torch.cat([F.linear(self.flat(x), p) for p in parts], -1) * self.factor(x).squeeze(-1)


class TwoProjections(ThreeProjections):
    """Two of them: that of the read and write, and that of the matrix."""

    def mixes(self, x: Tensor) -> Tensor:
        parts = self.phi.split((2 * N, N * N))
        return torch.cat([F.linear(self.flat(x), p) for p in parts], -1) * self.factor(x).squeeze(-1)


class OneProjectionPutTogether(Normed):
    """A list of projections that has one of them."""

    def mixes(self, x: Tensor) -> Tensor:
        return torch.cat([F.linear(self.flat(x), self.phi)], -1) * self.factor(x).squeeze(-1)


class ThreeNormsOfUnknownGates(Normed):
    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normed = self.flat(x) * self.factor(x).squeeze(-1)
        parts = self.phi.split((N, N, N * N))
        a, p, r = (F.linear(normed * w, p) for w, p in zip(self.norms, parts, strict=True))
        return a.softmax(-1), 1 + p.sin(), r.unflatten(-1, (N, N)).softmax(-1)


class TwoFactors(Normed):
    """The gates of one projection are scaled by two norms: most of them by one, the matrix by the other."""

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = self.flat(x)
        mean = flat.square().mean(-1, keepdim=True)
        usual, other = torch.rsqrt(mean + 1e-6), torch.rsqrt(mean + 1e-2)
        pre, post, res = self.split(self.project(flat))
        pre, post, res = self.logits((pre * usual, post * usual, res * other))
        return self.pre(pre), self.post(post), self.res(res)


NORMS: list[tuple[type[Normed], list[str]]] = [
    (WeightOfChannels, FULL),
    (WeightOfStreams, FULL),
    (WeightOfElements, FULL),
    (OneWeight, FULL),
    (WeightBefore, ["aggregate", "expand_combine", "generate_mix"]),
    (WeightWithoutFactor, FULL),
    (TwoWeights, APART),
    (NegatedFactor, FULL),
    (FactorOfEachElement, APART),
    (FactorOfEachStream, APART),
    (LayerNorm, APART),
    (LayerNormOfEachStream, APART),
    (NoNorm, FULL),
    (ThreeNorms, APART),
    (ThreeProjections, FULL),
    (TwoProjections, FULL),
    (OneProjectionPutTogether, FULL),
    (ThreeNormsOfUnknownGates, ["aggregate", "expand_combine", "projection"]),
    (TwoFactors, [*FULL, "sinkhorn"]),
]


@pytest.mark.parametrize(("kind", "operators"), NORMS, ids=[kind.__name__ for kind, _ in NORMS])
def test_norms(kind: type[Normed], operators: list[str]) -> None:
    outcome = check.run(kind(), (torch.randn(BATCH, LENGTH, N, WIDTH),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == operators, str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)


@pytest.mark.parametrize("kind", [kind for kind, _ in NORMS], ids=[kind.__name__ for kind, _ in NORMS])
def test_one_token(kind: type[Normed]) -> None:
    """A factor for each token has one number then, as a weight may have."""
    check.assert_as_accurate(check.run(kind(), (torch.randn(1, 1, N, WIDTH),), repeats=2))


class _Factor(Sublayer):
    def of_mean(self, ms: Tensor) -> Tensor:
        return torch.rsqrt(ms + 1e-6)

    def rms(self, flat: Tensor) -> Tensor:
        return self.of_mean(flat.square().mean(-1, keepdim=True))


class LargeDetached(_Factor):
    def of_mean(self, ms: Tensor) -> Tensor:
        return torch.rsqrt(torch.where(ms > 1e8, ms.detach(), ms) + 1e-6)


class SmallDetached(_Factor):
    def of_mean(self, ms: Tensor) -> Tensor:
        return torch.rsqrt(torch.where(ms < 1e-4, ms.detach(), ms) + 1e-9)


class FiniteMean(_Factor):
    def of_mean(self, ms: Tensor) -> Tensor:
        return torch.rsqrt(ms.clamp(1e-6, 3e38))


class NumberForInfinity(_Factor):
    def of_mean(self, ms: Tensor) -> Tensor:
        return torch.rsqrt(ms.nan_to_num(posinf=1e30) + 1e-6)


class WholeEps(_Factor):
    def of_mean(self, ms: Tensor) -> Tensor:
        return torch.rsqrt(ms + 1)


class EpsOfATensor(_Factor):
    def of_mean(self, ms: Tensor) -> Tensor:
        return torch.rsqrt(torch.tensor(1e-6) + ms)


@pytest.mark.parametrize(
    ("kind", "size", "taken"),
    [
        (LargeDetached, 3e4, False),
        (SmallDetached, 3e-3, False),
        (FiniteMean, 1e25, False),
        (NumberForInfinity, 1e25, False),
        (WholeEps, 1.0, True),
        (EpsOfATensor, 1.0, True),
    ],
)
def test_a_factor_is_that_of_a_norm_for_squares_of_all_sizes(kind: type[_Factor], size: float, taken: bool) -> None:
    """In value and in gradient, up to where squares overflow."""
    x = size * torch.randn(2, 3, 4, 6)
    outcome = check.run(kind(4, 6, 3, 2), (x,), backward=size < 1e20, repeats=1)
    assert ("generate_mix_and_aggregate" in outcome.operators) == taken, str(outcome.report)
    check.assert_equal_to_eager(outcome)
