"""projection, scale, sinkhorn and aggregate: values and gradients against float64, layouts, determinism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.kernels import aggregate, generate_mix, gpus, projection, scale, sinkhorn
from mhc_compile.kernels.common import room_like, token_view
from tests.kernels.cases import (
    DEVICE,
    FORMS,
    MARKS,
    USUAL,
    assert_all_near,
    assert_near,
    draw,
    gate,
    keywords,
    mix_case,
    project,
)

pytestmark = MARKS
Form = tuple[Rms, Gates, Sinkhorn]
NARROW = {"rms": Rms(), "gates": Gates(pre_eps=1e-3)}


def gradients(
    function: Callable[..., Sequence[Tensor]], args: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> list[Tensor]:
    """float64 gradients of args; [0] for an argument that is None, zeros for one that plays no part."""
    leaves = [None if a is None else a.double().requires_grad_() for a in args]
    outputs = function(*leaves)
    used = [(o, g.double()) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
    present = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad([o for o, _ in used], present, [g for _, g in used], allow_unused=True))
    results = []
    for leaf in leaves:
        gradient = None if leaf is None else next(found)
        if gradient is None:
            gradient = torch.zeros(0 if leaf is None else leaf.shape, dtype=torch.float64, device=DEVICE)
        results.append(gradient)
    return results


def assert_laid_out(results: Sequence[Tensor], dx: Tensor | None = None, x: Tensor | None = None) -> None:
    """As the fake implementations promise: dx as x, the others contiguous whatever the strides of the arguments."""
    for result in results:
        assert result.stride() == torch.empty(result.shape).stride()
        assert result.storage_offset() == 0
    if dx is not None and x is not None:
        assert dx.stride() == torch.empty_like(x).stride()


def strided(t: Tensor) -> Tensor:
    """The values of t with every second place of its last dimension between them."""
    return t.repeat_interleave(2, -1)[..., ::2]


def turned(t: Tensor) -> Tensor:
    """The values of t [12, ...] in two leading dimensions, whose order in memory is swapped."""
    return t.unflatten(0, (3, 4)).transpose(0, 1).contiguous().transpose(0, 1)


def check_projection(x: Tensor, phi: Tensor, norm: Tensor | None) -> None:
    out = projection.forward(x, phi, norm)
    assert [t.dtype for t in out] == [torch.float32] * 2
    assert_all_near(out, project(*(None if a is None else a.double() for a in (x, phi, norm))), "h ms")
    grads = draw(*out[0].shape), draw(*out[1].shape)
    got = projection.backward(*grads, x, phi, norm, [True] * 3)
    assert_laid_out([*out, *got])
    assert [g.dtype for g in got[:2]] == [x.dtype, phi.dtype]
    assert_all_near(got, gradients(project, (x, phi, norm), grads), "dx dphi dnorm")


@pytest.mark.parametrize(
    ("tokens", "n", "width", "rows", "dtype", "phi_dtype"),
    [
        (33, 1, 7, 5, torch.float32, torch.float32),
        (130, 4, 129, 24, torch.bfloat16, torch.float32),
        (3, 3, 40, 70, torch.float16, torch.bfloat16),
        (5, 2, 33, 130, torch.bfloat16, torch.float16),
        (140, 2, 200, 290, torch.bfloat16, torch.float32),
        (5, 2, 33, 2, torch.bfloat16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("norm", [False, True])
def test_projection(
    tokens: int, n: int, width: int, rows: int, dtype: torch.dtype, phi_dtype: torch.dtype, norm: bool
) -> None:
    phi = draw(rows, n * width, dtype=phi_dtype, scale=(n * width) ** -0.5)
    check_projection(draw(tokens, n, width, dtype=dtype), phi, draw(n * width).abs() if norm else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_projection_is_that_of_generate_mix(dtype: torch.dtype) -> None:
    case = mix_case(130, 2, 300, dtype=dtype, norm=True)
    whole = generate_mix.forward(*case.parameters, **keywords(FORMS[USUAL]))[3:]
    for a, b in zip(projection.forward(case.x, case.phi, case.norm_weight), whole, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("given", range(2))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_projection_of_a_single_gradient(given: int, dtype: torch.dtype) -> None:
    args = draw(5, 3, 40, dtype=dtype), draw(7, 120), draw(120)
    grads = [g if i == given else None for i, g in enumerate((draw(5, 7), draw(5)))]
    expected = gradients(project, args, grads)
    assert_all_near(projection.backward(*grads, *args, [True] * 3), expected, "dx dphi dnorm")
    for needed in range(3):
        got = projection.backward(*grads, *args, [i == needed for i in range(3)])
        for i, gradient in enumerate(got):
            if i == needed:
                assert_near(gradient, expected[i])
            else:
                assert gradient.shape == (0,)


def test_projection_layouts() -> None:
    x, phi, norm = draw(12, 3, 40, dtype=torch.bfloat16), draw(7, 120), draw(120)
    args = turned(x.mT.contiguous().mT), phi.T.contiguous().T, strided(norm)
    grads = draw(12, 7), draw(12)
    out = projection.forward(*args)
    got = projection.backward(turned(strided(grads[0])), turned(grads[1]), *args, [True] * 3)
    assert_laid_out([*out, *got[1:]], got[0], args[0])
    for a, b in zip(out, projection.forward(x, phi, norm), strict=True):
        # The layout of loads may change the order of the sum of squares.
        assert_near(a.flatten(0, 1), b.double())
    expected = projection.backward(*grads, x, phi, norm, [True] * 3)
    assert_near(got[0].flatten(0, 1), expected[0].double())
    assert_all_near(got[1:], [g.double() for g in expected[1:]], "dphi dnorm")


def test_projection_of_no_tokens() -> None:
    x, phi, norm = draw(0, 3, 40), draw(120, 7).T, draw(120)
    h, ms = projection.forward(x, phi, norm)
    assert (h.shape, ms.shape) == ((0, 7), (0,))
    got = projection.backward(h, ms, x, phi, norm, [True] * 3)
    assert_laid_out(got)
    for gradient, argument in zip(got, (x, phi, norm), strict=True):
        assert torch.equal(gradient, torch.zeros_like(argument))


def check_scale(
    tokens: int, n: int, form: Form, *, parts: int = 3, grouped: bool = True, dtype: torch.dtype = torch.float32
) -> None:
    rows = (n, 2 * n, n * n + 2 * n)[parts - 1]
    # ms around the clamps of the forms.
    args = (
        draw(tokens, rows, dtype=dtype), (draw(tokens).abs() + 0.1).to(dtype),
        (draw(parts if grouped else rows).abs() + 0.5).to(dtype), draw(rows, dtype=dtype),
    )  # fmt: skip
    narrow = {"rms": form[0], "gates": form[1]}
    out = scale.forward(*args, n, **narrow)
    assert [t.dtype for t in out] == [torch.float32] * 3

    def expected(*leaves: Tensor) -> tuple[Tensor, ...]:
        return gate(*leaves, n, form)

    assert_all_near(out, expected(*(a.double() for a in args)), "h_pre h_post logits")
    grads = [draw(*t.shape) for t in out]
    got = scale.backward(*grads, *args, n, [True] * 4, **narrow)
    assert_laid_out([*out, *got])
    assert [g.dtype for g in got] == [dtype] * 4
    assert_all_near(got, gradients(expected, args, grads), "dh dms dscale dbias")


@pytest.mark.parametrize("name", ["deepseek", "megatron", "columns_first_exp", "binding_clamp", "large_eps"])
def test_scale_forms(name: str) -> None:
    check_scale(33, 3, FORMS[name])


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("tokens", "n", "parts"), [(200, 1, 3), (5, 4, 1), (5, 5, 2), (200, 4, 3), (5, 16, 3)])
def test_scale_parts(tokens: int, n: int, parts: int, grouped: bool) -> None:
    check_scale(tokens, n, FORMS[USUAL], parts=parts, grouped=grouped)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scale_dtypes(dtype: torch.dtype) -> None:
    check_scale(5, 3, FORMS["megatron"], dtype=dtype)


def test_scale_of_large_logits() -> None:
    bias = torch.tensor([-100.0, 100.0] * 4, device=DEVICE)
    args = draw(5, 8), draw(5).abs() + 1.0, torch.ones(3, device=DEVICE), bias
    out = scale.forward(*args, 2, **NARROW)
    assert_all_near(out, gate(*(a.double() for a in args), 2, (*NARROW.values(), Sinkhorn())), "pre post logits")


@pytest.mark.parametrize("given", range(3))
def test_scale_of_a_single_gradient(given: int) -> None:
    args = draw(5, 15), draw(5).abs() + 0.1, draw(3), draw(15)
    grads = [g if i == given else None for i, g in enumerate((draw(5, 3), draw(5, 3), draw(5, 3, 3)))]
    expected = gradients(lambda *leaves: gate(*leaves, 3, FORMS[USUAL]), args, grads)
    for needed in range(4):
        got = scale.backward(*grads, *args, 3, [i == needed for i in range(4)], **NARROW)
        for i, gradient in enumerate(got):
            if i == needed:
                assert_near(gradient, expected[i])
            else:
                assert gradient.shape == (0,)


def test_scale_layouts() -> None:
    h, ms, alpha, bias = draw(12, 15), draw(12).abs() + 0.1, draw(3), draw(15)
    plain = scale.forward(h, ms, alpha, bias, 3, **NARROW)
    args = turned(strided(h)), turned(ms), strided(alpha), strided(bias)
    out = scale.forward(*args, 3, **NARROW)
    grads = [draw(*t.shape) for t in plain]
    got = scale.backward(*(turned(strided(g)) for g in grads), *args, 3, [True] * 4, **NARROW)
    assert_laid_out([*out, *got])
    back = scale.backward(*grads, h, ms, alpha, bias, 3, [True] * 4, **NARROW)
    for a, b in zip([*out, *got], [*plain, *back], strict=True):
        assert torch.equal(a.reshape(b.shape), b)


def test_scale_of_no_tokens() -> None:
    args = draw(0, 15), draw(0), draw(3), draw(15)
    out = scale.forward(*args, 3, **NARROW)
    assert [t.shape for t in out] == [(0, 3), (0, 3), (0, 3, 3)]
    for gradient, argument in zip(scale.backward(*out, *args, 3, [True] * 4, **NARROW), args, strict=True):
        assert torch.equal(gradient, torch.zeros_like(argument))


def check_sinkhorn(logits: Tensor, form: Sinkhorn, noise: float = 4e-6) -> None:
    out = sinkhorn.forward(logits, sinkhorn=form)
    assert out.dtype == torch.float32
    assert_near(out, form.equation(logits.double()), "p", noise)
    d_out = draw(*out.shape)
    got = sinkhorn.backward(d_out, logits, sinkhorn=form)
    assert_laid_out([out, got])
    assert got.dtype == logits.dtype
    (expected,) = gradients(lambda leaf: [form.equation(leaf)], [logits], [d_out])
    assert_near(got, expected, "d_logits", noise)


@pytest.mark.parametrize("name", FORMS)
def test_sinkhorn_forms(name: str) -> None:
    check_sinkhorn(draw(5, 3, 3), FORMS[name][2])


@pytest.mark.parametrize(("tokens", "n"), [(200, 1), (130, 4), (3, 5), (2, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sinkhorn_shapes(tokens: int, n: int, dtype: torch.dtype) -> None:
    check_sinkhorn(draw(tokens, n, n, dtype=dtype), FORMS[USUAL][2])


@pytest.mark.parametrize("name", ["transformer_engine", "log_columns", "log_softmax"])
def test_sinkhorn_of_large_logits(name: str) -> None:
    # A logit of 100 is rounded at 4e-6, and each of the half-steps rounds as much again.
    check_sinkhorn(draw(5, 4, 4).sign() * 100.0 + draw(5, 4, 4), FORMS[name][2], noise=1e-4)


@pytest.mark.parametrize("name", ["large_eps", "global_exp"])
def test_sinkhorn_of_equal_logits(name: str) -> None:
    """Ties share the gradient of a maximum that does not cancel."""
    check_sinkhorn(torch.zeros(3, 4, 4, device=DEVICE), FORMS[name][2])


@pytest.mark.parametrize("steps", [0, 1, 6])
@pytest.mark.parametrize("name", ["plain_exp", "plain_exp_clamped", "global_exp"])
def test_sinkhorn_whose_shift_does_not_cancel(name: str, steps: int) -> None:
    """Logits far below 0, where eps is all there is, and far above, where exp alone would overflow."""
    logits = draw(14, 4, 4)
    logits += torch.linspace(-150, 80 if steps == 0 else 150, 14, device=DEVICE)[:, None, None]
    logits[::2] *= torch.linspace(0.1, 1, 7, device=DEVICE)[:, None, None]
    # A logit of 150 is rounded at 8e-6.
    check_sinkhorn(logits, replace(FORMS[name][2], steps=steps), noise=1e-4)


@pytest.mark.parametrize("start", ["plain_exp", "global_exp"])
def test_sinkhorn_of_columns_that_sink_beside_a_small_eps(start: str) -> None:
    """Divided by it they are next to nothing, until half-steps have brought them back."""
    logits = 60.0 * draw(100, 4, 4)
    logits -= logits.amax((-2, -1), keepdim=True)
    form = Sinkhorn(steps=6, start=start, first="columns", eps=1e-8, start_eps=0.0)
    out = sinkhorn.forward(logits, sinkhorn=form)
    assert_near(out, form.equation(logits.double()), "p", 1e-4)


def test_sinkhorn_layouts() -> None:
    logits, d_out = draw(12, 3, 3), draw(12, 3, 3)
    form = FORMS["megatron"][2]
    out = sinkhorn.forward(turned(logits.mT.contiguous().mT), sinkhorn=form)
    got = sinkhorn.backward(turned(d_out.mT.contiguous().mT), turned(strided(logits)), sinkhorn=form)
    assert_laid_out([out, got])
    assert torch.equal(out.flatten(0, 1), sinkhorn.forward(logits, sinkhorn=form))
    assert torch.equal(got.flatten(0, 1), sinkhorn.backward(d_out, logits, sinkhorn=form))


def test_sinkhorn_of_no_tokens() -> None:
    logits = draw(0, 3, 3)
    assert sinkhorn.forward(logits, sinkhorn=Sinkhorn()).shape == (0, 3, 3)
    assert sinkhorn.backward(logits, logits, sinkhorn=Sinkhorn()).shape == (0, 3, 3)


def test_far_streams_are_brought_together() -> None:
    """Offsets within a token are counted in 32 bits; a token dimension may have any stride."""
    near = torch.empty_strided((3, 4, 5), (1 << 40, 5, 1), device="meta")
    assert token_view(near, 2) is near
    assert room_like(near, 2)[0].is_contiguous()
    far = torch.empty_strided((3, 5, 4), (4, 1 << 29, 1), device="meta")
    assert token_view(far, 2).is_contiguous()
    dense = torch.empty(5, 1 << 27, 4, device="meta").transpose(0, 1)
    whole, rows = room_like(dense, 2)
    assert whole.stride() == dense.stride()
    assert rows.is_contiguous()


def weighted(x: Tensor, h_pre: Tensor) -> list[Tensor]:
    return [(h_pre[..., None] * x).sum(-2)]


def check_aggregate(x: Tensor, h_pre: Tensor, out_dtype: torch.dtype | None = None, noise: float = 4e-6) -> None:
    out = aggregate.forward(x, h_pre, out_dtype=out_dtype)
    assert out.dtype == (out_dtype or x.dtype)
    assert_near(out, weighted(x.double(), h_pre.double())[0], "out", noise)
    d_out = draw(*out.shape, dtype=out.dtype)
    got = aggregate.backward(d_out, x, h_pre, [True] * 2)
    assert_laid_out([out, *got])
    assert [g.dtype for g in got] == [x.dtype, h_pre.dtype]
    expected = gradients(weighted, (x, h_pre), [d_out])
    assert_all_near(got, expected, "dx dh_pre", noise)
    for needed in range(2):
        alone = aggregate.backward(d_out, x, h_pre, [i == needed for i in range(2)])
        assert_near(alone[needed], expected[needed], "alone", noise)
        assert alone[1 - needed].shape == (0,)


@pytest.mark.parametrize(
    ("tokens", "n", "width", "dtype", "gates"),
    [
        (33, 1, 7, torch.float32, torch.float32),
        (20, 4, 600, torch.bfloat16, torch.float32),
        (3, 5, 40, torch.float16, torch.float16),
        (2, 16, 33, torch.bfloat16, torch.bfloat16),
        (5, 4, 1, torch.bfloat16, torch.float32),
    ],
)
def test_aggregate(tokens: int, n: int, width: int, dtype: torch.dtype, gates: torch.dtype) -> None:
    check_aggregate(draw(tokens, n, width, dtype=dtype), draw(tokens, n, dtype=gates))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_aggregate_out_dtype(dtype: torch.dtype) -> None:
    check_aggregate(draw(5, 3, 40, dtype=torch.bfloat16), draw(5, 3), dtype)


def test_aggregate_layouts() -> None:
    x, h_pre, d_out = draw(12, 3, 40, dtype=torch.bfloat16), draw(12, 3), draw(12, 40, dtype=torch.bfloat16)
    args = turned(x.mT.contiguous().mT), turned(strided(h_pre))
    out, got = aggregate.forward(*args), aggregate.backward(turned(strided(d_out)), *args, [True] * 2)
    assert_laid_out([out, got[1]], got[0], args[0])
    assert torch.equal(out.flatten(0, 1), aggregate.forward(x, h_pre))
    for a, b in zip(got, aggregate.backward(d_out, x, h_pre, [True] * 2), strict=True):
        # The layout of loads may change the order of the sum over columns.
        assert_near(a.flatten(0, 1), b.double())


def test_aggregate_of_no_tokens() -> None:
    x, h_pre = draw(0, 3, 40), draw(0, 3)
    assert aggregate.forward(x, h_pre).shape == (0, 40)
    assert [g.shape for g in aggregate.backward(draw(0, 40), x, h_pre, [True] * 2)] == [(0, 3, 40), (0, 3)]


def run_steps(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> list[Tensor]:
    """What each of the steps returns for a token."""
    n = x.shape[-2]
    h, ms = projection.forward(x, phi)
    pre, post, logits = scale.forward(h, ms, alpha, bias, n, **NARROW)
    out = aggregate.forward(x, pre)
    p = d_logits = logits
    if logits.numel():
        p = sinkhorn.forward(logits, sinkhorn=Sinkhorn(steps=3))
        d_logits = sinkhorn.backward(p * p, logits, sinkhorn=Sinkhorn(steps=3))
    dh, dms, *_ = scale.backward(pre, post, d_logits, h, ms, alpha, bias, n, [True, True, False, False], **NARROW)
    dx = projection.backward(dh, dms, x, phi, None, [True, False, False])[0]
    return [h, ms, pre, post, p, out, d_logits, dh, dms, dx, *aggregate.backward(out, x, pre, [True] * 2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "parts"), [(2, 1), (3, 3)])
def test_a_token_of_a_step_does_not_depend_on_the_batch(n: int, parts: int, dtype: torch.dtype) -> None:
    """Bitwise. Rows of 2 and of 15 float32 values: a slice begins where 16-byte loads may not."""
    tokens, width = (140, 130) if DEVICE == "cpu" else (3000, 1280)
    case = mix_case(tokens, n, width, dtype=dtype, parts=parts)
    arguments = case.phi, case.scale, case.bias
    whole = run_steps(case.x, *arguments)
    slices = [slice(tokens - 1, tokens), slice(5, 69)]
    if DEVICE == "cuda":
        slices += [slice(0, 1), slice(17, 150), slice(None)]
    for s in slices:
        for a, b in zip(run_steps(case.x[s], *arguments), whole, strict=True):
            assert torch.equal(a, b[s])


@pytest.mark.parametrize(
    ("tokens", "n", "dtype", "tile", "whole"),
    [
        (64, 4, torch.bfloat16, 16, False),
        (65, 4, torch.bfloat16, 128, False),
        (64, 4, torch.float16, 128, False),
        (1536, 4, torch.bfloat16, 128, False),
        (1537, 4, torch.bfloat16, 64, True),
        (5248, 4, torch.bfloat16, 64, True),
        (5249, 4, torch.bfloat16, 128, True),
        (4096, 8, torch.bfloat16, 64, True),
        (2048, 4, torch.float32, 128, False),
        (2048, 2, torch.bfloat16, 128, False),
        (2048, 16, torch.bfloat16, 128, False),
        (4300, 16, torch.bfloat16, 128, True),
    ],
)
def test_how_a_projection_is_shared(
    tokens: int, n: int, dtype: torch.dtype, tile: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole groups of chunks where they are work for all processors, in tiles of tokens as large as that allows."""
    monkeypatch.setattr(projection, "INTERPRETED", False)  # whose chunks are small
    monkeypatch.setattr(gpus, "processors", lambda device: 132)
    x, cut = torch.empty(tokens, n, 4096, dtype=dtype, device="meta"), projection.cut_columns(n, 4096)
    got, each = projection._share(x, n * n + 2 * n, cut)
    assert (got.tokens, each) == (tile, cut.group if whole else 1)
    # Where tokens lie side by side, a tile decides in which order squares are added.
    beside = torch.empty(n, 4096, tokens, dtype=dtype, device="meta").permute(2, 0, 1)
    assert projection._share(beside, n * n + 2 * n, cut)[0].tokens == 128
    # Nobody compared the bits of the smaller tiles on others.
    monkeypatch.setattr(gpus, "of", lambda device: gpus.TABLE[80])
    assert projection._share(x, n * n + 2 * n, cut)[0].tokens == 128


@pytest.mark.parametrize("n", [2, 3])
def test_a_narrow_step_does_not_depend_on_alignment(n: int) -> None:
    """The narrow arguments themselves begin at any element."""
    rows = n * n + 2 * n
    h, ms, alpha, bias = draw(140, rows), draw(140).abs() + 0.1, draw(3), draw(rows)
    grads = draw(140, n), draw(140, n), draw(140, n, n)

    def run(s: slice) -> list[Tensor]:
        parts = [g[s] for g in grads]
        out = scale.forward(h[s], ms[s], alpha, bias, n, **NARROW)
        back = scale.backward(*parts, h[s], ms[s], alpha, bias, n, [True, True, False, False], **NARROW)
        p = sinkhorn.forward(parts[2], sinkhorn=Sinkhorn(steps=3))
        return [*out, *back[:2], p, sinkhorn.backward(p, parts[2], sinkhorn=Sinkhorn(steps=3))]

    whole = run(slice(None))
    for s in (slice(0, 1), slice(5, 69), slice(7, 140)):
        for a, b in zip(run(s), whole, strict=True):
            assert torch.equal(a, b[s])


@pytest.mark.memory
@pytest.mark.large
@pytest.mark.skipif(DEVICE == "cpu", reason="real sizes need a CUDA device")
@pytest.mark.parametrize(
    ("tokens", "n", "width", "dtype"),
    [(8192, 4, 4096, torch.bfloat16), (1000, 4, 5129, torch.float16), (256, 16, 1280, torch.float32)],
)
def test_projection_scale_sinkhorn_aggregate_of_real_sizes(tokens: int, n: int, width: int, dtype: torch.dtype) -> None:
    x, phi = draw(tokens, n, width, dtype=dtype), draw(n * n + 2 * n, n * width, scale=(n * width) ** -0.5)
    # Sums over 8,192 tokens and 20,480 columns: errors grow with their roots.
    check_aggregate(x, draw(tokens, n), noise=2e-5)
    out = projection.forward(x, phi)
    assert_all_near(out, project(x.double(), phi.double(), None), "h ms", 2e-5)
    grads = draw(*out[0].shape), draw(tokens)
    got = projection.backward(*grads, x, phi, None, [True, True, False])
    assert_all_near(got[:2], gradients(project, (x, phi, None), grads)[:2], "dx dphi", 2e-5)
    check_sinkhorn(draw(tokens, n, n), Sinkhorn(), noise=2e-5)


@pytest.mark.large
@pytest.mark.skipif(DEVICE == "cpu", reason="millions of tokens need a CUDA device")
def test_more_tiles_than_a_grid_axis_has() -> None:
    """y and z of a grid end at 65,535; a tile has at most 128 tokens."""
    tokens = 65_536 * 128 + 3
    case = mix_case(tokens, 2, 8, dtype=torch.bfloat16)
    arguments = case.phi, case.scale, case.bias
    whole = run_steps(case.x, *arguments)
    for s in (slice(0, 5), slice(tokens - 3, tokens)):
        for a, b in zip(run_steps(case.x[s], *arguments), whole, strict=True):
            assert torch.equal(a, b[s])
