"""Draws are kept and replayed whatever way a model asks for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

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
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x.view(2, 2), 0.5, True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "rrelu in place": lambda x: F.rrelu(-x, training=True, inplace=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "attention": lambda x: F.scaled_dot_product_attention(*3 * [x.view(1, 1, 4, 1)], dropout_p=0.5),
    "gamma": lambda x: torch.distributions.Gamma(x, x).rsample(),
}
NO_DRAWS = {
    "attention": lambda x: F.scaled_dot_product_attention(*3 * [x.view(1, 1, 4, 1)]),
    "dropout": lambda x: F.dropout(x, 0.5, False),
    "rrelu": lambda x: F.rrelu(-x),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_the_same_in_float64(name: str) -> None:
    draw, x = DRAWS[name], torch.ones(4)
    with KeepDraws() as kept:
        first = draw(x)
    with ReplayDraws(kept.draws):
        again = draw(x.double())
    assert len(kept.draws) == 1
    torch.testing.assert_close(again, first.double(), rtol=1e-6, atol=0)
    if "dropout in place" in name:
        assert set(first.tolist()) <= {0.0, 2.0}


def test_draws_in_inference_mode() -> None:
    """There, what is made of draws is one operator."""
    x = torch.randn(4)
    with torch.inference_mode(), KeepDraws() as kept:
        torch.manual_seed(0)
        first = F.dropout(x, 0.5)
        torch.manual_seed(0)
    with torch.inference_mode():
        assert torch.equal(F.dropout(x, 0.5), first)
        with ReplayDraws(kept.draws):
            torch.testing.assert_close(F.dropout(x.double(), 0.5), first.double(), rtol=0, atol=0)


@pytest.mark.parametrize("name", NO_DRAWS)
def test_what_does_not_draw(name: str) -> None:
    x = torch.randn(4)
    with KeepDraws() as kept:
        first = NO_DRAWS[name](x)
    assert kept.draws == []
    with ReplayDraws([]):
        torch.testing.assert_close(NO_DRAWS[name](x.double()).float(), first)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_draws_again(reentrant: bool) -> None:
    x = torch.ones(64, requires_grad=True)
    wide = torch.ones(64, dtype=torch.float64, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(lambda x: torch.rand_like(x) * F.dropout(x, 0.5), x, use_reentrant=reentrant)
        out.sum().backward()
        return out

    with KeepDraws() as kept:
        first = run(x)
    with ReplayDraws(kept.draws):
        again = run(wide)
    torch.testing.assert_close(again, first.double())
    assert x.grad is not None
    assert wide.grad is not None
    torch.testing.assert_close(wide.grad, x.grad.double())


def test_other_draws_than_before() -> None:
    x = torch.ones(4)
    with KeepDraws() as kept:
        torch.rand(4)
    assert not kept.narrow
    for draw, words in (
        (lambda: torch.randn(4), "aten.randn.default draws random numbers, where aten.rand.default drew before"),
        (lambda: torch.rand(5), r"aten.rand.default draws \[5\] random numbers, where it drew \[4\]"),
    ):
        with ReplayDraws(kept.draws), pytest.raises(RuntimeError, match=words):
            draw()
    with ReplayDraws([]), pytest.raises(RuntimeError, match="where nothing drew before"):
        F.dropout(x, 0.5)
    with ReplayDraws([("aten.rand.default", None)]), pytest.raises(RuntimeError, match="nothing else can draw"):
        torch.rand(4)


def test_narrow_types_are_noted() -> None:
    with KeepDraws() as kept:
        torch.ones(2).bfloat16()
    assert kept.narrow
