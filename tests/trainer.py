"""One rank of a job that trains with a library: `python -m tests.trainer DEVICE RANK RANKS FILE NAME...`.

It prints a line of JSON for each named case.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from mhc_compile import distributed, records
from tests.jobs import ROOT, Scenarios, run_rank
from tests.sharded import Model, gradients, loss_of, mesh_of_all, own, rewriting


def in_float8() -> dict[str, Any]:
    """Linear layers of torchao whose weights are gathered in float8: the gradients, and what was rewritten."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    found = []
    for gathered in (True, False):
        model, mesh = Model(), mesh_of_all()
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathered, emulate=True)
        convert_to_float8_training(model.layers, config=config)
        with rewriting():
            replicas = distributed.replicate(model, mesh)
            for layer in model.layers:
                layer.compile(backend="mhc", fullgraph=True)
                fully_shard(layer, mesh=mesh, ignored_params=replicas)
            fully_shard(model, mesh=mesh, ignored_params=replicas)
            loss_of(model(own())).backward()
            report = records.report()
        found.append(gradients(model))
    return {
        "unequal": [name for name in found[0] if not torch.equal(found[0][name], found[1][name])],
        "rewritten": sorted(site.op for site in report.rewritten),
    }


def in_trainer(folder: Path) -> dict[str, Any]:
    """The example with transformers' `Trainer`: losses and norms of gradients, and what was rewritten."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    ranks = dist.get_world_size()
    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # asked for, and not used: the job has begun
    sys.path.append(str(ROOT / "examples"))
    example = importlib.import_module("train_with_trainer")
    with rewriting():
        trainer = example.make_trainer(str(folder / "trainer"), ranks, sharded=ranks > 1, steps=2, rows=4)
        if ranks > 1:
            # accelerate has no FSDP on CPUs. What it does from here on is what it does on GPUs.
            state = trainer.accelerator.state
            state.distributed_type = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
            trainer.is_fsdp_enabled = True
        trainer.train()
        report = records.report()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    parameters = dict(trainer.model_wrapped.named_parameters())
    return {
        "losses": [entry["loss"] for entry in logged],
        "norms": [entry["grad_norm"] for entry in logged],
        "all are DTensors": all(isinstance(p, DTensor) for p in parameters.values()),
        "whole": sum(isinstance(p, DTensor) and p.placements == (Replicate(),) for p in parameters.values()),
        "rewritten": sorted({site.op for site in report.rewritten}),
        "left": [site.reason for site in report.declined] + report.errors,
    }


def scenarios(_ranks: int, folder: Path) -> Scenarios:
    return {
        "float8": in_float8,
        "trainer": lambda: in_trainer(folder),
    }


if __name__ == "__main__":
    run_rank(scenarios)
