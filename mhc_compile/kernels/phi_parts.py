"""phi as bf16 parts, whose sum it is, for products on tensor cores: split once, ahead of the kernels that use them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mhc_compile.kernels.common import cdiv, launch, on_device, split_bf16


@triton.jit
def split_kernel(phi, norm_weight, parts, stride_k, stride_c, columns, K: tl.constexpr,
                 PADDED_K: tl.constexpr, PARTS: tl.constexpr, HAS_NORM: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """parts[p, k, c] [PARTS, PADDED_K, columns]: the bf16 parts of phi * norm_weight, rows beyond K zero."""
    k = tl.program_id(1).to(tl.int64)
    part = tl.full([], PADDED_K, tl.int64) * columns
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = c < columns
    w = tl.load(phi + k * stride_k + c * stride_c, mask=live & (k < K), other=0.0).to(tl.float32)
    if HAS_NORM:
        w = w * tl.load(norm_weight + c, mask=live, other=0.0).to(tl.float32)
    high, middle, low = split_bf16(w)
    at = parts + k * columns + c
    tl.store(at, high, mask=live)
    tl.store(at + part, middle, mask=live)
    if PARTS == 3:
        tl.store(at + 2 * part, low, mask=live)


def split_ahead(phi: torch.Tensor, norm_weight: torch.Tensor | None, parts: int, rows: int) -> torch.Tensor:
    """The bf16 parts of phi * norm_weight [parts, rows, n*C], two or three, the largest first; rows beyond K are 0."""
    columns = phi.shape[1]
    weight = torch.empty(parts, rows, columns, dtype=torch.bfloat16, device=phi.device)
    with on_device(phi):
        launch(
            split_kernel, (cdiv(columns, 1024), rows),
            phi, norm_weight, weight, phi.stride(0), phi.stride(1), columns, K=phi.shape[0], PADDED_K=rows,
            PARTS=parts, HAS_NORM=norm_weight is not None, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return weight


# A tile of `split_in_tiles`.
TILE_ROWS, TILE_COLUMNS = 32, 128


@triton.jit
def tiles_kernel(phi, norm_weight, tiles, stride_k, stride_c, C, N: tl.constexpr, K: tl.constexpr,
                 K_TILES: tl.constexpr, HAS_NORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """tiles [C / COLUMNS, N, K_TILES, 2, ROWS, COLUMNS]: the two largest bf16 parts of phi * norm_weight."""
    k = tl.program_id(1)
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = flat < N * C
    w = tl.load(phi + k.to(tl.int64) * stride_k + flat * stride_c, mask=live & (k < K), other=0.0).to(tl.float32)
    if HAS_NORM:
        w = w * tl.load(norm_weight + flat, mask=live, other=0.0).to(tl.float32)
    high, middle, _ = split_bf16(w)
    c = flat % C
    column = c % COLUMNS
    place = column // 32 * 32 + column // 2 % 4 * 8 + column // 8 % 4 * 2 + column % 2
    tile = ((c // COLUMNS) * N + flat // C) * K_TILES + k // ROWS
    at = tiles + tile.to(tl.int64) * (2 * ROWS * COLUMNS) + k % ROWS * COLUMNS + place
    tl.store(at, high, mask=live)
    tl.store(at + ROWS * COLUMNS, middle, mask=live)


def split_in_tiles(phi: torch.Tensor, norm_weight: torch.Tensor | None, n: int) -> torch.Tensor:
    """The two largest bf16 parts of phi * norm_weight, in tiles [C / 128, n, rows / 32, 2, 32, 128]; zeros beyond K.

    In a tile, the columns of each 32 have changed places: number q q i i e, in bits, is at place i i q q e.
    """
    rows, columns = phi.shape
    width, k_tiles = columns // n, cdiv(rows, TILE_ROWS)
    shape = (width // TILE_COLUMNS, n, k_tiles, 2, TILE_ROWS, TILE_COLUMNS)
    tiles = torch.empty(shape, dtype=torch.bfloat16, device=phi.device)
    with on_device(phi):
        launch(
            tiles_kernel, (cdiv(columns, 1024), k_tiles * TILE_ROWS),
            phi, norm_weight, tiles, phi.stride(0), phi.stride(1), width, N=n, K=rows, K_TILES=k_tiles,
            HAS_NORM=norm_weight is not None, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return tiles
