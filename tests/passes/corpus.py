"""Programs that the fuzzer draws, and what becomes of each: corpus.txt, and its test.

python -m tests.passes.corpus [count]     writes corpus.txt anew, for a change that is meant; git shows what is other

Other tests say what has to be rewritten, with few programs for each rule. Here every change of a plan shows, wherever
it comes from, and is looked at before it is kept. Some changes are no site more or less, and no other result: a cast or
a norm that the program makes itself now, and that an operator made before.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import mhc_compile
from mhc_compile.testing import capture
from tests.fuzz.__main__ import Choices, composed
from tests.fuzz.program import Program

_LINE = re.compile(r"(?:line \d+ of )?\b(tests/[\w/]+\.py)(?::\d+)?")
PATH = Path(__file__).with_suffix(".txt")
FIRST = 1_900_000_000


def program_of(seed: int) -> Program | None:
    """The program of a seed, if one process calls it, without dynamic sizes."""
    program = composed(Choices(seed))
    plain = program.ranks == 1 and program.dynamic is None and not program.marked and not program.inductor
    return program if plain else None


def outcome(program: Program) -> list[str]:
    """A line for each site and each kind of fusion, and the operators' calls: what they are given, and which dtypes."""
    with _quietly(), torch.set_grad_enabled(program.mode == "training"):
        report = mhc_compile.explain(*_called(program))
        calls = str(capture(*_called(program))).splitlines() if report.rewritten else []
    lines = [f"{site.op}{'' if site.rewritten else ' is left'}: {site.told}" for site in report.sites]
    lines += [f"fused: {count} x {name}" for name, count in sorted(report.fusions.items())]
    lines += [f"error: {error}" for error in report.errors]
    # A line more at the top of a file is no other outcome.
    return [_LINE.sub(r"\1", line) for line in lines + calls]


def _called(program: Program) -> tuple[Any, ...]:
    """The model and its inputs."""
    model, inputs = program.build()
    return model, *(value.requires_grad_(program.mode == "training" and program.leaves) for value in inputs)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    log = logging.getLogger("mhc_compile")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


def expected() -> dict[int, list[str]]:
    """The file: of each seed its lines."""
    found: dict[int, list[str]] = {}
    lines: list[str] = []
    for line in PATH.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            lines.append(line[2:])
        else:
            found[int(line)] = lines = []
    return found


def drawn() -> Iterator[tuple[int, list[str]]]:
    """Seeds of programs that can be called, and what becomes of each."""
    for seed in itertools.count(FIRST):
        program = program_of(seed)
        if program is not None:
            try:
                told = outcome(program)
            except Exception:  # of the program: some fail in eager code, too
                continue
            yield seed, told


def again() -> Iterator[tuple[int, list[str]]]:
    """What becomes of the programs of the file."""
    for seed in expected():
        program = program_of(seed)
        if program is None:
            sys.stderr.write(f"{seed} is another kind of program now, and left out: draw the corpus anew\n")
        else:
            yield seed, outcome(program)


if __name__ == "__main__":
    found = itertools.islice(drawn(), int(sys.argv[1])) if len(sys.argv) > 1 else again()
    lines = [f"{seed}\n" + "".join(f"  {line}\n" for line in told) for seed, told in found]
    PATH.write_text("".join(lines), encoding="utf-8")
