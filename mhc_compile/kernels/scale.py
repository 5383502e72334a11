"""Kernels of `mhc::scale`: from the projection to the gates and the logits of the residual mixing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from mhc_compile.forms import Gates, Rms
from mhc_compile.kernels.common import cdiv, empty_gradient, group_scale, launch, on_device, tile_sums, wanted
from mhc_compile.kernels.gates import affine, rms_factor, rms_gradient, rounded_product, sigmoid, sigmoid_and_slope
from mhc_compile.kernels.products import no_tokens, reduce_affine
from mhc_compile.kernels.projection import narrow_tile


@triton.jit
def _normalised(h, ms, scale, bias, tok, live, k, eps, N: tl.constexpr, K: tl.constexpr,
                RMS_MODE: tl.constexpr, GROUPED: tl.constexpr):  # fmt: skip
    """h, scale and logits [T, K]; ms and r [T]."""
    mean = tl.load(ms + tok, mask=live, other=1.0).to(tl.float32)
    r = rms_factor(mean, eps, RMS_MODE)
    v = tl.load(h + tok[:, None] * K + k, mask=live[:, None] & (k < K), other=0.0).to(tl.float32)
    s, b = affine(scale, bias, k, k < K, tl.minimum(k // N, 2), GROUPED)
    return v, s, r[:, None] * v * s + b, mean, r


# A slice of a batch may be aligned otherwise than the batch; what is compiled must not depend on it.
@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["h", "ms", "h_pre", "h_post", "logits"])
def scale_kernel(h, ms, scale, bias, h_pre, h_post, logits, M, rms_eps, pre_eps, post_mult, post_eps,
                 N: tl.constexpr, K: tl.constexpr, RMS_MODE: tl.constexpr, GROUPED: tl.constexpr,
                 BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """h_pre, h_post [M, n] and logits [M, n, n] of BLOCK_T tokens."""
    tok = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = tok < M
    k = tl.arange(0, BLOCK_K)[None, :]
    _, _, l, _, _ = _normalised(h, ms, scale, bias, tok, live, k, rms_eps, N, K, RMS_MODE, GROUPED)
    gate = sigmoid(tl.where(k < 2 * N, l, 0.0))
    row = tok[:, None] * N + k
    tl.store(h_pre + row, gate + pre_eps, mask=live[:, None] & (k < N))
    if K > N:
        tl.store(h_post + row - N, post_mult * gate + post_eps, mask=live[:, None] & (k >= N) & (k < 2 * N))
    if K > 2 * N:
        tl.store(logits + tok[:, None] * (N * N) + k - 2 * N, l, mask=live[:, None] & (k >= 2 * N) & (k < K))


@triton.jit(
    do_not_specialize=["M"],
    do_not_specialize_on_alignment=["d_pre", "d_post", "d_logits", "h", "ms", "dh", "dms"],
)
def scale_backward_kernel(d_pre, d_post, d_logits, h, ms, scale, bias, dh, dms, affine_part, M, rms_eps,
                          post_mult, N: tl.constexpr, K: tl.constexpr, RMS_MODE: tl.constexpr,
                          GROUPED: tl.constexpr, HAS_PRE: tl.constexpr, HAS_POST: tl.constexpr,
                          HAS_RES: tl.constexpr, NEED_DH: tl.constexpr, NEED_DMS: tl.constexpr,
                          NEED_AFFINE: tl.constexpr, BLOCK_T: tl.constexpr,
                          BLOCK_K: tl.constexpr):  # fmt: skip
    """dh [M, K], dms [M] and affine_part [tiles, 2, K] of BLOCK_T tokens."""
    tile = tl.program_id(0).to(tl.int64)
    tok = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    live = tok < M
    k = tl.arange(0, BLOCK_K)[None, :]
    mask = live[:, None]
    v, s, l, mean, r = _normalised(h, ms, scale, bias, tok, live, k, rms_eps, N, K, RMS_MODE, GROUPED)
    bounded = tl.where(k < 2 * N, l, 0.0)
    row = tok[:, None] * N + k
    dl = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    if HAS_PRE:
        dl += tl.load(d_pre + row, mask=mask & (k < N), other=0.0).to(tl.float32)
    if HAS_POST:
        inside = mask & (k >= N) & (k < 2 * N)
        dl += post_mult * tl.load(d_post + row - N, mask=inside, other=0.0).to(tl.float32)
    dl = dl * sigmoid_and_slope(bounded)[1]
    if HAS_RES:
        at = tok[:, None] * (N * N) + k - 2 * N
        dl += tl.load(d_logits + at, mask=mask & (k >= 2 * N) & (k < K), other=0.0).to(tl.float32)
    if NEED_DH:
        tl.store(dh + tok[:, None] * K + k, (dl * r[:, None] * s).to(dh.dtype.element_ty), mask=mask & (k < K))
    if NEED_DMS:
        grad = rms_gradient(tl.sum(rounded_product(dl * (v * r[:, None]), s), axis=1), mean, r, rms_eps, RMS_MODE)
        tl.store(dms + tok, grad.to(dms.dtype.element_ty), mask=live)
    if NEED_AFFINE:
        row_of = tl.arange(0, BLOCK_K)
        part_at = affine_part + tile * (2 * K) + row_of
        tl.store(part_at, tl.sum(rounded_product(dl * v, r[:, None]), axis=0), mask=row_of < K)
        tl.store(part_at + K, tl.sum(dl, axis=0), mask=row_of < K)


@triton.jit(do_not_specialize=["tiles"])
def affine_sum_kernel(affine_part, dscale, dbias, tiles, N: tl.constexpr, K: tl.constexpr,
                      NEED_DSCALE: tl.constexpr, NEED_DBIAS: tl.constexpr, GROUPED: tl.constexpr,
                      BLOCK_K: tl.constexpr):  # fmt: skip
    """dscale and dbias from affine_part [tiles, 2, K]."""
    reduce_affine(affine_part, dscale, dbias, tiles, N, K, NEED_DSCALE, NEED_DBIAS, GROUPED, BLOCK_K, 16)


def forward(
    h: torch.Tensor, ms: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, n: int, *, rms: Rms, gates: Gates
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(h_pre [..., n], h_post [..., n], res_logits [..., n, n]) of h [..., K] and ms [...]."""
    *lead, rows = h.shape

    def room(*shape: int) -> torch.Tensor:
        return torch.empty((*lead, *shape), dtype=torch.float32, device=h.device)

    h_pre, h_post = room(n), room(n if rows > n else 0)
    logits = room(n, n) if rows > 2 * n else room(0, 0)
    tokens = ms.numel()
    if tokens == 0:
        return h_pre, h_post, logits
    block_t, block = narrow_tile(rows)
    with on_device(h):
        launch(
            scale_kernel, (cdiv(tokens, block_t),),
            h.contiguous(), ms.contiguous(), scale.contiguous(), bias.contiguous(), h_pre, h_post, logits,
            tokens, rms.eps, gates.pre_eps, gates.post_mult, gates.post_eps, N=n, K=rows, RMS_MODE=rms.mode,
            GROUPED=group_scale(scale, bias), BLOCK_T=block_t, BLOCK_K=block, num_warps=4,
        )  # fmt: skip
    return h_pre, h_post, logits


def backward(
    d_h_pre: torch.Tensor | None,
    d_h_post: torch.Tensor | None,
    d_res_logits: torch.Tensor | None,
    h: torch.Tensor,
    ms: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    n: int,
    needs: Sequence[bool],
    *,
    rms: Rms,
    gates: Gates,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dh, dms, dscale, dbias), zero-sized where needs says no."""
    need_dh, need_dms, need_dscale, need_dbias = wanted(needs, 4)
    tokens, rows = ms.numel(), h.shape[-1]
    if tokens == 0 or not any(needs):
        dh, dms, dscale, dbias = no_tokens((h, ms, scale, bias), needs)
        return dh, dms, dscale, dbias
    dh, dms = empty_gradient(h, need_dh, h), empty_gradient(ms, need_dms, h)
    dscale, dbias = empty_gradient(scale, need_dscale, h), empty_gradient(bias, need_dbias, h)
    given = (d_h_pre, d_h_post if rows > n else None, d_res_logits if rows > 2 * n else None)
    d_pre, d_post, d_logits = (None if d is None else d.contiguous() for d in given)
    block_t, block = narrow_tile(rows)
    tiles = cdiv(tokens, block_t)
    need_affine = need_dscale or need_dbias
    part = tile_sums(tiles if need_affine else 0, 2 * rows, h)
    grouped = group_scale(scale, bias)
    with on_device(h):
        launch(
            scale_backward_kernel, (tiles,),
            d_pre, d_post, d_logits, h.contiguous(), ms.contiguous(), scale.contiguous(), bias.contiguous(),
            dh, dms, part, tokens, rms.eps, gates.post_mult, N=n, K=rows, RMS_MODE=rms.mode, GROUPED=grouped,
            HAS_PRE=d_pre is not None, HAS_POST=d_post is not None, HAS_RES=d_logits is not None,
            NEED_DH=need_dh, NEED_DMS=need_dms, NEED_AFFINE=need_affine, BLOCK_T=block_t, BLOCK_K=block,
            num_warps=4,
        )  # fmt: skip
        if need_affine:
            launch(
                affine_sum_kernel, (1,),
                part, dscale, dbias, tiles, N=n, K=rows, NEED_DSCALE=need_dscale, NEED_DBIAS=need_dbias,
                GROUPED=grouped, BLOCK_K=block, num_warps=4,
            )  # fmt: skip
    return dh, dms, dscale, dbias
