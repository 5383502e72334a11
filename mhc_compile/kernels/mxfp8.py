"""MXFP8: rows of float8_e4m3fn with a power of two for each block of 32 numbers, as the OCP specification of MX has it.

A scale is a biased exponent, e8m0: 2^(s - 127), and 255 is NaN. With m * 2^e, 1 <= m < 2, as the largest size in a
block, e4m3's largest number is 1.75 * 2^8:

    "floor"   2^(e - 8), so that larger numbers of the block become the largest one
    "rceil"   the least power of two that is not below m * 2^e / 448

What the two do where a block holds NaN or infinities, or is too small for a scale, is what torchao does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = tl.constexpr(32)
_LARGEST = tl.constexpr(448.0)
_INFINITY = tl.constexpr(0x7F800000)
# The mantissa of 1.75 in float32.
_OF_LARGEST = tl.constexpr(0x600000)


def empty(shape: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for numbers [..., C], and their scales [..., C / 32] as bytes."""
    data = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    return data, torch.empty((*shape[:-1], shape[-1] // BLOCK.value), dtype=torch.uint8, device=device)


@triton.jit
def mxfp8_rows(v, SCALING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """v [BLOCK_M, BLOCK_C] by its scales, within float8_e4m3fn, and the biased exponents [BLOCK_M, BLOCK_C / 32]."""
    blocks = tl.reshape(v, [BLOCK_M, BLOCK_C // BLOCK, BLOCK])
    # Without the sign, numbers are ordered as their bits are, and NaN is above all.
    top = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    exponents = (top >> 23) - 8
    if SCALING == "rceil":
        exponents += ((top & 0x7FFFFF) > _OF_LARGEST).to(tl.int32)
        exponents = tl.where(top == _INFINITY, 254, exponents)
        # Blocks that are too small for a scale are stored as they are.
        inverse = tl.where(exponents > 0, 254 - exponents, 127)
        # 2^-127 is no normal number.
        factor = (tl.maximum(inverse, 1) << 23).to(tl.float32, bitcast=True)
        factor = tl.where(inverse < 1, factor * 0.5, factor)
        factor = tl.where(top > _INFINITY, float("nan"), factor)
    else:
        # torchao divides by no scale below the least normal number.
        factor = ((254 - tl.maximum(exponents, 1)) << 23).to(tl.float32, bitcast=True)
        factor = tl.where(top > _INFINITY, 0.0, factor)
    exponents = tl.where(top > _INFINITY, 255, tl.maximum(exponents, 0))
    scaled = blocks * factor[:, :, None]
    scaled = tl.where(scaled > _LARGEST, _LARGEST, tl.where(scaled < -_LARGEST, -_LARGEST, scaled))
    return tl.reshape(scaled, [BLOCK_M, BLOCK_C]), exponents
