"""Functions that the program allows in the graph: nobody looks into them, so they may write and draw random numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_compile.testing import capture
from tests.fuzz import allowed

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
