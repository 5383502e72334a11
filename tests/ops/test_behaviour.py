"""Operators as citizens of torch: laziness, layouts, dtypes, autocast, checkpointing, transforms."""

from __future__ import annotations

import subprocess
import sys
import warnings
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mhc_compile.ops as ops
from mhc_compile.forms import Gates, Rms, Sinkhorn
from tests.ops.eager import combine_arguments, gradients, mix_arguments
from tests.ops.test_transforms import CALLS

MIX = torch.ops.mhc.generate_mix_and_aggregate


def test_defaults_of_schemas_and_wrappers_are_those_of_the_forms() -> None:
    import inspect

    expected = Rms().as_kwargs() | Gates().as_kwargs() | Sinkhorn().as_kwargs()
    for name in ops.__all__:
        schema = {a.name: a.default_value for a in getattr(torch.ops.mhc, name).default._schema.arguments}
        wrapper = inspect.signature(getattr(ops, name)).parameters
        assert list(wrapper) == list(schema)
        for argument, parameter in wrapper.items():
            if parameter.default is not inspect.Parameter.empty:
                assert parameter.default == schema[argument]
            key = f"sinkhorn_{argument}" if name == "sinkhorn" else argument
            if key in expected:
                assert schema[argument] == expected[key]


def test_importing_the_operators_imports_no_triton() -> None:
    code = "import mhc_compile.ops, sys; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("needs", list(product([False, True], repeat=5)))
def test_only_needed_gradients_are_computed(needs: tuple[bool, ...]) -> None:
    inputs = [*mix_arguments(2, 3), torch.rand(6, dtype=torch.float64)]
    *_, h, ms = MIX(*inputs)
    upstream = [torch.rand(2, 3, 3), torch.rand(2, 3, 2), torch.rand(2, 3, 2, 2), None, None]
    backward = torch.ops.mhc.generate_mix_and_aggregate_backward
    whole = backward(*upstream, *inputs, h, ms, [True] * 5)
    some = backward(*upstream, *inputs, h, ms, list(needs))
    # The last is the gradient of an input norm's weight, of which there is none.
    for need, result, full in zip([*needs, False], some, whole, strict=True):
        assert torch.equal(result, full) if need else result.shape == (0,)


@pytest.mark.parametrize("needs", list(product([False, True], repeat=5)))
def test_expand_combine_computes_only_needed_gradients(needs: tuple[bool, ...]) -> None:
    inputs = combine_arguments(2, 3)
    backward = torch.ops.mhc.expand_combine_backward
    d_x_new = torch.rand(2, 3, 2, 3, dtype=torch.float64)
    whole = backward(d_x_new, *inputs, [True] * 5)
    for need, result, full in zip(needs, backward(d_x_new, *inputs, list(needs)), whole, strict=True):
        assert torch.equal(result, full) if need else result.shape == (0,)


def test_missing_gradients_are_zero() -> None:
    inputs = mix_arguments(2, 3)
    shapes = [(2, 3, 3), (2, 3, 2), (2, 3, 2, 2), (2, 3, 8), (2, 3)]
    outputs = MIX(*inputs)
    backward = torch.ops.mhc.generate_mix_and_aggregate_backward
    zeros = [torch.zeros(*shape, dtype=torch.float64) for shape in shapes]
    for present in range(5):
        value = torch.rand(*shapes[present], dtype=torch.float64)
        given = [value if index == present else None for index in range(5)]
        filled = [value if index == present else zeros[index] for index in range(5)]
        saved = (*inputs, None, *outputs[-2:], [True, True, True, True, False])
        for mine, full in zip(backward(*given, *saved), backward(*filled, *saved), strict=True):
            # Adding zeros changes no bit.
            assert torch.equal(mine, full)


def test_frozen_parameters_get_no_gradient() -> None:
    x, phi, scale, bias = mix_arguments(2, 3)
    phi.requires_grad_()
    ops.generate_mix_and_aggregate(x, phi, scale, bias)[0].sum().backward()
    assert phi.grad is not None
    assert x.grad is None


def _noncontiguous(value: Tensor) -> list[Tensor]:
    """The same values as every second column, and with the last or the outer two dimensions exchanged."""
    wide = value.new_full((*value.shape[:-1], 2 * value.shape[-1]), float("nan"))
    wide[..., ::2] = value
    layouts = [wide[..., ::2]]
    if value.dim() >= 2:
        layouts.append(value.mT.contiguous().mT)
        layouts.append(value.transpose(0, -2).contiguous().transpose(0, -2))
    return layouts


def test_layouts_change_no_result() -> None:
    inputs = mix_arguments(4, 6)
    upstream = [torch.rand(2, 3, 6), torch.rand(2, 3, 4), torch.rand(2, 3, 4, 4)]
    expected = gradients(ops.generate_mix_and_aggregate, inputs, upstream)
    for index, value in enumerate(inputs):
        for strided in _noncontiguous(value):
            arguments = [*inputs[:index], strided, *inputs[index + 1 :]]
            leaves = [argument.detach().requires_grad_() for argument in arguments]
            outputs = ops.generate_mix_and_aggregate(*leaves)
            total = sum((o * u).sum() for o, u in zip(outputs, upstream, strict=True))
            assert isinstance(total, Tensor)
            for mine, true in zip([*outputs, *torch.autograd.grad(total, leaves)], expected, strict=True):
                # BLAS may order its sums by layout; they are float64.
                torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-12)


def test_expand_combine_layouts_change_no_result() -> None:
    inputs = combine_arguments(4, 6)
    expected = ops.expand_combine(*inputs)
    for index, value in enumerate(inputs):
        for strided in _noncontiguous(value):
            result = ops.expand_combine(*inputs[:index], strided, *inputs[index + 1 :])
            # As above.
            torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("parameter_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_of_outputs_and_gradients(dtype: torch.dtype, parameter_dtype: torch.dtype) -> None:
    x, *parameters = mix_arguments(2, 3)
    inputs = [x.to(dtype), *(value.to(parameter_dtype) for value in parameters)]
    inputs.append(torch.rand(6).to(parameter_dtype))
    leaves = [value.requires_grad_() for value in inputs]
    outputs = MIX(*leaves)
    assert [output.dtype for output in outputs] == [dtype] + [torch.float32] * 4
    total = sum(output.float().sum() for output in outputs)
    assert isinstance(total, Tensor)
    total.backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype
        assert leaf.grad.shape == leaf.shape
    assert MIX(*leaves, out_dtype=torch.float32)[0].dtype == torch.float32


def test_results_never_alias_arguments() -> None:
    f, _, h_post, x, h_res = combine_arguments(1, 4, (1,), dtype=torch.float32)
    logits = torch.zeros(1, 1, 1)
    results: list[tuple[Any, tuple[Tensor, ...]]] = [
        (ops.expand(f, 1), (f,)),
        (ops.contract(x), (x,)),
        (ops.aggregate(x, h_post), (x, h_post)),
        (ops.mix_streams(x, h_res), (x, h_res)),
        (ops.sinkhorn(logits, start="exp", steps=0, eps=0.0, start_eps=0.0), (logits,)),
        (ops.expand_combine(f, None, h_post, x, None), (f, h_post, x)),
        (
            torch.ops.mhc.expand_combine_backward(x, f, None, h_post, x, h_res, [True, False, True, True, True]),
            (x, f),
        ),
        (
            torch.ops.mhc.expand_combine_backward(x, f, None, h_post, x, None, [True, False, True, True, False]),
            (x, f),
        ),
        (torch.ops.mhc.expand_backward(x), (x,)),
        (torch.ops.mhc.contract_backward(f, 1), (f,)),
    ]
    for result, arguments in results:
        for tensor in result if isinstance(result, tuple | list) else (result,):
            pointers = {argument.untyped_storage().data_ptr() for argument in arguments}
            assert tensor.numel() == 0 or tensor.untyped_storage().data_ptr() not in pointers


# A boundary returns the streams that its own gates are made of: eager code does not let anyone change these either.
@pytest.mark.parametrize("name", [name for name in CALLS if name != "shifted_boundary"])
def test_results_may_be_changed_in_place(name: str) -> None:
    """As eager code's may: a view that comes out of an operator may not."""
    function, arguments = CALLS[name]
    results = []
    for change in (lambda t: t.mul_(2.0), lambda t: t * 2.0):
        leaves = [value.clone().requires_grad_() for value in arguments]
        outputs = function(*leaves)
        changed = [change(t) for t in (outputs if isinstance(outputs, tuple) else (outputs,))]
        results.append([*changed, *torch.autograd.grad([t.square().sum() for t in changed], leaves)])
    for mine, true in zip(*results, strict=True):
        assert torch.equal(mine, true)


def test_no_tokens() -> None:
    x, phi, scale, bias = (value.requires_grad_() for value in mix_arguments(4, 6, (0, 3)))
    layer_input, h_post, h_res = ops.generate_mix_and_aggregate(x, phi, scale, bias)
    out = ops.expand_combine(layer_input, None, h_post, x, h_res)
    assert (layer_input.shape, h_post.shape, h_res.shape) == ((0, 3, 6), (0, 3, 4), (0, 3, 4, 4))
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 3, 4, 6)
    for parameter in (phi, scale, bias):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def test_autocast_leaves_the_internals_in_float32() -> None:
    inputs = mix_arguments(4, 32, dtype=torch.float32)
    combine = combine_arguments(4, 32, dtype=torch.float32)
    expected = [*MIX(*inputs), ops.expand_combine(*combine)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [*MIX(*inputs), ops.expand_combine(*combine)]
    for mine, true in zip(results, expected, strict=True):
        assert torch.equal(mine, true)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_small_sums_are_exact_at_every_matmul_precision(precision: str) -> None:
    """Only the projection may be less than float32, and only where the user allows it."""
    inputs = combine_arguments(4, 64, (8,), dtype=torch.float32)
    (upstream,) = [torch.randn(8, 4, 64)]
    truth = gradients(ops.expand_combine, [value.double() for value in inputs], [upstream.double()])
    torch.set_float32_matmul_precision(precision)
    try:
        results = gradients(ops.expand_combine, inputs, [upstream])
    finally:
        torch.set_float32_matmul_precision("highest")
    for mine, true in zip(results, truth, strict=True):
        # Sums of at most 64 float32 products of order 1.
        torch.testing.assert_close(mine.double(), true, rtol=1e-5, atol=1e-5)


def test_checkpoint_and_saved_tensor_hooks() -> None:
    inputs = mix_arguments(2, 3)
    upstream = [torch.rand(2, 3, 3), torch.rand(2, 3, 2), torch.rand(2, 3, 2, 2)]
    expected = gradients(ops.generate_mix_and_aggregate, inputs, upstream)
    recomputed = gradients(
        lambda *a: checkpoint(ops.generate_mix_and_aggregate, *a, use_reentrant=False), inputs, upstream
    )
    with torch.autograd.graph.save_on_cpu():
        offloaded = gradients(ops.generate_mix_and_aggregate, inputs, upstream)
    for results in (recomputed, offloaded):
        assert all(torch.equal(mine, true) for mine, true in zip(results, expected, strict=True))


def test_vmap_over_a_token_dimension_equals_the_batched_call() -> None:
    x, phi, scale, bias = mix_arguments(2, 3, (4, 5))
    f, layer_bias, h_post, _, h_res = combine_arguments(2, 3, (4, 5))
    with warnings.catch_warnings():
        # A batching rule would be faster than torch's loop over the batch, which this warning tells.
        warnings.filterwarnings("ignore", message="There is a performance drop")
        mixed = torch.vmap(lambda x: ops.generate_mix_and_aggregate(x, phi, scale, bias), in_dims=1, out_dims=1)(x)
        combined = torch.vmap(lambda *a: ops.expand_combine(a[0], layer_bias, *a[1:]))(f, h_post, x, h_res)
    expected = (
        *ops.generate_mix_and_aggregate(x, phi, scale, bias),
        ops.expand_combine(f, layer_bias, h_post, x, h_res),
    )
    for mine, true in zip((*mixed, combined), expected, strict=True):
        # BLAS may order its sums by the number of rows; they are float64.
        torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-12)


def test_a_whole_sublayer_compiles_with_dynamic_tokens(fresh_dynamo: None) -> None:
    _, phi, scale, bias = mix_arguments(4, 6)

    def sublayer(x: Tensor) -> Tensor:
        layer_input, h_post, h_res = ops.generate_mix_and_aggregate(x, phi, scale, bias)
        return ops.expand_combine(layer_input.sin(), None, h_post, x, h_res)

    compiled = torch.compile(sublayer, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (5, 7):
        x = torch.rand(tokens, 4, 6, dtype=torch.float64)
        upstream = [torch.rand(tokens, 4, 6, dtype=torch.float64)]
        for mine, true in zip(gradients(compiled, [x], upstream), gradients(sublayer, [x], upstream), strict=True):
            assert torch.equal(mine, true)
