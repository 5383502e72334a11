"""Writing: x'[o] = post[o] * f + sum_i res[i, o] * x[i], where the matrix may be a sum of matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from mhc_compile.passes.recognise.contraction import (
    Axis,
    Contraction,
    StreamsView,
    by_stride,
    contractions,
    exact,
    is_innermost,
    is_stream_count,
    joined,
    split,
)
from mhc_compile.passes.recognise.layout import Layout, NotALayout, Steps, merged, origin, refine, tidy
from mhc_compile.passes.recognise.misses import Miss
from mhc_compile.passes.recognise.reader import Reader
from mhc_compile.passes.recognise.terms import Term
from mhc_compile.passes.shadow import Op, Value, spelled


@dataclass(frozen=True)
class Mix:
    """const * the streams times a matrix.

    The matrix is res with a layout indexed [token, i, o], or the diagonal one of res with a layout indexed [token, o],
    or the identity where res is None. A gate may be a part of a tensor, and one for several tokens.
    """

    res: Value | None
    res_layout: Layout
    const: float

    @property
    def is_matrix(self) -> bool:
        return len(self.res_layout.dims) == 3

    @property
    def is_transposed(self) -> bool:
        """Whether the matrix is applied as its transpose, as a plain matmul would not."""
        _, read, written = self.res_layout.dims
        return bool(read and written and read[0][1] > written[0][1])


@dataclass(frozen=True)
class Outer:
    """const * post[o] * f, with layouts [token, o] and [token, channel]; for a bias f has no tokens."""

    post: Value
    post_layout: Layout
    f: Value
    f_layout: Layout
    const: float


@dataclass(frozen=True)
class Combine:
    """out = post f + post layer_bias + the sum of the mixes, all of x; out_view says where the streams are written."""

    out: Value
    outer: Outer
    mixes: tuple[Mix, ...]
    x: Value
    streams: StreamsView
    out_view: StreamsView
    layer_bias: Value | None

    @property
    def op(self) -> Op:
        assert self.out.op is not None
        return self.out.op

    @property
    def mix(self) -> Mix | None:
        """What is mixed with a matrix of the program, if anything is."""
        return next((mix for mix in self.mixes if mix.is_matrix), None)

    @property
    def is_plain(self) -> bool:
        """Whether the streams are added as they are."""
        return len(self.mixes) == 1 and self.mixes[0].res is None and self.mixes[0].const == 1.0

    def gates(self) -> Iterator[Value]:
        yield self.outer.post
        yield from (mix.res for mix in self.mixes if mix.res is not None)


# Where the streams lie in a tensor, if it is known to have any.
Views = Callable[[Value], StreamsView | None]

# Products added to the mixed streams: those of f and of its bias; and matrices that are added.
_MAX_TERMS = 5


def combines(reader: Reader, out: Value) -> Iterator[Combine | Miss]:
    """The readings of a value as streams that are mixed by a matrix, and written; and where each of the others ends."""
    terms = reader.terms(out)
    if len(terms) > _MAX_TERMS:
        yield Miss(out, None, f"adds {len(terms)} products; at most {_MAX_TERMS} are followed", 0)
        return
    for i, term in enumerate(terms):
        if not term.summed:
            continue
        for c in contractions(term, out, parts=True):
            found = _read_mix(c)
            if isinstance(found, Miss):
                yield found
            else:
                mix, streams, written = found
                yield from _written_with(terms[:i] + terms[i + 1 :], out, c.right, streams, written, (mix,))


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
                yield from _written_with(terms[:i] + terms[i + 1 :], out, x, view, mix[1], (mix[0],))
                break
    if not found:
        yield from _unmixed(terms, out)


def _unmixed(terms: tuple[Term, ...], out: Value) -> Iterator[Miss]:
    """Products that are written without streams, by each of the values that may be their gates."""
    for term in terms:
        if term.summed or len(term.factors) != 2:
            continue
        others = tuple(other for other in terms if other is not term)
        reason = f"writes h_post f without adding the streams to that in one sum{_goes_into(out)}"
        if others:
            reason = f"adds to h_post f what was not recognised as streams, mixed or as they are{_made_by(others)}"
        for base in dict.fromkeys(source.base for factor in term.factors for source in factor):
            yield Miss(out, base, reason, 1)


def _own_streams(terms: tuple[Term, ...], out: Value, streams: Views) -> Iterator[tuple[Value, StreamsView]]:
    """The streams among the factors of terms that are not summed."""
    factors = (factor for term in terms if not term.summed and len(term.factors) <= 2 for factor in term.factors)
    bases = dict.fromkeys(source.base for factor in factors for source in exact(factor))
    known = ((x, streams(x)) for x in bases if x.numel == out.numel)
    return ((x, view) for x, view in known if view is not None)


def _written_with(
    terms: tuple[Term, ...], out: Value, x: Value, streams: StreamsView, written: StreamsView, mixes: tuple[Mix, ...]
) -> Iterator[Combine | Miss]:
    """The readings of the other terms as what is written, and as more of the same streams."""
    gate = mixes[0].res
    if not terms:
        reason = f"mixes the streams, but what h_post adds is not added to that in one sum{_goes_into(out)}"
        yield Miss(out, gate, reason, 2)
        return
    for i, term in enumerate(terms):
        more = _again(term, out, x, streams, written)
        if more is not None:
            yield from _written_with(terms[:i] + terms[i + 1 :], out, x, streams, written, (*mixes, more))
            return
    if len(terms) > 2:
        reason = f"adds {len(terms)} products to the mixed streams; the operator adds h_post f and h_post bias"
        yield Miss(out, gate, reason, 3)
        return
    reason = f"adds something else to the mixed streams than h_post times one tensor [..., C]{_made_by(terms)}"
    for outer, bias in _outer_sums(terms, out, written):
        if outer.f.numel == x.numel // streams.n:
            yield Combine(out, outer, mixes, x, streams, written, bias)
        reason = "adds to the mixed streams what is not of one token's width"
    yield Miss(out, gate, reason, 3)


def _again(term: Term, out: Value, x: Value, streams: StreamsView, written: StreamsView) -> Mix | None:
    """A term as the same streams times another matrix."""
    if not term.summed:
        alone = _alone(term, out, x, streams)
        return alone[0] if alone is not None and alone[1] == written else None
    for c in contractions(term, out, parts=True):
        found = _read_mix(c) if c.right is x else None
        if isinstance(found, tuple) and found[1:] == (streams, written):
            return found[0]
    return None


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
    return (steps.translate(_flat_rows(dim)) for dim in (view.tokens, (view.stream,), view.channel))


def _layout_of(c: Contraction, out: Value) -> Layout:
    """The right operand laid out over the result, element by element."""
    steps = Steps([(a.size, a.out, a.right) for a in c.axes])
    return Layout(tuple(steps.translate(dim) for dim in Layout.contiguous(out.shape).dims))


def _goes_into(value: Value) -> str:
    """What the program does with a value, to add to a reason."""
    names = dict.fromkeys(spelled(op.node) for op in value.users)
    return f" (it goes into {', '.join(names)})" if names else ""


def _made_by(terms: tuple[Term, ...]) -> str:
    """What made the factors of terms, to add to a reason."""
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


def _outer_sums(terms: tuple[Term, ...], out: Value, written: StreamsView) -> Iterator[tuple[Outer, Value | None]]:
    """The terms as post f, or as post f + post layer_bias, laid out as `written`."""
    if len(terms) == 1:
        for outer in _outers(terms[0], out, written):
            apart = _without_bias(outer, written)
            if apart is not None:
                yield apart
            yield outer, None
    elif len(terms) == 2:
        for first, second in (terms, terms[::-1]):
            for outer in _outers(first, out, written):
                for other in _outers(second, out, written, bias=True):
                    if (other.post, other.post_layout, other.const) == (outer.post, outer.post_layout, outer.const):
                        yield outer, other.f


def _without_bias(outer: Outer, written: StreamsView) -> tuple[Outer, Value] | None:
    """post (f + layer_bias) with the layer's bias apart, if f is such a sum."""
    op = outer.f.op
    if (
        op is None
        or op.name != "add"
        or op.kwargs.get("alpha", 1) != 1
        or not all(isinstance(a, Value) for a in op.args[:2])
        or len(outer.f_layout.dims[1]) > 1
        or (outer.f_layout.dims[1] and outer.f_layout.dims[1][0][1] != 1)
    ):
        return None
    channels = written.channels
    for f, bias in (op.args[:2], op.args[1::-1]):
        vector, layout = origin(bias)
        wide, order = origin(f)
        sized = vector.numel == channels == bias.shape[-1] and vector.numel < wide.numel == outer.f.numel
        if sized and layout.is_identity() and order.is_identity():
            return replace(outer, f=wide), vector
    return None


def _outers(term: Term, out: Value, written: StreamsView, *, bias: bool = False) -> Iterator[Outer]:
    if term.summed:
        return
    for c in contractions(term, out, parts=True):
        outer = _read_outer(c, written, bias=bias)
        if outer is not None:
            yield outer


def _read_mix(c: Contraction) -> tuple[Mix, StreamsView, StreamsView] | Miss:
    """The matrix, and where the streams are read and written."""
    summed = joined(by_stride([a for a in c.axes if a.summed], "right"))
    stream = joined(by_stride([a for a in c.axes if not a.summed and a.right == 0], "out"))
    if len(summed) != 1 or len(stream) != 1 or summed[0].size != stream[0].size:
        return Miss(c.out, c.left, "does not sum over the streams that it reads", 1)
    n = summed[0].size
    if c.right.numel != c.out.numel:
        return Miss(c.out, c.left, "multiplies it by what has not as many elements as the streams that it writes", 1)
    if not is_stream_count(n) or c.left is c.right or not all((summed[0].left, summed[0].right, stream[0].left)):
        return Miss(c.out, c.left, f"does not multiply streams by a matrix of {n} times {n} numbers", 1)
    shared = [a for a in c.axes if not a.summed and a.right != 0]
    for tokens, channels in split(shared, c.right, (n, summed[0].right)):
        token, channel = (joined(by_stride(axes, "right")) for axes in (tokens, channels))
        streams = StreamsView(
            tidy([(a.size, a.right) for a in token]), (n, summed[0].right), tidy([(a.size, a.right) for a in channel])
        )
        if not is_innermost(streams, c.right):
            continue
        written = _view(token, (n, stream[0].out), channel)
        dims = (tidy([(a.size, a.left) for a in token]), ((n, summed[0].left),), ((n, stream[0].left),))
        return Mix(c.left, Layout(dims, c.left_offset), c.const), streams, written
    reason = "multiplies it by streams whose channels do not lie side by side in memory, or not all of them"
    return Miss(c.out, c.left, reason, 2)


def _view(token: list[Axis], stream: tuple[int, int], channel: list[Axis]) -> StreamsView:
    return StreamsView(tidy([(a.size, a.out) for a in token]), stream, tidy([(a.size, a.out) for a in channel]))


def _read_outer(c: Contraction, written: StreamsView, *, bias: bool) -> Outer | None:
    """post times a tensor that has a row for each token or, for a bias, one row for all."""
    if any(a.summed for a in c.axes):
        return None
    places = {"token": written.tokens, "stream": (written.stream,), "channel": written.channel}
    post: dict[str, list[tuple[int, int]]] = {name: [] for name in places}
    f: dict[str, list[tuple[int, int]]] = {name: [] for name in places}
    try:
        rows = merged(
            refine(
                Layout(tuple(_flat_rows(places[name]) for name in places)),
                *(_over(c, places, side) for side in ("left", "right")),
            )
        )
    except NotALayout:
        return None
    names = list(places)
    for d, size, (_, left, right) in rows:
        post[names[d]].append((size, left))
        f[names[d]].append((size, right))
    if any(s for _, s in post["channel"]) or any(s for _, s in f["stream"]) or not all(s for _, s in post["stream"]):
        return None
    if not all(s for _, s in f["channel"]):
        return None
    if any(s for _, s in f["token"]) if bias else not all(s for _, s in f["token"]):
        return None
    if bias and (len(tidy(f["channel"])) > 1 or (f["channel"] and tidy(f["channel"])[0][1] != 1)):
        return None
    post_layout = Layout((tidy(post["token"]), tidy(post["stream"])), c.left_offset)
    f_layout = Layout((() if bias else tidy(f["token"]), tidy(f["channel"])))
    return Outer(c.left, post_layout, c.right, f_layout, c.const)


def _flat_rows(dim: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    return tuple(step for step in dim if step[0] > 1)


def _over(c: Contraction, places: dict[str, tuple[tuple[int, int], ...]], side: str) -> Layout:
    """One operand laid out over [token, stream, channel], from how both are written into the result."""
    steps = Steps([(a.size, a.out, getattr(a, side)) for a in c.axes])
    return Layout(tuple(tidy(steps.translate(_flat_rows(dim))) for dim in places.values()))
