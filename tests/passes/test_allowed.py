"""Functions that the program allows in the graph: nobody looks into them, so they may write and draw random numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_compile.testing import capture
from tests.fuzz import allowed
from tests.zoo import check

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
N, C = 4, 16
Between = Callable[[Tensor, Tensor], Tensor]


def write(gate: Tensor, f: Tensor) -> Tensor:
    """The post gate's bias changes after the read gate is made."""
    allowed.halve(gate)
    return f


def draw(gate: Tensor, f: Tensor) -> Tensor:
    """A function that draws, and one more behind it."""
    return F.dropout(f) + allowed.noise(gate)[..., :1]


def low_rank(gate: Tensor, f: Tensor) -> Tensor:
    """torch's own functions in Python draw as well."""
    return F.dropout(f) + torch.svd_lowrank(gate.view(2, 2), q=1)[0].sum()


class Model(torch.nn.Module):
    def __init__(self, between: Between) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.phi, self.bias = (torch.nn.Parameter(0.1 * torch.randn(*shape)) for shape in ((2 * N, N * C), (2 * N,)))
        self.scale, self.between = torch.nn.Parameter(torch.rand(2)), between

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(-2)
        bias = self.bias.detach() * 1.0
        h = F.linear(flat, self.phi) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
        pre = torch.sigmoid(h[..., :N] * self.scale[0] + self.bias[:N])
        f = self.between(bias[N:], (pre.unsqueeze(-1) * x).sum(-2))
        post = 2 * torch.sigmoid(h[..., N:] * self.scale[1] + bias[N:])
        return post.unsqueeze(-1) * f.unsqueeze(-2) + x


@pytest.mark.parametrize("between", [write, draw, low_rank])
def test_writes_and_draws_stay_in_their_order(between: Between) -> None:
    model, x = Model(between), torch.randn(6, N, C)
    compiled = torch.compile(model, backend="mhc", options={"fallback_random": True})
    results = []
    for call in (model, compiled):
        torch.manual_seed(1)
        results.append(call(x))
    torch.testing.assert_close(*results)


def test_what_is_around_them_is_rewritten() -> None:
    assert "expand_combine" in str(capture(Model(draw), torch.randn(6, N, C)))


def attention(bias: Tensor) -> Tensor:
    given = bias.view(1, 1, N)
    phi, weight = torch.eye(N).repeat(3, 1), torch.eye(N)
    return F.multi_head_attention_forward(
        given, given, given, N, 2, phi, None, None, None, False, 0.5, weight, None, need_weights=False
    )[0].view(N)


def pooled(bias: Tensor) -> Tensor:
    return F.fractional_max_pool2d_with_indices(bias.expand(1, 8, N).cumsum(1), 2, output_size=(2, 2))[0].view(N)


class DrawnBias(torch.nn.Module):
    """The bias of the post gate is drawn after a dropout that needs the read."""

    def __init__(self, drawn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.phi, self.bias = (torch.nn.Parameter(0.1 * torch.randn(*shape)) for shape in ((2 * N, N * C), (2 * N,)))
        self.drawn = drawn

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(-2)
        h = F.linear(flat, self.phi) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
        pre = torch.sigmoid(h[..., :N] + self.bias[:N])
        f = F.dropout((pre.unsqueeze(-1) * x).sum(-2))
        post = 2 * torch.sigmoid(h[..., N:] + self.drawn(self.bias[N:]))
        return post.unsqueeze(-1) * f.unsqueeze(-2) + x


@pytest.mark.parametrize("drawn", [attention, pooled, F.dropout])
def test_functions_of_torch_in_python_draw_in_their_order(drawn: Callable[[Tensor], Tensor]) -> None:
    model, x = DrawnBias(drawn), torch.randn(6, N, C)
    compiled, _ = check.rewriting(model)
    results = []
    for call in (model, compiled):
        torch.manual_seed(1)
        results.append(call(x))
    torch.testing.assert_close(*results)
