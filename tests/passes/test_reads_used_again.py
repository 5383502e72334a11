"""Sublayers that use what they read in several ways: multiples of a read are made of it, and read no streams."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.zoo import check
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SHAPE = (2, 5, 4, 6)
WHOLE = ["expand_combine", "generate_mix_and_aggregate"]
Use = Callable[[Tensor, Tensor], Tensor]


class Using(Sublayer):
    """A sublayer that is given a weight and the read, and the streams with two gates if it reads again."""

    def __init__(self, use: Callable[..., Tensor], again: bool = False) -> None:
        super().__init__(4, 6, 5, 2)
        self.use, self.again = use, again

    def layer(self, layer_input: Tensor, x: Tensor) -> Tensor:
        if not self.again:
            return self.use(self.weight, layer_input)
        pre, post, _ = self.gates(x)
        return self.use(self.weight, layer_input, x, pre, post)


def _attention(weight: Tensor, u: Tensor) -> Tensor:
    """Keys and values are the read itself. Inside, attention scales its keys by the root of its own scale."""
    return F.scaled_dot_product_attention(u @ weight, u, u)


def _causal_attention(weight: Tensor, u: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(u @ weight, u, u, is_causal=True, scale=0.3)


def _scaled_beside(weight: Tensor, u: Tensor) -> Tensor:
    return u @ weight + torch.tanh(u * 0.5)


def _divided_and_negated(weight: Tensor, u: Tensor) -> Tensor:
    return torch.tanh(u @ weight) + torch.tanh(u / 3) - torch.tanh(-u)


def _scaled_views(weight: Tensor, u: Tensor) -> Tensor:
    return torch.tanh((2 * u.flatten(0, 1)) @ weight).view_as(u) + torch.tanh(u.mT * 0.5).mT


@pytest.mark.parametrize("use", [_attention, _causal_attention, _scaled_beside, _divided_and_negated, _scaled_views])
def test_multiples_of_a_read_are_no_reads(use: Use) -> None:
    outcome = check.run(Using(use), (torch.randn(SHAPE),))
    assert outcome.operators == WHOLE, str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)
    check.assert_as_accurate(outcome)


def _scaled_alone(weight: Tensor, u: Tensor) -> Tensor:
    return torch.tanh((u * 0.5) @ weight)


def test_a_read_that_is_only_scaled_is_the_scaled_one() -> None:
    """Its operator scales, too."""
    outcome = check.run(Using(_scaled_alone), (torch.randn(SHAPE),))
    assert outcome.operators == ["aggregate", "expand_combine", "generate_mix"], str(outcome.report)
    check.assert_as_accurate(outcome)


def _by_other_gates(weight: Tensor, u: Tensor, x: Tensor, pre: Tensor, post: Tensor) -> Tensor:
    return torch.tanh(u @ weight) + torch.tanh((post.unsqueeze(-1) * x).sum(2) * 0.5)


def _of_other_streams(weight: Tensor, u: Tensor, x: Tensor, pre: Tensor, post: Tensor) -> Tensor:
    return torch.tanh(u @ weight) + torch.tanh((post.unsqueeze(-1) * x.sin()).sum(2) * 0.5)


@pytest.mark.parametrize("use", [_by_other_gates, _of_other_streams])
def test_another_read_stays_one(use: Callable[..., Tensor]) -> None:
    """It is made of the streams, and so is one that is made of the streams element by element."""
    outcome = check.run(Using(use, again=True), (torch.randn(SHAPE),))
    assert sum("aggregate" in op for op in outcome.operators) == 2, str(outcome.report)
    assert outcome.operators.count("expand_combine") == 1, str(outcome.report)
    check.assert_as_accurate(outcome)
