"""The pieces of a sublayer with hyper-connections, each in several spellings, as lines of Python."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.fuzz.program import Pick


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


def places(lines: list[Line], *names: str) -> list[int]:
    """Where the lines are that make values of these names."""
    return [index for index, line in enumerate(lines) if line.names in names]


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
# Gates that no operator makes: of other functions, and for all tokens; by what they take the place of.
OWN = {
    "h_pre": (
        "torch.tanh(pre) + 0.3",
        "1 + pre.sin()",
        "self.bias[:N].softmax(-1)",
        "self.bias[:N].softmax(-1).expand_as(h_pre)",
    ),
    "h_post": (
        "1 + torch.tanh(post * 0.5) * 0.5",
        "post.softmax(-1) * N",
        "self.bias[N : 2 * N].exp()",
        "self.bias[N : 2 * N].exp().expand_as(h_post)",
    ),
    "h_res": (
        "res.unflatten(-1, (N, N)).softmax(-1)",
        "0.5 * h_res + 0.5 * torch.eye(N, device=h_res.device)",
        "self.bias[2 * N :].view(N, N).softmax(-1)",
        "self.bias[2 * N :].view(N, N).softmax(-1).expand_as(h_res)",
        "torch.diag_embed(h_post)",
    ),
}
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
# From a layer input u to v; those before the mark are RMS norms over its channels, in one call.
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
PLAIN = ("xs", "xs", "0.5 * xs", "h_post.unsqueeze(-1) * xs", "h_post[..., :1, None] * xs")
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


def sinkhorn(pick: Pick, long: bool) -> list[Line]:
    """The residual matrix, unrolled: a start, and steps whose eps and axes are mostly the same."""
    eps, kind = pick(EPS), pick(["softmax", "exp", "log", "log softmax", "plain exp", "softmax columns", "global exp"])
    first, steps = pick([-2, -1]), pick([3, 1, 2, 4, 6, 7, 0, *([20, 39, 40] if long else [])])
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


def gates(pick: Pick, parts: int, cast: bool) -> list[Line]:
    """From the streams to h_pre, h_post and logits or, for programs without them, as many of these as there are."""
    eps = pick(EPS)
    weighted, norm = pick([False, False, True]), pick(["before", "after"] * 4 + ["none"])
    project = pick(PROJECTIONS[:3] * 3 + PROJECTIONS[3:])
    lines = [
        Line("flat", "{flat}"),
        Line("wide", "flat.float()" if cast else "flat"),
    ]
    if norm != "none":
        lines += [Line("ms", pick(POWERS)), Line("r", pick(FACTORS).format(eps=eps))]
    if norm == "before":
        lines += [Line("normed", "wide * r * self.gain" if weighted else "wide * r")]
        lines += [Line("h", project.format("normed"))]
    else:
        factor = " * r" if norm == "after" else ""
        lines += [Line("h", project.format("(wide * self.gain)" if weighted else "wide") + factor)]
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


def drawn_own(pick: Pick, parts: int) -> list[Line]:
    """Gates of the program's own in the place of some that operators make."""
    names = list(OWN)[:parts]
    return [Line(name, pick(OWN[name])) for name in names if pick([False, False, False, True])]


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


def cast_back(expression: str, cast: bool) -> str:
    return f"({expression}).to(x.dtype)" if cast else expression


def sublayer(pick: Pick, layout: Layout, cast: bool, long: bool = False) -> tuple[int, list[Line]]:
    parts = pick([3, 3, 3, 3, 2, 1])
    lines = [Line("xs", layout.streams), *gates(pick, parts, cast)]
    lines[1].expression = layout.flat
    if parts > 2:
        lines += [*sinkhorn(pick, long), Line("h_res", pick(["m", "m", "m.transpose(-1, -2)"]))]
    lines += drawn_own(pick, parts)
    read = pick(READS[:5] * 2 + READS[5:])
    lines.append(Line("u", cast_back(read.replace("xs", "xs.float()") if cast else read, cast)))
    layer = pick(LAYERS)
    if pick([False, True, True]):
        lines += _norm(pick)
        layer = re.sub(r"\bu\b", "v", layer) + pick([""] * 5 + [" + u"])
    lines.append(Line("f", layer))
    if parts == 1:
        return parts, [*lines, Line("out", "f")]
    mixed = pick(MIXED[:5] * 2 + MIXED[5:]) if parts > 2 else pick(PLAIN)
    if cast and pick([False, True]):
        mixed, outer = mixed.replace("h_res", "h_res.to(x.dtype)"), pick(OUTER).replace("h_post", "h_post.to(x.dtype)")
    else:
        outer = pick(OUTER)
    if cast:
        mixed = mixed if "to(x" in mixed else mixed.replace("xs", "xs.float()")
        outer = outer if "to(x" in outer else outer.replace("f.uns", "f.float().uns").replace(", f)", ", f.float())")
    lines += [Line("mixed", mixed), Line("outer", outer)]
    lines.append(Line("out", cast_back(pick(SUMS[:3] * 3 + SUMS[3:]), cast)))
    lines.append(Line("out", layout.back.format("out")))
    return parts, lines
