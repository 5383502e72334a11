"""Detached results beside results with gradients, as in `return y.mT, y.detach().mT`.

AOTAutograd makes the detached one anew outside of the graph from the other one, if both have equal sizes and strides.
It repeats there all views that lead from the memory's first tensor to the detached one: here a second transpose, which
raises an error or, in a square, returns other numbers (torch 2.13). It does not repeat views of symbolic sizes,
so that the result depends on what the first tensor is made by, which a rewriting changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.shadow import tensors_of

REASON = "its result is returned as a view and as the same view without gradient, of which torch repeats the views"


class Beside:
    """Results of a graph that AOTAutograd may make from other results."""

    def __init__(self, graph: fx.Graph) -> None:
        outputs = graph.find_nodes(op="output")
        self._results = list(dict.fromkeys(node for output in outputs for node in output.all_input_nodes))

    def pairs(self, node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """Detached results in the memory of a node, each with one that has a gradient and lies in the same place."""
        key = _storage(node)
        if key is None:
            return []
        sharing = [result for result in self._results if _storage(result) == key]
        attached = [result for result in sharing if compat.example(result).requires_grad]
        return [
            (result, other)
            for result in sharing
            if not compat.example(result).requires_grad
            for other in attached
            if _place(compat.example(result)) == _place(compat.example(other))
        ]

    def is_made_wrongly(self, firsts: Collection[fx.Node]) -> bool:
        """Whether a result is another tensor once the views that lead to it from one of the nodes are repeated.

        The nodes are one tensor, which is the first in its memory.
        """
        return any(_differs(result, other, firsts) for result, other in self.pairs(next(iter(firsts))))


def _differs(result: fx.Node, other: fx.Node, firsts: Collection[fx.Node]) -> bool:
    views: list[fx.Node] = []
    node: fx.Node | None = result
    while node is not None and node not in firsts:
        views.append(node)
        node = next((source for source in node.all_input_nodes if _storage(source) == _storage(result)), None)
    if node is None:
        return False  # it was there before
    example = compat.example(other)
    values = {node: example}
    with compat.quiet_shape_env(compat.fake_mode_of(example)), compat.fake_mode_of(example), torch.no_grad():
        for view in reversed(views):
            args, kwargs = fx.node.map_arg((view.args, view.kwargs), lambda n: values.get(n, compat.example(n)))
            try:
                function: Callable[..., Any] = (
                    getattr(torch.Tensor, str(view.target)) if view.op == "call_method" else view.target  # type: ignore[assignment]
                )
                values[view] = function(*args, **kwargs)
            except Exception:  # the views do not take what they made
                return True
    return _place(values[result]) != _place(example)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies in its memory. Sizes of one have no stride that matters."""
    sizes = [int(compat.hint(size)) for size in tensor.shape]
    steps = [int(compat.hint(step)) for step in tensor.stride()]
    return (
        sizes,
        [step for size, step in zip(sizes, steps, strict=True) if size > 1],
        compat.hint(tensor.storage_offset()),
    )


def _storage(node: fx.Node) -> Any:
    """The memory that the tensors of a node share, of which there is one."""
    keys = {compat.storage_of(tensor) for tensor in tensors_of(node)}
    return keys.pop() if len(keys) == 1 else None
