"""Results of equal calls stay tensors of their own, where they leave the graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.fuse.joint import call, is_operator


def keep_apart(graph: fx.Graph) -> int:
    """Let calls differ that are equal and whose results leave the graph; returns how many have got another argument.

    Eager code returns two tensors, and a write into one does not change the other. torch makes one call of two that are
    equal, unless their results leave the graph; for calls with several results, it does not look (2.11 to 2.14). So an
    argument is negated twice. Copies of an argument or of results are taken away by Inductor before that.
    """
    numbers: dict[fx.Node, int] = {}
    known: dict[Any, int] = {}
    for node in graph.nodes:
        numbers[node] = known.setdefault(_key(node, numbers), len(known))
    # What the last of some equal calls takes for the argument that is changed.
    taken: dict[int, fx.Node] = {}
    sources = set(map(_source, graph.output_node().all_input_nodes))
    changed = 0
    for source in [node for node in graph.nodes if node in sources and is_operator(node)]:
        tensors = [node for node in source.all_input_nodes if isinstance(compat.example(node), torch.Tensor)]
        argument = min(tensors, key=lambda node: compat.example(node).dim())
        last = taken.get(numbers[source])
        if last is not None:
            with graph.inserting_before(source):
                less = call(graph, torch.ops.aten.neg.default, (last,), {}, like=argument)
                same = call(graph, torch.ops.aten.neg.default, (less,), {}, like=argument)
            source.replace_input_with(argument, same)
            changed += 1
        taken[numbers[source]] = argument if last is None else same
    return changed


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
