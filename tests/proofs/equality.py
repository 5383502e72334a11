"""Whether two formulas are equal for all real numbers: z3 decides, after sympy has named all but polynomials.

    1 / b      ->  u with u * b = 1
    sqrt(b)    ->  s with s * s = b, s > 0
    exp(a + k) ->  e_a * e_k with e > 0, and so for powers of 2; exp(log(b)) is b
    log(b)     ->  a symbol of its own

An identity of polynomials in these names holds whatever the names stand for. One that needs their equations is proved
after both sides were multiplied by their denominators. So a proof holds wherever no denominator is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath
import sympy
import z3
from sympy.ntheory import nextprime

# Every proof and refutation here takes less than a tenth of it.
_MILLISECONDS = 20_000
# Values that are equal differ by rounding only.
DIGITS = 60
# exp(k * a) is a power of exp(a) for k up to this.
_MOST = 4


class Refuted(AssertionError):
    """Numbers for which two formulas differ."""

    def __init__(self, label: str, model: dict[str, str]) -> None:
        super().__init__(f"{label} differs where {', '.join(f'{name} = {value}' for name, value in model.items())}")
        self.model = model


def prove(left: Any, right: Any, label: str = "it", above: tuple[Any, Any] | None = None) -> None:
    """Raise `Refuted` with a model unless two formulas are equal.

    Formulas may be arrays of one shape; then all of their elements are compared. above: in a model the first of these
    two formulas is greater than the second.
    """
    shapes = getattr(left, "shape", ()), getattr(right, "shape", ())
    assert shapes[0] == shapes[1], f"{label} has the shapes {shapes}"
    if not shapes[0]:
        _prove(left, right, label, above)
        return
    for at in sympy.utilities.iterables.cartes(*(range(size) for size in shapes[0])):
        _prove(left[at], right[at], f"{label}{list(at)}", above)


def refute(left: Any, right: Any, above: tuple[Any, Any] | None = None) -> dict[str, str]:
    """Numbers for which two formulas, or two elements of arrays, differ; raises AssertionError if they are equal."""
    try:
        prove(left, right, above=above)
    except Refuted as found:
        return found.model
    raise AssertionError("the mutant was proved")


def _prove(left: Any, right: Any, label: str, above: tuple[Any, Any] | None) -> None:
    if left == right:
        return
    names = _Names()
    names.name_roots(left, right)
    a, b = names.of(sympy.sympify(left)), names.of(sympy.sympify(right))
    if _is_zero(a - b):
        return
    numerator = names.numerator(a - b)
    if _is_zero(numerator):
        return
    model = _differs(numerator, names, above)
    if model is None:
        return
    # z3 is free to choose exp(a), whatever a is. So the formulas are evaluated, for its numbers and for others.
    free = sorted(left.free_symbols | right.free_symbols, key=str)
    small = {name: sympy.Rational(nextprime(7 * k), 50) for k, name in enumerate(free)}
    for numbers in (small | model, small if above is None else small | model):
        with mpmath.workdps(DIGITS):
            values = {name: mpmath.mpf(number.p) / number.q for name, number in numbers.items()}
            if differ(value(left, dict(values)), value(right, values)):
                raise Refuted(label, {str(name): str(number) for name, number in numbers.items()})
    raise AssertionError(f"{label} may differ, but is not seen to")


def differ(one: Any, other: Any) -> bool:
    """Whether two values differ by more than rounding."""
    return bool(abs(one - other) > mpmath.mpf(10) ** (-DIGITS // 2) * max(abs(one), abs(other)))


def value(term: Any, values: dict[Any, Any], of_symbol: Callable[[Any], Any] | None = None) -> Any:
    """A formula in mpmath's numbers, where its symbols have values; of_symbol makes those that are not there."""
    if term not in values:
        given = [value(argument, values, of_symbol) for argument in term.args]
        if term.is_Symbol:
            assert of_symbol is not None, f"{term} has no value"
            values[term] = of_symbol(term)
        elif term.is_Add:
            values[term] = mpmath.fsum(given)
        elif term.is_Mul:
            values[term] = mpmath.fprod(given)
        elif term.is_Pow:
            values[term] = given[0] ** given[1]
        elif term.is_Rational:
            values[term] = mpmath.mpf(term.p) / term.q
        else:
            values[term] = getattr(mpmath, term.func.__name__)(*given)
    return values[term]


class _Names:
    """Formulas as polynomials in names, and what the names stand for."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        # Each in the order in which they were named: a base is made of earlier names.
        self.inverses: dict[Any, Any] = {}
        self.roots: dict[Any, Any] = {}
        self.symbols: set[Any] = set()
        self.positive: set[Any] = set()
        self._count = 0

    def of(self, term: Any) -> Any:
        if term not in self._known:
            self._known[term] = self._named(term)
        return self._known[term]

    def name_roots(self, *terms: Any) -> None:
        """Name the roots first: what is divided by a square is divided by the root twice."""
        for power in (power for term in terms for power in sympy.sympify(term).atoms(sympy.Pow)):
            if power.exp.is_Rational and not power.exp.is_Integer:
                self.of(power)

    def _named(self, term: Any) -> Any:
        if term.is_Symbol:
            self.symbols.add(term)
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
            return self._fresh("log")
        if not term.is_Pow:
            raise NotImplementedError(f"{term.func} in {term}")
        base, exponent = term.args
        if base == 2 and not exponent.is_number:
            return self._exponential("t", exponent, 2)
        if exponent.is_Integer:
            return self._power(self.of(base), int(exponent))
        if (2 * exponent).is_Integer:
            return self._power(self._root(base if base.is_Symbol else self.of(base)), int(2 * exponent))
        raise NotImplementedError(f"the power {term}")

    def _fresh(self, kind: str, positive: bool = False) -> Any:
        name = sympy.Symbol(f"{kind}_{self._count}", real=True, positive=positive or None)
        self._count += 1
        if positive:
            self.positive.add(name)
        return name

    def _power(self, base: Any, exponent: int) -> Any:
        if exponent >= 0 or base.is_Rational or base.is_Symbol:
            return base**exponent
        above, below = _fraction(base)  # the inverse of 1 + 1 / e is e / (e + 1)
        content, above = sympy.expand(above).as_content_primitive()
        factors = sympy.Integer(1)
        for factor in sympy.Mul.make_args(above):
            known, power = factor.as_base_exp() if factor.is_Pow else (factor, 1)
            if known in self.roots:
                factors *= self.roots[known] ** (-2 * power)
                continue
            if known.is_Add and known not in self.inverses:
                self.inverses[known] = self._fresh("inverse")
            factors *= self.inverses.get(known, 1 / known) ** power
        return (factors * below / content) ** -exponent

    def _root(self, base: Any) -> Any:
        base = sympy.expand(base)
        if base not in self.roots:
            self.roots[base] = self._fresh("root", positive=True)
            if base.is_Symbol:
                self._known[base] = self.roots[base] ** 2
        return self.roots[base]

    def _exponential(self, kind: str, exponent: Any, base: int) -> Any:
        """A product of powers, one for each summand of the exponent."""
        product = sympy.Integer(1)
        for summand in sympy.Add.make_args(sympy.expand(exponent)):
            count, rest = summand.as_coeff_Mul()
            if rest == 1 and base == 2 and count.is_Integer:
                product *= sympy.Integer(2) ** count
                continue
            if not count.is_Integer or abs(count) > _MOST:
                count, rest = (1, summand) if count > 0 else (-1, -summand)
            if isinstance(rest, sympy.log) and base == 1:
                product *= self._power(self.of(rest.args[0]), int(count))
                continue
            key = (kind, rest)
            if key not in self._known:
                self._known[key] = self._fresh(kind, positive=True)
            product *= self._power(self._known[key], int(count))
        return product

    def plain(self, term: Any) -> Any:
        """Divided by bases, where it has their inverses."""
        for base, name in reversed(self.inverses.items()):
            term = term.xreplace({name: 1 / base})
        return term

    def numerator(self, difference: Any) -> Any:
        """A polynomial that is 0 just where the difference is: without inverses, and with squares of roots put in."""
        numerator = _fraction(self.plain(difference))[0]
        for base, name in reversed(self.roots.items()):
            if name in numerator.free_symbols:
                square = self.plain(base)
                powers = sympy.Poly(sympy.expand(numerator), name).all_coeffs()[::-1]
                numerator = sympy.Add(*[c * square ** (k // 2) * name ** (k % 2) for k, c in enumerate(powers)])
                numerator = _fraction(numerator)[0]
        return numerator


def _fraction(term: Any) -> tuple[Any, Any]:
    return sympy.fraction(sympy.together(term))  # type: ignore[no-any-return]


def _is_zero(term: Any) -> bool:
    """Whether a polynomial is 0 as one: z3's sum of monomials, once sympy has cancelled what is divided by a name."""
    if any(power.exp.is_negative for power in term.atoms(sympy.Pow)):
        term = _fraction(sympy.expand(term))[0]
    expanded = _to_z3(term, {})
    for _ in range(2):  # once leaves numbers in the middle of products
        expanded = z3.simplify(expanded, som=True, som_blowup=100_000)
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


def _differs(numerator: Any, names: _Names, above: tuple[Any, Any] | None) -> dict[Any, Any] | None:
    """Numbers that make a numerator other than 0, and no denominator 0; None if there are none.

    They are primes where that is possible. Then z3 has to find one number for each root, of which the square is given,
    and to check.
    """
    known: dict[Any, Any] = {}
    claims = [_to_z3(numerator, known) != 0]
    claims += [_to_z3(_fraction(names.plain(base))[0], known) != 0 for base in names.inverses]
    if above is not None:
        claims.append(_to_z3(above[0], known) > _to_z3(above[1], known))
    free, solved = numerator.free_symbols | names.symbols, set()
    for base, name in names.roots.items():
        square, unit = _fraction(names.plain(base))
        claims.append(_to_z3(name**2 * unit - square, known) == 0)
        free |= {name, *square.free_symbols, *unit.free_symbols}
        solved |= set(sorted(square.free_symbols - solved - set(names.roots.values()), key=str)[:1])
    ordered = sorted(free, key=lambda name: (name not in names.roots.values(), str(name)))
    claims += [_to_z3(name, known) > 0 for name in ordered if name in names.positive]
    numbers = [nextprime(1000 // (k + 1) + 5 * k) for k in range(len(ordered))]
    for chosen in (numbers, numbers[::-1], None):
        pairs = dict(zip(ordered, chosen or (), strict=False))
        given = [(_to_z3(name, known), z3.RealVal(number)) for name, number in pairs.items() if name not in solved]
        solver = z3.Solver()
        solver.set("timeout", _MILLISECONDS)
        solver.add([z3.simplify(z3.substitute(claim, *given)) for claim in claims])
        answer = solver.check()
        if answer == z3.sat:
            found = {name: z3.substitute(_to_z3(name, known), *given) for name in names.symbols}
            return {name: _rational(solver.model().eval(number, True)) for name, number in found.items()}
    assert answer == z3.unsat, f"z3 does not know whether {numerator} = 0"
    return None


def _rational(number: Any) -> Any:
    """A number of z3's as a fraction; one that is a root, nearly."""
    if z3.is_algebraic_value(number):
        number = number.approx(2 * DIGITS)
    return sympy.Rational(number.numerator_as_long(), number.denominator_as_long())
