"""Starts kernels that Triton compiled, by CUDA's driver.

A launch through Triton takes 16 to 26 microseconds of the host's time. Before the first launch of a kernel, Triton
compiles a C function for it. torch's own launcher knows no cooperative launch.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

# What starts a kernel on the current stream, given the numbers of programs, and of its arguments those that vary.
Start = Callable[[tuple[int, int, int], Sequence[int]], None]

# Triton's types, each in 8 bytes.
_PACKED = {"i32": "i4x", "u32": "I4x", "i64": "q", "u64": "Q", "fp32": "f4x", "fp64": "d"}
_NO_CONTEXT = 201


class _Arguments(threading.local):
    """Where one thread keeps the arguments of a launch: the driver is given the address of each."""

    def __init__(self, layout: str, values: Sequence[Any], places: Sequence[int]) -> None:
        # Behind the arguments Triton keeps room for two pointers, which are read where it asks for scratch memory.
        slots = [*places, len(values), len(values) + 1]
        self.memory = ctypes.create_string_buffer(8 * len(slots))
        struct.pack_into(layout, self.memory, 0, *values)
        first = ctypes.addressof(self.memory)
        self.addresses = (ctypes.c_void_p * len(slots))(*(first + 8 * slot for slot in slots))


def load_kernel(compiled: Any, device: torch.device, args: Sequence[Any], varying: Sequence[int]) -> Start | None:
    """What starts a compiled kernel on this device, the current one; None where Triton has to.

    varying: the places, among these arguments, of tensors, which come as addresses, and of sizes; the others stay.
    """
    try:
        metadata, names, signature = compiled.metadata, compiled.src.fn.arg_names, compiled.src.signature
        # For kernel(x, weight, out, M, eps) with a weight of None, where out, x and M vary, [2, 0, 3]:
        # {0: "*bf16", 2: "*bf16", 3: "i32", 4: "fp32"}, and memory for out, x, M and eps.
        kinds = {i: signature[name] for i, name in enumerate(names) if signature[name] != "constexpr"}
        order = [*varying, *(i for i in kinds if i not in varying)]
        layout = ["Q" if kinds[i].startswith("*") else _PACKED[kinds[i]] for i in order]
        special = metadata.num_ctas > 1 or metadata.launch_pdl
        scratch = metadata.global_scratch_size + metadata.profile_scratch_size
        cooperative, shared, threads = metadata.launch_cooperative_grid, metadata.shared, 32 * metadata.num_warps
        launch = _cuda().cuLaunchCooperativeKernel if cooperative else _cuda().cuLaunchKernel
        function = None if special or scratch else _load(compiled, device.index)
    except (AttributeError, LookupError, OSError):  # of a Triton, or a driver, that is not known
        function = None
    if function is None:
        return None
    values = [0 if i in varying else args[i] for i in order]
    arguments = _Arguments("=" + "".join(layout), values, [order.index(i) for i in kinds])
    write = struct.Struct("=" + "".join(layout[: len(varying)])).pack_into
    stream_of, no_more = torch._C._cuda_getCurrentRawStream, () if cooperative else (None,)

    def start(grid: tuple[int, int, int], given: Sequence[int]) -> None:
        if 0 in grid:
            return
        write(arguments.memory, 0, *given)
        stream, addresses = stream_of(device.index), arguments.addresses
        wanted = (function, *grid, threads, 1, 1, shared, stream, addresses, *no_more)
        error = launch(*wanted)
        if error == _NO_CONTEXT:
            _enter(device.index)
            error = launch(*wanted)
        if error:
            raise RuntimeError(f"{compiled.name} was not launched: {_describe(error)}")

    return start


@functools.cache
def _load(compiled: Any, index: int) -> int | None:
    """The CUfunction of a kernel that Triton compiled, loaded to a GPU, the current one.

    None of an unknown Triton, and where it does not fit, of which Triton has more to say.
    """
    try:
        from triton.runtime import driver

        utils, shared = driver.active.utils, compiled.metadata.shared
        load, most = utils.load_binary, utils.get_device_properties(index)["max_shared_mem"]
    except (ImportError, AttributeError, LookupError):
        return None
    function: int | None = load(compiled.name, compiled.kernel, shared, index)[1] if shared <= most else None
    return function


def empty_on_gpu() -> Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]:
    """What makes memory on the current GPU: as Inductor's code does, in half the time of `torch.empty_strided`."""
    found = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    return _empty_by_torch if found is None else found


def _empty_by_torch(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


@functools.cache
def _cuda() -> Any:
    """CUDA's driver."""
    cuda = ctypes.CDLL("libcuda.so.1")
    sizes, pointers = [ctypes.c_uint] * 7, [ctypes.c_void_p] * 2
    cuda.cuLaunchKernel.argtypes = [ctypes.c_void_p, *sizes, *pointers, ctypes.c_void_p]
    cuda.cuLaunchCooperativeKernel.argtypes = [ctypes.c_void_p, *sizes, *pointers]
    return cuda


def _enter(index: int) -> None:
    """Give this thread the device's context, as torch does with its first call of CUDA, which may still come."""
    context = ctypes.c_void_p()
    _cuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), index)
    _cuda().cuCtxSetCurrent(context)


def _describe(error: int) -> str:
    text = ctypes.c_char_p()
    _cuda().cuGetErrorString(error, ctypes.byref(text))
    return (text.value or b"an unknown error").decode()
