"""The products with many rows of phi for streams of bf16, in Gluon for Hopper: as in `projection` and `products`.

    h = x @ phi^T        dx = d_x + h_pre d_out + coefficient x + dh @ phi        dphi = dh^T @ x

Such products wait for L2, from which a processor gets some 24 bytes in a cycle. So tiles are large: 256 tokens or
columns by 64 rows in three parts. Shared memory holds four such tiles. One or two are multiplied while the others are
on their way. For dx, a program keeps dh of 128 tokens, and phi goes by in tiles whose numbers lie side by side in
memory (`phi_parts.split_in_tiles`), so that copies need next to no addresses.
"""

# mypy: disable-error-code="assignment,var-annotated"
from __future__ import annotations

from collections.abc import Sequence

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from mhc_compile.kernels import gpus, one_pass, streamed_products
from mhc_compile.kernels.common import cdiv, expected, launch, on_device
from mhc_compile.kernels.one_pass import barrier, copy_layout, load_to_shared
from mhc_compile.kernels.opaque import opaque
from mhc_compile.kernels.phi_parts import TILE_COLUMNS, TILE_ROWS, split_ahead, split_in_tiles

# More rows than the kernels of 8 streams take.
FEWEST_ROWS = 81
WARPS = 8
# Of dx: tokens of a program, tiles of phi in shared memory, and the most rows whose dh fits beside them.
DX_TOKENS, DX_STAGES, DX_ROWS = 128, 5, 288
# Tokens, columns and rows of phi of a tile, for phi's gradient and for h.
DPHI_TILE = 64, 256, 64
PROJECT_TILE, PROJECT_STAGES = (256, 64, 64), 4


@gluon.jit
def _fetch_columns(x_s, high_s, middle_s, low_s, slot, x, phi, block, last, tok, M, C, columns, part_stride, first_row,
                   PER_STREAM: gl.constexpr, BLOCKS: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr,
                   BLOCK_C: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Start copying a block of columns of x and of the parts of phi."""
    TILE: gl.constexpr = copy_layout(BLOCK_C, WARPS)
    if block < last:
        stream = block // (PER_STREAM * BLOCKS)
        c = block % (PER_STREAM * BLOCKS) * BLOCK_C + gl.arange(0, BLOCK_C, gl.SliceLayout(0, TILE))[None, :]
        flat = stream * C + c
        load_to_shared(x_s.index(slot), x + tok * columns + flat, mask=(tok < M) & (c < C))
        k = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, TILE))[:, None]
        at = phi + k.to(gl.int64) * columns + flat
        # Rows beyond K exist and are zero.
        load_to_shared(high_s.index(slot), at, mask=c < C)
        load_to_shared(middle_s.index(slot), at + part_stride, mask=c < C)
        load_to_shared(low_s.index(slot), at + 2 * part_stride, mask=c < C)
    async_copy.commit_group()


@opaque("h_part", "squares_part")
@gluon.jit(do_not_specialize=["M", "token_tiles", "chunks_each"])
def project_of_rows_kernel(x, phi, h_part, squares_part, M, C, columns, token_tiles, chunks_each,
                           CHUNKS: gl.constexpr, PER_STREAM: gl.constexpr, CHUNK: gl.constexpr, K: gl.constexpr,
                           ROW_BLOCKS: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_C: gl.constexpr,
                           WARPS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The partial sums of `project_kernel` for BLOCK_M tokens and ROWS rows of phi, which comes in three parts."""
    TILE: gl.constexpr = copy_layout(BLOCK_C, WARPS)
    TOKEN: gl.constexpr = gl.SliceLayout(1, TILE)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, BLOCK_M // (WARPS // 4), 16])
    BLOCKS: gl.constexpr = CHUNK // BLOCK_C
    first_row = gl.program_id(0) % ROW_BLOCKS * ROWS
    start = (gl.program_id(0) // ROW_BLOCKS % token_tiles).to(gl.int64) * BLOCK_M
    stored = gl.program_id(0) // (ROW_BLOCKS * token_tiles)
    tok = gl.arange(0, BLOCK_M, TOKEN).to(gl.int64)[:, None] + start
    part_stride = columns.to(gl.int64) * (ROW_BLOCKS * ROWS)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_C], gl.NVMMASharedLayout(128, 16))
    high_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, BLOCK_C], gl.NVMMASharedLayout(128, 16))
    middle_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, BLOCK_C], gl.NVMMASharedLayout(128, 16))
    low_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, BLOCK_C], gl.NVMMASharedLayout(128, 16))
    first = stored * chunks_each * BLOCKS
    last = gl.minimum((stored + 1) * chunks_each, CHUNKS) * BLOCKS
    for ahead in gl.static_range(STAGES - 1):
        _fetch_columns(x_s, high_s, middle_s, low_s, ahead, x, phi, first + ahead, last, tok, M, C, columns,
                       part_stride, first_row, PER_STREAM, BLOCKS, ROWS, BLOCK_M, BLOCK_C, WARPS)  # fmt: skip
    h_chunk = gl.zeros([ROWS, BLOCK_M], gl.float32, MMA)
    h_sum = gl.zeros([ROWS, BLOCK_M], gl.float32, MMA)
    one = gl.full_like(h_sum, 1.0)
    zero = gl.zeros_like(h_sum)
    squares_chunk = gl.zeros([BLOCK_M], gl.float32, TOKEN)
    squares_sum = gl.zeros([BLOCK_M], gl.float32, TOKEN)
    slot = 0
    for block in range(first, last):
        async_copy.wait_group(STAGES - 2)
        # Tensor cores read shared memory past the threads that filled it.
        fence_async_shared()
        barrier()
        _fetch_columns(x_s, high_s, middle_s, low_s, (slot + STAGES - 1) % STAGES, x, phi, block + STAGES - 1, last,
                       tok, M, C, columns, part_stride, first_row, PER_STREAM, BLOCKS, ROWS, BLOCK_M, BLOCK_C,
                       WARPS)  # fmt: skip
        tokens_s = x_s.index(slot)
        right = tokens_s.permute((1, 0))
        part = warpgroup_mma(low_s.index(slot), right, zero, use_acc=False, is_async=True)
        part = warpgroup_mma(middle_s.index(slot), right, part, is_async=True)
        part = warpgroup_mma(high_s.index(slot), right, part, is_async=True)
        if first_row == 0:
            v = tokens_s.load(TILE).to(gl.float32)
            squares_chunk += gl.sum(v * v, axis=1)
        part = warpgroup_mma_wait(0, deps=(part,))
        # Not accumulated by tensor cores, which truncate (`common.add_rounded`).
        h_chunk = gl.fma(part, one, h_chunk)
        if block % BLOCKS == BLOCKS - 1:
            h_sum += h_chunk
            h_chunk = zero
            squares_sum += squares_chunk
            squares_chunk = gl.zeros_like(squares_sum)
        slot = (slot + 1) % STAGES
    async_copy.wait_group(0)
    k = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, MMA))[:, None]
    own = gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA)).to(gl.int64)[None, :] + start
    gl.store(h_part + (stored * K + k).to(gl.int64) * M + own, h_sum, mask=(k < K) & (own < M))
    if first_row == 0:
        row = gl.arange(0, BLOCK_M, TOKEN).to(gl.int64) + start
        gl.store(squares_part + stored.to(gl.int64) * M + row, squares_sum, mask=row < M)


@gluon.constexpr_function
def _dx_layout() -> gl.DistributedLinearLayout:
    """What a thread of 8 warps has of a product of 128 x 128, once the columns are in order: 8 neighbours at a time."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[128, 128],
    )


@gluon.jit
def _fetch_dh(dh_s, dh, start, M, K_TILES: gl.constexpr, ROW: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr,
              WARPS: gl.constexpr):  # fmt: skip
    """Start copying the two largest parts of dh of BLOCK_M tokens."""
    LAYOUT: gl.constexpr = copy_layout(ROWS, WARPS)
    tok = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT)).to(gl.int64)[:, None] + start
    k = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
    for part in gl.static_range(2):
        for tile in gl.static_range(K_TILES):
            at = dh + part * (M.to(gl.int64) * ROW) + tok * ROW + tile * ROWS + k
            load_to_shared(dh_s.index(2 * tile + part), at, mask=(tok < M) & (tile * ROWS + k < ROW))


@gluon.jit
def _fetch_phi(phi_s, slot, tiles, tile, last, ROWS: gl.constexpr, BLOCK_C: gl.constexpr, WARPS: gl.constexpr):
    """Start copying both parts of a tile of phi, if there is one left."""
    LAYOUT: gl.constexpr = copy_layout(BLOCK_C, WARPS)
    if tile < last:
        row = gl.arange(0, 2 * ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
        c = gl.arange(0, BLOCK_C, gl.SliceLayout(0, LAYOUT))[None, :]
        load_to_shared(phi_s.index(slot), tiles + tile.to(gl.int64) * (2 * ROWS * BLOCK_C) + (row * BLOCK_C + c))
    async_copy.commit_group()


@opaque("dx")
@gluon.jit(do_not_specialize=["M", "token_tiles", "each", "blocks"])
def dx_of_rows_kernel(x, d_out, d_x, tiles, dh, coefficient, h_pre, dx, M, token_tiles, each, blocks, C,
                        N: gl.constexpr, K_TILES: gl.constexpr, ROW: gl.constexpr, HAS_OUT: gl.constexpr,
                        HAS_DX: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_C: gl.constexpr, ROWS: gl.constexpr,
                        WARPS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """dx of BLOCK_M tokens and `each` of the blocks of columns: the same columns of each stream in turn.

    dh [3, M, ROW] comes as bf16 parts, the largest first, of which two are used.
    """
    FINISHED: gl.constexpr = _dx_layout()
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_C, 16])
    # Tiles that are copied ahead: those of the last product are still being read.
    AHEAD: gl.constexpr = STAGES - 2

    start = (gl.program_id(0) % token_tiles).to(gl.int64) * BLOCK_M
    first_block = gl.program_id(0) // token_tiles * each
    last_block = gl.minimum(first_block + each, blocks)
    tokens = M.to(gl.int64)

    dh_s = gl.allocate_shared_memory(gl.bfloat16, [2 * K_TILES, BLOCK_M, ROWS], gl.NVMMASharedLayout(2 * ROWS, 16))
    phi_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * ROWS, BLOCK_C], gl.NVMMASharedLayout(128, 16))
    _fetch_dh(dh_s, dh, start, M, K_TILES, ROW, ROWS, BLOCK_M, WARPS)
    tile = first_block * K_TILES
    last = last_block * K_TILES
    for ahead in gl.static_range(AHEAD):
        _fetch_phi(phi_s, ahead, tiles, tile + ahead, last, ROWS, BLOCK_C, WARPS)

    own = gl.arange(0, BLOCK_M, gl.SliceLayout(1, FINISHED)).to(gl.int64) + start
    live = own < M
    mask = live[:, None]
    factor = gl.load(coefficient + own, mask=live, other=0.0)[:, None]
    c = gl.arange(0, BLOCK_C, gl.SliceLayout(0, FINISHED))[None, :]
    slot = 0
    for block in range(first_block, last_block):
        stream = block % N
        column = block // N * BLOCK_C + c
        at = own[:, None] * (N * C) + stream * C + column
        # What is added to the product is on its way meanwhile.
        v = gl.load(x + at, mask=mask, other=0.0)
        if HAS_DX:
            before = gl.load(d_x + at, mask=mask, other=0.0)
        if HAS_OUT:
            grad = gl.load(d_out + own[:, None] * C + column, mask=mask, other=0.0)
            pre = gl.load(h_pre + stream * tokens + own, mask=live, other=0.0)[:, None]
        product = gl.zeros([BLOCK_M, BLOCK_C], gl.float32, MMA)
        for k_tile in range(K_TILES):
            async_copy.wait_group(AHEAD - 1)
            # Tensor cores read shared memory past the threads that filled it.
            fence_async_shared()
            barrier()
            _fetch_phi(phi_s, (slot + AHEAD) % STAGES, tiles, tile + AHEAD, last, ROWS, BLOCK_C, WARPS)
            high, middle = phi_s.index(slot).slice(0, ROWS, 0), phi_s.index(slot).slice(ROWS, ROWS, 0)
            d_high, d_middle = dh_s.index(2 * k_tile), dh_s.index(2 * k_tile + 1)
            # dx is rounded to bf16, so the products of the smaller parts are left out.
            product = warpgroup_mma(d_middle, high, product, is_async=True)
            product = warpgroup_mma(d_high, middle, product, is_async=True)
            product = warpgroup_mma(d_high, high, product, is_async=True)
            # The tile before is done with, the next copy goes there.
            product = warpgroup_mma_wait(3, deps=(product,))
            tile += 1
            slot = (slot + 1) % STAGES
        product = warpgroup_mma_wait(0, deps=(product,))
        # A column's place among the 128 has the bits g g i i q q e, the column g g q q i i e.
        d = product.reshape([BLOCK_M, 4, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([BLOCK_M, BLOCK_C])
        d = gl.convert_layout(d, FINISHED, assert_trivial=True)
        d += factor * v.to(gl.float32)
        if HAS_OUT:
            d += pre * grad.to(gl.float32)
        if HAS_DX:
            d += before.to(gl.float32)
        gl.store(dx + at, d.to(gl.bfloat16), mask=mask)
    async_copy.wait_group(0)


@gluon.jit
def _fetch_tokens(x_s, high_s, middle_s, low_s, slot, x, dh, start, last, M, columns, first_row, block,
                  ROW: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_C: gl.constexpr,
                  WARPS: gl.constexpr):  # fmt: skip
    """Start copying x and the parts of dh of the tokens from `start` on."""
    WIDE: gl.constexpr = copy_layout(BLOCK_C, WARPS)
    NARROW: gl.constexpr = copy_layout(ROWS, WARPS)
    tok = gl.arange(0, BLOCK_M, gl.SliceLayout(1, WIDE)).to(gl.int64)[:, None] + start
    c = block * BLOCK_C + gl.arange(0, BLOCK_C, gl.SliceLayout(0, WIDE))[None, :]
    load_to_shared(x_s.index(slot), x + tok * columns + c, mask=(tok < last) & (c < columns))
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, NARROW)).to(gl.int64)[:, None] + start
    k = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, NARROW))[None, :]
    at = dh + row * ROW + k
    mask = (row < last) & (k < ROW)
    part = M.to(gl.int64) * ROW
    # An allocation for each part: between copies into the same, Triton puts a barrier.
    load_to_shared(high_s.index(slot), at, mask=mask)
    load_to_shared(middle_s.index(slot), at + part, mask=mask)
    load_to_shared(low_s.index(slot), at + 2 * part, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _of_tokens(x_s, high_s, middle_s, low_s, slot, ROWS: gl.constexpr, BLOCK_C: gl.constexpr, MMA: gl.constexpr):
    """Start dh^T @ x of a tile."""
    part = gl.zeros([ROWS, BLOCK_C], gl.float32, MMA)
    v = x_s.index(slot)
    part = warpgroup_mma(low_s.index(slot).permute((1, 0)), v, part, is_async=True)
    part = warpgroup_mma(middle_s.index(slot).permute((1, 0)), v, part, is_async=True)
    return warpgroup_mma(high_s.index(slot).permute((1, 0)), v, part, is_async=True)


@opaque("dphi_part")
@gluon.jit(do_not_specialize=["M", "tokens_each"])
def dphi_of_rows_kernel(x, dh, dphi_part, M, tokens_each, columns, K: gl.constexpr, ROW: gl.constexpr,
                        ROW_BLOCKS: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_C: gl.constexpr,
                        WARPS: gl.constexpr):  # fmt: skip
    """dphi_part [splits, K, columns] of ROWS rows of phi, BLOCK_C columns and tokens_each tokens, two tiles at a time.

    The sum of the first is added to the others while the second is multiplied.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, BLOCK_C // (WARPS // 4), 16])
    # Side by side, so that x comes from L2 for all but the first block of rows.
    first_row = gl.program_id(0) % ROW_BLOCKS * ROWS
    blocks = gl.cdiv(columns, BLOCK_C)
    block = gl.program_id(0) // ROW_BLOCKS % blocks
    split = gl.program_id(0) // (ROW_BLOCKS * blocks)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [4, BLOCK_M, BLOCK_C], gl.NVMMASharedLayout(128, 16))
    high_s = gl.allocate_shared_memory(gl.bfloat16, [4, BLOCK_M, ROWS], gl.NVMMASharedLayout(128, 16))
    middle_s = gl.allocate_shared_memory(gl.bfloat16, [4, BLOCK_M, ROWS], gl.NVMMASharedLayout(128, 16))
    low_s = gl.allocate_shared_memory(gl.bfloat16, [4, BLOCK_M, ROWS], gl.NVMMASharedLayout(128, 16))
    first = split * tokens_each
    last = gl.minimum(first + tokens_each, M)
    for ahead in gl.static_range(2):
        _fetch_tokens(x_s, high_s, middle_s, low_s, ahead, x, dh, first + ahead * BLOCK_M, last, M, columns, first_row,
                      block, ROW, ROWS, BLOCK_M, BLOCK_C, WARPS)  # fmt: skip
    total = gl.zeros([ROWS, BLOCK_C], gl.float32, MMA)
    one = gl.full_like(total, 1.0)
    slot = 0
    for start in range(first, last, 2 * BLOCK_M):
        async_copy.wait_group(0)
        # Tensor cores read shared memory past the threads that filled it.
        fence_async_shared()
        barrier()
        for more in gl.static_range(2):
            _fetch_tokens(x_s, high_s, middle_s, low_s, 2 - slot + more, x, dh, start + (2 + more) * BLOCK_M, last, M,
                          columns, first_row, block, ROW, ROWS, BLOCK_M, BLOCK_C, WARPS)  # fmt: skip
        even = _of_tokens(x_s, high_s, middle_s, low_s, slot, ROWS, BLOCK_C, MMA)
        odd = _of_tokens(x_s, high_s, middle_s, low_s, slot + 1, ROWS, BLOCK_C, MMA)
        # Not accumulated by tensor cores, which truncate (`common.add_rounded`).
        even = warpgroup_mma_wait(3, deps=(even,))
        total = gl.fma(even, one, total)
        odd = warpgroup_mma_wait(0, deps=(odd,))
        total = gl.fma(odd, one, total)
        slot = 2 - slot
    async_copy.wait_group(0)
    k = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, MMA))[:, None]
    c = block * BLOCK_C + gl.arange(0, BLOCK_C, gl.SliceLayout(0, MMA))[None, :]
    gl.store(dphi_part + (split * K + k).to(gl.int64) * columns + c, total, mask=(k < K) & (c < columns))


def fits(x: torch.Tensor, rows: int) -> bool:
    """Whether dphi of x [M, n, C] and so many rows of phi is made here, and h as well where `is_work` says so."""
    here = rows >= FEWEST_ROWS and x.numel() > 0 and x.shape[-1] % 16 == 0 and _begins_a_copy(x)
    return here and one_pass.in_order(x, 2) and gpus.of(x.device).streams_once


def _begins_a_copy(x: torch.Tensor) -> bool:
    """Whether x begins at whole 16 bytes. Otherwise Triton adds squares in another order, and `project` does not."""
    offset = x.storage_offset()
    return not isinstance(offset, int) or offset * x.element_size() % 16 == 0


def fits_dx(streams: Sequence[torch.Tensor | None], rows: int) -> bool:
    """Whether dx is made here, of these x, dx [M, n, C] and, if there are any, d_out [M, C] and d_x [M, n, C]."""
    x = streams[0]
    assert x is not None
    whole = rows <= DX_ROWS and x.shape[-1] % TILE_COLUMNS == 0
    return whole and fits(x, rows) and all(t is None or one_pass.in_order(t, t.dim() - 1) for t in streams)


def is_work(x: torch.Tensor, rows: int, groups: int) -> bool:
    """Whether there are tokens enough for `project` to give each processor a program that adds up a whole group."""
    block_m, _, block_k = PROJECT_TILE
    return cdiv(expected(x.shape[0]), block_m) * cdiv(rows, block_k) * groups >= gpus.processors(x.device)


def project(
    x: torch.Tensor, phi: torch.Tensor, norm_weight: torch.Tensor | None, h: torch.Tensor, squares: torch.Tensor,
    cut: Sequence[int],
) -> None:  # fmt: skip
    """Fill the partial sums h [stored, K, M] and squares [stored, M] for contiguous x [M, n, C].

    cut: the columns of a chunk, chunks of a stream, of all streams and of a program.
    """
    tokens, n, width = x.shape
    chunk, per_stream, total, each = cut
    block_m, block_c, block_k = PROJECT_TILE
    row_blocks = cdiv(phi.shape[0], block_k)
    token_tiles = cdiv(tokens, block_m)
    weight = split_ahead(phi, norm_weight, 3, row_blocks * block_k)
    with on_device(x):
        launch(
            project_of_rows_kernel, (token_tiles * row_blocks * h.shape[0],),
            x, weight, h, squares, tokens, width, n * width, token_tiles, each, CHUNKS=total, PER_STREAM=per_stream,
            CHUNK=chunk, K=phi.shape[0], ROW_BLOCKS=row_blocks, ROWS=block_k, BLOCK_M=block_m, BLOCK_C=block_c,
            WARPS=WARPS, STAGES=PROJECT_STAGES, num_warps=WARPS,
        )  # fmt: skip


def share_columns(tokens: int, blocks: int, device: torch.device) -> tuple[int, int]:
    """How many programs share the blocks of columns of a tile of tokens, and how many each of them takes."""
    at_once, tiles = gpus.processors(device), cdiv(expected(tokens), DX_TOKENS)

    def time(shares: int) -> int:
        """In blocks that a processor does, one after the other; dh takes as long to copy as two of them."""
        return cdiv(tiles * shares, at_once) * (cdiv(blocks, shares) + 2)

    each = cdiv(blocks, min(range(1, min(blocks, at_once) + 1), key=time))
    return cdiv(blocks, each), each


def gradient_of_streams(
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
    """Fill dx [M, n, C], which may be d_x."""
    tokens, n, width = x.shape
    k_tiles = cdiv(phi.shape[0], TILE_ROWS)
    tiles = split_in_tiles(phi, norm_weight, n)
    blocks = n * width // TILE_COLUMNS
    token_tiles = cdiv(tokens, DX_TOKENS)
    shares, each = share_columns(tokens, blocks, x.device)
    with on_device(x):
        launch(
            dx_of_rows_kernel, (token_tiles * shares,),
            x, d_out, d_x, tiles, dh, coefficient, h_pre, dx, tokens, token_tiles, each, blocks, width, N=n,
            K_TILES=k_tiles, ROW=dh.shape[2], HAS_OUT=d_out is not None, HAS_DX=d_x is not None, BLOCK_M=DX_TOKENS,
            BLOCK_C=TILE_COLUMNS, ROWS=TILE_ROWS, WARPS=WARPS, STAGES=DX_STAGES, num_warps=WARPS,
        )  # fmt: skip


def partial_dphi(x: torch.Tensor, dh: torch.Tensor, rows: int) -> torch.Tensor:
    """Partial sums of dphi [splits, K, n*C] for contiguous x [M, n, C]."""
    columns = x.shape[1] * x.shape[2]
    block_m, block_c, block_k = DPHI_TILE
    row_blocks = cdiv(rows, block_k)
    programs = row_blocks * cdiv(columns, block_c)
    splits, each = streamed_products.split_tokens(x.shape[0], programs, x.device, 2 * block_m)
    part = torch.empty(splits, rows, columns, dtype=torch.float32, device=x.device)
    with on_device(x):
        launch(
            dphi_of_rows_kernel, (programs * splits,),
            x, dh, part, x.shape[0], each, columns, K=rows, ROW=dh.shape[2], ROW_BLOCKS=row_blocks, ROWS=block_k,
            BLOCK_M=block_m, BLOCK_C=block_c, WARPS=WARPS, num_warps=WARPS,
        )  # fmt: skip
    return part
