"""What the kernels share that go through a boundary's streams once: `combine_project`, `boundary_pass` and
`boundary_gradients`."""

# mypy: disable-error-code="assignment,var-annotated"
# (A tuple that a kernel builds up one by one changes its type each time.)
from __future__ import annotations

from collections.abc import Sequence

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# Rows of phi that a product takes, those beyond K zero.
ROWS = 32

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # triton 3.7 and 3.6
load_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # 3.8 and 3.6


@gluon.constexpr_function
def copy_layout(columns: int, warps: int) -> gl.BlockedLayout:
    """16 bytes to a thread."""
    lanes = columns // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def copy_rows(x_s, f_s, stage, f_stage, x, f, tok, c, mask, C, N: gl.constexpr, TOKENS: gl.constexpr):
    """Start copying columns c of the tokens, of x one stream after the other, and of f, if there is one."""
    for i in gl.static_range(N):
        rows = x_s[i].index(stage).slice(0, TOKENS, 0)
        load_to_shared(rows, x + tok * (N * C) + i * C + c, mask=mask)
    if f is not None:
        load_to_shared(f_s.index(f_stage), f + tok * C + c, mask=mask)


@gluon.jit
def split_phi(phi_s, first, phi, norm_weight, phi_k, phi_c, start, C, N: gl.constexpr, K: gl.constexpr,
              PARTS: gl.constexpr, ROWS: gl.constexpr, HAS_NORM: gl.constexpr, BLOCK_C: gl.constexpr,
              TILE: gl.constexpr):  # fmt: skip
    """Put the bf16 parts of ROWS rows of phi * norm_weight, from `first` on, into shared memory, the largest first."""
    c = (start + gl.arange(0, BLOCK_C, gl.SliceLayout(0, TILE)))[None, :]
    k = first + gl.arange(0, ROWS, gl.SliceLayout(1, TILE))[:, None]
    weights = ()
    for o in gl.static_range(N):
        w = gl.load(phi + k * phi_k + (o * C + c) * phi_c, mask=(k < K) & (c < C), other=0.0).to(gl.float32)
        if HAS_NORM:
            w = w * gl.load(norm_weight + o * C + c, mask=c < C, other=0.0).to(gl.float32)
        weights = weights + (w,)
    for o in gl.static_range(N):
        rest = weights[o]
        for part in gl.static_range(PARTS):
            phi_s[part].slice(o * ROWS, ROWS, 0).store(rest.to(gl.bfloat16))
            rest = rest - rest.to(gl.bfloat16).to(gl.float32)


@gluon.jit
def combined(post, res, f, old, o: gl.constexpr, N: gl.constexpr):
    """Row o of x', in float32: rounded as in `expand_combine`, to the bit. Coefficients have an element for a token."""
    v = post[o][:, None] * f
    for i in gl.static_range(N):
        v = gl.fma(res[i * N + o][:, None], old[i].to(gl.float32), v)
    return v


def in_order(t: torch.Tensor, inner: int) -> bool:
    """Whether t [..., *inner dims] is of bfloat16, and contiguous also where a single token could lie otherwise.

    Kernels are chosen by this, and a token's bits must not depend on the number of tokens.
    """
    size = 1
    for d in range(1, min(inner + 1, t.dim()) + 1):
        if t.stride(-d) != size:
            return False
        size *= t.shape[-d]
    return t.dtype == torch.bfloat16 and t.is_contiguous()


def fits(streams: Sequence[torch.Tensor | None], phi: torch.Tensor) -> bool:
    """Whether the kernels are for these tensors, of which the last is x [..., n, C], on a GPU that has them.

    Copies are of 16 bytes and tiles of 2^i streams.
    """
    x = streams[-1]
    if x is None or any(t is None or not in_order(t, t.dim() - x.dim() + 2) for t in streams):
        return False
    n, width = x.shape[-2:]
    return n in (2, 4) and width % 16 == 0 and phi.shape[0] <= ROWS and x.numel() > 0
