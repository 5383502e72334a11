"""Why no operator makes a gate: the report says what the gate is made of, or what it is that no operator computes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_compile.passes.report import Report
from tests.zoo import check
from tests.zoo.common import random_parameter
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SHAPE = (2, 3, 4, 6)

NO_SIGMOID = "is not mult * sigmoid(logits) + eps"
NO_SINKHORN = "is not a Sinkhorn projection of exp(logits) or softmax(logits)"
ANOTHER_NUMBER = "has fewer or more elements than the logits that it is made of"
REPEATED = "has the projection's elements repeated, left out, or its tokens in another order"
OF_THE_OUTPUT = "is made of the sublayer's output"
OF_ONE_VECTOR = "is projected from C numbers of a token, and not from all n C"


def _reasons(report: Report) -> dict[str, str]:
    """Each gate of the program's own by its role, with what is said of it."""
    told = "; ".join(site.own for site in report.rewritten if site.own.startswith("h_"))
    return {role: reason or "" for role, reason in re.findall(r"(h_\w+) \([^)]*\)(?:, which ((?:(?!; h_).)*))?", told)}


def _compiled(kind: type[Sublayer]) -> dict[str, str]:
    model: Any = kind(4, 6, 3, 2)
    outcome = check.run(model, (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert "expand_combine" in outcome.operators, str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)
    return _reasons(outcome.report)


# --- Sinkhorns of something other than exp


class Softplus(Sublayer):
    def start(self, logits: Tensor) -> Tensor:
        return F.softplus(logits)


class SoftplusOnce(Softplus):
    """One step is far from a doubly stochastic matrix."""

    def res(self, logits: Tensor) -> Tensor:
        return self.columns(self.rows(self.start(logits)))


class Absolute(Sublayer):
    """The small number is a part of the start, and no eps that differs from another."""

    def start(self, logits: Tensor) -> Tensor:
        return logits.abs() + 1e-3


class LaterEps(Sublayer):
    """A near miss: exp, and an eps that differs from step to step."""

    def res(self, logits: Tensor) -> Tensor:
        m = logits.exp()
        for eps in (1e-2, 1e-4, 1e-6):
            m = m / (m.sum(-1, keepdim=True) + eps)
            m = m / (m.sum(-2, keepdim=True) + eps)
        return m


@pytest.mark.parametrize("kind", [Softplus, SoftplusOnce, Absolute])
def test_a_matrix_of_another_kind_is_no_sinkhorn_of_exp(kind: type[Sublayer]) -> None:
    assert _compiled(kind) == {"h_res": NO_SINKHORN}


def test_an_iteration_whose_eps_differ_is_one() -> None:
    model: Any = LaterEps(4, 6, 3, 2)
    told = _reasons(check.run(model, (torch.randn(SHAPE),)).report)
    assert told["h_res"].endswith("has its small numbers, as if eps differ: 1e-06, 0.0001, 0.01"), told


class SumsOfProducts(Sublayer):
    """Sums are products with ones, and the columns have another eps and a factor."""

    def res(self, logits: Tensor) -> Tensor:
        m, ones = logits.exp(), torch.ones(self.n, 1, dtype=logits.dtype)
        for _ in range(3):
            m = m / (m @ ones + 1e-6)
            m = m / (1.01 * ones.T @ m + 1e-3)
        return m


class Leaning(Sublayer):
    """A softmax, and a little of its first row."""

    def res(self, logits: Tensor) -> Tensor:
        m = logits.softmax(-1)
        return m + 0.02 * m[..., :1, :] + 1e-2 * m[..., 0, :].unsqueeze(-2)


def test_sums_are_found_in_the_numbers() -> None:
    model: Any = SumsOfProducts(4, 6, 3, 2)
    outcome = check.run(model, (torch.randn(SHAPE),))
    assert outcome.report.errors == []
    assert _reasons(outcome.report)["h_res"].startswith("is a Sinkhorn-like matrix"), str(outcome.report)
    assert _compiled(Leaning) == {"h_res": NO_SINKHORN}


class Weighted(Sublayer):
    """An RMS norm with a weight, which is one of the streams or of the weighted streams."""

    def mixes(self, x: Tensor) -> Tensor:
        flat = self.flat(x)
        return self.project(flat * self.per_channel.repeat(self.n)) * self.rms(flat)

    def pre(self, logits: Tensor) -> Tensor:
        return F.hardsigmoid(logits)


def test_a_gate_behind_a_norm_with_a_weight_has_its_own_reason() -> None:
    assert _compiled(Weighted)["h_pre"] == NO_SIGMOID


# --- sums of gates


class SumOfSoftmax(Sublayer):
    """h_pre and h_post from matrices of logits."""

    def pre(self, logits: Tensor) -> Tensor:
        return self.matrix(logits).mean(-2)

    def post(self, logits: Tensor) -> Tensor:
        return self.matrix(logits).sum(-1)

    def matrix(self, logits: Tensor) -> Tensor:
        return logits.unflatten(-1, (self.n, self.n)).softmax(-1)

    def __init__(self, n: int, *sizes: int) -> None:
        super().__init__(n, *sizes)
        self.phi = random_parameter(3 * n * n, self.phi.shape[1], std=0.2)
        self.bias = random_parameter(3 * n * n, std=0.5)

    def split(self, mixes: Tensor) -> tuple[Tensor, ...]:
        return mixes.chunk(3, -1)

    def logits(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, res = (part * s + b for part, s, b in zip(parts, self.scale, self.bias.chunk(3), strict=True))
        return pre, post, res.unflatten(-1, (self.n, self.n))


class RepeatedGate(Sublayer):
    """A near miss: two gates, each for two streams."""

    def pre(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits[..., :2]).repeat_interleave(2, -1)


class PartOfTheGates(SumOfSoftmax):
    """A softmax of more logits than there are streams."""

    def pre(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)[..., : self.n]

    def post(self, logits: Tensor) -> Tensor:
        return 2 * torch.sigmoid(logits[..., : self.n])


def test_sums_and_parts_of_gates() -> None:
    told = _compiled(SumOfSoftmax)
    assert set(told) == {"h_pre", "h_post"}
    assert all(reason.startswith(ANOTHER_NUMBER) for reason in told.values()), told
    assert _compiled(PartOfTheGates)["h_pre"].startswith(ANOTHER_NUMBER)


def test_repeated_gates() -> None:
    assert _compiled(RepeatedGate)["h_pre"] == REPEATED


# --- what is projected


class OfTheOutput(Sublayer):
    """h_post is made of f, by a Linear and a sigmoid."""

    def layer(self, layer_input: Tensor, x: Tensor) -> Tensor:
        return F.gelu(super().layer(layer_input, x)) @ self.weight

    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return super().write(x, f, torch.sigmoid(f @ self.phi[: self.n, : self.width].mT), h_res)


class OfTheWholeOutput(Sublayer):
    """The sublayer makes more than is written, and the gate of all of it."""

    def body(self, x: Tensor) -> Any:
        pre, _, res = self.gates(x)
        wide = F.linear(self.layer(self.read(x, pre), x), self.phi[: 2 * self.width, : self.width]).tanh()
        h_post = torch.sigmoid(wide @ self.phi[: self.n, : 2 * self.width].mT)
        return self.write(x, wide[..., : self.width], h_post, res)


class OfTheInput(OfTheOutput):
    """A near miss: h_post is made of what the sublayer reads."""

    def layer(self, layer_input: Tensor, x: Tensor) -> Tensor:
        self.read_before = layer_input
        return super().layer(layer_input, x)

    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return Sublayer.write(self, x, f, torch.sigmoid(self.read_before @ self.phi[: self.n, : self.width].mT), h_res)


class OfTheMean(Sublayer):
    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        return super().read(x, torch.sigmoid(x.mean(-2) @ self.phi[: self.n, : self.width].mT))


class OfOneToken(Sublayer):
    """A near miss: all streams of one token."""

    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        logits = F.linear(self.flat(x)[:, -1:], self.phi[: self.n])
        return super().read(x, torch.sigmoid(logits).expand(-1, x.shape[1], -1))


class Softmax(Sublayer):
    """A near miss: a projection of all streams, and another function."""

    def pre(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)


OF_WHAT = [
    (OfTheOutput, "h_post", OF_THE_OUTPUT),
    (OfTheWholeOutput, "h_post", OF_THE_OUTPUT),
    (OfTheInput, "h_post", OF_ONE_VECTOR),
    (OfTheMean, "h_pre", OF_ONE_VECTOR),
    (OfOneToken, "h_pre", "comes from a projection that is not normalised by an RMS norm of the streams"),
    (Softmax, "h_pre", NO_SIGMOID),
]


@pytest.mark.parametrize(("kind", "role", "reason"), OF_WHAT, ids=[kind.__name__ for kind, *_ in OF_WHAT])
def test_what_a_gate_is_made_of(kind: type[Sublayer], role: str, reason: str) -> None:
    assert _compiled(kind)[role].startswith(reason)
