"""From a gate's input back to the projection: l = r * h * scale + bias, in whatever order it is written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mhc_compile.passes import shadow
from mhc_compile.passes.recognise import rms
from mhc_compile.passes.recognise.concatenation import TOGETHER, put_together
from mhc_compile.passes.recognise.layout import (
    Layout,
    NotALayout,
    Part,
    any_view,
    is_movement,
    keeps_order,
    move,
    origin,
    part_of,
    refine,
)
from mhc_compile.passes.recognise.projection import Projection, constant
from mhc_compile.passes.recognise.reader import Reader, moves_elements
from mhc_compile.passes.recognise.region import Region, region
from mhc_compile.passes.recognise.rms import RmsFactor
from mhc_compile.passes.shadow import Op, Value


class Param(NamedTuple):
    """A vector or scalar of the program, spread over the elements of the value it is combined with.

    inverse: it divides.
    """

    base: Value
    layout: Layout
    inverse: bool = False


class Term(NamedTuple):
    """const * the product of params; without params, a number."""

    const: float = 1.0
    params: tuple[Param, ...] = ()

    def times(self, const: float, params: tuple[Param, ...] = ()) -> Term:
        return Term(self.const * const, self.params + params)


class Affine(NamedTuple):
    """A value that is r * h[rows] * scale + the sum of bias, element by element.

    rows is the value's layout over the projection's result; params have layouts over their own bases, both indexed
    by the value. normed holds the RMS factor if it was applied after the projection.
    """

    projection: Projection
    rows: Layout
    scale: Term = Term()
    bias: tuple[Term, ...] = ()
    normed: RmsFactor | None = None

    def map(self, view: Callable[[Layout], Layout]) -> Affine:
        def moved(term: Term) -> Term:
            return Term(term.const, tuple(Param(p.base, view(p.layout), p.inverse) for p in term.params))

        bias = tuple([moved(term) for term in self.bias])
        return self._replace(rows=view(self.rows), scale=moved(self.scale), bias=bias)

    def indices(self, layout: Layout) -> list[int] | None:
        """For each element of a token, in order, its offset in the base of `layout`; None if tokens differ."""
        return token_indices(self.rows, layout, self.projection.rows)


class NotAffine(Exception):
    """Why a value made of an affine one is not affine itself; the message begins with a verb."""


_Spreads = Callable[[Layout], Layout]


@dataclass(frozen=True)
class _Spread:
    """From what an operator reads to its result of this shape, or to one part of that along an axis."""

    shape: tuple[int, ...]
    part: Part | None = None

    def __call__(self, layout: Layout) -> Layout:
        return _kept(layout.expand(self.shape), self.part)


class AffineWalk:
    """Describes values as affine in one projection's result; remembers what it has found.

    cone holds what is computed from the projection, none of which is a scale or bias: with one token, all could be.
    before is the walk of another reading of the same projection, from which regions are taken over.
    """

    def __init__(
        self, projection: Projection, cone: Collection[Value], reader: Reader, before: AffineWalk | None = None
    ) -> None:
        self.projection = projection
        self.cone = cone
        self.reader = reader
        # Why values that are made of affine ones are not.
        self.reasons: dict[Value, str] = {}
        self._seen: dict[tuple[Value, Part | None], Affine | None] = {}
        self._factors: dict[tuple[Value, bool], RmsFactor | str | None] = {}
        self._affine = self._find_affine()
        # A region depends on nothing but which values are affine, where it begins.
        same = before is not None and before._affine == self._affine
        self._regions: dict[Value, Region | None] = before._regions if before is not None and same else {}

    def describe(self, value: Value, part: Part | None = None) -> Affine | None:
        """The value, or a part of it: what is put together from several slices may be affine in each of them."""
        key = (value, part)
        if key not in self._seen:
            self._seen[key] = None  # a cycle cannot happen; a recursion through an unfinished value is no affine
            try:
                self._seen[key] = self._describe(value, part)
            except NotALayout:
                pass
            except NotAffine as why:
                self.reasons[value] = str(why)
        return self._seen[key]

    def region(self, value: Value) -> Region | None:
        """What is computed between an affine value and this one."""
        if value not in self._regions:
            self._regions[value] = region(value, self._affine.__contains__)
        return self._regions[value]

    def _find_affine(self) -> set[Value]:
        """From the projection onwards: what is affine is made from what is, or put together from views of it."""
        found: set[Value] = set()
        seen: set[Value] = set()
        # Put together from what is affine, and what is computed from that element by element.
        partly: set[Value] = set()
        pending = [self.projection.out]
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            op = value.op
            if self.describe(value) is not None:
                found.add(value)
            elif op is not None and (moves_elements(op) or (op.name in _HANDLERS and partly.intersection(op.sources))):
                partly.add(value)
            else:
                continue
            for user in value.users:
                pending += user.outs
        return found

    def rms_factor(self, value: Value, *, divides: bool) -> RmsFactor | str | None:
        key = (value, divides)
        if key not in self._factors:
            self._factors[key] = rms.identify(value, self.projection, self.reader, divides=divides)
        return self._factors[key]

    def _describe(self, value: Value, part: Part | None) -> Affine | None:
        whole = self.describe(value) if part is not None else None
        if whole is not None:
            return whole.map(lambda layout: _kept(layout, part))
        op = value.op
        if value is self.projection.out:
            found = Affine(self.projection, Layout.contiguous(value.shape))
            spread = _Spread(value.shape)
            return self._plus(found, self.projection.addend, 1.0, spread) if self.projection.addend else found
        if op is None or op.target is None:
            return None
        if is_movement(op):
            return self._moved(op, value, part)
        handler = _HANDLERS.get(op.name)
        if handler is not None:
            return handler(self, op, _Spread(value.shape, part))
        return self._gathered(value) if part is None else self._piece(op, part)

    def _moved(self, op: Op, value: Value, part: Part | None) -> Affine | None:
        source = next(op.inputs())
        whole = self.describe(source) if part is None else None
        if whole is not None:
            return whole.map(lambda layout: move(op, value, layout))
        if part is None:
            own = part_of(op, value)
            found = self.describe(source, own._replace(drops=False))
            return found.map(lambda layout: layout.drop(own.axis)) if found and own.drops else found
        return self.describe(source, part) if source.shape == value.shape and keeps_order(op) else None

    def _piece(self, op: Op, part: Part) -> Affine | None:
        """A part that lies in one of the pieces that are put together."""
        together = put_together(op) if op.name in TOGETHER else None
        if together is None or together.stacked or together.axis != part.axis:
            return None
        start = part.start
        for piece in together.pieces:
            size = piece.shape[part.axis]
            if start >= 0 and start + (part.length - 1) * part.step < size:
                return self.describe(piece, part._replace(start=start))
            start -= size
        return None

    def _gathered(self, value: Value) -> Affine | None:
        """A value put together from pieces of an affine one."""
        for view in self.reader.views(value)[1:]:
            source = self.describe(view.base)
            if source is not None:
                return source.map(lambda layout, view=view: view.layout.through(layout))  # type: ignore[misc]
        return None

    def _own(self, value: Any, to: _Spread) -> Affine | None:
        """An operand, as far as it is affine, spread over the operator's result."""
        if not isinstance(value, Value) or (to.part is not None and value.shape != to.shape):
            return None
        source = self.describe(value, to.part)
        return source.map(to) if source is not None and to.part is None else source

    def _param(self, base: Value, to: _Spreads) -> Param:
        source, layout = origin(base, any_view)
        return Param(source, to(layout))

    def mul(self, op: Op, to: _Spread) -> Affine | None:
        for own, other in _orders(op):
            source = self._own(own, to)
            if source is not None:
                return self._scaled(source, other, to)
        return None

    def div(self, op: Op, to: _Spread) -> Affine | None:
        own, other = op.args[:2]
        source = self._own(own, to) if not op.kwargs else None
        return self._scaled(source, other, to, divides=True) if source is not None else None

    def neg(self, op: Op, to: _Spread) -> Affine | None:
        source = self._own(op.args[0], to)
        return _times(source, -1.0) if source else None

    def add(self, op: Op, to: _Spread) -> Affine | None:
        alpha = constant(op.arg(2, "alpha", 1))
        for (own, other), own_factor, other_factor in zip(_orders(op), (1.0, alpha), (alpha, 1.0), strict=True):
            source = self._own(own, to)
            if source is not None and own_factor is not None and other_factor is not None:
                return self._plus(_times(source, own_factor), other, other_factor, to)
        return None

    def sub(self, op: Op, to: _Spread) -> Affine | None:
        alpha = constant(op.arg(2, "alpha", 1))
        left, right = op.args[:2]
        source = self._own(left, to)
        if source is not None and alpha is not None:
            return self._plus(source, right, -alpha, to)
        source = self._own(right, to)
        if source is not None and alpha is not None:
            return self._plus(_times(source, -alpha), left, 1.0, to)
        return None

    def addcmul(self, op: Op, to: _Spread) -> Affine | None:
        number = constant(op.kwargs.get("value", 1))
        for own, other in ((op.args[1], op.args[2]), (op.args[2], op.args[1])):
            source = self._own(own, to)
            if source is not None and number is not None:
                scaled = self._scaled(_times(source, number), other, to)
                return self._plus(scaled, op.args[0], 1.0, to) if scaled else None
        return None

    def _scaled(self, source: Affine, other: Any, to: _Spreads, *, divides: bool = False) -> Affine | None:
        """An affine value times `other`, or divided by it: a number, a vector, the RMS factor, or a product of these.

        Raises:
            NotAffine: it goes with the tokens, and no operator scales them by that.
        """
        if not isinstance(other, Value):
            number = constant(other)
            if number is None or (divides and not number):
                return None
            return _times(source, 1 / number if divides else number)
        param = self._param(other, to)
        by_token = self._goes_with_tokens(source, param)
        factor = self.rms_factor(other, divides=divides) if by_token else None
        if isinstance(factor, RmsFactor) and source.normed is None and not source.bias:
            return _times(source, factor.const)._replace(normed=factor)
        found = _times(source, 1.0, (param._replace(inverse=divides),)) if self._fits(source, param) else None
        if found is None or self.projection.tokens == 1:  # all that one token is scaled by could be a vector
            apart = self._by_each(source, param, divides)
            if found is None or (apart is not None and apart.normed != source.normed):
                found = apart
        if found is None and by_token:
            raise NotAffine(_why_not(source, factor))
        return found

    def _by_each(self, source: Affine, product: Param, divides: bool) -> Affine | None:
        """Apply the factors of a product one by one: the program may multiply a scale and the RMS factor first."""
        base = product.base
        if base.op is None or base.op.name not in ("mul", "div") or base.op.kwargs or base in self.cone:
            return None

        def to(layout: Layout) -> Layout:
            return product.layout.through(layout.expand(base.shape))

        left, right = base.op.args
        with contextlib.suppress(NotALayout):
            found = self._scaled(source, left, to, divides=divides)
            return found and self._scaled(found, right, to, divides=divides != (base.op.name == "div"))
        return None

    def _fits(self, source: Affine, param: Param) -> bool:
        return param.base not in self.cone and source.indices(param.layout) is not None

    def _goes_with_tokens(self, source: Affine, param: Param) -> bool:
        """Whether a value has one number a token, and each element meets that of its own."""
        if param.base.numel != self.projection.tokens:
            return False
        width = self.projection.rows
        rows = refine(source.rows, param.layout)
        return all(own // width == other if own >= width else other == 0 for _, _, (own, other) in rows)

    def _plus(self, source: Affine, other: Any, sign: float, to: _Spread) -> Affine | None:
        if not isinstance(other, Value):
            number = constant(other)
            return None if number is None else source._replace(bias=(*source.bias, Term(sign * number)))
        param = self._param(other, to)
        if not self._fits(source, param):
            return None
        return source._replace(bias=(*source.bias, Term(sign, (param,))))


def _why_not(source: Affine, factor: RmsFactor | str | None) -> str:
    if isinstance(factor, str):
        return factor
    if factor is None:
        return "comes from a projection that is scaled token by token, and not by an RMS norm of what it projects"
    if source.normed is not None:
        return "comes from a projection that is normalised twice"
    return "comes from a projection that is normalised after a bias is added; in the operators the bias comes last"


def _kept(layout: Layout, part: Part | None) -> Layout:
    return layout if part is None else layout.select(part.axis, part.start, part.length, part.step)


_HANDLERS: dict[str, Callable[[AffineWalk, shadow.Op, _Spread], Affine | None]] = {
    "mul": AffineWalk.mul,
    "div": AffineWalk.div,
    "add": AffineWalk.add,
    "sub": AffineWalk.sub,
    "rsub": lambda walk, op, to: AffineWalk.sub(walk, _swapped(op), to),
    "neg": AffineWalk.neg,
    "addcmul": AffineWalk.addcmul,
}


def _swapped(op: Op) -> Op:
    """rsub(a, b) read as sub(b, a)."""
    return replace(op, args=(op.args[1], op.args[0], *op.args[2:]))


def token_indices(rows: Layout, layout: Layout, row_count: int) -> list[int] | None:
    """Offsets of `layout` over the elements of one token; None if they depend on the token.

    rows separates tokens from elements: steps of at least `row_count` go from token to token.
    """
    offsets = [layout.offset]
    for _, size, (own, stride) in refine(rows, layout):
        if own >= row_count:
            if stride:
                return None
        else:
            offsets = [offset + i * stride for offset in offsets for i in range(size)]
    return offsets


def _times(source: Affine, const: float, params: tuple[Param, ...] = ()) -> Affine:
    bias = tuple(term.times(const, params) for term in source.bias)
    return source._replace(scale=source.scale.times(const, params), bias=bias)


def _orders(op: Op) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    left, right = op.args[:2]
    return (left, right), (right, left)
