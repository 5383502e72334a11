"""Kernels that Inductor cannot put into its graphs: those written in Gluon.

Inductor compiles a user's Triton kernel from its source, and knows no other language. In a graph such a kernel is a
call of the operator `mhc::_launch`, for which Inductor's code calls what launches the kernel (`ops._launch`). Inductor
plans its memory all the same, because what it makes are arguments that it writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mhc_compile.kernels.common import on_device


def opaque(*writes: str) -> Callable[[Any], Opaque]:
    """Decorate a Gluon kernel; writes are the names of the tensors that it writes, the others it only reads."""
    return lambda kernel: Opaque(kernel, writes)


class Opaque:
    """A kernel that is launched as a Triton kernel is, `kernel[grid](*args, **options)`.

    Each tensor that it is given begins at a multiple of 16 bytes, which its copies to shared memory demand.
    """

    def __init__(self, kernel: Any, writes: Sequence[str]) -> None:
        self.kernel = kernel
        self._written = [kernel.arg_names.index(name) for name in writes]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._start, grid)

    def _start(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        given = self.aligned(args)
        self.kernel[grid](*given, **options)
        self.put_back(args, given)

    def aligned(self, args: Sequence[Any]) -> list[Any]:
        """The arguments with copies of those tensors that begin elsewhere."""
        return [_copy(a) if isinstance(a, torch.Tensor) and a.data_ptr() % 16 else a for a in args]

    def put_back(self, args: Sequence[Any], given: Sequence[Any]) -> None:
        """Copy what was written into copies."""
        for i in self._written:
            if given[i] is not args[i]:
                args[i].copy_(given[i])

    def record(self, grid: tuple[int, ...], args: Sequence[Any], options: dict[str, Any]) -> None:
        """Call the operator in place of the kernel, as what a graph is traced with."""
        (programs,) = grid
        args = (*args, programs)
        written = [i for i in self._written if args[i] is not None]
        read = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and i not in written]
        sizes = [i for i, a in enumerate(args) if isinstance(a, torch.SymInt)]
        for i in sizes:
            if i < len(args) - 1 and not self.kernel.params[i].do_not_specialize:
                raise ValueError(f"{self.kernel.__name__} is compiled for a single {self.kernel.arg_names[i]}")
        rest = [None if isinstance(a, (torch.Tensor, torch.SymInt)) else a for a in args]
        path = f"{self.kernel.__module__}.{self.kernel.__name__}"
        launch = json.dumps([path, [*written, *read, *sizes], rest, options])
        torch.ops.mhc._launch(launch, *([args[i] for i in at] for at in (written, read, sizes)))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of the original, which a kernel has been told; a clone of a part of rows has others."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((last + 1 if tensor.numel() else 0,), (1,))
    return memory.clone().as_strided(tensor.shape, tensor.stride())


Start = Callable[[int, Sequence[Any]], None]


class Launch:
    """One launch of an opaque kernel, again and again: after the first, past all that Triton asks of the arguments.

    places: where the tensors and sizes stand that it is called with; rest: the others in their places, and behind the
    kernel's arguments the number of its programs; launcher: of a compiled kernel and a device, gives what starts it
    with so many programs and arguments, or None, and Triton does.
    """

    def __init__(
        self,
        kernel: Opaque,
        places: Sequence[int],
        rest: Sequence[Any],
        options: dict[str, Any],
        launcher: Callable[[Any, torch.device], Start | None] | None = None,
    ) -> None:
        self._kernel, self._places, self._rest, self._options = kernel, places, list(rest), options
        self._constants = [options[name] for name in kernel.kernel.arg_names[len(rest) - 1 :]]
        self._launcher = launcher
        self._starts: dict[Any, Start] = {}

    def __call__(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = ()) -> None:
        args, misaligned = self._rest.copy(), 0
        for place, value in zip(self._places, (*tensors, *sizes), strict=True):
            args[place] = value
        for tensor in tensors:
            misaligned |= tensor.data_ptr() % 16
        programs = args.pop()
        given = self._kernel.aligned(args) if misaligned else args
        # The kernel does not care which sizes these are, the other numbers are those of this launch, and tensors are
        # aligned: their types are what is left.
        key = (tensors[0].device, *[tensor.dtype for tensor in tensors])
        with on_device(tensors[0]):
            start = self._starts.get(key)
            if start is not None:
                start(programs, given)
            else:
                compiled = self._kernel.kernel[programs, 1, 1](*given, **self._options)
                start = None if self._launcher is None else self._launcher(compiled, tensors[0].device)
                self._starts[key] = start or self._by_triton(compiled)
        if misaligned:
            self._kernel.put_back(args, given)

    def _by_triton(self, compiled: Any) -> Start:
        return lambda programs, given: compiled[programs, 1, 1](*given, *self._constants)
