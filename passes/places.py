"""Which line of the program, and which module, each node of a Dynamo graph is of: in this process, and in an older one.

A cache finds a compiled graph by what the graph computes. Its report then comes from a program that computed the same,
but perhaps at other lines, in another file, or in modules of other names. Both programs have the same nodes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import fx

from mhc_compile.passes.report import NUMBER, SITES, Location, location, module_path


@dataclass
class Places:
    """The places of a graph's nodes, nested graphs included. nodes has, in their order, the numbers of their places."""

    places: list[tuple[Location, str]] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)

    @staticmethod
    def of(module: fx.GraphModule) -> Places:
        """Those of a graph as Dynamo made it. Each node is given its number."""
        found, numbers, lines = Places(), dict[Any, int](), dict[Any, Location]()
        for node in _nodes(module):
            trace = node.meta.get("stack_trace")
            if trace not in lines:
                lines[trace] = location(node)
            place = lines[trace], module_path(node)
            node.meta[NUMBER] = len(found.nodes)
            found.nodes.append(numbers.setdefault(place, len(numbers)))
        found.places = list(numbers)
        return found

    def named(self, names: Collection[str]) -> list[int]:
        """The nodes whose lines are among these, by number: it is the same whatever lines stand in front of them."""
        there = {number for number, (where, _) in enumerate(self.places) if where.is_among(names)}
        return [node for node, number in enumerate(self.nodes) if number in there]

    def told(self) -> dict[str, Any]:
        """As plain values, to be stored: each place with its first node."""
        first = {number: node for node, number in reversed(list(enumerate(self.nodes)))}
        places = [
            {"location": asdict(where), "name": where.name, "module": module, "node": first[number]}
            for number, (where, module) in enumerate(self.places)
        ]
        return {"nodes": len(self.nodes), "places": places}

    def moved(self, reports: list[dict[str, Any]], before: dict[str, Any]) -> list[dict[str, Any]]:
        """Reports as plain values, of a graph whose places were `before`, with the places of this graph."""
        if before["nodes"] != len(self.nodes):
            return reports
        new = [self.places[self.nodes[one["node"]]] for one in before["places"]]
        move = _Move(list(zip(before["places"], new, strict=True)))
        for site in (site for report in reports for name in SITES for site in report.get(name, [])):
            number = site.get("node")
            if number is not None and number < len(self.nodes):
                move.note(site, self.places[self.nodes[number]])
        moved: list[dict[str, Any]] = move.within(reports)
        return moved


def is_within(path: str, other: str) -> bool:
    """Whether a module's path is that of another module, or of one inside it."""
    return not other or path == other or path.startswith((f"{other}.", f"{other}["))


class _Move:
    def __init__(self, pairs: list[tuple[dict[str, Any], tuple[Location, str]]]) -> None:
        self._lines: dict[Any, Location] = {}
        self._sites: dict[Any, tuple[Location, str]] = {}
        self._exact: dict[Any, tuple[Location, str]] = {}
        self._words: dict[str, str] = {}
        for old, (where, module) in pairs:
            at = Location(**old["location"])
            if at.file:
                self._lines.setdefault((at.file, at.line), where)
                self._sites[at.file, at.line, old["module"]] = where, module
                for name, now in ((old["name"], str(where)), (at.short.rpartition(":")[0], where.short)):
                    line = f"line {where.line} of {now.rpartition(':')[0]}"
                    self._words.setdefault(f"{name}:{at.line}", now)
                    # With the code, as excerpts of a graph and sentences have it.
                    self._words.setdefault(f"{name}:{at.line}  {at.code}", f"{now}  {where.code}")
                    self._words.setdefault(f"line {at.line} of {name} ({at.code})", f"{line} ({where.code})")
        words = sorted(map(re.escape, self._words), key=len, reverse=True)
        self._pattern = re.compile(rf"(?<![\w/.])(?:{'|'.join(words)})(?!\w)") if words else re.compile(r"(?!)")

    def note(self, site: dict[str, Any], place: tuple[Location, str]) -> None:
        """Sites of one line may be those of several lines by now. A fused operator names its parts without a node."""
        self._exact.setdefault((*_known_by(site), site["node"]), place)
        self._exact.setdefault((*_known_by(site), None), place)

    def within(self, value: Any) -> Any:
        """The same plain value about the new places."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: self._words[found[0]], value)
        if isinstance(value, list):
            return list(map(self.within, value))
        if not isinstance(value, dict):
            return value
        if "location" in value and "module" in value:
            at = value["location"]
            where, module = self._exact.get(
                (*_known_by(value), value.get("node")),
                self._sites.get((at["file"], at["line"], value["module"]), (None, value["module"])),
            )
            where = where or self._lines.get((at["file"], at["line"]))
            told = {name: self.within(one) for name, one in value.items() if name not in ("location", "module")}
            return value | told | {"location": at if where is None else asdict(where), "module": module}
        return {name: self.within(one) for name, one in value.items()}


def _known_by(site: dict[str, Any]) -> tuple[Any, ...]:
    return site["op"], site["location"]["file"], site["location"]["line"], site["module"]


def _nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    yield from module.graph.nodes
    for name in sorted({str(node.target) for node in module.graph.nodes if node.op == "get_attr" and node.users}):
        body = getattr(module, name, None)
        if isinstance(body, fx.GraphModule):
            yield from _nodes(body)
