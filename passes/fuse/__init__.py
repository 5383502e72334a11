"""Stage 6, fuse: several operators become one, when forward and backward are in one graph.

accumulate -> boundary -> boundary_backward -> shifted_boundary -> shifted_boundary_backward -> combine_and_read
-> combine_and_read_backward -> recompute
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from torch import fx

from mhc_compile import compat
from mhc_compile.passes.fuse.accumulate import accumulate
from mhc_compile.passes.fuse.boundary import boundary, boundary_backward
from mhc_compile.passes.fuse.reads import combine_and_read, combine_and_read_backward
from mhc_compile.passes.fuse.recompute import Layers, check_layers, recompute
from mhc_compile.passes.fuse.shifted import shifted_boundary, shifted_boundary_backward

# By the name under which each can be switched off, in the order in which they run.
FUSIONS: dict[str, Callable[[fx.Graph], int]] = {
    "accumulate": accumulate,
    "boundary": boundary,
    "boundary_backward": boundary_backward,
    "shifted_boundary": shifted_boundary,
    "shifted_boundary_backward": shifted_boundary_backward,
    "combine_and_read": combine_and_read,
    "combine_and_read_backward": combine_and_read_backward,
}


def fuse(graph: fx.Graph, names: Collection[str] = tuple(FUSIONS), layers: Layers = None) -> Counter[str]:
    """Fuse the operators of a joint (or inference) graph in place; returns how often each fusion was applied.

    layers: how many layers keep one set of streams for the backward pass, see `recompute`.

    Raises RuntimeError if a node that writes or draws random numbers would run next to others than before.
    """
    before = _surroundings(graph)
    counts = Counter({name: fusion(graph) for name, fusion in FUSIONS.items() if name in names})
    again = recompute(graph, layers)
    if again:
        counts["recompute"] = again
    if counts.total():
        compat.sort_topologically(graph)
        graph.lint()
        _check_order(before, _surroundings(graph))
    return counts


def _surroundings(graph: fx.Graph) -> dict[fx.Node, tuple[int, int]]:
    """For each node, the number of writes before it; if it draws random numbers, also the number of such nodes."""
    writes = draws = 0
    found: dict[fx.Node, tuple[int, int]] = {}
    for node in graph.nodes:
        pure = node.op != "call_function" or compat.is_pure(node)
        found[node] = (writes, 0 if pure else draws)
        writes += compat.writes(node)
        draws += not pure
    return found


def _check_order(before: dict[fx.Node, tuple[int, int]], after: dict[fx.Node, tuple[int, int]]) -> None:
    for node, place in after.items():
        if before.get(node, place) != place:
            raise RuntimeError(f"{node} would change places with an operation that writes or draws random numbers")


__all__ = ["FUSIONS", "Layers", "check_layers", "fuse"]
