"""Results of equal calls stay tensors of their own, where they leave the graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.fuse.joint import call, is_operator


def keep_apart(graph: fx.Graph) -> int:
    """Copy what leaves the graph of a call if an equal call's results leave it as well; returns how many copies.

    Eager code returns two tensors, and a write into one does not change the other. torch makes one call of two that are
    equal, unless their results leave the graph; for calls with several results, it does not look (2.11 to 2.14).
    """
    numbers: dict[fx.Node, int] = {}
    known: dict[Any, int] = {}
    for node in graph.nodes:
        numbers[node] = known.setdefault(_key(node, numbers), len(known))
    owners: dict[int, fx.Node] = {}
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.output_node()
    for result in output.all_input_nodes:
        source = _source(result)
        if is_operator(source) and owners.setdefault(numbers[source], source) is not source:
            with graph.inserting_after(result):
                copies[result] = call(graph, torch.ops.aten.clone.default, (result,), {}, like=result)
    output.args = fx.map_arg(output.args, lambda node: copies.get(node, node))
    return len(copies)


def _key(node: fx.Node, numbers: dict[fx.Node, int]) -> Any:
    """Equal for calls of one function with equal arguments."""
    if node.op != "call_function" or not compat.is_pure(node):
        return node
    return node.target, repr(fx.map_arg((node.args, node.kwargs), lambda n: f"node {numbers[n]}"))


def _source(node: fx.Node) -> fx.Node:
    """The call in whose results a node lies, past views and the choice of one of several results."""
    while node.target is operator.getitem or _is_alias(node):
        node = node.all_input_nodes[0]
    return node


def _is_alias(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and any(
        result.alias_info is not None for result in node.target._schema.returns
    )
