"""Frac-connections: several rows of the streams are read side by side, and a sublayer's parts are written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhc_compile import passes
from mhc_compile.testing import capture
from tests.zoo import check
from tests.zoo.common import random_parameter

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# Streams, rows that are read, and channels of a row.
N, M, WIDTH = 4, 2, 6
SHAPE = (2, 3, N * WIDTH)


class Fractions(nn.Module):
    """[b, s, n C] -> [b, s, n C]; gates and steps are a subclass's."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.writes = random_parameter(N, M, std=0.5), random_parameter(M, N, std=0.5)
        self.mixes = random_parameter(N, N, std=0.5)
        self.weight = random_parameter(M * WIDTH, M * WIDTH, std=(M * WIDTH) ** -0.5)
        self.of_row = random_parameter(WIDTH, N + M, std=WIDTH**-0.5)
        self.of_all = random_parameter(N * WIDTH, 2 * N * M + N * N, std=(N * WIDTH) ** -0.5)

    def layer(self, u: Tensor) -> Tensor:
        """The sublayer, of the rows side by side: [b, s, m, C] -> [b, s, m, C]."""
        return torch.tanh(F.linear(u.flatten(-2), self.weight)).unflatten(-1, (M, WIDTH))

    def streams(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Any:
        return self.streams(x.sin().unflatten(-1, (N, WIDTH))).flatten(-2)


class Static(Fractions):
    def streams(self, x: Tensor) -> Tensor:
        f = self.layer(torch.einsum("bsnc,nm->bsmc", x, self.reads))
        return torch.einsum("bsmc,mn->bsnc", f, self.writes) + torch.einsum("bsnc,no->bsoc", x, self.mixes)


class InOneProduct(Fractions):
    """Rows that are read and rows that stay, by one product, with gates of each row."""

    def streams(self, x: Tensor) -> Tensor:
        alpha = torch.cat((self.reads, self.mixes), -1) + 0.1 * torch.tanh(F.rms_norm(x, (WIDTH,)) @ self.of_row)
        y = alpha.mT @ x
        return y[..., M:, :] + self.writes.mT @ self.layer(y[..., :M, :])


class OfTheProjection(Fractions):
    def streams(self, x: Tensor) -> Tensor:
        a, p, r = (F.rms_norm(x.flatten(-2), (N * WIDTH,)) @ self.of_all).split((N * M, N * M, N * N), -1)
        reads, writes = a.unflatten(-1, (N, M)).sigmoid(), 2 * p.unflatten(-1, (M, N)).sigmoid()
        f = self.layer(reads.mT @ x)
        return writes.mT @ f + r.unflatten(-1, (N, N)).softmax(-1).mT @ x


class ChannelsFirst(Fractions):
    """Products of [C, n] with gates on the right."""

    def streams(self, x: Tensor) -> Tensor:
        y = x.mT @ torch.cat((self.reads, self.mixes), -1)
        f = self.layer(y[..., :M].mT)
        return (y[..., M:] + f.mT @ self.writes).mT


class Unmixed(Fractions):
    def streams(self, x: Tensor) -> Tensor:
        return x + self.writes.mT @ self.layer(self.reads.mT @ x)


class UnmixedOfTheProjection(Fractions):
    def streams(self, x: Tensor) -> Tensor:
        a, p, _ = (F.rms_norm(x.flatten(-2), (N * WIDTH,)) @ self.of_all).split((N * M, N * M, N * N), -1)
        f = self.layer(torch.einsum("bsnc,bsnm->bsmc", x, a.unflatten(-1, (N, M)).tanh()))
        return torch.einsum("bsmc,bsmn->bsnc", f, p.unflatten(-1, (M, N)).tanh()) + x


MIXED = "mix_streams"
FORMS: list[tuple[type[Fractions], list[str]]] = [
    (Static, [MIXED] * 3),
    (InOneProduct, [MIXED] * 2 + ["projection"]),
    (OfTheProjection, [MIXED] * 3 + ["projection"]),
    (ChannelsFirst, [MIXED] * 2),
    (Unmixed, [MIXED] * 2),
    (UnmixedOfTheProjection, [MIXED] * 2 + ["projection"]),
]


@pytest.mark.parametrize(("kind", "operators"), FORMS, ids=[kind.__name__ for kind, _ in FORMS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_mixed_by_operators(kind: type[Fractions], operators: list[str], dtype: torch.dtype) -> None:
    outcome = check.run(kind().to(dtype), (torch.randn(SHAPE, dtype=dtype),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == operators, str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)
    assert all(site.own for site in outcome.report.rewritten), str(outcome.report)


def test_snapshot() -> None:
    text = str(capture(InOneProduct(), torch.randn(SHAPE)))
    assert text.count("mix_streams(") == 2, text


class TwoHops(Fractions):
    """A graph convolution of a graph convolution: no sublayer sees the nodes side by side."""

    def streams(self, x: Tensor) -> Tensor:
        nodes = torch.tanh(F.linear(self.mixes @ x, self.weight[:WIDTH, :WIDTH]))
        return self.mixes.mT @ x + self.mixes @ nodes


class OneHopUnmixed(TwoHops):
    """A graph convolution with a residual connection."""

    def streams(self, x: Tensor) -> Tensor:
        return x + self.mixes @ torch.tanh(F.linear(self.mixes @ x, self.weight[:WIDTH, :WIDTH]))


class SideBySideAtTheEnd(TwoHops):
    """The same, flattened for what reads it."""

    def streams(self, x: Tensor) -> Tensor:
        return super().streams(x).flatten(-2).unsqueeze(-1)


class NotWritten(Fractions):
    """Rows that go into a layer of which nothing comes back to the streams."""

    def streams(self, x: Tensor) -> Tensor:
        f = self.layer(torch.einsum("bsnc,nm->bsmc", x, self.reads))
        return torch.cat((f, x), -2)


@pytest.mark.parametrize("kind", [TwoHops, OneHopUnmixed, SideBySideAtTheEnd, NotWritten])
def test_what_is_no_fraction(kind: type[Fractions]) -> None:
    reports = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        reports.append(passes.run_recursively(gm))
        return gm.forward

    torch.compile(kind(), backend=backend)(torch.randn(SHAPE))
    assert not any(report.sites or report.errors for report in reports), str(reports[0])
