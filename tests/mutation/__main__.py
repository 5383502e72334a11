"""Draws mutants of passes/ and lets the tests judge them, in copies of the checkout, one for each process.

python -m tests.mutation --mutants 500 --seed 0 --processes 32 --out mutants.jsonl

Each line of the output is a judged mutant; those that are there are not judged again. The last line on the terminal is
a summary as JSON. There are two rounds. First, one case of each test of the mutant's stage judges. What these leave is
"undecided", and judged by all cases, and then by as many other tests, the fastest first, as fit into --budget seconds.
How long they take is found by running all of them without a mutant, which takes hours of one core. Tests that fail
without a mutant, as with another torch, are named by --deselect.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import Queue
from typing import Any

from tests.mutation.mutants import Mutant, drawn

ROOT = Path(__file__).resolve().parents[2]
# Tests of a stage, by the folder or file of passes/; all others of _OTHERS follow.
_STAGES = {
    "recognise": ("test_identification", "test_near_misses", "test_layout", "test_sinkhorn_starts", "test_norms"),
    "plan": (
        "test_reasons",
        "test_reasons_beside",
        "test_own_gates",
        "test_rows_read",
        "test_outside",
        "test_unwritten",
    ),
    "rewrite": ("test_aliases", "test_surroundings", "test_whole_programs", "test_parts_assigned"),
    "fuse": ("test_fuse", "test_fuse_traps", "test_fuse_recompute", "test_fuse_shifted", "test_input_norm"),
    "share": ("test_share", "test_share_calls"),
    "lower": (
        "test_lower",
        "test_lower_on_cpu",
        "test_lower_in_place",
        "test_lower_sizes",
        "test_lower_streams",
        "test_lower_zeros",
    ),
    "shadow": ("test_shadow",),
    "sizes": ("test_sizes",),
    "lists": ("test_lists",),
    "called": ("test_called",),
    "before_after": ("test_before_after",),
    "places": ("test_places",),
    "widened": ("test_names_of_operators",),
}
_FIRST = ("test_one_site", "test_forms", "test_zoo")
_OTHERS = (
    "tests/passes",
    "tests/test_backend.py",
    "tests/test_records.py",
    "tests/test_page.py",
    "tests/test_faults.py",
)
_OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:benchmark", "--tb=line", "-m", "not gpu and not thorough")


def stage_tests(file: str) -> list[str]:
    """The files of tests of a stage, which judge first."""
    parts = Path(file).with_suffix("").parts[1:]
    named = [name for part in parts for name in _STAGES.get(part, ())]
    return [f"tests/passes/{name}.py" for name in (*named, *_FIRST)]


def few(file: str) -> list[str]:
    """Some of these."""
    return [*stage_tests(file)[: -len(_FIRST)][:2], *stage_tests(file)[-len(_FIRST) :][:1]]


class Copy:
    """A copy of the checkout with a cache of its own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        for name in listed.stdout.decode().split("\0"):
            source, target = ROOT / name, self.root / name
            if name and (source.is_symlink() or source.is_file()):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        (folder / "tmp").mkdir()
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(self.root), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
            "TMPDIR": str(folder / "tmp"),
        }

    def test(self, files: list[str], seconds: float, *more: str) -> tuple[str, str]:
        """What becomes of the tests, and the first that failed."""
        files = [file for file in files if (self.root / file).exists()]
        command = [sys.executable, "-m", "pytest", *_OPTIONS, *more, *files]
        with subprocess.Popen(
            command,
            cwd=self.root,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return "timeout", ""
        failed = next((line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
        code = process.returncode
        # 2: a module cannot be imported with the mutant. Beyond 5, or negative: the process died.
        outcome = {0: "survived", 1: "killed", 2: "killed", 3: "killed", 4: "unusable", 5: "unusable"}.get(
            code, "killed"
        )
        return outcome, failed or said[-300:] * (outcome != "survived")

    def judge(self, mutant: Mutant, files: list[str], seconds: float, *more: str) -> dict[str, Any]:
        path, begin = self.root / mutant.file, time.monotonic()
        source = path.read_bytes()
        try:
            path.write_bytes(mutant.applied(source))
            outcome, by = self.test(files, seconds, *more)
        finally:
            path.write_bytes(source)
        took = round(time.monotonic() - begin, 1)
        return asdict(mutant) | {"name": mutant.name, "outcome": outcome, "by": by, "seconds": took}


def durations(copy: Copy, tests: list[str], seconds: float, processes: int, *more: str) -> dict[str, float]:
    """How long each file of tests takes without a mutant. Raises SystemExit if one fails."""
    report = copy.root.parent / "report.xml"
    options = (f"--junitxml={report}", "-o", "junit_family=xunit1", "-n", str(processes), *more)
    outcome, said = copy.test(tests, seconds, *options)
    if outcome != "survived":
        raise SystemExit(f"without a mutant the tests fail: {outcome} {said}")
    found: Counter[str] = Counter()
    for case in xml.parse(report).iter("testcase"):
        found[case.attrib["file"]] += float(case.attrib["time"])
    return dict(found)


def selected(file: str, known: dict[str, float], budget: float) -> list[str]:
    """The tests that judge a file, in their order."""
    first = stage_tests(file)
    left = budget - sum(known.get(one, 0.0) for one in first)
    for one, seconds in sorted(known.items(), key=lambda pair: pair[1]):
        if one not in first and seconds <= left:
            first.append(one)
            left -= seconds
    return first


def least_rate(killed: int, judged: int) -> float:
    """The lower bound at 95%, one-sided: with fewer, as many killed would have a probability below 5%."""
    low, high = 0.0, killed / judged if judged else 0.0
    for _ in range(60):
        rate = (low + high) / 2
        tail = sum(
            math.exp(
                math.lgamma(judged + 1)
                - math.lgamma(k + 1)
                - math.lgamma(judged - k + 1)
                + k * math.log(rate or 1e-300)
                + (judged - k) * math.log1p(-rate)
            )
            for k in range(killed, judged + 1)
        )
        low, high = (low, rate) if tail > 0.05 else (rate, high)
    return low


def summary(results: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    outcomes = Counter(result["outcome"] for result in results)
    killed = outcomes["killed"] + outcomes["timeout"]
    judged = killed + outcomes["survived"] + outcomes["undecided"]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip(),
        "seed": seed,
        "outcomes": dict(outcomes),
        "killed": round(killed / judged, 4) if judged else None,
        "at_least": round(least_rate(killed, judged), 4) if judged else None,
        "survivors": sorted(result["name"] for result in results if result["outcome"] in ("survived", "undecided")),
    }


def _known(path: Path) -> dict[str, dict[str, Any]]:
    """The judged mutants of an earlier run, as they were judged last. A line that was cut off is left out."""
    known = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            continue
        known[result["name"]] = result
    return known


def main(arguments: list[str] | None = None) -> int:
    """Judge mutants; returns 1 if one of them could not be judged, or none was."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.partition("\n")[0])
    parser.add_argument("--mutants", type=int, default=500, help="how many are drawn, file by file in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="each has a copy of the checkout")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds that the tests of a mutant take in all")
    parser.add_argument("--files", nargs="*", help="files of passes/ to draw from, such as passes/plan/roles.py")
    parser.add_argument("--deselect", nargs="*", default=[], help="tests that fail without a mutant, too")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"), help="judged mutants, one a line")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no mutant begins after that")
    parser.add_argument("--sample", action="store_true", help="one case of each of a few tests judges, and no others")
    given = parser.parse_args(arguments)
    deselected = [f"--deselect={test}" for test in given.deselect]
    end = time.monotonic() + given.seconds
    files = given.files or [str(path.relative_to(ROOT)) for path in sorted((ROOT / "passes").rglob("*.py"))]
    wanted = {mutant.name: mutant for mutant in drawn(ROOT, files, given.mutants, given.seed)}
    results = {name: result for name, result in _known(given.out).items() if name in wanted}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, given.out.open("a", encoding="utf-8") as out:
        copies = [Copy(Path(folder, str(number))) for number in range(given.processes)]
        free: Queue[Copy] = Queue()
        for copy in copies:
            free.put(copy)
        lock = threading.Lock()

        def judge(names: list[str], tests: Callable[[str], list[str]], survived: str, *more: str) -> None:
            def one(name: str) -> None:
                copy = free.get()
                try:
                    if time.monotonic() > end:
                        return
                    mutant = wanted[name]
                    # Others use the machine, too; and a mutant may be slow without being wrong.
                    result = copy.judge(mutant, tests(mutant.file), 4 * given.budget, *more, *deselected)
                finally:
                    free.put(copy)
                if result["outcome"] == "survived":
                    result["outcome"] = survived
                with lock:
                    results[name] = result
                    out.write(json.dumps(result) + "\n")
                    out.flush()
                    print(f"{len(results)} of {len(wanted)}: {result['outcome']}, {result['seconds']} s, {name}")

            with ThreadPoolExecutor(given.processes) as pool:
                list(pool.map(one, names))

        begun = [name for name in wanted if name not in results]
        if given.sample:
            judge(begun, few, "survived", "--thin", "1")
        else:
            named = sorted({test for name in begun for test in stage_tests(wanted[name].file)})
            if begun:
                durations(copies[0], named, 20 * given.budget, given.processes, "--thin", "1", *deselected)
            judge(begun, stage_tests, "undecided", "--thin", "1")
            left = [name for name, result in results.items() if result["outcome"] == "undecided"]
            if left and time.monotonic() < end:
                times = durations(copies[0], list(_OTHERS), 20 * given.budget, given.processes, *deselected)
                judge(left, lambda file: selected(file, times, given.budget), "survived")
    print(json.dumps(summary(list(results.values()), given.seed)))
    return int(not results or any(result["outcome"] == "unusable" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
