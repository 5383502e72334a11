"""mhc::expand_combine_and_read, a write and what reads the new streams without gates of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mhc_compile.forms import as_projected, is_alone
from mhc_compile.ops._checks import accumulation_dtype, check_needs, check_out_dtype, check_tensor, shape_text
from mhc_compile.ops._register import define, differentiate
from mhc_compile.ops._tensors import fake_gradients, rows_of, settle_gradient, settle_streams, upcast
from mhc_compile.ops.aggregate import pre_gradient
from mhc_compile.ops.aggregate import reference as aggregate_reference
from mhc_compile.ops.aggregate import reference_backward as aggregate_backward
from mhc_compile.ops.expand_combine import check as check_combine
from mhc_compile.ops.expand_combine import fake as fake_combine
from mhc_compile.ops.expand_combine import reference as combine_reference
from mhc_compile.ops.expand_combine import reference_backward as combine_backward
from mhc_compile.ops.projection import check_phi
from mhc_compile.ops.projection import gradients as projection_gradients
from mhc_compile.ops.projection import reference as projection_reference


def expand_combine_and_read(
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    h_pre: Tensor | None = None,
    phi: Tensor | None = None,
    norm_weight: Tensor | None = None,
    *,
    streams_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`expand_combine`, and of the streams that it returns `aggregate`, `projection` or both.

        x' = expand_combine(f, layer_bias, h_post, x, h_res)
        layer_input = aggregate(x', h_pre)
        h, ms = projection(x', phi, norm_weight)

    If phi has C columns, it is applied to each stream alone, as in arXiv 2409.19606:

        h[..., i, :], ms[..., i] = projection(x'[..., [i], :], phi, norm_weight)

    Neither waits for gates that are made of x'. So one pass that makes x' also makes what reads it. Gates that no
    operator makes have their own program after h and ms, and gates that are parameters need no h at all.

    Args:
        f, layer_bias, h_post, x, h_res: as in `expand_combine`.
        h_pre: [..., n], as in `aggregate`; None for no layer_input.
        phi, norm_weight: as in `projection`, phi [K, n*C] and norm_weight [n*C], or [K, C] and [C] for each stream
            alone; None for no h and ms.
        streams_dtype: the dtype of x'; None means that of x.
        out_dtype: the dtype of layer_input; None means that of x'.

    Returns:
        x' [..., n, C], layer_input [..., C], h [..., K] and ms [...], or h [..., n, K] and ms [..., n] of each stream.
        Without h_pre, layer_input has the shape [..., 0]; without phi, h and ms have.

    Raises:
        TypeError, ValueError: an argument has an unexpected dtype, shape or device, or neither h_pre nor phi is given.

    Source: equations 3, 14 and 15 of arXiv 2512.24880; for streams alone, section 2.2 of arXiv 2409.19606.
    """
    result: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.mhc.expand_combine_and_read(
        f, layer_bias, h_post, x, h_res, h_pre, phi, norm_weight, streams_dtype=streams_dtype, out_dtype=out_dtype
    )
    return result


def _check(
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    h_pre: Tensor | None,
    phi: Tensor | None,
    norm_weight: Tensor | None,
    *,
    streams_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> None:
    check_combine(f, layer_bias, h_post, x, h_res)
    check_out_dtype(streams_dtype, x, "streams_dtype")
    check_out_dtype(out_dtype, x)
    check_tensor("h_pre", h_pre, x.shape[:-1], "[..., n]", x)
    if h_pre is None and phi is None:
        raise ValueError("neither h_pre nor phi was given; expected one of them, or both")
    if phi is not None:
        n, width = x.shape[-2:]
        if phi.dim() == 2 and phi.shape[1] not in (n * width, width):
            raise ValueError(
                f"phi has shape {shape_text(phi.shape)}; expected [K, n*C] = [K, {n * width}], or [K, C] = [K, {width}]"
                f" for each stream alone, for x [..., n, C] of shape {shape_text(x.shape)}"
            )
        check_phi(as_projected(x, phi), phi, None)
        check_tensor("norm_weight", norm_weight, phi.shape[1:], "[C]" if is_alone(x, phi) else "[n*C]", x)
    elif norm_weight is not None:
        raise ValueError("norm_weight was given without phi; expected both, or None for both")


def reference(
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    h_pre: Tensor | None,
    phi: Tensor | None,
    norm_weight: Tensor | None,
    *,
    streams_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:
    """The operator in plain torch: its meaning, and its implementation where there is no kernel."""
    x_new = combine_reference(f, layer_bias, h_post, x, h_res, out_dtype=streams_dtype)
    layer_input, h, ms = empty_reads(x_new, h_pre, phi, out_dtype)
    if h_pre is not None:
        layer_input = aggregate_reference(x_new, h_pre, out_dtype=out_dtype)
    if phi is not None:
        h, ms = projection_reference(as_projected(x_new, phi), phi, norm_weight)
    return x_new, layer_input, h, ms


def empty_reads(
    x_new: Tensor, h_pre: Tensor | None, phi: Tensor | None, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """layer_input, h and ms of the new streams, their elements left open."""
    tokens, width, dtype = x_new.shape[:-2], x_new.shape[-1], accumulation_dtype(x_new)
    layer_input = x_new.new_empty((*tokens, 0 if h_pre is None else width), dtype=out_dtype or x_new.dtype)
    rows, means = shapes_of_projection(x_new, phi)
    return layer_input, x_new.new_empty(rows, dtype=dtype), x_new.new_empty(means, dtype=dtype)


def shapes_of_projection(x: Tensor, phi: Tensor | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of h and ms."""
    if phi is None:
        return (*x.shape[:-2], 0), (*x.shape[:-2], 0)
    tokens = as_projected(x, phi).shape[:-2]
    return (*tokens, phi.shape[0]), tuple(tokens)


def _fake(
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    h_pre: Tensor | None,
    phi: Tensor | None,
    norm_weight: Tensor | None,
    *,
    streams_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:
    x_new = fake_combine(f, layer_bias, h_post, x, h_res, out_dtype=streams_dtype)
    return x_new, *empty_reads(x_new, h_pre, phi, out_dtype)


def _check_backward(
    d_x_new: Tensor | None,
    d_layer_input: Tensor | None,
    d_h: Tensor | None,
    d_ms: Tensor | None,
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    h_pre: Tensor | None,
    phi: Tensor | None,
    norm_weight: Tensor | None,
    x_new: Tensor,
    needs: Sequence[bool],
) -> None:
    _check(f, layer_bias, h_post, x, h_res, h_pre, phi, norm_weight)
    check_needs(needs, 8)
    check_tensor("x_new", x_new, x.shape, "the shape of x", x)
    check_tensor("d_x_new", d_x_new, x.shape, "the shape of x", x)
    tokens = x.shape[:-2]
    check_tensor("d_layer_input", d_layer_input, (*tokens, 0 if h_pre is None else x.shape[-1]), "[..., C]", x)
    rows, means = shapes_of_projection(x, phi)
    each = "..., n" if phi is not None and is_alone(x, phi) else "..."
    check_tensor("d_h", d_h, rows, f"[{each}, K]", x)
    check_tensor("d_ms", d_ms, means, f"[{each}]", x)


def _reference_backward(
    d_x_new: Tensor | None,
    d_layer_input: Tensor | None,
    d_h: Tensor | None,
    d_ms: Tensor | None,
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    h_pre: Tensor | None,
    phi: Tensor | None,
    norm_weight: Tensor | None,
    x_new: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    into, dtype = any(needs[:5]), accumulation_dtype(x)
    d_new, d_pre, dphi, dnorm_weight = d_x_new, None, None, None
    if phi is not None:
        streams, aggregated = as_projected(x_new, phi), None
        if h_pre is not None and d_layer_input is not None:
            d_pre = pre_gradient(d_layer_input, x_new) if needs[5] else None
            gates, d_out = h_pre, d_layer_input
            if is_alone(x_new, phi):
                gates, d_out = h_pre.unsqueeze(-1), d_layer_input.unsqueeze(-2).expand(x_new.shape)
            aggregated = (upcast(rows_of(gates), dtype), rows_of(d_out))
        tokens = streams.shape[:-2].numel()
        dh = x.new_zeros((tokens, phi.shape[0]), dtype=dtype) if d_h is None else upcast(rows_of(d_h), dtype)
        dms = None if d_ms is None else upcast(d_ms.reshape(tokens), dtype)
        wide, d_x = (into, needs[6], needs[7]), as_projected(d_x_new, phi) if into and d_x_new is not None else None
        dx, dphi, dnorm_weight = projection_gradients(dh, dms, streams, phi, norm_weight, wide, d_x, aggregated)
        d_new = settle_streams(dx, x_new)
    elif h_pre is not None and d_layer_input is not None:
        read = aggregate_backward(d_layer_input, x_new, h_pre, (into, needs[5]), d_x_new if into else None)
        d_new, d_pre = read[0], read[1] if needs[5] else None
    if d_pre is None and needs[5] and h_pre is not None:
        d_pre = torch.zeros_like(h_pre)
    narrow = (
        settle_gradient(d_pre, h_pre, x),
        settle_gradient(dphi, phi, x),
        settle_gradient(dnorm_weight, norm_weight, x),
    )
    tensors = (f, layer_bias, h_post, x, h_res)
    if not into:
        return (*fake_gradients(tensors, needs[:5], x), *narrow)
    d_new = torch.zeros_like(x_new) if d_new is None else d_new
    return (*combine_backward(d_new, *tensors, needs[:5], None), *narrow)


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    *tensors, _, needs = arguments[4:]
    return fake_gradients(tensors, needs, tensors[3], streams=(0, 3))


_TENSORS = "Tensor f, Tensor? layer_bias, Tensor h_post, Tensor x, Tensor? h_res"

differentiate(
    define(
        "expand_combine_and_read",
        f"({_TENSORS}, Tensor? h_pre=None, Tensor? phi=None, Tensor? norm_weight=None, *,"
        " ScalarType? streams_dtype=None, ScalarType? out_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)",
        check=_check,
        reference=reference,
        fake=_fake,
        kernel="expand_combine_and_read.forward",
    ),
    define(
        "expand_combine_and_read_backward",
        "(Tensor? d_x_new, Tensor? d_layer_input, Tensor? d_h, Tensor? d_ms,"
        f" {_TENSORS}, Tensor? h_pre, Tensor? phi, Tensor? norm_weight, Tensor x_new, bool[] needs)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        check=_check_backward,
        reference=_reference_backward,
        fake=_fake_backward,
        kernel="expand_combine_and_read.backward",
    ),
    keep=lambda inputs, output: (*inputs, output[0]),
    tensors=8,
    drop=("streams_dtype", "out_dtype"),
    # h_pre has a part in the read alone, phi and norm_weight in h.
    reaches={5: (1,), 6: (2,), 7: (2,)},
)
