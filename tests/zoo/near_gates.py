"""Near misses between the projection and the three gates."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.zoo.near import Sublayer, miss


class _ClippedGradient(torch.autograd.Function):
    """The identity, whose backward lets only small gradients through whole."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.02, 0.02)


def _clipped(value: Tensor) -> Tensor:
    clipped: Tensor = _ClippedGradient.apply(value)
    return clipped


# --- the groups


@miss("split")
def split_post_first(self: Sublayer, mixes: Tensor) -> tuple[Tensor, ...]:
    post, pre, res = mixes.split((self.n, self.n, self.n**2), -1)
    return pre, post, res


@miss("split")
def split_res_first(self: Sublayer, mixes: Tensor) -> tuple[Tensor, ...]:
    res, pre, post = mixes.split((self.n**2, self.n, self.n), -1)
    return pre, post, res


@miss("split")
def split_overlapping(self: Sublayer, mixes: Tensor) -> tuple[Tensor, ...]:
    n = self.n
    return mixes[..., :n], mixes[..., 1 : n + 1], mixes[..., n : n + n * n]


@miss("split")
def split_same_twice(self: Sublayer, mixes: Tensor) -> tuple[Tensor, ...]:
    n = self.n
    return mixes[..., :n], mixes[..., :n], mixes[..., 2 * n :]


@miss("split")
def split_interleaved(self: Sublayer, mixes: Tensor) -> tuple[Tensor, ...]:
    n = self.n
    return mixes[..., 0 : 2 * n : 2], mixes[..., 1 : 2 * n : 2], mixes[..., 2 * n :]


@miss("split")
def split_reversed(self: Sublayer, mixes: Tensor) -> tuple[Tensor, ...]:
    n = self.n
    return mixes[..., :n].flip(-1), mixes[..., n : 2 * n], mixes[..., 2 * n :].flip(-1)


@miss("split")
def split_rolled(self: Sublayer, mixes: Tensor) -> tuple[Tensor, ...]:
    pre, post, res = mixes.split((self.n, self.n, self.n**2), -1)
    return pre.roll(1, -1), post, res


@miss("split")
def split_transposed_res(self: Sublayer, mixes: Tensor) -> tuple[Tensor, ...]:
    pre, post, res = mixes.split((self.n, self.n, self.n**2), -1)
    return pre, post, res.unflatten(-1, (self.n, self.n)).transpose(-1, -2).flatten(-2)


@miss("split")
def split_gates_over_tokens(self: Sublayer, mixes: Tensor) -> tuple[Tensor, ...]:
    """Where length equals n, [b, s, n] may be transposed unnoticed."""
    pre, post, res = mixes.split((self.n, self.n, self.n**2), -1)
    if mixes.shape[1] == self.n:
        return pre.transpose(1, 2), post.transpose(1, 2), res
    return pre.flip(1), post.flip(1), res


@miss("split")
def split_shifted_by_a_token(self: Sublayer, mixes: Tensor) -> tuple[Tensor, ...]:
    pre, post, res = mixes.split((self.n, self.n, self.n**2), -1)
    return pre, post.roll(1, 1), res


@miss("split")
def split_of_first_token(self: Sublayer, mixes: Tensor) -> tuple[Tensor, ...]:
    pre, post, res = mixes.split((self.n, self.n, self.n**2), -1)
    return pre[:, :1].expand_as(pre), post[:, :1].expand_as(post), res[:, :1].expand_as(res)


# --- scale and bias


def _logits(self: Sublayer, parts: tuple[Tensor, ...], change: Any) -> tuple[Tensor, Tensor, Tensor]:
    pre, post, res = Sublayer.logits(self, parts)
    return change(pre), post, res


@miss("logits")
def bias_per_position(self: Sublayer, parts: tuple[Tensor, ...]) -> Any:
    return _logits(self, parts, lambda pre: pre + self.per_position)


@miss("logits")
def scale_per_position(self: Sublayer, parts: tuple[Tensor, ...]) -> Any:
    return _logits(self, parts, lambda pre: pre * self.per_position)


@miss("logits")
def scale_per_batch(self: Sublayer, parts: tuple[Tensor, ...]) -> Any:
    return _logits(self, parts, lambda pre: pre * self.per_batch)


@miss("logits")
def bias_along_length(self: Sublayer, parts: tuple[Tensor, ...]) -> Any:
    """Where length equals n, a bias of n numbers can lie along the tokens."""
    along = self.per_stream if parts[0].shape[1] == self.n else self.per_position[:, 0]
    return _logits(self, parts, lambda pre: pre + along[:, None])


@miss("logits")
def bias_from_streams(self: Sublayer, parts: tuple[Tensor, ...]) -> Any:
    return _logits(self, parts, lambda pre: pre + parts[1].mean(-1, keepdim=True))


@miss("logits")
def scale_squared(self: Sublayer, parts: tuple[Tensor, ...]) -> Any:
    return _logits(self, parts, lambda pre: pre * pre)


@miss("logits")
def scale_twice(self: Sublayer, parts: tuple[Tensor, ...]) -> Any:
    return _logits(self, parts, lambda pre: (pre * self.per_stream + 0.5) * 3 - 1)


@miss("logits")
def logits_clamped(self: Sublayer, parts: tuple[Tensor, ...]) -> Any:
    return _logits(self, parts, lambda pre: pre.clamp(-1.0, 1.0))


@miss("logits")
def logits_detached(self: Sublayer, parts: tuple[Tensor, ...]) -> Any:
    return _logits(self, parts, lambda pre: pre.detach())


@miss("logits")
def res_bias_transposed(self: Sublayer, parts: tuple[Tensor, ...]) -> Any:
    n = self.n
    pre, post, _ = Sublayer.logits(self, parts)
    return pre, post, parts[2].unflatten(-1, (n, n)) * self.scale[2] + self.bias[2 * n :].view(n, n).t()


@miss("logits")
def res_bias_of_rows_only(self: Sublayer, parts: tuple[Tensor, ...]) -> Any:
    n = self.n
    pre, post, _ = Sublayer.logits(self, parts)
    return pre, post, parts[2].unflatten(-1, (n, n)) * self.per_stream + self.per_stream[:, None]


# --- the gates' functions


@miss("pre")
def pre_tanh(self: Sublayer, logits: Tensor) -> Tensor:
    return torch.tanh(logits)


@miss("pre")
def pre_softmax(self: Sublayer, logits: Tensor) -> Tensor:
    return logits.softmax(-1)


@miss("pre")
def pre_hard_sigmoid(self: Sublayer, logits: Tensor) -> Tensor:
    return F.hardsigmoid(logits)


@miss("pre")
def pre_negative_sigmoid(self: Sublayer, logits: Tensor) -> Tensor:
    return torch.sigmoid(-logits)


@miss("pre")
def pre_complement(self: Sublayer, logits: Tensor) -> Tensor:
    return 1 - torch.sigmoid(logits)


@miss("pre")
def pre_doubled(self: Sublayer, logits: Tensor) -> Tensor:
    return 2 * torch.sigmoid(logits)


@miss("pre")
def pre_sharpened(self: Sublayer, logits: Tensor) -> Tensor:
    return torch.sigmoid(3 * logits - 1)


@miss("pre")
def pre_learned_multiple(self: Sublayer, logits: Tensor) -> Tensor:
    return torch.sigmoid(logits) * self.per_stream


@miss("pre")
def pre_eps_per_stream(self: Sublayer, logits: Tensor) -> Tensor:
    return torch.sigmoid(logits) + 1e-2 * self.per_stream


@miss("pre")
def pre_normalised(self: Sublayer, logits: Tensor) -> Tensor:
    gate = torch.sigmoid(logits)
    return gate / gate.sum(-1, keepdim=True)


@miss("pre")
def pre_squared(self: Sublayer, logits: Tensor) -> Tensor:
    return torch.sigmoid(logits) ** 2


@miss("pre")
def pre_detached(self: Sublayer, logits: Tensor) -> Tensor:
    return torch.sigmoid(logits).detach()


@miss("pre")
def pre_straight_through(self: Sublayer, logits: Tensor) -> Tensor:
    soft = torch.sigmoid(logits)
    return soft + ((soft > 0.5).to(soft.dtype) - soft).detach()


@miss("pre")
def pre_with_scaled_gradient(self: Sublayer, logits: Tensor) -> Tensor:
    soft = torch.sigmoid(logits)
    return 0.25 * soft + 0.75 * soft.detach()


@miss("pre")
def pre_with_dropout(self: Sublayer, logits: Tensor) -> Tensor:
    return F.dropout(torch.sigmoid(logits), 0.3)


@miss("pre")
def pre_permuted(self: Sublayer, logits: Tensor) -> Tensor:
    return torch.sigmoid(logits).flip(-1)


@miss("pre")
def pre_in_bfloat16(self: Sublayer, logits: Tensor) -> Tensor:
    return torch.sigmoid(logits.bfloat16()).to(logits.dtype)


@miss("post")
def post_tanh(self: Sublayer, logits: Tensor) -> Tensor:
    return torch.tanh(logits)


@miss("post")
def post_with_negative_multiple(self: Sublayer, logits: Tensor) -> Tensor:
    return 0.25 - 1.5 * torch.sigmoid(logits)


@miss("post")
def post_detached(self: Sublayer, logits: Tensor) -> Tensor:
    return (2 * torch.sigmoid(logits)).detach()


@miss("post")
def post_masked(self: Sublayer, logits: Tensor) -> Tensor:
    return torch.where(logits > 0, 2 * torch.sigmoid(logits), 0.0)


@miss("post")
def post_clamped(self: Sublayer, logits: Tensor) -> Tensor:
    return (2 * torch.sigmoid(logits)).clamp(max=1.5)


# --- gradients that are clipped on their way back


@miss("rms")
def rms_with_clipped_gradient(self: Sublayer, flat: Tensor) -> Tensor:
    return _clipped(torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6))


@miss("pre")
def pre_with_clipped_gradient(self: Sublayer, logits: Tensor) -> Tensor:
    return torch.sigmoid(_clipped(logits)) + 1e-6


@miss("post")
def post_with_clipped_gradient(self: Sublayer, logits: Tensor) -> Tensor:
    return _clipped(2 * torch.sigmoid(logits))


@miss("start")
def start_with_clipped_gradient(self: Sublayer, logits: Tensor) -> Tensor:
    return _clipped(logits.softmax(-1)) + 1e-6


# --- a row of which nothing is left


@miss("res")
def sinkhorn_whose_clamp_binds_on_a_sunk_row(self: Sublayer, logits: Tensor) -> Tensor:
    """Without a shift, exp of a low row is below the clamp: its sum is not brought to one."""
    sunk = torch.zeros_like(logits)
    sunk[..., 0, :] = -80.0
    m = torch.exp(logits + sunk)
    for _ in range(3):
        m = m / m.sum(-1, keepdim=True).clamp_min(1e-30)
        m = m / m.sum(-2, keepdim=True).clamp_min(1e-30)
    return m
