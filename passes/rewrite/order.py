"""Sorts the new graph: unused nodes are erased, and every node follows its arguments."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from mhc_compile.passes.plan import Decline, Site
from mhc_compile.passes.report import in_words
from mhc_compile.passes.rewrite.copies import Copies

Calls = list[tuple[fx.Node, Site]]
"""The operators' calls, with the sites that they come from."""


def sort(copies: Copies, calls: Calls) -> None:
    """Order nodes after what they use, otherwise as they were.

    A node that would have to move past one that writes or sets global state might compute something else there: then
    the site that pulls it is declined, as is one that depends on its own result. So are those that would change the
    order in which random numbers are drawn.
    """
    done: set[fx.Node] = set()
    order: list[fx.Node] = []
    for root in copies.graph.nodes:
        stack = [(root, iter(root.all_input_nodes))]
        path = {root}
        while stack:
            node, sources = stack[-1]
            for source in sources:
                if source in path:
                    _blame(calls, source, "its operands depend on its own result")
                if source not in done:
                    stack.append((source, iter(source.all_input_nodes)))
                    path.add(source)
                    break
            else:
                stack.pop()
                path.discard(node)
                if node not in done:
                    done.add(node)
                    order.append(node)
    epoch = 0
    for node in order:
        epoch += node in copies.barriers
        if copies.epochs[node] != epoch:
            _blame(
                calls,
                node,
                f"an operand is computed at {in_words(node)}, after an operation that writes in place or sets global "
                "state",
            )
    for drawing, before in zip([node for node in order if node in copies.draws], copies.draws, strict=True):
        if drawing is not before:
            _blame(
                calls,
                drawing,
                f"an operand is computed at {in_words(drawing)}, which may draw random numbers, as {in_words(before)} "
                "does before it",
            )
    previous = copies.graph._root
    for node in order:
        previous.append(node)
        previous = node


def _blame(calls: Calls, node: fx.Node, reason: str) -> None:
    """Decline the first site whose operator needs `node`."""
    decline = Decline(reason)
    if calls:
        decline.site = calls[0][1]
    for call, site in calls:
        pending, seen = [call], {call}
        while pending:
            current = pending.pop()
            if current is node:
                decline.site = site
                raise decline
            fresh = [n for n in current.all_input_nodes if n not in seen]
            seen.update(fresh)
            pending += fresh
    raise decline


def erase_dead(copies: Copies) -> None:
    """Remove nodes that only replaced nodes needed, and what replaces them if nothing reads that.

    Nodes that may have an effect of their own stay.
    """
    erase_unused(copies, [*copies.replaced, *copies.on_demand, *copies.replaced.values()])


def erase_unused(copies: Copies, nodes: Iterable[fx.Node]) -> None:
    """Remove those of some nodes that nothing uses, and what only they needed."""
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node.users or node.op not in ("call_function", "call_method") or node._erased:
            continue
        if copies.has_effect(node):
            continue
        sources = node.all_input_nodes
        copies.graph.erase_node(node)
        pending.extend(sources)
