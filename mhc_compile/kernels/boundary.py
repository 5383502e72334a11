"""Kernels of `mhc::boundary`: expand_combine, and what the next sublayer makes of the new streams."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.kernels import (
    boundary_gradients,
    boundary_pass,
    combine_project,
    expand_combine,
    generate_mix_and_aggregate,
)
from mhc_compile.kernels.common import empty_gradient, nothing, token_view, wanted
from mhc_compile.kernels.input_norm import input_norm
from mhc_compile.kernels.mix import empty_gates
from mhc_compile.kernels.mix_backward import Logits, backward_gates
from mhc_compile.kernels.products import reduce_parameters


def rows_to_combine(
    f: torch.Tensor, h_post: torch.Tensor, x: torch.Tensor, h_res: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the kernels of one pass combine, token by token."""
    assert h_res is not None
    return token_view(f, 1), token_view(h_post, 1).contiguous(), token_view(x, 2), token_view(h_res, 2).contiguous()


def forward(
    f: torch.Tensor,
    layer_bias: torch.Tensor | None,
    h_post: torch.Tensor,
    x: torch.Tensor,
    h_res: torch.Tensor | None,
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
    streams_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    scaling: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """(x_new [..., n, C], layer_input [..., C], the next h_post and h_res, h [..., K], ms [...]).

    scaling: as in `generate_mix_and_aggregate`.
    """
    projected = None
    if streams_dtype in (None, x.dtype) and combine_project.fits(f, layer_bias, x, h_res, phi):
        x_new = torch.empty_like(x)
        f_rows, post, x_rows, res = rows_to_combine(f, h_post, x, h_res)
        combine = f_rows, post, res, token_view(x_new, 2)
        in_one = boundary_pass.fits(x, phi) and boundary_pass.pays(x)
        if input_norm_eps is None and in_one:
            layer_input, gates_made = torch.empty_like(f, dtype=out_dtype), empty_gates(x, phi, bias)
            boundary_pass.forward(
                x_rows, phi, scale, bias, norm_weight, token_view(layer_input, 1), gates_made, combine,
                rms=rms, gates=gates, sinkhorn=sinkhorn,
            )  # fmt: skip
            return x_new, layer_input, *gates_made
        projected = combine_project.forward(x_rows, phi, norm_weight, combine)
    else:
        x_new = expand_combine.forward(f, layer_bias, h_post, x, h_res, out_dtype=streams_dtype)
    mix = generate_mix_and_aggregate.forward(
        x_new, phi, scale, bias, norm_weight, input_norm_weight, rms=rms, gates=gates, sinkhorn=sinkhorn,
        input_norm_eps=input_norm_eps, out_dtype=out_dtype, partials=projected, scaling=scaling,
    )  # fmt: skip
    return x_new, *mix


def go_in_one_pass(
    streams: Sequence[torch.Tensor | None],
    layer_bias: torch.Tensor | None,
    h_res: torch.Tensor | None,
    phi: torch.Tensor,
    needs: Sequence[bool],
) -> bool:
    """Whether `backward_in_one_pass` is for these d_x_new, d_layer_input, x_new, f and x; needs begins with f's."""
    whole = layer_bias is None and h_res is not None and all(needs[i] for i in (0, 2, 3, 4))
    return whole and boundary_gradients.fits(streams, phi)


def backward_in_one_pass(
    d_x_new: torch.Tensor,
    logits: Logits,
    f: torch.Tensor,
    h_post: torch.Tensor,
    x: torch.Tensor,
    h_res: torch.Tensor | None,
    phi: torch.Tensor,
    norm_weight: torch.Tensor | None,
    x_new: torch.Tensor,
    need_parameters: Sequence[bool],
    dweight: torch.Tensor,
    in_place: bool,
) -> tuple[torch.Tensor, ...]:
    """The gradients of f, layer_bias, h_post, x, h_res, phi, scale, bias and norm_weight.

    dweight is filled from the parts of logits. in_place: dx takes the memory of d_x_new.
    """
    assert logits.d_out is not None
    df, dx = torch.empty_like(f), d_x_new if in_place else torch.empty_like(x)
    f_rows, post, x_rows, res = rows_to_combine(f, h_post, x, h_res)
    dphi_part, sums = boundary_gradients.backward(
        token_view(dx, 2), token_view(df, 1), token_view(d_x_new, 2), logits.d_out, token_view(x_new, 2), f_rows,
        x_rows, phi, norm_weight, logits.dh, logits.coefficient, logits.h_pre, post, res,
    )  # fmt: skip
    d_post, d_res = empty_gradient(h_post, True, x), empty_gradient(h_res, True, x)
    weight_part = nothing(x) if logits.weight_part is None else logits.weight_part
    expand_combine.reduce_partial_sums(sums, weight_part, weight_part.shape[0], d_post, d_res, dweight, x_rows)
    d_parameters = reduce_parameters(dphi_part, x_rows, phi, norm_weight, logits.affine, need_parameters)
    return df, nothing(x), d_post, dx, d_res, *d_parameters


def backward(
    d_x_new: torch.Tensor | None,
    d_layer_input: torch.Tensor | None,
    d_next_post: torch.Tensor | None,
    d_next_res: torch.Tensor | None,
    d_h: torch.Tensor | None,
    d_ms: torch.Tensor | None,
    f: torch.Tensor,
    layer_bias: torch.Tensor | None,
    h_post: torch.Tensor,
    x: torch.Tensor,
    h_res: torch.Tensor | None,
    phi: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor | None,
    x_new: torch.Tensor,
    h: torch.Tensor,
    ms: torch.Tensor,
    needs: Sequence[bool],
    input_norm_weight: torch.Tensor | None = None,
    *,
    rms: Rms,
    gates: Gates,
    sinkhorn: Sinkhorn,
    input_norm_eps: float | None = None,
    in_place: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The gradients of the ten tensors of `forward`, zero-sized where needs says no.

    in_place: dx may take the memory of d_x_new, if the two have the same layout.
    """
    needs = wanted([*needs, False][:10], 10)
    norm = input_norm(input_norm_weight, input_norm_eps)
    if go_in_one_pass((d_x_new, d_layer_input, x_new, f, x), layer_bias, h_res, phi, needs):
        assert d_x_new is not None
        assert d_layer_input is not None
        logits = backward_gates(
            token_view(d_layer_input, 1), None, d_next_post, d_next_res, d_h, d_ms, token_view(x_new, 2),
            scale, bias, h, ms, rms=rms, gates=gates, sinkhorn=sinkhorn, norm=norm, need_weight=needs[9],
        )  # fmt: skip
        dweight = empty_gradient(input_norm_weight, needs[9], x)
        streams = backward_in_one_pass(
            d_x_new, logits, f, h_post, x, h_res, phi, norm_weight, x_new, needs[5:9], dweight, in_place
        )
        return *streams, dweight
    into_streams = any(needs[:5])
    d_new, *parameters = generate_mix_and_aggregate.backward(
        d_layer_input, d_next_post, d_next_res, d_h, d_ms, x_new, phi, scale, bias, norm_weight, h, ms,
        (into_streams, *needs[5:]), d_x_new if into_streams else None, input_norm_weight, rms=rms, gates=gates,
        sinkhorn=sinkhorn, input_norm_eps=input_norm_eps, in_place=in_place,
    )  # fmt: skip
    if not into_streams:
        return (*(empty_gradient(t, False, x) for t in (f, layer_bias, h_post, x, h_res)), *parameters)
    return (*expand_combine.backward(d_new, f, layer_bias, h_post, x, h_res, needs[:5], in_place=True), *parameters)
