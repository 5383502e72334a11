"""mhc::aggregate_and_norm, what a sublayer reads, by the RMS norm at its start."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mhc_compile.ops import _input_norm
from mhc_compile.ops._checks import check_needs, check_out_dtype, check_tensor, check_x
from mhc_compile.ops._input_norm import InputNorm
from mhc_compile.ops._register import define, differentiate
from mhc_compile.ops._tensors import fake_gradients, settle_gradient


def aggregate_and_norm(
    x: Tensor,
    h_pre: Tensor,
    input_norm_weight: Tensor | None = None,
    *,
    input_norm_eps: float,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`aggregate`, and the RMS norm of its result, in float32 (float64 for float64 x).

        out = input_norm_weight * u / sqrt(mean(u^2) + input_norm_eps),  u = sum_i h_pre[i] * x[i]

    `generate_mix_and_aggregate` does the same with gates that it makes itself.

    Args:
        x: [..., n, C], any floating dtype.
        h_pre: [..., n], any floating dtype; float64 only together with float64 x.
        input_norm_weight: [C], any floating dtype; None leaves it out.
        input_norm_eps: a finite number >= 0.
        out_dtype: the dtype of the result; None means that of x.

    Returns:
        [..., C].

    Raises:
        TypeError, ValueError: an argument has an unexpected dtype, shape, device or value.

    Source: arXiv 2512.24880, H_pre x of equation 3, read through the norm of arXiv 1910.07467.
    """
    result: Tensor = torch.ops.mhc.aggregate_and_norm(
        x, h_pre, input_norm_weight, input_norm_eps=input_norm_eps, out_dtype=out_dtype
    )
    return result


def _check(
    x: Tensor,
    h_pre: Tensor,
    input_norm_weight: Tensor | None,
    *,
    input_norm_eps: float,
    out_dtype: torch.dtype | None = None,
) -> tuple[int, ...]:
    """Returns the shape of the result."""
    tokens, n, width = check_x(x)
    check_tensor("h_pre", h_pre, (*tokens, n), "[..., n]", x)
    check_tensor("input_norm_weight", input_norm_weight, (width,), "[C]", x)
    if not (input_norm_eps >= 0 and math.isfinite(input_norm_eps)):
        raise ValueError(f"input_norm_eps is {input_norm_eps}; expected a finite number >= 0")
    check_out_dtype(out_dtype, x)
    return (*tokens, width)


def _reference(
    x: Tensor,
    h_pre: Tensor,
    input_norm_weight: Tensor | None,
    *,
    input_norm_eps: float,
    out_dtype: torch.dtype | None,
) -> Tensor:
    return _input_norm.reference(x, h_pre, InputNorm(input_norm_weight, input_norm_eps), out_dtype)


def _fake(
    x: Tensor, h_pre: Tensor, *rest: Tensor | None, out_dtype: torch.dtype | None, input_norm_eps: float
) -> Tensor:
    return x.new_empty((*x.shape[:-2], x.shape[-1]), dtype=out_dtype or x.dtype)


def _check_backward(
    d_out: Tensor,
    x: Tensor,
    h_pre: Tensor,
    needs: Sequence[bool],
    input_norm_weight: Tensor | None,
    *,
    input_norm_eps: float,
) -> None:
    shape = _check(x, h_pre, input_norm_weight, input_norm_eps=input_norm_eps)
    check_tensor("d_out", d_out, shape, "[..., C]", x)
    check_needs(needs, 3)


def _reference_backward(
    d_out: Tensor,
    x: Tensor,
    h_pre: Tensor,
    needs: Sequence[bool],
    input_norm_weight: Tensor | None,
    *,
    input_norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of u, h_pre and the weight in plain torch; that of u has the dtype of d_out."""
    norm = InputNorm(input_norm_weight, input_norm_eps)
    d_pre, du, d_weight = _input_norm.backward(norm, d_out, x, h_pre, needs[2])
    return (
        settle_gradient(du if needs[0] else None, d_out, x),
        settle_gradient(d_pre if needs[1] else None, h_pre, x),
        settle_gradient(d_weight, input_norm_weight, x),
    )


def _fake_backward(
    d_out: Tensor,
    x: Tensor,
    h_pre: Tensor,
    needs: Sequence[bool],
    input_norm_weight: Tensor | None,
    *,
    input_norm_eps: float,
) -> tuple[Tensor, ...]:
    return fake_gradients((d_out, h_pre, input_norm_weight), needs, x, streams=())


def _with_streams(
    results: Sequence[Tensor], saved: Sequence[Tensor], needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradient of x in the place of that of u, by `aggregate_backward`: fusions know that operator."""
    du, *rest = results
    dx = torch.ops.mhc.aggregate_backward(du, *saved, [True, False])[0] if needs[0] else None
    return dx, *rest


differentiate(
    define(
        "aggregate_and_norm",
        "(Tensor x, Tensor h_pre, Tensor? input_norm_weight=None, *, float input_norm_eps,"
        " ScalarType? out_dtype=None) -> Tensor",
        check=_check,
        reference=_reference,
        fake=_fake,
        kernel="aggregate_and_norm.forward",
    ),
    define(
        "aggregate_and_norm_backward",
        "(Tensor d_out, Tensor x, Tensor h_pre, bool[] needs, Tensor? input_norm_weight=None, *,"
        " float input_norm_eps) -> (Tensor, Tensor, Tensor)",
        check=_check_backward,
        reference=_reference_backward,
        fake=_fake_backward,
        kernel="aggregate_and_norm.backward",
    ),
    keep=lambda inputs, output: inputs,
    tensors=3,
    drop=("out_dtype",),
    last="input_norm_weight",
    finish=_with_streams,
)
