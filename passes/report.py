"""Stage 5, report: what was rewritten, what was not, and why, in the words of the user's own source."""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import fx

from mhc_compile import compat, ops
from mhc_compile.encoding import printable_line

# A variable at the begin of a path. Dynamo wraps torch's own modules, or their methods, into a function of fn.
_VARIABLE = re.compile(r"^([LG])\['(\w+)'\](\.__self__)?\.?")
# The line by which a function's definition is known.
_DEF = re.compile(r"\s*(?:async\s+)?def\s+(\w+)")
# Whose lines stand for the user's line that calls them: torch, the typed wrappers of the operators, and libraries.
_SPELLERS = tuple(os.path.join(os.path.dirname(str(package.__file__)), "") for package in (torch, ops))
_LIBRARIES = ("einops",)


def _working_directory() -> str:
    """It ends with a slash; it is empty if the directory was deleted."""
    try:
        return os.path.join(os.getcwd(), "")
    except OSError:
        return ""


def _whole(path: str) -> str:
    return os.path.normpath(os.path.join(_working_directory(), path))


@dataclass(frozen=True)
class Location:
    """A line of the user's program; `file` is empty if the graph does not know it."""

    file: str
    line: int
    code: str

    @property
    def name(self) -> str:
        """The file without the folders that lead to installed packages or to where one is."""
        return self.file.rpartition("site-packages/")[2].removeprefix(_working_directory())

    @property
    def is_outdated(self) -> bool:
        """Whether the file has another line there by now."""
        lines = linecache.getlines(self.file)
        return bool(lines) and self.code not in [line.strip() for line in lines[self.line - 1 : self.line]]

    @property
    def short(self) -> str:
        """The same on all machines of a job; empty if the graph does not know the line."""
        return f"{os.path.basename(self.file)}:{self.line}" if self.file else ""

    def is_among(self, places: Iterable[str]) -> bool:
        """Whether `file.py:12`, with or without folders, names this line in a list of such places."""
        names = [f"/{self}", f"{printable_line(_whole(self.file))}:{self.line}"] if self.file else []
        for place in map(printable_line, places):
            ends = f"/{os.path.normpath(place).lstrip('/')}", f"/{place.lstrip('/')}"
            if any(name.endswith(ends) or name == _whole(place) for name in names):
                return True
        return False

    def __str__(self) -> str:
        return f"{printable_line(self.name)}:{self.line}" if self.file else "unknown source"


@dataclass(frozen=True)
class Traffic:
    """Bytes by count: each call reads every argument once and writes every result once, and a view costs nothing.

    moved is what is read and written, made what is written alone. Both are of the forward pass.
    """

    moved: int
    made: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.moved + other.moved, self.made + other.made)


@dataclass(frozen=True)
class SiteReport:
    """One piece of hyper-connection code. op is the operator it became, or would have become; reason is why not.

    own says which of its gates stay the program's code, and why; where it is empty, operators make all of them.
    module is the path of the module whose code it is, such as "layers.0.attention"; "" if none is known. before and
    after count the bytes of the program's own code and of what it became, None if they are not known. excerpt names
    the graph's lines before and after, in `Report.excerpts`; "" if there are none. node is the number of its node in
    Dynamo's graph, if that is known: one line may have several sites, and may be several lines later.
    """

    op: str
    location: Location
    detail: str
    reason: str | None = None
    own: str = ""
    module: str = ""
    # These differ where a function is compiled for several sizes; its sites are the same.
    before: Traffic | None = field(default=None, compare=False)
    after: Traffic | None = field(default=None, compare=False)
    excerpt: str = field(default="", compare=False)
    node: int | None = field(default=None, compare=False)

    @property
    def rewritten(self) -> bool:
        return self.reason is None

    @property
    def told(self) -> str:
        """What a report says below the line of the program."""
        return self.reason or self.detail + (f"; its own: {self.own}" if self.own else "")


@dataclass(frozen=True)
class Fused:
    """An operator of the forward pass that several sites share, by their operators, lines and modules."""

    op: str
    parts: tuple[SiteReport, ...]
    after: Traffic | None = field(default=None, compare=False)


# What stands for the operator, and for the detail, of a function that Dynamo gives up on.
FUNCTION, NOT_COMPILED, CANNOT_HOLD = "function", "not compiled", "not compiled, cannot hold a site"
# What stands for the detail of a site of which a part is in another graph.
CUT = "cut"
# What stands for the operator of a module that only its name tells (`passes.named`).
MODULE = "module"
# What notes the number of a node in it.
NUMBER = "mhc_number"
# The fields of a report that list sites, and those that count by names.
SITES = ("sites", "called", "cut", "unchecked")
COUNTS = ("checked", "fusions", "shared", "lowered")


@dataclass
class Report:
    """What the passes did, over all graphs of a model.

    - sites: every site, in program order. `rewritten` lists the accepted sites, `declined` the others;
    - called: the operators that the program calls itself. They are not sites;
    - cut: the sites that Dynamo cut or did not compile, and why. `detail` says which. `lost` lists sites that were not
      compiled. `unknown` lists functions that Dynamo gave up on before one of their graphs was looked at;
    - checked: for each operator, the number of sites that `mhc.check` compared with the program. `unchecked` lists the
      sites that it could not compare;
    - advice: what the user can do about graphs that Dynamo may give up on;
    - graphs: the number of graphs that were looked at. compiled counts a graph again for each recompilation, such as
      for other shapes. cached counts those from a cache, packaged those from packages of AOTInductor;
    - unreported: the number of loaded packages without a report;
    - outdated: the files that have changed since, if a loaded file or package names lines of the older version;
    - errors: internal failures. After each, a site or a graph was left as it was, or a log or report is incomplete;
    - fusions: the number of fusions in joint graphs, by name. shared: the number of calls of graphs that are compiled
      once. lowered: the number of operators that Inductor compiled as parts of a graph;
    - fused: the operators of forward passes that fusions made, each with the sites that it replaces;
    - excerpts: by name, the lines of a graph for a site, before and after the rewriting. Identical sites share one;
    - functions: by name, how many of its sites each function has, if reports of several functions were put together;
    - skipped: the places that `mhc.skip` names. idle: those where no site is, and no function with sites that Dynamo
      compiled by itself. The report of a single graph has none, since other graphs may have such a site;
    - breaks: where Dynamo ends a graph with sites, and begins another one with sites. Nothing is fused across these.

    `str(report)` is for people and has at most one screen; `details()` has everything, and `html()` is a page.
    """

    sites: list[SiteReport] = field(default_factory=list)
    called: list[SiteReport] = field(default_factory=list)
    cut: list[SiteReport] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    graphs: int = 0
    compiled: int = 0
    cached: int = 0
    packaged: int = 0
    unreported: int = 0
    outdated: list[str] = field(default_factory=list)
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    unchecked: list[SiteReport] = field(default_factory=list)
    fusions: Counter[str] = field(default_factory=Counter)
    shared: Counter[str] = field(default_factory=Counter)
    lowered: Counter[str] = field(default_factory=Counter)
    fused: list[Fused] = field(default_factory=list)
    excerpts: dict[str, list[str]] = field(default_factory=dict)
    functions: dict[str, int] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)

    @property
    def rewritten(self) -> list[SiteReport]:
        return [site for site in self.sites if site.rewritten]

    @property
    def declined(self) -> list[SiteReport]:
        return [site for site in self.sites if not site.rewritten]

    @property
    def with_own_gates(self) -> list[SiteReport]:
        """The rewritten sites some of whose gates stay the program's code."""
        return [site for site in self.rewritten if site.own]

    def add(self, other: Report) -> None:
        """Add what was done to other graphs, or by other passes to the same."""
        self.sites += other.sites
        self.called += other.called
        self.cut += other.cut
        self.advice += other.advice
        self.skipped = list(dict.fromkeys([*self.skipped, *other.skipped]))
        self.compiled = self._in_all() + other._in_all()
        self.graphs += other.graphs
        self.cached += other.cached
        self.packaged += other.packaged
        self.unreported += other.unreported
        self.outdated = list(dict.fromkeys([*self.outdated, *other.outdated]))
        self.seconds += other.seconds
        self.errors += other.errors
        self.checked += other.checked
        self.unchecked += other.unchecked
        self.fusions += other.fusions
        self.shared += other.shared
        self.lowered += other.lowered
        self.fused += other.fused
        self.excerpts |= other.excerpts

    @staticmethod
    def joined(reports: Iterable[Report]) -> Report:
        """The report of one program that was compiled several times: what is true of each graph is reported once."""
        total = Report()
        for one in reports:
            for name in (*SITES, "fused"):
                setattr(total, name, _united(getattr(total, name), getattr(one, name)))
            total.advice = list(dict.fromkeys([*total.advice, *one.advice]))
            total.skipped = list(dict.fromkeys([*total.skipped, *one.skipped]))
            total.compiled = total._in_all() + one._in_all()
            total.graphs = max(total.graphs, one.graphs)
            total.cached += one.cached
            total.seconds += one.seconds
            total.errors += [error for error in one.errors if error not in total.errors]
            total.checked |= one.checked
            total.fusions |= one.fusions
            total.shared |= one.shared
            total.lowered |= one.lowered
            total.excerpts |= one.excerpts
        return total

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, to be stored."""
        counts = {name: dict(getattr(self, name)) for name in COUNTS}
        sites = {name: [asdict(site) for site in getattr(self, name)] for name in SITES}
        return vars(self) | counts | sites | {"fused": [asdict(one) for one in self.fused]}

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Report:
        """What `as_dict` was made of; fields that this version does not know are left out."""
        known = {one.name: told[one.name] for one in fields(cls) if one.name in told}
        sites = {name: list(map(_site_from_dict, told.get(name, []))) for name in SITES}
        counts = {name: Counter(told.get(name, {})) for name in COUNTS}
        fused = [_fused_from_dict(one) for one in told.get("fused", [])]
        return cls(**known | sites | counts | {"fused": fused})

    def __str__(self) -> str:
        return _text([self._head(), *_lines(self, _KINDS), *self._nothing()])

    def told_of_cut(self) -> list[str]:
        """The report's lines about sites and functions that Dynamo cut or did not compile."""
        return [printable_line(line) for line in _cut_lines(self, _KINDS)]

    @property
    def unknown(self) -> list[SiteReport]:
        """The functions that Dynamo did not compile. They were not searched for sites."""
        return [site for site in self.cut if site.op == FUNCTION and site.detail in (NOT_COMPILED, CANNOT_HOLD)]

    @property
    def lost(self) -> list[SiteReport]:
        """The sites of graphs that Dynamo did not keep. They run eagerly."""
        return [site for site in self.cut if site.op != FUNCTION and site.detail == NOT_COMPILED]

    @property
    def found(self) -> int:
        """The number of sites, those of graphs that Dynamo did not keep included."""
        return len(self.sites) + len(self.lost)

    @property
    def torn(self) -> list[SiteReport]:
        """`cut` without functions that cannot hold a hyper-connection. Strict mode raises for these entries."""
        return [site for site in self.cut if site.detail != CANNOT_HOLD]

    @property
    def of_modules(self) -> list[SiteReport]:
        """All entries but those of functions, and of modules that only their names tell."""
        return [one for one in (*self.sites, *self.called, *self.cut) if one.op not in (MODULE, FUNCTION)]

    def details(self) -> str:
        """Everything: each line of the program, and each detail."""
        several = [f"  in {name}: {counted(count, 'site')}" for name, count in self.functions.items()]
        shown = several if len(several) > 1 else []
        return _text([self._head(), *_lines(self, None), *shown, *self._nothing()])

    def html(self, times: Mapping[str, float] | None = None) -> str:
        """A page about the model that needs no other file: its layers, their sites, and what became of each.

        times are milliseconds of one call that you measured, by what was measured ("eager", "mhc"); without them the
        page says that no time was measured. Raises ImportError if jinja2 is not installed.
        """
        from mhc_compile.page import page

        return page(self, times or {})

    def _head(self) -> str:
        graphs = f"{self.graphs} graph{'s' if self.graphs != 1 else ''}"
        if self._in_all() > self.graphs:
            graphs += f", compiled {self._in_all()} times in all"
        for count, source in ((self.cached, "the cache"), (self.packaged, "a package")):
            if count:
                graphs += f" from {source}" if count == self._in_all() else f", {count} of them from {source}"
        own = f", {len(self.with_own_gates)} with gates of their own," if self.with_own_gates else ""
        gone = self.unknown
        kinds, unknown = Counter(site.detail for site in self.cut if site not in gone), len(gone)
        torn = "; " + ", ".join(f"{count} {kind}" for kind, count in kinds.items()) if kinds else ""
        torn += f"; {unknown} function{'s' if unknown > 1 else ''} not looked at" if unknown else ""
        torn += f"; {_packages(self.unreported)} without a report" if self.unreported else ""
        return (
            f"mhc: {len(self.rewritten)} of {self.found} hyper-connection sites rewritten{own} "
            f"in {graphs} ({self.seconds:.2f} s){torn}"
        )

    def _in_all(self) -> int:
        return max(self.compiled, self.graphs)

    def _nothing(self) -> list[str]:
        if self.unreported:
            words = "a package carries its report if it is built under mhc_compile.enable()"
            return [f"  no report in {_packages(self.unreported)}: {words}"]
        if not self.graphs:
            until = "; what Dynamo compiled or gave up on earlier stays so until torch._dynamo.reset()"
            again = "" if self.unknown else until
            return [f"  no graph was looked at: mhc compiled none{again}"]
        if self.sites or self.called or self.errors or len(self.cut) > len(self.unknown):
            return []
        return [
            "  no hyper-connection code was found. Searched: code with n >= 2 streams, x[..., n, C] or a list of",
            "  tensors, that reads them as sum_i a[i] x[i] or writes them as p[o] f + sum_i h[i, o] x[i].",
            "  Not searched: n = 1, reads with a gate for each channel, and inputs without elements",
        ]


# How many kinds of sites, of declined ones and of errors a report for people shows; with them it fits on a screen.
_KINDS = 4
_WIDTH = 160
# How a program prints what such a report leaves out.
ALL_LINES = "print(report.details())"


def _text(lines: list[str]) -> str:
    return "\n".join(map(printable_line, lines))


def _packages(count: int) -> str:
    return counted(count, "loaded package")


def counted(count: int, noun: str) -> str:
    """A number of things in words: 1 graph, 2 graphs, 0 graphs."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


T = TypeVar("T", SiteReport, Fused)


def _united(sites: list[T], others: list[T]) -> list[T]:
    """The union of two lists with repetitions: each element as often as in the list that has it more often."""
    missing = Counter(others) - Counter(sites)
    added = []
    for site in others:
        if missing[site]:
            missing[site] -= 1
            added.append(site)
    return sites + added


def _site_from_dict(told: dict[str, Any]) -> SiteReport:
    traffic = {name: _traffic_from_dict(told.get(name)) for name in ("before", "after")}
    return SiteReport(**told | traffic | {"location": Location(**told["location"])})


def _traffic_from_dict(told: dict[str, Any] | None) -> Traffic | None:
    return None if told is None else Traffic(**told)


def _fused_from_dict(told: dict[str, Any]) -> Fused:
    return Fused(told["op"], tuple(map(_site_from_dict, told["parts"])), _traffic_from_dict(told["after"]))


def _lines(report: Report, most: int | None) -> list[str]:
    """The lines below the first: at most `most` kinds of each group; with None everything, line by line."""
    whole = most is None
    rewritten, declined = _groups(report.rewritten, whole), _groups(report.declined, whole)
    lines = [f"  advice: {words}" for words in dict.fromkeys(report.advice) if report.cut]
    lines += [line for group in rewritten[:most] for line in _site("  {count} x {op:<28} {place}", group)]
    lines += _more(len(rewritten), most, "kind", "of rewritten sites")
    for group in declined[:most]:
        count = f"{len(group)} x " if len(group) > 1 else ""
        lines += _site(f"  declined: {count}{{op}} at {{place}}", group)
    lines += _more(len(declined), most, "kind", "of declined sites")
    lines += _cut_lines(report, most)
    called = _groups(report.called, whole)
    for group in called[:most]:
        lines += _site("  called by the program: {count} x {op} at {place}", group)[:1]
    lines += _more(len(called), most, "kind", "of operators that the program calls")
    lines += [f"  nothing is fused across the graph break at {place}" for place in report.breaks[:most]]
    lines += _more(len(report.breaks), most, "graph break")
    unchecked = _groups(report.unchecked, whole)
    for group in unchecked[:most]:
        lines += _site("  not checked: {count} x {op} at {place}", group)
    lines += _more(len(unchecked), most, "kind", "of sites that were not checked")
    lines += [f"  mhc.skip names {place}, and no site is there" for place in report.idle]
    lines += [f"  lines of {file} are those of an older version, which was compiled" for file in report.outdated]
    counted = {"checked in the first calls": report.checked, "fused": report.fusions}
    for what, counts in (counted | {"compiled once": report.shared, "lowered": report.lowered}).items():
        if counts:
            lines.append(f"  {what}: " + ", ".join(f"{count} x {name}" for name, count in counts.items()))
    errors = list(dict.fromkeys(report.errors))
    lines += [f"  error: {message}" for message in errors[:most]]
    return lines + _more(len(errors), most, "error")


def _cut_lines(report: Report, most: int | None) -> list[str]:
    cut = _groups(report.cut, most is None)
    lines = [
        line for group in cut[:most] for line in _site(f"  {group[0].detail}: {{count}} x {{op}} at {{place}}", group)
    ]
    return lines + _more(len(cut), most, "kind", "of sites that were cut or not compiled")


def _groups(sites: list[SiteReport], whole: bool) -> list[list[SiteReport]]:
    """Sites with the same operator and text. If `whole`, they also have the same source line."""
    groups: dict[Any, list[SiteReport]] = {}
    for site in sites:
        line = (str(site.location), site.location.code) if whole else None
        groups.setdefault((site.op, line, site.told), []).append(site)
    return list(groups.values())


def _site(words: str, group: list[SiteReport]) -> list[str]:
    first = group[0]
    others = len({str(site.location) for site in group}) - 1
    place = str(first.location) + (f" and {others} other line{'s' if others > 1 else ''}" if others else "")
    line = words.format(count=len(group), op=_what(group), place=f"{place}  {first.location.code}")
    return [line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}...", f"      {first.told}"]


def _what(group: list[SiteReport]) -> str:
    """The operator; or a module with its path, which is all that is known of it."""
    if group[0].op != MODULE:
        return group[0].op
    paths = list(dict.fromkeys(site.module for site in group))
    others = f" and {counted(len(paths) - 1, 'other')}" if len(paths) > 1 else ""
    return f"module ({paths[0] or 'the compiled one'}{others})"


def _more(count: int, most: int | None, noun: str, of: str = "") -> list[str]:
    left = 0 if most is None else max(0, count - most)
    what = f"{noun}{'s' * (left > 1)} {of}".rstrip()
    return [f"  {left} more {what}: {ALL_LINES}"] if left else []


def location(node: fx.Node | None) -> Location:
    """The innermost line of the user's program that made a node."""
    trace = node.meta.get("stack_trace") if node is not None else None
    found = re.findall(r'File "([^"]+)", line (\d+)', trace or "")
    if not found:
        return Location("", 0, "")
    # the user's line, not that of the library that spells it for them
    own = [entry for entry in found if not _spells(entry[0])]
    file, line = (own or found)[-1][0], int((own or found)[-1][1])
    return Location(file, line, linecache.getline(file, line).strip())


def function_at(file: str, line: int, name: str) -> Location:
    """A function by the line of its `def`, and its name. Python has it begin with its first decorator."""
    lines = linecache.getlines(file)[line - 1 :]
    if lines and lines[0].lstrip().startswith("@"):
        defined = ((number, _DEF.match(text)) for number, text in enumerate(lines, line))
        number, found = next(((number, found) for number, found in defined if found), (line, None))
        line = number if found and found[1] == name else line
    return Location(file, line, name)


def module_path(node: fx.Node | None) -> str:
    """The module whose code made a node: "layers.0.attention"; "" for the compiled module itself, or if unknown.

    A path that does not begin at the compiled module begins with the name of a variable: "model.layers.0".
    """
    stack = node.meta.get("nn_module_stack") if node is not None else None
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    found = _VARIABLE.match(path)
    if found is None:
        return path
    scope, name, _ = found.groups()
    is_compiled = scope == "L" and (name in ("self", "fn") or name == compat.own_local())
    return path[found.end() :] if is_compiled else name + path[len(f"L['{name}']") :]


def _spells(file: str) -> bool:
    used = [getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES]
    return file.startswith((*_SPELLERS, *(os.path.join(os.path.dirname(one), "") for one in used if one)))


def number(node: fx.Node | None) -> int | None:
    """The number of a node among those of Dynamo's graph, if they were numbered."""
    return node.meta.get(NUMBER) if node is not None else None


def in_words(node: fx.Node) -> str:
    """A node by the line of the program that made it."""
    at = location(node)
    return f"line {at.line} of {at.name} ({at.code})" if at.file else f"{node.name}, which no line is known of,"
