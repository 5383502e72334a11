"""Code without a gradient beside code that has one: under no_grad, with a backward pass of None, and for a log."""

from __future__ import annotations

from tests.fuzz.program import Pick
from tests.fuzz.sublayer_lines import POWERS, Line

OFF = ("with torch.no_grad():", "with torch.set_grad_enabled(False):", "with torch.enable_grad():")
# Casts and moves of a value.
CASTS = (
    "{v}.to(torch.bfloat16)",
    "{v}.bfloat16()",
    "{v}.float()",
    "{v}.double()",
    "{v}.to({v}.dtype)",
    "{v}.to(torch.float32, copy=True)",
    "{v}.type(torch.bfloat16)",
    "{v}.to('cpu')",
    "{v}.cpu()",
    "{v}.to('cpu', torch.bfloat16)",
    "{v}.to(device='cpu', copy=True)",
    "{v}.to({v}.device, non_blocking=True)",
    "{v}.to(self.bias)",
    "{v}.to(tensor=self.bias)",
    "{v}.to(xs)",
    "{v}.type_as(self.bias)",
    "{v}.type_as(xs)",
)
# What becomes of what is cast; those before the mark go on with it.
CAST = (
    "{v} = {c}.to({v}.dtype)",
    "{v} = {c}",
    # others
    "kept.append({c})",
    "kept += [{c}, {v}]",
    "kept += [{v}, {c}.sin()]",
)
# Functions and operators whose backward pass returns None for an input.
NONE = (
    "{v} = Second.apply({v}, self.scale[0])",
    "{v} = Second.apply({v}, 0.5 * {v}.sin())",
    "{v} = Second.apply({v}.detach(), {v})",
    "{v} = First.apply({v}, self.scale[0])",
    "{v} = First.apply({v}, {v})",
    "{v} = First.apply({v}, {v}.detach())",
    "{v} = Stopped.apply({v})",
    "{v} = {v} + Stopped.apply({v})",
    "kept.append(Stopped.apply({v}))",
    "kept += [First.apply({v}, {v}.cos()), {v}]",
    "{v} = torch.ops.fuzz.first({v}, self.scale[0])",
    "{v} = torch.ops.fuzz.first({v}, {v}.sin())",
    "{v} = torch.ops.fuzz.first({v}.detach(), {v})",
    "{v} = allowed.first({v}, self.scale[0])",
    "{v} = allowed.first({v}.detach(), {v})",
    "{v} = {v}.detach() + {v}.data",
    "{v} = checkpoint(lambda a, b: a + b.detach(), {v}, self.scale[0], use_reentrant=False)",
    "{v} = checkpoint(lambda a, b: a.detach() * b, {v}, self.scale[0], use_reentrant=False)",
)
LOGGED = ("log", "log.mean()", "log.sqrt()", "log.squeeze(-1)", "(log + 1e-6).rsqrt()", "log.float()")
TO_LOG = (
    "kept.append({log})",
    "kept.insert(0, {log})",
    "kept += [{log}, {v}]",
    "self.buffer.copy_(log.mean())",
    "{v} = {v} / (1 + {log}.mean())",
)


def _likely(lines: list[Line], *names: str) -> list[int]:
    """Lines whose values may be changed; those of these names four times."""
    return [
        index
        for index, line in enumerate(lines)
        if line.mutable and line.names
        for _ in range(4 if line.names in names else 1)
    ]


def put_casts(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """Up to a few lines that run in another grad mode, and casts or moves of their last result outside."""
    for _ in range(pick([1, 1, 2])):
        made = pick(_likely(lines, "u", "f", "out", "h_pre", "h_post", "xs"))
        off = pick(OFF[:2] * 2 + OFF[2:])
        for index in range(max(0, made - pick([0, 0, 1, 2, 4, 8])), made + 1):
            # Each by itself: other kinds may append to any of them.
            texts[index] = [off, *(f"    {text}" for text in texts[index])]
        value = lines[made].names
        texts[made].append(pick(CAST[:1] * 3 + CAST).format(v=value, c=pick(CASTS[:4] * 2 + CASTS).format(v=value)))


def put_none(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """One or two values that go through a function whose backward pass returns None."""
    for _ in range(pick([1, 1, 2])):
        made = pick(_likely(lines, "u", "f", "h_pre", "h_post", "h_res", "xs"))
        texts[made].append(pick(NONE).format(v=lines[made].names))


def put_log(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """A mean of squares under no_grad, for a log, mostly of what is normalised."""
    made = pick(_likely(lines, "wide", "flat", "u"))
    value = lines[made].names
    at = min(made + pick([0, 0, 1, 2, 5]), len(texts) - 1)
    log = pick(POWERS).replace("wide", value)
    texts[at] += [f"with torch.no_grad(): log = {log}", pick(TO_LOG).format(v=value, log=pick(LOGGED))]
