"""Gates from the partial projections, the aggregate, and their backward.

Forward is one launch with two kinds of programs. Some turn the partial sums of `projection.project` into h, ms and
the gates (Sinkhorn in registers). The others need h_pre alone: they compute it again for their tokens and aggregate.
"""

# mypy: disable-error-code="assignment,misc"
# (A tuple that a kernel builds up one by one changes its type each time.)
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.kernels import aggregate_and_norm, mxfp8
from mhc_compile.kernels.aggregate import forward as aggregate_forward
from mhc_compile.kernels.aggregate import pre_gradient, weigh_streams
from mhc_compile.kernels.common import (
    blocks_each,
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
from mhc_compile.kernels.config import gate_tokens, tile_for
from mhc_compile.kernels.expand_combine import reduce_partial_sums
from mhc_compile.kernels.gates import (
    affine,
    in_units,
    rms_factor,
    rms_gradient,
    rounded_product,
    sigmoid,
    sigmoid_and_slope,
    sinkhorn,
    sinkhorn_backward,
)
from mhc_compile.kernels.input_norm import GateLogits, InputNorm, norm_backward, normed_rows, row_tile
from mhc_compile.kernels.products import Affine, backward_products, dh_parts, no_tokens, store_gradient
from mhc_compile.kernels.projection import Partials, partial_sum, project, store_sums, tokens_to_add

# Several threads share a larger matrix (`gate_tokens`).
_MOST_JOINED = tl.constexpr(4)
# Of more streams, the gates take so many registers that a read in the same kernel would wait for memory.
_MOST_READ_BESIDE = 8
_TOKENS_OF_MANY = 4


@triton.jit
def store_gates(h, r, scale, bias, out, i, tok, live, multiple, eps, GROUP: tl.constexpr, N: tl.constexpr,
                K: tl.constexpr, GROUPED: tl.constexpr):  # fmt: skip
    """h_pre (GROUP 0) or h_post (1) [M, n] from h [M, K], for i [NP, 1] and r, tok, live [1, T]."""
    mask = live & (i < N)
    k = GROUP * N + i
    v = tl.load(h + tok * K + k, mask=mask, other=0.0)
    s, b = affine(scale, bias, k, i < N, GROUP, GROUPED)
    tl.store(out + tok * N + i, multiple * sigmoid(r * v * s + b) + eps, mask=mask)


@triton.jit
def stream_logits(h, r, scale, bias, i, o, tok, live, N: tl.constexpr, K: tl.constexpr, GROUPED: tl.constexpr):
    """The logits of h_res from h [M, K] for any i, o, tok and live of one shape; -inf where padded."""
    valid = (i < N) & (o < N)
    k = 2 * N + i * N + o
    v = tl.load(h + tok * K + k, mask=valid & live, other=0.0)
    s, b = affine(scale, bias, k, valid, 2, GROUPED)
    return tl.where(valid, r * v * s + b, float("-inf"))


@triton.jit
def _threads_own(h, r, scale, bias, tok, live, N: tl.constexpr, NP: tl.constexpr, K: tl.constexpr,
                 GROUPED: tl.constexpr):  # fmt: skip
    """`stream_logits` [NP, NP, T] of tokens [T], each of which is in one thread, whatever Triton's layout for loads."""
    o = tl.arange(0, NP)[None, :]
    rows = ()
    for i in tl.static_range(NP):
        rows = rows + (stream_logits(h, r[:, None], scale, bias, o * 0 + i, o, tok[:, None], live[:, None], N, K,
                                     GROUPED),)  # fmt: skip
    for _ in tl.static_range(2):
        if len(rows) > 1:
            joined = ()
            for i in tl.static_range(len(rows) // 2):
                # The first axis that is joined is the highest bit.
                joined = joined + (tl.join(rows[i], rows[i + len(rows) // 2]),)
            rows = joined
    return tl.permute(tl.reshape(rows[0], [tok.shape[0], NP, NP]), 2, 1, 0)


@triton.jit
def store_res(logits, h_res, i, o, tok, live, tokens, sinkhorn_eps, start_eps, pairs, N: tl.constexpr,
              START: tl.constexpr, FIRST: tl.constexpr, CLAMP: tl.constexpr,
              ODD: tl.constexpr):  # fmt: skip
    """h_res [M, n, n] of logits [NP, NP, T], for i [NP, 1, 1], o [1, NP, 1] and tok, live [1, 1, T]."""
    mask = (i < N) & (o < N) & live
    p = sinkhorn(logits, i, o, sinkhorn_eps, start_eps, pairs, h_res, tok, mask, tokens, N, START, FIRST, CLAMP,
                 ODD, False)  # fmt: skip
    p = in_units(p, START)
    tl.store(h_res + tok * (N * N) + i * N + o, p, mask=mask)


@triton.jit
def _mix_tile(h_part, squares_part, scale, bias, h_pre, h_post, h_res, h, ms, first, tokens, stored,
              inverse_columns, rms_eps, pre_eps, post_mult, post_eps, sinkhorn_eps, start_eps, pairs,
              N: tl.constexpr, NP: tl.constexpr, K: tl.constexpr, GATES: tl.constexpr, RMS_MODE: tl.constexpr,
              START: tl.constexpr, FIRST: tl.constexpr, CLAMP: tl.constexpr, ODD: tl.constexpr,
              GROUPED: tl.constexpr, STORE_PRE: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
              KP: tl.constexpr, ADDED: tl.constexpr, LIVE: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """h, ms and the gates of LIVE tokens, of a tile that holds BLOCK_T (last axis); first, tokens = M as int64.

    The first GATES of the K rows of h make gates. h is added up for ADDED tokens at a time.
    """
    tok = first + tl.arange(0, BLOCK_T)
    live = (tok < tokens) & (tl.arange(0, BLOCK_T) < LIVE)
    i = tl.arange(0, NP)[:, None]
    i3 = tl.arange(0, NP)[:, None, None]
    o3 = tl.arange(0, NP)[None, :, None]
    # Every thread adds up some rows of h, and reads those of its own token when all are there.
    if ADDED == LIVE:
        store_sums(h_part, h, first + tl.arange(0, LIVE), tokens, stored, K, KP, GROUP, CHUNK)
    else:
        for some in tl.range(0, tl.minimum(LIVE, tokens - first), ADDED):
            store_sums(h_part, h, first + some + tl.arange(0, ADDED), tokens, stored, K, KP, GROUP, CHUNK)
    mean = partial_sum(squares_part + tok, live, stored, tokens, GROUP, CHUNK) * inverse_columns
    r = rms_factor(mean, rms_eps, RMS_MODE)
    tl.store(ms + tok, mean, mask=live)
    tl.debug_barrier()
    if STORE_PRE:
        store_gates(h, r[None, :], scale, bias, h_pre, i, tok[None, :], live[None, :], 1.0, pre_eps, 0, N, K, GROUPED)
    if GATES > N:
        store_gates(h, r[None, :], scale, bias, h_post, i, tok[None, :], live[None, :], post_mult, post_eps, 1, N, K,
                    GROUPED)  # fmt: skip
    if GATES > 2 * N:
        tok3 = tok[None, None, :]
        live3 = live[None, None, :]
        if NP <= _MOST_JOINED:
            logits = _threads_own(h, r, scale, bias, tok, live, N, NP, K, GROUPED)
        else:
            logits = stream_logits(h, r[None, None, :], scale, bias, i3, o3, tok3, live3, N, K, GROUPED)
        store_res(logits, h_res, i3, o3, tok3, live3, tokens, sinkhorn_eps, start_eps, pairs, N, START, FIRST, CLAMP,
                  ODD)  # fmt: skip


@triton.jit
def _aggregate_tile(h_part, squares_part, scale, bias, x, out, scales, input_weight, program, tokens, C, x_m, x_n,
                    x_c, stored, column_parts, blocks_each, inverse_columns, inverse_width, rms_eps, pre_eps, input_eps,
                    N: tl.constexpr, NP: tl.constexpr, K: tl.constexpr, RMS_MODE: tl.constexpr,
                    GROUPED: tl.constexpr, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, SCALING: tl.constexpr,
                    GROUP: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr,
                    BLOCK_C: tl.constexpr):  # fmt: skip
    """out[m] = sum_i h_pre[m, i] * x[m, i] for BLOCK_M tokens x blocks_each column blocks; NORM: normalised rows."""
    # The last tokens first: they were made last, and L2 may still hold them.
    tile = tl.cdiv(tokens, BLOCK_M) - 1 - program // column_parts
    first = program % column_parts * blocks_each * BLOCK_C
    tok = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = tok < tokens
    i = tl.arange(0, NP)[:, None]
    row_live = live[None, :] & (i < N)
    squares = partial_sum(squares_part + tok, live, stored, tokens, GROUP, CHUNK)
    v = partial_sum(h_part + i * tokens + tok[None, :], row_live, stored, K * tokens, GROUP, CHUNK)
    r = rms_factor(squares * inverse_columns, rms_eps, RMS_MODE)
    s, b = affine(scale, bias, i, i < N, 0, GROUPED)
    gates = sigmoid(r[None, :] * v * s + b) + pre_eps
    if NORM:
        normed_rows(gates, i, x, input_weight, out, scales, tok, live, C, x_m, x_n, x_c, inverse_width, input_eps, N,
                    HAS_WEIGHT, SCALING, BLOCK_M, BLOCK_C)  # fmt: skip
    else:
        last = tl.minimum(first + blocks_each * BLOCK_C, C)
        weigh_streams(gates, i, x, out, tok, live, first, last, C, x_m, x_n, x_c, N, BLOCK_M, BLOCK_C)


@triton.jit(do_not_specialize=["M", "stored", "mix_programs", "column_parts", "blocks_each", "pairs"])
def mix_kernel(h_part, squares_part, scale, bias, x, out, scales, h_pre, h_post, h_res, h, ms, input_weight, M, C, x_m,
               x_n, x_c, stored, mix_programs, column_parts, blocks_each, inverse_columns, inverse_width, rms_eps,
               pre_eps, post_mult, post_eps, sinkhorn_eps, start_eps, input_eps, pairs, N: tl.constexpr,
               NP: tl.constexpr, K: tl.constexpr, GATES: tl.constexpr, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
               SCALING: tl.constexpr, RMS_MODE: tl.constexpr, START: tl.constexpr, FIRST: tl.constexpr,
               CLAMP: tl.constexpr, ODD: tl.constexpr, GROUPED: tl.constexpr, AGGREGATE: tl.constexpr,
               GROUP: tl.constexpr, CHUNK: tl.constexpr, KP: tl.constexpr, ADDED: tl.constexpr, LIVE: tl.constexpr,
               BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """Programs below mix_programs compute the gates of LIVE tokens, the others aggregate."""
    pid = tl.program_id(0)
    tokens = M.to(tl.int64)
    if pid < mix_programs:
        first = pid.to(tl.int64) * LIVE
        _mix_tile(h_part, squares_part, scale, bias, h_pre, h_post, h_res, h, ms, first, tokens, stored,
                  inverse_columns, rms_eps, pre_eps, post_mult, post_eps, sinkhorn_eps, start_eps, pairs, N,
                  NP, K, GATES, RMS_MODE, START, FIRST, CLAMP, ODD, GROUPED, not AGGREGATE, GROUP, CHUNK, KP, ADDED,
                  LIVE, BLOCK_T)  # fmt: skip
    elif AGGREGATE:
        _aggregate_tile(h_part, squares_part, scale, bias, x, out, scales, input_weight, pid - mix_programs, tokens, C,
                        x_m, x_n, x_c, stored, column_parts, blocks_each, inverse_columns, inverse_width, rms_eps,
                        pre_eps, input_eps, N, NP, K, RMS_MODE, GROUPED, NORM, HAS_WEIGHT, SCALING, GROUP, CHUNK,
                        BLOCK_M, BLOCK_C)  # fmt: skip


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
            if NP <= _MOST_JOINED:
                logits = _threads_own(h, r1, scale, bias, tok1, live1, N, NP, K, GROUPED)
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
class Mix:
    """The forward results; h_pre is there when the aggregate is not, and the other way round.

    scales: of layer_input, if this is in MXFP8.
    """

    layer_input: torch.Tensor
    scales: torch.Tensor | None
    h_pre: torch.Tensor
    h_post: torch.Tensor
    h_res: torch.Tensor
    h: torch.Tensor
    ms: torch.Tensor


def empty_gates(
    x: torch.Tensor, phi: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for h_post [..., n], h_res [..., n, n], h [..., K] and ms [...] of x [..., n, C].

    Gates for which bias has no entries have no elements.
    """
    n, gates = x.shape[-2], bias.shape[0]
    side = n if gates > 2 * n else 0
    sizes = ((n if gates > n else 0,), (side, side), (phi.shape[0],), ())
    post, res, h, ms = (torch.empty((*x.shape[:-2], *s), dtype=torch.float32, device=x.device) for s in sizes)
    return post, res, h, ms


def forward_mix(
    x: torch.Tensor,
    phi: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor | None,
    *,
    rms: Rms,
    gates: Gates,
    sinkhorn: Sinkhorn | None,
    aggregate: bool,
    out_dtype: torch.dtype | None = None,
    partials: Partials | None = None,
    norm: InputNorm | None = None,
    scaling: str | None = None,
) -> Mix:
    """Gates of x [..., n, C], and with `aggregate` the layer input; the entries of bias say which gates exist.

    partials: the sums of the projection, where these are there already; norm: of the layer input; scaling: the
    one of `kernels.mxfp8`, if this is to be in MXFP8.
    """
    n, width = x.shape[-2:]
    if aggregate and n > _MOST_READ_BESIDE and scaling is None:
        mix = forward_mix(
            x, phi, scale, bias, norm_weight, rms=rms, gates=gates, sinkhorn=sinkhorn, aggregate=False,
            partials=partials,
        )  # fmt: skip
        if norm is None:
            read = aggregate_forward(x, mix.h_pre, out_dtype=out_dtype)
        else:
            read = aggregate_and_norm.forward(x, mix.h_pre, norm.weight, input_norm_eps=norm.eps, out_dtype=out_dtype)
        return replace(mix, layer_input=read, h_pre=nothing(x))
    rows = phi.shape[0]
    lead = x.shape[:-2]
    flat = token_view(x, 2)
    tokens = flat.shape[0]
    scale, bias = scale.contiguous(), bias.contiguous()
    out, scales = nothing(x), None
    if scaling is not None:
        out, scales = mxfp8.empty((*lead, width), x.device)
    elif aggregate:
        out = torch.empty((*lead, width), dtype=out_dtype or x.dtype, device=x.device)
    pre = nothing(x) if aggregate else torch.empty((*lead, n), dtype=torch.float32, device=x.device)
    post, res, h, ms = empty_gates(x, phi, bias)
    result = Mix(out, scales, pre, post, res, h, ms)
    if tokens == 0:
        return result
    partials = partials or project(flat, phi, norm_weight)
    form = (sinkhorn or Sinkhorn()).iterated
    tile = tile_for("aggregate", n, x.element_size()) if norm is None else row_tile(width)
    many = n > _MOST_READ_BESIDE
    # With more tokens of so many streams, Triton 3.7 spills.
    block_t, block_m, block_c = _TOKENS_OF_MANY if many else gate_tokens(n), tile.tokens, tile.columns
    added = min(block_t, tokens_to_add(partials, rows))
    # The rows of many streams are so many that most of a tile would have no token.
    live = block_t if many else added
    mix_programs = cdiv(tokens, live)
    blocks = blocks_each(width, block_c, tokens, block_m, 4, x.device)
    column_parts = cdiv(width, blocks * block_c)
    aggregate_programs = cdiv(tokens, block_m) * column_parts if aggregate else 0
    with on_device(x):
        launch(
            mix_kernel, (mix_programs + aggregate_programs,),
            partials.h, partials.squares, scale, bias, flat if aggregate else None, out, scales, pre, post, res, h, ms,
            None if norm is None else norm.weight, tokens, width, flat.stride(0), flat.stride(1), flat.stride(2),
            partials.stored, mix_programs, column_parts, blocks, 1.0 / (n * width),
            None if norm is None else 1.0 / width, rms.eps, gates.pre_eps, gates.post_mult, gates.post_eps, form.eps,
            form.start_eps, None if norm is None else norm.eps, form.steps // 2, NORM=norm is not None,
            HAS_WEIGHT=norm is not None and norm.weight is not None, SCALING=scaling, N=n, NP=next_power_of_2(n),
            K=rows, GATES=bias.shape[0], RMS_MODE=rms.mode, START=form.start, FIRST=form.first, CLAMP=form.clamp,
            ODD=form.steps % 2 == 1, GROUPED=group_scale(scale, bias), AGGREGATE=aggregate,
            GROUP=partials.group, CHUNK=partials.chunk, KP=next_power_of_2(rows), ADDED=added, LIVE=live,
            BLOCK_T=block_t, BLOCK_M=block_m, BLOCK_C=block_c, num_warps=tile.warps,
        )  # fmt: skip
    return result


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
