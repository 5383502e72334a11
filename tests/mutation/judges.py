"""Which tests judge a mutant, and how long each of them takes."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as xml
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.mutation import probes
from tests.mutation.mutants import Mutant

_TOLD, _TIMES, _NAMES = "told_apart.txt", "times.xml", "mutants.json"


def options(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a run of pytest that writes times, and what its probes see, into a folder."""
    arguments = ["-p", probes.__name__, "--maxfail=0", f"--junitxml={folder / _TIMES}", "-o", "junit_family=xunit1"]
    return arguments, {probes.FILE: str(folder / _TOLD)}


def finish(folder: Path, numbered: Sequence[Mutant]) -> Judges:
    """Write down for which mutants the run had probes, and read it. Raises ValueError if no test passed."""
    if not _tests(folder)[0]:
        raise ValueError(f"{folder}: no test passed without a mutant")
    (folder / _NAMES).write_text(json.dumps([mutant.name for mutant in numbered], indent=1), encoding="utf-8")
    return Judges(folder)


class Judges:
    """What such a run has written. Raises FileNotFoundError if there was none, or if it did not end.

    failed: tests that failed, and so cannot judge.
    """

    def __init__(self, folder: Path) -> None:
        names = json.loads((folder / _NAMES).read_text(encoding="utf-8"))
        self._times, self.failed = _tests(folder)
        self._told: dict[str, set[str]] = {name: set() for name in names}
        told = folder / _TOLD
        for line in told.read_text(encoding="utf-8").splitlines() if told.exists() else ():
            number, _, test = line.partition(" ")
            self._told[names[int(number)]].add(test)

    def knows(self, mutant: Mutant) -> bool:
        """Whether the run had a probe for this mutant."""
        return mutant.name in self._told

    def tests(self, mutant: Mutant, budget: float) -> list[str]:
        """Tests in which the mutant changes something, as many as fit into the budget of seconds; one at least.

        First those in a file that is named after the module, then the fastest one of each file, the second one of each,
        and so on. Those of a file stay together, which share what is made once for a file; files that are done first
        come first.
        """
        own = re.compile(rf"(^|_){Path(mutant.file.removesuffix('/__init__.py')).stem}(_|$)")
        turns: dict[str, int] = defaultdict(int)
        order = []
        for test in sorted(self._told[mutant.name] & self._times.keys(), key=lambda test: (self._times[test], test)):
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
