"""mhc::boundary, everything between two sublayers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mhc_compile.ops import _input_norm, _mix
from mhc_compile.ops import expand_combine as combining
from mhc_compile.ops._checks import check_all_make_gates, check_out_dtype, check_tensor
from mhc_compile.ops._register import define, differentiate, scalars
from mhc_compile.ops._tensors import fake_gradients
from mhc_compile.ops.generate_mix_and_aggregate import check_normed_mix, check_normed_mix_backward
from mhc_compile.ops.generate_mix_and_aggregate import reference as mix_reference
from mhc_compile.ops.generate_mix_and_aggregate import reference_backward as mix_backward


def boundary(
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
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
    streams_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`expand_combine` after one sublayer and `generate_mix_and_aggregate` before the next.

        x' = expand_combine(f, layer_bias, h_post, x, h_res)
        layer_input, h_post', h_res' = generate_mix_and_aggregate(x', phi, scale, bias, norm_weight, input_norm_weight)

    Args:
        f, layer_bias, h_post, x, h_res: as in `expand_combine`.
        phi, scale, bias, norm_weight, input_norm_weight: as in `generate_mix_and_aggregate`, of the next sublayer.
        rms_*, pre_eps, post_*, sinkhorn_*: the forms `Rms`, `Gates`, `Sinkhorn` of `mhc_compile.forms`.
        input_norm_eps: eps of the RMSNorm of layer_input; None means that there is no such norm.
        streams_dtype: the dtype of x'; None means that of x.
        out_dtype: the dtype of layer_input; None means that of x'.

    Returns:
        x' [..., n, C], layer_input [..., C], h_post' [..., n] and h_res' [..., n, n]; parts that K does not hold
        come back without elements.

    Raises:
        TypeError, ValueError: an argument has an unexpected dtype, shape, device or value.

    Source: arXiv 2512.24880, equation 3 with equations 14 to 19 of the next sublayer.
    """
    x_new, layer_input, next_post, next_res, h, _ = torch.ops.mhc.boundary(
        f,
        layer_bias,
        h_post,
        x,
        h_res,
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
        streams_dtype=streams_dtype,
        out_dtype=out_dtype,
    )
    check_all_make_gates("boundary", h.shape[-1], bias)
    return x_new, layer_input, next_post, next_res


def _check(
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    *parameters: Any,
    streams_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    **forms: Any,
) -> None:
    combining.check(f, layer_bias, h_post, x, h_res)
    check_out_dtype(streams_dtype, x, "streams_dtype")
    check_normed_mix(x, *parameters, out_dtype=out_dtype, **forms)


def reference(
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    *parameters: Any,
    streams_dtype: torch.dtype | None,
    **scalars: Any,
) -> tuple[Tensor, ...]:
    """The operator in plain torch: its meaning, and its implementation where there is no kernel."""
    x_new = combining.reference(f, layer_bias, h_post, x, h_res, out_dtype=streams_dtype)
    mix = mix_reference(x_new, *parameters, **scalars)
    return x_new, *mix


def _fake(
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    *norms: Any,
    streams_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    **forms: Any,
) -> tuple[Tensor, ...]:
    x_new = combining.fake(f, layer_bias, h_post, x, h_res, out_dtype=streams_dtype)
    layer_input = x.new_empty((*x.shape[:-2], x.shape[-1]), dtype=out_dtype or x_new.dtype)
    return x_new, layer_input, *_mix.fake_forward(x_new, phi, bias)[1:]


def _check_backward(
    d_x_new: Tensor | None,
    d_layer_input: Tensor | None,
    d_next_post: Tensor | None,
    d_next_res: Tensor | None,
    d_h: Tensor | None,
    d_ms: Tensor | None,
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    x_new: Tensor,
    h: Tensor,
    ms: Tensor,
    needs: Sequence[bool],
    input_norm_weight: Tensor | None,
    *,
    input_norm_eps: float | None,
    **forms: Any,
) -> None:
    combining.check(f, layer_bias, h_post, x, h_res)
    _input_norm.check_flags(needs, input_norm_weight, 10)
    check_tensor("x_new", x_new, x.shape, "the shape of x", x)
    check_tensor("d_x_new", d_x_new, x.shape, "the shape of x", x)
    check_tensor("d_layer_input", d_layer_input, (*x.shape[:-2], x.shape[-1]), "[..., C]", x)
    tokens, n, parts = _mix.check_mix(x_new, phi, scale, bias, norm_weight, **forms)
    side = n if parts == 3 else 0
    check_tensor("d_next_post", d_next_post, (*tokens, n if parts > 1 else 0), "the shape of the next h_post", x)
    check_tensor("d_next_res", d_next_res, (*tokens, side, side), "the shape of the next h_res", x)
    saved = (x_new, phi, scale, bias, norm_weight, h, ms, needs[4:], None, input_norm_weight)
    check_normed_mix_backward(None, d_next_post, d_next_res, d_h, d_ms, *saved, input_norm_eps=input_norm_eps, **forms)


def _reference_backward(
    d_x_new: Tensor | None,
    d_layer_input: Tensor | None,
    d_next_post: Tensor | None,
    d_next_res: Tensor | None,
    d_h: Tensor | None,
    d_ms: Tensor | None,
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    x_new: Tensor,
    h: Tensor,
    ms: Tensor,
    needs: Sequence[bool],
    input_norm_weight: Tensor | None,
    **scalars: Any,
) -> tuple[Tensor, ...]:
    into_streams = any(needs[:5])
    gradients = (d_layer_input, d_next_post, d_next_res, d_h, d_ms)
    parameters = (phi, scale, bias, norm_weight)
    mix_needs = [into_streams, *needs[5:]]
    given = (mix_needs, d_x_new if into_streams else None, input_norm_weight)
    d_new, *d_parameters = mix_backward(*gradients, x_new, *parameters, h, ms, *given, **scalars)
    tensors = (f, layer_bias, h_post, x, h_res)
    if not into_streams:
        return (*fake_gradients(tensors, needs[:5], x), *d_parameters)
    return (*combining.reference_backward(d_new, *tensors, needs[:5], None), *d_parameters)


def _fake_backward(*arguments: Any, **forms: Any) -> tuple[Tensor, ...]:
    *tensors, _, _, _, needs, input_norm_weight = arguments[6:]
    return fake_gradients((*tensors, input_norm_weight), _input_norm.flags(needs, 10), tensors[3], streams=(0, 3))


_FORMS = ("rms", "gates", "sinkhorn")
_TENSORS = (
    "Tensor f, Tensor? layer_bias, Tensor h_post, Tensor x, Tensor? h_res, Tensor phi, Tensor scale, Tensor bias,"
    " Tensor? norm_weight"
)

differentiate(
    define(
        "boundary",
        f"({_TENSORS}=None, {_input_norm.ARGUMENT}, *, {scalars(*_FORMS)}, {_input_norm.SCALAR},"
        " ScalarType? streams_dtype=None, ScalarType? out_dtype=None)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        forms=_FORMS,
        check=_check,
        reference=reference,
        fake=_fake,
        kernel="boundary.forward",
    ),
    define(
        "boundary_backward",
        "(Tensor? d_x_new, Tensor? d_layer_input, Tensor? d_next_post, Tensor? d_next_res, Tensor? d_h,"
        f" Tensor? d_ms, {_TENSORS}, Tensor x_new, Tensor h, Tensor ms, bool[] needs, {_input_norm.ARGUMENT},"
        f" *, {scalars(*_FORMS)}, {_input_norm.SCALAR})"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        forms=_FORMS,
        check=_check_backward,
        reference=_reference_backward,
        fake=_fake_backward,
        kernel="boundary.backward",
    ),
    keep=lambda inputs, output: (*inputs[:-1], output[0], *output[-2:], inputs[-1]),
    tensors=10,
    drop=("streams_dtype", "out_dtype"),
    last="input_norm_weight",
    # As those of generate_mix_and_aggregate, after x_new.
    reaches={5: (1, 2, 3, 4), 6: (1, 2, 3), 7: (1, 2, 3), 8: (1, 2, 3, 4), 9: (1,)},
)
