"""Kernels of `mhc::aggregate_and_norm`: whole rows, so that the streams are read once forward, and once backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from mhc_compile.kernels.common import (
    cdiv,
    empty_gradient,
    launch,
    next_power_of_2,
    nothing,
    on_device,
    token_view,
    wanted,
)
from mhc_compile.kernels.expand_combine import reduce_partial_sums
from mhc_compile.kernels.input_norm import input_norm, norm_backward, normed_rows, row_tile


@triton.jit(do_not_specialize=["M"])
def aggregate_and_norm_kernel(x, h_pre, weight, out, M, C, x_m, x_n, x_c, pre_m, pre_i, inverse_width, eps,
                              N: tl.constexpr, NP: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK_M: tl.constexpr,
                              BLOCK_C: tl.constexpr):  # fmt: skip
    """out for BLOCK_M tokens, the last tokens first, of which L2 may still hold some."""
    tile = tl.cdiv(M, BLOCK_M) - 1 - tl.program_id(0)
    tok = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = tok < M
    i = tl.arange(0, NP)[:, None]
    gates = tl.load(h_pre + tok[None, :] * pre_m + i * pre_i, mask=live[None, :] & (i < N), other=0.0)
    normed_rows(gates.to(tl.float32), i, x, weight, out, out, tok, live, C, x_m, x_n, x_c, inverse_width, eps, N,
                HAS_WEIGHT, None, BLOCK_M, BLOCK_C)  # fmt: skip


def forward(
    x: torch.Tensor,
    h_pre: torch.Tensor,
    input_norm_weight: torch.Tensor | None = None,
    *,
    input_norm_eps: float,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """out [..., C] of x [..., n, C] and h_pre [..., n]."""
    n, width = x.shape[-2:]
    out = torch.empty((*x.shape[:-2], width), dtype=out_dtype or x.dtype, device=x.device)
    x, h_pre = token_view(x, 2), token_view(h_pre, 1)
    tokens = x.shape[0]
    if tokens == 0:
        return out
    norm = input_norm(input_norm_weight, input_norm_eps)
    assert norm is not None
    tile = row_tile(width)
    with on_device(x):
        launch(
            aggregate_and_norm_kernel, (cdiv(tokens, tile.tokens),),
            x, h_pre, norm.weight, out, tokens, width, *x.stride(), *h_pre.stride(), 1.0 / width, norm.eps, N=n,
            NP=next_power_of_2(n), HAS_WEIGHT=norm.weight is not None, BLOCK_M=tile.tokens, BLOCK_C=tile.columns,
            num_warps=tile.warps,
        )  # fmt: skip
    return out


def backward(
    d_out: torch.Tensor,
    x: torch.Tensor,
    h_pre: torch.Tensor,
    needs: Sequence[bool],
    input_norm_weight: torch.Tensor | None = None,
    *,
    input_norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(du [..., C], dh_pre, dweight) for u, what the norm reads; zero-sized where needs says no."""
    need_du, need_pre, need_weight = wanted(needs, 3)
    need_weight = need_weight and input_norm_weight is not None
    d_pre = empty_gradient(h_pre, need_pre, x)
    d_weight = empty_gradient(input_norm_weight, need_weight, x)
    flat = token_view(x, 2)
    tokens, n, _ = flat.shape
    if tokens == 0 or not (need_du or need_pre or need_weight):
        return empty_gradient(d_out, need_du, x), d_pre, d_weight.zero_()
    norm = input_norm(input_norm_weight, input_norm_eps)
    assert norm is not None
    sums = d_pre if need_pre else empty_gradient(h_pre, True, x)
    d_rows, gates = token_view(d_out, 1), token_view(h_pre, 1)
    du, weight_part = norm_backward(d_rows, flat, norm, gates, sums, (n, 1), need_weight)
    if weight_part is not None:
        none = nothing(x)
        reduce_partial_sums(none, weight_part, weight_part.shape[0], none, none, d_weight, flat)
    return du.view(d_out.shape) if need_du else nothing(d_out), d_pre, d_weight
