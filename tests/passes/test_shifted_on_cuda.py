"""Reads that come one sublayer after their gates on a GPU, through Inductor: lowered, whole and against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from mhc_compile import ops, records
from mhc_compile.testing.float64 import Float64Reference
from tests.passes.fused import evaluate
from tests.passes.shifted import Model, one_hot
from tests.zoo import check
from tests.zoo.common import STREAMS, WIDTH, random_parameter, random_phi

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo", "fresh_cache")]

BOTH = {"shifted_boundary": 3, "shifted_boundary_backward": 3}


class Chain(nn.Module):
    """Four sublayers without a layer: with the operators' kernels deterministic, so is all of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        rows = STREAMS * STREAMS + 2 * STREAMS
        self.phi = nn.ParameterList(random_phi(rows, STREAMS * width) for _ in range(4))
        self.scale = random_parameter(3, mean=1.0, std=0.2)
        self.bias = random_parameter(rows, std=0.5)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        h_pre = one_hot(x)
        for phi in self.phi:
            f = ops.aggregate(x, h_pre)
            h_pre, post, res = ops.generate_mix(x, phi, self.scale, self.bias)
            x = ops.expand_combine(f, None, post, x, res)
        return (ops.aggregate(x, h_pre),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 37, 4096])
def test_bitwise_as_whole_operators(tokens: int, dtype: torch.dtype) -> None:
    model, results = Chain(1280).cuda(), []
    x = torch.randn(tokens, STREAMS, 1280, device="cuda", dtype=dtype)
    for lower in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="mhc", options={"mhc.lower": lower}, dynamic=False)
        results.append(evaluate(compiled, model, x))
    assert {name: records.last().lowered[name] for name in BOTH} == BOTH
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value), name


@pytest.mark.parametrize("tokens", [(1, 1), (2, 77), (4, 512)])
def test_a_step_is_as_accurate_as_eager(tokens: tuple[int, int]) -> None:
    model, x = Model(4).cuda(), torch.randn(*tokens, WIDTH, device="cuda")
    reference = Float64Reference(model)
    exact = evaluate(lambda x: (reference(x),), reference.module, x.double())
    eager = evaluate(lambda x: (model(x),), model, x)
    compiled = torch.compile(model, backend="mhc", dynamic=False)
    values, code = run_and_get_code(evaluate, lambda x: (compiled(x),), model, x)
    assert not any("torch.ops.mhc" in text for text in code)
    assert {name: records.last().fusions[name] for name in BOTH} == BOTH
    for name, value in exact.items():
        error, limit = check.error(values[name], value), check.error(eager[name], value)
        # Twice eager's error, or as many roundings as a few dozen operations make.
        assert error <= max(2 * limit, 32 * torch.finfo(torch.float32).eps), name
