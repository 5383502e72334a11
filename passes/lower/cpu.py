"""The parts of operators on a CPU: ATen operators that Inductor makes faster, and loops for the rest.

Operators of one step are in `cpu_steps`. Gates are left to the loops of `mhc_compile.ops._loops`: a token's bits would
depend on others by Inductor's exponentials, and a Sinkhorn would take long to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mhc_compile import compat
from mhc_compile.forms import as_projected, is_alone
from mhc_compile.ops import _loops
from mhc_compile.ops._checks import accumulation_dtype
from mhc_compile.ops._tensors import settle_gradient
from mhc_compile.ops.expand_combine_and_read import empty_reads
from mhc_compile.passes.lower.cpu_steps import (
    aggregate,
    aggregate_backward,
    expand_combine,
    expand_combine_backward,
    gate_gradient,
    mix_streams,
    mix_streams_backward,
    phi_gradients,
    projection,
    projection_backward,
    read_backward,
    unproject,
)

_MAX_UNROLLED = 8  # streams; the products of `cpu_steps` are spelled out


def generate_mix(x: Tensor, *parameters: Any, **scalars: Any) -> tuple[Tensor, ...]:
    """All of it by a loop."""
    return _loops.mix(x, *parameters, **scalars)


def generate_mix_and_aggregate(
    x: Tensor,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None = None,
    input_norm_weight: Tensor | None = None,
    *,
    input_norm_eps: float | None = None,
    out_dtype: torch.dtype | None = None,
    **scalars: Any,
) -> tuple[Tensor, ...]:
    """generate_mix, and the aggregate with its h_pre, normalised where there is a norm."""
    h_pre, *rest = generate_mix(x, phi, scale, bias, norm_weight, **scalars)
    if input_norm_eps is None:
        return aggregate(x, h_pre, out_dtype=out_dtype), *rest
    return aggregate_and_norm(x, h_pre, input_norm_weight, input_norm_eps=input_norm_eps, out_dtype=out_dtype), *rest


def aggregate_and_norm(
    x: Tensor,
    h_pre: Tensor,
    input_norm_weight: Tensor | None = None,
    *,
    input_norm_eps: float,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The aggregate, and its norm."""
    u = aggregate(x, h_pre, out_dtype=accumulation_dtype(x))
    row = u[..., None, :]
    mean = _loops.products(row, row, x.shape[-2])[..., 0] / x.shape[-1]
    normed = u * (1.0 / torch.sqrt(mean + input_norm_eps))
    if input_norm_weight is not None:
        normed = normed * input_norm_weight.to(normed.dtype)
    return normed.to(out_dtype or x.dtype)


def sinkhorn(logits: Tensor, **form: Any) -> Tensor:
    """All of it by a loop."""
    return _loops.sinkhorn(logits, **form)


def sinkhorn_backward(d_out: Tensor, logits: Tensor, **form: Any) -> Tensor:
    """The gradient of logits, in their dtype."""
    return _loops.sinkhorn(logits, d_out, **form).to(logits.dtype)


def head(x: Tensor, *parameters: Any, **scalars: Any) -> tuple[Tensor, ...]:
    """generate_mix_and_aggregate without its results that have no elements."""
    out, _, _, h, ms = generate_mix_and_aggregate(x, *parameters, **scalars)
    return out, h, ms


def _mix_backward(
    gradients: Sequence[Tensor | None],
    x: Tensor,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    h: Tensor,
    ms: Tensor,
    needs: Sequence[bool],
    d_x: Tensor | None = None,
    input_norm_weight: None = None,
    input_norm_eps: None = None,
    aggregated: tuple[Tensor, Tensor] | None = None,
    **scalars: Any,
) -> tuple[Tensor, ...]:
    """Two loops: one for the gates, and then one for the streams.

    gradients: of layer_input, h_pre, h_post, h_res, h and ms. aggregated: h_pre and d_layer_input, if they are of
    another mix.
    """
    h_pre, dh, dms, dscale, dbias = _loops.mix_backward(gradients, x, scale, bias, h, ms, **scalars)
    dx = x.new_empty(0)
    if needs[0]:
        if gradients[0] is not None:
            aggregated = (h_pre, gradients[0])
        dx = unproject(x, dh, phi, norm_weight, dms, aggregated, d_x)
    dphi, dnorm_weight = phi_gradients(dh, x, phi, norm_weight, (needs[1], needs[4]))
    dscale = settle_gradient(dscale if needs[2] else None, scale, x)
    dbias = settle_gradient(dbias if needs[3] else None, bias, x)
    return dx, dphi, dscale, dbias, dnorm_weight


def generate_mix_backward(
    d_h_pre: Tensor | None,
    d_h_post: Tensor | None,
    d_h_res: Tensor | None,
    d_h: Tensor | None,
    d_ms: Tensor | None,
    *saved: Any,
    **scalars: Any,
) -> tuple[Tensor, ...]:
    """The gradients of generate_mix."""
    return _mix_backward((None, d_h_pre, d_h_post, d_h_res, d_h, d_ms), *saved, **scalars)


def generate_mix_and_aggregate_backward(
    d_layer_input: Tensor | None,
    d_h_post: Tensor | None,
    d_h_res: Tensor | None,
    d_h: Tensor | None,
    d_ms: Tensor | None,
    *saved: Any,
    **scalars: Any,
) -> tuple[Tensor, ...]:
    """The gradients of generate_mix_and_aggregate without an input norm."""
    x, gradients = saved[0], _mix_backward((d_layer_input, None, d_h_post, d_h_res, d_h, d_ms), *saved, **scalars)
    return *gradients, x.new_empty(0)


def head_backward(
    d_out: Tensor | None, d_h: Tensor | None, d_ms: Tensor | None, *saved: Any, **scalars: Any
) -> tuple[Tensor, ...]:
    """The gradients of head."""
    return _mix_backward((d_out, None, None, None, d_h, d_ms), *saved, **scalars)


def boundary(
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    *parameters: Any,
    streams_dtype: torch.dtype | None = None,
    **scalars: Any,
) -> tuple[Tensor, ...]:
    """expand_combine, and generate_mix_and_aggregate of what it returns."""
    x_new = expand_combine(f, layer_bias, h_post, x, h_res, out_dtype=streams_dtype)
    return x_new, *generate_mix_and_aggregate(x_new, *parameters, **scalars)


def boundary_backward(
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
    input_norm_weight: Tensor | None = None,
    **scalars: Any,
) -> tuple[Tensor, ...]:
    """The gradient of x' by that of the mix, and from it those of expand_combine."""
    gradients = (d_layer_input, d_next_post, d_next_res, d_h, d_ms)
    saved = (x_new, phi, scale, bias, norm_weight, h, ms, [True, *needs[5:]], d_x_new, input_norm_weight)
    whole = torch.ops.mhc.generate_mix_and_aggregate_backward
    mix = whole if _has_norm(scalars) else generate_mix_and_aggregate_backward
    d_new, *d_parameters = mix(*gradients, *saved, **scalars)
    combine = expand_combine_backward if _is_fused(x, needs) else torch.ops.mhc.expand_combine_backward
    return *combine(d_new, f, layer_bias, h_post, x, h_res, list(needs[:5])), *d_parameters


def shifted_boundary(
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    h_pre: Tensor,
    *parameters: Any,
    streams_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    **scalars: Any,
) -> tuple[Tensor, ...]:
    """expand_combine, and aggregate and generate_mix of what it returns."""
    x_new = expand_combine(f, layer_bias, h_post, x, h_res, out_dtype=streams_dtype)
    return x_new, aggregate(x_new, h_pre, out_dtype=out_dtype), *generate_mix(x_new, *parameters, **scalars)


def shifted_boundary_backward(
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
    **scalars: Any,
) -> tuple[Tensor, ...]:
    """The gradient of x' by that of the mix, to which the read's is added, and from it those of expand_combine."""
    d_pre, aggregated = None, None
    if d_layer_input is not None:
        if needs[5]:
            d_pre = gate_gradient(x_new, d_layer_input, h_pre)
        aggregated = (h_pre, d_layer_input)
    elif needs[5]:
        d_pre = torch.zeros_like(h_pre)
    gradients = (None, d_next_pre, d_next_post, d_next_res, d_h, d_ms)
    saved = (x_new, phi, scale, bias, norm_weight, h, ms, [True, *needs[6:]], d_x_new)
    d_new, *d_parameters = _mix_backward(gradients, *saved, aggregated=aggregated, **scalars)
    combine = expand_combine_backward if _is_fused(x, needs) else torch.ops.mhc.expand_combine_backward
    streams = combine(d_new, f, layer_bias, h_post, x, h_res, list(needs[:5]))
    return *streams, settle_gradient(d_pre, h_pre, x), *d_parameters


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
) -> tuple[Tensor, ...]:
    """expand_combine, and aggregate and projection of what it returns."""
    x_new = expand_combine(f, layer_bias, h_post, x, h_res, out_dtype=streams_dtype)
    layer_input, h, ms = empty_reads(x_new, h_pre, phi, out_dtype)
    if h_pre is not None:
        layer_input = aggregate(x_new, h_pre, out_dtype=out_dtype)
    if phi is not None:
        h, ms = projection(as_projected(x_new, phi), phi, norm_weight)
    return x_new, layer_input, h, ms


def expand_combine_and_read_backward(
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
    """The gradient of x' by those of its readers in one sum, and from it those of expand_combine."""
    d_pre = torch.zeros_like(h_pre) if needs[5] and h_pre is not None else None
    aggregated = None
    if h_pre is not None and d_layer_input is not None:
        aggregated = (h_pre, d_layer_input)
        if needs[5]:
            d_pre = gate_gradient(x_new, d_layer_input, h_pre)
    dphi, dnorm_weight = settle_gradient(None, phi, x), settle_gradient(None, norm_weight, x)
    d_new = d_x_new
    if d_h is not None and phi is not None:
        dtype, read = accumulation_dtype(x), as_projected(x_new, phi)
        if aggregated is not None and is_alone(x_new, phi):
            d_new, aggregated = read_backward(*aggregated, d_x_new, x_new), None
        d_x = None if d_new is None else as_projected(d_new, phi)
        d_new = unproject(read, d_h.to(dtype), phi, norm_weight, d_ms, aggregated, d_x).view(x_new.shape)
        dphi, dnorm_weight = phi_gradients(d_h.to(dtype), read, phi, norm_weight, needs[6:])
    elif aggregated is not None:
        d_new = read_backward(*aggregated, d_x_new, x_new)
    assert d_new is not None
    combine = expand_combine_backward if _is_fused(x, needs) else torch.ops.mhc.expand_combine_backward
    streams = combine(d_new, f, layer_bias, h_post, x, h_res, list(needs[:5]))
    return *streams, settle_gradient(d_pre, h_pre, x), dphi, dnorm_weight


_PARTS: dict[str, Callable[..., Any]] = {
    "aggregate": aggregate,
    "aggregate_backward": aggregate_backward,
    "aggregate_and_norm": aggregate_and_norm,
    "mix_streams": mix_streams,
    "mix_streams_backward": mix_streams_backward,
    "expand_combine": expand_combine,
    "expand_combine_backward": expand_combine_backward,
    "projection": projection,
    "projection_backward": projection_backward,
    "generate_mix": generate_mix,
    "generate_mix_backward": generate_mix_backward,
    "generate_mix_and_aggregate": generate_mix_and_aggregate,
    "generate_mix_and_aggregate_backward": generate_mix_and_aggregate_backward,
    "sinkhorn": sinkhorn,
    "sinkhorn_backward": sinkhorn_backward,
    "head": head,
    "head_backward": head_backward,
    "boundary": boundary,
    "boundary_backward": boundary_backward,
    "shifted_boundary": shifted_boundary,
    "shifted_boundary_backward": shifted_boundary_backward,
    "expand_combine_and_read": expand_combine_and_read,
    "expand_combine_and_read_backward": expand_combine_and_read_backward,
}


_READING = ("expand_combine_and_read", "expand_combine_and_read_backward")
_INTO_STREAMS = ("boundary_backward", "shifted_boundary_backward", _READING[1])


def _is_fused(x: Tensor, needs: Sequence[bool]) -> bool:
    """Whether expand_combine_backward is better taken apart: without df and dx there is nothing to fuse, and the loops
    that take its products do not read float16.
    """
    return x.dtype != torch.float16 and (needs[0] or needs[3])


def _has_norm(given: dict[str, Any]) -> bool:
    """Whether there is an input norm, whose backward is left whole."""
    return given.get("input_norm_eps") is not None


def parts(name: str, x: Tensor, given: dict[str, Any]) -> Callable[..., Any] | None:
    """The parts of an operator on streams x; None if it is better left whole. given: its arguments by name.

    x: of `sinkhorn`, which reads no streams, its logits.
    """
    needs = given.get("needs", ())
    if x.shape[-2] > _MAX_UNROLLED:
        return None
    if name == "expand_combine_backward" and not _is_fused(x, needs):
        return None
    if name in _INTO_STREAMS and not any(needs[:5]):
        return None
    if name == "expand_combine_and_read_backward":
        is_projected, has_gradient = given["phi"] is not None, given["d_h"] is not None
        given_any = any(given[gradient] is not None for gradient in ("d_x_new", "d_layer_input", "d_h"))
        if is_projected != has_gradient or not given_any:
            return None
    if name == "generate_mix_and_aggregate_backward" and _has_norm(given):
        return None
    if name == "projection_backward" and given["d_h"] is None:
        return None
    if name == "mix_streams_backward" and compat.example(given["h"]).shape[-1] != x.shape[-2]:
        return None  # of other numbers of streams there is no loop
    projects = name in ("projection", "projection_backward") or (name in _READING and given["phi"] is not None)
    into_gates = name in ("aggregate_backward", "mix_streams_backward") and needs[1]
    if (projects or into_gates) and x.dtype == torch.float16:
        return None  # the loops would get a copy of all streams
    return _PARTS.get(name)
