"""The operators under torch.func: grad and vmap give what they should, forward mode is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from mhc_compile import ops
from tests.ops.eager import combine_arguments, mix_arguments

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


def _calls() -> dict[str, tuple[Callable[..., Any], list[Tensor]]]:
    x, phi, scale, bias = mix_arguments(2, 3, (4, 5))
    f, layer_bias, h_post, _, h_res = combine_arguments(2, 3, (4, 5))
    h, ms = ops.projection(x, phi)
    return {
        "projection": (ops.projection, [x, phi]),
        "scale": (lambda *a: ops.scale(*a, 2), [h, ms, scale, bias]),
        "sinkhorn": (ops.sinkhorn, [h_res]),
        "aggregate": (ops.aggregate, [x, h_post]),
        "mix_streams": (ops.mix_streams, [x, h_res[..., :1]]),
        "generate_mix": (ops.generate_mix, [x, phi, scale, bias]),
        "generate_mix_and_aggregate": (ops.generate_mix_and_aggregate, [x, phi, scale, bias]),
        "head": (ops.head, [x, phi[:2], scale[:1], bias[:2]]),
        "expand": (lambda f: ops.expand(f, 2), [f]),
        "contract": (ops.contract, [x]),
        "expand_combine": (ops.expand_combine, [f, layer_bias, h_post, x, h_res]),
        "shifted_boundary": (ops.shifted_boundary, [f, layer_bias, h_post, x, h_res, h_post, phi, scale, bias]),
    }


CALLS = _calls()


# torch's own decompositions for forward mode go through torch.jit.script, which it deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
@pytest.mark.parametrize("name", CALLS)
def test_forward_mode_is_refused(name: str) -> None:
    function, arguments = CALLS[name]
    for index, value in enumerate(arguments):

        def at(given: Tensor, index: int = index) -> Any:
            return function(*arguments[:index], given, *arguments[index + 1 :])

        with pytest.raises(NotImplementedError, match=f"mhc::{name} has no forward-mode derivative, and .* has a tan"):
            torch.func.jvp(at, (value,), (value,))
        for leaf in (value, value.clone().requires_grad_()):
            with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"mhc::{name} has no forward-mode"):
                at(forward_ad.make_dual(leaf, value))
    with forward_ad.dual_level():
        # Without tangents there is nothing to refuse.
        function(*arguments)


@pytest.mark.parametrize("name", CALLS)
def test_vmap_over_tokens_is_one_call(name: str) -> None:
    function, arguments = CALLS[name]
    in_dims = tuple(1 if value.shape[:2] == (4, 5) else None for value in arguments)
    results, expected = torch.vmap(function, in_dims=in_dims, out_dims=1)(*arguments), function(*arguments)
    pairs = zip(results, expected, strict=True) if isinstance(expected, tuple) else [(results, expected)]
    for mine, true in pairs:
        torch.testing.assert_close(mine, true, **CLOSE)
    calls = _Count()
    with calls:
        torch.vmap(function, in_dims=in_dims)(*arguments)
    assert calls.seen == 1


@pytest.mark.parametrize("name", CALLS)
def test_vmap_over_any_argument(name: str) -> None:
    function, arguments = CALLS[name]
    for index, value in enumerate(arguments):
        several = torch.stack([value, 2 * value, -value.abs() if name != "scale" else 3 * value], dim=-1)

        def at(given: Tensor, index: int = index) -> Any:
            return function(*arguments[:index], given, *arguments[index + 1 :])

        results = torch.vmap(at, in_dims=-1)(several)
        for sample in range(3):
            expected = at(several[..., sample])
            results_of, true_of = (list(v) if isinstance(v, tuple) else [v] for v in (results, expected))
            for mine, true in zip(results_of, true_of, strict=True):
                torch.testing.assert_close(mine[sample], true, **CLOSE)


class _Count(torch.utils._python_dispatch.TorchDispatchMode):
    """How many operators of ours run."""

    seen = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += function.namespace == "mhc"
        return function(*args, **(kwargs or {}))
