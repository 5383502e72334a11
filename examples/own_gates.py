"""Mix the streams with a manifold of your own: here, the doubly stochastic matrices that are circulant.

    python examples/own_gates.py

mhc_compile knows nothing about these matrices. Look at the report: reading and writing the streams became operators all
the same. It names h_res as the program's own, and Inductor compiles this gate. Only the class `Circulant` is new.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mhc_compile
from mhc_compile.nn import contract, expand

STREAMS, WIDTH = 4, 128


class Circulant(nn.Module):
    """h_res[i, o] = w[(o - i) mod n], where w is a softmax: rows and columns sum to one, without any iteration."""

    def __init__(self, layer: nn.Module, n: int = STREAMS, width: int = WIDTH) -> None:
        super().__init__()
        self.layer, self.n = layer, n
        self.phi = nn.Parameter(torch.randn(3 * n, n * width) * (n * width) ** -0.5)
        self.bias = nn.Parameter(torch.zeros(3 * n))
        self.register_buffer("shifts", (torch.arange(n) - torch.arange(n).unsqueeze(-1)) % n)

    def forward(self, x: Tensor) -> Tensor:  # [..., n, C]
        flat = x.flatten(-2)
        logits = F.linear(F.rms_norm(flat, flat.shape[-1:], eps=1e-6), self.phi) + self.bias
        pre, post, shift = logits.split(self.n, -1)
        h_res = shift.softmax(-1)[..., self.shifts]
        f = self.layer((pre.sigmoid().unsqueeze(-1) * x).sum(-2))
        return (2 * post.sigmoid()).unsqueeze(-1) * f.unsqueeze(-2) + h_res.transpose(-1, -2) @ x


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Circulant(nn.Linear(WIDTH, WIDTH)) for _ in range(layers)))

    def forward(self, tokens: Tensor) -> Tensor:
        return contract(self.layers(expand(tokens, STREAMS)))


def seconds(model: nn.Module, tokens: Tensor) -> float:
    """What a training step takes."""
    begin = time.perf_counter()
    model(tokens).square().mean().backward()
    return time.perf_counter() - begin


def main() -> None:
    torch.manual_seed(0)
    model, tokens = Model(), torch.randn(8, 128, WIDTH)
    print(mhc_compile.explain(model, tokens))
    eager = min(seconds(model, tokens) for _ in range(5))
    model.compile(backend="mhc")
    first = seconds(model, tokens)
    later = min(seconds(model, tokens) for _ in range(5))
    print(f"a training step: eager {1e3 * eager:.1f} ms, compiled {1e3 * later:.1f} ms; the first took {first:.1f} s")


if __name__ == "__main__":
    main()
