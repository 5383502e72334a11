"""Compile each layer by itself, instead of the whole model.

    python examples/compile_each_layer.py

Dynamo and Inductor compile one layer, and all layers that are alike use the result. So the first step is short. The
price: operators are not fused across layers. Look at the two times to the first step and the two reports.
"""

from __future__ import annotations

import time

import torch
from torch import nn

import mhc_compile
from mhc_compile.nn import HyperConnection, contract, expand

STREAMS, WIDTH, LAYERS = 4, 64, 6


class Layer(nn.Module):
    """Two sublayers."""

    def __init__(self) -> None:
        super().__init__()
        first, second = (nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.first = HyperConnection(first, dim=WIDTH, streams=STREAMS)
        self.second = HyperConnection(second, dim=WIDTH, streams=STREAMS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = expand(tokens, STREAMS)
        for layer in self.layers:
            x = layer(x)
        return contract(x)


def first_step(model: nn.Module, tokens: torch.Tensor) -> float:
    begin = time.perf_counter()
    model(tokens).square().mean().backward()
    return time.perf_counter() - begin


def main() -> None:
    torch.manual_seed(0)
    tokens = torch.randn(2, 16, WIDTH)

    model = Model()
    for layer in model.layers:
        layer.compile(backend="mhc")
    print(f"layer by layer: first step {first_step(model, tokens):.1f} s")
    print(mhc_compile.report())

    torch._dynamo.reset()  # forgets what was compiled, so that the next report is of the next model
    whole = Model()
    whole.compile(backend="mhc")
    print(f"whole: first step {first_step(whole, tokens):.1f} s")
    print(mhc_compile.report())


if __name__ == "__main__":
    main()
