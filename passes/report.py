"""Stage 5, report: what was rewritten, what was not, and why, in the words of the user's own source."""

from __future__ import annotations

import linecache
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from mhc_compile import ops
from mhc_compile.text import printable

# Whose lines stand for the user's line that calls them: libraries, and the typed wrappers of the operators.
_SPELLERS = ("/einops/", "/torch/")
_WRAPPERS = os.path.join(os.path.dirname(ops.__file__), "")


def _working_directory() -> str:
    """With the slash behind it; empty where it was deleted."""
    try:
        return os.path.join(os.getcwd(), "")
    except OSError:
        return ""


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

    def __str__(self) -> str:
        return f"{self.name}:{self.line}" if self.file else "unknown source"


@dataclass(frozen=True)
class SiteReport:
    """One piece of hyper-connection code. op is the operator it became, or would have become; reason is why not."""

    op: str
    location: Location
    detail: str
    reason: str | None = None

    @property
    def rewritten(self) -> bool:
        return self.reason is None


@dataclass
class Report:
    """What the passes did, over all graphs of a model.

    sites lists every site in program order, rewritten the accepted and declined the refused ones. called lists the
    operators that the program calls itself, which are no sites. graphs counts the
    graphs looked at, errors the messages of internal failures, after which a site or a graph was left as it was, or
    something beside the graph was not done. fusions counts,
    by name, what was fused in joint graphs, shared the calls of graphs that are compiled once, lowered the operators
    that Inductor compiled as parts of a graph.
    """

    sites: list[SiteReport] = field(default_factory=list)
    called: list[SiteReport] = field(default_factory=list)
    graphs: int = 0
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)
    fusions: Counter[str] = field(default_factory=Counter)
    shared: Counter[str] = field(default_factory=Counter)
    lowered: Counter[str] = field(default_factory=Counter)

    @property
    def rewritten(self) -> list[SiteReport]:
        return [site for site in self.sites if site.rewritten]

    @property
    def declined(self) -> list[SiteReport]:
        return [site for site in self.sites if not site.rewritten]

    def add(self, other: Report) -> None:
        self.sites += other.sites
        self.called += other.called
        self.graphs += other.graphs
        self.seconds += other.seconds
        self.errors += other.errors
        self.fusions += other.fusions
        self.shared += other.shared
        self.lowered += other.lowered

    def __str__(self) -> str:
        lines = [
            f"mhc: {len(self.rewritten)} of {len(self.sites)} hyper-connection sites rewritten "
            f"in {self.graphs} graph{'s' if self.graphs != 1 else ''} ({self.seconds:.2f} s)"
        ]
        for (op, location, code, detail), count in _grouped(self.rewritten).items():
            lines.append(f"  {count} x {op:<28} {location}  {code}")
            lines.append(f"      {detail}")
        for (op, location, code, reason), count in _grouped(self.declined).items():
            lines.append(f"  declined: {f'{count} x ' if count > 1 else ''}{op} at {location}  {code}")
            lines.append(f"      {reason}")
        for (op, location, code, _), count in _grouped(self.called).items():
            lines.append(f"  called by the program: {count} x {op} at {location}  {code}")
        lines += [f"  fused: {count} x {name}" for name, count in self.fusions.items()]
        lines += [f"  compiled once: {count} x {name}" for name, count in self.shared.items()]
        lines += [f"  lowered: {count} x {name}" for name, count in self.lowered.items()]
        lines += [f"  error: {message}" for message in self.errors]
        if not self.graphs:
            lines.append("  no graph was looked at: none was compiled, or Inductor's cache had them all")
        elif not (self.sites or self.called or self.errors):
            lines.append("  no hyper-connection code was found")
        return printable("\n".join(lines))


def _grouped(sites: Iterable[SiteReport]) -> Counter[tuple[str, str, str, str]]:
    """How often the same is said of the same source line, such as that of all layers."""
    return Counter((site.op, str(site.location), site.location.code, site.reason or site.detail) for site in sites)


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


def _spells(file: str) -> bool:
    return file.startswith(_WRAPPERS) or any(part in file for part in _SPELLERS)
