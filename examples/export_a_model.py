"""Export a model, and compile it ahead of time with AOTInductor.

    python examples/export_a_model.py

The package calls operators of mhc_compile. So the process that loads it must be Python, and must import mhc_compile
first. Look at the differences: the length was exported as a dynamic one, and the package takes any.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import mhc_compile
from mhc_compile.nn import HyperConnection, HyperHead, expand

STREAMS, WIDTH = 4, 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = HyperConnection(nn.Linear(WIDTH, WIDTH), dim=WIDTH, streams=STREAMS)
        self.head = HyperHead(dim=WIDTH, streams=STREAMS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.block(expand(tokens, STREAMS)))
        return out


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    model, tokens = Model().eval(), torch.randn(2, 16, WIDTH)
    exported = torch.export.export(model, (tokens,), dynamic_shapes=({1: torch.export.Dim("length")},))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.pt2")
        with mhc_compile.enable():  # AOTInductor takes no backend
            torch._inductor.aoti_compile_and_package(exported, package_path=path)
        loaded = torch._inductor.aoti_load_package(path)
        for length in (16, 5):
            tokens = torch.randn(2, length, WIDTH)
            print(f"{length} tokens: largest difference {(loaded(tokens) - model(tokens)).abs().max():.1e}")
    print(mhc_compile.report())


if __name__ == "__main__":
    main()
