"""Kernels of `mhc::head`: generate_mix_and_aggregate with the pre gates alone (K = n)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mhc_compile.forms import Gates, Rms
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
    pre_eps: float,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out [..., C], h [..., n], ms [...]) of x [..., n, C]."""
    gates = Gates(pre_eps=pre_eps)
    mix = forward_mix(
        x,
        phi,
        scale,
        bias,
        norm_weight,
        rms=rms,
        gates=gates,
        sinkhorn=None,
        aggregate=True,
        out_dtype=out_dtype,
    )
    return mix.layer_input, mix.h, mix.ms


def backward(
    d_out: torch.Tensor | None,
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
    pre_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx + d_x, dphi, dscale, dbias, dnorm_weight), zero-sized where needs says no."""
    return backward_mix(
        d_out, None, None, None, d_h, d_ms, x, phi, scale, bias, norm_weight, h, ms, wanted(needs, 5), d_x,
        rms=rms, gates=Gates(pre_eps=pre_eps), sinkhorn=None,
    )[:5]  # fmt: skip
