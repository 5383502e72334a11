"""Reads and writes by a matrix: the mean of rows that it mixes, and n times one output that it multiplies.

The operators take vectors: the sums of the matrix over its rows, and over its columns.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_compile.testing import capture
from tests.passes.test_own_gates import SHAPE, WIDTH, N, Own
from tests.zoo import check
from tests.zoo.common import random_parameter, random_phi

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Matrices(Own):
    """u = mean over i of (A x)[i], x' = R x + P [f, ..., f], by matrices of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.three = random_phi(3 * N * N, N * WIDTH)
        self.stacked = random_parameter(3, N, N, std=0.5)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = F.linear(F.layer_norm(x.flatten(-2), (N * WIDTH,)), self.three)
        a, p, r = made.reshape(*x.shape[:-2], 3, N, N).unbind(-3)
        return a.softmax(-1), p.softmax(-2), torch.tanh(r - r.mT)

    def read(self, x: Tensor, a: Tensor) -> Tensor:
        return torch.einsum("bsij,bsjc->bsic", a, x).mean(-2)

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        f = f.unsqueeze(-2).expand(*x.shape)
        return torch.einsum("bsij,bsjc->bsic", r, x) + torch.einsum("bsij,bsjc->bsic", p, f)


class Unmixed(Matrices):
    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return x + torch.einsum("bsij,bsjc->bsic", p, f.unsqueeze(-2).expand(*x.shape))


class Transposed(Matrices):
    """The transposes of the matrices, of which the columns and the rows are added."""

    def read(self, x: Tensor, a: Tensor) -> Tensor:
        return 0.5 * (a.mT @ x).sum(-2)

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return r.mT @ x + p.mT @ f.unsqueeze(-2).repeat(1, 1, N, 1)


class ByProducts(Matrices):
    """The same without matmul."""

    def read(self, x: Tensor, a: Tensor) -> Tensor:
        return (a.unsqueeze(-1) * x.unsqueeze(-3)).sum(-2).mean(-2, keepdim=True).squeeze(-2)

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        rows = (p.unsqueeze(-1) * f[:, :, None, None]).sum(-2)
        return (r.unsqueeze(-1) * x.unsqueeze(-3)).sum(-2) + rows


class ForAllTokens(Matrices):
    """As a layer for a graph whose edges are learned has it."""

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, p, r = self.stacked.unbind(0)
        return a.sigmoid(), 2 * p.sigmoid(), r.softmax(-1)

    def read(self, x: Tensor, a: Tensor) -> Tensor:
        return (a @ x).mean(-2)

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return r @ x + p @ f.unsqueeze(-2).expand(*x.shape)


class FewerRows(Matrices):
    """Two rows of a matrix alone are added."""

    def read(self, x: Tensor, a: Tensor) -> Tensor:
        return (a[..., :2, :] @ x).sum(-2)


class Pooled(Matrices):
    """The read is a plain mean."""

    def read(self, x: Tensor, a: Tensor) -> Tensor:
        return x.mean(-2)


class ReadAlone(Matrices):
    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return x + p[..., 0].unsqueeze(-1) * f.unsqueeze(-2)


class WriteAlone(Matrices):
    def read(self, x: Tensor, a: Tensor) -> Tensor:
        return (a[..., 0].unsqueeze(-1) * x).sum(-2)


class WriteAloneUnmixed(Unmixed):
    def read(self, x: Tensor, a: Tensor) -> Tensor:
        return (a[..., 0].unsqueeze(-1) * x).sum(-2)


class BySinkhorn(Matrices):
    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, p, r = F.linear(x.mean(-2), self.three[:, :WIDTH]).reshape(*x.shape[:-2], 3, N, N).unbind(-3)
        return self.sinkhorn(a), self.sinkhorn(p), self.sinkhorn(r)

    def sinkhorn(self, logits: Tensor) -> Tensor:
        m = logits.exp()
        for _ in range(4):
            m = m / m.sum(-1, keepdim=True)
            m = m / m.sum(-2, keepdim=True)
        return m


BOTH = ["aggregate", "expand_combine"]
FORMS: list[tuple[type[Own], list[str]]] = [
    (Matrices, [*BOTH, "projection"]),
    (Unmixed, [*BOTH, "projection"]),
    (Transposed, [*BOTH, "projection"]),
    (ByProducts, [*BOTH, "projection"]),
    (FewerRows, [*BOTH, "projection"]),
    (ReadAlone, [*BOTH, "projection"]),
    (WriteAlone, [*BOTH, "projection"]),
    (WriteAloneUnmixed, [*BOTH, "projection"]),
    (Pooled, ["expand_combine", "projection"]),
    (BySinkhorn, [*BOTH, *["sinkhorn"] * 3]),
]


@pytest.mark.parametrize(("kind", "operators"), FORMS)
def test_matrices_are_gates(kind: type[Own], operators: list[str]) -> None:
    outcome = check.run(kind(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == operators, str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)


@pytest.mark.parametrize("kind", [Matrices, Transposed, Unmixed])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision(kind: type[Own], dtype: torch.dtype) -> None:
    outcome = check.run(kind().to(dtype), (torch.randn(SHAPE).to(dtype),))
    check.assert_as_accurate(outcome)
    assert outcome.operators[:2] == BOTH, str(outcome.report)


def test_with_dynamic_tokens() -> None:
    model = Matrices()
    compiled, report = check.rewriting(model, dynamic=True)
    for tokens in (3, 7):
        x = torch.randn(2, tokens, N, WIDTH)
        torch.testing.assert_close(compiled(x), model(x))
    assert [site.op for site in report.rewritten] == ["projection", *BOTH], str(report)


def test_what_the_operators_get() -> None:
    text = str(capture(Matrices(), torch.randn(SHAPE)))
    assert (
        text
        == """\
%0 = projection(x=f32[2, 3, 1, 24], phi=f32[48, 24])
%1 = aggregate(x=f32[2, 3, 4, 6], h_pre=f32[2, 3, 4](%0.0))
%2 = expand_combine(f=f32[2, 3, 6](%1), h_post=f32[2, 3, 4](%0.0), x=f32[2, 3, 4, 6], h_res=f32[2,
    3, 4, 4](%0.0))
return %2"""
    )


class MixedIsReadElsewhere(Matrices):
    """The rows that the matrix mixes are there anyway: their mean is not read from the streams once more."""

    def body(self, x: Tensor) -> Any:
        a, p, r = self.gates(x)
        mixed = a @ x
        return self.write(x, self.layer(self.pooled(mixed)), p[..., 0], r), mixed

    def pooled(self, mixed: Tensor) -> Tensor:
        return mixed.mean(-2)

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return r @ x + p.unsqueeze(-1) * f.unsqueeze(-2)


class ScaledMixedIsReadElsewhere(MixedIsReadElsewhere):
    """What the read ends in is not the sum itself."""

    def pooled(self, mixed: Tensor) -> Tensor:
        return 0.5 * mixed.sum(-2)


class WeighedByChannel(Matrices):
    """A gate for each row and channel."""

    def read(self, x: Tensor, a: Tensor) -> Tensor:
        return ((a @ x) * self.weight[:N]).mean(-2)

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return r @ x + p[..., 0].unsqueeze(-1) * f.unsqueeze(-2)


class OutputsOfTheirOwn(Matrices):
    """The matrix multiplies n outputs that differ."""

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return r @ x + p @ (f.unsqueeze(-2) * self.weight[:N])


class Squared(Matrices):
    """The rows are squared before they are added."""

    def read(self, x: Tensor, a: Tensor) -> Tensor:
        return (a @ x).square().mean(-2)

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return r @ x + p[..., 0].unsqueeze(-1) * f.unsqueeze(-2)


@pytest.mark.parametrize(
    ("kind", "operators"),
    [
        (MixedIsReadElsewhere, ["expand_combine", "projection"]),
        (ScaledMixedIsReadElsewhere, ["expand_combine", "projection"]),
        (WeighedByChannel, ["expand_combine", "projection"]),
        (Squared, []),
        (OutputsOfTheirOwn, ["aggregate", "mix_streams", "projection"]),
        (ForAllTokens, []),
    ],
)
def test_near_misses(kind: type[Own], operators: list[str]) -> None:
    """One of the two steps is not of this form, and stays as it is."""
    outcome = check.run(kind(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == operators, str(outcome.report)
