"""The judge itself: what is true is proved, what is false is refuted, and what symbols cannot do is an error."""

from __future__ import annotations

import pytest
import sympy
import torch

from tests.proofs.equality import Refuted, prove, refute
from tests.proofs.short import Short
from tests.proofs.symbols import Symbols, Undecided

X, Y = sympy.symbols("x y", positive=True)
TRUE = [
    ((X + Y) ** 2, X**2 + 2 * X * Y + Y**2),
    (1 / X - 1 / Y, (Y - X) / (X * Y)),
    (1 / sympy.sqrt(X + Y), sympy.sqrt(X + Y) / (X + Y)),
    (1 / (1 + sympy.exp(-X)), sympy.exp(X) / (1 + sympy.exp(X))),
    (sympy.exp(X - sympy.log(Y)), sympy.exp(X) / Y),
    (2 ** (X + 3) / 2**X, sympy.Integer(8)),
]
FALSE = [
    ((X + Y) ** 2, X**2 + Y**2),
    (1 / (X + Y), 1 / X + 1 / Y),
    (sympy.sqrt(X + Y), sympy.sqrt(X) + sympy.sqrt(Y)),
    (1 / (1 + sympy.exp(-X)), sympy.exp(X)),
    (sympy.exp(X + Y), sympy.exp(X) + sympy.exp(Y)),
    (X, X + sympy.Rational(1, 10**12)),
]


@pytest.mark.parametrize(("left", "right"), TRUE)
def test_what_is_true_is_proved(left: sympy.Expr, right: sympy.Expr) -> None:
    prove(left, right)
    with pytest.raises(AssertionError, match="the mutant was proved"):
        refute(left, right)


@pytest.mark.parametrize(("left", "right"), FALSE)
def test_what_is_false_is_refuted_with_numbers(left: sympy.Expr, right: sympy.Expr) -> None:
    model = refute(left, right)
    numbers = {symbol: sympy.Rational(model[symbol.name]) for symbol in (left - right).free_symbols}
    assert sympy.N((left - right).subs(numbers), 50) != 0


def test_whole_programs_are_told_apart() -> None:
    """Sums in another order are the same formula; products that have to be multiplied out are proved."""
    symbols = Short()
    a, b, c = (symbols.tensor(name, 3) for name in "abc")
    with symbols:
        symbols.prove(symbols.terms((a + b) + c), symbols.terms(a + (c + b)), "the sum")
        symbols.prove(symbols.terms((a + b) * c), symbols.terms(a * c + b * c), "the product")
        with pytest.raises(Refuted):
            symbols.prove(symbols.terms((a + b) * c), symbols.terms(a * c + b), "the product")


def test_what_symbols_cannot_do() -> None:
    symbols = Symbols()
    x = symbols.tensor("x", 2)
    with symbols:
        with pytest.raises(ValueError, match="never written"):
            symbols.terms(torch.empty(2) + x)
        with pytest.raises(TypeError, match="would turn formulas into"):
            x.to(torch.int32)
        with pytest.raises(Undecided):
            x.clamp_min(0.5)
        with pytest.raises(NotImplementedError, match="erf of symbols"):
            x.erf()
