"""torchtitan's own function that compiles the layers of a model, on a CPU. Its trainer needs a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import mhc_compile
from tests.zoo.near import Sublayer

compiling = pytest.importorskip(
    "torchtitan.distributed.compile",
    reason="torchtitan is missing; no extra installs it, since it needs an older release of datasets",
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "passes_only")


class Model(nn.Module):
    """As torchtitan's models are: layers by name in a ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Sublayer(4, 6, 3, 2) for number in range(3)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("backend", "around"),
    [
        ("mhc", contextlib.nullcontext),
        # Here Inductor compiles in earnest.
        pytest.param("inductor", mhc_compile.enable, marks=pytest.mark.thorough),
    ],
    ids=["mhc", "enabled"],
)
def test_layers_that_torchtitan_compiles(backend: str, around: Callable[[], Any]) -> None:
    from torchtitan.config import CompileConfig
    from torchtitan.distributed import ParallelDims

    model, x = Model(), torch.randn(2, 3, 4, 6)
    expected = model(x)
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1)
    # torchtitan sets these for the whole process.
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=False, skip_fwd_side_effects_in_bwd_under_checkpoint=False),
        around(),
    ):
        compiling.apply_compile(model, compile_config=CompileConfig(enable=True, backend=backend), parallel_dims=dims)
        got = model(x)
        got.square().sum().backward()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # float32 in other orders
    report = mhc_compile.report()
    # One compiled layer serves all three.
    assert (len(report.rewritten), report.declined, report.errors) == (2, [], []), str(report)
