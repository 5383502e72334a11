"""A source with probes computes what it did, and tells every mutant that computes something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.mutation import probes
from tests.mutation.__main__ import ROOT
from tests.mutation.mutants import mutants
from tests.mutation.probes import probed

# Each function of `given` is called with each of its values.
SOURCE = b'''"""A module."""

from __future__ import annotations


def compared(x):
    """A text."""
    return [x < 3, x <= 3, x > 3, x >= 3, x == 3, x != 3, x is None, x in (1, 3)]


def calculated(x):
    return [x + 2, x - 2, x * 3, x / 4, x // 2, x % 2, x & 6, x | 6, x << 1, x >> 1, -x, not x]


def conditions(x):
    found = []
    if x > 1 and x < 5 or x == 7:
        found.append(1)
    left = [1, 2, 3]
    while left.pop() and x > 6:
        x -= 1
    if (half := x / 2) and half > 1:
        found.append(half)
    return found, x and 1 or 2, "a" if x else "b"


def waiting(x):
    return x is None or x.missing


def gone_through(x):
    for y in range(x):
        if y == 2:
            continue
        if y == 4:
            break
        x += y
    return [y for y in range(x) if y > 2 if y < 7], {y: 1 for y in range(x) if y}


def chosen(x):
    several = [x, 3, 5]
    return [
        any(y > 3 for y in several), all(y > 3 for y in several), min(several), max(several, key=lambda y: -y),
        max(x, 4), any([]), min([], default=x),
    ]


def matched(x):
    match x:
        case 3:
            return "three"
        case _:
            return None


def given_once(x, more=2, *, less=1):
    @given_by(LIMIT + 1)
    def inner(y=x + 1):
        return y * more
    return inner(), less


def returned(x):
    if x == 3:
        return None
    return x


def given_by(number):
    return lambda function: lambda: function() + number


LIMIT = 4
given = [compared, calculated, conditions, gone_through, chosen, matched, given_once, returned, waiting]
'''
VALUES = [0, 1, 2, 3, 4, 7, 9]
MUTANTS = mutants("passes/a.py", SOURCE)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    monkeypatch.setattr(probes, "_told", set())
    return probes._told


def _functions(source: str | bytes) -> list[Callable[[Any], Any]]:
    names: dict[str, Any] = {}
    exec(compile(source, "<source>", "exec"), names)
    found: list[Callable[[Any], Any]] = names["given"]
    return found


def _outcome(function: Callable[[Any], Any], value: Any) -> Any:
    try:
        return function(value)
    except Exception as error:
        return type(error)


def test_what_changes_a_result_is_told(told: set[int]) -> None:
    with_probes, without = _functions(probed(SOURCE, dict(enumerate(MUTANTS)))), _functions(SOURCE)
    assert not told, "a probe that runs on import belongs to no test"
    seen = {}
    for at, function in enumerate(without):
        for value in VALUES:
            told.clear()
            assert repr(_outcome(with_probes[at], value)) == repr(_outcome(function, value))
            seen[at, value] = {*told}
    noticed = 0
    for number, mutant in enumerate(MUTANTS):
        changed = _functions(mutant.applied(SOURCE))
        for at, function in enumerate(without):
            for value in VALUES:
                if repr(_outcome(changed[at], value)) != repr(_outcome(function, value)):
                    assert number in seen[at, value], (mutant.name, value)
                    noticed += 1
    assert noticed > 300


def test_what_changes_nothing_is_not_told(told: set[int]) -> None:
    of_source = {(mutant.old, mutant.new): number for number, mutant in enumerate(MUTANTS)}
    compared, calculated, conditions, _, chosen, *_, returned, _ = _functions(probed(SOURCE, dict(enumerate(MUTANTS))))
    compared(2)
    assert of_source["x == 3", "(x != 3)"] in told
    assert told.isdisjoint({of_source["x < 3", "(x <= 3)"], of_source["x >= 3", "(x > 3)"]})
    compared(3)
    assert {of_source["x < 3", "(x <= 3)"], of_source["x >= 3", "(x > 3)"]} <= told
    told.clear()
    calculated(0)
    assert of_source["x * 3", "((x) // (3))"] not in told
    conditions(7)
    assert of_source["x > 1 and x < 5", "((x > 1) or (x < 5))"] in told
    assert of_source["x > 1 and x < 5", "((x < 5))"] not in told
    told.clear()
    chosen(4)
    assert of_source["max", "min"] not in told, "the last one is max(x, 4)"
    chosen(9)
    assert of_source["max", "min"] in told
    told.clear()
    returned(3)
    assert of_source["return x", "return None"] not in told


def test_what_is_no_number_is_computed_once(told: set[int]) -> None:
    """What a mutant would do with a symbolic size could add a guard."""

    class Size(int):
        def __lt__(self, other: int) -> bool:
            asked.append("<")
            return int(self) < other

        def __le__(self, other: int) -> bool:
            asked.append("<=")
            return int(self) <= other

    asked: list[str] = []
    assert probes.computed(5, Size(2), 3, "lt", "le") is True
    assert asked == ["<"]
    assert told == {5}


def test_conditions_are_evaluated_once(told: set[int]) -> None:
    asked: list[str] = []

    def condition(name: str, value: Any) -> Callable[[], Any]:
        return lambda: asked.append(name) or value  # type: ignore[func-returns-value]

    assert probes.conditions([1, 2, 3], True, condition("a", 0), condition("b", 4)) == 0
    assert asked == ["a", "b"]
    assert told == {1, 2}


def test_the_test_that_runs_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "told"
    monkeypatch.setenv(probes.FILE, str(file))
    monkeypatch.setattr(probes, "_told", set())
    for test in ("a.py::test_a[x y] (call)", "a.py::test_a[x y] (call)", "b.py::test_b (setup)"):
        monkeypatch.setenv("PYTEST_CURRENT_TEST", test)
        probes.seen(3)
        probes.seen(3)
        probes.pytest_runtest_logfinish()
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    probes.seen(4)
    assert file.read_text(encoding="utf-8") == "3 a.py::test_a[x y]\n" * 2 + "3 b.py::test_b\n"


def test_all_passes_can_have_probes() -> None:
    for path in sorted((ROOT / "mhc_compile" / "passes").rglob("*.py")):
        source = path.read_bytes()
        text = probed(source, dict(enumerate(mutants("a.py", source))))
        compile(text, str(path), "exec")
