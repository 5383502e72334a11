"""The projection h = flat @ phi^T with the squares of flat; its backward takes the products of `products`.

Columns are cut into chunks, chunks into groups. A program adds the chunks of a group in order, or, when
there are few tokens, stores each chunk and leaves the same additions to the reader (`partial_sum`). The cut depends on
n and C alone, and a token's bits do not on how many others are in its tile, so they never depend on M.

phi is float32-accurate at bf16 speed because a bf16 x is exact: phi is split into bf16 parts, largest first.
(Triton ignores input_precision="ieee" on operands upcast from bf16.) Other dtypes of x use float32 dots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mhc_compile.kernels import gpus, products_are_exact, streamed_rows
from mhc_compile.kernels.common import (
    INTERPRETED,
    add_rounded,
    cdiv,
    dot_bf16,
    dot_float32,
    dot_precision,
    expected,
    gradient_like,
    launch,
    next_power_of_2,
    on_device,
    put_back,
    split_bf16,
    token_view,
    wanted,
)
from mhc_compile.kernels.config import TILES, Tile, tile_for
from mhc_compile.kernels.phi_parts import split_ahead
from mhc_compile.kernels.products import backward_products, block_k, dh_parts, most_rows, no_tokens, store_gradient

# Groups of chunks that the partial sums are stored in when there are many tokens.
GROUPS = 4
_GROUPS = tl.constexpr(GROUPS)
# Partial sums that a thread asks for before it adds them up, if a group is not more.
_LOADS = tl.constexpr(32)
# Splitting phi ahead of the projection costs a launch; below this many of the largest token tiles it is split in place.
SPLIT_AHEAD_TILES = 4


@dataclass(frozen=True)
class Cut:
    """How n * C columns are cut: `chunk` columns, never across streams, `group` chunks to a group."""

    chunk: int
    per_stream: int
    total: int
    group: int


def cut_columns(n: int, width: int) -> Cut:
    """The cut for n streams of this width; below 4,096 the largest chunk of those that waste least.

    Under the interpreter chunks are small, so that small tests have several.
    """
    if INTERPRETED:
        chunk = 128
    elif width >= 4096:
        chunk = 512
    else:
        chunk = min((512, 256, 128), key=lambda size: cdiv(width, size) * size)
    per_stream = cdiv(width, chunk)
    total = n * per_stream
    return Cut(chunk, per_stream, total, cdiv(total, GROUPS))


@dataclass(frozen=True)
class Partials:
    """Partial sums of h [stored, K, M] and of the squares [stored, M], and how they are added (`partial_sum`).

    Squares of each stream alone are [stored, n, M]. First every `chunk` of them, then every `group` of these sums.
    """

    h: torch.Tensor
    squares: torch.Tensor
    stored: int
    group: int
    chunk: int = 1


def parts_of(x: torch.Tensor, phi: torch.Tensor, norm_weight: torch.Tensor | None) -> int:
    """How many bf16 parts stand for phi; 0: float32 dots.

    "high" and "medium" allow tf32, whose 11 bits two bf16 parts exceed. bf16 phi is exact in one, f16 in two.
    """
    if x.dtype != torch.bfloat16:
        return 0
    if norm_weight is None and phi.dtype == torch.bfloat16:
        return 1
    if norm_weight is None and phi.dtype == torch.float16:
        return 2
    return 3 if products_are_exact() else 2


@triton.jit
def _product(v, phi, norm_weight, flat, k, inside, phi_k, phi_c, part_stride, K: tl.constexpr, PARTS: tl.constexpr,
             AHEAD: tl.constexpr, HAS_NORM: tl.constexpr, PRECISION: tl.constexpr,
             INTERPRET: tl.constexpr):  # fmt: skip
    """v [BLOCK_M, columns] @ phi[k, flat]^T for some of phi's rows."""
    w_at = phi + flat[:, None] * phi_c + k[None, :] * phi_k
    part = tl.zeros([v.shape[0], k.shape[0]], tl.float32)
    if AHEAD:
        # Rows beyond K exist and are zero.
        if PARTS == 3:
            low = tl.load(w_at + 2 * part_stride, mask=inside[:, None], other=0.0)
            part = dot_bf16(v, low, part, INTERPRET)
        middle = tl.load(w_at + part_stride, mask=inside[:, None], other=0.0)
        part = dot_bf16(v, middle, part, INTERPRET)
        high = tl.load(w_at, mask=inside[:, None], other=0.0)
        part = dot_bf16(v, high, part, INTERPRET)
    else:
        w = tl.load(w_at, mask=inside[:, None] & (k < K)[None, :], other=0.0)
        if HAS_NORM:
            norm = tl.load(norm_weight + flat, mask=inside, other=0.0)
            w = w.to(tl.float32) * norm.to(tl.float32)[:, None]
        if PARTS == 0:
            part = dot_float32(v.to(tl.float32), w.to(tl.float32), part, PRECISION)
        elif PARTS == 1:
            part = dot_bf16(v, w, part, INTERPRET)
        else:
            high, middle, low = split_bf16(w.to(tl.float32))
            if PARTS == 3:
                part = dot_bf16(v, low, part, INTERPRET)
            part = dot_bf16(v, middle, part, INTERPRET)
            part = dot_bf16(v, high, part, INTERPRET)
    return part


@triton.jit(do_not_specialize=["M", "chunks_each", "token_tiles"])
def project_kernel(x, phi, norm_weight, h_part, squares_part, M, C, stride_m, stride_n, stride_c, phi_k,
                   phi_c, part_stride, token_tiles, chunks_each, CHUNKS: tl.constexpr,
                   PER_STREAM: tl.constexpr, CHUNK: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
                   AHEAD: tl.constexpr, HAS_NORM: tl.constexpr, PRECISION: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, MORE_K: tl.constexpr,
                   EACH_BLOCK: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """Partial sums over the chunks of one program, for one tile of tokens and one block of phi's rows.

    MORE_K: rows after the block, in a product of their own; there is one block then.
    EACH_BLOCK: whether the squares of each block are added up by themselves, as `project_of_rows_kernel` does.
    """
    BLOCKS: tl.constexpr = CHUNK // BLOCK_C
    tile = tl.program_id(0) % token_tiles
    stored = tl.program_id(0) // token_tiles
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    tok = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_C)
    x_rows = x + tok[:, None] * stride_m
    live = (tok < M)[:, None]

    h_chunk = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    h_sum = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    if MORE_K:
        more_k = BLOCK_K + tl.arange(0, MORE_K)
        more_chunk = tl.zeros([BLOCK_M, MORE_K], tl.float32)
        more_sum = tl.zeros([BLOCK_M, MORE_K], tl.float32)
    squares_chunk = tl.zeros([BLOCK_M] if EACH_BLOCK else [BLOCK_M, BLOCK_C], tl.float32)
    squares_sum = tl.zeros([BLOCK_M], tl.float32)
    first = stored * chunks_each * BLOCKS
    last = tl.minimum((stored + 1) * chunks_each, CHUNKS) * BLOCKS
    for block in range(first, last):
        stream = block // (PER_STREAM * BLOCKS)
        c = (block % (PER_STREAM * BLOCKS)) * BLOCK_C + columns
        inside = c < C
        flat = stream * C + c
        v = tl.load(x_rows + stream * stride_n + c[None, :] * stride_c, mask=live & inside[None, :], other=0.0)
        part = _product(v, phi, norm_weight, flat, k, inside, phi_k, phi_c, part_stride, K, PARTS, AHEAD, HAS_NORM,
                        PRECISION, INTERPRET)  # fmt: skip
        h_chunk = add_rounded(part, h_chunk)
        if MORE_K:
            part = _product(v, phi, norm_weight, flat, more_k, inside, phi_k, phi_c, part_stride, K, PARTS, AHEAD,
                            HAS_NORM, PRECISION, INTERPRET)  # fmt: skip
            more_chunk = add_rounded(part, more_chunk)
        v = v.to(tl.float32)
        if EACH_BLOCK:
            squares_chunk += tl.sum(v * v, axis=1)
        else:
            squares_chunk += v * v
        if block % BLOCKS == BLOCKS - 1:
            h_sum += h_chunk
            h_chunk = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
            if MORE_K:
                more_sum += more_chunk
                more_chunk = tl.zeros([BLOCK_M, MORE_K], tl.float32)
            if EACH_BLOCK:
                squares_sum += squares_chunk
            else:
                squares_sum += tl.sum(squares_chunk, axis=1)
            squares_chunk = tl.zeros_like(squares_chunk)

    at = (stored * K + k).to(tl.int64) * M
    tl.store(h_part + at[None, :] + tok[:, None], h_sum, mask=live & (k < K)[None, :])
    if MORE_K:
        at = (stored * K + more_k).to(tl.int64) * M
        tl.store(h_part + at[None, :] + tok[:, None], more_sum, mask=live & (more_k < K)[None, :])
    if tl.program_id(1) == 0:
        tl.store(squares_part + stored.to(tl.int64) * M + tok, squares_sum, mask=tok < M)


@triton.jit
def partial_sum(base, mask, stored, stride, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """The sum of base[s * stride] over the stored partial sums, groups of GROUP chunks of CHUNK.

    A chunk's are added in order, a group's chunks, and then the groups: what a program does itself where there are many
    tokens. Up to 32 loads do not wait for each other; all of some hundred would take minutes to compile.
    """
    AT_ONCE: tl.constexpr = max(1, min(_GROUPS, _LOADS // (GROUP * CHUNK)))
    total = tl.zeros(mask.shape, tl.float32)
    for start in range(0, stored, AT_ONCE * GROUP * CHUNK):
        for group in tl.static_range(AT_ONCE):
            for chunk in tl.static_range(GROUP):
                for block in tl.static_range(CHUNK):
                    s = start + (group * GROUP + chunk) * CHUNK + block
                    v = tl.load(base + s * stride, mask=mask & (s < stored), other=0.0)
                    if block == 0:
                        of_chunk = v
                    else:
                        of_chunk += v
                if chunk == 0:
                    of_group = of_chunk
                else:
                    of_group += of_chunk
            total += of_group
    return total


@triton.jit
def store_sums(h_part, h, tok, tokens, stored, K: tl.constexpr, KP: tl.constexpr, GROUP: tl.constexpr,
               CHUNK: tl.constexpr):  # fmt: skip
    """h [M, K] of these tokens from its partial sums."""
    k = tl.arange(0, KP)[:, None]
    mask = (tok < tokens)[None, :] & (k < K)
    sums = partial_sum(h_part + k * tokens + tok[None, :], mask, stored, K * tokens, GROUP, CHUNK)
    tl.store(h + tok[None, :] * K + k, sums, mask=mask)


@triton.jit(do_not_specialize=["M", "stored"])
def collect_kernel(h_part, squares_part, h, ms, M, stored, inverse_columns, K: tl.constexpr,
                   SQUARES: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
                   BLOCK_T: tl.constexpr):  # fmt: skip
    """h [M, K] and ms [M, SQUARES] from the partial sums of a projection."""
    tokens = M.to(tl.int64)
    tok = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = tok < tokens
    for s in tl.static_range(SQUARES):
        squares = partial_sum(squares_part + s * tokens + tok, live, stored, SQUARES * tokens, GROUP, CHUNK)
        tl.store(ms + tok * SQUARES + s, squares * inverse_columns, mask=live)
    store_sums(h_part, h, tok, tokens, stored, K, BLOCK_K, GROUP, CHUNK)


@triton.jit(do_not_specialize=["M"])
def spread_kernel(d_h, d_ms, dh, coefficient, M, inverse_columns, K: tl.constexpr, SQUARES: tl.constexpr,
                  ROW: tl.constexpr, HAS_DH: tl.constexpr, HAS_DMS: tl.constexpr, PARTS: tl.constexpr,
                  BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """d h [M, K] and d ms [M, SQUARES] as products_kernel takes them: dh [parts, M, ROW] and 2 dms / (nC)."""
    tokens = M.to(tl.int64)
    tok = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = tok < tokens
    k = tl.arange(0, BLOCK_K)[None, :]
    grad = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    if HAS_DH:
        grad += tl.load(d_h + tok[:, None] * K + k, mask=live[:, None] & (k < K), other=0.0).to(tl.float32)
    store_gradient(grad, dh + tok[:, None] * ROW + k, tokens * ROW, live[:, None] & (k < ROW), PARTS)
    for s in tl.static_range(SQUARES):
        dms = tl.zeros([BLOCK_T], tl.float32)
        if HAS_DMS:
            dms += tl.load(d_ms + tok * SQUARES + s, mask=live, other=0.0).to(tl.float32)
        tl.store(coefficient + tok * SQUARES + s, dms * (2.0 * inverse_columns), mask=live)


def more_rows(rows: int, block: int) -> int:
    """Rows of phi for a second product: the 80 rows of 8 streams are 64 and 16, instead of 128 in one product."""
    rest = max(16, next_power_of_2(rows - block)) if rows > block else 0
    return rest if rest < block else 0


def _share(x: torch.Tensor, rows: int, cut: Cut) -> tuple[Tile, int]:
    """The tile of a program, and how many chunks it adds up.

    Fewer tokens are shared in tiles of half as many, so that there is work for all processors, and then in chunks,
    whose sums are written and read once more. With mix and aggregate, 2,048 tokens of n = 4 take 64 microseconds with
    half a tile, 75 with chunks; 2,048 of n = 8 170 and 260.
    """
    at_once, groups = gpus.processors(x.device), cdiv(cut.total, cut.group)

    def tile(name: str) -> Tile:
        return tile_for(name, x.shape[1], x.element_size())

    def programs(of: Tile, share: int) -> int:
        return cdiv(expected(x.shape[0]), of.tokens) * share

    many = tile("project")
    if 4 * programs(many, groups) >= 5 * at_once:
        return many, cut.group
    # Not for float16 with 16 tokens. Where tokens lie side by side, it depends on the tile in which order the squares
    # of a token are added; a symbolic stride is not asked.
    stride = x.stride(0)
    looked = gpus.of(x.device).same_bits_in_small_tiles and not (isinstance(stride, int) and stride == 1)
    # The others were not measured; the rows of 2 streams are so few that their sums may as well be stored.
    measured = x.dtype == torch.bfloat16 and 16 < rows <= 80
    half = tile("project_half")
    if looked and measured and 4 * programs(half, groups) >= 3 * at_once:
        return half, cut.group
    if programs(many, groups) >= at_once:
        return many, cut.group
    few = tile("project_few")
    # With the rows of 2 streams or of 8 it is slower.
    if looked and x.dtype != torch.float16 and 16 < rows <= 32 and programs(few, cut.total) <= at_once:
        return few, 1
    return many, 1


def project(x: torch.Tensor, phi: torch.Tensor, norm_weight: torch.Tensor | None) -> Partials:
    """Partial sums of h and of the squares for x [M, n, C] (M > 0) and phi [K, n*C]."""
    tokens, n, width = x.shape
    norm_weight = None if norm_weight is None else norm_weight.contiguous()
    rows = phi.shape[0]
    cut = cut_columns(n, width)
    block = block_k(rows)
    more = more_rows(rows, block) if most_rows(x) > block else 0
    parts = parts_of(x, phi, norm_weight)
    tile, each = _share(x, rows, cut)
    # Which kernel adds squares in which order does not depend on the number of tokens.
    by_block = parts == 3 and not more and streamed_rows.fits(x, rows)
    streamed = by_block and streamed_rows.is_work(x, rows, cdiv(cut.total, cut.group))
    if streamed:
        each = cut.group
    stored = cdiv(cut.total, each)
    h = torch.empty(stored, rows, tokens, dtype=torch.float32, device=x.device)
    squares = torch.empty(stored, tokens, dtype=torch.float32, device=x.device)
    partials = Partials(h, squares, stored, cut.group // each)
    if streamed:
        streamed_rows.project(x, phi, norm_weight, h, squares, (cut.chunk, cut.per_stream, cut.total, each))
        return partials
    blocks_k = cdiv(rows, block + more)
    ahead = parts > 1 and cdiv(expected(tokens), TILES["project"].tokens) >= SPLIT_AHEAD_TILES
    tiles, weight = cdiv(tokens, tile.tokens), phi
    with on_device(x):
        if ahead:
            weight = split_ahead(phi, norm_weight, parts, blocks_k * (block + more))
        launch(
            project_kernel, (tiles * stored, blocks_k),
            x, weight, norm_weight, h, squares, tokens, width, x.stride(0), x.stride(1), x.stride(2),
            weight.stride(-2), weight.stride(-1), weight.stride(0), tiles, each, CHUNKS=cut.total,
            PER_STREAM=cut.per_stream, CHUNK=cut.chunk, K=rows, PARTS=parts, AHEAD=ahead,
            HAS_NORM=norm_weight is not None and not ahead, PRECISION=dot_precision(), BLOCK_M=tile.tokens,
            BLOCK_C=tile.columns, BLOCK_K=block, MORE_K=more, EACH_BLOCK=by_block, INTERPRET=INTERPRETED,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return partials


def tokens_to_add(partials: Partials, rows: int) -> int:
    """So many for 4 warps that a thread adds up 8 of their numbers, or 1 where a number has many partial sums."""
    each = 8 if partials.stored <= GROUPS else 1
    return max(1, each * 128 // next_power_of_2(rows))


def narrow_tile(rows: int) -> tuple[int, int]:
    """(tokens, padded rows) of a program that holds all K values of its tokens, 32 to a thread of 4 warps."""
    padded = next_power_of_2(rows)
    return max(4, min(128, 4096 // padded)), padded


def forward(
    x: torch.Tensor, phi: torch.Tensor, norm_weight: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h [..., K], ms [...]) of x [..., n, C], bitwise those that generate_mix returns."""
    flat = token_view(x, 2)
    return collect(project(flat, phi, norm_weight) if flat.shape[0] else None, x, phi.shape[0])


def collect(
    partials: Partials | None, x: torch.Tensor, rows: int, alone: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h [..., K], ms [...]) from the partial sums of the K = `rows` projections of x [..., n, C]; None: no tokens.

    alone: the rows are of one stream after the other, h [..., n, K / n] and ms [..., n].
    """
    n, width = x.shape[-2:]
    squares = n if alone else 1
    shape = x.shape[:-1] if alone else x.shape[:-2]
    h = torch.empty((*shape, rows // squares), dtype=torch.float32, device=x.device)
    ms = torch.empty(shape, dtype=torch.float32, device=x.device)
    if partials is None:
        return h, ms
    tokens, block_t = partials.squares.shape[-1], tokens_to_add(partials, rows)
    with on_device(x):
        launch(
            collect_kernel, (cdiv(tokens, block_t),),
            partials.h, partials.squares, h, ms, tokens, partials.stored, squares / (n * width), K=rows,
            SQUARES=squares, GROUP=partials.group, CHUNK=partials.chunk, BLOCK_K=next_power_of_2(rows),
            BLOCK_T=block_t, num_warps=4,
        )  # fmt: skip
    return h, ms


def spread(
    d_h: torch.Tensor | None, d_ms: torch.Tensor | None, x: torch.Tensor, rows: int, alone: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """dh as `dh_parts` lays it out and the coefficient of x [M], for x [M, n, C] (M > 0) and K = `rows`.

    alone: the rows are of one stream after the other, and coefficient is [M, n].
    """
    tokens, n, width = x.shape
    squares = n if alone else 1
    dh = dh_parts(x, rows)
    coefficient = torch.empty(tokens, *([n] if alone else []), dtype=torch.float32, device=x.device)
    block_t, block = narrow_tile(dh.shape[2])
    with on_device(x):
        launch(
            spread_kernel, (cdiv(tokens, block_t),),
            None if d_h is None else d_h.contiguous(), None if d_ms is None else d_ms.contiguous(), dh,
            coefficient, tokens, squares / (n * width), K=rows, SQUARES=squares, ROW=dh.shape[2],
            HAS_DH=d_h is not None, HAS_DMS=d_ms is not None, PARTS=dh.shape[0] == 3, BLOCK_K=block,
            BLOCK_T=block_t, num_warps=4,
        )  # fmt: skip
    return dh, coefficient


def backward(
    d_h: torch.Tensor | None,
    d_ms: torch.Tensor | None,
    x: torch.Tensor,
    phi: torch.Tensor,
    norm_weight: torch.Tensor | None,
    needs: Sequence[bool],
    d_x: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx + d_x, dphi, dnorm_weight), zero-sized where needs says no."""
    need_dx, need_dphi, need_dnorm = wanted(needs, 3)
    flat = token_view(x, 2)
    if flat.shape[0] == 0 or not any(needs):
        dx, dphi, dnorm = no_tokens((x, phi, norm_weight), needs)
        return dx, dphi, dnorm
    dh, coefficient = spread(d_h, d_ms, flat, phi.shape[0])
    needs = need_dx, need_dphi, False, False, need_dnorm
    dx, dx_rows, _ = gradient_like(x, 2, need_dx)
    products = backward_products(flat, None, phi, norm_weight, dh, coefficient, None, None, needs, dx_rows, d_x)
    return put_back(dx, dx_rows), products.dphi, products.dnorm
