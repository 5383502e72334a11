"""One rank of a job that trains with FSDP2 or DDP: `python -m tests.sharded DEVICE RANK RANKS FILE NAME...`.

It prints a line of JSON for each named case. All ranks know the rows of all: each compares its gradients with those of
one process for all rows, against float64.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mhc_compile import backend, distributed, records
from mhc_compile.nn import Form, HyperConnection, HyperHead, expand
from mhc_compile.testing import Errors, Float64Reference, judge
from tests.jobs import Scenarios, device, here, run_rank

WIDTH, STREAMS, LAYERS, ROWS, LENGTH = 16, 4, 2, 4, 32
RUNS = 4  # that are judged together: one unlucky run does not decide
# Few half-steps of Sinkhorn: what is compared here is what ranks do.
FORM = Form.deepseek_v4(iterations=2)


class Model(nn.Module):
    """Layers among hyper-connected streams, a learned exit, and a second output that no hyper-connection is part of."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(
            HyperConnection(
                nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()),
                dim=WIDTH,
                streams=STREAMS,
                form=FORM,
                init="deepseek_v4",
                std=0.3,
            )
            for _ in range(LAYERS)
        )
        self.head = HyperHead(WIDTH, STREAMS, form=FORM, init="deepseek_v4", std=0.3)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = expand(tokens, STREAMS)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return {"out": self.out(self.head(x)).tanh(), "beside": self.out(tokens).tanh()}


def loss_of(outputs: dict[str, Tensor]) -> Tensor:
    return (outputs["out"].to(torch.promote_types(outputs["out"].dtype, torch.float32)) - 0.3).square().mean()


def rows(step: int = 0) -> Tensor:
    """The rows of all ranks, [ranks, rows of one, length, width]."""
    generator = torch.Generator().manual_seed(7 + step)
    return here(torch.randn(dist.get_world_size(), ROWS, LENGTH, WIDTH, generator=generator))


def own(step: int = 0) -> Tensor:
    return rows(step)[dist.get_rank()]


def whole(value: Tensor) -> Tensor:
    return here(value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def _phi(model: nn.Module) -> Any:
    """A parameter that is a replica, as optimizers see it."""
    return dict(model.named_parameters())["head.phi"]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def lowered(model: Model) -> None:
    """Put all but the parameters of hyper-connections into bfloat16."""
    for module in (*(layer.layer for layer in model.layers), model.out):
        module.bfloat16()


Gradients = dict[str, Tensor]


def one_process(steps: int = 1, *, low: bool = False, first: int = 0) -> tuple[Gradients, Gradients]:
    """The gradients of all ranks' rows, summed over steps: of float32 (or layers in bfloat16), and of float64."""
    model = here(Model())
    reference = Float64Reference(model)
    if low:
        lowered(model)
    for step in range(first, first + steps):
        x = rows(step).flatten(0, 1)
        loss_of(model(x.bfloat16() if low else x)).backward()
        loss_of(reference(x)).backward()
    return gradients(model), gradients(reference.module)


def unlike(*runs: tuple[Gradients, Gradients, Gradients]) -> list[str]:
    """Which gradients have a greater error against float64 than the rule of `mhc_compile.testing.judge` allows.

    runs: the gradients that were found, those of one process, and those of float64. All are judged together.
    """
    errors, of_trusted = Errors(), Errors()
    for found, trusted, exact in runs:
        errors.add(found, exact)
        of_trusted.add(trusted, exact)
    return [str(finding) for finding in judge(of_trusted, errors, list(exact), "gradients") if not finding.ok]


@contextlib.contextmanager
def collectives() -> Iterator[list[str]]:
    """The names of what `mhc_compile.distributed` has ranks do together."""
    seen: list[str] = []

    def counted(name: str) -> Any:
        return lambda *args, **kwargs: (seen.append(name), getattr(dist, name)(*args, **kwargs))[1]

    with mock.patch.object(
        distributed.replicas, "dist", SimpleNamespace(**{name: counted(name) for name in ("all_reduce", "broadcast")})
    ):
        yield seen


@contextlib.contextmanager
def rewriting() -> Iterator[None]:
    """Of the backend "mhc": the passes and AOTAutograd, without Inductor."""

    def compiler(mode: Any, options: Any, patches: Any) -> Any:
        def compiled(gm: Any, inputs: Any) -> Any:
            patches["pre_grad_custom_pass"](gm.graph)
            gm.recompile()
            return aot_eager(gm, inputs)

        return compiled

    torch._dynamo.reset()
    counters.clear()
    records.forget()
    with mock.patch.object(backend.compat, "inductor_compiler", compiler):
        yield


@dataclass
class Setting:
    """How a model is sharded."""

    compiled: str = ""  # "layers" or "model"
    by_layer: bool = True
    reshard: bool = True
    low: bool = False  # computed in bfloat16
    stored_low: bool = False
    checkpointed: bool = False
    offloaded: bool = False


def mesh_of_all() -> DeviceMesh:
    ranks = dist.get_world_size()
    if ranks == 4:
        return init_device_mesh(device(), (2, 2), mesh_dim_names=("copies", "shards"))
    return init_device_mesh(device(), (ranks,))


def sharded(setting: Setting | None = None) -> Model:
    setting = setting or Setting()
    model, mesh = here(Model(checkpointed=setting.checkpointed)), mesh_of_all()
    if setting.stored_low:
        lowered(model)
    kwargs: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": setting.reshard}
    if setting.low:
        kwargs["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if setting.offloaded:
        kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    kwargs["ignored_params"] = distributed.replicate(model, mesh)
    for layer in model.layers if setting.by_layer else ():
        if setting.compiled == "layers":
            layer.compile(backend="mhc", fullgraph=True)
        fully_shard(layer, **kwargs)
    fully_shard(model, **kwargs)
    if setting.compiled == "model":
        model.compile(backend="mhc")
    return model


def compared(setting: Setting) -> dict[str, Any]:
    """Gradients, their norm, and what was rewritten."""
    low = setting.low or setting.stored_low

    def backward(step: int) -> tuple[Gradients, Gradients, Gradients]:
        model.zero_grad()
        loss_of(model(own(step).bfloat16() if setting.stored_low else own(step))).backward()
        return gradients(model), *one_process(low=low, first=step)

    with rewriting(), collectives() as seen:
        model = sharded(setting)
        runs = [backward(0)]
        report = records.report()
    _, trusted, exact = runs[0]
    norm = whole(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    norms = [torch.stack([g.double().norm() for g in each.values()]).norm() for each in (exact, trusted)]
    clipped = torch.stack([g.double().norm() for g in gradients(model).values()]).norm()
    with rewriting():
        runs += [backward(step) for step in range(1, RUNS)]
    return {
        "unlike": unlike(*runs),
        "norm": float((norm.double() - norms[0]).abs() / norms[0]),
        "norm of one process": float((norms[1] - norms[0]).abs() / norms[0]),
        "clipped": float(clipped),
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
        "seen": seen,
        "rewritten": sorted(site.op for site in report.rewritten),
        "left": [site.reason for site in report.declined] + report.errors,
    }


def accumulated() -> dict[str, Any]:
    """Three backward passes, of which the first two exchange nothing; and two that both do."""
    model = sharded()
    found: dict[str, Any] = {}
    with collectives() as seen:
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            loss_of(model(own(step))).backward()
            found[f"after {step}"] = [*seen, str(_phi(model).grad.placements)]  # type: ignore[union-attr]
    found["unlike"] = unlike((gradients(model), *one_process(3)))
    model = sharded()
    for step in range(2):
        loss_of(model(own(step))).backward()
    found["unlike with all exchanged"] = unlike((gradients(model), *one_process(2)))
    return found


def divided() -> dict[str, Any]:
    """Gradients are summed, not averaged, as `set_gradient_divide_factor` says; in two backward passes."""
    model = sharded()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    for step in range(2):
        loss_of(model(own(step))).backward()
    averages = {name: total / dist.get_world_size() for name, total in gradients(model).items()}
    return {"unlike": unlike((averages, *one_process(2)))}


def missing() -> dict[str, Any]:
    """The only output with hyper-connections is used on rank 0 alone, and one more exit is used on no rank."""
    model, mesh = Model(), mesh_of_all()
    model.spare = HyperHead(WIDTH, STREAMS)
    here(model)
    replicas = distributed.replicate(model, mesh)
    with collectives() as seen:
        for _ in range(2):  # what is there is kept if a backward pass adds nothing
            outputs = model(own())
            outputs["out" if dist.get_rank() == 0 else "beside"].sum().backward()
    alone = here(Model())
    alone(rows()[0])["out"].sum().backward()
    expected = 2 * alone.head.phi.grad / mesh.size()  # type: ignore[operator]
    return {
        "seen": seen,
        "distance": float((whole(_phi(model).grad) - expected).abs().max() / expected.abs().max()),
        "without": sum(replica.grad is None for replica in replicas),
        "of spare": sum(parameter.grad is None for parameter in model.spare.parameters()),
    }


def with_optimizer(**kwargs: Any) -> dict[str, Any]:
    """Parameters after three steps of AdamW with clipped gradients, and those of one process, against float64."""

    def train(
        model: nn.Module, x: Callable[[int], Tensor], call: Callable[[Tensor], Any], **options: Any
    ) -> dict[str, Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(call(x(step))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        return {name: whole(p) for name, p in model.named_parameters()}

    model, single = sharded(), here(Model())
    reference = Float64Reference(single)
    found = train(model, own, model, **kwargs)
    trusted = train(single, lambda step: rows(step).flatten(0, 1), single)
    exact = train(reference.module, lambda step: rows(step).flatten(0, 1), reference)
    copies = [torch.empty_like(found["head.phi"]) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, _phi(model).detach().to_local())  # type: ignore[attr-defined]
    return {"unlike": unlike((found, trusted, exact)), "equal": all(torch.equal(copies[0], each) for each in copies)}


def _trained(model: Model) -> tuple[Model, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_of(model(own())).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = {name: whole(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state |= {f"{name}: {key}": whole(value) for key, value in optimizer.state[parameter].items()}
    return {name: value.cpu() for name, value in state.items()}


def saved(folder: Path) -> dict[str, Any]:
    model, optimizer = _trained(sharded())
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(parts, checkpoint_id=str(folder / "checkpoint"))
    state = _state(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(state, folder / "expected")
    dist.barrier()
    return {"keys": sorted(parts["model"]) == sorted(Model().state_dict())}


def loaded(folder: Path) -> dict[str, Any]:
    """What any number of ranks reads from the checkpoint of another number."""
    model = sharded()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model, optimizer = _trained(model)
    before, after = get_state_dict(model, optimizer)
    parts = {"model": before, "optimizer": after}
    dcp.load(parts, checkpoint_id=str(folder / "checkpoint"))
    set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    found, expected = _state(model, optimizer), torch.load(folder / "expected")
    return {
        "names": found.keys() == expected.keys(),
        "unequal": [n for n in expected if not torch.equal(found[n], expected[n])],
    }


def made_on_meta() -> dict[str, Any]:
    """Each rank draws other values; in the first forward pass, all get those of the first rank."""
    mesh = mesh_of_all()
    with torch.device("meta"):
        model = Model()
    replicas = distributed.replicate(model, mesh)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=replicas)
    fully_shard(model, mesh=mesh, ignored_params=replicas)
    model.to_empty(device=device())
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (HyperConnection, HyperHead, nn.RMSNorm, nn.Linear)):
                module.reset_parameters()
    first = model.head.phi.detach().clone()
    dist.broadcast(first, 0)
    loss_of(model(own())).backward()
    gradient = _phi(model).grad
    return {
        "equal": torch.equal(model.head.phi.detach(), first),
        "placements": str(gradient.placements),  # type: ignore[union-attr]
    }


def forgotten() -> dict[str, Any]:
    """An optimizer's step with gradients that were not exchanged: DTensor averages them, one by one."""
    model = sharded()
    model.set_requires_gradient_sync(False)
    loss_of(model(own())).backward()
    expected = here(Model())
    loss_of(expected(rows().flatten(0, 1))).backward()
    before = expected.head.phi.detach().clone()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    step = before - whole(_phi(model))
    exact = expected.head.phi.grad
    return {"distance": float((step - exact).abs().max() / exact.abs().max())}  # type: ignore[union-attr, operator]


def in_ddp(*, checkpointed: bool = False, **kwargs: Any) -> dict[str, Any]:
    """Gradients of two backward passes in DistributedDataParallel, of which the first is in `no_sync` if it can."""
    with rewriting():
        model = here(Model(checkpointed=checkpointed))
        wrapped = DistributedDataParallel(model, **kwargs)
        wrapped.compile(backend="mhc")
        # A graph that is static has to be exchanged in its first backward pass, without the backend, too.
        with contextlib.nullcontext() if kwargs.get("static_graph") else wrapped.no_sync():
            loss_of(wrapped(own(0))).backward()
        loss_of(wrapped(own(1))).backward()
        report = records.report()
    return {
        "unlike": unlike((gradients(model), *one_process(2))),
        "rewritten": sorted(site.op for site in report.rewritten),
        "left": [site.reason for site in report.declined] + report.errors,
    }


def scenarios(_ranks: int, folder: Path) -> Scenarios:
    return {
        "eager": lambda: compared(Setting()),
        "offloaded": lambda: compared(Setting(offloaded=True)),
        "layers": lambda: compared(Setting("layers")),
        "bfloat16": lambda: compared(Setting("layers", low=True)),
        "stored in bfloat16": lambda: compared(Setting(stored_low=True)),
        "checkpointed": lambda: compared(Setting("layers", checkpointed=True, reshard=False)),
        "model": lambda: compared(Setting("model")),
        "one unit": lambda: compared(Setting("model", by_layer=False, reshard=False)),
        "accumulated": accumulated,
        "divided": divided,
        "missing": missing,
        "foreach": lambda: with_optimizer(foreach=True),
        "fused": lambda: with_optimizer(fused=True),
        "saved": lambda: saved(folder),
        "loaded": lambda: loaded(folder),
        "forgotten": forgotten,
        "made on meta": made_on_meta,
        "ddp": lambda: in_ddp(gradient_as_bucket_view=True),
        "ddp, static": lambda: in_ddp(static_graph=True, checkpointed=True),
    }


if __name__ == "__main__":
    run_rank(scenarios)
