"""One program of the fuzzer: a model as source text, and how it is called and compiled."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

Pick = Callable[[Sequence[Any]], Any]

PRELUDE = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from tests.fuzz import allowed
from tests.fuzz.functions import First, Halved, Noise, Opposed, Second, Stopped
from tests.fuzz.ranks import gathered, local, on_all, shared_out
"""


@dataclass(frozen=True)
class Program:
    """One model as source text, the shape and dtype of its streams, and how it is compiled and called.

    extra holds the shapes of further inputs, later the shapes of all inputs of further calls. marked holds the input
    and the dimension of sizes that are marked as dynamic. mode is "training", "no_grad" or "inference"; leaves says
    whether inputs need gradients. flips: every second call has that otherwise, with every second parameter frozen.
    ranks is the size of the process group, of which this process is the first rank; with 1 there is none. device is
    where all tensors are, if the machine has one: a program for a GPU runs on a CPU elsewhere.
    inductor says whether the whole backend compiles it, or AOTAutograd and the fusions alone. features are the kinds
    that the program was drawn to have.
    """

    source: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    dynamic: bool | None = None
    seed: int = 0
    extra: tuple[tuple[int, ...], ...] = ()
    later: tuple[tuple[tuple[int, ...], ...], ...] = ()
    duck: bool = True
    marked: tuple[tuple[int, int], ...] = ()
    mode: str = "training"
    leaves: bool = True
    flips: bool = False
    ranks: int = 1
    device: str = "cpu"
    inductor: bool = False
    features: tuple[str, ...] = ()

    def build(self) -> tuple[nn.Module, list[Tensor]]:
        """The model with random parameters, and random inputs of the first call."""
        namespace: dict[str, Any] = {}
        torch.manual_seed(self.seed)
        exec(compile(PRELUDE + self.source, "<program>", "exec"), namespace)
        return namespace["Model"]().to(self.place), self.inputs(0)

    def inputs(self, call: int, generator: torch.Generator | None = None) -> list[Tensor]:
        """Random inputs of the given call."""
        shapes = [(self.shape, *self.extra), *self.later][call]
        dtype = getattr(torch, self.dtype)
        return [torch.randn(shape, generator=generator).to(self.place, dtype) for shape in shapes]

    @property
    def place(self) -> str:
        """The device on this machine."""
        return self.device if torch.cuda.is_available() else "cpu"

    def __str__(self) -> str:
        """A script that runs the program both ways and prints what differs."""
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)[5:]
            if getattr(self, field.name) != field.default
        ]
        given = ", ".join([str(self.shape), repr(self.dtype), str(self.dynamic), str(self.seed), *changed])
        return (
            PRELUDE
            + self.source
            + textwrap.dedent(
                f"""
            if __name__ == "__main__":
                from tests.fuzz.judge import check
                from tests.fuzz.program import Program

                with open(__file__) as file:
                    source = file.read().partition("if __name__")[0]
                program = Program(source, {given})
                print(check(program))
            """
            )
        )
