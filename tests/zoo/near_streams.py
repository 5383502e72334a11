"""Near misses where streams are read and written, and in the layer between: other tensors, axes, mutation, aliases."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.zoo.near import Sublayer, miss

# --- reading


@miss("read")
def read_mean(self: Sublayer, x: Tensor, h_pre: Tensor) -> Tensor:
    return (h_pre.unsqueeze(-1) * x).mean(2)


@miss("read")
def read_first_streams(self: Sublayer, x: Tensor, h_pre: Tensor) -> Tensor:
    return (h_pre[..., :-1].unsqueeze(-1) * x[:, :, :-1]).sum(2)


@miss("read")
def read_reversed_streams(self: Sublayer, x: Tensor, h_pre: Tensor) -> Tensor:
    return (h_pre.unsqueeze(-1) * x.flip(2)).sum(2)


@miss("read")
def read_other_tensor(self: Sublayer, x: Tensor, h_pre: Tensor) -> Tensor:
    return (h_pre.unsqueeze(-1) * x.sin()).sum(2)


@miss("read")
def read_detached(self: Sublayer, x: Tensor, h_pre: Tensor) -> Tensor:
    return (h_pre.unsqueeze(-1) * x.detach()).sum(2)


@miss("read")
def read_over_tokens(self: Sublayer, x: Tensor, h_pre: Tensor) -> Tensor:
    """Sums over the tokens and spreads over the streams instead; fits wherever length equals n."""
    gated = h_pre.unsqueeze(-1) * x
    return gated.sum(1) if x.shape[1] == x.shape[2] else gated.flip(1).sum(2)


@miss("read")
def read_gates_along_channels(self: Sublayer, x: Tensor, h_pre: Tensor) -> Tensor:
    """Where C equals n the gates can lie along the channels."""
    gate = h_pre.unsqueeze(-2) if x.shape[-1] == x.shape[-2] else h_pre.unsqueeze(-1)
    return (gate * x).sum(2)


@miss("read")
def read_channels_of_streams(self: Sublayer, x: Tensor, h_pre: Tensor) -> Tensor:
    """Where C equals n, x^T h_pre and x h_pre have one shape."""
    weighted = (x @ h_pre.unsqueeze(-1)).squeeze(-1) if x.shape[-1] == x.shape[-2] else None
    return weighted if weighted is not None else (x.mT @ h_pre.unsqueeze(-1)).squeeze(-1)


@miss("read")
def read_of_next_token(self: Sublayer, x: Tensor, h_pre: Tensor) -> Tensor:
    return (h_pre.roll(-1, 1).unsqueeze(-1) * x).sum(2)


@miss("read")
def read_squared(self: Sublayer, x: Tensor, h_pre: Tensor) -> Tensor:
    return (h_pre.unsqueeze(-1) * x * x).sum(2)


@miss("read")
def read_with_dropout(self: Sublayer, x: Tensor, h_pre: Tensor) -> Tensor:
    return (h_pre.unsqueeze(-1) * F.dropout(x, 0.3)).sum(2)


@miss("read")
def read_cumulative(self: Sublayer, x: Tensor, h_pre: Tensor) -> Tensor:
    return (h_pre.unsqueeze(-1) * x).cumsum(2)[:, :, -1]


@miss("read")
def read_in_bfloat16(self: Sublayer, x: Tensor, h_pre: Tensor) -> Tensor:
    return (h_pre.bfloat16().unsqueeze(-1) * x.bfloat16()).sum(2).to(x.dtype)


@miss("read")
def read_and_changed_in_place(self: Sublayer, x: Tensor, h_pre: Tensor) -> Tensor:
    out = (h_pre.unsqueeze(-1) * x).sum(2)
    return out.mul_(0.5)


# --- writing


@miss("write")
def write_untransposed(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res @ x


@miss("write")
def write_other_streams(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res.mT @ x.sin()


@miss("write")
def write_to_detached_streams(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res.mT @ x.detach()


@miss("write")
def write_subtracts(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return h_post.unsqueeze(-1) * f.unsqueeze(-2) - h_res.mT @ x


@miss("write")
def write_is_subtracted(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return h_res.mT @ x - h_post.unsqueeze(-1) * f.unsqueeze(-2)


@miss("write")
def write_scaled(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return torch.add(h_post.unsqueeze(-1) * f.unsqueeze(-2), h_res.mT @ x, alpha=0.5)


@miss("write")
def write_plus_streams(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res.mT @ x + x


@miss("write")
def write_mixes_twice(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res.mT @ (h_res.mT @ x)


@miss("write")
def write_mixes_output(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return h_res.mT @ (h_post.unsqueeze(-1) * f.unsqueeze(-2) + x)


@miss("write")
def write_mixes_channels(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """Where C equals n, x h_res mixes the channels in place of the streams."""
    mixed = x @ h_res if x.shape[-1] == x.shape[-2] else h_res.mT @ x
    return h_post.unsqueeze(-1) * f.unsqueeze(-2) + mixed


@miss("write")
def write_gates_channels(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """Where C equals n, post and f can be swapped."""
    if x.shape[-1] == x.shape[-2]:
        return h_post.unsqueeze(-2) * f.unsqueeze(-1) + h_res.mT @ x
    return f.unsqueeze(-2) * h_post.unsqueeze(-1) + h_res.mT @ x


@miss("write")
def write_mixes_tokens(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """Where length equals n, the tokens can be mixed in place of the streams."""
    fits = x.shape[1] == x.shape[2]
    mixed = torch.einsum("btio,bisc->btsc" if fits else "btio,btic->btoc", h_res, x)
    return h_post.unsqueeze(-1) * f.unsqueeze(-2) + mixed


@miss("write")
def write_tokens_of_streams(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """Where length equals n, f [b, s, C] can be spread along the tokens."""
    spread = f.unsqueeze(1) if x.shape[1] == x.shape[2] else f.unsqueeze(2)
    return h_post.unsqueeze(-1) * spread + h_res.mT @ x


@miss("write")
def write_pooled_output(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return h_post.unsqueeze(-1) * f.mean(1, keepdim=True).unsqueeze(-2) + h_res.mT @ x


@miss("write")
def write_output_of_each_stream(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return h_post.unsqueeze(-1) * (f.unsqueeze(-2) + self.per_stream[:, None]) + h_res.mT @ x


@miss("write")
def write_bias_afterwards(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return h_post.unsqueeze(-1) * f.unsqueeze(-2) + self.per_channel + h_res.mT @ x


@miss("write")
def write_bias_inside(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return h_post.unsqueeze(-1) * (f + self.per_channel).unsqueeze(-2) + h_res.mT @ x


@miss("write")
def write_bias_of_position(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return h_post.unsqueeze(-1) * (f + self.per_position).unsqueeze(-2) + h_res.mT @ x


@miss("write")
def write_with_first_matrix(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res[:, :1].mT @ x


@miss("write")
def write_with_mean_matrix(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res.mean((0, 1)).mT @ x


@miss("write")
def write_with_dropout(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return F.dropout(h_post.unsqueeze(-1) * f.unsqueeze(-2), 0.3) + h_res.mT @ x


@miss("write")
def write_with_dropout_on_residual(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return h_post.unsqueeze(-1) * f.unsqueeze(-2) + F.dropout(h_res.mT @ x, 0.3)


@miss("write")
def write_with_matrix_changed(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    h_res = h_res.clone()
    h_res[..., 0, 0] = 0.75
    return h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res.mT @ x


@miss("write")
def write_with_post_changed(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    h_post = h_post.mul_(0.5)
    return h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res.mT @ x


@miss("write")
def write_accumulates_in_place(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    out = h_res.mT @ x
    out += h_post.unsqueeze(-1) * f.unsqueeze(-2)
    return out


@miss("write")
def write_into_buffer(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    out = torch.empty_like(x)
    mixed = h_res.mT @ x
    for stream in range(self.n):
        out[:, :, stream] = h_post[..., stream, None] * f + mixed[:, :, stream]
    return out


@miss("write")
def write_in_bfloat16(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    low = h_post.bfloat16().unsqueeze(-1) * f.bfloat16().unsqueeze(-2) + h_res.bfloat16().mT @ x.bfloat16()
    return low.to(x.dtype)


@miss("write")
def write_rounded_sum(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return (h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res.mT @ x).bfloat16()


@miss("write")
def write_to_all_streams_but_one(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    out = h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res.mT @ x
    return torch.cat([x[:, :, :1], out[:, :, 1:]], 2)


# --- the layer between


@miss("layer")
def layer_returns_a_stream(self: Sublayer, layer_input: Tensor, x: Tensor) -> Tensor:
    return x[:, :, 0]


@miss("layer")
def layer_changes_its_input(self: Sublayer, layer_input: Tensor, x: Tensor) -> Tensor:
    layer_input.mul_(2.0)
    return layer_input.sin()


@miss("layer")
def layer_changes_streams(self: Sublayer, layer_input: Tensor, x: Tensor) -> Tensor:
    x.mul_(1.5)
    return layer_input.sin()


@miss("layer")
def layer_changes_a_view_of_streams(self: Sublayer, layer_input: Tensor, x: Tensor) -> Tensor:
    x.flatten(2)[..., : self.width].add_(layer_input)
    return layer_input.sin()


@miss("layer")
def layer_sets_a_stream(self: Sublayer, layer_input: Tensor, x: Tensor) -> Tensor:
    x[:, :, 1] = layer_input
    return layer_input.cos()


@miss("layer")
def layer_reads_streams(self: Sublayer, layer_input: Tensor, x: Tensor) -> Tensor:
    return layer_input + x.mean(2)


@miss("layer")
def layer_is_identity(self: Sublayer, layer_input: Tensor, x: Tensor) -> Tensor:
    return layer_input


@miss("layer")
def layer_is_constant(self: Sublayer, layer_input: Tensor, x: Tensor) -> Tensor:
    return self.per_channel.expand_as(layer_input)
