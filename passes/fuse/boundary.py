"""Boundary fusion: `expand_combine` with the next sublayer's mix, forward and backward.

    x' = expand_combine(f, ..., x, h_res); layer_input, ... = generate_mix_and_aggregate(x', ...)
        ->    x', layer_input, ... = boundary(f, ..., x, h_res, ...)

and likewise `head` at the end of a model. Backward, the gradient of x' goes straight into the combine's backward.
The two directions are fused independently: both compute just what they replace.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.fuse.joint import (
    arguments,
    call,
    calls,
    fits,
    item,
    item_of,
    note_parts,
    replace_items,
    same_layout,
    same_stretch,
    unviewed,
)

_MIXES = ("generate_mix_and_aggregate", "head")
# Results of `boundary` that stand for those of the mix, by number.
_RESULTS = {"generate_mix_and_aggregate": {0: 1, 1: 2, 2: 3, 3: 4, 4: 5}, "head": {0: 1, 1: 4, 2: 5}}
TENSORS = ("f", "layer_bias", "h_post", "x", "h_res")
PARAMETERS = ("phi", "scale", "bias", "norm_weight")
# An argument of generate_mix_and_aggregate alone.
_INPUT_NORM = "input_norm_weight"


def boundary(graph: fx.Graph) -> int:
    """Fuse forward; returns how many boundaries there are now."""
    mixes: dict[fx.Node, fx.Node] = {}
    for mix in calls(graph, *_MIXES):
        combine = unviewed(arguments(mix)["x"])
        if isinstance(combine, fx.Node) and combine.target is torch.ops.mhc.expand_combine.default:
            mixes.setdefault(combine, mix)
    count = 0
    for combine, mix in mixes.items():
        early = hoistable(mix, combine)
        alike = same_block(combine, mix) and same_width(combine, arguments(combine)["x"])
        if early is None or not alike or not same_stretch(combine, mix):
            continue
        for node in early:
            combine.prepend(node)
        count += _fuse(graph, combine, mix)
    return count


def hoistable(reader: fx.Node, combine: fx.Node) -> list[fx.Node] | None:
    """The other arguments of a reader of the new streams that are made after the combine, in order; None if that
    depends on what is between."""
    found: set[fx.Node] = set()
    pending = [node for name, node in arguments(reader).items() if name != "x" and isinstance(node, fx.Node)]
    while pending:
        node = pending.pop()
        if node in found or node < combine:
            continue
        if node is combine or node.op != "call_function" or not compat.is_pure(node):
            return None
        found.add(node)
        pending.extend(node.all_input_nodes)
    return sorted(found)


def same_block(combine: fx.Node, mix: fx.Node) -> bool:
    """Whether activation checkpointing treats both alike."""
    return all(combine.meta.get(key) == mix.meta.get(key) for key in ("recompute", "ac_graph_id"))


def same_width(x_new: fx.Node, x: fx.Node) -> bool:
    """Whether one precision is used for both: operators compute in float64 if their streams are float64."""
    return bool((x_new.meta["val"].dtype == torch.float64) == (x.meta["val"].dtype == torch.float64))


def _fuse(graph: fx.Graph, combine: fx.Node, mix: fx.Node) -> bool:
    """Returns whether the results are laid out as before; otherwise nothing is changed."""
    first, second = arguments(combine), arguments(mix)
    args = (*(first[name] for name in TENSORS), *(second[name] for name in PARAMETERS), second.get(_INPUT_NORM))
    kwargs: dict[str, Any] = dict(mix.kwargs)
    if first["out_dtype"] is not None:
        kwargs["streams_dtype"] = first["out_dtype"]
    with graph.inserting_before(combine):
        new = call(graph, torch.ops.mhc.boundary.default, args, kwargs, combine)
        streams = item(graph, new, 0, combine)
    results = _RESULTS[mix.target._opname]  # type: ignore[union-attr]
    if not (same_layout(streams, combine) and fits(mix, new, results)):
        graph.erase_node(streams)
        graph.erase_node(new)
        return False
    note_parts(new, combine, mix)
    with graph.inserting_after(streams):
        replace_items(graph, mix, new, results)
    combine.replace_all_uses_with(streams)
    graph.erase_node(combine)
    return True


def boundary_backward(graph: fx.Graph) -> int:
    """Fuse backward; returns how many pairs became one operator."""
    count = 0
    for combine in calls(graph, "expand_combine_backward"):
        gradient = arguments(combine)["d_x_new"]
        source = unviewed(gradient)
        mix = item_of(source, tuple(f"{name}_backward" for name in _MIXES), 0)
        if mix is None or not only_used_by(source, combine) or arguments(combine)["d_x"] is not None:
            continue
        alike = same_block(combine, mix) and same_width(source, arguments(combine)["x"])
        if not alike or not same_stretch(mix, combine):
            continue
        # Placed where the mix is, so that nothing which reads its other results has to move.
        if any(node > mix for node in combine.all_input_nodes if node is not gradient):
            continue
        count += _fuse_backward(graph, combine, mix)
    return count


def only_used_by(source: fx.Node, reader: fx.Node) -> bool:
    """Whether a node has one user, that user has one, and so on up to `reader`."""
    node = source
    while len(node.users) == 1:
        node = next(iter(node.users))
        if node is reader:
            return True
    return False


def _fuse_backward(graph: fx.Graph, combine: fx.Node, mix: fx.Node) -> bool:
    """Returns whether the gradients are laid out as before; otherwise nothing is changed."""
    first, second = arguments(combine), arguments(mix)
    head = mix.target is torch.ops.mhc.head_backward.default
    gradients = (
        second["d_x"],
        second["d_out" if head else "d_layer_input"],
        None if head else second["d_h_post"],
        None if head else second["d_h_res"],
        second["d_h"],
        second["d_ms"],
    )
    tensors = (*(first[name] for name in TENSORS), *(second[name] for name in PARAMETERS))
    saved = (second["x"], second["h"], second["ms"])
    needs = [*first["needs"], *second["needs"][1:], *([False] if head else [])]
    with graph.inserting_before(mix):
        args = (*gradients, *tensors, *saved, needs, second.get(_INPUT_NORM))
        new = call(graph, torch.ops.mhc.boundary_backward.default, args, dict(mix.kwargs), mix)
    of_combine, of_mix = {i: i for i in range(5)}, {i: i + 4 for i in range(1, 6)}
    if not (fits(combine, new, of_combine) and fits(mix, new, of_mix)):
        graph.erase_node(new)
        return False
    with graph.inserting_after(new):
        replace_items(graph, combine, new, of_combine)
        erase_views(graph, first["d_x_new"])
        replace_items(graph, mix, new, of_mix)
    return True


def erase_views(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a gradient that has lost its only reader, back to the call that made it."""
    while node.target is not operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        graph.erase_node(node)
        node = source
    graph.erase_node(node)
