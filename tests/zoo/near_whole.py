"""Near misses of a sublayer as a whole: escapes, mutation, gates of other streams, modes, other layouts of streams."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.zoo.near import Sublayer, miss

# --- the whole


@miss("body")
def escape_of_everything(self: Sublayer, x: Tensor) -> Any:
    flat = self.flat(x)
    h, r = self.project(flat), self.rms(flat)
    mixes = h * r
    logits = self.logits(self.split(mixes))
    h_pre, h_post, h_res = self.pre(logits[0]), self.post(logits[1]), self.res(logits[2])
    read = self.read(x, h_pre)
    out = self.write(x, self.layer(read, x), h_post, h_res)
    return out, read, h_pre, h_post, h_res, *logits, mixes, h, r


@miss("body")
def escape_of_start(self: Sublayer, x: Tensor) -> Any:
    pre, post, res = self.logits(self.split(self.mixes(x)))
    start = self.start(res)
    m = self.columns(self.rows(self.columns(start)))
    out = self.write(x, self.layer(self.read(x, self.pre(pre)), x), self.post(post), m)
    return out, start


@miss("body")
def escape_of_gates_transposed(self: Sublayer, x: Tensor) -> Any:
    h_pre, h_post, h_res = self.gates(x)
    out = self.write(x, self.layer(self.read(x, h_pre), x), h_post, h_res)
    return out, h_res.transpose(-1, -2), h_pre.sum(), out.flatten(2), out[:, :, 0]


@miss("body")
def gates_changed_after_use(self: Sublayer, x: Tensor) -> Any:
    h_pre, h_post, h_res = self.gates(x.clone())
    out = self.write(x, self.layer(self.read(x, h_pre), x), h_post, h_res)
    with torch.no_grad():
        statistics = h_res.mean((0, 1)).add_(1.0)
    return out, statistics


@miss("body")
def gates_of_other_tensor(self: Sublayer, x: Tensor) -> Any:
    h_pre, h_post, h_res = self.gates(x.cos())
    return self.write(x, self.layer(self.read(x, h_pre), x), h_post, h_res)


@miss("body")
def streams_changed_before_gates_and_after(self: Sublayer, x: Tensor) -> Any:
    x.add_(0.5)
    out = Sublayer.body(self, x)
    out.mul_(2.0)
    return out


@miss("body")
def streams_changed_between_gates_and_reading(self: Sublayer, x: Tensor) -> Any:
    h_pre, h_post, h_res = self.gates(x)
    x.mul_(0.5)
    return self.write(x, self.layer(self.read(x, h_pre), x), h_post, h_res)


@miss("body")
def streams_changed_through_older_view(self: Sublayer, x: Tensor) -> Any:
    view = x[:, :, 0]
    h_pre, h_post, h_res = self.gates(x)
    f = self.layer(self.read(x, h_pre), x)
    view.sub_(1.0)
    return self.write(x, f, h_post, h_res)


@miss("body")
def phi_changed_after_use(self: Sublayer, x: Tensor) -> Any:
    h_pre, h_post, h_res = self.gates(x)
    f = self.layer(self.read(x, h_pre), x)
    scale = self.scale * 1.0
    scale.add_(1.0)
    return self.write(x, f, h_post, h_res) * scale.sum()


@miss("logits")
def scale_changed_in_place_after_use(self: Sublayer, parts: tuple[Tensor, ...]) -> Any:
    n = self.n
    scale = self.scale * 1.0
    pre = parts[0].detach() * scale[0].detach() + self.bias[:n]
    scale.mul_(2.0)
    _, post, res = Sublayer.logits(self, parts)
    return pre, post * scale[1], res


@miss("body")
def next_sublayer_reads_old_gates(self: Sublayer, x: Tensor) -> Any:
    """Shifted ordering: the second sublayer reads with the gate of the first."""
    h_pre, h_post, h_res = self.gates(x)
    x = self.write(x, self.layer(self.read(x, h_pre), x), h_post, h_res)
    _, post_2, res_2 = self.gates(x)
    return self.write(x, self.layer(self.read(x, h_pre), x), post_2, res_2)


@miss("body")
def previous_streams_are_mixed(self: Sublayer, x: Tensor) -> Any:
    new = Sublayer.body(self, x)
    h_pre, h_post, h_res = self.gates(new)
    return self.write(x, self.layer(self.read(new, h_pre), x), h_post, h_res)


@miss("body")
def same_gates_twice(self: Sublayer, x: Tensor) -> Any:
    h_pre, h_post, h_res = self.gates(x)
    new = self.write(x, self.layer(self.read(x, h_pre), x), h_post, h_res)
    return self.write(new, self.layer(self.read(new, h_pre), x), h_post, h_res)


@miss("body")
def without_gradient_altogether(self: Sublayer, x: Tensor) -> Any:
    with torch.no_grad():
        new = Sublayer.body(self, x)
    return new + x


@miss("body")
def gates_without_gradient(self: Sublayer, x: Tensor) -> Any:
    with torch.no_grad():
        h_pre, h_post, h_res = self.gates(x)
    return self.write(x, self.layer(self.read(x, h_pre), x), h_post, h_res)


@miss("body")
def reading_without_gradient(self: Sublayer, x: Tensor) -> Any:
    h_pre, h_post, h_res = self.gates(x)
    with torch.no_grad():
        read = self.read(x, h_pre)
    return self.write(x, self.layer(read, x), h_post, h_res)


@miss("body")
def gradient_switched_on_inside(self: Sublayer, x: Tensor) -> Any:
    with torch.no_grad():
        h_pre, h_post, h_res = self.gates(x)
        with torch.enable_grad():
            read = self.read(x, h_pre)
    return self.write(x, self.layer(read, x), h_post, h_res)


@miss("body")
def autocast_inside(self: Sublayer, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h_pre, h_post, h_res = self.gates(x)
    return self.write(x, self.layer(self.read(x, h_pre), x), h_post, h_res)


@miss("body")
def autocast_around_writing(self: Sublayer, x: Tensor) -> Any:
    h_pre, h_post, h_res = self.gates(x)
    f = self.layer(self.read(x, h_pre), x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.write(x, f, h_post, h_res)


@miss("body")
def autocast_ends_inside(self: Sublayer, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixes = self.mixes(x)
    pre, post, res = self.logits(self.split(mixes))
    h_pre, h_post, h_res = self.pre(pre), self.post(post), self.res(res)
    return self.write(x, self.layer(self.read(x, h_pre), x), h_post, h_res)


@miss("body")
def checkpointed(self: Sublayer, x: Tensor) -> Any:
    return checkpoint(lambda value: Sublayer.body(self, value), x, use_reentrant=False)


@miss("body")
def checkpointed_gates(self: Sublayer, x: Tensor) -> Any:
    h_pre, h_post, h_res = checkpoint(self.gates, x, use_reentrant=False)
    return self.write(x, self.layer(self.read(x, h_pre), x), h_post, h_res)


@miss("body")
def graph_break_inside(self: Sublayer, x: Tensor) -> Any:
    h_pre, h_post, h_res = self.gates(x)
    torch._dynamo.graph_break()
    return self.write(x, self.layer(self.read(x, h_pre), x), h_post, h_res)


@miss("body")
def streams_first(self: Sublayer, x: Tensor) -> Any:
    """Streams [n, b, s, C] at rest, moved for the gates only."""
    moved = x.permute(2, 0, 1, 3).contiguous()
    h_pre, h_post, h_res = self.gates(moved.permute(1, 2, 0, 3))
    f = self.layer((h_pre.permute(2, 0, 1).unsqueeze(-1) * moved).sum(0), x)
    mixed = torch.einsum("bsio,ibsc->obsc", h_res, moved)
    return h_post.permute(2, 0, 1).unsqueeze(-1) * f.unsqueeze(0) + mixed


@miss("body")
def streams_with_gaps(self: Sublayer, x: Tensor) -> Any:
    wide = torch.cat([x, x.sin()], -1)
    return Sublayer.body(self, wide[..., : self.width])


@miss("body")
def streams_expanded(self: Sublayer, x: Tensor) -> Any:
    return Sublayer.body(self, x[:, :, :1].expand(-1, -1, self.n, -1))


@miss("body")
def streams_transposed_in_memory(self: Sublayer, x: Tensor) -> Any:
    return Sublayer.body(self, x.transpose(0, 1).contiguous().transpose(0, 1))


@miss("body")
def streams_as_float64_gates(self: Sublayer, x: Tensor) -> Any:
    flat = self.flat(x).double()
    mixes = (F.linear(flat, self.phi.double()) * self.rms(flat)).to(x.dtype)
    pre, post, res = self.logits(self.split(mixes))
    return self.write(x, self.layer(self.read(x, self.pre(pre)), x), self.post(post), self.res(res))
