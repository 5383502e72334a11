"""The two wide products of a projection's backward, dh @ phi and dh^T @ x, and the sums of parameters' gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mhc_compile.kernels import gpus, many_rows, streamed_products, streamed_rows
from mhc_compile.kernels.common import (
    INTERPRETED,
    add_rounded,
    cdiv,
    dot_bf16,
    dot_float32,
    dot_precision,
    empty_gradient,
    expected,
    group_scale,
    laid_out_as,
    launch,
    next_power_of_2,
    nothing,
    on_device,
    share_tokens,
    split_bf16,
)
from mhc_compile.kernels.config import tile_for
from mhc_compile.kernels.gates import rounded_product

MAX_BLOCK_K = 64
# Programs per processor that the split over tokens aims at.
WAVES = 5


def most_rows(x: torch.Tensor) -> int:
    """The most rows of phi that one program multiplies."""
    return gpus.of(x.device).rows_of_phi if x.dtype == torch.bfloat16 else MAX_BLOCK_K


def block_k(rows: int, limit: int = MAX_BLOCK_K) -> int:
    """How many of phi's rows a program takes."""
    return max(16, min(limit, next_power_of_2(rows)))


def dh_parts(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Room for dh [1 or 3, M, row]: float32, or for bf16 x its three bf16 parts, in rows of whole 16 bytes.

    Who fills it puts zeros into columns beyond K: a kernel that copies 16 bytes at a time multiplies them by zeros.
    """
    if x.dtype == torch.bfloat16:
        return torch.empty(3, x.shape[0], cdiv(rows, 8) * 8, dtype=torch.bfloat16, device=x.device)
    return torch.empty(1, x.shape[0], rows, dtype=torch.float32, device=x.device)


@triton.jit
def store_gradient(grad, at, part_stride, mask, PARTS: tl.constexpr):
    """Store dh, whole or as its three bf16 parts."""
    if PARTS:
        high, middle, low = split_bf16(grad)
        tl.store(at, high, mask=mask)
        tl.store(at + part_stride, middle, mask=mask)
        tl.store(at + 2 * part_stride, low, mask=mask)
    else:
        tl.store(at, grad, mask=mask)


@triton.jit(do_not_specialize=["M", "tokens_each", "part_stride"])
def products_kernel(x, d_out, d_x, phi, norm_weight, dh, coefficient, h_pre, dx, dphi_part, M, tokens_each,
                    part_stride, C, x_m, x_n, x_c, d_m, d_c, phi_k, phi_c, dx_m, dx_n, dx_c,
                    N: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, PARTS: tl.constexpr,
                    HAS_NORM: tl.constexpr, HAS_OUT: tl.constexpr, HAS_DX: tl.constexpr, NEED_DX: tl.constexpr,
                    NEED_DPHI: tl.constexpr, PRECISION: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
                    BLOCKS_K: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """dx = d_x + h_pre * d_out + (dh @ phi) * norm_weight + coefficient * x, and dphi_part = dh^T @ x.

    A program holds one column block of one stream for the tokens of its split. The streams of a block run side
    by side, so that d_out comes from L2. dh is float32, or the three bf16 parts of it.
    """
    pid = tl.program_id(0)
    k_own = tl.arange(0, BLOCK_K)
    if NEED_DPHI:
        # Side by side as well, so that x comes from L2 for all but the first block of rows.
        k_own += pid % BLOCKS_K * BLOCK_K
        pid = pid // BLOCKS_K
    stream = pid % N
    blocks = tl.cdiv(C, BLOCK_C)
    c = (pid // N) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    split = pid // (N * blocks)
    inside = c < C
    flat = stream * C + c
    k_first = tl.arange(0, BLOCK_K)
    if HAS_NORM:
        norm = tl.load(norm_weight + flat, mask=inside, other=0.0).to(tl.float32)[None, :]
    w_at = phi + k_first[:, None] * phi_k + flat[None, :] * phi_c
    if NEED_DX and BLOCKS_K == 1:
        w = tl.load(w_at, mask=(k_first < K)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if HAS_NORM:
            w = w * norm
        w_high, w_middle, _ = split_bf16(w)
    if NEED_DPHI:
        acc = tl.zeros([BLOCK_C, BLOCK_K], tl.float32)
    first = split * tokens_each
    for start in range(first, tl.minimum(first + tokens_each, M), BLOCK_M):
        tok = tl.arange(0, BLOCK_M).to(tl.int64) + start
        live = tok < M
        tile = live[:, None] & inside[None, :]
        v = tl.load(x + tok[:, None] * x_m + stream * x_n + c[None, :] * x_c, mask=tile, other=0.0)
        # What dx adds is on its way while tensor cores are busy.
        dx_at = tok[:, None] * dx_m + stream * dx_n + c[None, :] * dx_c
        if NEED_DX and HAS_DX:
            before = tl.load(d_x + dx_at, mask=tile, other=0.0)
        if NEED_DX and HAS_OUT:
            grad = tl.load(d_out + tok[:, None] * d_m + c[None, :] * d_c, mask=tile, other=0.0)
        if NEED_DPHI or BLOCKS_K == 1:
            g_at = dh + tok[:, None] * ROW + k_own[None, :]
            g_mask = live[:, None] & (k_own < K)[None, :]
            g_high = tl.load(g_at, mask=g_mask, other=0.0)
            if PARTS:
                g_middle = tl.load(g_at + part_stride, mask=g_mask, other=0.0)
        if NEED_DPHI:
            if PARTS:
                g_low = tl.load(g_at + 2 * part_stride, mask=g_mask, other=0.0)
                v_t = tl.trans(v)
                part = dot_bf16(v_t, g_low, tl.zeros([BLOCK_C, BLOCK_K], tl.float32), INTERPRET)
                part = dot_bf16(v_t, g_middle, part, INTERPRET)
                part = dot_bf16(v_t, g_high, part, INTERPRET)
            else:
                part = tl.zeros([BLOCK_C, BLOCK_K], tl.float32)
                part = dot_float32(tl.trans(v.to(tl.float32)), g_high, part, PRECISION)
            acc = add_rounded(part, acc)
        if NEED_DX:
            d = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
            if BLOCKS_K == 1:
                if PARTS:
                    # dx is rounded to bf16, so the products of the smaller parts are left out.
                    d = dot_bf16(g_middle, w_high, d, INTERPRET)
                    d = dot_bf16(g_high, w_middle, d, INTERPRET)
                    d = dot_bf16(g_high, w_high, d, INTERPRET)
                else:
                    d = dot_float32(g_high, w, d, PRECISION)
            else:
                for block in range(BLOCKS_K):
                    k = block * BLOCK_K + k_first
                    k_at = dh + tok[:, None] * ROW + k[None, :]
                    k_mask = live[:, None] & (k < K)[None, :]
                    g_k = tl.load(k_at, mask=k_mask, other=0.0)
                    w_k = tl.load(
                        w_at + block * BLOCK_K * phi_k, mask=(k < K)[:, None] & inside[None, :], other=0.0
                    ).to(tl.float32)
                    if HAS_NORM:
                        w_k = w_k * norm
                    # Of bf16 parts, `many_rows` takes so many rows.
                    d = dot_float32(g_k, w_k, d, PRECISION)
            d += tl.load(coefficient + tok, mask=live, other=0.0)[:, None] * v.to(tl.float32)
            if HAS_OUT:
                pre = tl.load(h_pre + stream.to(tl.int64) * M + tok, mask=live, other=0.0)
                d += pre[:, None] * grad.to(tl.float32)
            if HAS_DX:
                d += before.to(tl.float32)
            tl.store(dx + dx_at, d.to(dx.dtype.element_ty), mask=tile)
    if NEED_DPHI:
        at = (split.to(tl.int64) * K + k_own) * (N * C)
        tl.store(dphi_part + at[None, :] + flat[:, None], acc, mask=inside[:, None] & (k_own < K)[None, :])


@triton.jit
def reduce_affine(affine_part, dscale, dbias, tiles, N: tl.constexpr, K: tl.constexpr,
                  NEED_DSCALE: tl.constexpr, NEED_DBIAS: tl.constexpr, GROUPED: tl.constexpr,
                  PADDED_K: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """dscale (by row or by group) and dbias from affine_part [tiles, 2, K]."""
    k = tl.arange(0, PADDED_K)
    scale_sum = tl.zeros([PADDED_K], tl.float32)
    bias_sum = tl.zeros([PADDED_K], tl.float32)
    for start in range(0, tiles, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        at = t[:, None].to(tl.int64) * (2 * K) + k[None, :]
        mask = (t < tiles)[:, None] & (k < K)[None, :]
        scale_sum += tl.sum(tl.load(affine_part + at, mask=mask, other=0.0), axis=0)
        bias_sum += tl.sum(tl.load(affine_part + at + K, mask=mask, other=0.0), axis=0)
    if NEED_DSCALE:
        if GROUPED:
            # Rows beyond pre and post belong to the one group that is left.
            group_of = tl.minimum(k // N, 2)
            for group in tl.static_range((K + N - 1) // N if K <= 2 * N else 3):
                value = tl.sum(tl.where(group_of == group, scale_sum, 0.0), axis=0)
                tl.store(dscale + group, value.to(dscale.dtype.element_ty))
        else:
            tl.store(dscale + k, scale_sum.to(dscale.dtype.element_ty), mask=k < K)
    if NEED_DBIAS:
        tl.store(dbias + k, bias_sum.to(dbias.dtype.element_ty), mask=k < K)


@triton.jit(do_not_specialize=["splits", "tiles"])
def reduce_kernel(dphi_part, phi, norm_weight, affine_part, dphi, dnorm, dscale, dbias, splits, tiles,
                  columns, column_programs, phi_k, phi_c, N: tl.constexpr, K: tl.constexpr,
                  GATES: tl.constexpr, HAS_NORM: tl.constexpr, NEED_DPHI: tl.constexpr, NEED_DNORM: tl.constexpr,
                  NEED_DSCALE: tl.constexpr, NEED_DBIAS: tl.constexpr, GROUPED: tl.constexpr,
                  PADDED_GATES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Second stage of the parameter gradients, every sum in a fixed order.

    Programs below column_programs own a block of columns of dphi and d norm_weight, the last scale and bias.
    """
    pid = tl.program_id(0)
    if pid < column_programs:
        c = pid * BLOCK + tl.arange(0, BLOCK)
        live = c < columns
        if NEED_DNORM:
            acc_norm = tl.zeros([BLOCK], tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            tile = (k < K)[:, None] & live[None, :]
            at = k[:, None] * columns + c[None, :]
            acc = tl.zeros([BLOCK_K, BLOCK], tl.float32)
            part_at = dphi_part + at
            for _ in range(0, splits):
                acc += tl.load(part_at, mask=tile, other=0.0)
                part_at += K * columns
            if NEED_DNORM:
                w = tl.load(phi + k[:, None] * phi_k + c[None, :] * phi_c, mask=tile, other=0.0)
                acc_norm += tl.sum(rounded_product(acc, w.to(tl.float32)), axis=0)
            if NEED_DPHI:
                if HAS_NORM:
                    acc = acc * tl.load(norm_weight + c, mask=live, other=0.0).to(tl.float32)[None, :]
                tl.store(dphi + at, acc.to(dphi.dtype.element_ty), mask=tile)
        if NEED_DNORM:
            tl.store(dnorm + c, acc_norm.to(dnorm.dtype.element_ty), mask=live)
    elif NEED_DSCALE or NEED_DBIAS:
        reduce_affine(affine_part, dscale, dbias, tiles, N, GATES, NEED_DSCALE, NEED_DBIAS, GROUPED, PADDED_GATES,
                      BLOCK_T)  # fmt: skip


@dataclass(frozen=True)
class Products:
    """The results of `backward_products`, zero-sized where not asked for."""

    dx: torch.Tensor
    dphi: torch.Tensor
    dscale: torch.Tensor
    dbias: torch.Tensor
    dnorm: torch.Tensor


@dataclass(frozen=True)
class Affine:
    """Scale and bias, and the memory of part [tiles, 2, K], the partial sums of dscale (as if ungrouped) and dbias."""

    scale: torch.Tensor
    bias: torch.Tensor
    part: torch.Tensor  # as `tile_sums` makes it
    tiles: int


def no_tokens(tensors: Sequence[torch.Tensor | None], needs: Sequence[bool]) -> list[torch.Tensor]:
    """The gradients of x, of which there is nothing, and of parameters, whose sums are empty."""
    first, *parameters = tensors
    assert first is not None
    dx = torch.empty_like(first) if needs[0] else nothing(first)
    return [dx, *(empty_gradient(t, need, first).zero_() for t, need in zip(parameters, needs[1:], strict=True))]


def backward_products(
    x: torch.Tensor,
    d_out: torch.Tensor | None,
    phi: torch.Tensor,
    norm_weight: torch.Tensor | None,
    dh: torch.Tensor,
    coefficient: torch.Tensor,
    h_pre: torch.Tensor | None,
    affine: Affine | None,
    needs: tuple[bool, ...],
    dx: torch.Tensor | None = None,
    d_x: torch.Tensor | None = None,
) -> Products:
    """dx (+ d_x) and the parameter gradients from dh, the coefficient of x [M] and, with d_out, h_pre [n, M].

    dx is the memory to fill, [M, n, C] of any strides; without it there is new one.

    dh is filled as `dh_parts` lays it out. Without affine there is no dscale and no dbias.
    """
    norm_weight = None if norm_weight is None else norm_weight.contiguous()
    need_dx, need_dphi, _, _, need_dnorm = needs
    need_sum = need_dphi or (need_dnorm and norm_weight is not None)
    if dx is None:
        dx = empty_gradient(x, need_dx, x)
    d_x = laid_out_as(d_x, dx)
    part = _products((x, d_out, d_x, phi, norm_weight, dh, coefficient, h_pre, dx), need_dx, need_sum)
    return Products(dx, *reduce_parameters(part, x, phi, norm_weight, affine, needs[1:]))


# x, d_out, d_x, phi, norm_weight, dh, coefficient, h_pre and dx, as in `backward_products`.
_Given = tuple[
    torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor | None, torch.Tensor,
    torch.Tensor, torch.Tensor | None, torch.Tensor,
]  # fmt: skip


def _products(given: _Given, need_dx: bool, need_sum: bool) -> torch.Tensor:
    """Fill dx, if it is needed, and return the partial sums of dphi [splits, K, n*C], none if they are not needed."""
    x, d_out, d_x, phi, norm_weight, dh, _, _, dx = given
    if need_dx and streamed_products.fits((x, dx, d_out, d_x), phi):
        return streamed_products.multiply(*given, need_sum)
    tokens, n, width = x.shape
    rows, columns = phi.shape
    part = None
    if need_dx and streamed_rows.fits_dx((x, dx, d_out, d_x), rows):
        streamed_rows.gradient_of_streams(*given)
        need_dx = False
    if need_sum and streamed_rows.fits(x, rows):
        part = streamed_rows.partial_dphi(x, dh, rows)
        need_sum = False
    # All rows at once need one launch and read x once.
    kb = block_k(rows, most_rows(x) if rows <= most_rows(x) else MAX_BLOCK_K)
    blocks_k = cdiv(rows, kb)
    many = blocks_k > 1 and x.dtype == torch.bfloat16
    large = many and gpus.of(x.device).many_rows
    tile = tile_for("products_of_many_rows" if large else "products", n, x.element_size())
    block_m, block_c = tile.tokens, tile.columns
    column_blocks = n * cdiv(width, block_c)
    # Enough programs to fill the device, each with enough tokens to pay for its share of dphi's partial sums.
    most_splits = cdiv(expected(tokens), 4 * block_m)
    splits = max(1, min(cdiv(WAVES * gpus.processors(x.device), column_blocks), most_splits))
    splits, tokens_each = share_tokens(tokens, splits, block_m)
    dx_strides = dx.stride() if need_dx else (0, 0, 0)
    if part is None:
        part = torch.empty(splits if need_sum else 0, rows, columns, dtype=torch.float32, device=x.device)

    def multiply(dx_too: bool, dphi_too: bool) -> None:
        launch(
            products_kernel, (column_blocks * splits * (blocks_k if dphi_too else 1),),
            *given, part, tokens, tokens_each, dh.stride(0), width, *x.stride(),
            *(d_out.stride() if d_out is not None else (0, 0)), *phi.stride(), *dx_strides, N=n, K=rows,
            ROW=dh.shape[-1], PARTS=x.dtype == torch.bfloat16, HAS_NORM=norm_weight is not None,
            HAS_OUT=d_out is not None, HAS_DX=d_x is not None, NEED_DX=dx_too, NEED_DPHI=dphi_too,
            PRECISION=dot_precision(), BLOCK_M=block_m, BLOCK_C=block_c, BLOCK_K=kb, BLOCKS_K=blocks_k,
            INTERPRET=INTERPRETED, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    with on_device(x):
        if need_dx and many:
            many_rows.multiply(*given)
        elif need_dx:
            multiply(True, need_sum and blocks_k == 1)
        if need_sum and not (need_dx and blocks_k == 1):
            multiply(False, True)
    return part


def reduce_parameters(
    dphi_part: torch.Tensor,
    x: torch.Tensor,
    phi: torch.Tensor,
    norm_weight: torch.Tensor | None,
    affine: Affine | None,
    needs: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dphi, dscale, dbias, dnorm_weight) from dphi_part [splits, K, n*C] and the parts of affine."""
    rows, columns = phi.shape
    need_dphi, need_dscale, need_dbias, need_dnorm = needs
    need_dnorm = need_dnorm and norm_weight is not None
    need_sum = need_dphi or need_dnorm
    norm_weight = None if norm_weight is None else norm_weight.contiguous()
    scale, bias = (None, None) if affine is None else (affine.scale, affine.bias)
    affine_part, tiles = (None, 0) if affine is None else (affine.part, affine.tiles)
    gates = 1 if bias is None else bias.shape[0]
    dphi, dnorm = empty_gradient(phi, need_dphi, x), empty_gradient(norm_weight, need_dnorm, x)
    dscale, dbias = empty_gradient(scale, need_dscale, x), empty_gradient(bias, need_dbias, x)
    block = 64
    column_programs = cdiv(columns, block) if need_sum else 0
    if need_sum or need_dscale or need_dbias:
        with on_device(x):
            launch(
                reduce_kernel, (column_programs + 1,),
                dphi_part, phi, norm_weight, affine_part, dphi, dnorm, dscale, dbias, dphi_part.shape[0],
                tiles, columns, column_programs, phi.stride(0), phi.stride(1), N=x.shape[-2], K=rows, GATES=gates,
                HAS_NORM=norm_weight is not None, NEED_DPHI=need_dphi,
                NEED_DNORM=need_dnorm, NEED_DSCALE=need_dscale, NEED_DBIAS=need_dbias,
                GROUPED=affine is not None and group_scale(affine.scale, affine.bias),
                PADDED_GATES=next_power_of_2(gates),
                BLOCK_K=min(32, next_power_of_2(rows)), BLOCK_T=16, BLOCK=block, num_warps=4,
            )  # fmt: skip
    return dphi, dscale, dbias, dnorm
