"""Results among the outputs, and what shares memory with them."""

from __future__ import annotations

from tests.fuzz.program import Pick
from tests.fuzz.sublayer_lines import Line
from tests.fuzz.views import view

DETACHED = (
    "kept += [{v}, {v}.detach()]",
    "kept += [{v}.detach(), {v}]",
    "kept.append({v}.detach())",
    "kept.insert(0, {v}.detach())",
    "kept.append({v}.data)",
    "kept += [{v}.data, {v}]",
    "kept.append({v}.detach()[..., :1])",
    "kept.append({v}.detach().requires_grad_())",
    "kept += [{v}.detach(), {v}.detach()]",
    "kept += [{v}, {v}.detach().clone()]",
    "kept += [{v}.detach(), {v}.detach().transpose(-1, -2)]",
)
HEADS = (
    "(out.detach(), out)",
    "(out, out.detach())",
    "(out.detach(), out.detach())",
    "(out, out)",
    "(out, out.data)",
    "(out.detach(), out.detach()[..., :1], out)",
    "{'out': out, 'again': out[..., :1]}",
    "[out[:1], out.transpose(0, 1)]",
    "(out.mT, out.detach().mT)",
    "(out, (out.view(-1), {'x': x}))",
)


def put_detached(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """A value and its detached alias among the outputs, in some order."""
    for _ in range(pick([1, 1, 2])):
        made = pick([index for index, line in enumerate(lines) if line.mutable])
        texts[made].append(pick(DETACHED).format(v=lines[made].names))


def put_aliases(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """A value, views of it, and the inputs among the outputs, where the value is made or later."""
    for _ in range(pick([1, 1, 2])):
        made = pick([index for index, line in enumerate(lines) if line.mutable])
        value = pick([lines[made].names] * 8 + ["xs", "x"])
        at = min(made + pick([0, 0, 1, 3, 8]), len(texts) - 1)
        seen = f"({view(pick, value)})"
        texts[at].append(
            pick(
                [
                    f"kept += [{value}, {seen}]",
                    f"kept.append({seen})",
                    f"kept += [{seen}, {value}]",
                    f"kept += [{value}, {value}]",
                    f"kept += [{seen}, {view(pick, value)}]",
                ]
            )
        )
