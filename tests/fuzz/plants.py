"""Wrong rewrites, to plant into the passes: a check that finds none of them would not be one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mhc_compile import passes
from mhc_compile.passes.report import Report


def _another_eps(graph: fx.Graph, node: fx.Node) -> None:
    if "mix" in node.target._opname:
        node.update_kwarg("pre_eps", node.kwargs.get("pre_eps", 0.0) + 1e-4)


def _one_step_less(graph: fx.Graph, node: fx.Node) -> None:
    if node.kwargs.get("sinkhorn_steps", 0) > 1:
        node.update_kwarg("sinkhorn_steps", node.kwargs["sinkhorn_steps"] - 1)


def _transposed(graph: fx.Graph, node: fx.Node) -> None:
    if node.target._opname == "expand_combine" and isinstance(node.args[4], fx.Node):
        with graph.inserting_before(node):
            node.update_arg(4, graph.call_method("transpose", (node.args[4], -1, -2)))


def _gradient_lost(graph: fx.Graph, node: fx.Node) -> None:
    if node.target._opname == "expand_combine":
        with graph.inserting_before(node):
            node.update_arg(0, graph.call_method("detach", (node.args[0],)))


def _another_norm(graph: fx.Graph, node: fx.Node) -> None:
    if node.kwargs.get("input_norm_eps") is not None:
        node.update_kwarg("input_norm_eps", node.kwargs["input_norm_eps"] + 1e-4)


PLANTS = {
    "another eps": _another_eps,
    "one step less": _one_step_less,
    "transposed mixing": _transposed,
    "gradient lost": _gradient_lost,
    "another norm": _another_norm,
}


def planted(kind: str) -> Callable[[fx.Graph], tuple[fx.Graph | None, Report]]:
    """`passes.run`, whose result is spoilt."""
    run = passes.run

    def spoilt(graph: fx.Graph, **options: Any) -> tuple[fx.Graph | None, Report]:
        new, report = run(graph, **options)
        for node in [] if new is None else list(new.nodes):
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "mhc":
                PLANTS[kind](new, node)
        return new, report

    return spoilt
