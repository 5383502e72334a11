"""The projection matmul: h = flat(x) @ phi^T, with what normalises x in front of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import isqrt, prod
from typing import Any

import torch

from mhc_compile import compat
from mhc_compile.passes.recognise.concatenation import put_together
from mhc_compile.passes.recognise.contraction import MAX_ROWS, Contraction, by_stride, contractions, exact, steps_in
from mhc_compile.passes.recognise.layout import (
    Dim,
    Layout,
    NotALayout,
    Steps,
    is_movement,
    merged,
    origin,
    refine,
    tidy,
    tiles,
)
from mhc_compile.passes.recognise.reader import Reader
from mhc_compile.passes.shadow import Op, Value

# A norm, its weight, and what the model does to its streams before.
_MAX_SCALINGS = 4
# What is made of logits, before a gate is no longer said to come from them.
_MOST_STEPS = 200


@dataclass(frozen=True)
class Scaling:
    """A factor that x is multiplied or divided by before the matmul: its layout is over the elements of x."""

    factor: Value
    divides: bool
    layout: Layout


@dataclass(frozen=True)
class Part:
    """Rows of a projection that come from one phi.

    row gives phi's steps from row to row, inner, as (size, stride in x, stride in phi), those along the contraction.
    """

    phi: Value
    rows: int
    row: Dim
    inner: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Projection:
    """h[token, k] = sum over the `width` elements of a token of x * phi[k].

    out is the result, tokens (major to minor as in x) before rows. tokens are the steps from token to token in x.
    Several parts are projections of one x put together by `cat`. scalings lie between x and the matmul, as does const,
    which is not among what h says above. addend is a linear bias. turned: out has the rows before the tokens.
    """

    out: Value
    x: Value
    tokens_at: Dim
    rows: int
    width: int
    parts: tuple[Part, ...]
    scalings: tuple[Scaling, ...]
    addend: Value | None = None
    const: float = 1.0
    turned: bool = False

    @property
    def tokens(self) -> int:
        return self.x.numel // self.width


def streams_by_rows(projection: Projection) -> int | None:
    """The number of streams n whose h_pre, h_post and h_res have n*n + 2*n rows together, if there is one."""
    n = isqrt(projection.rows + 1) - 1
    return n if n > 1 and n * n + 2 * n == projection.rows and projection.width % n == 0 else None


def projections(reader: Reader, op: Op, before: dict[Value, list[Projection]]) -> list[Projection]:
    """The readings of an ATen call's result as the projection of the streams, from the operand backwards.

    x may be the operand itself, or what it was before a multiplication, before two, ...: a model may well scale
    its streams long before it mixes them, so which one is meant is for the caller to find out. `before` holds the
    readings of earlier values, of which `op` may put several together.
    """
    if op.name in ("cat", "slice_scatter"):
        return list(_put_together(op, before))
    terms = reader.terms(op.out)
    products = [t for t in terms if len(t.factors) == 2 and t.summed]
    others = [t for t in terms if t not in products]
    if len(products) != 1 or len(others) > 1 or products[0].const != 1.0:
        return []
    addend: Value | None = None
    if others:
        if op.name not in ("addmm", "baddbmm"):
            return []
        addend = op.args[0]
    found: list[Projection] = []
    for contraction in contractions(products[0], op.out):
        found += _readings(reader, contraction, addend)
        if found and min(found[0].tokens, found[0].rows) > 1:  # one token's streams are a vector, as one row's phi is
            break
    return found


def too_many_rows(reader: Reader, value: Value, of_streams: Callable[[Value], bool]) -> str:
    """What a value comes from if that would be a projection with fewer rows; empty if it is none.

    of_streams: whether something is computed from the streams. Rows are not: tokens are.
    """
    for _ in range(_MOST_STEPS):
        products = [t for t in reader.terms(value) if len(t.factors) == 2 and t.summed]
        for product in products:
            for c in contractions(product, value):
                rows = prod(a.size for a in c.axes if a.left == 0 and a.right != 0 and not a.summed)
                whole = c.right.numel == rows * prod(a.size for a in c.axes if a.summed)
                if rows > MAX_ROWS and whole and not of_streams(c.right):
                    return f"a product with {rows:,} rows, and the operators take at most {MAX_ROWS:,}"
        if value.op is None or not value.op.sources or (products and not is_movement(value.op)):
            break
        value = max(value.op.sources, key=lambda source: source.numel)
    return ""


def turned_projections(reader: Reader, out: Value) -> Iterator[Projection]:
    """The readings of a value as a projection whose rows come before its tokens.

    Any product of two matrices is one, of either by the other: only what is known to be streams is worth the look.
    """
    terms = reader.terms(out)
    if len(terms) == 1 and len(terms[0].factors) == 2 and terms[0].summed and terms[0].const == 1.0:
        for contraction in contractions(terms[0], out):
            for reading in _readings(reader, contraction, None, turned=True):
                if min(reading.tokens, reading.rows) > 1:
                    yield reading


def _readings(reader: Reader, c: Contraction, addend: Value | None, *, turned: bool = False) -> Iterator[Projection]:
    row_axes = by_stride([a for a in c.axes if a.left == 0 and a.right != 0 and not a.summed], "out")
    token_axes = by_stride([a for a in c.axes if a.right == 0 and a.left != 0 and not a.summed], "left")
    inner = [a for a in c.axes if a.summed]
    rows = width = 1
    for axis in row_axes:
        rows *= axis.size
    for axis in inner:
        width *= axis.size
    if len(row_axes) + len(token_axes) + len(inner) != len(c.axes) or not 1 <= rows <= MAX_ROWS:
        return
    if width <= 1 or any(a.left == 0 or a.right == 0 for a in inner) or c.right.numel != rows * width:
        return
    if c.left is c.right:  # squares
        return
    tokens_of_all = c.left.numel // width
    inmost = tokens_of_all if turned else 1
    if not tiles([(a.size, a.out // inmost) for a in row_axes], rows) or any(a.out % inmost for a in row_axes):
        return
    after = 1 if turned else rows
    for axis in reversed(token_axes):
        if axis.out != after:
            return
        after *= axis.size
    part = Part(
        c.right,
        rows,
        steps_in(row_axes, "right"),
        tuple((a.size, a.left, a.right) for a in by_stride(inner, "left")),
    )
    tokens = steps_in(token_axes, "left")
    pending = [Projection(c.out, c.left, tokens, rows, width, (part,), (), addend, turned=turned)]
    while pending:
        reading = pending.pop(0)
        yield reading
        if len(reading.scalings) < _MAX_SCALINGS:
            pending += further(reader, reading)


def further(reader: Reader, reading: Projection) -> Iterator[Projection]:
    """The same projection with x as it was before the multiplication that made it."""
    value, op = reading.x, reading.x.op
    if op is None:
        return
    divides = op.name == "div"
    for wide, factor in _wide_and_factor(op, value):
        whole = next((source for source in exact(reader.views(wide)) if source.base.numel == value.numel), None)
        if whole is None:
            continue
        base, layout = whole.base, whole.layout
        try:
            layout = layout.expand(value.shape)
            steps = Steps.of(layout)
            tokens = tidy(steps.translate(reading.tokens_at))
            (part,) = reading.parts
            inner = tuple(step for axis in part.inner for step in _retraced(axis, steps))
            added: tuple[Scaling, ...] = ()
            if isinstance(factor, Value):
                seen = _seen_from(base, layout, Layout.contiguous(factor.shape).expand(value.shape))
                added = (Scaling(factor, divides, seen),)
            scalings = tuple(
                Scaling(s.factor, s.divides, _seen_from(base, layout, s.layout.reshape(value.shape)))
                for s in reading.scalings
            )
        except NotALayout:
            continue
        const = 1.0 if isinstance(factor, Value) else 1.0 / factor if divides else factor
        yield replace(
            reading,
            x=base,
            tokens_at=tokens,
            parts=(replace(part, inner=inner),),
            scalings=(*scalings, *added),
            const=reading.const * const,
        )


def _retraced(axis: tuple[int, int, int], steps: Steps) -> list[tuple[int, int, int]]:
    size, own, phi = axis
    parts = steps.translate(((size, own),))
    found, minor = [], 1
    for count, stride in reversed(parts):
        found.append((count, stride, phi * minor))
        minor *= count
    return found[::-1]


def _seen_from(base: Value, layout: Layout, over: Layout) -> Layout:
    """A layout over a view of `base`, as one over the elements of base: a single dimension."""
    rows = sorted(((o[0], size, o[1]) for _, size, o in refine(layout, over)), reverse=True)
    dim = tidy([(size, stride) for _, size, stride in rows])
    if not tiles([(size, own) for own, size, _ in rows], base.numel):
        raise NotALayout
    return Layout((dim,), over.offset)


def token_factor(scaling: Scaling, projection: Projection) -> bool:
    """Whether the factor is one number a token, and each token's own."""
    return _along(scaling, projection, inner=False)


def weight_axes(scaling: Scaling, projection: Projection) -> tuple[tuple[int, int, int], ...] | None:
    """The affine weight's steps as (size, stride in x, stride in the weight), if it is the same for all tokens.

    It may have a number for each element of a token, each channel, each stream, or one for all.
    """
    base, layout = origin(scaling.factor)
    if scaling.divides or base.numel > projection.width or not _along(scaling, projection, inner=True):
        return None
    try:
        whole = scaling.layout.through(layout)
        rows = refine(Layout.contiguous((projection.x.numel,)), whole)
        steps = Steps([(size, own, other) for _, size, (own, other) in rows])
        found = [part for axis in projection.parts[0].inner for part in _followed(axis[0], axis[1], steps)]
    except NotALayout:
        return None
    return _even(found) if tiles([(size, other) for size, _, other in found if other], base.numel) else None


def _followed(size: int, own: int, steps: Steps) -> list[tuple[int, int, int]]:
    """A step through x as steps (size, stride in x, stride in what goes with it)."""
    found, minor = [], own
    for count, other in reversed(steps.translate(((size, own),))):
        found.append((count, minor, other))
        minor *= count
    return found[::-1]


def _even(axes: list[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Steps with neighbours that make one even step joined."""
    found: list[tuple[int, int, int]] = []
    for size, own, other in axes:
        if found and found[-1][1:] == (size * own, size * other):
            found[-1] = (found[-1][0] * size, own, other)
        else:
            found.append((size, own, other))
    return tuple(found)


def _along(scaling: Scaling, projection: Projection, *, inner: bool) -> bool:
    """Whether the factor follows the tokens, in order, or else the elements within them; and nothing besides."""
    try:
        steps = Steps([(s, own, other) for _, s, (own, other) in _against(scaling, projection)])
        tokens = tidy(steps.translate(projection.tokens_at))
        within = [stride for size, own, _ in projection.parts[0].inner for _, stride in steps.translate(((size, own),))]
    except NotALayout:
        return False
    if inner:
        return not any(stride for _, stride in tokens)
    return not any(within) and tokens == tidy(((projection.tokens, 1),)) and scaling.layout.offset == 0


def _against(scaling: Scaling, projection: Projection) -> list[tuple[int, int, tuple[int, ...]]]:
    return merged(refine(Layout.contiguous((projection.x.numel,)), scaling.layout))


def _put_together(op: Op, before: dict[Value, list[Projection]]) -> Iterator[Projection]:
    """Projections of one x whose results `op` concatenates, as one projection."""
    together = put_together(op)
    if together is None or together.stacked or together.axis != len(op.out.shape) - 1:
        return
    pieces = []
    for piece in together.pieces:
        base, layout = origin(piece)
        if base not in before or not layout.is_identity() or piece.shape[-1] != before[base][0].rows:
            return
        pieces.append(before[base])
    for first in pieces[0]:
        same = [next((p for p in piece if _same_operand(p, first)), None) for piece in pieces]
        if any(p is None or p.addend is not None for p in same):
            continue
        parts = tuple(part for p in same if p is not None for part in p.parts)
        rows = sum(part.rows for part in parts)
        if rows <= MAX_ROWS:
            yield replace(first, out=op.out, rows=rows, parts=parts)


def _same_operand(one: Projection, other: Projection) -> bool:
    return (one.x, one.tokens_at, one.width, one.scalings, one.const) == (
        other.x, other.tokens_at, other.width, other.scalings, other.const,
    )  # fmt: skip


def _wide_and_factor(op: Op, value: Value) -> Iterator[tuple[Value, Value | float]]:
    """The operand of a product that has all its elements, and the other; with one token a weight has as many."""
    if op.name not in ("mul", "div") or op.kwargs:
        return
    left, right = op.args[:2]
    if not isinstance(right, Value):
        number = constant(right)
        if number and isinstance(left, Value):
            yield left, number
        return
    if left is right or not isinstance(left, Value):
        return
    for wide, other in ((left, _unexpanded(right)), (right, _unexpanded(left))):
        fewer = other.numel < value.numel or len(other.shape) < len(value.shape)
        if wide.numel == value.numel and fewer and (op.name == "mul" or wide is left):
            yield wide, other


def constant(leaf: Any) -> float | None:
    """A number of the program."""
    if isinstance(leaf, torch.SymFloat):
        return compat.float_watch.value(leaf)
    return float(leaf) if isinstance(leaf, (int, float)) and not isinstance(leaf, bool) else None


def _unexpanded(value: Value) -> Value:
    """What an explicit broadcast repeats; the operators broadcast it themselves."""
    while value.op is not None and value.op.name == "expand":
        value = next(value.op.inputs())
    return value
