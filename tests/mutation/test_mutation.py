"""Mutants are what they say, each is put back, and one that changes results is killed."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.mutation import __main__ as mutation
from tests.mutation.__main__ import _STAGES, ROOT, Copy, least_rate, selected, stage_tests, summary
from tests.mutation.mutants import Mutant, drawn, mutants

SOURCE = b'''"""A module."""
LIMIT = 3  # \xc3\xa4


def f(x: int = 1) -> "int | None":
    """A text."""
    log.info("%d", 1 + 2)
    if x < LIMIT and not x:
        g(x)
        return x + 1
    return f"{x + 1}" or None
'''


def test_what_is_changed() -> None:
    found = {(mutant.line, mutant.old, mutant.new) for mutant in mutants("passes/a.py", SOURCE)}
    assert {(2, "3", "4"), (5, "1", "2"), (9, "g(x)", "pass"), (10, "return x + 1", "return None")} <= found
    assert {(8, "x < LIMIT", "(x <= LIMIT)"), (8, "not x", "(x)"), (10, "x + 1", "((x) - (1))")} <= found
    assert {line for line, *_ in found} == {2, 5, 8, 9, 10, 11}
    assert not any(old.startswith(("x + 1", "1")) for line, old, _ in found if line == 11)


def test_each_mutant_is_one_change() -> None:
    for mutant in mutants("passes/a.py", SOURCE):
        changed = mutant.applied(SOURCE)
        ast.parse(changed)
        rest = SOURCE[: mutant.begin], SOURCE[mutant.end :]
        assert changed == mutant.new.encode().join(rest) != mutant.old.encode().join(rest) == SOURCE
        with pytest.raises(ValueError, match="has changed"):
            mutant.applied(SOURCE + b"#")


def test_a_draw_is_the_same_for_a_seed_and_takes_files_in_turn() -> None:
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "mhc_compile" / "passes").rglob("*.py")]
    some = drawn(ROOT, files, 60, 1)
    assert some == drawn(ROOT, files, 60, 1) != drawn(ROOT, files, 60, 2)
    assert len({mutant.file for mutant in some}) > 50
    assert len({mutant.name for mutant in some}) == 60


def test_stage_tests_the_stage_come_first_and_within_the_budget() -> None:
    known = {"tests/passes/test_lower.py": 9.0, "tests/a.py": 3.0, "tests/b.py": 2.0, "tests/c.py": 1.0}
    order = selected("passes/lower/zeros.py", known, 12.5)
    assert order[0] == "tests/passes/test_lower.py"
    assert order[-2:] == ["tests/c.py", "tests/b.py"]
    for name in _STAGES:
        assert all((ROOT / file).exists() for file in stage_tests(f"passes/{name}.py")), name


def test_the_lower_bound() -> None:
    assert least_rate(0, 10) < 1e-9
    assert least_rate(10, 10) == pytest.approx(0.05**0.1, rel=1e-6)
    assert least_rate(463, 500) == pytest.approx(0.9039, abs=2e-3)  # Clopper and Pearson's, one-sided
    told = summary([{"outcome": "killed", "name": "a"}, {"outcome": "survived", "name": "b"}], 3)
    assert (told["killed"], told["survivors"], told["seed"]) == (0.5, ["b"], 3)
    assert json.loads(json.dumps(told)) == told


def test_what_a_few_tests_leave_is_judged_by_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a second round, which may be another run: what was judged is not judged again."""
    seen: list[tuple[str, bool]] = []

    def judge(copy: Copy, mutant: Mutant, files: list[str], seconds: float, *more: str) -> dict[str, Any]:
        few = "--thin" in more
        assert ("tests/a.py" in files) != few
        seen.append((mutant.name, few))
        outcome = "survived" if few and len(seen) % 2 else "killed"
        return {"name": mutant.name, "outcome": outcome, "seconds": 1.0}

    monkeypatch.setattr(Copy, "judge", judge)
    monkeypatch.setattr(mutation, "durations", lambda copy, tests, *_: {"tests/a.py": 1.0})
    out = tmp_path / "mutants.jsonl"
    given = ["--mutants", "4", "--files", "passes/report.py", "--out", str(out)]
    monkeypatch.setattr(mutation.time, "monotonic", lambda: 10.0 if len(seen) == 4 else 0.0)
    assert mutation.main([*given, "--seconds", "5"]) == 0
    assert [few for _, few in seen] == [True] * 4
    assert mutation.main([*given, "--seconds", "5"]) == 0
    names = [name for name, _ in seen]
    assert [few for _, few in seen[4:]] == [False] * 2
    assert names[4:] == names[:4:2]
    outcomes = [result["outcome"] for result in mutation._known(out).values()]
    assert outcomes == ["killed"] * 4
    assert summary([{"outcome": "killed", "name": "a"}, {"outcome": "undecided", "name": "b"}], 3)["killed"] == 0.5


def test_passes_are_reached_by_one_path() -> None:
    """A mutant of passes/ is one of the package that the tests import."""
    if not (ROOT / "passes").exists():
        pytest.skip("an sdist has the passes in place of the link")
    assert Path(ROOT / "mhc_compile" / "passes" / "report.py").samefile(ROOT / "passes" / "report.py")


@pytest.mark.thorough
def test_a_mutant_is_killed_and_taken_out(tmp_path: Path) -> None:
    copy, file = Copy(tmp_path), "passes/report.py"
    if not (copy.root / file).exists():
        pytest.skip("an sdist has the passes in place of the link")
    source = (copy.root / file).read_bytes()
    old = "return [site for site in self.sites if site.rewritten]"
    (mutant,) = [one for one in mutants(file, source) if one.old == old]
    result = copy.judge(mutant, ["tests/test_page.py"], 300, "--thin", "1")
    assert result["outcome"] == "killed"
    assert "test_page.py" in result["by"]
    assert (copy.root / file).read_bytes() == source
    assert copy.test(["tests/test_page.py"], 300, "--thin", "1") == ("survived", "")
