"""mhc::mix_streams, several weighted sums of the streams at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mhc_compile.ops._checks import (
    accumulation_dtype,
    check_accumulated,
    check_beside,
    check_mixed,
    check_needs,
    check_out_dtype,
    check_tensor,
    check_width,
    shape_text,
    streams_shape,
)
from mhc_compile.ops._register import define, differentiate
from mhc_compile.ops._tensors import (
    fake_gradients,
    settle_streams,
    stream_products,
    token_chunks,
    tokens_of,
    upcast,
    weighted_sums,
)


def mix_streams(x: Tensor, h: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """m weighted sums of the n streams, accumulated in float32 (float64 for float64 x).

        out[o] = sum_i h[i, o] * x[i]

    With m = n it mixes the streams as `expand_combine` does, without a write. With m = 1 it computes what `aggregate`
    computes. Forms that apply h untransposed pass `h.mT`, a view, which costs no copy.

    Args:
        x: [..., n, C], any floating dtype.
        h: [..., n, m] with n, m >= 1 and n*m <= 1024, any floating dtype; float64 only together with float64 x.
        out_dtype: the dtype of the result; None means that of x.

    Returns:
        [..., m, C].

    Raises:
        TypeError, ValueError: an argument has an unexpected dtype, shape or device.

    Source: arXiv 2409.19606 (width connections), arXiv 2512.24880, H_res x of equation 3, and arXiv 2503.14125, whose
    fractions are the streams.
    """
    result: Tensor = torch.ops.mhc.mix_streams(x, h, out_dtype=out_dtype)
    return result


def reference(x: Tensor, h: Tensor, *, out_dtype: torch.dtype | None) -> Tensor:
    """The operator in plain torch: its meaning, and its implementation where there is no kernel."""
    streams = tokens_of(x)
    weights = upcast(tokens_of(h), accumulation_dtype(x)).mT
    out = _fake(x, h, out_dtype=out_dtype)
    rows = tokens_of(out)
    for tokens in token_chunks(streams):
        rows[tokens] = weighted_sums(weights[tokens], streams[tokens])
    return out


def _check(x: Tensor, h: Tensor, *, out_dtype: torch.dtype | None = None) -> tuple[int, ...]:
    """Returns the shape of the result."""
    tokens, n, width = streams_shape(x)
    check_width(x)
    check_beside("h", h, x)
    if tuple(h.shape[:-1]) != (*tokens, n):
        raise ValueError(f"h has shape {shape_text(h.shape)}; expected [..., n, m] = {shape_text((*tokens, n, 'm'))}")
    check_mixed(n, h.shape[-1], f"h of shape {shape_text(h.shape)}")
    check_out_dtype(out_dtype, x)
    return (*tokens, h.shape[-1], width)


def _fake(x: Tensor, h: Tensor, *, out_dtype: torch.dtype | None) -> Tensor:
    return x.new_empty((*x.shape[:-2], h.shape[-1], x.shape[-1]), dtype=out_dtype or x.dtype)


def _check_backward(d_out: Tensor, x: Tensor, h: Tensor, needs: Sequence[bool], d_x: Tensor | None) -> None:
    check_tensor("d_out", d_out, _check(x, h), "[..., m, C]", x)
    check_needs(needs, 2)
    check_accumulated(d_x, x, needs[0])


def _reference_backward(
    d_out: Tensor, x: Tensor, h: Tensor, needs: Sequence[bool], d_x: Tensor | None
) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(x)
    streams, d_rows = tokens_of(x), tokens_of(d_out)
    weights = upcast(tokens_of(h), dtype)
    dx, dh = fake_gradients((x, h), needs, x, streams=())
    for tokens in token_chunks(streams):
        d_new = upcast(d_rows[tokens], dtype)
        if needs[0]:
            part = weighted_sums(weights[tokens], d_new)
            tokens_of(dx)[tokens] = part if d_x is None else part + tokens_of(d_x)[tokens]
        if needs[1]:
            tokens_of(dh)[tokens] = stream_products(streams[tokens], d_new)
    return settle_streams(dx if needs[0] else None, x), dh


def _fake_backward(
    d_out: Tensor, x: Tensor, h: Tensor, needs: Sequence[bool], d_x: Tensor | None
) -> tuple[Tensor, ...]:
    return fake_gradients((x, h), needs, x)


differentiate(
    define(
        "mix_streams",
        "(Tensor x, Tensor h, *, ScalarType? out_dtype=None) -> Tensor",
        check=_check,
        reference=reference,
        fake=_fake,
        kernel="mix_streams.forward",
    ),
    define(
        "mix_streams_backward",
        "(Tensor d_out, Tensor x, Tensor h, bool[] needs, Tensor? d_x=None) -> (Tensor, Tensor)",
        check=_check_backward,
        reference=_reference_backward,
        fake=_fake_backward,
        kernel="mix_streams.backward",
    ),
    keep=lambda inputs, output: inputs,
    tensors=2,
    drop=("out_dtype",),
)
