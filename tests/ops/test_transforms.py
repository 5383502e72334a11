"""The operators under torch.func: grad and vmap give what they should, forward mode is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from mhc_compile import ops
from tests.ops.calls import (
    BACKWARD,
    FORWARD,
    OPERATORS,
    Given,
    Sizes,
    arguments,
    call,
    is_of_tokens,
    result_names,
    results,
    tensor_names,
)
from tests.ops.eager import mix_arguments

Function = Callable[..., Any]

# BLAS may order its sums by the number of rows; everything here is float64.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def _sublayer(x: Tensor, phi: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    layer_input, h_post, h_res = ops.generate_mix_and_aggregate(x, phi, scale, bias)
    return ops.expand_combine(layer_input.sin(), None, h_post, x, h_res)


def _loss(*arguments: Tensor) -> Tensor:
    return _sublayer(*arguments).square().sum()


def test_grad() -> None:
    arguments = mix_arguments(2, 3)
    leaves = [value.clone().requires_grad_() for value in arguments]
    expected = torch.autograd.grad(_loss(*leaves), leaves)
    results = torch.func.grad(_loss, argnums=(0, 1, 2, 3))(*arguments)
    for mine, true in zip(results, expected, strict=True):
        torch.testing.assert_close(mine, true, **CLOSE)


def test_gradients_per_sample() -> None:
    """vmap over grad: gradients of x in one call, those of shared parameters for each sample."""
    x, *parameters = mix_arguments(2, 3, (4, 5))
    per_sample = torch.func.vmap(torch.func.grad(_loss, argnums=(0, 1, 2, 3)), in_dims=(0, None, None, None))
    results = per_sample(x, *parameters)
    for sample in range(4):
        expected = torch.func.grad(_loss, argnums=(0, 1, 2, 3))(x[sample], *parameters)
        for mine, true in zip(results, expected, strict=True):
            torch.testing.assert_close(mine[sample], true, **CLOSE)


def test_jacrev() -> None:
    x, *parameters = mix_arguments(2, 3, (2,))
    jacobian = torch.func.jacrev(_sublayer)(x, *parameters)
    expected = torch.autograd.functional.jacobian(lambda x: _sublayer(x, *parameters), x)
    torch.testing.assert_close(jacobian, expected, **CLOSE)


def test_second_derivatives_are_refused() -> None:
    arguments = mix_arguments(2, 3)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.func.grad(lambda x: torch.func.grad(_loss)(x, *arguments[1:]).sum())(arguments[0])


def of_tensors(operator: str, given: Given) -> tuple[Function, list[Tensor]]:
    """An operator as a function of its tensors, and these."""
    names = tensor_names(operator)

    def function(*tensors: Tensor) -> Any:
        return call(operator, given | dict(zip(names, tensors, strict=True)))

    return function, [given[name] for name in names]


SIZES = Sizes(2, 3, (4, 5))


@pytest.mark.parametrize("name", FORWARD)
def test_grad_of_every_operator(name: str) -> None:
    function, tensors = of_tensors(name, arguments(name, SIZES))

    def loss(*given: Tensor) -> Tensor:
        return torch.stack([result.square().sum() for result in results(function(*given))]).sum()

    leaves = [value.clone().requires_grad_() for value in tensors]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for mine, true in zip(torch.func.grad(loss, argnums=(*range(len(leaves)),))(*tensors), expected, strict=True):
        torch.testing.assert_close(mine, true, **CLOSE)


# torch's own decompositions for forward mode go through torch.jit.script, which it deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_is_refused(name: str) -> None:
    function, tensors = of_tensors(name, arguments(name, SIZES))
    for index, value in enumerate(tensors):

        def at(given: Tensor, index: int = index) -> Any:
            return function(*tensors[:index], given, *tensors[index + 1 :])

        with pytest.raises(NotImplementedError, match=f"mhc::{name} has no forward-mode derivative, and .* has a tan"):
            torch.func.jvp(at, (value,), (value,))
        for leaf in (value, value.clone().requires_grad_()):
            with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"mhc::{name} has no forward-mode"):
                at(forward_ad.make_dual(leaf, value))
    with forward_ad.dual_level():
        # Without tangents there is nothing to refuse.
        function(*tensors)


# torch's own decompositions for forward mode go through torch.jit.script, which it deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_over_grad_is_refused(name: str) -> None:
    function, (first, *others) = of_tensors(name, arguments(name, SIZES))

    def loss(given: Tensor) -> Tensor:
        return torch.stack([result.square().sum() for result in results(function(given, *others))]).sum()

    with pytest.raises(NotImplementedError, match=f"mhc::{name} has no forward-mode derivative, and .* has a tan"):
        torch.func.jvp(torch.func.grad(loss), (first,), (first,))


@pytest.mark.parametrize("name", BACKWARD)
def test_vmap_over_a_backward(name: str) -> None:
    """A parameter's gradient is a sum over the tokens of one sample, and not over those of all samples."""
    given = arguments(name, SIZES, without={"d_x"})
    for wanted in tensor_names(name.removesuffix("_backward")):
        if "needs" in given:
            given["needs"] = [wanted == one for one in tensor_names(name.removesuffix("_backward"))]
        function, tensors = of_tensors(name, given)
        in_dims = tuple(0 if is_of_tokens(k) and given[k] is not None else None for k in tensor_names(name))
        batched = results(torch.vmap(function, in_dims=in_dims)(*tensors))
        for sample in range(SIZES.tokens[0]):
            own = [t if dim is None else t[sample] for t, dim in zip(tensors, in_dims, strict=True)]
            expected = results(function(*own))
            for mine, true in zip(batched, expected, strict=True):
                if true.shape != (0,):
                    torch.testing.assert_close(mine[sample], true, **CLOSE)


@pytest.mark.parametrize("name", OPERATORS)
def test_vmap_over_no_samples(name: str) -> None:
    """Results have the shape of a sample's behind a dim of size 0, however many calls a batch would take."""
    function, tensors = of_tensors(name, arguments(name, SIZES))
    expected = [(0, *result.shape) for result in results(function(*tensors))]
    for kinds in ((True,), (True, False)):
        in_dims = tuple(0 if is_of_tokens(argument) in kinds else None for argument in tensor_names(name))
        none = [t if dim is None else t.new_empty(0, *t.shape) for t, dim in zip(tensors, in_dims, strict=True)]
        batched = torch.vmap(function, in_dims=in_dims)(*none)
        assert [tuple(result.shape) for result in results(batched)] == expected


@pytest.mark.parametrize("name", OPERATORS)
def test_vmap_over_tokens_is_one_call(name: str) -> None:
    """A backward's, too, while it makes no gradient of a parameter, which is a sum over tokens."""
    given = arguments(name, SIZES)
    if "needs" in given:
        given["needs"] = [is_of_tokens(result) for result in result_names(name)]
    function, tensors = of_tensors(name, given)
    in_dims = tuple(1 if is_of_tokens(argument) else None for argument in tensor_names(name))
    with _Count() as calls:
        batched = torch.vmap(function, in_dims=in_dims)(*tensors)
    assert calls.seen == 1
    for mine, true in zip(results(batched), results(function(*tensors)), strict=True):
        # A gradient that was not asked for is without elements, for each of the batch.
        if true.shape != (0,):
            torch.testing.assert_close(mine.movedim(0, 1), true, **CLOSE)


@pytest.mark.parametrize("name", FORWARD)
def test_vmap_over_any_argument(name: str) -> None:
    function, tensors = of_tensors(name, arguments(name, SIZES))
    for index, value in enumerate(tensors):
        # Mean squares stay positive.
        several = torch.stack([value, 2 * value, 3 * value], dim=-1)

        def at(given: Tensor, index: int = index) -> Any:
            return function(*tensors[:index], given, *tensors[index + 1 :])

        batched = results(torch.vmap(at, in_dims=-1)(several))
        for sample in range(3):
            for mine, true in zip(batched, results(at(several[..., sample])), strict=True):
                torch.testing.assert_close(mine[sample], true, **CLOSE)


class _Count(torch.utils._python_dispatch.TorchDispatchMode):
    """How many operators of ours run."""

    seen = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += function.namespace == "mhc"
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("fresh_dynamo")
def test_dynamo_looks_into_no_operator() -> None:
    """A frame that Dynamo leaves calls operators as they are, forward and backward."""

    @torch.compile(backend="eager")
    def step(x: Tensor, gate: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = x + torch.ops.mhc.aggregate(x, gate).unsqueeze(-2)
        x.sum().backward()  # type: ignore[no-untyped-call]
        return x

    torch._dynamo.utils.clear_compilation_metrics()
    step(torch.randn(3, 4, 8, requires_grad=True), torch.rand(3, 4, requires_grad=True))
    seen = [metrics.co_filename or "" for metrics in torch._dynamo.utils.get_compilation_metrics()]
    assert seen
    assert not [file for file in seen if "mhc_compile" in file]
