"""The backward of gates, and of the aggregate that they weigh: from their gradients to those of h, x and phi."""

# mypy: disable-error-code="assignment,misc"
# (A tuple that a kernel builds up one by one changes its type each time.)
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.kernels.aggregate import pre_gradient
from mhc_compile.kernels.common import (
    cdiv,
    empty_gradient,
    gradient_onto,
    group_scale,
    launch,
    next_power_of_2,
    nothing,
    on_device,
    put_back,
    tile_sums,
    token_view,
)
from mhc_compile.kernels.config import gate_tokens
from mhc_compile.kernels.expand_combine import reduce_partial_sums
from mhc_compile.kernels.gates import (
    affine,
    rms_factor,
    rms_gradient,
    rounded_product,
    sigmoid_and_slope,
    sinkhorn_backward,
)
from mhc_compile.kernels.input_norm import GateLogits, InputNorm, norm_backward
from mhc_compile.kernels.mix import MOST_JOINED, threads_own
from mhc_compile.kernels.products import Affine, backward_products, dh_parts, no_tokens, store_gradient


@triton.jit
def _logit_gradient(dl, v, r, s, d_h, dh, tok, tokens, k, mask, K: tl.constexpr, ROW: tl.constexpr,
                    PARTS: tl.constexpr, HAS_DH: tl.constexpr):  # fmt: skip
    """Store dh = dl * r * scale (+ d_h), whole or as bf16 parts; return the terms of r * dr, shaped as dl."""
    grad = dl * r * s
    if HAS_DH:
        grad += tl.load(d_h + tok * K + k, mask=mask, other=0.0)
    store_gradient(grad, dh + tok * ROW + k, tokens * ROW, mask, PARTS)
    return rounded_product(dl * (v * r), s)


@triton.jit
def _gate_gradient(d_gate, h, r, scale, bias, d_h, dh, affine_at, i, tok, mask, tokens, GROUP: tl.constexpr,
                   N: tl.constexpr, K: tl.constexpr, GATES: tl.constexpr, ROW: tl.constexpr, PARTS: tl.constexpr,
                   HAS_DH: tl.constexpr, GROUPED: tl.constexpr):  # fmt: skip
    """From d_gate [NP, T], of the sigmoids of h_pre (GROUP 0) or h_post (1), to their rows of dh and sums for scale and
    bias; returns the sigmoids and the terms of r * dr [T]."""
    k = GROUP * N + i
    v = tl.load(h + tok * K + k, mask=mask, other=0.0)
    s, b = affine(scale, bias, k, i < N, GROUP, GROUPED)
    logit = r * v * s + b
    gate, slope = sigmoid_and_slope(logit)
    dl = rounded_product(d_gate, slope)
    edge = tl.arange(0, dl.shape[0])
    tl.store(affine_at + GROUP * N + edge, tl.sum(rounded_product(dl * v, r), axis=1), mask=edge < N)
    tl.store(affine_at + GATES + GROUP * N + edge, tl.sum(dl, axis=1), mask=edge < N)
    return gate, tl.sum(_logit_gradient(dl, v, r, s, d_h, dh, tok, tokens, k, mask, K, ROW, PARTS, HAS_DH), axis=0)


@triton.jit(do_not_specialize=["M", "pre_parts", "pre_s", "pre_i", "pre_m", "pairs"])
def mix_backward_kernel(h, ms, scale, bias, d_pre, d_post, d_res, d_h, d_ms, read_with, dh, coefficient, h_pre,
                        affine_part, history, M, pre_parts, pre_s, pre_i, pre_m, post_m, post_i, res_m, res_i, res_o,
                        read_m, read_i,
                        inverse_columns, rms_eps, pre_eps, post_mult, sinkhorn_eps, start_eps, pairs,
                        N: tl.constexpr, NP: tl.constexpr, K: tl.constexpr, GATES: tl.constexpr,
                        RMS_MODE: tl.constexpr, START: tl.constexpr, FIRST: tl.constexpr, CLAMP: tl.constexpr,
                        ODD: tl.constexpr, GROUPED: tl.constexpr, HAS_PRE: tl.constexpr,
                        HAS_POST: tl.constexpr, HAS_RES: tl.constexpr, HAS_DH: tl.constexpr,
                        HAS_DMS: tl.constexpr, READ_GIVEN: tl.constexpr, ROW: tl.constexpr, PARTS: tl.constexpr,
                        MORE: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """From the gates' gradients to dh [parts, M, ROW], 2 dms / (nC), h_pre [n, M], affine_part [tiles, 2, GATES].

    The first GATES of the K rows of h make gates; of the others dh is d_h, if there is one, and of columns beyond K
    it is 0. READ_GIVEN: read_with takes the place of h_pre in the result.
    """
    tile = tl.program_id(0)
    tokens = M.to(tl.int64)
    tok1 = tile.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    live1 = tok1 < tokens
    mean = tl.load(ms + tok1, mask=live1, other=1.0)
    r1 = rms_factor(mean, rms_eps, RMS_MODE)
    affine_at = affine_part + tile.to(tl.int64) * (2 * GATES)

    # The longest first: what the others keep would be in its way.
    r_dr = tl.zeros([BLOCK_T], tl.float32)
    if GATES > 2 * N:
        i3 = tl.arange(0, NP)[:, None, None]
        o3 = tl.arange(0, NP)[None, :, None]
        tok3 = tok1[None, None, :]
        r3 = r1[None, None, :]
        valid = (i3 < N) & (o3 < N)
        mask3 = valid & live1[None, None, :]
        k3 = 2 * N + i3 * N + o3
        v3 = tl.load(h + tok3 * K + k3, mask=mask3, other=0.0)
        s3, b3 = affine(scale, bias, k3, valid, 2, GROUPED)
        dl3 = tl.zeros([NP, NP, BLOCK_T], tl.float32)
        if HAS_RES:
            if NP <= MOST_JOINED:
                logits = threads_own(h, r1, scale, bias, tok1, live1, N, NP, K, GROUPED)
            else:
                logits = tl.where(valid, r3 * v3 * s3 + b3, float("-inf"))
            dp = tl.load(d_res + tok3 * res_m + i3 * res_i + o3 * res_o, mask=mask3, other=0.0).to(tl.float32)
            dl3 = sinkhorn_backward(logits, dp, i3, o3, sinkhorn_eps, start_eps, pairs, history, tok3,
                                    live1[None, None, :], tokens, N, START, FIRST, CLAMP,
                                    ODD)  # fmt: skip
            dl3 = tl.where(valid, dl3, 0.0)
        part3 = _logit_gradient(dl3, v3, r3, s3, d_h, dh, tok3, tokens, k3, mask3, K, ROW, PARTS, HAS_DH)
        r_dr += tl.sum(tl.sum(part3, axis=0), axis=0)
        row = tl.arange(0, NP)[:, None]
        column = tl.arange(0, NP)[None, :]
        square = (row < N) & (column < N)
        k2 = 2 * N + row * N + column
        tl.store(affine_at + k2, tl.sum(rounded_product(dl3 * v3, r3), axis=2), mask=square)
        tl.store(affine_at + GATES + k2, tl.sum(dl3, axis=2), mask=square)

    tok = tok1[None, :]
    r = r1[None, :]
    i = tl.arange(0, NP)[:, None]
    mask = live1[None, :] & (i < N)
    d_gate = tl.zeros([NP, BLOCK_T], tl.float32)
    if HAS_PRE:
        for part in range(0, pre_parts):
            d_gate += tl.load(d_pre + part * pre_s + i * pre_i + tok * pre_m, mask=mask, other=0.0).to(tl.float32)
    gate, terms = _gate_gradient(d_gate, h, r, scale, bias, d_h, dh, affine_at, i, tok, mask, tokens, 0, N, K, GATES,
                                 ROW, PARTS, HAS_DH, GROUPED)  # fmt: skip
    read = gate + pre_eps
    if READ_GIVEN:
        read = tl.load(read_with + tok * read_m + i * read_i, mask=mask, other=0.0).to(tl.float32)
    tl.store(h_pre + i * tokens + tok, read, mask=mask)
    r_dr += terms
    if GATES > N:
        d_gate = tl.zeros([NP, BLOCK_T], tl.float32)
        if HAS_POST:
            d_gate = tl.load(d_post + tok * post_m + i * post_i, mask=mask, other=0.0).to(tl.float32) * post_mult
        _, terms = _gate_gradient(d_gate, h, r, scale, bias, d_h, dh, affine_at, i, tok, mask, tokens, 1, N, K, GATES,
                                  ROW, PARTS, HAS_DH, GROUPED)  # fmt: skip
        r_dr += terms
    for first in tl.static_range(GATES, ROW, MORE):
        k = first + tl.arange(0, MORE)[:, None]
        grad = tl.zeros([MORE, BLOCK_T], tl.float32)
        if HAS_DH:
            grad = tl.load(d_h + tok * K + k, mask=live1[None, :] & (k < K), other=0.0).to(tl.float32)
        store_gradient(grad, dh + tok * ROW + k, tokens * ROW, live1[None, :] & (k < ROW), PARTS)

    dms = rms_gradient(r_dr, mean, r1, rms_eps, RMS_MODE)
    if HAS_DMS:
        dms += tl.load(d_ms + tok1, mask=live1, other=0.0)
    tl.store(coefficient + tok1, dms * (2.0 * inverse_columns), mask=live1)


@dataclass(frozen=True)
class Logits:
    """What the gates' backward makes for the wide products: dh as `dh_parts` lays it out, the coefficient of x [M],
    h_pre [n, M], and the partial sums of dscale and dbias, if an operator made the gates. For an input norm, also the
    gradient [M, C] of its argument and the partial sums [splits, C] of its weight's gradient."""

    dh: torch.Tensor
    coefficient: torch.Tensor
    h_pre: torch.Tensor
    affine: Affine | None
    d_out: torch.Tensor | None
    weight_part: torch.Tensor | None


def backward_gates(
    d_out: torch.Tensor | None,
    d_pre: torch.Tensor | None,
    d_post: torch.Tensor | None,
    d_res: torch.Tensor | None,
    d_h: torch.Tensor | None,
    d_ms: torch.Tensor | None,
    x: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    h: torch.Tensor,
    ms: torch.Tensor,
    *,
    rms: Rms,
    gates: Gates,
    sinkhorn: Sinkhorn | None,
    norm: InputNorm | None = None,
    need_weight: bool = False,
    read_with: torch.Tensor | None = None,
) -> Logits:
    """The gradient of h from those of the gates, for x [M, n, C] and d_out [M, C], which stands for that of h_pre.

    d_out of the result is the one given, or what it comes to before the norm; need_weight: of the norm. read_with: the
    gates [M, n] that made what d_out is of; h_pre of the result is these, and d_out then says nothing of d_pre.
    """
    tokens, n, width = x.shape
    form = (sinkhorn or Sinkhorn()).iterated
    rows, made = h.shape[-1], bias.shape[0]
    post = None if d_post is None or made <= n else token_view(d_post, 1)
    res = None if d_res is None or made <= 2 * n else token_view(d_res, 2)
    d_h = None if d_h is None else d_h.contiguous()
    d_ms = None if d_ms is None else d_ms.contiguous()
    scale, bias, h, ms = scale.contiguous(), bias.contiguous(), h.contiguous(), ms.contiguous()

    def scratch(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    pre_parts, pre_strides = 1, (0, 0, 0)
    pre = weight_part = None
    with on_device(x):
        if d_out is not None and read_with is None:
            if norm is None:
                pre = pre_gradient(d_out, x)
            else:
                made_of = GateLogits(h, ms, scale, bias, rms, gates)
                pre = scratch(1, n, tokens)
                strides = pre.stride(2), pre.stride(1)
                d_out, weight_part = norm_backward(d_out, x, norm, made_of, pre, strides, need_weight)
            pre_parts, pre_strides = pre.shape[0], (pre.stride(0), pre.stride(1), 1)
        elif d_pre is not None:
            pre = token_view(d_pre, 1)
            pre_strides = (0, pre.stride(1), pre.stride(0))
        block_t = gate_tokens(n)
        tiles = cdiv(tokens, block_t)
        dh = dh_parts(x, rows)
        coefficient, h_pre = scratch(tokens), scratch(n, tokens)
        affine_part = tile_sums(tiles, 2 * made, x)
        history = scratch(form.steps, n, tokens) if res is not None else coefficient
        launch(
            mix_backward_kernel, (tiles,),
            h, ms, scale, bias, pre, post, res, d_h, d_ms, read_with, dh, coefficient, h_pre, affine_part, history,
            tokens, pre_parts, *pre_strides, *(post.stride() if post is not None else (0, 0)),
            *(res.stride() if res is not None else (0, 0, 0)),
            *(read_with.stride() if read_with is not None else (0, 0)), 1.0 / (n * width), rms.eps, gates.pre_eps,
            gates.post_mult, form.eps, form.start_eps, form.steps // 2, N=n, NP=next_power_of_2(n), K=rows,
            GATES=made, RMS_MODE=rms.mode, START=form.start, FIRST=form.first, CLAMP=form.clamp,
            ODD=form.steps % 2 == 1, GROUPED=group_scale(scale, bias), HAS_PRE=pre is not None,
            HAS_POST=post is not None, HAS_RES=res is not None, HAS_DH=d_h is not None, HAS_DMS=d_ms is not None,
            READ_GIVEN=read_with is not None, ROW=dh.shape[2], PARTS=dh.shape[0] == 3,
            MORE=next_power_of_2(min(dh.shape[2] - made, 32)), BLOCK_T=block_t, num_warps=4,
        )  # fmt: skip
    return Logits(dh, coefficient, h_pre, Affine(scale, bias, affine_part, tiles), d_out, weight_part)


def backward_mix(
    d_layer_input: torch.Tensor | None,
    d_pre: torch.Tensor | None,
    d_post: torch.Tensor | None,
    d_res: torch.Tensor | None,
    d_h: torch.Tensor | None,
    d_ms: torch.Tensor | None,
    x: torch.Tensor,
    phi: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor | None,
    h: torch.Tensor,
    ms: torch.Tensor,
    needs: tuple[bool, ...],
    d_x: torch.Tensor | None = None,
    *,
    rms: Rms,
    gates: Gates,
    sinkhorn: Sinkhorn | None,
    in_place: bool = False,
    norm: InputNorm | None = None,
    need_weight: bool = False,
    read_with: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx + d_x, dphi, dscale, dbias, dnorm_weight, d weight of norm); at most one of d_layer_input and d_pre is given,
    but with read_with, the gates [..., n] that made layer_input in place of h_pre.

    in_place: dx may take the memory of d_x, if the two have the same layout.
    """
    flat = token_view(x, 2)
    weight = None if norm is None else norm.weight
    need_weight = need_weight and weight is not None
    dweight = empty_gradient(weight, need_weight, x)
    if flat.shape[0] == 0 or d_layer_input is None:
        dweight.zero_()
    if flat.shape[0] == 0 or not (any(needs) or need_weight):
        dx, dphi, dscale, dbias, dnorm = no_tokens((x, phi, scale, bias, norm_weight), needs)
        return dx, dphi, dscale, dbias, dnorm, dweight
    d_out = None if d_layer_input is None else token_view(d_layer_input, 1)
    logits = backward_gates(
        d_out, d_pre, d_post, d_res, d_h, d_ms, flat, scale, bias, h, ms,
        rms=rms, gates=gates, sinkhorn=sinkhorn, norm=norm, need_weight=need_weight,
        read_with=None if read_with is None else token_view(read_with, 1),
    )  # fmt: skip
    dx, dx_rows = gradient_onto(d_x, x, needs[0], in_place)
    products = backward_products(
        flat, logits.d_out, phi, norm_weight, logits.dh, logits.coefficient, logits.h_pre, logits.affine, needs,
        dx_rows, d_x,
    )  # fmt: skip
    if logits.weight_part is not None:
        none = nothing(x)
        part = logits.weight_part
        reduce_partial_sums(none, part, part.shape[0], none, none, dweight, flat)
    return put_back(dx, dx_rows), products.dphi, products.dscale, products.dbias, products.dnorm, dweight
