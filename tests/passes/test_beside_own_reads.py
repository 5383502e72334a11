"""Gates that an operator could make, of a connection whose read has gates of the program's own.

The read waits for its gates, so no operator can read the streams with the others. Then the write makes the logits of
all of them as it goes, and the program makes the gates.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mhc_compile
from tests.zoo import check
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, WIDTH, X = 4, 6, (2, 3, 4, 6)
LEFT = ["aggregate", "expand_combine", "projection"]


class Softmax(Sublayer):
    def pre(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)


class Tanh(Sublayer):
    def pre(self, logits: Tensor) -> Tensor:
        return torch.tanh(logits)


class Twice(Sublayer):
    def pre(self, logits: Tensor) -> Tensor:
        return 2 * torch.sigmoid(logits)


class OwnMatrix(Softmax):
    def res(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)


class OwnPost(Softmax):
    def post(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)


class WithoutMatrix(Softmax):
    """Only h_post is a gate that an operator could make."""

    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return h_post.unsqueeze(-1) * f.unsqueeze(-2) + x


class Chain(nn.Module):
    def __init__(self, kind: type[Sublayer]) -> None:
        super().__init__()
        self.sublayers = nn.ModuleList([kind(N, WIDTH, 3, 2) for _ in range(2)])

    def forward(self, x: Tensor) -> Any:
        x = 1.5 * x
        for sublayer in self.sublayers:
            assert isinstance(sublayer, Sublayer)
            x = sublayer.body(x)
        return x


FOUND: dict[type[Sublayer], list[str]] = {
    Softmax: [*LEFT, "sinkhorn"],
    Tanh: [*LEFT, "sinkhorn"],
    Twice: [*LEFT, "sinkhorn"],
    OwnMatrix: LEFT,
    OwnPost: [*LEFT, "sinkhorn"],
    WithoutMatrix: LEFT,
}


@pytest.mark.parametrize("kind", FOUND)
def test_the_write_makes_all_logits(kind: type[Sublayer]) -> None:
    model = Chain(kind)
    for sublayer in model.sublayers:
        for name, parameter in sublayer.named_parameters():
            parameter.requires_grad_(name in ("phi", "scale", "bias", "weight"))
    outcome = check.run(model, (torch.randn(X),), repeats=2)
    check.assert_as_accurate(outcome)
    assert outcome.operators == sorted(2 * FOUND[kind]), str(outcome.report)
    fused = mhc_compile.explain(model, torch.randn(X)).fusions
    assert fused["combine_and_read"] == fused["combine_and_read_backward"] == 1


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Twice, "the h_pre gate is 2 * sigmoid; only sigmoid (+ eps) is supported"),
        (Tanh, "crosses zero as a tanh does, with more digits"),
        (Softmax, "not mult * sigmoid"),
    ],
)
def test_the_report_says_why(kind: type[Sublayer], why: str) -> None:
    report = mhc_compile.explain(Chain(kind), torch.randn(X))
    own = {site.op: site.own for site in report.rewritten}
    assert own["aggregate"].startswith("h_pre (")
    assert why in own["aggregate"]
    assert own["expand_combine"].startswith("h_post (")
    assert own["expand_combine"].endswith("): left to the program, as h_pre is")
    assert not [site for site in report.sites if site.reason]


class GateGoesOut(Softmax):
    """No write reads h_post: what becomes of it is told only if an operator makes it."""

    def body(self, x: Tensor) -> Any:
        h_pre, h_post, h_res = self.gates(x)
        f = self.layer(self.read(x, h_pre), x)
        return self.write(x, f, h_pre, h_res), h_post


class GatesFromBefore(Sublayer):
    """The gates of the read are parameters: it waits for nothing."""

    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        return super().read(x, self.per_stream.softmax(-1))


@pytest.mark.parametrize("kind", [GateGoesOut, GatesFromBefore])
def test_otherwise_an_operator_makes_the_gates(kind: type[Sublayer]) -> None:
    report = mhc_compile.explain(kind(N, WIDTH, 3, 2), torch.randn(X))
    assert "generate_mix" in [site.op for site in report.rewritten], str(report)
    assert not any("left to the program" in site.own for site in report.rewritten)


class BesideAnother(Softmax):
    """Two connections of the same streams: an operator reads for the other one."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.other = Sublayer(*sizes)

    def body(self, x: Tensor) -> Any:
        return 0.5 * super().body(x) + 0.5 * self.other.body(x)


def test_beside_another_connection() -> None:
    model = BesideAnother(N, WIDTH, 3, 2)
    outcome = check.run(model, (torch.randn(X),), repeats=2)
    check.assert_as_accurate(outcome)
    assert {"generate_mix_and_aggregate", "aggregate", "sinkhorn"} <= {*outcome.operators}
