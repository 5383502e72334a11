"""What a host function does on a GPU, done again for other tensors of the same kind.

A host function checks sizes, makes views and memory, chooses tiles, and launches kernels through Triton. That takes
many times as long as the launches, and comes out the same for tensors with the same shapes, strides and dtypes. So one
call is recorded: which memory it made, what it launched, and where in which memory each argument lies. A `Program`
makes new memory and launches the same kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from mhc_compile.kernels.common import FUSED, cdiv, recorded
from mhc_compile.kernels.opaque import Load, Opaque, Start, span

log = logging.getLogger(__name__)

Place = tuple[int, int]
Step = Callable[[list[Tensor], list[int]], None]

# Memory on the current device, of a size, strides and a dtype.
Empty = Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]

aten = torch.ops.aten
_MEMORY = (
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten.new_empty_strided.default,
)  # fmt: skip
# Parts of one piece of memory begin at multiples of this, as pieces of torch's allocator do.
_APART = 512


class _Unknown(Exception):
    """The host function does something that a program cannot do again."""


@dataclass(frozen=True)
class _View:
    """A tensor within what a slot holds: its place and layout."""

    slot: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, slots: Sequence[Tensor]) -> Tensor:
        whole = slots[self.slot]
        if self.offset == 0 and whole.shape == self.size and whole.stride() == self.stride:
            return whole
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)


@dataclass(frozen=True)
class Launched:
    """A launch of a kernel; places: where its tensors lie, by their positions among the arguments."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]
    places: dict[int, Place]


StartOf = Callable[[Launched, torch.device], Start | None]


def by_driver(load: Load, launched: Launched, device: torch.device) -> Start | None:
    """What launches a kernel again, past Triton, for other tensors; None where Triton has to."""
    kernel = launched.kernel.kernel if isinstance(launched.kernel, Opaque) else launched.kernel
    compiled = kernel.warmup(*launched.args, grid=launched.grid, **FUSED, **launched.options)
    return load(compiled, device, launched.args, list(launched.places))


@dataclass(frozen=True)
class _Call:
    """A call of torch's, with views in place of its tensors; made: the slot of its result, if that is new memory."""

    function: Any
    args: Any
    kwargs: Any
    made: int | None

    def __call__(self, slots: list[Tensor], addresses: list[int]) -> None:
        args, kwargs = tree_map_only(_View, lambda view: view.of(slots), (self.args, self.kwargs))
        result = self.function(*args, **kwargs)
        if self.made is not None:
            slots[self.made], addresses[self.made] = result, result.data_ptr()


class _Recorder(TorchDispatchMode):
    """Follows each tensor to the argument or the memory in which it lies. Slots are the arguments, then memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.steps: list[Launched | _Call] = []
        # All tensors stay, so that no other one has their id or their memory.
        self._kept: list[Tensor] = []
        self._places: dict[int, Place] = {}
        self.whole: list[Tensor] = []
        self.calls_make: set[int] = set()
        self.zeros: set[int] = set()
        self.unknown: str | None = None
        self._launching = False
        for tensor in tensors:
            self._add(tensor)

    def _add(self, tensor: Tensor) -> int:
        self.whole.append(tensor)
        self._put(tensor, (len(self.whole) - 1, 0))
        return len(self.whole) - 1

    def _put(self, tensor: Tensor, place: Place) -> None:
        self._kept.append(tensor)
        self._places[id(tensor)] = place

    def place(self, tensor: Tensor) -> Place:
        """The slot that a tensor lies in, and how many bytes behind its beginning."""
        if id(tensor) not in self._places:
            raise _Unknown("a tensor of unknown origin")
        return self._places[id(tensor)]

    def view(self, tensor: Tensor) -> _View:
        slot, offset = self.place(tensor)
        if self.whole[slot].dtype != tensor.dtype:
            raise _Unknown("a view in another dtype")
        return _View(slot, offset // tensor.element_size(), tuple(tensor.shape), tensor.stride())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._launching:  # by Triton's interpreter, which copies
            return result
        try:
            self._note(func, args, kwargs, result)
        except _Unknown as error:
            self.unknown = self.unknown or f"{func}: {error}"
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if not isinstance(result, Tensor):
            raise _Unknown("its result is no tensor")
        if func in _MEMORY:
            self._add(result)
            return
        if func is aten.zeros.default and result.dim() == 1:
            self.zeros.add(self._add(result))
            return
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if not func._schema.is_mutable:
            within = [t for t in given if func.is_view and _same_storage(t, result)]
            if within:
                slot, offset = self.place(within[0])
                self._put(result, (slot, offset + _bytes_before(result) - _bytes_before(within[0])))
                return
        views, named = tree_map_only(Tensor, self.view, (args, kwargs))
        made = None
        if not any(result is t for t in given):
            made = self._add(result)
            self.calls_make.add(made)
        self.steps.append(_Call(func, views, named, made))

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Launch a kernel, and remember it."""
        self._launching = True
        kernel[grid](*args, **FUSED, **options)
        self._launching = False
        try:
            places = {at: self.place(arg) for at, arg in enumerate(args) if isinstance(arg, Tensor)}
            if isinstance(kernel, Opaque) and any(args[at].data_ptr() % 16 for at in places):
                raise _Unknown("it was given a copy")
            self.steps.append(Launched(kernel, grid, args, options, places))
        except _Unknown as error:
            self.unknown = self.unknown or f"an argument of {kernel}: {error}"


def _same_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _bytes_before(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def record(
    function: Callable[..., Any], args: Sequence[Any], start_of: StartOf, empty: Empty
) -> tuple[Any, Program | None]:
    """function(*args), and a program that does the same for other tensors; None if some of it cannot be done again.

    The tensors, at least one, lie on the current device and begin at multiples of 16 bytes, there as here.
    start_of: gives what launches a kernel again; empty: makes memory.
    """
    # Each argument is a tensor of its own, even if one tensor was given twice.
    args = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args]
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    recorder = _Recorder(tensors)
    with recorder, recorded(recorder.launch):
        result = function(*args)
    try:
        if recorder.unknown is not None:
            raise _Unknown(recorder.unknown)
        return result, _program(recorder, len(tensors), result, start_of, empty)
    except Exception as error:  # the result is there
        log.info("%s stays a call of the host: %s: %s", function, type(error).__name__, error)
        return result, None


def _program(recorder: _Recorder, given: int, result: Any, start_of: StartOf, empty: Empty) -> Program:
    alone = isinstance(result, Tensor)
    results = [recorder.view(tensor) for tensor in ([result] if alone else result)]
    if any(view.slot < given for view in results):
        raise _Unknown("a result is an argument")
    whole = recorder.whole
    read = tree_leaves([(step.args, step.kwargs) for step in recorder.steps if isinstance(step, _Call)])
    tensors = {view.slot for view in (*results, *read) if isinstance(view, _View)}
    tensors |= recorder.calls_make | recorder.zeros
    # What only kernels see is one piece of memory, behind all others.
    scratch, size = {}, 0
    for slot in range(given, len(whole)):
        if slot not in tensors:
            scratch[slot] = size
            size += cdiv(span(whole[slot]) * whole[slot].element_size(), _APART) * _APART
    steps: list[Step] = []
    for step in recorder.steps:
        if isinstance(step, Launched):
            places = {
                at: (len(whole), offset + scratch[slot]) if slot in scratch else (slot, offset)
                for at, (slot, offset) in step.places.items()
            }
            steps.append(_started(step, list(places.values()), start_of(step, whole[0].device)))
        else:
            steps.append(step)
    memory: list[Any] = [
        None if slot in scratch or slot in recorder.calls_make else (tuple(t.shape), t.stride(), t.dtype)
        for slot, t in enumerate(whole[given:], given)
    ]
    memory.append(((size,), (1,), torch.uint8) if size else None)
    return Program(empty, memory, sorted(recorder.zeros), steps, _of_whole(results, whole), alone)


def _of_whole(views: Sequence[_View], whole: Sequence[Tensor]) -> list[_View | int]:
    """The slots of those that are all that their slots hold."""
    return [view.slot if view.of(whole) is whole[view.slot] else view for view in views]


def _started(launched: Launched, places: Sequence[Place], start: Start | None) -> Step:
    if start is None:
        raise _Unknown(f"{launched.kernel} has to be launched by Triton")
    x, y, z = (*launched.grid, 1, 1)[:3]
    grid, started = (x, y, z), start

    def step(slots: list[Tensor], addresses: list[int]) -> None:
        started(grid, [addresses[slot] + offset for slot, offset in places])

    return step


class Program:
    """What a recorded call did, for the tensors among its arguments. It keeps no memory of any call."""

    def __init__(
        self,
        empty: Empty,
        memory: Sequence[tuple[Sequence[int], Sequence[int], torch.dtype] | None],
        zeros: Sequence[int],
        steps: Sequence[Step],
        results: Sequence[_View | int],
        alone: bool,
    ) -> None:
        self._empty, self._memory, self._zeros = empty, memory, zeros
        self._steps, self._results, self._alone = steps, results, alone

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """What the host function returns for these tensors, of the kinds of those that it was recorded with."""
        empty, nothing = self._empty, tensors[0]
        # What a call makes, and what is a part of the last piece, is no memory here.
        slots = [*tensors, *(nothing if kind is None else empty(*kind) for kind in self._memory)]
        for slot in self._zeros:
            slots[slot].zero_()
        addresses = [tensor.data_ptr() for tensor in slots]
        for step in self._steps:
            step(slots, addresses)
        results = [slots[view] if isinstance(view, int) else view.of(slots) for view in self._results]
        return results[0] if self._alone else tuple(results)
