"""Hooks that a program registers on gates: called with the gradients of eager code, or not at all, as there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import check
from tests.zoo.common import random_parameter, random_phi

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, WIDTH = 4, 6


class Hooked(nn.Module):
    """The hook changes the gradient of the Sinkhorn matrix that `used` mixes the streams by, or of none."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = random_phi(N * N + 2 * N, N * WIDTH)
        self.bias = random_parameter(N * N + 2 * N)

    def used(self, h_res: Tensor, logits: Tensor) -> Tensor:
        return h_res

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        flat = x.flatten(-2)
        h = F.linear(flat, self.phi) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6) + self.bias
        pre, post, res = h.split([N, N, N * N], -1)
        logits = res.unflatten(-1, (N, N))
        h_res = logits.softmax(-1) + 1e-6
        for axis in (-2, -1, -2):
            h_res = h_res / (h_res.sum(axis, keepdim=True) + 1e-6)
        if h_res.requires_grad:
            h_res.register_hook(lambda grad: 0.75 * grad)
        f = torch.tanh((torch.sigmoid(pre).unsqueeze(-1) * x).sum(-2))
        return 2 * torch.sigmoid(post).unsqueeze(-1) * f.unsqueeze(-2) + self.used(h_res, logits).mT @ x


class Unused(Hooked):
    """No gradient comes back to the hooked matrix."""

    def used(self, h_res: Tensor, logits: Tensor) -> Tensor:
        return logits.softmax(-1)


class Detached(Hooked):
    def used(self, h_res: Tensor, logits: Tensor) -> Tensor:
        return h_res.detach()


def test_a_hook_changes_the_gradient() -> None:
    outcome = check.run(Hooked(), (torch.randn(2, 3, N, WIDTH),))
    check.assert_as_accurate(outcome)
    assert "generate_mix_and_aggregate" in outcome.operators


@pytest.mark.parametrize("kind", [Unused, Detached])
def test_a_hook_that_eager_code_does_not_call_is_not_called(kind: type[Hooked]) -> None:
    """An operator of several results would call it with None."""
    outcome = check.run(kind(), (torch.randn(2, 3, N, WIDTH),))
    check.assert_as_accurate(outcome)
    assert any("a hook is registered on" in reason for reason in outcome.reasons), str(outcome.report)
    assert "expand_combine" in outcome.operators, str(outcome.report)
