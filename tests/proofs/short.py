"""Symbols for whole programs: every sum and every function has a name, so formulas stay short.

A formula is a number times powers of symbols. Two programs share their names, and a sum of sums is one sum. So what two
programs compute alike is one formula, in whatever order they add.
"""

from __future__ import annotations

import contextlib
from typing import Any

import mpmath
import numpy as np
import sympy

from tests.proofs.equality import DIGITS, Refuted, differ, prove, value
from tests.proofs.symbols import Symbols, Terms

# How often names are spelled out before two formulas count as not proved.
_LEVELS = 6


class Short(Symbols):
    """`Symbols` whose formulas are products of names."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.meanings: dict[sympy.Symbol, Any] = {}
        self._names: dict[Any, sympy.Symbol] = {}
        self._products: dict[Any, Any] = {}
        # Formulas for some numbers.
        self._values: dict[Any, Any] = {}

    def made(self, terms: Terms) -> Terms:
        """The formulas as products."""
        return np.frompyfunc(self._product, 1, 1)(terms)  # type: ignore[no-any-return]

    def prove(self, left: Terms, right: Terms, label: str) -> None:
        """Raise `Refuted` if formulas differ for some numbers, and AssertionError if they are not proved equal.

        A proof holds for names as free symbols. If it fails, names that only one side has are spelled out.
        """
        assert left.shape == right.shape, f"{label} has the shapes {left.shape} and {right.shape}"
        for at in np.ndindex(*left.shape):
            if left[at] != right[at]:
                self._refute(left[at], right[at], f"{label}{list(at)}")
                self._prove(left[at], right[at], f"{label}{list(at)}")

    def _prove(self, a: Any, b: Any, label: str) -> None:
        for _ in range(_LEVELS):
            with contextlib.suppress(Refuted):
                return prove(a, b, label)
            apart = (a.free_symbols ^ b.free_symbols) & self.meanings.keys()
            sums = {name for name in apart if self.meanings[name].is_Add}
            pairs = {name: self.meanings[name] for name in sums or apart or a.free_symbols & self.meanings.keys()}
            a, b = a.xreplace(pairs), b.xreplace(pairs)
        raise AssertionError(f"{label} is not proved")

    def _refute(self, a: Any, b: Any, label: str) -> None:
        with mpmath.workdps(DIGITS):
            if differ(self._value(a), self._value(b)):
                raise Refuted(label, {name: mpmath.nstr(value) for name, value in self._of_free(a - b).items()})

    def _of_free(self, term: Any) -> dict[str, Any]:
        """The numbers of the free symbols that a formula is made of."""
        pending, seen = [term], set()
        for each in pending:
            fresh = each.free_symbols - seen
            seen |= fresh
            pending += [self.meanings[name] for name in fresh if name in self.meanings]
        return {str(s): self._value(s) for s in seen if s not in self.meanings and s not in self.maxima}

    def _value(self, term: Any) -> Any:
        """A formula for some numbers, one of its own for each free symbol."""
        return value(term, self._values, self._of_symbol)

    def _of_symbol(self, symbol: Any) -> Any:
        if symbol in self.meanings:
            return self._value(self.meanings[symbol])
        if symbol in self.maxima:
            return max(self._value(each) for each in self.maxima[symbol])
        return mpmath.mpf(int(sympy.prime(len(self._values) + 1000))) / 10_000

    def _product(self, term: Any) -> Any:
        if term not in self._products:
            self._products[term] = self._made_product(term)
        return self._products[term]

    def _made_product(self, term: Any) -> Any:
        if term.is_Symbol or term.is_number:
            return term
        if term.is_Add:
            summands = [s for argument in term.args for s in self._summands(self._product(argument))]
            total = sympy.Add(*summands)
            return self._name(total) if total.is_Add else total
        made = term.func(*[self._product(argument) for argument in term.args])
        return made if term.is_Mul or term.is_Pow or made.is_number else self._name(made)

    def _summands(self, product: Any) -> list[Any]:
        """Of a number times a named sum, the summands: sums of sums are one sum."""
        number, name = product.as_coeff_Mul()
        meaning = self.meanings.get(name)
        return [number * s for s in meaning.args] if meaning is not None and meaning.is_Add else [product]

    def _name(self, meaning: Any) -> Any:
        if meaning not in self._names:
            name = sympy.Symbol(f"n{len(self._names)}", real=True)
            self._names[meaning], self.meanings[name] = name, meaning
        return self._names[meaning]
