"""Near misses of sums written stream by stream, of streams put together from parts, and of in-place code."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.zoo.near import Sublayer, miss


@miss("read")
def reads_streams_with_the_gates_of_others(self: Sublayer, x: Tensor, h_pre: Tensor) -> Any:
    return sum(h_pre[..., i, None] * x[:, :, (i + 1) % self.n] for i in range(self.n))


@miss("read")
def reads_one_stream_twice(self: Sublayer, x: Tensor, h_pre: Tensor) -> Any:
    return sum(h_pre[..., i, None] * x[:, :, i] for i in (*range(self.n), 1))


@miss("read")
def leaves_out_a_stream(self: Sublayer, x: Tensor, h_pre: Tensor) -> Any:
    return sum(h_pre[..., i, None] * x[:, :, i] for i in range(self.n - 1))


@miss("read")
def reads_backwards(self: Sublayer, x: Tensor, h_pre: Tensor) -> Any:
    return sum(h_pre[..., i, None] * x[:, :, self.n - 1 - i] for i in range(self.n))


@miss("read")
def subtracts_a_stream(self: Sublayer, x: Tensor, h_pre: Tensor) -> Any:
    return sum((-1) ** i * h_pre[..., i, None] * x[:, :, i] for i in range(self.n))


@miss("read")
def detaches_a_stream_on_the_way(self: Sublayer, x: Tensor, h_pre: Tensor) -> Any:
    streams = [x[:, :, i].detach() if i == 1 else x[:, :, i] for i in range(self.n)]
    return sum(h_pre[..., i, None] * stream for i, stream in enumerate(streams))


@miss("read")
def mean_over_all_but_a_factor(self: Sublayer, x: Tensor, h_pre: Tensor) -> Any:
    return (h_pre.unsqueeze(-1) * x).mean(2) * (self.n + 1)


@miss("flat")
def flat_in_reverse(self: Sublayer, x: Tensor) -> Any:
    return torch.cat(x.unbind(2)[::-1], -1)


@miss("flat")
def flat_with_a_stream_twice(self: Sublayer, x: Tensor) -> Any:
    parts = list(x.unbind(2))
    return torch.cat([parts[0], parts[0], *parts[2:]], -1)


@miss("project")
def projections_of_different_streams(self: Sublayer, flat: Tensor) -> Any:
    n = self.n
    pre, post, res = self.phi.split((n, n, n * n))
    return torch.cat([F.linear(flat, pre), F.linear(flat * self.per_channel.repeat(n), post), F.linear(flat, res)], -1)


@miss("project")
def projection_of_streams_in_another_order(self: Sublayer, flat: Tensor) -> Any:
    parts = zip(flat.chunk(self.n, -1)[::-1], self.phi.chunk(self.n, -1), strict=True)
    return sum(x @ phi.T for x, phi in parts)


@miss("write")
def writes_backwards(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Any:
    out = torch.empty_like(x)
    for o in range(self.n):
        out[:, :, self.n - 1 - o] = h_post[..., o, None] * f + (h_res[..., :, o, None] * x).sum(2)
    return out


@miss("write")
def leaves_a_stream_as_it_was(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Any:
    out = x.clone()
    for o in range(self.n - 1):
        out[:, :, o] = h_post[..., o, None] * f + (h_res[..., :, o, None] * x).sum(2)
    return out


@miss("write")
def writes_a_stream_twice(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Any:
    out = torch.zeros_like(x)
    for o in (*range(self.n), 0):
        out[:, :, o] = h_post[..., o, None] * f + (h_res[..., :, o, None] * x).sum(2) * (o + 1)
    return out


@miss("write")
def writes_streams_already_written(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Any:
    """Each stream is mixed from those before it as they are by then."""
    out = x.clone()
    for o in range(self.n):
        out[:, :, o] = h_post[..., o, None] * f + (h_res[..., :, o, None] * out.clone()).sum(2)
    return out


@miss("write")
def sum_seen_through_an_older_view(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Any:
    out = h_res.mT @ x
    first = out[:, :, :1]
    out.add_(h_post.unsqueeze(-1) * f.unsqueeze(-2))
    return out + 0.5 * first


@miss("write")
def sum_into_a_view_of_itself(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Any:
    out = h_res.mT @ x
    out[:, :, :1].add_(h_post[..., :1, None] * f.unsqueeze(-2))
    return out


@miss("write")
def sum_without_a_gradient(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Any:
    out = h_res.mT @ x
    out.detach().add_(h_post.unsqueeze(-1).detach() * f.unsqueeze(-2).detach())
    return out


@miss("write")
def sum_read_before_it_is_complete(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Any:
    out = h_res.mT @ x
    before = out * 2.0
    out += h_post.unsqueeze(-1) * f.unsqueeze(-2)
    return out, before


@miss("write")
def difference_in_place(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Any:
    out = h_res.mT @ x
    out -= h_post.unsqueeze(-1) * f.unsqueeze(-2)
    return out


@miss("write")
def half_of_the_sum_added(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Any:
    return torch.addcmul(h_res.mT @ x, h_post.unsqueeze(-1), f.unsqueeze(-2), value=0.5)


@miss("write")
def one_stream_mixed_the_other_way(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Any:
    streams = []
    for o in range(self.n):
        row = h_res[..., o, :] if o == 1 else h_res[..., :, o]
        streams.append(h_post[..., o, None] * f + (row.unsqueeze(-1) * x).sum(2))
    return torch.stack(streams, 2)


@miss("start")
def temperature_of_each_token(self: Sublayer, logits: Tensor) -> Any:
    return (logits / (1.5 + torch.tanh(logits.mean((-1, -2), keepdim=True)))).softmax(-1) + 1e-6


@miss("rms")
def squares_of_one_stream_twice(self: Sublayer, flat: Tensor) -> Any:
    parts = list(flat.chunk(self.n, -1))
    total: Any = sum(part.square().sum(-1, keepdim=True) for part in [*parts[:-1], parts[0]])
    return torch.rsqrt(total / flat.shape[-1] + 1e-6)


@miss("rms")
def guarded_against_nought(self: Sublayer, flat: Tensor) -> Any:
    ms = flat.square().mean(-1, keepdim=True)
    return torch.where(ms > 1e-30, torch.rsqrt(ms), 0.0)


@miss("read")
def reads_with_tokens_for_streams(self: Sublayer, x: Tensor, h_pre: Tensor) -> Any:
    """Where there are as many tokens as streams, the gates may be read the other way."""
    turned = h_pre.mT if x.shape[1] == x.shape[2] else h_pre
    return torch.einsum("bsn,bsnc->bsc", turned, x)


@miss("write")
def writes_with_tokens_for_streams(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Any:
    turned = h_post.mT if x.shape[1] == x.shape[2] else h_post
    return torch.einsum("bsn,bsc->bsnc", turned, f) + h_res.mT @ x


@miss("write")
def mixes_with_tokens_for_streams(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Any:
    turned = h_res.transpose(1, 2) if x.shape[1] == x.shape[2] else h_res
    return torch.einsum("bsn,bsc->bsnc", h_post, f) + torch.einsum("bsio,bsic->bsoc", turned, x)


@miss("flat")
def projects_tokens_for_streams(self: Sublayer, x: Tensor) -> Any:
    turned = x.transpose(1, 2) if x.shape[1] == x.shape[2] else x
    return turned.flatten(2)


@miss("write")
def changed_in_place_without_gradients(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Any:
    """Under no_grad a write changes the numbers and keeps the gradient of what was there."""
    out = h_res.mT @ x
    with torch.no_grad():
        out += h_post.unsqueeze(-1) * f.unsqueeze(-2)
    return out


@miss("read")
def clamped_in_place_without_gradients(self: Sublayer, x: Tensor, h_pre: Tensor) -> Any:
    gate = h_pre * 1.0
    with torch.no_grad():
        gate.clamp_(0.4, 0.6)
    return (gate.unsqueeze(-1) * x).sum(2)


@miss("write")
def added_in_place_under_autocast_of_bfloat16(
    self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor
) -> Any:
    out = h_res.mT @ x
    with torch.autocast("cpu", torch.bfloat16):
        out.flatten(0, 1).baddbmm_(h_post.flatten(0, 1).unsqueeze(-1), f.flatten(0, 1).unsqueeze(1))
    return out


@miss("read")
def begins_with_zeros_that_are_written(self: Sublayer, x: Tensor, h_pre: Tensor) -> Any:
    """A write through a function of lists, known by its name alone."""
    total = torch.zeros_like(x[:, :, 0])
    torch._foreach_add_([total], [1.0])
    return total + (h_pre.unsqueeze(-1) * x).sum(2)


@miss("write")
def squashed_in_place_by_a_function(self: Sublayer, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Any:
    out = h_post.unsqueeze(-1) * f.unsqueeze(-2)
    torch.tanh_(out)
    return out + h_res.mT @ x
