"""Whether two formulas are equal for all real numbers: z3 decides, after sympy has named all but polynomials.

    1 / b      ->  u with u * b = 1
    sqrt(b)    ->  s with s * s = b, s > 0
    exp(a + k) ->  e_a * e_k with e > 0, and so for powers of 2; exp(log(b)) is b
    log(b)     ->  a symbol of its own

An identity of polynomials in these names holds whatever the names stand for. One that needs their equations is proved
after both sides were multiplied by their denominators. So a proof holds wherever no denominator is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import z3
from sympy.ntheory import nextprime

# Every proof and refutation here takes less than a tenth of it.
_MILLISECONDS = 60_000


class Refuted(AssertionError):
    """Numbers for which two formulas differ."""

    def __init__(self, label: str, model: dict[str, str]) -> None:
        super().__init__(f"{label} differs where {', '.join(f'{name} = {value}' for name, value in model.items())}")
        self.model = model


def prove(left: Any, right: Any, label: str = "it") -> None:
    """Raise `Refuted` with a model unless two formulas are equal.

    Formulas may be arrays of one shape; then all of their elements are compared.
    """
    shapes = getattr(left, "shape", ()), getattr(right, "shape", ())
    assert shapes[0] == shapes[1], f"{label} has the shapes {shapes}"
    if not shapes[0]:
        _prove(left, right, label)
        return
    for at in sympy.utilities.iterables.cartes(*(range(size) for size in shapes[0])):
        _prove(left[at], right[at], f"{label}{list(at)}")


def refute(left: Any, right: Any) -> dict[str, str]:
    """Numbers for which two formulas, or two elements of arrays, differ; raises AssertionError if they are equal."""
    try:
        prove(left, right)
    except Refuted as found:
        return found.model
    raise AssertionError("the mutant was proved")


def _prove(left: Any, right: Any, label: str) -> None:
    if left == right:
        return
    names = _Names()
    a, b = names.of(sympy.sympify(left)), names.of(sympy.sympify(right))
    if _is_zero(a - b):
        return
    numerator = names.numerator(a - b)
    if _is_zero(numerator):
        return
    model = _differs(numerator, names)
    if model is None:
        raise AssertionError(f"{label}: z3 neither proves nor refutes {left} = {right}")
    raise Refuted(label, model)


class _Names:
    """Formulas as polynomials in names, and what the names stand for."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        # Each in the order in which they were named: a base is made of earlier names.
        self.inverses: dict[Any, Any] = {}
        self.roots: dict[Any, Any] = {}
        self.positive: set[Any] = set()
        self.meaning: dict[str, Any] = {}

    def of(self, term: Any) -> Any:
        if term not in self._known:
            self._known[term] = self._named(term)
        return self._known[term]

    def _named(self, term: Any) -> Any:
        if term.is_Symbol:
            if term.is_positive:
                self.positive.add(term)
            return term
        if term.is_Rational:
            return term
        if term.is_Add or term.is_Mul:
            return term.func(*[self.of(argument) for argument in term.args])
        if isinstance(term, sympy.exp):
            return self._exponential("e", term.exp, 1)
        if isinstance(term, sympy.log):
            return self._fresh("log", term)
        if not term.is_Pow:
            raise NotImplementedError(f"{term.func} in {term}")
        base, exponent = term.args
        if base == 2 and not exponent.is_number:
            return self._exponential("t", exponent, 2)
        if exponent.is_Integer:
            return self._power(self.of(base), int(exponent))
        if (2 * exponent).is_Integer:
            return self._power(self._root(self.of(base)), int(2 * exponent))
        raise NotImplementedError(f"the power {term}")

    def _fresh(self, kind: str, meaning: Any, positive: bool = False) -> Any:
        name = sympy.Symbol(f"{kind}_{len(self.meaning)}", real=True, positive=positive or None)
        self.meaning[name.name] = meaning
        if positive:
            self.positive.add(name)
        return name

    def _power(self, base: Any, exponent: int) -> Any:
        if exponent >= 0 or base.is_Rational:
            return base**exponent
        base = sympy.expand(base)
        content, base = base.as_content_primitive()
        if base not in self.inverses:
            self.inverses[base] = self._fresh("inverse", base)
        return (self.inverses[base] / content) ** -exponent

    def _root(self, base: Any) -> Any:
        base = sympy.expand(base)
        if base not in self.roots:
            self.roots[base] = self._fresh("root", base, positive=True)
        return self.roots[base]

    def _exponential(self, kind: str, exponent: Any, base: int) -> Any:
        """A product of powers, one for each summand of the exponent."""
        product = sympy.Integer(1)
        for summand in sympy.Add.make_args(sympy.expand(exponent)):
            count, rest = summand.as_coeff_Mul()
            if rest == 1 and base == 2 and count.is_Integer:
                product *= sympy.Integer(2) ** count
                continue
            if not count.is_Integer:
                count, rest = (1, summand) if count > 0 else (-1, -summand)
            if isinstance(rest, sympy.log) and base == 1:
                product *= self._power(self.of(rest.args[0]), int(count))
                continue
            key = (kind, rest)
            if key not in self._known:
                self._known[key] = self._fresh(kind, rest, positive=True)
            product *= self._power(self._known[key], int(count))
        return product

    def numerator(self, difference: Any) -> Any:
        """A polynomial that is 0 just where the difference is: without inverses, and with squares of roots put in."""
        for base, name in reversed(self.inverses.items()):
            difference = difference.xreplace({name: 1 / base})
        numerator = sympy.expand(sympy.fraction(sympy.together(difference))[0])
        for base, name in reversed(self.roots.items()):
            base = base.xreplace({inverse: 1 / of for of, inverse in self.inverses.items()})
            powers = sympy.Poly(numerator, name).all_coeffs()[::-1]
            even = sympy.Add(*[c * base ** (k // 2) for k, c in enumerate(powers) if k % 2 == 0])
            odd = sympy.Add(*[c * base ** (k // 2) for k, c in enumerate(powers) if k % 2])
            numerator = sympy.expand(sympy.fraction(sympy.together(even + name * odd))[0])
        return numerator


def _is_zero(term: Any) -> bool:
    """Whether a polynomial is 0 as one: z3's sum of monomials."""
    expanded = z3.simplify(_to_z3(term, {}), som=True, som_blowup=1 << 30)
    return bool(z3.is_rational_value(expanded) and expanded.as_fraction() == 0)


def _to_z3(term: Any, known: dict[Any, Any]) -> Any:
    if term in known:
        return known[term]
    if term.is_Symbol:
        made = z3.Real(term.name)
    elif term.is_Rational:
        made = z3.RealVal(f"{term.p}/{term.q}")
    elif term.is_Add:
        made = z3.Sum([_to_z3(argument, known) for argument in term.args])
    elif term.is_Mul:
        made = z3.Product([_to_z3(argument, known) for argument in term.args])
    else:
        base, exponent = term.args
        assert term.is_Pow, term
        made = z3.Product([_to_z3(base, known)] * int(exponent))
    known[term] = made
    return made


def _differs(numerator: Any, names: _Names) -> dict[str, str] | None:
    """Numbers that make a numerator other than 0; None if z3 finds none, or cannot tell.

    They are distinct primes where that is possible, which z3 then only has to check.
    """
    free = sorted(numerator.free_symbols, key=str)
    known: dict[Any, Any] = {}
    solver = z3.Solver()
    solver.set("timeout", _MILLISECONDS)
    solver.add(_to_z3(numerator, known) != 0)
    inverses = {name: 1 / base for base, name in names.inverses.items()}
    chosen = set(names.roots.values())
    solver.add([_to_z3(name, known) > 0 for name in free if name in names.positive])
    for base, name in names.roots.items():
        below, above = sympy.fraction(sympy.together(base.xreplace(inverses)))[::-1]
        solver.add(_to_z3(name**2 * below - above, known) == 0, _to_z3(name, known) > 0)
        free += sorted((below.free_symbols | above.free_symbols).difference(free), key=str)
    for primes in (True, False):
        solver.push()
        if primes:
            solver.add([_to_z3(name, known) == nextprime(5 * k) for k, name in enumerate(free) if name not in chosen])
        if solver.check() == z3.sat:
            return _readable(solver.model(), free, names)
        solver.pop()
    return None


def _readable(model: z3.ModelRef, free: Sequence[Any], names: _Names) -> dict[str, str]:
    def spelled(name: str) -> Iterable[str]:
        yield name
        meaning = names.meaning.get(name)
        if meaning is not None:
            yield f"({name.split('_')[0]} of {meaning})"

    return {" ".join(spelled(name.name)): str(model.eval(z3.Real(name.name), True)) for name in free}
