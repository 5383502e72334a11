"""mhc::aggregate, the weighted sum of the streams that a sublayer reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mhc_compile.ops._checks import (
    accumulation_dtype,
    check_accumulated,
    check_needs,
    check_out_dtype,
    check_tensor,
    check_x,
)
from mhc_compile.ops._register import define, differentiate
from mhc_compile.ops._tensors import (
    fake_gradients,
    rows_of,
    settle_gradient,
    settle_streams,
    stream_products,
    token_chunks,
    tokens_of,
    upcast,
    weighted_sums,
)


def aggregate(x: Tensor, h_pre: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """The weighted sum of the streams, accumulated in float32 (float64 for float64 x).

        out = sum_i h_pre[i] * x[i]

    Args:
        x: [..., n, C], any floating dtype.
        h_pre: [..., n], any floating dtype; float64 only together with float64 x.
        out_dtype: the dtype of the result; None means that of x.

    Returns:
        [..., C].

    Raises:
        TypeError, ValueError: an argument has an unexpected dtype, shape or device.

    Source: arXiv 2512.24880, H_pre x of equation 3.
    """
    result: Tensor = torch.ops.mhc.aggregate(x, h_pre, out_dtype=out_dtype)
    return result


def reference(x: Tensor, h_pre: Tensor, *, out_dtype: torch.dtype | None) -> Tensor:
    """The operator in plain torch: its meaning, and its implementation where there is no kernel."""
    streams = tokens_of(x)
    weights = upcast(rows_of(h_pre), accumulation_dtype(x)).unsqueeze(1)
    out = _fake(x, h_pre, out_dtype=out_dtype)
    rows = rows_of(out).unsqueeze(1)
    for tokens in token_chunks(streams):
        rows[tokens] = weighted_sums(weights[tokens], streams[tokens])
    return out


def pre_gradient(d_out: Tensor, x: Tensor) -> Tensor:
    """dh_pre [M, n] in the accumulation dtype."""
    streams, d_rows = tokens_of(x), rows_of(d_out).unsqueeze(1)
    dh_pre = streams.new_empty((*streams.shape[:2], 1), dtype=accumulation_dtype(x))
    for tokens in token_chunks(streams):
        dh_pre[tokens] = stream_products(streams[tokens], d_rows[tokens])
    return dh_pre.squeeze(-1)


def _check(x: Tensor, h_pre: Tensor, *, out_dtype: torch.dtype | None = None) -> tuple[tuple[int, ...], int, int]:
    tokens, n, width = check_x(x)
    check_tensor("h_pre", h_pre, (*tokens, n), "[..., n]", x)
    check_out_dtype(out_dtype, x)
    return tokens, n, width


def _fake(x: Tensor, h_pre: Tensor, *, out_dtype: torch.dtype | None) -> Tensor:
    return x.new_empty((*x.shape[:-2], x.shape[-1]), dtype=out_dtype or x.dtype)


def _check_backward(d_out: Tensor, x: Tensor, h_pre: Tensor, needs: Sequence[bool], d_x: Tensor | None) -> None:
    tokens, _, width = _check(x, h_pre)
    check_tensor("d_out", d_out, (*tokens, width), "[..., C]", x)
    check_needs(needs, 2)
    check_accumulated(d_x, x, needs[0])


def reference_backward(
    d_out: Tensor, x: Tensor, h_pre: Tensor, needs: Sequence[bool], d_x: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of x and h_pre in plain torch; dx begins with d_x."""
    dtype = accumulation_dtype(x)
    dx = dh_pre = None
    if needs[0]:
        d_rows = upcast(rows_of(d_out), dtype)
        dx = upcast(rows_of(h_pre), dtype).unsqueeze(-1) * d_rows.unsqueeze(-2)
        if d_x is not None:
            dx += tokens_of(d_x)
    if needs[1]:
        dh_pre = pre_gradient(d_out, x)
    return settle_streams(dx, x), settle_gradient(dh_pre, h_pre, x)


def _fake_backward(
    d_out: Tensor, x: Tensor, h_pre: Tensor, needs: Sequence[bool], d_x: Tensor | None
) -> tuple[Tensor, ...]:
    return fake_gradients((x, h_pre), needs, x)


differentiate(
    define(
        "aggregate",
        "(Tensor x, Tensor h_pre, *, ScalarType? out_dtype=None) -> Tensor",
        check=_check,
        reference=reference,
        fake=_fake,
        kernel="aggregate.forward",
    ),
    define(
        "aggregate_backward",
        "(Tensor d_out, Tensor x, Tensor h_pre, bool[] needs, Tensor? d_x=None) -> (Tensor, Tensor)",
        check=_check_backward,
        reference=reference_backward,
        fake=_fake_backward,
        kernel="aggregate.backward",
    ),
    keep=lambda inputs, output: inputs,
    tensors=2,
    drop=("out_dtype",),
)
