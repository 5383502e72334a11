"""Gates are recognised by numbers, not by a proof: which constants the points at which they are tried tell apart.

Each constant of a program is changed by 1e-7, one place at a time. Then either the rewritten graph is another one: in
float64 it is as near to the changed program as eager code in float32 is. Or it is the same: then so is the program, to
twelve digits.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from mhc_compile import passes
from mhc_compile.passes.recognise import sinkhorn
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, WIDTH, STEPS = 4, 6, 5
SHAPE = (2, 3, N, WIDTH)
CHANGE = 1 + 1e-7
# float32's distance between 1 and the next smaller number: what eager code rounds a result by.
ROUNDING = 2.0**-24
# What float64 rounds the results of some dozens of operations by, and 1e-7 of an eps of 1e-6 in a sum near 1.
SAME = 1e-12


class _Program(Sublayer):
    """A hyper-connection with every constant of its regions spelled out; the one that is named is changed."""

    def __init__(self, changed: str, mode: str, clamp: bool, start_eps: float) -> None:
        super().__init__(N, WIDTH, 3, 2)
        self.changed, self.mode, self.clamp, self.start_eps = changed, mode, clamp, start_eps

    def number(self, name: str, value: float) -> float:
        return value * CHANGE if name == self.changed else value

    def rms(self, flat: Tensor) -> Tensor:
        eps = self.number("rms eps", 1e-6)
        ms = flat.square().sum(-1, keepdim=True) * self.number("mean", 1 / flat.shape[-1])
        if self.mode == "inside":
            r = torch.rsqrt(ms + eps)
        else:
            r = 1 / (ms.sqrt() + eps if self.mode == "outside" else ms.sqrt().clamp_min(eps))
        return r * self.number("factor of r", 1.0)

    def pre(self, logits: Tensor) -> Tensor:
        gate = self.number("height of pre", 1.0) * torch.sigmoid(self.number("slope of pre", 1.0) * logits)
        return gate + self.number("eps of pre", 1e-6)

    def post(self, logits: Tensor) -> Tensor:
        gate = self.number("height of post", 2.0) * torch.sigmoid(self.number("slope of post", 1.0) * logits)
        return gate + self.number("eps of post", 1e-6)

    def res(self, logits: Tensor) -> Tensor:
        m = (self.number("slope of the logits", 1.0) * logits).softmax(-1)
        m = m + self.number("eps of the start", self.start_eps) if self.start_eps else m
        for step in range(STEPS):
            total, eps = m.sum(-1 if step % 2 else -2, keepdim=True), self.number(f"eps of step {step}", 1e-6)
            m = m / (total.clamp_min(eps) if self.clamp else total + eps) * self.number(f"factor of step {step}", 1.0)
        return m

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


STEP_CONSTANTS = [f"{what} of step {step}" for step in range(STEPS) for what in ("eps", "factor")]
CONSTANTS = [
    *("rms eps", "mean", "factor of r", "height of pre", "slope of pre", "eps of pre", "height of post"),
    *("slope of post", "eps of post", "slope of the logits", "eps of the start", *STEP_CONSTANTS),
]


# These may stay: half-steps after the first have sums near 1, to which an eps of 1e-6 adds next to nothing. A factor of
# one half-step is cancelled by the next.
MAY_STAY = {f"eps of step {step}" for step in range(1, STEPS)} | {f"factor of step {step}" for step in range(STEPS - 1)}


def _rewritten(model: nn.Module) -> fx.GraphModule:
    made: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        passes.run_recursively(gm)
        made.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(torch.randn(SHAPE))
    return made[0]


def _errors(graph: fx.GraphModule, model: _Program, x: Tensor) -> tuple[float, float]:
    """How far a rewritten graph in float64, and eager code in float32, are from the program in float64."""
    parameters = dict(model.named_parameters())
    named = {node.name: node.name.removeprefix("l_self_parameters_").rstrip("_") for node in graph.graph.nodes}
    given = [parameters.get(named[node.name], x) for node in graph.graph.nodes if node.op == "placeholder"]
    (got,), wanted = graph(*given), model(x)
    eager = copy.deepcopy(model).float()(x.float()).double()
    own, others = (float((value - wanted).abs().max() / wanted.abs().max()) for value in (got, eager))
    return own, others


@torch.no_grad()
def _compare(changed: str, mode: str, clamp: bool, start_eps: float) -> tuple[bool, list[tuple[float, float]]]:
    """Whether a change is told apart, and the errors of several inputs."""
    graphs = []
    for name in ("", changed):
        torch.manual_seed(0)
        model = _Program(name, mode, clamp, start_eps)
        graphs.append(_rewritten(model))
    model.double()
    tokens = torch.randn(SHAPE, dtype=torch.float64)
    errors = [_errors(graphs[1], model, size * tokens) for size in (1.0, 1e-3, 1e-5)]
    # A row and a column of logits that have sunk to where an eps counts: ln(1e-6) is -13.8.
    matrix = model.bias[2 * N :].view(N, N)
    for _ in range(3):
        matrix[0] -= 7.0
        matrix[:, -1] -= 7.0
        errors.append(_errors(graphs[1], model, tokens))
    return str(graphs[0].graph) != str(graphs[1].graph), errors


VARIANTS = [("inside", False, 1e-6), ("outside", True, 0.0), ("clamp", False, 0.0)]
MARKED = [VARIANTS[0], *(pytest.param(*variant, marks=pytest.mark.thorough) for variant in VARIANTS[1:])]


@pytest.mark.parametrize("changed", CONSTANTS)
@pytest.mark.parametrize(("mode", "clamp", "start_eps"), MARKED)
def test_a_constant_is_told_apart_or_below_rounding(changed: str, mode: str, clamp: bool, start_eps: float) -> None:
    if changed == "eps of the start" and not start_eps:
        return
    told, errors = _compare(changed, mode, clamp, start_eps)
    assert told or changed in MAY_STAY
    for own, eager in errors:
        assert own <= (max(eager, ROUNDING) if told else SAME)


def test_fewer_digits_would_not_tell_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinkhorn, "_TOLERANCE", 1e-5)
    monkeypatch.setattr(sinkhorn, "same_gradient", lambda *given, **named: True)
    told, errors = _compare("eps of the start", *VARIANTS[0])
    assert not told
    assert max(errors)[0] > SAME
