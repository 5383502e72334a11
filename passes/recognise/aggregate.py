"""Reading: the weighted sum of the streams, layer_input = sum_i gate[i] * x[i].

The sum of rows that a matrix mixes is such a sum, too: sum_r sum_i H[r, i] x[i] has the gates sum_r H[r, i].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mhc_compile.passes.recognise.contraction import (
    Contraction,
    StreamsView,
    by_stride,
    constant_in_sum,
    contractions,
    is_stream_count,
    joined,
    steps_in,
    streams_in,
    without_another,
)
from mhc_compile.passes.recognise.layout import Dim, Layout
from mhc_compile.passes.recognise.misses import Miss
from mhc_compile.passes.recognise.reader import Reader, sums_what_others_read
from mhc_compile.passes.recognise.sums_of_products import Term
from mhc_compile.passes.shadow import Op, Value


@dataclass(frozen=True)
class Reading:
    """out is made of one token of the streams x, and by_channel says whether with a gate for each channel."""

    out: Value
    x: Value
    streams: StreamsView
    by_channel: bool = False


@dataclass(frozen=True)
class Aggregate:
    """out[token] = const * the sum over the streams of gate[token, i] * x[token, i].

    gate_layout is indexed [token, i] over the gate, out_layout [token, channel] over the result. A gate may be a part
    of a tensor, and one for several tokens. If it is a matrix, rows says along which steps its rows are added.
    """

    out: Value
    gate: Value
    gate_layout: Layout
    x: Value
    streams: StreamsView
    out_layout: Layout
    const: float
    rows: Dim = ()

    @property
    def op(self) -> Op:
        assert self.out.op is not None
        return self.out.op

    @property
    def has_whole_gate(self) -> bool:
        """Whether each element of the gate weighs one stream of one token, in their order."""
        return not self.rows and self.gate_layout.is_identity()


def aggregates(reader: Reader, out: Value) -> Iterator[Aggregate | Miss]:
    """The readings of a value as a weighted sum of streams, and where each of the others ends."""
    terms = reader.terms(out)
    if len(terms) != 1 or len(terms[0].factors) != 2:
        yield Miss(out, None, "is not the sum of a gate times streams alone", 0)
        return
    if not terms[0].summed:
        yield Miss(out, None, "does not sum over the streams in a way that is followed", 0)
        return
    for c in contractions(terms[0], out, parts=True):
        found = _read(c)
        if isinstance(found, Aggregate) and found.rows and sums_what_others_read(out):
            found = "is the sum of mixed streams that other code reads as well", 2
        yield Miss(out, c.left, found[0], found[1]) if isinstance(found, tuple) else found


def other_readings(reader: Reader, out: Value) -> Iterator[Reading]:
    """Reads of streams that no operator makes: their mean or sum, or one with a gate for each channel.

    The streams may be others that a matrix mixes: that is summed, too.
    """
    terms = reader.terms(out)
    if (len(terms) > 1 or terms[0].summed > 1) and out.op is not None:
        terms = reader.reduction(out.op) or terms
    if len(terms) != 1 or not terms[0].summed or len(terms[0].factors) > 2:
        return
    found = list(_of_channels(terms[0], out))
    read = (a for a in aggregates(reader, out) if isinstance(a, Aggregate))
    if found and not any(not a.rows and not a.streams.holds_tokens for a in read):
        yield from found


def _of_channels(term: Term, out: Value) -> Iterator[Reading]:
    """The readings of one product or one tensor that is summed, where nothing is a gate for each token."""
    factors = term.factors
    bases = [{source.base for source in factor} for factor in factors]
    if len(factors) == 2 and bases[0] & bases[1]:  # the squares of a norm
        return
    for factor in factors:
        for c in without_another(term, out, factor):
            summed = [a for a in c.axes if a.summed]
            if len(summed) != 1 or not summed[0].size > 1 or not is_stream_count(summed[0].size, c.right):
                continue
            stream = (summed[0].size, summed[0].right)
            if any(a.right == 0 for a in c.axes) or stream[1] == 1:  # a mean over what may be the channels
                continue
            # Without a gate, no axis is one of tokens. The last view takes only what lies innermost in x as channels.
            walked = streams_in([a for a in c.axes if not a.summed], c.right, stream)
            views = [view for _, _, view in walked if not view.holds_tokens]
            for view in views[-1:]:
                by_channel = any(not constant_in_sum(other, len(out.shape)) for other in factors if other is not factor)
                yield Reading(out, c.right, view, by_channel)


def _read(c: Contraction) -> Aggregate | tuple[str, int]:
    summed = joined(by_stride([a for a in c.axes if a.summed and a.right], "left"))
    rows = joined(by_stride([a for a in c.axes if a.summed and not a.right], "left"))
    if len(summed) != 1 or not summed[0].left or not summed[0].right or c.left is c.right:
        return "is not the sum over i of h_pre[i] x[i] for streams [..., n, C]", 1
    stream = (summed[0].size, summed[0].right)
    if not is_stream_count(stream[0], c.right) or any(a.right == 0 for a in c.axes if not a.summed):
        return f"sums {stream[0]} streams (the operators take at most 31), or reads streams that are broadcast", 1
    if not all(a.left and is_stream_count(a.size) for a in rows):
        return "adds more rows of a matrix than there may be streams", 1
    for token, channel, streams in streams_in([a for a in c.axes if not a.summed], c.right, stream):
        # A linear layer also multiplies the channels of each token by a matrix.
        if rows and (streams.channels == 1 or streams.channels_first):
            continue
        gate = Layout((steps_in(token, "left"), ((stream[0], summed[0].left),)), c.left_offset)
        out = Layout((steps_in(token, "out"), steps_in(channel, "out")))
        return Aggregate(c.out, c.left, gate, c.right, streams, out, c.const, steps_in(rows, "left"))
    return "reads streams whose channels are not adjacent", 2
