"""The combine with the next sublayer's projection in one pass, in Gluon for Hopper: x' is not read again.

    x'[o] = h_post[o] f + sum_i h_res[i, o] x[i]        h = x' phi^T        squares = sum x'^2

and, where the gates of the read are given, its result: layer_input = sum_o h_pre[o] x'[o]. The squares of each stream
can stay alone.

A program owns some tokens and goes through blocks of columns of all streams, while the next block is copied into
shared memory. x' takes the place of x there, from where tensor cores get it; phi, in three bf16 parts, they read where
it was copied to. In C-units of n = 4 that is 9, where combine and projection apart move 13.

Blocks are dealt out in turn to GROUPS programs, which start together: what they read at one time lies side by side.
A program adds its blocks chunk by chunk. With few tokens, it stores the sums of one chunk or one block, and leaves the
same additions to the reader, as in `projection`. So a token's bits never depend on the number of tokens.
"""

# mypy: disable-error-code="assignment,misc,var-annotated"
# (A tuple that a kernel builds up one by one changes its type each time.)
from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from mhc_compile.kernels import gpus, one_pass
from mhc_compile.kernels.common import cdiv, expected, launch, on_device
from mhc_compile.kernels.config import Tile
from mhc_compile.kernels.one_pass import ROWS, barrier, combined, copy_rows, load_to_shared, split_phi
from mhc_compile.kernels.opaque import opaque
from mhc_compile.kernels.phi_parts import split_ahead
from mhc_compile.kernels.projection import GROUPS, SPLIT_AHEAD_TILES, Partials, parts_of

MANY = Tile(64, 64, 8, 2)
# For programs of a single block, where processors are left over. Tensor cores multiply as many rows as before, but it
# takes time, too, to copy and combine tokens that are not there.
FEW = Tile(32, 64, 8, 1)
# Chunks that the blocks of a group are cut into.
CHUNKS = 8
# The most blocks of a group that are stored one by one: C up to 8,192.
MOST_BLOCKS = 32


@gluon.jit
def _fetch(x_s, f_s, phi_s, stage, x, f, phi, tile, start, bound, M, C, N: gl.constexpr, PARTS: gl.constexpr,
           ROWS: gl.constexpr, AHEAD: gl.constexpr, TOKENS: gl.constexpr, BLOCK_C: gl.constexpr,
           TILE: gl.constexpr):  # fmt: skip
    """Start copying the columns from `start` on, below `bound`: x (one stream after the other), f and phi's parts."""
    c = (start + gl.arange(0, BLOCK_C, gl.SliceLayout(0, TILE)))[None, :]
    tok = gl.arange(0, TOKENS, gl.SliceLayout(1, TILE)).to(gl.int64)[:, None] + tile
    mask = (tok < M) & (c < bound)
    copy_rows(x_s, f_s, stage, stage, x, f, tok, c, mask, C, N, TOKENS)
    if AHEAD:
        k = gl.arange(0, N * ROWS, gl.SliceLayout(1, TILE))[:, None]
        for part in gl.static_range(PARTS):
            phi_at = phi + (part * ROWS + k % ROWS) * (N * C) + (k // ROWS) * C + c
            load_to_shared(phi_s[part].index(stage), phi_at, mask=c < bound)
    async_copy.commit_group()


@opaque("out", "layer_input", "h_part", "squares_part")
@gluon.jit(do_not_specialize=["M", "stored", "chunks_each", "chunk_blocks"])
def combine_project_kernel(f, h_post, x, h_res, h_pre, phi, norm_weight, out, layer_input, h_part, squares_part, M,
                           C, phi_k, phi_c, stored, chunks_each, chunk_blocks, N: gl.constexpr, K: gl.constexpr,
                           PARTS: gl.constexpr, ROWS: gl.constexpr, AHEAD: gl.constexpr, HAS_NORM: gl.constexpr,
                           SQUARES: gl.constexpr, GROUPS: gl.constexpr, TOKENS: gl.constexpr, BLOCK_M: gl.constexpr,
                           BLOCK_C: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """out [M, n, C], layer_input [M, C] where h_pre [M, n] is given, and sums of chunks_each chunks: h_part
    [stored, K, M] and squares_part [stored, SQUARES, M], with SQUARES of all streams 1 and of each alone n.

    AHEAD: phi [PARTS, ROWS, n*C] comes as bf16 parts, the largest first, its rows beyond K zero. Otherwise it is split
    here, block by block. A program has TOKENS of the BLOCK_M rows that tensor cores multiply, and with one stage a
    single block.
    """
    COMBINE: gl.constexpr = f is not None
    READ: gl.constexpr = h_pre is not None
    LANES: gl.constexpr = BLOCK_C // 8
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    TOKEN: gl.constexpr = gl.SliceLayout(1, TILE)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, ROWS * 4 // WARPS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    # Blocks that are copied ahead.
    FILLED: gl.constexpr = STAGES - 1 if STAGES > 1 else 1
    PHASE: gl.constexpr = 64 // BLOCK_C
    WIDE: gl.constexpr = gl.SwizzledSharedLayout(8, PHASE, 8 // PHASE, [1, 0])
    RIGHT: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_C, 16)

    # Two threads with one element would not agree on when it is overwritten.
    gl.static_assert(TOKENS % (WARPS * (32 // LANES)) == 0)
    tokens = M.to(gl.int64)
    tile = (gl.program_id(0) // stored).to(gl.int64) * TOKENS
    part_of = gl.program_id(0) % stored
    group = part_of // (stored // GROUPS)
    first = part_of % (stored // GROUPS) * chunks_each * chunk_blocks
    bound = gl.minimum((first + chunks_each * chunk_blocks) * GROUPS * BLOCK_C, C)
    tok = gl.arange(0, TOKENS, TOKEN).to(gl.int64) + tile
    live = tok < tokens
    # Each has its own allocation: between copies into the same one, Triton puts a barrier.
    x_s = ()
    for _ in gl.static_range(N):
        x_s = x_s + (gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_C], WIDE),)
    f_s = x_s[0]
    if COMBINE:
        f_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, BLOCK_C], WIDE)
    phi_s = ()
    for _ in gl.static_range(PARTS):
        phi_s = phi_s + (gl.allocate_shared_memory(gl.bfloat16, [STAGES, N * ROWS, BLOCK_C], RIGHT),)
    for stage in gl.static_range(FILLED):
        start = ((first + stage) * GROUPS + group) * BLOCK_C
        _fetch(x_s, f_s, phi_s, stage, x, f, phi, tile, start, bound, M, C, N, PARTS, ROWS, AHEAD, TOKENS, BLOCK_C,
               TILE)  # fmt: skip
    post = ()
    res = ()
    if COMBINE:
        for o in gl.static_range(N):
            post = post + (gl.load(h_post + tok * N + o, mask=live, other=0.0).to(gl.float32),)
        for both in gl.static_range(N * N):
            res = res + (gl.load(h_res + tok * (N * N) + both, mask=live, other=0.0).to(gl.float32),)
    pre = ()
    if READ:
        for o in gl.static_range(N):
            pre = pre + (gl.load(h_pre + tok * N + o, mask=live, other=0.0).to(gl.float32),)
    h = gl.zeros([BLOCK_M, ROWS], gl.float32, MMA)
    squares = ()
    for _ in gl.static_range(SQUARES):
        squares = squares + (gl.zeros([TOKENS], gl.float32, TOKEN),)
    turn = 0
    for chunk in range(chunks_each):
        h_chunk = gl.zeros([BLOCK_M, ROWS], gl.float32, MMA)
        squares_chunk = ()
        for _ in gl.static_range(SQUARES):
            squares_chunk = squares_chunk + (gl.zeros([TOKENS], gl.float32, TOKEN),)
        for within in range(chunk_blocks):
            start = ((first + chunk * chunk_blocks + within) * GROUPS + group) * BLOCK_C
            if not AHEAD:
                parts = ()
                for part in gl.static_range(PARTS):
                    parts = parts + (phi_s[part].index(turn),)
                split_phi(parts, 0, phi, norm_weight, phi_k, phi_c, start, C, N, K, PARTS, ROWS, HAS_NORM, BLOCK_C,
                          TILE)  # fmt: skip
            async_copy.wait_group(FILLED - 1)
            # Tensor cores read shared memory past the threads that filled it.
            fence_async_shared()
            barrier()
            if STAGES > 1:
                _fetch(x_s, f_s, phi_s, (turn + FILLED) % STAGES, x, f, phi, tile,
                       start + FILLED * GROUPS * BLOCK_C, bound, M, C, N, PARTS, ROWS, AHEAD, TOKENS, BLOCK_C,
                       TILE)  # fmt: skip
            c = (start + gl.arange(0, BLOCK_C, gl.SliceLayout(0, TILE)))[None, :]
            mask = live[:, None] & (c < C)
            if COMBINE:
                out_at = out + tok[:, None] * (N * C) + c
                row = f_s.index(turn).load(TILE).to(gl.float32)
            old = ()
            for i in gl.static_range(N):
                old = old + (x_s[i].index(turn).slice(0, TOKENS, 0).load(TILE),)
            terms = ()
            if READ:
                read = gl.zeros([TOKENS, BLOCK_C], gl.float32, TILE)
            for o in gl.static_range(N):
                new = old[o]
                if COMBINE:
                    new = combined(post, res, row, old, o, N).to(gl.bfloat16)
                    gl.store(out_at + o * C, new, mask=mask)
                    # A thread reads of x what it overwrites, and nothing else.
                    x_s[o].index(turn).slice(0, TOKENS, 0).store(new)
                v = new.to(gl.float32)
                if o < SQUARES:
                    terms = terms + (v * v,)
                else:
                    terms = (gl.fma(v, v, terms[0]),)
                if READ:
                    read = gl.fma(pre[o][:, None], v, read)
            if READ:
                read_at = layer_input + tok[:, None] * C + c
                gl.store(read_at, read.to(layer_input.dtype.element_ty), mask=mask)
            added = ()
            for s in gl.static_range(SQUARES):
                added = added + (squares_chunk[s] + gl.sum(terms[s], axis=1),)
            squares_chunk = added
            if COMBINE:
                barrier()
            small = gl.zeros([BLOCK_M, ROWS], gl.float32, MMA)
            large = gl.zeros([BLOCK_M, ROWS], gl.float32, MMA)
            for o in gl.static_range(N):
                new = x_s[o].index(turn).load(LEFT)
                for part in gl.static_range(PARTS - 1, -1, -1):
                    right = phi_s[part].index(turn).slice(o * ROWS, ROWS, 0).permute((1, 0))
                    if part > 0:
                        small = warpgroup_mma(new, right, small, is_async=True)
                    else:
                        large = warpgroup_mma(new, right, large, is_async=True)
            small, large = warpgroup_mma_wait(0, deps=(small, large))
            # Not accumulated by tensor cores, which truncate (`common.add_rounded`).
            h_chunk = gl.fma(large + small, gl.full_like(h_chunk, 1.0), h_chunk)
            turn = (turn + 1) % STAGES
        h += h_chunk
        added = ()
        for s in gl.static_range(SQUARES):
            added = added + (squares[s] + squares_chunk[s],)
        squares = added
    async_copy.wait_group(0)
    tok_h = (gl.arange(0, BLOCK_M, gl.SliceLayout(1, MMA)).to(gl.int64) + tile)[:, None]
    k = gl.arange(0, ROWS, gl.SliceLayout(0, MMA))[None, :]
    live_h = tok_h < gl.minimum(tokens, tile + TOKENS)
    gl.store(h_part + (part_of * K + k).to(gl.int64) * tokens + tok_h, h, mask=live_h & (k < K))
    for s in gl.static_range(SQUARES):
        gl.store(squares_part + (part_of * SQUARES + s).to(gl.int64) * tokens + tok, squares[s], mask=live)


def fits(
    f: torch.Tensor, layer_bias: torch.Tensor | None, x: torch.Tensor, h_res: torch.Tensor | None, phi: torch.Tensor
) -> bool:
    """Whether the kernel is for f [..., C] and x [..., n, C] (x' of x's dtype), and for their device."""
    plain = layer_bias is None and h_res is not None
    return plain and one_pass.fits((f, x), phi) and gpus.of(x.device).streams_once


def cut(width: int) -> tuple[int, int]:
    """The chunks that the blocks of a group are cut into, and the blocks of each."""
    blocks = cdiv(cdiv(width, MANY.columns), GROUPS)
    chunk = cdiv(blocks, CHUNKS)
    return cdiv(blocks, chunk), chunk


def forward(
    x: torch.Tensor,
    phi: torch.Tensor,
    norm_weight: torch.Tensor | None,
    combine: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    read: tuple[torch.Tensor, torch.Tensor] | None = None,
    alone: bool = False,
) -> Partials:
    """The partial sums of the projection of x [M, n, C], or of x'.

    combine: f [M, C], h_post, h_res, and out for x' [M, n, C], which is filled; read: h_pre [M, n], and out for the sum
    [M, C] that it weighs, which is filled; alone: squares are of each stream.
    """
    tokens, n, width = x.shape
    rows = phi.shape[0]
    norm_weight = None if norm_weight is None else norm_weight.contiguous()
    expected_tiles = cdiv(expected(tokens), MANY.tokens)
    chunks, chunk = cut(width)

    def rounds(cut: tuple[int, int]) -> int:
        """Blocks that a processor goes through, one program after the other, of which each costs one to begin."""
        programs = expected_tiles * GROUPS * (chunks * chunk // (cut[0] * cut[1]))
        return cdiv(programs, gpus.processors(x.device)) * (cut[0] * cut[1] + 1)

    # Chunks of a program, and blocks of such a chunk; not single blocks where the reader would have to unroll too many.
    cuts = [(chunks, chunk), (1, chunk), *([(1, 1)] if chunks * chunk <= MOST_BLOCKS else [])]
    each, chunk_blocks = min(cuts, key=rounds)
    stored = GROUPS * (chunks * chunk // (each * chunk_blocks))
    h = torch.empty(stored, rows, tokens, dtype=torch.float32, device=x.device)
    squares = torch.empty(stored, *([n] if alone else []), tokens, dtype=torch.float32, device=x.device)
    parts = max(2, parts_of(x, phi, norm_weight))
    # As in `projection`: splitting phi once costs a launch, and pays where many programs need it.
    ahead = expected_tiles >= SPLIT_AHEAD_TILES
    weight = split_ahead(phi, norm_weight, parts, ROWS) if ahead else phi
    few = each * chunk_blocks == 1 and cdiv(expected(tokens), FEW.tokens) * stored <= gpus.processors(x.device)
    tile = FEW if few else MANY
    f, h_post, h_res, out = combine or (None, None, None, None)
    h_pre, layer_input = read or (None, None)
    with on_device(x):
        launch(
            combine_project_kernel, (cdiv(tokens, tile.tokens) * stored,),
            f, h_post, x, h_res, h_pre, weight, norm_weight, out, layer_input, h, squares, tokens, width,
            weight.stride(-2), weight.stride(-1), stored, each, chunk_blocks, N=n, K=rows, PARTS=parts, ROWS=ROWS,
            AHEAD=ahead, HAS_NORM=norm_weight is not None and not ahead, SQUARES=n if alone else 1, GROUPS=GROUPS,
            TOKENS=tile.tokens, BLOCK_M=MANY.tokens, BLOCK_C=tile.columns, WARPS=tile.warps, STAGES=tile.stages,
            num_warps=tile.warps,
        )  # fmt: skip
    return Partials(h, squares, stored, chunks // each, chunk // chunk_blocks)
