"""Kernels that graphs launch by an operator: what surrounds them, with a kernel that torch computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from mhc_compile import compat
from mhc_compile.kernels.opaque import Launch, Opaque


class Kernel:
    """out = factor * x, and both the addresses that it was given and how often Triton was asked."""

    arg_names = ("x", "out", "factor", "BLOCK")
    __module__, __name__ = "somewhere", "kernel"

    def __init__(self) -> None:
        self.asked = 0
        self.addresses: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def start(x: Tensor, out: Tensor, factor: float, BLOCK: int) -> Any:
            self.asked += 1
            return self._compiled(x, out, factor, BLOCK)

        return start

    def _compiled(self, x: Tensor, out: Tensor, factor: float, block: int) -> Any:
        assert block == 8
        self.addresses = [x.data_ptr(), out.data_ptr()]
        out.copy_(factor * x)

        class Compiled:
            def __getitem__(_, grid: tuple[int, ...]) -> Callable[..., Any]:
                assert grid == (3, 1, 1)
                return self._compiled

        return Compiled()


def _misaligned(size: int) -> Tensor:
    return torch.zeros(size + 1)[1:]


@pytest.mark.parametrize("place", [torch.zeros, _misaligned])
def test_copies_begin_where_the_kernel_wants_them(place: Callable[[int], Tensor]) -> None:
    kernel = Kernel()
    x, out = place(7).fill_(2.0), place(7)
    Opaque(kernel, ["out"])[3,](x, out, 5.0, BLOCK=8)
    assert all(address % 16 == 0 for address in kernel.addresses)
    assert torch.equal(out, torch.full((7,), 10.0))
    assert torch.equal(x, torch.full((7,), 2.0))


def test_what_is_read_may_be_what_is_written() -> None:
    x = _misaligned(7).fill_(2.0)
    Opaque(Kernel(), ["out"])[3,](x, x, 5.0, BLOCK=8)
    assert torch.equal(x, torch.full((7,), 10.0))


@pytest.mark.parametrize(
    "part",
    [
        torch.arange(40.0).view(4, 10)[:, 1:9],
        torch.arange(40.0).view(4, 10)[:, 1:9].t(),
        torch.arange(9.0)[1:].expand(3, 8),
        torch.arange(9.0)[1:1],
    ],
    ids=["rows", "columns", "expanded", "none"],
)
def test_copies_lie_as_the_original(part: Tensor) -> None:
    """The kernel is given the strides as well."""
    (copy,) = Opaque(Kernel(), []).aligned([part])
    assert (copy.data_ptr() % 16 == 0, copy.stride()) == (True, part.stride())
    assert torch.equal(copy, part)
    assert part.numel() == 0 or copy.data_ptr() != part.data_ptr()


def test_triton_is_asked_once_for_the_same_types() -> None:
    kernel = Kernel()
    launch = Launch(Opaque(kernel, ["out"]), [1, 0], [None, None, 5.0, 3], {"BLOCK": 8})
    for tensor in (torch.ones(7), torch.ones(7), _misaligned(7) + 1, torch.ones(7, dtype=torch.float64)):
        out = torch.empty_like(tensor)
        launch([out, tensor])
        assert torch.equal(out, 5 * tensor)
    assert kernel.asked == 2


def test_another_launcher_takes_over_after_the_first_time() -> None:
    kernel, started = Kernel(), []

    def launcher(compiled: Any, device: torch.device) -> Callable[[int, Any], None]:
        assert (compiled[3, 1, 1], device) == (kernel._compiled, torch.device("cpu"))
        return lambda programs, args: started.append((programs, len(args)))

    launch = Launch(Opaque(kernel, ["out"]), [1, 0], [None, None, 5.0, 3], {"BLOCK": 8}, launcher)
    x = torch.ones(7)
    for _ in range(3):
        launch([torch.empty(7), x])
    assert kernel.asked == 1
    assert started == [(3, 3)] * 2


@gluon.jit
def _scale(x, weight, out, count, stride, BLOCK: gl.constexpr):  # type: ignore[no-untyped-def]
    at = gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [4], [0])) * stride
    gl.store(out + at, gl.load(x + at, mask=at < count, other=0.0), mask=at < count)


def test_torch_launches_with_what_a_compiled_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No argument that is None or was compiled in; the stream is that of the kernel's device."""
    signature = {"x": "*bf16", "weight": "constexpr", "out": "*bf16", "count": "i32", "stride": "constexpr"}
    constants = {"weight": None, "stride": 1, "BLOCK": 128}
    source = GluonASTSource(_scale, signature | {"BLOCK": "constexpr"}, constants, {})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    compiled.function = 77
    seen: list[Any] = []

    class Torch:
        @staticmethod
        def _launch_kernel(*given: Any) -> None:
            seen.append(given)

    monkeypatch.setattr(StaticallyLaunchedCudaKernel, "C_impl", Torch)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 1000 + index, raising=False)
    start = compat.launcher(compiled, torch.device("cuda", 2))
    assert start is not None
    x, out = torch.ones(5), torch.empty(5)
    start(9, [x, None, out, 5, 1])
    ((function, *grid, warps, shared, types, args, stream),) = seen
    assert (function, grid, warps, shared, stream) == (77, [9, 1, 1], 4, compiled.metadata.shared, 1002)
    assert types[:3] == "OOi"
    assert args[:3] == (x, out, 5)
    # What Triton keeps room for behind the arguments.
    assert set(types[3:]) <= {"O"}
    assert args[3:] == (None,) * (len(types) - 3)


def test_triton_launches_what_torch_does_not() -> None:
    assert compat.launcher(object(), torch.device("cuda", 0)) is None
