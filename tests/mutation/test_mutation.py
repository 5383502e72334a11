"""Mutants are what they say, each is put back, and one that changes results is killed."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.mutation import __main__ as mutation
from tests.mutation.__main__ import ROOT, TESTS, Copy, judges, least_rate, summary
from tests.mutation.judges import Judges, finish
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
MUTANTS = mutants("passes/a.py", SOURCE)


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
    # A file's own do not depend on what else there is.
    alone = [mutant for mutant in drawn(ROOT, files[3:5], 4, 1) if mutant.file == files[3]]
    both = [mutant for mutant in drawn(ROOT, files, len(files) * 2, 1) if mutant.file == files[3]]
    assert both == alone[:2]


def _judges(folder: Path, known: dict[str, tuple[float, list[int]]], failed: str = "") -> Judges:
    """What a run has written in which these tests took so long, and saw these mutants of a file, and one failed."""
    told = [f"{number} {test}\n" for test, (_, numbers) in known.items() for number in numbers]
    (folder / "told_apart.txt").write_text("".join(told), encoding="utf-8")
    cases = [(*test.split("::"), seconds) for test, (seconds, _) in known.items()]
    said = "".join(
        f'<testcase file="{file}" name="{name}" time="{seconds}">{"<failure/>" * (name == failed)}</testcase>'
        for file, name, seconds in cases
    )
    (folder / "times.xml").write_text(f"<testsuite>{said}</testsuite>", encoding="utf-8")
    return finish(folder, MUTANTS)


def test_what_a_mutant_changes_judges_it_its_own_tests_first_and_some_of_each_file(tmp_path: Path) -> None:
    known = {
        "b.py::test_slow": (50.0, [0, 1]),
        "b.py::test_fast": (1.0, [0, 1]),
        "a.py::test_a": (3.0, [0]),
        "a.py::test_b": (2.0, [1]),
        "c.py::test_c": (9.0, [2]),
        "c.py::test_first": (3.0, [2]),
        "c.py::test_second": (3.5, [2]),
        "e.py::test_e": (8.0, [2]),
        "test_a.py::test_of_a": (8.0, [2]),
        "d.py::test_d": (1.0, [0, 1]),
    }
    found = _judges(tmp_path, known, "test_d")
    assert found.failed == ["d.py::test_d"]

    def tests(number: int, budget: float) -> list[str]:
        assert found.knows(MUTANTS[number])
        return found.tests(MUTANTS[number], budget)

    assert tests(1, 100) == ["a.py::test_b", "b.py::test_fast", "b.py::test_slow"]
    assert tests(1, 3.5) == ["b.py::test_fast", "a.py::test_b"]
    assert tests(0, 0) == ["a.py::test_a"]
    assert tests(0, 10) == ["b.py::test_fast", "a.py::test_a"]
    assert found.seconds(tests(0, 10)) == 4
    assert tests(2, 20) == ["c.py::test_first", "test_a.py::test_of_a", "e.py::test_e"]
    assert tests(2, 23) == ["c.py::test_first", "c.py::test_second", "test_a.py::test_of_a", "e.py::test_e"]
    assert tests(3, 100) == []
    assert not any(map(found.knows, mutants("passes/a.py", SOURCE + b"A = 1")))


def test_a_run_that_did_not_end_is_none(tmp_path: Path) -> None:
    _judges(tmp_path, {"a.py::test_a": (1.0, [0])})
    Judges(tmp_path)
    (tmp_path / "mutants.json").unlink()
    with pytest.raises(FileNotFoundError):
        Judges(tmp_path)
    (tmp_path / "times.xml").write_text('<testsuite><testcase name="a" time="0"><error/></testcase></testsuite>')
    with pytest.raises(ValueError, match="no test passed"):
        finish(tmp_path, MUTANTS)


def test_the_lower_bound() -> None:
    assert least_rate(0, 10) < 1e-9
    assert least_rate(10, 10) == pytest.approx(0.05**0.1, rel=1e-6)
    assert least_rate(463, 500) == pytest.approx(0.9039, abs=2e-3)  # Clopper and Pearson's, one-sided
    told = summary([{"outcome": "killed", "name": "a"}, {"outcome": "survived", "name": "b"}], 3)
    assert (told["killed"], told["survivors"], told["seed"]) == (0.5, ["b"], 3)
    assert json.loads(json.dumps(told)) == told


def test_what_is_judged_is_not_judged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that came to its end in time is gone on with; what changes nothing in any test survives."""
    seen: list[str] = []

    def test(self: Copy, tests: list[str], seconds: float, *more: str, **environment: str) -> tuple[str, str]:
        assert tests == ["tests/a.py::test_a"]
        assert seconds == 120 + 4 * 2.0
        seen.append((self.root / "passes" / "report.py").read_text(encoding="utf-8"))
        return "killed", "FAILED tests/a.py"

    class Fixed:
        def knows(self, mutant: Mutant) -> bool:
            return mutant.file == "passes/report.py"

        def tests(self, mutant: Mutant, budget: float) -> list[str]:
            assert budget == 7
            return ["tests/a.py::test_a"] * (mutant.name != names[0])

        def seconds(self, tests: list[str]) -> float:
            return 2.0 * len(tests)

    names = [mutant.name for mutant in drawn(ROOT, ["passes/report.py"], 4, 0)]
    monkeypatch.setattr(Copy, "test", test)
    monkeypatch.setattr(mutation, "judges", lambda *given: Fixed())
    out = tmp_path / "mutants.jsonl"
    given = ["--mutants", "4", "--files", "passes/report.py", "--out", str(out), "--budget", "7"]
    monkeypatch.setattr(mutation.time, "monotonic", lambda: 10.0 if len(seen) == 1 else 0.0)
    assert mutation.main([*given, "--seconds", "5"]) == 0
    assert list(mutation._known(out)) == names[:2]
    monkeypatch.setattr(mutation.time, "monotonic", lambda: 0.0)
    assert mutation.main([*given, "--seconds", "5"]) == 0
    outcomes = [mutation._known(out)[name]["outcome"] for name in names]
    assert outcomes == ["survived", "killed", "killed", "killed"]
    assert len(seen) == len(set(seen)) == 3
    assert [mutation._known(out)[name]["tests"] for name in names] == [0, 1, 1, 1]
    survivor, names[0] = names[0], ""
    assert mutation.main(given) == 0
    assert len(seen) == 3
    assert mutation.main([*given, "--again"]) == 0
    assert len(seen) == 4
    assert mutation._known(out)[survivor]["outcome"] == "killed"
    with pytest.raises(SystemExit, match=r"judges: made for other mutants than passes/places.py"):
        mutation.main(["--files", "passes/places.py", "--out", str(tmp_path / "other")])


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
    found = judges(copy, tmp_path / "judges", [mutant], 1, ["tests/test_page.py"], "--thin=1")
    assert (copy.root / file).read_bytes() == source
    tests = found.tests(mutant, 60)
    result = copy.judge(mutant, tests, 300)
    assert result["outcome"] == "killed"
    assert "test_page.py" in result["by"]
    assert (copy.root / file).read_bytes() == source
    assert copy.test(tests, 300) == ("survived", "")
    assert copy.judge(mutant, [], 300)["outcome"] == "survived"


def test_the_tests_that_judge_are_there() -> None:
    assert all((ROOT / test).exists() for test in TESTS)
