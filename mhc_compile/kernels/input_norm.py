"""The RMS norm after the aggregate: whole rows, so that the streams are read once.

u = sum_i h_pre[i] * x[i];  r = 1 / sqrt(mean(u^2) + eps);  out = r * u * weight
du = r * g - kappa * u,  g = weight * d_out,  kappa = r^3 * <g, u> / C;  d weight = sum over tokens of r * u * d_out
"""

# mypy: disable-error-code="assignment"
# A tuple of tiles grows while a loop over streams is unrolled.

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from mhc_compile.forms import Gates, Rms
from mhc_compile.kernels import gpus
from mhc_compile.kernels.common import cdiv, expected, group_scale, launch, next_power_of_2, on_device
from mhc_compile.kernels.config import Tile
from mhc_compile.kernels.gates import affine, rms_factor, rounded_product, sigmoid
from mhc_compile.kernels.mxfp8 import BLOCK as MXFP8_BLOCK
from mhc_compile.kernels.mxfp8 import mxfp8_rows

# Programs per processor.
WAVES = 2
# The most bytes of shared memory for one of the two tiles of rows that are on their way.
_PREFETCHED = 48 << 10
# In rows of up to so many columns, a thread may have a single number.
_SHORT = tl.constexpr(128)


@dataclass(frozen=True)
class InputNorm:
    """A norm: weight [C] or None, and eps."""

    weight: torch.Tensor | None
    eps: float


def input_norm(weight: torch.Tensor | None, eps: float | None) -> InputNorm | None:
    """The norm that these arguments of an operator describe; none without eps."""
    return None if eps is None else InputNorm(None if weight is None else weight.contiguous(), eps)


def row_tile(width: int) -> Tile:
    """Whole rows of so many columns, 16 to 32 numbers of them in a thread while 32 warps are enough for it."""
    columns = next_power_of_2(width)
    return Tile(max(1, 2048 // columns), columns, max(4, min(32, columns // 1024)))


def backward_tile(n: int, width: int, itemsize: int) -> Tile:
    """As `row_tile`, with half the numbers in a thread where rows are long or short, and the next rows copied ahead.

    They are copied ahead if they fit. Short rows have rounded products, which take more registers.
    """
    tile = row_tile(width)
    if tile.columns <= _SHORT.value:
        tile = replace(tile, tokens=tile.tokens // 2)
    row_bytes = (n + 1) * tile.tokens * tile.columns * itemsize
    warps = max(4, min(32, tile.columns // (512 if n <= 4 else 256)))
    return replace(tile, warps=warps, stages=3 if row_bytes <= _PREFETCHED else 1)


@triton.jit
def _product(x, y, BLOCK_C: tl.constexpr):
    """x * y, to be added up over BLOCK_C columns: rounded where a thread may have a single one of them."""
    return rounded_product(x, y) if BLOCK_C <= _SHORT else x * y


@triton.jit
def normed_rows(gates, i, x, weight, out, scales, tok, live, C, x_m, x_n, x_c, inverse_width, eps, N: tl.constexpr,
                HAS_WEIGHT: tl.constexpr, SCALING: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_C: tl.constexpr):  # fmt: skip
    """out[tok] of rows of C <= BLOCK_C columns; i is the rows of gates. SCALING: in MXFP8, with scales."""
    c = tl.arange(0, BLOCK_C)
    mask = live[:, None] & (c < C)[None, :]
    u = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for stream in tl.static_range(N):
        gate = tl.sum(tl.where(i == stream, gates, 0.0), axis=0)[:, None]
        v = tl.load(x + tok[:, None] * x_m + stream * x_n + c[None, :] * x_c, mask=mask, other=0.0)
        u += gate * v.to(tl.float32)
    # Rows of no token would be divided by 0 where eps is 0.
    mean = tl.where(live, tl.sum(_product(u, u, BLOCK_C), axis=1) * inverse_width, 1.0)
    normed = u / tl.sqrt(mean + eps)[:, None]
    if HAS_WEIGHT:
        normed = normed * tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    if SCALING is not None:
        # Rounded as without MXFP8 first, so that the bits are the same as those of a quantization of that result.
        normed = normed.to(tl.bfloat16).to(tl.float32)
        normed, exponents = mxfp8_rows(normed, SCALING, BLOCK_M, BLOCK_C)
        block = tl.arange(0, BLOCK_C // MXFP8_BLOCK)[None, :]
        of_row = C // MXFP8_BLOCK
        tl.store(scales + tok[:, None] * of_row + block, exponents.to(tl.uint8), mask=live[:, None] & (block < of_row))
    at = out + tok[:, None] * C + c[None, :]
    if SCALING is not None:
        # With 16 bytes in a thread, it would have 16 numbers of a stream, and add the squares in another order.
        at = tl.max_contiguous(at, [1, 8])
    tl.store(at, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_two(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add_four(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit(do_not_specialize=["M"])
def input_norm_backward_kernel(x, d_out, weight, h, ms, scale, bias, du, d_pre, weight_part, M, C, x_m,
                               x_n, x_c, d_m, d_c, h_m, h_i, pre_m, pre_i, inverse_width, eps, rms_eps, pre_eps,
                               N: tl.constexpr, GIVEN: tl.constexpr, RMS_MODE: tl.constexpr, GROUPED: tl.constexpr,
                               HAS_WEIGHT: tl.constexpr, NEED_DWEIGHT: tl.constexpr, BLOCK_M: tl.constexpr,
                               BLOCK_C: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """du [M, C], d_pre [M, n] = <du, x[i]>, and weight_part [programs, C]. GIVEN: h holds gates, and not logits."""
    c = tl.arange(0, BLOCK_C)
    inside = c < C
    if HAS_WEIGHT:
        w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    if NEED_DWEIGHT:
        d_weight = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    tiles = tl.cdiv(M, BLOCK_M)
    # All programs near the same tokens, and the last ones first, of which L2 may still hold some.
    for turn in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        tok = (tiles - 1 - turn).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        live = tok < M
        mask = live[:, None] & inside[None, :]
        out = tl.load(d_out + tok[:, None] * d_m + c[None, :] * d_c, mask=mask, other=0.0)
        streams = ()
        for i in tl.static_range(N):
            at = x + tok[:, None] * x_m + i * x_n + c[None, :] * x_c
            streams = streams + (tl.load(at, mask=mask, other=0.0),)
        if not GIVEN:
            r = rms_factor(tl.load(ms + tok, mask=live, other=1.0), rms_eps, RMS_MODE)
        u = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        for i in tl.static_range(N):
            gate = tl.load(h + tok * h_m + i * h_i, mask=live, other=0.0).to(tl.float32)
            if not GIVEN:
                s, b = affine(scale, bias, i + tok * 0, live, 0, GROUPED)
                gate = sigmoid(r * gate * s + b) + pre_eps
            u += gate[:, None] * streams[i].to(tl.float32)
        out = out.to(tl.float32)
        g = out
        if HAS_WEIGHT:
            g = g * w
        # Sums that are taken together cost the threads of a row one exchange.
        squares, with_u = tl.reduce((_product(u, u, BLOCK_C), _product(g, u, BLOCK_C)), 1, _add_two)
        factor = (1.0 / tl.sqrt(tl.where(live, squares * inverse_width, 1.0) + eps))[:, None]
        if NEED_DWEIGHT:
            d_weight += out * (u * factor)
        # In this order, since the factor's cube alone overflows where u is small.
        kappa = with_u[:, None] * factor * inverse_width * factor * factor
        d = factor * g - kappa * u
        tl.store(du + tok[:, None] * C + c[None, :], d.to(du.dtype.element_ty), mask=mask)
        for i in tl.static_range(0, N, 4):
            terms = ()
            for j in tl.static_range(i, i + 4):
                terms = terms + (_product(d, streams[j if j < N else i].to(tl.float32), BLOCK_C),)
            sums = tl.reduce(terms, 1, _add_four)
            for j in tl.static_range(i, i + 4):
                if j < N:
                    at = d_pre + tok * pre_m + tl.full([], j, tl.int64) * pre_i
                    tl.store(at, sums[j - i].to(d_pre.dtype.element_ty), mask=live)
    if NEED_DWEIGHT:
        part_at = weight_part + tl.program_id(0).to(tl.int64) * C + c
        tl.store(part_at, tl.sum(d_weight, axis=0), mask=inside)


@dataclass(frozen=True)
class GateLogits:
    """What an operator makes the gates of a read of: the first n columns of h [..., K], and ms [...], contiguous."""

    h: torch.Tensor
    ms: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor
    rms: Rms
    gates: Gates


def norm_backward(
    d_out: torch.Tensor,
    x: torch.Tensor,
    norm: InputNorm,
    read_with: GateLogits | torch.Tensor,
    d_pre: torch.Tensor,
    strides: tuple[int, int],
    need_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """du [M, C] and, where wanted, partial sums [programs, C] of d weight, for x [M, n, C] (M > 0) and d_out [M, C].

    read_with: the gates of the read [M, n], or what they are made of. d_pre is filled: the gradient of these gates,
    with the strides of a token and of a gate.
    """
    tokens, n, width = x.shape
    tile = backward_tile(n, width, x.element_size())
    # As many programs as run at once, since each brings a row of d weight to be added up.
    programs = min(WAVES * gpus.processors(x.device), cdiv(expected(tokens), tile.tokens))
    du = torch.empty(tokens, width, dtype=d_out.dtype, device=x.device)
    need_weight = need_weight and norm.weight is not None
    weight_part = torch.empty(programs, width, dtype=torch.float32, device=x.device) if need_weight else None
    if isinstance(read_with, GateLogits):
        of_gates = read_with.h.shape[-1], 1
        h, ms, scale, bias = read_with.h, read_with.ms, read_with.scale, read_with.bias
        rms, pre_eps, grouped = read_with.rms, read_with.gates.pre_eps, group_scale(scale, bias)
    else:
        of_gates = read_with.stride(0), read_with.stride(1)
        h, ms, scale, bias, rms, pre_eps, grouped = read_with, None, None, None, Rms(), 0.0, False
    with on_device(x):
        launch(
            input_norm_backward_kernel, (programs,),
            x, d_out, norm.weight, h, ms, scale, bias, du, d_pre, weight_part, tokens, width, *x.stride(),
            *d_out.stride(), *of_gates, *strides, 1.0 / width, norm.eps, rms.eps, pre_eps, N=n,
            GIVEN=ms is None, RMS_MODE=rms.mode, GROUPED=grouped, HAS_WEIGHT=norm.weight is not None,
            NEED_DWEIGHT=need_weight, BLOCK_M=tile.tokens, BLOCK_C=tile.columns, STAGES=tile.stages,
            num_warps=tile.warps,
        )  # fmt: skip
    return du, weight_part
