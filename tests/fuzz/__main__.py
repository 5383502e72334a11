"""python -m tests.fuzz [--programs N] [--seed S]: draw programs and judge them, and print the wrong ones as scripts.

Another process judges them, so that one that crashes, or hangs where Python cannot stop it, is found and printed too.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import multiprocessing
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import torch._dynamo.guards
import torch._inductor.config

from tests.fuzz.grammar import compose
from tests.fuzz.judge import LIMIT_OF_INDUCTOR, Verdict, alone, check
from tests.fuzz.program import Program

LINE = "-" * 80
# So many wrong programs are made smaller; each takes as long as fifty programs, and the first ones say enough.
SHRUNK = 20


# Where programs run that are not ranks of several, if it is not drawn.
_DEVICE: list[str] = []


class Choices:
    """Makes choices at random but for the first ones, which are given; remembers all of them."""

    def __init__(self, seed: int, given: Sequence[int] = ()) -> None:
        self.random = random.Random(seed)
        self.given = list(given)
        self.made: list[int] = []

    def __call__(self, options: Sequence[Any]) -> Any:
        drawn = self.random.randrange(len(options))  # drawn even if not used, so that later draws stay what they were
        place = len(self.made)
        self.made.append(min(self.given[place], len(options) - 1) if place < len(self.given) else drawn)
        return options[self.made[-1]]


def composed(choices: Choices) -> Program:
    """The program of these choices, on the device that was asked for."""
    program = compose(choices)
    return replace(program, device=_DEVICE[0]) if _DEVICE and program.ranks == 1 else program


def shrink(seed: int, made: list[int], tell: Callable[[], None] = lambda: None) -> tuple[Program, Verdict]:
    """Replace choices by the plainest, one after the other, as long as the program stays wrong.

    `tell` is called before each attempt.
    """
    best = composed(Choices(seed, made))
    verdict = check(best)
    for place in range(len(made)):
        if place >= len(made) or made[place] == 0:  # a smaller program may have made fewer choices
            continue
        tried = [*made[:place], 0, *made[place + 1 :]]
        choices = Choices(seed, tried)
        program = composed(choices)
        tell()
        found = check(program)
        if found.complaint:
            best, verdict, made = program, found, choices.made[: len(made)]
    return best, verdict


@dataclass
class Tally:
    """What became of all programs so far."""

    judged: int = 0
    rewritten: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    invalid: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    drawn: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)

    def add(self, program: Program, verdict: Verdict) -> None:
        if verdict.invalid:
            self.invalid[verdict.invalid.splitlines()[0][:120]] += 1
            return
        self.judged += 1
        self.rewritten += bool(verdict.operators)
        self.operators += verdict.operators
        kinds = [*program.features, *["through Inductor"] * program.inductor, *["on a GPU"] * (program.place != "cpu")]
        self.drawn.update(kinds)
        self.met.update(kinds if verdict.operators else ())
        if verdict.complaint:
            self.wrong[
                next(
                    (word for word in ("hang", "crash", "the passes failed") if word in verdict.complaint[:20]), "wrong"
                )
            ] += 1

    def __str__(self) -> str:
        bad = ", ".join(f"{count} x {kind}" for kind, count in self.wrong.items()) or "none wrong"
        return f"{self.judged} judged, {self.rewritten} rewritten, {self.invalid.total()} invalid, {bad}"

    def summary(self) -> str:
        kinds = [
            f"{count:6} with {kind}, {self.met[kind]} of them rewritten" for kind, count in self.drawn.most_common()
        ]
        reasons = [f"{count:6} x {reason}" for reason, count in self.invalid.most_common(20)]
        return "\n".join(
            [
                str(self),
                f"operators: {dict(self.operators)}",
                *kinds,
                "not judged, because eager alone, or torch.compile alone, fails:",
                *reasons,
            ]
        )


def _judge(seeds: Iterator[int], sent: Connection, received: Connection) -> None:
    """In the other process: judge the programs of these seeds, one after the other."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    received.close()  # so that sending fails, and ends this process, once nobody receives
    faulthandler.enable()
    warnings.simplefilter("ignore")
    for name in ("mhc_compile", "torch"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Dynamo times the guards of every graph, for a log that nobody reads: a fifth of what a small graph costs.
    torch._dynamo.guards.profile_guard_manager = lambda *given: 0.0  # type: ignore[attr-defined]
    # Without this, a quarter of the time goes into looking through all of torch for garbage, again and again.
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    wrong = 0
    for seed in seeds:
        choices = Choices(seed)
        program = composed(choices)
        verdict = check(program)
        sent.send((seed, verdict))
        if verdict.complaint and not verdict.complaint.startswith("hang"):
            wrong += 1
            print(f"WRONG, seed {seed}: {verdict.complaint}", flush=True)  # before it is made smaller, which takes long
            if wrong <= SHRUNK:
                program, verdict = shrink(seed, choices.made, lambda: sent.send(None))
            print(f"{LINE}\nseed {seed}, smaller: {verdict.complaint}\n{program}\n{LINE}", flush=True)


def _judge_alone(seed: int, sent: Connection) -> None:
    """In a process of its own, which may not survive it either."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sent.send(alone(composed(Choices(seed))))


def _ended(end: str, seed: int) -> Verdict:
    """The verdict on a program that ended its process, unless it does so without the passes, too."""
    context = multiprocessing.get_context("fork")
    received, sent = context.Pipe(duplex=False)
    process = context.Process(target=_judge_alone, args=(seed, sent), daemon=True)
    process.start()
    sent.close()
    try:
        complaint = received.recv() if received.poll(2 * LIMIT_OF_INDUCTOR) else "hang"
    except EOFError:
        process.join()
        complaint = f"crash: exit code {process.exitcode}"
    finally:
        process.kill()
    return Verdict(invalid=f"without the passes: {complaint}") if complaint else Verdict(complaint=end)


def verdicts(first: int) -> Generator[tuple[int, Verdict], None, None]:
    """Seeds and verdicts, without end. Where the other process does not survive a program, another one goes on."""
    context = multiprocessing.get_context("fork")
    seed, shrinking = first, False
    while True:
        received, sent = context.Pipe(duplex=False)
        process = context.Process(target=_judge, args=(iter(range(seed, sys.maxsize)), sent, received), daemon=True)
        process.start()
        sent.close()
        end = "hang: where Python could not stop it"
        try:
            while received.poll(3 * LIMIT_OF_INDUCTOR):  # a program that is wrong is judged twice
                found = received.recv()
                shrinking = found is None
                if not shrinking:
                    yield found
                    seed = found[0] + 1
        except EOFError:
            process.join()
            end = f"crash: exit code {process.exitcode}"
        finally:
            process.kill()
        if not shrinking:  # else the one that was to be made smaller is known already
            yield seed, _ended(end, seed)
            seed += 1
        shrinking = False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=2000, help="how many to judge (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next has the next (default %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="of all programs, in place of one in 500 on a GPU")
    options = parser.parse_args()
    _DEVICE[:] = [options.device] * (options.device is not None)
    # Inductor would start as many other processes as there are cores.
    torch._inductor.config.compile_threads = 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # with what was found until then
    begin, tally, judging = time.perf_counter(), Tally(), verdicts(options.seed)
    try:
        for seed, verdict in judging:
            program = composed(Choices(seed))
            tally.add(program, verdict)
            if verdict.complaint and verdict.complaint.startswith(("hang", "crash")):
                print(f"WRONG, seed {seed}: {verdict.complaint}\n{LINE}\n{program}\n{LINE}", flush=True)
            if seed % 25 == 24:
                print(f"{time.perf_counter() - begin:6.0f} s  {tally}", flush=True)
            if tally.judged >= options.programs:
                break
    finally:
        judging.close()
        print(tally.summary())
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
