"""Random numbers that a model draws, kept, so that an evaluation in another precision can use the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["KeepDraws", "ReplayDraws"]

# Functions that multiply their first argument by what they draw.
_DROPOUTS = frozenset({F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.feature_dropout})
_IN_PLACE = frozenset({torch.dropout_, torch.feature_dropout_})
_DROPOUTS |= _IN_PLACE
# Functions whose result, or whose first argument afterwards, is what they draw.
_DRAWS = frozenset(
    getattr(owner, name)
    for owner, names in (
        (torch, "rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson"),
        (torch.Tensor, "bernoulli bernoulli_ uniform_ normal_ exponential_ multinomial random_ cauchy_ log_normal_"),
    )
    for name in names.split()
)

Function = Callable[..., Any]


class KeepDraws(TorchFunctionMode):
    """Writes down, in `draws`, every random tensor that is drawn inside, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Function, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            args, kwargs, x = _without_input(args, kwargs)
            drawn = func(torch.ones_like(x), *args, **kwargs).detach()
            self.draws.append(drawn)
            return _dropped(func, x, drawn, args, kwargs)
        result = func(*args, **kwargs)
        if func in _DRAWS:
            self.draws.append(result.detach().clone())
        return result


class ReplayDraws(TorchFunctionMode):
    """Gives, in turn, the random tensors of `draws` to whatever draws inside, in the dtype that is asked for there."""

    def __init__(self, draws: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.draws = iter(draws)

    def __torch_function__(
        self, func: Function, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            args, kwargs, x = _without_input(args, kwargs)
            return _dropped(func, x, next(self.draws).to(x.dtype), args, kwargs)
        result = func(*args, **kwargs)
        if func in _DRAWS:
            drawn = next(self.draws).to(result.dtype)
            written = result is kwargs.get("out") or result is next(iter(args), None)
            return result.copy_(drawn) if written else drawn
        return result


def _dropped(
    func: Function, x: torch.Tensor, drawn: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """What a dropout gives; its arguments without its input are the probability, whether it trains, and in place."""
    in_place = func in _IN_PLACE or kwargs.get("inplace", False) or any(args[2:])
    return x.mul_(drawn) if in_place else x * drawn


def _without_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    if args:
        return args[1:], kwargs, args[0]
    rest = {name: value for name, value in kwargs.items() if name != "input"}
    return (), rest, kwargs["input"]
