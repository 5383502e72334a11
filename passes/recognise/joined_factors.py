"""Products with what is put together from pieces of unequal sizes: [H, p] @ cat([x, f]) is H @ x + p f."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from math import prod

from mhc_compile.passes.recognise.concatenation import put_together
from mhc_compile.passes.recognise.layout import NotALayout
from mhc_compile.passes.recognise.reader import Reader
from mhc_compile.passes.recognise.sums_of_products import Factor, Term, Terms


def taken_apart(reader: Reader, terms: Terms) -> Terms:
    """The terms, each sum along pieces of unequal sizes as one sum a piece; none where there is no such sum.

    Pieces of one size are rows of one tensor, such as the streams of a list.
    """
    found: list[Term] = []
    for term in terms:
        lengths = next((lengths for factor in term.factors for lengths in _lengths(factor)), None)
        if lengths is None or term.summed != 1:
            found.append(term)
            continue
        for start, length in zip(accumulate((0, *lengths)), lengths, strict=False):
            try:
                factors = tuple(reader.of_last(factor, start, length) for factor in term.factors)
            except NotALayout:
                return ()
            if not all(factors):
                return ()
            found.append(Term(term.const, factors, int(length > 1)))
    return tuple(found) if len(found) > len(terms) else ()


def _lengths(factor: Factor) -> Iterator[list[int]]:
    """The sizes of the pieces along which a factor is summed, if they are not all of one size."""
    for base, layout in factor:
        if base.op is None or base.op.name != "cat":
            continue
        whole = put_together(base.op)
        if whole is None or len({piece.shape[whole.axis] for piece in whole.pieces}) == 1:
            continue
        stride = prod(base.shape[whole.axis + 1 :])
        if layout.dims[-1] == ((base.shape[whole.axis], stride),):
            yield [piece.shape[whole.axis] for piece in whole.pieces]
