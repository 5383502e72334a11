"""mhc::head, the learned collapse of the streams after the last layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.ops import _mix
from mhc_compile.ops._checks import check_out_dtype, check_tensor
from mhc_compile.ops._register import define, differentiate, scalars
from mhc_compile.ops._tensors import fake_gradients
from mhc_compile.ops.aggregate import reference as aggregate_reference


def head(
    x: Tensor,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None = None,
    *,
    rms_eps: float = 1e-6,
    rms_mode: str = "inside",
    pre_eps: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The streams collapsed by gates of their own: `generate_mix_and_aggregate` with the part pre only.

        h_pre = sigmoid(r * h * scale + bias) + pre_eps;  out = sum_i h_pre[i] * x[i]

    An unweighted mean is `contract`.

    Args:
        x: [..., n, C], bfloat16, float16, float32 or float64.
        phi: [n, n*C].
        scale: [n] or [1].
        bias: [n].
        norm_weight: [n*C], the weight of an affine RMSNorm.
        rms_*, pre_eps: the forms `Rms` and `Gates` of `mhc_compile.forms`.
        out_dtype: the dtype of the result; None means that of x.

        Parameters have any floating dtype, float64 only together with float64 x.

    Returns:
        [..., C].

    Raises:
        TypeError, ValueError: an argument has an unexpected dtype, shape, device or value.

    Source: arXiv 2512.24880, the pre part of equations 14 to 17, applied as H_pre x of equation 3;
    DeepSeek-V4 models end with it.
    """
    out: Tensor
    out, _, _ = torch.ops.mhc.head(
        x,
        phi,
        scale,
        bias,
        norm_weight,
        rms_eps=rms_eps,
        rms_mode=rms_mode,
        pre_eps=pre_eps,
        out_dtype=out_dtype,
    )
    return out


def _parts(rms: Rms, pre_eps: float) -> dict[str, Any]:
    return {"rms": rms, "gates": Gates(pre_eps=pre_eps), "sinkhorn": Sinkhorn()}


def _check_rows(x: Tensor, phi: Tensor) -> None:
    if phi.shape[0] != x.shape[-2]:
        raise ValueError(f"phi has K = {phi.shape[0]} rows; with n = {x.shape[-2]} streams expected K = n")


def _check(x: Tensor, phi: Tensor, *narrow: Any, rms: Rms, pre_eps: float, out_dtype: torch.dtype | None) -> None:
    _mix.check_mix(x, phi, *narrow, **_parts(rms, pre_eps))
    _check_rows(x, phi)
    check_out_dtype(out_dtype, x)


def reference(
    x: Tensor,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    *,
    rms: Rms,
    pre_eps: float,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator in plain torch: its meaning, and its implementation where there is no kernel."""
    h_pre, _, _, h, ms = _mix.forward(x, phi, scale, bias, norm_weight, **_parts(rms, pre_eps))
    return aggregate_reference(x, h_pre, out_dtype=out_dtype), h, ms


def _fake(
    x: Tensor,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    *,
    out_dtype: torch.dtype | None,
    **forms: Any,
) -> tuple[Tensor, ...]:
    out = x.new_empty((*x.shape[:-2], x.shape[-1]), dtype=out_dtype or x.dtype)
    return (out, *_mix.fake_forward(x, phi, bias)[3:])


def _check_backward(
    d_out: Tensor | None, d_h: Tensor | None, d_ms: Tensor | None, *rest: Any, rms: Rms, pre_eps: float
) -> None:
    x, phi = rest[:2]
    _mix.check_mix_backward(None, None, d_h, d_ms, *rest, **_parts(rms, pre_eps))
    _check_rows(x, phi)
    check_tensor("d_out", d_out, (*x.shape[:-2], x.shape[-1]), "[..., C]", x)


def _reference_backward(
    d_out: Tensor | None, d_h: Tensor | None, d_ms: Tensor | None, *rest: Any, rms: Rms, pre_eps: float
) -> tuple[Tensor, ...]:
    return _mix.backward(d_out, None, None, None, d_h, d_ms, *rest, **_parts(rms, pre_eps))


def _fake_backward(*arguments: Any, **forms: Any) -> tuple[Tensor, ...]:
    x, phi, scale, bias, norm_weight, _, _, needs, _ = arguments[3:]
    return fake_gradients((x, phi, scale, bias, norm_weight), needs, x)


differentiate(
    define(
        "head",
        f"({_mix.ARGUMENTS}=None, *, {scalars('rms')}, float pre_eps=0.0, ScalarType? out_dtype=None)"
        " -> (Tensor, Tensor, Tensor)",
        forms=("rms",),
        check=_check,
        reference=reference,
        fake=_fake,
        kernel="head.forward",
    ),
    define(
        "head_backward",
        f"(Tensor? d_out, Tensor? d_h, Tensor? d_ms, {_mix.SAVED}, *, {scalars('rms')}, float pre_eps=0.0)"
        f" -> {_mix.GRADIENTS}",
        forms=("rms",),
        check=_check_backward,
        reference=_reference_backward,
        fake=_fake_backward,
        kernel="head.backward",
    ),
    keep=_mix.saved,
    tensors=5,
    drop=("out_dtype",),
    reaches={1: (0, 1), 2: (0,), 3: (0,), 4: (0, 1)},
)
