"""Detached results that lie in the same place as a result with a gradient, and which AOTAutograd makes from that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mhc_compile.passes.beside import Beside
from tests.passes.dynamo import graph_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# What a program returns of a tensor [2, 1, 2, 3], and how many pairs there are.
RESULTS: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "the same view": (lambda y: (y.mT, y.detach().mT), 1),
    "another stride, of a size of one": (lambda y: (y.transpose(0, 1), y.detach().view(1, 2, 2, 3)), 1),
    "twice detached": (lambda y: (y.mT, y.detach().mT, y.mT.detach()), 2),
    "detached alone": (lambda y: (y.detach(), y.cos()), 0),
    "another part": (lambda y: (y[0], y[1].detach()), 0),
    "other strides, of sizes of two": (lambda y: (y[..., :2], y[..., :2].detach().mT), 0),
    "other memory": (lambda y: (y, y.cos().detach()), 0),
}


@pytest.mark.parametrize("name", RESULTS)
def test_pairs(name: str) -> None:
    results, count = RESULTS[name]
    graph = graph_of(lambda x: results(x.sin()), torch.randn(2, 1, 2, 3, requires_grad=True)).graph
    (made,) = (node for node in graph.nodes if node.target == "sin")
    pairs = Beside(graph).pairs(made)
    assert len(pairs) == count
    for detached, attached in pairs:
        assert not detached.meta["example_value"].requires_grad
        assert attached.meta["example_value"].requires_grad


def _before(y: Tensor) -> tuple[Tensor, Tensor]:
    before = y.detach()
    return before, y.mul_(2)


@pytest.mark.parametrize(
    ("results", "first", "wrongly"),
    [
        (lambda y: (y.mT, y.detach().mT), "sin", True),
        (lambda y: (y.flatten(), y.detach().flatten()), "sin", False),
        (lambda y: (y.select(3, 0), y.detach().select(3, 0)), "sin", True),  # what they make has no dim 3
        (_before, "mul_", False),  # it does not come from the product
    ],
)
def test_views_that_are_repeated(results: Callable[[Tensor], Any], first: str, wrongly: bool) -> None:
    graph = graph_of(lambda x: results(x.sin()), torch.randn(2, 1, 2, 3, requires_grad=True)).graph
    (node,) = (node for node in graph.nodes if node.target == first)
    assert len(Beside(graph).pairs(node)) == 1
    assert Beside(graph).is_made_wrongly([node]) == wrongly
