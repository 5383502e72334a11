"""What a write adds to the streams: post[o] * (f + layer_bias), where post may be 1 for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mhc_compile.passes.recognise.contraction import (
    Contraction,
    StreamsView,
    by_stride,
    contractions,
    is_stream_count,
    joined,
    steps_in,
    without_another,
)
from mhc_compile.passes.recognise.layout import Dim, Layout, NotALayout, Steps, is_shown, merged, origin, refine, tidy
from mhc_compile.passes.recognise.sums_of_products import Term
from mhc_compile.passes.shadow import Value


@dataclass(frozen=True)
class Outer:
    """const * post[o] * f, with layouts [token, o] and [token, channel]; for a bias f has no tokens.

    Where post is None, every stream gets the same const * f. If post is a matrix, it multiplies n times the same f, and
    columns says along which steps its columns are added.
    """

    post: Value | None
    post_layout: Layout
    f: Value
    f_layout: Layout
    const: float
    columns: Dim = ()


def outer_sums(terms: tuple[Term, ...], out: Value, written: StreamsView) -> Iterator[tuple[Outer, Value | None]]:
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
                    if replace(other, f=outer.f, f_layout=outer.f_layout) == outer:
                        yield outer, other.f


def _without_bias(outer: Outer, written: StreamsView) -> tuple[Outer, Value] | None:
    """post (f + layer_bias) with the layer's bias apart, if f is such a sum."""
    op = outer.f.op
    if (
        op is None
        or op.name != "add"
        or op.arg(2, "alpha", 1) != 1
        or not all(isinstance(a, Value) for a in op.args[:2])
        or len(outer.f_layout.dims[1]) > 1
        or (outer.f_layout.dims[1] and outer.f_layout.dims[1][0][1] != 1)
    ):
        return None
    channels = written.channels
    for f, bias in (op.args[:2], op.args[1::-1]):
        vector, layout = origin(bias)
        wide, order = origin(f)
        # Inside one node, the sum is a value of the program.
        shown = is_shown(wide) and is_shown(vector)
        sized = shown and bias.shape[-1:] == (vector.numel,) == (channels,) and channels < wide.numel == outer.f.numel
        if sized and layout.is_identity() and order.is_identity():
            return replace(outer, f=wide), vector
    return None


def _outers(term: Term, out: Value, written: StreamsView, *, bias: bool = False) -> Iterator[Outer]:
    alone = len(term.factors) == 1
    if term.summed and alone:
        return
    for c in without_another(term, out, term.factors[0]) if alone else contractions(term, out, parts=True):
        outer = _read_outer(c, written, alone=alone, bias=bias)
        if outer is not None:
            yield outer


def _read_outer(c: Contraction, written: StreamsView, *, alone: bool, bias: bool) -> Outer | None:
    """post times a tensor that has a row for each token or, for a bias, one row for all."""
    summed = [a for a in c.axes if a.summed]
    if not all(a.left and not a.right and is_stream_count(a.size) for a in summed):
        return None
    if summed and (written.channels == 1 or written.channels_first):  # a linear layer multiplies channels by a matrix
        return None
    places = {"token": written.tokens, "stream": (written.stream,), "channel": written.channel}
    post: dict[str, list[tuple[int, int]]] = {name: [] for name in places}
    f: dict[str, list[tuple[int, int]]] = {name: [] for name in places}
    try:
        rows = merged(
            refine(
                Layout(tuple(flat(places[name]) for name in places)),
                *(_over(c, places, side) for side in ("left", "right")),
            )
        )
    except NotALayout:
        return None
    names = list(places)
    for d, size, (_, left, right) in rows:
        post[names[d]].append((size, left))
        f[names[d]].append((size, right))
    if any(s for _, s in post["channel"]) or any(s for _, s in f["stream"]):
        return None
    if not alone and not all(s for _, s in post["stream"]):
        return None
    if not all(s for _, s in f["channel"]):
        return None
    if any(s for _, s in f["token"]) if bias else not all(s for _, s in f["token"]):
        return None
    if bias and (len(tidy(f["channel"])) > 1 or (f["channel"] and tidy(f["channel"])[0][1] != 1)):
        return None
    post_layout = Layout((tidy(post["token"]), tidy(post["stream"])), c.left_offset)
    f_layout = Layout((() if bias else tidy(f["token"]), tidy(f["channel"])))
    columns = steps_in(joined(by_stride(summed, "left")), "left")
    return Outer(None if alone else c.left, post_layout, c.right, f_layout, c.const, columns)


def flat(dim: Dim) -> Dim:
    """A dimension without its factors of size 1."""
    return tuple(step for step in dim if step[0] > 1)


def _over(c: Contraction, places: dict[str, Dim], side: str) -> Layout:
    """One operand laid out over [token, stream, channel], from how both are written into the result."""
    steps = Steps([(a.size, a.out, getattr(a, side)) for a in c.axes if not a.summed])
    return Layout(tuple(tidy(steps.translate(flat(dim))) for dim in places.values()))
