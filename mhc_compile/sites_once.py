"""One report of all functions that Dynamo compiled.

Several functions may run the same lines of the same module. With `generate`, one function calls the model with the
prompt, and another with each token. What they make of such a line counts once.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from mhc_compile import compat
from mhc_compile.passes.report import COUNTS, MODULE, SITES, Fused, Location, Report, SiteReport

_numbered: dict[int, tuple[weakref.ref[nn.Module], int]] = {}
_numbers = itertools.count()
# For the paths in a report, the numbers of the modules that they name; paths of modules that are not known are missing.
Modules = Mapping[str, int]


def number_of(module: nn.Module) -> int:
    """A number that no other module of this process has or will have: `id` gives those of lost modules again."""
    there = _numbered.get(id(module))
    if there is None or there[0]() is not module:
        there = _numbered[id(module)] = (weakref.ref(module), next(_numbers))
    return there[1]


class Functions:
    """The report of several functions, to which one after the other is added.

    An entry counts as often as in the function that has it most often. Entries are equal if they say the same of the
    same line of the same module. Entries of modules that are not known are never equal. The parts of a function, before
    a break and after it, are one function: they run one after the other.
    """

    def __init__(self, total: Report) -> None:
        self.total = total
        self._most: dict[str, Counter[Any]] = defaultdict(Counter)
        self._of: dict[tuple[int, str], Counter[Any]] = defaultdict(Counter)
        self._begun: dict[tuple[str, str, int], int] = {}

    def add(self, compilations: Iterable[tuple[Report, Modules]], function: Location) -> None:
        """Add all compilations of a function, or of a part of it."""
        whole = self._whole(function)
        here: dict[str, Counter[Any]] = defaultdict(Counter)
        for report, modules in _by_modules(compilations):
            new: dict[str, Any] = {}
            for name in (*SITES, "fused"):
                entries = getattr(report, name)
                new[name], times = self._new(entries, modules, self._of[whole, name], self._most[name])
                here[name] |= times
            if report.sites and not new["sites"]:  # then they count once, and so does what was done to them
                new |= {name: getattr(report, name) - getattr(self.total, name) for name in COUNTS}
            self.total.add(replace(report, **new))
        for name, times in here.items():
            self._of[whole, name] += times
        if here["sites"]:
            own = compat.own_name(function.code)
            name = f"{own} ({function})" if own == function.code else f"{own}, its part after a break ({function})"
            self.total.functions[name] = self.total.functions.get(name, 0) + here["sites"].total()

    def _whole(self, part: Location) -> int:
        """A number for each function; its parts after a break have that of the part before the first one.

        Of several functions of their name, it is the last that begins above them.
        """
        name = compat.own_name(part.code)
        begin = part.line
        if name != part.code:
            begins = [line for file, function, line in self._begun if (file, function) == (part.file, name)]
            begin = max((line for line in begins if line <= part.line), default=0)
        place = part.file, name, begin
        if name == part.code or place not in self._begun:
            self._begun[place] = next(_numbers)
        return self._begun[place]

    @staticmethod
    def _new(
        entries: list[Any], modules: Modules, before: Counter[Any], most: Counter[Any]
    ) -> tuple[list[Any], Counter[Any]]:
        """The entries that no function so far has as often, and how often each is there.

        before counts those of the function's earlier parts; most, those of the function that has each most often.
        """
        new, times = [], Counter[Any]()
        for entry in entries:
            key = _key(entry, modules) or object()
            times[key] += 1
            if before[key] + times[key] > most[key]:
                new.append(entry)
                most[key] = before[key] + times[key]
        return new, times


def _by_modules(compilations: Iterable[tuple[Report, Modules]]) -> list[tuple[Report, Modules]]:
    """One report for all compilations of the same modules; those in which a path names another module are apart."""
    groups: list[tuple[list[Report], dict[str, int]]] = []
    for report, modules in compilations:
        same = (one for one in groups if all(one[1].get(path, number) == number for path, number in modules.items()))
        group = next(same, None)
        if group is None:
            group = [], {}
            groups.append(group)
        group[0].append(report)
        group[1].update(modules)
    return [(Report.joined(reports), known) for reports, known in groups]


def _key(entry: SiteReport | Fused, modules: Modules) -> Hashable:
    if isinstance(entry, SiteReport):
        module = modules.get(entry.module)
        return None if module is None else (replace(entry, module=""), module)
    parts = tuple(_key(part, modules) for part in entry.parts)
    return None if None in parts else (entry.op, parts)


@dataclass
class Part:
    """The report of one graph, with the numbers of its modules; cut says whether a graph break is beside it."""

    report: Report
    modules: Modules
    cut: bool


def told_elsewhere(parts: list[Part]) -> list[set[str]]:
    """For each graph, the modules that only their names tell in it, and of whose connection another graph has more."""
    named = [[site.module for site in part.report.sites if site.op == MODULE] for part in parts]
    there = {number: module() for module, number in list(_numbered.values())}  # other threads compile

    def found(part: Part, path: str) -> nn.Module | None:
        number = part.modules.get(path)
        return None if number is None else there.get(number)

    known = [(part, found(part, path)) for part in parts for path in {site.module for site in part.report.of_modules}]
    told: list[set[str]] = []
    for part, paths in zip(parts, named, strict=True):
        others = [module for of, module in known if of is not part]
        told.append({p for p in paths if any(_are_of_one(found(part, p), one, part.cut or not p) for one in others)})
    return told


def _are_of_one(own: nn.Module | None, other: nn.Module | None, around: bool) -> bool:
    """Whether another module is inside a module or, if code around this one counts, the reverse; in doubt they are."""
    if own is None or other is None:
        return True
    return any(one is other for one in own.modules()) or (around and any(one is own for one in other.modules()))
