"""Kernels of `mhc::aggregate`: out = sum_i h_pre[i] * x[i], and what the mix kernels share with it."""

# mypy: disable-error-code="assignment"
# A tuple of tiles grows while a loop over streams is unrolled.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

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
from mhc_compile.kernels.config import SUM_COLUMNS, Tile, gate_tokens, tile_for


@triton.jit
def weigh_streams(gates, i, x, out, tok, live, first, last, C, x_m, x_n, x_c, N: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """out[tok, c] = sum_i gates[i, tok] * x[tok, i, c] for the columns from first to last; i is the rows of gates."""
    pre = ()
    for stream in tl.static_range(N):
        pre = pre + (tl.sum(tl.where(i == stream, gates, 0.0), axis=0)[:, None],)
    x_rows = x + tok[:, None] * x_m
    for start in range(first, last, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        mask = live[:, None] & (c < C)[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        for stream in tl.static_range(N):
            x_tile = tl.load(x_rows + stream * x_n + c[None, :] * x_c, mask=mask, other=0.0)
            acc += pre[stream] * x_tile.to(tl.float32)
        tl.store(out + tok[:, None] * C + c[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "token_tiles", "blocks"])
def aggregate_kernel(x, h_pre, out, M, C, x_m, x_n, x_c, pre_m, pre_i, token_tiles, blocks, N: tl.constexpr,
                     NP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """out for BLOCK_M tokens x `blocks` column blocks."""
    tile = tl.program_id(0) % token_tiles
    first = tl.program_id(0) // token_tiles * blocks * BLOCK_C
    tok = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = tok < M
    i = tl.arange(0, NP)[:, None]
    gates = tl.load(h_pre + tok[None, :] * pre_m + i * pre_i, mask=live[None, :] & (i < N), other=0.0)
    last = tl.minimum(first + blocks * BLOCK_C, C)
    weigh_streams(gates.to(tl.float32), i, x, out, tok, live, first, last, C, x_m, x_n, x_c, N, BLOCK_M,
                  BLOCK_C)  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def aggregate_backward_kernel(x, d_out, h_pre, d_x, dx, part, M, C, x_m, x_n, x_c, d_m, d_c, pre_m, pre_i,
                              dx_m, dx_n, dx_c, N: tl.constexpr, HAS_DX: tl.constexpr,
                              NEED_DX: tl.constexpr, NEED_DPRE: tl.constexpr, COLUMNS: tl.constexpr,
                              BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, VECTOR: tl.constexpr):  # fmt: skip
    """dx[m, i] = d_x[m, i] + h_pre[m, i] * d_out[m], and part[s, i, m] = the sum over COLUMNS columns of d_out * x.

    d_x has the strides of dx.
    """
    LANES: tl.constexpr = BLOCK_C // VECTOR
    splits = tl.cdiv(C, COLUMNS)
    split = tl.program_id(0) % splits
    # A token's columns at one time, and the last tokens first, of which L2 may still hold some.
    tile = tl.cdiv(M, BLOCK_M) - 1 - tl.program_id(0) // splits
    tok = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = tok < M
    pre = ()
    sums = ()
    for stream in tl.static_range(N):
        sums = sums + (tl.zeros([BLOCK_M, LANES], tl.float32),)
        if NEED_DX:
            gate = tl.load(h_pre + tok * pre_m + stream * pre_i, mask=live, other=0.0)
            pre = pre + (gate.to(tl.float32)[:, None],)
    x_rows = x + tok[:, None] * x_m
    first = split * COLUMNS
    for start in range(first, tl.minimum(first + COLUMNS, C), BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        mask = live[:, None] & (c < C)[None, :]
        g = tl.load(d_out + tok[:, None] * d_m + c[None, :] * d_c, mask=mask, other=0.0).to(tl.float32)
        if NEED_DPRE:
            updated = ()
            for stream in tl.static_range(N):
                v = tl.load(x_rows + stream * x_n + c[None, :] * x_c, mask=mask, other=0.0).to(tl.float32)
                # VECTOR neighbours lie in one thread, so this much of the sum needs no exchange.
                updated = updated + (sums[stream] + tl.sum(tl.reshape(g * v, [BLOCK_M, LANES, VECTOR]), axis=2),)
            sums = updated
        if NEED_DX:
            for stream in tl.static_range(N):
                at = tok[:, None] * dx_m + stream * dx_n + c[None, :] * dx_c
                d = pre[stream] * g
                if HAS_DX:
                    d += tl.load(d_x + at, mask=mask, other=0.0).to(tl.float32)
                tl.store(dx + at, d.to(dx.dtype.element_ty), mask=mask)
    if NEED_DPRE:
        for stream in tl.static_range(N):
            at = (split * N + stream).to(tl.int64) * M + tok
            tl.store(part + at, tl.sum(sums[stream], axis=1), mask=live)


@triton.jit(do_not_specialize=["M", "splits"])
def gate_sum_kernel(part, d_pre, M, splits, N: tl.constexpr, NP: tl.constexpr, BLOCK_T: tl.constexpr):
    """d_pre [M, n] from part [splits, n, M]."""
    tokens = M.to(tl.int64)
    tok = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[None, :]
    i = tl.arange(0, NP)[:, None]
    mask = (tok < tokens) & (i < N)
    total = tl.zeros([NP, BLOCK_T], tl.float32)
    for split in range(0, splits):
        total += tl.load(part + (split * N + i) * tokens + tok, mask=mask, other=0.0)
    tl.store(d_pre + tok * N + i, total.to(d_pre.dtype.element_ty), mask=mask)


def _launch_backward(
    d_out: torch.Tensor,
    x: torch.Tensor,
    h_pre: torch.Tensor | None,
    d_x: torch.Tensor | None,
    dx: torch.Tensor | None,
    part: torch.Tensor | None,
    tile: Tile,
) -> None:
    """Fill dx [M, n, C], of any strides, and part [splits, n, M] where they are given, from x [M, n, C] (M > 0)."""
    tokens, n, width = x.shape
    tiles = cdiv(tokens, tile.tokens)
    launch(
        aggregate_backward_kernel, (tiles * cdiv(width, SUM_COLUMNS),),
        x, d_out, h_pre, d_x, dx, part, tokens, width, *x.stride(), *d_out.stride(),
        *(h_pre.stride() if h_pre is not None else (0, 0)),
        *(dx.stride() if dx is not None else (0, 0, 0)), N=n, HAS_DX=d_x is not None, NEED_DX=dx is not None,
        NEED_DPRE=part is not None, COLUMNS=SUM_COLUMNS, BLOCK_M=tile.tokens, BLOCK_C=tile.columns,
        VECTOR=16 // x.element_size(), num_warps=tile.warps,
    )  # fmt: skip


def _room(x: torch.Tensor) -> torch.Tensor:
    tokens, n, width = x.shape
    return torch.empty(cdiv(width, SUM_COLUMNS), n, tokens, dtype=torch.float32, device=x.device)


def pre_gradient(d_out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Partial sums [splits, n, M] of d h_pre, to be added in order, for x [M, n, C] (M > 0) and d_out [M, C]."""
    part = _room(x)
    with on_device(x):
        _launch_backward(d_out, x, None, None, None, part, tile_for("pre_gradient", x.shape[1], x.element_size()))
    return part


def forward(x: torch.Tensor, h_pre: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """out [..., C] of x [..., n, C] and h_pre [..., n]."""
    n, width = x.shape[-2:]
    out = torch.empty((*x.shape[:-2], width), dtype=out_dtype or x.dtype, device=x.device)
    x, h_pre = token_view(x, 2), token_view(h_pre, 1)
    tokens = x.shape[0]
    if tokens == 0:
        return out
    tile = tile_for("aggregate", n, x.element_size())
    tiles = cdiv(tokens, tile.tokens)
    blocks = blocks_each(width, tile.columns, tokens, tile.tokens, 4, x.device)
    with on_device(x):
        launch(
            aggregate_kernel, (tiles * cdiv(width, blocks * tile.columns),),
            x, h_pre, out, tokens, width, *x.stride(), *h_pre.stride(), tiles, blocks, N=n,
            NP=next_power_of_2(n), BLOCK_M=tile.tokens, BLOCK_C=tile.columns, num_warps=tile.warps,
        )  # fmt: skip
    return out


def backward(
    d_out: torch.Tensor,
    x: torch.Tensor,
    h_pre: torch.Tensor,
    needs: Sequence[bool],
    d_x: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx + d_x, dh_pre), zero-sized where needs says no."""
    need_dx, need_dpre = wanted(needs, 2)
    dx, dx_rows, _ = gradient_like(x, 2, need_dx)
    d_pre = empty_gradient(h_pre, need_dpre, x)
    flat, pre = token_view(x, 2), token_view(h_pre, 1)
    tokens, n, _ = flat.shape
    if tokens == 0 or not (need_dx or need_dpre):
        return put_back(dx, dx_rows), d_pre
    part = _room(flat) if need_dpre else None
    with on_device(x):
        tile = tile_for("aggregate_backward", n, x.element_size())
        _launch_backward(
            token_view(d_out, 1), flat, pre if need_dx else None, laid_out_as(d_x, dx_rows),
            dx_rows if need_dx else None, part, tile,
        )  # fmt: skip
        if part is not None:
            block_t = gate_tokens(n)
            launch(
                gate_sum_kernel, (cdiv(tokens, block_t),),
                part, d_pre, tokens, part.shape[0], N=n, NP=next_power_of_2(n), BLOCK_T=block_t,
                num_warps=4,
            )  # fmt: skip
    return put_back(dx, dx_rows), d_pre
