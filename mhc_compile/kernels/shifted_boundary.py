"""Kernels of `mhc::shifted_boundary`: those of `boundary`, with the gates of the read given."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.kernels import aggregate, combine_project, expand_combine
from mhc_compile.kernels.boundary import backward_in_one_pass, go_in_one_pass, rows_to_combine
from mhc_compile.kernels.common import empty_gradient, nothing, token_view, wanted
from mhc_compile.kernels.mix import forward_mix
from mhc_compile.kernels.mix_backward import backward_gates, backward_mix


def forward(
    f: torch.Tensor,
    layer_bias: torch.Tensor | None,
    h_post: torch.Tensor,
    x: torch.Tensor,
    h_res: torch.Tensor | None,
    h_pre: torch.Tensor,
    phi: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    *,
    rms: Rms,
    gates: Gates,
    sinkhorn: Sinkhorn,
    streams_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """(x_new [..., n, C], layer_input [..., C], the next h_pre, h_post and h_res, h [..., K], ms [...])."""
    projected = None
    if streams_dtype in (None, x.dtype) and combine_project.fits(f, layer_bias, x, h_res, phi):
        x_new, layer_input = torch.empty_like(x), torch.empty_like(f, dtype=out_dtype)
        f_rows, post, x_rows, res = rows_to_combine(f, h_post, x, h_res)
        # The read needs no gate of x', so that the pass which makes x' reads it as well.
        read = token_view(h_pre, 1).contiguous(), token_view(layer_input, 1)
        projected = combine_project.forward(x_rows, phi, norm_weight, (f_rows, post, res, token_view(x_new, 2)), read)
    else:
        x_new = expand_combine.forward(f, layer_bias, h_post, x, h_res, out_dtype=streams_dtype)
        layer_input = aggregate.forward(x_new, h_pre, out_dtype=out_dtype)
    mix = forward_mix(
        x_new, phi, scale, bias, norm_weight, rms=rms, gates=gates, sinkhorn=sinkhorn, aggregate=False,
        partials=projected,
    )  # fmt: skip
    return x_new, layer_input, mix.h_pre, mix.h_post, mix.h_res, mix.h, mix.ms


def backward(
    d_x_new: torch.Tensor | None,
    d_layer_input: torch.Tensor | None,
    d_next_pre: torch.Tensor | None,
    d_next_post: torch.Tensor | None,
    d_next_res: torch.Tensor | None,
    d_h: torch.Tensor | None,
    d_ms: torch.Tensor | None,
    f: torch.Tensor,
    layer_bias: torch.Tensor | None,
    h_post: torch.Tensor,
    x: torch.Tensor,
    h_res: torch.Tensor | None,
    h_pre: torch.Tensor,
    phi: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor | None,
    x_new: torch.Tensor,
    h: torch.Tensor,
    ms: torch.Tensor,
    needs: Sequence[bool],
    *,
    rms: Rms,
    gates: Gates,
    sinkhorn: Sinkhorn,
    in_place: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The gradients of the ten tensors of `forward`, zero-sized where needs says no.

    in_place: dx may take the memory of d_x_new, if the two have the same layout.
    """
    needs = wanted(needs, 10)
    if d_layer_input is None:
        d_pre = empty_gradient(h_pre, needs[5], x).zero_()
    else:
        _, d_pre = aggregate.backward(d_layer_input, x_new, h_pre, (False, needs[5]))
    if go_in_one_pass((d_x_new, d_layer_input, x_new, f, x), layer_bias, h_res, phi, needs):
        assert d_x_new is not None
        assert d_layer_input is not None
        logits = backward_gates(
            token_view(d_layer_input, 1), d_next_pre, d_next_post, d_next_res, d_h, d_ms, token_view(x_new, 2),
            scale, bias, h, ms, rms=rms, gates=gates, sinkhorn=sinkhorn, read_with=token_view(h_pre, 1),
        )  # fmt: skip
        streams = backward_in_one_pass(
            d_x_new, logits, f, h_post, x, h_res, phi, norm_weight, x_new, needs[6:], nothing(x), in_place
        )
        return *streams[:5], d_pre, *streams[5:]
    into_streams = any(needs[:5])
    d_new, *parameters = backward_mix(
        d_layer_input, d_next_pre, d_next_post, d_next_res, d_h, d_ms, x_new, phi, scale, bias, norm_weight, h, ms,
        (into_streams, *needs[6:]), d_x_new if into_streams else None, rms=rms, gates=gates, sinkhorn=sinkhorn,
        in_place=in_place, read_with=h_pre,
    )[:5]  # fmt: skip
    if not into_streams:
        return (*(empty_gradient(t, False, x) for t in (f, layer_bias, h_post, x, h_res)), d_pre, *parameters)
    streams = expand_combine.backward(d_new, f, layer_bias, h_post, x, h_res, needs[:5], in_place=True)
    return *streams, d_pre, *parameters
