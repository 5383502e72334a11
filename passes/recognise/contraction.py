"""Products of two tensors summed over some dimensions, however they are spelled.

A term with two factors is laid out over one iteration space: axes, each with its stride in the left operand, the right
operand and the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mhc_compile.passes.recognise.layout import Factor as Step
from mhc_compile.passes.recognise.layout import Layout, NotALayout, merged, refine, tiles
from mhc_compile.passes.recognise.terms import Factor, Source, Term
from mhc_compile.passes.shadow import Value


class Axis(NamedTuple):
    """One factor of the iteration space; out is its stride in the result, unused where it is summed."""

    size: int
    left: int
    right: int
    out: int
    summed: bool


class Contraction(NamedTuple):
    """out = const * sum over the summed axes of left * right, where every element of left and right is reached."""

    const: float
    out: Value
    left: Value
    right: Value
    axes: tuple[Axis, ...]

    def swapped(self) -> Contraction:
        axes = tuple(Axis(a.size, a.right, a.left, a.out, a.summed) for a in self.axes)
        return Contraction(self.const, self.out, self.right, self.left, axes)


def contractions(term: Term, out: Value) -> Iterator[Contraction]:
    """The readings of a term of `out`: operands may be taken before or after a broadcast, and either way round."""
    if len(term.factors) != 2:
        return
    for left in exact(term.factors[0]):
        for right in exact(term.factors[1]):
            try:
                axes = _axes(term, out, left, right)
            except NotALayout:
                continue
            reading = Contraction(term.const, out, left.base, right.base, axes)
            yield reading
            yield reading.swapped()


def exact(factor: Factor) -> Iterator[Source]:
    """The descriptions of a factor that reach every element of their base: the farthest base, one of each size."""
    sizes: set[int] = set()
    for source in reversed(factor):
        strided = [step for dim in source.layout.dims for step in dim if step[1]]
        if source.base.numel in sizes or source.layout.offset or not tiles(strided, source.base.numel):
            continue
        sizes.add(source.base.numel)
        yield source


def _axes(term: Term, out: Value, left: Source, right: Source) -> tuple[Axis, ...]:
    rank = len(out.shape)
    written = Layout.contiguous(out.shape)
    summed = left.layout.shape[rank:]
    space = Layout((*written.dims, *(((size, 0),) if size > 1 else () for size in summed)))
    rows = merged(refine(left.layout, right.layout, space))
    return tuple(Axis(size, s[0], s[1], s[2], d >= rank) for d, size, s in rows)


class StreamsView(NamedTuple):
    """Where a tensor holds its streams: steps as (size, stride), major to minor, over its contiguous elements.

    tokens go from token to token, stream from stream to stream, channels through the width of one stream.
    """

    tokens: tuple[Step, ...]
    stream: Step
    channel: tuple[Step, ...]

    @property
    def n(self) -> int:
        return self.stream[0]

    @property
    def channels(self) -> int:
        count = 1
        for size, _ in self.channel:
            count *= size
        return count

    @property
    def channels_first(self) -> bool:
        """Whether the streams are next to one another, [..., C, n]."""
        return self.n > 1 and self.stream[1] == 1 and self.channels > 1

    @property
    def layout(self) -> Layout:
        return Layout((self.tokens, (self.stream,) if self.n > 1 else (), self.channel))


def by_stride(axes: Sequence[Axis], side: str) -> list[Axis]:
    """Axes from major to minor in one of the tensors: `side` is left, right or out."""
    return sorted(axes, key=lambda axis: -int(getattr(axis, side)))


def joined(axes: Sequence[Axis]) -> list[Axis]:
    """Axes in this order, neighbours that every tensor steps through evenly made one."""
    found: list[Axis] = []
    for axis in axes:
        last = found[-1] if found else None
        if last and (last.left, last.right, last.out) == tuple(
            axis.size * stride for stride in (axis.left, axis.right, axis.out)
        ):
            found[-1] = Axis(last.size * axis.size, axis.left, axis.right, axis.out, last.summed)
        else:
            found.append(axis)
    return found
