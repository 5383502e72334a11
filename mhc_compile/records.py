"""What the passes reported, of every compiled graph that this process has: made here, or found in a cache.

A compiled graph that is found in a cache skips the passes. So Inductor's own object for a compiled graph carries the
report, and wherever that object is kept, in the FX graph cache, in AOTAutograd's, in the artifacts of
`torch.compiler.save_cache_artifacts` or in the file of an ahead-of-time compiled function, the report is kept with it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from mhc_compile import compat, guard
from mhc_compile.passes.report import Report

log = logging.getLogger(__name__)


@dataclass
class Compiled:
    """What the passes did to one graph that Dynamo made.

    traced is of the graph before autograd and of its joint graph. lowered has a report for each graph that Inductor
    makes of these: of the forward, and of the backward, which may follow much later. loaded has both reports of each
    of these graphs that a cache had.
    """

    traced: Report = field(default_factory=Report)
    lowered: list[Report] = field(default_factory=list)
    loaded: list[tuple[Report, Report]] = field(default_factory=list)

    def report(self) -> Report:
        traced = self.traced
        # Where the passes ran here, too, they know of the program as it is now.
        if self.loaded and _digest(self.loaded[-1][0]) != _digest(traced):
            traced = self.loaded[-1][0]
        total = Report(cached=traced.graphs if self.loaded else 0)
        for one in (traced, *self.lowered, *(lowered for _, lowered in self.loaded)):
            total.add(one)
        return total

    def digest(self) -> str:
        """Equal if the same is told of two graphs before they are lowered.

        It is part of what Inductor's cache knows a graph by. Otherwise two programs that become the same graph would
        have the same report.
        """
        return _digest(self.loaded[-1][0] if self.loaded else self.traced)

    def packed(self) -> str:
        """The report that Inductor's object for the graph lowered last carries."""
        return json.dumps([self.traced.as_dict(), (self.lowered or [Report()])[-1].as_dict()])

    def unpack(self, text: str) -> None:
        """Add the report of a graph that comes from a cache."""
        report = _unpacked(text)
        if report not in self.loaded:  # a file may be loaded twice
            self.loaded.append(report)
            log.info("from a cache: %s", self.report())


def _unpacked(text: str) -> tuple[Report, Report]:
    traced, lowered = map(Report.from_dict, json.loads(text))
    return traced, lowered


def _digest(report: Report) -> str:
    """Equal for reports that differ in the time and in line numbers at most."""
    sites = [
        (site.op, site.location.name, site.location.code, site.detail, site.reason)
        for site in (*report.sites, *report.called)
    ]
    told = (sites, report.graphs, report.errors, sorted(report.fusions.items()))
    return hashlib.sha256(repr(told).encode(errors="backslashreplace")).hexdigest()[:16]


@dataclass
class _Compilation:
    """The graphs of one compilation of a frame. It counts from when Dynamo keeps the code that calls them."""

    attempt: int
    graphs: list[Compiled] = field(default_factory=list)
    kept: bool = False

    def report(self) -> Report:
        total = Report()
        for graph in self.graphs:
            total.add(graph.report())
        return total


class Ledger:
    """The graphs of every compilation, by the frame that Dynamo compiled.

    A frame is compiled again for other shapes, or for another module whose code it is. Dynamo itself begins anew while
    it compiles one, and gives up; what it throws away does not count.
    """

    def __init__(self) -> None:
        self._frames: dict[Any, dict[Any, _Compilation]] = {}
        self._without_frame: list[Compiled] = []
        self._active: ContextVar[Compiled | None] = ContextVar("active", default=None)
        self._last: _Compilation | Compiled | None = None

    @contextmanager
    def graph(self) -> Iterator[Compiled]:
        """Around the compilation of one graph of Dynamo's."""
        graph = Compiled()
        with guard.guard("the report is not kept", graph.traced.errors):
            self._enter(graph)
        token = self._active.set(graph)
        try:
            yield graph
        finally:
            self._active.reset(token)

    def _enter(self, graph: Compiled) -> None:
        compat.on_dynamo_reset(_forgetful)
        compat.on_code_of_dynamo(_kept)
        frame, number, attempt = compat.compile_id()
        if frame is None:
            self._without_frame.append(graph)
            self._last = graph
            return
        compilations = self._frames.setdefault(frame, {})
        if number not in compilations or compilations[number].attempt != attempt:
            compilations[number] = _Compilation(attempt)
        compilations[number].graphs.append(graph)
        self._last = compilations[number]

    def current(self) -> Compiled | None:
        """The graph that is being compiled. That of a backward which is compiled later is the last of its frame."""
        active = self._active.get()
        compilation = None if active is not None else self._compilation()
        return compilation.graphs[-1] if compilation is not None and compilation.graphs else active

    def _compilation(self) -> _Compilation | None:
        frame, number, _ = compat.compile_id()
        return self._frames.get(frame, {}).get(number)

    def keep(self) -> None:
        """Dynamo keeps the code of the frame that it compiles."""
        compilation = self._compilation()
        if compilation is not None:
            compilation.kept = True

    def load(self, text: str) -> None:
        """A compiled graph was found in a cache, or in the file of an ahead-of-time compiled function."""
        (self.current() or self._loaded_before(text)).unpack(text)

    def _loaded_before(self, text: str) -> Compiled:
        """The entry for what is loaded outside a compilation: forward and backward of one graph have one."""
        traced, _ = _unpacked(text)
        for graph in self._without_frame:
            if graph.digest() == _digest(traced):
                return graph
        self._without_frame.append(Compiled())
        return self._without_frame[-1]

    def report(self) -> Report:
        total = Report()
        for compilations in self._frames.values():
            kept = [one.report() for one in compilations.values() if one.kept]
            total.add(Report.joined(kept))
        without_frame = {graph.digest(): graph for graph in self._without_frame}
        for graph in without_frame.values():
            total.add(graph.report())
        return total

    def last(self) -> Report:
        """The report of the last compilation, whether it is kept or not."""
        return Report() if self._last is None else self._last.report()

    def forget(self) -> None:
        self._frames.clear()
        self._without_frame.clear()
        self._last = None


_process = Ledger()
# In which the graphs are that Dynamo compiles at present: that of the process, and those of callers of `explain`.
_open = [_process]


@contextmanager
def ledger() -> Iterator[Ledger]:
    """A ledger of one's own, for graphs that are looked at only."""
    one = Ledger()
    _open.append(one)
    try:
        yield one
    finally:
        _open.remove(one)


# Of the process: around the compilation of one graph, the graph that is being compiled, and the last compilation.
graph, current, last = _process.graph, _process.current, _process.last


def forget() -> None:
    """Forget all reports, and what was told of failures."""
    _process.forget()
    guard.forget()


def report() -> Report:
    """All graphs that were compiled, or found in a cache, since `torch._dynamo.reset()`, in one report.

    Graphs that Dynamo threw away do not count. A function that was compiled again, for other shapes, counts once. For a
    graph that was found in a cache, this is the report of its compilation, which the cache keeps with the graph.
    `cached` counts these graphs, and the text says so. So does what
    `torch.compiler.load_compiled_function` has loaded.
    """
    return _process.report()


def _kept() -> None:
    for one in _open:
        with guard.guard("the report is not kept"):
            one.keep()


def _pack() -> str | None:
    graph = _process.current()
    return graph.packed() if graph is not None and (graph.traced.graphs or graph.lowered) else None


class _Forgetful:
    """Stands among Dynamo's backends, so that a reset of Dynamo is one of ours."""

    @staticmethod
    def reset() -> None:
        forget()


_forgetful = _Forgetful()
with guard.guard("caches have no reports"):
    compat.carry_with_compiled_graphs(_pack, _process.load)
