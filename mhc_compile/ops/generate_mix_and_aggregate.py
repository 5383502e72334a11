"""mhc::generate_mix_and_aggregate, everything before a sublayer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.ops import _input_norm, _mix
from mhc_compile.ops._checks import check_all_make_gates, check_out_dtype, check_tensor
from mhc_compile.ops._register import define, differentiate, scalars
from mhc_compile.ops._tensors import fake_gradients, settle_gradient
from mhc_compile.ops.aggregate import reference as aggregate_reference


def generate_mix_and_aggregate(
    x: Tensor,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None = None,
    input_norm_weight: Tensor | None = None,
    *,
    rms_eps: float = 1e-6,
    rms_mode: str = "inside",
    pre_eps: float = 0.0,
    post_mult: float = 2.0,
    post_eps: float = 0.0,
    sinkhorn_steps: int = 39,
    sinkhorn_start: str = "softmax",
    sinkhorn_first: str = "columns",
    sinkhorn_eps: float = 1e-6,
    sinkhorn_start_eps: float = 1e-6,
    sinkhorn_clamp: bool = False,
    input_norm_eps: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`generate_mix` and `aggregate` in one: a sublayer's input, and the mixes for `expand_combine` after.

        h_pre, h_post, h_res = generate_mix(x, phi, scale, bias, norm_weight)
        layer_input = sum_i h_pre[i] * x[i]

    With input_norm_eps the sublayer's own RMSNorm follows:

        layer_input = input_norm_weight * u / sqrt(mean(u^2) + input_norm_eps),  u = sum_i h_pre[i] * x[i]

    Args:
        x: [..., n, C], bfloat16, float16, float32 or float64.
        phi: [K, n*C], K = n (pre), 2*n (pre, post) or n*n + 2*n (pre, post, res; row 2*n + i*n + o is
            res[i, o]).
        scale: [K], or one entry for each of these groups.
        bias: [K].
        norm_weight: [n*C], the weight of an affine RMSNorm of the streams.
        input_norm_weight: [C], the weight of the RMSNorm of layer_input; None leaves it out.
        rms_*, pre_eps, post_*, sinkhorn_*: the forms `Rms`, `Gates`, `Sinkhorn` of `mhc_compile.forms`.
        input_norm_eps: eps of the RMSNorm of layer_input; None means that there is no such norm.
        out_dtype: the dtype of layer_input; None means that of x.

        Parameters have any floating dtype, float64 only together with float64 x.

    Returns:
        layer_input [..., C]; h_post [..., n] and h_res [..., n, n], float32 (float64 for float64 x). Parts
        that K does not hold come back without elements: [..., 0] and [..., 0, 0].

    Raises:
        TypeError, ValueError: an argument has an unexpected dtype, shape, device or value.

    Source: arXiv 2512.24880, H_pre x of equation 3 with equations 14 to 19.
    """
    layer_input, h_post, h_res, h, _ = torch.ops.mhc.generate_mix_and_aggregate(
        x,
        phi,
        scale,
        bias,
        norm_weight,
        input_norm_weight,
        rms_eps=rms_eps,
        rms_mode=rms_mode,
        pre_eps=pre_eps,
        post_mult=post_mult,
        post_eps=post_eps,
        sinkhorn_steps=sinkhorn_steps,
        sinkhorn_start=sinkhorn_start,
        sinkhorn_first=sinkhorn_first,
        sinkhorn_eps=sinkhorn_eps,
        sinkhorn_start_eps=sinkhorn_start_eps,
        sinkhorn_clamp=sinkhorn_clamp,
        input_norm_eps=input_norm_eps,
        out_dtype=out_dtype,
    )
    check_all_make_gates("generate_mix_and_aggregate", h.shape[-1], bias)
    return layer_input, h_post, h_res


def check_normed_mix(
    x: Tensor,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    input_norm_weight: Tensor | None,
    *,
    input_norm_eps: float | None,
    out_dtype: torch.dtype | None,
    **forms: Any,
) -> None:
    """Raise TypeError or ValueError for arguments that do not go together."""
    _mix.check_mix(x, phi, scale, bias, norm_weight, **forms)
    _input_norm.check_input_norm(input_norm_weight, input_norm_eps, x)
    check_out_dtype(out_dtype, x)


def reference(
    x: Tensor,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    input_norm_weight: Tensor | None,
    *,
    rms: Rms,
    gates: Gates,
    sinkhorn: Sinkhorn,
    input_norm_eps: float | None,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operator in plain torch: its meaning, and its implementation where there is no kernel."""
    h_pre, *rest = _mix.forward(x, phi, scale, bias, norm_weight, rms=rms, gates=gates, sinkhorn=sinkhorn)
    h_post, h_res, h, ms = rest
    norm = _input_norm.input_norm(input_norm_weight, input_norm_eps)
    if norm is None:
        layer_input = aggregate_reference(x, h_pre, out_dtype=out_dtype)
    else:
        layer_input = _input_norm.reference(x, h_pre, norm, out_dtype)
    return layer_input, h_post, h_res, h, ms


def _fake(
    x: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, *norms: Any, out_dtype: torch.dtype | None, **forms: Any
) -> tuple[Tensor, ...]:
    layer_input = x.new_empty((*x.shape[:-2], x.shape[-1]), dtype=out_dtype or x.dtype)
    return (layer_input, *_mix.fake_forward(x, phi, bias)[1:])


def check_normed_mix_backward(
    d_layer_input: Tensor | None,
    d_h_post: Tensor | None,
    d_h_res: Tensor | None,
    d_h: Tensor | None,
    d_ms: Tensor | None,
    x: Tensor,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    h: Tensor,
    ms: Tensor,
    needs: Sequence[bool],
    d_x: Tensor | None,
    input_norm_weight: Tensor | None,
    *,
    input_norm_eps: float | None,
    **forms: Any,
) -> None:
    """As `check_normed_mix`, for the gradients and what was saved."""
    _input_norm.check_flags(needs, input_norm_weight, 6)
    arguments = (x, phi, scale, bias, norm_weight, h, ms, needs[:5], d_x)
    _mix.check_mix_backward(d_h_post, d_h_res, d_h, d_ms, *arguments, **forms)
    check_tensor("d_layer_input", d_layer_input, (*x.shape[:-2], x.shape[-1]), "[..., C]", x)
    _input_norm.check_input_norm(input_norm_weight, input_norm_eps, x)


def reference_backward(
    d_layer_input: Tensor | None,
    d_h_post: Tensor | None,
    d_h_res: Tensor | None,
    *rest: Any,
    input_norm_eps: float | None,
    **forms: Any,
) -> tuple[Tensor, ...]:
    """The gradients of the six tensors in plain torch; dx begins with d_x."""
    *saved, needs, d_x, input_norm_weight = rest
    norm = _input_norm.input_norm(input_norm_weight, input_norm_eps)
    saved += [_input_norm.flags(needs, 6), d_x, norm]
    results = _mix.backward(d_layer_input, None, d_h_post, d_h_res, *saved, **forms)
    return results if norm is not None else (*results, settle_gradient(None, input_norm_weight, saved[2]))


def _fake_backward(*arguments: Any, **forms: Any) -> tuple[Tensor, ...]:
    *tensors, _, _, needs, _, input_norm_weight = arguments[5:]
    return fake_gradients((*tensors, input_norm_weight), _input_norm.flags(needs, 6), tensors[0])


_FORMS = ("rms", "gates", "sinkhorn")

differentiate(
    define(
        "generate_mix_and_aggregate",
        f"({_mix.ARGUMENTS}=None, {_input_norm.ARGUMENT}, *, {scalars(*_FORMS)}, {_input_norm.SCALAR},"
        " ScalarType? out_dtype=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        forms=_FORMS,
        check=check_normed_mix,
        reference=reference,
        fake=_fake,
        kernel="generate_mix_and_aggregate.forward",
    ),
    define(
        "generate_mix_and_aggregate_backward",
        "(Tensor? d_layer_input, Tensor? d_h_post, Tensor? d_h_res, Tensor? d_h, Tensor? d_ms,"
        f" {_mix.SAVED}, {_input_norm.ARGUMENT}, *, {scalars(*_FORMS)}, {_input_norm.SCALAR})"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        forms=_FORMS,
        check=check_normed_mix_backward,
        reference=reference_backward,
        fake=_fake_backward,
        kernel="generate_mix_and_aggregate.backward",
    ),
    keep=lambda inputs, output: (*inputs[:-1], *output[-2:], inputs[-1]),
    tensors=6,
    drop=("out_dtype",),
    last="input_norm_weight",
    reaches={**_mix.REACHES, 5: (0,)},
)
