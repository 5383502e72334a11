"""Kernels of `mhc::mix_streams`: out[o] = sum_i h[i, o] * x[i].

Up to MAX_UNROLLED streams and rows of the result, a program holds its tiles in registers and moves each byte once:
n + m rows forward, m + 2n backward. Beyond that it re-reads them from cache.
"""

# mypy: disable-error-code="assignment,var-annotated"
# A tuple of tiles grows while a loop over streams is unrolled.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from mhc_compile.kernels.aggregate import gate_sum_kernel
from mhc_compile.kernels.common import (
    blocks_each,
    cdiv,
    empty_gradient,
    gradient_like,
    laid_out_as,
    launch,
    next_power_of_2,
    on_device,
    put_back,
    token_view,
    wanted,
)
from mhc_compile.kernels.config import SUM_COLUMNS, tile_for, tokens_of_values
from mhc_compile.kernels.gates import rounded_product

MAX_UNROLLED = 8
# Entries of h that a program keeps in registers; it reads more of them again, from cache, for each block of columns.
KEPT = tl.constexpr(16)


@triton.jit
def _weight(at, mask):
    """An entry of h for each token as a column, float32; loaded as a vector, once per token and warp."""
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["M", "token_tiles", "blocks"])
def mix_streams_kernel(x, h, out, M, C, x_m, x_n, x_c, h_m, h_i, h_o, token_tiles, blocks, N: tl.constexpr,
                       ROWS: tl.constexpr, UNROLL: tl.constexpr, BLOCK_M: tl.constexpr,
                       BLOCK_C: tl.constexpr):  # fmt: skip
    """out [M, ROWS, C] for BLOCK_M tokens x `blocks` column blocks."""
    tile = tl.program_id(0) % token_tiles
    first = tl.program_id(0) // token_tiles * blocks * BLOCK_C
    tok1 = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tok = tok1[:, None]
    live = tok < M
    h_at = h + tok1 * h_m
    weights = ()
    if UNROLL and N * ROWS <= KEPT:
        for at in tl.static_range(N * ROWS):
            weights = weights + (_weight(h_at + (at // ROWS) * h_i + (at % ROWS) * h_o, tok1 < M),)
    for start in range(first, tl.minimum(first + blocks * BLOCK_C, C), BLOCK_C):
        c = (start + tl.arange(0, BLOCK_C))[None, :]
        mask = live & (c < C)
        x_at = x + tok * x_m + c * x_c
        out_at = out + c
        if UNROLL:
            xs = ()
            for i in tl.static_range(N):
                xs = xs + (tl.load(x_at + i * x_n, mask=mask, other=0.0),)
            for o in tl.static_range(ROWS):
                acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
                for i in tl.static_range(N):
                    if N * ROWS <= KEPT:
                        weight = weights[i * ROWS + o]
                    else:
                        weight = _weight(h_at + i * h_i + o * h_o, tok1 < M)
                    acc = tl.fma(weight, xs[i].to(tl.float32), acc)
                tl.store(out_at + (tok * ROWS + o) * C, acc.to(out.dtype.element_ty), mask=mask)
        else:
            for o in range(ROWS):
                acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
                for i in range(N):
                    weight = _weight(h_at + i * h_i + o * h_o, tok1 < M)
                    acc += weight * tl.load(x_at + i * x_n, mask=mask, other=0.0).to(tl.float32)
                tl.store(out_at + (tok * ROWS + o) * C, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _lane_sum(x, g, BLOCK_M: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """x * g summed over neighbouring columns: [BLOCK_M, LANES * VECTOR] -> [BLOCK_M, LANES].

    The neighbours lie in one thread where columns lie side by side in memory; elsewhere they may not.
    """
    return tl.sum(tl.reshape(rounded_product(x, g), [BLOCK_M, LANES, VECTOR]), axis=2)


@triton.jit(do_not_specialize=["M"])
def mix_streams_backward_kernel(x, d_out, h, d_x, dx, part, M, C, x_m, x_n, x_c, d_m, d_o, d_c, h_m, h_i, h_o,
                                dx_m, dx_n, dx_c, N: tl.constexpr, ROWS: tl.constexpr, HAS_DX: tl.constexpr,
                                NEED_DX: tl.constexpr, NEED_DH: tl.constexpr, COLUMNS: tl.constexpr,
                                BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, VECTOR: tl.constexpr):  # fmt: skip
    """dx[m, i] = d_x[m, i] + sum_o h[m, i, o] * d_out[m, o], all rows of d_out in registers.

    part[s, i * ROWS + o, m] = the sum over COLUMNS columns of x[m, i] * d_out[m, o]. d_x has the strides of dx.
    """
    LANES: tl.constexpr = BLOCK_C // VECTOR
    splits = tl.cdiv(C, COLUMNS)
    split = tl.program_id(0) % splits
    tok1 = (tl.program_id(0) // splits).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tok = tok1[:, None]
    live = tok < M
    h_at = h + tok1 * h_m
    weights = ()
    sums = ()
    for at in tl.static_range(N * ROWS):
        if NEED_DX and N * ROWS <= KEPT:
            weights = weights + (_weight(h_at + (at // ROWS) * h_i + (at % ROWS) * h_o, tok1 < M),)
        if NEED_DH:
            sums = sums + (tl.zeros([BLOCK_M, LANES], tl.float32),)
    first = split * COLUMNS
    for start in range(first, tl.minimum(first + COLUMNS, C), BLOCK_C):
        c = (start + tl.arange(0, BLOCK_C))[None, :]
        mask = live & (c < C)
        gs = ()
        for o in tl.static_range(ROWS):
            gs = gs + (tl.load(d_out + tok * d_m + o * d_o + c * d_c, mask=mask, other=0.0),)
        if NEED_DX:
            for i in tl.static_range(N):
                acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
                for o in tl.static_range(ROWS):
                    if N * ROWS <= KEPT:
                        weight = weights[i * ROWS + o]
                    else:
                        weight = _weight(h_at + i * h_i + o * h_o, tok1 < M)
                    acc = tl.fma(weight, gs[o].to(tl.float32), acc)
                offset = tok * dx_m + i * dx_n + c * dx_c
                if HAS_DX:
                    acc += tl.load(d_x + offset, mask=mask, other=0.0).to(tl.float32)
                tl.store(dx + offset, acc.to(dx.dtype.element_ty), mask=mask)
        if NEED_DH:
            updated = ()
            for i in tl.static_range(N):
                v = tl.load(x + tok * x_m + i * x_n + c * x_c, mask=mask, other=0.0).to(tl.float32)
                for o in tl.static_range(ROWS):
                    more = _lane_sum(v, gs[o].to(tl.float32), BLOCK_M, LANES, VECTOR)
                    updated = updated + (sums[i * ROWS + o] + more,)
            sums = updated
    if NEED_DH:
        rows = part + split.to(tl.int64) * (N * ROWS) * M + tok1
        for at in tl.static_range(N * ROWS):
            tl.store(rows + at * M.to(tl.int64), tl.sum(sums[at], axis=1), mask=tok1 < M)


@triton.jit(do_not_specialize=["M"])
def mix_streams_backward_looped_kernel(x, d_out, h, d_x, dx, part, M, C, x_m, x_n, x_c, d_m, d_o, d_c, h_m, h_i,
                                       h_o, dx_m, dx_n, dx_c, N: tl.constexpr, ROWS: tl.constexpr,
                                       HAS_DX: tl.constexpr, NEED_DX: tl.constexpr, NEED_DH: tl.constexpr,
                                       COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
                                       VECTOR: tl.constexpr):  # fmt: skip
    """mix_streams_backward_kernel for many streams or rows: one column block (COLUMNS = BLOCK_C).

    x is read once, d_out once for each stream, again from cache.
    """
    splits = tl.cdiv(C, COLUMNS)
    split = tl.program_id(0) % splits
    tokens = M.to(tl.int64)
    tok1 = (tl.program_id(0) // splits).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tok = tok1[:, None]
    c = (split * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    mask = (tok < M) & (c < C)
    rows = part + split.to(tl.int64) * (N * ROWS) * tokens + tok1
    for i in range(N):
        if NEED_DH:
            v = tl.load(x + tok * x_m + i * x_n + c * x_c, mask=mask, other=0.0).to(tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        for o in range(ROWS):
            g = tl.load(d_out + tok * d_m + o * d_o + c * d_c, mask=mask, other=0.0).to(tl.float32)
            if NEED_DX:
                acc += _weight(h + tok1 * h_m + i * h_i + o * h_o, tok1 < M) * g
            if NEED_DH:
                tl.store(rows + (i * ROWS + o) * tokens, tl.sum(rounded_product(v, g), axis=1), mask=tok1 < M)
        if NEED_DX:
            offset = tok * dx_m + i * dx_n + c * dx_c
            if HAS_DX:
                acc += tl.load(d_x + offset, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx + offset, acc.to(dx.dtype.element_ty), mask=mask)


def forward(x: torch.Tensor, h: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """out [..., m, C] of x [..., n, C] and h [..., n, m]."""
    (n, width), rows = x.shape[-2:], h.shape[-1]
    out = torch.empty((*x.shape[:-2], rows, width), dtype=out_dtype or x.dtype, device=x.device)
    x, h = token_view(x, 2), token_view(h, 2)
    tokens = x.shape[0]
    if tokens == 0:
        return out
    tile = tile_for("mix_streams", max(n, rows), x.element_size())
    tiles = cdiv(tokens, tile.tokens)
    blocks = blocks_each(width, tile.columns, tokens, tile.tokens, 4, x.device)
    with on_device(x):
        launch(
            mix_streams_kernel, (tiles * cdiv(width, blocks * tile.columns),),
            x, h, out, tokens, width, *x.stride(), *h.stride(), tiles, blocks, N=n, ROWS=rows,
            UNROLL=max(n, rows) <= MAX_UNROLLED, BLOCK_M=tile.tokens, BLOCK_C=tile.columns, num_warps=tile.warps,
        )  # fmt: skip
    return out


def backward(
    d_out: torch.Tensor,
    x: torch.Tensor,
    h: torch.Tensor,
    needs: Sequence[bool],
    d_x: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx + d_x, dh), zero-sized where needs says no."""
    need_dx, need_dh = wanted(needs, 2)
    dx, dx_rows, dx_strides = gradient_like(x, 2, need_dx)
    dh = empty_gradient(h, need_dh, x)
    d_out, flat, weights = token_view(d_out, 2), token_view(x, 2), token_view(h, 2)
    (tokens, n, width), rows = flat.shape, h.shape[-1]
    if tokens == 0 or not (need_dx or need_dh):
        return put_back(dx, dx_rows), dh
    unroll = max(n, rows) <= MAX_UNROLLED
    kernel = mix_streams_backward_kernel if unroll else mix_streams_backward_looped_kernel
    tile = tile_for("mix_streams_backward", max(n, rows), x.element_size())
    block_m, block_c = (tile.tokens, tile.columns) if unroll else (4, SUM_COLUMNS)
    # As many columns as a thread has of a tile.
    vector = tile.tokens * tile.columns // (32 * tile.warps)
    splits, sums = cdiv(width, SUM_COLUMNS), n * rows
    part = torch.empty(splits if need_dh else 0, sums, tokens, dtype=torch.float32, device=x.device)
    with on_device(x):
        launch(
            kernel, (cdiv(tokens, block_m) * splits,),
            flat, d_out, weights, laid_out_as(d_x, dx_rows), dx_rows, part, tokens, width, *flat.stride(),
            *d_out.stride(), *weights.stride(), *dx_strides, N=n, ROWS=rows, HAS_DX=d_x is not None,
            NEED_DX=need_dx, NEED_DH=need_dh, COLUMNS=SUM_COLUMNS, BLOCK_M=block_m, BLOCK_C=block_c,
            VECTOR=vector, num_warps=tile.warps,
        )  # fmt: skip
        if need_dh:
            padded = next_power_of_2(sums)
            block_t = tokens_of_values(padded)
            launch(
                gate_sum_kernel, (cdiv(tokens, block_t),),
                part, dh, tokens, splits, N=sums, NP=padded, BLOCK_T=block_t, num_warps=4,
            )  # fmt: skip
    return put_back(dx, dx_rows), dh
