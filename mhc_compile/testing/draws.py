"""Random numbers that a model draws, kept, so that an evaluation in another precision can use the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Draw", "KeepDraws", "ReplayDraws"]

# The operator's name, and what it drew; None if no result shows it.
Draw = tuple[str, torch.Tensor | None]

_ATEN = torch.ops.aten
_RRELU = (_ATEN.rrelu_with_noise, _ATEN.rrelu_with_noise_)


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches operators below autograd: of whatever function draws there, and of what a checkpoint computes again."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _draws(func, args, kwargs):
            return self.seen(func(*args, **kwargs))
        with self:  # Without autograd, as in inference mode, dropout arrives whole.
            parts = func.decompose(*args, **kwargs)
        return self.draw(func, args, kwargs) if parts is NotImplemented else parts

    def seen(self, result: Any) -> Any:
        return result

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class KeepDraws(_Draws):  # type: ignore[no-untyped-call]
    """Writes down, in `draws`, every random tensor that is drawn inside, and changes nothing.

    narrow says whether anything inside was computed in a floating point dtype below float32.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[Draw] = []
        self.narrow = False

    def seen(self, result: Any) -> Any:
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize < 4:
                self.narrow = True
        return result

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        drawn = result
        if func.overloadpacket is _ATEN.native_dropout:
            drawn = result[1]
        elif func.overloadpacket in _RRELU:
            drawn = args[1]
        self.draws.append((str(func), drawn.clone() if isinstance(drawn, torch.Tensor) else None))
        return result


class ReplayDraws(_Draws):  # type: ignore[no-untyped-call]
    """Gives, in turn, the random tensors of `draws` to whatever draws inside, in the dtype that is asked for there."""

    def __init__(self, draws: Iterable[Draw]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = iter(draws)

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, drawn = next(self.draws, ("nothing", None))
        if name != str(func):
            raise RuntimeError(f"{func} draws random numbers, where {name} drew before")
        if drawn is None:
            raise RuntimeError(f"{func} draws random numbers that nothing else can draw")
        if func.overloadpacket is _ATEN.native_dropout:
            x, p, trains = args
            mask = drawn.to(torch.bool)
            return x * mask * (1 / (1 - p) if trains is not False and p < 1 else 1), mask
        if func.overloadpacket in _RRELU:
            args[1].copy_(drawn)
            return args[0].mul_(drawn) if func.overloadpacket is _RRELU[1] else args[0] * args[1]
        result = func(*args, **kwargs)
        if result.shape != drawn.shape:
            raise RuntimeError(f"{func} draws {list(result.shape)} random numbers, where it drew {list(drawn.shape)}")
        written = result is kwargs.get("out") or result is next(iter(args), None)
        return result.copy_(drawn) if written else drawn.to(result.dtype)


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call draws: attention without dropout has the tag of drawing, too."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()) or func.namespace != "aten":
        return False
    arguments = func._schema.arguments
    named = {a.name: a.default_value for a in arguments}
    named |= {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
    trains = all(named.get(name) is not False for name in ("training", "train"))
    return trains and all(named.get(name, 1) != 0 for name in ("dropout_p", "dropout"))
