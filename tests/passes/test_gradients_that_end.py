"""Gradients that end inside of what a program calls: parameters behind it have none, in eager code and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mhc_compile.testing import capture
from tests.fuzz import allowed, functions  # noqa: F401  (registers operators)

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
N, C = 4, 16
ENDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "data": lambda x, y: x + y.data,
    "allowed": allowed.first,
    "packet": lambda x, y: torch.ops.fuzz.first(x, y),
    "overload": lambda x, y: torch.ops.fuzz.first.default(x, y),
    "vmap": lambda x, y: torch.vmap(lambda x, y: x + y.detach())(x, y),
    "checkpoint": lambda x, y: checkpoint(lambda x, y: x + y.detach(), x, y, use_reentrant=False),
}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


# Of what they are called with, the result is detached.
CALLED: dict[str, Callable[[Tensor], Tensor]] = {
    "a checkpoint": lambda y: checkpoint(torch.sin, y, use_reentrant=False),
    "a function": lambda y: Doubled.apply(y),
    "an allowed function": lambda y: allowed.first(y, y),
    "a condition": lambda y: torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)),
    "vmap": torch.vmap(torch.sin),
}
ENDS |= {
    f"{name}, detached": lambda x, y, function=function: x + function(y).detach() for name, function in CALLED.items()
}


def _copied(x: Tensor, y: Tensor) -> Tensor:
    kept = torch.zeros_like(y)
    with torch.no_grad():
        kept.copy_(y)
    return x + kept


def _written_in_part(x: Tensor, y: Tensor) -> Tensor:
    kept = torch.zeros_like(y)
    with torch.no_grad():
        kept[1:] = y[1:]
    return x + kept + y.detach()


def _written_for_nothing(x: Tensor, y: Tensor) -> Tensor:
    torch.zeros_like(y).copy_(y)
    return x


ENDS |= {"a copy": _copied, "a part": _written_in_part, "a copy for nothing": _written_for_nothing}


class Model(torch.nn.Module):
    """The write's result ends; the read's does not."""

    def __init__(self, end: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("phi", 0.1 * torch.randn(2 * N, N * C))
        self.pre, self.post = (torch.nn.Parameter(torch.rand(N)) for _ in range(2))
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(-2)
        h = F.linear(flat, self.phi) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
        pre, post = torch.sigmoid(h[..., :N] + self.pre), 2 * torch.sigmoid(h[..., N:] + self.post)
        f = (pre.unsqueeze(-1) * x).sum(-2)
        return self.end(f.unsqueeze(-2).expand_as(x), post.unsqueeze(-1) * f.unsqueeze(-2) + x)


@pytest.mark.parametrize("kind", ENDS)
def test_no_gradient_stays_none(kind: str) -> None:
    model, x = Model(ENDS[kind]), torch.randn(6, N, C)
    found = []
    for call in (model, torch.compile(model, backend="mhc")):
        model.zero_grad()
        call(x).square().sum().backward()
        found.append([parameter.grad for parameter in (model.pre, model.post)])
    assert found[0][1] is None
    assert found[1][1] is None
    torch.testing.assert_close(found[1][0], found[0][0])


def _into_a_view(x: Tensor, y: Tensor) -> Tensor:
    kept = torch.zeros(2, *y.shape)
    kept[0].copy_(y)
    return x + kept.sum(0)


def _into_an_item(x: Tensor, y: Tensor) -> Tensor:
    kept = torch.zeros(2, *y.shape)
    kept[0] = y
    return x + kept[0]


def _by_an_allowed_function(x: Tensor, y: Tensor) -> Tensor:
    kept = torch.zeros_like(y)
    allowed.added(kept, y)
    return x + kept


@pytest.mark.parametrize("end", [_into_a_view, _into_an_item, _by_an_allowed_function, lambda x, y: x + y])
def test_a_gradient_comes_back_through_memory(end: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Nothing reads the result of the write itself."""
    lines = str(capture(Model(end), torch.randn(6, N, C)))
    assert "generate_mix_and_aggregate" in lines
    assert "expand_combine" in lines


@pytest.mark.parametrize("depth", [1, 2])
def test_a_gradient_comes_back_through_vmap(depth: int) -> None:
    function = torch.sin
    for _ in range(depth):
        function = torch.vmap(function)
    lines = str(capture(Model(lambda x, y: x + function(y)), torch.randn(6, N, C)))
    assert "generate_mix_and_aggregate" in lines
    assert "expand_combine" in lines
