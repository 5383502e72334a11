"""Calls of one operator on a GPU, of which the third and later ones of a kind take a fraction of the host's time.

The kind of a call is all that the host's work depends on. The first call of a kind runs as it is. The second one is
recorded (`kernels.replay`). After that, nothing is checked or decided: the same kernels are launched for other tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mhc_compile import compat, kernels

if TYPE_CHECKING:
    from mhc_compile.kernels.replay import Program

Kind = Hashable

# Beyond so many kinds, as models have that see each number of tokens once, all are forgotten.
_MOST = 1024
_PLAIN = (Tensor, torch.nn.Parameter)


def tensors_of(args: Sequence[Any]) -> list[Tensor]:
    """The tensors among an operator's arguments."""
    return [value for value in args if isinstance(value, Tensor)]


def _kind(args: Sequence[Any], scalars: dict[str, Any]) -> Kind | None:
    """What decides how an operator runs: two calls of a kind differ in the memory of their tensors alone.

    None of a call with tensors that are not plain ones on a GPU: of others a process may not even ask for its GPUs.
    """
    parts: list[Any] = []
    for value in args:
        if type(value) in _PLAIN and value.is_cuda:
            parts += value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % 16, value.is_neg()
        elif isinstance(value, Tensor):
            return None
        else:
            parts.append(tuple(value) if isinstance(value, list) else value)
    return (*parts, *scalars.items(), *_asked_of_process())


def _asked_of_process() -> tuple[Hashable, ...]:
    """What kernels, and the host functions that launch them, ask of the process."""
    capturing = torch.cuda.is_current_stream_capturing()
    return torch.cuda.current_device(), kernels.products_are_exact(), kernels.communicates(), capturing


def _can_be_recorded(args: Sequence[Any]) -> bool:
    """Whether all tensors lie on the current GPU and begin where kernels want it, and no CUDA graph is captured.

    Of a graph, the host has nothing to do later.
    """
    here = torch.device("cuda", torch.cuda.current_device())
    fit = all(t.device == here and t.data_ptr() % 16 == 0 and not t.is_neg() for t in tensors_of(args))
    return fit and not torch.cuda.is_current_stream_capturing()


class Calls:
    """The kinds of calls that an operator has had, and the programs of those that came again."""

    def __init__(self) -> None:
        self._seen: set[Kind] = set()
        # None for what cannot be recorded.
        self._programs: dict[Kind, Program | None] = {}

    def program(self, args: Sequence[Any], scalars: dict[str, Any]) -> Program | None:
        """What a call has left to do, to be called with its tensors; None of a call that is to run as it is."""
        kind = _kind(args, scalars) if self._programs else None
        return None if kind is None else self._programs.get(kind)

    def run(
        self, given: Sequence[Any], scalars: dict[str, Any], function: Callable[..., Any], args: Sequence[Any]
    ) -> Any:
        """function(*args) for a call that has no program; args are what was given, and defaults."""
        kind = _kind(given, scalars)
        if kind is None or kind in self._programs:
            return function(*args)
        if kind not in self._seen:
            if len(self._seen) + len(self._programs) >= _MOST:
                self._seen.clear()
                self._programs.clear()
            self._seen.add(kind)
            return function(*args)
        # Not at the top: operators work where Triton is missing.
        from mhc_compile.kernels import replay

        self._seen.discard(kind)
        if not _can_be_recorded(args):
            self._programs[kind] = None
            return function(*args)
        start_of = functools.partial(replay.by_driver, compat.load_kernel)
        result, self._programs[kind] = replay.record(function, args, start_of, compat.empty_on_gpu())
        return result
