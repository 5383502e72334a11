"""Reading and editing calls of the operators in a joint graph."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.guard import guard
from mhc_compile.passes.report import SiteReport, location, module_path

# Where a fused operator notes the sites that it stands for.
_PARTS = "mhc_parts"
_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze.dims,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.alias.default,
}


def calls(graph: fx.Graph, *names: str) -> Iterator[fx.Node]:
    """The calls of these operators of the namespace `mhc`, in program order."""
    yield from (node for node in list(graph.nodes) if is_operator(node, *names))


def is_operator(node: fx.Node, *names: str) -> bool:
    """Whether a node calls one of these operators of the namespace `mhc`; without names, any of it."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "mhc":
        return False
    return not names or target._opname in names


def operator_name(node: fx.Node) -> str:
    """The name of the operator that a node calls, without the namespace."""
    return str(node.target._opname)  # type: ignore[union-attr]


def is_backward(node: fx.Node) -> bool:
    """Whether a node calls one of the backward operators."""
    return is_operator(node) and str(node.target._opname).endswith("_backward")  # type: ignore[union-attr]


def is_view(node: fx.Node) -> bool:
    """Whether a node is a view that keeps every element once."""
    return node.target in _VIEWS


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator call by name, defaults included."""
    found: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        default = argument.default_value if argument.has_default_value() else None
        if not argument.kwarg_only and position < len(node.args):
            found[argument.name] = node.args[position]
        else:
            found[argument.name] = node.kwargs.get(argument.name, default)
    return found


def change(node: fx.Node, **given: Any) -> None:
    """Give an operator call other arguments."""
    changed = arguments(node) | given
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    node.args = tuple(changed[argument.name] for argument in schema if not argument.kwarg_only)
    _forget(node)


def item_of(node: Any, names: tuple[str, ...], index: int) -> fx.Node | None:
    """The call of one of these operators whose result number `index` this node, and no other, is."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem or node.args[1] != index:
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    alone = sum(number == index for number, _ in items(source)) == 1
    return source if is_operator(source, *names) and alone else None


def _forget(node: fx.Node) -> None:
    """Drop notes about old arguments: Inductor insists on as many arguments as in its note."""
    node.meta.pop("eager_input_vals", None)


def items(node: fx.Node) -> list[tuple[int, fx.Node]]:
    """The results of an operator call that are used, with their numbers."""
    return [(int(user.args[1]), user) for user in node.users if user.target is operator.getitem]  # type: ignore[arg-type]


def same_layout(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes have the same shape and dtype, and equal places of elements in memory."""
    return _alike(a.meta.get("val"), b.meta.get("val"))


def _alike(left: Any, right: Any) -> bool:
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)) or left.dtype != right.dtype:
        return False
    pairs = [(left.shape, right.shape), (left.stride(), right.stride()), ((left.storage_offset(),), (0,))]
    pairs.append(((right.storage_offset(),), (0,)))
    return all(len(x) == len(y) and all(compat.same_size(i, j) for i, j in zip(x, y, strict=True)) for x, y in pairs)


def fits(old: fx.Node, new: fx.Node, mapping: dict[int, int]) -> bool:
    """Whether the results of one operator call that are read have the layouts of another's results, by number."""
    read = [(mapping[number], node) for number, node in items(old) if number in mapping and node.users]
    return all(_alike(node.meta.get("val"), new.meta["val"][number]) for number, node in read)


def contiguous(node: fx.Node) -> bool:
    """Whether a tensor lies in memory in the order of its elements, as far as its symbolic sizes show."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not compat.same_size(value.storage_offset(), 0):
        return False
    expected: Any = 1
    for size, stride in reversed(list(zip(value.shape, value.stride(), strict=True))):
        if not compat.same_size(stride, expected):
            return False
        expected = expected * size
    return True


def permutation(views: Sequence[fx.Node]) -> list[int] | None:
    """For each dimension of the last view, that of the first view's source; None if a view does more than permute."""
    order: list[int] = []
    for view in views:
        dimensions = view.meta["val"].dim()
        order = order or list(range(dimensions))
        if view.target is torch.ops.aten.transpose.int:
            a, b = (cast(int, d) % dimensions for d in view.args[1:])
            order[a], order[b] = order[b], order[a]
        elif view.target is torch.ops.aten.permute.default:
            order = [order[d % dimensions] for d in cast(list[int], view.args[1])]
        else:
            return None
    return order or None


def depends_on(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node of a sorted graph is computed from another."""
    pending, seen = [node], {node}
    while pending:
        for each in pending.pop().all_input_nodes:
            if each is source:
                return True
            if each > source and each not in seen:
                seen.add(each)
                pending.append(each)
    return node is source


def same_stretch(first: fx.Node, last: fx.Node) -> bool:
    """Whether nothing between two nodes writes into tensors, so that either may stand where the other is."""
    node = first
    while node is not last:
        if node.op == "call_function" and compat.writes(node):
            return False
        node = node.next
    return True


def viewed(node: Any) -> tuple[fx.Node, list[fx.Node]]:
    """What a node is a view of, and the views in between, the innermost first."""
    views: list[fx.Node] = []
    while is_view(node):
        views.insert(0, node)
        node = node.args[0]
    return node, views


def unviewed(node: Any) -> Any:
    """What a node is, past views that end in the layout in which they began."""
    if not isinstance(node, fx.Node):
        return node
    source, views = viewed(node)
    return source if views and same_layout(source, node) else node


def in_order(node: Any) -> Any:
    """What a node is, past views that leave all elements in order; each stream may be a token of its own in them."""
    if not isinstance(node, fx.Node):
        return node
    source, _ = viewed(node)
    return source if contiguous(source) and contiguous(node) else unviewed(node)


def call(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node) -> fx.Node:
    """Insert a call whose fake result is computed, and which otherwise is described as `like`."""
    fakes = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    with compat.quiet_fakes(fakes):
        value = target(*fakes[0], **fakes[1])
    node = graph.call_function(target, args, kwargs)
    node.meta = dict(like.meta)
    _forget(node)
    node.meta["val"] = value
    # Partitioners know what returns several tensors by its absence.
    node.meta.pop("tensor_meta", None)
    if isinstance(value, torch.Tensor):
        node.meta["tensor_meta"] = compat.tensor_metadata(value)
    return node


def item(graph: fx.Graph, source: fx.Node, index: int, like: fx.Node) -> fx.Node:
    """Insert result number `index` of an operator call."""
    node = graph.call_function(operator.getitem, (source, index))
    node.meta = dict(like.meta)
    _forget(node)
    node.meta["val"] = source.meta["val"][index]
    return node


def note_parts(node: fx.Node, *parts: fx.Node) -> None:
    """Note on a fused operator which calls it replaces."""
    with guard("a fused operator does not say what it replaces"):
        node.meta[_PARTS] = tuple(
            SiteReport(operator_name(part), location(part), "", module=module_path(part)) for part in parts
        )


def noted_parts(graph: fx.Graph) -> list[tuple[fx.Node, tuple[SiteReport, ...]]]:
    """The fused operators with the calls that each replaces, without recomputed copies. The notes are erased."""
    noted = ((node, node.meta.pop(_PARTS)) for node in calls(graph) if _PARTS in node.meta)
    return list({id(parts): (node, parts) for node, parts in noted}.values())


def replace_items(graph: fx.Graph, old: fx.Node, new: fx.Node, mapping: dict[int, int]) -> None:
    """Let the users of old's results use those of new, by number, and erase old."""
    for index, node in items(old):
        replacement = item(graph, new, mapping[index], node)
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)
    graph.erase_node(old)
