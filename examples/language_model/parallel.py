"""How a model is divided among the processes of a job, with torch.distributed's own means.

    ddp   each process has the whole model and its own rows; gradients are averaged
    fsdp  as ddp, but parameters, gradients and the optimizer's state are divided too
    tp    the layers of a block are divided, and the tokens of its streams; each process of a group has the same rows
    cp    the tokens of a row are divided; keys and values are gathered
    pp    the blocks are divided; streams go from stage to stage

They are combined by sizes, as in fsdp=2,tp=2. `ddp` and `tp` do not go together: DistributedDataParallel does not take
the tensors of tensor parallelism. So beside `tp`, `cp` divides parameters as `fsdp` does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from language_model.model import BYTES, LanguageModel, loss_of
from mhc_compile.distributed import HyperConnectionParallel

KINDS = ("pp", "ddp", "fsdp", "cp", "tp")
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


def sizes_of(text: str, world: int) -> dict[str, int]:
    """`fsdp=2,tp=2` as numbers. One size may be left out: it takes the processes that are left."""
    given = [part.partition("=") for part in text.split(",") if part]
    names = [name for name, _, _ in given]
    unknown = sorted(set(names) - set(KINDS))
    if unknown or len(set(names)) < len(names):
        raise ValueError(f"--parallel: expected different ones of {', '.join(KINDS)}, got {text!r}")
    if {"ddp", "fsdp"} <= set(names) or {"ddp", "tp"} <= set(names):
        raise ValueError(f"--parallel: ddp goes with neither fsdp nor tp, got {text!r}; fsdp goes with tp")
    sizes = {name: int(size) for name, _, size in given if size}
    open_ones = [name for name, _, size in given if not size]
    rest, left = divmod(world, math.prod(sizes.values()))
    if len(open_ones) > 1 or left or (not open_ones and rest != 1):
        raise ValueError(f"--parallel: {text!r} does not divide {world} processes")
    return sizes | dict.fromkeys(open_ones, rest)


@dataclass
class Parallel:
    """The place of this process. data: among those that average gradients; rows: among those with rows of their own."""

    sizes: dict[str, int]
    mesh: DeviceMesh | None = None
    tokens: DeviceMesh | None = None

    @classmethod
    def of(cls, text: str, device: str) -> Parallel:
        if not dist.is_initialized():
            return cls({})
        sizes = sizes_of(text or "ddp", dist.get_world_size())
        pp, cp, tp = (sizes.get(name, 1) for name in ("pp", "cp", "tp"))
        rows = cls(sizes).parts
        mesh = init_device_mesh(device, (pp, rows * cp, tp), mesh_dim_names=("pp", "data", "tp"))
        tokens = init_device_mesh(device, (pp, rows, cp, tp), mesh_dim_names=("pp", "rows", "cp", "tp"))
        return cls(sizes, mesh, tokens)

    def size(self, name: str) -> int:
        return self.sizes.get(name, 1)

    def rank(self, name: str) -> int:
        """This process's place along a dimension of the mesh."""
        if self.tokens is None:
            return 0
        return self.tokens.get_local_rank(name)

    @property
    def parts(self) -> int:
        """Into how many parts the rows of a step are divided."""
        return self.size("ddp") * self.size("fsdp")

    @property
    def is_last_stage(self) -> bool:
        return self.rank("pp") == self.size("pp") - 1

    def share(self, rows: Tensor) -> Tensor:
        """The rows of this process, of all that belong to a step, and of these its tokens."""
        if self.tokens is None:
            return rows
        mine = rows.chunk(self.parts)[self.rank("rows")]
        return mine.chunk(self.size("cp"), 1)[self.rank("cp")]

    @property
    def divides_layers(self) -> bool:
        """Whether blocks are compiled one by one, because what is around them differs or cuts their graph."""
        return bool(self.sizes.keys() & {"fsdp", "tp", "pp"})

    def divide(self, model: LanguageModel, schedule: str) -> list[LanguageModel]:
        """The part of this process: the model, or its pipeline stages, of which an interleaved schedule has two."""
        if self.mesh is None or self.tokens is None:
            return [model]
        count = self.size("pp") * (2 if self.size("pp") > 1 and schedule == "interleaved" else 1)
        if model.config.layers < count:
            raise ValueError(f"--parallel: {model.config.layers} blocks do not divide into {count} pipeline stages")
        stages = [model]
        if count > 1:
            stages = [_stage(model, index, count) for index in range(self.rank("pp"), count, self.size("pp"))]
        for stage in stages:
            if self.size("cp") > 1:
                _divide_tokens(stage, self.tokens["cp"])
            if self.size("tp") > 1:
                _divide_layers(stage, self.mesh["tp"])
        return stages

    def pipeline(self, stages: list[nn.Module], schedule: str, device: str, batch: int) -> Pipeline | None:
        if self.mesh is None or self.size("pp") == 1:
            return None
        return Pipeline(self, stages, schedule, device, batch)

    def average(self, model: LanguageModel) -> nn.Module:
        """The model with gradients that are averaged over all rows and tokens."""
        if self.mesh is None or self.mesh["data"].size() == 1:
            return model
        if not self.sizes.keys() & {"fsdp", "tp"}:  # DistributedDataParallel takes no DTensors
            return DistributedDataParallel(model, process_group=self.mesh["data"].get_group())
        # A stage has several microbatches, and keeps its parameters from one to the next.
        kwargs: dict[str, Any] = {"mesh": self.mesh["data"]}
        if self.size("pp") > 1:
            kwargs["reshard_after_forward"] = False
        for block in model.blocks.values():
            fully_shard(block, **kwargs)
        return fully_shard(model, **kwargs)

    def mean(self, value: Tensor) -> float:
        """A loss, the mean over all rows; only the last stage has one."""
        if self.mesh is None:
            return value.item()
        total = value.detach().clone() if self.is_last_stage else torch.zeros_like(value)
        dist.all_reduce(total)
        return total.item() / (self.mesh.size() / self.size("pp"))

    def clip(self, parameters: Iterable[nn.Parameter], most: float) -> float:
        """Clip all gradients by their common norm, and return that. Parameters may live on several meshes."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        squares = [_whole(torch.nn.utils.get_total_norm(group)).square() for group in of_each_mesh(gradients)]
        square = torch.stack(squares).sum()
        if self.mesh is not None and self.size("pp") > 1:
            dist.all_reduce(square, group=self.mesh["pp"].get_group())
        norm = square.sqrt()
        for gradient in gradients:
            gradient.mul_((most / (norm + 1e-6)).clamp(max=1.0).to(gradient.dtype))
        return norm.item()


def of_each_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Plain tensors, and DTensors of each mesh, apart: torch's operators on lists of tensors take one kind."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())


class Pipeline:
    """The schedule of this process's stages: two microbatches for each stage of the model, if the rows divide so."""

    def __init__(self, parallel: Parallel, stages: list[nn.Module], schedule: str, device: str, batch: int) -> None:
        self.parallel, ranks = parallel, parallel.size("pp")
        assert parallel.mesh is not None
        count = ranks * len(stages)
        group = parallel.mesh["pp"].get_group()
        microbatches = math.gcd(batch, 2 * count)
        made = [
            PipelineStage(
                stage,
                index,
                count,
                torch.device(device),
                *_handed_on(stage, parallel, batch // microbatches),
                group=group,
            )
            for stage, index in zip(stages, range(parallel.rank("pp"), count, ranks), strict=True)
        ]
        if schedule == "interleaved":
            self.schedule: Any = ScheduleInterleaved1F1B(made, microbatches, loss_fn=loss_of)
        else:
            self.schedule = SCHEDULES[schedule](made[0], microbatches, loss_fn=loss_of)

    def run(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward of all microbatches; the mean loss on the last stage, zero on others."""
        losses: list[Tensor] = []
        first = self.parallel.rank("pp") == 0
        given = (ids,) if first else ()
        if self.parallel.is_last_stage:
            self.schedule.step(*given, target=targets, losses=losses)
            return torch.stack(losses).mean()
        self.schedule.step(*given)
        return ids.new_zeros((), dtype=torch.float32)


def _stage(model: LanguageModel, index: int, count: int) -> LanguageModel:
    """One of so many stages: a part of the blocks; the first has the embedding, the last the logits."""
    stage = copy.copy(model)
    stage._modules = dict(model._modules)
    names = list(model.blocks)
    begin, end = (len(names) * at // count for at in (index, index + 1))
    stage.blocks = nn.ModuleDict({name: model.blocks[name] for name in names[begin:end]})
    if index > 0:
        stage.embedding = None
    if index < count - 1:
        stage.norm = stage.unembedding = None
    return stage


def _handed_on(stage: nn.Module, parallel: Parallel, rows: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Without data, what a stage gets and what it makes of so many rows: ranks need not ask each other."""
    model = stage.module if isinstance(stage, DistributedDataParallel) else stage
    assert isinstance(model, LanguageModel)
    config, tokens = model.config, model.config.context // parallel.size("cp")
    shape = (rows, tokens // parallel.size("tp"), config.held)
    with torch.device("meta"):
        carried = [torch.empty(*shape, config.width, dtype=model.dtype, requires_grad=True)]
        if config.variant == "v41":
            carried.append(torch.empty(shape, requires_grad=True))
        ids = (torch.empty(rows, tokens, dtype=torch.long),)
        logits = (torch.empty(rows, tokens, BYTES, requires_grad=True),)
    return tuple(carried) if model.embedding is None else ids, tuple(carried) if model.unembedding is None else logits


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _divide_layers(stage: LanguageModel, mesh: DeviceMesh) -> None:
    """Divide the layers inside the sublayers, and the tokens of the streams around them."""
    if stage.config.heads % mesh.size():
        raise ValueError(f"--parallel: tp={mesh.size()} does not divide the {stage.config.heads} heads")
    # Between stages, streams are plain tensors: this process's part.
    begin = Shard(1)
    if stage.embedding is not None:
        begin = Replicate()  # the gates that some forms begin with
        parallelize_module(stage.embedding, mesh, _redistributed(Replicate(), Shard(1)))
    if stage.norm is not None:
        whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)
        parallelize_module(stage.norm, mesh, whole)
    *_, last = stage.blocks.values()
    for block in stage.blocks.values():
        parallelize_module(block.attention, mesh, HyperConnectionParallel(Shard(1), input_layouts=begin))
        leaves = block is last and stage.norm is None
        parallelize_module(block.feed_forward, mesh, HyperConnectionParallel(Shard(1), use_local_output=leaves))
        for sublayer, columns, row in (
            (block.attention.layer, ("q", "k", "v"), "out"),
            (block.feed_forward.layer, ("gate", "up"), "down"),
        ):
            plan = {name: ColwiseParallel() for name in columns}
            plan[row] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
            parallelize_module(sublayer, mesh, plan | {"norm": SequenceParallel()})
            # What the norm makes of its tokens is gathered once for all that read it.
            parallelize_module(sublayer.norm, mesh, _redistributed(Shard(1), Replicate()))
            sublayer.norm.weight.register_post_accumulate_grad_hook(_add_up)


def _redistributed(made: Placement, wanted: Placement) -> PrepareModuleOutput:
    return PrepareModuleOutput(output_layouts=made, desired_output_layouts=wanted, use_local_output=False)


def _add_up(parameter: nn.Parameter) -> None:
    """Add up the processes' parts of a gradient once, instead of in each operation of the optimizer."""
    parameter.grad = parameter.grad.redistribute(placements=[Replicate()])


def _divide_tokens(model: LanguageModel, mesh: DeviceMesh) -> None:
    tokens, rest = divmod(model.config.context, mesh.size())
    if rest:
        raise ValueError(f"--parallel: cp={mesh.size()} does not divide the {model.config.context} tokens of a row")
    for block in model.blocks.values():
        attention = block.attention.layer
        attention.first_token = mesh.get_local_rank() * tokens
        attention.gathered = _gathering(mesh)


def _gathering(mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    # A functional collective: Dynamo traces it, so that the graph of a block stays whole.
    return lambda t: all_gather_tensor_autograd(t.contiguous(), 2, mesh.get_group())
