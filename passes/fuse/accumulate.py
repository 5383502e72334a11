"""Gradient accumulation: the operator that computes the last gradient of the streams also adds the others.

    dx = a.dx + b.dx    ->    dx = b(..., d_x=a.dx).dx

Autograd adds, in the streams' dtype, what the consumers of one tensor send back. A backward operator that takes d_x
adds in float32 and rounds once, and no pass over memory is left for the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.budget import Steps
from mhc_compile.passes.fuse.joint import (
    arguments,
    call,
    change,
    contiguous,
    depends_on,
    item_of,
    permutation,
    same_layout,
    viewed,
)

# Operators with d_x, and which of their results is the gradient of x.
_ACCUMULATORS = {
    "generate_mix_backward": 0,
    "generate_mix_and_aggregate_backward": 0,
    "head_backward": 0,
    "projection_backward": 0,
    "aggregate_backward": 0,
    "mix_streams_backward": 0,
    "expand_combine_backward": 3,
}

# For one sum. Each look may go through the whole graph, and a sum of k summands may take k times k of them.
_MOST_LOOKS = 10_000


@dataclass
class _Leaf:
    """A summand. If an operator can add to it: that operator, and the views from its result to the summand."""

    summand: fx.Node
    operator: fx.Node | None = None
    views: tuple[fx.Node, ...] = ()

    @property
    def ready(self) -> fx.Node:
        """The last node that has to be there before this summand can be added to."""
        return self.operator or self.summand


def accumulate(graph: fx.Graph) -> int:
    """Returns how many additions disappeared."""
    count = 0
    for root in list(graph.nodes):
        if _is_sum(root) and not _is_inner(root):
            leaves = _ordered(_leaves(root))
            if any(leaf.operator is not None for leaf in leaves[1:]):
                count += _fold(graph, root, leaves)
                if any(_reads_later(leaf) for leaf in leaves):
                    compat.sort_topologically(graph)
    return count


def _is_sum(node: fx.Node) -> bool:
    return (
        node.target is torch.ops.aten.add.Tensor
        and not node.kwargs
        and all(isinstance(a, fx.Node) and same_layout(a, node) for a in node.args)
    )


def _is_inner(node: fx.Node) -> bool:
    return len(node.users) == 1 and _is_sum(next(iter(node.users)))


def _summands(root: fx.Node) -> Iterator[fx.Node]:
    """What a sum adds, the sums in it taken apart. A loop: gradients of a shared tensor are sums of any depth."""
    pending = list(reversed(root.args))
    while pending:
        argument = pending.pop()
        assert isinstance(argument, fx.Node)
        if _is_sum(argument) and len(argument.users) == 1:
            pending += reversed(argument.args)
        else:
            yield argument


def _reads_later(leaf: _Leaf) -> bool:
    """Whether the leaf's operator adds a tensor that comes after it in the graph."""
    given = None if leaf.operator is None else arguments(leaf.operator)["d_x"]
    return given is not None and leaf.operator is not None and bool(given > leaf.operator)


def _leaves(root: fx.Node) -> list[_Leaf]:
    summands = list(_summands(root))
    # What is added to itself cannot also be added into.
    return [_leaf(node) if summands.count(node) == 1 else _Leaf(node) for node in summands]


def _leaf(node: fx.Node) -> _Leaf:
    source, views = viewed(node)
    for name, index in _ACCUMULATORS.items():
        operator = item_of(source, (name,), index)
        unshared = all(len(each.users) == 1 for each in (source, *views))
        if operator is not None and unshared and arguments(operator)["d_x"] is None:
            return _Leaf(node, operator, tuple(views))
    return _Leaf(node)


def _ordered(leaves: list[_Leaf]) -> list[_Leaf]:
    """Leaves in an order of computation. Those that no operator can add to come as early as possible."""
    remaining = sorted(leaves, key=lambda leaf: leaf.ready)
    ordered: list[_Leaf] = []
    budget = Steps("looks for what a summand is computed from", _MOST_LOOKS)

    def waits_for(leaf: _Leaf, operator: fx.Node) -> bool:
        budget.take()
        return depends_on(leaf.summand, operator)

    while remaining:
        operators = [leaf.operator for leaf in remaining if leaf.operator is not None]
        free = (
            leaf
            for leaf in remaining
            if leaf.operator is None and not any(waits_for(leaf, operator) for operator in operators)
        )
        chosen = next(free, remaining[0])
        remaining.remove(chosen)
        ordered.append(chosen)
    return ordered


def _fold(graph: fx.Graph, root: fx.Node, leaves: list[_Leaf]) -> int:
    """Add the leaves one after the other, inside operators if possible."""
    count = 0
    total = leaves[0].summand
    for leaf in leaves[1:]:
        shaped = _shaped_as(graph, total, leaf)
        if leaf.operator is None or shaped is None:
            with graph.inserting_after(max(total, leaf.summand)):
                total = call(graph, torch.ops.aten.add.Tensor, (total, leaf.summand), {}, root)
        else:
            change(leaf.operator, d_x=shaped)
            total = leaf.summand
            count += 1
    root.replace_all_uses_with(total)
    _erase_sum(graph, root)
    return count


def _erase_sum(graph: fx.Graph, root: fx.Node) -> None:
    inner = {argument: None for argument in root.args if isinstance(argument, fx.Node)}
    graph.erase_node(root)
    for node in inner:
        if _is_sum(node) and not node.users:
            _erase_sum(graph, node)


def _shaped_as(graph: fx.Graph, total: fx.Node, leaf: _Leaf) -> fx.Node | None:
    """The sum so far in the shape in which the leaf's operator makes its gradient: a view of it, so no copy."""
    if leaf.operator is None:
        return None
    inside = leaf.views[0].args[0] if leaf.views else leaf.summand
    assert isinstance(inside, fx.Node)
    source, views = viewed(total)
    for node in (total, *(view.args[0] for view in views), source):
        if isinstance(node, fx.Node) and same_layout(node, inside):
            return node
    if contiguous(total) and contiguous(inside):
        return _as_streams(graph, total, arguments(leaf.operator)["x"])
    order = permutation(leaf.views)
    if order is None or not same_layout(total, leaf.summand):
        return None
    with graph.inserting_after(total):
        back = [order.index(dimension) for dimension in range(len(order))]
        return call(graph, torch.ops.aten.permute.default, (total, back), {}, total)


def _as_streams(graph: fx.Graph, total: fx.Node, x: fx.Node) -> fx.Node:
    """A contiguous sum in the shape of x."""
    sizes: list[Any] = []
    with graph.inserting_after(max(total, x)):
        for dimension, size in enumerate(x.meta["val"].shape):
            known = isinstance(size, int)
            sizes.append(size if known else call(graph, torch.ops.aten.sym_size.int, (x, dimension), {}, total))
        shaped = call(graph, torch.ops.aten.view.default, (total, sizes), {}, total)
    for size in sizes:
        if isinstance(size, fx.Node):
            shaped.prepend(size)
    return shaped
