"""Sizes of intermediate tensors become sizes of inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from mhc_compile.passes.sizes import from_inputs
from tests.passes.dynamo import graph_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def traced(function: Callable[[Tensor], Tensor]) -> fx.GraphModule:
    """The graph of a function of 5 x 3 numbers, the 5 symbolic."""
    x = torch.ones(5, 3)
    torch._dynamo.mark_dynamic(x, 0)
    return graph_of(function, x)


def flat_and_back(x: Tensor) -> Tensor:
    y = x.relu()
    return y.view(-1).view(y.size())


def sizes_read(graph: fx.Graph) -> list[fx.Node]:
    return [*graph.find_nodes(op="call_method", target="size")]


def test_a_shape_is_made_of_inputs() -> None:
    module = traced(flat_and_back)
    new = from_inputs(module.graph)
    assert len(sizes_read(module.graph)) == 1
    assert sizes_read(new) == []
    x = torch.randn(7, 3)
    assert torch.equal(fx.GraphModule(module, new)(7, x)[0], x.relu())
    assert from_inputs(new) is new


def test_a_shape_that_is_returned_stays() -> None:
    graph = traced(flat_and_back).graph
    (size,) = sizes_read(graph)
    output = graph.output_node()
    output.args = ((*output.args[0], size),)  # type: ignore[misc]
    assert from_inputs(graph) is graph
