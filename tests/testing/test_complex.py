"""Complex numbers are widened, and judged by their parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mhc_compile.testing import Float64Reference, KeepFloat64

CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda x: x.to(torch.complex64),
    "cfloat": lambda x: x.cfloat(),
    "chalf": lambda x: x.chalf(),
    "factory": lambda x: torch.ones(8, dtype=torch.complex64),
    "factory without dtype": lambda x: torch.complex(torch.ones(2), torch.ones(2)),
    "to another": lambda x: x.to(torch.zeros(1, dtype=torch.complex64)),
    "type as": lambda x: x.type_as(NARROW),
}
NARROW = torch.zeros(1, dtype=torch.complex64)


@pytest.mark.parametrize("cast", CASTS)
def test_no_cast_leaves_complex128(cast: str) -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    with KeepFloat64():
        assert CASTS[cast](x).dtype is torch.complex128


class Rotates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.turn.cfloat()


def test_parameters_and_inputs_are_widened() -> None:
    module, x = Rotates(), torch.randn(2, 3, dtype=torch.complex64)
    reference = Float64Reference(module)
    out = reference(x)
    assert torch.equal(out, x.to(torch.complex128) * module.turn.to(torch.complex128))
    out.abs().sum().backward()
    assert reference.module.turn.grad is not None
    assert module.turn.dtype is torch.complex64
