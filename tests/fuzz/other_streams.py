"""Streams in other forms: fractions of channels, Python lists, reads with the gates of the sublayer before."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.program import Pick
from tests.fuzz.sublayer_lines import (
    LAYERS,
    MIXED,
    OUTER,
    READS,
    SUMS,
    Layout,
    Line,
    cast_back,
    drawn_own,
    gates,
    sinkhorn,
    sublayer,
)

# What makes the lines of a program, and how many of the projection's parts these need.
Maker = Callable[[Pick, Layout, bool, bool], tuple[int, list[Line]]]

# Frac-connections: rows that are read, and how their gates are made of n * n + 2 * n numbers.
FRACTIONS = ("self.bias", "h", "torch.tanh(h)", "0.1 * torch.tanh(h) + self.bias")
SQUARES = ("{}.unflatten(-1, (N, N))", "{}.unflatten(-1, (N, N)).softmax(-1)", "{}.unflatten(-1, (N, N)).mT")
ROWS = (
    "torch.einsum('...nm,...nc->...mc', reads, xs)",
    "reads.mT @ xs",
    "(xs.mT @ reads).mT",
    "(reads.unsqueeze(-1) * xs.unsqueeze(-2)).sum(-3)",
)
# Rows side by side in one sublayer; the last two look at each row by itself, and are none.
SIDE_BY_SIDE = (
    "F.rms_norm(torch.tanh(u.flatten(-2)), (M * C,)).unflatten(-1, (M, C))",
    "torch.tanh(u.reshape(*u.shape[:-2], M * C) * 1.5).reshape(u.shape)",
    "torch.tanh(u)",
    "u",
)
WRITTEN_ROWS = (
    "torch.einsum('...mn,...mc->...nc', writes, f)",
    "writes.mT @ f",
    "(writes.unsqueeze(-1) * f.unsqueeze(-2)).sum(-3)",
)
LISTS = (
    "list(xs.unbind(-2))",
    "[xs[..., i, :] for i in range(N)]",
    "[s.squeeze(-2) for s in xs.split(1, -2)]",
    "[s.sin() for s in xs.unbind(-2)]",
    "[(xs.mean(-2) + self.bias[i]).to(x.dtype) for i in range(N)]",
    "[xs.mean(-2).clone() for i in range(N)]",
    "[xs.mean(-2)] * N",
)
LIST_READS = (
    "sum(h_pre[..., i, None] * ss[i] for i in range(N))",
    "sum(g * s for g, s in zip(h_pre.unsqueeze(-1).unbind(-2), ss))",
    "torch.stack([h_pre[..., i : i + 1] * ss[i] for i in range(N)]).sum(0)",
    "sum(ss) / N",
    "ss[0]",
)
LIST_WRITES = (
    "[h_post[..., o, None] * f + sum(h_res[..., i, o, None] * ss[i] for i in range(N)) for o in range(N)]",
    "[sum(h_res[..., o, i, None] * ss[i] for i in range(N)) + h_post[..., o, None] * f for o in range(N)]",
    "[torch.addcmul(ss[o], h_post[..., o, None], f.to(ss[o].dtype)) for o in range(N)]",
    "[ss[o] + h_post[..., o, None] * f for o in range(N)]",
    "[h_res[..., 0, o, None] * ss[o] + h_post[..., o, None] * f for o in range(N)]",
    "[h_res[..., o, o, None] * ss[o] + h_post[..., o, None] * f for o in range(N)]",
    "[sum(h_res[..., i, o, None] * ss[i] for i in range(N)) + f for o in range(N)]",
    "[ss[0] + f, *ss[1:]]",
    "[sum(h_res[..., i, o, None] * ss[i - 1] for i in range(N)) + h_post[..., o, None] * f for o in range(N)]",
    "[*reversed([h_post[..., o, None] * f + ss[o] for o in range(N)])]",
)
# What else is done with streams in a list: results, operators that see how they lie, and other dtypes or gradients.
BESIDE_LISTS = (
    "kept.extend(ss)",
    "kept.append(ss[0].exp())",
    "kept.append(torch.ops.fuzz.as_it_lies(ss[-1]))",
    "kept.append(ss[1].contiguous().view(-1, C).sin())",
    "kept.append(ss[1].reshape(-1).view(ss[1].shape))",
    "ss[0] = ss[0].detach()",
    "ss[-1] = ss[-1].to(torch.bfloat16)",
    "ss[0] = ss[0].to(torch.bfloat16).to(x.dtype); kept.append(ss[0] * 1.5)",
    "ss = [*ss[1:], ss[0]]",
    "ss[1] = torch.ops.fuzz.as_it_lies(ss[1]); kept.append(ss[1].cos())",
)
LIST_ENDS = ("torch.stack(ss, -2)", "torch.cat([s.unsqueeze(-2) for s in ss], -2)", "torch.stack(ss, -1).mT")
# The gates of the first read, before any are made.
FIRST = (
    "F.one_hot(xs.new_zeros(xs.shape[:-2], dtype=torch.long), N).float()",
    "torch.eye(N)[0]",
    "self.bias[:N].softmax(-1)",
    "xs.new_ones(N) / N",
)


def fractions(pick: Pick, layout: Layout, cast: bool, long: bool) -> tuple[int, list[Line]]:
    """Frac-connections (arXiv 2503.14125)."""
    lines = [Line("xs", layout.streams), *_projected(pick, layout.flat, cast)]
    lines += [Line("M", pick(["2", "1", "N"]), mutable=False), Line("l", pick(FRACTIONS))]
    lines.append(Line("reads", "l[..., : N * M].unflatten(-1, (N, M))"))
    lines.append(Line("writes", "l[..., -N * M :].unflatten(-1, (M, N))"))
    lines.append(Line("mixes", pick(SQUARES).format("l[..., 2 * N :]")))
    together = pick([False, False, True])
    if together:
        lines.append(Line("both", pick(ROWS).replace("reads", "torch.cat((reads, mixes), -1)")))
    lines.append(Line("u", "both[..., :M, :]" if together else pick(ROWS)))
    lines.append(Line("f", pick(SIDE_BY_SIDE[:2] * 3 + SIDE_BY_SIDE[2:])))
    lines.append(Line("mixed", "both[..., M:, :]" if together else pick(ROWS).replace("reads", "mixes")))
    lines += [Line("outer", pick(WRITTEN_ROWS)), Line("out", cast_back(pick(SUMS[:3]), cast))]
    if cast:
        for line in lines[1:]:
            line.expression = line.expression.replace("xs", "xs.float()")
    return 3, [*lines, Line("out", layout.back.format("out"))]


def listed(pick: Pick, layout: Layout, cast: bool, long: bool) -> tuple[int, list[Line]]:
    """Streams that a list holds from the first line to the last."""
    lines = [Line("xs", layout.streams), *_gated(pick, layout.flat, cast, long)]
    lines.append(Line("ss", pick(LISTS[:4] * 2 + LISTS[4:]), mutable=False))
    for _ in range(pick([2, 1, 3])):
        lines.append(Line("u", cast_back(pick(LIST_READS[:3] * 2 + LIST_READS[3:]), cast)))
        lines.append(Line("f", pick(LAYERS)))
        lines.append(Line("ss", pick(LIST_WRITES[:4] * 2 + LIST_WRITES[4:]), mutable=False))
        if cast:
            lines.append(Line("ss", "[s.to(x.dtype) for s in ss]", mutable=False))
        if pick([False] * 3 + [True]):
            beside = pick(BESIDE_LISTS[:1] * 3 + BESIDE_LISTS).split("; ")
            lines += [Line("", statement, mutable=False) for statement in beside]
    lines.append(Line("out", pick(LIST_ENDS)))
    return 3, [*lines, Line("out", layout.back.format("out"))]


def shifted(pick: Pick, layout: Layout, cast: bool, long: bool) -> tuple[int, list[Line]]:
    """Each sublayer reads with gates that were made at the boundary before it."""
    lines = [Line("xs", layout.streams), Line("a", pick(FIRST))]
    flat = layout.flat
    for _ in range(pick([2, 3, 1])):
        made = _gated(pick, flat, cast, long)
        read = pick(READS[:5]).replace("h_pre", "a")
        step = [Line("u", cast_back(read.replace("xs", "xs.float()") if cast else read, cast))]
        lines += [*made, *step] if pick([False, True]) else [*step, *made]
        lines.append(Line("f", pick(LAYERS)))
        mixed, outer = pick(MIXED[:5]), pick(OUTER)
        lines.append(Line("mixed", mixed.replace("xs", "xs.float()") if cast else mixed))
        lines.append(Line("outer", outer.replace("f.uns", "f.float().uns").replace(", f)", ", f.float())")))
        lines.append(Line("xs", cast_back(pick(SUMS[:3]), cast)))
        lines.append(Line("a", "h_pre"))
        flat = "xs.flatten(-2)"
    lines.append(Line("last", pick(READS[:5]).replace("h_pre", "a").replace("xs", "xs.float()")))
    lines.append(Line("", "kept.append(last)", mutable=False))
    return 3, [*lines, Line("out", layout.back.format("xs"))]


def _projected(pick: Pick, flat: str, cast: bool) -> list[Line]:
    """The lines from the streams to the logits h, of all gates together."""
    lines = gates(pick, 3, cast)
    lines[0].expression = flat
    return lines[: next(index for index, line in enumerate(lines) if line.names == "h") + 1]


def _gated(pick: Pick, flat: str, cast: bool, long: bool) -> list[Line]:
    """The lines from the streams to h_pre, h_post and h_res."""
    lines = [*gates(pick, 3, cast), *sinkhorn(pick, long)]
    lines[0].expression = flat
    return [*lines, Line("h_res", pick(["m", "m", "m.transpose(-1, -2)"])), *drawn_own(pick, 3)]


# By the name of the kind, which is none for streams in one tensor.
MAKERS: dict[str, Maker] = {
    "": sublayer,
    "fractions of channels": fractions,
    "list of streams": listed,
    "shifted order": shifted,
}
