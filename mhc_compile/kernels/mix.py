"""Gates from the partial projections, and the aggregate; `mix_backward` has their backward.

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
from mhc_compile.kernels.aggregate import weigh_streams
from mhc_compile.kernels.common import (
    blocks_each,
    cdiv,
    group_scale,
    launch,
    next_power_of_2,
    nothing,
    on_device,
    token_view,
)
from mhc_compile.kernels.config import gate_tokens, tile_for
from mhc_compile.kernels.gates import (
    affine,
    in_units,
    rms_factor,
    sigmoid,
    sinkhorn,
)
from mhc_compile.kernels.input_norm import InputNorm, normed_rows, row_tile
from mhc_compile.kernels.projection import Partials, partial_sum, project, store_sums, tokens_to_add

# Several threads share a larger matrix (`gate_tokens`).
MOST_JOINED = tl.constexpr(4)
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
def threads_own(h, r, scale, bias, tok, live, N: tl.constexpr, NP: tl.constexpr, K: tl.constexpr,
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
        if NP <= MOST_JOINED:
            logits = threads_own(h, r, scale, bias, tok, live, N, NP, K, GROUPED)
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
