"""Wrong rewrites, to plant into the passes: a check that finds none of them would not be one."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mhc_compile import passes
from mhc_compile.passes.report import Report

Plant = Callable[[fx.Graph, fx.Node], None]


def _name(node: fx.Node) -> str:
    """The name of one of our operators, nothing of other nodes."""
    ours = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "mhc"
    return str(node.target._opname) if ours else ""


def _another_eps(graph: fx.Graph, node: fx.Node) -> None:
    if "mix" in _name(node):
        node.update_kwarg("pre_eps", node.kwargs.get("pre_eps", 0.0) + 1e-4)


def _one_step_less(graph: fx.Graph, node: fx.Node) -> None:
    if _name(node) and node.kwargs.get("sinkhorn_steps", 0) > 1:
        node.update_kwarg("sinkhorn_steps", node.kwargs["sinkhorn_steps"] - 1)


def _transposed(graph: fx.Graph, node: fx.Node) -> None:
    if _name(node) == "expand_combine" and isinstance(node.args[4], fx.Node):
        with graph.inserting_before(node):
            node.update_arg(4, graph.call_method("transpose", (node.args[4], -1, -2)))


def _gradient_lost(graph: fx.Graph, node: fx.Node) -> None:
    if _name(node) == "expand_combine":
        with graph.inserting_before(node):
            node.update_arg(0, graph.call_method("detach", (node.args[0],)))


def _another_norm(graph: fx.Graph, node: fx.Node) -> None:
    if _name(node) and node.kwargs.get("input_norm_eps") is not None:
        node.update_kwarg("input_norm_eps", node.kwargs["input_norm_eps"] + 1e-4)


PLANTS: dict[str, Plant] = {
    "another eps": _another_eps,
    "one step less": _one_step_less,
    "transposed mixing": _transposed,
    "gradient lost": _gradient_lost,
    "another norm": _another_norm,
}


def _write_lost(graph: fx.Graph, node: fx.Node) -> None:
    """What is written goes into a copy, as it does if views are not followed to the value that they are of."""
    if node.op == "call_method" and str(node.target).endswith("_"):
        with graph.inserting_before(node):
            node.update_arg(0, graph.call_method("clone", (node.args[0],)))


def _output_changed(*steps: tuple[Any, ...]) -> Plant:
    """The last output goes through methods, given with their arguments."""

    def plant(graph: fx.Graph, node: fx.Node) -> None:
        if node.op == "output":
            (given,) = node.args
            results = list(given if isinstance(given, tuple | list) else [given])
            with graph.inserting_before(node):
                for method, *args in steps:
                    results[-1] = graph.call_method(method, (results[-1], *args))
            node.args = (tuple(results),)

    return plant


def _still_attached(graph: fx.Graph, node: fx.Node) -> None:
    if node.op == "call_method" and node.target == "detach":
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.call_method("view_as", (node.args[0], node.args[0])))


def _rows_left(graph: fx.Graph, node: fx.Node) -> None:
    """Rows that a list picks are taken for all rows in their order."""
    if node.target is operator.getitem and isinstance(node.args[1], list | tuple) and isinstance(node.args[0], fx.Node):
        node.replace_all_uses_with(node.args[0])


def _size_kept(graph: fx.Graph, node: fx.Node) -> None:
    """The number of tokens of the first call is taken for that of every call."""
    if _name(node) == "expand_combine":
        with graph.inserting_after(node):
            size = graph.call_method("size", (node, 1))
        with graph.inserting_after(size):
            part = graph.call_function(operator.truediv, (size, 3))
        with graph.inserting_after(part):
            changed = graph.call_function(operator.mul, (node, part))
        node.replace_all_uses_with(changed, delete_user_cb=lambda user: user not in (size, changed))


def _noisy_gradient(graph: fx.Graph, node: fx.Node) -> None:
    """H_res' gradient is off by some parts in ten million, which is seen only where what it makes vanishes."""
    if _name(node) == "expand_combine" and isinstance(node.args[4], fx.Node):
        given = node.args[4]
        with graph.inserting_before(node):
            side = graph.call_method("size", (given, -1))
            columns = graph.call_function(torch.arange, (side,))
            weights = graph.call_function(operator.mul, (graph.call_method("unsqueeze", (columns, 1)), columns))
            more = graph.call_function(operator.mul, (given, graph.call_function(operator.mul, (weights, 1e-7))))
            less = graph.call_method("detach", (more,))
            nothing = graph.call_function(operator.sub, (more, less))
            node.update_arg(4, graph.call_function(operator.add, (given, nothing)))


def _endless(graph: fx.Graph, node: fx.Node) -> None:
    while True:
        time.sleep(0.01)


def _failing(graph: fx.Graph, node: fx.Node) -> None:
    raise ValueError("planted")


# What is seen in programs of one kind alone.
OBSERVED: dict[str, Plant] = {
    "write lost": _write_lost,
    "output copied": _output_changed(("clone",)),
    "output with other strides": _output_changed(("transpose", 1, 2), ("contiguous",), ("transpose", 1, 2)),
    "detached result attached": _still_attached,
    "rows not picked": _rows_left,
    "size of the first call": _size_kept,
    "noisy gradient": _noisy_gradient,
    "hang": _endless,
    "failure": _failing,
}


def planted(kind: str) -> Callable[[fx.Graph], tuple[fx.Graph | None, Report]]:
    """`passes.run`, whose result is spoilt."""
    run = passes.run

    def spoilt(graph: fx.Graph, **options: Any) -> tuple[fx.Graph | None, Report]:
        new, report = run(graph, **options)
        try:
            for node in [] if new is None else list(new.nodes):
                (PLANTS | OBSERVED)[kind](new, node)
        except ValueError as error:  # as `run` does with what goes wrong inside it
            report.errors.append(str(error))
        return new, report

    return spoilt
