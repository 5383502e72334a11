"""Steps of a boundary in one pass, which `boundary_pass` and `boundary_rest` share."""

# mypy: disable-error-code="assignment,misc"
# (A tuple that a kernel builds up one by one changes its type each time.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from mhc_compile.kernels.exchange import load_floats
from mhc_compile.kernels.mix import store_gates, store_res, stream_logits


@gluon.constexpr_function
def _pieces(rows: int) -> list[int]:
    """phi's rows cut into powers of two, as tiles are, of 8 or more, as products take them: 24 rows into 16 and 8."""
    whole = -(-rows // 8) * 8
    return [1 << i for i in reversed(range(whole.bit_length())) if whole >> i & 1]


@gluon.constexpr_function
def pieces(rows: int) -> int:
    """Into how many pieces phi's rows are cut."""
    return len(_pieces(rows))


@gluon.constexpr_function
def rows_of(piece: int, rows: int) -> int:
    """How many rows of phi a piece has; the last ones of the last piece may be beyond phi's, and zero."""
    return int(_pieces(rows)[piece])


@gluon.constexpr_function
def rows_before(piece: int, rows: int) -> int:
    """How many rows of phi come before those of a piece."""
    return sum(_pieces(rows)[:piece])


@gluon.jit
def store_part(at, row, product, first: gl.constexpr, COUNT: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr,
               MMA: gl.constexpr):  # fmt: skip
    """Store products with COUNT rows of phi, from `first` on, as columns of parts [..., ROWS], for row [M, 1]."""
    k = first + gl.arange(0, COUNT, gl.SliceLayout(0, MMA))[None, :]
    if first + COUNT > K:
        # Column K is that of the squares.
        gl.store(at + row * ROWS + k, product, mask=k < K)
    else:
        gl.store(at + row * ROWS + k, product)


@gluon.jit
def room_for_phi(N: gl.constexpr, K: gl.constexpr, PARTS: gl.constexpr, BLOCK_C: gl.constexpr, LAYOUT: gl.constexpr):
    """Shared memory for BLOCK_C columns of phi's parts, by pieces of its rows."""
    room = ()
    for piece in gl.static_range(pieces(K)):
        parts = ()
        for _ in gl.static_range(PARTS):
            parts = parts + (gl.allocate_shared_memory(gl.bfloat16, [N * rows_of(piece, K), BLOCK_C], LAYOUT),)
        room = room + (parts,)
    return room


@gluon.jit
def coefficients(h_post, h_res, tok, tokens, N: gl.constexpr):
    """The n + n * n of each token; for tokens that are not there those of the last."""
    tok = gl.minimum(tok, tokens - 1)
    res = ()
    for i in gl.static_range(N):
        res = res + load_floats(h_res + tok * (N * N) + N * i, N)
    return load_floats(h_post + tok * N, N), res


@gluon.jit
def dot(left, phi_s, o, small, large, PARTS: gl.constexpr, COUNT: gl.constexpr, RIGHT: gl.constexpr):
    """Add the products of a stream to those with the small parts of COUNT rows of phi, and with the large one."""
    for part in gl.static_range(PARTS - 1, -1, -1):
        right = phi_s[part].slice(o * COUNT, COUNT, 0).permute((1, 0)).load(RIGHT)
        if part > 0:
            small = mma_v2(left, right, small)
        else:
            large = mma_v2(left, right, large)
    return small, large


@gluon.jit
def other_gates(h, r, tok, scale, bias, next_post, next_res, tokens, post_mult, post_eps, sinkhorn_eps, start_eps,
                pairs, N: gl.constexpr, K: gl.constexpr, GATES: gl.constexpr, START: gl.constexpr,
                FIRST: gl.constexpr, CLAMP: gl.constexpr, ODD: gl.constexpr, GROUPED: gl.constexpr,
                WARPS: gl.constexpr):  # fmt: skip
    """h_post and h_res of 32 tokens tok, of which those from `tokens` on are not there, from h [M, K] and r [32].

    As far as there are GATES rows for them.
    """
    # As in `mix`, a token is one thread's.
    ALL: gl.constexpr = gl.BlockedLayout([N, N, 1], [1, 1, 32], [1, 1, WARPS], [2, 1, 0])
    ROW: gl.constexpr = gl.BlockedLayout([N, 1], [1, 32], [1, WARPS], [1, 0])
    tok2 = gl.convert_layout(tok, gl.SliceLayout(0, ROW))[None, :]
    i = gl.arange(0, N, gl.SliceLayout(1, ROW))[:, None]
    r_of = gl.convert_layout(r, gl.SliceLayout(0, ROW))[None, :]
    if GATES > N:
        store_gates(h, r_of, scale, bias, next_post, i, tok2, tok2 < tokens, post_mult, post_eps, 1, N, K, GROUPED)
    if GATES > 2 * N:
        _res(h, r, tok, scale, bias, next_res, tokens, sinkhorn_eps, start_eps, pairs, N, K, START, FIRST, CLAMP, ODD,
             GROUPED, ALL)  # fmt: skip


@gluon.jit
def _res(h, r, tok, scale, bias, next_res, tokens, sinkhorn_eps, start_eps, pairs, N: gl.constexpr, K: gl.constexpr,
         START: gl.constexpr, FIRST: gl.constexpr, CLAMP: gl.constexpr, ODD: gl.constexpr, GROUPED: gl.constexpr,
         ALL: gl.constexpr):  # fmt: skip
    """The h_res of `other_gates`, for a layout of [n, n, tokens]."""
    TOKENS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, ALL))
    tok3 = gl.convert_layout(tok, TOKENS)[None, None, :]
    live3 = tok3 < tokens
    i3 = gl.arange(0, N, gl.SliceLayout(1, gl.SliceLayout(2, ALL)))[:, None, None]
    o3 = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, ALL)))[None, :, None]
    r_of = gl.convert_layout(r, TOKENS)[None, None, :]
    logits = stream_logits(h, r_of, scale, bias, i3, o3, tok3, live3, N, K, GROUPED)
    store_res(logits, next_res, i3, o3, tok3, live3, tokens, sinkhorn_eps, start_eps, pairs, N, START, FIRST, CLAMP,
              ODD)  # fmt: skip
