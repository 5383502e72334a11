"""The wide part of `boundary`'s backward in one pass, in Gluon: products and the combine's backward, without dx'.

    dx'[o] = d_x_new[o] + h_pre[o] d_layer_input + coefficient x_new[o] + dh @ phi[o]
    dx[i] = sum_o h_res[i, o] dx'[o]        df = sum_o h_post[o] dx'[o]
    dphi = dh^T @ x_new                     dh_post[o] = <f, dx'[o]>, dh_res[i, o] = <x[i], dx'[o]>

The coefficient may be one for each stream.

A program owns COLUMNS columns of all streams and a stretch of tokens, TOKENS at a time. Tensor cores leave the products
in their own layout, one thread far from the next; here the program says where each tile lies, which Triton does not
let it, and copies the next tile into shared memory while it computes. In C-units of n = 4 it reads 14 and writes 5,
where products and combine apart move 27.
"""

# mypy: disable-error-code="assignment,misc,var-annotated"
# (A tuple that a kernel builds up one by one changes its type each time.)
from __future__ import annotations

from collections.abc import Sequence

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from mhc_compile.kernels import gpus, one_pass
from mhc_compile.kernels.common import cdiv, launch, on_device, share_tokens
from mhc_compile.kernels.one_pass import ROWS, barrier, load_to_shared, split_phi
from mhc_compile.kernels.opaque import opaque

TOKENS, COLUMNS = 16, 64
WARPS, STAGES = 4, 2
# Programs per processor: as many as its shared memory holds.
WAVES = 2


@gluon.jit
def _fetch(new_s, grad_s, old_s, input_s, f_s, dh_s, stage, x_new, d_x_new, x, d_layer_input, f, dh, start, last, M,
           C, block, N: gl.constexpr, ROW: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_C: gl.constexpr,
           TILE: gl.constexpr, NARROW: gl.constexpr):  # fmt: skip
    """Start copying all that is read of the tokens from `start` on; streams lie one after the other as rows."""
    c = (block * BLOCK_C + gl.arange(0, BLOCK_C, gl.SliceLayout(0, TILE)))[None, :]
    row = gl.arange(0, N * BLOCK_M, gl.SliceLayout(1, TILE))[:, None]
    tok = (row % BLOCK_M).to(gl.int64) + start
    mask = (tok < last) & (c < C)
    at = tok * (N * C) + (row // BLOCK_M) * C + c
    k = gl.arange(0, 32, gl.SliceLayout(0, NARROW))[None, :]
    # Three parts and one block of rows that nobody reads: a power of two.
    row_h = gl.arange(0, 4 * BLOCK_M, gl.SliceLayout(1, NARROW))[:, None]
    part = row_h // BLOCK_M
    tok_h = (row_h % BLOCK_M).to(gl.int64) + start
    dh_at = dh + part * (M.to(gl.int64) * ROW) + tok_h * ROW + k
    tok_1 = (gl.arange(0, BLOCK_M, gl.SliceLayout(1, TILE)).to(gl.int64) + start)[:, None]
    at_1 = tok_1 * C + c
    mask_1 = (tok_1 < last) & (c < C)
    # What is needed first comes first.
    load_to_shared(new_s.index(stage), x_new + at, mask=mask)
    load_to_shared(dh_s.index(stage), dh_at, mask=(tok_h < last) & (k < ROW) & (part < 3))
    load_to_shared(grad_s.index(stage), d_x_new + at, mask=mask)
    load_to_shared(input_s.index(stage), d_layer_input + at_1, mask=mask_1)
    load_to_shared(old_s.index(stage), x + at, mask=mask)
    load_to_shared(f_s.index(stage), f + at_1, mask=mask_1)
    async_copy.commit_group()


@gluon.jit
def _factors(coefficient, h_pre, h_post, h_res, tok, live, tokens, N: gl.constexpr, COEFFICIENTS: gl.constexpr):
    """Per token: coefficients, h_pre, h_post and the rows of h_res, asked for before any of them is needed."""
    values = ()
    for o in gl.static_range(COEFFICIENTS):
        values = values + (gl.load(coefficient + tok * COEFFICIENTS + o, mask=live, other=0.0)[:, None],)
    for o in gl.static_range(N):
        values = values + (gl.load(h_pre + o * tokens + tok, mask=live, other=0.0)[:, None],)
    for o in gl.static_range(N):
        values = values + (gl.load(h_post + tok * N + o, mask=live, other=0.0).to(gl.float32)[:, None],)
    for i in gl.static_range(N * N):
        values = values + (gl.load(h_res + tok * (N * N) + i, mask=live, other=0.0).to(gl.float32)[:, None],)
    return values


@opaque("dx", "df", "dphi_part", "sums_part")
@gluon.jit(do_not_specialize=["M", "tokens_each"])
def boundary_gradients_kernel(d_x_new, d_layer_input, x_new, f, x, phi, norm_weight, dh, coefficient, h_pre, h_post,
                              h_res, dx, df, dphi_part, sums_part, M, tokens_each, C, phi_k, phi_c, N: gl.constexpr,
                              K: gl.constexpr, COEFFICIENTS: gl.constexpr, ROW: gl.constexpr,
                              ROWS: gl.constexpr, HAS_NORM: gl.constexpr, BLOCK_M: gl.constexpr,
                              BLOCK_C: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """dx, df, dphi_part [splits, K, n*C] and sums_part [blocks, n + n*n, M] of BLOCK_C columns of tokens_each tokens.

    dh [3, M, ROW] comes as bf16 parts, the largest first; of phi * norm_weight two are made here. coefficient
    [M, COEFFICIENTS] has one number for all streams, or one for each.
    """
    LANES: gl.constexpr = BLOCK_C // 8
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    TOKEN: gl.constexpr = gl.SliceLayout(1, TILE)
    SUMS: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    # Swizzled so that the 16 bytes which eight neighbouring rows hold of one column lie in different banks.
    WIDE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    THIN: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    SUMMED: gl.constexpr = N + N * N
    SUM_TILES: gl.constexpr = (SUMMED + LANES - 1) // LANES

    pid = gl.program_id(0)
    blocks = gl.cdiv(C, BLOCK_C)
    block = pid % blocks
    split = pid // blocks
    tokens = M.to(gl.int64)
    c_1 = block * BLOCK_C + gl.arange(0, BLOCK_C, gl.SliceLayout(0, TILE))
    inside = (c_1 < C)[None, :]
    c = c_1[None, :]

    phi_s = ()
    for _ in gl.static_range(2):
        phi_s = phi_s + (gl.allocate_shared_memory(gl.bfloat16, [N * ROWS, BLOCK_C], WIDE),)
    # An allocation for each tensor: between copies into the same, Triton puts a barrier.
    new_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N * BLOCK_M, BLOCK_C], WIDE)
    grad_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N * BLOCK_M, BLOCK_C], WIDE)
    old_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N * BLOCK_M, BLOCK_C], WIDE)
    input_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_C], WIDE)
    f_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_C], WIDE)
    dh_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 4 * BLOCK_M, 32], THIN)
    first = split * tokens_each
    last = gl.minimum(first + tokens_each, M)
    for stage in gl.static_range(STAGES - 1):
        _fetch(new_s, grad_s, old_s, input_s, f_s, dh_s, stage, x_new, d_x_new, x, d_layer_input, f, dh,
               first + stage * BLOCK_M, last, M, C, block, N, ROW, BLOCK_M, BLOCK_C, TILE, NARROW)  # fmt: skip
    split_phi(phi_s, 0, phi, norm_weight, phi_k, phi_c, block * BLOCK_C, C, N, K, 2, ROWS, HAS_NORM, BLOCK_C, TILE)
    lane = gl.arange(0, LANES, gl.SliceLayout(0, SUMS))[None, :]
    dphi = ()
    for _ in gl.static_range(N):
        dphi = dphi + (gl.zeros([ROWS, BLOCK_C], gl.float32, MMA),)
    turn = 0
    for start in range(first, last, BLOCK_M):
        async_copy.wait_group(STAGES - 2)
        barrier()
        _fetch(new_s, grad_s, old_s, input_s, f_s, dh_s, (turn + STAGES - 1) % STAGES, x_new, d_x_new, x,
               d_layer_input, f, dh, start + (STAGES - 1) * BLOCK_M, last, M, C, block, N, ROW, BLOCK_M, BLOCK_C,
               TILE, NARROW)  # fmt: skip
        new_t = new_s.index(turn)
        parts_s = dh_s.index(turn)
        tok_1 = gl.arange(0, BLOCK_M, TOKEN).to(gl.int64) + start
        live = tok_1 < last
        mask = live[:, None] & inside
        at = tok_1[:, None] * (N * C) + c
        factors = _factors(coefficient, h_pre, h_post, h_res, tok_1, live, tokens, N, COEFFICIENTS)

        high_t = parts_s.slice(0, BLOCK_M, 0).permute((1, 0)).load(LEFT)
        middle_t = parts_s.slice(BLOCK_M, BLOCK_M, 0).permute((1, 0)).load(LEFT)
        low_t = parts_s.slice(2 * BLOCK_M, BLOCK_M, 0).permute((1, 0)).load(LEFT)
        summed = ()
        for o in gl.static_range(N):
            v = new_t.slice(o * BLOCK_M, BLOCK_M, 0).load(RIGHT)
            part = mma_v2(low_t, v, gl.zeros([ROWS, BLOCK_C], gl.float32, MMA))
            part = mma_v2(middle_t, v, part)
            part = mma_v2(high_t, v, part)
            # Not accumulated by tensor cores, which truncate (`common.add_rounded`).
            summed = summed + (gl.fma(part, gl.full_like(part, 1.0), dphi[o]),)
        dphi = summed

        high = parts_s.slice(0, BLOCK_M, 0).load(LEFT)
        middle = parts_s.slice(BLOCK_M, BLOCK_M, 0).load(LEFT)
        d_input = input_s.index(turn).load(TILE).to(gl.float32)
        d_new = ()
        for o in gl.static_range(N):
            phi_high = phi_s[0].slice(o * ROWS, ROWS, 0).load(RIGHT)
            phi_middle = phi_s[1].slice(o * ROWS, ROWS, 0).load(RIGHT)
            # As in the products apart: dx is rounded to bf16, so the products of the smaller parts are left out.
            part = mma_v2(middle, phi_high, gl.zeros([BLOCK_M, BLOCK_C], gl.float32, MMA))
            part = mma_v2(high, phi_middle, part)
            part = mma_v2(high, phi_high, part)
            new = new_t.slice(o * BLOCK_M, BLOCK_M, 0).load(TILE).to(gl.float32)
            v = gl.convert_layout(part, TILE) + factors[o % COEFFICIENTS] * new
            v += factors[COEFFICIENTS + o] * d_input + grad_s.index(turn).slice(o * BLOCK_M, BLOCK_M, 0).load(TILE).to(
                gl.float32
            )
            d_new = d_new + (v,)

        sums = ()
        for _ in gl.static_range(SUM_TILES):
            sums = sums + (gl.zeros([BLOCK_M, LANES], gl.float32, SUMS),)
        # f and the streams one by one: what is kept of each are sums, and its own gradient goes out at once.
        for i in gl.static_range(N + 1):
            if i == 0:
                v = f_s.index(turn).load(TILE).to(gl.float32)
            else:
                v = old_s.index(turn).slice((i - 1) * BLOCK_M, BLOCK_M, 0).load(TILE).to(gl.float32)
            grad = gl.zeros([BLOCK_M, BLOCK_C], gl.float32, TILE)
            for o in gl.static_range(N):
                total = gl.convert_layout(gl.sum(d_new[o] * v, axis=1), gl.SliceLayout(1, SUMS))[:, None]
                changed = ()
                for j in gl.static_range(SUM_TILES):
                    if j == (i * N + o) // LANES:
                        changed = changed + (gl.where(lane == (i * N + o) % LANES, total, sums[j]),)
                    else:
                        changed = changed + (sums[j],)
                sums = changed
                # h_post stands before the rows of h_res, as f before the streams.
                grad += factors[COEFFICIENTS + N + i * N + o] * d_new[o]
            if i == 0:
                gl.store(df + tok_1[:, None] * C + c, grad.to(gl.bfloat16), mask=mask)
            else:
                gl.store(dx + at + (i - 1) * C, grad.to(gl.bfloat16), mask=mask)
        sums_tok = (gl.arange(0, BLOCK_M, gl.SliceLayout(1, SUMS)).to(gl.int64) + start)[:, None]
        for j in gl.static_range(SUM_TILES):
            row = j * LANES + lane
            sums_at = sums_part + (block * SUMMED + row).to(gl.int64) * tokens + sums_tok
            gl.store(sums_at, sums[j], mask=(sums_tok < last) & (row < SUMMED))
        turn = (turn + 1) % STAGES
    async_copy.wait_group(0)
    k_out = gl.arange(0, ROWS, gl.SliceLayout(1, MMA))[:, None]
    c_out = (block * BLOCK_C + gl.arange(0, BLOCK_C, gl.SliceLayout(0, MMA)))[None, :]
    for o in gl.static_range(N):
        dphi_at = dphi_part + (split * K + k_out).to(gl.int64) * (N * C) + o * C + c_out
        gl.store(dphi_at, dphi[o], mask=(k_out < K) & (c_out < C))


def fits(streams: Sequence[torch.Tensor | None], phi: torch.Tensor) -> bool:
    """Whether the kernel is for these d_x_new, d_layer_input, x_new, f and x [..., n, C], and for their device."""
    return one_pass.fits(streams, phi) and gpus.of(phi.device).gradients_once


def split_tokens(tokens: int, width: int, device: torch.device) -> tuple[int, int]:
    """How many programs share the tokens of a column block, and how many tokens each of them takes."""
    splits = max(1, WAVES * gpus.processors(device) // cdiv(width, COLUMNS))
    return share_tokens(tokens, splits, TOKENS)


def backward(
    dx: torch.Tensor,
    df: torch.Tensor,
    d_x_new: torch.Tensor,
    d_layer_input: torch.Tensor,
    x_new: torch.Tensor,
    f: torch.Tensor,
    x: torch.Tensor,
    phi: torch.Tensor,
    norm_weight: torch.Tensor | None,
    dh: torch.Tensor,
    coefficient: torch.Tensor,
    h_pre: torch.Tensor,
    h_post: torch.Tensor,
    h_res: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill dx [M, n, C], which may be d_x_new, and df [M, C]; return the partial sums of what is left.

    These are dphi_part [splits, K, n*C] and sums_part [blocks, n + n*n, M], dh_post before the rows of dh_res.
    """
    tokens, n, width = x.shape
    rows, columns = phi.shape
    norm_weight = None if norm_weight is None else norm_weight.contiguous()
    splits, each = split_tokens(tokens, width, x.device)
    blocks = cdiv(width, COLUMNS)

    dphi_part = torch.empty(splits, rows, columns, dtype=torch.float32, device=x.device)
    sums_part = torch.empty(blocks, n + n * n, tokens, dtype=torch.float32, device=x.device)
    with on_device(x):
        launch(
            boundary_gradients_kernel, (splits * blocks,),
            d_x_new, d_layer_input, x_new, f, x, phi, norm_weight, dh, coefficient, h_pre, h_post, h_res, dx, df,
            dphi_part, sums_part, tokens, each, width, phi.stride(0), phi.stride(1), N=n, K=rows,
            COEFFICIENTS=n if coefficient.dim() == 2 else 1, ROW=dh.shape[2], ROWS=ROWS,
            HAS_NORM=norm_weight is not None, BLOCK_M=TOKENS, BLOCK_C=COLUMNS, WARPS=WARPS, STAGES=STAGES,
            num_warps=WARPS,
        )  # fmt: skip
    return dphi_part, sums_part
