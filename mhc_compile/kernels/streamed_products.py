"""The two wide products of a projection's backward for 8 streams of bf16, in Gluon for Hopper: as in `products`.

    dx = d_x + h_pre d_out + coefficient x + dh @ phi        dphi = dh^T @ x

A program owns COLUMNS columns of STREAMS streams and a stretch of tokens, TOKENS at a time. It copies the next tile
into shared memory while it computes, from where tensor cores take all they multiply, and finishes dx while they are
busy with dphi. The 80 rows of phi are 64 and 16 here: Triton's tiles have 2^i rows.
"""

# mypy: disable-error-code="assignment,misc,var-annotated"
# (A tuple that a kernel builds up one by one changes its type each time.)
from __future__ import annotations

from collections.abc import Sequence

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from mhc_compile.kernels import gpus, one_pass
from mhc_compile.kernels.common import cdiv, expected, launch, on_device, share_tokens
from mhc_compile.kernels.one_pass import barrier, copy_layout, load_to_shared, split_phi
from mhc_compile.kernels.opaque import opaque

TOKENS, COLUMNS, STREAMS = 32, 128, 2
WARPS, STAGES = 8, 2
# The rows of phi, in two pieces; rows beyond K are zero.
ROWS = 64, 16


@gluon.constexpr_function
def _in_shared_memory(columns: int) -> gl.NVMMASharedLayout:
    """How rows of bf16 lie that tensor cores read."""
    return gl.NVMMASharedLayout(min(128, 2 * columns), 16)


@gluon.jit
def _fetch_rows(dh_s, dh, k_first, start, last, M, ROW: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr,
                WARPS: gl.constexpr):  # fmt: skip
    """Start copying the parts of ROWS columns of dh."""
    LAYOUT: gl.constexpr = copy_layout(ROWS, WARPS)
    k = k_first + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
    # Three parts and one block of rows that nobody reads: a power of two.
    row = gl.arange(0, 4 * BLOCK_M, gl.SliceLayout(1, LAYOUT))[:, None]
    part = row // BLOCK_M
    tok = (row % BLOCK_M).to(gl.int64) + start
    at = dh + part * (M.to(gl.int64) * ROW) + tok * ROW + k
    load_to_shared(dh_s, at, mask=(tok < last) & (k < ROW) & (part < 3))


@gluon.jit
def _fetch(x_s, before_s, grad_s, dh_s, dh_2s, stage, x, d_x, d_out, dh, start, last, M, first_stream, C, block,
           N: gl.constexpr, STREAMS: gl.constexpr, ROW: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr,
           HAS_OUT: gl.constexpr, HAS_DX: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_C: gl.constexpr,
           WARPS: gl.constexpr):  # fmt: skip
    """Start copying all that is read of the tokens from `start` on; streams lie one after the other as rows."""
    TILE: gl.constexpr = copy_layout(BLOCK_C, WARPS)
    c = (block * BLOCK_C + gl.arange(0, BLOCK_C, gl.SliceLayout(0, TILE)))[None, :]
    row = gl.arange(0, STREAMS * BLOCK_M, gl.SliceLayout(1, TILE))[:, None]
    tok = (row % BLOCK_M).to(gl.int64) + start
    mask = (tok < last) & (c < C)
    at = tok * (N * C) + (first_stream + row // BLOCK_M) * C + c
    # What is needed first comes first.
    load_to_shared(x_s.index(stage), x + at, mask=mask)
    _fetch_rows(dh_s.index(stage), dh, 0, start, last, M, ROW, FIRST, BLOCK_M, WARPS)
    _fetch_rows(dh_2s.index(stage), dh, FIRST, start, last, M, ROW, SECOND, BLOCK_M, WARPS)
    if HAS_DX:
        load_to_shared(before_s.index(stage), d_x + at, mask=mask)
    if HAS_OUT:
        tok_1 = (gl.arange(0, BLOCK_M, gl.SliceLayout(1, TILE)).to(gl.int64) + start)[:, None]
        grad_at = d_out + tok_1 * C + c
        load_to_shared(grad_s.index(stage), grad_at, mask=(tok_1 < last) & (c < C))
    async_copy.commit_group()


@gluon.jit
def _dphi_of_tile(x_t, parts_s, like, BLOCK_M: gl.constexpr):
    """Start x^T @ dh of a stream's tile, for some of dh's columns."""
    part = gl.zeros_like(like)
    for rest in gl.static_range(2, -1, -1):
        right = parts_s.slice(rest * BLOCK_M, BLOCK_M, 0)
        part = warpgroup_mma(x_t.permute((1, 0)), right, part, is_async=True)
    return part


@gluon.jit
def _dx_of_rows(dx, phi_high, phi_middle, parts_s, BLOCK_M: gl.constexpr):
    """Start adding phi^T @ dh^T of some rows of phi to dx."""
    high = parts_s.slice(0, BLOCK_M, 0).permute((1, 0))
    middle = parts_s.slice(BLOCK_M, BLOCK_M, 0).permute((1, 0))
    # dx is rounded to bf16, so the products of the smaller parts are left out.
    dx = warpgroup_mma(phi_high.permute((1, 0)), middle, dx, is_async=True)
    dx = warpgroup_mma(phi_middle.permute((1, 0)), high, dx, is_async=True)
    return warpgroup_mma(phi_high.permute((1, 0)), high, dx, is_async=True)


@gluon.jit
def _store_dphi(dphi, dphi_part, k_first, split, first_stream, C, block, N: gl.constexpr, K: gl.constexpr,
                ROWS: gl.constexpr, STREAMS: gl.constexpr, BLOCK_C: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    k = k_first + gl.arange(0, ROWS, gl.SliceLayout(0, MMA))[None, :]
    c = (block * BLOCK_C + gl.arange(0, BLOCK_C, gl.SliceLayout(1, MMA)))[:, None]
    for s in gl.static_range(STREAMS):
        at = dphi_part + (split * K + k).to(gl.int64) * (N * C) + (first_stream + s) * C + c
        gl.store(at, dphi[s], mask=(k < K) & (c < C))


@opaque("dx", "dphi_part")
@gluon.jit(do_not_specialize=["M", "tokens_each"])
def streamed_products_kernel(x, d_out, d_x, phi, norm_weight, dh, coefficient, h_pre, dx, dphi_part, M, tokens_each, C,
                             phi_k, phi_c, N: gl.constexpr, STREAMS: gl.constexpr, K: gl.constexpr, ROW: gl.constexpr,
                             FIRST: gl.constexpr, SECOND: gl.constexpr, HAS_NORM: gl.constexpr, HAS_OUT: gl.constexpr,
                             HAS_DX: gl.constexpr, NEED_DPHI: gl.constexpr, BLOCK_M: gl.constexpr,
                             BLOCK_C: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """dx, and dphi_part [splits, K, n*C] of BLOCK_C columns of STREAMS streams of tokens_each tokens.

    dh [3, M, ROW] comes as bf16 parts, the largest first; of phi * norm_weight two are made here.
    """
    TILE: gl.constexpr = copy_layout(BLOCK_C, WARPS)
    TOKEN: gl.constexpr = gl.SliceLayout(1, TILE)
    # Tensor cores of Hopper multiply 64 rows at a time: columns of the streams, so that tokens may be fewer.
    DPHI: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, FIRST, 16])
    MORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, SECOND, 16])
    DX: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    WIDE: gl.constexpr = _in_shared_memory(BLOCK_C)

    pid = gl.program_id(0)
    groups = N // STREAMS
    blocks = gl.cdiv(C, BLOCK_C)
    # The streams of a block run side by side, so that d_out comes from L2.
    first_stream = pid % groups * STREAMS
    block = pid // groups % blocks
    split = pid // (groups * blocks)
    tokens = M.to(gl.int64)
    c = (block * BLOCK_C + gl.arange(0, BLOCK_C, gl.SliceLayout(0, TILE)))[None, :]

    # The parts of the first rows of phi, and of the others.
    high_s = gl.allocate_shared_memory(gl.bfloat16, [STREAMS * FIRST, BLOCK_C], WIDE)
    middle_s = gl.allocate_shared_memory(gl.bfloat16, [STREAMS * FIRST, BLOCK_C], WIDE)
    high_2s = gl.allocate_shared_memory(gl.bfloat16, [STREAMS * SECOND, BLOCK_C], WIDE)
    middle_2s = gl.allocate_shared_memory(gl.bfloat16, [STREAMS * SECOND, BLOCK_C], WIDE)
    dh_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 4 * BLOCK_M, FIRST], _in_shared_memory(FIRST))
    dh_2s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 4 * BLOCK_M, SECOND], _in_shared_memory(SECOND))
    # An allocation for each tensor: between copies into the same, Triton puts a barrier.
    x_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, STREAMS * BLOCK_M, BLOCK_C], WIDE)
    before_s = x_s
    grad_s = x_s
    if HAS_DX:
        before_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, STREAMS * BLOCK_M, BLOCK_C], WIDE)
    if HAS_OUT:
        grad_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_C], WIDE)
    first = split * tokens_each
    last = gl.minimum(first + tokens_each, M)
    for stage in gl.static_range(STAGES - 1):
        _fetch(x_s, before_s, grad_s, dh_s, dh_2s, stage, x, d_x, d_out, dh, first + stage * BLOCK_M, last, M,
               first_stream, C, block, N, STREAMS, ROW, FIRST, SECOND, HAS_OUT, HAS_DX, BLOCK_M, BLOCK_C,
               WARPS)  # fmt: skip
    own_phi = phi + first_stream * C * phi_c
    own_weight = norm_weight
    if HAS_NORM:
        own_weight = norm_weight + first_stream * C
    split_phi((high_s, middle_s), 0, own_phi, own_weight, phi_k, phi_c, block * BLOCK_C, C, STREAMS, K, 2, FIRST,
              HAS_NORM, BLOCK_C, TILE)  # fmt: skip
    split_phi((high_2s, middle_2s), FIRST, own_phi, own_weight, phi_k, phi_c, block * BLOCK_C, C, STREAMS, K, 2, SECOND,
              HAS_NORM, BLOCK_C, TILE)  # fmt: skip
    dphi = ()
    more = ()
    for _ in gl.static_range(STREAMS):
        dphi = dphi + (gl.zeros([BLOCK_C, FIRST], gl.float32, DPHI),)
        more = more + (gl.zeros([BLOCK_C, SECOND], gl.float32, MORE),)
    turn = 0
    for start in range(first, last, BLOCK_M):
        async_copy.wait_group(STAGES - 2)
        # Tensor cores read shared memory past the threads that filled it.
        fence_async_shared()
        barrier()
        _fetch(x_s, before_s, grad_s, dh_s, dh_2s, (turn + STAGES - 1) % STAGES, x, d_x, d_out, dh,
               start + (STAGES - 1) * BLOCK_M, last, M, first_stream, C, block, N, STREAMS, ROW, FIRST, SECOND, HAS_OUT,
               HAS_DX, BLOCK_M, BLOCK_C, WARPS)  # fmt: skip
        tok = gl.arange(0, BLOCK_M, TOKEN).to(gl.int64) + start
        live = tok < last
        mask = live[:, None] & (c < C)
        factor = gl.load(coefficient + tok, mask=live, other=0.0)[:, None]
        pre = ()
        if HAS_OUT:
            for s in gl.static_range(STREAMS):
                pre = pre + (gl.load(h_pre + (first_stream + s) * tokens + tok, mask=live, other=0.0)[:, None],)
        x_t = x_s.index(turn)
        first_t, second_t = dh_s.index(turn), dh_2s.index(turn)
        added = ()
        products = ()
        for s in gl.static_range(STREAMS):
            v = gl.zeros([BLOCK_C, BLOCK_M], gl.float32, DX)
            v = _dx_of_rows(v, high_s.slice(s * FIRST, FIRST, 0), middle_s.slice(s * FIRST, FIRST, 0), first_t,
                            BLOCK_M)  # fmt: skip
            v = _dx_of_rows(v, high_2s.slice(s * SECOND, SECOND, 0), middle_2s.slice(s * SECOND, SECOND, 0),
                            second_t, BLOCK_M)  # fmt: skip
            added = added + (v,)
        if NEED_DPHI:
            for s in gl.static_range(STREAMS):
                rows = x_t.slice(s * BLOCK_M, BLOCK_M, 0)
                products = products + (_dphi_of_tile(rows, first_t, dphi[s], BLOCK_M),)
                products = products + (_dphi_of_tile(rows, second_t, more[s], BLOCK_M),)
        # Those of dphi are three each; of all that are under way a processor lets no more than seven go on.
        added = warpgroup_mma_wait(3 * len(products), deps=added)
        for s in gl.static_range(STREAMS):
            v = gl.convert_layout(gl.permute(added[s], (1, 0)), TILE)
            v += factor * x_t.slice(s * BLOCK_M, BLOCK_M, 0).load(TILE).to(gl.float32)
            if HAS_OUT:
                v += pre[s] * grad_s.index(turn).load(TILE).to(gl.float32)
            if HAS_DX:
                v += before_s.index(turn).slice(s * BLOCK_M, BLOCK_M, 0).load(TILE).to(gl.float32)
            at = tok[:, None] * (N * C) + (first_stream + s) * C + c
            gl.store(dx + at, v.to(gl.bfloat16), mask=mask)
        if NEED_DPHI:
            products = warpgroup_mma_wait(0, deps=products)
            summed = ()
            summed_more = ()
            for s in gl.static_range(STREAMS):
                # Not accumulated by tensor cores, which truncate (`common.add_rounded`).
                summed = summed + (gl.fma(products[2 * s], gl.full_like(dphi[s], 1.0), dphi[s]),)
                summed_more = summed_more + (gl.fma(products[2 * s + 1], gl.full_like(more[s], 1.0), more[s]),)
            dphi = summed
            more = summed_more
        turn = (turn + 1) % STAGES
    async_copy.wait_group(0)
    if NEED_DPHI:
        _store_dphi(dphi, dphi_part, 0, split, first_stream, C, block, N, K, FIRST, STREAMS, BLOCK_C, DPHI)
        _store_dphi(more, dphi_part, FIRST, split, first_stream, C, block, N, K, SECOND, STREAMS, BLOCK_C, MORE)


def fits(streams: Sequence[torch.Tensor | None], phi: torch.Tensor) -> bool:
    """Whether the kernel is for these x, dx and, if there are any, d_x [M, n, C] and d_out [M, C], and their device."""
    x = streams[0]
    if x is None or not all(t is None or one_pass.in_order(t, t.dim() - 1) for t in streams):
        return False
    rows, (n, width) = phi.shape[0], x.shape[-2:]
    alike = n == 8 and ROWS[0] < rows <= sum(ROWS) and rows % 8 == 0 and width % 16 == 0 and x.numel() > 0
    return alike and gpus.of(x.device).streams_once


def split_tokens(tokens: int, groups: int, device: torch.device, tile: int = TOKENS) -> tuple[int, int]:
    """How many programs share the tokens of a group of columns, and how many tokens, in whole tiles, each takes."""
    at_once, usual = gpus.processors(device), expected(tokens)

    def time(splits: int) -> float:
        """In rounds of programs with all tokens; partial sums of dphi take as long as the streams of 100 tokens."""
        return cdiv(groups * splits, at_once) / splits + groups / at_once * splits * 100 / usual

    splits = min(range(1, max(1, min(cdiv(4 * at_once, groups), usual // (4 * tile))) + 1), key=time)
    return share_tokens(tokens, splits, tile)


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
    need_dphi: bool,
) -> torch.Tensor:
    """Fill dx [M, n, C], which may be d_x; return the partial sums of dphi [splits, K, n*C], none if not needed."""
    tokens, n, width = x.shape
    rows, columns = phi.shape
    groups = n // STREAMS * cdiv(width, COLUMNS)
    splits, each = split_tokens(tokens, groups, x.device)
    dphi_part = torch.empty(splits if need_dphi else 0, rows, columns, dtype=torch.float32, device=x.device)
    with on_device(x):
        launch(
            streamed_products_kernel, (splits * groups,),
            x, d_out, d_x, phi, norm_weight, dh, coefficient, h_pre, dx, dphi_part, tokens, each, width,
            phi.stride(0), phi.stride(1), N=n, STREAMS=STREAMS, K=rows, ROW=dh.shape[2], FIRST=ROWS[0],
            SECOND=ROWS[1], HAS_NORM=norm_weight is not None, HAS_OUT=d_out is not None, HAS_DX=d_x is not None,
            NEED_DPHI=need_dphi, BLOCK_M=TOKENS, BLOCK_C=COLUMNS, WARPS=WARPS, STAGES=STAGES, num_warps=WARPS,
        )  # fmt: skip
    return dphi_part
