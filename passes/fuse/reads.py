"""Fusion of a write with what reads its streams without gates of their own, forward and backward.

    x' = expand_combine(f, ..., x, h_res); layer_input = aggregate(x', h_pre); h, ms = projection(x', phi)
        ->    x', layer_input, h, ms = expand_combine_and_read(f, ..., x, h_res, h_pre, phi)

The projection may be of each stream alone, as a token of its own.

Forward, either of the two readers may be missing. Gates that are parameters, or that come from the sublayer before, are
there before x' is; and where gates are the program's own, what they are made of is.

Backward, the gradient of h waits for that of h_pre where a program makes the gates from h. So a read beside a
projection is taken apart: the gradient of its gates stays alone, and that of x' goes into the sum. Boundaries whose
gates an operator makes are fused before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.fuse.boundary import TENSORS, erase_views, hoistable, same_block, same_width
from mhc_compile.passes.fuse.joint import (
    arguments,
    call,
    calls,
    fits,
    in_order,
    is_operator,
    item,
    note_parts,
    replace_items,
    same_layout,
    same_stretch,
    unviewed,
)
from mhc_compile.passes.fuse.recompute import made_by
from mhc_compile.passes.fuse.shifted import first_reader, made_for, move_behind, readers, users_between

_READ, _PROJECTION = "aggregate", "projection"
_BACKWARD = (f"{_READ}_backward", f"{_PROJECTION}_backward")
# Results of `expand_combine_and_read` that stand for those of the projection, and its gradients for those of the three.
_RESULTS = {0: 2, 1: 3}
_OF_COMBINE = {i: i for i in range(5)}
_OF_READ, _OF_PROJECTION = {1: 5}, {1: 6, 2: 7}


def combine_and_read(graph: fx.Graph) -> int:
    """Fuse forward; returns how many writes are fused now."""
    reads, projections = readers(graph, _READ), readers(graph, _PROJECTION, in_order)
    for combine, found in projections.items():
        projections[combine] = [projection for projection in found if _projects(projection, combine)]
    count = 0
    for combine in sorted({*reads, *projections}):
        read, projection = (first_reader(found.get(combine, ()), combine) for found in (reads, projections))
        if read is None and projection is None:
            continue
        early = {
            node for reader in (read, projection) if reader is not None for node in hoistable(reader, combine) or ()
        }
        for node in sorted(early):
            combine.prepend(node)
        count += _fuse(graph, combine, read, projection)
    return count


def _projects(projection: fx.Node, streams: fx.Node) -> bool:
    """Whether a projection, or its backward, reads streams [..., n, C] as they are, or each of them alone."""
    x = arguments(projection)["x"]
    if same_layout(x, streams):
        return True
    have, whole = x.meta["val"].shape, streams.meta["val"].shape
    alone = (*whole[:-1], 1, whole[-1])
    several = not compat.same_size(whole[-2], 1)
    return several and len(have) == len(alone) and all(map(compat.same_size, have, alone))


def _fuse(graph: fx.Graph, combine: fx.Node, read: fx.Node | None, projection: fx.Node | None) -> bool:
    """Returns whether the results are laid out as before; otherwise nothing is changed."""
    first = arguments(combine)
    second = {} if read is None else arguments(read)
    third = {} if projection is None else arguments(projection)
    args = (*(first[name] for name in TENSORS), second.get("h_pre"), third.get("phi"), third.get("norm_weight"))
    dtypes = {"streams_dtype": first["out_dtype"], "out_dtype": second.get("out_dtype")}
    kwargs: dict[str, Any] = {name: dtype for name, dtype in dtypes.items() if dtype is not None}
    with graph.inserting_before(combine):
        new = call(graph, torch.ops.mhc.expand_combine_and_read.default, args, kwargs, combine)
        streams = item(graph, new, 0, combine)
        layer_input = None if read is None else item(graph, new, 1, read)
    alike = same_layout(streams, combine) and (projection is None or fits(projection, new, _RESULTS))
    if not alike or (layer_input is not None and read is not None and not same_layout(layer_input, read)):
        for node in (layer_input, streams, new):
            if node is not None:
                graph.erase_node(node)
        return False
    note_parts(new, *(node for node in (combine, read, projection) if node is not None))
    if projection is not None:
        with graph.inserting_after(layer_input or streams):
            replace_items(graph, projection, new, _RESULTS)
    if read is not None and layer_input is not None:
        read.replace_all_uses_with(layer_input)
        graph.erase_node(read)
    combine.replace_all_uses_with(streams)
    graph.erase_node(combine)
    return True


def combine_and_read_backward(graph: fx.Graph) -> int:
    """Fuse backward; returns how many backwards of writes are fused now."""
    count = 0
    for combine in calls(graph, "expand_combine_backward"):
        later = made_for(arguments(combine)["d_x_new"], combine, _BACKWARD, in_order)
        earlier = None if later is None else made_for(arguments(later)["d_x"], later, _BACKWARD, in_order)
        if later is None:
            continue
        # Those that add to the gradient of x', in order.
        parts = [later] if earlier is None or earlier.target is later.target else [earlier, later]
        read, projection = (next((node for node in parts if is_operator(node, name)), None) for name in _BACKWARD)
        # A projection alone would gain nothing.
        if read is None or not _belong_together(combine, read, parts):
            continue
        if projection is not None and not _projects(projection, arguments(read)["x"]):
            continue
        # Placed where the later one is: what reads other results of a projection before that has to move.
        moving = [] if projection in (None, later) else users_between(parts[0], later, combine)
        if moving is not None:
            count += _fuse_backward(graph, combine, parts, read, projection, moving)
    return count


def _belong_together(combine: fx.Node, read: fx.Node, parts: list[fx.Node]) -> bool:
    """Whether these backwards are of readers of what the write made of the tensors that its own backward has."""
    given, streams = arguments(combine), unviewed(arguments(read)["x"])
    made = made_by(streams)
    return (
        given["d_x"] is None
        and made is not None
        and all(in_order(arguments(part)["x"]) is streams for part in parts)
        and all(arguments(made)[name] is given[name] for name in TENSORS)
        and all(same_block(combine, part) and same_width(arguments(part)["x"], given["x"]) for part in parts)
        and same_stretch(parts[0], combine)
        and all(node < parts[-1] for node in combine.all_input_nodes if node is not given["d_x_new"])
    )


def _fuse_backward(
    graph: fx.Graph,
    combine: fx.Node,
    parts: list[fx.Node],
    read: fx.Node,
    projection: fx.Node | None,
    moving: list[fx.Node],
) -> bool:
    """Returns whether the gradients are laid out as before; otherwise nothing is changed."""
    first, second = arguments(combine), arguments(read)
    third = {} if projection is None else arguments(projection)
    gates_apart = projection is not None and second["needs"][1]
    before = arguments(parts[0])["d_x"]
    if before is not None and not same_layout(before, second["x"]):
        before = in_order(before)  # a projection of each stream alone adds to it
        if not same_layout(before, second["x"]):
            return False
    gradients = (before, second["d_out"], third.get("d_h"), third.get("d_ms"))
    tensors = (*(first[name] for name in TENSORS), second["h_pre"], third.get("phi"), third.get("norm_weight"))
    needs = [*first["needs"], second["needs"][1] and not gates_apart, *third.get("needs", [False] * 3)[1:]]
    with graph.inserting_before(parts[-1]):
        args = (*gradients, *tensors, second["x"], needs)
        new = call(graph, torch.ops.mhc.expand_combine_and_read_backward.default, args, {}, parts[-1])
    mappings = {combine: _OF_COMBINE, read: {} if gates_apart else _OF_READ}
    if projection is not None:
        mappings[projection] = _OF_PROJECTION
    if not all(fits(node, new, mapping) for node, mapping in mappings.items()):
        graph.erase_node(new)
        return False
    handed_over = [first["d_x_new"], *(arguments(part)["d_x"] for part in reversed(parts[1:]))]
    if gates_apart:
        with graph.inserting_before(read):
            args = (second["d_out"], second["x"], second["h_pre"], [False, True])
            alone = call(graph, torch.ops.mhc.aggregate_backward.default, args, {}, read)
    for node, gradient in zip((combine, *reversed(parts)), (*handed_over, None), strict=True):
        source, mapping = (alone, {1: 1}) if gates_apart and node is read else (new, mappings[node])
        with graph.inserting_after(source):
            replace_items(graph, node, source, mapping)
        if gradient is not None:
            erase_views(graph, gradient)
    move_behind(new, moving)
    return True
