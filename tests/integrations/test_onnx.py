"""ONNX: a model is exported as its eager code, compiled or not. Operators that are called directly are not exported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mhc_compile
from mhc_compile import ops
from mhc_compile.nn import HyperConnection, HyperHead, expand

for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package, reason=f"{package} is missing; the extra test installs it")

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # torch's exporter uses what torch, onnxscript and Python have deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
STREAMS, WIDTH = 4, 32


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = HyperConnection(nn.Linear(WIDTH, WIDTH), dim=WIDTH, streams=STREAMS, init="deepseek_v4")
        self.head = HyperHead(WIDTH, STREAMS, init="deepseek_v4")

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(expand(tokens, STREAMS)))
        return out


class Direct(nn.Module):
    """The same block, written with the operators."""

    def __init__(self) -> None:
        super().__init__()
        rows = STREAMS * STREAMS + 2 * STREAMS
        self.phi = nn.Parameter(torch.randn(rows, STREAMS * WIDTH) / 16)
        self.scale, self.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(rows))

    def forward(self, tokens: Tensor) -> Tensor:
        x = ops.expand(tokens, STREAMS)
        layer_input, h_post, h_res = ops.generate_mix_and_aggregate(x, self.phi, self.scale, self.bias)
        return ops.contract(ops.expand_combine(layer_input.tanh(), None, h_post, x, h_res))


def _tokens(length: int) -> Tensor:
    return torch.randn(2, length, WIDTH)


def _export(model: Callable[..., Any]) -> Any:
    sizes = ({1: torch.export.Dim("length", min=2)},)
    with torch.no_grad():
        return torch.onnx.export(model, (_tokens(8),), dynamo=True, dynamic_shapes=sizes, verbose=False)


def _in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="mhc")
    return model


@pytest.mark.parametrize(
    ("way", "around"),
    [
        (lambda model: model, contextlib.nullcontext),
        pytest.param(lambda model: model, mhc_compile.enable, marks=pytest.mark.thorough),
        pytest.param(_in_place, contextlib.nullcontext, marks=pytest.mark.thorough),
    ],
    ids=["eager", "enabled", "in place"],
)
def test_a_model_is_exported(way: Callable[..., Any], around: Callable[..., Any]) -> None:
    """For any length, with the operators of ONNX alone, and it computes the same."""
    model = Model().eval()
    with around():
        program = _export(way(model))
    assert {node.domain for node in program.model.graph} == {""}
    for length in (8, 5):
        tokens = _tokens(length)
        (got,) = program(tokens)
        # Values of about 1 in float32, in other orders.
        torch.testing.assert_close(got, model(tokens), rtol=1e-5, atol=1e-5)


def test_operators_that_are_called_directly() -> None:
    """ONNX has no translation of them. If that changes, the documentation can say so."""
    with pytest.raises(torch.onnx.errors.OnnxExporterError, match="ConversionError") as caught:
        _export(Direct().eval())
    assert "No ONNX function found for <OpOverload(op='mhc." in str(caught.value)
