"""Small tensor helpers of the eager references."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_compile.ops._checks import accumulation_dtype

# A float32 copy of so many elements still lies in a cache near the core when the next operation reads it.
# Measured with 512 to 2,048 tokens of 4 x 1,024: 2^17 to 2^19 are alike, all at once takes up to 6 times.
_CHUNK_ELEMENTS = 1 << 18
# Measured with 4 x 256 and 4 x 4,096 columns: 16 rows gain a fifth with many tokens, and lose half with one.
_BLOCK_ROWS = 8
# Tried on a CPU with MKL, float32 and float64, K and J from 2 to 4,004: with multiples of 2 some rows differ.
_WIDTHS = 4
_ALIGNMENT = 64  # of torch's memory, and so of every block of rows in it


def token_chunks(streams: Tensor) -> Iterator[slice]:
    """Ranges of tokens of [M, n, C] to be worked on one after the other, so that temporaries stay small."""
    tokens, n, width = streams.shape
    # Whole blocks of `matmul_rows`, of which only the last is padded.
    blocks = max(1, _CHUNK_ELEMENTS // (n * width * _BLOCK_ROWS))
    step = blocks * _BLOCK_ROWS if streams.device.type == "cpu" else max(1, tokens)
    return (slice(start, start + step) for start in range(0, tokens, step))


def upcast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value if value.dtype == dtype else value.to(dtype)


def _is_settled(value: Tensor, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether value may be returned as it is: of this shape and dtype, contiguous, and no view."""
    # A dimension of size 1 may have an odd stride, which a fake implementation cannot predict.
    alike = value.dtype == dtype and tuple(value.shape) == tuple(shape) and 1 not in value.shape
    # In inference mode a view has no base.
    return alike and value._base is None and value.storage_offset() == 0 and value.is_contiguous()


def settle(value: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A result: rounded to dtype, contiguous, and no view, which autograd would not let anyone change in place."""
    value = upcast(value, dtype)
    if _is_settled(value, shape, dtype):
        return value
    return value.new_empty(shape).copy_(value.reshape(shape))


def settle_gradient(value: Tensor | None, like: Tensor | None, x: Tensor) -> Tensor:
    """A contiguous gradient in the shape and dtype of its argument; one that was not computed has no elements."""
    if value is None or like is None:
        return x.new_empty(0, dtype=x.dtype if like is None else like.dtype)
    value = upcast(value, like.dtype)
    if _is_settled(value, like.shape, like.dtype):
        return value
    # Unlike `contiguous`, this leaves no odd strides of dimensions of size 1.
    laid_out = value.reshape(-1).view(like.shape)
    # What looks contiguous may still be a part of a larger tensor.
    return laid_out.clone() if laid_out.storage_offset() else laid_out


def settle_streams(value: Tensor | None, x: Tensor) -> Tensor:
    """A gradient of x, as `settle_gradient`, but with the strides that `torch.empty_like(x)` has."""
    if value is None or x.is_contiguous():
        return settle_gradient(value, x, x)
    return torch.empty_like(x).copy_(value.reshape(x.shape))


def fake_gradients(
    arguments: Sequence[Tensor | None], needs: Sequence[bool], x: Tensor, streams: Sequence[int] = (0,)
) -> tuple[Tensor, ...]:
    """Gradients of the arguments; those at the indices `streams` have their argument's strides."""
    results = []
    for index, (argument, need) in enumerate(zip(arguments, needs, strict=True)):
        if argument is None or not need:
            results.append(x.new_empty(0, dtype=x.dtype if argument is None else argument.dtype))
        elif index in streams:
            results.append(torch.empty_like(argument))
        else:
            results.append(x.new_empty(argument.shape, dtype=argument.dtype))
    return tuple(results)


def matmul_rows(rows: Tensor, weight: Tensor) -> Tensor:
    """rows [M, K] @ weight [K, J], each row bitwise the same whatever other rows there are.

    On a CPU, BLAS chooses its kernel by M and by the alignment of memory. MKL has one kernel for a single row, one for
    2 and 3, and one for more. The kernel decides the order of a sum. So BLAS gets a batch of equal blocks of rows, with
    zeros after K and J if these are no multiples of `_WIDTHS`.
    """
    if rows.device.type != "cpu":
        # Of CUDA tensors only float64 gets here, and GPUs too old for the kernels.
        return torch.mm(rows, weight)
    if rows.dtype == torch.float64 and weight.shape[0] < weight.shape[1]:
        # MKL's threads share out wide results by the number of blocks.
        return weighted_sums(rows.unsqueeze(1), weight.unsqueeze(0)).squeeze(1)
    tokens, columns = rows.shape[0], weight.shape[1]
    inner, outer = -rows.shape[1] % _WIDTHS, -columns % _WIDTHS
    # At least two, because a batch of one may go to another routine.
    blocks = max(2, -(-tokens // _BLOCK_ROWS))
    missing = blocks * _BLOCK_ROWS - tokens
    if inner or missing or not rows.is_contiguous() or rows.data_ptr() % _ALIGNMENT:
        rows = F.pad(rows, (0, inner, 0, missing))
    if inner or outer:
        weight = F.pad(weight, (0, outer, 0, inner))
    out = torch.bmm(rows.view(blocks, _BLOCK_ROWS, -1), weight.expand(blocks, -1, -1))
    return out.view(-1, weight.shape[1])[:tokens, :columns]


def _matmul_is_exact(value: Tensor) -> bool:
    """Whether a float32 matmul is one: tf32 (CUDA) and bf16 (CPU) stand in for it where the user allows."""
    cpu: Any = torch.backends.mkldnn
    exact = value.device.type == "cpu" and cpu.matmul.fp32_precision in ("none", "ieee")
    return value.dtype == torch.float64 or exact


def _aligned(value: Tensor) -> Tensor:
    """value [M, i, C] for BLAS, zeros after its columns where rows would not begin at multiples of `_ALIGNMENT`.

    Some of BLAS's kernels order a sum by the alignment of memory, in which a token's rows follow those of others.
    """
    if value.device.type != "cpu":
        return value
    *rows, width = value.shape
    missing = -width % (_ALIGNMENT // value.element_size())
    if missing == 0 and value.is_contiguous() and value.data_ptr() % _ALIGNMENT == 0:
        return value
    padded = value.new_zeros(*rows, width + missing)
    padded[..., :width] = value
    return padded


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """torch.bmm, of a single token as of many: a batch of one goes to a routine that may sum in another order."""
    return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1] if a.shape[0] == 1 else torch.bmm(a, b)


def weighted_sums(weights: Tensor, x: Tensor) -> Tensor:
    """out[m, o] = sum_i weights[m, o, i] * x[m, i] in the dtype of weights; from [M, o, i] and [M, i, C]."""
    # In float64, BLAS orders these sums by the number of tokens and threads.
    if _matmul_is_exact(weights) and weights.dtype != torch.float64:
        return _bmm(weights, _aligned(upcast(x, weights.dtype)))[..., : x.shape[-1]]
    total = weights[:, :, :1] * x[:, :1]
    for i in range(1, x.shape[1]):
        total.addcmul_(weights[:, :, i : i + 1], upcast(x[:, i : i + 1], weights.dtype))
    return total


def stream_products(a: Tensor, b: Tensor) -> Tensor:
    """out[m, i, o] = <a[m, i], b[m, o]>, accumulated in float32 (float64); [M, i, C], [M, o, C]."""
    dtype = accumulation_dtype(a)
    a, b = upcast(a, dtype), upcast(b, dtype)
    if b.shape[1] == 1:
        # BLAS may add up equal rows in different orders, and the gradients of equal streams have to cancel.
        return (a * b).sum(-1, keepdim=True)
    if _matmul_is_exact(a):
        return _bmm(_aligned(a), _aligned(b).mT)
    return torch.stack([(a * b[:, o : o + 1]).sum(-1) for o in range(b.shape[1])], -1)


def tokens_of(x: Tensor) -> Tensor:
    """x [..., n, C] with one token dimension: [M, n, C]. M is spelled out: 0 tokens leave -1 ambiguous."""
    return x.reshape(x.shape[:-2].numel(), *x.shape[-2:])


def rows_of(value: Tensor) -> Tensor:
    """value [..., K] with one token dimension: [M, K]."""
    return value.reshape(value.shape[:-1].numel(), value.shape[-1])
