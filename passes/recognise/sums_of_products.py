"""What a value is read as: a sum of terms, each a constant times a product of views, summed over some dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mhc_compile.passes.recognise.layout import Layout
from mhc_compile.passes.shadow import Value


class Source(NamedTuple):
    """A factor as a view of `base`: layout is indexed by the value's dimensions and then by the summed ones."""

    base: Value
    layout: Layout


Factor = tuple[Source, ...]
"""Equivalent descriptions of one factor, the nearest first."""


class Term(NamedTuple):
    """const times the product of factors, summed over the last `summed` dimensions of their layouts."""

    const: float
    factors: tuple[Factor, ...]
    summed: int = 0


Terms = tuple[Term, ...]


def collected(terms: Sequence[Term]) -> Terms:
    """Terms alike whose factors lie evenly apart become one that is summed: g[0] x[0] + g[1] x[1] + ..."""
    found: list[Term] = []
    for term in terms:
        for i, other in enumerate(found):
            joined = _extended(other, term) or _paired(other, term)
            if joined is not None:
                found[i] = joined
                break
        else:
            found.append(term)
    return tuple(found)


def _paired(first: Term, second: Term) -> Term | None:
    """Two terms as a sum over a dimension of size 2."""
    if not _alike(first, second, 0):
        return None

    def step(a: Layout, b: Layout) -> Layout | None:
        distance = b.offset - a.offset
        return Layout((*a.dims, ((2, distance),)), a.offset) if distance > 0 and a.dims == b.dims else None

    return _each(first, second, step, 1) or _each(second, first, step, 1)


def _extended(run: Term, one: Term) -> Term | None:
    """A term appended to a sum over its likes."""
    if not _alike(run, one, 1) or not run.summed:
        return None

    def longer(a: Layout, b: Layout, at_end: bool) -> Layout | None:
        if a.dims[:-1] != b.dims or len(a.dims[-1]) != 1:
            return None
        ((size, stride),) = a.dims[-1]
        if b.offset != (a.offset + size * stride if at_end else a.offset - stride):
            return None
        return Layout((*a.dims[:-1], ((size + 1, stride),)), min(a.offset, b.offset))

    # All factors at the same end: one that begins where another ends is a different sum.
    return _each(run, one, lambda a, b: longer(a, b, True), 0) or _each(run, one, lambda a, b: longer(a, b, False), 0)


def _alike(first: Term, second: Term, more: int) -> bool:
    return (first.const, len(first.factors), first.summed) == (
        second.const,
        len(second.factors),
        second.summed + more,
    )


def _each(first: Term, second: Term, step: Callable[[Layout, Layout], Layout | None], summed: int) -> Term | None:
    """Both terms' factors paired by their bases, in either order."""
    for order in (second.factors, second.factors[::-1]):
        factors = []
        for one, other in zip(first.factors, order, strict=True):
            layouts = {source.base: source.layout for source in other}
            factors.append(
                tuple(
                    Source(s.base, joined)
                    for s in one
                    if s.base in layouts and (joined := step(s.layout, layouts[s.base])) is not None
                )
            )
        if all(factors):
            return Term(first.const, tuple(factors), first.summed + summed)
    return None
