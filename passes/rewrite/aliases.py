"""Which nodes of a program share memory, and whether those of the rewritten program still do.

An operator's result is new memory. What the program derives from the value that it replaces, views for example, is
derived from the result, and so shares the new memory. What was there before that value, such as a tensor that it is a
view of, keeps the old memory. The difference shows if that memory is written, or if tensors of both leave the graph.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from torch import fx

from mhc_compile.passes.plan import Decline, Site
from mhc_compile.passes.report import in_words
from mhc_compile.passes.rewrite.copies import Copies
from mhc_compile.passes.shadow import Shadow, memory_of


class Aliases:
    """The memory of a program's tensors: which of it is written, is an input's, or leaves the graph."""

    def __init__(self, shadow: Shadow) -> None:
        self._written = {key for _, keys in shadow.writes for key in keys}
        inputs = [node for node in shadow.graph.nodes if node.op in ("placeholder", "get_attr")]
        self._given = {key for node in inputs for key in memory_of(node)}
        outputs = shadow.graph.find_nodes(op="output")
        self._results = {node for output in outputs for node in output.all_input_nodes}
        self._shown = {key for node in self._results for key in memory_of(node)}

    def is_written(self, node: fx.Node) -> bool:
        """Whether the program writes into the memory of a node, at any time."""
        return not self._written.isdisjoint(memory_of(node))

    def is_shown(self, node: fx.Node) -> bool:
        """Whether the node leaves the graph, or another one that shares its memory."""
        return not self._shown.isdisjoint(memory_of(node))

    def parted(self, copies: Copies, made: list[tuple[fx.Node, Site]]) -> dict[int, Exception]:
        """Why sites cannot stay, by their identities: they separate tensors that share memory, and this is visible.

        made: the nodes of the program in whose places there are operators' results, and the sites of these.
        """
        made = [(old, site) for old, site in made if not copies.current(old)._erased]
        stands_for: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for old in copies:
            stands_for[copies.current(old)].append(old)
        holders = Counter(key for node, olds in stands_for.items() if not node._erased for key in _keys(olds))
        suspects = {key for old, _ in made for key in memory_of(old) if holders[key] > 1}
        if not suspects:
            return {}
        places: dict[Any, dict[fx.Node, int]] = defaultdict(dict)  # by storage, of the program's nodes
        for node, held in _places(copies.graph, stands_for).items():
            for old in stands_for.get(node, ()):
                for key in suspects & memory_of(old):
                    places[key][old] = held[key]
        failures: dict[int, Exception] = {}
        for old, site in reversed(made):  # the result of an earlier site may be what the later one's is a view of
            for key in suspects & memory_of(old):
                here = places[key][old]
                others = [node for node, place in places[key].items() if place != here]
                if others and self._shows(key, places[key]):
                    reason = f"its result shares memory with {in_words(others[0])}, which is also written or returned"
                    failures[id(site)] = Decline(reason)
                    suspects.discard(key)
        return failures

    def _shows(self, key: Any, places: dict[fx.Node, int]) -> bool:
        """Whether it is visible that nodes with one storage in the program have several now."""
        shown = {place for node, place in places.items() if node in self._results}
        return key in self._written or len(shown) > 1 or (key in self._given and bool(shown))


def _keys(nodes: list[fx.Node]) -> Iterator[Any]:
    return (key for node in nodes for key in memory_of(node))


def _places(graph: fx.Graph, stands_for: dict[fx.Node, list[fx.Node]]) -> dict[fx.Node, dict[Any, int]]:
    """For each node of the new graph: by storage, of its example and of what it stands for, the memory it lies in.

    A copied node carries the example of the old program. It lies in the memory of an input that holds the same
    storage, and otherwise in memory of its own.
    """
    places: dict[fx.Node, dict[Any, int]] = {}
    count = 0
    for node in graph.nodes:
        held: dict[Any, int] = {}
        for key in memory_of(node):
            found = next((places[source][key] for source in node.all_input_nodes if key in places[source]), count)
            count += found == count
            held[key] = found
        for old in stands_for.get(node, ()):
            for key in memory_of(old) - held.keys():
                held[key] = next(iter(held.values()))
        places[node] = held
    return places
