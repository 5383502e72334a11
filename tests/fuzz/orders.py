"""What depends on an order: random numbers of several calls, writes in front of a cast, chains of writes in place."""

from __future__ import annotations

from tests.fuzz.program import Pick
from tests.fuzz.sublayer_lines import Line, places
from tests.fuzz.writes import WRITES

# The same numbers in every dtype.
NOISES = (
    "torch.ops.fuzz.noise({v})",
    "torch.ops.fuzz.untagged_noise({v})",
    "Noise.apply({v})",
    "allowed.noise({v})",
    "checkpoint(torch.ops.fuzz.noise, {v}, use_reentrant=False)",
    "{v} * (1 + torch.rand({v}.shape[-1]).to({v}.dtype))",
    "F.dropout({v}, 0.25, True)",
)
NOISY = ("{v} = {d}", "{v} = {d}", "{v} = {v} + {d}", "kept.append({d})")
LATE_CASTS = ("torch.bfloat16", "torch.bfloat16", "torch.float16", "torch.float64", "x.dtype")
# A chain begins with {v}, ends with {v}, and leaves {w}, which shares memory with it.
CHAINS = (
    "w = {v}.sin(); w.add_(0.125); {v} = w.view({v}.shape).mul_(0.75)",
    "w = {v}.flatten(-2).sin(); w.add_(0.125); {v} = w.view({v}.shape).mul_(0.75)",
    "w = {v}.flatten(0, 1) * 1.5; w.clamp_(max=0.5); {v} = w.view({v}.shape).tanh_()",
    "w = {v} + 0; {v} = w.unsqueeze(0).mul_(0.75)[0]; {v} = {v}.add_(0.125)",
    "w = {v}.sin(); {v} = w.transpose(0, 1).mul_(0.75).add_(0.125).transpose(0, 1)",
    "w = {v}.detach().clone(); w.add_(0.125); {v} = w.view({v}.shape).exp_()",
    "w = {v}.sin(); {v} = w.unsqueeze_(0).squeeze_(0)",
    "w = {v}.sin(); {v} = w.transpose_(0, 1).mul_(0.75).transpose(0, 1)",
)
# Products in place, which autocast leaves in float32, and others that it casts.
PRODUCTS = (
    "w = {v}.sin().flatten(0, -3) * 1; w.baddbmm_(w.mean(-1, True), w.mean(-2, True)); {v} = w.view({v}.shape)",
    "w = {v}.sin().flatten(0, -2) * 1; w.addmm_(w.mean(-1, True), w.mean(0, True)); {v} = w.view({v}.shape)",
    "w = {v}.sin() * 1; w.exp_(); {v} = w.rsqrt_()",
    "w = {v}.sin() + 2; w.log_().pow_(2); {v} = w",
)


def put_noises(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """Two or three values that are multiplied with random numbers, each by a call of its own."""
    likely = places(lines, "h_pre", "h_post", "u", "f", "v", "pre", "post", "m")
    for _ in range(pick([2, 2, 3])):
        made = pick([*likely * 3, *(index for index, line in enumerate(lines) if line.mutable)])
        value = lines[made].names
        texts[made].append(pick(NOISY).format(v=value, d=pick(NOISES).format(v=value)))


def put_late_casts(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """Streams, or what is computed of them, are written into between a value and its cast."""
    made = pick([*places(lines, "u", "out", "mixed") * 3, *places(lines, "outer", "f", "h_pre", "h_post", "xs")])
    value = lines[made].names
    written = pick(["xs", "xs", "x", "flat", value])
    cast = f"{value} = {value}.to({pick(LATE_CASTS)})" + pick(["", "", f".to({value}.dtype)"])
    texts[made] += [f"w = {written}.detach()" if pick([False, True]) else f"w = {written}"]
    texts[made] += [*pick(WRITES[:6]).format(w="w").split("; "), cast]


def put_chains(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """Writes in place one after the other, through views, whose results the program goes on with."""
    made = pick([*places(lines, "xs") * 2, *places(lines, "h_pre", "h_post", "h_res", "u", "mixed", "outer")])
    texts[made] += pick(CHAINS).format(v=lines[made].names).split("; ")
    if pick([False, True, True]):
        at = min(made + pick([1, 2, 3, 5, 8, 12]), len(texts) - 1)
        texts[at] += pick(WRITES[:6]).format(w="w").split("; ")


def put_products(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """Products and other functions in place, mostly where autocast is on."""
    made = pick([*places(lines, "xs", "mixed", "outer") * 2, *places(lines, "u", "f", "h_res")])
    statements = pick(PRODUCTS).format(v=lines[made].names).split("; ")
    block = pick(['with torch.autocast("cpu", torch.bfloat16):', 'with torch.autocast("cpu", torch.bfloat16):', ""])
    texts[made] += [block, *(f"    {text}" for text in statements)] if block else statements
