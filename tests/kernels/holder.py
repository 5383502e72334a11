"""A kernel that holds processors of a GPU until it is told to leave, as one that waits for another GPU does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Shared memory that leaves no room for a program of `boundary_pass`.
_NUMBERS = 1 << 15
_SECONDS = 60

# $0: what is at $1, once it is not 0.
_UNTIL_SET = gl.constexpr(
    """{
.reg .pred %set;
again:
ld.acquire.sys.global.b32 $0, [$1];
setp.ne.b32 %set, $0, 0;
@%set bra done;
nanosleep.u32 200;
bra again;
done:
}"""
)


@gluon.jit
def _hold_kernel(flag, arrived, sink, NUMBERS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    room = gl.allocate_shared_memory(gl.int32, [NUMBERS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    i = gl.arange(0, NUMBERS, LAYOUT)
    room.store(i)
    gl.atomic_add(arrived, 1, sem="relaxed", scope="gpu")
    told = gl.inline_asm_elementwise(_UNTIL_SET, "=&r,l", [flag.to(gl.int64)], gl.int32, is_pure=False, pack=1)
    gl.store(sink + i, room.load(LAYOUT) + told)


def wait_until(holds: Callable[[], bool]) -> bool:
    """Whether it holds within a minute."""
    end = time.monotonic() + _SECONDS
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


class Holder:
    """A context in which so many processors are held, or with whole=False as many of them as are free."""

    def __init__(self, processors: int, whole: bool = True) -> None:
        self._processors, self._whole = processors, whole
        self._streams = torch.cuda.Stream(), torch.cuda.Stream()
        self._one, self._count = torch.ones(1, dtype=torch.int32).pin_memory(), torch.empty(1).long().pin_memory()

    def __enter__(self) -> None:
        # Held as well, as long as the kernel runs: it writes them in the end.
        self._flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._arrived = torch.zeros(1, dtype=torch.int64, device="cuda")
        self._sink = torch.empty(_NUMBERS, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(self._streams[0]):
            _hold_kernel[(self._processors,)](self._flag, self._arrived, self._sink, _NUMBERS, num_warps=4)

        def all_are_held() -> bool:
            with torch.cuda.stream(self._streams[1]):
                self._count.copy_(self._arrived, non_blocking=True)
            self._streams[1].synchronize()
            return int(self._count) == self._processors

        assert not self._whole or wait_until(all_are_held)

    def __exit__(self, *_: Any) -> None:
        with torch.cuda.stream(self._streams[1]):
            self._flag.copy_(self._one, non_blocking=True)
        if self._whole:
            torch.cuda.synchronize()
