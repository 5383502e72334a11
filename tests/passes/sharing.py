"""Layers between hyper-connections, and the graph of them with calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from mhc_compile import compat, ops, passes
from tests.passes.lowering import operators

CALL = torch.ops.higher_order.invoke_subgraph
N, WIDTH, LAYERS = 2, 8, 4

Layer = Callable[..., Any]


def plain_layer(u: Tensor, w: Tensor, number: int) -> Tensor:
    return torch.tanh(u @ w) * 2 + 1


def program_of(layer: Layer) -> Callable[..., list[Tensor]]:
    """Layers between hyper-connections. A layer returns its output, or that and what a backward pass would need."""

    def run(x: Tensor, post: Tensor, *weights: Tensor) -> list[Tensor]:
        saved: list[Tensor] = []
        for number, w in enumerate(weights):
            u = ops.aggregate(x, post)
            f = layer(u, w, number)
            if isinstance(f, tuple):
                f, *more = f
                saved += more
            x = ops.expand_combine(f, None, post, x, None)
        return [x, *saved]

    return run


def make_inputs(tokens: int = 3) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(tokens, N, WIDTH), (tokens, N), *[(WIDTH, WIDTH)] * LAYERS]
    return [torch.randn(shape, generator=draw) for shape in shapes]


def trace(program: Callable[..., Any], inputs: list[Tensor]) -> fx.GraphModule:
    module = make_fx(program, compat.inductor_decompositions(), tracing_mode="fake")(*inputs)
    module.graph.eliminate_dead_code()
    return module


def share(program: Callable[..., Any], inputs: list[Tensor]) -> fx.GraphModule:
    """The program with calls, after its results were found to be what they were, to the last bit."""
    module = trace(program, inputs)
    before = module(*inputs)
    bodies, report = passes.share(module.graph)
    assert not report.errors
    module.graph.lint()
    module.recompile()
    for result, expected in zip(module(*inputs), before, strict=True):
        assert torch.equal(result, expected)
        assert result.stride() == expected.stride()
    calls = Counter(str(node.args[1]) for node in module.graph.find_nodes(op="call_function", target=CALL))
    assert len(bodies) == len(calls)
    assert report.shared.total() == calls.total()
    for body in bodies:
        _check_memory(body)
    return module


def calls_of_each(layer: Layer, inputs: list[Tensor] | None = None) -> list[int]:
    """How many calls there are of each sublayer, once results are what they were."""
    module = share(program_of(layer), inputs or make_inputs())
    return sorted(Counter(str(node.args[1]) for node in sublayer_calls(module)).values())


def operators_called(module: fx.GraphModule, name: str) -> list[str]:
    """The hyper-connections in one of its graphs."""
    return operators(getattr(module, name).graph)


def sublayer_calls(module: fx.GraphModule) -> list[fx.Node]:
    """Those of sublayers; those of hyper-connections are a matter of their own."""
    found = module.graph.find_nodes(op="call_function", target=CALL)
    return [node for node in found if not operators_called(module, str(node.args[1]))]


def _check_memory(body: fx.GraphModule) -> None:
    """Each result and argument has its own memory, as far as Inductor can see."""
    (output,) = body.graph.find_nodes(op="output")
    results = [compat.storage_of(node.meta["val"]) for node in output.args[0]]
    arguments = {compat.storage_of(node.meta["val"]) for node in body.graph.find_nodes(op="placeholder")}
    assert len(set(results)) == len(results)
    assert arguments.isdisjoint(results)
    assert output.meta["user_visible_output_idxs"] == list(range(len(results)))
