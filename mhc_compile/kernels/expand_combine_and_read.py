"""Kernels of `mhc::expand_combine_and_read`: the combine's, with what reads x' in the same pass where there is one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mhc_compile.forms import as_projected, is_alone
from mhc_compile.kernels import aggregate, combine_project, expand_combine, projection
from mhc_compile.kernels.boundary import backward_in_one_pass, go_in_one_pass, rows_to_combine
from mhc_compile.kernels.common import empty_gradient, gradient_onto, nothing, put_back, token_view, wanted
from mhc_compile.kernels.mix_backward import Logits
from mhc_compile.kernels.one_pass import ROWS
from mhc_compile.kernels.products import backward_products


def forward(
    f: torch.Tensor,
    layer_bias: torch.Tensor | None,
    h_post: torch.Tensor,
    x: torch.Tensor,
    h_res: torch.Tensor | None,
    h_pre: torch.Tensor | None = None,
    phi: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    *,
    streams_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """(x_new [..., n, C], layer_input [..., C], h [..., K], ms [...]); what was not asked for is [..., 0]."""
    lead, width = x.shape[:-2], 0 if h_pre is None else x.shape[-1]
    layer_input = torch.empty((*lead, width), dtype=out_dtype or streams_dtype or x.dtype, device=x.device)
    plain = streams_dtype in (None, x.dtype)
    of_all = None if phi is None else _of_all_streams(phi, norm_weight, x)
    if plain and phi is not None and of_all is not None and combine_project.fits(f, layer_bias, x, h_res, of_all[0]):
        x_new = torch.empty_like(x)
        f_rows, post, x_rows, res = rows_to_combine(f, h_post, x, h_res)
        read = None if h_pre is None else (token_view(h_pre, 1).contiguous(), token_view(layer_input, 1))
        combine = f_rows, post, res, token_view(x_new, 2)
        alone = is_alone(x, phi)
        partials = combine_project.forward(x_rows, *of_all, combine, read, alone)
        return x_new, layer_input, *projection.collect(partials, x, of_all[0].shape[0], alone)
    given = None if h_pre is None else (h_pre, layer_input)
    x_new = expand_combine.forward(f, layer_bias, h_post, x, h_res, out_dtype=streams_dtype, read=given)
    if phi is not None:
        return x_new, layer_input, *projection.forward(as_projected(x_new, phi), phi, norm_weight)
    h, ms = (torch.empty((*lead, 0), dtype=torch.float32, device=x.device) for _ in range(2))
    return x_new, layer_input, h, ms


def backward(
    d_x_new: torch.Tensor | None,
    d_layer_input: torch.Tensor | None,
    d_h: torch.Tensor | None,
    d_ms: torch.Tensor | None,
    f: torch.Tensor,
    layer_bias: torch.Tensor | None,
    h_post: torch.Tensor,
    x: torch.Tensor,
    h_res: torch.Tensor | None,
    h_pre: torch.Tensor | None,
    phi: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    x_new: torch.Tensor,
    needs: Sequence[bool],
    *,
    in_place: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The gradients of the eight tensors of `forward`, zero-sized where needs says no.

    in_place: dx may take the memory of d_x_new, if the two have the same layout.
    """
    needs = wanted(needs, 8)
    into_streams = any(needs[:5])
    tensors = f, layer_bias, h_post, x, h_res
    read = None if h_pre is None or d_layer_input is None else (h_pre, d_layer_input)
    projected = phi is not None and (d_h is not None or d_ms is not None) and x.numel() > 0
    if not projected:
        if d_x_new is None and read is None:
            d_x_new = torch.zeros_like(x_new)
        d_pre = empty_gradient(h_pre, needs[5], x).zero_()
        *streams, made = expand_combine.backward_with_read(d_x_new, *tensors, read, needs[:6], in_place=in_place)
        dphi, dnorm = (empty_gradient(t, n, x).zero_() for t, n in zip((phi, norm_weight), needs[6:], strict=True))
        return *streams, d_pre if read is None else made, dphi, dnorm
    assert phi is not None
    alone, of_all = is_alone(x, phi), _of_all_streams(phi, norm_weight, x)
    read_in_one_pass = (d_x_new, d_layer_input, x_new, f, x)
    in_one_pass = (
        read is not None
        and of_all is not None
        and go_in_one_pass(read_in_one_pass, layer_bias, h_res, of_all[0], needs)
    )
    if of_all is None or (alone and not in_one_pass):
        return _backward_of_each(d_x_new, d_layer_input, d_h, d_ms, tensors, h_pre, phi, norm_weight, x_new, needs)
    d_pre, d_out, gates = empty_gradient(h_pre, needs[5], x), None, None
    if read is not None:
        d_out, gates = token_view(read[1], 1), token_view(read[0], 1).T.to(torch.float32).contiguous()
        _, d_pre = aggregate.backward(read[1], x_new, read[0], (False, needs[5]))
    else:
        d_pre.zero_()
    new_rows = token_view(x_new, 2)
    dh, coefficient = projection.spread(d_h, d_ms, new_rows, of_all[0].shape[0], alone)
    needs_of_parameters = needs[6], False, False, needs[7]
    if in_one_pass:
        assert d_x_new is not None
        assert gates is not None
        logits = Logits(dh, coefficient, gates, None, d_out, None)
        *streams, dphi, _, _, dnorm = backward_in_one_pass(
            d_x_new, logits, f, h_post, x, h_res, *of_all, x_new, needs_of_parameters, nothing(x), in_place
        )
        if alone:
            dphi, dnorm = _of_each_stream(dphi, phi, x), _of_each_stream(dnorm, norm_weight, x)
        return *streams, d_pre, dphi, dnorm
    d_x = d_x_new if into_streams else None
    dx, dx_rows = gradient_onto(d_x, x_new, into_streams, in_place)
    products = backward_products(
        new_rows, d_out, phi, norm_weight, dh, coefficient, gates, None, (into_streams, *needs_of_parameters), dx_rows,
        d_x,
    )  # fmt: skip
    narrow = d_pre, products.dphi, products.dnorm
    if not into_streams:
        return (*(empty_gradient(t, False, x) for t in tensors), *narrow)
    return (*expand_combine.backward(put_back(dx, dx_rows), *tensors, needs[:5], in_place=True), *narrow)


def _of_all_streams(
    phi: torch.Tensor, norm_weight: torch.Tensor | None, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """phi and norm_weight of all streams, as one pass takes them; None for more rows than it has.

    Those of each stream alone, [K, C] and [C], become [n*K, n*C] and [n*C], with zeros for other streams. Tensor cores
    multiply as many rows anyway, and a sum with zeros has the same bits.
    """
    n, (rows, width) = x.shape[-2], phi.shape
    if not is_alone(x, phi):
        return phi, norm_weight
    if n * rows > ROWS:
        return None
    own = torch.eye(n, dtype=torch.bool, device=phi.device)[:, None, :, None]
    of_all = torch.where(own, phi.to(torch.float32)[:, None, :], 0.0).reshape(n * rows, n * width)
    return of_all, None if norm_weight is None else norm_weight.to(torch.float32).repeat(n)


def _of_each_stream(gradient: torch.Tensor, like: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """The gradient of phi [K, C] or norm_weight [C] from that of what `_of_all_streams` makes of it."""
    if like is None or gradient.numel() == 0:
        return empty_gradient(like, False, x)
    n, width = x.shape[-2:]
    if like.dim() == 1:
        return gradient.view(n, width).sum(0).to(like.dtype)
    own = gradient.view(n, like.shape[0], n, width).diagonal(dim1=0, dim2=2)
    return own.sum(-1).to(like.dtype)


def _backward_of_each(
    d_x_new: torch.Tensor | None,
    d_layer_input: torch.Tensor | None,
    d_h: torch.Tensor | None,
    d_ms: torch.Tensor | None,
    tensors: tuple[torch.Tensor | None, ...],
    h_pre: torch.Tensor | None,
    phi: torch.Tensor,
    norm_weight: torch.Tensor | None,
    x_new: torch.Tensor,
    needs: Sequence[bool],
) -> tuple[torch.Tensor, ...]:
    """As `backward`, one operator after the other, where each stream is projected alone."""
    into_streams = any(needs[:5])
    d_x = d_x_new if into_streams else None
    if h_pre is None or d_layer_input is None:
        d_pre = empty_gradient(h_pre, needs[5], x_new).zero_()
    else:
        made, d_pre = aggregate.backward(d_layer_input, x_new, h_pre, (into_streams, needs[5]), d_x)
        d_x = made if into_streams else None
    d_new, dphi, dnorm = projection.backward(
        d_h, d_ms, as_projected(x_new, phi), phi, norm_weight, (into_streams, *needs[6:]),
        None if d_x is None else as_projected(d_x, phi),
    )  # fmt: skip
    narrow = d_pre, dphi, dnorm
    if not into_streams:
        return (*(empty_gradient(t, False, x_new) for t in tensors), *narrow)
    f, layer_bias, h_post, x, h_res = tensors
    assert f is not None
    assert h_post is not None
    assert x is not None
    streams = expand_combine.backward(d_new.squeeze(-2), f, layer_bias, h_post, x, h_res, needs[:5], in_place=True)
    return *streams, *narrow
