"""The gradient of streams from a projection with more rows of phi than one program of `products` multiplies.

It is for GPUs, layouts and sizes that `streamed_rows` does not take.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mhc_compile.kernels import gpus
from mhc_compile.kernels.common import INTERPRETED, cdiv, dot_bf16, launch, on_device
from mhc_compile.kernels.config import Tile
from mhc_compile.kernels.phi_parts import split_ahead

# Rows of phi that a program multiplies at a time.
ROWS = 64
# Of 64 x 128, a thread of an A100 would have more than its registers hold.
LARGE, SMALL = Tile(64, 128, 4, 2), Tile(64, 64, 8, 2)


@triton.jit(do_not_specialize=["M", "token_tiles", "part_stride"])
def many_rows_kernel(x, d_out, d_x, weight, dh, coefficient, h_pre, dx, M, part_stride, weight_stride, token_tiles, C,
                     x_m, x_n, x_c, d_m, d_c, dx_m, dx_n, dx_c, N: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr,
                     HAS_OUT: tl.constexpr, HAS_DX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
                     BLOCK_K: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """dx = d_x + h_pre * d_out + dh @ weight + coefficient * x for a tile of tokens and columns of one stream.

    dh [3, M, ROW] and weight [2, padded K, n*C] are bf16 parts. Programs of the same columns run side by side, so that
    their part of weight comes from L2; all of dh fits there.
    """
    tile = tl.program_id(0) % token_tiles
    block = tl.program_id(0) // token_tiles
    stream = block % N
    tok = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = block // N * BLOCK_C + tl.arange(0, BLOCK_C)
    live = tok < M
    inside = c < C
    flat = stream * C + c
    mask = live[:, None] & inside[None, :]
    at = tok[:, None] * dx_m + stream * dx_n + c[None, :] * dx_c
    # What is added to the product is on its way meanwhile.
    v = tl.load(x + tok[:, None] * x_m + stream * x_n + c[None, :] * x_c, mask=mask, other=0.0)
    if HAS_OUT:
        grad = tl.load(d_out + tok[:, None] * d_m + c[None, :] * d_c, mask=mask, other=0.0)
    d = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        g_at = dh + tok[:, None] * ROW + k[None, :]
        g_mask = live[:, None] & (k < K)[None, :]
        # Rows beyond K exist and are zero.
        w_at = weight + k[:, None].to(tl.int64) * (N * C) + flat[None, :]
        g_high = tl.load(g_at, mask=g_mask, other=0.0)
        g_middle = tl.load(g_at + part_stride, mask=g_mask, other=0.0)
        w_high = tl.load(w_at, mask=inside[None, :], other=0.0)
        w_middle = tl.load(w_at + weight_stride, mask=inside[None, :], other=0.0)
        # dx is rounded to bf16, so the products of the smaller parts are left out.
        d = dot_bf16(g_middle, w_high, d, INTERPRET)
        d = dot_bf16(g_high, w_middle, d, INTERPRET)
        d = dot_bf16(g_high, w_high, d, INTERPRET)
    d += tl.load(coefficient + tok, mask=live, other=0.0)[:, None] * v.to(tl.float32)
    if HAS_OUT:
        pre = tl.load(h_pre + stream.to(tl.int64) * M + tok, mask=live, other=0.0)
        d += pre[:, None] * grad.to(tl.float32)
    if HAS_DX:
        d += tl.load(d_x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx + at, d.to(dx.dtype.element_ty), mask=mask)


def multiply(
    x: torch.Tensor,
    d_out: torch.Tensor | None,
    d_x: torch.Tensor | None,
    phi: torch.Tensor,
    norm_weight: torch.Tensor | None,
    dh: torch.Tensor,
    coefficient: torch.Tensor,
    h_pre: torch.Tensor | None,
    dx: torch.Tensor,
) -> None:
    """Fill dx [M, n, C] for x [M, n, C] of bf16 (M > 0); d_x lies as dx does. dh is that of `dh_parts`."""
    tokens, n, width = x.shape
    rows = phi.shape[0]
    weight = split_ahead(phi, norm_weight, 2, cdiv(rows, ROWS) * ROWS)
    tile = LARGE if gpus.of(x.device).many_rows else SMALL
    tiles = cdiv(tokens, tile.tokens)
    with on_device(x):
        launch(
            many_rows_kernel, (tiles * n * cdiv(width, tile.columns),),
            x, d_out, d_x, weight, dh, coefficient, h_pre, dx, tokens, dh.stride(0), weight.stride(0), tiles, width,
            *x.stride(), *((0, 0) if d_out is None else d_out.stride()), *dx.stride(), N=n, K=rows, ROW=dh.shape[-1],
            HAS_OUT=d_out is not None, HAS_DX=d_x is not None, BLOCK_M=tile.tokens, BLOCK_C=tile.columns,
            BLOCK_K=ROWS, STAGES=tile.stages, INTERPRET=INTERPRETED, num_warps=tile.warps,
        )  # fmt: skip
