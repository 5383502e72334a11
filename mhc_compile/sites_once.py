"""One report of all functions that Dynamo compiled.

Several functions may run the same lines of the same module. With `generate`, one function calls the model with the
prompt, and another with each token. What they make of such a line counts once.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from mhc_compile import compat
from mhc_compile.passes.report import COUNTS, SITES, Fused, Location, Report, SiteReport

_numbered: dict[int, tuple[weakref.ref[nn.Module], int]] = {}
_numbers = itertools.count()


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

    def add(self, report: Report, modules: Mapping[str, int], function: Location) -> None:
        """Add a function's report. modules has the numbers of the modules that its paths name, if they are known."""
        whole = self._whole(function)
        entries = {name: (self._of[whole, name], getattr(report, name)) for name in (*SITES, "fused")}
        new: dict[str, Any] = {name: self._new(name, *given, modules) for name, given in entries.items()}
        if report.sites and not new["sites"]:  # then they count once, and so does what was done to them
            new |= {name: getattr(report, name) - getattr(self.total, name) for name in COUNTS}
        if report.sites:
            name = f"{compat.own_name(function.code)} ({function})"
            self.total.functions[name] = self.total.functions.get(name, 0) + len(report.sites)
        self.total.add(replace(report, **new))

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

    def _new(self, name: str, here: Counter[Any], entries: list[Any], modules: Mapping[str, int]) -> list[Any]:
        """Those that no function so far has as often. here counts those of this function's earlier parts, too."""
        new = []
        for entry in entries:
            key = _key(entry, modules)
            if key is not None:
                here[key] += 1
            if key is None or here[key] > self._most[name][key]:
                new.append(entry)
        self._most[name] |= here
        return new


def _key(entry: SiteReport | Fused, modules: Mapping[str, int]) -> Hashable:
    if isinstance(entry, SiteReport):
        module = modules.get(entry.module)
        return None if module is None else (replace(entry, module=""), module)
    parts = tuple(_key(part, modules) for part in entry.parts)
    return None if None in parts else (entry.op, parts)
