"""Kernels of `mhc::sinkhorn`: every half-step in registers, one read and one write of the matrices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mhc_compile.forms import Sinkhorn
from mhc_compile.kernels.common import cdiv, launch, next_power_of_2, on_device, token_view
from mhc_compile.kernels.config import gate_tokens
from mhc_compile.kernels.gates import in_units, sinkhorn, sinkhorn_backward


@triton.jit
def _matrices(logits, M, N: tl.constexpr, NP: tl.constexpr, BLOCK_T: tl.constexpr):
    """For one tile of tokens: the row and column numbers, tokens, which of them live, offsets and logits."""
    i = tl.arange(0, NP)[:, None, None]
    o = tl.arange(0, NP)[None, :, None]
    tok = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[None, None, :]
    live = tok < M
    valid = (i < N) & (o < N)
    at = tok * (N * N) + i * N + o
    values = tl.load(logits + at, mask=valid & live, other=0.0).to(tl.float32)
    return i, o, tok, live, at, tl.where(valid, values, float("-inf"))


# A slice of a batch may be aligned otherwise than the batch; what is compiled must not depend on it.
@triton.jit(do_not_specialize=["M", "pairs"], do_not_specialize_on_alignment=["logits", "out"])
def sinkhorn_kernel(logits, out, M, eps, start_eps, pairs, N: tl.constexpr, NP: tl.constexpr,
                    START: tl.constexpr, FIRST: tl.constexpr, CLAMP: tl.constexpr,
                    ODD: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """out [M, n, n] of logits [M, n, n]."""
    tokens = M.to(tl.int64)
    i, o, tok, live, at, values = _matrices(logits, tokens, N, NP, BLOCK_T)
    p = sinkhorn(values, i, o, eps, start_eps, pairs, out, tok, live, tokens, N, START, FIRST, CLAMP, ODD,
                 False)  # fmt: skip
    p = in_units(p, START)
    tl.store(out + at, p, mask=(i < N) & (o < N) & live)


@triton.jit(do_not_specialize=["M", "pairs"], do_not_specialize_on_alignment=["d_out", "logits", "d_logits"])
def sinkhorn_backward_kernel(d_out, logits, d_logits, history, M, eps, start_eps, pairs, N: tl.constexpr,
                             NP: tl.constexpr, START: tl.constexpr, FIRST: tl.constexpr, CLAMP: tl.constexpr,
                             ODD: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """d_logits [M, n, n]; history [steps, n, M] is scratch."""
    tokens = M.to(tl.int64)
    i, o, tok, live, at, values = _matrices(logits, tokens, N, NP, BLOCK_T)
    mask = (i < N) & (o < N) & live
    dp = tl.load(d_out + at, mask=mask, other=0.0).to(tl.float32)
    dl = sinkhorn_backward(values, dp, i, o, eps, start_eps, pairs, history, tok, live, tokens, N, START, FIRST,
                           CLAMP, ODD)  # fmt: skip
    tl.store(d_logits + at, dl.to(d_logits.dtype.element_ty), mask=mask)


def forward(logits: torch.Tensor, *, sinkhorn: Sinkhorn) -> torch.Tensor:
    """The projection of logits [..., n, n] in float32."""
    n, form = logits.shape[-1], sinkhorn.iterated
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    flat = token_view(logits, 2).contiguous()
    tokens = flat.shape[0]
    if tokens == 0:
        return out
    block_t = gate_tokens(n)
    with on_device(logits):
        launch(
            sinkhorn_kernel, (cdiv(tokens, block_t),),
            flat, out, tokens, form.eps, form.start_eps, form.steps // 2, N=n,
            NP=next_power_of_2(n), START=form.start, FIRST=form.first, CLAMP=form.clamp,
            ODD=form.steps % 2 == 1, BLOCK_T=block_t, num_warps=4,
        )  # fmt: skip
    return out


def backward(d_out: torch.Tensor, logits: torch.Tensor, *, sinkhorn: Sinkhorn) -> torch.Tensor:
    """d_logits [..., n, n] in the dtype of logits."""
    n, form = logits.shape[-1], sinkhorn.iterated
    d_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    flat, d_flat = token_view(logits, 2).contiguous(), token_view(d_out, 2).contiguous()
    tokens = flat.shape[0]
    if tokens == 0:
        return d_logits
    block_t = gate_tokens(n)
    history = torch.empty(form.steps, n, tokens, dtype=torch.float32, device=logits.device)
    with on_device(logits):
        launch(
            sinkhorn_backward_kernel, (cdiv(tokens, block_t),),
            d_flat, flat, d_logits, history, tokens, form.eps, form.start_eps, form.steps // 2,
            N=n, NP=next_power_of_2(n), START=form.start, FIRST=form.first,
            CLAMP=form.clamp, ODD=form.steps % 2 == 1, BLOCK_T=block_t,
            num_warps=4,
        )  # fmt: skip
    return d_logits
