"""The RMS norm after the aggregate, as a part of it: the sublayer's own, which reads nothing but the layer input.

    u = sum_i h_pre[i] * x[i];  r = 1 / sqrt(mean(u^2) + eps);  layer_input = r * u * w

The backward keeps nothing of u. It computes u again from the streams, which it reads anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mhc_compile.ops._checks import accumulation_dtype, check_needs, check_tensor
from mhc_compile.ops._tensors import rows_of, stream_products, token_chunks, tokens_of, upcast, weighted_sums

ARGUMENT = "Tensor? input_norm_weight=None"
SCALAR = "float? input_norm_eps=None"


@dataclass(frozen=True)
class InputNorm:
    """A norm: weight [C] or None, and eps."""

    weight: Tensor | None
    eps: float


def input_norm(weight: Tensor | None, eps: float | None) -> InputNorm | None:
    """The norm that these arguments of an operator describe; none without eps."""
    return None if eps is None else InputNorm(weight, eps)


def check_input_norm(weight: Tensor | None, eps: float | None, x: Tensor) -> None:
    """Raise TypeError or ValueError for a norm's arguments that do not go together."""
    check_tensor("input_norm_weight", weight, (x.shape[-1],), "[C]", x)
    if eps is None:
        if weight is not None:
            raise ValueError("input_norm_weight was given without input_norm_eps; expected both, or None for both")
    elif not (eps >= 0 and math.isfinite(eps)):
        raise ValueError(f"input_norm_eps is {eps}; expected a finite number >= 0, or None for no norm")


def check_flags(needs: Sequence[bool], weight: Tensor | None, count: int) -> None:
    """As check_needs: count flags, the last for the norm's weight, which may be left out where there is none."""
    if weight is not None or len(needs) != count - 1:
        check_needs(needs, count)


def flags(needs: Sequence[bool], count: int) -> list[bool]:
    """count flags, of which `check_flags` lets the last be left out."""
    return [*needs, False][:count]


def reference(x: Tensor, h_pre: Tensor, norm: InputNorm, out_dtype: torch.dtype | None) -> Tensor:
    """layer_input [..., C]."""
    dtype = accumulation_dtype(x)
    streams, gates = tokens_of(x), upcast(rows_of(h_pre), dtype).unsqueeze(1)
    out = x.new_empty((*x.shape[:-2], x.shape[-1]), dtype=out_dtype or x.dtype)
    rows = rows_of(out).unsqueeze(1)
    for tokens in token_chunks(streams):
        u = weighted_sums(gates[tokens], streams[tokens])
        normed = u * torch.rsqrt(_squares(u) / u.shape[-1] + norm.eps)
        rows[tokens] = normed if norm.weight is None else normed * upcast(norm.weight, dtype)
    return out


def _squares(u: Tensor) -> Tensor:
    """The sum of squares [M, 1, 1] of u [M, 1, C]."""
    return stream_products(u, u)


def backward(
    norm: InputNorm, d_layer_input: Tensor, x: Tensor, h_pre: Tensor, need_weight: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dh_pre [..., n], du [M, C] and d weight [C] in the accumulation dtype.

    du = r * g - kappa * u,  dh_pre[j] = <du, x[j]>;  g = w * d_layer_input, kappa = r^3 * <g, u> / C
    """
    dtype, width = accumulation_dtype(x), x.shape[-1]
    streams, gates, d_rows = tokens_of(x), upcast(rows_of(h_pre), dtype).unsqueeze(1), rows_of(d_layer_input)
    d_pre = streams.new_empty(streams.shape[:2], dtype=dtype)
    du = streams.new_empty((streams.shape[0], width), dtype=dtype)
    d_weight = du.new_zeros(width) if need_weight and norm.weight is not None else None
    for tokens in token_chunks(streams):
        d_out = upcast(d_rows[tokens], dtype).unsqueeze(1)
        g = d_out if norm.weight is None else d_out * upcast(norm.weight, dtype)
        u = weighted_sums(gates[tokens], streams[tokens])
        r = torch.rsqrt(_squares(u) / width + norm.eps)
        # In this order, since r^3 alone overflows where u is small.
        kappa = stream_products(g, u) * r / width * r * r
        rows = g * r - u * kappa
        du[tokens] = rows.squeeze(1)
        d_pre[tokens] = stream_products(streams[tokens], rows).squeeze(-1)
        if d_weight is not None:
            d_weight += (d_out * u * r).sum((0, 1))
    return d_pre.view(h_pre.shape), du, d_weight
