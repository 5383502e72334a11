"""Train a small GPT whose residual connections are hyper-connections, compiled with backend="mhc".

    python examples/gpt.py

Look at `GPT`: only three lines differ from a GPT with plain residuals. The report at the end says what they became.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mhc_compile
from mhc_compile.nn import HyperConnection, HyperHead, expand

TEXT = "the quick brown fox jumps over the lazy dog. " * 40
WIDTH, HEADS, LAYERS, STREAMS, LENGTH = 64, 4, 2, 4, 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def mlp() -> nn.Module:
    return nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class GPT(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layers = (layer for _ in range(LAYERS) for layer in (Attention(), mlp()))
        # In place of x = x + layer(x): the module reads the streams, calls the layer, and writes the streams.
        self.layers = nn.Sequential(*(HyperConnection(layer, dim=WIDTH, streams=STREAMS) for layer in layers))
        self.head = HyperHead(WIDTH, STREAMS)
        self.logits = nn.Linear(WIDTH, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = expand(self.embedding(ids) + self.positions, STREAMS)  # [batch, tokens, C] to [batch, tokens, n, C]
        return self.logits(self.head(self.layers(x)))  # the head makes [batch, tokens, C] of the streams


def main() -> None:
    torch.manual_seed(0)
    letters = sorted(set(TEXT))
    data = torch.tensor([letters.index(letter) for letter in TEXT])
    model = GPT(len(letters))
    model.compile(backend="mhc")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        starts = torch.randint(0, len(data) - LENGTH - 1, (8, 1))
        rows = data[starts + torch.arange(LENGTH + 1)]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss before {losses[0]:.3f}, after {losses[-1]:.3f}")
    print(mhc_compile.report())


if __name__ == "__main__":
    main()
