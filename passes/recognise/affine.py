"""From a gate's input back to the projection: l = r * h * scale + bias, in whatever order it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from mhc_compile import compat
from mhc_compile.passes import shadow
from mhc_compile.passes.recognise import rms
from mhc_compile.passes.recognise.layout import Layout, NotALayout, any_view, is_movement, move, origin, refine
from mhc_compile.passes.recognise.projection import Projection
from mhc_compile.passes.recognise.reader import Reader, moves_elements
from mhc_compile.passes.recognise.region import Region, region
from mhc_compile.passes.recognise.rms import RmsFactor
from mhc_compile.passes.shadow import Op, Value


@dataclass(frozen=True)
class Param:
    """A vector or scalar of the program, spread over the elements of the value it is combined with.

    inverse: it divides.
    """

    base: Value
    layout: Layout
    inverse: bool = False


@dataclass(frozen=True)
class Term:
    """const * the product of params; without params, a number."""

    const: float = 1.0
    params: tuple[Param, ...] = ()

    def times(self, const: float, params: tuple[Param, ...] = ()) -> Term:
        return Term(self.const * const, self.params + params)


@dataclass(frozen=True)
class Affine:
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

        return replace(
            self, rows=view(self.rows), scale=moved(self.scale), bias=tuple(moved(term) for term in self.bias)
        )

    def indices(self, layout: Layout) -> list[int] | None:
        """For each element of a token, in order, its offset in the base of `layout`; None if tokens differ."""
        return token_indices(self.rows, layout, self.projection.rows)


class AffineWalk:
    """Describes values as affine in one projection's result; remembers what it has found.

    before is the walk of another reading of the same projection, from which regions are taken over.
    """

    def __init__(self, projection: Projection, reader: Reader, before: AffineWalk | None = None) -> None:
        self.projection = projection
        self.reader = reader
        self._seen: dict[Value, Affine | None] = {}
        self._factors: dict[tuple[Value, bool], RmsFactor | None] = {}
        self._affine = self._find_affine()
        # A region depends on nothing but which values are affine, where it begins.
        same = before is not None and before._affine == self._affine
        self._regions: dict[Value, Region | None] = before._regions if before is not None and same else {}

    def describe(self, value: Value) -> Affine | None:
        if value not in self._seen:
            self._seen[value] = None  # a cycle cannot happen; a recursion through an unfinished value is no affine
            try:
                self._seen[value] = self._describe(value)
            except NotALayout:
                self._seen[value] = None
        return self._seen[value]

    def region(self, value: Value) -> Region | None:
        """What is computed between an affine value and this one."""
        if value not in self._regions:
            self._regions[value] = region(value, self._affine.__contains__)
        return self._regions[value]

    def _find_affine(self) -> set[Value]:
        """From the projection onwards: what is affine is made from what is, or put together from views of it."""
        found: set[Value] = set()
        seen: set[Value] = set()
        pending = [self.projection.out]
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            if self.describe(value) is not None:
                found.add(value)
            elif value.op is None or not moves_elements(value.op):
                continue
            for user in value.users:
                pending += user.outs
        return found

    def rms_factor(self, value: Value, *, divides: bool) -> RmsFactor | None:
        key = (value, divides)
        if key not in self._factors:
            self._factors[key] = rms.identify(value, self.projection, self.reader, divides=divides)
        return self._factors[key]

    def _describe(self, value: Value) -> Affine | None:
        if value is self.projection.out:
            found = Affine(self.projection, Layout.contiguous(value.shape))
            return self._plus(found, self.projection.addend, 1.0, value) if self.projection.addend else found
        op = value.op
        if op is None or op.target is None:
            return None
        if is_movement(op):
            source = self.describe(next(op.inputs()))
            return source.map(lambda layout: move(op, value, layout)) if source else None
        handler = _HANDLERS.get(op.name)
        return handler(self, op) if handler else self._gathered(value)

    def _gathered(self, value: Value) -> Affine | None:
        """A value put together from pieces of an affine one."""
        for view in self.reader.views(value)[1:]:
            source = self.describe(view.base)
            if source is not None:
                return source.map(lambda layout, view=view: view.layout.through(layout))  # type: ignore[misc]
        return None

    def _spread(self, source: Affine, op: Op) -> Affine:
        return source.map(lambda layout: layout.expand(op.out.shape))

    def _param(self, base: Value, out: Value) -> Param:
        source, layout = origin(base, any_view)
        return Param(source, layout.expand(out.shape))

    def mul(self, op: Op) -> Affine | None:
        for own, other in _orders(op):
            source = self.describe(own) if isinstance(own, Value) else None
            if source is not None:
                return self._scaled(self._spread(source, op), other, op)
        return None

    def div(self, op: Op) -> Affine | None:
        own, other = op.args[:2]
        source = self.describe(own) if isinstance(own, Value) and not op.kwargs else None
        if source is None:
            return None
        source = self._spread(source, op)
        if isinstance(other, Value):
            normalised = self._normalised(source, other, divides=True)
            return normalised or self._times_param(source, replace(self._param(other, op.out), inverse=True))
        number = _number(other)
        return _times(source, 1 / number) if number else None

    def neg(self, op: Op) -> Affine | None:
        source = self.describe(op.args[0])
        return _times(source, -1.0) if source else None

    def add(self, op: Op) -> Affine | None:
        alpha = _number(op.kwargs.get("alpha", 1))
        for (own, other), own_factor, other_factor in zip(_orders(op), (1.0, alpha), (alpha, 1.0), strict=True):
            source = self.describe(own) if isinstance(own, Value) else None
            if source is not None and own_factor is not None and other_factor is not None:
                return self._plus(_times(self._spread(source, op), own_factor), other, other_factor, op.out)
        return None

    def sub(self, op: Op) -> Affine | None:
        alpha = _number(op.kwargs.get("alpha", 1))
        left, right = op.args[:2]
        source = self.describe(left) if isinstance(left, Value) else None
        if source is not None and alpha is not None:
            return self._plus(self._spread(source, op), right, -alpha, op.out)
        source = self.describe(right) if isinstance(right, Value) else None
        if source is not None and alpha is not None:
            return self._plus(_times(self._spread(source, op), -alpha), left, 1.0, op.out)
        return None

    def addcmul(self, op: Op) -> Affine | None:
        constant = _number(op.kwargs.get("value", 1))
        for own, other in ((op.args[1], op.args[2]), (op.args[2], op.args[1])):
            source = self.describe(own)
            if source is not None and constant is not None:
                scaled = self._scaled(_times(self._spread(source, op), constant), other, op)
                return self._plus(scaled, op.args[0], 1.0, op.out) if scaled else None
        return None

    def _scaled(self, source: Affine, other: Any, op: Op) -> Affine | None:
        if not isinstance(other, Value):
            number = _number(other)
            return None if number is None else _times(source, number)
        normalised = self._normalised(source, other, divides=False)
        if normalised is not None:
            return normalised
        return self._times_param(source, self._param(other, op.out))

    def _times_param(self, source: Affine, param: Param) -> Affine | None:
        return _times(source, 1.0, (param,)) if source.indices(param.layout) is not None else None

    def _normalised(self, source: Affine, other: Value, *, divides: bool) -> Affine | None:
        factor = self.rms_factor(other, divides=divides)
        if factor is None or source.normed is not None or source.bias:
            return None
        return replace(_times(source, factor.const), normed=factor) if self._same_tokens(source, other) else None

    def _same_tokens(self, source: Affine, factor: Value) -> bool:
        """Whether the factor that meets each element belongs to that element's token."""
        base, layout = origin(factor, any_view)
        if base.numel != self.projection.tokens:
            return False
        rows = refine(source.rows, layout.expand(source.rows.shape))
        width = self.projection.rows
        return all(own // width == other if own >= width else other == 0 for _, _, (own, other) in rows)

    def _plus(self, source: Affine, other: Any, sign: float, out: Value) -> Affine | None:
        if not isinstance(other, Value):
            number = _number(other)
            return None if number is None else replace(source, bias=(*source.bias, Term(sign * number)))
        param = self._param(other, out)
        if source.indices(param.layout) is None:
            return None
        return replace(source, bias=(*source.bias, Term(sign, (param,))))


_HANDLERS: dict[str, Callable[[AffineWalk, shadow.Op], Affine | None]] = {
    "mul": AffineWalk.mul,
    "div": AffineWalk.div,
    "add": AffineWalk.add,
    "sub": AffineWalk.sub,
    "rsub": lambda walk, op: AffineWalk.sub(walk, _swapped(op)),
    "neg": AffineWalk.neg,
    "addcmul": AffineWalk.addcmul,
}


def _swapped(op: Op) -> Op:
    """rsub(a, b) read as sub(b, a)."""
    return replace(op, args=(op.args[1], op.args[0], *op.args[2:]))


def token_indices(rows: Layout, layout: Layout, row_count: int) -> list[int] | None:
    """Offsets of `layout` over the elements of one token; None if they depend on the token.

    rows tells tokens from elements: steps of at least `row_count` go from token to token.
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
    return replace(source, scale=source.scale.times(const, params), bias=bias)


def _orders(op: Op) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    left, right = op.args[:2]
    return (left, right), (right, left)


def _number(leaf: Any) -> float | None:
    if isinstance(leaf, torch.SymFloat):
        return compat.float_watch.value(leaf)
    return float(leaf) if isinstance(leaf, (int, float)) and not isinstance(leaf, bool) else None
