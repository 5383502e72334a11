"""One case after another, one provider after another: first the results are checked, then they are timed."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks import traffic, units
from benchmarks.cases import Call, Case, Values, Workload, complaints, errors, workload
from benchmarks.measure import Meter, OutOfTime, caches, first_step, in_process, process, release
from benchmarks.own_gates import KINDS
from benchmarks.plan import BLOCK, FIRST, PROCESS, SHIFTED, Plan
from benchmarks.providers import CHANNELS_FIRST, PROVIDERS, Unavailable, installed

# Above this many tokens the device is what takes time.
HOST_TOKENS = 512
START = time.perf_counter()

Result = dict[str, Any]
Key = tuple[str, str]


class Refused(Exception):
    """A provider's results disagree with float64: no speed is given for them."""


def say(message: str) -> None:
    """A line of progress, at once, with the time since the start."""
    print(f"[{time.perf_counter() - START:6.1f} s] {message}", flush=True)


class Judge:
    """Compares what a provider computes with float64, and what eager code of the same dtypes computes."""

    def __init__(self, work: Workload) -> None:
        self.dtype = work.case.torch_dtype
        self.reference: Values = work.reference()
        self.of_eager = errors(work.step(work.module), self.reference)

    def check(self, values: Values) -> dict[str, float]:
        """The errors of everything in `values`; raises Refused if one is too large."""
        found = errors(values, {name: self.reference[name] for name in self.reference if name in values})
        wrong = complaints(found, self.of_eager, self.dtype)
        if wrong:
            raise Refused("; ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""))
        return found

    def check_step(self, values: Values) -> dict[str, float]:
        """As `check`, and nothing may be missing."""
        missing = self.reference.keys() - values.keys()
        if missing:
            raise Refused(f"no gradient for {', '.join(sorted(missing))}")
        return self.check(values)


@dataclass
class Budget:
    """The seconds that a run may take. What took long before is expected to take as long again."""

    seconds: float = float("inf")
    longest: dict[Key, float] = field(default_factory=dict)
    begun: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.begun)

    def allows(self, case: str, provider: str) -> bool:
        """Whether there is time for what took longest of cases of this name, or else of any."""
        of_provider = [seconds for (_, who), seconds in self.longest.items() if who == provider]
        return self.left > self.longest.get((case, provider), max(of_provider, default=0.0))

    def took(self, seconds: float, case: str, provider: str) -> None:
        self.longest[case, provider] = max(seconds, self.longest.get((case, provider), 0.0))


def run_provider(work: Workload, judge: Judge, provider: str, meter: Meter, prepared: bool = False) -> Result:
    """The measurements of one provider, each taken after its own results were found right."""
    case, call = work.case, PROVIDERS[provider](work, None)
    result: Result = {}
    if "step" in case.modes:
        begun = time.perf_counter()
        with counting(provider) as counted:
            values = work.step(call)
        meter.wait()
        if not prepared:
            result["first_call_seconds"] = time.perf_counter() - begun
        result["errors"] = judge.check_step(values)
        del values
        result |= moved(work, provider, "step", counted)
        result["step_ms"] = asdict(meter.milliseconds(lambda: work.step(call)))
        peak = meter.peak_bytes(lambda: work.step(call))
        if peak is not None:
            result["peak_bytes"] = peak
            result["peak_units"] = peak / case.row_bytes / case.depth
    if "forward" in case.modes:
        with counting(provider) as counted:
            output = work.forward(call)
        judge.check({"output": output})
        del output
        result |= moved(work, provider, "forward", counted)
        result["forward_ms"] = asdict(meter.milliseconds(lambda: work.forward(call)))
        if case.tokens <= HOST_TOKENS:
            result["forward_host_us"] = asdict(meter.host_microseconds(lambda: work.forward(call)))
    if "launches" in case.modes:
        judge.check({"output": work.forward(call)})
        result["forward_launches"] = meter.launches(lambda: work.forward(call))
    if "graph" in case.modes:
        release()
        try:
            result |= run_graph(work, judge, provider, meter)
        except (RuntimeError, AssertionError) as error:  # what cannot be captured can still be timed as it is
            result["graph_note"] = reason(error)
    return result


def counting(provider: str) -> AbstractContextManager[list[int]]:
    """Inductor's count of bytes, for the provider that it is the best count of."""
    return traffic.of_inductor() if provider == "inductor" else nullcontext([])


def moved(work: Workload, provider: str, mode: str, counted: list[int]) -> Result:
    """The C-units that `provider` moves a sublayer, by whichever count there is for it."""
    case = work.case
    if case.name in WHOLE:
        return {}
    count = None
    if case.name not in (*KINDS, *SHIFTED):  # what operators there are depends on the gates
        count = traffic.by_design(provider, mode, case.streams, case.depth, case.tokens, case.width)
    if provider == "eager":
        run = work.step if mode == "step" else work.forward
        counted = [traffic.of_eager(lambda: run(work.module))]
    if counted:
        count = counted[0] / case.row_bytes
    return {} if count is None else {f"{mode}_units": count / case.depth}


# Attention, experts or weights are part of these: a floor for the hyper-connections says nothing about them.
WHOLE = (*BLOCK, "model", "served", "served-alone", "sine")


def run_graph(work: Workload, judge: Judge, provider: str, meter: Meter) -> Result:
    """The same inside a CUDA graph."""
    if work.device.type == "cpu":
        return {"graph_note": "no CUDA graphs on a CPU"}
    counters["inductor"].clear()
    graphed: Call = meter.graphed(work, provider)
    for _ in range(3):  # eager warm-up, recording, replay
        output = work.forward(graphed).clone()
    judge.check({"output": output})
    if counters["inductor"]["cudagraph_skips"]:
        return {"graph_note": "Inductor made no graph"}
    # The host needs up to half a millisecond to start a graph; meanwhile the device fills the flush buffer.
    return {"graph_ms": asdict(meter.milliseconds(lambda: work.forward(graphed), ahead=8))}


@dataclass
class Runner:
    """All that a run of cases shares. `keep` gets the copy bandwidth and the results so far, whenever there is one."""

    device: torch.device
    meter: Meter
    bandwidth: float
    budget: Budget = field(default_factory=Budget)
    results: list[Result] = field(default_factory=list)
    keep: Callable[[float, list[Result]], None] = lambda bandwidth, results: None
    prepared: set[Key] = field(default_factory=set)

    def missing(self, case: Case, only: Sequence[str] = ()) -> list[str]:
        """The providers of a case that are asked for, are there, and have no result yet."""
        done = {identity(result["case"], result["provider"]) for result in self.results}
        asked = [name for name in case.providers or PROVIDERS if not only or name in only]
        return [name for name in asked if installed(name) and identity(case.as_json(), name) not in done]

    def run(self, case: Case, providers: Sequence[str]) -> list[Result]:
        """These providers of a case, side by side on the same tensors. Fewer results than that: no time was left."""
        found: list[Result] = []

        def add(provider: str, result: Result, about: str) -> None:
            found.append({"case": case.as_json(), "provider": provider} | result)
            self.results.append(found[-1])
            self.keep(self.bandwidth, self.results)
            say(f"  {provider}: {about}")

        measure: Callable[[Result, str], None] = partial(self.fresh_process, case)
        allowed = any(self.budget.allows(case.name, provider) for provider in providers)
        if case.modes not in (FIRST, PROCESS) and allowed:
            try:
                work = workload(case, self.device)
                measure = partial(self.measure, work, Judge(work))
            except Exception as error:
                release()
                failure = failed(error)
                failure["reason"] = f"reference: {failure['reason']}"
                for provider in providers:
                    add(provider, failure, failure["reason"])
                return found
        for provider in providers:
            if not self.budget.allows(case.name, provider):
                say(f"  {provider}: left out, it needs more than the {max(self.budget.left, 0):.0f} s that are left")
                continue
            begun = time.perf_counter()
            result: Result = {"status": "ok"} | self.floors(case)
            try:
                _attempt(result, partial(measure, result, provider))
            except OutOfTime as error:
                say(f"  {provider}: left out, {error}")
                continue
            release()
            self.budget.took(time.perf_counter() - begun, case.name, provider)
            add(provider, result, summary(result, case))
        return found

    def floors(self, case: Case) -> Result:
        """The time of a forward and of a step that moves no more than it must."""
        if case.name in WHOLE:
            return {}
        size = case.tokens, case.width, case.torch_dtype.itemsize
        return {
            f"{mode}_floor_ms": units.milliseconds(units.floor(mode, case.streams) * case.depth, *size, self.bandwidth)
            for mode in ("forward", "step")
        }

    def fresh_process(self, case: Case, result: Result, provider: str) -> None:
        """A first step in processes of their own, which check their results themselves."""
        say(f"  {provider}: first step in a fresh process, cold and warm")
        if case.modes == PROCESS:
            result["process_seconds"] = process(case, provider, self.device, self.budget.left)
        else:
            result["first_step_seconds"] = first_step(case, provider, self.device, self.budget.left)

    def measure(self, work: Workload, judge: Judge, result: Result, provider: str) -> None:
        prepared = (request(work.case, provider, self.device), provider) in self.prepared
        with laid_out(work, provider):
            result |= run_provider(work, judge, provider, self.meter, prepared)

    def prepare(self, cases: Iterable[tuple[Case, Sequence[str]]], processes: int) -> None:
        """Let Inductor compile its programs of these cases side by side, before anything is timed again.

        It takes a minute for each; from a cache, a few seconds. What did not get done, the run itself compiles.
        """
        wanted = [case for case, names in cases if "inductor" in names and case.modes not in (FIRST, PROCESS)]
        if not wanted or processes < 1:
            return
        say(f"Inductor compiles {len(wanted)} cases in {processes} processes")
        # At most half of what is left: the rest is for measuring.
        until = time.perf_counter() + min(self.budget.left / 2, 600.0)

        def compile_one(case: Case) -> None:
            begun = time.perf_counter()
            asked, left = request(case, "inductor", self.device), until - begun
            if left < 1:
                return
            try:
                in_process("compile", asked, left, TORCHINDUCTOR_COMPILE_THREADS="2")
            except (OutOfTime, RuntimeError) as error:
                say(f"  not compiled: {case.label}: {reason(error)}")
            else:
                self.prepared.add((asked, "inductor"))
                say(f"  compiled in {time.perf_counter() - begun:.0f} s: {case.label}")

        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(compile_one, wanted))


def laid_out(work: Workload, provider: str) -> AbstractContextManager[None]:
    """The streams in the memory layout that `provider` wants."""
    return work.channels_first() if provider in CHANNELS_FIRST else nullcontext()


def identity(case: dict[str, Any], provider: str) -> str:
    """What makes two measurements the same: the case, whoever else ran it, and the provider."""
    return json.dumps([{key: value for key, value in case.items() if key != "providers"}, provider], sort_keys=True)


def request(case: Case, provider: str, device: torch.device) -> str:
    """What a fresh process is asked for."""
    return json.dumps({"case": case.as_json(), "provider": provider, "device": str(device)})


def _attempt(result: Result, measure: Callable[[], None]) -> None:
    """Note in `result` why `measure` could not be done: the other providers go on."""
    try:
        measure()
    except Unavailable as error:
        result |= {"status": "unavailable", "reason": str(error)}
    except Refused as error:
        # What was measured before the refusal is of the same program, and goes as well.
        for key in [key for key in result if key.endswith(("_ms", "_us", "_seconds")) and "floor" not in key]:
            del result[key]
        result |= {"status": "refused", "reason": str(error)}
    except OutOfTime:
        raise
    except Exception as error:
        result |= failed(error)


def failed(error: Exception) -> Result:
    """The status that an error makes. What exceeds the memory is no failure: it is said, and left out."""
    return {"status": "skipped" if isinstance(error, torch.OutOfMemoryError) else "failed", "reason": reason(error)}


def reason(error: Exception) -> str:
    """What went wrong, in a line."""
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:300]}"


def summary(result: Result, case: Case) -> str:
    """One provider's result in a line."""
    if result["status"] != "ok":
        return f"{result['status']}: {result['reason']}"
    depth, graph = case.depth, result.get("graph_ms")
    cells = [
        f"{mode} {result[key]['median'] / depth:.4f} ms a sublayer"
        + (f" ({result[key]['median'] / result[floor]:.2f} x floor)" if (floor := f"{mode}_floor_ms") in result else "")
        for mode in ("forward", "step")
        if (key := f"{mode}_ms") in result
    ]
    if graph:
        cells.append(f"in a graph {1000 * graph['median'] / depth:.1f} us a sublayer")
    if "graph_note" in result:
        cells.append(result["graph_note"])
    if "peak_units" in result:
        cells.append(f"peak {result['peak_units']:.1f} units a sublayer")
    if "first_step_seconds" in result:
        cells.append("first step {cold:.1f} s cold, {warm:.1f} s warm".format(**result["first_step_seconds"]))
    if "process_seconds" in result:
        cells.append("a process {cold:.1f} s cold, {warm:.1f} s warm".format(**result["process_seconds"]))
    if "forward_launches" in result:
        cells.append(f"{result['forward_launches']} launches in all")
    return ", ".join(cells)


def run_plan(plan: Plan, only: Sequence[str], runner: Runner, processes: int = 0) -> bool:
    """Run every case that has no result yet; whether there was time for all of them.

    Compiled programs live in an empty cache of their own, so that a first call is one.
    """
    todo = [(part, case, missing) for part, cases in plan.items() for case in cases
            if (missing := runner.missing(case, only))]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, caches(Path(folder)):
        for number, (part, case, providers) in enumerate(todo, 1):
            # After the first part only: its first calls are measured, and nothing else is as important.
            if part != "main" and processes:
                runner.prepare([(case, names) for _, case, names in todo[number - 1 :]], processes)
                processes = 0
            if runner.budget.left <= 0:
                say(f"the budget is spent: {len(todo) - number + 1} of {len(todo)} cases are left out")
                break
            say(f"case {number} of {len(todo)}, {part}: {case.label}")
            runner.run(case, providers)
            release()
    return not any(runner.missing(case, only) for _, case, _ in todo)


def compile_here(asked: str) -> None:
    """Run each of a case's programs once, so that what is compiled for them, and counted in it, is in the caches."""
    given = json.loads(asked)
    work = workload(Case.from_json(given["case"]), torch.device(given["device"]))
    modes, compiled = work.case.modes, PROVIDERS[given["provider"]]
    call = compiled(work, None)
    with counting(given["provider"]):
        if "step" in modes:
            work.step(call)
        if {"forward", "launches"} & {*modes}:
            work.forward(call)
    if "graph" in modes and work.device.type == "cuda":
        work.forward(compiled(work, "reduce-overhead"))


def first_step_here(asked: str) -> float:
    """Seconds to the end of one first step in this process, its results checked afterwards.

    Imports, the start of CUDA and of Inductor's workers are counted only if the request says when the process began.
    """
    given = json.loads(asked)
    device = torch.device(given["device"])
    if "begun" in given:  # the start of this process, by the clock of the one that started it
        return _step_of_process(given, device)
    with tempfile.TemporaryDirectory() as elsewhere, caches(Path(elsewhere)):
        x = torch.ones(8, device=device, requires_grad=True)
        torch.compile(lambda x: (x.sin() * x).sum())(x).backward()
    torch._dynamo.reset()
    work = workload(Case.from_json(given["case"]), device)
    with laid_out(work, given["provider"]):
        meter = Meter(device)
        meter.wait()
        start = time.perf_counter()
        values = work.step(PROVIDERS[given["provider"]](work, None))
        meter.wait()
        seconds = time.perf_counter() - start
    Judge(work).check_step(values)
    return seconds


def _step_of_process(given: Result, device: torch.device) -> float:
    work = workload(Case.from_json(given["case"]), device)
    values = work.step(PROVIDERS[given["provider"]](work, None))
    Meter(device).wait()
    seconds = time.time() - float(given["begun"])
    Judge(work).check_step(values)
    return seconds
