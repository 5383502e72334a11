"""A grammar of hyper-connection programs, as Python source.

`compose(pick)` makes one program. pick chooses one of several options; the first option is always the plainest, so a
failing program shrinks towards a real hyper-connection. A program is real until a mutation is applied to it: most
mutations change what it computes, which the passes have to notice.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.zoo import (  # noqa: F401  (they register near misses)
    near_flat,
    near_gates,
    near_mixing,
    near_streams,
    near_whole,
    spellings,
)
from tests.zoo.near import MISSES

Pick = Callable[[Sequence[Any]], Any]

PRELUDE = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
"""


@dataclass(frozen=True)
class Program:
    """One model as source text, the shape and dtype of its streams, and how it is compiled."""

    source: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    dynamic: bool | None = None
    seed: int = 0

    def build(self) -> tuple[nn.Module, torch.Tensor]:
        """The model with random parameters, and random streams."""
        namespace: dict[str, Any] = {}
        torch.manual_seed(self.seed)
        exec(compile(PRELUDE + self.source, "<program>", "exec"), namespace)
        return namespace["Model"](), torch.randn(self.shape).to(getattr(torch, self.dtype))

    def __str__(self) -> str:
        """A script that runs the program both ways and prints what differs."""
        return (
            PRELUDE
            + self.source
            + textwrap.dedent(
                f"""
            if __name__ == "__main__":
                from tests.fuzz.grammar import Program
                from tests.fuzz.judge import check

                with open(__file__) as file:
                    source = file.read().partition("if __name__")[0]
                program = Program(source, {self.shape}, {self.dtype!r}, {self.dynamic}, {self.seed})
                print(check(program))
            """
            )
        )


@dataclass
class Line:
    """`names = expression`: one statement, whose results mutations may change."""

    names: str
    expression: str
    mutable: bool = True

    def __str__(self) -> str:
        return f"{self.names} = {self.expression}" if self.names else self.expression


@dataclass(frozen=True)
class Layout:
    """How the streams lie in memory: source for the flat vector, for [..., n, C], and back from there."""

    shape: str
    flat: str
    streams: str
    back: str


LAYOUTS = {
    "tokens, streams, channels": Layout("bsnc", "x.flatten(-2)", "x", "{}"),
    "one token dimension": Layout("tnc", "x.flatten(1)", "x", "{}"),
    "flattened": Layout("bsd", "x", "x.unflatten(-1, (N, C))", "{}.flatten(-2)"),
    "channels first": Layout("bscn", "x.transpose(-1, -2).flatten(-2)", "x.transpose(-1, -2)", "{}.transpose(-1, -2)"),
    "streams before tokens": Layout("bnsc", "x.transpose(1, 2).flatten(-2)", "x.transpose(1, 2)", "{}.transpose(1, 2)"),
    "streams first": Layout("nbsc", "x.movedim(0, -2).flatten(-2)", "x.movedim(0, -2)", "{}.movedim(-2, 0)"),
}

POWERS = (
    "wide.square().mean(-1, keepdim=True)",
    "(wide * wide).mean(dim=-1, keepdim=True)",
    "wide.pow(2).sum(-1, keepdim=True) / wide.shape[-1]",
    "wide.norm(dim=-1, keepdim=True) ** 2 / wide.shape[-1]",
)
FACTORS = (
    "torch.rsqrt(ms + {eps})",
    "1 / torch.sqrt(ms + {eps})",
    "1 / (ms.sqrt() + {eps})",
    "(ms + {eps}) ** -0.5",
    "torch.rsqrt(ms.clamp_min({eps}))",
    "1 / ms.sqrt().clamp(min={eps})",
)
PROJECTIONS = (
    "F.linear({}, self.phi)",
    "{} @ self.phi.t()",
    "torch.einsum('...d,kd->...k', {}, self.phi)",
    "torch.cat([F.linear({}, part) for part in self.phi.split([N, N, N * N][: self.parts])], -1)",
    "F.linear({}, self.phi, self.bias / self.scale[0])",
)
SIGMOIDS = (
    "torch.sigmoid({})",
    "{}.sigmoid()",
    "1 / (1 + torch.exp(-{}))",
    "0.5 * (1 + torch.tanh({} / 2))",
    "F.hardsigmoid({})",
    "torch.softmax({}, -1)",
)
READS = (
    "(h_pre.unsqueeze(-1) * xs).sum(-2)",
    "torch.einsum('...n,...nc->...c', h_pre, xs)",
    "(h_pre.unsqueeze(-2) @ xs).squeeze(-2)",
    "(xs.transpose(-1, -2) @ h_pre.unsqueeze(-1)).squeeze(-1)",
    "sum(h_pre[..., i, None] * xs[..., i, :] for i in range(N))",
    "(h_pre.unsqueeze(-1) * xs).mean(-2) * N",
    "(h_pre.unsqueeze(-1) * xs).cumsum(-2)[..., -1, :]",
)
LAYERS = (
    "torch.tanh(F.linear(u, self.weight.to(u.dtype)))",
    "u",
    "torch.tanh(u) + self.layer_bias.to(u.dtype)",
)
# Of a layer input u to v; those before the mark are RMS norms over its channels, in one call.
NORMS = (
    "F.rms_norm(u, (C,), self.channel.to(u.dtype), {eps})",
    "F.rms_norm(u, (C,), None, {eps})",
    "F.rms_norm(u.float(), (C,), self.channel, {eps}).to(u.dtype)",
    # others
    "F.layer_norm(u, (C,), self.channel.to(u.dtype), None, {eps})",
    "F.normalize(u, dim=-1, eps={eps}) * C**0.5",
    "F.rms_norm(u.unflatten(-1, (2, C // 2)), (C // 2,), None, {eps}).flatten(-2)",
)
CHANNELS = (
    "v",
    "v * self.channel",
    "self.channel * v",
    "v * (1 + self.channel)",
    "v / self.channel",
    "v * self.scale[0]",
)
MIXED = (
    "h_res.transpose(-1, -2) @ xs",
    "h_res @ xs",
    "torch.einsum('...io,...ic->...oc', h_res, xs)",
    "torch.einsum('...oi,...ic->...oc', h_res, xs)",
    "(h_res.unsqueeze(-1) * xs.unsqueeze(-2)).sum(-3)",
    "(h_res.unsqueeze(-1) * xs.unsqueeze(-2)).sum(-2).clone()",
    "xs",
)
OUTER = (
    "h_post.unsqueeze(-1) * f.unsqueeze(-2)",
    "torch.einsum('...n,...c->...nc', h_post, f)",
    "h_post.unsqueeze(-1) @ f.unsqueeze(-2)",
    "f.unsqueeze(-2) * h_post[..., None]",
)
SUMS = (
    "outer + mixed",
    "mixed + outer",
    "torch.add(mixed, outer)",
    "mixed - outer",
    "mixed.add_(outer)",
    "torch.lerp(mixed, outer, 0.5)",
    "outer + mixed + xs",
    "torch.addcmul(mixed, h_post.unsqueeze(-1), f.unsqueeze(-2))",
)
EPS = (1e-6, 1e-5, 1e-8, 1e-3, 1e-2, 1e-12)

# Changes of a value {v}: those before the mark leave what is computed as it is, those after it do not.
MUTATIONS = (
    "{v} = {v}.clone()",
    "{v} = {v}.contiguous()",
    "{v} = {v} * 1.0",
    "kept.append({v})",
    "kept.append({v}.mean())",
    "kept.append({v}.detach().sum())",
    "{v} = {v}.float().to({v}.dtype)",
    "torch._dynamo.graph_break()",
    # what is computed changes from here on
    "{v} = {v}.detach()",
    "{v} = 0.5 * {v} + 0.5 * {v}.detach()",
    "{v} = {v}.bfloat16().to({v}.dtype)",
    "{v} = {v}.half().to({v}.dtype)",
    "{v} = {v}.double().mul(1.25).to({v}.dtype)",
    "{v} = {v}.clamp(-0.5, 0.5)",
    "{v} = {v}.clamp(min=1e-3)",
    "{v} = {v}.clamp(max=30.0)",
    "{v} = {v} + 1e-3",
    "{v} = {v} * 1.001",
    "{v} = -{v}",
    "{v} = {v}.flip(-1)",
    "{v} = {v}.roll(1, 0)",
    "{v} = {v}.roll(1, -1)",
    "{v} = {v}.roll(1, 1)",
    # what only many tokens show
    "{v} = {v} * (1 + (torch.arange({v}.shape[1]) > 100).view(-1, *[1] * ({v}.dim() - 2)))",
    "{v} = torch.where(torch.ones_like({v}).cumsum(1) > 100, {v}.detach(), {v})",
    "{v} = torch.where(torch.ones_like({v}).cumsum(0) > 100, 0.5 * {v}, {v})",
    "{v} = torch.where(torch.ones_like({v}).sum() > 4000, 1.25 * {v}, {v})",
    "{v} = torch.cat([{v}[:, :100], 0.75 * {v}[:, 100:]], 1)",
    "{v} = {v} * (1 + 0.001 * {v}.abs().sum())",
    "{v} = {v}.transpose(-1, -2).contiguous().view({v}.shape)",
    "{v} = {v}.transpose(-1, -2) if {v}.shape[-1] == {v}.shape[-2] else {v}.flip(-2)",
    "{v} = {v}.transpose(0, 1) if {v}.shape[0] == {v}.shape[1] else {v}.flip(0)",
    "{v} = {v} + 0.1 * {v}.mean(0, keepdim=True)",
    "{v} = {v} * {v}.shape[0]",
    "{v} = {v}[:1].expand_as({v})",
    "{v} = torch.where({v} > 0, {v}, 0.9 * {v})",
    "{v} = torch.where({v}.isnan(), 0.0, {v})",
    "{v} = torch.cat([{v}[..., 1:], {v}[..., :1]], -1)",
    "{v} = {v} / {v}.detach().abs().max()",
    "{v} = {v} - {v}.mean(-1, keepdim=True)",
    "{v} = F.dropout({v}, 0.25, training=False)",
    "{v} = {v}.clone(); {v}.mul_(1.5)",
    "{v} = {v}.clone(); {v}[..., 0] = 0.25",
    "{v} = {v}.clone(); alias = {v}.view(-1); alias[1:3].add_(0.25)",
    "{v}.mul_(0.75)",
    "{v}[..., :1] *= 2.0",
    "with torch.no_grad(): {v} = {v} * 1.0",
    "with torch.no_grad(): {v}.add_(0.125)",
    "self.buffer.add_(1.0); {v} = {v} * self.buffer",
    "{v} = {v} * self.buffer; self.buffer.mul_(0.5)",
    "xs.mul_(0.5)",
    "x = x * 0.5",
)
BLOCKS = (
    "with torch.no_grad():",
    'with torch.autocast("cpu", torch.bfloat16):',
    'with torch.autocast("cpu", enabled=False):',
    "with torch.enable_grad():",
    "for _ in range(2):",
)


def _sinkhorn(pick: Pick) -> list[Line]:
    """The residual matrix, unrolled: a start, and steps whose eps and axes are mostly the same."""
    eps, kind = pick(EPS), pick(["softmax", "exp", "log", "log softmax", "plain exp", "softmax columns", "global exp"])
    first, steps = pick([-2, -1]), pick([3, 1, 2, 4, 6, 7, 0])
    axes = [first if step % 2 == 0 else -3 - first for step in range(steps)]
    if kind == "log":
        lines = [Line("m", f"m - torch.logsumexp(m, dim={axis}, keepdim=True)") for axis in axes]
        return [Line("m", "logits"), *lines, Line("m", "m.exp()")]
    starts = {
        "softmax": f"logits.softmax(-1) + {eps}",
        "exp": "torch.exp(logits - logits.amax(-1, keepdim=True))",
        "log softmax": f"F.log_softmax(logits, -1).exp() + {pick([eps, 0.0])}",
        "plain exp": "torch.exp(logits)",
        "softmax columns": f"logits.softmax(-2) + {eps}",
        "global exp": "torch.exp(logits - logits.amax((-1, -2), keepdim=True))",
    }
    total = pick(["(m.sum({axis}, keepdim=True) + {eps})", "m.sum(dim={axis}, keepdim=True).clamp_min({eps})"])
    if pick([False] * 4 + [True]) and steps:  # one step that is not like the others
        odd = pick(range(steps))
        if pick(["eps", "axis"]) == "axis":
            axes[odd] = -3 - axes[odd]
            odd_eps = eps
        else:
            odd_eps = pick(EPS)
    else:
        odd, odd_eps = 0, eps
    lines = [
        Line("m", "m / " + total.format(axis=axis, eps=odd_eps if step == odd else eps))
        for step, axis in enumerate(axes)
    ]
    return [Line("m", starts[kind]), *lines]


def _gates(pick: Pick, parts: int, cast: bool) -> list[Line]:
    """From the streams to h_pre, h_post and logits or, for programs without them, as many of these as there are."""
    eps = pick(EPS)
    weighted, before = pick([False, False, True]), pick([False, True])
    project = pick(PROJECTIONS[:3] * 3 + PROJECTIONS[3:])
    lines = [
        Line("flat", "{flat}"),
        Line("wide", "flat.float()" if cast else "flat"),
        Line("ms", pick(POWERS)),
        Line("r", pick(FACTORS).format(eps=eps)),
    ]
    if before:
        lines += [Line("normed", "wide * r * self.gain" if weighted else "wide * r")]
        lines += [Line("h", project.format("normed"))]
    else:
        lines += [Line("h", project.format("(wide * self.gain)" if weighted else "wide") + " * r")]
    sizes = ["N", "N", "N * N"][:parts]
    names = ["pre", "post", "res"][:parts]
    lines.append(Line(", ".join(names) + ",", f"h.split([{', '.join(sizes)}], -1)", mutable=False))
    for index, name in enumerate(names):
        bias = f"self.bias.split([{', '.join(sizes)}])[{index}]"
        lines.append(
            Line(
                name,
                pick([f"{name} * self.scale[{index}] + {bias}", f"torch.addcmul({bias}, {name}, self.scale[{index}])"]),
            )
        )
    plain = SIGMOIDS[:4] * 2 + SIGMOIDS[4:]
    lines.append(Line("h_pre", pick(plain).format("pre") + pick(["", f" + {eps}", " + 0.5"])))
    if parts > 1:
        factor = pick(["2", "1", "2.5"])
        lines.append(Line("h_post", f"{factor} * ({pick(plain).format('post')})" + pick(["", "", f" + {eps}"])))
    if parts > 2:
        lines.append(Line("logits", "res.unflatten(-1, (N, N))"))
    return lines


def _norm(pick: Pick) -> list[Line]:
    """From the layer input u to v, normalised or in a way that is nearly that."""
    eps = pick(EPS)
    if pick([False, True]):
        return [Line("v", pick(NORMS[:3] * 2 + NORMS[3:]).format(eps=eps))]
    return [
        Line("v", pick(["u", "u.float()"])),
        Line("ms", pick(POWERS).replace("wide", "v")),
        Line("r", pick(FACTORS[:2] * 3 + FACTORS).format(eps=eps)),
        Line("v", pick(["v * r", "r * v", "v / (1 / r)"])),
        Line("v", f"({pick(CHANNELS[:3] * 2 + CHANNELS[3:])}).to(u.dtype)"),
    ]


def _cast(expression: str, cast: bool) -> str:
    return f"({expression}).to(x.dtype)" if cast else expression


def _sublayer(pick: Pick, layout: Layout, cast: bool) -> tuple[int, list[Line]]:
    parts = pick([3, 3, 3, 3, 2, 1])
    lines = [Line("xs", layout.streams), *_gates(pick, parts, cast)]
    lines[1].expression = layout.flat
    if parts > 2:
        lines += [*_sinkhorn(pick), Line("h_res", pick(["m", "m", "m.transpose(-1, -2)"]))]
    read = pick(READS[:5] * 2 + READS[5:])
    lines.append(Line("u", _cast(read.replace("xs", "xs.float()") if cast else read, cast)))
    layer = pick(LAYERS)
    if pick([False, True, True]):
        lines += _norm(pick)
        layer = re.sub(r"\bu\b", "v", layer) + pick([""] * 5 + [" + u"])
    lines.append(Line("f", layer))
    if parts == 1:
        return parts, [*lines, Line("out", "f")]
    mixed = pick(MIXED[:5] * 2 + MIXED[5:]) if parts > 2 else "xs"
    if cast and pick([False, True]):
        mixed, outer = mixed.replace("h_res", "h_res.to(x.dtype)"), pick(OUTER).replace("h_post", "h_post.to(x.dtype)")
    else:
        outer = pick(OUTER)
    if cast:
        mixed = mixed if "to(x" in mixed else mixed.replace("xs", "xs.float()")
        outer = outer if "to(x" in outer else outer.replace("f.uns", "f.float().uns").replace(", f)", ", f.float())")
    lines += [Line("mixed", mixed), Line("outer", outer)]
    lines.append(Line("out", _cast(pick(SUMS[:3] * 3 + SUMS[3:]), cast)))
    lines.append(Line("out", layout.back.format("out")))
    return parts, lines


def _mutated(pick: Pick, lines: list[Line]) -> list[str]:
    """The statements as text, with a few mutations and at most one block put in."""
    texts = [[str(line)] for line in lines]
    for _ in range(pick([0, 1, 0, 1, 1, 2, 2, 3])):
        where = pick([index for index, line in enumerate(lines) if line.mutable])
        texts[where] += pick(MUTATIONS).format(v=lines[where].names).split("; ")
    if pick([False] * 5 + [True]):
        begin = pick(range(1, len(texts)))
        end = begin + pick([1, 2, 3, 6])
        block = [f"    {text}" for group in texts[begin:end] for text in group]
        texts[begin:end] = [[pick(BLOCKS), *block]]
    return [text for group in texts for text in group]


def compose(pick: Pick) -> Program:
    """One program, by the choices of `pick`."""
    return pick([_written, _written, _written, _written, _nearly, _spelled])(pick)


def _nearly(pick: Pick) -> Program:
    """Two or three of the zoo's near misses in one model."""
    # Those that draw random numbers draw others in float64.
    names = [name for name in MISSES if not any(word in name for word in ("dropout", "noise", "random"))]
    bases = list(dict.fromkeys(pick(names) for _ in range(pick([2, 3]))))
    n = pick([4, 2, 3])
    batch, length, width = pick([2, n]), pick([3, n, 3, 130]), pick([6, n])
    source = f"""
from tests.zoo import near_flat, near_gates, near_mixing, near_streams, near_whole
from tests.zoo.near import MISSES


class Model({", ".join(f'MISSES["{name}"]' for name in bases)}):
    def __init__(self):
        super().__init__(n={n}, width={width}, length={length}, batch={batch})
"""
    return Program(source, (batch, length, n, width), dynamic=pick([None] * 7 + [True]), seed=pick(range(100)))


def _spelled(pick: Pick) -> Program:
    """The zoo's sublayer in a spelling drawn at random."""
    choices = {place: pick(list(options)) for place, options in spellings.PLACES.items()}
    n = pick([4, 2, 3])
    shape = (pick([2, n]), pick([3, n]), n, pick([6, n]))
    source = f"""
from tests.zoo.spellings import Spelled


class Model(Spelled):
    def __init__(self):
        super().__init__({choices!r}, n={n}, width={shape[-1]})
"""
    return Program(source, shape, dynamic=pick([None] * 7 + [True]), seed=pick(range(100)))


def _written(pick: Pick) -> Program:
    """A program of the grammar."""
    layout = LAYOUTS[pick([*LAYOUTS, *[*LAYOUTS][:4] * 2])]
    n = pick([4, 2, 3])
    sizes = {
        "b": pick([2, n]),
        "s": pick([3, n, 5, 3, 141]),
        "n": n,
        "c": pick([6, n, 8]),
        "t": pick([5, n, 5, n, 150]),
    }
    sizes["d"] = n * sizes["c"]
    cast = pick([False] * 5 + [True])
    parts, lines = _sublayer(pick, layout, cast)
    body = _mutated(pick, lines)
    head = pick(["out", "out", "(out, out.mean(-2))", "out.sin()"])
    rows = [n, 2 * n, n * n + 2 * n][parts - 1]
    entry = [str(sizes["b"]) if letter == "b" else "1" for letter in layout.shape]
    source = f"""
N, C = {n}, {sizes["c"]}


class Model(nn.Module):
    checkpointing = {pick([False] * 7 + [True])}
    parts = {parts}

    def __init__(self):
        super().__init__()
        self.phi = nn.Parameter(torch.randn({rows}, N * C) * (N * C) ** -0.5)
        self.scale = nn.Parameter(1 + 0.2 * torch.randn(3))
        self.bias = nn.Parameter(0.5 * torch.randn({rows}))
        self.gain = nn.Parameter(1 + 0.2 * torch.randn(N * C))
        self.weight = nn.Parameter(torch.randn(C, C) * C**-0.5)
        self.layer_bias = nn.Parameter(torch.randn(C))
        self.channel = nn.Parameter(1 + 0.2 * torch.randn(C))
        self.entry = nn.Parameter(1 + 0.2 * torch.randn({", ".join(entry)}))
        self.register_buffer("buffer", torch.ones(()))

    def body(self, x):
        kept = []
{textwrap.indent(chr(10).join(body), " " * 8)}
        return ({head}, *kept)

    def forward(self, x):
        x = (x * self.entry).to(x.dtype)
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointing else self.body(x)
"""
    return Program(
        source,
        tuple(sizes[letter] for letter in layout.shape),
        "bfloat16" if cast else "float32",
        pick([None] * 7 + [True]),
        pick(range(100)),
    )
