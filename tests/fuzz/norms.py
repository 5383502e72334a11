"""Norms of tokens that are all zeros, as padding is, and whose normed value or factor the program reads itself."""

from __future__ import annotations

from tests.fuzz.program import Pick
from tests.fuzz.sublayer_lines import Line

ZEROS = (
    "torch.cat([{v}[:1] * 0, {v}[1:]])",
    "torch.cat([{v}[:, :-1], 0 * {v}[:, -1:]], 1)",
    "{v} * ({v}[..., :1] > 0)",
    "{v}.masked_fill({v}[..., :1] < 0, 0.0)",
    "torch.where({v}[..., :1] > 0.5, {v}, torch.zeros_like({v}))",
    "F.pad({v}[:, 1:], [0, 0] * ({v}.dim() - 2) + [1, 0])",
    "torch.zeros_like({v})",
    "{v} * 0",
)
# Size and factor of a norm whose gradient at zero is finite.
SIZES = ("{v}.norm(dim=-1, keepdim=True)", "torch.linalg.vector_norm({v}, dim=-1, keepdim=True)")
OF_SIZES = (
    "1 / torch.where(ms == 0, torch.ones_like(ms), ms)",
    "{v}.shape[-1] ** 0.5 / ms.clamp_min(1e-12)",
    "{v}.shape[-1] ** 0.5 / (ms + 1e-6)",
    "ms.clamp(min=1e-8).reciprocal()",
)
NORMED = ("F.normalize({v}, dim=-1)", "F.rms_norm({v}, {v}.shape[-1:])", "F.normalize({v}, dim=-1, eps=1e-6)")
READ = (
    "kept.append({r})",
    "kept.append({r}.squeeze(-1))",
    "kept += [{r}, ms]",
    "kept.append({v} * {r})",
    "kept += [{v} * {r}, {r}.detach()]",
    "kept.append(({r} > 1).to({r}.dtype))",
    "kept.append({v}.detach() * {r})",
    "{v} = {v} * {r}; kept.append({v})",
)


def put_zeros(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """Tokens of zeros in front of a norm, whose factor or result is an output."""
    norms = [index for index, line in enumerate(lines) if line.names == "r"]
    fused = [index for index, line in enumerate(lines) if line.names == "v" and "norm" in line.expression]
    if not norms and not fused:
        made = next(index for index, line in enumerate(lines) if line.names in ("wide", "u"))
        value = lines[made].names
        texts[made] += [f"{value} = " + pick(ZEROS).format(v=value)]
        texts[made] += [f"normed = {pick(NORMED).format(v=value)}", "kept.append(normed)"]
        return
    at = pick([*norms, *fused])
    if at in fused:
        texts[at].insert(0, "u = " + pick(ZEROS).format(v="u"))
        texts[at].append(pick(["kept.append(v)", "kept += [v, u]", "kept.append(v.detach())"]))
        return
    value = "v" if lines[at - 2].names == "v" else "wide"
    texts[at - 1].insert(0, f"{value} = " + pick(ZEROS).format(v=value))
    if pick([False, True]):
        texts[at - 1][1] = "ms = " + pick(SIZES).format(v=value)
        texts[at][0] = "r = " + pick(OF_SIZES[:1] * 2 + OF_SIZES).format(v=value)
        texts[at] += pick([["kept.append(ms)"], []])
    texts[at] += pick(READ).format(v=value, r="r").split("; ")
    if pick([False, True]):  # the streams of such a token are zeros, too
        texts[0].insert(0, "x = " + pick(ZEROS).format(v="x"))
