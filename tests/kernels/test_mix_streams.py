"""mix_streams: values and gradients against float64, layouts, and tokens that do not depend on each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mhc_compile.kernels import mix_streams
from tests.kernels.cases import DEVICE, MARKS, assert_all_near, assert_near, draw
from tests.kernels.test_steps import assert_laid_out, gradients, strided, turned

pytestmark = MARKS


def mixed(x: Tensor, h: Tensor) -> list[Tensor]:
    return [torch.einsum("...io,...ic->...oc", h, x)]


def check(x: Tensor, h: Tensor, out_dtype: torch.dtype | None = None) -> None:
    out = mix_streams.forward(x, h, out_dtype=out_dtype)
    assert out.dtype == (out_dtype or x.dtype)
    assert_near(out, mixed(x.double(), h.double())[0], "out")
    d_out = draw(*out.shape, dtype=out.dtype)
    got = mix_streams.backward(d_out, x, h, [True] * 2)
    assert_laid_out([out, *got])
    assert [g.dtype for g in got] == [x.dtype, h.dtype]
    expected = gradients(mixed, (x, h), [d_out])
    assert_all_near(got, expected, "dx dh")
    for needed in range(2):
        alone = mix_streams.backward(d_out, x, h, [i == needed for i in range(2)])
        assert_near(alone[needed], expected[needed], "alone")
        assert alone[1 - needed].shape == (0,)


@pytest.mark.parametrize(
    ("tokens", "n", "m", "width", "dtype", "weights"),
    [
        (33, 1, 1, 7, torch.float32, torch.float32),
        (20, 4, 4, 600, torch.bfloat16, torch.float32),
        (20, 4, 1, 600, torch.bfloat16, torch.float32),
        (3, 5, 3, 40, torch.float16, torch.float16),
        (5, 8, 8, 130, torch.bfloat16, torch.float32),
        (5, 8, 8, 130, torch.float32, torch.float32),
        (5, 2, 4, 1, torch.bfloat16, torch.float32),
        # More than are unrolled: of streams, of rows, and as many as there may be.
        (2, 16, 3, 33, torch.bfloat16, torch.bfloat16),
        (3, 3, 9, 600, torch.float32, torch.float32),
        (2, 103, 9, 5, torch.float16, torch.float32),
        (2, 1, 1024, 5, torch.float32, torch.float32),
    ],
)
def test_mix_streams(tokens: int, n: int, m: int, width: int, dtype: torch.dtype, weights: torch.dtype) -> None:
    check(draw(tokens, n, width, dtype=dtype), draw(tokens, n, m, dtype=weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_out_dtype(dtype: torch.dtype) -> None:
    check(draw(5, 3, 40, dtype=torch.bfloat16), draw(5, 3, 2), dtype)


@pytest.mark.parametrize("m", [2, 9])
def test_layouts(m: int) -> None:
    x, h, d_out = draw(12, 3, 40, dtype=torch.bfloat16), draw(12, 3, m), draw(12, m, 40, dtype=torch.bfloat16)
    args = turned(x.mT.contiguous().mT), turned(strided(h).mT.contiguous().mT)
    out, got = mix_streams.forward(*args), mix_streams.backward(turned(strided(d_out)), *args, [True] * 2)
    assert_laid_out([out, got[1]], got[0], args[0])
    assert torch.equal(out.flatten(0, 1), mix_streams.forward(x, h))
    for a, b in zip(got, mix_streams.backward(d_out, x, h, [True] * 2), strict=True):
        # The layout of loads may change the order of the sum over columns.
        assert_near(a.flatten(0, 1), b.double())


def test_no_tokens() -> None:
    x, h = draw(0, 3, 40), draw(0, 3, 2)
    assert mix_streams.forward(x, h).shape == (0, 2, 40)
    assert [g.shape for g in mix_streams.backward(draw(0, 2, 40), x, h, [True] * 2)] == [(0, 3, 40), (0, 3, 2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "m"), [(4, 4), (3, 1), (2, 9)])
def test_a_token_does_not_depend_on_the_batch(n: int, m: int, dtype: torch.dtype) -> None:
    """Bitwise. A slice begins where 16-byte loads may not."""
    tokens, width = (40, 130) if DEVICE == "cpu" else (3000, 1282)
    x, h, d_out = draw(tokens, n, width, dtype=dtype), draw(tokens, n, m), draw(tokens, m, width, dtype=dtype)

    def results(s: slice) -> list[Tensor]:
        part = x[s], h[s]
        return [mix_streams.forward(*part), *mix_streams.backward(d_out[s], *part, [True] * 2, x[s])]

    whole = results(slice(None))
    for s in (slice(tokens - 1, tokens), slice(5, 36)):
        assert all(torch.equal(a, b[s]) for a, b in zip(results(s), whole, strict=True))
