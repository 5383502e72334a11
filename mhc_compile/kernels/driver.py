"""Starts kernels that Triton compiled, by CUDA's driver.

Triton's way from a call to the driver takes 16 to 26 microseconds of the host's time, and before the first launch of a
kernel it compiles a C function for it; torch's way knows no cooperative launch.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from mhc_compile import compat

# What starts a kernel on the current stream: takes the number of programs and the kernel's arguments, tensors as
# addresses.
Start = Callable[[int, Sequence[Any]], None]

# Triton's types, each in 8 bytes.
_PACKED = {"i32": "i4x", "u32": "I4x", "i64": "q", "u64": "Q", "fp32": "f4x", "fp64": "d"}
# Behind the arguments Triton keeps room for two pointers, which are read only where scratch memory is asked for.
_BEHIND = 2
_NO_CONTEXT = 201


class _Arguments(threading.local):
    """Where one thread puts the arguments of a launch: the driver is given the address of each."""

    def __init__(self, count: int) -> None:
        self.values = ctypes.create_string_buffer(8 * (count + _BEHIND))
        first = ctypes.addressof(self.values)
        self.addresses = (ctypes.c_void_p * (count + _BEHIND))(*range(first, first + 8 * (count + _BEHIND), 8))


def load(compiled: Any, device: torch.device) -> Start | None:
    """What starts a compiled kernel on this device, the current one; None where Triton has to.

    Raises what Triton raises where the device has too little shared memory for it.
    """
    try:
        metadata, names, signature = compiled.metadata, compiled.src.fn.arg_names, compiled.src.signature
        taken = {i: signature[name] for i, name in enumerate(names) if signature[name] != "constexpr"}
        layout = "=" + "".join("Q" if kind.startswith("*") else _PACKED[kind] for kind in taken.values())
        plain = (metadata.num_ctas, metadata.launch_pdl, metadata.global_scratch_size, metadata.profile_scratch_size)
        cooperative, shared, threads = metadata.launch_cooperative_grid, metadata.shared, 32 * metadata.num_warps
        begin = _cuda().cuLaunchCooperativeKernel if cooperative else _cuda().cuLaunchKernel
        function = compat.load_kernel(compiled, device.index) if plain == (1, False, 0, 0) else None
    except (AttributeError, LookupError, OSError):  # of a Triton, or a driver, that is not known
        function = None
    if function is None:
        return None
    arguments, pick, raw_stream = _Arguments(len(taken)), itemgetter(*taken), compat.raw_stream
    pack, end = struct.Struct(layout).pack_into, () if cooperative else (None,)

    def start(programs: int, args: Sequence[Any]) -> None:
        pack(arguments.values, 0, *pick(args))
        launch = function, programs, 1, 1, threads, 1, 1, shared, raw_stream(device.index), arguments.addresses, *end
        error = begin(*launch)
        if error == _NO_CONTEXT:
            _enter(device.index)
            error = begin(*launch)
        if error:
            raise RuntimeError(f"{compiled.name} was not launched: {_describe(error)}")

    return start


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
