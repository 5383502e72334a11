"""Rows and columns picked by lists and index tensors."""

from __future__ import annotations

from tests.fuzz.program import Pick
from tests.fuzz.sublayer_lines import Line

# Those before the mark pick every row once and in order.
ROWS = (
    "{v}[[*range({v}.shape[0])]]",
    "{v}[torch.arange({v}.shape[0])]",
    "{v}[:, [*range({v}.shape[1])]]",
    "{v}[..., [*range({v}.shape[-1])]]",
    "{v}[[*range({v}.shape[0])]][[*range({v}.shape[0])]]",
    "{v}.index_select(0, torch.arange({v}.shape[0]))",
    "{v}.index_select(-1, torch.arange({v}.shape[-1]))",
    "{v}[None][[0]][0]",
    "{v}.unsqueeze(1)[:, [0]].squeeze(1)",
    "{v}[[*range({v}.shape[0])][::-1]][[*range({v}.shape[0])][::-1]]",
    "{v}[torch.ones({v}.shape[0], dtype=torch.bool)]",
    "{v}.take_along_dim(torch.arange({v}.shape[-1]).expand({v}.shape), -1)",
    "{v}.gather(0, torch.arange({v}.shape[0]).view(-1, *[1] * ({v}.dim() - 1)).expand({v}.shape))",
    "{v}[torch.arange({v}.shape[0])[:, None], torch.arange({v}.shape[1])]",
    # others
    "{v}[[*range({v}.shape[0])][::-1]]",
    "{v}[..., [*range({v}.shape[-1])][::-1]]",
    "{v}[:, [-1] * {v}.shape[1]]",
    "{v}[[0] * {v}.shape[0]]",
    "{v}[[-1]].expand_as({v})",
    "{v}[torch.tensor([0]).expand({v}.shape[0])]",
    "{v}.index_select(-1, torch.arange({v}.shape[-1]).flip(0))",
    "{v}.gather(-1, torch.zeros_like({v}, dtype=torch.long))",
    "{v}[:, torch.arange({v}.shape[1]).roll(1)]",
    "{v}[[0]]",
)


def put_rows(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """One or two values whose rows are picked."""
    for _ in range(pick([1, 1, 2])):
        made = pick([index for index, line in enumerate(lines) if line.mutable])
        value = lines[made].names
        texts[made].append(f"{value} = " + pick(ROWS).format(v=value))
