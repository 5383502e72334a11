"""Train on two processes, with DistributedDataParallel or with FSDP2.

    torchrun --standalone --nproc-per-node 2 examples/train_on_two_processes.py
    torchrun --standalone --nproc-per-node 2 examples/train_on_two_processes.py fsdp

Look at the losses: each rank trains on rows of its own, and the ranks end with equal parameters. All ranks rewrite a
graph, or none does.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import mhc_compile
from mhc_compile.nn import HyperConnection, contract, expand

STREAMS, WIDTH = 4, 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.layers = nn.Sequential(*(HyperConnection(layer, dim=WIDTH, streams=STREAMS) for layer in layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return contract(self.layers(expand(tokens, STREAMS)))


def distributed(model: Model, sharded: bool) -> nn.Module:
    """The model as the ranks train it: compile each layer before it is sharded, and a DDP model as a whole."""
    if sharded:
        for layer in model.layers:
            layer.compile(backend="mhc")
            fully_shard(layer)
        fully_shard(model)
        return model
    wrapped = DistributedDataParallel(model)
    wrapped.compile(backend="mhc")
    return wrapped


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" on GPUs, after torch.cuda.set_device
    torch.manual_seed(0)
    model = distributed(Model(), sharded="fsdp" in sys.argv[1:])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    torch.manual_seed(dist.get_rank())  # rows of this rank
    for step in range(20):
        tokens = torch.randn(4, 16, WIDTH)
        loss = (model(tokens) - tokens.roll(1, dims=-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, 19):
            print(f"rank {dist.get_rank()}, step {step}: loss {loss.item():.3f}", flush=True)

    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    total = sum(p.detach().double().sum() for p in whole)
    totals = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(totals, total)
    if dist.get_rank() == 0:
        print(f"parameters are equal on all ranks: {all(torch.equal(total, other) for other in totals)}")
        print(mhc_compile.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
