"""Reads, writes, mixes and projections on a CPU: one step of a hyper-connection each, forward and backward.

Inductor gets products and sums over streams. It neither reorders nor contracts them, so a token's bits depend on no
other token; its sums over columns would not keep that. What sums over columns or tokens is left to the loops of
`mhc_compile.ops._loops`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mhc_compile.ops import _loops
from mhc_compile.ops._checks import accumulation_dtype
from mhc_compile.ops._tensors import fake_gradients, settle_gradient
from mhc_compile.ops.projection import parameter_gradients


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def aggregate(x: Tensor, h_pre: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """out = sum_i h_pre[i] * x[i]."""
    dtype = accumulation_dtype(x)
    wide, weights = x.to(dtype), h_pre.to(dtype)
    out = _sum([weights[..., i, None] * wide[..., i, :] for i in range(x.shape[-2])])
    return out.to(out_dtype or x.dtype)


def aggregate_backward(
    d_out: Tensor, x: Tensor, h_pre: Tensor, needs: Sequence[bool], d_x: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dx[i] = d_x[i] + h_pre[i] * d_out, and d_pre[i] = <x[i], d_out>."""
    dx = read_backward(h_pre, d_out, d_x, x) if needs[0] else settle_gradient(None, x, x)
    return dx, settle_gradient(gate_gradient(x, d_out, h_pre) if needs[1] else None, h_pre, x)


def gate_gradient(streams: Tensor, row: Tensor, gates: Tensor) -> Tensor:
    """<streams[i], row>: the gradient of one gate for each stream, of a read or a write."""
    return _loops.products(streams, row[..., None, :])[..., 0].to(gates.dtype)


def mix_streams(x: Tensor, h: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """out[o] = sum_i h[i, o] * x[i]."""
    dtype = accumulation_dtype(x)
    wide, weights = x.to(dtype), h.to(dtype)
    out = _sum([weights[..., i, :, None] * wide[..., i, None, :] for i in range(x.shape[-2])])
    return out.to(out_dtype or x.dtype)


def mix_streams_backward(
    d_out: Tensor, x: Tensor, h: Tensor, needs: Sequence[bool], d_x: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dx[i] = sum_o h[i, o] * d_out[o] + d_x[i], and dh[i, o] = <x[i], d_out[o]>."""
    dx = _mixed_back(d_out, h, d_x, x) if needs[0] else settle_gradient(None, x, x)
    return dx, settle_gradient(_loops.products(x, d_out) if needs[1] else None, h, x)


def expand_combine(
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x'[o] = h_post[o] * (f + layer_bias) + sum_i h_res[i, o] * x[i]."""
    dtype = accumulation_dtype(x)
    wide, rows = x.to(dtype), f.to(dtype)
    rows = rows if layer_bias is None else rows + layer_bias.to(dtype)
    mixed = wide
    if h_res is not None:
        mixed = mix_streams(x, h_res, out_dtype=dtype)
    return (mixed + h_post.to(dtype)[..., None] * rows[..., None, :]).to(out_dtype or x.dtype)


def expand_combine_backward(
    d_x_new: Tensor,
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    needs: Sequence[bool],
    d_x: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """df = sum_o h_post[o] * dx'[o] and dx[i] = sum_o h_res[i, o] * dx'[o] + d_x[i]; products over columns the rest."""
    dtype, streams = accumulation_dtype(x), range(x.shape[-2])
    wide = d_x_new.to(dtype)
    df, d_bias, d_post, dx, d_res = fake_gradients((f, layer_bias, h_post, x, h_res), [False] * 5, x)
    if needs[1] and layer_bias is not None:
        only_bias = [False, True, False, False, False]
        d_bias = torch.ops.mhc.expand_combine_backward(d_x_new, f, layer_bias, h_post, x, h_res, only_bias)[1]
    if needs[2]:
        rows = f if layer_bias is None else f.to(dtype) + layer_bias.to(dtype)
        d_post = gate_gradient(d_x_new, rows, h_post)
    if needs[4] and h_res is not None:
        d_res = _loops.products(x, d_x_new).to(h_res.dtype)
    if needs[0]:
        post = h_post.to(dtype)
        df = _sum([post[..., o, None] * wide[..., o, :] for o in streams]).to(f.dtype)
    if needs[3] and h_res is not None:
        dx = _mixed_back(d_x_new, h_res, d_x, x)
    elif needs[3]:
        dx = (wide if d_x is None else wide + d_x.to(dtype)).to(x.dtype)
    return df, d_bias, d_post, dx, d_res


def _mixed_back(d_new: Tensor, h_res: Tensor, d_x: Tensor | None, x: Tensor) -> Tensor:
    """As `mixed`, by a loop where there is one."""
    # A copy of a matrix that all tokens share would only cost time: no loop takes gradients of such a write.
    mixing = _loops.mixed if _loops.can_add(x) and h_res.is_contiguous() else mixed
    return mixing(d_new, h_res, d_x, x.dtype)


def mixed(d_new: Tensor, h_res: Tensor, d_x: Tensor | None, dtype: torch.dtype) -> Tensor:
    """d[i] = sum_o h_res[i, o] * d_new[o] + d_x[i], rounded to dtype."""
    accumulated = accumulation_dtype(d_new)
    wide, res = d_new.to(accumulated), h_res.to(accumulated)
    total = _sum([res[..., o, None] * wide[..., o, None, :] for o in range(d_new.shape[-2])])
    return (total if d_x is None else total + d_x.to(accumulated)).to(dtype)


def projection(x: Tensor, phi: Tensor, norm_weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """All of it by a loop."""
    return _loops.project(x, phi, norm_weight)


def projection_backward(
    d_h: Tensor,
    d_ms: Tensor | None,
    x: Tensor,
    phi: Tensor,
    norm_weight: Tensor | None,
    needs: Sequence[bool],
    d_x: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """dx = d_h @ phi + 2 / nC * d_ms * x + d_x."""
    dtype = accumulation_dtype(x)
    dx, dh = x.new_empty(0), d_h.to(dtype)
    if needs[0]:
        dx = unproject(x, dh, phi, norm_weight, d_ms, d_x=d_x)
    return dx, *phi_gradients(dh, x, phi, norm_weight, needs[1:])


def unproject(
    x: Tensor,
    dh: Tensor,
    phi: Tensor,
    norm_weight: Tensor | None,
    dms: Tensor | None,
    aggregated: tuple[Tensor, Tensor] | None = None,
    d_x: Tensor | None = None,
) -> Tensor:
    """dx[i] = (dh @ phi)[i] + 2 / nC * dms * x[i] + h_pre[i] * d_out + d_x[i]; aggregated: h_pre and d_out."""
    if _loops.can_add(x):
        return _loops.unproject(x, dh, phi, norm_weight, dms, aggregated=aggregated, d_x=d_x)
    dx = _loops.unproject(x, dh, phi, norm_weight)
    if dms is not None:
        dx = dx + x.to(dx.dtype) * (dms.to(dx.dtype) * (2.0 / phi.shape[1]))[..., None, None]
    if aggregated is not None:
        h_pre, d_out = aggregated
        dx = dx + h_pre.to(dx.dtype)[..., None] * d_out.to(dx.dtype)[..., None, :]
    return (dx if d_x is None else dx + d_x.to(dx.dtype)).to(x.dtype)


def phi_gradients(
    dh: Tensor, x: Tensor, phi: Tensor, norm_weight: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """The gradients of phi and norm_weight."""
    product = _loops.phi_gradient(dh, x) if any(needs) else None
    dphi, dnorm_weight = parameter_gradients(product, phi, norm_weight, needs)
    return settle_gradient(dphi, phi, x), settle_gradient(dnorm_weight, norm_weight, x)


def read_backward(h_pre: Tensor, d_out: Tensor, d_x: Tensor | None, x: Tensor) -> Tensor:
    """d_x[i] + h_pre[i] * d_out, rounded to the dtype of x."""
    dtype = accumulation_dtype(x)
    dx = h_pre.to(dtype)[..., None] * d_out.to(dtype)[..., None, :]
    return (dx if d_x is None else dx + d_x.to(dtype)).to(x.dtype)
