"""Ways in which torch compiles a model: its forward, in place, and layer by layer.

`tests/e2e/test_deepseek_v4.py` compiles layers that are regions. In torch 2.13 a region that Inductor does not compile
computes with wrong numbers, with or without this package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.e2e.deepseek_models import deepseek
from tests.integrations.programs import compare
from tests.zoo import check

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _forward(model: nn.Module, backend: Any) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(model.forward, backend=backend)
    return compiled


def _in_place(model: nn.Module, backend: Any) -> Callable[..., Any]:
    model.compile(backend=backend)
    return model


def _layers(model: nn.Module, backend: Any) -> Callable[..., Any]:
    for layer in model.model.layers:
        layer.compile(backend=backend)
    return model


# A compiled layer serves all layers that are alike: there are the four sites of one. The head is outside the layers.
@pytest.mark.parametrize(
    ("way", "sites"), [(_forward, 9), (_in_place, 9), (_layers, 4)], ids=["forward", "in place", "layers"]
)
def test_way(way: Callable[[nn.Module, Any], Callable[..., Any]], sites: int) -> None:
    outcome = compare(deepseek(2), way)
    check.assert_as_accurate(outcome)
    assert (len(outcome.report.rewritten), len(outcome.report.declined)) == (sites, 0), str(outcome.report)
