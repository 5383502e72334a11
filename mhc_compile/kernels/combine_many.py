"""The combine and its backward for 9 to 31 streams of bf16: a token's matrix times its streams, on tensor cores.

    x'[o] = h_post[o] * (f + layer_bias) + sum_i h_res[i, o] * x[i]
    dx[i] = d_x[i] + sum_o h_res[i, o] * dx'[o]     df = sum_o h_post[o] * dx'[o]
    dh_post[o] = <f, dx'[o]>                        dh_res[i, o] = <x[i], dx'[o]>

So many streams do not fit into registers. Without tensor cores each stream is read n times from cache. A product of
bf16 numbers is exact, and a float32 matrix is three bf16 parts. So results are those of float32, but for infinite
streams and gates: a sum of parts may be NaN where that of the whole is infinite.

The backward is for a matrix h_res, no layer bias, and no read with given gates. `expand_combine` has one for others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from mhc_compile.kernels.common import (
    INTERPRETED,
    add_rounded,
    blocks_each,
    cdiv,
    dot_bf16,
    launch,
    next_power_of_2,
    on_device,
    split_bf16,
)

# Columns of a program's tile, and its warps. Each warp of the backward computes all of dh_res, so that one does the
# least in total, and has registers for so many numbers of all streams.
COLUMNS, WARPS = 128, 4
BACKWARD_NUMBERS, BACKWARD_WARPS = 1024, 1
# The fewest streams that fill a tile of tensor cores by more than half.
FEWEST = 9


@triton.jit
def _times(h, v, INTERPRET: tl.constexpr):
    """h [n, n] @ v [n, columns] in float32, of a matrix in any float dtype and bf16 columns."""
    acc = tl.zeros([h.shape[0], v.shape[1]], tl.float32)
    if h.dtype == tl.bfloat16:
        return dot_bf16(h, v, acc, INTERPRET)
    high, middle, low = split_bf16(h.to(tl.float32))
    acc = dot_bf16(low, v, acc, INTERPRET)
    acc = dot_bf16(middle, v, acc, INTERPRET)
    return dot_bf16(high, v, acc, INTERPRET)


@triton.jit(do_not_specialize=["column_parts", "blocks_each"])
def combine_many_kernel(f, layer_bias, h_post, x, h_res, h_pre, out, layer_input, C, f_m, f_c, post_m, post_o, x_m,
                        x_n, x_c, res_m, res_i, res_o, pre_m, pre_o, out_m, out_n, out_c, column_parts, blocks_each,
                        N: tl.constexpr, NP: tl.constexpr, HAS_BIAS: tl.constexpr, READ: tl.constexpr,
                        BLOCK_C: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """x' [M, n, C], and with READ layer_input [M, C], for a token and blocks_each column blocks."""
    tok = (tl.program_id(0) // column_parts).to(tl.int64)
    first = tl.program_id(0) % column_parts * blocks_each * BLOCK_C
    o = tl.arange(0, NP)
    i = tl.arange(0, NP)
    inside = (o < N)[:, None] & (i < N)[None, :]
    turned = tl.load(h_res + tok * res_m + i[None, :] * res_i + o[:, None] * res_o, mask=inside, other=0.0)
    post = tl.load(h_post + tok * post_m + o * post_o, mask=o < N, other=0.0).to(tl.float32)
    if READ:
        pre = tl.load(h_pre + tok * pre_m + o * pre_o, mask=o < N, other=0.0).to(tl.float32)
    for start in tl.range(first, tl.minimum(first + blocks_each * BLOCK_C, C), BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        mask = (i < N)[:, None] & (c < C)[None, :]
        v = tl.load(x + tok * x_m + i[:, None] * x_n + c[None, :] * x_c, mask=mask, other=0.0)
        fb = tl.load(f + tok * f_m + c * f_c, mask=c < C, other=0.0).to(tl.float32)
        if HAS_BIAS:
            fb += tl.load(layer_bias + c, mask=c < C, other=0.0).to(tl.float32)
        new = add_rounded(_times(turned, v, INTERPRET), post[:, None] * fb[None, :]).to(out.dtype.element_ty)
        tl.store(out + tok * out_m + o[:, None] * out_n + c[None, :] * out_c, new, mask=mask)
        if READ:
            # Rows beyond the last stream are NaN where f is infinite.
            read = tl.sum(tl.where((o < N)[:, None], pre[:, None] * new.to(tl.float32), 0.0), axis=0)
            tl.store(layer_input + tok * C + c, read.to(layer_input.dtype.element_ty), mask=c < C)


@triton.jit
def combine_many_backward_kernel(d_out, f, h_post, x, h_res, d_x, df, dx, dh_post, dh_res, C, d_m, d_n, d_c, f_m,
                                 f_c, post_m, post_o, x_m, x_n, x_c, res_m, res_i, res_o, df_m, df_c, dx_m, dx_n, dx_c,
                                 N: tl.constexpr, NP: tl.constexpr, HAS_DX: tl.constexpr, NEED_DF: tl.constexpr,
                                 NEED_DPOST: tl.constexpr, NEED_DX: tl.constexpr, NEED_DRES: tl.constexpr,
                                 BLOCK_C: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """Every gradient of a token, whose sums over columns need no other program."""
    tok = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, NP)
    i = tl.arange(0, NP)
    inside = (i < N)[:, None] & (o < N)[None, :]
    if NEED_DX:
        res = tl.load(h_res + tok * res_m + i[:, None] * res_i + o[None, :] * res_o, mask=inside, other=0.0)
    if NEED_DF:
        post = tl.load(h_post + tok * post_m + o * post_o, mask=o < N, other=0.0).to(tl.float32)
    post_sums = tl.zeros([NP, BLOCK_C], tl.float32)
    res_sums = tl.zeros([NP, NP], tl.float32)
    for start in tl.range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        mask = (o < N)[:, None] & (c < C)[None, :]
        g = tl.load(d_out + tok * d_m + o[:, None] * d_n + c[None, :] * d_c, mask=mask, other=0.0)
        if NEED_DRES:
            v = tl.load(x + tok * x_m + i[:, None] * x_n + c[None, :] * x_c, mask=mask, other=0.0)
            part = dot_bf16(v, tl.trans(g), tl.zeros([NP, NP], tl.float32), INTERPRET)
            res_sums = add_rounded(part, res_sums)
        if NEED_DPOST:
            of_layer = tl.load(f + tok * f_m + c * f_c, mask=c < C, other=0.0).to(tl.float32)
            post_sums += g.to(tl.float32) * of_layer[None, :]
        if NEED_DF:
            total = tl.sum(post[:, None] * g.to(tl.float32), axis=0)
            tl.store(df + tok * df_m + c * df_c, total.to(df.dtype.element_ty), mask=c < C)
        if NEED_DX:
            d = _times(res, g, INTERPRET)
            at = tok * dx_m + i[:, None] * dx_n + c[None, :] * dx_c
            if HAS_DX:
                d += tl.load(d_x + at, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx + at, d.to(dx.dtype.element_ty), mask=mask)
    if NEED_DPOST:
        tl.store(dh_post + tok * N + o, tl.sum(post_sums, axis=1).to(dh_post.dtype.element_ty), mask=o < N)
    if NEED_DRES:
        at = dh_res + tok * (N * N) + i[:, None] * N + o[None, :]
        tl.store(at, res_sums.to(dh_res.dtype.element_ty), mask=inside)


def fits(*streams: torch.Tensor) -> bool:
    """Whether the kernels are for these x and gradients of x'."""
    return streams[0].shape[-2] >= FEWEST and all(t.dtype == torch.bfloat16 for t in streams)


def _rows(n: int) -> int:
    return max(16, next_power_of_2(n))


def forward(
    f: torch.Tensor,
    layer_bias: torch.Tensor | None,
    h_post: torch.Tensor,
    x: torch.Tensor,
    h_res: torch.Tensor,
    h_pre: torch.Tensor | None,
    layer_input: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Fill out [M, n, C] and, with the gates h_pre [M, n], layer_input [..., C]."""
    tokens, n, width = x.shape
    blocks = blocks_each(width, COLUMNS, tokens, 1, 8, x.device)
    parts = cdiv(width, blocks * COLUMNS)
    with on_device(x):
        launch(
            combine_many_kernel, (tokens * parts,),
            f, layer_bias, h_post, x, h_res, h_pre, out, layer_input, width, *f.stride(), *h_post.stride(),
            *x.stride(), *h_res.stride(), *((0, 0) if h_pre is None else h_pre.stride()), *out.stride(), parts,
            blocks, N=n, NP=_rows(n), HAS_BIAS=layer_bias is not None, READ=h_pre is not None, BLOCK_C=COLUMNS,
            INTERPRET=INTERPRETED, num_warps=WARPS,
        )  # fmt: skip


def backward(
    d_out: torch.Tensor,
    f: torch.Tensor,
    h_post: torch.Tensor,
    x: torch.Tensor,
    h_res: torch.Tensor,
    d_x: torch.Tensor | None,
    results: Sequence[torch.Tensor],
    needs: Sequence[bool],
) -> None:
    """Fill df [M, C], dh_post [M, n], dx [M, n, C] and dh_res [M, n, n], those that are needed; d_x lies as dx does."""
    tokens, n, width = x.shape
    df, dpost, dx, dres = results
    need_df, need_dpost, need_dx, need_dres = needs
    with on_device(x):
        launch(
            combine_many_backward_kernel, (tokens,),
            d_out, f, h_post, x, h_res, d_x, df, dx, dpost, dres, width, *d_out.stride(), *f.stride(),
            *h_post.stride(), *x.stride(), *h_res.stride(), *(df.stride() if need_df else (0, 0)),
            *(dx.stride() if need_dx else (0, 0, 0)), N=n, NP=_rows(n), HAS_DX=d_x is not None, NEED_DF=need_df,
            NEED_DPOST=need_dpost, NEED_DX=need_dx, NEED_DRES=need_dres, BLOCK_C=BACKWARD_NUMBERS // _rows(n),
            INTERPRET=INTERPRETED, num_warps=BACKWARD_WARPS,
        )  # fmt: skip
