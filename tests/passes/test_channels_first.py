"""Streams whose channels come before the tokens' positions, [b, n, C, h, w], with gates for each position.

Kernels read the channels of a token in one piece. Where memory has them so, a view is enough; else it takes a copy.
"""

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

N, WIDTH = 4, 6
SHAPE, MEMORY = (2, N, WIDTH, 3, 5), (2, 3, 5, N * WIDTH)
READ, WRITE = "aggregate", "expand_combine"
REASON = (
    "the gates differ along the innermost dim; the operator has the channels there and would need a copy of {}: make "
    "the channels the last dim"
)


class Image(nn.Module):
    """Streams [b, n, C, h, w]; the sublayer is a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.p = random_parameter(N, 1, 1, mean=0.5), random_parameter(N, 1, 1, mean=1.0)
        self.r = random_parameter(N, N, std=0.5)
        self.of_stream = random_parameter(N + 2, WIDTH, 1, 1, std=WIDTH**-0.5)
        self.weight = random_parameter(WIDTH, WIDTH, 3, 3, std=WIDTH**-0.5 / 3)

    def layer(self, u: Tensor) -> Tensor:
        return torch.tanh(F.conv2d(u, self.weight, padding=1))

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[b, n, h, w] to read and to write, and [b, n, n, h, w]: this stream's, for each that is written."""
        h = torch.tanh(F.conv2d(x.flatten(0, 1), self.of_stream)).unflatten(0, (-1, N))
        a, p, r = h.split((1, 1, N), 2)
        return a.squeeze(2) + self.a, p.squeeze(2) + self.p, r + self.r[..., None, None]

    def read(self, x: Tensor, a: Tensor) -> Tensor:
        return torch.einsum("bshw,bsdhw->bdhw", a, x)

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return torch.einsum("bsthw,bsdhw->btdhw", r, x) + torch.einsum("bdhw,bshw->bsdhw", f, p)

    def body(self, x: Tensor) -> Any:
        a, p, r = self.gates(x)
        return self.write(x, self.layer(self.read(x, a)), p, r)

    def forward(self, x: Tensor) -> Any:
        return self.body(x.sin())


class Together(Image):
    """One [n, n + 1] product for reading and mixing, arXiv 2409.19606."""

    def body(self, x: Tensor) -> Any:
        a, p, r = self.gates(x)
        both = torch.einsum("bsthw,bsdhw->btdhw", torch.cat((a.unsqueeze(2), r), 2), x)
        return both[:, 1:] + torch.einsum("bdhw,bshw->bsdhw", self.layer(both[:, 0]), p)


class Multiplied(Image):
    def read(self, x: Tensor, a: Tensor) -> Tensor:
        return (x * a.unsqueeze(2)).sum(1)

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return (r.unsqueeze(3) * x.unsqueeze(2)).sum(1) + p.unsqueeze(2) * f.unsqueeze(1)


class Unmixed(Image):
    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return x + p.unsqueeze(2) * f.unsqueeze(1)


class Diagonal(Image):
    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return (1 - p).unsqueeze(2) * x + p.unsqueeze(2) * f.unsqueeze(1)


class MixedForAll(Image):
    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return torch.einsum("st,bsdhw->btdhw", self.r, x) + p.unsqueeze(2) * f.unsqueeze(1)


class WrittenForAll(Image):
    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return torch.einsum("bsthw,bsdhw->btdhw", r, x) + self.p.unsqueeze(-1) * f.unsqueeze(1)


class ReadForAll(Unmixed):
    def read(self, x: Tensor, a: Tensor) -> Tensor:
        return torch.einsum("s,bsdhw->bdhw", self.a.flatten(), x)


class OnlyReadForEach(Image):
    """Only the gates of the read differ from position to position."""

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return torch.einsum("st,bsdhw->btdhw", self.r, x) + self.p.unsqueeze(-1) * f.unsqueeze(1)


KINDS = [Image, Together, Unmixed, WrittenForAll]
# What these make has the channels apart in memory, whatever the streams have.
APART = [Multiplied, Diagonal, MixedForAll]
OTHERS: list[tuple[type[Image], list[str], int]] = [(ReadForAll, [READ], 1), (OnlyReadForEach, [WRITE], 1)]


class ChannelsInnermost(nn.Module):
    """[b, h, w, n C] of memory, which the program sees as [b, n, C, h, w]."""

    def __init__(self, kind: type[Image]) -> None:
        super().__init__()
        self.image = kind()

    def forward(self, x: Tensor) -> Any:
        return self.image(x.unflatten(-1, (N, WIDTH)).permute(0, 3, 4, 1, 2))


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rewritten_by_a_view(kind: type[Image], dtype: torch.dtype) -> None:
    outcome = check.run(ChannelsInnermost(kind).to(dtype), (torch.randn(MEMORY, dtype=dtype),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == [READ, WRITE], str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)
    assert all(site.own for site in outcome.report.rewritten), str(outcome.report)


@pytest.mark.parametrize("kind", KINDS + APART, ids=[kind.__name__ for kind in KINDS + APART])
def test_a_copy_is_told(kind: type[Image]) -> None:
    outcome = check.run(kind(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert not outcome.operators, str(outcome.report)
    assert [(site.op, site.reason) for site in outcome.report.declined] == [
        (READ, REASON.format("the streams")),
        (WRITE, REASON.format("the streams")),
    ], str(outcome.report)


@pytest.mark.parametrize(("kind", "operators", "left"), OTHERS, ids=[kind.__name__ for kind, *_ in OTHERS])
def test_steps_with_gates_for_all_positions_are_rewritten(kind: type[Image], operators: list[str], left: int) -> None:
    outcome = check.run(kind(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == operators, str(outcome.report)
    assert [site.reason for site in outcome.report.declined] == [REASON.format("the streams")] * left


@pytest.mark.parametrize("batch", [2, 0])
def test_later_layers_have_the_channels_innermost(batch: int) -> None:
    """What einsum makes has the channels innermost in memory, and so has all that comes after it."""
    shape = (batch, *SHAPE[1:])
    outcome = check.run(nn.Sequential(Together(), Together(), Together()), (torch.randn(shape),), exact=False)
    check.assert_equal_to_eager(outcome)
    assert outcome.operators == ([READ, READ, WRITE, WRITE] if batch else []), str(outcome.report)


def test_dynamic_sizes() -> None:
    outcome = check.run(ChannelsInnermost(Together), (torch.randn(MEMORY),), dynamic=True)
    check.assert_as_accurate(outcome)
    assert outcome.operators == [READ, WRITE], str(outcome.report)


class OutputWithChannelsApart(Image):
    """The sublayer's output is [b, C, h, w] in memory."""

    def layer(self, u: Tensor) -> Tensor:
        return super().layer(u.contiguous())


COPIES = [(OutputWithChannelsApart, "the sublayer's output"), (Diagonal, "its result"), (MixedForAll, "its result")]


@pytest.mark.parametrize(("kind", "what"), COPIES, ids=[kind.__name__ for kind, _ in COPIES])
def test_another_copy_is_told(kind: type[Image], what: str) -> None:
    outcome = check.run(ChannelsInnermost(kind), (torch.randn(MEMORY),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == [READ], str(outcome.report)
    assert [site.reason for site in outcome.report.declined] == [REASON.format(what)]


class ConvolutionBetween(nn.Module):
    """Streams [b, s, n, C]; the sublayer reads and makes [b, C, s]."""

    def __init__(self) -> None:
        super().__init__()
        self.of_stream = random_parameter(WIDTH, N + 2, std=WIDTH**-0.5)
        self.weight = random_parameter(WIDTH, WIDTH, 3, std=WIDTH**-0.5)

    def forward(self, x: Tensor) -> Any:
        x = x.sin()
        a, p, r = torch.tanh(x @ self.of_stream).split((1, 1, N), -1)
        f = torch.tanh(F.conv1d((a * x).sum(-2).mT, self.weight, padding=1)).mT
        return p * f.unsqueeze(-2) + r.mT @ x


def test_only_streams_with_channels_apart_are_left() -> None:
    outcome = check.run(ConvolutionBetween(), (torch.randn(2, 5, N, WIDTH),))
    check.assert_as_accurate(outcome)
    assert {READ, WRITE} <= set(outcome.operators), str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)


class GateOfChannels(nn.Module):
    """Streams [b, n, s, C], read with a gate for each channel that all tokens share, and written with others."""

    def __init__(self) -> None:
        super().__init__()
        self.of_stream = random_parameter(WIDTH, N + 1, std=WIDTH**-0.5)
        self.weight = random_parameter(WIDTH, WIDTH, std=WIDTH**-0.5)

    def forward(self, x: Tensor) -> Any:
        x = x.sin()
        p, r = torch.tanh(x @ self.of_stream).split((1, N), -1)
        f = torch.tanh(F.linear((x.mean(2, keepdim=True).sigmoid() * x).sum(1), self.weight))
        return torch.einsum("bito,bitc->botc", r, x) + p * f.unsqueeze(1)


def test_the_write_says_what_the_channels_of_a_read_are() -> None:
    outcome = check.run(GateOfChannels(), (torch.randn(2, N, 5, WIDTH),))
    check.assert_as_accurate(outcome)
    (site,) = outcome.report.declined
    assert (site.op, "with a gate for each channel" in str(site.reason)) == (READ, True), str(outcome.report)


def test_strict() -> None:
    model = torch.compile(Image(), backend="mhc", options={"mhc.strict": True})
    with pytest.raises(Exception, match="make the channels the last dim"):
        model(torch.randn(SHAPE))


def test_what_a_sublayer_reads_keeps_its_order_in_memory() -> None:
    """A row of a larger product has gaps in memory. What replaces it has none, and no other order."""
    strides = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        passes.run_recursively(gm)
        convolutions = gm.graph.find_nodes(op="call_function", target=torch.conv2d)
        strides.append(convolutions[-1].args[0].meta["example_value"].stride())
        return gm.forward

    torch.compile(ChannelsInnermost(Together), backend=backend)(torch.randn(MEMORY))
    assert strides == [(3 * 5 * WIDTH, 1, 5 * WIDTH, WIDTH)]


def test_snapshot() -> None:
    assert str(capture(ChannelsInnermost(Together), torch.randn(MEMORY))) == (
        "%0 = aggregate(x=f32[2, 3, 5, 4, 6], h_pre=f32[2, 3, 5, 4])\n"
        "%1 = expand_combine(f=f32[2, 3, 5, 6](%0), h_post=f32[2, 3, 5, 4], x=f32[2, 3, 5, 4, 6],\n"
        "    h_res=f32[2, 3, 5, 4, 4])\n"
        "return %1"
    )
