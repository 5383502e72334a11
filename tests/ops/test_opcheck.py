"""torch.library.opcheck on every operator: schema, autograd registration, fake against real, AOT."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tests.ops.calls import (
    BACKWARD,
    FORWARD,
    OPERATORS,
    RARE,
    Given,
    Sizes,
    arguments,
    is_of_tokens,
    keywords,
    result_names,
    results,
    schema,
    tensor_names,
)

_LOG = {"sinkhorn_eps": 0.0, "sinkhorn_start_eps": 0.0, "sinkhorn_steps": 3}
_CLAMP = {"rms_mode": "clamp", "sinkhorn_start": "exp", "sinkhorn_clamp": True, "sinkhorn_steps": 2}
_FEW = {"sinkhorn_steps": 3}


@dataclass(frozen=True)
class Variant:
    """How an operator is called."""

    sizes: Sizes
    dtype: torch.dtype
    parameter_dtype: torch.dtype
    without: Collection[str] = ()
    scalars: dict[str, Any] = field(default_factory=lambda: _FEW)
    only: str = ""
    """For a backward: the gradients that it makes, of x or of parameters, from the gradients that go into them."""
    transposed: bool = False


# No token, one token, one stream, one column; all parts and not; dtypes of the streams and of the parameters.
_EVERY = {
    "whole": Variant(
        Sizes(4, 8, (2, 3), per_row=True),
        torch.bfloat16,
        torch.float32,
        scalars=_FEW | {"out_dtype": torch.float32, "streams_dtype": torch.bfloat16},
    ),
    "token": Variant(Sizes(2, 5, ()), torch.float32, torch.bfloat16, RARE, _LOG),
    "single": Variant(
        Sizes(1, 1, (1, 1), per_row=True, m=1), torch.float32, torch.float32, {*RARE, "layer_bias", "h_res"}, _CLAMP
    ),
    "empty": Variant(Sizes(3, 4, (0,), parts=2), torch.float16, torch.float16),
    "double": Variant(
        Sizes(2, 3, (4,), parts=1, per_row=True, more=3), torch.float64, torch.float64, RARE, _CLAMP, transposed=True
    ),
}
# What models call most, of operators for which this is not "whole".
_USUAL = Variant(Sizes(4, 8, (2, 3)), torch.bfloat16, torch.float32, RARE)
# Backwards of which models often need a part.
_PARTS = {
    f"only {which}": Variant(Sizes(4, 8, (2, 3)), torch.bfloat16, torch.float32, RARE, only=which)
    for which in ("x", "parameters")
}
_SAMPLES = {f"{operator}-{name}": (operator, variant) for operator in OPERATORS for name, variant in _EVERY.items()}
_SAMPLES |= {f"{name}-usual": (name, _USUAL) for name in OPERATORS if RARE & {*tensor_names(name)}}
_SAMPLES |= {
    f"{operator}-{name}": (operator, variant)
    for operator in BACKWARD
    for name, variant in _PARTS.items()
    if {"x", "phi"} <= {*tensor_names(operator)}
}


def _partly(operator: str, given: Given, only: str) -> Given:
    """The arguments of a backward that makes these gradients, from those of the layer's input or of the gates."""
    names = result_names(operator)
    wanted = [name == "d_x" if only == "x" else not is_of_tokens(name) for name in names]
    needs = [want and need for want, need in zip(wanted, given["needs"], strict=True)]
    wide = {"d_x_new", "d_layer_input", "d_out"}
    outputs = tensor_names(operator)[: len(schema(operator.removesuffix("_backward")).returns)]
    kept = [name for name in outputs if (name in wide) == (only == "x") and given[name] is not None]
    # Where all belong to the other kind, all are given.
    left_out = dict.fromkeys(name for name in outputs if name not in kept) if kept else {}
    return given | left_out | {"needs": needs}


def _sample(operator: str, variant: Variant) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = arguments(
        operator,
        variant.sizes,
        variant.dtype,
        variant.parameter_dtype,
        without=variant.without,
        scalars=variant.scalars,
    )
    if variant.only:
        given = _partly(operator, given, variant.only)
    values = list(given.values())
    if variant.transposed:
        values = [v.mT.contiguous().mT if isinstance(v, Tensor) and v.dim() > 1 else v for v in values]
    if operator in FORWARD:
        values = [v.requires_grad_() if isinstance(v, Tensor) else v for v in values]
    return tuple(values), keywords(operator, given, variant.scalars)


@pytest.mark.parametrize("name", _SAMPLES)
def test_opcheck(name: str) -> None:
    operator, variant = _SAMPLES[name]
    positional, scalars = _sample(operator, variant)
    opcheck(getattr(torch.ops.mhc, operator).default, positional, scalars)


def _on_cuda(value: Any) -> Any:
    return value.detach().cuda().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


@pytest.mark.gpu
@pytest.mark.parametrize("name", _SAMPLES)
def test_opcheck_on_cuda(name: str) -> None:
    """With the kernels where there are some, which leave the dtype and strides that the fake promises."""
    operator, variant = _SAMPLES[name]
    positional, scalars = _sample(operator, variant)
    opcheck(getattr(torch.ops.mhc, operator).default, tuple(map(_on_cuda, positional)), scalars)


@pytest.mark.gpu
@pytest.mark.parametrize("name", _SAMPLES)
def test_cuda_equals_cpu(name: str) -> None:
    operator, variant = _SAMPLES[name]
    positional, scalars = _sample(operator, variant)
    op = getattr(torch.ops.mhc, operator).default
    with torch.no_grad():
        expected = op(*positional, **scalars)
        found = op(*map(_on_cuda, positional), **scalars)
    for mine, true in zip(results(found), results(expected), strict=True):
        # Both accumulate few terms of order 1 in float32, then round to the dtype: an ulp of it may differ.
        tolerance = {"rtol": 2 * torch.finfo(true.dtype).eps, "atol": max(2e-5, torch.finfo(true.dtype).eps)}
        if operator.endswith("boundary_backward"):
            # The gradient of x', of order 10, is rounded to the streams' dtype on the way: what is summed over it
            # differs by an ulp of that where the two round to different sides.
            tolerance["atol"] = max(2e-5, 10 * torch.finfo(variant.dtype).eps)
        if operator in BACKWARD and "input_norm_eps" in scalars:
            # So is the gradient of what the norm reads, which 1 / sqrt(eps) of the norm makes 30 times as large.
            tolerance["atol"] = max(2e-5, 30 * torch.finfo(variant.dtype).eps)
        torch.testing.assert_close(mine.cpu(), true, **tolerance)
