"""Models whose reads come one sublayer after their gates: a sublayer reads with the previous sublayer's h_pre."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mhc_compile import ops
from tests.zoo.common import STREAMS, WIDTH, CheapLayer, random_parameter, random_phi, stream_embedding


def one_hot(x: Tensor) -> Tensor:
    """The gates of the first read, before any are made: the first of the streams [..., n, C]."""
    return F.one_hot(x.new_zeros(x.shape[:-2], dtype=torch.long), x.shape[-2]).float()


class Sublayer(nn.Module):
    """Streams [..., n, C] and gates of their read to new streams and gates of the next read, in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        rows = STREAMS * STREAMS + 2 * STREAMS
        self.phi = random_phi(rows, STREAMS * WIDTH)
        self.scale = random_parameter(3, mean=1.0, std=0.2)
        self.bias = random_parameter(rows, std=0.5)
        self.layer = CheapLayer(WIDTH)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [STREAMS, STREAMS, STREAMS * STREAMS]
        flat = x.flatten(-2).float()
        mixes = F.linear(flat, self.phi.float()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
        pre, post, res = (
            mix * scale + bias
            for mix, scale, bias in zip(mixes.split(sizes, -1), self.scale, self.bias.split(sizes), strict=True)
        )
        p = res.unflatten(-1, (STREAMS, STREAMS)).softmax(-1) + 1e-6
        p = p / (p.sum(-2, keepdim=True) + 1e-6)
        for _ in range(2):
            p = p / (p.sum(-1, keepdim=True) + 1e-6)
            p = p / (p.sum(-2, keepdim=True) + 1e-6)
        return pre.sigmoid() + 1e-6, 2 * post.sigmoid(), p

    def forward(self, x: Tensor, h_pre: Tensor) -> tuple[Tensor, Tensor]:
        f = self.layer(read(x, h_pre))
        next_pre, post, res = self.gates(x)
        new = post.unsqueeze(-1) * f.float().unsqueeze(-2) + torch.einsum("...io,...ic->...oc", res, x.float())
        return new.to(x.dtype), next_pre


def read(x: Tensor, h_pre: Tensor) -> Tensor:
    return (h_pre.unsqueeze(-1) * x).sum(-2).to(x.dtype)


class Model(nn.Module):
    """Hidden states [..., C] to hidden states: no head, what the last gates read of the last streams is the output."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = stream_embedding(STREAMS, WIDTH)
        self.sublayers = nn.ModuleList(Sublayer() for _ in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.unsqueeze(-2) + self.embedding
        h_pre = one_hot(x)
        for sublayer in self.sublayers:
            x, h_pre = sublayer(x, h_pre)
        return read(x, h_pre)


class OperatorSublayer(nn.Module):
    """As `Sublayer` through the operators themselves: nothing to recognise, so quickly compiled.

    order: when the gates are made: before the read, after it, or after the layer.
    """

    def __init__(self, order: str) -> None:
        super().__init__()
        rows = STREAMS * STREAMS + 2 * STREAMS
        self.order = order
        self.phi = random_phi(rows, STREAMS * WIDTH)
        self.scale = random_parameter(3, mean=1.0, std=0.2)
        self.bias = random_parameter(rows, std=0.5)
        self.layer = CheapLayer(WIDTH)
        self.layer_bias = random_parameter(WIDTH, std=0.3)

    def forward(self, x: Tensor, h_pre: Tensor) -> tuple[Tensor, Tensor]:
        def gates() -> tuple[Tensor, Tensor, Tensor]:
            return ops.generate_mix(x, self.phi, self.scale, self.bias, sinkhorn_steps=5)

        made = gates() if self.order == "before the read" else None
        f = ops.aggregate(x, h_pre)
        made = gates() if self.order == "after the read" else made
        f = self.layer(f)
        next_pre, post, res = made or gates()
        return ops.expand_combine(f, self.layer_bias, post, x, res), next_pre


ORDERS = ("before the read", "after the read", "after the layer")


class Stack(nn.Module):
    """Streams to what the last gates read; where: what activation checkpointing of the user's is around."""

    def __init__(self, layers: int = 3, order: str = ORDERS[1], where: str | None = None) -> None:
        super().__init__()
        self.sublayers = nn.ModuleList(OperatorSublayer(order) for _ in range(layers))
        self.where = where
        if where == "layers":
            for sublayer in self.sublayers:
                forward = sublayer.layer.forward
                sublayer.layer.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=False)

    def _all(self, x: Tensor) -> Tensor:
        h_pre = one_hot(x)
        for sublayer in self.sublayers:
            around = (sublayer, x, h_pre)
            x, h_pre = checkpoint(*around, use_reentrant=False) if self.where == "sublayers" else sublayer(x, h_pre)
        return ops.aggregate(x, h_pre)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self._all, x, use_reentrant=False) if self.where == "all" else self._all(x)
        return out
