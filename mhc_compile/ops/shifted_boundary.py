"""mhc::shifted_boundary, everything between two sublayers whose reads come one sublayer after their gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mhc_compile.ops import _mix
from mhc_compile.ops._checks import check_all_make_gates, check_needs, check_out_dtype, check_tensor
from mhc_compile.ops._register import define, differentiate, scalars
from mhc_compile.ops._tensors import fake_gradients, settle_gradient
from mhc_compile.ops.aggregate import pre_gradient
from mhc_compile.ops.aggregate import reference as aggregate_reference
from mhc_compile.ops.expand_combine import check
from mhc_compile.ops.expand_combine import fake as fake_combine
from mhc_compile.ops.expand_combine import reference as combine_reference
from mhc_compile.ops.expand_combine import reference_backward as combine_backward


def shifted_boundary(
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    h_pre: Tensor,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None = None,
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
    streams_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`expand_combine`, `aggregate` with gates from the previous boundary, and `generate_mix` for the next boundaries.

        x' = expand_combine(f, layer_bias, h_post, x, h_res)
        layer_input = aggregate(x', h_pre)
        h_pre', h_post', h_res' = generate_mix(x', phi, scale, bias, norm_weight)

    After the sublayer that reads layer_input, h_post' and h_res' write into x', and h_pre' reads what this write makes.
    No read waits for gates of its own streams, so one pass makes x', layer_input and the projection.

    Args:
        f, layer_bias, h_post, x, h_res: as in `expand_combine`.
        h_pre: [..., n], any floating dtype; float64 only together with float64 x.
        phi, scale, bias, norm_weight: as in `generate_mix`, of the next sublayer.
        rms_*, pre_eps, post_*, sinkhorn_*: the forms `Rms`, `Gates`, `Sinkhorn` of `mhc_compile.forms`.
        streams_dtype: the dtype of x'; None means that of x.
        out_dtype: the dtype of layer_input; None means that of x'.

    Returns:
        x' [..., n, C], layer_input [..., C], h_pre' [..., n], h_post' [..., n] and h_res' [..., n, n]; parts that K
        does not hold come back without elements.

    Raises:
        TypeError, ValueError: an argument has an unexpected dtype, shape, device or value.

    Source: the single-pass order of Megatron-LM (`mhc_single_pass`), with equations 3 and 14 to 19 of arXiv 2512.24880.
    """
    x_new, layer_input, next_pre, next_post, next_res, h, _ = torch.ops.mhc.shifted_boundary(
        f,
        layer_bias,
        h_post,
        x,
        h_res,
        h_pre,
        phi,
        scale,
        bias,
        norm_weight,
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
        streams_dtype=streams_dtype,
        out_dtype=out_dtype,
    )
    check_all_make_gates("shifted_boundary", h.shape[-1], bias)
    return x_new, layer_input, next_pre, next_post, next_res


def _check(
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    h_pre: Tensor,
    *parameters: Any,
    streams_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    **forms: Any,
) -> None:
    check(f, layer_bias, h_post, x, h_res)
    check_tensor("h_pre", h_pre, x.shape[:-1], "[..., n]", x)
    check_out_dtype(streams_dtype, x, "streams_dtype")
    check_out_dtype(out_dtype, x)
    _mix.check_mix(x, *parameters, **forms)


def reference(
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    h_pre: Tensor,
    *parameters: Any,
    streams_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    **forms: Any,
) -> tuple[Tensor, ...]:
    """The operator in plain torch: its meaning, and its implementation where there is no kernel."""
    x_new = combine_reference(f, layer_bias, h_post, x, h_res, out_dtype=streams_dtype)
    return x_new, aggregate_reference(x_new, h_pre, out_dtype=out_dtype), *_mix.forward(x_new, *parameters, **forms)


def _fake(
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    h_pre: Tensor,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    *,
    streams_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    **forms: Any,
) -> tuple[Tensor, ...]:
    x_new = fake_combine(f, layer_bias, h_post, x, h_res, out_dtype=streams_dtype)
    layer_input = x.new_empty((*x.shape[:-2], x.shape[-1]), dtype=out_dtype or x_new.dtype)
    return x_new, layer_input, *_mix.fake_forward(x_new, phi, bias)


def _check_backward(
    d_x_new: Tensor | None,
    d_layer_input: Tensor | None,
    d_next_pre: Tensor | None,
    d_next_post: Tensor | None,
    d_next_res: Tensor | None,
    d_h: Tensor | None,
    d_ms: Tensor | None,
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    h_pre: Tensor,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    x_new: Tensor,
    h: Tensor,
    ms: Tensor,
    needs: Sequence[bool],
    **forms: Any,
) -> None:
    check(f, layer_bias, h_post, x, h_res)
    check_needs(needs, 10)
    check_tensor("h_pre", h_pre, x.shape[:-1], "[..., n]", x)
    check_tensor("x_new", x_new, x.shape, "the shape of x", x)
    check_tensor("d_x_new", d_x_new, x.shape, "the shape of x", x)
    check_tensor("d_layer_input", d_layer_input, (*x.shape[:-2], x.shape[-1]), "[..., C]", x)
    check_tensor("d_next_pre", d_next_pre, x.shape[:-1], "[..., n]", x)
    tokens, n, parts = _mix.check_mix(x_new, phi, scale, bias, norm_weight, **forms)
    side = n if parts == 3 else 0
    check_tensor("d_next_post", d_next_post, (*tokens, n if parts > 1 else 0), "the shape of the next h_post", x)
    check_tensor("d_next_res", d_next_res, (*tokens, side, side), "the shape of the next h_res", x)
    saved = (x_new, phi, scale, bias, norm_weight, h, ms, needs[5:], None)
    _mix.check_mix_backward(d_next_post, d_next_res, d_h, d_ms, *saved, **forms)


def _reference_backward(
    d_x_new: Tensor | None,
    d_layer_input: Tensor | None,
    d_next_pre: Tensor | None,
    d_next_post: Tensor | None,
    d_next_res: Tensor | None,
    d_h: Tensor | None,
    d_ms: Tensor | None,
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    h_pre: Tensor,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    x_new: Tensor,
    h: Tensor,
    ms: Tensor,
    needs: Sequence[bool],
    **forms: Any,
) -> tuple[Tensor, ...]:
    into_streams = any(needs[:5])
    mix_needs, d_x = [into_streams, *needs[6:]], d_x_new if into_streams else None
    gates = (d_next_pre, d_next_post, d_next_res, d_h, d_ms)
    parameters = (phi, scale, bias, norm_weight)
    d_new, *d_parameters = _mix.backward(
        d_layer_input, *gates, x_new, *parameters, h, ms, mix_needs, d_x, read_with=h_pre, **forms
    )
    d_pre = None
    if needs[5]:
        d_pre = h_pre.new_zeros(h_pre.shape) if d_layer_input is None else pre_gradient(d_layer_input, x_new)
    narrow = (settle_gradient(d_pre, h_pre, x), *d_parameters)
    tensors = (f, layer_bias, h_post, x, h_res)
    if not into_streams:
        return (*fake_gradients(tensors, needs[:5], x), *narrow)
    return (*combine_backward(d_new, *tensors, needs[:5], None), *narrow)


def _fake_backward(*arguments: Any, **forms: Any) -> tuple[Tensor, ...]:
    *tensors, _, _, _, needs = arguments[7:]
    return fake_gradients(tensors, needs, tensors[3], streams=(0, 3))


_FORMS = ("rms", "gates", "sinkhorn")
_TENSORS = (
    "Tensor f, Tensor? layer_bias, Tensor h_post, Tensor x, Tensor? h_res, Tensor h_pre, Tensor phi, Tensor scale,"
    " Tensor bias, Tensor? norm_weight"
)

differentiate(
    define(
        "shifted_boundary",
        f"({_TENSORS}=None, *, {scalars(*_FORMS)}, ScalarType? streams_dtype=None, ScalarType? out_dtype=None)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        forms=_FORMS,
        check=_check,
        reference=reference,
        fake=_fake,
        kernel="shifted_boundary.forward",
    ),
    define(
        "shifted_boundary_backward",
        "(Tensor? d_x_new, Tensor? d_layer_input, Tensor? d_next_pre, Tensor? d_next_post, Tensor? d_next_res,"
        f" Tensor? d_h, Tensor? d_ms, {_TENSORS}, Tensor x_new, Tensor h, Tensor ms, bool[] needs,"
        f" *, {scalars(*_FORMS)})"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        forms=_FORMS,
        check=_check_backward,
        reference=_reference_backward,
        fake=_fake_backward,
        kernel="shifted_boundary.backward",
    ),
    keep=lambda inputs, output: (*inputs, output[0], *output[-2:]),
    tensors=10,
    drop=("streams_dtype", "out_dtype"),
    # h_pre has a part in the read alone; the mix's parameters in its gates and h.
    reaches={5: (1,), 6: (2, 3, 4, 5), 7: (2, 3, 4), 8: (2, 3, 4), 9: (2, 3, 4, 5)},
)
