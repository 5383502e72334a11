"""Hyper-connections in plain PyTorch, as a model's author writes them. Streams are [batch, tokens, n, C]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6


def expand(hidden: Tensor, n: int) -> Tensor:
    """[batch, tokens, C] to n equal streams."""
    return hidden.unsqueeze(-2).expand(*hidden.shape[:-1], n, hidden.shape[-1]).contiguous()


def read(x: Tensor, h_pre: Tensor) -> Tensor:
    """u = sum_i h_pre[i] x[i]."""
    return (h_pre.unsqueeze(-1) * x).sum(-2).to(x.dtype)


def write(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """x'[o] = h_post[o] f + sum_i h_res[i, o] x[i], in float32."""
    new = h_post.unsqueeze(-1) * f.float().unsqueeze(-2) + torch.einsum("...io,...ic->...oc", h_res, x.float())
    return new.to(x.dtype)


class Connection(nn.Module):
    """mHC (arXiv 2512.24880) around a layer: gates by sigmoid and Sinkhorn, of a projection of the streams.

    rows: how many logits a token has.
    """

    iterations = 10

    def __init__(self, layer: nn.Module, width: int, n: int, rows: int | None = None) -> None:
        super().__init__()
        self.layer, self.n = layer, n
        rows = rows or n * n + 2 * n
        self.phi = nn.Parameter(0.02 * torch.randn(rows, n * width))
        self.scale = nn.Parameter(torch.full((3,), 0.1))
        self.bias = nn.Parameter(torch.cat([torch.zeros(2 * n), self.mixing_bias(rows - 2 * n)]))

    def mixing_bias(self, rows: int) -> Tensor:
        """The bias of h_res at first: almost the identity."""
        return 4.0 * torch.eye(self.n).flatten()

    def logits(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = x.flatten(-2).float()
        projected = F.linear(flat, self.phi) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
        sizes = [self.n, self.n, self.phi.shape[0] - 2 * self.n]
        pre, post, res = projected.split(sizes, -1)
        pre_bias, post_bias, res_bias = self.bias.split(sizes)
        return pre * self.scale[0] + pre_bias, post * self.scale[1] + post_bias, res * self.scale[2] + res_bias

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, res = self.logits(x)
        return torch.sigmoid(pre) + EPS, 2 * torch.sigmoid(post), self.doubly_stochastic(res)

    def doubly_stochastic(self, logits: Tensor) -> Tensor:
        p = logits.unflatten(-1, (self.n, self.n)).softmax(-1) + EPS
        p = p / (p.sum(-2, keepdim=True) + EPS)
        for _ in range(self.iterations - 1):
            p = p / (p.sum(-1, keepdim=True) + EPS)
            p = p / (p.sum(-2, keepdim=True) + EPS)
        return p

    def forward(self, x: Tensor) -> tuple[Tensor]:
        h_pre, h_post, h_res = self.gates(x)
        return (write(x, self.layer(read(x, h_pre)), h_post, h_res),)


class ReadsWithPreviousGates(Connection):
    """The order of DeepSeek-V4.1: a sublayer reads with the gates that the one before it made, and hands its own on."""

    def forward(self, x: Tensor, h_pre: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        f = self.layer(read(x, h_pre))
        next_pre, h_post, h_res = self.gates(x)
        return write(x, f, h_post, h_res), next_pre


class Tanh(Connection):
    """Dynamic hyper-connections (arXiv 2409.19606): bounded changes of static gates."""

    def logits(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [self.n, self.n, self.n * self.n]
        normed = F.layer_norm(x.flatten(-2).float(), (self.phi.shape[1],))
        parts = torch.tanh(F.linear(normed, self.phi)).split(sizes, -1)
        pre, post, res = (part * scale for part, scale in zip(parts, self.scale, strict=True))
        return pre, post, res

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = self.n
        pre, post, res = self.logits(x)
        pre_bias, post_bias, res_bias = self.bias.split([n, n, n * n])
        return (
            pre + pre_bias + 1 / n,
            post + post_bias + 1,
            (res + res_bias).unflatten(-1, (n, n)) / 4,
        )


class Kronecker(Connection):
    """KromHC: h_res is a Kronecker product of doubly stochastic 2 x 2 matrices, so n is a power of two."""

    def __init__(self, layer: nn.Module, width: int, n: int) -> None:
        self.factors = n.bit_length() - 1
        if n != 2**self.factors:
            raise ValueError(f"n: expected a power of two for Kronecker factors, got {n}")
        super().__init__(layer, width, n, 2 * n + self.factors)

    def mixing_bias(self, rows: int) -> Tensor:
        return torch.full((rows,), 4.0)

    def doubly_stochastic(self, logits: Tensor) -> Tensor:
        product = logits.new_ones(*logits.shape[:-1], 1, 1)
        for share in logits.sigmoid().unbind(-1):
            factor = torch.stack([share, 1 - share, 1 - share, share], -1).unflatten(-1, (2, 2))
            size = 2 * product.shape[-1]
            wide = product[..., :, None, :, None] * factor[..., None, :, None, :]
            product = wide.reshape(*logits.shape[:-1], size, size)
        return product


class Plain(nn.Module):
    """No hyper-connection, but a residual connection, to compare with. It has one stream."""

    def __init__(self, layer: nn.Module, width: int, n: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x + self.layer(x.squeeze(-2)).unsqueeze(-2),)


VARIANTS: dict[str, type[nn.Module]] = {
    "mhc": Connection,
    "v41": ReadsWithPreviousGates,
    "hc": Tanh,
    "krom": Kronecker,
    "plain": Plain,
}
