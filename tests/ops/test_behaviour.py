"""Operators as citizens of torch: laziness, layouts, dtypes, autocast, checkpointing, transforms."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mhc_compile.ops as ops
from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.ops._register import REFERENCES
from tests.ops.calls import (
    BACKWARD,
    FORWARD,
    OPERATORS,
    RARE,
    SCALARS_BESIDE,
    Sizes,
    arguments,
    call,
    is_optional,
    result_names,
    results,
    schema,
    tensor_names,
)
from tests.ops.eager import combine_arguments, gradients, mix_arguments

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


@pytest.mark.parametrize("name", FORWARD)
def test_an_output_has_a_gradient_where_eager_code_has_one(name: str) -> None:
    """Each tensor alone: what depends on none that has a gradient may be returned, and written, as in eager code."""
    positional = [argument.name for argument in schema(name).arguments if not argument.kwarg_only]
    for wanted in tensor_names(name):
        given = arguments(name, Sizes())
        given = {key: value.detach() if isinstance(value, Tensor) else value for key, value in given.items()}
        given[wanted].requires_grad_()
        beside = {key: value for tensor in given for key, value in SCALARS_BESIDE.get(tensor, {}).items()}
        eager = REFERENCES[name](*(given.get(argument) for argument in positional), **beside)
        tracked = [result.requires_grad for result in results(call(name, given))]
        assert tracked == [result.requires_grad for result in results(eager)], wanted


@pytest.mark.parametrize("name", [name for name in BACKWARD if "needs" in [a.name for a in schema(name).arguments]])
def test_only_needed_gradients_are_computed(name: str) -> None:
    """Each combination, or of many arguments each alone and all but each."""
    given = arguments(name, Sizes(), without=("d_x",))
    whole, count = results(call(name, given)), len(given["needs"])
    alone = [tuple(index == one for index in range(count)) for one in range(count)]
    some = product([False, True], repeat=count) if count < 7 else [*alone, *([not n for n in one] for one in alone)]
    for needs in some:
        for need, result, full in zip(needs, results(call(name, given | {"needs": [*needs]})), whole, strict=True):
            assert torch.equal(result, full) if need else result.shape == (0,)


@pytest.mark.parametrize("name", BACKWARD)
def test_missing_gradients_are_zero(name: str) -> None:
    given = arguments(name, Sizes(), without=("d_x",))
    optional = [n for n in given if n.startswith("d_") and is_optional(name, n) and given[n] is not None]
    for present in optional:
        others = [each for each in optional if each != present]
        mine = results(call(name, given | dict.fromkeys(others)))
        full = results(call(name, given | {each: torch.zeros_like(given[each]) for each in others}))
        # Adding zeros changes no bit.
        assert all(map(torch.equal, mine, full))


def test_frozen_parameters_get_no_gradient() -> None:
    x, phi, scale, bias = mix_arguments(2, 3)
    phi.requires_grad_()
    ops.generate_mix_and_aggregate(x, phi, scale, bias)[0].sum().backward()
    assert phi.grad is not None
    assert x.grad is None


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


# Forms that leave a result equal to an argument: Sinkhorn without a half-step, and streams that nothing mixes.
UNCHANGED = {"sinkhorn_start": "exp", "sinkhorn_steps": 0, "sinkhorn_eps": 0.0, "sinkhorn_start_eps": 0.0}
UNMIXED = {*RARE, "layer_bias", "h_res"}


@pytest.mark.parametrize("name", OPERATORS)
def test_results_never_alias_arguments(name: str) -> None:
    """With one token, one stream and one row, where a view would be right."""
    sizes = Sizes(1, 4, (1,), m=1)
    for without, scalars in product(((), RARE, UNMIXED), ({}, UNCHANGED)):
        given = arguments(name, sizes, torch.float32, without=without, scalars=scalars)
        taken = [value for value in given.values() if isinstance(value, Tensor)]
        pointers = {value.untyped_storage().data_ptr() for value in taken}
        for result in results(call(name, given, scalars)):
            assert result.numel() == 0 or result.untyped_storage().data_ptr() not in pointers


@pytest.mark.parametrize("name", FORWARD)
def test_results_may_be_changed_in_place(name: str) -> None:
    """As eager code's may: a view that comes out of an operator may not.

    But for results that the backward reads, such as a boundary's streams: nor may eager code's be changed then.
    """
    given, read = arguments(name, Sizes()), tensor_names(f"{name}_backward")
    compared = []
    for change in (lambda t: t.mul_(2.0), lambda t: t * 2.0):
        leaves = {argument: given[argument].clone().requires_grad_() for argument in tensor_names(name)}
        named = zip(result_names(name), results(call(name, given | leaves)), strict=True)
        changed = [change(result) for result_name, result in named if result_name not in read]
        gradients = torch.autograd.grad([t.square().sum() for t in changed], [*leaves.values()], allow_unused=True)
        compared.append([*changed, *(gradient for gradient in gradients if gradient is not None)])
    for mine, true in zip(*compared, strict=True):
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
    for other in (recomputed, offloaded):
        assert all(torch.equal(mine, true) for mine, true in zip(other, expected, strict=True))


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
