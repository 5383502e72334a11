"""What the passes reported, of every compiled graph that this process has: made here, or found in a cache.

A compiled graph that is found in a cache skips the passes. So Inductor's own object for a compiled graph carries the
report. The report is kept wherever that object is kept: in the FX graph cache, in AOTAutograd's cache, in the artifacts
of `torch.compiler.save_cache_artifacts`, or in the file of an ahead-of-time compiled function.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from mhc_compile import compat, guard
from mhc_compile.ops import _loops
from mhc_compile.passes.cut import MADE_ELSEWHERE, can_hold
from mhc_compile.passes.places import Places, is_within
from mhc_compile.passes.report import (
    CANNOT_HOLD,
    FUNCTION,
    MODULE,
    NOT_COMPILED,
    Location,
    Report,
    SiteReport,
    counted,
    function_at,
)
from mhc_compile.sites_once import Functions, Part, number_of, told_elsewhere

log = logging.getLogger(__name__)


@dataclass
class Compiled:
    """What the passes did to one graph that Dynamo made.

    traced is of the graph before autograd and of its joint graph. lowered has a report for each graph that Inductor
    makes of these: of the forward, and of the backward, which may follow much later. loaded has both reports of each
    of these graphs that a cache had, or a package if packaged, by their text. They say what other processes did, so
    they have no seconds. checked is what `mhc.check` did in its first calls.
    places are those of the graph's nodes, if they are known: with them, loaded has the lines of the program as it is
    now. before and after are the breaks by which the graph began, and ended. modules has numbers for the modules that
    paths in its report name. failure says why there is no compiled graph, strict whether options ask for errors.
    """

    traced: Report = field(default_factory=Report)
    lowered: list[Report] = field(default_factory=list)
    loaded: dict[str, tuple[Report, Report]] = field(default_factory=dict)
    packaged: bool = False
    checked: Report = field(default_factory=Report)
    places: Places | None = None
    before: compat.GraphBreak | None = None
    after: compat.GraphBreak | None = None
    modules: dict[str, int] = field(default_factory=dict)
    failure: str | None = None
    strict: bool = False
    begun: float = field(default_factory=time.perf_counter)

    def say(self, what: str) -> None:
        """Log a stage, and when after the beginning it was reached."""
        if log.isEnabledFor(logging.INFO):
            frame, number, _ = compat.compile_id()
            log.info("graph %s/%s, %.1f s: %s", frame, number, time.perf_counter() - self.begun, what)

    def report(self, told: Container[str] = ()) -> Report:
        """What is known of the graph, without modules that only their names tell if more is said of them.

        told: paths of modules of which other graphs say more.
        """
        # Where the passes ran here, too, they know of the program as it is now.
        traced = self.traced if self.digest() == _digest(self.traced) else self._latest
        count = traced.graphs if self.loaded else 0
        total = Report(packaged=count) if self.packaged else Report(cached=count)
        for one in (traced, *self.lowered, *(lowered for _, lowered in self.loaded.values()), self.checked):
            total.add(one)
        total.cut = list(self._cut(total.cut))
        total.sites = [site for site in total.sites if site.op != MODULE or not _says_more(total, site.module, told)]
        if self.loaded and self.places is None:
            total.outdated = list(
                dict.fromkeys(site.location.name for site in total.sites if site.location.is_outdated)
            )
        return total

    @property
    def _latest(self) -> Report:
        """The report of the graph before it is lowered: the last that was loaded, if any."""
        return list(self.loaded.values())[-1][0] if self.loaded else self.traced

    def note_modules(self) -> None:
        """Note which modules its report is about, while Dynamo still has them at hand."""
        report = self.report()
        sites = [*report.sites, *report.called, *report.cut, *(part for one in report.fused for part in one.parts)]
        for path in dict.fromkeys(site.module for site in sites):
            module = compat.module_at(path)
            if module is not None:
                self.modules[path] = number_of(module)

    def discard(self) -> None:
        """Nothing counts that was done to this graph: it is compiled again."""
        self.traced, self.checked = Report(), Report()
        self.lowered.clear()
        self.loaded.clear()

    def _cut(self, sites: list[SiteReport]) -> Iterator[SiteReport]:
        """With Dynamo's reason. Without one it is the program that compiles its parts one by one."""
        for site in sites:
            broken = self.before if site.reason == MADE_ELSEWHERE else self.after
            if broken is not None:
                yield replace(site, reason=f"{site.reason}: Dynamo breaks the graph at {_told(broken)}")

    def digest(self) -> str:
        """Equal for two graphs with the same report, before they are lowered.

        It is part of what Inductor's cache knows a graph by. Otherwise two programs that become the same graph would
        have the same report.
        """
        return _digest(self._latest)

    def packed(self) -> str:
        """The report that Inductor's object for the graph lowered last carries."""
        places = None if self.places is None else self.places.told()
        return json.dumps([self.traced.as_dict(), (self.lowered or [Report()])[-1].as_dict(), places])

    def unpack(self, text: str) -> None:
        """Add the report of a graph that comes from a cache."""
        if text not in self.loaded:  # a file may be loaded twice
            traced, lowered = _unpacked(text, self.places)
            self.loaded[text] = replace(traced, seconds=0.0), replace(lowered, seconds=0.0)
            found = self.report()
            told = found if found.sites or found.called else "a graph, or a part of one, with no site of its own"
            log.info("from a %s: %s", "package" if self.packaged else "cache", told)


def _says_more(report: Report, path: str, told: Container[str]) -> bool:
    """Whether a report has code inside a module, or operators that the program calls around it."""
    inside = any(is_within(site.module, path) for site in report.of_modules)
    return path in told or inside or any(is_within(path, site.module) for site in report.called)


def _unpacked(text: str, places: Places | None = None) -> tuple[Report, Report]:
    *told, before = json.loads(text)
    if places is not None and before is not None:
        told = places.moved(told, before)
    traced, lowered = map(Report.from_dict, told)
    return traced, lowered


def _digest(report: Report) -> str:
    """Equal for reports that differ in the time and in line numbers at most."""
    sites = [
        (site.op, site.location.name, site.location.code, site.module, site.detail, site.reason)
        for site in (*report.sites, *report.called, *report.cut)
    ]
    told = (sites, report.graphs, report.errors, sorted(report.fusions.items()))
    return hashlib.sha256(repr(told).encode(errors="backslashreplace")).hexdigest()[:16]


@dataclass
class _Compilation:
    """The graphs of one compilation of a frame. It counts from when Dynamo keeps the code that calls them.

    before: Dynamo's attempt before this one, which it threw away.
    """

    attempt: int
    graphs: list[Compiled] = field(default_factory=list)
    before: _Compilation | None = None

    def report(self, told: Callable[[Compiled], Container[str]] = lambda graph: ()) -> Report:
        total = Report()
        for graph in self.graphs:
            total.add(graph.report(told(graph)))
        return total

    @property
    def modules(self) -> dict[str, int]:
        """The numbers of the modules that paths in its report name."""
        return {path: number for graph in self.graphs for path, number in graph.modules.items()}

    def attempts(self) -> list[_Compilation]:
        """Dynamo's attempts, this one included, the first one first."""
        return [*(self.before.attempts() if self.before is not None else []), self]

    def left(self, kept: set[Location]) -> Iterator[tuple[list[SiteReport], list[str]]]:
        """The sites of each attempt at lines that neither `kept` nor an earlier attempt has, and its advice."""
        known = set(kept)
        for attempt in self.attempts():
            report = attempt.report()
            report.sites = [site for site in report.sites if site.op != MODULE]
            if report.sites:
                failed = [graph.report() for graph in attempt.graphs if graph.failure is not None]
                advice = [words for graph in failed for words in graph.advice]
                yield [site for site in report.sites if site.location not in known], advice
            known |= {site.location for site in report.sites}

    def failure(self, frame: Any, number: Any) -> str | None:
        """Why there is no code that Dynamo could keep; None where it may be at work still."""
        graphs = [graph for attempt in self.attempts() for graph in attempt.graphs]
        failures = [graph.failure for graph in graphs if graph.failure is not None]
        if not failures:
            return None
        breaks = [one for one in list(compat.watched.breaks) if (one.frame, one.number) == (frame, number)]
        return f"Dynamo gives up on the graph at {_told(breaks[-1])}" if breaks else f"its graph failed: {failures[-1]}"


def _told(one: compat.GraphBreak) -> str:
    return f"{Location(one.file, one.line, '')}: {one.words}"


class Ledger:
    """The graphs of every compilation, by the frame that Dynamo compiled.

    A frame is compiled again for other shapes, or for another module whose code it is. Dynamo itself begins anew while
    it compiles one, and gives up; what it throws away does not count.
    """

    def __init__(self) -> None:
        self._frames: dict[Any, dict[Any, _Compilation]] = {}
        self._without_frame: list[Compiled] = []
        self._eager: list[compat.GivenUp] = []
        self._limits: dict[Any, compat.RecompileLimit] = {}
        self._unreported = 0
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
            with guard.guard("a site that several functions have counts several times"):
                graph.note_modules()
            with guard.guard("the log is not complete"):
                graph.say("done")
        except Exception as error:
            graph.failure = guard.described(error)
            raise
        finally:
            self._active.reset(token)

    def _enter(self, graph: Compiled) -> None:
        compat.on_dynamo_reset(_forgetful)
        compat.watch_dynamo()
        graph.before, graph.after = compat.breaks_around()
        frame, number, attempt = compat.compile_id()
        if frame is None:
            self._without_frame.append(graph)
            self._last = graph
            return
        compilations = self._frames.setdefault(frame, {})
        now = compilations.setdefault(number, _Compilation(attempt))
        if now.attempt != attempt:
            now = compilations[number] = _Compilation(attempt, before=now)
        now.graphs.append(graph)
        self._last = compilations[number]

    def current(self) -> Compiled | None:
        """The graph that is being compiled. That of a backward which is compiled later is the last of its frame."""
        active = self._active.get()
        compilation = None if active is not None else self._compilation()
        return compilation.graphs[-1] if compilation is not None and compilation.graphs else active

    def _compilation(self) -> _Compilation | None:
        frame, number, _ = compat.compile_id()
        return self._frames.get(frame, {}).get(number)

    def load(self, text: str) -> None:
        """A compiled graph was found in a cache, or in the file of an ahead-of-time compiled function."""
        compat.on_dynamo_reset(_forgetful)
        (self.current() or self._loaded_before(text)).unpack(text)

    def load_package(self, text: str | None) -> None:
        """A package of AOTInductor was loaded, with its report if it has one. What was built here is known."""
        compat.on_dynamo_reset(_forgetful)
        if text is None:
            self._unreported += 1
            return
        graph, (_, lowered) = self._loaded_before(text), _unpacked(text)
        if lowered not in graph.lowered:
            graph.packaged = True
            graph.unpack(text)

    def _loaded_before(self, text: str) -> Compiled:
        """The entry for what is loaded outside a compilation: forward and backward of one graph have one."""
        traced, _ = _unpacked(text)
        for graph in self._without_frame:
            if graph.digest() == _digest(traced):
                return graph
        self._without_frame.append(Compiled())
        return self._without_frame[-1]

    def give_up(self, function: compat.GivenUp) -> bool:
        """Note a function that Dynamo gives up on, unless it does so for a graph that failed: that graph was looked at.

        Returns whether it is noted.
        """
        compat.on_dynamo_reset(_forgetful)
        compilation = self._frames.get(function.broken.frame, {}).get(function.broken.number)
        if compilation is not None and any(graph.failure is not None for graph in compilation.graphs):
            return False
        self._eager.append(function)
        return True

    def report(self) -> Report:
        """All that Dynamo kept, with what it did not keep of the same code."""
        total = Report(cut=list(dict.fromkeys(map(_unknown, self._eager))), unreported=self._unreported)
        functions: list[Location] = []
        graphs: list[Compiled] = []
        put = Functions(total)
        told = _told_elsewhere([*self._kept(), *self._without_frame])
        for frame, compilations in list(self._frames.items()):
            kept = [number for number in list(compilations) if (frame, number) in compat.watched.kept]
            if not kept:
                continue
            function = function_at(*compat.watched.kept[frame, kept[0]])
            reports = [(compilations[number].report(told), compilations[number].modules) for number in kept]
            if any(report.sites or report.called for report, _ in reports):
                functions.append(function)
            put.add(reports, function)
            graphs += (graph for number in kept for graph in compilations[number].graphs)
        total.breaks = _breaks_between_sites(graphs)
        total.cut += [_left_eager(limit, self._may_hold(frame)) for frame, limit in list(self._limits.items())]
        without_frame = {graph.digest(): graph for graph in list(self._without_frame)}
        for graph in without_frame.values():
            total.add(graph.report(told(graph)))
        given_up = self._given_up({site.location for site in total.sites})
        total.cut += given_up.cut
        total.advice = given_up.advice  # nobody needs it for graphs that were compiled
        known = [*functions, *(site.location for site in (*total.sites, *total.cut))]
        total.idle = [place for place in total.skipped if not any(where.is_among([place]) for where in known)]
        return total

    def _kept(self) -> Iterator[Compiled]:
        """The graphs of the compilations that Dynamo kept."""
        for frame, compilations in list(self._frames.items()):
            for number, one in list(compilations.items()):
                if (frame, number) in compat.watched.kept:
                    yield from one.graphs

    def _given_up(self, kept: set[Location]) -> Report:
        """Sites of graphs that Dynamo threw away, where no other graph has the same line, and what the user can do."""
        reasons: dict[tuple[str, Location], str] = {}
        lost = Report()
        for frame, compilations in list(self._frames.items()):
            for number, one in list(compilations.items()):
                why = None if (frame, number) in compat.watched.kept else one.failure(frame, number)
                if why is None:
                    continue
                for sites, advice in one.left(kept):
                    told = [(site.op, site.location) for site in sites]
                    cut = [SiteReport(*site, NOT_COMPILED, reasons.setdefault(site, why)) for site in told]
                    lost = Report.joined([lost, Report(cut=cut, advice=advice)])
        return lost

    def reach_limit(self, frame: Any, limit: compat.RecompileLimit) -> bool:
        """Note a frame that is compiled no more. Returns whether it has sites, or may have some."""
        compat.on_dynamo_reset(_forgetful)
        self._limits[frame] = limit
        return self._may_hold(frame)

    def _may_hold(self, frame: Any) -> bool:
        """Whether a frame that is compiled no more has sites, or may have some, or calls what may have some."""
        graphs = [graph for one in list(self._frames.get(frame, {}).values()) for graph in one.graphs]
        return any(graph.report().sites for graph in graphs) or can_hold(self._limits[frame].reached)

    def finds_nothing(self, frame: Any, number: Any) -> bool:
        """Whether strict options have found nothing yet: not in a compilation of a frame, and not before.

        It is False for a frame that Dynamo cuts, and for the rest of one, because of its other graphs.
        """
        compilation = self._frames.get(frame, {}).get(number)
        graphs = compilation.graphs if compilation is not None else []
        if not any(graph.strict for graph in graphs) or any(graph.before or graph.after for graph in graphs):
            return False
        found = self.report()
        return not (found.sites or found.called or found.cut)

    def progress(self) -> str:
        """How many graphs there are so far, those that Dynamo may throw away included, and what Dynamo is at."""
        graphs = [graph for all in list(self._frames.values()) for one in list(all.values()) for graph in one.graphs]
        sites = sum(len(graph.traced.sites) for graph in graphs)
        now = [f"; Dynamo is at {name}" for name in compat.watched.at_work[-1:]]
        return "".join([f"{counted(len(graphs), 'graph')} traced, with {counted(sites, 'site')}", *now])

    def last(self) -> Report:
        """The report of the last compilation, whether it is kept or not."""
        return Report() if self._last is None else self._last.report()

    def forget(self) -> None:
        """Forget everything, as Dynamo does when it is reset."""
        self._frames.clear()
        self._without_frame.clear()
        self._eager.clear()
        self._limits.clear()
        self._unreported = 0
        self._last = None


def place(function: compat.GivenUp | compat.RecompileLimit) -> Location:
    """Where a function begins, with its name; the rest of a function begins where its first part ends."""
    return function_at(function.file, function.line, function.function)


def _breaks_between_sites(graphs: list[Compiled]) -> list[str]:
    """The breaks by which a graph with sites ends, and a later one begins. What they cut is told elsewhere."""
    found = [(graph, report) for graph in graphs if (report := graph.report()).rewritten]
    reasons = " ".join(site.reason or "" for _, report in found for site in report.cut)
    ended, between = set[compat.GraphBreak](), dict[str, None]()
    for graph, _ in found:
        if graph.before in ended:
            between[_told(graph.before)] = None
        if graph.after is not None:
            ended.add(graph.after)
    return [place for place in between if place not in reasons]


def _told_elsewhere(graphs: Iterable[Compiled]) -> Callable[[Compiled], Container[str]]:
    """For each graph, the modules that only their names tell there, if another graph has more of the same connection.

    Dynamo compiles a module by itself where a break is in it. Then its caller, which may complete the connection, is in
    another graph; and so is a caller that goes on after a break.
    """
    listed = list(graphs)
    if not any(site.op == MODULE for one in listed for site in (*one.traced.sites, *one._latest.sites)):
        return lambda graph: ()
    cut = [one.before is not None or one.after is not None for one in listed]
    parts = [Part(one.report(), one.modules, there) for one, there in zip(listed, cut, strict=True)]
    found = dict(zip(map(id, listed), told_elsewhere(parts), strict=True))
    return lambda graph: found.get(id(graph), ())


def _unknown(function: compat.GivenUp) -> SiteReport:
    own = "Its own lines after an earlier break" if function.resumed else "Its own lines"
    own = "The rest of its own lines" if function.broken.ends else own
    words = (
        f"Dynamo gives up on it at {_told(function.broken).rstrip('.')}. {own} run eagerly and were not looked at; "
        "each function that it calls is compiled by itself, and its sites count once"
    )
    if can_hold(function.reached):
        return SiteReport(FUNCTION, place(function), NOT_COMPILED, words)
    words += (
        ". Strict options accept it: it reaches neither numbers that make gates nor streams with their gates. Nothing "
        "is fused across it"
    )
    return SiteReport(FUNCTION, place(function), CANNOT_HOLD, words)


def _left_eager(limit: compat.RecompileLimit, may_hold: bool) -> SiteReport:
    what = "the part of it after an earlier break" if limit.resumed else "it"
    times = "once" if limit.number == 1 else f"{limit.number} times"
    name = f"the {limit.limit} of torch.compile" if limit.given else f"torch._dynamo.config.{limit.limit}"
    words = (
        f"Dynamo compiled {what} {times} ({name}), and runs it, and all that it calls, "
        f"eagerly for anything new; what changed last: {limit.changed}"
    )
    return SiteReport(FUNCTION, place(limit), "not compiled any more" if may_hold else CANNOT_HOLD, words)


class _Forgetful:
    """Stands among Dynamo's backends, so that a reset of Dynamo is one of ours."""

    @staticmethod
    def reset() -> None:
        forget()


_forgetful = _Forgetful()
_process = Ledger()
# The ledger of this process.
graph, current, last = _process.graph, _process.current, _process.last
give_up, finds_nothing, reach_limit = _process.give_up, _process.finds_nothing, _process.reach_limit


def forget() -> None:
    """Forget all reports, and what failed."""
    _process.forget()
    compat.watched.reset()
    guard.forget()
    _loops.forget_failures()


@contextmanager
def aside() -> Iterator[None]:
    """Meanwhile, reports are of what is compiled meanwhile; afterwards, they are as before."""
    before = dict(vars(_process))
    # Other threads go on with graphs that they have begun.
    vars(_process).update(vars(Ledger()) | {"_active": _process._active})
    try:
        yield
    finally:
        vars(_process).update(before)


def report() -> Report:
    """All graphs that were compiled, or found in a cache, since `torch._dynamo.reset()`, in one report.

    Graphs that Dynamo threw away do not count. A function that was compiled again, for other shapes, counts once. For a
    graph that was found in a cache, this is the report of its compilation, which the cache keeps with the graph.
    `cached` counts these graphs, and the text says so. Graphs that `torch.compiler.load_compiled_function` has loaded
    are counted in the same way.

    A package of AOTInductor carries its report, too, if it was built under `enable`. `packaged` counts the graphs of
    such packages that `torch._inductor.aoti_load_package` has loaded. `unreported` counts packages without a report.

    `cut` has the steps that Dynamo cut or did not compile, with Dynamo's reason.
    """
    return _process.report()


def _pack() -> str | None:
    graph = _process.current()
    if graph is None or not (graph.traced.graphs or graph.lowered):
        return None
    graph.say("Inductor has compiled one of its graphs")
    return graph.packed()


with guard.guard("caches have no reports"):
    compat.carry_with_compiled_graphs(_pack, _process.load)
with guard.guard("packages have no reports"):
    compat.watch_packages(_process.load_package)
