"""What is not rewritten is reported with the line of the program, and with the numbers that stand in the way."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_compile.passes.report import Report
from tests.zoo import check
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SHAPE = (2, 3, 4, 6)


class UnequalEps(Sublayer):
    def columns(self, m: Tensor) -> Tensor:
        return m / (m.sum(-2, keepdim=True) + 1e-5)


class ShiftedAlongTheOther(Sublayer):
    """The columns are normalised first."""

    def start(self, logits: Tensor) -> Tensor:
        return (logits - logits.amax(-1, keepdim=True)).exp()


class ShiftedByColumns(Sublayer):
    """The rows are normalised first, and no `exp` shows where a projection of shifted logits would begin."""

    def start(self, logits: Tensor) -> Tensor:
        return self.rows((logits - logits.amax(-2, keepdim=True)).expm1() + 1)


class ShiftedAlongTheOtherWithoutEps(ShiftedAlongTheOther):
    def rows(self, m: Tensor) -> Tensor:
        return m / m.sum(-1, keepdim=True)

    def columns(self, m: Tensor) -> Tensor:
        return m / m.sum(-2, keepdim=True)


class ClampedLogits(Sublayer):
    def start(self, logits: Tensor) -> Tensor:
        return logits.clamp(-10.0, 10.0).exp()


class SquashedBeforeScale(Sublayer):
    def split(self, mixes: Tensor) -> tuple[Tensor, ...]:
        return super().split(torch.tanh(mixes))


class TokensLast(Sublayer):
    def res(self, logits: Tensor) -> Tensor:
        m = logits.flatten(0, 1).permute(1, 2, 0).softmax(1)
        for axis in (0, 1) * 3:
            m = m / (m.sum(axis, keepdim=True) + 1e-6)
        return m.permute(2, 0, 1).view_as(logits)


class OneMatrixForAll(Sublayer):
    """The matrix is a parameter."""

    def res(self, logits: Tensor) -> Tensor:
        return super().res(self.bias[2 * self.n :].view(self.n, self.n))

    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return h_post.unsqueeze(-1) * f.unsqueeze(-2) + torch.einsum("io,bsic->bsoc", h_res, x)


class UnderVmap(Sublayer):
    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = self.n

        def of_token(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            pre, post, res = (self.project(x.flatten()) * self.rms(x.flatten())).split((n, n, n * n))
            return self.pre(pre), self.post(post), self.res(res.view(n, n))

        return torch.func.vmap(torch.func.vmap(of_token))(x)  # type: ignore[no-any-return]


class AllTokensLast(Sublayer):
    """Streams as [n, C, tokens], and all that is made of them."""

    def forward(self, x: Tensor) -> Any:
        x = x.flatten(0, 1).permute(1, 2, 0).contiguous().sin()
        n, flat = self.n, x.flatten(0, 1)
        h = (self.phi @ flat) * torch.rsqrt(flat.square().mean(0) + 1e-6)
        pre, post, res = (h + self.bias[:, None]).split((n, n, n * n))
        matrices = self.sinkhorn(res.unflatten(0, (n, n)))
        layer_input = (pre.sigmoid().unsqueeze(1) * x).sum(0)
        return 2 * post.sigmoid().unsqueeze(1) * layer_input + (matrices.unsqueeze(2) * x.unsqueeze(1)).sum(0)

    def sinkhorn(self, logits: Tensor) -> Tensor:
        p = torch.exp(logits)
        for _ in range(10):
            p = p / p.sum(1, keepdim=True)
            p = p / p.sum(0, keepdim=True)
        return p


class ThreeHalfStepsOfTokensLast(AllTokensLast):
    """As few as make moderate logits nearly doubly stochastic."""

    def sinkhorn(self, logits: Tensor) -> Tensor:
        p = torch.exp(logits)
        for axis in (1, 0, 1):
            p = p / p.sum(axis, keepdim=True)
        return p


class SoftmaxOfTokensLast(AllTokensLast):
    """The first of three half-steps is a softmax."""

    def sinkhorn(self, logits: Tensor) -> Tensor:
        p = logits.softmax(1)
        for axis in (0, 1):
            p = p / p.sum(axis, keepdim=True)
        return p


class OneAxisOfTokensLast(AllTokensLast):
    def sinkhorn(self, logits: Tensor) -> Tensor:
        p = torch.exp(logits)
        for _ in range(10):
            p = p / p.sum(1, keepdim=True)
        return p


class AllUnderVmap(Sublayer):
    def forward(self, x: Tensor) -> Any:
        return torch.func.vmap(self.of_token)(x.flatten(0, 1).sin())

    def of_token(self, x: Tensor) -> Tensor:
        pre, post, res = (self.project(x.flatten()) * self.rms(x.flatten())).split((self.n, self.n, self.n**2))
        layer_input = self.pre(pre) @ x
        return self.post(post)[:, None] * layer_input + self.matrices(res.view(self.n, self.n)).T @ x

    def matrices(self, logits: Tensor) -> Tensor:
        p = torch.softmax(logits, -1)
        for _ in range(10):
            p = p / (p.sum(-2, keepdim=True) + 1e-6)
            p = p / (p.sum(-1, keepdim=True) + 1e-6)
        return p


class TwiceUnderVmap(AllUnderVmap):
    """As few steps as are told; a tensor is subtracted by name before them."""

    def matrices(self, logits: Tensor) -> Tensor:
        p = torch.exp(torch.sub(logits, other=logits.amax()))
        for _ in range(2):
            p = p / p.sum(-2, keepdim=True)
            p = p / p.sum(-1, keepdim=True)
        return p


class EachStepUnderVmap(AllUnderVmap):
    def matrices(self, logits: Tensor) -> Tensor:
        p = torch.exp(logits)
        p = p / p.sum(-2, keepdim=True)
        p = p / p.sum(-1, keepdim=True)
        p = p / p.sum(-2, keepdim=True)
        return p / p.sum(-1, keepdim=True)


class DividedUnderVmap(AllUnderVmap):
    """A near miss: what divides is as far from a sum as one is looked for, and is of no sum."""

    def matrices(self, logits: Tensor) -> Tensor:
        p = torch.exp(logits)
        for _ in range(4):
            p = p / p.sin().tanh().exp().abs().clamp(min=0.1)
        return p


class SoftmaxUnderVmap(AllUnderVmap):
    def matrices(self, logits: Tensor) -> Tensor:
        p = torch.softmax(logits, -1)
        return p / (p.sum(-2, keepdim=True) + 1e-6)


class OneAxis(Sublayer):
    def res(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)


class DetachedSinkhorn(Sublayer):
    def columns(self, m: Tensor) -> Tensor:
        return m / (m.sum(-2, keepdim=True).detach() + 1e-6)


class LogarithmsWithEps(Sublayer):
    """The logarithm of what plain exp with an eps computes, as long as no exp overflows."""

    def res(self, logits: Tensor) -> Tensor:
        for _ in range(6):
            logits = logits - (logits.exp().sum(-1, keepdim=True) + 1e-6).log()
            logits = logits - (logits.exp().sum(-2, keepdim=True) + 1e-6).log()
        return logits.exp()


class ProjectionInFloat64(Sublayer):
    def project(self, flat: Tensor) -> Tensor:
        return F.linear(flat.double(), self.phi.double()).to(flat.dtype)


class ManyRows(Sublayer):
    """The matrix projects for others as well."""

    def project(self, flat: Tensor) -> Tensor:
        return F.linear(flat, self.phi.repeat(50, 1))[..., : len(self.phi)]


class ManyNumbersBetween(Sublayer):
    """A near miss: gates come from a product with few rows, of something that has many."""

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, h_post, h_res = super().gates(x)
        hidden = F.linear(self.flat(x), self.phi.repeat(50, 1)).relu()
        few = self.phi.flatten().repeat(9)[:4800].view(1200, 4)
        logits = torch.addmm(self.bias[:4], hidden.flatten(0, 1), few, alpha=0.5)
        return torch.sigmoid(logits.view(*x.shape[:2], 4)), h_post, h_res


class ManyMatrices(Sublayer):
    """A near miss: fifty matrices with few rows, one for each sequence of the batch."""

    def project(self, flat: Tensor) -> Tensor:
        return flat @ (self.phi * self.per_batch).mT


class GatesInFloat64(Sublayer):
    def pre(self, logits: Tensor) -> Tensor:
        return (torch.sigmoid(logits.double()) + 1e-6).to(logits.dtype)


class StreamsWritten(Sublayer):
    """The caller's streams: nobody knows who else holds them."""

    def forward(self, x: Tensor) -> Any:
        return self.body(x)

    def mixes(self, x: Tensor) -> Tensor:
        r = self.rms(self.flat(x))
        x.mul_(1.5)
        return self.project(self.flat(x)) * r


class NoNorm(Sublayer):
    def mixes(self, x: Tensor) -> Tensor:
        return self.project(self.flat(x))


class NormedAfterBias(Sublayer):
    def mixes(self, x: Tensor) -> Tensor:
        flat = self.flat(x)
        return (self.project(flat) + self.bias) * self.rms(flat)


class NormedByOthers(Sublayer):
    """One number a token, and not the RMS factor of the streams: that of their halves."""

    def mixes(self, x: Tensor) -> Tensor:
        flat = self.flat(x)
        return self.project(flat) * self.rms(flat[..., ::2])


class NextToNoEps(Sublayer):
    def rms(self, flat: Tensor) -> Tensor:
        return 1.0 / (flat.square().mean(-1, keepdim=True).sqrt() + 1e-33)


class DetachedGate(Sublayer):
    def pre(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits).detach()


class ScaledByPosition(Sublayer):
    def pre(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits * self.per_position)


class NormedTwice(Sublayer):
    def mixes(self, x: Tensor) -> Tensor:
        r = self.rms(self.flat(x))
        return self.project(self.flat(x)) * (r * self.scale[0] * r)


class NumbersOnly(Sublayer):
    """What sets NaN to 0 equals a gate for numbers alone."""

    def post(self, logits: Tensor) -> Tensor:
        return super().post(logits).nan_to_num()


class FiniteLogits(Sublayer):
    def res(self, logits: Tensor) -> Tensor:
        return super().res(logits.nan_to_num(neginf=-5.0))


class FiniteStart(Sublayer):
    def start(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1).nan_to_num() + 1e-6


class MixedTwice(Sublayer):
    """A matrix mixes what is left of the streams without their mean; the mean is added."""

    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        along = torch.full((4, 4), 0.25)
        rest = torch.einsum("oi,bsic->bsoc", torch.eye(4) - along, x)
        mixed = torch.einsum("oi,bsic->bsoc", along, x) + h_res.transpose(-1, -2) @ rest
        return mixed + h_post.unsqueeze(-1) * f.unsqueeze(-2)


class CopiesMixed(Sublayer):
    """A matrix, which is made of the gates, mixes n copies of the sublayer's output."""

    def matrix(self, h_post: Tensor) -> Tensor:
        return h_post.unsqueeze(-1) * self.per_stream

    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        copies = f.unsqueeze(-2).expand(-1, -1, self.n, -1)
        return torch.einsum("bsoi,bsic->bsoc", self.matrix(h_post), copies) + h_res.transpose(-1, -2) @ x


class RepeatedAndMixed(CopiesMixed):
    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        copies = f.unsqueeze(-2).repeat(1, 1, self.n, 1)
        return h_res.transpose(-1, -2) @ x + self.matrix(h_post) @ copies


class RowsMixed(CopiesMixed):
    """A near miss: what the other matrix mixes differs from row to row."""

    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return h_res.transpose(-1, -2) @ x + self.matrix(h_post) @ (f.unsqueeze(-2) * x)


class RowsOfAllMixed(RowsMixed):
    """A near miss: the streams are the same for all tokens, and differ from each other."""

    def body(self, x: Tensor) -> Any:
        return super().body(x[:1, :1].expand_as(x))


class WrittenBack(NoNorm):
    """There is no sublayer, and no known gate."""

    def pre(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def post(self, logits: Tensor) -> Tensor:
        return 1 + logits.sin()

    def res(self, logits: Tensor) -> Tensor:
        return logits.tanh()

    def layer(self, layer_input: Tensor, x: Tensor) -> Tensor:
        return layer_input


class MixedOnceAndAdded(MixedTwice):
    """A near miss: the other tensor is added as it is."""

    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return h_res.transpose(-1, -2) @ x + x.tanh() + h_post.unsqueeze(-1) * f.unsqueeze(-2)


class BiasOfEachBatch(Sublayer):
    """What is added with the output is the same for all positions, but not for the batch: no layer's bias."""

    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        bias = x.amax((1, 2))[:, None, None]
        return h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_post.unsqueeze(-1) * bias + h_res.transpose(-1, -2) @ x


class SameMixedTwice(MixedTwice):
    """A near miss: both matrices mix the same streams, so that they are one."""

    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        along = torch.einsum("oi,bsic->bsoc", torch.full((4, 4), 0.25), x)
        return along + h_res.transpose(-1, -2) @ x + h_post.unsqueeze(-1) * f.unsqueeze(-2)


REASONS: list[tuple[type[Sublayer], str, str]] = [
    (UnequalEps, "column eps 1e-05 differs from its row eps 1e-06", "columns"),
    (ShiftedByColumns, "by the maxima of their columns and then normalises the rows first", ""),
    (SquashedBeforeScale, "from tanh of the projection and from other tensors", ""),
    (TokensLast, "with the tokens last, as [..., tokens]", "res"),
    (UnderVmap, "computed under vmap", "gates"),
    (AllTokensLast, "a Sinkhorn projection of [n, n, tokens]", "sinkhorn"),
    (ThreeHalfStepsOfTokensLast, "a Sinkhorn projection of [n, n, tokens]", "sinkhorn"),
    (SoftmaxOfTokensLast, "a Sinkhorn projection of [n, n, tokens]", "sinkhorn"),
    (AllUnderVmap, "what looks like a Sinkhorn iteration is under vmap", "matrices"),
    (TwiceUnderVmap, "what looks like a Sinkhorn iteration is under vmap", "matrices"),
    (OneAxis, "normalises one axis only", "res"),
    (DetachedSinkhorn, "its gradient does not", "columns"),
    (LogarithmsWithEps, "equals a Sinkhorn projection at moderate logits, but not at large ones", "res"),
    (ProjectionInFloat64, "computes in float64; the operators would compute that in float32", ""),
    (ManyRows, "this is a product with 1,200 rows, and the operators take at most 1,024", "project"),
    (ManyRows, "comes from a product with 1,200 rows, and the operators take at most 1,024", ""),
    (GatesInFloat64, "an input has dtype torch.float64", ""),
    (StreamsWritten, "x.mul_(1.5)", ""),
    (NormedAfterBias, "is normalised after a bias is added", ""),
    (NormedByOthers, "scaled token by token, and not by an RMS norm of what it projects", ""),
    (NextToNoEps, "an RMS norm with an eps of 1e-33 (outside)", ""),
    (DetachedGate, "equals a sigmoid gate, but its gradient does not", "pre"),
    (NumbersOnly, "equals a sigmoid gate, but not for logits that are NaN or infinite", "post"),
    (FiniteStart, "equals a Sinkhorn projection, but not for logits that are NaN or infinite", ""),
    (ScaledByPosition, "but also from another tensor, [3, 1], in mul", "pre"),
    (BiasOfEachBatch, "something other than h_post times one tensor [..., C]", "write"),
    (MixedTwice, "mixes two tensors by a matrix each, and the operator mixes one", "write"),
    (RowsMixed, "mixes two tensors by a matrix each, and the operator mixes one", "write"),
    (RowsOfAllMixed, "mixes two tensors by a matrix each, and the operator mixes one", ""),
    (WrittenBack, "writes back what was read, without a sublayer in between", ""),
    (NormedTwice, "comes from a projection that is normalised twice", ""),
]


@pytest.mark.parametrize(("kind", "reason", "piece"), REASONS, ids=[kind.__name__ for kind, _, _ in REASONS])
def test_reason(kind: type[Sublayer], reason: str, piece: str) -> None:
    """Why a site is left, or why a gate stays the program's own."""
    model: Any = kind(4, 6, 3, 2)
    outcome = check.run(model, (torch.randn(SHAPE),), exact=False, repeats=1, backward=False, around=torch.no_grad())
    check.assert_equal_to_eager(outcome)
    told = [(place, text) for place, text in _told(outcome.report) if reason in text]
    assert told, str(outcome.report)
    assert all(line for _, line in (place for place, _ in told))
    if piece:
        lines, first = inspect.getsourcelines(getattr(kind, piece))
        file, line = told[0][0]
        assert __file__.endswith(file)
        assert first <= line < first + len(lines)


@pytest.mark.parametrize("kind", [CopiesMixed, RepeatedAndMixed])
def test_nothing_is_said_of_a_gate_that_another_gate_is_made_of(kind: type[Sublayer]) -> None:
    model: Any = kind(4, 6, 3, 2)
    outcome = check.run(model, (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert "expand_combine" in outcome.operators
    assert not outcome.report.declined, str(outcome.report)


@pytest.mark.parametrize(("kind", "writes"), [(MixedOnceAndAdded, 0), (SameMixedTwice, 1)])
def test_one_mixed_tensor_is_not_said_to_be_two(kind: type[Sublayer], writes: int) -> None:
    model: Any = kind(4, 6, 3, 2)
    outcome = check.run(model, (torch.randn(SHAPE),), exact=False, repeats=1, backward=False, around=torch.no_grad())
    assert outcome.operators.count("expand_combine") == writes, str(outcome.report)
    assert not any("mixes two tensors" in text for _, text in _told(outcome.report))


def test_rows_of_an_earlier_product_are_no_reason() -> None:
    outcome = check.run(ManyNumbersBetween(4, 6, 3, 2), (torch.randn(SHAPE),), around=torch.no_grad(), backward=False)
    assert "its own: h_pre" in str(outcome.report)
    assert "1,200 rows" not in str(outcome.report)


class ScaledBySum(Sublayer):
    def post(self, logits: Tensor) -> Tensor:
        return super().post(logits) * self.phi.sum().tanh()


@pytest.mark.parametrize("dynamic", [None, True])
def test_many_tokens_are_no_rows(dynamic: bool | None) -> None:
    """A projection is a product of tokens and rows, in either order. How many tokens there are is no reason."""
    model: Any = ScaledBySum(4, 6, 1, 1100)
    outcome = check.run(
        model, (torch.randn(1, 1100, 4, 6),), dynamic=dynamic, repeats=1, around=torch.no_grad(), backward=False
    )
    assert "its own: h_post" in str(outcome.report)
    assert "rows, and the operators" not in str(outcome.report)


def test_rows_of_many_matrices_are_not_counted_together() -> None:
    outcome = check.run(ManyMatrices(4, 6, 3, 50), (torch.randn(50, 3, 4, 6),), around=torch.no_grad(), backward=False)
    check.assert_as_accurate(outcome)
    assert "sinkhorn" in outcome.operators, str(outcome.report)
    assert "1,200 rows" not in str(outcome.report)


def _told(report: Report) -> Iterator[tuple[tuple[str, int], str]]:
    """All reasons, each with the file and the line that it is about."""
    for site in report.sites:
        if site.reason:
            yield (site.location.file, site.location.line), site.reason
        for file, line, reason in re.findall(
            r"\((\S+):(\d+)\), which ([^;]*(?:; in the operators[^;]*|; the operators[^;]*)?)", site.own
        ):
            yield (file, int(line)), reason


WHOLE = [
    (ShiftedAlongTheOther, ["expand_combine", "generate_mix_and_aggregate", "sinkhorn"]),
    (ShiftedAlongTheOtherWithoutEps, ["expand_combine", "generate_mix_and_aggregate", "sinkhorn"]),
    (ClampedLogits, ["expand_combine", "generate_mix_and_aggregate", "sinkhorn"]),
    (FiniteLogits, ["expand_combine", "generate_mix_and_aggregate", "sinkhorn"]),
    (OneMatrixForAll, ["expand_combine", "generate_mix_and_aggregate", "sinkhorn"]),
    (SquashedBeforeScale, ["aggregate", "expand_combine", "projection", "sinkhorn"]),
    (NoNorm, ["expand_combine", "generate_mix_and_aggregate"]),
    (UnderVmap, ["aggregate", "expand_combine"]),
]


@pytest.mark.parametrize(("kind", "operators"), WHOLE, ids=[kind.__name__ for kind, _ in WHOLE])
def test_what_is_no_gate_of_an_operator_stays_between_operators(kind: type[Sublayer], operators: list[str]) -> None:
    outcome = check.run(kind(4, 6, 3, 2), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == operators, str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)


def test_a_sinkhorn_under_vmap_is_told_at_its_last_step() -> None:
    outcome = check.run(EachStepUnderVmap(4, 6, 3, 2), (torch.randn(SHAPE),), exact=False, repeats=1, backward=False)
    lines, first = inspect.getsourcelines(EachStepUnderVmap.matrices)
    (line,) = (line for (_, line), text in _told(outcome.report) if "looks like a Sinkhorn iteration" in text)
    assert line == first + len(lines) - 1


@pytest.mark.parametrize("kind", [OneAxisOfTokensLast, SoftmaxUnderVmap, DividedUnderVmap])
def test_no_reason_for_what_is_no_sinkhorn(kind: type[Sublayer]) -> None:
    outcome = check.run(kind(4, 6, 3, 2), (torch.randn(SHAPE),), exact=False, repeats=1)
    assert all(site.op != "sinkhorn" for site in outcome.report.sites), str(outcome.report)
