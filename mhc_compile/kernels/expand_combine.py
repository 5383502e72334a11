"""Kernels of `mhc::expand_combine`: x'[o] = h_post[o] * (f + layer_bias) + sum_i h_res[i, o] * x[i].

Where the gates of the next read are given, it is made in the same pass: layer_input = sum_o h_pre[o] * x'[o].

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

from mhc_compile.kernels import combine_gradients, combine_many
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
def combine_kernel(f, layer_bias, h_post, x, h_res, h_pre, out, layer_input, M, C, f_m, f_c, post_m, post_o, x_m, x_n,
                   x_c, res_m, res_i, res_o, pre_m, pre_o, out_m, out_n, out_c, token_tiles, blocks_each,
                   N: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr, READ: tl.constexpr,
                   UNROLL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """x' [M, n, C], and with READ layer_input [M, C], for BLOCK_M tokens x blocks_each column blocks."""
    tile = tl.program_id(0) % token_tiles
    first = tl.program_id(0) // token_tiles * blocks_each * BLOCK_C
    tok1 = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tok = tok1[:, None]
    live = tok < M
    post = ()
    res = ()
    pre = ()
    if UNROLL:
        for o in tl.static_range(N):
            post = post + (_column(h_post + tok1 * post_m + o * post_o, tok1 < M),)
            if READ:
                pre = pre + (_column(h_pre + tok1 * pre_m + o * pre_o, tok1 < M),)
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
        if READ:
            read = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
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
                new = acc.to(out.dtype.element_ty)
                tl.store(out_at + o * out_n, new, mask=mask)
                if READ:
                    read = tl.fma(pre[o], new.to(tl.float32), read)
        else:
            for o in range(N):
                acc = tl.load(h_post + tok * post_m + o * post_o, mask=live, other=0.0).to(tl.float32) * fb
                if HAS_RES:
                    for i in range(N):
                        r = tl.load(h_res + tok * res_m + i * res_i + o * res_o, mask=live, other=0.0).to(tl.float32)
                        acc += r * tl.load(x_at + i * x_n, mask=mask, other=0.0).to(tl.float32)
                else:
                    acc += tl.load(x_at + o * x_n, mask=mask, other=0.0).to(tl.float32)
                new = acc.to(out.dtype.element_ty)
                tl.store(out_at + o * out_n, new, mask=mask)
                if READ:
                    gate = tl.load(h_pre + tok * pre_m + o * pre_o, mask=live, other=0.0).to(tl.float32)
                    read += gate * new.to(tl.float32)
        if READ:
            tl.store(layer_input + tok * C + c, read.to(layer_input.dtype.element_ty), mask=mask)


@triton.jit
def sum_rows(N: tl.constexpr, NEED_DPRE: tl.constexpr):
    """Rows of sums of a token: of h_post, of h_res, and of the products that the gradient of h_pre is made of."""
    return N + N * N + (N + 1 if NEED_DPRE else 0)


@triton.jit
def _stream_gradient(d_out, offset, d_read, gate, mask, HAS_OUT: tl.constexpr, READ: tl.constexpr):
    """The gradient of a stream of x', what a read with these gates sends back included."""
    if HAS_OUT:
        g = tl.load(d_out + offset, mask=mask, other=0.0)
        if READ:
            g = tl.fma(gate, d_read, g.to(tl.float32))
    else:
        g = gate * d_read
    return g


@triton.jit
def _lane_sum(product, BLOCK_M: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Sum neighbouring columns that lie in one thread: [BLOCK_M, LANES * VECTOR] -> [BLOCK_M, LANES]."""
    return tl.sum(tl.reshape(product, [BLOCK_M, LANES, VECTOR]), axis=2)


@triton.jit(do_not_specialize=["M", "token_tiles"])
def combine_backward_kernel(d_out, d_read, f, layer_bias, h_post, x, h_res, h_pre, d_x, df, dx, sums_part, bias_part, M,
                            C, d_m, d_n, d_c, read_m, read_c, f_m, f_c, post_m, post_o, x_m, x_n, x_c, res_m, res_i,
                            res_o, pre_m, pre_o, df_m, df_c, dx_m, dx_n, dx_c, token_tiles, N: tl.constexpr,
                            HAS_OUT: tl.constexpr, READ: tl.constexpr, HAS_BIAS: tl.constexpr,
                            HAS_RES: tl.constexpr, HAS_DX: tl.constexpr, NEED_DF: tl.constexpr,
                            NEED_DBIAS: tl.constexpr, NEED_DPOST: tl.constexpr, NEED_DX: tl.constexpr,
                            NEED_DRES: tl.constexpr, NEED_DPRE: tl.constexpr, COLUMNS: tl.constexpr,
                            BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, VECTOR: tl.constexpr):  # fmt: skip
    """Every gradient in one pass, all streams in registers.

    READ: d_read [M, C] is the gradient of layer_input, and h_pre[o] * d_read a part of that of x'[o], beside d_out.
    sums_part [splits, rows, M]: over COLUMNS columns, d h_post[o], then d h_res[i, o], and with NEED_DPRE the products
    of d_read with f + layer_bias and with x[i].
    bias_part [token tiles, C]: over BLOCK_M tokens, d layer_bias.
    """
    LANES: tl.constexpr = BLOCK_C // VECTOR
    ROWS: tl.constexpr = sum_rows(N, NEED_DPRE)
    tile = tl.program_id(0) % token_tiles
    split = tl.program_id(0) // token_tiles
    tok1 = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tok = tok1[:, None]
    live = tok < M
    post = ()
    res = ()
    pre = ()
    post_sums = ()
    res_sums = ()
    read_sums = ()
    for o in tl.static_range(N):
        post = post + (_column(h_post + tok1 * post_m + o * post_o, tok1 < M),)
        post_sums = post_sums + (tl.zeros([BLOCK_M, LANES], tl.float32),)
        if READ:
            pre = pre + (_column(h_pre + tok1 * pre_m + o * pre_o, tok1 < M),)
        else:
            pre = pre + (0.0,)
    for _ in tl.static_range(N + 1):
        read_sums = read_sums + (tl.zeros([BLOCK_M, LANES], tl.float32),)
    if HAS_RES:
        for at in tl.static_range(N * N):
            res = res + (_column(h_res + tok1 * res_m + (at // N) * res_i + (at % N) * res_o, tok1 < M),)
            res_sums = res_sums + (tl.zeros([BLOCK_M, LANES], tl.float32),)
    first = split * COLUMNS
    for start in range(first, tl.minimum(first + COLUMNS, C), BLOCK_C):
        c = (start + tl.arange(0, BLOCK_C))[None, :]
        mask = live & (c < C)
        du = 0.0
        if READ:
            du = tl.load(d_read + tok * read_m + c * read_c, mask=mask, other=0.0).to(tl.float32)
        gs = ()
        for o in tl.static_range(N):
            offset = tok * d_m + o * d_n + c * d_c
            gs = gs + (_stream_gradient(d_out, offset, du, pre[o], mask, HAS_OUT, READ),)
        if NEED_DPOST or NEED_DPRE:
            fb = tl.load(f + tok * f_m + c * f_c, mask=mask, other=0.0).to(tl.float32)
            if HAS_BIAS:
                fb += tl.load(layer_bias + c, mask=c < C, other=0.0).to(tl.float32)
        if NEED_DPOST:
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
        if NEED_DRES or NEED_DPRE:
            updated = ()
            updated_read = ()
            for i in tl.static_range(N):
                v = tl.load(x + tok * x_m + i * x_n + c * x_c, mask=mask, other=0.0).to(tl.float32)
                if NEED_DRES:
                    for o in tl.static_range(N):
                        product = v * gs[o].to(tl.float32)
                        updated = updated + (res_sums[i * N + o] + _lane_sum(product, BLOCK_M, LANES, VECTOR),)
                if NEED_DPRE:
                    if i == 0:
                        updated_read = updated_read + (read_sums[i] + _lane_sum(du * fb, BLOCK_M, LANES, VECTOR),)
                    updated_read = updated_read + (read_sums[1 + i] + _lane_sum(du * v, BLOCK_M, LANES, VECTOR),)
            if NEED_DRES:
                res_sums = updated
            if NEED_DPRE:
                read_sums = updated_read
    row = sums_part + split.to(tl.int64) * ROWS * M
    if NEED_DPOST:
        for o in tl.static_range(N):
            tl.store(row + o * M.to(tl.int64) + tok1, tl.sum(post_sums[o], axis=1), mask=tok1 < M)
    if NEED_DRES:
        for at in tl.static_range(N * N):
            tl.store(row + (N + at) * M.to(tl.int64) + tok1, tl.sum(res_sums[at], axis=1), mask=tok1 < M)
    if NEED_DPRE:
        for at in tl.static_range(N + 1):
            place = (N + N * N + at) * M.to(tl.int64) + tok1
            tl.store(row + place, tl.sum(read_sums[at], axis=1), mask=tok1 < M)


@triton.jit(do_not_specialize=["M", "token_tiles"])
def combine_backward_looped_kernel(d_out, d_read, f, layer_bias, h_post, x, h_res, h_pre, d_x, df, dx, sums_part,
                                   bias_part, M, C, d_m, d_n, d_c, read_m, read_c, f_m, f_c, post_m, post_o, x_m, x_n,
                                   x_c, res_m, res_i, res_o, pre_m, pre_o, df_m, df_c, dx_m, dx_n, dx_c, token_tiles,
                                   N: tl.constexpr, HAS_OUT: tl.constexpr, READ: tl.constexpr,
                                   HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr, HAS_DX: tl.constexpr,
                                   NEED_DF: tl.constexpr, NEED_DBIAS: tl.constexpr, NEED_DPOST: tl.constexpr,
                                   NEED_DX: tl.constexpr, NEED_DRES: tl.constexpr, NEED_DPRE: tl.constexpr,
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
    g_at = tok * d_m + c * d_c
    row = sums_part + split.to(tl.int64) * sum_rows(N, NEED_DPRE) * tokens + tok1
    gate = tl.zeros([BLOCK_M, 1], tl.float32)
    du = 0.0
    if READ:
        du = tl.load(d_read + tok * read_m + c * read_c, mask=mask, other=0.0).to(tl.float32)
    if NEED_DPOST or NEED_DF or NEED_DBIAS or NEED_DPRE:
        fb = tl.load(f + tok * f_m + c * f_c, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            fb += tl.load(layer_bias + c, mask=c < C, other=0.0).to(tl.float32)
        if NEED_DPRE:
            tl.store(row + (N + N * N) * tokens, tl.sum(du * fb, axis=1), mask=tok1 < M)
        acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        for o in range(N):
            if READ:
                gate = tl.load(h_pre + tok * pre_m + o * pre_o, mask=live, other=0.0).to(tl.float32)
            g = _stream_gradient(d_out, g_at + o * d_n, du, gate, mask, HAS_OUT, READ).to(tl.float32)
            acc += tl.load(h_post + tok * post_m + o * post_o, mask=live, other=0.0).to(tl.float32) * g
            if NEED_DPOST:
                tl.store(row + o * tokens, tl.sum(g * fb, axis=1), mask=tok1 < M)
        if NEED_DF:
            tl.store(df + tok * df_m + c * df_c, acc.to(df.dtype.element_ty), mask=mask)
        if NEED_DBIAS:
            tl.store(bias_part + tile.to(tl.int64) * C + c1, tl.sum(acc, axis=0), mask=c1 < C)
    if NEED_DX or NEED_DRES or NEED_DPRE:
        for i in range(N):
            if NEED_DRES or NEED_DPRE:
                v = tl.load(x + tok * x_m + i * x_n + c * x_c, mask=mask, other=0.0).to(tl.float32)
            if NEED_DPRE:
                tl.store(row + (N + N * N + 1 + i) * tokens, tl.sum(du * v, axis=1), mask=tok1 < M)
            if HAS_RES:
                acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
                for o in range(N):
                    if READ:
                        gate = tl.load(h_pre + tok * pre_m + o * pre_o, mask=live, other=0.0).to(tl.float32)
                    g = _stream_gradient(d_out, g_at + o * d_n, du, gate, mask, HAS_OUT, READ).to(tl.float32)
                    r = tl.load(h_res + tok * res_m + i * res_i + o * res_o, mask=live, other=0.0).to(tl.float32)
                    acc += r * g
                    if NEED_DRES:
                        tl.store(row + (N + i * N + o) * tokens, tl.sum(g * v, axis=1), mask=tok1 < M)
            else:
                if READ:
                    gate = tl.load(h_pre + tok * pre_m + i * pre_o, mask=live, other=0.0).to(tl.float32)
                acc = _stream_gradient(d_out, g_at + i * d_n, du, gate, mask, HAS_OUT, READ).to(tl.float32)
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
def combine_reduce_kernel(sums_part, bias_part, h_post, h_res, dh_post, dh_res, dh_pre, d_bias, M, C, post_m, post_o,
                          res_m, res_i, res_o, bias_tiles, splits, gate_programs, N: tl.constexpr,
                          HAS_RES: tl.constexpr, NEED_DPOST: tl.constexpr, NEED_DRES: tl.constexpr,
                          NEED_DPRE: tl.constexpr, NEED_DBIAS: tl.constexpr, PADDED: tl.constexpr,
                          AT_ONCE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
                          BLOCK_R: tl.constexpr):  # fmt: skip
    """Programs below gate_programs finish the gradients of gates of BLOCK_T tokens, the others d_bias.

    dh_pre[o] = <d_read, x'[o]> = h_post[o] * <d_read, f + layer_bias> + sum_i h_res[i, o] * <d_read, x[i]>
    """
    pid = tl.program_id(0)
    ROWS: tl.constexpr = sum_rows(N, NEED_DPRE)
    OF_READ: tl.constexpr = N + N * N
    if pid < gate_programs:
        tokens = M.to(tl.int64)
        tok1 = pid.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        tok = tok1[None, :]
        k = tl.arange(0, PADDED)[:, None]
        post_mask = (tok < tokens) & (k < N)
        res_mask = (tok < tokens) & (k >= N) & (k < OF_READ)
        read_mask = (tok < tokens) & (k >= OF_READ) & (k < ROWS)
        mask = (post_mask & NEED_DPOST) | (res_mask & NEED_DRES) | read_mask
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
        if NEED_DPRE:
            live = tok1 < tokens
            for o in tl.static_range(N):
                total = tl.load(h_post + tok1 * post_m + o * post_o, mask=live, other=0.0).to(tl.float32)
                total *= tl.sum(tl.where(k == OF_READ, acc, 0.0), axis=0)
                for i in tl.static_range(N):
                    product = tl.sum(tl.where(k == OF_READ + 1 + i, acc, 0.0), axis=0)
                    if HAS_RES:
                        at = h_res + tok1 * res_m + i * res_i + o * res_o
                        total = tl.fma(tl.load(at, mask=live, other=0.0).to(tl.float32), product, total)
                    elif i == o:
                        total += product
                tl.store(dh_pre + tok1 * N + o, total.to(dh_pre.dtype.element_ty), mask=live)
    elif NEED_DBIAS:
        _reduce_bias(bias_part, d_bias, pid - gate_programs, C, bias_tiles, BLOCK_C, BLOCK_R)


Read = tuple[torch.Tensor, torch.Tensor]


def forward(
    f: torch.Tensor,
    layer_bias: torch.Tensor | None,
    h_post: torch.Tensor,
    x: torch.Tensor,
    h_res: torch.Tensor | None,
    *,
    out_dtype: torch.dtype | None = None,
    read: Read | None = None,
) -> torch.Tensor:
    """x' [..., n, C] of f [..., C], h_post [..., n], x [..., n, C], h_res [..., n, n] (None: identity).

    read: h_pre [..., n], and memory for layer_input [..., C], which is filled.
    """
    n, width = x.shape[-2:]
    whole, out = room_like(x, 2, out_dtype)
    x, f, h_post = token_view(x, 2), token_view(f, 1), token_view(h_post, 1)
    layer_bias = None if layer_bias is None else layer_bias.contiguous()
    res = None if h_res is None else token_view(h_res, 2)
    pre, layer_input = (None, None) if read is None else (token_view(read[0], 1), read[1])
    tokens = x.shape[0]
    if tokens == 0:
        return whole
    if res is not None and combine_many.fits(x):
        combine_many.forward(f, layer_bias, h_post, x, res, pre, layer_input, out)
        return put_back(whole, out)
    tile = tile_for("combine" if read is None else "combine_read", n, x.element_size())
    block_m, block_c = tile.tokens, tile.columns
    tiles = cdiv(tokens, block_m)
    blocks = blocks_each(width, block_c, tokens, block_m, 8, x.device)
    with on_device(x):
        launch(
            combine_kernel, (tiles * cdiv(width, blocks * block_c),),
            f, layer_bias, h_post, x, res, pre, out, layer_input, tokens, width, *f.stride(), *h_post.stride(),
            *x.stride(), *_strides(res, 3), *_strides(pre, 2), *out.stride(), tiles, blocks, N=n,
            HAS_BIAS=layer_bias is not None, HAS_RES=res is not None, READ=read is not None,
            UNROLL=n <= MAX_UNROLLED, BLOCK_M=block_m, BLOCK_C=block_c, num_warps=tile.warps,
        )  # fmt: skip
    return put_back(whole, out)


def _strides(t: torch.Tensor | None, dims: int) -> tuple[int, ...]:
    return (0,) * dims if t is None else t.stride()


def backward(
    d_x_new: torch.Tensor | None,
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
    needs = (*wanted(needs, 5), False)
    return backward_with_read(d_x_new, f, layer_bias, h_post, x, h_res, None, needs, d_x, in_place=in_place)[:5]


def backward_with_read(
    d_x_new: torch.Tensor | None,
    f: torch.Tensor,
    layer_bias: torch.Tensor | None,
    h_post: torch.Tensor,
    x: torch.Tensor,
    h_res: torch.Tensor | None,
    read: Read | None,
    needs: Sequence[bool],
    d_x: torch.Tensor | None = None,
    *,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `backward`, where x' is read with given gates, too; the gradient of these follows.

    read: the gates [..., n], and the gradient of layer_input [..., C]. d_x_new: that of other readers of x', if any.
    """
    need_df, need_dbias, need_dpost, need_dx, need_dres, need_dpre = wanted(needs, 6)
    need_dbias = need_dbias and layer_bias is not None
    need_dres = need_dres and h_res is not None
    need_dpre = need_dpre and read is not None
    n, width = x.shape[-2:]
    df, df_rows, df_strides = gradient_like(f, 1, need_df)
    unroll = n <= MAX_UNROLLED
    alone = h_res is not None and read is None and layer_bias is None
    many = alone and d_x_new is not None and combine_many.fits(x, d_x_new)
    takes_over = in_place and need_dx and (unroll or many) and d_x_new is not None
    if takes_over and d_x_new is not None and d_x_new.stride() == x.stride() and d_x_new.dtype == x.dtype:
        # A program reads a block of all streams before it writes any of it.
        dx, dx_rows = d_x_new, token_view(d_x_new, 2)
        dx_strides = dx_rows.stride()
    else:
        dx, dx_rows, dx_strides = gradient_like(x, 2, need_dx)
    dbias, dpost = empty_gradient(layer_bias, need_dbias, x), empty_gradient(h_post, need_dpost, x)
    dres = empty_gradient(h_res, need_dres, x)
    dpre = empty_gradient(None if read is None else read[0], need_dpre, x)
    layer_bias = None if layer_bias is None else layer_bias.contiguous()
    d_out = None if d_x_new is None else token_view(d_x_new, 2)
    x, f, post = token_view(x, 2), token_view(f, 1), token_view(h_post, 1)
    res = None if h_res is None else token_view(h_res, 2)
    pre, d_read = (None, None) if read is None else (token_view(t, 1) for t in read)
    tokens = x.shape[0]
    results = df, dbias, dpost, dx, dres, dpre
    if tokens == 0:
        dbias.zero_()
        return results
    if not any((need_df, need_dbias, need_dpost, need_dx, need_dres, need_dpre)):
        return results
    whole = d_x is None and layer_bias is None and read is None and all((need_df, need_dpost, need_dx, need_dres))
    if whole and res is not None and d_out is not None and combine_gradients.fits((d_out, f, df_rows, dx_rows, x)):
        sums = combine_gradients.backward(dx_rows, df_rows, d_out, f, post.contiguous(), x, res.contiguous())
        reduce_partial_sums(sums, nothing(x), 0, dpost, dres, dbias, x)
        put_back(df, df_rows)
        put_back(dx, dx_rows)
        return results
    if many and res is not None and d_out is not None:
        given = laid_out_as(d_x, dx_rows)
        needed = need_df, need_dpost, need_dx, need_dres
        combine_many.backward(d_out, f, post, x, res, given, (df_rows, dpost, dx_rows, dres), needed)
        put_back(df, df_rows)
        put_back(dx, dx_rows)
        return results
    kernel = combine_backward_kernel if unroll else combine_backward_looped_kernel
    tile = tile_for("combine_backward" if read is None else "combine_read_backward", n, x.element_size())
    block_m, block_c = (tile.tokens, tile.columns) if unroll else (4, SUM_COLUMNS)
    tiles, splits = cdiv(tokens, block_m), cdiv(width, SUM_COLUMNS)
    rows = n + n * n + (n + 1 if need_dpre else 0)
    need_gates = need_dpost or need_dres or need_dpre
    sums = torch.empty(splits if need_gates else 0, rows, tokens, dtype=torch.float32, device=x.device)
    bias_part = tile_sums(tiles if need_dbias else 0, width, x)
    with on_device(x):
        launch(
            kernel, (tiles * splits,),
            d_out, d_read, f, layer_bias, post, x, res, pre, laid_out_as(d_x, dx_rows), df_rows, dx_rows, sums,
            bias_part, tokens, width, *_strides(d_out, 3), *_strides(d_read, 2), *f.stride(), *post.stride(),
            *x.stride(), *_strides(res, 3), *_strides(pre, 2), *df_strides, *dx_strides, tiles, N=n,
            HAS_OUT=d_out is not None, READ=read is not None, HAS_BIAS=layer_bias is not None,
            HAS_RES=res is not None, HAS_DX=d_x is not None, NEED_DF=need_df, NEED_DBIAS=need_dbias,
            NEED_DPOST=need_dpost, NEED_DX=need_dx, NEED_DRES=need_dres, NEED_DPRE=need_dpre, COLUMNS=SUM_COLUMNS,
            BLOCK_M=block_m, BLOCK_C=block_c, VECTOR=16 // x.element_size(), num_warps=tile.warps,
        )  # fmt: skip
    reduce_partial_sums(sums, bias_part, tiles, dpost, dres, dbias, x, (post, res, dpre))
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
    read: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor] | None = None,
) -> None:
    """Fill dh_post, dh_res and d_bias, those that have elements, and dh_pre.

    From sums [splits, rows, M] and bias_part [bias_tiles, C]. read: h_post [M, n], h_res [M, n, n] or None, and dh_pre.
    """
    tokens, n, width = x.shape
    post, res, dh_pre = read or (None, None, nothing(x))
    need_dpost, need_dres, need_dpre, need_dbias = (bool(t.numel() > 0) for t in (dh_post, dh_res, dh_pre, d_bias))
    if not (need_dpost or need_dres or need_dpre or need_dbias):
        return
    padded = next_power_of_2(n + n * n + (n + 1 if need_dpre else 0))
    block_t = max(4, min(32, 2048 // padded))
    gate_programs = cdiv(tokens, block_t) if need_dpost or need_dres or need_dpre else 0
    bias_programs = cdiv(width, 64) if need_dbias else 0
    with on_device(x):
        launch(
            combine_reduce_kernel, (gate_programs + bias_programs,),
            sums, bias_part, post, res, dh_post, dh_res, dh_pre, d_bias, tokens, width, *_strides(post, 2),
            *_strides(res, 3), bias_tiles, sums.shape[0], gate_programs, N=n, HAS_RES=res is not None,
            NEED_DPOST=need_dpost, NEED_DRES=need_dres, NEED_DPRE=need_dpre, NEED_DBIAS=need_dbias, PADDED=padded,
            AT_ONCE=8, BLOCK_T=block_t, BLOCK_C=64, BLOCK_R=32, num_warps=4,
        )  # fmt: skip
