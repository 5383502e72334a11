"""Whether the rewritten form of a program computes what the program says."""

from __future__ import annotations

import contextlib
import copy
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.fx.experimental import _config as shapes

import mhc_compile.entry  # makes "mhc" known where the package is run from its sources
from mhc_compile.testing.float64 import Float64Reference
from tests.fuzz.evaluation import Evaluation, Results, difference, evaluate
from tests.fuzz.program import Program
from tests.fuzz.ranks import group
from tests.fuzz.watch import Verdict, Watch
from tests.zoo.check import FEW, SLACK_FEW

__all__ = ["LIMIT", "Verdict", "alone", "check"]

# Luck of a few numbers makes a factor of 3. What is larger is tried again on this many inputs, each with parameters of
# its own, where luck averages out. A program may write over its inputs, and then has only other parameters. Where gates
# are saturated, a few of many tokens carry all of a gradient: what is still larger is tried on more.
INPUTS = (12, 120, 1000)
FIRST, AGAIN = 3.0, 2.0
# Where a few of a thousand inputs still make all of the error, the ratio is that of a few numbers (tests.zoo.check). If
# it is too large for that, another thousand is drawn: a fault shows again, in the same result, and luck rarely does.
ROUNDINGS = 8.0
# A gradient that vanishes but for rounding has no size of its own: beneath this part of the root mean square of all
# gradients, errors are relative to that, as in mhc_compile.testing.judging.
VANISHING = 1e-6
# Seconds for one program, most of which take less than one, and for one that Inductor compiles: both forms of it, whose
# C++ compiler shares the machine with whatever else runs.
LIMIT, LIMIT_OF_INDUCTOR = 120, 600


Norms = dict[str, float]


class Hang(BaseException):
    """A program took too long. No Exception, which the passes would put into their report and go on."""


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise Hang(f"no result after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(program: Program) -> Verdict:
    """Run a program eagerly, in float64 and rewritten, and judge the results.

    Eager code that raises is no program, and not judged; nor is one that torch.compile alone does not run as eager
    does. The passes make constants of sizes that guards leave only one value for, so one that torch.compile alone does
    not run with constants, and for the same reason, is none either (docs/limits.md).
    """
    verdict = _check_with_caches(program, rewriting=True)
    if verdict.complaint:
        complaint = alone(program)
        if complaint:
            return Verdict(invalid=f"without the passes: {complaint}")
        if program.dynamic is not False:
            constant = _check(replace(program, dynamic=False, marked=(), later=()), rewriting=False)
            if constant.complaint == verdict.complaint:
                return Verdict(invalid=f"without the passes, where sizes are constants: {constant.complaint}")
    return verdict


def alone(program: Program) -> str | None:
    """What is wrong with a program that torch.compile runs alone."""
    return _check_with_caches(program, rewriting=False).complaint


def _check_with_caches(program: Program, *, rewriting: bool) -> Verdict:
    """Twice if Inductor compiles it: the second one finds what the first one left in Inductor's caches."""
    verdict = _check(program, rewriting=rewriting)
    if program.inductor and not verdict.complaint and not verdict.invalid:
        verdict.complaint = _check(program, rewriting=rewriting).complaint
    return verdict


def _check(program: Program, *, rewriting: bool) -> Verdict:
    verdict = Verdict()
    torch._dynamo.reset()
    try:
        limit = _limited(LIMIT_OF_INDUCTOR if program.inductor else LIMIT)
        with limit, group(program.ranks), shapes.patch(use_duck_shape=program.duck):
            verdict.complaint = _complaint(program, verdict, rewriting)
    except _Invalid as reason:
        verdict.invalid, verdict.complaint = str(reason), None
    except Hang as hang:
        verdict.complaint = f"hang: {hang}"
        torch._dynamo.reset()
    return verdict


class _Invalid(Exception):
    """The program is none that can be judged."""


class _Wrong(Exception):
    """The program does otherwise than eager code, in what is no matter of rounding."""


def _compiled(model: nn.Module, program: Program, verdict: Verdict, rewriting: bool) -> Any:
    if program.inductor:
        backend: Any = "mhc" if rewriting else "inductor"
    else:
        backend = Watch(verdict, rewriting)
    return torch.compile(model, backend=backend, dynamic=program.dynamic)


def _complaint(program: Program, verdict: Verdict, rewriting: bool) -> str | None:
    try:
        model, _ = program.build()
    except Exception as error:
        raise _Invalid(f"no model: {type(error).__name__}: {error}") from error
    reference = Float64Reference(model)
    compiled = _compiled(model, program, verdict, rewriting)
    first = copy.deepcopy(model.state_dict())

    def evaluated(
        call: Any, module: nn.Module, given: Sequence[Tensor], state: Any, flipped: bool, wide: bool = False
    ) -> Evaluation:
        with torch.no_grad():
            module.load_state_dict(state)  # buffers as they were: a program may count in them
        return evaluate(call, module, given, program, wide, flipped)

    def attempt(call: int, number: int) -> tuple[Results, tuple[Norms, ...]]:
        # With a generator of its own: `evaluate` seeds torch's, which would make every draw the same.
        given = program.inputs(call, torch.Generator().manual_seed(100 * program.seed + number))
        flipped = program.flips and call % 2 == 1
        try:
            state = replace(program, seed=100 * program.seed + number).build()[0].state_dict() if number else first
            eager = evaluated(model, model, given, state, flipped)
            exact = evaluated(reference, reference.module, given, state, flipped, wide=True).results
        except Exception as error:
            raise _Invalid(f"{type(error).__name__}: {error}") from error
        if not all(value.isfinite().all() for value in (*eager.results.values(), *exact.values())):
            raise _Invalid("eager's results are not finite")
        try:
            ours = evaluated(compiled, model, given, state, flipped)
        except Exception as error:
            raise _Wrong(f"raised {type(error).__name__}: {str(error)[:2000]}") from error
        other = verdict.complaint or difference(eager, ours)
        if other:
            raise _Wrong(other)
        norms = (_squares(exact, exact, zero=True), _squares(eager.results, exact), _squares(ours.results, exact))
        return eager.results, norms

    try:
        for call in range(1 + len(program.later)):
            results, norms = attempt(call, 0)
            if judged([norms], results, FIRST):
                more = [norms]
                for inputs in INPUTS:
                    more += (attempt(call, number)[1] for number in range(len(more), inputs))
                    found = judged(more, results, AGAIN)
                    if not found:
                        break
                else:
                    if all(_made_by_few(more, name) for name in found):
                        others = [attempt(call, number)[1] for number in range(INPUTS[-1], 2 * INPUTS[-1])]
                        again = judged(others, results, AGAIN)
                        found = {name: told for name, told in again.items() if name in found}
                    if found:
                        return "\n".join(found.values())
    except _Wrong as wrong:
        return str(wrong)
    finally:
        if program.inductor and rewriting:
            verdict.note(mhc_compile.report())
    return verdict.complaint


def _squares(results: Results, exact: Results, zero: bool = False) -> Norms:
    return {
        name: (value.double() - (0.0 if zero else exact[name].double())).square().sum().item()
        for name, value in results.items()
    }


def judged(errors: Sequence[tuple[Norms, ...]], results: Results, slack: float) -> dict[str, str]:
    """Compare root mean squares over all inputs, relative to the exact values': results that are worse, and how."""
    sums = [{name: sum(one[run][name] for one in errors) ** 0.5 for name in results} for run in range(3)]
    norms, eager, ours = sums
    sizes = {name: max(norm, _least(name, norms, results)) for name, norm in norms.items()}
    relative = {name: eager[name] / sizes[name] if sizes[name] else 0.0 for name in results}
    typical = median(relative.values())
    complaints = {}
    for name, value in results.items():
        floor = ROUNDINGS * torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
        allowed = (SLACK_FEW if _made_by_few(errors, name) else slack) * max(relative[name], typical) + floor
        got = ours[name] / sizes[name] if sizes[name] else ours[name]
        if not got <= allowed:
            complaints[name] = f"{name}: {got:.2e} rewritten, {relative[name]:.2e} eager, allowed {allowed:.2e}"
    return complaints


def _made_by_few(errors: Sequence[tuple[Norms, ...]], name: str) -> bool:
    """Whether a few of many inputs make all of the error of a result, in one of both forms."""
    return len(errors) >= INPUTS[-1] and min(_inputs_in_effect(errors, run, name) for run in (1, 2)) < FEW


def _inputs_in_effect(errors: Sequence[tuple[Norms, ...]], run: int, name: str) -> float:
    """How many inputs make the error of a result: 1 if a single one makes all of it, all if each makes as much."""
    squares = [one[run][name] for one in errors]
    fourth = sum(square * square for square in squares)
    return sum(squares) ** 2 / fourth if fourth else float(len(squares))


def _least(name: str, norms: Norms, results: Results) -> float:
    """The size below which a result vanishes among those of its kind, gradients or values."""
    kind = [other for other in results if other.startswith("gradient") == name.startswith("gradient")]
    numbers = sum(results[other].numel() for other in kind)
    whole = sum(norms[other] ** 2 for other in kind) ** 0.5
    return VANISHING * whole * (results[name].numel() / max(1, numbers)) ** 0.5
