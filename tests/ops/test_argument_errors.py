"""Every argument of every operator, wrong in each way: the error names operator and argument, and what was expected.

The texts themselves are in test_errors.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import mhc_compile.ops  # noqa: F401
from mhc_compile import compat

Make = Callable[..., Tensor]

# 5 tokens of n = 2 streams with C = 3; K = 8 rows. A gradient d_... has the shape of what it is a gradient of.
SHAPES: dict[str, tuple[int, ...]] = {
    "x": (5, 2, 3), "phi": (8, 6), "scale": (3,), "bias": (8,), "norm_weight": (6,), "h": (5, 8), "ms": (5,),
    "f": (5, 3), "layer_bias": (3,), "h_pre": (5, 2), "h_post": (5, 2), "h_res": (5, 2, 2), "logits": (5, 2, 2),
    "res_logits": (5, 2, 2), "layer_input": (5, 3), "out": (5, 3), "x_new": (5, 2, 3),
    "next_pre": (5, 2), "next_post": (5, 2), "next_res": (5, 2, 2), "input_norm_weight": (3,),
}  # fmt: skip
OF_HEAD = {"phi": (2, 6), "scale": (1,), "bias": (2,), "h": (5, 2)}
OF_SINKHORN = {"out": (5, 2, 2)}
OF_MIXED = {"h": (5, 2, 4), "out": (5, 4, 3)}
WRONG_SCALARS: dict[str, Any] = {
    "rms_eps": float("inf"), "rms_mode": "before", "pre_eps": float("nan"), "post_mult": float("inf"),
    "post_eps": float("nan"), "steps": -1, "start": "log", "first": "cols", "eps": -1.0, "start_eps": float("nan"),
    "out_dtype": torch.int64, "streams_dtype": torch.int64, "input_norm_eps": -1.0,
}  # fmt: skip
# Beside a weight of an input norm, as every call here has one.
NEEDED_SCALARS = {"input_norm_eps": 1e-6}
# Where no other tensor says what the shape has to be, all but these have one too few dimensions at [7].
SCALAR_IS_WRONG = {("expand", "f"), ("contract_backward", "d_out")}
OPERATORS = sorted(compat.registered_operators("mhc"))


def _schema(operator: str) -> Any:
    return getattr(torch.ops.mhc, operator).default._schema


def _tensors(operator: str) -> list[str]:
    return [a.name for a in _schema(operator).arguments if str(a.type) in ("Tensor", "Optional[Tensor]")]


def _main(operator: str) -> str:
    """The tensor that the dtypes, devices and shapes of all others are compared with."""
    names = _tensors(operator)
    return next((name for name in ("x", "h", "logits") if name in names), names[0])


def _shape(operator: str, name: str) -> tuple[int, ...]:
    others = {"head": OF_HEAD, "sinkhorn": OF_SINKHORN, "mix_streams": OF_MIXED}
    special = others.get(operator.removesuffix("_backward"), {})
    name = name.removeprefix("d_")
    return special.get(name, SHAPES[name])


def _call(operator: str, make: Make, **changed: Any) -> Any:
    """The operator on right arguments but for those that are given."""
    positional, keywords = [], {}
    for argument in _schema(operator).arguments:
        name = argument.name
        if argument.kwarg_only:
            keywords |= {key: value for key, value in (NEEDED_SCALARS | changed).items() if key == name}
        elif name in changed:
            positional.append(changed[name])
        elif name in _tensors(operator):
            positional.append(make(_shape(operator, name)))
        else:
            positional.append({"n": 2, "needs": [True] * len(_schema(operator).returns)}[name])
    return getattr(torch.ops.mhc, operator)(*positional, **keywords)


def _refuses(operator: str, name: str, value: Callable[[Make], Any], error: type[Exception], text: str) -> None:
    """The same from the real and the fake implementation; `text` follows the operator's name."""
    expected = f"^mhc::{operator}: {text}"
    with pytest.raises(error, match=expected):
        _call(operator, torch.zeros, **{name: value(torch.zeros)})
    with FakeTensorMode(), pytest.raises(error, match=expected):
        _call(operator, torch.empty, **{name: value(torch.empty)})


@pytest.mark.parametrize("operator", OPERATORS)
def test_right_arguments_are_taken(operator: str) -> None:
    _call(operator, torch.zeros)
    with FakeTensorMode():
        _call(operator, torch.empty)


@pytest.mark.parametrize(("operator", "name"), [(o, name) for o in OPERATORS for name in _tensors(o)])
def test_tensors(operator: str, name: str) -> None:
    shape, main = _shape(operator, name), _main(operator)
    dtype = f"{name} has dtype torch.int32; expected bfloat16, float16, float32 or float64"
    _refuses(operator, name, lambda make: make(shape, dtype=torch.int32), TypeError, dtype)
    wrong = () if (operator, name) in SCALAR_IS_WRONG else (7,)
    _refuses(operator, name, lambda make: make(wrong), ValueError, rf"{name} (has|of) shape \[7?\].* expected ")
    if not any(a.name == name and str(a.type) == "Optional[Tensor]" for a in _schema(operator).arguments):
        _refuses(operator, name, lambda make: None, TypeError, f"{name} is None; expected a tensor")
    if name == main:
        return
    wide = f"{name} is float64, but {main} is torch.float32; expected float64 only beside float64 {main}"
    _refuses(operator, name, lambda make: make(shape, dtype=torch.float64), TypeError, wide)
    # Real tensors of a device without data would choose that device's implementation.
    elsewhere = f"^mhc::{operator}: {name} is on meta, but {main} is on cpu; expected the same device"
    with FakeTensorMode(), pytest.raises(ValueError, match=elsewhere):
        _call(operator, torch.empty, **{name: torch.empty(shape, device="meta")})


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        (o, a.name)
        for o in OPERATORS
        for a in _schema(o).arguments
        if a.name not in _tensors(o) and str(a.type) != "bool"
    ],
)
def test_scalars(operator: str, name: str) -> None:
    if name == "needs":
        count = len(_schema(operator).returns)
        text = f"needs has {count + 1} entries; expected {count}, one per differentiable argument"
        _refuses(operator, name, lambda make: [True] * (count + 1), ValueError, text)
    elif name == "n":
        _refuses(operator, name, lambda make: 0, ValueError, "the argument n? ?gives n = 0 streams; expected n >= 1")
    else:
        wrong = WRONG_SCALARS[name.removeprefix("sinkhorn_")]
        error = TypeError if name.endswith("_dtype") else ValueError
        _refuses(operator, name, lambda make: wrong, error, f"{name} is .*; expected ")
