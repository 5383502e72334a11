"""Boundary fusion where reads come one sublayer after their gates: a combine, a read and a mix, forward and backward.

    x' = expand_combine(f, ..., x, h_res); layer_input = aggregate(x', h_pre); h_pre', ... = generate_mix(x', ...)
        ->    x', layer_input, h_pre', ... = shifted_boundary(f, ..., x, h_res, h_pre, ...)

The read and the mix come in either order. Backward, each adds to the gradient of x' that the other has made, and the
sum goes straight into the combine's backward. The two directions are fused independently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.fuse.boundary import (
    PARAMETERS,
    TENSORS,
    erase_views,
    hoistable,
    only_used_by,
    same_block,
    same_width,
)
from mhc_compile.passes.fuse.joint import (
    arguments,
    call,
    calls,
    fits,
    is_operator,
    item,
    item_of,
    items,
    note_parts,
    replace_items,
    same_layout,
    same_stretch,
    unviewed,
)

_READ, _MIX = "aggregate", "generate_mix"
_BACKWARD = (f"{_READ}_backward", f"{_MIX}_backward")
# Results of `shifted_boundary` that stand for those of the mix, by number.
_RESULTS = {0: 2, 1: 3, 2: 4, 3: 5, 4: 6}
# Gradients of `shifted_boundary_backward` that stand for those of the three, but for the read's and the mix's of x'.
_OF_COMBINE = {i: i for i in range(5)}
_OF_READ, _OF_MIX = {1: 5}, {i: i + 5 for i in range(1, 5)}


def shifted_boundary(graph: fx.Graph) -> int:
    """Fuse forward; returns how many boundaries there are now."""
    reads, mixes = readers(graph, _READ), readers(graph, _MIX)
    count = 0
    for combine in mixes:
        read, mix = (first_reader(readers.get(combine, ()), combine) for readers in (reads, mixes))
        if read is None or mix is None:
            continue
        for node in sorted({*(hoistable(read, combine) or ()), *(hoistable(mix, combine) or ())}):
            combine.prepend(node)
        count += _fuse(graph, combine, read, mix)
    return count


def readers(graph: fx.Graph, name: str, seen: Callable[[Any], Any] = unviewed) -> dict[fx.Node, list[fx.Node]]:
    """The operators of this name that read the new streams of a combine, by combine; seen looks past views."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for reader in calls(graph, name):
        combine = seen(arguments(reader)["x"])
        if isinstance(combine, fx.Node) and is_operator(combine, "expand_combine"):
            found.setdefault(combine, []).append(reader)
    return found


def first_reader(readers: Iterable[fx.Node], combine: fx.Node) -> fx.Node | None:
    """The first of a combine's readers that may move to the combine's place."""
    for reader in readers:
        alike = same_block(combine, reader) and same_width(combine, arguments(combine)["x"])
        if alike and hoistable(reader, combine) is not None and same_stretch(combine, reader):
            return reader
    return None


def _fuse(graph: fx.Graph, combine: fx.Node, read: fx.Node, mix: fx.Node) -> bool:
    """Returns whether the results are laid out as before; otherwise nothing is changed."""
    first, second, third = arguments(combine), arguments(read), arguments(mix)
    args = (*(first[name] for name in TENSORS), second["h_pre"], *(third[name] for name in PARAMETERS))
    kwargs: dict[str, Any] = dict(mix.kwargs)
    for name, dtype in (("streams_dtype", first["out_dtype"]), ("out_dtype", second["out_dtype"])):
        if dtype is not None:
            kwargs[name] = dtype
    with graph.inserting_before(combine):
        new = call(graph, torch.ops.mhc.shifted_boundary.default, args, kwargs, combine)
        streams, layer_input = item(graph, new, 0, combine), item(graph, new, 1, read)
    if not (same_layout(streams, combine) and same_layout(layer_input, read) and fits(mix, new, _RESULTS)):
        for node in (layer_input, streams, new):
            graph.erase_node(node)
        return False
    note_parts(new, combine, read, mix)
    with graph.inserting_after(layer_input):
        replace_items(graph, mix, new, _RESULTS)
    for old, made in ((read, layer_input), (combine, streams)):
        old.replace_all_uses_with(made)
        graph.erase_node(old)
    return True


def shifted_boundary_backward(graph: fx.Graph) -> int:
    """Fuse backward; returns how many times three operators became one."""
    count = 0
    for combine in calls(graph, "expand_combine_backward"):
        later = made_for(arguments(combine)["d_x_new"], combine)
        earlier = None if later is None else made_for(arguments(later)["d_x"], later)
        if later is None or earlier is None or not _belong_together(combine, later, earlier):
            continue
        # Placed where the later one is: what reads other results of the earlier one before that has to move.
        moving = users_between(earlier, later, combine)
        if moving is not None:
            count += _fuse_backward(graph, combine, later, earlier, moving)
    return count


def made_for(
    gradient: Any, reader: fx.Node, names: tuple[str, ...] = _BACKWARD, seen: Callable[[Any], Any] = unviewed
) -> fx.Node | None:
    """The backward of a read or a mix whose gradient of the streams this is, which nothing but `reader` uses."""
    source = seen(gradient)
    made = item_of(source, names, 0)
    return made if made is not None and only_used_by(source, reader) else None


def _belong_together(combine: fx.Node, later: fx.Node, earlier: fx.Node) -> bool:
    """Whether one read and one mix of the same streams add to the gradient that the combine's backward takes."""
    given = arguments(combine)
    return (
        given["d_x"] is None
        and later.target is not earlier.target
        and unviewed(arguments(later)["x"]) is unviewed(arguments(earlier)["x"])
        and same_block(combine, later)
        and same_block(combine, earlier)
        and same_width(arguments(later)["x"], given["x"])
        and same_stretch(earlier, combine)
        and all(node < later for node in combine.all_input_nodes if node is not given["d_x_new"])
    )


def users_between(earlier: fx.Node, later: fx.Node, combine: fx.Node) -> list[fx.Node] | None:
    """The nodes before the later operator that use the earlier one's results, without the gradient of x'.

    None if the later one or the combine's backward depends on that, or if it may not be moved.
    """
    found: set[fx.Node] = set()
    pending = [user for number, node in items(earlier) if number != 0 for user in node.users]
    while pending:
        node = pending.pop()
        if node in (later, combine):
            return None
        if node in found or node > later:
            continue
        if not compat.is_pure(node):
            return None
        found.add(node)
        pending.extend(node.users)
    return sorted(found)


def _fuse_backward(graph: fx.Graph, combine: fx.Node, later: fx.Node, earlier: fx.Node, moving: list[fx.Node]) -> bool:
    """Returns whether the gradients are laid out as before; otherwise nothing is changed."""
    read, mix = (later, earlier) if is_operator(later, _BACKWARD[0]) else (earlier, later)
    first, second, third = arguments(combine), arguments(read), arguments(mix)
    handed_over, outside = arguments(later)["d_x"], arguments(earlier)["d_x"]
    gates = ("d_h_pre", "d_h_post", "d_h_res", "d_h", "d_ms")
    gradients = (outside, second["d_out"], *(third[name] for name in gates))
    tensors = (*(first[name] for name in TENSORS), second["h_pre"], *(third[name] for name in PARAMETERS))
    needs = [*first["needs"], second["needs"][1], *third["needs"][1:]]
    with graph.inserting_before(later):
        args = (*gradients, *tensors, third["x"], third["h"], third["ms"], needs)
        new = call(graph, torch.ops.mhc.shifted_boundary_backward.default, args, dict(mix.kwargs), mix)
    parts = ((combine, _OF_COMBINE), (read, _OF_READ), (mix, _OF_MIX))
    if not all(fits(node, new, mapping) for node, mapping in parts):
        graph.erase_node(new)
        return False
    with graph.inserting_after(new):
        replace_items(graph, combine, new, _OF_COMBINE)
        erase_views(graph, first["d_x_new"])
        replace_items(graph, later, new, _OF_READ if later is read else _OF_MIX)
        erase_views(graph, handed_over)
        replace_items(graph, earlier, new, _OF_MIX if later is read else _OF_READ)
    move_behind(new, moving)
    return True


def move_behind(new: fx.Node, moving: list[fx.Node]) -> None:
    """Put nodes behind an operator and its results, in order."""
    place = new
    while place.next in new.users:
        place = place.next
    for node in moving:
        place.append(node)
        place = node
