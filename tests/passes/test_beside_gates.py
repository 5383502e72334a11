"""Logits that an operator of gates makes beside those of its gates, and those that stay a projection of their own."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhc_compile.testing import capture, graph_text
from tests.zoo import check
from tests.zoo.common import random_parameter, random_phi

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, WIDTH = 3, 6
SHAPE = (2, 4, N, WIDTH)
TOGETHER = ["expand_combine", "generate_mix_and_aggregate"]
APART = [*TOGETHER, "projection"]


class Separate(nn.Module):
    """h_pre and h_post by sigmoid, h_res by softmax, each with a phi of its own, in two connections."""

    def __init__(self) -> None:
        super().__init__()
        self.phi_pre, self.phi_post = random_phi(N, N * WIDTH), random_phi(N, N * WIDTH)
        self.phi_res = random_phi(N * N, N * WIDTH)
        self.bias = random_parameter(2, N)
        self.weight, self.other_weight = random_parameter(N * WIDTH, mean=1.0), random_parameter(N * WIDTH, mean=1.0)

    def normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.flatten(-2), (N * WIDTH,), self.weight, 1e-5)

    def res_logits(self, x: Tensor) -> Tensor:
        return F.linear(self.normed(x), self.phi_res)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = self.normed(x)
        pre = torch.sigmoid(F.linear(flat, self.phi_pre, self.bias[0]))
        return pre, 2 * torch.sigmoid(F.linear(flat, self.phi_post, self.bias[1]))

    def connection(self, x: Tensor) -> Tensor:
        pre, post = self.gates(x)
        res = self.res_logits(x).unflatten(-1, (N, N)).softmax(-1)
        f = torch.tanh((pre.unsqueeze(-1) * x).sum(-2))
        return post.unsqueeze(-1) * f.unsqueeze(-2) + res.mT @ x

    def forward(self, x: Tensor) -> Tensor:
        return self.connection(self.connection(x.sin()))


class ResFirst(Separate):
    """The program makes its own gate before those that an operator makes."""

    def connection(self, x: Tensor) -> Tensor:
        res = self.res_logits(x).unflatten(-1, (N, N)).softmax(-1)
        pre, post = self.gates(x)
        f = torch.tanh((pre.unsqueeze(-1) * x).sum(-2))
        return post.unsqueeze(-1) * f.unsqueeze(-2) + res.mT @ x


class RowsBefore(Separate):
    """One phi, whose first rows are those of the program's own gate."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = random_phi(N * N + 2 * N, N * WIDTH)

    def connection(self, x: Tensor) -> Tensor:
        res, pre, post = F.linear(self.normed(x), self.phi).split([N * N, N, N], -1)
        pre, post = torch.sigmoid(pre + self.bias[0]), 2 * torch.sigmoid(post + self.bias[1])
        f = torch.tanh((pre.unsqueeze(-1) * x).sum(-2))
        return post.unsqueeze(-1) * f.unsqueeze(-2) + res.unflatten(-1, (N, N)).softmax(-1).mT @ x


class TwoMore(Separate):
    """The program's own gate is made of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.phi_more = random_phi(N * N, N * WIDTH)

    def res_logits(self, x: Tensor) -> Tensor:
        return super().res_logits(x) * F.linear(self.normed(x), self.phi_more).tanh()


class BesideAHead(Separate):
    """No operator makes h_post."""

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = self.normed(x)
        pre = torch.sigmoid(F.linear(flat, self.phi_pre, self.bias[0]))
        return pre, F.linear(flat, self.phi_post, self.bias[1]).softmax(-1)


class OtherWeight(Separate):
    def res_logits(self, x: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x.flatten(-2), (N * WIDTH,), self.other_weight, 1e-5), self.phi_res)


class OtherNorm(Separate):
    """The factor of a token acts on the product, and may be another one."""

    def res_logits(self, x: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x.flatten(-2), (N * WIDTH,), self.weight, 0.5), self.phi_res)


class OtherTokens(Separate):
    """The program's own gate is made of the token before."""

    def res_logits(self, x: Tensor) -> Tensor:
        return super().res_logits(x[:, torch.tensor([0, 0, 1, 2])])


class OtherOrder(Separate):
    """The tokens of a sequence come before those of a batch."""

    def res_logits(self, x: Tensor) -> Tensor:
        return super().res_logits(x.transpose(0, 1)).transpose(0, 1)


class HalfFrozen(TwoMore):
    """One of two products has no gradient: the other one goes beside the gates, and an operator has place for one."""

    def __init__(self) -> None:
        super().__init__()
        self.phi_more.requires_grad_(False)


class Detached(Separate):
    """phi_res has no gradient in eager code."""

    def res_logits(self, x: Tensor) -> Tensor:
        return super().res_logits(x).detach()


class LayerDetached(BesideAHead):
    """phi_pre has no gradient in eager code."""

    def connection(self, x: Tensor) -> Tensor:
        pre, post = self.gates(x)
        f = torch.tanh((pre.unsqueeze(-1) * x).sum(-2)).detach()
        return post.unsqueeze(-1) * f.unsqueeze(-2) + self.res_logits(x).unflatten(-1, (N, N)).softmax(-1).mT @ x


class Frozen(Detached):
    def __init__(self) -> None:
        super().__init__()
        self.phi_res.requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (Separate, N * N + 2 * N),
        (ResFirst, N * N + 2 * N),
        (RowsBefore, N * N + 2 * N),
        (TwoMore, 2 * N * N + 2 * N),
        (OtherNorm, N * N + 2 * N),
        (BesideAHead, N * N + 2 * N),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_logits_of_the_same_streams_go_together(kind: type[Separate], rows: int, dynamic: bool) -> None:
    outcome = check.run(kind(), (torch.randn(SHAPE),), dynamic=dynamic)
    check.assert_as_accurate(outcome)
    assert outcome.operators == sorted(2 * TOGETHER), str(outcome.report)
    more = rows - (N if kind is BesideAHead else 2 * N)
    assert all(f"{more} logits more" in site.detail for site in outcome.report.rewritten if "mix" in site.op)
    assert re.findall(r"phi=f32\[(\d+),", str(capture(kind(), torch.randn(SHAPE)))) == [str(rows)] * 2


@pytest.mark.parametrize(
    ("kind", "operators"),
    [
        (OtherWeight, APART),
        (OtherTokens, APART),
        (OtherOrder, APART),
        (HalfFrozen, APART),
        (Detached, APART),
        (LayerDetached, ["expand_combine", "head", "projection"]),
    ],
)
def test_others_stay_apart(kind: type[Separate], operators: list[str]) -> None:
    """And parameters without a gradient in eager code have none."""
    outcome = check.run(kind(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == sorted(2 * operators), str(outcome.report)
    assert outcome.rewritten.keys() == outcome.eager.keys()


def test_frozen_rows_of_detached_logits_go_together() -> None:
    """What has no gradient anyway gets none."""
    outcome = check.run(Frozen(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.rewritten.keys() == outcome.eager.keys()


def test_a_boundary_has_them() -> None:
    """The write, the next read and all logits of it are one operator, forward and backward."""
    joint = graph_text(capture(Separate(), torch.randn(SHAPE)).joint[0])
    assert joint.count(" boundary(") == joint.count(" boundary_backward(") == 1
    assert "projection" not in joint
