"""Two axes of one size change places: the elements are others then, though no shape says so.

Each piece of a sublayer is turned like that, one at a time, with as many streams as channels, tokens and sequences.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_compile import passes
from tests.zoo import check
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SIZE = 4
PIECES = (
    *("flat", "rms", "project", "mixes", "pre", "post", "start", "rows", "columns", "res", "read", "layer", "write"),
    *("factor", "normed", "factor_before", "factor_of_streams"),
)


class Turned(Sublayer):
    """Every piece may be turned; the sublayer begins with a norm, and the streams may be normalised before phi."""

    def __init__(self, piece: str, axes: tuple[int, int]) -> None:
        super().__init__(SIZE, SIZE, SIZE, SIZE)
        self.piece, self.axes = piece, axes

    def turned(self, piece: str, value: Tensor) -> Tensor:
        return value.transpose(*self.axes) if piece == self.piece else value

    def mixes(self, x: Tensor) -> Tensor:
        flat = self.flat(x)
        if self.piece == "factor_before":
            return self.project(flat * self.turned("factor_before", self.rms(flat)))
        if self.piece == "factor_of_streams":
            r = torch.rsqrt(x.square().mean((-2, -1), keepdim=True) + 1e-6)
            return self.project(self.flat(x * self.turned("factor_of_streams", r)))
        return self.project(flat) * self.rms(flat)

    def layer(self, layer_input: Tensor, x: Tensor) -> Tensor:
        r = torch.rsqrt(layer_input.square().mean(-1, keepdim=True) + 1e-6)
        normed = self.turned("normed", layer_input * self.turned("factor", r))
        return torch.tanh(F.linear(normed, self.weight))


def _turn(piece: str) -> Any:
    own = getattr(Turned, piece)

    def run(self: Turned, *given: Any) -> Tensor:
        return self.turned(piece, own(self, *given))

    return run


for _piece in PIECES:
    if hasattr(Sublayer, _piece):
        setattr(Turned, _piece, _turn(_piece))


def _cases() -> Iterator[tuple[str, tuple[int, int]]]:
    """The pieces with each pair of axes that they have, and that are of one size."""
    for piece, axes in itertools.product(PIECES, itertools.combinations(range(4), 2)):
        with contextlib.suppress(IndexError, RuntimeError):
            Turned(piece, axes)(torch.randn(4 * (SIZE,)))
            yield piece, axes


@pytest.mark.parametrize(("piece", "axes"), list(_cases()), ids=str)
def test_the_results_are_those_of_the_program(
    piece: str, axes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "INPUT_NORMS", True)
    outcome = check.run(Turned(piece, axes), (torch.randn(4 * (SIZE,)),), repeats=2)
    check.assert_as_accurate(outcome)
    assert "expand_combine" in outcome.operators
