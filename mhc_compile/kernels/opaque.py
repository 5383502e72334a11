"""Kernels that Inductor cannot put into its graphs: those written in Gluon.

Inductor compiles a user's Triton kernel from its source, and knows no other language. In a graph such a kernel is a
call of the operator `mhc::_launch`, for which Inductor's code calls what launches the kernel (`ops._launch`). Inductor
plans its memory all the same, because what it makes are arguments that it writes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any

import torch

from mhc_compile.encoding import to_text
from mhc_compile.kernels.common import FUSED, on_device


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
        self.put_back(range(len(args)), args, given)

    def aligned(self, args: Sequence[Any]) -> list[Any]:
        """The arguments with copies of those tensors that begin elsewhere."""
        return [_copy(a) if isinstance(a, torch.Tensor) and a.data_ptr() % 16 else a for a in args]

    def put_back(self, places: Sequence[int], args: Sequence[Any], given: Sequence[Any]) -> None:
        """Copy what was written into copies; places: where the arguments stand among those of the kernel."""
        for place, arg, copy in zip(places, args, given, strict=False):
            if copy is not arg and place in self._written:
                arg.copy_(copy)

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
        dtypes = [str(args[i].dtype).removeprefix("torch.") for i in (*written, *read)]
        launch = to_text([path, [*written, *read, *sizes], dtypes, rest, options])
        tensors, ints, results = ([args[i] for i in at] for at in (read, sizes, written))
        torch.ops.mhc._launch(launch, tensors, ints, written=results)


def span(tensor: torch.Tensor) -> int:
    """How many elements a tensor lies across."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) if tensor.numel() else 0


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of the original, for which a kernel was compiled; a clone of parts of rows has others."""
    memory = tensor.as_strided((span(tensor),), (1,))
    return memory.clone().as_strided(tensor.shape, tensor.stride())


# What starts a kernel on the current stream, given the numbers of programs, and of its arguments those that vary.
Start = Callable[[tuple[int, int, int], Sequence[int]], None]
Load = Callable[[Any, torch.device, Sequence[Any], Sequence[int]], Start | None]


class Launch:
    """One launch of an opaque kernel, again and again: after the first, past all that Triton asks of the arguments.

    places: where the tensors and then the sizes stand that it is called with; dtypes: those of the tensors; rest: the
    other arguments in their places. Behind the kernel's stands the number of programs, which may be one of the sizes.
    load: gives what starts a compiled kernel on a device, of the arguments and the places of those that vary, or None,
    and Triton does.
    """

    def __init__(
        self,
        kernel: Opaque,
        places: Sequence[int],
        dtypes: Sequence[str],
        rest: Sequence[Any],
        options: dict[str, Any],
        load: Load,
    ) -> None:
        *self._args, self._programs = rest
        self._kernel, self._options, self._load = kernel, options, load
        self._counted = len(self._args) in places
        self._places = [place for place in places if place < len(self._args)]
        self._dtypes = [getattr(torch, name) for name in dtypes]
        self._starts: dict[torch.device, Start] = {}

    def __call__(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = ()) -> None:
        values = [tensor.data_ptr() for tensor in tensors]
        if reduce(or_, values) % 16:
            given = self._kernel.aligned(tensors)
            self(given, sizes)
            self._kernel.put_back(self._places, tensors, given)
            return
        values += sizes
        programs = values.pop() if self._counted else self._programs
        with on_device(tensors[0]):
            device = tensors[0].device
            start = self._starts.get(device)
            if start is None:
                start = self._starts[device] = self._compile(device, sizes)
            start((programs, 1, 1), values)

    def _compile(self, device: torch.device, sizes: Sequence[int]) -> Start:
        """What starts the kernel on a device."""
        kernel, compiled = self._kernel.kernel, self._compiled(sizes)
        constants = [self._options[name] for name in kernel.arg_names[len(self._args) :]]

        def by_triton(grid: tuple[int, int, int], values: Sequence[int]) -> None:
            compiled[grid](*self._filled(values), *constants)

        return self._load(compiled, device, self._args, self._places) or by_triton

    def compile(self) -> None:
        """Compile the kernel into Triton's cache, for any sizes."""
        self._compiled([2] * (len(self._places) - len(self._dtypes)))

    def _compiled(self, sizes: Sequence[int]) -> Any:
        """The kernel as Triton compiles it for tensors by their dtypes, and for any sizes."""
        from triton import knobs

        _know_assembler(knobs.nvidia.ptxas.path)
        values = self._filled([*self._dtypes, *sizes])
        return self._kernel.kernel.warmup(*values, grid=(1, 1, 1), **FUSED, **self._options)

    def _filled(self, values: Sequence[Any]) -> list[Any]:
        """The kernel's arguments, of which these vary."""
        args = self._args.copy()
        for place, value in zip(self._places, values, strict=False):
            args[place] = value
        return args


class _Absent:
    """What Triton asks of a GPU while it compiles."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_device(self) -> Any:
        return self._target

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


_assembler = ""


def _know_assembler(path: str) -> None:
    """Let Triton ask this assembler for its version, which is part of each kernel's key: it may remember another's."""
    global _assembler
    if path != _assembler:
        from triton.backends.nvidia.compiler import get_ptxas_version

        get_ptxas_version.cache_clear()
        _assembler = path


def hash_of_triton() -> str | None:
    """The hash of all of Triton, part of each kernel's key, which a process takes up to a second and a half to make."""
    try:
        from triton.runtime.cache import triton_key
    except ImportError:  # of a Triton that is not known
        return None
    return str(triton_key())


def triton_here() -> dict[str, str]:
    """With what Triton compiles in this process, and where it keeps the result, as variables for `compiling_for`."""
    from triton import knobs

    libdevice = os.environ.get("TRITON_LIBDEVICE_PATH")
    return {"TRITON_PTXAS_PATH": knobs.nvidia.ptxas.path, "TRITON_CACHE_DIR": knobs.cache.dir} | (
        {} if libdevice is None else {"TRITON_LIBDEVICE_PATH": libdevice}
    )


@contextlib.contextmanager
def compiling_for(
    target: tuple[Any, ...], environment: dict[str, str], triton_hash: str | None = None
) -> Iterator[None]:
    """Triton compiles for a GPU, its own description of it, as a process with these variables would.

    triton_hash: what that process has found out as `hash_of_triton`, which holds for this process from then on.

    The GPU need not be there: nothing is launched. Triton remembers the version of its assembler, which is part of a
    kernel's key in the cache, and of which another than this process's may be meant.
    """
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas_version
    from triton.runtime import cache, driver

    if triton_hash is not None:
        cache.triton_key = lambda: triton_hash
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    get_ptxas_version.cache_clear()
    driver.set_active(_Absent(GPUTarget(*target)))
    try:
        yield
    finally:
        driver.set_active(None)
        get_ptxas_version.cache_clear()
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
