"""Gates that one function computes together, and that are taken apart afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.zoo import check
from tests.zoo.common import random_parameter, random_phi

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, WIDTH = 4, 6
SHAPE = (2, 3, N, WIDTH)


class Together(nn.Module):
    """x' = x + post f; `gates` makes pre and post of the logits [..., 2 n]."""

    def __init__(self, gates: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.gates = gates
        self.phi = random_phi(2 * N, N * WIDTH)
        self.scale, self.bias = random_parameter(2 * N, mean=1.0), random_parameter(2 * N)

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        logits = torch.nn.functional.rms_norm(x.flatten(2), (N * WIDTH,), eps=1e-6) @ self.phi.T
        pre, post = self.gates(logits * self.scale + self.bias)
        return x + post.unsqueeze(-1) * torch.tanh((pre.unsqueeze(-1) * x).sum(2)).unsqueeze(2)


def _chunk(logits: Tensor) -> tuple[Tensor, ...]:
    return torch.sigmoid(logits).chunk(2, -1)


def _slices(logits: Tensor) -> tuple[Tensor, ...]:
    gates = torch.sigmoid(logits)
    return gates[..., :N], gates[..., N:]


def _unbind(logits: Tensor) -> tuple[Tensor, ...]:
    return torch.sigmoid(logits.unflatten(-1, (2, N))).unbind(-2)


def _further(logits: Tensor) -> tuple[Tensor, ...]:
    pre, post = (1 / (1 + torch.exp(-logits))).split(N, -1)
    return pre + 1e-6, 2 * post


def _half_first(logits: Tensor) -> tuple[Tensor, ...]:
    """The other half comes first."""
    post, pre = torch.sigmoid(logits).chunk(2, -1)
    return pre, post


@pytest.mark.parametrize("gates", [_chunk, _slices, _unbind, _further, _half_first])
@pytest.mark.parametrize("dynamic", [False, True])
def test_they_are_fused(gates: Callable[[Tensor], tuple[Tensor, ...]], dynamic: bool) -> None:
    outcome = check.run(Together(gates), (torch.randn(SHAPE),), dynamic=dynamic)
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"], str(outcome.report)
    assert not outcome.reasons, str(outcome.report)


def test_one_token() -> None:
    outcome = check.run(Together(_chunk), (torch.randn(1, 1, N, WIDTH),))
    check.assert_as_accurate(outcome)
    assert not outcome.reasons, str(outcome.report)


def _across_gates(logits: Tensor) -> tuple[Tensor, ...]:
    return torch.sigmoid(logits.cumsum(-1)).chunk(2, -1)


def _in_another_order(logits: Tensor) -> tuple[Tensor, ...]:
    return torch.sigmoid(logits).flip(-1).chunk(2, -1)


def _no_sigmoid(logits: Tensor) -> tuple[Tensor, ...]:
    return torch.sigmoid(logits).square().chunk(2, -1)


def _of_the_last_token(logits: Tensor) -> tuple[Tensor, ...]:
    pre, post = torch.sigmoid(logits).chunk(2, -1)
    return pre[:, -1:], post


def _of_other_tokens(logits: Tensor) -> tuple[Tensor, ...]:
    pre, post = torch.sigmoid(logits).roll(1, 1).chunk(2, -1)
    return pre, post


def _both_are_one(logits: Tensor) -> tuple[Tensor, ...]:
    gates = torch.sigmoid(logits)[..., :N]
    return gates, gates


def _not_trained(logits: Tensor) -> tuple[Tensor, ...]:
    pre, post = torch.sigmoid(logits).chunk(2, -1)
    return pre.detach(), post


NEAR_MISSES = [
    _across_gates,
    _in_another_order,
    _no_sigmoid,
    _of_the_last_token,
    _of_other_tokens,
    _both_are_one,
    _not_trained,
]


@pytest.mark.parametrize("gates", NEAR_MISSES)
def test_near_misses_are_right(gates: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    outcome = check.run(Together(gates), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert not outcome.report.errors
    if gates not in (_both_are_one, _not_trained):
        assert outcome.reasons, str(outcome.report)


class Beside(nn.Module):
    """Two connections of the same streams, whose gates come from one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.phi, self.bias = random_phi(4 * N, N * WIDTH), random_parameter(4 * N)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.sin()
        logits = torch.nn.functional.rms_norm(x.flatten(2), (N * WIDTH,), eps=1e-6) @ self.phi.T + self.bias
        pre, other_pre, post, other_post = torch.sigmoid(logits).chunk(4, -1)
        f = torch.tanh((pre.unsqueeze(-1) * x).sum(2)).unsqueeze(2)
        g = torch.cos((other_pre.unsqueeze(-1) * x).sum(2)).unsqueeze(2)
        return x + 2 * post.unsqueeze(-1) * f, x + 2 * other_post.unsqueeze(-1) * g


def test_each_of_two_connections_has_its_own_read() -> None:
    outcome = check.run(Beside(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine"] * 2 + ["generate_mix_and_aggregate"] * 2, str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)
