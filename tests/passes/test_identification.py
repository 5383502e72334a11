"""Small regions by behaviour: forms that differ only where an eps or a guard counts are kept apart."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.zoo import check
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, WIDTH = 4, 6


class _Shifted(Sublayer):
    """exp of logits shifted by their maximum, with an eps: the last column has sunk to the size of it."""

    eps = 1e-8
    detached = False

    def __init__(self) -> None:
        super().__init__(N, WIDTH, 3, 2)
        with torch.no_grad():
            self.bias[2 * N :].view(N, N)[:, -1] += math.log(self.eps)

    def res(self, logits: Tensor) -> Tensor:
        top = logits.amax(-1, keepdim=True)
        m = torch.exp(logits - (top.detach() if self.detached else top)) + self.eps
        for axis in (-1, -2, -1, -2):
            m = m / m.sum(axis, keepdim=True)
        return m


class _Detached(_Shifted):
    detached = True


class _TinyDetached(_Detached):
    eps = 1e-13


@pytest.mark.parametrize(
    ("kind", "rewritten"), [(_Shifted, True), (_Detached, False), (_TinyDetached, False)], ids=lambda v: str(v)
)
def test_a_detached_shift_counts_where_an_eps_is_added(kind: type[_Shifted], rewritten: bool) -> None:
    outcome = check.run(kind(), (torch.randn(2, 3, N, WIDTH),))
    check.assert_as_accurate(outcome)
    told = [site.reason or "" for site in outcome.report.declined]
    assert any("its gradient does not" in reason for reason in told) != rewritten, str(outcome.report)


class _Outside(Sublayer):
    eps, size = 1e-12, 1e-17

    def rms(self, flat: Tensor) -> Tensor:
        return 1 / (flat.square().mean(-1, keepdim=True).sqrt() + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


class _Clamped(_Outside):
    eps, size = 1e-15, 1e-14

    def rms(self, flat: Tensor) -> Tensor:
        return 1 / flat.square().mean(-1, keepdim=True).sqrt().clamp_min(self.eps)


@pytest.mark.parametrize("kind", [_Outside, _Clamped])
def test_tokens_of_next_to_nothing_under_tiny_guards(kind: type[_Outside]) -> None:
    """1 / sqrt(ms) has a derivative there that float32 does not hold: such guards are none of the operators'."""
    x = torch.randn(2, 3, N, WIDTH)
    x[0, 0] *= kind.size
    outcome = check.run(kind(N, WIDTH, 3, 2), (x,), repeats=1)
    check.assert_as_accurate(outcome)


class _SmallEps(_Outside):
    eps = 1e-8


def test_the_smallest_eps_outside_the_root_that_is_taken() -> None:
    x = torch.randn(2, 3, N, WIDTH)
    x[0, 0] *= 1e-17
    outcome = check.run(_SmallEps(N, WIDTH, 3, 2), (x,), repeats=1)
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"], str(outcome.report)
