"""Logits of which the program sets a part to a number before it makes gates of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mhc_compile.passes.functional import functional
from tests.passes.dynamo import graph_of
from tests.zoo import check
from tests.zoo.common import random_parameter, random_phi
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, WIDTH = 4, 6
ROWS = 2 * N + N * N
SHAPE = (2, 3, N, WIDTH)


class Layer(nn.Module):
    """x' = post f + res x, with gates of logits of which `assign` sets a part."""

    def __init__(self, assign: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.assign = assign
        self.phi, self.bias = random_phi(ROWS, N * WIDTH), random_parameter(ROWS)

    def forward(self, x: Tensor) -> Any:
        x = x.sin()
        logits = torch.nn.functional.rms_norm(x.flatten(2), (N * WIDTH,), eps=1e-6) @ self.phi.T * 0.5
        kept = self.assign(logits)
        pre, post, res = (logits + self.bias).split([N, N, N * N], -1)
        f = torch.tanh((torch.sigmoid(pre).unsqueeze(-1) * x).sum(2))
        mixed = torch.einsum("bsio,bsic->bsoc", res.unflatten(-1, (N, N)), x)
        out = mixed + torch.sigmoid(post).unsqueeze(-1) * f.unsqueeze(2)
        return out if kept is None else (out, kept)


def _slice(logits: Tensor) -> None:
    logits[..., 2 * N :] = 0.0


def _slice_to_one(logits: Tensor) -> None:
    logits[:, :, N : 2 * N] = 1


def _one_row(logits: Tensor) -> None:
    logits[..., -1] = 0.5


def _tensor(logits: Tensor) -> None:
    logits[..., 2 * N :] = logits[..., 2 * N :].tanh()


@pytest.mark.parametrize("assign", [_slice, _slice_to_one, _one_row, _tensor])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_site_is_rewritten(assign: Callable[[Tensor], Any], dynamic: bool) -> None:
    outcome = check.run(Layer(assign), (torch.randn(SHAPE),), dynamic=dynamic)
    check.assert_as_accurate(outcome)
    assert {"aggregate", "expand_combine"} <= {*outcome.operators}, str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)


def _also_returned(logits: Tensor) -> Any:
    logits[..., 2 * N :] = 0.0
    return logits


def _seen_before(logits: Tensor) -> Any:
    view = logits[..., :N]
    logits[..., :2] = 3.0
    return view


def _of_a_view(logits: Tensor) -> None:
    logits.view(-1, ROWS)[:, 2 * N :] = 0.0


def _by_mask(logits: Tensor) -> None:
    logits[logits > 0] = 0.0


@pytest.mark.parametrize("assign", [_also_returned, _seen_before, _of_a_view, _by_mask])
def test_results_are_eagers(assign: Callable[[Tensor], Any]) -> None:
    outcome = check.run(Layer(assign), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert not outcome.report.errors, str(outcome.report)


def test_a_write_that_stays_leaves_nothing_of_what_would_have_come_instead() -> None:
    """The sum would have other strides than the columns that are written."""

    def program(a: Tensor, b: Tensor) -> Tensor:
        columns = (a @ a)[:, :2]
        columns.add_(b)
        return columns

    graph = graph_of(program, torch.randn(4, 4), torch.randn(4, 2)).graph
    kept = [node.target for node in functional(graph).nodes if node.op == "call_method"]
    assert kept == ["add_"]


@pytest.mark.parametrize("half", [False, True])
def test_a_symbolic_size_is_assigned_in_place(half: bool) -> None:
    """It is neither a number nor a tensor."""

    class Assigned(Sublayer):
        def forward(self, x: Tensor) -> Any:
            x = x.sin()
            x[..., 0, :] = x.shape[0] * 0.5 if half else x.shape[0]
            return self.body(x)

    outcome = check.run(Assigned(N, WIDTH, SHAPE[1], SHAPE[0]), (torch.randn(SHAPE),), dynamic=True)
    check.assert_as_accurate(outcome)
    assert "expand_combine" in outcome.operators, str(outcome.report)
    assert not outcome.report.errors
