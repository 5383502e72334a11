"""The zoo on a GPU: the rewritten and fused graphs run the kernels, and are at least as accurate as the eager code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.zoo import ZOO, check
from tests.zoo.common import WIDTH

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo instantiates autograd.Function while it traces one, which torch itself warns about.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # After a graph break Dynamo looks at the .grad of the tensors that the second graph is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

LAYERS = 2


def _run(name: str, dtype: torch.dtype, width: int = WIDTH, tokens: tuple[int, int] = (2, 37)) -> check.Outcome:
    if name.startswith("hyper-connections"):
        pytest.importorskip(
            "hyper_connections", reason="hyper-connections is not installed; it is in mhc-compile[test]"
        )
    model = ZOO[name].build(layers=LAYERS, width=width).to("cuda", dtype)
    return check.run(model, (torch.randn(*tokens, width, dtype=dtype, device="cuda"),), repeats=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ZOO)
def test_as_accurate_as_eager(name: str, dtype: torch.dtype) -> None:
    check.assert_as_accurate(_run(name, dtype))


@pytest.mark.parametrize("name", ["deepseek", "transformer-engine", "megatron-dev", "liger"])
def test_a_real_width(name: str) -> None:
    outcome = _run(name, torch.bfloat16, width=1280, tokens=(3, 200))
    check.assert_as_accurate(outcome)
    assert "expand_combine" in outcome.operators


@pytest.mark.parametrize("name", ["deepseek", "transformer-engine", "megatron-dev"])
def test_through_inductor(name: str) -> None:
    """The whole backend, fused, against eager: differences of float32 rounding, amplified by a few layers."""
    model = ZOO[name].build(layers=LAYERS, width=128).cuda()
    x = torch.randn(2, 37, 128, device="cuda")
    compiled: Any = torch.compile(model, backend="mhc")
    eager, ours = check.evaluate(model, model, (x,)), check.evaluate(compiled, model, (x,))
    assert eager.keys() == ours.keys()
    for result, value in eager.items():
        limit = (64 if value.numel() >= check.FEW else 10_000) * torch.finfo(torch.float32).eps
        assert check.error(ours[result], value) < limit, result
