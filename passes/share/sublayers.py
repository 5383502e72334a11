"""The sublayers between the hyper-connections of a graph, and which of them are identical."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from mhc_compile import compat
from mhc_compile.passes.fuse.joint import calls, is_operator, items

# Nodes: a shorter sublayer is not worth a call, nor are so few that they would be compiled soon.
_LENGTH = 8
_SAVED = 100
# Bytes: what Inductor takes addresses to be multiples of.
_ALIGNED = 16

Sublayer = list[fx.Node]


def alike(graph: fx.Graph) -> list[list[Sublayer]]:
    """Groups of identical sublayers: the same calls, on values with the same layouts, connected in the same way.

    Each sublayer is a list of nodes, in the order of the graph. The graph changes: a node of one sublayer that others
    read, such as a table of angles or a mask, moves in front of the sublayer. A graph without hyper-connections is not
    looked at.
    """
    if not any(calls(graph)):
        return []
    for call in calls(graph):
        for _, result in items(call):
            call.append(result)
    dependent = _dependent(graph)
    sublayers = _sublayers(graph, _written(graph))
    shared = _shared(sublayers, dependent)
    groups = _groups(_behind(shared, sublayer) for sublayer in sublayers)
    longest = sorted(groups, key=len, reverse=True)
    several = {key: groups[key] for key in longest if len(groups[key]) > 1 and len(key) >= _LENGTH}
    for (alone,) in (group for group in groups.values() if len(group) == 1):
        for structure, group in several.items():
            if part := _part(alone, structure, dependent):
                group.append(part)
                break
    found = [group for group in several.values() if _saved(group) >= _SAVED]
    return found + [group for group in _groups(_on_a_cpu(graph)).values() if found and _saved(group)]


def _groups(sublayers: Iterable[Sublayer]) -> dict[Any, list[Sublayer]]:
    groups: dict[Any, list[Sublayer]] = defaultdict(list)
    for sublayer in sublayers:
        groups[_structure(sublayer)].append(sublayer)
    return groups


def _saved(group: Sequence[Sublayer]) -> int:
    """The number of nodes that need not be compiled."""
    return (len(group) - 1) * len(group[0])


def _part(sublayer: Sublayer, structure: Sequence[Any], dependent: set[fx.Node]) -> Sublayer | None:
    """A part of this structure. The first and the last sublayer may have more around them, such as an embedding or a
    head. Among their nodes may be some that make an argument of the others, such as a table that was not worth
    keeping; they move in front, so they read nothing of the structure."""
    for begin in range(len(sublayer) - len(structure) + 1):
        numbers: dict[fx.Node, int] = {}
        apart: set[fx.Node] = set()
        # No further, however long an encoder is, all of which could stand apart.
        for node in sublayer[begin : begin + 2 * len(structure)]:
            if len(numbers) == len(structure):
                break
            expected = structure[len(numbers)]
            if node.target == expected[0] and _call(node, numbers) == expected:
                numbers[node] = len(numbers)
            elif node in dependent or not numbers or not numbers.keys().isdisjoint(node.all_input_nodes):
                break
            else:
                apart.add(node)
        if len(numbers) == len(structure):
            last = sublayer.index(next(reversed(numbers)))
            return _behind(apart, sublayer[begin : last + 1])
    return None


def _on_a_cpu(graph: fx.Graph) -> list[Sublayer]:
    """Each hyper-connection with its results: on a CPU it is compiled as well, of many more nodes."""
    found = []
    for node in calls(graph):
        values = [compat.example(source) for source in node.all_input_nodes]
        if values and all(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in values):
            found.append([node, *(result for _, result in sorted(items(node), key=lambda item: item[0]))])
    return found


def _written(graph: fx.Graph) -> set[fx.Node]:
    """The nodes between an input that is written and its new value. Without others in between, it is made in place."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":
            behind = _reached([node.args[0]], lambda reader: reader.users)
            found |= behind & _reached(node.args[1:2], lambda source: source.all_input_nodes)
    return found


def _reached(start: Iterable[Any], nearby: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    left = [node for node in start if isinstance(node, fx.Node)]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += nearby(node)
    return found


def _sublayers(graph: fx.Graph, written: set[fx.Node]) -> list[Sublayer]:
    """Nodes that may become one call, between hyper-connections and whatever else has to stay where it is."""
    found: list[Sublayer] = [[]]
    for node in graph.nodes:
        if node not in written and _may_move(node):
            found[-1].append(node)
        elif found[-1]:
            found.append([])
    return [sublayer for sublayer in found if sublayer]


def _may_move(node: fx.Node) -> bool:
    """Whether a node computes tensors of tensors, and does nothing else."""
    if node.op != "call_function" or is_operator(node):
        return False
    values = [value for value in pytree.tree_leaves(compat.example(node)) if value is not None]
    given = (compat.example(source) for source in node.all_input_nodes)
    tensors = all(isinstance(value, torch.Tensor) for value in values)
    if not values or not tensors or not all(map(_is_plain, (*values, *pytree.tree_leaves(list(given))))):
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and _may_move(node.args[0])
    target = node.target
    if not compat.is_pure(node) or node.is_impure():
        return False
    # Which Inductor moves and joins; and the numbers of seeds, which differ from layer to layer.
    return "c10d" not in target.namespace and target._opname != "inductor_lookup_seed"  # type: ignore[union-attr]


def _is_plain(value: Any) -> bool:
    """Whether calls can take and return a value: a size, or a tensor without pending operations."""
    if not isinstance(value, torch.Tensor):
        return isinstance(value, int | torch.SymInt)
    return value.layout is torch.strided and not value.is_complex() and not value.is_neg()


def _behind(shared: set[fx.Node], sublayer: Sublayer) -> Sublayer:
    """The sublayer without shared nodes, which now come before it."""
    rest = [node for node in sublayer if node not in shared]
    for node in sublayer:
        if rest and node in shared:
            rest[0].prepend(node)
    return rest


def _shared(sublayers: Sequence[Sublayer], dependent: set[fx.Node]) -> set[fx.Node]:
    """Nodes of a sublayer that another one reads, and their inputs, unless they depend on the streams."""
    home = {node: number for number, sublayer in enumerate(sublayers) for node in sublayer}
    found: set[fx.Node] = set()
    for node in reversed(list(home)):
        if node not in dependent:
            readers = {home.get(user, home[node]) for user in node.users}
            if readers != {home[node]} or not found.isdisjoint(node.users):
                found.add(node)
    return found


def _dependent(graph: fx.Graph) -> set[fx.Node]:
    """The hyper-connections, and everything computed from their results."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_operator(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _structure(sublayer: Sublayer) -> Any:
    """The structure that is equal for sublayers that can be compiled once."""
    numbers = {node: i for i, node in enumerate(sublayer)}
    return tuple(_call(node, numbers) for node in sublayer)


def _call(node: fx.Node, numbers: dict[fx.Node, int]) -> Any:
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    given = tuple(
        numbers.get(leaf, _layouts(compat.example(leaf))) if isinstance(leaf, fx.Node) else repr(leaf)
        for leaf in leaves
    )
    # What an operator of somebody else's is to be given exactly.
    exact = _layouts(node.meta.get("eager_input_vals"))
    return (node.target, str(spec), given, _layouts(compat.example(node)), exact)


def _layouts(values: Any) -> Any:
    return tuple(map(_layout, pytree.tree_leaves(values)))


def _layout(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return (type(value), str(value))
    offset = value.storage_offset()
    aligned = offset * value.element_size() % _ALIGNED == 0 if isinstance(offset, int) else str(offset)
    # Symbolic sizes, which have no hash, by their names.
    sizes = (*map(str, value.shape), *map(str, value.stride()))
    return (type(value), value.dtype, value.device, value.dim(), sizes, aligned)
