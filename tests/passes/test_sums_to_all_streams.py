"""Writes that add one sum of the streams to all of them: x'[o] = post[o] f + sum_i a[i] x[i] + sum_i H[i, o] x[i]."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.zoo import check
from tests.zoo.common import random_parameter

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, WIDTH = 4, 6
SHAPE = (2, 3, N, WIDTH)

Sum = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """x' = post f(u) + what `more` makes of x, a and u + H x; u is a weighted sum of the streams."""

    def __init__(self, more: Sum, *, mixed: bool = True) -> None:
        super().__init__()
        self.more, self.mixed = more, mixed
        self.pre, self.post, self.a = (random_parameter(N, 1) for _ in range(3))
        self.h = random_parameter(N, N)

    def forward(self, x: Tensor) -> Tensor:
        u = (self.pre * x).sum(2)
        written = self.post * torch.tanh(u).unsqueeze(2) + self.more(x, self.a, u)
        return written + (torch.einsum("io,bsic->bsoc", self.h, x) if self.mixed else x)


SUMS: dict[str, Sum] = {
    "weighted": lambda x, a, u: (a * x).sum(2, keepdim=True),
    "weighted and expanded": lambda x, a, u: (a * x).sum(2, keepdim=True).expand(-1, -1, N, -1),
    "by einsum": lambda x, a, u: torch.einsum("i,bsic->bsc", a[:, 0], x).unsqueeze(2),
    "with a gate of each token": lambda x, a, u: (torch.tanh(x[..., :1]) * x).sum(2, keepdim=True),
    "the one that is read": lambda x, a, u: u.unsqueeze(2),
    "mean": lambda x, a, u: x.mean(2, keepdim=True),
    "sum": lambda x, a, u: x.sum(2).unsqueeze(2),
}


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "unmixed"])
@pytest.mark.parametrize("more", SUMS.values(), ids=SUMS)
def test_it_is_a_part_of_the_matrix(more: Sum, mixed: bool) -> None:
    model = nn.Sequential(Layer(more, mixed=mixed), Layer(more, mixed=mixed))  # the second reads what is a sum itself
    outcome = check.run(model, (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators.count("expand_combine") == 2, str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)


def test_the_report_names_it() -> None:
    outcome = check.run(Layer(SUMS["weighted"]), (torch.randn(SHAPE),))
    assert "h_post f + h_res^T x + a sum of x to all" in str(outcome.report)


def _squares(x: Tensor, a: Tensor, u: Tensor) -> Tensor:
    return (x * x).sum(2, keepdim=True)


def _of_other_streams(x: Tensor, a: Tensor, u: Tensor) -> Tensor:
    return (a * x.flip(-1)).sum(2, keepdim=True)


def _over_channels(x: Tensor, a: Tensor, u: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def _over_tokens(x: Tensor, a: Tensor, u: Tensor) -> Tensor:
    return x.mean(1, keepdim=True)


@pytest.mark.parametrize("more", [_squares, _of_other_streams, _over_channels, _over_tokens])
def test_other_sums_are_not(more: Sum) -> None:
    outcome = check.run(Layer(more), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert "expand_combine" not in outcome.operators, str(outcome.report)
    (declined,) = outcome.report.declined
    assert "adds to the mixed streams something other" in declined.reason or "adds 2 products" in declined.reason


def test_what_is_added_to_a_write_is_no_part_of_it() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(Layer(SUMS["weighted"]), Layer(SUMS["weighted"]))

        def forward(self, x: Tensor) -> Tensor:
            return (self.layers(x) - x.sin()).square().mean()

    outcome = check.run(Loss(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators.count("expand_combine") == 2, str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)


def test_a_sum_without_a_sublayer_is_no_hyper_connection() -> None:
    class Pooled(nn.Module):
        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            return torch.einsum("io,bsic->bsoc", adjacency, x) + x.mean(2, keepdim=True) + 0.5 * x

    outcome = check.run(Pooled(), (torch.randn(SHAPE), torch.randn(N, N)))
    assert not outcome.operators, str(outcome.report)
    assert not outcome.reasons, str(outcome.report)
