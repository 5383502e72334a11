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
