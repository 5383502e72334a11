"""Mixing the streams into several rows at once: out[o] = sum_i gate[i, o] * x[i].

Frac-connections (arXiv 2503.14125) read m rows of the streams, put them side by side for the sublayer, and write the m
parts of its result through a matrix. Structure alone does not separate this from a graph convolution or attention.
The rows count as streams if the program puts them side by side as the channels of what it writes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from mhc_compile.passes.recognise.contraction import (
    MAX_ROWS,
    Contraction,
    StreamsView,
    by_stride,
    contractions,
    exact,
    joined,
    may_contract,
    steps_in,
    streams_in,
)
from mhc_compile.passes.recognise.layout import Dim, Layout, is_movement, seen
from mhc_compile.passes.recognise.reader import Reader, may_hold_products
from mhc_compile.passes.recognise.streams import Connections
from mhc_compile.passes.shadow import Op, Value

# What sums products over streams.
PRODUCTS = {"mm", "bmm", "sum"}


@dataclass(frozen=True)
class Mixing:
    """out[token, o, channel] = const * the sum over i of gate[token, i, o] * x[token, i, channel].

    The layouts are indexed so, each over its tensor. Streams that are split into fractions have two strides.
    """

    out: Value
    gate: Value
    gate_layout: Layout
    x: Value
    x_layout: Layout
    out_layout: Layout
    const: float

    @property
    def op(self) -> Op:
        assert self.out.op is not None
        return self.out.op

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of streams, of rows that they are mixed into, and of channels."""
        _, n, channels = self.x_layout.shape
        return n, self.out_layout.shape[1], channels

    @property
    def streams(self) -> StreamsView | None:
        """Where the streams lie, if they are evenly apart."""
        tokens, stream, channel = self.x_layout.dims
        return StreamsView(tokens, stream[0], channel) if len(stream) == 1 else None


def mixings(reader: Reader, out: Value) -> Iterator[Mixing]:
    """The readings of a value as several rows, each a sum of the streams."""
    terms = reader.terms(out)
    if len(terms) != 1 or not terms[0].summed:
        return
    for c in contractions(terms[0], out, parts=True):
        found = _read(c)
        if found is not None:
            yield found


def _read(c: Contraction) -> Mixing | None:
    streams = joined(by_stride([a for a in c.axes if a.summed], "right"))
    rows = joined(by_stride([a for a in c.axes if not a.summed and a.right == 0], "out"))
    if not streams or not rows or c.left is c.right or not all(a.left for a in (*streams, *rows)):
        return None
    n = prod(a.size for a in streams)
    if n * prod(a.size for a in rows) > MAX_ROWS or not all(a.right for a in streams):
        return None
    nearest = (n, streams[-1].right)
    for token, channel, view in streams_in([a for a in c.axes if not a.summed and a.right], c.right, nearest):
        # A linear layer mixes the channels of all tokens so, and a read by as many gates the streams.
        if view.channels == 1 or view.channels_first:
            continue
        gate = Layout(tuple(steps_in(axes, "left") for axes in (token, streams, rows)), c.left_offset)
        x = Layout(tuple(steps_in(axes, "right") for axes in (token, streams, channel)))
        out = Layout(tuple(steps_in(axes, "out") for axes in (token, rows, channel)))
        return Mixing(c.out, c.left, gate, c.right, x, out, c.const)
    return None


def mixed_alone(reader: Reader, views: Mapping[Value, StreamsView]) -> Iterator[Mixing]:
    """The streams that are others mixed by a matrix to which nothing is added, and so on back; views: known streams."""
    known = dict(views)
    pending = list(views)
    for out in pending:
        view = known[out]
        for mixing in mixings(reader, out):
            if mixing.sizes[:2] == (view.n, view.n) and mixing.out_layout == view.layout:
                yield mixing
                if mixing.x not in known and mixing.streams is not None:
                    known[mixing.x] = mixing.streams
                    pending.append(mixing.x)
                break


def mixed_last(ops: Iterable[Op], reader: Reader, views: Mapping[Value, StreamsView]) -> Iterator[Mixing]:
    """What streams are mixed into that nothing else reads, and so on forward; views: where these streams lie."""
    known = dict(views)
    for op in ops if known else ():
        if op.name not in PRODUCTS or not op.outs or not may_hold_products(op, reader):
            continue
        for mixing in mixings(reader, seen(op.out)):
            view = known.get(mixing.x)
            if view is not None and mixing.streams == view and mixing.sizes[:2] == (view.n, view.n):
                yield mixing
                tokens, stream, channel = mixing.out_layout.dims
                known.setdefault(mixing.out, StreamsView(tokens, stream[0], channel))
                break


def fractions(sums: Iterable[Value], reader: Reader, connections: Connections) -> list[Mixing]:
    """The mixings that make sums of mixed streams and of a sublayer's parts, where the streams are connected."""
    found: dict[tuple[Value, Value], Mixing] = {}
    for out in sums:
        for x, f in _written(out, reader):
            behind = [value for value in connections.between(x, out) if _is_first(value)]
            mixed = [m for value in behind for m in mixings(reader, value) if m.x is x or m.x is f]
            parts = connections.between(x, f)
            if any(m.x is x and _side_by_side(m, parts, reader) for m in mixed):
                for mixing in mixed:
                    found.setdefault((mixing.out, mixing.x), mixing)
    return list(found.values())


def _written(out: Value, reader: Reader) -> Iterator[tuple[Value, Value]]:
    """The streams that are mixed in a sum of two products, and what the other product may be of.

    Or streams that are added to a product as they are, and what the product mixes.
    """
    terms = reader.terms(out)
    if len(terms) != 2 or not any(map(may_contract, terms)):
        return
    for term, other in (terms, terms[::-1]):
        mixed = {m.x for c in contractions(term, out, parts=True) if (m := _read(c)) and m.sizes[0] == m.sizes[1]}
        bases = dict.fromkeys(source.base for factor in other.factors for source in exact(factor))
        yield from ((x, f) for x in mixed for f in bases)
        if len(other.factors) == 1 and not other.summed:
            written = {m.x for c in contractions(term, out, parts=True) if (m := _read(c))}
            yield from ((x, f) for x in bases if x.numel == out.numel for f in written)


def _is_first(value: Value) -> bool:
    """Whether a value is in the program, and no view of another one that is."""
    if not value.nodes:
        return False
    while value.op is not None and is_movement(value.op):
        value = next(value.op.inputs())
        if value.nodes:
            return False
    return value.op is not None


def _side_by_side(mixing: Mixing, values: Iterable[Value], reader: Reader) -> bool:
    """Whether the program makes one row of several: the parts of what a sublayer reads."""
    _, _, channel = mixing.out_layout.dims
    return any(
        source.base is mixing.out and _covers(source.layout.dims[-1], channel)
        for value in values
        if value.shape and value.shape[-1] > mixing.sizes[2]
        for source in reader.views(value)
    )


def _covers(dim: Dim, channel: Dim) -> bool:
    """Whether a dim goes over all channels, and not over the rows of each of them."""
    return all(
        any(step <= stride and stride % step == 0 and size * step >= count * stride for size, step in dim if step)
        for count, stride in channel
    )
