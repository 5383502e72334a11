"""Text that every machine has: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

MOST = 16 * 2**20


class Text:
    """Rows of bytes, drawn for each step from the step's number alone: a resumed run sees what it would have seen."""

    def __init__(self, seed: int = 0) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"\n".join(file.read_bytes() for file in files)[:MOST]
        self.seed = seed
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def rows(self, step: int, count: int, tokens: int) -> tuple[Tensor, Tensor]:
        """The inputs [count, tokens] of a step, and the bytes that follow each of them."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.bytes) - tokens - 1, (count, 1), generator=generator)
        rows = self.bytes[starts + torch.arange(tokens + 1)].long()
        return rows[:, :-1], rows[:, 1:]
