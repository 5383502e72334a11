"""One rank of a job of several: `python -m tests.ranks DEVICE RANK RANKS FILE SCENARIO...` prints what it saw in each.

A scenario says what goes wrong on which rank. In all of them the graph has a collective in it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn

import mhc_compile
from mhc_compile import agreement, backend, checking, hooks, passes, records
from mhc_compile.ops import _register
from tests.jobs import Scenarios, here, run_rank
from tests.passes.fused import program
from tests.zoo.near import Sublayer

planning = importlib.import_module("mhc_compile.passes.plan")
rewriting = importlib.import_module("mhc_compile.passes.rewrite")
FAILING = 1


class Summed(nn.Module):
    """A sublayer, and a sum over all ranks of what it makes, before a second one."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = (Sublayer(4, width, 3, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        total = collectives.all_reduce(x.detach(), "sum", dist.group.WORLD)
        return self.second(x + 0.01 * total)


def _raise(*args: Any, **kwargs: Any) -> Any:
    raise MemoryError("of this rank alone")


def _failing(owner: Any, name: str, on: Callable[[int], bool] = lambda rank: rank == FAILING) -> Any:
    return mock.patch.object(owner, name, _raise) if on(dist.get_rank()) else contextlib.nullcontext()


def _until_all_have_announced() -> Any:
    """Let no rank vote before all have said that they compile the graph."""
    original = passes.functional

    def wait(graph: Any) -> Any:
        vote = votes[-1]
        while vote._read("announced") < dist.get_world_size():
            time.sleep(0.002)
        return original(graph)

    return mock.patch.object(passes, "functional", wait)


votes: list[agreement.Vote] = []


class Seen(agreement.Vote):
    """A vote that tests can ask."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        votes.append(self)


@contextlib.contextmanager
def _one_after_the_other(first: int) -> Iterator[None]:
    """Let this rank compile before the others have begun, or after."""
    if dist.get_rank() != first:
        dist.barrier()
    yield
    if dist.get_rank() == first:
        dist.barrier()


def _combine_fails(on: Callable[[int], bool]) -> Any:
    return _failing(rewriting.Rewriter, "_combine", on)


SCENARIOS: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "plan": lambda: _failing(planning, "plan"),
    "one site": lambda: _combine_fails(lambda rank: rank == FAILING),
    "one site on all": lambda: _combine_fails(lambda rank: True),
    "fusing": lambda: _failing(passes.fusing, "fuse"),
    "describing sites": lambda: _failing(passes, "_sites"),
}


def _compiled_alike(model: nn.Module, x: Tensor, around: Callable[[], Any]) -> dict[str, Any]:
    """What the report of a compilation says, and how far its results are from those of eager code."""
    votes.clear()
    torch._dynamo.reset()
    dist.barrier()
    with around(), _until_all_have_announced():
        compiled = program(model)
        out = compiled.call(x)
        gradients = torch.autograd.grad(out.square().sum(), list(model.parameters()), allow_unused=True)
    return _seen(compiled.report, model, x, out, gradients)


def _seen(report: Any, model: nn.Module, x: Tensor, out: Tensor, gradients: Any) -> dict[str, Any]:
    expected = model(x)
    exact = torch.autograd.grad(expected.square().sum(), list(model.parameters()), allow_unused=True)
    pairs = [(out, expected), *((a, b) for a, b in zip(gradients, exact, strict=True) if b is not None)]
    distance = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return {
        "rewritten": [site.op for site in report.rewritten],
        "fused": sum(report.fusions.values()),
        "errors": report.errors,
        "distance": distance,
    }


def _in_turns(first: int, around: Callable[[], Any]) -> dict[str, Any]:
    """Passes alone, of which one rank's end before another's begin."""
    graphs: list[Any] = []

    def keep(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(here(Sublayer(4, 6, 3, 2)), backend=keep)(here(torch.randn(2, 3, 4, 6)))
    dist.barrier()
    with around(), _one_after_the_other(first):
        try:
            new, report = passes.run(graphs[0].graph)
        except agreement.FailedAlone as error:
            return {"raised": str(error)}
    return {"rewritten": [site.op for site in report.rewritten], "new": new is not None, "errors": report.errors}


def _others_are_not_waited_for() -> dict[str, Any]:
    """Each rank has a program of its own; then one compiles a program that no other has."""
    rank = dist.get_rank()
    torch._dynamo.reset()
    model = here(nn.Sequential(*(Sublayer(4, 6, 3, 2) for _ in range(rank + 1))))
    counts = []
    for given in (model, lambda x: x.sin(), model) if rank else (model,):
        compiled = program(given)
        compiled.call(here(torch.randn(2, 3, 4, 6)))
        counts.append(len(compiled.report.rewritten))
    return {"counts": counts}


def _others_instead() -> dict[str, Any]:
    """Each rank has a graph of its own where the others have another, and then the one that all have."""
    torch._dynamo.reset()
    dist.barrier()
    counts = []
    # Whoever waits in vain waits until the job has failed.
    with mock.patch.object(agreement, "_PATIENCE", 50.0), mock.patch.object(agreement.Vote, "_waited_in_vain", False):
        for width in (6 + dist.get_rank(), 5):
            model = here(Sublayer(4, width, 3, 2))
            own = (lambda x, model=model: model(x.sin())) if dist.get_rank() and width > 5 else model
            compiled = program(own)
            compiled.call(here(torch.randn(2, 3, 4, width)))
            counts.append(len(compiled.report.rewritten))
        in_vain = agreement.Vote._waited_in_vain
    return {"counts": counts, "in vain": in_vain}


def _only_one_compiles() -> dict[str, Any]:
    torch._dynamo.reset()
    compiled = program(here(Sublayer(4, 6, 3, 2)))
    if dist.get_rank() == FAILING:
        compiled.call(here(torch.randn(2, 3, 4, 6)))
    return {"rewritten": [site.op for site in compiled.report.rewritten]}


def _with_inductor() -> dict[str, Any]:
    """Work outside the graph fails on one rank, with the backend as users have it, in DistributedDataParallel."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(dist.get_rank())
    model, x = here(Summed()), here(torch.randn(2, 3, 4, 6, generator=generator))
    model(x).sum().backward()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.grad is not None)  # DistributedDataParallel waits for all that it has
    model.zero_grad()
    wrapped = nn.parallel.DistributedDataParallel(model)
    with contextlib.ExitStack() as stack:
        for owner, name in (
            (records, "_digest"),
            (backend.compat, "hash_files"),
            (backend.compat, "trace_artifact"),
            (backend.compat, "compile_beside"),
            (backend.compat, "tell_workers"),
        ):
            stack.enter_context(_failing(owner, name))
        hooks._sources_hash.cache_clear()
        out = torch.compile(wrapped, backend="mhc")(x)
        out.square().sum().backward()
    report = records.last()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    total = sum(float(gradient.double().norm()) for gradient in gradients)
    expected = model(x)
    distance = float((out - expected).abs().max() / expected.abs().max())
    return {
        "rewritten": [site.op for site in report.rewritten],
        "errors": sorted(set(report.errors)),
        "distance": distance,
        "norm": total,
    }


@contextlib.contextmanager
def _wrong_combine() -> Iterator[None]:
    """The kernel of a combine makes too large streams; so does what stands for it on a CPU."""
    module = importlib.import_module("mhc_compile.ops.expand_combine")
    mix, load = module.weighted_sums, _register._load_kernel

    def loaded(path: str) -> Callable[..., Any]:
        kernel = load(path)
        return (
            (lambda *given, **options: kernel(*given, **options) * 1.01) if path == "expand_combine.forward" else kernel
        )

    with (
        mock.patch.object(module, "weighted_sums", lambda weights, x: mix(weights, x) * 1.01),
        mock.patch.object(_register, "_load_kernel", loaded),
    ):
        yield


def _checked(planted: Callable[[int], bool]) -> dict[str, Any]:
    """Training steps with `mhc.check`, in which the combine of two streams is wrong on some ranks."""
    torch._dynamo.reset()
    checking.forget()
    model = here(Summed())

    def rewrite(mode: Any, options: Any, patches: Any) -> Any:
        return lambda gm, inputs: (patches["pre_grad_custom_pass"](gm.graph), gm.forward)[1]

    rewritten, distances = [], []
    with (
        _wrong_combine() if planted(dist.get_rank()) else contextlib.nullcontext(),
        mock.patch.object(backend.compat, "inductor_compiler", rewrite),
    ):
        compiled = torch.compile(model, backend="mhc", options={"mhc.check": True})
        for _ in range(2 * checking.CALLS + 4):
            x = here(torch.randn(2, 3, 4, 6))
            out = compiled(x)
            out.square().sum().backward()
            distances.append(float((out - model(x)).abs().max()))
            rewritten.append(sorted(site.op for site in records.report().rewritten))
    reasons = [site.reason for site in records.report().declined]
    return {"rewritten": rewritten, "reasons": reasons, "distance": max(distances)}


def _split() -> dict[str, Any]:
    """A model in DistributedDataParallel with small buckets, explained, and compiled by the passes alone."""

    def rewrite(mode: Any, options: Any, patches: Any) -> Any:
        return lambda gm, inputs: (patches["pre_grad_custom_pass"](gm.graph), gm.forward)[1]

    torch._dynamo.reset()
    x = here(torch.randn(2, 3, 4, 6))
    with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1000):
        wrapped = nn.parallel.DistributedDataParallel(here(Summed()), bucket_cap_mb=0.002)
        explained = mhc_compile.explain(wrapped, x)
        with mock.patch.object(backend.compat, "inductor_compiler", rewrite):
            torch.compile(wrapped, backend="mhc")(x)
    reports = [explained, records.report()]
    return {
        "sites": [[f"{site.op} at {site.location}: {site.told}" for site in report.sites] for report in reports],
        "cut": [len(report.cut) for report in reports],
        "graphs": [report.graphs for report in reports],
        "compiled": [report.compiled for report in reports],
    }


def _alike(name: str) -> dict[str, Any]:
    return _compiled_alike(here(Summed()), here(torch.randn(2, 3, 4, 6)), SCENARIOS[name])


def scenarios(_ranks: int, _folder: Path) -> Scenarios:
    torch.manual_seed(2 + dist.get_rank())
    agreement.Vote = Seen  # type: ignore[misc]
    alike = {name: functools.partial(_alike, name) for name in SCENARIOS}
    return alike | {
        "late failure": lambda: _in_turns(0, SCENARIOS["plan"]),
        "early failure": lambda: _in_turns(FAILING, SCENARIOS["plan"]),
        "others instead": _others_instead,
        "different programs": _others_are_not_waited_for,
        "only one compiles": _only_one_compiles,
        "inductor": _with_inductor,
        "split": _split,
        "wrong on all": lambda: _checked(lambda rank: True),
        "wrong on one": lambda: _checked(lambda rank: rank == FAILING),
        "wrong on none": lambda: _checked(lambda rank: False),
    }


if __name__ == "__main__":
    run_rank(scenarios)
