"""What computes in float64 throughout: a graph, and the graphs that it calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from mhc_compile.passes.widened import widened


def rounded(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = x.exp()
    y = y.half()
    z: Tensor = checkpoint(lambda v: v.to(torch.float32).sin(), y, use_reentrant=False)
    return z


@pytest.mark.usefixtures("fresh_dynamo")
def test_casts_after_autocast_and_in_a_nested_graph_are_to_float64() -> None:
    graphs: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(module)
        return module.forward

    x = torch.randn(5, 3, dtype=torch.float64)
    torch.compile(rounded, backend=backend, fullgraph=True)(x.float())
    (result,) = widened(graphs[0])(x)
    assert result.dtype == torch.float64
    assert torch.equal(result, x.exp().sin())
    (before,) = graphs[0](x)
    assert before.dtype == torch.float32
