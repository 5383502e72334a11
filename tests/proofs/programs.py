"""Graphs run on symbols, and the joint graphs (forward and backward in one) of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from mhc_compile import compat, passes
from tests.proofs.short import Short
from tests.proofs.symbols import in_range


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A module with a graph of its own."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


def joint_graph(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    """The joint graph of a rewritten model, not fused."""
    made: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        passes.run_recursively(gm)
        return compat.compile_without_inductor(gm, example_inputs, lambda joint: made.append(copied(joint)))

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(*inputs)
    (joint,) = made
    return joint


def prove_same(one: fx.GraphModule, other: fx.GraphModule) -> None:
    """Two graphs of equal inputs compute the same, result by result."""
    symbols = Short(above=in_range)
    inputs = [
        symbols.tensor(f"i{k}_", *node.meta["val"].shape)
        for k, node in enumerate(node for node in one.graph.nodes if node.op == "placeholder")
    ]
    with torch.no_grad(), symbols:
        results = [pytree.tree_leaves(_Run(graph, symbols).run(*inputs)) for graph in (one, other)]
    for k, (a, b) in enumerate(zip(*results, strict=True)):
        assert (a is None) == (b is None), f"result {k}"
        if a is not None:
            symbols.prove(symbols.terms(a), symbols.terms(b), f"result {k}")


class _Run(fx.Interpreter):
    """A graph on symbols, its constants among them."""

    def __init__(self, graph: fx.GraphModule, symbols: Short) -> None:
        super().__init__(graph)
        self.symbols = symbols

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        numbers = [sympy.Rational(float(number)) for number in value.flatten()]
        return self.symbols.of(numbers, value.dtype).reshape(value.shape)
