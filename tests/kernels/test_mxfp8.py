"""Layer inputs in MXFP8: to the bit what a quantization of the same kernel's bfloat16 has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from mhc_compile.kernels import boundary, generate_mix_and_aggregate, mxfp8
from mhc_compile.kernels.common import launch
from mhc_compile.passes.lower import mxfp8 as identified
from tests.kernels.cases import DEVICE, FORMS, INTERPRETED, MARKS, draw, keywords, mix_case
from tests.kernels.test_boundary import before

pytestmark = MARKS
BF16 = torch.bfloat16
# Few half-steps, over which the interpreter takes its time.
FORM = FORMS["large_eps"]


@triton.jit
def _rows_kernel(x, out, scales, SCALING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    v, exponents = mxfp8.mxfp8_rows(tl.load(x + row * BLOCK_C + c).to(tl.float32), SCALING, BLOCK_M, BLOCK_C)
    tl.store(out + row * BLOCK_C + c, v.to(out.dtype.element_ty))
    block = tl.arange(0, BLOCK_C // 32)[None, :]
    tl.store(scales + row * (BLOCK_C // 32) + block, exponents.to(tl.uint8))


def _quantized(v: Tensor, scaling: str) -> tuple[Tensor, Tensor]:
    """The numbers [..., C], and the exponents [..., C / 32], by the definition that recognises programs."""
    numbers, exponents = identified._mxfp8(v.cpu().reshape(-1, 32), scaling)
    return numbers.view(v.shape), exponents.view(*v.shape[:-1], v.shape[-1] // 32)


def _assert_quantized(got: Tensor, scales: Tensor, plain: Tensor, scaling: str) -> None:
    numbers, exponents = _quantized(plain, scaling)
    assert torch.equal(scales.cpu(), exponents)
    assert torch.equal(got.cpu().view(torch.uint8), numbers.view(torch.uint8))


# Of infinity times zero, in the interpreter.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("scaling", identified.SCALINGS)
def test_every_size_of_a_block(scaling: str) -> None:
    """Each bfloat16 number as the largest, infinities and NaN."""
    v = identified._blocks()
    every = torch.arange(0x7FC1).to(torch.int16).view(BF16)
    v = torch.cat([v, v[torch.arange(len(every)) % len(v)].sign() * every[:, None]])
    if INTERPRETED:
        # It reads numbers without a leading one as others.
        v = torch.where(v.float().abs() < 2.0**-126, 0.0, v)
    v = torch.cat([v, v.new_zeros(-len(v) % 512, 32)]).view(-1, 64).to(DEVICE)
    out, scales = mxfp8.empty(tuple(v.shape), v.device)
    launch(_rows_kernel, (len(v) // 128,), v, out, scales, SCALING=scaling, BLOCK_M=128, BLOCK_C=64)
    numbers, exponents = _quantized(v, scaling)
    assert torch.equal(scales.cpu(), exponents)
    assert identified._same_bits(out.cpu(), numbers)


@pytest.mark.parametrize(
    ("tokens", "n", "width"),
    [
        (5, 4, 64),
        (33, 2, 96),
        (3, 3, 32),
        (1, 4, 2080),
        (0, 2, 64),
        pytest.param(8192, 4, 4096, marks=pytest.mark.gpu),
        pytest.param(300, 4, 7168, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("scaling", identified.SCALINGS)
def test_mix(tokens: int, n: int, width: int, scaling: str) -> None:
    case, weight = mix_case(tokens, n, width, dtype=BF16), draw(width) + 2
    form: dict[str, Any] = keywords(FORM) | {"input_norm_eps": 1e-3}
    plain = generate_mix_and_aggregate.forward(*case.parameters, weight, **form)
    *got, scales = generate_mix_and_aggregate.forward(*case.parameters, weight, **form, scaling=scaling)
    _assert_quantized(got[0], scales, plain[0], scaling)
    for one, other in zip(got[1:], plain[1:], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bias", [True, False])
def test_boundary(bias: bool) -> None:
    """With and without a bias of the layer: without it, the write and the projection are a single pass in Gluon."""
    args, case = before(20, 4, 64, BF16, bias=bias), mix_case(20, 4, 64, dtype=BF16)
    form: dict[str, Any] = keywords(FORM) | {"input_norm_eps": 1e-3}
    parameters = (*case.parameters[1:], draw(64) + 2)
    plain = boundary.forward(*args, *parameters, **form)
    *got, scales = boundary.forward(*args, *parameters, **form, scaling="rceil")
    _assert_quantized(got[1], scales, plain[1], "rceil")
    for one, other in zip((got[0], *got[2:]), (plain[0], *plain[2:]), strict=True):
        assert torch.equal(one, other)
