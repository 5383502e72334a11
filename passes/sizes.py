"""Sizes of intermediate tensors become sizes of inputs: a tensor of which only sizes are read may disappear."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mhc_compile import compat


def put_inputs_first(graph: fx.Graph) -> None:
    """Let every input stand before all else, in the same order: Dynamo adds a symbolic size where it first needs it."""
    first = None
    for node in list(graph.nodes):
        if node.op != "placeholder":
            first = first or node
        elif first is not None:
            first.prepend(node)


def from_inputs(graph: fx.Graph) -> fx.Graph:
    """The graph itself, or a copy in which calls of `size` make way for numbers and the graph's symbolic inputs."""
    if not any(map(_reads_size, graph.nodes)):
        return graph
    new, _ = compat.copy_graph(graph)
    symbols = [node for node in new.find_nodes(op="placeholder") if isinstance(compat.example(node), torch.SymInt)]
    for node in filter(_reads_size, list(new.nodes)):
        # As it was there: a tensor's shape may be changed in place later.
        sizes = [_known(size, symbols) for size in compat.example(node)]
        if None not in sizes:
            _substitute(node, tuple(sizes))
    return new


def _reads_size(node: fx.Node) -> bool:
    """Whether this is a whole shape of something computed here, which others use as a tuple."""
    if node.op != "call_method" or node.target != "size" or len(node.args) != 1 or node.kwargs:
        return False
    if node.all_input_nodes[0].op == "placeholder" or not isinstance(compat.example(node), torch.Size):
        return False
    return not any(user.op == "output" or (user.op == "call_method" and user.args[0] is node) for user in node.users)


def _known(size: Any, symbols: Sequence[fx.Node]) -> int | fx.Node | None:
    size = compat.as_number(size)
    if isinstance(size, int):
        return size
    return next((node for node in symbols if compat.same_size(compat.example(node), size)), None)


def _substitute(node: fx.Node, value: Any) -> None:
    for user in list(node.users):
        if user.target is operator.getitem and isinstance(value, tuple) and isinstance(user.args[1], int):
            _substitute(user, value[user.args[1]])
        else:
            user.args = fx.node.map_arg(user.args, lambda n: value if n is node else n)
            user.kwargs = fx.node.map_arg(user.kwargs, lambda n: value if n is node else n)
    if not node.users:
        node.graph.erase_node(node)
