"""Sublayers of nodes that are alike, put into a graph of their own that is called in place of each."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from mhc_compile import compat
from mhc_compile.passes.memory import Memory

# An argument of a sublayer's nodes: the node's number in the sublayer, and the argument's number among its arguments.
Place = tuple[int, int]


class Unsuitable(Exception):
    """These sublayers cannot be calls of one graph."""


def outline(graph: fx.Graph, sublayers: Sequence[Sequence[fx.Node]]) -> fx.GraphModule:
    """Replace sublayers, which `sublayers.alike` says are alike, by calls of one graph; returns that.

    What others read of a sublayer the call returns. A view is made again where it is read, so that no two results,
    and no result and argument, share memory: who compiles the calling graph takes them for apart.
    """
    given = _given(sublayers)
    returned = _returned(sublayers)
    _check_memory(graph, sublayers, given, returned)
    sizes = _sizes(graph, sublayers[0], [arguments[0] for arguments in given.values()])
    body = _body(sublayers[0], sizes + [arguments[0] for arguments in given.values()], returned)
    owner = graph.owning_module
    assert owner is not None
    name = _unused(owner)
    owner.add_submodule(name, body)
    for sublayer in sublayers:
        arguments = sizes + [_leaves(sublayer[i])[at] for i, at in given]
        _call(graph, name, sublayer, arguments, returned)
    return body


def _leaves(node: fx.Node) -> list[Any]:
    return pytree.tree_leaves((node.args, node.kwargs))


def _given(sublayers: Sequence[Sequence[fx.Node]]) -> dict[Place, tuple[fx.Node, ...]]:
    """What the sublayers read that is made elsewhere, one node a sublayer, by where it is read first.

    Two places share an argument if they do in every sublayer.
    """
    inside = [{node: i for i, node in enumerate(sublayer)} for sublayer in sublayers]
    found: dict[tuple[fx.Node, ...], Place] = {}
    for i, alike in enumerate(zip(*sublayers, strict=True)):
        for at, leaves in enumerate(zip(*map(_leaves, alike), strict=True)):
            if not isinstance(leaves[0], fx.Node):
                continue
            numbers = {numbering.get(leaf) for numbering, leaf in zip(inside, leaves, strict=True)}
            if len(numbers) != 1:
                raise Unsuitable("they are put together in different ways")
            if numbers == {None}:
                if not all(isinstance(compat.example(leaf), torch.Tensor | torch.SymInt) for leaf in leaves):
                    raise Unsuitable("an argument is no tensor")
                found.setdefault(leaves, (i, at))
    return {place: leaves for leaves, place in found.items()}


def _returned(sublayers: Sequence[Sequence[fx.Node]]) -> list[int]:
    """The numbers of the nodes that a call has to return: those of which others read the node, or a view of it."""
    found: set[int] = set()
    for sublayer in sublayers:
        inside = {node: i for i, node in enumerate(sublayer)}
        for node in sublayer:
            if any(user not in inside for user in node.users):
                while node in inside and _is_view(node):
                    node = _viewed(node)
                if node in inside:
                    found.add(inside[node])
    if any(not isinstance(compat.example(sublayer[i]), torch.Tensor) for sublayer in sublayers for i in found):
        raise Unsuitable("several results of one call would leave it")
    return sorted(found)


def _is_view(node: fx.Node) -> bool:
    """Whether a node's result lies in the memory of its first argument, or is one of several that do."""
    if node.target is operator.getitem:
        return _is_view(node.args[0])  # type: ignore[arg-type]
    return node.target is torch.ops.aten._unsafe_view.default or bool(compat.aliased(node))


def _viewed(view: fx.Node) -> fx.Node:
    source = view.args[0]
    if not isinstance(source, fx.Node):
        raise Unsuitable(f"{view.target} is a view of several tensors")
    return source


def _check_memory(
    graph: fx.Graph,
    sublayers: Sequence[Sequence[fx.Node]],
    given: dict[Place, tuple[fx.Node, ...]],
    returned: Sequence[int],
) -> None:
    memory = Memory(graph)
    for number, sublayer in enumerate(sublayers):
        results = [sublayer[i] for i in returned]
        arguments = [leaves[number] for leaves in given.values()]
        for i, result in enumerate(results):
            if any(memory.is_shared(result, other) for other in (*results[:i], *arguments)):
                raise Unsuitable("a result lies in the memory of another, or of an argument")


def _sizes(graph: fx.Graph, sublayer: Sequence[fx.Node], arguments: Sequence[fx.Node]) -> list[fx.Node]:
    """The graph's inputs that are the symbolic sizes of what a sublayer reads and makes: its code cannot see others."""
    values = (compat.example(node) for node in (*arguments, *sublayer))
    symbols = {symbol for value in values for symbol in compat.symbols(value)}
    inputs = {compat.symbolic_expression(compat.example(node)): node for node in graph.find_nodes(op="placeholder")}
    if not symbols <= inputs.keys():
        raise Unsuitable("a size is no input of the graph")
    return [node for size, node in inputs.items() if size in symbols and node not in arguments]


def _body(sublayer: Sequence[fx.Node], arguments: Sequence[fx.Node], returned: Sequence[int]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for argument in arguments:
        # The first sublayer's names only.
        copies[argument] = graph.placeholder(argument.name)
        copies[argument].meta["val"] = compat.example(argument)
    for node in sublayer:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    output = graph.output(tuple(copies[sublayer[i]] for i in returned))
    output.meta |= compat.strides_to_keep(output)
    return fx.GraphModule(torch.nn.Module(), graph)


def _call(
    graph: fx.Graph, name: str, sublayer: Sequence[fx.Node], arguments: Sequence[fx.Node], returned: Sequence[int]
) -> None:
    inside = set(sublayer)
    with graph.inserting_before(sublayer[0]):
        body = graph.get_attr(name)
        call = graph.call_function(torch.ops.higher_order.invoke_subgraph, (body, name, *arguments))
        call.meta["val"] = tuple(compat.example(sublayer[i]) for i in returned)
        outside: dict[fx.Node, fx.Node] = {}
        for number, i in enumerate(returned):
            outside[sublayer[i]] = graph.call_function(operator.getitem, (call, number))
            outside[sublayer[i]].meta = dict(sublayer[i].meta)

        def read(node: fx.Node) -> fx.Node:
            """The node that others read in place of one of the sublayer's."""
            if node in inside and node not in outside:
                sources = {source: read(source) for source in node.all_input_nodes}
                outside[node] = graph.node_copy(node, lambda n: sources[n])
            return outside.get(node, node)

        for node in sublayer:
            users = [user for user in node.users if user not in inside]
            if users:
                new = read(node)
                for user in users:
                    user.replace_input_with(node, new)
    for node in reversed(sublayer):
        graph.erase_node(node)


def _unused(module: torch.nn.Module) -> str:
    number = 0
    while hasattr(module, f"sublayer_{number}"):
        number += 1
    return f"sublayer_{number}"
