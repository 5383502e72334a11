"""Draws are kept and replayed whatever way a model asks for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from mhc_compile.testing.draws import KeepDraws, ReplayDraws


def _in_place(**how: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    def drop(x: torch.Tensor) -> torch.Tensor:
        y = x + 0
        F.dropout(y, 0.5, True, **how)
        return y

    return drop


def _positional(x: torch.Tensor) -> torch.Tensor:
    y = x + 0
    F.dropout(y, 0.5, True, True)
    return y


def _out(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(4, dtype=x.dtype)
    torch.rand(4, out=y)
    return y


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5, True),
    "dropout by keyword": lambda x: F.dropout(input=x, p=0.5, training=True),
    "dropout in place": _in_place(inplace=True),
    "dropout not in place": _in_place(inplace=False),
    "dropout in place by position": _positional,
    "torch.dropout_": lambda x: torch.dropout_(x + 0, 0.5, True),
    "rand": lambda x: torch.rand(4, dtype=x.dtype),
    "rand by keyword": lambda x: torch.rand(size=(4,), dtype=x.dtype),
    "rand_like by keyword": lambda x: torch.rand_like(input=x),
    "rand into": _out,
    "uniform in place": lambda x: (x + 0).uniform_(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_the_same_in_float64(name: str) -> None:
    draw, x = DRAWS[name], torch.ones(4)
    with KeepDraws() as kept:
        first = draw(x)
    with ReplayDraws(kept.draws):
        again = draw(x.double())
    assert len(kept.draws) == 1
    torch.testing.assert_close(again, first.double(), rtol=0, atol=0)
    if "in place" in name and "not" not in name and "uniform" not in name:
        assert set(first.tolist()) <= {0.0, 2.0}
