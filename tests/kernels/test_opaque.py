"""Kernels that graphs launch by an operator: what surrounds them, with a kernel that torch computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

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


def test_triton_is_asked_once_for_the_same_types() -> None:
    kernel = Kernel()
    launch = Launch(Opaque(kernel, ["out"]), [1, 0], [None, None, 5.0, 3], {"BLOCK": 8})
    for tensor in (torch.ones(7), torch.ones(7), _misaligned(7) + 1, torch.ones(7, dtype=torch.float64)):
        out = torch.empty_like(tensor)
        launch([out, tensor])
        assert torch.equal(out, 5 * tensor)
    assert kernel.asked == 2
