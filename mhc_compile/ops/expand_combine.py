"""mhc::expand_combine, everything after a sublayer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    settle_streams,
    stream_products,
    token_chunks,
    tokens_of,
    upcast,
    weighted_sums,
)


def expand_combine(
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The new streams from a sublayer's output and the old streams.

        x'[o] = h_post[o] * (f + layer_bias) + sum_i h_res[i, o] * x[i]        (h_res None: + x[o])

    It is accumulated in float32, for float64 x in float64. Forms that apply h_res untransposed pass
    `h_res.mT`, a view, which costs no copy.

    Args:
        f: [..., C], the sublayer's output.
        layer_bias: [C], a bias that the sublayer left to be added here.
        h_post: [..., n].
        x: [..., n, C], the streams that the sublayer's input was made from.
        h_res: [..., n, n]; None stands for the identity: x'[o] gets x[o] as it is.
        out_dtype: the dtype of x'; None means that of x.

        All have any floating dtype, float64 only together with float64 x.

    Returns:
        x' [..., n, C], with the strides of x (those of `torch.empty_like(x)`).

    Raises:
        TypeError, ValueError: an argument has an unexpected dtype, shape or device.

    Source: arXiv 2512.24880, equation 3.
    """
    result: Tensor = torch.ops.mhc.expand_combine(f, layer_bias, h_post, x, h_res, out_dtype=out_dtype)
    return result


def check(
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    *,
    out_dtype: torch.dtype | None = None,
) -> None:
    """Raise TypeError or ValueError for arguments that do not go together."""
    tokens, n, width = check_x(x)
    check_tensor("f", f, (*tokens, width), "[..., C]", x)
    check_tensor("layer_bias", layer_bias, (width,), "[C]", x)
    check_tensor("h_post", h_post, (*tokens, n), "[..., n]", x)
    check_tensor("h_res", h_res, (*tokens, n, n), "[..., n, n]", x)
    check_out_dtype(out_dtype, x)


def _biased(rows: Tensor, layer_bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    rows = upcast(rows, dtype)
    return rows if layer_bias is None else rows + upcast(layer_bias, dtype)


def reference(
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    *,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """The operator in plain torch: its meaning, and its implementation where there is no kernel."""
    dtype = accumulation_dtype(x)
    streams, rows = tokens_of(x), rows_of(f)
    x_new = fake(f, layer_bias, h_post, x, h_res, out_dtype=out_dtype)
    out = tokens_of(x_new) if x_new.is_contiguous() else streams.new_empty(streams.shape, dtype=x_new.dtype)
    post = upcast(rows_of(h_post), dtype).unsqueeze(-1)
    res = None if h_res is None else upcast(tokens_of(h_res), dtype).mT
    for tokens in token_chunks(streams):
        mixed = upcast(streams[tokens], dtype) if res is None else weighted_sums(res[tokens], streams[tokens])
        out[tokens] = torch.addcmul(mixed, post[tokens], _biased(rows[tokens], layer_bias, dtype).unsqueeze(1))
    return x_new if x_new.is_contiguous() else x_new.copy_(out.view(x.shape))


def fake(
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    *,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """A tensor like the result, its elements left open."""
    return torch.empty_like(x, dtype=out_dtype)


def _check_backward(
    d_x_new: Tensor,
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    needs: Sequence[bool],
    d_x: Tensor | None,
) -> None:
    check(f, layer_bias, h_post, x, h_res)
    check_tensor("d_x_new", d_x_new, x.shape, "[..., n, C]", x)
    check_needs(needs, 5)
    check_accumulated(d_x, x, needs[3])


def reference_backward(
    d_x_new: Tensor,
    f: Tensor,
    layer_bias: Tensor | None,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor | None,
    needs: Sequence[bool],
    d_x: Tensor | None,
) -> tuple[Tensor, ...]:
    """The gradients of f, layer_bias, h_post, x and h_res in plain torch; dx begins with d_x."""
    dtype = accumulation_dtype(x)
    streams, d_streams, rows = tokens_of(x), tokens_of(d_x_new), rows_of(f)
    post = upcast(rows_of(h_post), dtype).unsqueeze(1)
    res = None if h_res is None else upcast(tokens_of(h_res), dtype)
    arguments = (f, layer_bias, h_post, x, h_res)
    df, d_bias, dh_post, dx, dh_res = fake_gradients(arguments, needs, x, streams=())
    d_layer_bias = rows.new_zeros(rows.shape[1], dtype=dtype)
    for tokens in token_chunks(streams):
        d_new = upcast(d_streams[tokens], dtype)
        if needs[0] or needs[1]:
            d_rows = weighted_sums(post[tokens], d_new).squeeze(1)
            if needs[0]:
                rows_of(df)[tokens] = d_rows
            if needs[1]:
                d_layer_bias += d_rows.sum(0)
        if needs[2]:
            biased = _biased(rows[tokens], layer_bias, dtype).unsqueeze(1)
            rows_of(dh_post)[tokens] = stream_products(d_new, biased).squeeze(-1)
        if needs[3]:
            part = d_new if res is None else weighted_sums(res[tokens], d_new)
            tokens_of(dx)[tokens] = part if d_x is None else part + tokens_of(d_x)[tokens]
        if needs[4] and res is not None:
            tokens_of(dh_res)[tokens] = stream_products(streams[tokens], d_new)
    if needs[1] and layer_bias is not None:
        d_bias.copy_(d_layer_bias)
    df = settle_streams(df if needs[0] else None, f)
    dx = settle_streams(dx if needs[3] else None, x)
    return df, d_bias, dh_post, dx, dh_res


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    _, *tensors, needs, _ = arguments
    return fake_gradients(tensors, needs, tensors[3], streams=(0, 3))


differentiate(
    define(
        "expand_combine",
        "(Tensor f, Tensor? layer_bias, Tensor h_post, Tensor x, Tensor? h_res, *,"
        " ScalarType? out_dtype=None) -> Tensor",
        check=check,
        reference=reference,
        fake=fake,
        kernel="expand_combine.forward",
    ),
    define(
        "expand_combine_backward",
        "(Tensor d_x_new, Tensor f, Tensor? layer_bias, Tensor h_post, Tensor x, Tensor? h_res, bool[] needs,"
        " Tensor? d_x=None)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        check=_check_backward,
        reference=reference_backward,
        fake=_fake_backward,
        kernel="expand_combine.backward",
    ),
    keep=lambda inputs, output: inputs,
    tensors=5,
    drop=("out_dtype",),
)
