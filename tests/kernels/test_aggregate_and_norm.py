"""aggregate_and_norm: values and gradients against float64, layouts, and the bits of the mix that makes the gates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mhc_compile.kernels import aggregate_and_norm, generate_mix, generate_mix_and_aggregate
from tests.kernels.cases import DEVICE, FORMS, MARKS, assert_all_near, assert_near, draw, keywords, mix_case
from tests.kernels.test_steps import assert_laid_out, strided, turned

pytestmark = MARKS
BF16 = torch.bfloat16
EPS = 1e-3


def _normed(x: Tensor, h_pre: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """The result, and what the norm reads."""
    u = torch.einsum("...n,...nc->...c", h_pre, x)
    out = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + EPS)
    return (out if weight is None else out * weight), u


def _exact(d_out: Tensor, x: Tensor, h_pre: Tensor, weight: Tensor | None) -> list[Tensor]:
    """The gradients of u, h_pre and the weight in float64."""
    given = [None if t is None else t.double().detach().requires_grad_() for t in (x, h_pre, weight)]
    out, u = _normed(*given)  # type: ignore[arg-type]
    leaves = [u, *(t for t in given[1:] if t is not None)]
    return list(torch.autograd.grad(out, leaves, d_out.double()))


@pytest.mark.parametrize(
    ("tokens", "n", "width", "dtype", "gates", "weighted"),
    [
        (5, 1, 7, torch.float32, torch.float32, True),
        (33, 2, 129, BF16, torch.float32, True),
        (3, 3, 40, torch.float16, torch.float16, False),
        (6, 4, 520, torch.float32, torch.float32, True),
        (20, 4, 64, BF16, BF16, False),
        (2, 9, 24, BF16, torch.float32, True),
        (2, 31, 40, torch.float32, torch.float32, True),
        pytest.param(300, 4, 9000, BF16, torch.float32, True, marks=pytest.mark.gpu),
    ],
)
def test_values_and_gradients(
    tokens: int, n: int, width: int, dtype: torch.dtype, gates: torch.dtype, weighted: bool
) -> None:
    x, h_pre = draw(tokens, n, width, dtype=dtype), draw(tokens, n, dtype=gates)
    weight = draw(width) + 2 if weighted else None
    out = aggregate_and_norm.forward(x, h_pre, weight, input_norm_eps=EPS)
    exact = [None if t is None else t.double() for t in (x, h_pre, weight)]
    assert out.dtype == dtype
    assert_near(out, _normed(*exact)[0], "out")  # type: ignore[arg-type]
    d_out = draw(tokens, width, dtype=dtype)
    expected = _exact(d_out, x, h_pre, weight)
    needs = [True, True, weighted]
    got = aggregate_and_norm.backward(d_out, x, h_pre, needs, weight, input_norm_eps=EPS)
    assert [g.dtype for g in got[:2]] == [dtype, gates]
    assert_all_near([g for g in got if g.numel()], expected, "du dh_pre dweight" if weighted else "du dh_pre")
    for needed in range(2 + weighted):
        flags = [at == needed for at in range(3)]
        alone = aggregate_and_norm.backward(d_out, x, h_pre, flags, weight, input_norm_eps=EPS)
        assert torch.equal(alone[needed], got[needed])
        assert all(one.shape == (0,) for at, one in enumerate(alone) if at != needed)


@pytest.mark.parametrize(("n", "width", "dtype"), [(4, 96, BF16), (2, 130, torch.float32), (9, 24, BF16)])
def test_bits_of_the_mix(n: int, width: int, dtype: torch.dtype) -> None:
    """With the gates that generate_mix makes, the bits are those of generate_mix_and_aggregate."""
    case, weight, form = mix_case(37, n, width, dtype=dtype), draw(width) + 2, keywords(FORMS["large_eps"])
    h_pre = generate_mix.forward(*case.parameters, **form)[0]
    got = aggregate_and_norm.forward(case.x, h_pre, weight, input_norm_eps=EPS)
    wanted = generate_mix_and_aggregate.forward(*case.parameters, weight, **form, input_norm_eps=EPS)[0]
    assert torch.equal(got, wanted)


def test_layouts() -> None:
    x, h_pre, d_out = draw(12, 3, 40, dtype=BF16), draw(12, 3), draw(12, 40, dtype=BF16)
    weight = draw(80)[::2]
    args = turned(x.mT.contiguous().mT), turned(strided(h_pre))
    out = aggregate_and_norm.forward(*args, weight, input_norm_eps=EPS)
    got = aggregate_and_norm.backward(turned(strided(d_out)), *args, [True] * 3, weight, input_norm_eps=EPS)
    assert_laid_out([out, *got])
    # The layout of loads may change the order of the sum over columns.
    exact = x.double(), h_pre.double(), weight.double()
    assert_near(out.flatten(0, 1), _normed(*exact)[0])
    flat = [got[0].flatten(0, 1), got[1].flatten(0, 1), got[2]]
    assert_all_near(flat, _exact(d_out, x, h_pre, weight), "du dh_pre dweight")


@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_without_eps(tokens: int) -> None:
    """Tiles have room for more tokens than there are; of these, the norm would divide by 0."""
    x, h_pre, weight, d_out = draw(tokens, 4, 8), draw(tokens, 4), draw(8), draw(tokens, 8)
    out = aggregate_and_norm.forward(x, h_pre, weight, input_norm_eps=0.0)
    u = torch.einsum("mn,mnc->mc", h_pre.double(), x.double())
    normed = u * torch.rsqrt(u.square().mean(-1, keepdim=True))
    assert_near(out, normed * weight.double())
    got = aggregate_and_norm.backward(d_out, x, h_pre, [True] * 3, weight, input_norm_eps=0.0)
    assert_near(got[2], (normed * d_out.double()).sum(0))


def test_no_tokens() -> None:
    x, h_pre, weight, d_out = draw(0, 3, 40), draw(0, 3), draw(40), draw(0, 40)
    assert aggregate_and_norm.forward(x, h_pre, weight, input_norm_eps=EPS).shape == (0, 40)
    got = aggregate_and_norm.backward(d_out, x, h_pre, [True] * 3, weight, input_norm_eps=EPS)
    assert [g.shape for g in got] == [(0, 40), (0, 3), (40,)]
    assert torch.equal(got[2], torch.zeros_like(weight))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_token_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    """Bitwise. A slice begins where 16-byte loads may not."""
    tokens, width = (40, 130) if DEVICE == "cpu" else (3000, 1282)
    x, h_pre, d_out = draw(tokens, 4, width, dtype=dtype), draw(tokens, 4), draw(tokens, width, dtype=dtype)
    weight = draw(width)

    def results(s: slice) -> list[Tensor]:
        part = x[s], h_pre[s]
        made = aggregate_and_norm.backward(d_out[s], *part, [True, True, False], weight, input_norm_eps=EPS)
        return [aggregate_and_norm.forward(*part, weight, input_norm_eps=EPS), *made[:2]]

    whole = results(slice(None))
    for s in (slice(tokens - 1, tokens), slice(5, 36)):
        assert all(torch.equal(a, b[s]) for a, b in zip(results(s), whole, strict=True))
