"""Values and gradients of every form against straightforward compositions, in float64 and below."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mhc_compile.ops as ops
from mhc_compile.forms import SINKHORN_STARTS, Rms, Sinkhorn
from tests.ops.calls import BACKWARD, Sizes, arguments, call, result_names, results, tensor_names
from tests.ops.eager import FORMS, combine, combine_arguments, deepseek, gradients, mix_arguments

# Both sides compute the same function in float64 with some hundred roundings in different order.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def _upstream(*shapes: tuple[int, ...], seed: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _error(results: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [((result.double() - true).norm() / true.norm()).item() for result, true in zip(results, truth, strict=True)]


@pytest.mark.parametrize("n", [1, 2, 4, 5])
@pytest.mark.parametrize("name", FORMS)
def test_form_equals_its_eager_composition(name: str, n: int) -> None:
    form = FORMS[name]
    inputs = mix_arguments(n, 6, per_row=form.scale_per_row)
    upstream = _upstream((2, 3, 6), (2, 3, n), (2, 3, n, n))
    truth = gradients(form.eager, inputs, upstream)
    results = gradients(lambda *a: ops.generate_mix_and_aggregate(*a, **form.scalars), inputs, upstream)
    for result, true in zip(results, truth, strict=True):
        torch.testing.assert_close(result, true, **CLOSE)


@pytest.mark.parametrize("name", FORMS)
def test_composite_equals_its_elementary_operators(name: str) -> None:
    n, scalars = 4, FORMS[name].scalars
    narrow = {key: value for key, value in scalars.items() if not key.startswith("sinkhorn_")}
    steps = {key.removeprefix("sinkhorn_"): value for key, value in scalars.items() if key.startswith("sinkhorn_")}
    inputs = mix_arguments(n, 6)
    upstream = _upstream((2, 3, 6), (2, 3, n), (2, 3, n, n))

    def elementary(x: Tensor, phi: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        h, ms = ops.projection(x, phi)
        h_pre, h_post, logits = ops.scale(h, ms, scale, bias, n, **narrow)
        return ops.aggregate(x, h_pre), h_post, ops.sinkhorn(logits, **steps)

    def mixed(*arguments: Tensor) -> tuple[Tensor, ...]:
        h_pre, h_post, h_res = ops.generate_mix(*arguments, **scalars)
        return ops.aggregate(arguments[0], h_pre), h_post, h_res

    whole = gradients(lambda *a: ops.generate_mix_and_aggregate(*a, **scalars), inputs, upstream)
    for parts in (elementary, mixed):
        for result, true in zip(gradients(parts, inputs, upstream), whole, strict=True):
            torch.testing.assert_close(result, true, **CLOSE)


@pytest.mark.parametrize("parts", [1, 2])
def test_switched_off_parts_leave_the_others_as_they_are(parts: int) -> None:
    n = 4
    x, phi, scale, bias = mix_arguments(n, 6)
    k = parts * n
    layer_input, h_post, h_res = ops.generate_mix_and_aggregate(x, phi[:k], scale[:parts], bias[:k])
    whole = ops.generate_mix_and_aggregate(x, phi, scale, bias)
    torch.testing.assert_close(layer_input, whole[0], **CLOSE)
    assert h_res.shape == (2, 3, 0, 0)
    if parts == 1:
        assert h_post.shape == (2, 3, 0)
        torch.testing.assert_close(ops.head(x, phi[:k], scale[:1], bias[:k]), whole[0], **CLOSE)
    else:
        torch.testing.assert_close(h_post, whole[1], **CLOSE)


def test_norm_weight_multiplies_the_normalised_streams() -> None:
    inputs = [*mix_arguments(3, 5), *_upstream((15,), seed=3)]
    upstream = _upstream((2, 3, 5), (2, 3, 3), (2, 3, 3, 3))
    truth = gradients(lambda x, phi, s, b, w: deepseek(x, phi * w, s, b), inputs, upstream)
    results = gradients(lambda *a: ops.generate_mix_and_aggregate(*a, pre_eps=1e-6), inputs, upstream)
    for result, true in zip(results, truth, strict=True):
        torch.testing.assert_close(result, true, **CLOSE)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("with_res", [True, False])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_expand_combine_equals_its_eager_composition(n: int, with_res: bool, with_bias: bool) -> None:
    f, layer_bias, h_post, x, h_res = combine_arguments(n, 6)
    inputs = [f, h_post, x] + [layer_bias] * with_bias + [h_res] * with_res

    def call(function):  # type: ignore[no-untyped-def]
        def with_optional(f: Tensor, h_post: Tensor, x: Tensor, *rest: Tensor) -> Tensor:
            bias = rest[0] if with_bias else None
            result: Tensor = function(f, bias, h_post, x, rest[-1] if with_res else None)
            return result

        return gradients(with_optional, inputs, _upstream((2, 3, n, 6)))

    for result, true in zip(call(ops.expand_combine), call(combine), strict=True):
        torch.testing.assert_close(result, true, **CLOSE)


@pytest.mark.parametrize("n", [1, 2, 4, 5])
@pytest.mark.parametrize("name", FORMS)
def test_boundary_equals_its_eager_composition(name: str, n: int) -> None:
    form = FORMS[name]
    f, layer_bias, h_post, x, h_res = combine_arguments(n, 6)
    inputs = [f, layer_bias, h_post, x, h_res, *mix_arguments(n, 6, per_row=form.scale_per_row)[1:]]
    upstream = _upstream((2, 3, n, 6), (2, 3, 6), (2, 3, n), (2, 3, n, n))

    def composition(*values: Tensor) -> tuple[Tensor, ...]:
        x_new = combine(*values[:5])
        return (x_new, *form.eager(x_new, *values[5:]))

    results = gradients(lambda *values: ops.boundary(*values, **form.scalars), inputs, upstream)
    for result, true in zip(results, gradients(composition, inputs, upstream), strict=True):
        torch.testing.assert_close(result, true, **CLOSE)


@pytest.mark.parametrize("n", [1, 2, 4, 5])
@pytest.mark.parametrize("name", FORMS)
def test_shifted_boundary_equals_its_eager_composition(name: str, n: int) -> None:
    form = FORMS[name]
    _, *parameters = mix_arguments(n, 6, per_row=form.scale_per_row)
    inputs = [*combine_arguments(n, 6), *_upstream((2, 3, n)), *parameters]
    upstream = _upstream((2, 3, n, 6), (2, 3, 6), (2, 3, 6), (2, 3, n), (2, 3, n, n))

    def read(x: Tensor, h_pre: Tensor) -> Tensor:
        return (h_pre.unsqueeze(-1) * x).sum(-2)

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        """The new h_pre by what it reads of x', as in the eager code."""
        x_new, layer_input, next_pre, *gates = ops.shifted_boundary(*values, **form.scalars)
        return (x_new, layer_input, read(x_new, next_pre), *gates)

    def composition(*values: Tensor) -> tuple[Tensor, ...]:
        x_new = combine(*values[:5])
        return (x_new, read(x_new, values[5]), *form.eager(x_new, *values[6:]))

    results = gradients(call, inputs, upstream)
    for result, true in zip(results, gradients(composition, inputs, upstream), strict=True):
        torch.testing.assert_close(result, true, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shifted_boundary_equals_its_three_operators_bitwise(dtype: torch.dtype) -> None:
    """x' is rounded to its dtype before it is read and mixed: what follows reads what is stored."""
    combined = combine_arguments(4, 6, dtype=dtype)
    h_pre, *parameters = (value.float() for value in (*_upstream((2, 3, 4)), *mix_arguments(4, 6)[1:]))
    for streams_dtype in (None, torch.float32):
        x_new, layer_input, *gates = ops.shifted_boundary(
            *combined, h_pre, *parameters, streams_dtype=streams_dtype, out_dtype=torch.float32
        )
        expected = ops.expand_combine(*combined, out_dtype=streams_dtype)
        assert torch.equal(x_new, expected)
        assert torch.equal(layer_input, ops.aggregate(expected, h_pre, out_dtype=torch.float32))
        assert all(map(torch.equal, gates, ops.generate_mix(expected, *parameters)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_write_with_its_reads_equals_its_operators_bitwise(dtype: torch.dtype) -> None:
    combined = combine_arguments(4, 6, dtype=dtype)
    h_pre, phi = (value.float() for value in (*_upstream((2, 3, 4)), mix_arguments(4, 6)[1]))
    for streams_dtype in (None, torch.float32):
        expected = ops.expand_combine(*combined, out_dtype=streams_dtype)
        layer_input, projected = ops.aggregate(expected, h_pre), ops.projection(expected, phi)
        for gates, weight in ((h_pre, phi), (h_pre, None), (None, phi)):
            x_new, read, *others = ops.expand_combine_and_read(*combined, gates, weight, streams_dtype=streams_dtype)
            assert torch.equal(x_new, expected)
            assert torch.equal(read, layer_input if gates is not None else layer_input[..., :0])
            assert [value.numel() for value in others] == ([0, 0] if weight is None else [p.numel() for p in projected])
            assert weight is None or all(map(torch.equal, others, projected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_boundary_equals_its_two_operators_bitwise(dtype: torch.dtype) -> None:
    """x' is rounded to its dtype before it is mixed: what follows reads what is stored."""
    f, layer_bias, h_post, x, h_res = combine_arguments(4, 6, dtype=dtype)
    parameters = [value.float() for value in mix_arguments(4, 6)[1:]]
    for out_dtype in (None, torch.float32):
        x_new, *rest = ops.boundary(
            f, layer_bias, h_post, x, h_res, *parameters, streams_dtype=out_dtype, out_dtype=torch.float32
        )
        expected = ops.expand_combine(f, layer_bias, h_post, x, h_res, out_dtype=out_dtype)
        assert torch.equal(x_new, expected)
        mixed = ops.generate_mix_and_aggregate(expected, *parameters, out_dtype=torch.float32)
        assert all(torch.equal(a, b) for a, b in zip(rest, mixed, strict=True))


@pytest.mark.parametrize(
    "name", [name for name in BACKWARD if "d_x" in tensor_names(name) and "x" in tensor_names(name)]
)
def test_backward_operators_add_to_a_gradient_that_is_there(name: str) -> None:
    """d_x comes on top in float64, whatever its layout, and leaves every other result as it is."""
    given = arguments(name, Sizes(4, 6, (2, 3)))
    d_x = given["d_x"]
    alone = results(call(name, given | {"d_x": None}))
    for laid_out in (d_x, d_x.mT.contiguous().mT):
        before = laid_out.clone()
        together = results(call(name, given | {"d_x": laid_out}))
        for result, a, b in zip(result_names(name), alone, together, strict=True):
            # One addition more, in float64.
            torch.testing.assert_close(b, a + d_x if result == "d_x" else a, rtol=1e-14, atol=1e-14, msg=result)
        assert torch.equal(laid_out, before)


def test_expand_and_contract() -> None:
    (f,) = _upstream((2, 3, 5))
    x, df = gradients(lambda f: ops.expand(f, 4), [f], _upstream((2, 3, 4, 5)))
    torch.testing.assert_close(x, f.unsqueeze(-2).expand(2, 3, 4, 5), rtol=0, atol=0)
    torch.testing.assert_close(df, _upstream((2, 3, 4, 5))[0].sum(-2), **CLOSE)
    mean, dx = gradients(ops.contract, [x + _upstream((2, 3, 4, 5))[0]], _upstream((2, 3, 5)))
    torch.testing.assert_close(mean, (x + _upstream((2, 3, 4, 5))[0]).mean(-2), **CLOSE)
    torch.testing.assert_close(dx, (_upstream((2, 3, 5))[0] / 4).unsqueeze(-2).expand(2, 3, 4, 5), **CLOSE)


@pytest.mark.parametrize("size", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("start", ["softmax", "exp"])
@pytest.mark.parametrize("first", ["rows", "columns"])
def test_log_domain_holds_for_large_logits(first: str, start: str, size: float) -> None:
    logits, upstream = _upstream((50, 4, 4), (50, 4, 4))
    logits, upstream = (logits * size).float(), upstream.float()
    form = {"steps": 41, "start": start, "first": first, "eps": 0.0, "start_eps": 0.0}
    low, d_low = gradients(lambda value: ops.sinkhorn(value, **form), [logits], [upstream])
    high, d_high = gradients(lambda value: ops.sinkhorn(value, **form), [logits.double()], [upstream.double()])
    # log P is rounded to a few ulp of the differences of logits that matter for P: those below 20 or so.
    torch.testing.assert_close(low.double(), high, rtol=0, atol=20 * 4 * torch.finfo(torch.float32).eps)
    torch.testing.assert_close(d_low.double(), d_high, rtol=0, atol=20 * 8 * torch.finfo(torch.float32).eps)
    # 41 half-steps end on the axis that they began with, whose sums of 4 entries are 1 up to rounding.
    assert (low.sum(-1 if first == "rows" else -2) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", FORMS)
def test_errors_are_no_larger_than_the_eager_ones(name: str, dtype: torch.dtype) -> None:
    form, n, width, tokens = FORMS[name], 4, 96, (16, 8)
    inputs = mix_arguments(n, width, tokens, per_row=form.scale_per_row, dtype=dtype)
    inputs[1:] = [value.float() for value in mix_arguments(n, width, tokens, per_row=form.scale_per_row)[1:]]
    upstream = [value.to(dtype) for value in _upstream((*tokens, width), (*tokens, n), (*tokens, n, n))]
    truth = gradients(form.eager, [value.double() for value in inputs], [value.double() for value in upstream])
    eager = _error(gradients(form.eager, inputs, upstream), truth)
    fused = _error(gradients(lambda *a: ops.generate_mix_and_aggregate(*a, **form.scalars), inputs, upstream), truth)
    for mine, theirs in zip(fused, eager, strict=True):
        # Where both are exact to float32, or both errors are that of rounding the result itself to dtype,
        # they differ by chance: a tenth, and a few float32 units.
        assert mine <= 1.1 * theirs + 4e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_combine_errors_are_no_larger_than_the_eager_ones(dtype: torch.dtype) -> None:
    inputs = combine_arguments(4, 96, (16, 8), dtype=dtype)
    upstream = [value.to(dtype) for value in _upstream((16, 8, 4, 96))]
    truth = gradients(combine, [value.double() for value in inputs], [value.double() for value in upstream])
    eager = _error(gradients(combine, inputs, upstream), truth)
    fused = _error(gradients(ops.expand_combine, inputs, upstream), truth)
    for mine, theirs in zip(fused, eager, strict=True):
        # As above: chance where both errors are that of the last rounding.
        assert mine <= 1.1 * theirs + 4e-7


_SINKHORNS = [
    {"start": start, "first": first, "steps": steps, "eps": eps, "start_eps": start_eps, "clamp": clamp}
    for start in ("plain_exp", "global_exp")
    for first in ("rows", "columns")
    for steps in (1, 2, 7)
    for eps, start_eps, clamp in ((1e-6, 0.0, False), (1e-6, 1e-6, False), (0.5, 0.0, True), (0.0, 1e-3, False))
]


@pytest.mark.parametrize("form", _SINKHORNS, ids=lambda form: "-".join(map(str, form.values())))
def test_starts_whose_shift_does_not_cancel(form: dict[str, Any]) -> None:
    """Far below 0, where eps is all there is, and far above, where eager float32 overflows and float64 does not."""
    logits, upstream = _upstream((60, 4, 4), (60, 4, 4))
    logits[10:] *= torch.linspace(1, 30, 50, dtype=torch.float64)[:, None, None]
    logits[:10] += torch.linspace(-150, 100, 10, dtype=torch.float64)[:, None, None]

    def eager(value: Tensor) -> Tensor:
        return Sinkhorn(**form).equation(value)

    truth = gradients(eager, [logits.float().double()], [upstream])
    for dtype, bound in ((torch.float64, 1e-9), (torch.float32, 2e-5)):
        results = gradients(lambda value: ops.sinkhorn(value, **form), [logits.float().to(dtype)], [upstream.to(dtype)])
        assert all(value.isfinite().all() for value in results)
        # float32 rounds the logits' differences and exp of them, some 30 times over.
        assert max(_error(results, truth)) < bound


@pytest.mark.parametrize("start", ["plain_exp", "global_exp"])
def test_columns_that_sink_beside_a_small_eps(start: str) -> None:
    """Divided by it they are next to nothing, until half-steps have brought them back."""
    logits, _ = _upstream((500, 4, 4), (1,))
    logits = (60.0 * logits).float()
    logits -= logits.amax((-2, -1), keepdim=True)
    form: dict[str, Any] = {"start": start, "first": "columns", "steps": 6, "eps": 1e-8, "start_eps": 0.0}
    truth = Sinkhorn(**form).equation(logits.double())
    # A difference of a hundred is rounded at 8e-6.
    assert (ops.sinkhorn(logits, **form) - truth).norm() / truth.norm() < 1e-5
    # Eager's exp has no more than a few bits there, or none.
    assert (Sinkhorn(**form).equation(logits) - truth).norm() / truth.norm() > 1e-3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Sinkhorn(start="sigmod"),
            f"start is 'sigmod'; expected one of {', '.join(map(repr, SINKHORN_STARTS))}",
        ),
        (lambda: Sinkhorn(first="cols"), "first is 'cols'; expected one of 'rows', 'columns'"),
        (lambda: Rms(mode="before"), "mode is 'before'; expected one of 'inside', 'outside', 'clamp', 'none'"),
    ],
)
def test_a_form_that_there_is_not(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


def test_the_start_inside_kernels_is_none_of_an_operator() -> None:
    assert Sinkhorn(eps=0.0, start_eps=0.0).iterated.start == "normalised"
    with pytest.raises(ValueError, match="mhc::sinkhorn: start is 'normalised'; expected one of"):
        ops.sinkhorn(torch.ones(2, 2), start="normalised")
