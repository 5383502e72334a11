"""The RMS norm behind the aggregate: rows forward, and the sums over a row that its backward begins with.

u = sum_i h_pre[i] * x[i];  r = 1 / sqrt(mean(u^2) + eps);  out = r * u * weight
du = r * g - kappa * u,  g = weight * d_out,  kappa = r^3 * <g, u> / C;  d weight = sum over tokens of r * u * d_out
"""

# mypy: disable-error-code="assignment"
# A tuple of tiles grows while a loop over streams is unrolled.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mhc_compile.forms import Gates, Rms
from mhc_compile.kernels.common import group_scale, launch, on_device
from mhc_compile.kernels.config import SUM_COLUMNS, Tile, tile_for
from mhc_compile.kernels.gates import affine, rms_factor

# Columns of a row that a program holds at once; wider rows are read twice.
_ROW = 8192


@dataclass(frozen=True)
class InputNorm:
    """A norm: weight [C] or None, and eps."""

    weight: torch.Tensor | None
    eps: float


def input_norm(weight: torch.Tensor | None, eps: float | None) -> InputNorm | None:
    """The norm that these arguments of an operator describe; none without eps."""
    return None if eps is None else InputNorm(None if weight is None else weight.contiguous(), eps)


def row_tile(width: int) -> Tile:
    """Whole rows of so many columns, 16 to 32 numbers of them in a thread."""
    columns = min(_ROW, triton.next_power_of_2(width))
    return Tile(max(1, 2048 // columns), columns, 8 if columns > 4096 else 4)


@triton.jit
def _weighted(pre, x_rows, c, mask, x_n, x_c, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """u, float32, of these columns."""
    u = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for stream in tl.static_range(N):
        v = tl.load(x_rows + stream * x_n + c[None, :] * x_c, mask=mask, other=0.0)
        u += pre[stream] * v.to(tl.float32)
    return u


@triton.jit
def _store_normed(u, r, weight, out, tok, c, mask, C, HAS_WEIGHT: tl.constexpr):
    normed = u * r[:, None]
    if HAS_WEIGHT:
        normed = normed * tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    tl.store(out + tok[:, None] * C + c[None, :], normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def normed_rows(gates, i, x, weight, out, tok, live, C, x_m, x_n, x_c, inverse_width, eps, N: tl.constexpr,
                HAS_WEIGHT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_C: tl.constexpr):  # fmt: skip
    """out[tok] of rows of C columns; i is the rows of gates. WHOLE: a row fits into BLOCK_C and is read once."""
    pre = ()
    for stream in tl.static_range(N):
        pre = pre + (tl.sum(tl.where(i == stream, gates, 0.0), axis=0)[:, None],)
    x_rows = x + tok[:, None] * x_m
    c = tl.arange(0, BLOCK_C)
    if WHOLE:
        mask = live[:, None] & (c < C)[None, :]
        u = _weighted(pre, x_rows, c, mask, x_n, x_c, N, BLOCK_M, BLOCK_C)
        r = 1.0 / tl.sqrt(tl.sum(u * u, axis=1) * inverse_width + eps)
        _store_normed(u, r, weight, out, tok, c, mask, C, HAS_WEIGHT)
    else:
        squares = tl.zeros([BLOCK_M], tl.float32)
        for start in range(0, C, BLOCK_C):
            mask = live[:, None] & (start + c < C)[None, :]
            u = _weighted(pre, x_rows, start + c, mask, x_n, x_c, N, BLOCK_M, BLOCK_C)
            squares += tl.sum(u * u, axis=1)
        r = 1.0 / tl.sqrt(squares * inverse_width + eps)
        for start in range(0, C, BLOCK_C):
            mask = live[:, None] & (start + c < C)[None, :]
            u = _weighted(pre, x_rows, start + c, mask, x_n, x_c, N, BLOCK_M, BLOCK_C)
            _store_normed(u, r, weight, out, tok, start + c, mask, C, HAS_WEIGHT)


@triton.jit(do_not_specialize=["M", "token_tiles"])
def input_norm_sums_kernel(x, d_out, weight, h, ms, scale, bias, part, M, C, x_m, x_n, x_c, d_m, d_c, rms_eps, pre_eps,
                           token_tiles, N: tl.constexpr, K: tl.constexpr, RMS_MODE: tl.constexpr,
                           GROUPED: tl.constexpr, HAS_WEIGHT: tl.constexpr, COLUMNS: tl.constexpr,
                           BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, VECTOR: tl.constexpr):  # fmt: skip
    """part [splits, 2n + 1, M], sums over COLUMNS columns: <g, x[i]> for each i, <u, x[i]> for each i, and <u, u>."""
    LANES: tl.constexpr = BLOCK_C // VECTOR
    tile = tl.program_id(0) % token_tiles
    split = tl.program_id(0) // token_tiles
    tok = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = tok < M
    r = rms_factor(tl.load(ms + tok, mask=live, other=1.0), rms_eps, RMS_MODE)
    pre = ()
    sums = (tl.zeros([BLOCK_M, LANES], tl.float32),)
    for stream in tl.static_range(N):
        s, b = affine(scale, bias, stream + tok * 0, live, 0, GROUPED)
        logit = r * tl.load(h + tok * K + stream, mask=live, other=0.0) * s + b
        pre = pre + ((tl.sigmoid(logit) + pre_eps)[:, None],)
        sums = sums + (tl.zeros([BLOCK_M, LANES], tl.float32), tl.zeros([BLOCK_M, LANES], tl.float32))
    x_rows = x + tok[:, None] * x_m
    first = split * COLUMNS
    for start in range(first, tl.minimum(first + COLUMNS, C), BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        mask = live[:, None] & (c < C)[None, :]
        g = tl.load(d_out + tok[:, None] * d_m + c[None, :] * d_c, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g = g * tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        u = _weighted(pre, x_rows, c, mask, x_n, x_c, N, BLOCK_M, BLOCK_C)
        # VECTOR neighbours lie in one thread, so this much of a sum needs no exchange.
        updated = (sums[0] + tl.sum(tl.reshape(u * u, [BLOCK_M, LANES, VECTOR]), axis=2),)
        for stream in tl.static_range(N):
            v = tl.load(x_rows + stream * x_n + c[None, :] * x_c, mask=mask, other=0.0).to(tl.float32)
            with_g = sums[2 * stream + 1] + tl.sum(tl.reshape(g * v, [BLOCK_M, LANES, VECTOR]), axis=2)
            with_u = sums[2 * stream + 2] + tl.sum(tl.reshape(u * v, [BLOCK_M, LANES, VECTOR]), axis=2)
            updated = updated + (with_g, with_u)
        sums = updated
    at = part + (split * (2 * N + 1)).to(tl.int64) * M + tok
    for stream in tl.static_range(N):
        tl.store(at + stream * M.to(tl.int64), tl.sum(sums[2 * stream + 1], axis=1), mask=live)
        tl.store(at + (N + stream) * M.to(tl.int64), tl.sum(sums[2 * stream + 2], axis=1), mask=live)
    tl.store(at + 2 * N * M.to(tl.int64), tl.sum(sums[0], axis=1), mask=live)


@triton.jit
def norm_gradient(d_products, gates, sums, tok, mask, part_s, row_s, parts, inverse_width, eps, factors, tokens,
                  live, i, N: tl.constexpr, BLOCK_T: tl.constexpr, NP: tl.constexpr):  # fmt: skip
    """d h_pre [NP, T] from <g, x[i]> and the other sums; r and kappa go to factors [2, M]."""
    dots = tl.zeros([NP, BLOCK_T], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    for part in range(0, parts):
        at = sums + part * part_s + tok
        dots += tl.load(at[None, :] + (N + i) * row_s, mask=mask, other=0.0)
        squares += tl.load(at + 2 * N * row_s, mask=live, other=0.0)
    r = 1.0 / tl.sqrt(squares * inverse_width + eps)
    # In this order, since r^3 alone overflows where u is small.
    kappa = tl.sum(tl.where(mask, gates * d_products, 0.0), axis=0) * r * inverse_width * r * r
    tl.store(factors + tok, r, mask=live)
    tl.store(factors + tokens + tok, kappa, mask=live)
    return r[None, :] * d_products - kappa[None, :] * dots


@triton.jit(do_not_specialize=["splits"])
def column_sum_kernel(part, out, C, splits, BLOCK: tl.constexpr):
    """out [C] from part [splits, C], added in order."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    at = part + c
    for _ in range(0, splits):
        total += tl.load(at, mask=c < C, other=0.0)
        at += C
    tl.store(out + c, total.to(out.dtype.element_ty), mask=c < C)


def row_sums(
    d_out: torch.Tensor,
    x: torch.Tensor,
    norm: InputNorm,
    h: torch.Tensor,
    ms: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    *,
    rms: Rms,
    gates: Gates,
) -> torch.Tensor:
    """The sums [splits, 2n + 1, M] of `input_norm_sums_kernel`, for x [M, n, C] (M > 0) and d_out [M, C]."""
    tokens, n, width = x.shape
    tile = tile_for("norm_sums", n, x.element_size())
    splits, tiles = triton.cdiv(width, SUM_COLUMNS), triton.cdiv(tokens, tile.tokens)
    part = torch.empty(splits, 2 * n + 1, tokens, dtype=torch.float32, device=x.device)
    rows = h.shape[-1]
    with on_device(x):
        launch(
            input_norm_sums_kernel, (tiles * splits,),
            x, d_out, norm.weight, h, ms, scale, bias, part, tokens, width, *x.stride(), *d_out.stride(), rms.eps,
            gates.pre_eps, tiles, N=n, K=rows, RMS_MODE=rms.mode, GROUPED=group_scale(scale, rows),
            HAS_WEIGHT=norm.weight is not None, COLUMNS=SUM_COLUMNS, BLOCK_M=tile.tokens, BLOCK_C=tile.columns,
            VECTOR=16 // x.element_size(), num_warps=tile.warps,
        )  # fmt: skip
    return part


def weight_gradient(part: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """d weight from part [splits, C], the sums over stretches of tokens."""
    out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    splits, width = part.shape
    with on_device(part):
        launch(column_sum_kernel, (triton.cdiv(width, 128),), part, out, width, splits, BLOCK=128, num_warps=4)
    return out
