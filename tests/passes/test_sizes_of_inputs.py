"""Sizes of intermediate tensors become sizes of inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from mhc_compile.compat import example
from mhc_compile.passes import run_recursively
from mhc_compile.passes.sizes import from_inputs
from tests.passes.dynamo import graph_of
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def traced(function: Callable[[Tensor], Tensor]) -> fx.GraphModule:
    """The graph of a function of 5 x 3 numbers, the 5 symbolic."""
    x = torch.ones(5, 3)
    torch._dynamo.mark_dynamic(x, 0)
    return graph_of(function, x)


def flat_and_back(x: Tensor) -> Tensor:
    y = x.relu()
    return y.view(-1).view(y.size())


def by_name(x: Tensor) -> Tensor:
    y = x.relu()
    return torch.reshape(input=y.view(-1), shape=y.size())


class Reshaped(Sublayer):
    """A read gate that is flat for a while."""

    def pre(self, logits: Tensor) -> Tensor:
        h_pre = torch.sigmoid(logits)
        return (h_pre.flatten(0, 1) * 1.5).view(h_pre.size()).tanh()


def sizes_read(graph: fx.Graph) -> list[fx.Node]:
    return [*graph.find_nodes(op="call_method", target="size")]


@pytest.mark.parametrize("function", [flat_and_back, by_name])
def test_a_shape_is_made_of_inputs(function: Callable[[Tensor], Tensor]) -> None:
    module = traced(function)
    new = from_inputs(module.graph)
    assert len(sizes_read(module.graph)) == 1
    assert sizes_read(new) == []
    x = torch.randn(7, 3)
    assert torch.equal(fx.GraphModule(module, new)(7, x)[0], x.relu())
    assert from_inputs(new) is new


def test_a_size_that_comes_late_may_be_used_before() -> None:
    """torch 2.11 adds it where a hook's region takes it, after a gate that has its shape from there."""
    model, x = Reshaped(n=2, width=4, length=5, batch=3), torch.ones(3, 5, 2, 4)
    torch._dynamo.mark_dynamic(x, 1)
    module = graph_of(model, x)
    (size,) = [node for node in module.graph.find_nodes(op="placeholder") if isinstance(example(node), torch.SymInt)]
    module.graph.output_node().prepend(size)
    assert "expand_combine" in [site.op for site in run_recursively(module).rewritten]
    module.graph.lint()
    last = module.graph.find_nodes(op="placeholder")[-1]
    assert isinstance(example(last), torch.SymInt)


def test_a_shape_that_is_returned_stays() -> None:
    graph = traced(flat_and_back).graph
    (size,) = sizes_read(graph)
    output = graph.output_node()
    output.args = ((*output.args[0], size),)  # type: ignore[misc]
    assert from_inputs(graph) is graph
