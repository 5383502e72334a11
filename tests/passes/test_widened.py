"""What computes in float64 throughout: a graph, and the graphs that it calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mhc_compile.passes.widened import widened
from tests.passes.dynamo import graph_of


def rounded(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = x.exp()
    y = y.half()
    z: Tensor = checkpoint(lambda v: v.to(torch.float32).sin(), y, use_reentrant=False)
    return z


@pytest.mark.usefixtures("fresh_dynamo")
def test_casts_after_autocast_and_in_a_nested_graph_are_to_float64() -> None:
    x = torch.randn(5, 3, dtype=torch.float64)
    module = graph_of(rounded, x.float())
    (result,) = widened(module)(x)
    assert result.dtype == torch.float64
    assert torch.equal(result, x.exp().sin())
    (before,) = module(x)
    assert before.dtype == torch.float32


def with_factories(x: Tensor) -> Tensor:
    """What has no dtype of its own takes the default one; whole numbers stay whole, and index."""
    length = x.shape[-1]
    x = x[:, torch.arange(length, dtype=torch.int64)]
    weights = torch.linspace(0, 1, length) + torch.full((length,), 0.1) + torch.arange(length)
    return x @ torch.eye(length) + weights * torch.tensor(0.3) + torch.ones(length, dtype=torch.float32)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dynamic", [False, True])
def test_numbers_that_are_made_of_no_tensor_are_of_float64(dynamic: bool) -> None:
    x = torch.randn(5, 3, dtype=torch.float64)
    with torch._dynamo.config.patch(assume_static_by_default=not dynamic):
        module = graph_of(with_factories, x.float())
    sizes = [node for node in module.graph.find_nodes(op="placeholder") if "SymInt" in str(node.type)]
    (result,) = widened(module)(*[3 for _ in sizes], x)
    assert result.dtype == torch.float64
    weights = torch.linspace(0, 1, 3, dtype=torch.float64) + 0.1 + torch.arange(3)
    torch.testing.assert_close(result, x + 0.3 * weights + 1.0)
