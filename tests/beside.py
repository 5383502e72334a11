"""Training steps of FSDP2 in which the boundary's single pass runs beside communication, on GPUs: scenarios of a job.

Every scenario trains the same model on the same data. What runs beside it changes no bit of a loss.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.profiler
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mhc_compile import distributed
from mhc_compile.kernels import boundary_pass, gpus
from mhc_compile.nn import HyperConnection
from tests.jobs import Scenarios, run_rank
from tests.kernels.holder import Holder

STEPS = int(os.environ.get("BESIDE_STEPS", "60"))
WIDTH, TOKENS, LAYERS = 4096, 768, 2
# Before this step nothing is held: kernels are loaded, and a GPU may have to be idle for that.
LOADED = 10


class Wide(nn.Module):
    """A sublayer with one weight, which the graph gathers if a group is given."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        rows = WIDTH // (1 if group is None else group.size())
        self.weight = nn.Parameter(torch.randn(rows, WIDTH, dtype=torch.bfloat16) * WIDTH**-0.5)

    def forward(self, u: Tensor) -> Tensor:
        weight: Any = self.weight
        if self.group is not None:
            weight = functional.all_gather_tensor_autograd(weight, 0, self.group)  # type: ignore[no-untyped-call]
        return torch.tanh(u @ weight.t())


class Layer(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.first = HyperConnection(Wide(group), dim=WIDTH)
        self.second = HyperConnection(Wide(group), dim=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


class Beside:
    """What happens on this rank in a step, beside the model."""

    def begin(self, step: int) -> None:
        """Before the step."""

    def queued(self) -> None:
        """When the host has queued the forward pass."""

    def end(self, step: int) -> None:
        """When the host has queued the backward pass."""


class SecondCommunicator(Beside):
    """All-gathers and reduce-scatters of another group, on a stream of their own."""

    def __init__(self) -> None:
        ranks = dist.get_world_size()
        self._group, self._stream = dist.new_group(list(range(ranks))), torch.cuda.Stream()
        self._part = torch.ones(8 << 20, dtype=torch.bfloat16, device="cuda")
        self._whole = self._part.new_empty(ranks * len(self._part))
        torch.cuda.synchronize()

    def begin(self, step: int) -> None:
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                dist.all_gather_into_tensor(self._whole, self._part, group=self._group)
                dist.reduce_scatter_tensor(self._part, self._whole, group=self._group)
                self._part.div_(dist.get_world_size())


class Traced(SecondCommunicator):
    """A profiler looks at some steps. It saw so many `passes`, and NCCL ran beside so many of them."""

    FIRST, LAST = 30, 34

    def __init__(self) -> None:
        super().__init__()
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.passes, self.beside = 0, 0

    def begin(self, step: int) -> None:
        if step == self.FIRST:
            torch.cuda.synchronize()
            self._profiler.start()
        super().begin(step)

    def end(self, step: int) -> None:
        if step == self.LAST:
            torch.cuda.synchronize()
            self._profiler.stop()
            kernels = [event for event in self._profiler.events() or () if event.device_type == DeviceType.CUDA]
            passes = [event.time_range for event in kernels if "boundary_pass_kernel" in event.name]
            nccl = [event.time_range for event in kernels if "nccl" in event.name]
            self.passes = len(passes)
            self.beside = sum(any(a.start < b.end and b.start < a.end for b in nccl) for a in passes)


class Delays(Beside):
    """Streams and the host wait for a random time."""

    def __init__(self) -> None:
        self._random, self._other = random.Random(dist.get_rank()), torch.cuda.Stream()

    def begin(self, step: int) -> None:
        for stream in (torch.cuda.current_stream(), self._other):
            with torch.cuda.stream(stream):
                if self._random.random() < 0.5:
                    torch.cuda._sleep(int(self._random.random() * 4e6))
        if self._random.random() < 0.3:
            time.sleep(self._random.random() * 5e-3)


class Held(Beside):
    """In some steps processors are held, up to all of them, until the host has queued the forward or both passes."""

    def __init__(self) -> None:
        self._random, self._holding = random.Random(dist.get_rank()), contextlib.ExitStack()
        self._most = gpus.processors(torch.device("cuda", torch.cuda.current_device()))

    def begin(self, step: int) -> None:
        if step >= LOADED and self._random.random() < 0.3:
            torch.cuda.synchronize()
            self._holding.enter_context(Holder(self._random.choice([self._most, 100, 40]), whole=False))

    def queued(self) -> None:
        if self._random.random() < 0.5:
            self._holding.close()

    def end(self, step: int) -> None:
        self._holding.close()


@contextlib.contextmanager
def _watched() -> Iterator[list[str]]:
    """Filled when a graph gets the pass."""
    seen: list[str] = []
    forward = boundary_pass.forward

    def watched(*args: Any, **kwargs: Any) -> None:
        seen.append("pass")
        forward(*args, **kwargs)

    with mock.patch.object(boundary_pass, "forward", watched):
        yield seen


def _train(beside: Beside, *, steps: int = STEPS, one_pass: bool = True, gathered: bool = False) -> dict[str, Any]:
    """The losses of so many steps, and whether the single pass is in the graphs."""
    torch._dynamo.reset()
    torch.manual_seed(5)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    group = mesh.get_group() if gathered else None
    model = nn.Sequential(*(Layer(group) for _ in range(LAYERS))).cuda()
    run: Any = model
    if gathered:
        run = torch.compile(model, backend="mhc")
        shared = [p for p in model.parameters() if p.dtype != torch.bfloat16]
    else:
        shared = []
        replicas = distributed.replicate(model, mesh)
        for layer in model:
            layer.compile(backend="mhc")
            fully_shard(layer, mesh=mesh, ignored_params=replicas)
        fully_shard(model, mesh=mesh, ignored_params=replicas)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.Generator("cuda").manual_seed(100 + dist.get_rank())
    losses: list[Tensor] = []
    with (
        mock.patch.object(boundary_pass, "pays", return_value=one_pass),
        # No cache knows what is patched here.
        torch._inductor.config.patch(reorder_for_compute_comm_overlap=gathered, force_disable_caches=True),
        _watched() as seen,
    ):
        for step in range(steps):
            x = torch.randn(TOKENS, 4, WIDTH, generator=data, device="cuda").bfloat16()
            beside.begin(step)
            loss = run(x).float().square().mean()
            beside.queued()
            loss.backward()
            beside.end(step)
            for parameter in shared:
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if step % 50 == 0:  # the host stays near
                torch.cuda.synchronize()
    return {"losses": torch.stack(losses).tolist(), "passes": len(seen)}


def _traced() -> dict[str, Any]:
    traced = Traced()
    _train(traced, steps=Traced.LAST + 1)
    return {"passes": traced.passes, "beside": traced.beside}


def scenarios(_ranks: int, _folder: Path) -> Scenarios:
    few = min(STEPS, 300)
    return {
        "two passes": lambda: _train(Beside(), steps=few, one_pass=False),
        "one pass": lambda: _train(Beside()),
        "two communicators": lambda: _train(SecondCommunicator()),
        "traced": _traced,
        "delays": lambda: _train(Delays()),
        "held": lambda: _train(Held()),
        "gathered, two passes": lambda: _train(Beside(), steps=few, one_pass=False, gathered=True),
        "gathered and reordered": lambda: _train(Beside(), gathered=True),
    }


if __name__ == "__main__":
    run_rank(scenarios, seconds=300)
