"""Chains of hyper-connections whose gates, or some of them, no operator makes: as their authors write them.

"krom"    H is a Kronecker product of doubly stochastic 2 x 2 matrices; n = 4
"lite"    H is a weighted mean of all n! permutations, with weights by softmax
"tanh"    the original Hyper-Connections, dynamic (arXiv 2409.19606): tanh gates, one [n, n + 1] product
"static"  all gates are parameters, the same for all tokens
"soft"    the read weighs the streams by softmax; the write's gates are sigmoids and a Sinkhorn

The sublayer is an RMS norm without a weight: where it is nothing at all, a read and a write are one product.
"""

from __future__ import annotations

import math
from itertools import permutations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def _sublayer(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=EPS)


class _Projected(nn.Module):
    """Sigmoid gates for read and write, and a matrix that `mixing` makes of `rows` logits."""

    rows = 0

    def __init__(self, streams: int, width: int) -> None:
        super().__init__()
        rows, inner = 2 * streams + self.rows, streams * width
        self.streams = streams
        self.phi = nn.Parameter(torch.randn(rows, inner) * inner**-0.5)
        self.bias = nn.Parameter(torch.randn(rows) * 0.5)
        self.scale = nn.Parameter(torch.rand(3) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        n = self.streams
        logits = F.linear(_normed(x.flatten(2).float()), self.phi)
        pre, post, res = torch.split(logits, [n, n, self.rows], -1)
        pre_bias, post_bias, res_bias = torch.split(self.bias, [n, n, self.rows])
        pre = self.reading(pre * self.scale[0] + pre_bias)
        post = 2 * torch.sigmoid(post * self.scale[1] + post_bias)
        matrix = self.mixing(res * self.scale[2] + res_bias)
        f = _sublayer((pre.unsqueeze(-1) * x).sum(2).to(x.dtype))
        return post.to(x.dtype).unsqueeze(-1) * f.unsqueeze(-2) + matrix.to(x.dtype).mT @ x

    def reading(self, logits: Tensor) -> Tensor:
        """The gates of the read, [..., n]."""
        return torch.sigmoid(logits)

    def mixing(self, logits: Tensor) -> Tensor:
        """H of a token's logits [..., rows], [..., n, n]: what most kinds differ in."""
        raise NotImplementedError


class Krom(_Projected):
    rows = 2

    def mixing(self, logits: Tensor) -> Tensor:
        a = torch.sigmoid(logits)
        first, second = torch.stack([a, 1 - a, 1 - a, a], -1).view(*a.shape, 2, 2).unbind(-3)
        return torch.einsum("btij,btkl->btikjl", first, second).flatten(-2).flatten(-3, -2)


class Lite(_Projected):
    def __init__(self, streams: int, width: int) -> None:
        self.rows = math.factorial(streams)
        super().__init__(streams, width)
        self.register_buffer("permutations", torch.eye(streams)[torch.tensor(list(permutations(range(streams))))])

    def mixing(self, logits: Tensor) -> Tensor:
        return torch.einsum("btk,kij->btij", logits.softmax(-1), self.permutations)


class SoftmaxRead(_Projected):
    def __init__(self, streams: int, width: int) -> None:
        self.rows = streams**2
        super().__init__(streams, width)

    def reading(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def mixing(self, logits: Tensor) -> Tensor:
        matrix = torch.unflatten(logits, -1, (self.streams, self.streams)).softmax(-1) + EPS
        matrix = matrix / (matrix.sum(-2, keepdim=True) + EPS)
        for _ in range(19):
            matrix = matrix / (matrix.sum(-1, keepdim=True) + EPS)
            matrix = matrix / (matrix.sum(-2, keepdim=True) + EPS)
        return matrix


class Tanh(nn.Module):
    def __init__(self, streams: int, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.randn(width, streams + 1) * width**-0.5)
        self.beta = nn.Parameter(torch.randn(width) * width**-0.5)
        self.scale = nn.Parameter(torch.rand(2) * 0.1)
        self.static_alpha = nn.Parameter(torch.cat([torch.ones(streams, 1), torch.eye(streams)], 1))
        self.static_beta = nn.Parameter(torch.ones(streams))

    def forward(self, x: Tensor) -> Tensor:
        normed = _normed(x.float())
        alpha = torch.tanh(normed @ self.alpha) * self.scale[0] + self.static_alpha
        beta = torch.tanh(normed @ self.beta) * self.scale[1] + self.static_beta
        mixed = alpha.to(x.dtype).mT @ x
        return mixed[..., 1:, :] + beta.to(x.dtype).unsqueeze(-1) * _sublayer(mixed[..., :1, :])


class Static(nn.Module):
    def __init__(self, streams: int, width: int) -> None:
        super().__init__()
        self.pre = nn.Parameter(torch.randn(streams))
        self.post = nn.Parameter(torch.randn(streams))
        self.res = nn.Parameter(torch.eye(streams) + torch.randn(streams, streams) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        f = _sublayer(torch.einsum("n,btnc->btc", self.pre.to(x.dtype), x))
        return self.post.to(x.dtype).unsqueeze(-1) * f.unsqueeze(-2) + self.res.to(x.dtype).mT @ x


KINDS: dict[str, type[nn.Module]] = {
    "krom": Krom,
    "lite": Lite,
    "tanh": Tanh,
    "static": Static,
    "soft": SoftmaxRead,
}
