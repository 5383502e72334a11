"""The float64 reference keeps float64 through every kind of cast, and leaves the original module alone."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mhc_compile.testing.evaluation import evaluate
from mhc_compile.testing.float64 import Float64Reference, KeepFloat64

LOWER = torch.zeros(1)
CASTS = {
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float32),
    "to keyword": lambda x: x.to(dtype=torch.bfloat16),
    "to device and dtype": lambda x: x.to("cpu", torch.float16),
    "type": lambda x: x.type(torch.float32),
    "type by class": lambda x: x.type(torch.FloatTensor),
    "type by name": lambda x: x.type("torch.HalfTensor"),
    "type by keyword": lambda x: x.type(dtype=torch.FloatTensor),
    "type as": lambda x: x.type_as(LOWER),
    "to a tensor": lambda x: x.to(LOWER),
    "to a tensor by keyword": lambda x: x.to(tensor=LOWER, copy=True),
    "type as by keyword": lambda x: x.type_as(other=LOWER),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "softmax": lambda x: x.softmax(-1, dtype=torch.float32),
    "functional softmax": lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
    "sum": lambda x: x.sum(-1, dtype=torch.float32),
    "factory": lambda x: x.new_zeros(3, dtype=torch.float32),
    "factory without dtype": lambda x: torch.zeros(3),
    "integer": lambda x: torch.arange(3).float(),
}


@pytest.mark.parametrize("ends", [[3, 3, 8], [2, 5, 6]])
def test_grouped_products(ends: list[int]) -> None:
    """Rows times matrices of their own, such as experts: torch has them for lower precision alone."""
    rows, matrices = torch.randn(8, 16, requires_grad=True), torch.randn(3, 16, 32, requires_grad=True)
    offs = torch.tensor(ends, dtype=torch.int32)
    lower = F.grouped_mm(rows, matrices, offs=offs)[: ends[-1]]
    wide = rows.detach().double().requires_grad_(), matrices.detach().double().requires_grad_()
    with pytest.raises(RuntimeError, match="got Double"):
        F.grouped_mm(*wide, offs=offs)
    with KeepFloat64():
        exact = F.grouped_mm(*wide, offs=offs)
    assert (exact.dtype, exact.shape) == (torch.float64, (8, 32))
    exact = exact[: ends[-1]]
    # Sixteen products in float32; their squares go into the gradients.
    torch.testing.assert_close(lower.double(), exact, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(lower.square().sum(), (rows, matrices))
    wanted = torch.autograd.grad(exact.square().sum(), wide)
    # torch writes nothing after the last group.
    torch.testing.assert_close(found[0][: ends[-1]].double(), wanted[0][: ends[-1]], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cast", CASTS)
def test_no_cast_leaves_float64(cast: str) -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    with KeepFloat64():
        assert CASTS[cast](x).dtype is torch.float64
    assert torch.zeros(1).dtype is torch.float32  # the default dtype is back


class Casting(nn.Module):
    """softmax of a linear layer, computed in float32 whatever the input's dtype, and cast back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = F.linear(x.float(), self.linear.weight.float(), self.linear.bias.float())
        return logits.softmax(-1, dtype=torch.float32).to(x.dtype)


def test_the_reference_is_the_float64_result_and_the_module_stays_as_it_was() -> None:
    module = Casting()
    x = torch.randn(4, 5, dtype=torch.bfloat16)
    reference = Float64Reference(module)
    got = reference(x)
    logits = x.double() @ module.linear.weight.double().T + module.linear.bias.double()
    # Two float64 evaluations of values below 1: a few units of 2.2e-16.
    torch.testing.assert_close(got, logits.softmax(-1), rtol=0, atol=1e-15)
    got.square().sum().backward()
    assert reference.module.linear.weight.grad is not None
    assert module.linear.weight.dtype is torch.bfloat16
    assert module.linear.weight.grad is None


def test_recomputation_in_backward_stays_in_float64() -> None:
    module = Casting()
    seen: list[Any] = []

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def run(x: torch.Tensor) -> torch.Tensor:
                seen.append(x.float().dtype)
                return self.inner(x)

            modes = contextlib.nullcontext(), KeepFloat64()
            return checkpoint(run, x, use_reentrant=False, context_fn=lambda: modes)

    Float64Reference(Checkpointed())(torch.randn(4, 5)).sum().backward()
    assert seen == [torch.float64, torch.float64]


def test_a_buffer_that_two_modules_hold_stays_one() -> None:
    class Holder(nn.Module):
        def __init__(self, buffer: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("buffer", buffer)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = torch.ones(3)
            self.first, self.second = Holder(shared), Holder(shared)

        def forward(self) -> torch.Tensor:
            self.first.buffer.mul_(3)  # type: ignore[operator]
            return self.second.buffer * 1  # type: ignore[no-any-return,operator]

    reference = Float64Reference(Both())
    assert torch.equal(reference(), Both()().double())


def test_sparse_gradients_are_compared() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3))
    results = evaluate(model, model, (torch.arange(4),), {}, grad=True)
    gradient = next(value for name, value in results.items() if "0.weight" in name)
    assert gradient.layout is torch.strided


def test_the_mode_may_be_entered_again() -> None:
    before, mode = torch.get_default_dtype(), KeepFloat64()
    with mode:
        with mode:
            assert torch.zeros(1).dtype == torch.float64
        assert torch.get_default_dtype() == torch.float64
    assert torch.get_default_dtype() == before
