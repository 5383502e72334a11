"""The weighted sum of the streams: layer_input = sum_i gate[i] * x[i]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mhc_compile.passes.recognise.contraction import Contraction, StreamsView, by_stride, contractions, joined
from mhc_compile.passes.recognise.layout import Layout, tidy, tiles
from mhc_compile.passes.recognise.projection import MAX_ROWS
from mhc_compile.passes.recognise.reader import Reader
from mhc_compile.passes.shadow import Op, Value


@dataclass(frozen=True)
class Aggregate:
    """out[token] = const * the sum over the streams of gate[token, i] * x[token, i].

    gate_layout is indexed [token, i] over the gate, out_layout [token, channel] over the result.
    """

    out: Value
    gate: Value
    gate_layout: Layout
    x: Value
    streams: StreamsView
    out_layout: Layout
    const: float

    @property
    def op(self) -> Op:
        assert self.out.op is not None
        return self.out.op


def aggregates(reader: Reader, out: Value) -> Iterator[Aggregate]:
    """The readings of a value as a sum of streams weighted per token."""
    terms = reader.terms(out)
    if len(terms) != 1 or terms[0].summed == 0:
        return
    for c in contractions(terms[0], out):
        found = _read(c)
        if found is not None:
            yield found


def why_none(reader: Reader, out: Value, gate: Value) -> str:
    """Why a value computed from a gate and streams is not read as their weighted sum."""
    terms = reader.terms(out)
    if len(terms) != 1 or len(terms[0].factors) != 2:
        return "is not the sum of a gate times streams alone"
    if not terms[0].summed:
        return "does not sum over the streams in a way that is followed"
    for c in contractions(terms[0], out):
        summed = [a for a in c.axes if a.summed]
        if c.left is gate and len(summed) == 1 and summed[0].right and not _has_inner_channels(c):
            return "reads streams whose channels do not lie side by side in memory"
    return "is not the sum over i of h_pre[i] x[i] for streams [..., n, C]"


def _has_inner_channels(c: Contraction) -> bool:
    least = min((a.right for a in c.axes if a.right), default=1)
    return any(a.right == least and (a.left == 0 or a.summed) for a in c.axes)


def _read(c: Contraction) -> Aggregate | None:
    summed = joined(by_stride([a for a in c.axes if a.summed], "left"))
    channel = joined(by_stride([a for a in c.axes if not a.summed and a.left == 0], "right"))
    token = joined(by_stride([a for a in c.axes if not a.summed and a.left != 0], "right"))
    if len(summed) != 1 or not summed[0].left or not summed[0].right or c.left is c.right:
        return None
    if not is_stream_count(summed[0].size):
        return None
    if any(a.right == 0 for a in (*token, *channel)):
        return None
    streams = StreamsView(
        tidy([(a.size, a.right) for a in token]),
        (summed[0].size, summed[0].right),
        tidy([(a.size, a.right) for a in channel]),
    )
    gate = Layout((tidy([(a.size, a.left) for a in token]), ((summed[0].size, summed[0].left),)))
    out = Layout((tidy([(a.size, a.out) for a in token]), tidy([(a.size, a.out) for a in channel])))
    if not is_innermost(streams, c.right) or not tiles([f for dim in gate.dims for f in dim], c.left.numel):
        return None
    return Aggregate(c.out, c.left, gate, c.right, streams, out, c.const)


def is_stream_count(n: int) -> bool:
    """Whether the operators take so many streams."""
    return n * n + 2 * n <= MAX_ROWS


def is_innermost(streams: StreamsView, x: Value) -> bool:
    """Whether the channels of a stream lie together, as far as streams between them allow.

    What the gates do not depend on would otherwise pass for channels: all tokens, where there is one gate for all.
    """
    if not streams.tokens and x.shape[-1] not in (streams.channels, streams.n, streams.n * streams.channels):
        return False
    expected = streams.n if streams.channels_first else 1
    for size, stride in reversed(streams.channel):
        if stride != expected:
            return False
        expected *= size
    return True
