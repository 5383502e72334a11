"""Parts of a DTensor that a rewritten program no longer uses.

A program that splits a DTensor and uses all parts can lose some to an operator. In the backward pass autograd puts
plain zeros in the places of their gradients, and DTensors refuse to be joined with these (torch 2.13 and 2.14). So the
parts that are left are taken one by one. Where sizes are symbolic, torch does not place such a part (2.13 and 2.14),
and what would take the others stays as it is.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from mhc_compile import compat
from mhc_compile.passes.plan import Decline
from mhc_compile.passes.report import in_words
from mhc_compile.passes.rewrite.copies import Copies
from mhc_compile.passes.shadow import spelled

# How to call each, and where it has its dim among the positional arguments.
_SPLITS = {"split": 2, "split_with_sizes": 2, "chunk": 2, "tensor_split": 2, "unbind": 1}


def take_one_by_one(copies: Copies) -> None:
    """Take each used part of a DTensor for itself where another part is not used.

    Raises Decline where a part that the program uses has lost its users, and the others cannot be taken so.
    """
    before = {new: old for old, new in copies.items()}
    for node in list(copies.graph.nodes):
        parts = compat.example(node)
        if spelled(node) not in _SPLITS or not isinstance(parts, (tuple, list)):
            continue
        sizes = [size for part in parts if compat.is_dtensor(part) for size in part.shape]
        if not sizes:
            continue
        if not all(isinstance(size, int) for size in sizes):
            if node.users and node in before and len(node.users) < len(before[node].users) and parts[0].requires_grad:
                raise Decline(f"{in_words(before[node])} would lose a part, and DTensors of symbolic sizes need all")
            continue
        items = [user for user in node.users if user.target is operator.getitem and isinstance(user.args[1], int)]
        used = {item.args[1] % len(parts) for item in items}
        if len(items) == len(node.users) and len(used) < len(parts):
            for item in items:
                _replace(copies, item, _taken(copies.graph, item, parts, item.args[1] % len(parts)))
            copies.graph.erase_node(node)


def _taken(graph: fx.Graph, item: fx.Node, parts: Any, at: int) -> fx.Node:
    split: Any = item.args[0]
    source = split.args[0]
    # From the front: torch 2.13 gives the gradient of a DTensor's select the wrong local sizes where dim is negative.
    dim = split.kwargs.get("dim", next(iter(split.args[_SPLITS[spelled(split)] :]), 0)) % compat.example(source).dim()
    with graph.inserting_before(item):
        if spelled(split) == "unbind":
            return graph.call_method("select", (source, dim, at))
        start = sum(part.shape[dim] for part in parts[:at])
        return graph.call_method("narrow", (source, dim, start, parts[at].shape[dim]))


def _replace(copies: Copies, old: fx.Node, new: fx.Node) -> None:
    new.meta = dict(old.meta)
    copies.epochs[new] = copies.epochs[old]
    copies.replaced[old] = new
    old.replace_all_uses_with(new)
    copies.graph.erase_node(old)
