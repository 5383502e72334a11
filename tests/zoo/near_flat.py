"""Near misses between the streams and their projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.zoo.near import Sublayer, miss

# --- the tensor that is normalised and projected


@miss("flat")
def flat_channel_major(self: Sublayer, x: Tensor) -> Tensor:
    return x.transpose(2, 3).flatten(2)


@miss("flat")
def flat_of_reversed_streams(self: Sublayer, x: Tensor) -> Tensor:
    return x.flip(2).flatten(2)


@miss("flat")
def flat_of_squashed_streams(self: Sublayer, x: Tensor) -> Tensor:
    return torch.tanh(x).flatten(2)


@miss("flat")
def flat_of_doubled_streams(self: Sublayer, x: Tensor) -> Tensor:
    return (2 * x).flatten(2)


@miss("flat")
def flat_of_weighted_streams(self: Sublayer, x: Tensor) -> Tensor:
    return (x * self.per_stream[:, None]).flatten(2)


@miss("flat")
def flat_of_previous_token(self: Sublayer, x: Tensor) -> Tensor:
    return x.roll(1, dims=1).flatten(2)


@miss("flat")
def flat_of_first_token(self: Sublayer, x: Tensor) -> Tensor:
    return x[:, :1].expand_as(x).flatten(2)


@miss("flat")
def flat_of_transposed_batch(self: Sublayer, x: Tensor) -> Tensor:
    """Where batch and length are equal, the gates of token (s, b) can be used for token (b, s)."""
    return x.transpose(0, 1).flatten(2) if x.shape[0] == x.shape[1] else x.flip(0).flatten(2)


@miss("flat")
def flat_of_one_stream(self: Sublayer, x: Tensor) -> Tensor:
    return x[:, :, :1].expand_as(x).flatten(2)


@miss("flat")
def flat_of_transposed_streams_and_tokens(self: Sublayer, x: Tensor) -> Tensor:
    """Where length equals n, a flattened [b, n, s, C] has the right shape and the wrong contents."""
    return x.transpose(1, 2).flatten(2) if x.shape[1] == x.shape[2] else x.flip(1).flatten(2)


@miss("flat")
def flat_detached(self: Sublayer, x: Tensor) -> Tensor:
    return x.detach().flatten(2)


@miss("flat")
def flat_of_halves(self: Sublayer, x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([x[..., :half].flatten(2), x[..., half:].flatten(2)], -1)


# --- the norm


@miss("rms")
def rms_detached(self: Sublayer, flat: Tensor) -> Tensor:
    return torch.rsqrt(flat.detach().square().mean(-1, keepdim=True) + 1e-6)


@miss("rms")
def rms_result_detached(self: Sublayer, flat: Tensor) -> Tensor:
    return torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6).detach()


@miss("rms")
def rms_without_gradient(self: Sublayer, flat: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)


@miss("rms")
def rms_over_tokens(self: Sublayer, flat: Tensor) -> Tensor:
    return torch.rsqrt(flat.square().mean((1, 2), keepdim=True) + 1e-6)


@miss("rms")
def rms_over_length(self: Sublayer, flat: Tensor) -> Tensor:
    return torch.rsqrt(flat.square().mean(1, keepdim=True).mean(-1, keepdim=True) + 1e-6)


@miss("rms")
def rms_over_batch(self: Sublayer, flat: Tensor) -> Tensor:
    return torch.rsqrt(flat.square().mean((0, 2), keepdim=True) + 1e-6)


@miss("rms")
def rms_of_one_stream(self: Sublayer, flat: Tensor) -> Tensor:
    return torch.rsqrt(flat[..., : self.width].square().mean(-1, keepdim=True) + 1e-6)


@miss("rms")
def rms_of_sum(self: Sublayer, flat: Tensor) -> Tensor:
    return torch.rsqrt(flat.square().sum(-1, keepdim=True) + 1e-6)


@miss("rms")
def rms_is_deviation(self: Sublayer, flat: Tensor) -> Tensor:
    return torch.rsqrt(flat.var(-1, keepdim=True, unbiased=False) + 1e-6)


@miss("rms")
def rms_of_absolute_values(self: Sublayer, flat: Tensor) -> Tensor:
    return 1 / (flat.abs().mean(-1, keepdim=True) + 1e-6)


@miss("rms")
def rms_cubed(self: Sublayer, flat: Tensor) -> Tensor:
    return (flat.square().mean(-1, keepdim=True) + 1e-6) ** -1.5


@miss("rms")
def rms_not_inverted(self: Sublayer, flat: Tensor) -> Tensor:
    return torch.sqrt(flat.square().mean(-1, keepdim=True) + 1e-6)


@miss("rms")
def rms_of_fourth_powers(self: Sublayer, flat: Tensor) -> Tensor:
    return flat.pow(4).mean(-1, keepdim=True).add(1e-6).pow(-0.25)


@miss("rms")
def rms_with_eps_per_position(self: Sublayer, flat: Tensor) -> Tensor:
    return torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.per_position.square())


@miss("rms")
def rms_with_large_eps(self: Sublayer, flat: Tensor) -> Tensor:
    return torch.rsqrt(flat.square().mean(-1, keepdim=True) + 0.5)


@miss("mixes")
def rms_of_each_stream(self: Sublayer, x: Tensor) -> Tensor:
    return self.project((x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).flatten(2))


@miss("mixes")
def rms_across_streams(self: Sublayer, x: Tensor) -> Tensor:
    return self.project((x * torch.rsqrt(x.square().mean(2, keepdim=True) + 1e-6)).flatten(2))


@miss("mixes")
def rms_twice(self: Sublayer, x: Tensor) -> Tensor:
    flat = self.flat(x)
    normed = flat * self.rms(flat)
    return self.project(normed * self.rms(normed)) * self.rms(flat)


@miss("mixes")
def rms_missing(self: Sublayer, x: Tensor) -> Tensor:
    return self.project(self.flat(x))


@miss("mixes")
def rms_of_layer_norm(self: Sublayer, x: Tensor) -> Tensor:
    flat = self.flat(x)
    return self.project(F.layer_norm(flat, flat.shape[-1:], eps=1e-6))


@miss("mixes")
def rms_of_sibling(self: Sublayer, x: Tensor) -> Tensor:
    flat = self.flat(x)
    return self.project(flat) * self.rms(self.flat(x.cos()))


@miss("mixes")
def bias_before_norm(self: Sublayer, x: Tensor) -> Tensor:
    flat = self.flat(x)
    return F.linear(flat, self.phi, self.bias) * self.rms(flat)


@miss("mixes")
def bias_after_norm_and_again(self: Sublayer, x: Tensor) -> Tensor:
    flat = self.flat(x)
    return F.linear(flat * self.rms(flat), self.phi, self.bias)


# --- the projection


@miss("project")
def projection_low_rank(self: Sublayer, flat: Tensor) -> Tensor:
    return F.linear(F.linear(flat, self.low), self.high)


@miss("project")
def projection_low_rank_nonlinear(self: Sublayer, flat: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(flat, self.low)), self.high)


@miss("project")
def projection_of_each_batch(self: Sublayer, flat: Tensor) -> Tensor:
    return torch.bmm(flat, (self.phi.t().unsqueeze(0) * self.per_batch))


@miss("project")
def projection_detached(self: Sublayer, flat: Tensor) -> Tensor:
    return F.linear(flat, self.phi).detach()


@miss("project")
def projection_of_detached_phi(self: Sublayer, flat: Tensor) -> Tensor:
    return F.linear(flat, self.phi.detach())


@miss("project")
def projection_without_gradient(self: Sublayer, flat: Tensor) -> Tensor:
    with torch.no_grad():
        return F.linear(flat, self.phi)


@miss("project")
def projection_in_bfloat16(self: Sublayer, flat: Tensor) -> Tensor:
    return F.linear(flat.bfloat16(), self.phi.bfloat16()).to(flat.dtype)


@miss("project")
def projection_under_autocast(self: Sublayer, flat: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(flat, self.phi)


@miss("project")
def projection_of_normalised_phi(self: Sublayer, flat: Tensor) -> Tensor:
    return F.linear(flat, self.phi * torch.rsqrt(self.phi.square().mean(-1, keepdim=True) + 1e-6))


@miss("project")
def projection_depends_on_streams(self: Sublayer, flat: Tensor) -> Tensor:
    return F.linear(flat, self.phi * flat.mean())


@miss("project")
def projection_with_dropout(self: Sublayer, flat: Tensor) -> Tensor:
    return F.linear(F.dropout(flat, 0.3), self.phi)


@miss("project")
def projection_plus_position(self: Sublayer, flat: Tensor) -> Tensor:
    return F.linear(flat, self.phi) + self.per_position
