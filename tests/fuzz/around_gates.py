"""What programs do with gates besides reading and writing streams: lists of them, dropouts, and frozen ones."""

from __future__ import annotations

from tests.fuzz.program import Pick
from tests.fuzz.sublayer_lines import Line, places

DROPOUTS = (
    "F.dropout({v}, 0.25, {t})",
    "F.dropout({v}, p=0.5, training={t})",
    "torch.dropout({v}, 0.25, {t})",
    "F.dropout(0 + {v}, 0.25, {t}, True)",
    "F.alpha_dropout({v}, 0.25, {t})",
    "F.feature_alpha_dropout({v}, 0.25, {t})",
    "torch.feature_dropout({v}, 0.25, {t})",
    "F.dropout1d({v}.flatten(0, -3), 0.25, {t}).view({v}.shape)",
    "F.dropout2d({v}.movedim(-2, 1), 0.25, {t}).movedim(1, -2)",
    "F.dropout2d({v}.movedim(-1, 1), 0.25, {t}).movedim(1, -1)",
)
TRAINING = ("self.training", "True", "False")
DROPPED = (
    "{v} = {d}",
    "{v} = {d}",
    "{v} = 0.5 * {v} + {d}",
    "kept.append({d})",
    "d = {d}; kept.append(d); {v} = {v} + d",
)
# Both gates in one call.
TOGETHER = (
    "h_pre, h_post = F.dropout(torch.stack([h_pre, h_post]), 0.25, {t}).unbind(0)",
    "h_pre, h_post = F.dropout(torch.cat([h_pre, h_post], -1), 0.25, {t}).chunk(2, -1)",
)
# As a gate: each stream is dropped as a whole.
STREAMS = "F.dropout1d(xs.flatten(0, -3), 0.5, {t}).view(xs.shape)"
# Gates {g} as a list; those after the mark are of parameters and buffers of their own.
LISTS = (
    "[{g}[..., i] for i in range(N)]",
    "list({g}.unbind(-1))",
    "[g.clone() for g in {g}.unbind(-1)]",
    "[g.squeeze(-1) for g in {g}.split(1, -1)]",
    "[{g}[..., i] * self.each[i] for i in range(N)]",
    # others
    "[self.each[i].sigmoid() for i in range(N)]",
    "[self.each[i] for i in range(N)]",
    "[self.each[i].exp() if i else self.each[i].detach() for i in range(N)]",
    "[self.get_buffer(f'held{{i}}') for i in range(N)]",
)
TOUCHED = (
    "{s}[0] = {s}[0] * 0.5",
    "{s}[-1] = {s}[-1].detach()",
    "for g in {s}: g.mul_(0.5)",
    "{s}[0].mul_(0.5)",
    "{s}[-1] += 0.125",
    "torch._foreach_mul_({s}, 0.5)",
    "{s}.reverse()",
    "kept.extend({s})",
    "kept.append({s})",
    "kept += [g[None] for g in {s}]",
    "kept.append({s}[0])",
    "with torch.no_grad(): {s}[-1] = {s}[-1].sigmoid()",
    "with torch.no_grad(): {s} = [g.sigmoid() for g in {s}]",
    "with torch.no_grad(): {s}[0].mul_(0.5)",
    "with torch.no_grad(): torch._foreach_mul_({s}, 0.5)",
)
LIST_READS = (
    "sum({s}[i][..., None] * {xs}[i] for i in range(N))",
    "sum(g.unsqueeze(-1) * s for g, s in zip({s}, {xs}))",
)
MORE_OF_LISTS = (
    "self.each = nn.ParameterList(nn.Parameter(torch.randn(())) for _ in range(N))",
    "for i in range(N): self.register_buffer(f'held{i}', torch.rand(()) + 0.5)",
)
# In the place of a gate, or beside it, by the gate; `fixed` needs no gradient.
FROZEN = {
    "h_pre": ("self.fixed[0].sigmoid()", "self.fixed[0].sigmoid().expand_as(h_pre)", "self.fixed[0]"),
    "h_post": ("2 * self.fixed[1].sigmoid()", "self.fixed[1].exp().expand_as(h_post)", "self.fixed[1]"),
    "h_res": ("self.fixed.softmax(-1)", "self.fixed.softmax(-1).expand_as(h_res)", "h_res @ self.fixed", "self.fixed"),
}
BESIDE = (
    "{g} = {g} * self.fixed[0]",
    "{g} = {g} + self.fixed[-1]",
    "{g} = torch.cat([{g}[..., :1], self.fixed[0][1:].sigmoid().expand_as({g}[..., 1:])], -1)",
    "kept.append(self.fixed)",
    "kept.append(self.fixed[0].sigmoid())",
    "kept.append({g})",
    "kept += [self.fixed[1], {g}]",
)
MORE_OF_FROZEN = ("self.fixed = nn.Parameter(torch.randn(N, N))",)
# Parameters that need no gradient.
FREEZES = (
    ("fixed",),
    ("fixed", "entry", "phi", "bias", "scale", "gain"),
    ("fixed",),
    ("fixed", "phi"),
    ("fixed", "bias"),
    ("fixed", "scale"),
    ("fixed", "phi", "bias", "scale"),
)


def put_dropouts(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """Dropouts of gates, streams, or any other values."""
    for _ in range(pick([1, 1, 2])):
        training = pick(TRAINING)
        both = places(lines, "h_post")
        if both and pick([False] * 5 + [True]):
            texts[pick(both)].append(pick(TOGETHER).format(t=training))
            continue
        read = places(lines, "u")
        if places(lines, "h_pre") and pick([False] * 4 + [True]):
            texts[read[0]] += [f"d = {STREAMS.format(t=training)}", "u = d.sum(-2)"]
            texts[read[0]] += pick([["kept.append(d)"], ["kept += [d, u]"], []])
            continue
        likely = places(lines, "h_pre", "h_post", "h_res", "xs", "pre", "post", "u", "f")
        made = pick([*likely * 3, *(index for index, line in enumerate(lines) if line.mutable)])
        value = lines[made].names
        dropped = pick(DROPOUTS[:4] * 2 + DROPOUTS[4:]).format(v=value, t=training)
        texts[made] += pick(DROPPED).format(v=value, d=dropped).split("; ")


def put_lists(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """Gates in a Python list, which the program writes into, returns, or makes without a gradient."""
    for gate, held in (("h_pre", "pres"), ("h_post", "posts"))[: pick([1, 2, 1])]:
        made = places(lines, gate)
        if not made:
            return
        at = made[-1]
        texts[at].append(f"{held} = " + pick(LISTS).format(g=gate))
        if pick([False, False, True]):
            texts[at] = [*texts[at][:-1], "with torch.no_grad():", f"    {texts[at][-1]}"]
        later = at
        for _ in range(pick([0, 1, 1, 2])):
            later = min(later + pick([0, 0, 0, 1, 5, 9]), len(texts) - 1)
            texts[later].append(pick(TOUCHED).format(s=held))
        _read_from_list(pick, lines, texts, at, gate, held)


def _read_from_list(pick: Pick, lines: list[Line], texts: list[list[str]], at: int, gate: str, held: str) -> None:
    """What reads a gate later reads it out of the list."""
    stacked = f"{gate} = torch.stack({held}, -1)"
    after = [
        index for index in range(at + 1, len(lines)) if lines[index].names == ("u" if gate == "h_pre" else "outer")
    ]
    one_by_one = [index for index in range(at + 1, len(lines)) if "h_post[..., o, None]" in texts[index][0]]
    if gate == "h_post" and one_by_one:
        texts[one_by_one[0]][0] = texts[one_by_one[0]][0].replace("h_post[..., o, None]", "posts[o][..., None]")
    elif not after or pick([False, False, True]):
        texts[at].append(stacked)
    elif gate == "h_post":
        texts[after[0]][0] = "outer = torch.stack([g[..., None] * f for g in posts], -2)"
    else:
        streams = "ss" if any(line.names == "ss" for line in lines) else "xs.unbind(-2)"
        read = pick(LIST_READS).format(s=held, xs=streams)
        texts[after[0]][0] = f"u = ({read}).to(x.dtype)" if "x.dtype" in texts[after[0]][0] else f"u = {read}"


def put_frozen(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """Gates of a parameter that needs no gradient, beside trained ones."""
    for _ in range(pick([1, 1, 2])):
        made = pick(places(lines, *FROZEN))
        gate = lines[made].names
        texts[made].append(pick([f"{gate} = {pick(FROZEN[gate])}", pick(BESIDE).format(g=gate)]))
