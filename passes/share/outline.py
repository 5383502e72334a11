"""Identical sublayers become a graph of their own, which is called in place of each sublayer."""

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
    """Replace sublayers that `sublayers.alike` found with calls of one graph; returns this graph.

    The call returns everything that other code reads of a sublayer. A view is made again where it is read. So no two
    results, and no result and argument, share memory: the compiler of the calling graph assumes this.
    """
    places, given = _given(sublayers)
    returned = _returned(sublayers)
    _check_memory(graph, sublayers, given, returned)
    sizes = _sizes(graph, sublayers[0], given[0])
    body = _body(sublayers[0], places, sizes, given[0], returned)
    owner = graph.owning_module
    assert owner is not None
    name = _unused(owner)
    _try(body, name, [*sizes, *given[0]], [sublayers[0][i] for i in returned])
    owner.add_submodule(name, body)
    for sublayer in sublayers:
        # As they are now: some were results of sublayers before.
        leaves = {number: _leaves(sublayer[i])[at] for (i, at), number in places.items()}
        _call(graph, name, sublayer, [*sizes, *(leaves[number] for number in range(len(given[0])))], returned)
    return body


def _leaves(node: fx.Node) -> list[Any]:
    return pytree.tree_leaves((node.args, node.kwargs))


def _given(sublayers: Sequence[Sequence[fx.Node]]) -> tuple[dict[Place, int], list[list[fx.Node]]]:
    """The inputs of sublayers: for each place the number of its argument, and for each sublayer the arguments.

    Two places have one argument if they read the same node in every sublayer.
    """
    inside = [{node: i for i, node in enumerate(sublayer)} for sublayer in sublayers]
    places: dict[Place, int] = {}
    arguments: dict[tuple[fx.Node, ...], int] = {}
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
                places[i, at] = arguments.setdefault(leaves, len(arguments))
    return places, [list(given) for given in zip(*arguments, strict=True)] or [[] for _ in sublayers]


def _returned(sublayers: Sequence[Sequence[fx.Node]]) -> list[int]:
    """The numbers of the nodes that a call has to return: other code reads the node, or a view of it."""
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
    """Whether a node's result, or one of its results, lies in the memory of an argument."""
    if node.target is operator.getitem:
        returns = node.args[0].target._schema.returns  # type: ignore[union-attr]
        return (returns[node.args[1]] if len(returns) > 1 else returns[0]).alias_info is not None
    return node.target is torch.ops.aten._unsafe_view.default or bool(compat.aliased(node))


def _viewed(view: fx.Node) -> fx.Node:
    sources = compat.aliased(view) or list(view.all_input_nodes[:1])
    if len(sources) != 1:
        raise Unsuitable(f"{view.target} is a view of several tensors")
    return sources[0]


def _check_memory(
    graph: fx.Graph,
    sublayers: Sequence[Sequence[fx.Node]],
    given: Sequence[Sequence[fx.Node]],
    returned: Sequence[int],
) -> None:
    memory = Memory(graph)
    for sublayer, arguments in zip(sublayers, given, strict=True):
        results = [sublayer[i] for i in returned]
        for i, result in enumerate(results):
            if any(memory.is_shared(result, other) for other in (*results[:i], *arguments)):
                raise Unsuitable("a result lies in the memory of another, or of an argument")


def _sizes(graph: fx.Graph, sublayer: Sequence[fx.Node], arguments: Sequence[fx.Node]) -> list[fx.Node]:
    """The graph's inputs that are symbolic sizes in a sublayer: its code sees only the sizes that it is given."""
    values = (compat.example(node) for node in (*arguments, *sublayer))
    symbols = {symbol for value in values for symbol in compat.symbols(value)}
    inputs = {compat.symbolic_expression(compat.example(node)): node for node in graph.find_nodes(op="placeholder")}
    if not symbols <= inputs.keys():
        raise Unsuitable("a size is no input of the graph")
    return [node for size, node in inputs.items() if size in symbols and node not in arguments]


def _body(
    sublayer: Sequence[fx.Node],
    places: dict[Place, int],
    sizes: Sequence[fx.Node],
    arguments: Sequence[fx.Node],
    returned: Sequence[int],
) -> fx.GraphModule:
    graph = fx.Graph()
    inputs = []
    for number, argument in enumerate([*sizes, *arguments]):
        # Two arguments of the first sublayer may be one node.
        inputs.append(graph.placeholder(f"argument_{number}"))
        inputs[-1].meta["val"] = compat.example(argument)
    given = inputs[len(sizes) :]
    copies: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(sublayer):
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        new = [given[places[i, at]] if (i, at) in places else copies.get(x, x) for at, x in enumerate(leaves)]
        copies[node] = graph.node_copy(node, lambda n: n)
        copies[node].args, copies[node].kwargs = pytree.tree_unflatten(new, spec)
    output = graph.output(tuple(copies[sublayer[i]] for i in returned))
    output.meta |= compat.strides_to_keep(output)
    return fx.GraphModule(torch.nn.Module(), graph)


def _try(body: fx.GraphModule, name: str, arguments: Sequence[fx.Node], results: Sequence[fx.Node]) -> None:
    """Raise Unsuitable unless a call returns what the first sublayer makes, as far as fake tensors show."""
    values = [compat.example(argument) for argument in arguments]
    try:
        with compat.quiet_fakes(values):
            found = torch.ops.higher_order.invoke_subgraph(body, name, *values)
    except Exception as error:  # whatever a dispatcher refuses
        raise Unsuitable(f"a call of it is refused: {type(error).__name__}: {error}") from error
    if not all(map(compat.same_strides, found, map(compat.example, results))):
        raise Unsuitable("a call would return tensors laid out otherwise")


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
            """The node that other code reads in place of a node of the sublayer."""
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
