"""The call of any registered operator, built from its schema.

Tests that hold of every operator go over `OPERATORS` or `FORWARD` and build their calls here. So a new operator has
these tests without a row of its own. It needs one here only for an argument name that no other operator has.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mhc_compile.ops  # noqa: F401  (registers the operators)
from mhc_compile import compat

# The shape of every input, in letters: t tokens, n streams, C columns, K rows of phi, L of them with gates, G groups of
# scale, m rows of mixed streams. The gradient d_name of an output has the shape of that output.
SHAPES = {
    "x": "t n C", "f": "t C", "h": "t K", "ms": "t", "h_pre": "t n", "h_post": "t n", "h_res": "t n n",
    "logits": "t n n", "phi": "K nC", "scale": "G", "bias": "L", "norm_weight": "nC", "layer_bias": "C",
    "input_norm_weight": "C",
}  # fmt: skip
# Inputs of another shape in one operator.
OTHER_SHAPES = {
    "head": {"phi": "n nC", "scale": "1", "bias": "n"},
    "scale": {"h": "t L"},
    "mix_streams": {"h": "t n m"},
}
# Results of a backward that are not the gradient of the argument at the same place.
OTHER_RESULTS = {("aggregate_and_norm_backward", "d_x"): "d_u"}
PARAMETERS = frozenset(name for name, letters in SHAPES.items() if not letters.startswith("t"))
# Optional arguments that models seldom give: some kernels run only without them.
RARE = frozenset({"norm_weight", "input_norm_weight", "d_h", "d_ms", "d_x"})
# Scalars without a default, by the tensor that needs them.
SCALARS_BESIDE: dict[str, dict[str, Any]] = {"input_norm_weight": {"input_norm_eps": 1e-3}}
# And those by the operator that needs them.
SCALARS_OF: dict[str, dict[str, Any]] = {"aggregate_and_norm": {"input_norm_eps": 1e-3}}

OPERATORS = sorted(compat.registered_operators("mhc"))
FORWARD = [name for name in OPERATORS if not name.endswith("_backward")]
BACKWARD = [name for name in OPERATORS if name.endswith("_backward")]

Given = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How large the arguments are; parts and per_row say which of the gates there are, and their scale's form.

    more: rows of phi without gates.
    """

    n: int = 2
    width: int = 3
    tokens: tuple[int, ...] = (5,)
    parts: int = 3
    per_row: bool = False
    m: int = 4
    more: int = 0

    def shape(self, letters: str) -> tuple[int, ...]:
        n, k = self.n, (self.n, 2 * self.n, self.n * (self.n + 2))[self.parts - 1]
        sizes = {"n": n, "C": self.width, "nC": n * self.width, "K": k + self.more, "L": k, "m": self.m, "1": 1}
        sizes["G"] = k if self.per_row else self.parts
        return tuple(size for letter in letters.split() for size in (self.tokens if letter == "t" else [sizes[letter]]))


def schema(operator: str) -> Any:
    return getattr(torch.ops.mhc, operator).default._schema


def tensor_names(operator: str) -> list[str]:
    return [a.name for a in schema(operator).arguments if str(a.type) in ("Tensor", "Optional[Tensor]")]


def is_optional(operator: str, name: str) -> bool:
    return any(a.name == name and str(a.type) == "Optional[Tensor]" for a in schema(operator).arguments)


def result_names(operator: str) -> list[str]:
    """What each result is: an output, named by its gradient in the backward, or the gradient d_name of an input."""
    if operator in BACKWARD:
        forward = operator.removesuffix("_backward")
        return [OTHER_RESULTS.get((operator, f"d_{name}"), f"d_{name}") for name in tensor_names(forward)]
    gradients = tensor_names(f"{operator}_backward")[: len(schema(operator).returns)]
    return [name.removeprefix("d_") for name in gradients]


def is_of_tokens(name: str) -> bool:
    """Whether a tensor has the tokens' dimensions: all have, but parameters and their gradients."""
    return name.removeprefix("d_") not in PARAMETERS


def is_streams_or_rows(name: str) -> bool:
    """Whether a tensor has a token's columns, and so the streams' dtype."""
    letters = SHAPES[name]
    return letters.startswith("t") and letters.endswith("C")


def arguments(
    operator: str,
    sizes: Sizes,
    dtype: torch.dtype = torch.float64,
    parameter_dtype: torch.dtype | None = None,
    *,
    without: Collection[str] = (),
    scalars: dict[str, Any] | None = None,
    device: str = "cpu",
) -> Given:
    """The positional arguments by name, drawn at random: streams in dtype, all else in float32 or in float64.

    Optional arguments named in `without` are None. A backward gets what its forward, with these scalars, has saved.
    It makes every gradient that it can.
    """
    narrow = dtype if dtype == torch.float64 else torch.float32
    dtypes = {name: dtype if is_streams_or_rows(name) else narrow for name in SHAPES}
    if parameter_dtype is not None:
        dtypes |= dict.fromkeys(PARAMETERS, parameter_dtype)
    forward = operator.removesuffix("_backward")
    special = SHAPES | OTHER_SHAPES.get(forward, {})
    known: Given = {"n": sizes.n}
    for name in tensor_names(forward):
        if not (name in without and is_optional(forward, name)):
            known[name] = _drawn(name, sizes.shape(special[name]), narrow, device).to(dtypes[name])
    if operator == forward:
        return _in_order(operator, known)
    known["needs"] = [name in known for name in tensor_names(forward)]
    given = _in_order(forward, known)
    outputs = dict(zip(result_names(forward), results(call(forward, given, scalars)), strict=True))
    saved = known | outputs
    for name in tensor_names(operator):
        rare = name in without and is_optional(operator, name) and name.removeprefix("d_") in tensor_names(operator)
        if name.startswith("d_") and not rare:
            known[name] = torch.randn_like(saved[name.removeprefix("d_")], memory_format=torch.contiguous_format)
    return _in_order(operator, outputs | known)


def call(operator: str, given: Given, scalars: dict[str, Any] | None = None) -> Any:
    """The operator on arguments by name; it gets those of the scalars that it takes."""
    return getattr(torch.ops.mhc, operator)(*given.values(), **keywords(operator, given, scalars))


def keywords(operator: str, given: Given, scalars: dict[str, Any] | None = None) -> dict[str, Any]:
    """The scalars that `call` passes on: those given, and those that a tensor needs."""
    beside = {k: v for name, more in SCALARS_BESIDE.items() if given.get(name) is not None for k, v in more.items()}
    beside |= SCALARS_OF.get(operator.removesuffix("_backward"), {})
    return scalars_of(operator, beside | (scalars or {}))


def scalars_of(operator: str, scalars: dict[str, Any]) -> dict[str, Any]:
    """Those of the scalars that the operator takes, by its own names: sinkhorn_steps is steps of mhc::sinkhorn."""
    names = {a.name for a in schema(operator).arguments if a.kwarg_only}
    if operator.removesuffix("_backward") == "sinkhorn":
        scalars = {name.removeprefix("sinkhorn_"): value for name, value in scalars.items()}
    return {name: value for name, value in scalars.items() if name in names}


def results(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _in_order(operator: str, known: Given) -> Given:
    return {a.name: known.get(a.name) for a in schema(operator).arguments if not a.kwarg_only}


def _drawn(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Values of order 1; gates and mean squares are positive."""
    normal = torch.randn(shape, dtype=dtype, device=device)
    if name == "phi":
        return normal / shape[-1] ** 0.5
    if name in ("ms", "scale"):
        return normal.sigmoid() + 0.5
    return normal.sigmoid() if name in ("h_pre", "h_post", "h_res") else normal
