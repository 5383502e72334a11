"""Kernels that graphs launch by an operator: what surrounds them, with a kernel that torch computes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from mhc_compile import compat
from mhc_compile.compat import driver
from mhc_compile.kernels import common
from mhc_compile.kernels.opaque import Launch, Opaque, Start


class Kernel:
    """out = factor * x, and the addresses that it was given."""

    arg_names = ("x", "out", "factor", "BLOCK")
    __module__, __name__ = "somewhere", "kernel"

    def __init__(self) -> None:
        self.compiled_for: list[tuple[Any, ...]] = []
        self.addresses: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda x, out, factor, BLOCK: self._run(x.data_ptr(), out.data_ptr(), factor, BLOCK)

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
        self.compiled_for.append((*args, grid, options))
        return {(3, 1, 1): self._run}

    def _run(self, x: int, out: int, factor: float, block: int) -> None:
        assert block == 8
        self.addresses = [x, out]
        values = (ctypes.c_float * 7).from_address(x)
        (ctypes.c_float * 7).from_address(out)[:] = [factor * value for value in values]


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


def _launch(kernel: Kernel, places: list[int], rest: list[Any]) -> Launch:
    return Launch(Opaque(kernel, ["out"]), places, ["float32"] * 2, rest, {"BLOCK": 8}, compat.load_kernel)


def test_triton_is_asked_once() -> None:
    kernel = Kernel()
    launch = Launch(
        Opaque(kernel, ["out"]), [1, 0], ["float32", "float32"], [None, None, 5.0, 3], {"BLOCK": 8}, compat.load_kernel
    )
    for tensor in (torch.ones(7), torch.ones(7), _misaligned(7) + 1):
        for out in (torch.empty(7), _misaligned(7)):
            launch([out, tensor])
            assert torch.equal(out, 5 * tensor)
    assert kernel.compiled_for == [(torch.float32, torch.float32, 5.0, (1, 1, 1), common.FUSED | {"BLOCK": 8})]


def test_a_launch_says_that_products_and_sums_become_one() -> None:
    """Triton 3.9 warns where nothing is said: 3.10 is to round both."""
    given: list[dict[str, Any]] = []
    common.launch({(3,): lambda x, **options: given.append(options)}, (3,), torch.ones(7), BLOCK=8)
    assert given == [{"enable_fp_fusion": True, "BLOCK": 8}]


def test_sizes_and_the_number_of_programs_may_be_given() -> None:
    kernel = Kernel()
    launch = Launch(
        Opaque(kernel, ["out"]), [1, 0, 2, 3], ["float32", "float32"], [None] * 4, {"BLOCK": 8}, compat.load_kernel
    )
    x, out = torch.ones(7), torch.empty(7)
    launch([out, x], [5, 3])
    assert torch.equal(out, 5 * x)


@gluon.jit
def _scale(x, weight, out, count, stride, factor, BLOCK: gl.constexpr):  # type: ignore[no-untyped-def]
    at = gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [4], [0])) * stride
    gl.store(out + at, gl.load(x + at, mask=at < count, other=0.0) * factor, mask=at < count)


class Cuda:
    """CUDA's driver, which has nothing to start a kernel on: keeps what it is given."""

    def __init__(self, *errors: int) -> None:
        self.errors = list(errors)
        self.launches: list[tuple[Any, ...]] = []
        self.entered = 0

    def cuLaunchKernel(self, *given: Any) -> int:
        *numbers, addresses, extra = given
        assert extra is None
        kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, ctypes.c_uint64, ctypes.c_uint64)
        values = [kind.from_address(address).value for kind, address in zip(kinds, addresses, strict=True)]
        self.launches.append((numbers, values))
        return self.errors.pop() if self.errors else 0

    def cuLaunchCooperativeKernel(self, *given: Any) -> int:
        return self.cuLaunchKernel(*given, None)

    def cuDevicePrimaryCtxRetain(self, context: Any, index: int) -> None:
        assert index == 2

    def cuCtxSetCurrent(self, context: Any) -> None:
        self.entered += 1

    def cuGetErrorString(self, error: int, text: Any) -> None:
        text._obj.value = b"error %d" % error


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """_scale, for a Hopper, of which nobody asks to have one."""
    signature = {"x": "*bf16", "weight": "constexpr", "out": "*bf16", "count": "i32", "stride": "constexpr"}
    constants = {"weight": None, "stride": 1, "BLOCK": 128}
    source = GluonASTSource(_scale, signature | {"factor": "fp32", "BLOCK": "constexpr"}, constants, {})
    monkeypatch.setattr(driver, "_load", lambda compiled, index: 75 + index)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 1000 + index, raising=False)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=common.FUSED | {"num_warps": 4})


def _start(compiled: Any, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setattr(driver, "_cuda", lambda: cuda)
    start = compat.load_kernel(compiled, torch.device("cuda", 2), [None, None, None, None, 1, 0.25], [2, 0, 3])
    assert start is not None
    return start


@pytest.mark.parametrize("cooperative", [False, True])
def test_the_driver_gets_what_a_compiled_kernel_takes(
    cooperative: bool, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No argument that is None or was compiled in, and after them what Triton keeps room for; each thread its own."""
    compiled.metadata = compiled.metadata._replace(launch_cooperative_grid=cooperative)
    cuda = Cuda()
    start = _start(compiled, cuda, monkeypatch)
    start((9, 2, 3), [1 << 60, 1 << 40, -5])
    other = threading.Thread(target=start, args=((1, 1, 1), [32, 16, 1]))
    other.start()
    other.join()
    shared = compiled.metadata.shared
    assert cuda.launches == [
        ([77, 9, 2, 3, 128, 1, 1, shared, 1002], [1 << 40, 1 << 60, -5, 0.25, 0, 0]),
        ([77, 1, 1, 1, 128, 1, 1, shared, 1002], [16, 32, 1, 0.25, 0, 0]),
    ]


def test_a_thread_without_a_context_gets_that_of_the_device(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(201)
    _start(compiled, cuda, monkeypatch)((9, 1, 1), [32, 16, 1])
    first, second = cuda.launches
    assert (first, cuda.entered) == (second, 1)


def test_an_error_of_the_driver_is_raised(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="_scale was not launched: error 720"):
        _start(compiled, Cuda(720), monkeypatch)((9, 1, 1), [32, 16, 1])


def test_triton_launches_what_the_driver_does_not(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_cuda", Cuda)
    compiled.metadata = compiled.metadata._replace(global_scratch_size=16)
    for unknown in (object(), compiled):
        assert compat.load_kernel(unknown, torch.device("cuda", 0), [None] * 6, [2, 0, 3]) is None
