"""Every argument of every operator, wrong in each way: the error names operator and argument, and what was expected.

The texts themselves are in test_errors.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.ops.calls import OPERATORS, Given, Sizes, arguments, call, is_optional, result_names, schema, tensor_names

WRONG_SCALARS: dict[str, list[Any]] = {
    "float": [float("nan"), float("inf")],
    "Optional[float]": [float("nan"), float("inf"), -1.0],
    "int": [-1],
    "str": ["log"],
    "Optional[ScalarType]": [torch.int64, torch.float64],
}
# A gate may have a negative term or factor, these not.
NOT_NEGATIVE = {"rms_eps", "sinkhorn_eps", "sinkhorn_start_eps", "eps", "start_eps"}


class _Operator:
    """An operator with right arguments, real and fake."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.real = arguments(name, Sizes(), torch.float32)
        self.mode = FakeTensorMode()
        self.fake = self._faked(self.real)

    def _faked(self, given: Given) -> Given:
        with self.mode:
            return {
                name: torch.empty(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value
                for name, value in given.items()
            }

    def refuses(self, changed: Given, error: type[Exception], text: str) -> None:
        """The same error from the real and the fake implementation; `text` follows the operator's name."""
        expected = f"^mhc::{self.name}: {text}"
        scalars = {name: value for name, value in changed.items() if name not in self.real}
        positional = {name: value for name, value in changed.items() if name in self.real}
        with pytest.raises(error, match=expected):
            call(self.name, self.real | positional, scalars)
        with self.mode, pytest.raises(error, match=expected):
            call(self.name, self.fake | self._faked(positional), scalars)


@pytest.mark.parametrize("name", OPERATORS)
def test_right_arguments_are_taken(name: str) -> None:
    operator = _Operator(name)
    call(name, operator.real)
    with operator.mode:
        call(name, operator.fake)


@pytest.mark.parametrize("name", OPERATORS)
def test_tensors(name: str) -> None:
    operator, names = _Operator(name), tensor_names(name)
    # The tensor that the dtypes, devices and shapes of all others are compared with.
    main = next((n for n in ("x", "h", "logits") if n in names), names[0])
    for tensor in names:
        shape = operator.real[tensor].shape
        floats = f"{tensor} has dtype torch.int32; expected bfloat16, float16, float32 or float64"
        operator.refuses({tensor: torch.zeros(shape, dtype=torch.int32)}, TypeError, floats)
        # Rows that no other tensor is compared with may be of any length, but have one.
        wrong = torch.zeros(() if len(names) == 1 and len(shape) == 2 else (7,))
        operator.refuses({tensor: wrong}, ValueError, rf"{tensor} (has|of) shape \[7?\].* expected ")
        if not is_optional(name, tensor):
            operator.refuses({tensor: None}, TypeError, f"{tensor} is None; expected a tensor")
        if tensor == main:
            continue
        wide = f"{tensor} is float64, but {main} is torch.float32; expected float64 only with float64 {main}"
        operator.refuses({tensor: torch.zeros(shape, dtype=torch.float64)}, TypeError, wide)
        # Real tensors of a device without data would choose that device's implementation.
        elsewhere = f"^mhc::{name}: {tensor} is on meta, but {main} is on cpu; expected the same device"
        with operator.mode, pytest.raises(ValueError, match=elsewhere):
            call(name, operator.fake | {tensor: torch.empty(shape, device="meta")})


@pytest.mark.parametrize("name", OPERATORS)
def test_scalars(name: str) -> None:
    operator = _Operator(name)
    for argument in schema(name).arguments:
        if argument.name == "needs":
            count = len(result_names(name))
            text = f"needs has {count + 1} entries; expected {count}, one per differentiable argument"
            operator.refuses({"needs": [True] * (count + 1)}, ValueError, text)
            if {"x", "d_x"} <= {*tensor_names(name)}:
                needs = [result != "d_x" for result in result_names(name)]
                text = "d_x was given, but needs says that x needs no gradient; expected None"
                operator.refuses({"needs": needs}, ValueError, text)
        elif argument.name == "n":
            text = "the argument n? ?gives n = 0 streams; expected 1 to 31"
            operator.refuses({"n": 0}, ValueError, text)
        elif argument.kwarg_only and str(argument.type) != "bool":
            kind = "Optional[ScalarType]" if argument.name.endswith("_dtype") else str(argument.type)
            wrong = WRONG_SCALARS[kind] + [-1.0] * (argument.name in NOT_NEGATIVE)
            for value in wrong:
                error = TypeError if isinstance(value, torch.dtype) else ValueError
                operator.refuses({argument.name: value}, error, f"{argument.name} is .*; expected ")
