"""How a Sinkhorn projection starts: shifted exponentials, the log domain, and what only looks like them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mhc_compile
from tests.zoo import check
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, WIDTH = 4, 6


class _Shifted(Sublayer):
    """exp of logits shifted by their maximum, with an eps: the last column has sunk to the size of it."""

    eps = 1e-8
    detached = False

    def __init__(self) -> None:
        super().__init__(N, WIDTH, 3, 2)
        with torch.no_grad():
            self.bias[2 * N :].view(N, N)[:, -1] += math.log(self.eps)

    def res(self, logits: Tensor) -> Tensor:
        top = logits.amax(-1, keepdim=True)
        m = torch.exp(logits - (top.detach() if self.detached else top)) + self.eps
        for axis in (-1, -2, -1, -2):
            m = m / m.sum(axis, keepdim=True)
        return m


class _Detached(_Shifted):
    detached = True


class _TinyDetached(_Detached):
    eps = 1e-13


@pytest.mark.parametrize(
    ("kind", "rewritten"), [(_Shifted, True), (_Detached, False), (_TinyDetached, False)], ids=lambda v: str(v)
)
def test_a_detached_shift_counts_where_an_eps_is_added(kind: type[_Shifted], rewritten: bool) -> None:
    outcome = check.run(kind(), (torch.randn(2, 3, N, WIDTH),))
    check.assert_as_accurate(outcome)
    assert any("its gradient does not" in reason for reason in outcome.reasons) != rewritten, str(outcome.report)


class _TwoStreams(Sublayer):
    """Two streams converge so soon that many forms come to nearly the same matrices, and not to the same gradients."""

    first = "columns"

    def res(self, logits: Tensor) -> Tensor:
        m = self.start(logits)
        for i in range(39):
            m = self.rows(m) if (i % 2 == 0) == (self.first == "rows") else self.columns(m)
        return m


class _TwoStreamsRowsFirst(_TwoStreams):
    first = "rows"


@pytest.mark.parametrize("tokens", [4, 2048])
@pytest.mark.parametrize("kind", [_TwoStreams, _TwoStreamsRowsFirst])
def test_two_streams(kind: type[_TwoStreams], tokens: int) -> None:
    outcome = check.run(kind(2, WIDTH, 3, 2), (torch.randn(4, tokens, 2, WIDTH),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"], str(outcome.report)


class _LogDomain(Sublayer):
    """Twenty iterations come so close to doubly stochastic that a gradient has to differ within a matrix to count."""

    detached = False

    def res(self, logits: Tensor) -> Tensor:
        for axis in (-1, -2) * 20:
            total = torch.logsumexp(logits, axis, keepdim=True)
            logits = logits - (total.detach() if self.detached else total)
        return logits.exp()


class _LogDomainDetached(_LogDomain):
    detached = True


@pytest.mark.parametrize("tokens", [7, 64, 1024])
@pytest.mark.parametrize(("kind", "rewritten"), [(_LogDomain, True), (_LogDomainDetached, False)])
def test_log_domain_of_many_tokens(kind: type[_LogDomain], rewritten: bool, tokens: int) -> None:
    outcome = check.run(kind(N, WIDTH, 3, 2), (torch.randn(4, tokens, N, WIDTH),), repeats=1)
    check.assert_as_accurate(outcome)
    assert any("no eps" in site.detail for site in outcome.report.rewritten) == rewritten, str(outcome.report)


class _Exponential(Sublayer):
    """exp of logits, some matrices of which are as small as the eps that are added to their sums."""

    eps = 1e-6
    axes = (-1, -2) * 4
    detached = False

    def __init__(self) -> None:
        super().__init__(N, WIDTH, 3, 2)
        with torch.no_grad():
            self.scale[2] = 8.0
            self.bias[2 * N :] += math.log(self.eps)

    def exponential(self, logits: Tensor) -> Tensor:
        return logits.exp()

    def total(self, m: Tensor, axis: int) -> Tensor:
        return m.sum(axis, keepdim=True) + self.eps

    def res(self, logits: Tensor) -> Tensor:
        m = self.exponential(logits)
        for axis in self.axes:
            m = m / self.total(m, axis)
        return m


class _ExponentialColumnsFirst(_Exponential):
    axes = (-2, -1, -2)


class _ExponentialClamped(_Exponential):
    def total(self, m: Tensor, axis: int) -> Tensor:
        return m.sum(axis, keepdim=True).clamp(min=self.eps)


class _ExponentialPlusEps(_Exponential):
    def exponential(self, logits: Tensor) -> Tensor:
        return logits.exp() + self.eps


class _ShiftedByAll(_Exponential):
    def exponential(self, logits: Tensor) -> Tensor:
        top = logits.amax((-2, -1), keepdim=True)
        return (logits - (top.detach() if self.detached else top)).exp()


class _ShiftedByFlatMaximum(_Exponential):
    def exponential(self, logits: Tensor) -> Tensor:
        return (logits - logits.flatten(-2).max(-1)[0][..., None, None]).exp()


class _ShiftedByAllDetached(_ShiftedByAll):
    detached = True


class _ShiftedByAllTokens(_Exponential):
    def exponential(self, logits: Tensor) -> Tensor:
        return (logits - logits.max()).exp()


class _ShiftedByAConstant(_Exponential):
    def exponential(self, logits: Tensor) -> Tensor:
        return (logits - 3.0).exp()


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (_Exponential, "plain_exp, rows first, 8 half-steps, eps 1e-06"),
        (_ExponentialColumnsFirst, "plain_exp, columns first, 3 half-steps, eps 1e-06"),
        (_ExponentialClamped, "plain_exp, rows first, 8 half-steps, eps 1e-06 clamped"),
        (_ExponentialPlusEps, "plain_exp, rows first, 8 half-steps, eps 1e-06"),
        (_ShiftedByAll, "global_exp, rows first, 8 half-steps, eps 1e-06"),
        (_ShiftedByFlatMaximum, "global_exp, rows first, 8 half-steps, eps 1e-06"),
        (_ShiftedByAConstant, "plain_exp, rows first, 8 half-steps, eps 1e-06"),
        (_ShiftedByAllDetached, None),
        (_ShiftedByAllTokens, None),
    ],
)
def test_exponentials_whose_shift_does_not_cancel(kind: type[_Exponential], told: str | None) -> None:
    """Where the shift is no form's, the projection is one of logits that are shifted before."""
    outcome = check.run(kind(), (torch.randn(2, 3, N, WIDTH),))
    check.assert_as_accurate(outcome)
    (gates,) = (site.detail for site in outcome.report.rewritten if site.op == "generate_mix_and_aggregate")
    assert gates.endswith(told) if told else "sinkhorn" not in gates, str(outcome.report)
    assert ("sinkhorn" in outcome.operators) == (told is None), str(outcome.report)


class _FlatExponential(_Exponential):
    """exp before the logits are seen as matrices; `order` is what happens to them in between."""

    order = staticmethod(lambda flat: flat)

    def logits(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, res = super().logits(parts)
        return pre, post, self.order(res.flatten(-2).flatten(0, 1).exp()).view(*pre.shape[:2], N, N)

    def exponential(self, logits: Tensor) -> Tensor:
        return logits


class _FlatRolled(_FlatExponential):
    order = staticmethod(lambda flat: flat.roll(1, -1))


class _FlatNextToken(_FlatExponential):
    order = staticmethod(lambda flat: flat.roll(1, 0))


class _FlatHalfDetached(_FlatExponential):
    order = staticmethod(lambda flat: torch.cat([flat[:, :8], flat[:, 8:].detach()], -1))


@pytest.mark.parametrize(
    ("kind", "rewritten"),
    [(_FlatExponential, True), (_FlatRolled, False), (_FlatNextToken, False), (_FlatHalfDetached, False)],
)
@pytest.mark.parametrize("length", [3, 150])
def test_exponential_before_the_view(kind: type[_FlatExponential], rewritten: bool, length: int) -> None:
    outcome = check.run(kind(), (torch.randn(2, length, N, WIDTH),))
    check.assert_as_accurate(outcome)
    (gates,) = (site.detail for site in outcome.report.rewritten if site.op == "generate_mix_and_aggregate")
    assert ("plain_exp" in gates) == rewritten, str(outcome.report)


class _LogPotentials(Sublayer):
    """exp(M + u + v): the logits are rounded anew in every half-step."""

    lost = 0.0

    def res(self, logits: Tensor) -> Tensor:
        u = v = torch.zeros_like(logits[..., 0])
        for _ in range(20):
            u = (
                -torch.log(torch.exp(logits + v.unsqueeze(-2)).sum(-1) + self.lost)
                if self.lost
                else -torch.logsumexp(logits + v.unsqueeze(-2), -1)
            )
            v = -torch.logsumexp(logits + u.unsqueeze(-1), -2)
        return torch.exp(logits + u.unsqueeze(-1) + v.unsqueeze(-2))


class _LogPotentialsWithEps(_LogPotentials):
    lost = 1e-10


@pytest.mark.parametrize(("kind", "rewritten"), [(_LogPotentials, True), (_LogPotentialsWithEps, False)])
def test_log_potentials(kind: type[_LogPotentials], rewritten: bool) -> None:
    outcome = check.run(kind(N, WIDTH, 3, 2), (torch.randn(2, 3, N, WIDTH),))
    check.assert_as_accurate(outcome)
    assert any("no eps" in site.detail for site in outcome.report.rewritten) == rewritten, str(outcome.report)


class _RowsAgain(Sublayer):
    """Rows are normalised after a softmax over them: with a clamp the values are the same without that half-step.

    The gradient of logits that are equal along a row vanishes exactly where the half-step is computed.
    """

    def __init__(self) -> None:
        super().__init__(2, WIDTH, 3, 2)

    def res(self, logits: Tensor) -> Tensor:
        m = logits[..., :1].expand(logits.shape).softmax(-1) + 1e-5
        for axis in (-1, -2):
            m = m / m.sum(axis, keepdim=True).clamp_min(1e-5)
        return m


def test_a_half_step_that_cancels_is_computed_where_it_is_written() -> None:
    model, x = _RowsAgain(), torch.randn(2, 16, 2, WIDTH)
    compiled = torch.compile(model, backend="mhc")
    out = compiled(x)
    out.backward(torch.randn(out.shape))
    assert "2 half-steps" in mhc_compile.report().details()
    assert not model.phi.grad[4:].any()


@pytest.mark.parametrize("equation", ["bij,bjc->bic", "bji,bjc->bic", "bij,bjc->bci"])
def test_an_einsum_that_reads_a_sinkhorn(equation: str) -> None:
    """Which views it within its own node, before it multiplies."""

    class Mixed(_Shifted):
        def forward(self, x: Tensor) -> Tensor:
            logits = (x.flatten(-2) @ self.phi[2 * N :].t()).unflatten(-1, (N, N))
            return torch.einsum(equation, self.res(logits), x)

    outcome = check.run(Mixed(), (torch.randn(5, N, WIDTH),))
    assert outcome.operators == ["sinkhorn"], str(outcome.report)
    assert "value of its own" not in str(outcome.report)
    check.assert_as_accurate(outcome)


def test_a_sinkhorn_of_which_the_maximum_is_read_as_well() -> None:
    """With few channels, what the matrices mix is no larger than the matrices: all their readers may be their steps."""

    class Mixed(_Shifted):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            m = self.res((x.flatten(-2) @ self.phi[2 * N :, : N * N].t()).unflatten(-1, (N, N)))
            return (m @ x).sin().sum(-1), m.amax(-1)

    outcome = check.run(Mixed(), (torch.randn(5, 3, N, N),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["sinkhorn"], str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)


def test_a_sinkhorn_that_is_solved_with() -> None:
    """One call makes a result that is larger than the matrices, and others that are not."""

    class Solved(_Shifted):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            m = self.res((x.flatten(-2) @ self.phi[2 * N :].t()).unflatten(-1, (N, N)))
            return torch.linalg.solve_ex(m, x)[0], m.amax(-1)

    outcome = check.run(Solved(), (torch.randn(5, 3, N, WIDTH),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["sinkhorn"], str(outcome.report)


def test_logits_that_are_read_whole_and_column_by_column() -> None:
    """The logits are views of what is projected, and their columns are views of them."""

    class Columns(Sublayer):
        def logits(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
            pre, post, res = parts
            return pre, post, res.unflatten(-1, (N, N))

        def res(self, logits: Tensor) -> Tensor:
            m = torch.exp(logits - functools.reduce(torch.maximum, logits.split(1, -1)))
            for axis in (-1, -2) * 3:
                m = m / m.sum(axis, keepdim=True)
            return m

    outcome = check.run(Columns(N, WIDTH, 3, 2), (torch.randn(2, 3, N, WIDTH),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"], str(outcome.report)
    assert outcome.reasons == []


class _OfLogits(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, logits: Tensor) -> Tensor:
        return self.function(logits.sin())


def _softmax_and_columns(logits: Tensor) -> Tensor:
    m = logits.softmax(-1)
    return m / m.sum(-2, keepdim=True)


def _logarithms_and_columns(logits: Tensor) -> Tensor:
    m = logits.log_softmax(-1)
    return (m - m.logsumexp(-2, keepdim=True)).exp()


@pytest.mark.parametrize("function", [_softmax_and_columns, _logarithms_and_columns])
def test_a_softmax_is_the_first_of_two_half_steps(function: Callable[[Tensor], Tensor]) -> None:
    """Of a Sinkhorn whose logits no projection makes."""
    outcome = check.run(_OfLogits(function), (torch.randn(2, 3, N, N),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["sinkhorn"], str(outcome.report)
