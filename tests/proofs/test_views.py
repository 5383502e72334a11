"""Views as index maps, for any sizes: where a layout says that an element lies is where torch's views have it.

Sizes are distinct primes here, as symbolic sizes are in the record. Layouts only multiply, divide and compare sizes for
divisibility. So a stride is a product of sizes that can be read off its prime factors, and is that for all sizes.

An index along several sizes, such as n C, is i C + c. z3 proves that i and c are unique, that a reshape keeps the
position of each element, and that the layout's offset is the element's position in the tensor that is viewed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import sympy
import z3

from mhc_compile.passes.recognise.layout import Layout
from tests.proofs.mutants import mutated

# Names of sizes. K is the number of rows of a projection, n² + 2 n or more.
SIZES = {"b": 13, "s": 17, "n": 11, "C": 1009, "K": 211}
Names = tuple[str, ...]
Step = tuple[Any, ...]


@dataclass(frozen=True)
class _Index:
    """An index along a dimension of these sizes: one digit for each; `start` is what comes before it in a slice."""

    sizes: Names
    digits: tuple[Any, ...]

    @staticmethod
    def of(sizes: Names, name: str) -> _Index:
        return _Index(sizes, tuple(z3.Int(f"{name}_{size}_{k}") for k, size in enumerate(sizes)))

    @property
    def value(self) -> Any:
        total: Any = z3.IntVal(0)
        for size, digit in zip(self.sizes, self.digits, strict=True):
            total = total * z3.Int(size) + digit
        return total


def _offset(element: Sequence[_Index], layout: Layout) -> Any:
    """Where a layout says that an element lies."""
    total = _product(layout.offset)
    for index, factors in zip(element, layout.dims, strict=True):
        sizes, digits = index.sizes, index.digits
        for size, stride in factors:
            taken = next(k for k in range(len(sizes) + 1) if _length(sizes[:k]) == size)
            total += _Index(sizes[:taken], digits[:taken]).value * _product(stride)
            sizes, digits = sizes[taken:], digits[taken:]
    return total


def _product(number: int) -> Any:
    """A number as a product of sizes and of what is no size."""
    of_prime = {prime: name for name, prime in SIZES.items()}
    factors = [
        z3.Int(of_prime[prime]) if prime in of_prime else z3.IntVal(prime)
        for prime, power in sympy.factorint(number).items()
        for _ in range(power)
    ]
    return z3.Product(factors) if factors else z3.IntVal(number)


def _position(shape: Sequence[_Index]) -> Any:
    """The position of an element in a contiguous tensor."""
    total: Any = z3.IntVal(0)
    for index in shape:
        total = total * z3.Product([z3.IntVal(1), *map(z3.Int, index.sizes)]) + index.value
    return total


def _length(sizes: Names) -> int:
    return prod(SIZES[size] for size in sizes)


def _apply(base: Sequence[Names], steps: Sequence[Step]) -> Iterator[tuple[Any, Any]]:
    """What has to be equal: positions before and after each reshape, and in the end position and offset.

    The element of the result is followed back through the steps.
    """
    shapes, layout = [list(base)], Layout.contiguous([_length(sizes) for sizes in base])
    for kind, *given in steps:
        shape = list(shapes[-1])
        if kind == "reshape":
            shape = list(given[0])
            layout = layout.reshape([_length(sizes) for sizes in shape])
        elif kind == "permute":
            shape = [shape[d] for d in given[0]]
            layout = layout.permute(given[0])
        elif kind == "slice":
            axis, start, shape[axis] = given
            layout = layout.select(axis, start(SIZES["n"]), _length(shape[axis]))
        else:
            shape.insert(0, given[0])
            layout = layout.expand([_length(sizes) for sizes in shape])
        shapes.append(shape)
    element = [_Index.of(sizes, f"i{d}") for d, sizes in enumerate(shapes[-1])]
    offset = _offset(element, layout)
    for (kind, *given), shape in zip(reversed(steps), reversed(shapes[:-1]), strict=True):
        if kind == "reshape":
            assert [size for index in element for size in index.sizes] == [size for sizes in shape for size in sizes]
            digits = [digit for index in element for digit in index.digits]
            before = _position(element)
            element = [_Index(sizes, tuple(digits.pop(0) for _ in sizes)) for sizes in shape]
            yield before, _position(element)
        elif kind == "permute":
            element = [element[list(given[0]).index(d)] for d in range(len(shape))]
        elif kind == "slice":
            axis, start, _ = given
            element[axis] = _Index(shape[axis], (start(z3.Int("n")) + element[axis].value,))
        else:
            element = element[1:]
    yield _position(element), offset


VIEWS: dict[str, tuple[Sequence[Names], Sequence[Step]]] = {
    "flatten streams": ([("b",), ("n",), ("C",)], [("reshape", [("b",), ("n", "C")])]),
    "tokens in one dimension": (
        [("b",), ("s",), ("n",), ("C",)],
        [("reshape", [("b", "s"), ("n", "C")]), ("reshape", [("b", "s"), ("n",), ("C",)])],
    ),
    "streams last": ([("b",), ("n",), ("C",)], [("permute", [0, 2, 1]), ("permute", [1, 0, 2])]),
    "streams in the batch": (
        [("b", "n"), ("s",), ("C",)],
        [("reshape", [("b",), ("n",), ("s",), ("C",)]), ("permute", [0, 2, 1, 3])],
    ),
    "streams first, taken apart and flattened": (
        [("n",), ("b",), ("s",), ("C",)],
        [("reshape", [("n",), ("b", "s"), ("C",)]), ("permute", [1, 0, 2])],
    ),
    "rows of the mixing matrix, transposed": (
        [("b",), ("K",)],
        [("slice", 1, lambda n: 2 * n, ("n", "n")), ("reshape", [("b",), ("n",), ("n",)]), ("permute", [0, 2, 1])],
    ),
    "rows of the post gate": ([("b",), ("s",), ("K",)], [("slice", 2, lambda n: n, ("n",)), ("permute", [2, 0, 1])]),
    "channels first, flattened with the streams first": (
        [("b",), ("C",), ("n",)],
        [("permute", [0, 2, 1]), ("reshape", [("b",), ("n", "C")])],
    ),
    "a turned cube": ([("n",), ("n",), ("n",)], [("permute", [2, 0, 1])]),
    "copies of one embedding": (
        [("b",), ("C",)],
        [("expand", ("n",)), ("permute", [1, 0, 2]), ("permute", [0, 2, 1])],
    ),
}


def _prove_views(name: str) -> None:
    for one, other in _apply(*VIEWS[name]):
        solver = z3.Solver()
        solver.add(*[z3.Int(size) > 0 for size in SIZES], one != other)
        if solver.check() == z3.sat:
            raise AssertionError(f"{name}: differs where {solver.model()}")


@pytest.mark.parametrize("name", VIEWS)
def test_a_layout_says_where_elements_lie(name: str) -> None:
    _prove_views(name)


@pytest.mark.parametrize(
    ("function", "old", "new", "name"),
    [
        (
            Layout.permute,
            "self.dims[d] for d in order",
            "self.dims[order.index(d)] for d in range(len(order))",
            "a turned cube",
        ),
        (Layout.select, "self.offset + start * stride", "self.offset", "rows of the post gate"),
        (
            Layout.reshape,
            "_reshaped(self, tuple(shape))",
            "_contiguous(tuple(shape))",
            "channels first, flattened with the streams first",
        ),
    ],
    ids=["the inverse order", "a slice without its start", "a reshape that forgets"],
)
def test_another_layout_is_refuted(function: Callable[..., Any], old: str, new: str, name: str) -> None:
    with mutated(function, old, new), pytest.raises(AssertionError, match="differs where"):
        _prove_views(name)


def test_digits_are_unique() -> None:
    """i C + c = j C + d with c, d < C only for i = j and c = d, for any C."""
    i, c, j, d, size = z3.Ints("i c j d C")
    solver = z3.Solver()
    solver.add(c >= 0, c < size, d >= 0, d < size, i * size + c == j * size + d)
    solver.push()
    solver.add(z3.Or(i != j, c != d))
    assert solver.check() == z3.unsat
    solver.pop()
    solver.add(i == j)
    assert solver.check() == z3.sat
