"""Products of two tensors summed over some dimensions, however they are spelled.

A term with two factors is laid out over one iteration space: axes, each with its stride in the left operand, the right
operand and the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import prod
from typing import NamedTuple

from mhc_compile import compat
from mhc_compile.passes.recognise.layout import Dim, Layout, NotALayout, is_shown, merged, refine, tidy, tiles
from mhc_compile.passes.recognise.layout import Factor as Step
from mhc_compile.passes.recognise.sums_of_products import Factor, Source, Term
from mhc_compile.passes.shadow import Value

# The rows of the widest projection that the operators take.
MAX_ROWS = 1024


class Axis(NamedTuple):
    """One factor of the iteration space; out is its stride in the result, unused where it is summed."""

    size: int
    left: int
    right: int
    out: int
    summed: bool


class Contraction(NamedTuple):
    """out = const * sum over the summed axes of left * right.

    Every element of right is reached, and of left unless it is a part, whose first element is at left_offset.
    """

    const: float
    out: Value
    left: Value
    right: Value
    axes: tuple[Axis, ...]
    left_offset: int = 0

    def swapped(self) -> Contraction:
        axes = tuple(Axis(a.size, a.right, a.left, a.out, a.summed) for a in self.axes)
        return Contraction(self.const, self.out, self.right, self.left, axes)


def may_contract(term: Term) -> bool:
    """Whether a term is the sum of products of two factors, which costs nothing to see."""
    return bool(term.summed) and len(term.factors) == 2


def contractions(term: Term, out: Value, *, parts: bool = False) -> Iterator[Contraction]:
    """The readings of a term of `out`: operands may be taken before or after a broadcast, and either way round.

    parts: left may be a part of a tensor, such as some columns of a matrix of gates.
    """
    if len(term.factors) != 2:
        return
    whole = [list(exact(factor)) for factor in term.factors]
    for left in whole[0]:
        for right in whole[1]:
            reading = _reading(term, out, left, right)
            if reading is not None:
                yield reading
                yield reading.swapped()
    for one, other in ((0, 1), (1, 0)) if parts else ():
        held = [source for source in term.factors[one] if source.base.nodes] or term.factors[one][-1:]
        for left in [] if whole[one] else held[:1]:
            for right in whole[other]:
                reading = _reading(term, out, left, right)
                if reading is not None:
                    yield reading


def _reading(term: Term, out: Value, left: Source, right: Source) -> Contraction | None:
    try:
        return Contraction(term.const, out, left.base, right.base, _axes(term, out, left, right), left.layout.offset)
    except NotALayout:
        return None


def exact(factor: Factor) -> Iterator[Source]:
    """The descriptions of a factor that reach every element of their base: one of each size.

    It is the one with the farthest base that the program has, or with the farthest base if the program has none.
    """
    found: dict[int, Source] = {}
    for source in reversed(factor):
        base, known = source.base, found.get(source.base.numel)
        if known is not None and (is_shown(known.base) or not is_shown(base)):
            continue
        strided = [step for dim in source.layout.dims for step in dim if step[1]]
        if not source.layout.offset and 0 not in source.layout.shape and tiles(strided, base.numel):
            found[base.numel] = source
    yield from found.values()


def constant_in_sum(factor: Factor, rank: int) -> bool:
    """Whether a factor of a value with `rank` dimensions is the same for all that is summed, as what is repeated is."""
    return any(not any(stride for dim in source.layout.dims[rank:] for _, stride in dim) for source in factor)


def without_another(term: Term, out: Value, factor: Factor) -> Iterator[Contraction]:
    """The readings of one factor of a term as if the other one were a constant, in which left has no step."""
    for source in exact(factor):
        nothing = Layout(tuple(((size, 0),) if size > 1 else () for size in source.layout.shape))
        reading = _reading(term, out, Source(source.base, nothing), source)
        if reading is not None:
            yield reading


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
    def holds_tokens(self) -> bool:
        """Whether tokens lie between the channels of a stream, [..., n, C, tokens]."""
        return bool(self.channel) and any(stride < self.channel[-1][1] for _, stride in self.tokens)

    @property
    def layout(self) -> Layout:
        return Layout((self.tokens, (self.stream,) if self.n > 1 else (), self.channel))


def by_stride(axes: Sequence[Axis], side: str) -> list[Axis]:
    """Axes from major to minor in one of the tensors: `side` is left, right or out."""
    return sorted(axes, key=lambda axis: -int(getattr(axis, side)))


def joined(axes: Sequence[Axis]) -> list[Axis]:
    """Axes in this order. Neighbours that every tensor steps through evenly are joined."""
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


def steps_in(axes: Sequence[Axis], side: str) -> Dim:
    """How one of the tensors is stepped through along axes in this order: `side` is left, right or out."""
    return tidy([(a.size, getattr(a, side)) for a in axes])


def _split(axes: Sequence[Axis], x: Value, streams_at: Step) -> Iterator[tuple[list[Axis], list[Axis]]]:
    """The axes that x and the result share as (tokens, channels), for a gate on the left.

    A gate for each token goes with the tokens and not with the channels. Where it has tokens in common as well, the
    channels are what lies innermost in x.
    """
    fixed = [a for a in axes if a.left == 0]
    yield [a for a in axes if a.left != 0], fixed
    bound = 1
    for size in reversed(x.shape):
        bound *= size
        inner = [part for axis in fixed for part in _cut(axis, bound)]
        channels = [a for a in inner if a.right < bound]
        if channels and (streams_at[1] == 1 or bound <= streams_at[1] or streams_at[1] * streams_at[0] <= bound):
            yield [a for a in axes if a.left != 0] + [a for a in inner if a.right >= bound], channels
            return


def streams_in(
    axes: Sequence[Axis], x: Value, streams_at: Step
) -> Iterator[tuple[list[Axis], list[Axis], StreamsView]]:
    """The axes that x and the result share as tokens and channels, with the streams that these make, likeliest first.

    Last come channels that hold tokens: some dims of one stream, along which the gates do not differ.
    """
    for tokens, channels in _split(axes, x, streams_at):
        found = _with_view(tokens, channels, streams_at)
        if _is_innermost(found[2], x):
            yield found
    within = [bound for d in range(len(x.shape)) if 0 < (bound := prod(x.shape[d:])) <= streams_at[1]]
    for bound, inner in combinations(within, 2):
        parts = [part for axis in axes for half in _cut(axis, bound) for part in _cut(half, inner)]
        channels = [a for a in parts if inner <= a.right < bound and not a.left]
        if prod(a.size for a in channels) == bound // inner:
            found = _with_view([a for a in parts if a not in channels], channels, streams_at)
            if found[2].holds_tokens:
                yield found


def _with_view(
    tokens: Sequence[Axis], channels: Sequence[Axis], streams_at: Step
) -> tuple[list[Axis], list[Axis], StreamsView]:
    token, channel = (joined(by_stride(some, "right")) for some in (tokens, channels))
    return token, channel, StreamsView(steps_in(token, "right"), streams_at, steps_in(channel, "right"))


def _cut(axis: Axis, bound: int) -> list[Axis]:
    """An axis in two parts where it steps over a bound in the right operand."""
    inner = bound // axis.right
    if axis.right >= bound or axis.right * axis.size <= bound or bound % axis.right or axis.size % inner:
        return [axis]
    outer = Axis(axis.size // inner, axis.left * inner, axis.right * inner, axis.out * inner, axis.summed)
    return [outer, Axis(inner, axis.left, axis.right, axis.out, axis.summed)]


def _is_innermost(streams: StreamsView, x: Value) -> bool:
    """Whether the channels of a stream lie together, as far as streams between them allow.

    What the gates do not depend on would otherwise pass for channels: all tokens, where there is one gate for all.
    """
    if not streams.tokens and x.shape[-1] not in (streams.channels, streams.n, streams.n * streams.channels):
        return False
    if streams.channels == 1 and any(stride < streams.stream[1] for _, stride in streams.tokens):
        return False  # a gate for each channel: all elements would be tokens
    expected = streams.n if streams.channels_first else 1
    for size, stride in reversed(streams.channel):
        if stride != expected:
            return False
        expected *= size
    return True


def is_stream_count(n: int, x: Value | None = None) -> bool:
    """Whether the operators take so many streams, of x if its sizes may differ from call to call."""
    if x is not None and n in x.shape:
        n = int(compat.hint(x.meta.shape[x.shape.index(n)]))  # a prime stands for it in the record
    return n * n + 2 * n <= MAX_ROWS
