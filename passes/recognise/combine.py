"""The combine: x'[o] = post[o] * f + sum_i res[i, o] * x[i], or with the residual added as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mhc_compile.passes.recognise.aggregate import is_innermost, is_stream_count
from mhc_compile.passes.recognise.contraction import (
    Axis,
    Contraction,
    StreamsView,
    by_stride,
    contractions,
    exact,
    joined,
)
from mhc_compile.passes.recognise.layout import Layout, NotALayout, Steps, merged, origin, refine, tidy, tiles
from mhc_compile.passes.recognise.reader import Reader
from mhc_compile.passes.recognise.terms import Term
from mhc_compile.passes.shadow import Op, Value, spelled


@dataclass(frozen=True)
class Mix:
    """const * sum_i res[i, o] * x[i]; res_layout is indexed [token, i, o], out_view says how it is written."""

    res: Value
    res_layout: Layout
    x: Value
    streams: StreamsView
    out_view: StreamsView
    const: float

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
    out_view: StreamsView
    const: float


@dataclass(frozen=True)
class Combine:
    """out = post f + post layer_bias + mix; mix None: the streams x as they are."""

    out: Value
    outer: Outer
    mix: Mix | None
    x: Value
    streams: StreamsView
    layer_bias: Value | None

    @property
    def op(self) -> Op:
        assert self.out.op is not None
        return self.out.op


def combines(reader: Reader, out: Value) -> Iterator[Combine]:
    """The readings of a value as the combine with a mixed residual."""
    terms = reader.terms(out)
    if not 2 <= len(terms) <= 3:
        return
    for i, term in enumerate(terms):
        if not term.summed:
            continue
        others = terms[:i] + terms[i + 1 :]
        for c in contractions(term, out):
            mix = _read_mix(c)
            if mix is None:
                continue
            for outer, bias in _outer_sums(others, out, mix.out_view):
                if outer.f.numel == mix.x.numel // mix.streams.n:
                    yield Combine(out, outer, mix, mix.x, mix.streams, bias)


def residuals(reader: Reader, out: Value, streams: dict[Value, StreamsView]) -> Iterator[Combine]:
    """The readings of a value as outer + x, for forms that do not mix the residual: x is one of `streams`."""
    terms = reader.terms(out)
    if not 2 <= len(terms) <= 3:
        return
    for i, term in enumerate(terms):
        if term.summed or len(term.factors) != 1 or term.const != 1.0:
            continue
        for source in exact(term.factors[0]):
            view = streams.get(source.base)
            written = view and _written(source.layout, out, view)
            if view is None or written is None or source.base.numel != out.numel:
                continue
            for outer, bias in _outer_sums(terms[:i] + terms[i + 1 :], out, written):
                yield Combine(out, outer, None, source.base, view, bias)


def why_none(reader: Reader, out: Value, gate: Value, *, mixes: bool) -> str:
    """Why a value made with a gate, h_res if `mixes` and h_post otherwise, is not read as a combine."""
    terms = reader.terms(out)
    own = next((t for t in terms if any(s.base is gate for factor in t.factors for s in factor)), None)
    if own is None or len(own.factors) != 2:
        return "does not multiply it by one tensor"
    others = tuple(term for term in terms if term is not own)
    if mixes:
        if not own.summed:
            return "does not sum over the streams that it reads"
        readings = [c for c in contractions(own, out) if c.left is gate]
        if len(gate.shape) == 2:
            return "has one matrix for all tokens; the operator takes one for each, such as h_res.expand(*tokens, n, n)"
        mix = next((mix for mix in map(_read_mix, readings) if mix is not None), None)
        if mix is None:
            if any(c.right.numel != out.numel for c in readings):
                return "multiplies it by what has not as many elements as the streams that it writes"
            return "multiplies it by streams whose channels do not lie side by side in memory, or not all of them"
        if not others:
            return f"mixes the streams, but what h_post adds is not added to that in one sum{_goes_into(out)}"
        if len(others) > 2:
            return f"adds {len(others)} products to the mixed streams; the operator adds h_post f and h_post bias"
        if not any(True for _ in _outer_sums(others, out, mix.out_view)):
            return f"adds something else to the mixed streams than h_post times one tensor [..., C]{_made_by(others)}"
        return "adds to the mixed streams what is not of one token's width"
    if not others:
        return f"writes h_post f without adding the streams to that in one sum{_goes_into(out)}"
    return f"adds to h_post f what was not recognised as streams, mixed or as they are{_made_by(others)}"


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
            apart = _without_bias(outer)
            if apart is not None:
                yield apart
            yield outer, None
    elif len(terms) == 2:
        for first, second in (terms, terms[::-1]):
            for outer in _outers(first, out, written):
                for other in _outers(second, out, written, bias=True):
                    if (other.post, other.post_layout, other.const) == (outer.post, outer.post_layout, outer.const):
                        yield outer, other.f


def _without_bias(outer: Outer) -> tuple[Outer, Value] | None:
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
    channels = outer.out_view.channels
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
    for c in contractions(term, out):
        outer = _read_outer(c, written, bias=bias)
        if outer is not None:
            yield outer


def _read_mix(c: Contraction) -> Mix | None:
    summed = joined(by_stride([a for a in c.axes if a.summed], "right"))
    stream = [a for a in c.axes if not a.summed and a.right == 0]
    channel = joined(by_stride([a for a in c.axes if not a.summed and a.left == 0], "right"))
    token = joined(by_stride([a for a in c.axes if not a.summed and a.left != 0 and a.right != 0], "right"))
    if len(summed) != 1 or len(stream) != 1 or summed[0].size != stream[0].size:
        return None
    n = summed[0].size
    if not is_stream_count(n) or c.left is c.right:
        return None
    if not all((summed[0].left, summed[0].right, stream[0].left)) or any(a.right == 0 for a in channel):
        return None
    tokens = tidy([(a.size, a.right) for a in token])
    streams = StreamsView(tokens, (n, summed[0].right), tidy([(a.size, a.right) for a in channel]))
    written = _view(token, (n, stream[0].out), channel)
    res = Layout((tidy([(a.size, a.left) for a in token]), ((n, summed[0].left),), ((n, stream[0].left),)))
    if not is_innermost(streams, c.right) or not tiles([f for dim in res.dims for f in dim], c.left.numel):
        return None
    if c.right.numel != c.out.numel:
        return None
    return Mix(c.left, res, c.right, streams, written, c.const)


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
    if not all(s for _, s in post["token"]) or not all(s for _, s in f["channel"]):
        return None
    if any(s for _, s in f["token"]) if bias else not all(s for _, s in f["token"]):
        return None
    if bias and (len(tidy(f["channel"])) > 1 or (f["channel"] and tidy(f["channel"])[0][1] != 1)):
        return None
    post_layout = Layout((tidy(post["token"]), tidy(post["stream"])))
    f_layout = Layout((() if bias else tidy(f["token"]), tidy(f["channel"])))
    return Outer(c.left, post_layout, c.right, f_layout, written, c.const)


def _flat_rows(dim: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    return tuple(step for step in dim if step[0] > 1)


def _over(c: Contraction, places: dict[str, tuple[tuple[int, int], ...]], side: str) -> Layout:
    """One operand laid out over [token, stream, channel], from how both are written into the result."""
    steps = Steps([(a.size, a.out, getattr(a, side)) for a in c.axes])
    return Layout(tuple(tidy(steps.translate(_flat_rows(dim))) for dim in places.values()))
