"""mhc::expand, the entry into the streams."""

from __future__ import annotations

import torch
from torch import Tensor

from mhc_compile.ops._checks import accumulation_dtype, check_floating, check_streams, check_x, shape_text
from mhc_compile.ops._register import define, differentiate
from mhc_compile.ops._tensors import settle


def expand(f: Tensor, n: int) -> Tensor:
    """n equal streams: x[i] = f.

    Args:
        f: [..., C], any floating dtype.
        n: the number of streams.

    Returns:
        [..., n, C], contiguous; a copy, never a view.

    Raises:
        TypeError, ValueError: an argument has an unexpected dtype, shape or value.

    Source: arXiv 2409.19606 (hyper-connections), where streams are replicated after the embedding.
    """
    result: Tensor = torch.ops.mhc.expand(f, n)
    return result


def _check(f: Tensor, n: int) -> None:
    check_floating("f", f)
    if f.dim() < 1 or f.shape[-1] < 1:
        raise ValueError(f"f has shape {shape_text(f.shape)}; expected [..., C] with C >= 1")
    check_streams(n, "the argument n")


def _fake(f: Tensor, n: int) -> Tensor:
    return f.new_empty((*f.shape[:-1], n, f.shape[-1]))


def reference(f: Tensor, n: int) -> Tensor:
    """The operator in plain torch: its meaning, and its implementation where there is no kernel."""
    return _fake(f, n).copy_(f.unsqueeze(-2))


def _check_backward(d_x: Tensor) -> None:
    try:
        check_x(d_x)
    except (TypeError, ValueError) as error:
        raise type(error)(f"d_{error}") from None


def _fake_backward(d_x: Tensor) -> Tensor:
    return d_x.new_empty((*d_x.shape[:-2], d_x.shape[-1]))


def _reference_backward(d_x: Tensor) -> Tensor:
    total = d_x.sum(-2, dtype=accumulation_dtype(d_x))
    return settle(total, total.shape, d_x.dtype)


differentiate(
    define("expand", "(Tensor f, SymInt n) -> Tensor", check=_check, reference=reference, fake=_fake),
    define(
        "expand_backward",
        "(Tensor d_x) -> Tensor",
        check=_check_backward,
        reference=_reference_backward,
        fake=_fake_backward,
    ),
    keep=lambda inputs, output: (),
    tensors=1,
    with_needs=False,
)
