"""Piecewise compilation: a graph is split at an operator such as attention, and Inductor compiles each piece alone.

Serving frameworks do that with `torch._inductor.standalone_compile`. They are not used here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import standalone_compile
from torch.fx.passes.split_module import split_module

import mhc_compile
from tests.zoo.near import Sublayer

# Inductor compiles in earnest.
pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("fresh_dynamo", "fresh_cache")]


class Piece(nn.Module):
    """Compiled alone when it is first called."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self.module, self.compiled = module, None

    def forward(self, *args: Any) -> Any:
        if self.compiled is None:
            self.compiled = standalone_compile(self.module, args, dynamic_shapes="from_example_inputs")
        return self.compiled(*args)


def _piecewise(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    (at,) = (index for index, node in enumerate(gm.graph.nodes) if node.target is torch.tanh)
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    split = split_module(gm, None, lambda node: 1 if order[node] == at else 2 * (order[node] > at))
    for number in (0, 2):
        setattr(split, f"submod_{number}", Piece(getattr(split, f"submod_{number}")))
    return split


class Attended(Sublayer):
    """Its layer is one operator, at which the graph is split."""

    def layer(self, layer_input: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(layer_input)


def test_both_pieces_are_rewritten() -> None:
    """The gates and the reading in one, the writing in the other; with dynamic shapes off, as of one batch size."""
    model, x = Attended(4, 6, 3, 2).eval(), torch.randn(2, 3, 4, 6)
    with torch.no_grad(), mhc_compile.enable():
        got = torch.compile(model, backend=_piecewise, fullgraph=True)(x)
        torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-5)  # float32 in other orders
    report = mhc_compile.report()
    assert sorted(site.op for site in report.rewritten) == ["expand_combine", "generate_mix_and_aggregate"]
    assert (report.declined, report.errors) == ([], []), str(report)
