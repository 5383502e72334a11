"""Kernels of `mhc::expand_combine`: x'[o] = h_post[o] * (f + layer_bias) + sum_i h_res[i, o] * x[i].

Up to MAX_UNROLLED streams a program holds its tile of every stream in registers and reads each byte once.
Beyond that it re-reads streams from cache.
"""

# mypy: disable-error-code="assignment"
# A tuple of tiles grows while a loop over streams is unrolled.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from mhc_compile.kernels import combine_gradients
from mhc_compile.kernels.common import (
    blocks_each,
    cdiv,
    empty_gradient,
    gradient_like,
    laid_out_as,
    launch,
    next_power_of_2,
    nothing,
    on_device,
    put_back,
    room_like,
    tile_sums,
    token_view,
    wanted,
)
from mhc_compile.kernels.config import SUM_COLUMNS, tile_for

MAX_UNROLLED = 8


@triton.jit
def _column(at, mask):
    """A coefficient for each token as a column, float32; loaded as a vector, once per token and warp."""
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["M", "token_tiles", "blocks_each"])
def combine_kernel(f, layer_bias, h_post, x, h_res, out, M, C, f_m, f_c, post_m, post_o, x_m, x_n, x_c,
                   res_m, res_i, res_o, out_m, out_n, out_c, token_tiles, blocks_each, N: tl.constexpr,
                   HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr, UNROLL: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """x' [M, n, C] for BLOCK_M tokens x blocks_each column blocks."""
    tile = tl.program_id(0) % token_tiles
    first = tl.program_id(0) // token_tiles * blocks_each * BLOCK_C
    tok1 = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tok = tok1[:, None]
    live = tok < M
    post = ()
    res = ()
    if UNROLL:
        for o in tl.static_range(N):
            post = post + (_column(h_post + tok1 * post_m + o * post_o, tok1 < M),)
        if HAS_RES:
            for at in tl.static_range(N * N):
                res = res + (_column(h_res + tok1 * res_m + (at // N) * res_i + (at % N) * res_o, tok1 < M),)
    for start in range(first, tl.minimum(first + blocks_each * BLOCK_C, C), BLOCK_C):
        c = (start + tl.arange(0, BLOCK_C))[None, :]
        mask = live & (c < C)
        fb = tl.load(f + tok * f_m + c * f_c, mask=mask, other=0.0).to(tl.float32)
        x_at = x + tok * x_m + c * x_c
        out_at = out + tok * out_m + c * out_c
        if HAS_BIAS:
            fb += tl.load(layer_bias + c, mask=c < C, other=0.0).to(tl.float32)
        if UNROLL:
            xs = ()
            for i in tl.static_range(N):
                xs = xs + (tl.load(x_at + i * x_n, mask=mask, other=0.0),)
            for o in tl.static_range(N):
                acc = post[o] * fb
                if HAS_RES:
                    for i in tl.static_range(N):
                        acc = tl.fma(res[i * N + o], xs[i].to(tl.float32), acc)
                else:
                    acc += xs[o].to(tl.float32)
                tl.store(out_at + o * out_n, acc.to(out.dtype.element_ty), mask=mask)
        else:
            for o in range(N):
                acc = tl.load(h_post + tok * post_m + o * post_o, mask=live, other=0.0).to(tl.float32) * fb
                if HAS_RES:
                    for i in range(N):
                        r = tl.load(h_res + tok * res_m + i * res_i + o * res_o, mask=live, other=0.0).to(tl.float32)
                        acc += r * tl.load(x_at + i * x_n, mask=mask, other=0.0).to(tl.float32)
                else:
                    acc += tl.load(x_at + o * x_n, mask=mask, other=0.0).to(tl.float32)
                tl.store(out_at + o * out_n, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _lane_sum(product, BLOCK_M: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Sum neighbouring columns that lie in one thread: [BLOCK_M, LANES * VECTOR] -> [BLOCK_M, LANES]."""
    return tl.sum(tl.reshape(product, [BLOCK_M, LANES, VECTOR]), axis=2)


@triton.jit(do_not_specialize=["M", "token_tiles"])
def combine_backward_kernel(d_out, f, layer_bias, h_post, x, h_res, d_x, df, dx, sums_part, bias_part, M, C, d_m,
                            d_n, d_c, f_m, f_c, post_m, post_o, x_m, x_n, x_c, res_m, res_i, res_o, df_m,
                            df_c, dx_m, dx_n, dx_c, token_tiles, N: tl.constexpr, HAS_BIAS: tl.constexpr,
                            HAS_RES: tl.constexpr, HAS_DX: tl.constexpr, NEED_DF: tl.constexpr,
                            NEED_DBIAS: tl.constexpr, NEED_DPOST: tl.constexpr, NEED_DX: tl.constexpr,
                            NEED_DRES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr,
                            BLOCK_C: tl.constexpr, VECTOR: tl.constexpr):  # fmt: skip
    """Every gradient in one pass, all streams in registers.

    sums_part [splits, n + n*n, M]: over COLUMNS columns, d h_post[o], then d h_res[i, o].
    bias_part [token tiles, C]: over BLOCK_M tokens, d layer_bias.
    """
    LANES: tl.constexpr = BLOCK_C // VECTOR
    tile = tl.program_id(0) % token_tiles
    split = tl.program_id(0) // token_tiles
    tok1 = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tok = tok1[:, None]
    live = tok < M
    post = ()
    res = ()
    post_sums = ()
    res_sums = ()
    for o in tl.static_range(N):
        post = post + (_column(h_post + tok1 * post_m + o * post_o, tok1 < M),)
        post_sums = post_sums + (tl.zeros([BLOCK_M, LANES], tl.float32),)
    if HAS_RES:
        for at in tl.static_range(N * N):
            res = res + (_column(h_res + tok1 * res_m + (at // N) * res_i + (at % N) * res_o, tok1 < M),)
            res_sums = res_sums + (tl.zeros([BLOCK_M, LANES], tl.float32),)
    first = split * COLUMNS
    for start in range(first, tl.minimum(first + COLUMNS, C), BLOCK_C):
        c = (start + tl.arange(0, BLOCK_C))[None, :]
        mask = live & (c < C)
        gs = ()
        for o in tl.static_range(N):
            gs = gs + (tl.load(d_out + tok * d_m + o * d_n + c * d_c, mask=mask, other=0.0),)
        if NEED_DPOST:
            fb = tl.load(f + tok * f_m + c * f_c, mask=mask, other=0.0).to(tl.float32)
            if HAS_BIAS:
                fb += tl.load(layer_bias + c, mask=c < C, other=0.0).to(tl.float32)
            updated = ()
            for o in tl.static_range(N):
                updated = updated + (post_sums[o] + _lane_sum(gs[o].to(tl.float32) * fb, BLOCK_M, LANES, VECTOR),)
            post_sums = updated
        if NEED_DF or NEED_DBIAS:
            acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
            for o in tl.static_range(N):
                acc += post[o] * gs[o].to(tl.float32)
            if NEED_DF:
                tl.store(df + tok * df_m + c * df_c, acc.to(df.dtype.element_ty), mask=mask)
            if NEED_DBIAS:
                c1 = start + tl.arange(0, BLOCK_C)
                tl.store(bias_part + tile.to(tl.int64) * C + c1, tl.sum(acc, axis=0), mask=c1 < C)
        if NEED_DX:
            for i in tl.static_range(N):
                if HAS_RES:
                    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
                    for o in tl.static_range(N):
                        acc += res[i * N + o] * gs[o].to(tl.float32)
                else:
                    acc = gs[i].to(tl.float32)
                offset = tok * dx_m + i * dx_n + c * dx_c
                if HAS_DX:
                    acc += tl.load(d_x + offset, mask=mask, other=0.0).to(tl.float32)
                tl.store(dx + offset, acc.to(dx.dtype.element_ty), mask=mask)
        if NEED_DRES:
            updated = ()
            for i in tl.static_range(N):
                v = tl.load(x + tok * x_m + i * x_n + c * x_c, mask=mask, other=0.0).to(tl.float32)
                for o in tl.static_range(N):
                    product = v * gs[o].to(tl.float32)
                    updated = updated + (res_sums[i * N + o] + _lane_sum(product, BLOCK_M, LANES, VECTOR),)
            res_sums = updated
    row = sums_part + split.to(tl.int64) * (N + N * N) * M
    if NEED_DPOST:
        for o in tl.static_range(N):
            tl.store(row + o * M.to(tl.int64) + tok1, tl.sum(post_sums[o], axis=1), mask=tok1 < M)
    if NEED_DRES:
        for at in tl.static_range(N * N):
            tl.store(row + (N + at) * M.to(tl.int64) + tok1, tl.sum(res_sums[at], axis=1), mask=tok1 < M)


@triton.jit(do_not_specialize=["M", "token_tiles"])
def combine_backward_looped_kernel(d_out, f, layer_bias, h_post, x, h_res, d_x, df, dx, sums_part, bias_part, M,
                                   C, d_m, d_n, d_c, f_m, f_c, post_m, post_o, x_m, x_n, x_c, res_m, res_i,
                                   res_o, df_m, df_c, dx_m, dx_n, dx_c, token_tiles, N: tl.constexpr,
                                   HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr, HAS_DX: tl.constexpr,
                                   NEED_DF: tl.constexpr, NEED_DBIAS: tl.constexpr,
                                   NEED_DPOST: tl.constexpr, NEED_DX: tl.constexpr, NEED_DRES: tl.constexpr,
                                   COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
                                   VECTOR: tl.constexpr):  # fmt: skip
    """combine_backward_kernel for many streams: one column block (COLUMNS = BLOCK_C), re-read from cache."""
    tile = tl.program_id(0) % token_tiles
    split = tl.program_id(0) // token_tiles
    tokens = M.to(tl.int64)
    tok1 = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tok = tok1[:, None]
    live = tok < M
    c1 = split * BLOCK_C + tl.arange(0, BLOCK_C)
    c = c1[None, :]
    mask = live & (c < C)
    g_at = d_out + tok * d_m + c * d_c
    row = sums_part + split.to(tl.int64) * (N + N * N) * tokens + tok1
    if NEED_DPOST or NEED_DF or NEED_DBIAS:
        fb = tl.load(f + tok * f_m + c * f_c, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            fb += tl.load(layer_bias + c, mask=c < C, other=0.0).to(tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        for o in range(N):
            g = tl.load(g_at + o * d_n, mask=mask, other=0.0).to(tl.float32)
            acc += tl.load(h_post + tok * post_m + o * post_o, mask=live, other=0.0).to(tl.float32) * g
            if NEED_DPOST:
                tl.store(row + o * tokens, tl.sum(g * fb, axis=1), mask=tok1 < M)
        if NEED_DF:
            tl.store(df + tok * df_m + c * df_c, acc.to(df.dtype.element_ty), mask=mask)
        if NEED_DBIAS:
            tl.store(bias_part + tile.to(tl.int64) * C + c1, tl.sum(acc, axis=0), mask=c1 < C)
    if NEED_DX or NEED_DRES:
        for i in range(N):
            if HAS_RES:
                if NEED_DRES:
                    v = tl.load(x + tok * x_m + i * x_n + c * x_c, mask=mask, other=0.0).to(tl.float32)
                acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
                for o in range(N):
                    g = tl.load(g_at + o * d_n, mask=mask, other=0.0).to(tl.float32)
                    r = tl.load(h_res + tok * res_m + i * res_i + o * res_o, mask=live, other=0.0).to(tl.float32)
                    acc += r * g
                    if NEED_DRES:
                        tl.store(row + (N + i * N + o) * tokens, tl.sum(g * v, axis=1), mask=tok1 < M)
            else:
                acc = tl.load(g_at + i * d_n, mask=mask, other=0.0).to(tl.float32)
            if NEED_DX:
                offset = tok * dx_m + i * dx_n + c * dx_c
                if HAS_DX:
                    acc += tl.load(d_x + offset, mask=mask, other=0.0).to(tl.float32)
                tl.store(dx + offset, acc.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _reduce_bias(bias_part, d_bias, program, C, bias_tiles, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr):
    """d_bias of one block of columns: the sum of bias_part [bias_tiles, C] over its rows."""
    c = program * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for start in range(0, bias_tiles, BLOCK_R):
        t = start + tl.arange(0, BLOCK_R)
        mask = (t < bias_tiles)[:, None] & (c < C)[None, :]
        total += tl.load(bias_part + t[:, None].to(tl.int64) * C + c[None, :], mask=mask, other=0.0)
    tl.store(d_bias + c, tl.sum(total, axis=0).to(d_bias.dtype.element_ty), mask=c < C)


@triton.jit(do_not_specialize=["M", "bias_tiles", "splits", "gate_programs"])
def combine_reduce_kernel(sums_part, bias_part, dh_post, dh_res, d_bias, M, C, bias_tiles, splits,
                          gate_programs, N: tl.constexpr, NEED_DPOST: tl.constexpr, NEED_DRES: tl.constexpr,
                          NEED_DBIAS: tl.constexpr, PADDED: tl.constexpr, AT_ONCE: tl.constexpr,
                          BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    """Programs below gate_programs finish dh_post and dh_res of BLOCK_T tokens, the others d_bias."""
    pid = tl.program_id(0)
    ROWS: tl.constexpr = N + N * N
    if pid < gate_programs:
        tokens = M.to(tl.int64)
        tok = (pid.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[None, :]
        k = tl.arange(0, PADDED)[:, None]
        post_mask = (tok < tokens) & (k < N)
        res_mask = (tok < tokens) & (k >= N) & (k < ROWS)
        mask = (post_mask & NEED_DPOST) | (res_mask & NEED_DRES)
        acc = tl.zeros([PADDED, BLOCK_T], tl.float32)
        for start in range(0, splits, AT_ONCE):
            # One after the other in this order, but asked for together.
            for later in tl.static_range(AT_ONCE):
                at = sums_part + ((start + later) * ROWS + k) * tokens + tok
                acc += tl.load(at, mask=mask & (start + later < splits), other=0.0)
        if NEED_DPOST:
            tl.store(dh_post + tok * N + k, acc.to(dh_post.dtype.element_ty), mask=post_mask)
        if NEED_DRES:
            tl.store(dh_res + tok * (N * N) + k - N, acc.to(dh_res.dtype.element_ty), mask=res_mask)
    elif NEED_DBIAS:
        _reduce_bias(bias_part, d_bias, pid - gate_programs, C, bias_tiles, BLOCK_C, BLOCK_R)


def forward(
    f: torch.Tensor,
    layer_bias: torch.Tensor | None,
    h_post: torch.Tensor,
    x: torch.Tensor,
    h_res: torch.Tensor | None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x' [..., n, C] of f [..., C], h_post [..., n], x [..., n, C], h_res [..., n, n] (None: identity)."""
    n, width = x.shape[-2:]
    whole, out = room_like(x, 2, out_dtype)
    x, f, h_post = token_view(x, 2), token_view(f, 1), token_view(h_post, 1)
    layer_bias = None if layer_bias is None else layer_bias.contiguous()
    res = None if h_res is None else token_view(h_res, 2)
    tokens = x.shape[0]
    if tokens == 0:
        return whole
    tile = tile_for("combine", n, x.element_size())
    block_m, block_c = tile.tokens, tile.columns
    tiles = cdiv(tokens, block_m)
    blocks = blocks_each(width, block_c, tokens, block_m, 8, x.device)
    with on_device(x):
        launch(
            combine_kernel, (tiles * cdiv(width, blocks * block_c),),
            f, layer_bias, h_post, x, res, out, tokens, width, *f.stride(), *h_post.stride(), *x.stride(),
            *(res.stride() if res is not None else (0, 0, 0)), *out.stride(), tiles, blocks, N=n,
            HAS_BIAS=layer_bias is not None, HAS_RES=res is not None, UNROLL=n <= MAX_UNROLLED,
            BLOCK_M=block_m, BLOCK_C=block_c, num_warps=tile.warps,
        )  # fmt: skip
    return put_back(whole, out)


def backward(
    d_x_new: torch.Tensor,
    f: torch.Tensor,
    layer_bias: torch.Tensor | None,
    h_post: torch.Tensor,
    x: torch.Tensor,
    h_res: torch.Tensor | None,
    needs: Sequence[bool],
    d_x: torch.Tensor | None = None,
    *,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(df, d_layer_bias, dh_post, dx + d_x, dh_res), zero-sized where needs (in that order) says no.

    in_place: dx may take the memory of d_x_new, if the two have the same layout.
    """
    need_df, need_dbias, need_dpost, need_dx, need_dres = wanted(needs, 5)
    need_dbias = need_dbias and layer_bias is not None
    need_dres = need_dres and h_res is not None
    n, width = x.shape[-2:]
    df, df_rows, df_strides = gradient_like(f, 1, need_df)
    if in_place and need_dx and n <= MAX_UNROLLED and d_x_new.stride() == x.stride() and d_x_new.dtype == x.dtype:
        # A program reads a block of all streams before it writes any of it.
        dx, dx_rows = d_x_new, token_view(d_x_new, 2)
        dx_strides = dx_rows.stride()
    else:
        dx, dx_rows, dx_strides = gradient_like(x, 2, need_dx)
    dbias, dpost = empty_gradient(layer_bias, need_dbias, x), empty_gradient(h_post, need_dpost, x)
    dres = empty_gradient(h_res, need_dres, x)
    layer_bias = None if layer_bias is None else layer_bias.contiguous()
    d_out, x, f = token_view(d_x_new, 2), token_view(x, 2), token_view(f, 1)
    post = token_view(h_post, 1)
    res = None if h_res is None else token_view(h_res, 2)
    tokens = x.shape[0]
    results = df, dbias, dpost, dx, dres
    if tokens == 0:
        dbias.zero_()
        return results
    if not (need_df or need_dbias or need_dpost or need_dx or need_dres):
        return results
    whole = d_x is None and layer_bias is None and all((need_df, need_dpost, need_dx, need_dres))
    if whole and res is not None and combine_gradients.fits((d_out, f, df_rows, dx_rows, x)):
        sums = combine_gradients.backward(dx_rows, df_rows, d_out, f, post.contiguous(), x, res.contiguous())
        reduce_partial_sums(sums, nothing(x), 0, dpost, dres, dbias, x)
        put_back(df, df_rows)
        put_back(dx, dx_rows)
        return results
    unroll = n <= MAX_UNROLLED
    kernel = combine_backward_kernel if unroll else combine_backward_looped_kernel
    tile = tile_for("combine_backward", n, x.element_size())
    block_m, block_c = (tile.tokens, tile.columns) if unroll else (4, SUM_COLUMNS)
    tiles, splits = cdiv(tokens, block_m), cdiv(width, SUM_COLUMNS)
    need_gates = need_dpost or need_dres
    sums = torch.empty(splits if need_gates else 0, n + n * n, tokens, dtype=torch.float32, device=x.device)
    bias_part = tile_sums(tiles if need_dbias else 0, width, x)
    with on_device(x):
        launch(
            kernel, (tiles * splits,),
            d_out, f, layer_bias, post, x, res, laid_out_as(d_x, dx_rows), df_rows, dx_rows, sums, bias_part,
            tokens, width, *d_out.stride(), *f.stride(), *post.stride(), *x.stride(),
            *(res.stride() if res is not None else (0, 0, 0)), *df_strides, *dx_strides, tiles, N=n,
            HAS_BIAS=layer_bias is not None, HAS_RES=res is not None, HAS_DX=d_x is not None, NEED_DF=need_df,
            NEED_DBIAS=need_dbias, NEED_DPOST=need_dpost, NEED_DX=need_dx, NEED_DRES=need_dres,
            COLUMNS=SUM_COLUMNS, BLOCK_M=block_m, BLOCK_C=block_c, VECTOR=16 // x.element_size(),
            num_warps=tile.warps,
        )  # fmt: skip
    reduce_partial_sums(sums, bias_part, tiles, dpost, dres, dbias, x)
    put_back(df, df_rows)
    put_back(dx, dx_rows)
    return results


def reduce_partial_sums(
    sums: torch.Tensor,
    bias_part: torch.Tensor,
    bias_tiles: int,
    dh_post: torch.Tensor,
    dh_res: torch.Tensor,
    d_bias: torch.Tensor,
    x: torch.Tensor,
) -> None:
    """Fill dh_post, dh_res and d_bias, those that have elements.

    From sums [splits, n + n*n, M] and bias_part [bias_tiles, C].
    """
    tokens, n, width = x.shape
    need_dpost, need_dres, need_dbias = (bool(t.numel() > 0) for t in (dh_post, dh_res, d_bias))
    if not (need_dpost or need_dres or need_dbias):
        return
    padded = next_power_of_2(n + n * n)
    block_t = max(4, min(32, 2048 // padded))
    gate_programs = cdiv(tokens, block_t) if need_dpost or need_dres else 0
    bias_programs = cdiv(width, 64) if need_dbias else 0
    with on_device(x):
        launch(
            combine_reduce_kernel, (gate_programs + bias_programs,),
            sums, bias_part, dh_post, dh_res, d_bias, tokens, width, bias_tiles, sums.shape[0], gate_programs,
            N=n, NEED_DPOST=need_dpost, NEED_DRES=need_dres, NEED_DBIAS=need_dbias, PADDED=padded, AT_ONCE=8,
            BLOCK_T=block_t, BLOCK_C=64, BLOCK_R=32, num_warps=4,
        )  # fmt: skip
