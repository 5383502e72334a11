"""phi as bf16 parts, whose sum it is, for products on tensor cores: split once, ahead of the kernels that use them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mhc_compile.kernels.common import cdiv, launch, on_device, split_bf16


@triton.jit
def split_kernel(phi, norm_weight, parts, stride_k, stride_c, columns, K: tl.constexpr,
                 PADDED_K: tl.constexpr, PARTS: tl.constexpr, HAS_NORM: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """parts[p, k, c] [PARTS, PADDED_K, columns]: the bf16 parts of phi * norm_weight, rows beyond K zero."""
    k = tl.program_id(1).to(tl.int64)
    part = tl.full([], PADDED_K, tl.int64) * columns
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = c < columns
    w = tl.load(phi + k * stride_k + c * stride_c, mask=live & (k < K), other=0.0).to(tl.float32)
    if HAS_NORM:
        w = w * tl.load(norm_weight + c, mask=live, other=0.0).to(tl.float32)
    high, middle, low = split_bf16(w)
    at = parts + k * columns + c
    tl.store(at, high, mask=live)
    tl.store(at + part, middle, mask=live)
    if PARTS == 3:
        tl.store(at + 2 * part, low, mask=live)


def split_ahead(phi: torch.Tensor, norm_weight: torch.Tensor | None, parts: int, rows: int) -> torch.Tensor:
    """The bf16 parts of phi * norm_weight [parts, rows, n*C], two or three, the largest first; rows beyond K are 0."""
    columns = phi.shape[1]
    weight = torch.empty(parts, rows, columns, dtype=torch.bfloat16, device=phi.device)
    with on_device(phi):
        launch(
            split_kernel, (cdiv(columns, 1024), rows),
            phi, norm_weight, weight, phi.stride(0), phi.stride(1), columns, K=phi.shape[0], PADDED_K=rows,
            PARTS=parts, HAS_NORM=norm_weight is not None, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return weight
