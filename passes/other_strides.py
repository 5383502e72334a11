"""Which nodes see that a tensor is now a part of a stack: it has other strides, and a gradient if any part has one.

Products and pointwise code make the same of both tensors. But a custom operator may read other memory, `.view` may
fail, and a result may have other strides or a gradient. So the readers are tried on fake tensors, and so are the
readers of what differs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from mhc_compile import compat
from mhc_compile.passes.shadow import Shadow

# For each node that a part stands for: the fake tensor of the part, and the position behind which nodes read it.
Parts = Mapping[fx.Node, Sequence[tuple[int, Any]]]
# Functions of torch, which have no namespace, and operators of these namespaces make the same of a tensor whatever its
# strides are. Only those that are given strides do not.
_OF_INDICES = {"", "aten", "prims", "mhc"}
_OF_MEMORY = ("as_strided", "_reshape_alias")


def seeing(shadow: Shadow, parts: Parts) -> set[fx.Node]:
    """The readers that have to keep their tensors: with parts of a stack, something in the graph would be different."""
    found: set[fx.Node] = set()
    mode = compat.common_fake_mode(map(compat.example, shadow.graph.nodes))
    with compat.quiet_shape_env(mode), mode or contextlib.nullcontext():
        while not found.issuperset(more := _differing(shadow, parts, found)):
            found |= more
    return found


def _differing(shadow: Shadow, parts: Parts, apart: set[fx.Node]) -> set[fx.Node]:
    """The readers of parts that make a difference in some place, if those in `apart` read no parts."""
    found: set[fx.Node] = set()
    changed: dict[fx.Node, tuple[Any, frozenset[fx.Node]]] = {}
    with compat.autocast_regions() as follow_autocast:
        for node in shadow.graph.nodes:
            follow_autocast(node)
            given = {source: changed[source] for source in node.all_input_nodes if source in changed}
            if node not in apart and node.op != "output":
                for source in node.all_input_nodes:
                    part = next((part for last, part in parts.get(source, ()) if shadow.position[node] > last), None)
                    if part is not None:
                        given[source] = part, frozenset([node])
            if not given:
                continue
            readers = frozenset[fx.Node]().union(*(some for _, some in given.values()))
            try:
                made = _made(node, {source: example for source, (example, _) in given.items()}, shadow.states[node])
            except Exception:  # nothing is known of it, or it does not take the parts
                found |= readers
            else:
                if made is not None:
                    changed[node] = made, readers
    return found


def _made(node: fx.Node, given: Mapping[fx.Node, Any], state: str) -> Any:
    """What a node makes of parts in the place of the program's tensors; None if it makes the same of both."""
    if not _goes_by_indices(node):
        raise TypeError
    made = _call(node, given, state)
    memory = {compat.storage_of(tensor) for tensor in tree_leaves([*given.values()])}
    is_view = any(compat.storage_of(leaf) in memory for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor))
    if not is_view and (_alike(made, compat.example(node)) or _alike(made, _call(node, {}, state))):
        return None
    return made


def _goes_by_indices(node: fx.Node) -> bool:
    """Whether torch itself computes a node, from elements at indices, wherever in memory they are."""
    if node.op not in ("call_function", "call_method") or compat.may_mutate(node) or not compat.is_plain_call(node):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return compat.namespace_of(node.target) in _OF_INDICES and not name.startswith(_OF_MEMORY)


def _call(node: fx.Node, given: Mapping[fx.Node, Any], state: str) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: given.get(source, compat.example(source)))
    with torch.set_grad_enabled(not gradients_are_off(state)):
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _alike(one: Any, other: Any) -> bool:
    """Whether results are tensors of the same strides and other values that are equal."""
    leaves, others = tree_leaves(one), tree_leaves(other)
    return len(leaves) == len(others) and all(map(_is_like, leaves, others))


def _is_like(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return compat.same_strides(one, other) and one.requires_grad == other.requires_grad
    return type(one) is type(other) and bool(compat.same_size(one, other))


def gradients_are_off(state: str) -> bool:
    """Whether gradients are off in a state of the record."""
    return state.startswith("(False") or not state.endswith(" 0")
