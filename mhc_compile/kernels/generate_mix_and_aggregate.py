"""Kernels of `mhc::generate_mix_and_aggregate`: two passes over x forward, or one, two backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.kernels import boundary_pass, combine_project, gpus, one_pass
from mhc_compile.kernels.common import token_view
from mhc_compile.kernels.input_norm import input_norm
from mhc_compile.kernels.mix import empty_gates, forward_mix
from mhc_compile.kernels.mix_backward import backward_mix
from mhc_compile.kernels.projection import Partials


def forward(
    x: torch.Tensor,
    phi: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    input_norm_weight: torch.Tensor | None = None,
    *,
    rms: Rms,
    gates: Gates,
    sinkhorn: Sinkhorn,
    input_norm_eps: float | None = None,
    out_dtype: torch.dtype | None = None,
    partials: Partials | None = None,
    scaling: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """(layer_input [..., C], h_post [..., n], h_res [..., n, n], h [..., K], ms [...]) of x [..., n, C].

    partials: the sums of the projection, where these are there already. scaling: with an input norm, layer_input is in
    MXFP8, and its scales [..., C / 32] follow as a sixth result.
    """
    given = partials is None and input_norm_eps is None
    if given and gpus.of(x.device).streams_once and one_pass.fits((x,), phi) and boundary_pass.fits(x, phi):
        flat = token_view(x, 2)
        if boundary_pass.pays(x):
            layer_input = torch.empty((*x.shape[:-2], x.shape[-1]), dtype=out_dtype or x.dtype, device=x.device)
            gates_made = empty_gates(x, phi, bias)
            boundary_pass.forward(
                flat, phi, scale, bias, norm_weight, token_view(layer_input, 1), gates_made,
                rms=rms, gates=gates, sinkhorn=sinkhorn,
            )  # fmt: skip
            return layer_input, *gates_made
        # To the same bits.
        partials = combine_project.forward(flat, phi, norm_weight)
    mix = forward_mix(
        x,
        phi,
        scale,
        bias,
        norm_weight,
        rms=rms,
        gates=gates,
        sinkhorn=sinkhorn,
        aggregate=True,
        out_dtype=out_dtype,
        partials=partials,
        norm=input_norm(input_norm_weight, input_norm_eps),
        scaling=scaling,
    )
    scales = () if mix.scales is None else (mix.scales,)
    return mix.layer_input, mix.h_post, mix.h_res, mix.h, mix.ms, *scales


def backward(
    d_layer_input: torch.Tensor | None,
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
    input_norm_weight: torch.Tensor | None = None,
    *,
    rms: Rms,
    gates: Gates,
    sinkhorn: Sinkhorn,
    input_norm_eps: float | None = None,
    in_place: bool = False,
) -> tuple[torch.Tensor, ...]:
    """(dx + d_x, dphi, dscale, dbias, dnorm_weight, dinput_norm_weight), zero-sized where needs says no.

    in_place: dx may take the memory of d_x, if the two have the same layout.
    """
    return backward_mix(
        d_layer_input, None, d_h_post, d_h_res, d_h, d_ms, x, phi, scale, bias, norm_weight, h, ms,
        tuple(needs[:5]), d_x, rms=rms, gates=gates, sinkhorn=sinkhorn, in_place=in_place,
        norm=input_norm(input_norm_weight, input_norm_eps), need_weight=any(needs[5:]),
    )  # fmt: skip
