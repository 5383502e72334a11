"""Writes into what a program has made, in every form there is, through views and at any later place."""

from __future__ import annotations

from tests.fuzz.program import Pick
from tests.fuzz.sublayer_lines import Line
from tests.fuzz.views import view

# Statements that write into {w}.
WRITES = (
    "{w}.add_(0.125)",
    "{w}.mul_(0.75)",
    "{w}.copy_({w} * 0.5 + 0.1)",
    "{w}.fill_(0.25)",
    "{w}.zero_()",
    "{w}.clamp_(max=0.4)",
    "{w}.tanh_()",
    "{w}.masked_fill_({w} > 0.2, 0.1)",
    "{w}.index_fill_(0, torch.tensor([0]), 0.3)",
    "{w}.index_add_(0, torch.tensor([0]), torch.full_like({w}[:1], 0.5))",
    "{w}.index_copy_(-1, torch.tensor([0]), torch.full_like({w}[..., :1], 0.5))",
    "{w}.index_put_((torch.tensor([0]),), torch.tensor(0.25, dtype={w}.dtype))",
    "{w}.index_put_((torch.tensor([0]),), torch.tensor(0.25, dtype={w}.dtype), accumulate=True)",
    "{w}.scatter_(-1, torch.zeros_like({w}[..., :1], dtype=torch.long), 0.25)",
    "{w}.lerp_(torch.ones_like({w}), 0.25)",
    "{w}.addcmul_({w}.detach().clone(), torch.ones_like({w}))",
    "{w}[...] = 0.25",
    "{w}[..., :1] = 0.5",
    "{w}[0] *= 0.5",
    "{w}[torch.tensor([0])] = 0.25",
    "{w}[[0]] += 0.25",
    "w = {w}; w += 0.125",
    "w = {w}; w *= 0.5",
    "torch.mul({w}.detach(), 0.5, out={w}.detach())",
    "torch.add({w}.detach(), 0.5, out={w}.data)",
    "torch._foreach_mul_([{w}], 0.5)",
    "torch._foreach_add_([{w}, torch.ones(2)], 0.25)",
    "F.relu_({w})",
    "F.hardtanh({w}, -0.5, 0.5, inplace=True)",
    "F.dropout({w}, 0.0, inplace=True)",
    "torch.ops.fuzz.halve_({w}.detach())",
    "torch.ops.fuzz.halve_({w})",
    "checkpoint(lambda w: w.mul_(0.5).sum(), {w}, use_reentrant=False)",
    "torch.cond({w}.sum() > 0, lambda w: w.mul(0.5), lambda w: w * 1.5, ({w},))",
    "with torch.no_grad(): {w}.add_(0.125)",
    "with torch.no_grad(): {w}.copy_(torch.ones_like({w}))",
)


def write(pick: Pick, value: str, plain: bool = False) -> list[str]:
    """Statements that write into a value, or into a view of it."""
    target = value if plain else pick([value, None, None, None]) or view(pick, value)
    statement = pick(WRITES)
    if pick([False, False, True]) and target != value:  # through a name, so that the view is made once
        return [f"seen = {target}", *statement.format(w="seen").split("; ")]
    if statement.count("{w}") > 1 or " if " in target:
        return [f"seen = {target}", *statement.format(w="seen").split("; ")]
    return statement.format(w=target).split("; ")


def put_writes(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """One or two writes: each after the line that makes the value, or after a later one."""
    for _ in range(pick([1, 1, 2])):
        made = pick([index for index, line in enumerate(lines) if line.mutable])
        value = pick([lines[made].names] * 8 + ["xs", "x"])
        at = made + pick([0, 0, 0, 1, 2, 3, 5, 8])
        texts[min(at, len(texts) - 1)] += write(pick, value)
        if pick([False] * 3 + [True]):  # the value itself is an output, too
            texts[made].append(f"kept.append({value})")
