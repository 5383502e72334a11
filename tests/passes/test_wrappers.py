"""Tensor subclasses that hold other tensors: what is taken out of them is a value like any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import mhc_compile
from mhc_compile import passes
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BOTH = ["generate_mix_and_aggregate", "expand_combine"]
X = (2, 3, 4, 6)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Local(nn.Module):
    """Its streams come as a DTensor, and are one again between two sublayers."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.first, self.second = (Sublayer(4, 6, 3, 2) for _ in range(2))

    def forward(self, x: DTensor) -> Tensor:
        out = self.first.body(x.to_local())
        doubled = DTensor.from_local(out, self.mesh, [Replicate()]) * 2.0
        result: Tensor = self.second.body(doubled.to_local())
        return result


def test_streams_that_come_out_of_a_dtensor(mesh: DeviceMesh) -> None:
    model, x = Local(mesh), distribute_tensor(torch.randn(X), mesh, [Replicate()])
    report = mhc_compile.explain(model, x)
    assert [site.op for site in report.rewritten] == 2 * BOTH
    assert (report.declined, report.errors) == ([], [])

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        passes.run_recursively(gm)
        return gm.forward

    # Two float32 evaluations of a few hundred sums.
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x), rtol=1e-5, atol=1e-5)


def test_streams_that_are_a_dtensor_say_so(mesh: DeviceMesh) -> None:
    model = Sublayer(4, 6, 3, 2)
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
    report = mhc_compile.explain(model, distribute_tensor(torch.randn(X), mesh, [Replicate()]))
    assert report.rewritten == []
    assert {site.reason for site in report.declined} == {"an input is a tensor subclass, DTensor"}
