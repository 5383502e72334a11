"""Which tests run which lines of passes/, and how long each of them takes."""

from __future__ import annotations

import ast
import json
import re
import xml.etree.ElementTree as xml
from collections import defaultdict
from pathlib import Path

from coverage import CoverageData

from tests.mutation.mutants import Mutant, hash_of

_LINES, _TIMES, _SOURCES = "lines.sqlite", "times.xml", "sources.json"


def options(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a run of pytest that writes its lines and times into a folder."""
    arguments = ["--maxfail=0", "--cov=mhc_compile/passes", "--cov-context=test", "--cov-report="]
    arguments += [f"--junitxml={folder / _TIMES}", "-o", "junit_family=xunit1"]
    return arguments, {"COVERAGE_FILE": str(folder / _LINES)}


def finish(folder: Path, root: Path) -> Reached:
    """Write down which sources the run had, and read what it has written. Raises ValueError if no test passed."""
    if not _tests(folder)[0]:
        raise ValueError(f"{folder}: no test passed without a mutant")
    sources = sorted((root / "passes").rglob("*.py"))
    hashes = {str(file.relative_to(root)): hash_of(file.read_bytes()) for file in sources}
    (folder / _SOURCES).write_text(json.dumps(hashes, indent=1), encoding="utf-8")
    return Reached(folder)


class Reached:
    """What such a run has written. Raises FileNotFoundError if there was none, or if it did not end.

    failed: tests that failed, and so cannot judge.
    """

    def __init__(self, folder: Path) -> None:
        self._hashes = json.loads((folder / _SOURCES).read_text(encoding="utf-8"))
        self._times, self.failed = _tests(folder)
        data = CoverageData(str(folder / _LINES))
        data.read()
        self._lines: dict[str, dict[int, set[str]]] = {}
        for measured in data.measured_files():
            file = next((one for one in self._hashes if measured.endswith(f"/{one}")), None)
            if file is not None:
                contexts = data.contexts_by_lineno(measured).items()
                self._lines[file] = {line: {one.rpartition("|")[0] for one in names} - {""} for line, names in contexts}

    def knows(self, mutant: Mutant) -> bool:
        """Whether the run had the file as the mutant has it."""
        return bool(self._hashes.get(mutant.file) == mutant.source)

    def tests(self, mutant: Mutant, source: bytes, budget: float) -> list[str]:
        """Tests that run what is changed, as many as fit into the budget of seconds; one at least.

        First those in a file that is named after the module, then the fastest one of each file, the second one of each,
        and so on. Those of a file stay together, which share what is made once for a file; files that are done first
        come first.
        """
        lines = self._lines.get(mutant.file, {})
        found: set[str] = set().union(*(lines.get(line, ()) for line in _statement(source, mutant.line)))
        own = re.compile(rf"(^|_){Path(mutant.file.removesuffix('/__init__.py')).stem}(_|$)")
        turns: dict[str, int] = defaultdict(int)
        order = []
        for test in sorted(found & self._times.keys(), key=lambda test: (self._times[test], test)):
            file = test.partition("::")[0]
            order.append((not own.search(Path(file).stem), turns[file], self._times[test], test))
            turns[file] += 1
        chosen: dict[str, list[str]] = defaultdict(list)
        left = budget
        for *_, seconds, test in sorted(order):
            if not chosen or seconds <= left:
                left -= seconds
                chosen[test.partition("::")[0]].append(test)
        groups = sorted(chosen.values(), key=self.seconds)
        return [test for group in groups for test in group]

    def seconds(self, tests: list[str]) -> float:
        return sum(self._times[test] for test in tests)


def _tests(folder: Path) -> tuple[dict[str, float], list[str]]:
    """How long each test took that passed or was skipped, and those that failed."""
    times, failed = {}, []
    for case in xml.parse(folder / _TIMES).iter("testcase"):
        test = f"{case.attrib.get('file', '')}::{case.attrib['name']}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(test)
        else:
            times[test] = float(case.attrib["time"])
    return times, failed


def _statement(source: bytes, line: int) -> set[int]:
    """The lines of the statement on a line, without those of statements inside it.

    What runs when a module is imported belongs to no test: its function stands for it, or else the whole file.
    """
    tree = ast.parse(source)
    holding = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and line in _lines(node)]
    functions = [node for node in holding if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    if any(node.body[0].lineno <= line for node in functions):
        own = max(holding, key=lambda node: node.lineno)
        inside = [node for node in ast.walk(own) if isinstance(node, ast.stmt) and node is not own]
        return {*_lines(own)}.difference(*map(_lines, inside)) | {line}
    return set().union(*map(_lines, functions[-1:] or tree.body))


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)
