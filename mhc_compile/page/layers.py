"""A report as a column of layers: which sites belong to which layer and sublayer, and what became of each.

A layer is a module of a numbered list, such as `layers.3`; whatever is in it belongs to it. Other modules with sites
are layers of their own. A sublayer ends with the site that writes the streams.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from mhc_compile.passes.report import CUT, FUNCTION, Fused, Report, SiteReport, Traffic

_NUMBERED = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")
_WRITES = ("expand_combine", "mix_streams")


@dataclass(eq=False)
class Entry:
    """A site, with the operators into which it was fused, and why it is cut from its neighbours."""

    site: SiteReport
    status: str
    fused: list[tuple[Fused, list[Entry]]] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)

    @property
    def layer(self) -> str:
        """The module that counts as this site's layer."""
        found = _NUMBERED.match(self.site.module)
        return found[0] if found else self.site.module

    @property
    def inner(self) -> str:
        """The module of the site, seen from its layer."""
        return self.site.module[len(self.layer) :].lstrip(".")

    @property
    def losses(self) -> list[str]:
        """Why the site is declined or cut."""
        return self.cut if self.site.reason is None else [self.site.reason, *self.cut]


@dataclass
class Sublayer:
    """Sites up to the one that writes the streams."""

    entries: list[Entry]

    @property
    def modules(self) -> list[str]:
        """The modules inside of the layer whose code its sites are."""
        return list(dict.fromkeys(entry.inner for entry in self.entries if entry.inner))


@dataclass
class Layer:
    """The sites of one module of the model, in program order; like is the first layer that is the same."""

    name: str
    entries: list[Entry] = field(default_factory=list)
    like: Layer | None = None

    @property
    def sublayers(self) -> list[Sublayer]:
        groups: list[list[Entry]] = [[]]
        for entry in self.entries:
            if groups[-1] and groups[-1][-1].site.op in _WRITES:
                groups.append([])
            groups[-1].append(entry)
        return [Sublayer(group) for group in groups]

    @property
    def rewritten(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.status == "rewritten"]

    @property
    def statuses(self) -> dict[str, int]:
        """The number of sites by status, without rewritten ones, and the number of rewritten sites that are cut."""
        counts: dict[str, int] = {}
        for status in [one.status for one in self.entries] + ["cut" for one in self.entries if one.cut]:
            if status != "rewritten":
                counts[status] = counts.get(status, 0) + 1
        return counts

    @property
    def fused(self) -> int:
        """How many fused operators its sites belong to."""
        return len({id(fused) for entry in self.entries for fused, _ in entry.fused})

    @property
    def before(self) -> Traffic | None:
        return total(entry.site.before for entry in self.rewritten)

    @property
    def after(self) -> Traffic | None:
        return total(entry.site.after for entry in self.rewritten)

    def signature(self) -> object:
        """Equal for layers whose entries differ in module names only."""
        return [
            (replace(one.site, module=one.inner), one.status, one.cut, [fused.op for fused, _ in one.fused])
            for one in self.entries
        ]


def total(counts: Iterable[Traffic | None]) -> Traffic | None:
    """The sum; None if there is nothing to sum up, or if a count is not known."""
    found = list(counts)
    known = [one for one in found if one is not None]
    return sum(known[1:], known[0]) if known and len(known) == len(found) else None


def layers(report: Report) -> list[Layer]:
    """All sites of a report by layers, in program order; the functions that Dynamo gave up on are not among them."""
    entries = [Entry(site, "rewritten" if site.rewritten else "declined") for site in report.sites]
    entries += [Entry(site, "called by the program") for site in report.called]
    for site in report.cut:
        torn = [one for one in _alike(site, entries) if one.status == "rewritten" and not one.cut]
        cut = next((one for one in torn if site.detail == CUT and one.site.location == site.location), None)
        if cut is not None:
            cut.cut.append(site.reason or site.detail)
        elif site.op != FUNCTION:
            entries.append(Entry(site, site.detail))
    for fused in report.fused:
        parts: list[Entry] = []
        for part in fused.parts:
            parts += [one for one in _alike(part, entries) if not one.fused][:1]
        for entry in parts:
            entry.fused.append((fused, [one for one in parts if one is not entry]))
    found: dict[str, Layer] = {}
    for entry in entries:
        found.setdefault(entry.layer, Layer(entry.layer)).entries.append(entry)
    first: dict[str, Layer] = {}
    for layer in found.values():
        same = first.setdefault(repr(layer.signature()), layer)
        layer.like = None if same is layer else same
    return list(found.values())


def _alike(site: SiteReport, entries: list[Entry]) -> Iterator[Entry]:
    """Entries that may belong to a site: with its operator and module, those with its line first."""
    found = [one for one in entries if (one.site.op, one.site.module) == (site.op, site.module)]
    return iter(sorted(found, key=lambda one: one.site.location != site.location))


def with_fusion(report: Report, found: Iterable[Layer]) -> Traffic | None:
    """The bytes of all operators with the fused ones in the place of what they stand for; None if it is not known."""
    entries = [entry for layer in found for entry in layer.rewritten]
    alone = [entry.site.after for entry in entries if not entry.fused]
    parts = sum(len(fused.parts) for fused in report.fused)
    if not report.fused or parts != sum(len(entry.fused) for entry in entries):
        return None
    return total([*alone, *(fused.after for fused in report.fused)])
