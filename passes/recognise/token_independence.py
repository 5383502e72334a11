"""Watches that calls treat each token alone, so that a few tokens show what becomes of many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mhc_compile.passes.aten_calls import tensors

_ANYWHERE = {
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "permute", "transpose", "t", "numpy_T"),
    *("squeeze", "squeeze_", "unsqueeze", "alias", "detach", "clone", "_to_copy", "lift_fresh", "copy_", "stack"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full"),
}
# What these do along their `dim`, they do to each place in the other dimensions alone.
_ALONG = {
    *("sum", "mean", "prod", "amax", "amin", "max", "min", "var", "std", "logsumexp", "linalg_vector_norm", "norm"),
    *("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"),
    *("cat", "select", "split", "split_with_sizes", "unbind", "flip", "roll"),
}
# The operand whose last dimension is summed over.
_PRODUCTS = {"mm": "self", "bmm": "self", "mv": "self", "addmm": "mat1", "baddbmm": "batch1"}
_TO_THE_END = (None, 2**63 - 1)


class MixesTokens(Exception):
    """What a call makes of a token may depend on other tokens, on the token's place, or on how many there are."""


class TokensAlone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises `MixesTokens` for calls not known to treat each token alone, those of a backward among them.

    Even a sum that shows in no value of a few tokens may do so in thousands: what it is compared with is reached.
    Dimensions of tokens are known by their sizes, multiples of `counts`, which should be primes. If another dimension
    is such a multiple too, a call is refused without need.
    """

    def __init__(self, counts: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = tuple(counts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = func._schema.arguments
        given = {argument.name: argument.default_value for argument in names}
        given |= {argument.name: value for argument, value in zip(names, args, strict=False)} | kwargs
        if not self._treats_alone(func, given):
            raise MixesTokens(str(func))
        return func(*args, **kwargs)

    def _treats_alone(self, func: Any, given: dict[str, Any]) -> bool:
        name = func.overloadpacket.__name__
        if torch.Tag.pointwise in func.tags or name in _ANYWHERE:
            return True
        shapes = [tensor.shape for tensor in tensors(given)]
        if not any(self._counts_tokens(size) for shape in shapes for size in shape):
            return True
        if name == "slice" and given["start"] in (None, 0) and given["end"] in _TO_THE_END and given["step"] == 1:
            return True
        if name in _PRODUCTS:
            return not self._counts_tokens(given[_PRODUCTS[name]].shape[-1])
        if name in _ALONG or name == "slice":
            along = given.get("dim", given.get("dims"))
            return not any(self._counts_tokens(size) for shape in shapes for size in _sizes(shape, along))
        return False

    def _counts_tokens(self, size: int) -> bool:
        return any(size % count == 0 for count in self._counts)


def _sizes(shape: Sequence[int], along: int | Sequence[int] | None) -> Iterator[int]:
    """The sizes of these dimensions; no dimension named means all of them."""
    named = [along] if isinstance(along, int) else along or range(len(shape))
    return (shape[d] for d in named if shape)
