"""Kernels that Inductor cannot put into its graphs: those written in Gluon.

Inductor compiles a user's Triton kernel from its source, and knows no other language. In a graph such a kernel is a
call of the operator `mhc::_launch`, which launches it as the host does. Inductor plans its memory all the same, because
what it makes are arguments that it writes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mhc_compile.kernels.common import capability

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # triton 3.7 and 3.6


@gluon.jit
def to_bf16(v):
    """v rounded to bf16, two numbers at a time: Triton converts one by one, on a unit an eighth as wide."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [v], dtype=gl.bfloat16, is_pure=True, pack=2
    )


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
        return functools.partial(self._start, grid)

    def _start(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        given = [_aligned(a) if isinstance(a, torch.Tensor) else a for a in args]
        self.kernel[grid](*given, **options)
        for i in self._written:
            if given[i] is not args[i]:
                args[i].copy_(given[i])

    def record(self, grid: tuple[int, ...], args: Sequence[Any], options: dict[str, Any]) -> None:
        """Call the operator in place of the kernel, as what a graph is traced with."""
        read = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and i not in self._written]
        rest = [None if isinstance(a, torch.Tensor) else a for a in args]
        path = f"{self.kernel.__module__}.{self.kernel.__name__}"
        launch = json.dumps([path, grid, [*self._written, *read], rest, options])
        torch.ops.mhc._launch(launch, [args[i] for i in self._written], [args[i] for i in read])


def runs_on(device: torch.device, *capabilities: int) -> bool:
    """Whether device is a GPU of NVIDIA's with one of these compute capabilities, 90 for 9.0."""
    return device.type == "cuda" and torch.version.hip is None and capability(device) in capabilities


def _aligned(t: torch.Tensor) -> torch.Tensor:
    return t.clone() if t.data_ptr() % 16 else t
