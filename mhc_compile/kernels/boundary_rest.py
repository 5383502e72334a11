"""The tiles of a boundary that no team of `boundary_pass` has drawn, in Gluon: a program takes a whole tile.

Teams draw tiles in order, and do all that they draw. So what is left are the tiles from the next number on, if teams
did not fill up because other kernels held the GPU. That is rare: usually a program finds nothing to do. Here no program
waits for another one. The bits are those of `boundary_pass`.
"""

# mypy: disable-error-code="assignment,misc,var-annotated"
# (A tuple that a kernel builds up one by one changes its type each time.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mhc_compile.kernels.boundary_steps import (
    coefficients,
    dot,
    other_gates,
    pieces,
    room_for_phi,
    rows_before,
    rows_of,
    store_part,
)
from mhc_compile.kernels.gates import affine, rms_factor, sigmoid
from mhc_compile.kernels.one_pass import barrier, combined, split_phi
from mhc_compile.kernels.opaque import opaque


@gluon.jit
def _project(f, h_post, x, h_res, phi, norm_weight, out, parts, x_s, phi_s, tok, live, tokens, C, phi_k, phi_c,
             N: gl.constexpr, K: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr, HAS_NORM: gl.constexpr,
             BLOCK_M: gl.constexpr, BLOCK_C: gl.constexpr, WARPS: gl.constexpr, TILE: gl.constexpr):  # fmt: skip
    """Combine a tile, and store its parts of h and of the squares [ranks, BLOCK_M, ROWS], block by block."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [BLOCK_M // 16, WARPS // (BLOCK_M // 16)], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, TILE))
    row_h = gl.arange(0, BLOCK_M, gl.SliceLayout(1, MMA))[:, None]
    post = ()
    res = ()
    if f is not None:
        post, res = coefficients(h_post, h_res, tok, tokens, N)
    for rank in range((C + BLOCK_C - 1) // BLOCK_C):
        # Of the last block, threads may still read phi and x'.
        barrier()
        for piece in gl.static_range(pieces(K)):
            split_phi(phi_s[piece], rows_before(piece, K), phi, norm_weight, phi_k, phi_c, rank * BLOCK_C, C, N, K,
                      PARTS, rows_of(piece, K), HAS_NORM, BLOCK_C, TILE)  # fmt: skip
        c = (rank * BLOCK_C + gl.arange(0, BLOCK_C, gl.SliceLayout(0, TILE)))[None, :]
        mask = live[:, None] & (c < C)
        at = tok[:, None] * (N * C) + c
        old = ()
        for i in gl.static_range(N):
            old = old + (gl.load(x + at + i * C, mask=mask, other=0.0),)
        if f is not None:
            f_row = gl.load(f + tok[:, None] * C + c, mask=mask, other=0.0).to(gl.float32)
        terms = gl.zeros([BLOCK_M, BLOCK_C], gl.float32, TILE)
        for o in gl.static_range(N):
            new = old[o]
            if f is not None:
                new = combined(post, res, f_row, old, o, N).to(gl.bfloat16)
                gl.store(out + at + o * C, new, mask=mask)
            x_s[o].store(new)
            v = new.to(gl.float32)
            terms = gl.fma(v, v, terms)
        part_at = parts + rank * (BLOCK_M * ROWS)
        gl.store(part_at + row * ROWS + K, gl.sum(terms, axis=1))
        barrier()
        for piece in gl.static_range(pieces(K)):
            small = gl.zeros([BLOCK_M, rows_of(piece, K)], gl.float32, MMA)
            large = gl.zeros([BLOCK_M, rows_of(piece, K)], gl.float32, MMA)
            for o in gl.static_range(N):
                small, large = dot(x_s[o].load(LEFT), phi_s[piece], o, small, large, PARTS, rows_of(piece, K), RIGHT)
            store_part(part_at, row_h, large + small, rows_before(piece, K), rows_of(piece, K), K, ROWS, MMA)
    barrier()


@gluon.jit
def _add_up(parts, row, k, ranks, GROUPS: gl.constexpr, CHUNKS: gl.constexpr, CHUNK: gl.constexpr, K: gl.constexpr,
            BLOCK_M: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr):  # fmt: skip
    """The sums [BLOCK_M, ROWS] of the parts, in the order of `projection.partial_sum`."""
    total = gl.zeros([BLOCK_M, ROWS], gl.float32, SUMS)
    for group in range(GROUPS):
        of_group = gl.zeros([BLOCK_M, ROWS], gl.float32, SUMS)
        for chunk in gl.static_range(CHUNKS):
            of_chunk = gl.zeros([BLOCK_M, ROWS], gl.float32, SUMS)
            for block in gl.static_range(CHUNK):
                of = (chunk * CHUNK + block) * GROUPS + group
                at = parts + (of * BLOCK_M + row) * ROWS + k
                of_chunk += gl.load(at, mask=(of < ranks) & (k <= K), other=0.0)
            of_group += of_chunk
        total += of_group
    return total


@opaque("out", "layer_input", "next_post", "next_res", "h", "ms", "parts")
@gluon.jit(do_not_specialize=["M", "drawn_at", "pairs"])
def boundary_rest_kernel(f, h_post, x, h_res, phi, norm_weight, scale, bias, out, layer_input, next_post, next_res, h,
                         ms, parts, flags, M, C, phi_k, phi_c, drawn_at, inverse_columns, rms_eps, pre_eps, post_mult,
                         post_eps, sinkhorn_eps, start_eps, pairs, N: gl.constexpr, K: gl.constexpr,
                         GATES: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr, HAS_NORM: gl.constexpr,
                         RMS_MODE: gl.constexpr, START: gl.constexpr, FIRST: gl.constexpr, CLAMP: gl.constexpr,
                         ODD: gl.constexpr, GROUPED: gl.constexpr, GROUPS: gl.constexpr, CHUNKS: gl.constexpr,
                         CHUNK: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_C: gl.constexpr,
                         WARPS: gl.constexpr):  # fmt: skip
    """The results of `boundary_pass_kernel` from tile flags[drawn_at] on; parts have room for one tile a program."""
    LANES: gl.constexpr = BLOCK_C // 8
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    TOKEN: gl.constexpr = gl.SliceLayout(1, TILE)
    SUMS: gl.constexpr = gl.BlockedLayout([1, 4], [128 // ROWS, ROWS // 4], [WARPS, 1], [1, 0])
    WIDE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    x_s = ()
    for _ in gl.static_range(N):
        x_s = x_s + (gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, BLOCK_C], WIDE),)
    phi_s = room_for_phi(N, K, PARTS, BLOCK_C, WIDE)
    tokens = M.to(gl.int64)
    tiles = (M + BLOCK_M - 1) // BLOCK_M
    ranks = (C + BLOCK_C - 1) // BLOCK_C
    parts += gl.program_id(0).to(gl.int64) * (ranks * BLOCK_M * ROWS)
    row = gl.arange(0, BLOCK_M, TOKEN)
    row_of = gl.arange(0, BLOCK_M, gl.SliceLayout(1, SUMS))
    k = gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))[None, :]
    gate_scale, gate_bias = affine(scale, bias, k, k < N, 0, GROUPED)
    # Columns of the parts that are nobody's.
    at_gates = parts + K + 1
    drawn = gl.minimum(gl.load(flags + drawn_at), tiles.to(gl.int64)).to(gl.int32)
    for tile in range(drawn + gl.program_id(0), tiles, gl.num_programs(0)):
        first = gl.to_tensor(tile).to(gl.int64) * BLOCK_M
        tok = row + first
        live = tok < tokens
        _project(f, h_post, x, h_res, phi, norm_weight, out, parts, x_s, phi_s, tok, live, tokens, C, phi_k, phi_c, N,
                 K, PARTS, ROWS, HAS_NORM, BLOCK_M, BLOCK_C, WARPS, TILE)  # fmt: skip
        total = _add_up(parts, row_of[:, None], k, ranks, GROUPS, CHUNKS, CHUNK, K, BLOCK_M, ROWS, SUMS)
        mean = gl.sum(gl.where(k == K, total, 0.0), axis=1) * inverse_columns
        r = rms_factor(mean, rms_eps, RMS_MODE)
        # As in `mix`, to the bit.
        gate = sigmoid(r[:, None] * total * gate_scale + gate_bias) + pre_eps
        tok_of = row_of + first
        gl.store(h + tok_of[:, None] * K + k, total, mask=(k < K) & (tok_of < tokens)[:, None])
        gl.store(ms + tok_of, mean, mask=tok_of < tokens)
        # All have read the parts, and the last tile's gates.
        barrier()
        gl.store(at_gates + row_of[:, None] * ROWS + k, gate, mask=k < N)
        barrier()
        other_gates(h, r, tok_of, scale, bias, next_post, next_res, tokens, post_mult, post_eps, sinkhorn_eps,
                    start_eps, pairs, N, K, GATES, START, FIRST, CLAMP, ODD, GROUPED, WARPS)  # fmt: skip
        h_pre = ()
        for o in gl.static_range(N):
            h_pre = h_pre + (gl.load(at_gates + row * ROWS + o),)
        new = x
        if f is not None:
            new = out
        for rank in range(ranks):
            c = (rank * BLOCK_C + gl.arange(0, BLOCK_C, gl.SliceLayout(0, TILE)))[None, :]
            mask = live[:, None] & (c < C)
            acc = gl.zeros([BLOCK_M, BLOCK_C], gl.float32, TILE)
            for o in gl.static_range(N):
                row_o = gl.load(new + tok[:, None] * (N * C) + o * C + c, mask=mask, other=0.0)
                acc += h_pre[o][:, None] * row_o.to(gl.float32)
            gl.store(layer_input + tok[:, None] * C + c, acc.to(layer_input.dtype.element_ty), mask=mask)
