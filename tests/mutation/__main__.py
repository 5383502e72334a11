"""Draws mutants of passes/ and lets the tests judge them, in copies of the checkout, one for each process.

python -m tests.mutation --mutants 500 --seed 0 --processes 32 --out mutants.jsonl

Each line of the output is a judged mutant; those that are there are not judged again, but for survivors with --again.
The last line on the terminal is a summary as JSON. A mutant is judged by tests in which it changes something, as many
as fit into --budget seconds: those of its own module and some of each file first. Which these are is found by running
all tests once without a mutant, but with a probe for each. That takes an hour of two cores, and is kept in the folder
--judges. Tests that fail then, as some may with another torch, do not judge.
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
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

from tests.mutation.judges import Judges, finish, options
from tests.mutation.mutants import Mutant, drawn
from tests.mutation.probes import probed

ROOT = Path(__file__).resolve().parents[2]
# Not those of kernels and of whole programs in processes of their own, which say little of a pass for their time.
TESTS = (
    *("tests/passes", "tests/integrations", "tests/proofs", "tests/testing"),
    *("tests/test_agreement.py", "tests/test_backend.py", "tests/test_breaks.py", "tests/test_checking.py"),
    *("tests/test_breaks_between_connections.py", "tests/test_breaks_not_resumed.py", "tests/test_command_line.py"),
    *("tests/test_enable.py", "tests/test_extremes.py", "tests/test_faults.py", "tests/test_given_up.py"),
    *("tests/test_nn.py", "tests/test_page.py", "tests/test_recompile_limit.py", "tests/test_records.py"),
    *("tests/test_scaling.py", "tests/test_sites_once.py", "tests/test_verification.py"),
)
# Of a run without a mutant, in seconds.
_HOURS = 6 * 3600.0
_OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:benchmark", "--tb=line", "-m", "not gpu and not thorough")


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
            # Each process would start as many others as there are cores.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
            "TMPDIR": str(folder / "tmp"),
        }

    def test(
        self, tests: Sequence[str], seconds: float, *more: str, shown: bool = False, **environment: str
    ) -> tuple[str, str]:
        """What becomes of the tests, and the first that failed, unless all that pytest says is shown."""
        command = [sys.executable, "-m", "pytest", *_OPTIONS, *more, *tests]
        with subprocess.Popen(
            command,
            cwd=self.root,
            env=self._environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=None if shown else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said = process.communicate(timeout=seconds)[0] or ""
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return "timeout", ""
        failed = next((line.split()[1] for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))), "")
        code = process.returncode
        # 2: a module cannot be imported with the mutant. Beyond 5, or negative: the process died.
        outcome = {0: "survived", 1: "killed", 2: "killed", 3: "killed", 4: "unusable", 5: "unusable"}.get(
            code, "killed"
        )
        return outcome, failed

    def judge(self, mutant: Mutant, tests: Sequence[str], seconds: float) -> dict[str, Any]:
        path, begin = self.root / mutant.file, time.monotonic()
        source = path.read_bytes()
        try:
            path.write_bytes(mutant.applied(source))
            outcome, by = self.test(tests, seconds) if tests else ("survived", "it changes nothing in any test")
        finally:
            path.write_bytes(source)
        took = round(time.monotonic() - begin, 1)
        return {"name": mutant.name, "outcome": outcome, "by": by, "tests": len(tests), "seconds": took}


def judges(
    copy: Copy, folder: Path, mutants: Sequence[Mutant], processes: int, tests: Sequence[str], *more: str
) -> Judges:
    """Which tests judge which mutants."""
    try:
        return Judges(folder)
    except FileNotFoundError:
        pass
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print("running the tests without a mutant", flush=True)
    files: dict[str, dict[int, Mutant]] = defaultdict(dict)
    for number, mutant in enumerate(mutants):
        files[mutant.file][number] = mutant
    sources = {copy.root / file: (copy.root / file).read_bytes() for file in files}
    arguments, environment = options(folder)
    try:
        for file, numbered in files.items():
            path = copy.root / file
            path.write_text(probed(sources[path], numbered), encoding="utf-8")
        copy.test(tests, _HOURS, *arguments, "-n", str(processes), *more, shown=True, **environment)
    finally:
        for path, source in sources.items():
            path.write_bytes(source)
    found = finish(folder, mutants)
    if found.failed:
        print(f"these fail without a mutant, and do not judge: {', '.join(found.failed)}")
    return found


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
    judged = killed + outcomes["survived"]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip(),
        "seed": seed,
        "outcomes": dict(outcomes),
        "killed": round(killed / judged, 4) if judged else None,
        "at_least": round(least_rate(killed, judged), 4) if judged else None,
        "survivors": sorted(result["name"] for result in results if result["outcome"] == "survived"),
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
    parser.add_argument("--budget", type=float, default=120.0, help="seconds that the tests of a mutant take in all")
    parser.add_argument("--files", nargs="*", help="files of passes/ to draw from, such as passes/plan/roles.py")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="the tests that may judge")
    parser.add_argument("--thin", type=int, help="of each test at most so many cases may judge")
    parser.add_argument("--whole", nargs="*", default=(), help="folders whose fast tests judge with all cases")
    parser.add_argument("--again", action="store_true", help="judge survivors again, as with more tests")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"), help="judged mutants, one a line")
    parser.add_argument("--judges", type=Path, default=Path("judges"), help="folder of which tests judge which mutants")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no mutant begins after that")
    given = parser.parse_args(arguments)
    end = time.monotonic() + given.seconds
    files = given.files or [str(path.relative_to(ROOT)) for path in sorted((ROOT / "passes").rglob("*.py"))]
    wanted = {mutant.name: mutant for mutant in drawn(ROOT, files, given.mutants, given.seed)}
    results = {name: result for name, result in _known(given.out).items() if name in wanted}
    if given.again:
        results = {name: result for name, result in results.items() if result["outcome"] != "survived"}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, given.out.open("a", encoding="utf-8") as out:
        copies = [Copy(Path(folder, str(number))) for number in range(given.processes)]
        thin = [f"--thin={given.thin}", *(f"--whole={folder}" for folder in given.whole)] if given.thin else []
        found = judges(copies[0], given.judges.absolute(), [*wanted.values()], given.processes, given.tests, *thin)
        unknown = [name for name, mutant in wanted.items() if not found.knows(mutant)]
        if unknown:
            raise SystemExit(f"{given.judges}: made for other mutants than {unknown[0]}. Delete it, or name another")
        free: Queue[Copy] = Queue()
        for copy in copies:
            free.put(copy)
        lock = threading.Lock()

        def judge(mutant: Mutant) -> None:
            copy = free.get()
            try:
                if time.monotonic() > end:
                    return
                tests = found.tests(mutant, given.budget)
                # Others use the machine, too; and a mutant may be slow without being wrong.
                result = copy.judge(mutant, tests, 120 + 4 * found.seconds(tests))
            finally:
                free.put(copy)
            with lock:
                results[mutant.name] = result
                out.write(json.dumps(result) + "\n")
                out.flush()
                told = f"{result['outcome']}, {len(tests)} tests, {result['seconds']} s, {mutant.name}"
                print(f"{len(results)} of {len(wanted)}: {told}", flush=True)

        with ThreadPoolExecutor(given.processes) as pool:
            list(pool.map(judge, [mutant for name, mutant in wanted.items() if name not in results]))
    print(json.dumps(summary(list(results.values()), given.seed)))
    return int(not results or any(result["outcome"] == "unusable" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
