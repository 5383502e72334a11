"""Tensor subclasses that hold other tensors: what is taken out of them is a value like any other."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

import mhc_compile
from mhc_compile import compat, passes
from tests.zoo.check import rewriting
from tests.zoo.misses import MISSES
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


def _distributed(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for name, parameter in list(model.named_parameters(recurse=False)):
        setattr(model, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
    return model


# The last two lose some parts of a split to an operator: autograd then joins DTensors with zeros that are none.
@pytest.mark.parametrize("name", ["", "half_of_the_sum_added", "logits_clamped", "reads_one_stream_twice"])
def test_streams_that_are_a_dtensor(mesh: DeviceMesh, name: str) -> None:
    """As many sites as among plain tensors, and gradients."""
    torch.manual_seed(0)
    kind = MISSES[name] if name else Sublayer
    model, x = kind(4, 6, 3, 2), torch.randn(X)
    plain = mhc_compile.explain(model, x)
    expected, *exact = _with_gradients(model, model, x)
    torch._dynamo.reset()
    _distributed(model, mesh)
    program, report = rewriting(model)
    result, *gradients = _with_gradients(model, program, distribute_tensor(x, mesh, [Shard(1)]))
    assert sorted(site.op for site in report.rewritten) == sorted(site.op for site in plain.rewritten)
    assert [site.reason for site in report.declined] == [site.reason for site in plain.declined]
    assert report.errors == []
    assert isinstance(result, DTensor)
    assert result.placements == (Shard(1),)
    for one, other in zip((result, *gradients), (expected, *exact), strict=True):
        # Two float32 evaluations of a few hundred sums.
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["", "half_of_the_sum_added", "logits_clamped", "reads_one_stream_twice"])
def test_a_dtensor_with_a_symbolic_number_of_tokens(mesh: DeviceMesh, name: str) -> None:
    """What is rewritten has the results and gradients of eager code, and what is not has a reason."""
    torch.manual_seed(0)
    kind = MISSES[name] if name else Sublayer
    model = _distributed(kind(4, 6, 3, 2), mesh)
    program, report = rewriting(model, dynamic=True)
    for batch in (2, 4):
        x = distribute_tensor(torch.randn(batch, 3, 4, 6), mesh, [Shard(0)])
        (result, *gradients), (exact, *expected) = (_with_gradients(model, call, x) for call in (program, model))
        assert result.placements == (Shard(0),)
        for one, other in zip((result, *gradients), (exact, *expected), strict=True):
            # Two float32 evaluations of a few hundred sums.
            torch.testing.assert_close(one.full_tensor(), other.full_tensor(), rtol=1e-5, atol=1e-5)
    assert report.errors == []
    assert report.rewritten
    assert all(site.reason for site in report.declined)
    if name == "reads_one_stream_twice":
        assert any("would lose a part" in site.reason for site in report.declined)


def _with_gradients(model: nn.Module, program: Callable[..., Any], x: Tensor) -> list[Any]:
    result = program(x)
    used = list(model.parameters())
    gradients = torch.autograd.grad(result.square().sum(), used, allow_unused=True)
    return [result.detach(), *(gradient for gradient in gradients if gradient is not None)]


class Halves(Sublayer):
    """Both parts of a split are used beside the sublayer, and one part of another split."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        last = x.split(3, -1)[-1]
        return self.body(torch.cat((second, first + last), -1))


def test_a_split_all_of_whose_parts_are_used_stays(mesh: DeviceMesh) -> None:
    taken: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        assert [site.op for site in passes.run_recursively(gm).rewritten] == BOTH
        taken.extend(str(node.target) for node in gm.graph.nodes if node.target in ("chunk", "split", "narrow"))
        return gm.forward

    model, x = _distributed(Halves(4, 6, 3, 2), mesh), distribute_tensor(torch.randn(X), mesh, [Shard(1)])
    torch.compile(model, backend=backend)(x)
    assert taken == ["chunk", "narrow"]


class Elsewhere(Sublayer):
    """Its sublayer hands its output on in shards of tokens."""

    def layer(self, layer_input: Any, x: Tensor) -> Any:
        return super().layer(layer_input, x).redistribute(placements=[Shard(1)])


def test_a_result_is_placed_as_in_eager_code(mesh: DeviceMesh) -> None:
    """Streams in shards of channels are written so by the operator, but by eager code in the shards of f."""
    model, x = _distributed(Elsewhere(4, 6, 3, 2), mesh), distribute_tensor(torch.randn(X), mesh, [Shard(3)])
    redistributed: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        report = passes.run_recursively(gm)
        assert [site.op for site in report.rewritten] == BOTH
        redistributed.append(sum(node.target == "redistribute" for node in gm.graph.nodes))
        return gm.forward

    result, expected = torch.compile(model.body, backend=backend)(x), model.body(x)
    assert result.placements == expected.placements == (Shard(1),)
    assert redistributed == [2]  # the program's own, and that of the result
    torch.testing.assert_close(result.full_tensor(), expected.full_tensor(), rtol=1e-5, atol=1e-5)


def test_in_place_writes_into_a_dtensor_stay(mesh: DeviceMesh) -> None:
    """What comes in their place among plain tensors has a derivative that takes no DTensors."""
    model = _distributed(MISSES["write_into_buffer"](4, 6, 3, 2), mesh)
    report = mhc_compile.explain(model, distribute_tensor(torch.randn(X), mesh, [Shard(1)]))
    assert report.errors == []
    assert "expand_combine" not in {site.op for site in report.rewritten}


def test_without_rules_streams_that_are_a_dtensor_say_so(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("mhc_compile.compat.dtensors"), "_with_rules", [])
    program, report = rewriting(_distributed(Sublayer(4, 6, 3, 2), mesh))
    program(distribute_tensor(torch.randn(X), mesh, [Replicate()]))
    assert report.rewritten == []
    assert {site.reason for site in report.declined} == {"an input is a tensor subclass, DTensor"}


def test_local_map(mesh: DeviceMesh) -> None:
    """The function that it maps works on plain tensors."""
    model = Sublayer(4, 6, 3, 2)

    def body(x: DTensor) -> Any:
        mapped = local_map(model.body, [Shard(1)], in_placements=([Shard(1)],), device_mesh=mesh)
        return mapped(x)

    x = distribute_tensor(torch.randn(X), mesh, [Shard(1)])
    program, report = rewriting(body)
    torch.testing.assert_close(program(x).to_local(), model.body(x.to_local()), rtol=1e-5, atol=1e-5)
    assert [site.op for site in report.rewritten] == BOTH
    assert report.errors == []


def test_parameters_gathered_in_the_graph(mesh: DeviceMesh) -> None:
    """As SimpleFSDP has them: sharded, and made whole where they are used."""
    model = Sublayer(4, 6, 3, 2)
    names = [name for name, _ in model.named_parameters()]
    shards = {name: distribute_tensor(getattr(model, name).detach(), mesh, [Shard(0)]) for name in names}
    leaves = {name: shard.requires_grad_() for name, shard in shards.items()}

    def body(x: Tensor) -> Any:
        whole = {
            name: leaf.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            for name, leaf in leaves.items()
        }
        return torch.func.functional_call(model, whole, (x,))

    x = torch.randn(X)
    program, report = rewriting(body)
    out = program(x)
    torch.testing.assert_close(out, model(x), rtol=1e-5, atol=1e-5)
    out.square().sum().backward()
    assert leaves["phi"].grad is not None
    assert [site.op for site in report.rewritten] == BOTH
    assert report.errors == []


@pytest.mark.parametrize(
    ("module", "name", "mutates"),
    [
        ("torch._dynamo.variables.tensor", "prim_to_local", False),
        ("torch._dynamo.variables.torch", "prim from_local", False),
        ("torch._dynamo.utils", "numpy_to_tensor_wrapper", True),
    ],
)
def test_methods_of_dtensors_as_torch_2_11_has_them(module: str, name: str, mutates: bool) -> None:
    """Dynamo puts functions of its own into the graph, as it does for NumPy code."""

    def function(x: Tensor) -> Tensor:
        return x

    function.__module__, function.__name__ = module, name
    graph = torch.fx.Graph()
    assert compat.may_mutate(graph.call_function(function, (graph.placeholder("x"),))) is mutates
