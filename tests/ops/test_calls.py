"""The tests that hold of every operator have every registered operator, without a row of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mhc_compile import ops
from mhc_compile.ops._transforms import _TOKEN_ARGUMENTS
from tests.ops import (
    test_argument_errors,
    test_behaviour,
    test_determinism,
    test_errors,
    test_forms,
    test_gradcheck,
    test_layouts,
    test_opcheck,
    test_transforms,
)
from tests.ops.calls import BACKWARD, FORWARD, OPERATORS, PARAMETERS, Sizes, result_names, schema, tensor_names

_NEEDS = [name for name in BACKWARD if "needs" in [argument.name for argument in schema(name).arguments]]
_ACCUMULATE = [name for name in BACKWARD if {"x", "d_x"} <= {*tensor_names(name)}]


def test_every_operator_is_in_one_of_the_lists() -> None:
    assert FORWARD == ops.__all__ == sorted(ops.__all__)
    assert {f"{name}_backward" for name in FORWARD} == {*BACKWARD}
    assert sorted(FORWARD + BACKWARD) == OPERATORS


@pytest.mark.parametrize(
    ("test", "operators"),
    [
        (test_argument_errors.test_right_arguments_are_taken, OPERATORS),
        (test_argument_errors.test_tensors, OPERATORS),
        (test_argument_errors.test_scalars, OPERATORS),
        (test_behaviour.test_only_needed_gradients_are_computed, _NEEDS),
        (test_behaviour.test_missing_gradients_are_zero, BACKWARD),
        (test_behaviour.test_results_never_alias_arguments, OPERATORS),
        (test_behaviour.test_results_may_be_changed_in_place, FORWARD),
        (test_errors.test_second_derivative_names_the_operator, FORWARD),
        (test_forms.test_backward_operators_add_to_a_gradient_that_is_there, _ACCUMULATE),
        (test_gradcheck.test_every_operator, FORWARD),
        (test_layouts.test_results_lie_as_their_arguments, OPERATORS),
        (test_transforms.test_grad_of_every_operator, FORWARD),
        (test_transforms.test_forward_mode_is_refused, FORWARD),
        (test_transforms.test_vmap_over_tokens_is_one_call, OPERATORS),
        (test_transforms.test_vmap_over_any_argument, FORWARD),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_new_operator_is_tested(test: Callable[..., None], operators: list[str]) -> None:
    marks: list[Any] = test.pytestmark  # type: ignore[attr-defined]
    (values,) = [mark.args[1] for mark in marks if mark.name == "parametrize"]
    assert values == operators


def test_a_new_operator_is_run_and_sampled() -> None:
    runs = test_determinism.runs(Sizes(), torch.float32)
    assert {name.split()[0] for name, _, _ in runs} == {*OPERATORS}
    assert {operator for operator, _ in test_opcheck._SAMPLES.values()} == {*OPERATORS}


def test_what_is_of_tokens_is_what_vmap_takes_for_it() -> None:
    tensors = {name for operator in OPERATORS for name in tensor_names(operator) if not name.startswith("d_")}
    assert tensors - PARAMETERS == _TOKEN_ARGUMENTS


def test_results_are_named_by_their_gradients() -> None:
    assert result_names("generate_mix") == ["h_pre", "h_post", "h_res", "h", "ms"]
    assert result_names("expand_combine_backward") == ["d_f", "d_layer_bias", "d_h_post", "d_x", "d_h_res"]
    for operator in OPERATORS:
        assert len(result_names(operator)) == len(schema(operator).returns)
