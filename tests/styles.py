"""One rank of a job that shares out streams by a plan: `python -m tests.styles DEVICE RANK RANKS FILE SCENARIO...`."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mhc_compile
from mhc_compile import passes, records
from mhc_compile.distributed import HyperConnectionParallel
from mhc_compile.nn import Form, HyperConnection, HyperHead
from mhc_compile.testing import Errors, judge
from tests.fuzz.plants import planted
from tests.jobs import Scenarios, device, here, run_rank
from tests.sharded import rewriting

BATCH, LENGTH, STREAMS, WIDTH = 2, 6, 4, 8
# Few half-steps of Sinkhorn: what is compared here is what ranks do.
FORM = Form.deepseek_v4(iterations=2)
LAYERS = 2


class Model(nn.Module):
    """Whole streams, as every rank has them, to whole vectors of tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        mlp = lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))  # noqa: E731
        options: dict[str, Any] = {"form": FORM, "init": "deepseek_v4", "std": 0.3}
        self.layers = nn.ModuleList(HyperConnection(mlp(), dim=WIDTH, **options) for _ in range(LAYERS))
        self.head = HyperHead(WIDTH, STREAMS, **options)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def streams_of_all() -> Tensor:
    return here(torch.randn(BATCH, LENGTH, STREAMS, WIDTH))


def planned(model: Model, mesh: DeviceMesh, streams: Placement) -> Model:
    """The model with its streams and the layers inside shared out; what comes in and goes out is whole."""
    inside = Shard(2) if streams == Shard(-1) else streams
    plan = {
        "layers.*": HyperConnectionParallel(streams, input_layouts=Replicate()),
        "layers.*.layer.0": ColwiseParallel(input_layouts=inside, use_local_output=False),
        "layers.*.layer.2": RowwiseParallel(output_layouts=inside, use_local_output=False),
        "head": HyperConnectionParallel(streams, output_layouts=Replicate(), use_local_output=True),
    }
    parallelize_module(model, mesh, plan)
    return model


def _whole(value: Any) -> Tensor:
    whole: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().clone()


def _gradients(model: nn.Module, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """The result, and the gradients of parameters and streams; added to those that are there."""
    x = x.detach().requires_grad_()
    result = model(x)
    (result * weight).sum().backward()
    named = {name: _whole(p.grad) for name, p in model.named_parameters()}
    return {"result": _whole(result), "x": _whole(x.grad), **named}


@rewriting()
def trained(mesh: DeviceMesh, streams: Placement, *, compiled: bool = False) -> dict[str, Any]:
    """Two backward passes without `zero_grad` in between, judged against one process; placements of gradients."""
    model = here(Model())
    whole, double = copy.deepcopy(model), copy.deepcopy(model).double()
    planned(model, mesh, streams)
    if compiled:
        model.compile(backend="mhc", fullgraph=True)
    trusted, errors = Errors(), Errors()
    for _ in range(3):
        for each in (model, whole, double):
            each.zero_grad()
        for _ in range(2):
            x, weight = streams_of_all(), here(torch.randn(BATCH, LENGTH, WIDTH))
            exact = _gradients(double, x.double(), weight.double())
            alone, shared = _gradients(whole, x, weight), _gradients(model, x, weight)
        trusted.add(alone, exact)
        errors.add(shared, exact)
    own = [p for module in (*model.layers, model.head) for p in module.parameters(recurse=False)]
    return {
        "findings": [str(one) for one in judge(trusted, errors, list(exact), "the model") if not one.ok],
        "placed": sorted({f"{p.placements} {p.grad.placements}" for p in own}),  # type: ignore[attr-defined, union-attr]
        "own": len(own),
        "rewritten": sorted(site.op for site in records.report().rewritten),
        "left": [site.reason for site in records.report().declined] + records.report().errors,
    }


@rewriting()
def verified(mesh: DeviceMesh, *, wrong_on: int | None = None) -> dict[str, Any]:
    """`verify` with DTensors as parameters, inputs and outputs; one rank may have a wrong rewrite."""
    streams = Shard(1)
    model = planned(here(Model()), mesh, streams)
    x = distribute_tensor(streams_of_all(), mesh, [streams])
    before = [_whole(p) for p in model.parameters()]
    is_wrong = wrong_on == dist.get_rank()
    with mock.patch.object(passes, "run", planted("transposed mixing")) if is_wrong else contextlib.nullcontext():
        found = mhc_compile.verify(nn.Sequential(*model.layers), x, inductor=False, raises=False, say=None)
    return {
        "ok": found.ok,
        "failures": len(found.failures),
        "rewritten": len(found.report.rewritten),
        "compared": len(found.errors["mhc"].numbers),
        "numbers": found.errors["mhc"].numbers["output"],
        "changed": sum(not torch.equal(_whole(p), b) for p, b in zip(model.parameters(), before, strict=True)),
    }


def optimised(mesh: DeviceMesh) -> dict[str, Any]:
    """What an optimizer and the norm of gradients communicate for parameters of hyper-connections."""
    model = planned(here(Model()), mesh, Shard(1))
    own = [p for module in (*model.layers, model.head) for p in module.parameters(recurse=False)]
    optimizer = torch.optim.AdamW(own)
    with CommDebugMode() as backward:
        model(streams_of_all()).sum().backward()
    with CommDebugMode() as step:
        nn.utils.clip_grad_norm_(own, 1.0)
        optimizer.step()
    counted = {str(name).rpartition(".")[2]: count for name, count in backward.get_comm_counts().items()}
    return {"backward": counted, "step": step.get_total_counts(), "parameters": len(own)}


class Hands(nn.Module):
    """Hands on what it gets."""

    def forward(self, *given: Any) -> tuple[Any, ...]:
        return given


class Listed(Hands):
    def forward(self, *given: Any) -> Any:
        return list(given)


def handed_on(mesh: DeviceMesh) -> dict[str, Any]:
    """How streams, gates and others are placed inside, and what comes out of them."""
    x, gates = streams_of_all(), here(torch.randn(BATCH, LENGTH, STREAMS))
    mask = torch.ones_like(gates, dtype=torch.bool)
    found: dict[str, Any] = {}
    for streams in (Shard(0), Shard(1), Shard(-1), Replicate()):
        style = HyperConnectionParallel(streams, input_layouts=Replicate())
        given = parallelize_module(Hands(), mesh, style)(x, gates, mask, 3)
        found[str(streams)] = [str(one.placements) if isinstance(one, DTensor) else type(one).__name__ for one in given]
    style = HyperConnectionParallel(output_layouts=(Replicate(), None), use_local_output=True)
    made = parallelize_module(Hands(), mesh, style)(x, gates)
    style = HyperConnectionParallel(output_layouts=Shard(-1))
    found["last"] = [str(one.placements) for one in parallelize_module(Hands(), mesh, style)(x, gates)]
    found["made"] = [[type(one).__name__, *one.shape] for one in made]
    return found


def wrong(mesh: DeviceMesh) -> dict[str, Any]:
    """Messages; all ranks raise, and none waits."""
    ranks = mesh.size()
    square, other = init_device_mesh(device(), (1, ranks)), DeviceMesh(device(), list(reversed(range(ranks))))
    x = streams_of_all()

    def raised(call: Callable[[], Any]) -> str:
        try:
            call()
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    def with_parameter(placed: DeviceMesh, placement: Placement) -> nn.Module:
        module = Hands()
        module.phi = nn.Parameter(distribute_tensor(here(torch.ones(4, 8)), placed, [placement]))
        return module

    def called(streams: Placement, *given: Any) -> Callable[[], Any]:
        style = HyperConnectionParallel(streams, input_layouts=Replicate())
        return lambda: parallelize_module(Hands(), mesh, style)(*given)

    style = HyperConnectionParallel()
    return {
        "placement": raised(lambda: HyperConnectionParallel(Partial())),
        "type": raised(lambda: HyperConnectionParallel("tokens")),  # type: ignore[arg-type]
        "mesh": raised(lambda: parallelize_module(Hands(), square, style)),
        "sharded parameter": raised(lambda: parallelize_module(with_parameter(mesh, Shard(1)), mesh, style)),
        "parameter elsewhere": raised(lambda: parallelize_module(with_parameter(other, Replicate()), mesh, style)),
        "whole parameter": raised(lambda: parallelize_module(with_parameter(mesh, Replicate()), mesh, style)),
        "no streams": raised(called(Shard(1), 3)),
        "no arguments": raised(called(Shard(1))),
        "too few dims": raised(called(Shard(1), here(torch.ones(2, 3)))),
        "over n": raised(called(Shard(2), x)),
        "beyond": raised(called(Shard(7), x)),
        "sizes": raised(called(Shard(1), x[:, : LENGTH - 1])),
        "elsewhere": raised(called(Shard(1), distribute_tensor(x, other, [Shard(1)]))),
        "dims": raised(
            lambda: parallelize_module(Hands(), mesh, HyperConnectionParallel(output_layouts=Shard(3)))(x, x[..., 0])
        ),
        "list": raised(lambda: parallelize_module(Listed(), mesh, HyperConnectionParallel(use_local_output=True))(x)),
        "results": raised(
            lambda: parallelize_module(Hands(), mesh, HyperConnectionParallel(output_layouts=(None, None)))(x)
        ),
    }


def seeded(scenario: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    torch.manual_seed(1)
    return scenario()


def scenarios(ranks: int, _folder: Path) -> Scenarios:
    mesh = init_device_mesh(device(), (ranks,))
    known: dict[str, Callable[[], dict[str, Any]]] = {
        "rows": lambda: trained(mesh, Shard(0)),
        "tokens": lambda: trained(mesh, Shard(1)),
        "channels": lambda: trained(mesh, Shard(-1)),
        "whole": lambda: trained(mesh, Replicate()),
        "tokens, compiled": lambda: trained(mesh, Shard(1), compiled=True),
        "channels, compiled": lambda: trained(mesh, Shard(-1), compiled=True),
        "verified": lambda: verified(mesh),
        "verified, wrong": lambda: verified(mesh, wrong_on=1),
        "optimised": lambda: optimised(mesh),
        "handed on": lambda: handed_on(mesh),
        "wrong": lambda: wrong(mesh),
    }
    return {name: functools.partial(seeded, scenario) for name, scenario in known.items()}


if __name__ == "__main__":
    run_rank(scenarios)
