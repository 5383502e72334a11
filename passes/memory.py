"""Which values of a graph share memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from mhc_compile import compat


class Memory:
    """Which nodes of a graph may share memory, and until when it is read."""

    def __init__(self, graph: fx.Graph) -> None:
        self._position = {node: i for i, node in enumerate(graph.nodes)}
        self._groups: dict[fx.Node, set[fx.Node]] = {node: {node} for node in graph.nodes}
        first: dict[Any, fx.Node] = {}
        for node in graph.nodes:
            value = compat.example(node)
            storage = compat.storage_of(value) if isinstance(value, torch.Tensor) else None
            if storage is not None:
                self.join(first.setdefault(storage, node), node)
            for source in compat.aliased(node):
                self.join(source, node)

    def join(self, left: fx.Node, right: fx.Node) -> None:
        """Note that two nodes share memory."""
        one, other = (self._groups.setdefault(node, {node}) for node in (left, right))
        if one is not other:
            one |= other
            self._groups |= dict.fromkeys(other, one)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Note that a node takes the place of another, which leaves the graph."""
        self.join(new, old)
        self._groups.pop(old).discard(old)

    def readers(self, node: fx.Node) -> set[fx.Node]:
        """What reads a node, or another that shares its memory."""
        return {user for alias in self._groups[node] for user in alias.users}

    def is_free_after(self, node: fx.Node, tensor: Any) -> bool:
        """Whether node may overwrite this argument: the graph made it, and node alone reads it from here on, once."""
        group = self._groups[tensor]
        if not all(map(compat.is_made_here, group)):
            return False
        given = pytree.tree_leaves((node.args, node.kwargs))
        if sum(isinstance(leaf, fx.Node) and leaf in group for leaf in given) > 1:
            return False
        # Nodes that were added to the graph since then are parts of operators before this one.
        return all(self._position.get(user, 0) <= self._position[node] for user in self.readers(tensor))

    def is_shared(self, left: fx.Node, right: fx.Node) -> bool:
        """Whether two nodes lie in the same memory."""
        return right in self._groups[left]
