"""One tensor of zeros for the counters of all launches in a graph.

A launch whose programs wait for each other counts from zero. Each such tensor would be a kernel of its own, which costs
the host a launch and takes the GPU some 3 microseconds.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.fuse.joint import call

_FULL = torch.ops.aten.full.default
_EMPTY = torch.ops.aten.empty.memory_format
_FILL = torch.ops.aten.fill_.Scalar
_SLICE = torch.ops.aten.slice.Tensor
_LAUNCH = torch.ops.mhc._launch.default
# Bytes: launches copy what begins elsewhere.
_ALIGNED = 16


def merge_zeros(graph: fx.Graph) -> None:
    """Make zeros that only launches use parts of one tensor, which is made in the place of the first."""
    alike: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=_FULL):
        if _is_for_a_launch(node):
            value = compat.example(node)
            alike[value.dtype, value.device].append(node)
    for nodes in alike.values():
        if len(nodes) > 1:
            _merge(graph, nodes)


def _is_for_a_launch(node: fx.Node) -> bool:
    """Whether this is a row of zeros for launches alone, and its length is known."""
    if {user.target for user in node.users} != {_LAUNCH} or len(node.args) != 2:
        return False
    value = compat.example(node)
    one_row = value.dim() == 1 and isinstance(value.shape[0], int)
    return one_row and type(node.args[1]) is int and node.args[1] == 0


def _merge(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    values = [compat.example(node) for node in nodes]
    step = _ALIGNED // values[0].element_size()
    rooms = [(len(value) + step - 1) // step * step for value in values]
    *starts, total = accumulate(rooms, initial=0)
    options = {"dtype": values[0].dtype, "device": values[0].device}
    with compat.fake_mode_of(values[0]):
        with graph.inserting_before(nodes[0]):
            # Filled afterwards: of a constant that is no memory yet, Inductor would make each part anew.
            memory = call(graph, _EMPTY, ([total],), options, like=nodes[0])
            whole = call(graph, _FILL, (memory, 0), {}, like=nodes[0])
        for node, value, start in zip(nodes, values, starts, strict=True):
            with graph.inserting_before(node):
                part = call(graph, _SLICE, (whole, 0, start, start + len(value)), {}, like=node)
            node.replace_all_uses_with(part)
            graph.erase_node(node)
