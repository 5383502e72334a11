"""A byte-level language model whose residual connections are hyper-connections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from language_model.connections import VARIANTS, expand, read

BYTES = 256


@dataclass(frozen=True)
class Config:
    """The size of a model. context: how many tokens a row has."""

    layers: int
    width: int
    heads: int
    context: int
    streams: int = 4
    variant: str = "mhc"

    @property
    def held(self) -> int:
        """How many streams the model has: plain residual connections have one."""
        return 1 if self.variant == "plain" else self.streams


SIZES = {
    "nano": Config(layers=2, width=64, heads=4, context=128),
    "tiny": Config(layers=6, width=256, heads=4, context=256),
    "small": Config(layers=12, width=768, heads=12, context=1024),
    "medium": Config(layers=24, width=1024, heads=16, context=1024),
    "1b": Config(layers=20, width=2048, heads=16, context=2048),
    "wide": Config(layers=8, width=4096, heads=32, context=2048),
}


class Linear(nn.Linear):
    """Its parameters stay in float32, for the optimizer. It computes in its input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions; x is [batch, heads, tokens, channels of a head]."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions.unsqueeze(-1) * rates
    a, b = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention. How many heads this process has, and which tokens, it learns from the shapes it gets.

    gathered: set by context parallelism; makes the keys and values of all tokens of those of this process.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.channels = config.width // config.heads
        self.norm = Norm(config.width, eps=1e-6)
        self.q, self.k, self.v, self.out = (Linear(config.width, config.width, bias=False) for _ in range(4))
        self.first_token = 0
        self.gathered = lambda t: t

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (p(x).unflatten(-1, (-1, self.channels)).transpose(1, 2) for p in (self.q, self.k, self.v))
        here = self.first_token + torch.arange(q.shape[2], device=x.device)
        k, v = self.gathered(rotated(k, here)), self.gathered(v)
        everywhere = torch.arange(k.shape[2], device=x.device)
        mixed = F.scaled_dot_product_attention(rotated(q, here), k, v, attn_mask=here.unsqueeze(-1) >= everywhere)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = Norm(config.width, eps=1e-6)
        self.gate, self.up = (Linear(config.width, 4 * config.width, bias=False) for _ in range(2))
        self.down = Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each behind a hyper-connection: the residual connections of this model."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        connection = VARIANTS[config.variant]
        self.attention = connection(Attention(config), config.width, config.streams)
        self.feed_forward = connection(FeedForward(config), config.width, config.streams)

    def forward(self, *carried: Tensor) -> tuple[Tensor, ...]:
        """From streams to streams; for `v41`, from streams and the gates of the next read to the same."""
        return self.feed_forward(*self.attention(*carried))


class Output(NamedTuple):
    logits: Tensor
    loss: Tensor | None


class LanguageModel(nn.Module):
    """Byte ids [batch, tokens] to logits of the next byte; with `targets`, the loss too.

    A pipeline stage is this model without the parts that other stages have: no `embedding` or no `unembedding`, and
    some of the blocks.
    """

    def __init__(self, config: Config, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embedding: nn.Embedding | None = nn.Embedding(BYTES, config.width)
        self.blocks = nn.ModuleDict({str(i): Block(config) for i in range(config.layers)})
        self.norm: Norm | None = Norm(config.width, eps=1e-6)
        self.unembedding: Linear | None = Linear(config.width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if isinstance(self.get_submodule(name.rpartition(".")[0]), nn.Linear | nn.Embedding):
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5 if last else 0.02)

    def begin(self, ids: Tensor) -> tuple[Tensor, ...]:
        """The streams; for `v41` also the gates of the first read."""
        assert self.embedding is not None
        x = expand(self.embedding(ids).to(self.dtype), self.config.held)
        gates = torch.full(x.shape[:-1], 1 / self.config.held, device=x.device)
        return (x, gates) if self.config.variant == "v41" else (x,)

    def end(self, x: Tensor, *gates: Tensor) -> Tensor:
        assert self.norm is not None
        assert self.unembedding is not None
        hidden = read(x, *gates) if gates else x.sum(-2)
        return self.unembedding(self.norm(hidden)).float()

    def forward(self, *given: Tensor, targets: Tensor | None = None) -> Output | Tensor | tuple[Tensor, ...]:
        carried = given if self.embedding is None else self.begin(*given)
        for block in self.blocks.values():
            carried = block(*carried)
        if self.unembedding is None:
            return carried if len(carried) > 1 else carried[0]
        logits = self.end(*carried)
        return logits if targets is None else Output(logits, loss_of(logits, targets))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats, the mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
