"""boundary: values and gradients against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mhc_compile.kernels import boundary
from tests.kernels.cases import (
    DEVICE,
    FORMS,
    MARKS,
    USUAL,
    MixCase,
    assert_all_near,
    assert_near,
    combine,
    draw,
    keywords,
    mix,
    mix_case,
    roundoff,
)

pytestmark = MARKS
NAMES = "df dbias dpost dx dres dphi dscale dbias dnorm"
Before = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]


def before(tokens: int, n: int, width: int, dtype: torch.dtype, *, bias: bool = True, res: bool = True) -> Before:
    """f, layer_bias, h_post, x and h_res; the new streams come out of the size of the old."""
    return (
        draw(tokens, width, dtype=dtype),
        draw(width) if bias else None,
        draw(tokens, n),
        draw(tokens, n, width, dtype=dtype),
        draw(tokens, n, n, scale=n**-0.5) if res else None,
    )


def gradients(args: Before, case: MixCase, x_new: Tensor, grads: list[Tensor | None], form: str) -> list[Tensor | None]:
    """float64 gradients for `grads` of (x', layer_input, h_post, h_res, h, ms), the mix taken at the rounded x'."""
    leaves = [None if t is None else t.double().requires_grad_() for t in (*args, *case.parameters[1:])]
    new = combine(*leaves[:5])
    # The operators go on with x' as it was rounded, and so does an eager program.
    rounded = x_new.double() + (new - new.detach())
    _, layer_input, *rest = mix(rounded, *leaves[5:], FORMS[form])
    outputs = (rounded, layer_input, *rest)
    used = [(o, g.double()) for o, g in zip(outputs, grads, strict=True) if g is not None and o.numel()]
    present = [t for t in leaves if t is not None]
    found = iter(
        torch.autograd.grad([o for o, _ in used], present, [g for _, g in used], allow_unused=True)
    )  # fmt: skip
    results: list[Tensor | None] = []
    for leaf in leaves:
        gradient = None if leaf is None else next(found)
        results.append(None if leaf is None else torch.zeros_like(leaf) if gradient is None else gradient)
    return results


def _rounding_on_the_way(x_new: Tensor) -> float:
    """What the rounding of dx' to the streams' dtype adds to sums over it, relative to the largest of them."""
    return 4 * roundoff(x_new.dtype)


def check(args: Before, case: MixCase, form: str = USUAL, noise: float = 4e-6) -> None:
    out = boundary.forward(*args, *case.parameters[1:], **keywords(FORMS[form]))
    assert_near(out[0], combine(*(None if t is None else t.double() for t in args)), "x_new", noise)
    _, *expected = mix(*(None if t is None else t.double() for t in (out[0], *case.parameters[1:])), FORMS[form])
    assert_all_near(out[1:], expected, "layer_input h_post h_res h ms", noise)
    grads = [draw(*out[0].shape, dtype=out[0].dtype), *case.grads]
    needs = [t is not None for t in (*args, *case.parameters[1:])]
    got = boundary.backward(
        *grads, *args, *case.parameters[1:], out[0], *out[4:], needs, **keywords(FORMS[form])
    )  # fmt: skip
    wanted = gradients(args, case, out[0], list(grads), form)
    for gradient, like, value, name in zip(
        got[:9], (*args, *case.parameters[1:]), wanted, NAMES.split(), strict=True
    ):  # fmt: skip
        if like is None or value is None:
            assert gradient.shape == (0,), name
        else:
            assert gradient.dtype == like.dtype, name
            assert_near(gradient, value, name, max(noise, _rounding_on_the_way(out[0])))


@pytest.mark.parametrize(
    ("tokens", "n", "width", "dtype"),
    [
        (33, 1, 7, torch.float32),
        (70, 2, 129, torch.bfloat16),
        (1, 3, 70, torch.float16),
        (70, 4, 129, torch.bfloat16),
        (70, 4, 66, torch.float32),
        (260, 2, 9, torch.bfloat16),
        (5, 5, 40, torch.bfloat16),
        (3, 8, 33, torch.float32),
    ],
)
def test_shapes(tokens: int, n: int, width: int, dtype: torch.dtype) -> None:
    check(before(tokens, n, width, dtype), mix_case(tokens, n, width, dtype=dtype))


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    check(before(5, 4, 40, torch.float32), mix_case(5, 4, 40), form)


@pytest.mark.parametrize(("parts", "more"), [(2, 2), (1, 5), (3, 30)])
def test_more_rows_than_gates(parts: int, more: int) -> None:
    args = before(37, 4, 48, torch.bfloat16, bias=False)
    check(args, mix_case(37, 4, 48, dtype=torch.bfloat16, parts=parts, more=more, norm=more == 5))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("bias", "res"), [(False, True), (True, False)])
def test_optional_parts(parts: int, bias: bool, res: bool) -> None:
    """Without residual mixing or gates of it, and with the norm's weight; K = n is what a head makes."""
    args = before(5, 4, 40, torch.bfloat16, bias=bias, res=res)
    check(args, mix_case(5, 4, 40, dtype=torch.bfloat16, parts=parts, norm=True))


def test_only_what_is_needed() -> None:
    args, case = before(5, 4, 40, torch.bfloat16), mix_case(5, 4, 40, dtype=torch.bfloat16, norm=True)
    form = keywords(FORMS[USUAL])
    out = boundary.forward(*args, *case.parameters[1:], **form)
    grads = (draw(5, 4, 40, dtype=torch.bfloat16), *case.grads)
    saved = (*args, *case.parameters[1:], out[0], *out[4:])
    whole = boundary.backward(*grads, *saved, [True] * 9, **form)
    for needed in range(9):
        got = boundary.backward(*grads, *saved, [i == needed for i in range(9)], **form)
        for i, (gradient, among_all) in enumerate(zip(got, whole, strict=True)):
            if i == needed:
                # Rounding inside fused multiply-adds may differ between the two programs.
                assert_near(gradient, among_all.double(), f"gradient {i} alone")
            else:
                assert gradient.shape == (0,), (needed, i)


@pytest.mark.parametrize("absent", range(6))
def test_gradients_that_did_not_come(absent: int) -> None:
    args, case = before(5, 4, 40, torch.float32), mix_case(5, 4, 40)
    form = keywords(FORMS[USUAL])
    out = boundary.forward(*args, *case.parameters[1:], **form)
    grads: list[Tensor | None] = [draw(5, 4, 40), *case.grads]
    grads[absent] = None
    needs = [True] * 8 + [False]
    got = boundary.backward(*grads, *args, *case.parameters[1:], out[0], *out[4:], needs, **form)
    for gradient, expected in zip(got[:8], gradients(args, case, out[0], grads, USUAL), strict=False):
        assert expected is not None
        assert_near(gradient, expected)


def test_layouts() -> None:
    """Channels first, as TransformerEngine has it: old and new streams and the gradient alike."""
    args, case = before(12, 4, 40, torch.bfloat16), mix_case(12, 4, 40, dtype=torch.bfloat16)
    form = keywords(FORMS[USUAL])
    parameters = case.parameters[1:]
    plain = boundary.forward(*args, *parameters, **form)
    grads = (draw(12, 4, 40, dtype=torch.bfloat16), *case.grads)
    needs = [True] * 8 + [False]
    expected = boundary.backward(*grads, *args, *parameters, plain[0], *plain[4:], needs, **form)
    f, bias, post, x, res = args
    turned = (f, bias, post, x.mT.contiguous().mT, res)
    out = boundary.forward(*turned, *parameters, **form)
    assert out[0].stride() == turned[3].stride()
    for a, b in zip(out, plain, strict=True):
        assert_near(a, b.double())
    got = boundary.backward(*grads, *turned, *parameters, out[0], *out[4:], needs, **form)
    assert got[3].stride() == turned[3].stride()
    for a, b in zip(got[:8], expected, strict=False):
        assert_near(a, b.double(), noise=4 * roundoff(torch.bfloat16))


@pytest.mark.parametrize(("n", "dtype"), [(4, torch.bfloat16), (2, torch.float32), (8, torch.bfloat16)])
def test_in_place(n: int, dtype: torch.dtype) -> None:
    """The same bits, in the memory of the gradient of x'."""
    args, case = before(37, n, 40, dtype), mix_case(37, n, 40, dtype=dtype)
    form = keywords(FORMS[USUAL])
    out = boundary.forward(*args, *case.parameters[1:], **form)
    d_new, needs = draw(37, n, 40, dtype=dtype), [True] * 8 + [False]
    saved = (*case.grads, *args, *case.parameters[1:], out[0], *out[4:], needs)
    expected = boundary.backward(d_new, *saved, **form)
    given = d_new.clone()
    got = boundary.backward(given, *saved, **form, in_place=True)
    assert got[3].data_ptr() == given.data_ptr()
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_no_tokens() -> None:
    args, case = before(0, 4, 33, torch.bfloat16), mix_case(0, 4, 33, dtype=torch.bfloat16)
    form = keywords(FORMS[USUAL])
    out = boundary.forward(*args, *case.parameters[1:], **form)
    assert out[0].shape == (0, 4, 33)
    needs = [True] * 8 + [False]
    got = boundary.backward(
        *(draw(0, 4, 33), *case.grads), *args, *case.parameters[1:], out[0], *out[4:], needs, **form
    )
    for gradient, like in zip(got[:8], (*args, *case.parameters[1:]), strict=False):
        assert like is not None
        assert torch.equal(gradient, torch.zeros_like(like))


@pytest.mark.memory
@pytest.mark.large
@pytest.mark.skipif(DEVICE == "cpu", reason="real sizes need a CUDA device")
@pytest.mark.parametrize(
    ("tokens", "n", "width", "dtype"),
    [(8192, 4, 4096, torch.bfloat16), (1000, 4, 5129, torch.bfloat16), (512, 2, 2560, torch.float32)],
)
def test_real_sizes(tokens: int, n: int, width: int, dtype: torch.dtype) -> None:
    # Sums over 8,192 tokens: errors grow with their roots.
    check(before(tokens, n, width, dtype), mix_case(tokens, n, width, dtype=dtype), noise=2e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter runs one program after the other")
def test_a_token_does_not_depend_on_the_batch() -> None:
    """Bitwise: slices of a batch, and a repeated run."""
    args, case = before(3000, 4, 1280, torch.bfloat16), mix_case(3000, 4, 1280, dtype=torch.bfloat16)
    form = keywords(FORMS[USUAL])
    d_new = draw(3000, 4, 1280, dtype=torch.bfloat16)

    def run(s: slice) -> list[Tensor]:
        f, bias, post, x, res = args
        assert res is not None
        cut = (f[s], bias, post[s], x[s], res[s])
        out = boundary.forward(*cut, *case.parameters[1:], **form)
        grads = (d_new[s], *(g[s] for g in case.grads))
        needs = [True] * 8 + [False]
        back = boundary.backward(*grads, *cut, *case.parameters[1:], out[0], *out[4:], needs, **form)
        return [*out, back[0], back[2], back[3], back[4], *back[5:8], back[1]]

    whole = run(slice(None))
    for a, b in zip(run(slice(None)), whole, strict=True):
        assert torch.equal(a, b)
    for s in (slice(2999, 3000), slice(5, 69), slice(17, 150)):
        for a, b in zip(run(s)[:10], whole, strict=False):
            assert torch.equal(a, b[s])
