"""Vectors that are reflected or projected, x - 2 (x k) k: each by itself, so that few tokens are no streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import check
from tests.zoo.common import random_parameter

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# More channels than the operators take streams, which else could be streams themselves.
N, WIDTH = 4, 40


class Reflection(nn.Module):
    """Vectors [b, t, C], along the normal that their mean makes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = random_parameter(WIDTH, WIDTH, std=WIDTH**-0.5)
        self.a = random_parameter(N, mean=0.5)

    def read(self, x: Tensor) -> Tensor:
        return x.mean(1)

    def normal(self, x: Tensor) -> Tensor:
        return F.normalize(F.linear(self.read(x), self.weight), dim=-1).unsqueeze(1)

    def forward(self, x: Tensor) -> Any:
        x = x.sin()
        k = self.normal(x)
        return x - self.gate(x, k) * k

    def gate(self, x: Tensor, k: Tensor) -> Tensor:
        return 2 * (x * k).sum(-1, keepdim=True)


class ByProducts(Reflection):
    def gate(self, x: Tensor, k: Tensor) -> Tensor:
        return 2 * torch.einsum("btc,bsc->bts", x, k)


class Damped(Reflection):
    """With a factor of its own for each vector."""

    def gate(self, x: Tensor, k: Tensor) -> Tensor:
        return (x @ self.weight[:, :1]).sigmoid() * (x @ k.mT)


class NotNormed(Reflection):
    """By a vector of any length, whose square divides the product."""

    def normal(self, x: Tensor) -> Tensor:
        return F.linear(self.read(x), self.weight).unsqueeze(1)

    def gate(self, x: Tensor, k: Tensor) -> Tensor:
        return 2 * (x @ k.mT) / (k * k).sum(-1, keepdim=True)


class OfOneTensor(Reflection):
    """The vectors are seen as [b, t, 4, C / 4] before and after, as streams are."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.unflatten(-1, (4, -1)).cos().flatten(-2)).unflatten(-1, (4, -1))


class Gated(Reflection):
    """A near miss: a function of the product is a gate."""

    def gate(self, x: Tensor, k: Tensor) -> Tensor:
        return (x * k).sum(-1, keepdim=True).sigmoid()


class OfAWeightedSum(Reflection):
    """A near miss: a read with gates shows that the vectors are streams."""

    def read(self, x: Tensor) -> Tensor:
        return torch.einsum("n,bnc->bc", self.a, x)


@pytest.mark.parametrize("kind", [Reflection, ByProducts, Damped, NotNormed, OfOneTensor])
def test_reflected_vectors_are_no_streams(kind: type[Reflection]) -> None:
    outcome = check.run(kind(), (torch.randn(2, N, WIDTH),), exact=False, repeats=1)
    check.assert_equal_to_eager(outcome)
    assert not outcome.report.sites, str(outcome.report)


@pytest.mark.parametrize("kind", [Gated, OfAWeightedSum])
def test_gates_and_weighted_sums_are_of_streams(kind: type[Reflection]) -> None:
    outcome = check.run(kind(), (torch.randn(2, N, WIDTH),))
    check.assert_as_accurate(outcome)
    assert "expand_combine" in outcome.operators, str(outcome.report)
