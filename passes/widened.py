"""The float64 form of a module that a graph runs: every narrower type in it becomes float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.aten_calls import leaves

_NARROWER = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = ("float", "bfloat16", "half")


def widened(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a module, given float64 for its floating point inputs, that computes in float64 throughout.

    Nested graphs are widened as well, those of an autograd.Function's backward among them, which torch runs with
    every mode off.
    """
    graph, _ = compat.copy_graph(module.graph)
    for node in graph.nodes:
        if compat.changes_global_state(node):
            continue  # autocast leaves float64 alone, and has no such type
        if node.op == "call_method" and node.target in _CASTS:
            node.target = "double"
        node.args = fx.node.map_aggregate(node.args, _wide)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _wide)
        if _takes_default_dtype(node):
            node.kwargs = {**node.kwargs, "dtype": torch.float64}
    made = compat.module_of(graph, module)
    for name, body in list(made.named_children()):
        if isinstance(body, fx.GraphModule):
            setattr(made, name, widened(body))
    return made


def _takes_default_dtype(node: fx.Node) -> bool:
    """Whether this makes floating point numbers of no tensor, such as `torch.eye(4)`: there is none to widen."""
    made = compat.example(node)
    if node.op != "call_function" or not isinstance(made, torch.Tensor) or made.dtype not in _NARROWER:
        return False
    read = [leaf for one in node.all_input_nodes for leaf in leaves(compat.example(one))]
    return "dtype" not in node.kwargs and not any(leaf is None or isinstance(leaf, torch.Tensor) for leaf in read)


def _wide(leaf: Any) -> Any:
    return torch.float64 if isinstance(leaf, torch.dtype) and leaf in _NARROWER else leaf
