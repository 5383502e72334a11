"""What generate_mix, generate_mix_and_aggregate and head share: one check, one forward, one backward.

They are the same computation with parts switched off: by the rows that have gates (no residual part, no post part), and
by which of h_pre and the aggregated streams is returned.

Rows of phi beyond those with entries in bias have no gates. h has their products, which a program makes gates of its
own of, and d_h their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.ops._checks import (
    accumulation_dtype,
    check_accumulated,
    check_gate_rows,
    check_gates,
    check_needs,
    check_rms,
    check_sinkhorn,
    check_tensor,
)
from mhc_compile.ops._input_norm import InputNorm
from mhc_compile.ops._input_norm import backward as norm_backward
from mhc_compile.ops._tensors import rows_of, settle_gradient, settle_streams, upcast
from mhc_compile.ops.aggregate import pre_gradient
from mhc_compile.ops.projection import check_phi
from mhc_compile.ops.projection import gradients as projection_gradients
from mhc_compile.ops.projection import reference as projection_reference
from mhc_compile.ops.scale import gradients as scale_gradients
from mhc_compile.ops.scale import reference as scale_reference
from mhc_compile.ops.sinkhorn import gradient as sinkhorn_gradient
from mhc_compile.ops.sinkhorn import reference as sinkhorn_reference


def check_mix(
    x: Tensor,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    *,
    rms: Rms,
    gates: Gates,
    sinkhorn: Sinkhorn,
) -> tuple[tuple[int, ...], int, int]:
    """Returns the token dimensions, n, and how many of the parts pre, post, res there are."""
    tokens, n, k = check_phi(x, phi, norm_weight)
    parts = check_gate_rows(scale, bias, k, n, x)
    check_rms(rms)
    check_gates(gates)
    check_sinkhorn(sinkhorn)
    return tokens, n, parts


def check_mix_backward(
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
    *,
    rms: Rms,
    gates: Gates,
    sinkhorn: Sinkhorn,
) -> int:
    """Returns how many of the parts pre, post, res there are."""
    tokens, n, parts = check_mix(x, phi, scale, bias, norm_weight, rms=rms, gates=gates, sinkhorn=sinkhorn)
    side = n if parts == 3 else 0
    check_tensor("d_h_post", d_h_post, (*tokens, n if parts > 1 else 0), "the shape of h_post", x)
    check_tensor("d_h_res", d_h_res, (*tokens, side, side), "the shape of h_res", x)
    for prefix, of_h, of_ms in (("d_", d_h, d_ms), ("", h, ms)):
        check_tensor(f"{prefix}h", of_h, (*tokens, phi.shape[0]), "[..., K]", x)
        check_tensor(f"{prefix}ms", of_ms, tokens, "[...]", x)
    check_needs(needs, 5)
    check_accumulated(d_x, x, needs[0])
    return parts


Narrow = tuple[Tensor, Tensor, Tensor]
NarrowGradients = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def narrow_forward(
    h: Tensor, ms: Tensor, scale: Tensor, bias: Tensor, n: int, *, rms: Rms, gates: Gates, sinkhorn: Sinkhorn
) -> Narrow:
    """h_pre, h_post, h_res of a projection."""
    h_pre, h_post, logits = scale_reference(h, ms, scale, bias, n, rms=rms, gates=gates)
    return h_pre, h_post, sinkhorn_reference(logits, sinkhorn=sinkhorn)


def narrow_backward(
    d_layer_input: Tensor | None,
    d_h_pre: Tensor | None,
    d_h_post: Tensor | None,
    d_h_res: Tensor | None,
    x: Tensor,
    h: Tensor,
    ms: Tensor,
    scale: Tensor,
    bias: Tensor,
    needs: Sequence[bool],
    *,
    rms: Rms,
    gates: Gates,
    sinkhorn: Sinkhorn,
) -> NarrowGradients:
    """h_pre [..., n]; dh [M, K], dms [M], dscale and dbias; at most one of d_layer_input and d_h_pre is given."""
    n = x.shape[-2]
    h_pre, _, logits = scale_reference(h, ms, scale, bias, n, rms=rms, gates=gates)
    d_pre = d_res = None
    if d_layer_input is not None:
        d_pre = pre_gradient(d_layer_input, x)
    elif d_h_pre is not None:
        d_pre = rows_of(d_h_pre)
    if d_h_res is not None:
        d_res = rows_of(sinkhorn_gradient(d_h_res, logits, sinkhorn=sinkhorn).flatten(-2))
    d_post = None if d_h_post is None else rows_of(d_h_post)
    return h_pre, *scale_gradients(d_pre, d_post, d_res, h, ms, scale, bias, n, needs, rms=rms, gates=gates)


def behind_norm(
    norm: InputNorm,
    d_layer_input: Tensor | None,
    x: Tensor,
    h: Tensor,
    ms: Tensor,
    scale: Tensor,
    bias: Tensor,
    need_weight: bool,
    *,
    rms: Rms,
    gates: Gates,
    sinkhorn: Sinkhorn,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """d h_pre, the gradient [M, C] of what the norm reads, and that of its weight, from that of layer_input."""
    if d_layer_input is None:
        return None, None, torch.zeros_like(norm.weight) if need_weight and norm.weight is not None else None
    h_pre = scale_reference(h, ms, scale, bias, x.shape[-2], rms=rms, gates=gates)[0]
    return norm_backward(norm, d_layer_input, x, h_pre, need_weight)


def forward(
    x: Tensor,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    **forms: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """h_pre, h_post, h_res, h, ms."""
    h, ms = projection_reference(x, phi, norm_weight)
    return *narrow_forward(h, ms, scale, bias, x.shape[-2], **forms), h, ms


def fake_forward(x: Tensor, phi: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, n, rows, dtype = x.shape[:-2], x.shape[-2], bias.shape[0], accumulation_dtype(x)
    side = n if rows > 2 * n else 0
    return (
        x.new_empty((*tokens, n), dtype=dtype),
        x.new_empty((*tokens, n if rows > n else 0), dtype=dtype),
        x.new_empty((*tokens, side, side), dtype=dtype),
        x.new_empty((*tokens, phi.shape[0]), dtype=dtype),
        x.new_empty(tokens, dtype=dtype),
    )


def backward(
    d_layer_input: Tensor | None,
    d_h_pre: Tensor | None,
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
    input_norm: InputNorm | None = None,
    read_with: Tensor | None = None,
    **forms: Any,
) -> tuple[Tensor, ...]:
    """dx (+ d_x), dphi, dscale, dbias, dnorm_weight; at most one of d_layer_input and d_h_pre is given.

    With an input norm the gradient of its weight follows, and needs has a flag more. read_with: the gates [..., n] that
    made layer_input in place of h_pre; both gradients may be given then.
    """
    wide = needs[0] or needs[1] or needs[4]
    narrow_needs = (wide, needs[0], needs[2], needs[3])
    d_rows = None if d_layer_input is None else rows_of(d_layer_input)
    d_weight = None
    if input_norm is not None:
        d_h_pre, d_rows, d_weight = behind_norm(input_norm, d_layer_input, x, h, ms, scale, bias, needs[5], **forms)
    if input_norm is not None or read_with is not None:
        d_layer_input = None
    gradients = (d_layer_input, d_h_pre, d_h_post, d_h_res)
    h_pre, dh, dms, dscale, dbias = narrow_backward(*gradients, x, h, ms, scale, bias, narrow_needs, **forms)
    dx = dphi = dnorm_weight = None
    if dh is not None:
        dh = dh if d_h is None else dh + rows_of(d_h)
        dms = dms if d_ms is None or dms is None else dms + d_ms.reshape(-1)
        wide_needs = (needs[0], needs[1], needs[4])
        read = h_pre if read_with is None else upcast(read_with, dh.dtype)
        aggregated = None if d_rows is None else (rows_of(read), d_rows)
        dx, dphi, dnorm_weight = projection_gradients(dh, dms, x, phi, norm_weight, wide_needs, d_x, aggregated)
    results = (
        settle_streams(dx, x),
        settle_gradient(dphi, phi, x),
        settle_gradient(dscale, scale, x),
        settle_gradient(dbias, bias, x),
        settle_gradient(dnorm_weight, norm_weight, x),
    )
    return results if input_norm is None else (*results, settle_gradient(d_weight, input_norm.weight, x))


def saved(inputs: tuple[Tensor | None, ...], output: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """The inputs, and h and ms, so that the backward does not read x once more for them."""
    return (*inputs, *output[-2:])


# Which outputs phi, scale, bias and norm_weight have a part in: the gates, or the layer input, and h.
REACHES = {1: (0, 1, 2, 3), 2: (0, 1, 2), 3: (0, 1, 2), 4: (0, 1, 2, 3)}
ARGUMENTS = "Tensor x, Tensor phi, Tensor scale, Tensor bias, Tensor? norm_weight"
SAVED = f"{ARGUMENTS}, Tensor h, Tensor ms, bool[] needs, Tensor? d_x=None"
GRADIENTS = "(Tensor, Tensor, Tensor, Tensor, Tensor)"
