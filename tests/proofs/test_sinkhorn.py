"""Sinkhorn: a half-step, its gradient, and each start are those of the programs; induction gives any number.

A half-step is proved for matrices of free positive symbols, so for what any number of half-steps before has made.
`_start` is replaced for it. `test_more_half_steps_continue_fewer` is the step of the induction.

Without eps, exp(L) is kept as m * 2^k. `_exponential` and `_power_of_2` are replaced by what they promise: m * 2^k =
exp(L) / c with any c for each line, and any k.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import cycle, islice, permutations
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from torch import Tensor

from mhc_compile.forms import SINKHORN_AXES, SINKHORN_STARTS, Sinkhorn
from mhc_compile.ops import sinkhorn
from tests.proofs.calculus import prove_gradients
from tests.proofs.equality import Refuted, prove
from tests.proofs.mutants import mutated
from tests.proofs.symbols import Symbols, Terms, in_range

# The package has the operator under the module's name.
module = sys.modules["mhc_compile.ops.sinkhorn"]
UP_TO_8 = [2, 4, pytest.param(8, marks=pytest.mark.thorough)]
STEP = [
    (first, clamp, holds) for first in SINKHORN_AXES for clamp, holds in ((False, False), (True, False), (True, True))
]


@pytest.fixture(autouse=True)
def _one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without 63 tokens of zeros, which fill a vector."""
    monkeypatch.setattr(module, "_VECTOR", 1)


@pytest.fixture
def any_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator is given the matrix before the first half-step; one without eps is stored divided by UNIT."""

    def start(logits: Tensor, form: Sinkhorn) -> tuple[Tensor, float, float]:
        return logits / module._unit(form), 0.0, form.eps

    monkeypatch.setattr(module, "_start", start)
    monkeypatch.setattr(module, "_start_gradient", lambda d_start, start, logits, form: d_start)


def _deciding(clamp_holds: bool) -> Symbols:
    """Symbols of which a sum is above the eps of a clamp, or below. A gradient is no larger than the largest float."""

    def above(a: Any, b: Any) -> bool:
        if a.is_number or b.is_number:
            return bool(b.is_number and b < 0)
        return clamp_holds if a.is_Symbol else not clamp_holds

    return Symbols(above=above)


def _form(symbols: Symbols, first: str, clamp: bool, steps: int = 1) -> dict[str, Any]:
    eps = symbols.number("eps")
    return {"steps": steps, "start": "plain_exp", "first": first, "eps": eps, "start_eps": 0.0, "clamp": clamp}


def _prove_step(n: int, first: str, clamp: bool, holds: bool) -> None:
    symbols = _deciding(holds)
    matrix, form = symbols.tensor("p", 1, n, n, positive=True), _form(symbols, first, clamp)
    with symbols:
        got, wanted = sinkhorn(matrix, **form), Sinkhorn(**form).equation(matrix.log())
        prove(symbols.terms(got), symbols.terms(wanted))


@pytest.mark.usefixtures("any_matrix")
@pytest.mark.parametrize(("first", "clamp", "holds"), STEP)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_half_step_divides_by_sums(n: int, first: str, clamp: bool, holds: bool) -> None:
    _prove_step(n, first, clamp, holds)


@pytest.mark.usefixtures("any_matrix")
@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        (module._total, ".add_(eps)", ""),
        (module._axes, '(_ROWS, _COLUMNS) if form.first == "rows"', '(_ROWS, _COLUMNS) if form.first != "rows"'),
        (module._axes, "form.steps", "form.steps - 1"),
    ],
    ids=["no eps", "the other axis", "one half-step fewer"],
)
def test_another_half_step_is_refuted(function: Callable[..., Any], old: str, new: str) -> None:
    with mutated(function, old, new), pytest.raises(Refuted):
        _prove_step(2, "rows", False, False)


@pytest.mark.usefixtures("any_matrix")
@pytest.mark.parametrize(("first", "clamp", "holds"), STEP)
@pytest.mark.parametrize("n", UP_TO_8)
def test_gradient_of_a_half_step(n: int, first: str, clamp: bool, holds: bool) -> None:
    symbols = _deciding(holds)
    matrix, form = symbols.tensor("p", 1, n, n, positive=True), _form(symbols, first, clamp)
    prove_gradients(symbols, lambda matrix: (sinkhorn(matrix, **form),), matrix)


@pytest.mark.usefixtures("any_matrix")
@pytest.mark.parametrize("first", SINKHORN_AXES)
@pytest.mark.parametrize("n", UP_TO_8)
def test_half_steps_without_eps(n: int, first: str) -> None:
    """In the form that is stored divided by a power of 2, and with the gradient that is centred twice."""
    symbols = _deciding(False)
    matrix = symbols.tensor("p", 1, n, n, positive=True)
    # `iterated` takes the first half-step into the start, which is replaced here, and goes on with the other axis.
    form = {"steps": 2, "start": "exp", "first": "columns" if first == "rows" else "rows", "eps": 0.0, "start_eps": 0.0}
    with symbols:
        got = sinkhorn(matrix, **form)
        prove(symbols.terms(got), symbols.terms(matrix / matrix.sum(-1 if first == "rows" else -2, keepdim=True)))
    prove_gradients(symbols, lambda matrix: (sinkhorn(matrix, **form),), matrix)


@pytest.mark.usefixtures("any_matrix")
@pytest.mark.parametrize(
    ("function", "old", "new", "eps"),
    [
        (module._backward, "d_out - (d_out * p).sum(axis, keepdim=True)", "d_out", True),
        (module._backward, "(d_out / total).clamp", "d_out.clamp", True),
        (module._centred, "(centred * p + lost * p)", "(centred + lost)", False),
    ],
    ids=["no sum", "no division", "an unweighted sum"],
)
def test_another_gradient_of_a_half_step_is_refuted(
    function: Callable[..., Any], old: str, new: str, eps: bool
) -> None:
    symbols = _deciding(False)
    matrix = symbols.tensor("p", 1, 2, 2, positive=True)
    form = _form(symbols, "rows", False) if eps else {"steps": 2, "start": "exp", "eps": 0.0, "start_eps": 0.0}
    with mutated(function, old, new), pytest.raises(Refuted):
        prove_gradients(symbols, lambda matrix: (sinkhorn(matrix, **form),), matrix)


def test_more_half_steps_continue_fewer() -> None:
    """The step of the induction: one half-step more is a half-step, over the other axis, of what there was."""
    for first in SINKHORN_AXES:
        both = module._axes(Sinkhorn(2, first=first))
        assert sorted(both) == [0, 1]
        for steps in range(200):
            axes = module._axes(Sinkhorn(steps + 1, first=first))
            assert axes == [*module._axes(Sinkhorn(steps, first=first)), both[steps % 2]]


@pytest.mark.usefixtures("any_matrix")
@pytest.mark.parametrize("first", SINKHORN_AXES)
def test_half_steps_one_after_the_other(first: str) -> None:
    """Two and three half-steps in one call, against as many calls of one."""
    symbols = _deciding(False)
    matrix = symbols.tensor("p", 1, 2, 2, positive=True)
    with symbols:
        one = matrix
        for steps, axis in enumerate(islice(cycle([first, *(a for a in SINKHORN_AXES if a != first)]), 3), start=1):
            one = sinkhorn(one, **_form(symbols, axis, False))
            many = sinkhorn(matrix, **_form(symbols, first, False, steps))
            prove(*(_without_names(symbols.terms(result)) for result in (one, many)))


def _without_names(terms: Terms) -> Terms:
    """Each call has an eps of its own name."""
    eps = sympy.Symbol("eps", positive=True)
    pairs = {symbol: eps for term in terms.flat for symbol in term.free_symbols if symbol.name == "eps"}
    return np.frompyfunc(lambda term: term.xreplace(pairs), 1, 1)(terms)  # type: ignore[no-any-return]


@pytest.mark.parametrize("axis", SINKHORN_AXES)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_half_step_with_logarithms_is_one_without(n: int, axis: str) -> None:
    """Of any matrix, whose entries are the exponentials of free logits; so any number of them, with no eps."""
    symbols = Symbols()
    logits, eps = symbols.tensor("l", 1, n, n), symbols.number("eps")
    with symbols:
        with_logarithms = Sinkhorn(1, "plain_exp", axis, eps=0.0, start_eps=0.0).equation(logits)
        plain = Sinkhorn(1, "plain_exp", axis, eps=eps, start_eps=0.0).equation(logits)
        prove(symbols.terms(with_logarithms), _at_zero(symbols.terms(plain)))
        # The logarithms of one step are the logits of the next.
        step = logits.log_softmax(-1 if axis == "rows" else -2)
        prove(symbols.terms(step.exp()), symbols.terms(with_logarithms))
        with pytest.raises(Refuted):
            prove(symbols.terms(with_logarithms), symbols.terms(plain))


def _at_zero(terms: Terms) -> Terms:
    """Formulas without eps."""
    zero = {sympy.Symbol("eps", positive=True): sympy.Integer(0)}
    return np.frompyfunc(lambda term: term.xreplace(zero), 1, 1)(terms)  # type: ignore[no-any-return]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_some_half_steps_with_logarithms_are_those_without(steps: int) -> None:
    symbols = Symbols()
    logits, eps = symbols.tensor("l", 1, 2, 2), symbols.number("eps")
    for start in ("softmax", "plain_exp"):
        form = {"steps": steps, "start": start, "start_eps": 0.0}
        with symbols:
            with_logarithms = symbols.terms(Sinkhorn(**form, eps=0.0).equation(logits))
            plain = _at_zero(symbols.terms(Sinkhorn(**form, eps=eps).equation(logits)))
        prove(with_logarithms, plain)


def _kept(monkeypatch: pytest.MonkeyPatch, symbols: Symbols) -> None:
    """exp(L) as m * 2^k, with any k, and divided by any number for each line."""

    def exponential(logits: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        shift, k = logits.amax(axis, keepdim=True), symbols.tensor("k", *logits.shape)
        terms = symbols.terms(torch.exp(logits - shift)) / 2 ** symbols.terms(k)
        return symbols.of(terms), k

    def power(exponent: Tensor) -> Tensor:
        return symbols.of(2 ** symbols.terms(exponent))

    monkeypatch.setattr(module, "_exponential", exponential)
    monkeypatch.setattr(module, "_power_of_2", power)


def _eps(symbols: Symbols, without: bool) -> dict[str, float]:
    return {name: 0.0 if without else symbols.number(name) for name in ("eps", "start_eps")}


@pytest.mark.parametrize("without_eps", [False, True])
@pytest.mark.parametrize("first", SINKHORN_AXES)
@pytest.mark.parametrize("start", SINKHORN_STARTS)
@pytest.mark.parametrize(("n", "steps"), [(2, 1), (2, 2), (4, 1)])
def test_every_start_is_that_of_the_program(
    n: int, steps: int, start: str, first: str, without_eps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    symbols = Symbols(above=in_range)
    _kept(monkeypatch, symbols)
    logits = symbols.tensor("l", 1, n, n)
    form = {"steps": steps, "start": start, "first": first, **_eps(symbols, without_eps)}
    with symbols:
        prove(symbols.terms(sinkhorn(logits, **form)), symbols.terms(Sinkhorn(**form).equation(logits)))


@pytest.mark.parametrize(
    ("function", "old", "new", "start", "without_eps"),
    [
        (module._start, "form.start_eps * root * root", "form.start_eps * root", "plain_exp", False),
        (module._start, "form.eps * root * root", "form.eps", "global_exp", False),
        (module._shift_axes, '"exp": (_first_axis(form),)', '"exp": (_other_axis(form),)', "exp", False),
        (module._normalised, "m * _power_of_2(k), _other_axis(form)", "m, _other_axis(form)", "exp", True),
        (module._normalised, "_power_of_2(k), _other_axis", "_power_of_2(k), _first_axis", "exp", True),
    ],
    ids=["a part of the shift", "an eps without the shift", "shifted along the other axis", "no 2^k", "the other axis"],
)
def test_another_start_is_refuted(
    function: Callable[..., Any], old: str, new: str, start: str, without_eps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    symbols = Symbols(above=in_range)
    _kept(monkeypatch, symbols)
    logits = symbols.tensor("l", 1, 2, 2)
    form = {"steps": 1, "start": start, "first": "columns", **_eps(symbols, without_eps)}
    with symbols, mutated(function, old, new), pytest.raises(Refuted):
        prove(symbols.terms(sinkhorn(logits, **form)), symbols.terms(Sinkhorn(**form).equation(logits)))


# Which of four logits is larger than which: every order is a case of its own.
ORDERS = list(permutations(range(4)))
SOME_ORDERS = [pytest.param(order, marks=() if i % 12 == 0 else pytest.mark.thorough) for i, order in enumerate(ORDERS)]


def _prove_gradient_of_start(
    monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...], steps: int, start: str, first: str, without_eps: bool
) -> None:
    names = [f"l0_{k // 2}_{k % 2}" for k in order]

    def largest(terms: list[Any]) -> Any:
        known = [term for term in terms if term.is_Symbol and term.name in names]
        return min(known, key=lambda term: names.index(term.name)) if len(known) == len(terms) else None

    symbols = Symbols(above=in_range, largest=largest)
    _kept(monkeypatch, symbols)
    form = {"steps": steps, "start": start, "first": first, **_eps(symbols, without_eps)}
    prove_gradients(symbols, lambda logits: (sinkhorn(logits, **form),), symbols.tensor("l", 1, 2, 2))


@pytest.mark.parametrize("without_eps", [False, True])
@pytest.mark.parametrize("first", SINKHORN_AXES)
@pytest.mark.parametrize("start", SINKHORN_STARTS)
@pytest.mark.parametrize("order", SOME_ORDERS)
def test_gradient_of_every_start(
    order: tuple[int, ...], start: str, first: str, without_eps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one half-step behind it: the chain rule goes on from there."""
    _prove_gradient_of_start(monkeypatch, order, 1, start, first, without_eps)


@pytest.mark.parametrize(
    ("old", "new", "start", "without_eps"),
    [
        ("(d_start * start).sum(_ROWS, keepdim=True)", "0.0", "softmax", False),
        ("d_logits - largest", "d_logits - 0.0 * largest", "exp", False),
        ("_centred(d_start, start, _other_axis(form), size)", "d_start", "exp", True),
    ],
    ids=["no sum of the softmax", "a shift without gradient", "no sum of the normalised start"],
)
def test_another_gradient_of_a_start_is_refuted(
    old: str, new: str, start: str, without_eps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mutated(module._start_gradient, old, new), pytest.raises(Refuted):
        _prove_gradient_of_start(monkeypatch, ORDERS[0], 1, start, "columns", without_eps)
