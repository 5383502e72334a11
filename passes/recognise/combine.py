"""Writing: x'[o] = post[o] * f + sum_i res[i, o] * x[i], where the matrix may be a sum of matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from mhc_compile.passes.recognise.contraction import (
    Axis,
    Contraction,
    StreamsView,
    by_stride,
    contractions,
    exact,
    is_stream_count,
    joined,
    steps_in,
    streams_in,
    without_another,
)
from mhc_compile.passes.recognise.layout import Layout, NotALayout, Steps, broadcasts, origin, refine, seen, tidy
from mhc_compile.passes.recognise.misses import Miss
from mhc_compile.passes.recognise.outer import Outer, flat, outer_sums
from mhc_compile.passes.recognise.reader import Reader
from mhc_compile.passes.recognise.sums_of_products import Term, Terms
from mhc_compile.passes.shadow import Op, Value, spelled


@dataclass(frozen=True)
class Mix:
    """const * the streams times a matrix.

    The matrix is res with a layout indexed [token, i, o], or the diagonal one of res with a layout indexed [token, o].
    Where res is None, it is the matrix of ones, or the identity. A gate may be a part of a tensor, and one for several
    tokens.
    """

    res: Value | None
    res_layout: Layout
    const: float

    @property
    def is_matrix(self) -> bool:
        return len(self.res_layout.dims) == 3

    @property
    def to_all(self) -> bool:
        """Whether all streams get the same of it: the columns of the matrix are equal."""
        return self.is_matrix and not any(stride for _, stride in self.res_layout.dims[2])

    @property
    def is_transposed(self) -> bool:
        """Whether the matrix is applied as its transpose, as a plain matmul would not."""
        _, read, written = self.res_layout.dims
        return bool(read and written and read[0][1] > written[0][1])


@dataclass(frozen=True)
class Combine:
    """out = post f + post layer_bias + the sum of the mixes, all of x; out_view says where the streams are written.

    in_one_product: the streams and f are put together, and one matrix multiplies them.
    """

    out: Value
    outer: Outer
    mixes: tuple[Mix, ...]
    x: Value
    streams: StreamsView
    out_view: StreamsView
    layer_bias: Value | None
    in_one_product: bool = False

    @property
    def op(self) -> Op:
        assert self.out.op is not None
        return self.out.op

    @property
    def mix(self) -> Mix | None:
        """What is mixed with a matrix of the program, if anything is."""
        return next((mix for mix in self.mixes if mix.is_matrix and not mix.to_all), None)

    @property
    def is_plain(self) -> bool:
        """Whether the streams are added as they are."""
        return len(self.mixes) == 1 and self.mixes[0].res is None and self.mixes[0].const == 1.0

    def gates(self) -> Iterator[Value]:
        if self.outer.post is not None:
            yield self.outer.post
        yield from (mix.res for mix in self.mixes if mix.res is not None)


@dataclass(frozen=True)
class Almost(Miss):
    """What would be a write without something that is added besides; combine is the write without that."""

    combine: Combine


# Where the streams lie in a tensor, if it is known to have any.
Views = Callable[[Value], StreamsView | None]

# Products added to the mixed streams: those of f and of its bias; and matrices that are added.
_MAX_TERMS = 5
# How far a reading got that knows the mixed streams, and does not know what is added to them.
ADDED = 3


def of_sum(
    reader: Reader, op: Op, read: Callable[[Reader], Iterable[Combine | Miss]], almost: list[Almost]
) -> list[Combine]:
    """What is found in a sum; if nothing is, what is found if products that several streams get are not taken apart.

    In x + g f, where g is a number for each token, all streams get the one product: there is no gate for each stream.
    If there is no reading, those that something besides prevents are added to `almost`.
    """
    answers = list(read(reader))
    found = [c for c in answers if isinstance(c, Combine)]
    added = (origin(source, broadcasts)[0] for source in op.sources)
    products = {value for value in added if value.numel < op.out.numel and reader.is_made(value)}
    if not found and products:
        found = [c for c in read(Reader({*reader.whole, *products})) if isinstance(c, Combine)]
    if not found:
        almost += (miss for miss in answers if isinstance(miss, Almost))
    return found


def combines(reader: Reader, out: Value, terms: Terms | None = None) -> Iterator[Combine | Miss]:
    """The readings of a value as streams that are mixed by a matrix, and written; and where each of the others ends.

    terms: those that the value is read as, if not the reader's.
    """
    terms = reader.terms(out) if terms is None else terms
    if len(terms) > _MAX_TERMS:
        yield Miss(out, None, f"adds {len(terms)} products; at most {_MAX_TERMS} are followed", 0)
        return
    for i, term in enumerate(terms):
        if not term.summed:
            continue
        for c in contractions(term, out, parts=True):
            for found in _read_mix(c):
                if isinstance(found, Miss):
                    yield found
                else:
                    mix, streams, written = found
                    rest = terms[:i] + terms[i + 1 :]
                    yield from _written_with(reader, rest, out, c.right, streams, written, (mix,))


def residuals(reader: Reader, out: Value, streams: Views) -> Iterator[Combine | Miss]:
    """The readings of a value as outer + x, each stream by itself: x is what `streams` knows the streams of."""
    terms = reader.terms(out)
    if len(terms) > _MAX_TERMS:
        return
    found = False
    for x, view in _own_streams(terms, out, streams):
        for i, term in enumerate(terms):
            mix = _alone(term, out, x, view)
            if mix is not None:
                found = True
                yield from _written_with(reader, terms[:i] + terms[i + 1 :], out, x, view, mix[1], (mix[0],))
                break
    if not found:
        yield from _unmixed(terms, out)


def _unmixed(terms: tuple[Term, ...], out: Value) -> Iterator[Miss]:
    """Products that are written without streams, by each of the values that may be their gates."""
    for term in terms:
        if term.summed or len(term.factors) != 2:
            continue
        others = tuple(other for other in terms if other is not term)
        reason = f"writes h_post f without adding the streams in the same sum{_goes_into(out)}"
        if others:
            reason = f"adds to h_post f something not recognised as streams, mixed or unmixed{_made_by(others)}"
        for base in dict.fromkeys(source.base for factor in term.factors for source in factor):
            yield Miss(out, base, reason, 1)


def _own_streams(terms: tuple[Term, ...], out: Value, streams: Views) -> Iterator[tuple[Value, StreamsView]]:
    """The streams among the factors of terms that are not summed, in each way that they may be held."""
    factors = (factor for term in terms if not term.summed and len(term.factors) <= 2 for factor in term.factors)
    bases = dict.fromkeys(source.base for factor in factors for source in exact(factor))
    for x in bases:
        view = streams(x) if x.numel == out.numel else None
        if view is not None:
            axes = [Axis(size, 0, stride, 0, False) for size, stride in (*view.tokens, *view.channel)]
            ways = dict.fromkeys((view, *(way for _, _, way in streams_in(axes, x, view.stream))))
            yield from ((x, way) for way in sorted(ways, key=lambda way: way.holds_tokens))


def _written_with(
    reader: Reader,
    terms: tuple[Term, ...],
    out: Value,
    x: Value,
    streams: StreamsView,
    written: StreamsView,
    mixes: tuple[Mix, ...],
) -> Iterator[Combine | Miss]:
    """The readings of the other terms as what is written, and as more of the same streams."""
    gate = mixes[0].res
    if not terms:
        last = seen(out)
        reason = f"mixes the streams without adding a product with h_post in the same sum{_goes_into(last)}"
        if not last.users:
            reason = "mixes the streams and adds nothing to them"
        yield Miss(out, gate, reason, 2)
        return
    for i, term in enumerate(terms):
        more = _again(term, out, x, streams, written)
        if more is None and len(terms) > 1:  # the last one is what is written, even if it is made of the streams
            more = _to_all(reader, term, out, x, streams, written)
        if more is not None:
            yield from _written_with(reader, terms[:i] + terms[i + 1 :], out, x, streams, written, (*mixes, more))
            return
    if len(terms) > 2:
        reason = f"adds {len(terms)} products to the mixed streams; the operator adds h_post f and h_post bias"
    else:
        reason = f"adds to the mixed streams something other than h_post times one tensor [..., C]{_made_by(terms)}"
        for outer, bias in outer_sums(terms, out, written):
            if outer.f.numel == x.numel // streams.n:
                yield Combine(out, outer, mixes, x, streams, written, bias)
            reason = "adds something to the mixed streams that does not have the width of one stream"
    others = [term for term in terms if _is_other_mixture(term, out, x)] if mixes[0].is_matrix else []
    if others:
        reason = (
            "mixes two tensors by a matrix each, and the operator mixes one; if one was made of the other by a matrix, "
            "multiply the matrices before they mix"
        )
    yield Miss(out, gate, reason, ADDED)
    for term in terms if len(terms) > 1 else ():
        for outer, bias in outer_sums((term,), out, written):
            if outer.f.numel == x.numel // streams.n:
                yield Almost(out, gate, reason, ADDED, Combine(out, outer, mixes, x, streams, written, bias))


def _is_other_mixture(term: Term, out: Value, x: Value) -> bool:
    """Whether a term is another tensor than the streams, mixed by a matrix."""
    found = contractions(term, out, parts=True) if term.summed else ()
    return any(isinstance(read, tuple) and c.right is not x for c in found for read in _read_mix(c))


def _again(term: Term, out: Value, x: Value, streams: StreamsView, written: StreamsView) -> Mix | None:
    """A term as the same streams times another matrix."""
    if not term.summed:
        alone = _alone(term, out, x, streams)
        return alone[0] if alone is not None and alone[1] == written else None
    for c in contractions(term, out, parts=True):
        for found in _read_mix(c) if c.right is x else ():
            if isinstance(found, tuple) and found[1:] == (streams, written):
                return found[0]
    return None


def _to_all(reader: Reader, term: Term, out: Value, x: Value, streams: StreamsView, written: StreamsView) -> Mix | None:
    """A term as a sum over the same streams that all of them get: all columns of its matrix are alike."""
    for whole in (term, *reader.sums_taken_alone(term)):
        for c in (*contractions(whole, out, parts=True), *_ungated(whole, out, x)) if whole.summed else ():
            for found in _read_mix(c, alike=True) if c.right is x else ():
                if isinstance(found, tuple) and found[1:] == (streams, written):
                    return replace(found[0], res=None) if c.left is x else found[0]
    return None


def _ungated(term: Term, out: Value, x: Value) -> Iterator[Contraction]:
    """A sum over the streams alone as if there were a gate, of which no element is read."""
    for c in without_another(term, out, term.factors[0]) if len(term.factors) == 1 else ():
        if c.right is x:
            yield c


def _alone(term: Term, out: Value, x: Value, view: StreamsView) -> tuple[Mix, StreamsView] | None:
    """A term as each of the streams by itself, times a number or a gate; and where they are written."""
    if term.summed or len(term.factors) > 2:
        return None
    if len(term.factors) == 1:
        layout = next((s.layout for s in exact(term.factors[0]) if s.base is x), None)
        written = _written(layout, out, view) if layout is not None else None
        return written and (Mix(None, Layout(((), ())), term.const), written)
    for c in contractions(term, out, parts=True):
        if c.right is not x:
            continue
        try:
            layout = Layout(tuple(tidy(dim) for dim in _translated(c, view)))
            written = _written(_layout_of(c, out), out, view)
        except NotALayout:
            continue
        token, stream, channel = layout.dims
        if written is not None and not any(stride for _, stride in channel):
            return Mix(c.left, Layout((token, stream), c.left_offset), c.const), written
    return None


def _translated(c: Contraction, view: StreamsView) -> Iterator[tuple[tuple[int, int], ...]]:
    """The gate's steps along the tokens, streams and channels of what it multiplies."""
    steps = Steps([(a.size, a.right, a.left) for a in c.axes])
    return (steps.translate(flat(dim)) for dim in (view.tokens, (view.stream,), view.channel))


def _layout_of(c: Contraction, out: Value) -> Layout:
    """The right operand laid out over the result, element by element."""
    steps = Steps([(a.size, a.out, a.right) for a in c.axes])
    return Layout(tuple(steps.translate(dim) for dim in Layout.contiguous(out.shape).dims))


def _goes_into(value: Value) -> str:
    """The operations that use a value, to add to a reason."""
    names = dict.fromkeys(spelled(op.node) for op in value.users)
    return f" (it goes into {', '.join(names)})" if names else ""


def _made_by(terms: tuple[Term, ...]) -> str:
    """The operations that made the factors of terms, to add to a reason."""
    ops = [factor[-1].base.op for term in terms for factor in term.factors]
    names = dict.fromkeys(spelled(op.node) for op in ops if op is not None)
    return f" (made by {' and '.join(names)})" if names else ""


def _written(layout: Layout, out: Value, view: StreamsView) -> StreamsView | None:
    """Where the elements of the streams, read through `view`, are in `out`, of which `layout` gives the source."""
    rows = [(size, own, other) for _, size, (other, own) in refine(Layout.contiguous(out.shape), layout)]
    try:
        steps = Steps(rows)
        stream = steps.translate((view.stream,)) if view.n > 1 else ((1, 0),)
        if len(stream) != 1:
            return None
        return StreamsView(tidy(steps.translate(view.tokens)), stream[0], tidy(steps.translate(view.channel)))
    except NotALayout:
        return None


def _read_mix(c: Contraction, *, alike: bool = False) -> Iterator[tuple[Mix, StreamsView, StreamsView] | Miss]:
    """The matrix, and where the streams are read and written; with `alike`, its rows or columns may be equal."""
    summed = joined(by_stride([a for a in c.axes if a.summed], "right"))
    stream = joined(by_stride([a for a in c.axes if not a.summed and a.right == 0], "out"))
    if len(summed) != 1 or len(stream) != 1 or summed[0].size != stream[0].size:
        yield Miss(c.out, c.left, "does not sum over the streams that it reads", 1)
        return
    n = summed[0].size
    if c.right.numel != c.out.numel:
        yield Miss(c.out, c.left, "multiplies it by a tensor of another size than the streams that it writes", 1)
        return
    gated = (summed[0].left and stream[0].left) or alike
    squares = c.left is c.right and any(a.left for a in c.axes)
    if not is_stream_count(n, c.right) or not summed[0].right or not gated or squares:
        yield Miss(c.out, c.left, f"does not multiply streams by a matrix of {n} times {n} numbers", 1)
        return
    shared = [a for a in c.axes if not a.summed and a.right != 0]
    found = False
    for token, channel, streams in streams_in(shared, c.right, (n, summed[0].right)):
        if streams.holds_tokens or not found:
            found = True
            written = StreamsView(steps_in(token, "out"), (n, stream[0].out), steps_in(channel, "out"))
            dims = (steps_in(token, "left"), ((n, summed[0].left),), ((n, stream[0].left),))
            yield Mix(c.left, Layout(dims, c.left_offset), c.const), streams, written
    if not found:
        reason = "multiplies it by a part of the streams, or by streams whose channels are not adjacent"
        yield Miss(c.out, c.left, reason, 2)
