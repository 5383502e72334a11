"""Which symbolic sizes the guards of a graph leave only one value for."""

from __future__ import annotations

from typing import Any

import pytest
import sympy

from mhc_compile.compat.values import _solution

N = sympy.Symbol("s0", integer=True, positive=True)
C = sympy.Symbol("s1", integer=True, positive=True)


@pytest.mark.parametrize(
    ("equation", "expected"),
    [
        (sympy.Eq(N**2 + 2 * N, 24), (N, 4)),
        (sympy.Eq(32 * N, 128), (N, 4)),
        (sympy.Eq(3 * N**2, 12), (N, 2)),
        (sympy.Eq(N * C, 128), None),
        (sympy.Eq(N**2 + 2, 3 * N, evaluate=False), None),  # 1 and 2
        (sympy.Eq(N**2, 2, evaluate=False), None),
        (sympy.Eq(sympy.Mod(N, 8), 4), None),
        (sympy.Eq(sympy.floor(N / 8), 4), None),
        (sympy.Ne(N, 4), None),
        (N <= 4, None),
        (sympy.true, None),
    ],
    ids=str,
)
def test_equations_with_one_solution(equation: Any, expected: Any) -> None:
    assert _solution(equation) == expected
