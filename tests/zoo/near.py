"""Programs that are nearly hyper-connections: one complete sublayer, in which one piece is replaced.

`misses.MISSES` maps a name to a model class. Some of them can still be rewritten, in part or with care; none may
compute anything else than its eager code does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.common import random_parameter, random_phi


class Sublayer(nn.Module):
    """Streams [b, s, n, C] -> [b, s, n, C], in pieces that a near miss replaces one by one."""

    def __init__(self, n: int, width: int, length: int, batch: int) -> None:
        super().__init__()
        self.n, self.width = n, width
        rows = n * n + 2 * n
        self.phi = random_phi(rows, n * width)
        self.scale = random_parameter(3, mean=1.0, std=0.2)
        self.bias = random_parameter(rows, std=0.5)
        self.weight = random_parameter(width, width, std=width**-0.5)
        # What only some of the near misses use.
        self.per_position = random_parameter(length, 1, mean=1.0, std=0.3)
        self.per_batch = random_parameter(batch, 1, 1, mean=1.0, std=0.3)
        self.per_stream = random_parameter(n, mean=1.0, std=0.3)
        self.per_channel = random_parameter(width, mean=1.0, std=0.3)
        self.low = random_parameter(3, n * width, std=(n * width) ** -0.5)
        self.high = random_parameter(rows, 3)

    def flat(self, x: Tensor) -> Tensor:
        return x.flatten(2)

    def rms(self, flat: Tensor) -> Tensor:
        return torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)

    def project(self, flat: Tensor) -> Tensor:
        return F.linear(flat, self.phi)

    def mixes(self, x: Tensor) -> Tensor:
        flat = self.flat(x)
        return self.project(flat) * self.rms(flat)

    def split(self, mixes: Tensor) -> tuple[Tensor, ...]:
        n = self.n
        return mixes.split((n, n, n * n), -1)

    def logits(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        n = self.n
        pre, post, res = parts
        pre_bias, post_bias, res_bias = self.bias.split((n, n, n * n))
        return (
            pre * self.scale[0] + pre_bias,
            post * self.scale[1] + post_bias,
            res.unflatten(-1, (n, n)) * self.scale[2] + res_bias.view(n, n),
        )

    def pre(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits) + 1e-6

    def post(self, logits: Tensor) -> Tensor:
        return 2 * torch.sigmoid(logits)

    def start(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) + 1e-6

    def rows(self, m: Tensor) -> Tensor:
        return m / (m.sum(-1, keepdim=True) + 1e-6)

    def columns(self, m: Tensor) -> Tensor:
        return m / (m.sum(-2, keepdim=True) + 1e-6)

    def res(self, logits: Tensor) -> Tensor:
        m = self.columns(self.start(logits))
        for _ in range(2):
            m = self.columns(self.rows(m))
        return m

    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        return (h_pre.unsqueeze(-1) * x).sum(2)

    def layer(self, layer_input: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(layer_input, self.weight))

    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res.transpose(-1, -2) @ x

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, res = self.logits(self.split(self.mixes(x)))
        return self.pre(pre), self.post(post), self.res(res)

    def body(self, x: Tensor) -> Any:
        h_pre, h_post, h_res = self.gates(x)
        f = self.layer(self.read(x, h_pre), x)
        return self.write(x, f, h_post, h_res)

    def forward(self, x: Tensor) -> Any:
        # The streams are no leaf, so that the near misses may change them in place.
        return self.body(x * self.per_channel)


registered: dict[str, type[Sublayer]] = {}
Piece = Callable[..., Any]


def miss(piece: str) -> Callable[[Piece], Piece]:
    """Register the model in which `piece` is the decorated function, under the function's name."""

    def register(function: Piece) -> Piece:
        name = function.__name__
        assert hasattr(Sublayer, piece)
        assert name not in registered
        registered[name] = type(name, (Sublayer,), {piece: function, "__doc__": function.__doc__})
        return function

    return register
