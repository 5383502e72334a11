"""What the kernels share that go through a boundary's streams once: `combine_project`, `boundary_pass` and
`boundary_gradients`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mhc_compile.kernels.common import capability

# Rows of phi that a product takes, those beyond K zero.
ROWS = 32

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # triton 3.7 and 3.6


@gluon.jit
def combined(post, res, f, old, o: gl.constexpr, N: gl.constexpr):
    """Row o of x', in float32: rounded as in `expand_combine`, to the bit. Coefficients have an element for a token."""
    v = post[o][:, None] * f
    for i in gl.static_range(N):
        v = gl.fma(res[i * N + o][:, None], old[i].to(gl.float32), v)
    return v


def fits(streams: Sequence[torch.Tensor | None], phi: torch.Tensor, *capabilities: int) -> bool:
    """Whether the kernels are for these tensors, of which the last is x [..., n, C], and for their device.

    Copies are of 16 bytes and tiles of 2^i streams.
    """
    x = streams[-1]
    if x is None or any(t is None or t.dtype != torch.bfloat16 or not t.is_contiguous() for t in streams):
        return False
    n, width = x.shape[-2:]
    alike = n in (2, 4) and width % 16 == 0 and phi.shape[0] <= ROWS and x.numel() > 0
    return alike and runs_on(x.device, *capabilities)


def runs_on(device: torch.device, *capabilities: int) -> bool:
    """Whether device is a GPU of NVIDIA's with one of these compute capabilities, 90 for 9.0."""
    return device.type == "cuda" and torch.version.hip is None and capability(device) in capabilities
