"""The backward of the combine for streams of bf16, in Gluon: as in `expand_combine`, with copies on their way.

    dx[i] = sum_o h_res[i, o] dx'[o]                df = sum_o h_post[o] dx'[o]
    dh_post[o] = <f, dx'[o]>                        dh_res[i, o] = <x[i], dx'[o]>

A program owns some tokens and goes through blocks of columns of all streams, while the next one is copied into shared
memory. A thread keeps the sums of its own columns until the end: for 8 streams 72 numbers. Few
others then fit into registers, so h_res is read again for every block.
"""

# mypy: disable-error-code="assignment,misc,var-annotated"
# (A tuple that a kernel builds up one by one changes its type each time.)
from __future__ import annotations

from collections.abc import Sequence

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from mhc_compile.kernels import gpus, one_pass
from mhc_compile.kernels.common import cdiv, launch, on_device
from mhc_compile.kernels.one_pass import barrier, load_to_shared
from mhc_compile.kernels.opaque import opaque

TOKENS, COLUMNS = 8, 128
WARPS, STAGES = 4, 3
# Columns whose sums a program adds up.
SUM_COLUMNS = 1024


@gluon.jit
def _fetch(grad_s, x_s, f_s, stage, d_x_new, x, f, tile, start, bound, M, C, N: gl.constexpr, BLOCK_M: gl.constexpr,
           BLOCK_C: gl.constexpr, TILE: gl.constexpr):  # fmt: skip
    """Start copying the columns from `start` on, below `bound`; streams lie one after the other as rows."""
    c = (start + gl.arange(0, BLOCK_C, gl.SliceLayout(0, TILE)))[None, :]
    row = gl.arange(0, N * BLOCK_M, gl.SliceLayout(1, TILE))[:, None]
    tok = (row % BLOCK_M).to(gl.int64) + tile
    mask = (tok < M) & (c < bound)
    at = tok * (N * C) + (row // BLOCK_M) * C + c
    tok_1 = gl.arange(0, BLOCK_M, gl.SliceLayout(1, TILE)).to(gl.int64)[:, None] + tile
    load_to_shared(grad_s.index(stage), d_x_new + at, mask=mask)
    f_at = f + tok_1 * C + c
    load_to_shared(f_s.index(stage), f_at, mask=(tok_1 < M) & (c < bound))
    load_to_shared(x_s.index(stage), x + at, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _own_sums(v, BLOCK_M: gl.constexpr, LANES: gl.constexpr):
    """The sums of the 8 columns that a thread has."""
    return gl.sum(gl.reshape(v, [BLOCK_M, LANES, 8]), axis=2)


@opaque("dx", "df", "sums_part")
@gluon.jit(do_not_specialize=["M"])
def combine_gradients_kernel(d_x_new, f, h_post, x, h_res, dx, df, sums_part, M, C, N: gl.constexpr,
                             SUM_COLUMNS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_C: gl.constexpr,
                             WARPS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """dx, df, and sums_part [splits, n + n*n, M] of SUM_COLUMNS columns, dh_post before the rows of dh_res."""
    LANES: gl.constexpr = BLOCK_C // 8
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    TOKEN: gl.constexpr = gl.SliceLayout(1, TILE)
    WIDE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])

    pid = gl.program_id(0)
    splits = gl.cdiv(C, SUM_COLUMNS)
    split = pid % splits
    tile = (pid // splits).to(gl.int64) * BLOCK_M
    tokens = M.to(gl.int64)
    first = split * SUM_COLUMNS
    bound = gl.minimum(first + SUM_COLUMNS, C)
    # An allocation for each tensor: between copies into the same, Triton puts a barrier.
    grad_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N * BLOCK_M, BLOCK_C], WIDE)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N * BLOCK_M, BLOCK_C], WIDE)
    f_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_C], WIDE)
    for stage in gl.static_range(STAGES - 1):
        _fetch(grad_s, x_s, f_s, stage, d_x_new, x, f, tile, first + stage * BLOCK_C, bound, M, C, N, BLOCK_M, BLOCK_C,
               TILE)  # fmt: skip
    tok = gl.arange(0, BLOCK_M, TOKEN).to(gl.int64) + tile
    live = tok < tokens
    nothing = _own_sums(gl.zeros([BLOCK_M, BLOCK_C], gl.float32, TILE), BLOCK_M, LANES)
    sums = ()
    for _ in gl.static_range(N + N * N):
        sums = sums + (nothing,)
    turn = 0
    for start in range(first, bound, BLOCK_C):
        async_copy.wait_group(STAGES - 2)
        barrier()
        _fetch(grad_s, x_s, f_s, (turn + STAGES - 1) % STAGES, d_x_new, x, f, tile, start + (STAGES - 1) * BLOCK_C,
               bound, M, C, N, BLOCK_M, BLOCK_C, TILE)  # fmt: skip
        c = (start + gl.arange(0, BLOCK_C, gl.SliceLayout(0, TILE)))[None, :]
        mask = live[:, None] & (c < C)
        at = tok[:, None] * (N * C) + c
        d_new = ()
        for o in gl.static_range(N):
            d_new = d_new + (grad_s.index(turn).slice(o * BLOCK_M, BLOCK_M, 0).load(TILE),)
        changed = ()
        # f and the streams one by one: what is kept of each are sums, and its own gradient goes out at once.
        for i in gl.static_range(N + 1):
            if i == 0:
                v = f_s.index(turn).load(TILE).to(gl.float32)
            else:
                v = x_s.index(turn).slice((i - 1) * BLOCK_M, BLOCK_M, 0).load(TILE).to(gl.float32)
            grad = gl.zeros([BLOCK_M, BLOCK_C], gl.float32, TILE)
            for o in gl.static_range(N):
                if i == 0:
                    factor = gl.load(h_post + tok * N + o, mask=live, other=0.0)
                else:
                    factor = gl.load(h_res + tok * (N * N) + (i - 1) * N + o, mask=live, other=0.0)
                d = d_new[o].to(gl.float32)
                grad = gl.fma(gl.zeros_like(d) + factor.to(gl.float32)[:, None], d, grad)
                changed = changed + (sums[i * N + o] + _own_sums(v * d, BLOCK_M, LANES),)
            if i == 0:
                gl.store(df + tok[:, None] * C + c, grad.to(gl.bfloat16), mask=mask)
            else:
                gl.store(dx + at + (i - 1) * C, grad.to(gl.bfloat16), mask=mask)
        sums = changed
        turn = (turn + 1) % STAGES
    async_copy.wait_group(0)
    for row in gl.static_range(N + N * N):
        total = gl.convert_layout(gl.sum(sums[row], axis=1), TOKEN)
        gl.store(sums_part + (split * (N + N * N) + row).to(gl.int64) * tokens + tok, total, mask=live)


def fits(streams: Sequence[torch.Tensor]) -> bool:
    """Whether the kernel is for these d_x_new, f, df, dx and x [M, n, C], and for their device."""
    if not all(one_pass.in_order(t, t.dim() - 1) for t in streams):
        return False
    x = streams[-1]
    n, width = x.shape[-2:]
    return n in (2, 4, 8) and width % 16 == 0 and x.numel() > 0 and gpus.of(x.device).gradients_once


def backward(
    dx: torch.Tensor,
    df: torch.Tensor,
    d_x_new: torch.Tensor,
    f: torch.Tensor,
    h_post: torch.Tensor,
    x: torch.Tensor,
    h_res: torch.Tensor,
) -> torch.Tensor:
    """Fill dx [M, n, C], which may be d_x_new, and df [M, C]; return sums_part [splits, n + n*n, M]."""
    tokens, n, width = x.shape
    splits = cdiv(width, SUM_COLUMNS)
    sums_part = torch.empty(splits, n + n * n, tokens, dtype=torch.float32, device=x.device)
    with on_device(x):
        launch(
            combine_gradients_kernel, (cdiv(tokens, TOKENS) * splits,),
            d_x_new, f, h_post, x, h_res, dx, df, sums_part, tokens, width, N=n, SUM_COLUMNS=SUM_COLUMNS,
            BLOCK_M=TOKENS, BLOCK_C=COLUMNS, WARPS=WARPS, STAGES=STAGES, num_warps=WARPS,
        )  # fmt: skip
    return sums_part
