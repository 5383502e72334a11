"""generate_mix_and_aggregate, generate_mix and head: values and gradients against float64, shapes, determinism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.kernels import generate_mix, generate_mix_and_aggregate, gpus, head, projection
from tests.kernels.cases import (
    DEVICE,
    FORMS,
    MARKS,
    USUAL,
    MixCase,
    assert_all_near,
    assert_near,
    draw,
    keywords,
    mix,
    mix_case,
    mix_gradients,
)

pytestmark = MARKS
ALL = [True] * 5
Form = tuple[Rms, Gates, Sinkhorn]


def expected_outputs(case: MixCase, form: Form) -> tuple[Tensor, ...]:
    return mix(*(None if p is None else p.double() for p in case.parameters), form)


def check(case: MixCase, form: Form, noise: float = 4e-6) -> None:
    """Outputs, and the gradients of all of them together."""
    out = generate_mix_and_aggregate.forward(*case.parameters, **keywords(form))
    expected = list(expected_outputs(case, form)[1:])
    assert [t.dtype for t in out] == [case.x.dtype] + [torch.float32] * 4
    assert_all_near(out, expected, "layer_input h_post h_res h ms", noise)
    needs = [True] * 4 + [case.norm_weight is not None]
    got = generate_mix_and_aggregate.backward(*case.grads, *case.parameters, *out[3:], needs, **keywords(form))
    for gradient, parameter in zip(got, (*case.parameters, None), strict=True):
        assert parameter is None or gradient.dtype == parameter.dtype
    expected = mix_gradients(case, form, case.grads)
    count = len(expected)
    assert_all_near(got[:count], expected, " ".join(["dx", "dphi", "dscale", "dbias", "dnorm"][:count]), noise)


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    check(mix_case(5, 4, 33, norm=name == "megatron"), FORMS[name])


@pytest.mark.parametrize(
    ("tokens", "n", "width", "dtype", "norm"),
    [
        (33, 1, 7, torch.float32, True),
        (33, 2, 129, torch.bfloat16, True),
        (1, 3, 40, torch.float16, False),
        (130, 4, 129, torch.bfloat16, False),
        (3, 5, 300, torch.bfloat16, True),
        (2, 8, 33, torch.float32, False),
        (5, 4, 1, torch.bfloat16, True),
    ],
)
def test_shapes(tokens: int, n: int, width: int, dtype: torch.dtype, norm: bool) -> None:
    check(mix_case(tokens, n, width, dtype=dtype, norm=norm, grouped=norm), FORMS[USUAL])


@pytest.mark.parametrize(("n", "width"), [(11, 12), (16, 7), (1, 1100)])
def test_many_streams_and_wide_ones(n: int, width: int) -> None:
    check(mix_case(1, n, width, dtype=torch.bfloat16), FORMS["log_softmax"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("phi_dtype", [torch.bfloat16, torch.float16])
def test_parameter_dtypes(dtype: torch.dtype, phi_dtype: torch.dtype) -> None:
    check(mix_case(3, 3, 20, dtype=dtype, phi_dtype=phi_dtype, small_dtype=torch.bfloat16), FORMS["megatron"])


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_fewer_parts(parts: int, grouped: bool) -> None:
    check(mix_case(5, 3, 33, parts=parts, grouped=grouped), FORMS[USUAL])


@pytest.mark.parametrize(
    ("n", "parts", "more", "dtype"),
    [
        (4, 2, 2, torch.bfloat16),
        (4, 2, 24, torch.float32),
        (3, 1, 1, torch.float32),
        (4, 3, 40, torch.bfloat16),
        (2, 2, 100, torch.float16),
    ],
)
def test_more_rows_than_gates(n: int, parts: int, more: int, dtype: torch.dtype) -> None:
    """h has them, and their gradients come back to phi and x."""
    check(mix_case(37, n, 33, parts=parts, more=more, grouped=parts == 2, norm=more == 1, dtype=dtype), FORMS[USUAL])


@pytest.mark.parametrize("name", ["transformer_engine", "log_columns", "log_softmax"])
def test_log_domain_of_large_logits(name: str) -> None:
    """Logits of +-100: the linear domain would divide 0 by 0."""
    case = mix_case(5, 4, 33)
    case.bias = case.bias.sign() * 100.0
    # A logit of 100 is rounded at 4e-6, and each of the half-steps rounds as much again.
    check(case, FORMS[name], noise=1e-4)


@pytest.mark.parametrize("given", range(5))
def test_a_single_gradient(given: int) -> None:
    case = mix_case(5, 4, 33)
    grads = [g if i == given else None for i, g in enumerate(case.grads)]
    _, _, _, h, ms = generate_mix_and_aggregate.forward(*case.parameters, **keywords(FORMS[USUAL]))
    got = generate_mix_and_aggregate.backward(
        *grads, *case.parameters, h, ms, [True] * 4 + [False], **keywords(FORMS[USUAL])
    )
    expected = mix_gradients(case, FORMS[USUAL], grads)
    assert_all_near(got[:4], expected, "dx dphi dscale dbias")


def test_only_what_is_needed() -> None:
    """One gradient alone is what it is among all; the others come back empty."""
    case = mix_case(5, 4, 33, dtype=torch.bfloat16, norm=True)
    form = keywords(FORMS[USUAL])
    _, _, _, h, ms = generate_mix_and_aggregate.forward(*case.parameters, **form)
    everything = generate_mix_and_aggregate.backward(*case.grads, *case.parameters, h, ms, ALL, **form)
    for needed in range(5):
        needs = [i == needed for i in range(5)]
        got = generate_mix_and_aggregate.backward(*case.grads, *case.parameters, h, ms, needs, **form)
        for i, (gradient, whole) in enumerate(zip(got, everything, strict=True)):
            if i == needed:
                # Rounding inside fused multiply-adds may differ between the two programs.
                assert_near(gradient, whole.double(), f"gradient {i} alone")
            else:
                assert gradient.shape == (0,), (needed, i)


def test_generate_mix() -> None:
    case = mix_case(5, 4, 33, dtype=torch.bfloat16)
    form = FORMS[USUAL]
    out = generate_mix.forward(*case.parameters, **keywords(form))
    h_pre, _, *rest = expected_outputs(case, form)
    assert_all_near(out, [h_pre, *rest], "h_pre h_post h_res h ms")
    grads = [draw(5, 4), *case.grads[1:]]
    got = generate_mix.backward(*grads, *case.parameters, *out[3:], [True] * 4 + [False], **keywords(form))
    assert_all_near(got[:4], mix_gradients(case, form, grads, of_h_pre=True), "dx dphi dscale dbias")


def test_head() -> None:
    case = mix_case(5, 4, 33, parts=1, norm=True)
    form = (Rms(), Gates(pre_eps=1e-3), Sinkhorn())
    out = head.forward(*case.parameters, rms=form[0], pre_eps=1e-3)
    expected = expected_outputs(case, form)
    assert_all_near(out, [expected[1], *expected[4:]], "out h ms")
    grads = [case.grads[0], case.grads[3], case.grads[4]]
    got = head.backward(*grads, *case.parameters, *out[1:], ALL, rms=form[0], pre_eps=1e-3)
    assert_all_near(got, mix_gradients(case, form, case.grads), "dx dphi dscale dbias dnorm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_dtype(dtype: torch.dtype) -> None:
    case = mix_case(3, 4, 33, dtype=torch.bfloat16)
    out = generate_mix_and_aggregate.forward(*case.parameters, **keywords(FORMS[USUAL]), out_dtype=dtype)
    assert out[0].dtype == dtype
    assert_near(out[0], expected_outputs(case, FORMS[USUAL])[1])


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The values of x [12, n, C] with other strides and leading dimensions."""
    if layout == "channels_first":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "sliced":
        padded = torch.full((12, x.shape[1] + 1, x.shape[2] + 3), torch.nan, dtype=x.dtype, device=DEVICE)
        padded[:, 1:, :-3] = x
        return padded[:, 1:, :-3]
    if layout == "two_leading":
        return x.unflatten(0, (3, 4))
    return x.unflatten(0, (3, 4)).transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("layout", ["channels_first", "sliced", "two_leading", "swapped_leading"])
def test_layouts(layout: str) -> None:
    case = mix_case(12, 3, 40, dtype=torch.bfloat16)
    form = keywords(FORMS[USUAL])
    plain = generate_mix_and_aggregate.forward(*case.parameters, **form)
    needs = [True] * 4 + [False]
    back = generate_mix_and_aggregate.backward(*case.grads, *case.parameters, *plain[3:], needs, **form)
    x = laid_out(case.x, layout)
    lead = x.shape[:-2]
    out = generate_mix_and_aggregate.forward(x, *case.parameters[1:], **form)
    for a, b in zip(out, plain, strict=True):
        assert a.shape == (*lead, *b.shape[1:])
        # The layout of loads may change the order of the sum of squares.
        assert_near(a, b.double().reshape(a.shape))
    grads = [g.reshape(*lead, *g.shape[1:]) for g in case.grads]
    h, ms = (t.reshape(*lead, *t.shape[1:]) for t in plain[3:])
    transposed = [grads[0], grads[1], grads[2].mT.contiguous().mT, *grads[3:]]
    got = generate_mix_and_aggregate.backward(*transposed, x, *case.parameters[1:], h, ms, needs, **form)
    for a, b in zip(got[:4], back[:4], strict=True):
        assert_near(a, b.double().reshape(a.shape))


def test_transposed_phi() -> None:
    case = mix_case(5, 4, 33, dtype=torch.bfloat16)
    case.phi = case.phi.T.contiguous().T
    check(case, FORMS[USUAL])


def test_no_tokens() -> None:
    case = mix_case(0, 4, 33, norm=True)
    form = keywords(FORMS[USUAL])
    out = generate_mix_and_aggregate.forward(*case.parameters, **form)
    assert [t.shape for t in out] == [(0, 33), (0, 4), (0, 4, 4), (0, 24), (0,)]
    got = generate_mix_and_aggregate.backward(*case.grads, *case.parameters, *out[3:], ALL, **form)
    assert got[0].shape == (0, 4, 33)
    for gradient, parameter in zip(got[1:5], case.parameters[1:], strict=True):
        assert parameter is not None
        assert torch.equal(gradient, torch.zeros_like(parameter))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_does_not_depend_on_the_batch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise: slices of a batch, other tokens replaced, and a repeated run."""
    if DEVICE == "cpu":
        # As on a GPU, whole groups of partial sums are stored of the batch, and single ones of the slices.
        monkeypatch.setattr(gpus, "processors", lambda device: 5)
    tokens = 150 if DEVICE == "cpu" else 3000
    width = 300 if DEVICE == "cpu" else 1280
    case = mix_case(tokens, 2 if DEVICE == "cpu" else 4, width, dtype=dtype)
    form = keywords(FORMS[USUAL])
    needs = [True] * 4 + [False]

    def run(s: slice, x: Tensor) -> list[Tensor]:
        out = generate_mix_and_aggregate.forward(x, *case.parameters[1:], **form)
        grads = [g[s] for g in case.grads]
        back = generate_mix_and_aggregate.backward(*grads, x, *case.parameters[1:], *out[3:], needs, **form)
        return [*out, *back[:4]]

    whole = run(slice(None), case.x)
    slices = [slice(tokens - 1, tokens), slice(5, 69)]
    if DEVICE == "cuda":
        slices += [slice(0, 1), slice(17, 150)]
        # The interpreter runs one program after the other: there, nothing could come out differently.
        for a, b in zip(run(slice(None), case.x), whole, strict=True):
            assert torch.equal(a, b)
    for s in slices:
        for a, b in zip(run(s, case.x[s])[:6], whole, strict=False):
            assert torch.equal(a, b[s])
    x = case.x.clone()
    # The interpreter's numpy warns about NaN.
    x[1::2] = 1e3 if DEVICE == "cpu" else torch.nan
    for a, b in zip(run(slice(None), x)[:6], whole, strict=False):
        assert torch.equal(a[::2], b[::2])


@pytest.mark.memory
@pytest.mark.large
@pytest.mark.skipif(DEVICE == "cpu", reason="real sizes need a CUDA device")
@pytest.mark.parametrize(
    ("tokens", "n", "width", "dtype"),
    [
        (8192, 4, 4096, torch.bfloat16),
        (1000, 4, 5129, torch.bfloat16),
        (512, 8, 2560, torch.float16),
        (256, 16, 1280, torch.float32),
    ],
)
def test_real_sizes(tokens: int, n: int, width: int, dtype: torch.dtype) -> None:
    # Sums over 8,192 tokens and 65,536 columns: errors grow with their roots.
    check(mix_case(tokens, n, width, dtype=dtype), FORMS[USUAL], noise=2e-5)


@pytest.mark.parametrize(("precision", "limit"), [("highest", 4e-7), ("high", 3.5e-4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_matmul_precision(precision: str, limit: float, dtype: torch.dtype) -> None:
    """highest: as exact as a float32 product (eager measures 6e-7 at this size).

    high: one operand rounded to tf32 is off by 2.1e-4 in the root of the mean square, two by 2.9e-4; cut, as tensor
    cores do, by 4e-4 and 8e-4. f16 is exact in tf32, and bf16 is multiplied by two parts of phi.
    """
    case = mix_case(512, 4, 4096, dtype=dtype) if DEVICE == "cuda" else mix_case(20, 2, 300, dtype=dtype)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        h = generate_mix_and_aggregate.forward(*case.parameters, **keywords(FORMS[USUAL]))[3]
    finally:
        torch.set_float32_matmul_precision(before)
    expected = case.x.double().flatten(-2) @ case.phi.double().T
    error = ((h - expected).norm() / expected.norm()).item()
    assert error < limit
    if precision == "high" and dtype != torch.bfloat16:
        # As the user allowed: three products in place of one would be below this.
        assert error > 1e-5


@pytest.mark.memory
@pytest.mark.large
@pytest.mark.skipif(DEVICE == "cpu", reason="more than 2^31 elements need a CUDA device")
def test_more_elements_than_int32_counts() -> None:
    tokens, n, width = 140_000, 4, 4096
    x = torch.zeros(tokens, n, width, dtype=torch.bfloat16, device=DEVICE)
    x[-3:] = draw(3, n, width, dtype=torch.bfloat16)
    small = mix_case(3, n, width, dtype=torch.bfloat16)
    small.x = x[-3:]
    form = keywords(FORMS[USUAL])
    out = generate_mix_and_aggregate.forward(x, *small.parameters[1:], **form)
    for a, b in zip(out, generate_mix_and_aggregate.forward(*small.parameters, **form), strict=True):
        assert torch.equal(a[-3:], b)
    grads = [torch.zeros_like(t) for t in out[:3]]
    for gradient, last in zip(grads, small.grads, strict=False):
        gradient[-3:] = last
    needs = [True] * 4 + [False]
    h, ms = (t[-3:].contiguous() for t in out[3:])
    got = generate_mix_and_aggregate.backward(*grads, None, None, x, *small.parameters[1:], *out[3:], needs, **form)
    expected = generate_mix_and_aggregate.backward(
        *small.grads[:3], None, None, *small.parameters, h, ms, needs, **form
    )
    assert torch.equal(got[0][-3:], expected[0])
    for a, b in zip(got[1:4], expected[1:4], strict=True):
        assert_near(a, b.double())


@pytest.mark.large
@pytest.mark.skipif(DEVICE == "cpu", reason="millions of tokens need a CUDA device")
def test_more_tiles_than_a_grid_axis_has() -> None:
    """y and z of a grid end at 65,535; a tile has at most 128 tokens."""
    tokens = 65_536 * 128 + 3
    case = mix_case(tokens, 2, 8, dtype=torch.bfloat16)
    form = keywords(FORMS[USUAL])
    needs = [True] + [False] * 4

    def run(s: slice) -> list[Tensor]:
        out = generate_mix_and_aggregate.forward(case.x[s], *case.parameters[1:], **form)
        grads = [g[s] for g in case.grads]
        back = generate_mix_and_aggregate.backward(*grads, case.x[s], *case.parameters[1:], *out[3:], needs, **form)
        return [*out, back[0]]

    whole = run(slice(None))
    for s in (slice(0, 5), slice(tokens - 3, tokens)):
        for a, b in zip(run(s), whole, strict=True):
            assert torch.equal(a, b[s])


@pytest.mark.parametrize(
    ("tokens", "n", "dtype", "arch", "tile"),
    [
        (1, 4, torch.bfloat16, 90, 16),
        (64, 4, torch.float32, 90, 16),
        (65, 4, torch.bfloat16, 90, 128),  # more programs than processors
        (1, 4, torch.float16, 90, 128),  # whose bits would be others
        (1, 2, torch.bfloat16, 90, 128),
        (1, 8, torch.bfloat16, 90, 128),
        (1, 4, torch.bfloat16, 100, 128),
    ],
)
def test_tiles_of_the_projection(
    tokens: int, n: int, dtype: torch.dtype, arch: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[int, int]] = []

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        launched.append((grid[0], options["BLOCK_M"]))

    monkeypatch.setattr(projection, "launch", launch)
    monkeypatch.setattr(gpus, "of", lambda device: gpus.TABLE[arch])
    monkeypatch.setattr(gpus, "processors", lambda device: 132)
    # As where kernels are compiled; the interpreter has smaller chunks.
    monkeypatch.setattr(projection, "INTERPRETED", False)
    x, phi = torch.empty(tokens, n, 4096, dtype=dtype), torch.empty(n * n + 2 * n, n * 4096)
    partials = projection.project(x, phi, None)
    assert launched == [(-(-tokens // tile) * partials.stored, tile)]
