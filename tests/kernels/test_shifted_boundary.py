"""shifted_boundary: values and gradients against float64, in one pass over the streams and in several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mhc_compile.kernels import aggregate, boundary_gradients, combine_project, shifted_boundary
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
from tests.kernels.test_boundary import Before, before

pytestmark = MARKS
BF16 = torch.bfloat16
NAMES = ["df", "dlayer_bias", "dpost", "dx", "dres", "dpre", "dphi", "dscale", "dbias", "dnorm"]
IN_ONE_PASS = ["combine_project_kernel", "boundary_gradients_kernel"]


def _forward(arguments: Sequence[Any], form: str = USUAL, **options: Any) -> tuple[Tensor, ...]:
    return shifted_boundary.forward(*arguments, **keywords(FORMS[form]), **options)


def _backward(*arguments: Any, form: str = USUAL, **options: Any) -> tuple[Tensor, ...]:
    return shifted_boundary.backward(*arguments, **keywords(FORMS[form]), **options)


def _arguments(args: Before, h_pre: Tensor, case: MixCase) -> tuple[Tensor | None, ...]:
    return (*args, h_pre, *case.parameters[1:])


def _draw_gradients(x_new: Tensor, case: MixCase) -> list[Tensor | None]:
    """Gradients of x', layer_input, the next h_pre, h_post and h_res, h and ms."""
    d_layer_input, *others = case.grads
    return [draw(*x_new.shape, dtype=x_new.dtype), d_layer_input, draw(*x_new.shape[:-1]), *others]


def _exact(
    arguments: tuple[Tensor | None, ...], x_new: Tensor, grads: list[Tensor | None], form: str
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The outputs after x' and the gradients in float64, the read and the mix taken at the rounded x'."""
    leaves = [None if t is None else t.double().requires_grad_() for t in arguments]
    new = combine(*leaves[:5])
    rounded = x_new.double() + (new - new.detach())
    h_pre = leaves[5]
    assert h_pre is not None
    next_pre, _, *others = mix(rounded, *leaves[6:], FORMS[form])
    outputs = [rounded, (h_pre[..., None] * rounded).sum(-2), next_pre, *others]
    used = [(o, g.double()) for o, g in zip(outputs, grads, strict=True) if g is not None and o.numel()]
    present = [t for t in leaves if t is not None]
    found = iter(torch.autograd.grad([o for o, _ in used], present, [g for _, g in used], allow_unused=True))
    gradients = []
    for leaf in leaves:
        gradient = None if leaf is None else next(found)
        gradients.append(torch.zeros_like(leaf) if leaf is not None and gradient is None else gradient)
    return [o.detach() for o in outputs[1:]], gradients


def check(args: Before, case: MixCase, form: str = USUAL, noise: float = 4e-6) -> None:
    arguments = _arguments(args, draw(*args[2].shape), case)
    out = _forward(arguments, form)
    grads = _draw_gradients(out[0], case)
    outputs, gradients = _exact(arguments, out[0], grads, form)
    assert_near(out[0], combine(*(None if t is None else t.double() for t in args)), "x_new", noise)
    assert_all_near(out[1:], outputs, "layer_input next_pre next_post next_res h ms", noise)
    needs = [t is not None for t in arguments]
    got = _backward(*grads, *arguments, out[0], *out[5:], needs, form=form)
    # The gradient of x' is rounded to the streams' dtype before it is summed over, where it is not kept in registers.
    noise = max(noise, 4 * roundoff(out[0].dtype))
    for gradient, like, value, name in zip(got, arguments, gradients, NAMES, strict=True):
        if like is None or value is None:
            assert gradient.shape == (0,), name
        else:
            assert gradient.dtype == like.dtype, name
            assert_near(gradient, value, name, noise)


@pytest.mark.parametrize(
    ("tokens", "n", "width", "dtype"),
    [
        (33, 1, 7, torch.float32),
        (1, 3, 70, torch.float16),
        (70, 4, 129, BF16),
        (70, 4, 66, torch.float32),
        (5, 5, 40, BF16),
        (3, 8, 33, torch.float32),
    ],
)
def test_shapes(tokens: int, n: int, width: int, dtype: torch.dtype) -> None:
    check(before(tokens, n, width, dtype), mix_case(tokens, n, width, dtype=dtype))


@pytest.mark.parametrize("form", ["deepseek", "transformer_engine", "binding_clamp"])
def test_forms(form: str) -> None:
    check(before(5, 4, 40, torch.float32), mix_case(5, 4, 40), form)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("bias", "res"), [(False, True), (True, False)])
def test_optional_parts(parts: int, bias: bool, res: bool) -> None:
    """Without residual mixing or gates of it, and with the norm's weight."""
    args = before(5, 4, 40, BF16, bias=bias, res=res)
    check(args, mix_case(5, 4, 40, dtype=BF16, parts=parts, norm=True))


@pytest.mark.parametrize(
    ("tokens", "n", "width", "parts", "norm"),
    [(270, 4, 80, 3, True), (33, 2, 48, 3, True), (20, 4, 144, 3, False), (5, 4, 64, 2, False), (16, 4, 32, 1, True)],
)
def test_one_pass(tokens: int, n: int, width: int, parts: int, norm: bool, launched: list[str]) -> None:
    check(before(tokens, n, width, BF16, bias=False), mix_case(tokens, n, width, dtype=BF16, parts=parts, norm=norm))
    assert launched == IN_ONE_PASS


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("streams_dtype", [None, torch.float32])
def test_dtypes_that_are_asked_for(
    streams_dtype: torch.dtype | None, out_dtype: torch.dtype | None, launched: list[str]
) -> None:
    args, case = before(5, 4, 64, BF16, bias=False), mix_case(5, 4, 64, dtype=BF16)
    h_pre = draw(5, 4)
    out = _forward(_arguments(args, h_pre, case), streams_dtype=streams_dtype, out_dtype=out_dtype)
    assert (out[0].dtype, out[1].dtype) == (streams_dtype or BF16, out_dtype or streams_dtype or BF16)
    assert_near(out[1], (h_pre.double()[..., None] * out[0].double()).sum(-2))
    assert ("combine_project_kernel" in launched) == (streams_dtype is None)


def test_gates_of_the_read_in_any_layout(launched: list[str]) -> None:
    args, case, h_pre = before(37, 4, 64, BF16, bias=False), mix_case(37, 4, 64, dtype=BF16), draw(37, 4)
    results = []
    for gates in (h_pre, h_pre.t().contiguous().t(), torch.cat([h_pre, h_pre], -1)[:, :4]):
        arguments = _arguments(args, gates, case)
        out = _forward(arguments)
        torch.manual_seed(0)
        grads, needs = _draw_gradients(out[0], case), [t is not None for t in arguments]
        back = _backward(*grads, *arguments, out[0], *out[5:], needs)
        results.append([*out, *back])
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))
    assert launched == IN_ONE_PASS * 3


def test_one_pass_equals_several(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    args, case = before(37, 4, 64, BF16, bias=False), mix_case(37, 4, 64, dtype=BF16)
    arguments = _arguments(args, draw(37, 4), case)
    needs = [t is not None for t in arguments]
    out = _forward(arguments)
    saved = (*_draw_gradients(out[0], case), *arguments, out[0], *out[5:], needs)
    got = _backward(*saved)
    assert launched == IN_ONE_PASS
    for kernel in (combine_project, boundary_gradients):
        monkeypatch.setattr(kernel, "fits", lambda *tensors: False)
    apart = _forward(arguments)
    for a, b in zip(apart, out, strict=True):
        assert_near(a, b.double(), noise=4 * roundoff(BF16))
    for a, b in zip(_backward(*saved), got, strict=True):
        assert_near(a, b.double(), noise=4 * roundoff(BF16))


@pytest.mark.parametrize("width", [40, 64])
def test_only_what_is_needed(width: int, launched: list[str]) -> None:
    args, case = before(5, 4, width, BF16), mix_case(5, 4, width, dtype=BF16, norm=True)
    arguments = _arguments(args, draw(5, 4), case)
    out = _forward(arguments)
    saved = (*_draw_gradients(out[0], case), *arguments, out[0], *out[5:])
    whole = _backward(*saved, [True] * 10)
    for needed in range(10):
        got = _backward(*saved, [i == needed for i in range(10)])
        for i, (gradient, among_all) in enumerate(zip(got, whole, strict=True)):
            if i == needed:
                # Rounding inside fused multiply-adds may differ between the two programs.
                assert_near(gradient, among_all.double(), f"{NAMES[i]} alone")
            else:
                assert gradient.shape == (0,), (needed, i)


@pytest.mark.parametrize("absent", range(7))
def test_gradients_that_did_not_come(absent: int) -> None:
    args, case = before(5, 4, 40, torch.float32), mix_case(5, 4, 40)
    arguments = _arguments(args, draw(5, 4), case)
    out = _forward(arguments)
    grads = _draw_gradients(out[0], case)
    grads[absent] = None
    needs = [True] * 9 + [False]
    got = _backward(*grads, *arguments, out[0], *out[5:], needs)
    _, expected = _exact(arguments, out[0], grads, USUAL)
    for gradient, value, name in zip(got[:9], expected, NAMES, strict=False):
        assert value is not None
        assert_near(gradient, value, name)


def test_layouts() -> None:
    """Channels first, as TransformerEngine has it: old and new streams and the gradient alike."""
    args, case = before(12, 4, 40, BF16), mix_case(12, 4, 40, dtype=BF16)
    h_pre, needs = draw(12, 4), [True] * 9 + [False]
    plain = _arguments(args, h_pre, case)
    f, bias, post, x, res = args
    turned = (f, bias, post, x.mT.contiguous().mT, res, *plain[5:])
    expected = _forward(plain)
    out = _forward(turned)
    assert out[0].stride() == turned[3].stride()
    grads = _draw_gradients(out[0], case)
    back = _backward(*grads, *plain, expected[0], *expected[5:], needs)
    got = _backward(*grads, *turned, out[0], *out[5:], needs)
    assert got[3].stride() == turned[3].stride()
    for a, b in zip((*out, *got[:9]), (*expected, *back[:9]), strict=True):
        assert_near(a, b.double(), noise=4 * roundoff(BF16))


@pytest.mark.parametrize(("n", "width", "dtype"), [(4, 40, BF16), (4, 64, BF16), (2, 40, torch.float32), (8, 40, BF16)])
def test_in_place(n: int, width: int, dtype: torch.dtype, launched: list[str]) -> None:
    """The same bits, in the memory of the gradient of x'."""
    args, case = before(37, n, width, dtype, bias=False), mix_case(37, n, width, dtype=dtype)
    arguments = _arguments(args, draw(37, n), case)
    out = _forward(arguments)
    d_new, *others = _draw_gradients(out[0], case)
    assert d_new is not None
    saved = (*others, *arguments, out[0], *out[5:], [t is not None for t in arguments])
    expected = _backward(d_new, *saved)
    given = d_new.clone()
    got = _backward(given, *saved, in_place=True)
    assert got[3].data_ptr() == given.data_ptr()
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    assert ("boundary_gradients_kernel" in launched) == (width == 64)


def test_no_tokens() -> None:
    args, case = before(0, 4, 33, BF16), mix_case(0, 4, 33, dtype=BF16)
    arguments = _arguments(args, draw(0, 4), case)
    out = _forward(arguments)
    assert (out[0].shape, out[1].shape, out[2].shape) == ((0, 4, 33), (0, 33), (0, 4))
    needs = [True] * 9 + [False]
    grads = _draw_gradients(out[0], case)
    got = _backward(*grads, *arguments, out[0], *out[5:], needs)
    for gradient, like in zip(got[:9], arguments, strict=False):
        assert like is not None
        assert torch.equal(gradient, torch.zeros_like(like))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter runs one program after the other")
@pytest.mark.parametrize("bias", [False, True])
def test_a_token_does_not_depend_on_the_batch(bias: bool) -> None:
    """Bitwise: slices of a batch, and a repeated run, in one pass and in several."""
    args, case, h_pre = before(3000, 4, 1280, BF16, bias=bias), mix_case(3000, 4, 1280, dtype=BF16), draw(3000, 4)
    d_new, d_pre = draw(3000, 4, 1280, dtype=BF16), draw(3000, 4)

    def run(s: slice) -> list[Tensor]:
        f, layer_bias, post, x, res = args
        assert res is not None
        cut = (f[s], layer_bias, post[s], x[s], res[s], h_pre[s], *case.parameters[1:])
        out = _forward(cut)
        d_input, *others = (g[s] for g in case.grads)
        needs = [t is not None for t in cut]
        back = _backward(d_new[s], d_input, d_pre[s], *others, *cut, out[0], *out[5:], needs)
        return [*out, back[0], *back[2:6], *back[6:9], back[1]]

    whole = run(slice(None))
    for a, b in zip(run(slice(None)), whole, strict=True):
        assert torch.equal(a, b)
    for s in (slice(2999, 3000), slice(5, 69), slice(17, 150)):
        for a, b in zip(run(s)[:12], whole, strict=False):
            assert torch.equal(a, b[s])


@pytest.mark.memory
@pytest.mark.large
@pytest.mark.skipif(DEVICE == "cpu", reason="real sizes need a CUDA device")
@pytest.mark.parametrize(
    ("tokens", "n", "width", "dtype", "bias"),
    [(8192, 4, 4096, BF16, False), (1000, 4, 5129, BF16, True), (512, 2, 2560, torch.float32, True)],
)
def test_real_sizes(tokens: int, n: int, width: int, dtype: torch.dtype, bias: bool) -> None:
    # Sums over 8,192 tokens: errors grow with their roots.
    check(before(tokens, n, width, dtype, bias=bias), mix_case(tokens, n, width, dtype=dtype), noise=2e-5)


def test_the_read_is_the_aggregate_s() -> None:
    """Where nothing is in one pass the read is `aggregate` itself, to the bit."""
    args, case, h_pre = before(33, 3, 40, BF16), mix_case(33, 3, 40, dtype=BF16), draw(33, 3)
    out = _forward(_arguments(args, h_pre, case))
    assert torch.equal(out[1], aggregate.forward(out[0], h_pre))
