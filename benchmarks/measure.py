"""How things are measured: device time, host time, memory, launches, copy bandwidth, and a first step."""

from __future__ import annotations

import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Call, Case, Workload
from benchmarks.providers import COMPILED, PROVIDERS

ROOT = Path(__file__).resolve().parent.parent
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Sample:
    """The median of several runs, with the 20th and the 80th percentile."""

    median: float
    p20: float
    p80: float
    runs: int

    @classmethod
    def of(cls, values: list[float]) -> Sample:
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        # "inclusive": the percentiles of the runs there were, never beyond them.
        fifths = statistics.quantiles(values, n=5, method="inclusive")
        return cls(statistics.median(values), fifths[0], fifths[3], len(values))


class OutOfTime(Exception):
    """A measurement that there was no time for; it is left for another run."""


class Meter:
    """Measures on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        # Larger than any L2; overwriting it before each run leaves nothing of ours in there.
        self._flush = torch.empty((256 if self.cuda else 1) * MEGABYTE, dtype=torch.int8, device=device)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def milliseconds(self, call: Callable[[], object], *, ahead: int = 1) -> Sample:
        """Time between two events around `call`, with a cold L2; on a CPU, of the clock.

        The device is kept busy by `ahead` fills of the flush buffer, about 0.1 ms each, while the host starts the call.
        What the host needs beyond that shows, as it does for a user.
        """
        call()
        self.wait()
        start = time.perf_counter()
        call()
        self.wait()
        once = time.perf_counter() - start
        # A third of a second each, but neither less than 10 runs nor more than 200; a tenth, 5 and 50 on a CPU.
        seconds, fewest, most = (0.3, 10, 200) if self.cuda else (0.1, 5, 50)
        runs = int(min(max(seconds / max(once, 1e-6), fewest), most))
        if not self.cuda:
            return Sample.of([1000 * self._clocked(call) for _ in range(runs)])
        make: Any = torch.cuda.Event
        events = [[make(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        for begin, end in events:
            for _ in range(ahead):
                self._flush.zero_()
            begin.record()
            call()
            end.record()
        self.wait()
        return Sample.of([begin.elapsed_time(end) for begin, end in events])

    def _clocked(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def host_microseconds(self, call: Callable[[], object], runs: int = 50) -> Sample:
        """What a call costs the host when the device is idle."""
        values = []
        for _ in range(runs if self.cuda else 5):
            self.wait()
            values.append(1e6 * self._clocked(call))
        self.wait()
        return Sample.of(values)

    def peak_bytes(self, call: Callable[[], object]) -> int | None:
        """The most memory that `call` holds above what was there before; None on a CPU."""
        if not self.cuda:
            return None
        call()
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        self.wait()
        return torch.cuda.max_memory_allocated() - before

    def launches(self, call: Callable[[], object]) -> int | None:
        """The kernels that `call` runs on the device, without copies and fills; None if the device does not say."""
        if not self.cuda:
            return None
        call()
        self.wait()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            self.wait()
        kernels = [e.name for e in profile.events() if e.device_type.name == "CUDA"]
        return sum(not name.startswith(("Memcpy", "Memset")) for name in kernels) or None

    def copy_bandwidth(self) -> float:
        """GB/s of a device copy, reading and writing counted, of 1 GiB (of 16 MiB on a CPU)."""
        source = torch.ones((1024 if self.cuda else 16) * MEGABYTE, dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.milliseconds(lambda: target.copy_(source)).median / 1e6

    def graphed(self, work: Workload, provider: str) -> Call:
        """`provider` inside a CUDA graph, without gradients: mode="reduce-overhead", or captured as it is."""
        if provider in COMPILED or not self.cuda:
            return PROVIDERS[provider](work, "reduce-overhead")
        call = PROVIDERS[provider](work, None)
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                work.forward(call)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = work.forward(call)

        def replay(*arguments: Any) -> torch.Tensor:
            graph.replay()
            return output

        return replay


def release() -> None:
    """Forget compiled code and return memory, so that one provider does not pay for another."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def caches(folder: Path) -> Iterator[None]:
    """Inductor's and Triton's caches in `folder`."""
    before = {name: os.environ.get(name) for name in CACHES}
    os.environ.update({name: str(folder / name.lower()) for name in CACHES})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def in_process(command: str, request: str, limit: float, **environment: str) -> str:
    """What `python -m benchmarks command request` prints, in a fresh process.

    Raises RuntimeError if it fails, OutOfTime if it needs more than `limit` seconds; then nothing of it is left.
    """
    # Files, as Inductor's own workers would keep a pipe open after their parent has gone.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks", command, request],
            cwd=ROOT, env=os.environ | environment, stdout=out, stderr=err, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(max(limit, 0.0))
        except subprocess.TimeoutExpired:
            raise OutOfTime(f"{command} did not end in the {limit:.0f} s that were left") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0), err.seek(0)
        if status:
            raise RuntimeError(f"{command} in a fresh process: {err.read().strip()[-500:]}")
        return out.read()


def first_step(case: Case, provider: str, device: torch.device, limit: float = 900.0) -> dict[str, float]:
    """Seconds to the end of a first step in a fresh process, with empty caches ("cold") and then with full ones.

    Raises RuntimeError if a process fails, OutOfTime if both need more than `limit` seconds.
    """
    return _cold_and_warm(case, provider, device, limit, dict)


def process(case: Case, provider: str, device: torch.device, limit: float = 900.0) -> dict[str, float]:
    """As `first_step`, from the start of the process on: imports and the start of CUDA are a part."""
    return _cold_and_warm(case, provider, device, limit, lambda: {"begun": time.time()})


def _cold_and_warm(
    case: Case, provider: str, device: torch.device, limit: float, more: Callable[[], dict[str, float]]
) -> dict[str, float]:
    result = {}
    until = time.perf_counter() + min(limit, 900.0)
    with tempfile.TemporaryDirectory() as folder, caches(Path(folder)):
        for kind in ("cold", "warm"):
            request = json.dumps({"case": case.as_json(), "provider": provider, "device": str(device)} | more())
            printed = in_process("first-step", request, until - time.perf_counter())
            result[kind] = float(json.loads(printed.splitlines()[-1])["seconds"])
    return result
