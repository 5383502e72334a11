"""A copy of the nodes of a graph that remain after the rewriting.

Twenty iterations of Sinkhorn are a hundred nodes for which one operator call comes: copying them only to erase them
would be most of the work.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from torch import fx

from mhc_compile import compat
from mhc_compile.passes.shadow import Shadow


class Copies(dict[fx.Node, fx.Node]):
    """Maps old nodes to new ones; a node that was left out is copied when somebody asks for it.

    For an old node of `targets` there is one of the same kind without arguments, until it is replaced and erased.
    What computes `sources` is copied at once.

    Attributes:
        graph: the new graph.
        replaced: new nodes and what has come in their places.
        on_demand: the copies that somebody asked for.
        barriers: the new nodes that write or set global state, so that nothing may move past them.
        epochs: for each new node, how many barriers there are up to it.
        draws: the new nodes that draw random numbers, in an order that has to stay.
    """

    def __init__(self, shadow: Shadow, targets: Iterable[fx.Node], sources: Iterable[fx.Node]) -> None:
        super().__init__()
        old = shadow.graph
        self.graph = fx.Graph(old.owning_module)
        self.position = shadow.position
        self.replaced: dict[fx.Node, fx.Node] = {}
        self.on_demand: list[fx.Node] = []
        self.epochs: dict[fx.Node, int] = {}
        self._old_epochs: dict[fx.Node, int] = {}
        self.barriers: set[fx.Node] = set()
        self.draws: dict[fx.Node, None] = {}
        barriers = {node for node in old.nodes if _is_barrier(node)} | {node for node, _ in shadow.writes}
        draws = {node for node in old.nodes if compat.draws_random_numbers(node)}
        kept = {node for node in old.nodes if node.op not in ("call_function", "call_method")} | barriers | draws
        stubs = set(targets) - kept
        doomed = _only_for(stubs, kept.union(sources))
        epoch = 0
        for node in old.nodes:
            epoch += node in barriers
            self._old_epochs[node] = epoch
            if node in stubs:
                self._note(node, self.graph.create_node(node.op, node.target, (), {}, node.name, node.type))
            elif node not in doomed:
                self._copy(node)
                if node in barriers:
                    self.barriers.add(self[node])
                if node in draws:
                    self.draws[self[node]] = None
        self._kept = list(self)  # in the order of the program
        self._positions = [self.position[node] for node in self._kept]
        self.graph.set_codegen(old._codegen)  # an exported graph's arguments are a tree

    def __missing__(self, node: fx.Node) -> fx.Node:
        lacking, pending = {node}, [node]
        while pending:
            fresh = [n for n in pending.pop().all_input_nodes if n not in self and n not in lacking]
            lacking.update(fresh)
            pending += fresh
        for old in sorted(lacking, key=self.position.__getitem__):
            after = self._kept[bisect_right(self._positions, self.position[old])]
            with self.graph.inserting_before(self[after]):
                self._copy(old)
            self.on_demand.append(self[old])
        return self[node]

    def has_effect(self, new: fx.Node) -> bool:
        """Whether a node does something else than to make its result."""
        return new in self.barriers or new in self.draws

    def current(self, old: fx.Node) -> fx.Node:
        """The new node for an old one: its copy, or what has replaced the copy."""
        node = self[old]
        return self.replaced.get(node, node)

    def _copy(self, node: fx.Node) -> None:
        if node.op == "output":
            self._note(node, self.graph.output(fx.node.map_arg(node.args[0], self.current)))
        else:
            self._note(node, self.graph.node_copy(node, self.current))
            compat.copy_source(node, self[node])

    def _note(self, old: fx.Node, new: fx.Node) -> None:
        new.meta = dict(old.meta)
        self[old] = new
        self.epochs[new] = self._old_epochs[old]


def _is_barrier(node: fx.Node) -> bool:
    return compat.may_mutate(node) or compat.changes_global_state(node)


def _only_for(nodes: set[fx.Node], kept: set[fx.Node]) -> set[fx.Node]:
    """The nodes, and other nodes whose results only these use."""
    found, pending = set(nodes), list(nodes)
    while pending:
        for source in pending.pop().all_input_nodes:
            if source in found or source in kept:
                continue
            if all(user in found for user in source.users):
                found.add(source)
                pending.append(source)
    return found
