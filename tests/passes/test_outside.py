"""Gates that come in from outside: from a graph that was compiled before, from a function with its own backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mhc_compile import passes
from mhc_compile.passes.plan import outside
from mhc_compile.passes.report import Report
from tests.zoo import check
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, WIDTH, LENGTH, BATCH = 4, 6, 3, 2
SHAPE = (BATCH, LENGTH, N, WIDTH)
FULL = ["expand_combine", "generate_mix_and_aggregate"]


def _cut(model: nn.Module) -> tuple[Callable[..., Any], list[Report]]:
    """The model with a graph break between the gates, the read and the write, as Megatron-LM's modules have."""
    reports: list[Report] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        reports.append(passes.run_recursively(gm))
        return gm.forward

    return torch.compile(model, backend=backend), reports


class Broken(Sublayer):
    """Its Sinkhorn is not traced, and each step stands in a function of its own."""

    def forward(self, x: Tensor) -> Any:
        h_pre, h_post, logits = self.first(x)
        torch._dynamo.graph_break()
        h_res = self.res(logits)
        torch._dynamo.graph_break()
        u = self.read(x, h_pre)
        torch._dynamo.graph_break()
        return self.write(x, self.layer(u, u), h_post, h_res)

    def first(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, res = self.logits(self.split(self.mixes(x)))
        return self.pre(pre), self.post(post), res


def test_the_steps_of_a_program_that_is_cut() -> None:
    model, x = Broken(N, WIDTH, LENGTH, BATCH), torch.randn(SHAPE)
    program, reports = _cut(model)
    eager, ours = check.evaluate(model, model, (x,)), check.evaluate(program, model, (x,))
    assert ours.keys() == eager.keys()
    for name, value in eager.items():
        # Float32 rounding of a few dozen operations in another order.
        assert check.error(ours[name], value) < 64 * torch.finfo(torch.float32).eps, name
    found = [[site.op for site in report.rewritten] for report in reports]
    assert found == [["generate_mix"], ["sinkhorn"], ["aggregate"], ["expand_combine"]], "\n".join(map(str, reports))
    assert not any(report.declined for report in reports)


def test_a_read_alone_is_none_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no gate of its shape left a graph before."""
    monkeypatch.setattr(outside, "_left", set())
    program, reports = _cut(lambda x, gate: (gate.unsqueeze(-1) * x).sum(-2))  # type: ignore[arg-type]
    program(torch.randn(SHAPE), torch.rand(SHAPE[:-1]))
    assert not reports[0].sites, str(reports[0])


@pytest.mark.parametrize(("made", "found"), [(torch.clone, ["aggregate"]), (torch.sin, [])], ids=["given", "made here"])
def test_only_a_gate_that_comes_in_is_one_that_left_a_graph(made: Callable[[Tensor], Tensor], found: list[str]) -> None:
    _cut(Broken(N, WIDTH, LENGTH, BATCH))[0](torch.randn(SHAPE))
    program, reports = _cut(lambda x, gate: (made(gate).unsqueeze(-1) * x).sum(-2))  # type: ignore[arg-type]
    program(torch.randn(SHAPE), torch.rand(SHAPE[:-1]))
    assert [site.op for site in reports[0].sites] == found, str(reports[0])


def _normalised(m: Tensor) -> Tensor:
    for _ in range(4):
        m = m / m.sum(-1, keepdim=True)
        m = m / m.sum(-2, keepdim=True)
    return m


class _Again(torch.autograd.Function):
    """Its backward computes the forward again and asks autograd for its gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        start = logits.exp()
        ctx.save_for_backward(start)
        return _normalised(start)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (start,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = start.detach().requires_grad_(True)
            (found,) = torch.autograd.grad(_normalised(leaf), leaf, gradient)
        return found * start


class WithItsOwnBackward(Sublayer):
    def res(self, logits: Tensor) -> Tensor:
        return _Again.apply(logits)  # type: ignore[no-any-return]


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="this torch traces no call of autograd"
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_backward_that_calls_autograd() -> None:
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        outcome = check.run(WithItsOwnBackward(N, WIDTH, LENGTH, BATCH), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == FULL, str(outcome.report)
    assert outcome.report.graphs == 1


class Packed(Sublayer):
    """How many tokens there are depends on data."""

    def forward(self, x: Tensor, kept: Tensor) -> Any:  # type: ignore[override]
        return self.body(x[kept].unsqueeze(0))


def test_a_number_of_tokens_that_depends_on_data() -> None:
    model, x, kept = Packed(N, WIDTH, LENGTH, BATCH), torch.randn(SHAPE), torch.rand(SHAPE[:2]) > 0.3
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        outcome = check.run(model, (x, kept), exact=False, repeats=1)
    check.assert_equal_to_eager(outcome)
    assert outcome.operators == FULL, str(outcome.report)


class Apart(Sublayer):
    """Parameters of its own for each gate, which nobody knows; one of the logits is detached."""

    def __init__(self, detached: int | None) -> None:
        super().__init__(N, WIDTH, LENGTH, BATCH)
        self.detached = detached
        self.phis = nn.ParameterList([nn.Parameter(p.clone()) for p in self.phi.split((N, N, N * N))])

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = [F.linear(self.flat(x), phi) for phi in self.phis]
        if self.detached is not None:
            logits[self.detached] = logits[self.detached].detach()
        a, p, r = logits
        return a.softmax(-1), 1 + p.sin(), r.unflatten(-1, (N, N)).softmax(-1)


@pytest.mark.parametrize("detached", [None, 0, 1, 2])
def test_what_has_no_gradient_shares_no_projection(detached: int | None) -> None:
    outcome = check.run(Apart(detached), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)  # the same parameters have gradients
    assert outcome.operators.count("projection") == (1 if detached is None else 2), str(outcome.report)


class OverOne(Sublayer):
    """Sums over axes of one change nothing."""

    def mixes(self, x: Tensor) -> Tensor:
        return super().mixes(x).unsqueeze(-2).sum(-2)


def test_sums_over_axes_of_one() -> None:
    outcome = check.run(OverOne(N, WIDTH, LENGTH, BATCH), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == FULL, str(outcome.report)


class Interleaved(Sublayer):
    """The rows of h_pre and h_post take turns."""

    def split(self, mixes: Tensor) -> tuple[Tensor, ...]:
        return mixes[..., : 2 * N : 2], mixes[..., 1 : 2 * N : 2], mixes[..., 2 * N :]


class RowsInAnyOrder(Sublayer):
    def split(self, mixes: Tensor) -> tuple[Tensor, ...]:
        rows = mixes.unbind(-1)
        pre = torch.stack([rows[i] for i in (5, 0, 3, 23)], -1)
        post = torch.stack([rows[i] for i in (1, 2, 4, 6)], -1)
        return pre, post, mixes[..., 7:23]


@pytest.mark.parametrize("kind", [Interleaved, RowsInAnyOrder])
def test_rows_in_other_orders(kind: type[Sublayer]) -> None:
    outcome = check.run(kind(N, WIDTH, LENGTH, BATCH), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert not outcome.report.declined, str(outcome.report)
    assert "expand_combine" in outcome.operators
