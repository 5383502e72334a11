"""Stage 7, lower: operator calls of the graph after grad become what they consist of.

On CUDA that is their kernels' launches, as nodes of the graph: Inductor plans their memory, launches them from its own
wrapper without a dispatch through Python, and may compile them ahead of time. A call that cannot be taken apart stays.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from mhc_compile import compat
from mhc_compile.ops._register import KERNELS, REFERENCES
from mhc_compile.passes.fuse.joint import calls

log = logging.getLogger(__name__)


def lower(graph: fx.Graph) -> Counter[str]:
    """Lower the operators of a graph after grad in place; returns how many of each were.

    What cannot be lowered stays as it is, and is logged.
    """
    counts: Counter[str] = Counter()
    for node in calls(graph):
        name = str(node.target._opname)  # type: ignore[union-attr]
        try:
            body = _body(node, name)
        except Exception as error:  # an operator that stays costs time, never a result
            log.info("%s is not lowered: %s: %s", name, type(error).__name__, error)
            continue
        if body is not None:
            _inline(node, body)
            counts[name] += 1
    return counts


def _body(node: fx.Node, name: str) -> fx.GraphModule | None:
    """The operator's implementation as a graph of the tensors among its arguments; None where it has to stay."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
    values = [compat.example(leaves[i]) for i in at]
    # A size that is not known could only be branched on with a guard, for which it is too late.
    if not all(map(_is_static, values)) or not all(value.is_cuda and value.numel() for value in values):
        return None

    def call(*tensors: torch.Tensor) -> Any:
        for i, tensor in zip(at, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return (KERNELS if name in KERNELS else REFERENCES)[name](*args, **kwargs)

    if name not in KERNELS:
        return _trace(torch.func.functionalize(call), values)
    # Here and not above: the passes work where Triton is missing.
    from mhc_compile.kernels import common, embedded, supports

    if torch.version.hip is not None or not supports(*values):
        return None
    with common.recorded(embedded.record):
        return _trace(call, values)


def _trace(call: Callable[..., Any], values: list[torch.Tensor]) -> fx.GraphModule:
    with compat.fake_mode_of(values[0]), torch.no_grad():
        body: fx.GraphModule = make_fx(call, compat.inductor_decompositions())(*values)
    return body


def _is_static(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return all(isinstance(size, int) for size in (*value.shape, *value.stride(), value.storage_offset()))


def _inline(node: fx.Node, body: fx.GraphModule) -> None:
    """Put the nodes of body, a graph of the tensors that node takes, in place of it."""
    graph = node.graph
    given = iter([leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)])
    copies: dict[fx.Node, fx.Node] = {}
    made: list[fx.Node] = []
    results: Any = None
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                copies[inner] = next(given)
            elif inner.op == "output":
                results = fx.node.map_arg(inner.args[0], lambda n: copies[n])
            else:
                copies[inner] = graph.node_copy(inner, lambda n: copies[n])
                made.append(copies[inner])
    for new in made:
        _describe(new, node)
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)
    for new in reversed(made):
        if not new.users and not compat.writes(new):
            graph.erase_node(new)


def _describe(new: fx.Node, old: fx.Node) -> None:
    if "stack_trace" in old.meta:
        new.meta["stack_trace"] = old.meta["stack_trace"]
    if compat.is_kernel_launch(new):
        # Inductor gives a kernel exactly the strides of these, which the launch has as numbers.
        new.meta["eager_input_vals"] = fx.node.map_arg((new.args, new.kwargs), lambda n: n.meta["val"])
