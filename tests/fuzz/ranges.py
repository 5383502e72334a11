"""What shows in a part of the range of numbers alone: functions that change there, and gates that are nearly zero."""

from __future__ import annotations

from tests.fuzz.program import Pick
from tests.fuzz.sublayer_lines import Line, places

# Where {v} is changed, and to what.
WHERE = ("{v} > {t}", "{v} < {t}", "{v}.abs() > {t}", "{v}.abs() < {t}")
LIMITS = ("20", "1", "1e-2", "1e-4", "80", "1e8", "0.5", "1e-8", "1e-12")
CHANGED = (
    "torch.where({w}, {v}.detach(), {v})",
    "torch.where({w}, {v}.detach(), {v})",
    "torch.where({w}, 0.5 * {v}, {v})",
    "{v}.masked_fill({w}, 0.0)",
    "{v}.clamp(max={t})",
    "{v}.clamp(min={t})",
    "F.threshold({v}, {t}, 0.0)",
)
# How far the streams, or the value itself, are from one.
FACTORS = ("1e4", "3e-3", "30", "100", "1e-2")
# Gates that cross zero, or are nearly zero, of logits {l}.
SMALL = (
    "torch.tanh({l})",
    "0.5 * torch.tanh({l})",
    "-torch.sigmoid({l} - 8)",
    "-2 * torch.sigmoid({l})",
    "2 * torch.sigmoid({l} - 12)",
    "1 - torch.sigmoid({l} + 8)",
    "2 * torch.sigmoid(2 * {l}) - 1",
    "F.threshold(torch.sigmoid({l} - 25), 1e-12, 0.0)",
)
SMALLER = ("1e-3", "1e-2", "1", "3")


def put_ranges(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """A value of the gates is changed where it is large or small, and may be so."""
    made = pick([*places(lines, "ms", "r") * 2, *places(lines, "h_pre", "h_post", "m", "logits", "h_res", "u")])
    value, limit = lines[made].names, pick(LIMITS)
    changed = pick(CHANGED).format(v=value, t=limit, w=pick(WHERE).format(v=value, t=limit))
    scaled = pick(["", "x", "x", value])
    if scaled == "x":
        texts[0].insert(0, f"x = x * {pick(FACTORS)}")
    elif scaled:
        texts[made].append(f"{value} = {value} * {pick(FACTORS)}")
    texts[made].append(f"{value} = {changed}")


def put_small(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """A read or write gate that crosses zero, or is nearly zero."""
    made = pick(places(lines, "h_pre", "h_post"))
    gate = lines[made].names
    logits = gate.removeprefix("h_")
    texts[made][0] = f"{gate} = " + pick(SMALL).format(l=f"({pick(SMALLER)} * {logits})")
