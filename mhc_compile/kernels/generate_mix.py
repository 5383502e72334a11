"""Kernels of `mhc::generate_mix`: the gates without the aggregate, one pass over x forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.kernels.common import wanted
from mhc_compile.kernels.mix import forward_mix
from mhc_compile.kernels.mix_backward import backward_mix


def forward(
    x: torch.Tensor,
    phi: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    *,
    rms: Rms,
    gates: Gates,
    sinkhorn: Sinkhorn,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(h_pre [..., n], h_post [..., n], h_res [..., n, n], h [..., K], ms [...]) of x [..., n, C]."""
    mix = forward_mix(x, phi, scale, bias, norm_weight, rms=rms, gates=gates, sinkhorn=sinkhorn, aggregate=False)
    return mix.h_pre, mix.h_post, mix.h_res, mix.h, mix.ms


def backward(
    d_h_pre: torch.Tensor | None,
    d_h_post: torch.Tensor | None,
    d_h_res: torch.Tensor | None,
    d_h: torch.Tensor | None,
    d_ms: torch.Tensor | None,
    x: torch.Tensor,
    phi: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor | None,
    h: torch.Tensor,
    ms: torch.Tensor,
    needs: Sequence[bool],
    d_x: torch.Tensor | None = None,
    *,
    rms: Rms,
    gates: Gates,
    sinkhorn: Sinkhorn,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx + d_x, dphi, dscale, dbias, dnorm_weight), zero-sized where needs says no."""
    return backward_mix(
        None, d_h_pre, d_h_post, d_h_res, d_h, d_ms, x, phi, scale, bias, norm_weight, h, ms,
        wanted(needs, 5), d_x, rms=rms, gates=gates, sinkhorn=sinkhorn,
    )[:5]  # fmt: skip
