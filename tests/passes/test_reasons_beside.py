"""What stands beside a Sinkhorn, a read or a write and keeps it from being rewritten is reported with its line."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.zoo import check
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SHAPE = (2, 3, 4, 6)


class Convolution(Sublayer):
    """The projection as a convolution over tokens."""

    def project(self, flat: Tensor) -> Tensor:
        return F.conv1d(flat.mT, self.phi.unsqueeze(-1)).mT


class ProjectedForTwo(Sublayer):
    """Gates of two writes are of one projection. The second takes them from an operator, the first changes them."""

    def body(self, x: Tensor) -> Tensor:
        pre, post, res = self.split(self.mixes(x))
        factor = x.mean((-1, -2)).unsqueeze(-1)
        first = self.res((res * factor).unflatten(-1, (self.n, self.n)))
        new = self.write(x, self.layer(self.read(x, self.pre(pre)), x), torch.tanh(post), first)
        shift = new.mean()
        second = self.res((res + shift).unflatten(-1, (self.n, self.n)))
        layer_input = self.read(new, self.pre(pre + shift))
        return self.write(new, self.layer(layer_input, new), self.post(post + shift), second)


class ChannelsApart(Sublayer):
    """Streams kept as [b, n, C, s], so that the channels of a stream are s elements apart."""

    def forward(self, x: Tensor) -> Any:
        return self.body(x.permute(0, 2, 3, 1).contiguous().sin())

    def flat(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2).mT

    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        return torch.einsum("bnct,btn->btc", x, h_pre)

    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return torch.einsum("btij,bict->bjct", h_res, x) + torch.einsum("btj,btc->bjct", h_post, f)


class SquashedBeforeAdded(Sublayer):
    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return h_post.unsqueeze(-1) * f.unsqueeze(-2) + torch.tanh(h_res.mT @ x)


class DropoutOfMixed(Sublayer):
    """So rare that runs can be compared."""

    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return h_post.unsqueeze(-1) * f.unsqueeze(-2) + torch.nn.functional.dropout(h_res.mT @ x, 1e-12)


class DropoutOfWritten(Sublayer):
    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return torch.nn.functional.dropout(h_post.unsqueeze(-1) * f.unsqueeze(-2), 1e-12) + h_res.mT @ x


class MultipliedStreams(Sublayer):
    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return h_post.unsqueeze(-1) * f.unsqueeze(-2) * (h_res.mT @ x)


class GateOfChannels(Sublayer):
    """What h_post multiplies has a row for each stream."""

    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return h_post.unsqueeze(-1) * (f.unsqueeze(-2) + x.sin()) + h_res.mT @ x


class MaskedBetweenSteps(Sublayer):
    def rows(self, m: Tensor) -> Tensor:
        return super().rows(m * torch.ones(self.n, self.n).tril())


class FourTerms(Sublayer):
    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        gate = h_post.unsqueeze(-1)
        return gate * f.unsqueeze(-2) + gate * f.sin().unsqueeze(-2) + gate * f.cos().unsqueeze(-2) + h_res.mT @ x


class MixedMaximum(Sublayer):
    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        mixed = (h_res.unsqueeze(-1) * x.unsqueeze(-2)).amax(2)
        return h_post.unsqueeze(-1) * f.unsqueeze(-2) + mixed


class ReadOfSquares(Sublayer):
    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        return (h_pre.unsqueeze(-1) * x).amax(2)


NEIGHBOURS: list[tuple[type[Sublayer], str, str, str]] = [
    (Convolution, "generate_mix", "not recognised as the projection of a token's streams", "project"),
    (ProjectedForTwo, "generate_mix", "returns other gates alone, so that this projects once more", ""),
    (ChannelsApart, "expand_combine", "would need a copy of the streams", "write"),
    (SquashedBeforeAdded, "expand_combine", "without adding a product with h_post in the same sum", "write"),
    (DropoutOfMixed, "expand_combine", "with h_post in the same sum (it goes into dropout)", "write"),
    (DropoutOfWritten, "expand_combine", "than h_post times one tensor [..., C] (made by dropout)", "write"),
    (MultipliedStreams, "expand_combine", "without adding a product with h_post in the same sum", "write"),
    (GateOfChannels, "expand_combine", "to the mixed streams something other than h_post times one tensor", "write"),
    (MaskedBetweenSteps, "sinkhorn", "and is then divided by its sums 4 more times", ""),
    (FourTerms, "expand_combine", "adds 3 products to the mixed streams", "write"),
    (MixedMaximum, "expand_combine", "does not sum over the streams", "write"),
    (ReadOfSquares, "aggregate", "does not sum over the streams", "read"),
]


@pytest.mark.parametrize(("kind", "op", "reason", "piece"), NEIGHBOURS, ids=[kind.__name__ for kind, *_ in NEIGHBOURS])
def test_what_stands_beside_a_sinkhorn_and_is_not_rewritten(
    kind: type[Sublayer], op: str, reason: str, piece: str
) -> None:
    """The Sinkhorn is; so whatever reads its matrices, or makes its logits, was meant to be."""
    outcome = check.run(kind(4, 6, 3, 2), (torch.randn(SHAPE),), repeats=2)
    check.assert_as_accurate(outcome)
    assert {"sinkhorn", "generate_mix", "generate_mix_and_aggregate"}.intersection(outcome.operators)
    told = [site for site in outcome.report.declined if site.op == op and reason in str(site.reason)]
    assert told, str(outcome.report)
    if piece:
        lines, first = inspect.getsourcelines(getattr(kind, piece))
        assert first <= told[0].location.line < first + len(lines)


class BlendedWithIdentity(Sublayer):
    """Not what was projected mixes the streams; the projection is still the operator's, and so is the mixing."""

    def res(self, logits: Tensor) -> Tensor:
        return 0.9 * super().res(logits) + 0.1 * torch.eye(self.n)


def test_matrices_that_are_changed_before_they_mix() -> None:
    outcome = check.run(BlendedWithIdentity(4, 6, 3, 2), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"], str(outcome.report)
    assert "sinkhorn softmax" in next(site.detail for site in outcome.report.rewritten if "generate" in site.op)
    assert not outcome.report.declined, str(outcome.report)


class TwoLayers(SquashedBeforeAdded):
    """The streams that a squashed product mixes are new ones, which the second sublayer reads."""

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        h_pre, h_post, h_res = self.gates(x)
        return self.write(x, self.layer(self.read(x, h_pre), x), h_post, h_res)


def test_new_streams_that_are_read_are_not_mixed_last() -> None:
    report = check.run(TwoLayers(4, 6, 3, 2), (torch.randn(SHAPE),)).report
    assert all("(it goes into tanh)" in str(site.reason) for site in report.declined), str(report)
    assert [site.op for site in report.declined] == ["expand_combine"] * 2, str(report)
    assert "mix_streams" not in [site.op for site in report.rewritten], str(report)


class ListOfStreams(Sublayer):
    def forward(self, x: Tensor) -> Any:
        return self.body([stream.sin() for stream in x.unbind(2)])

    def flat(self, x: Any) -> Tensor:
        return torch.cat(x, -1)

    def read(self, x: Any, h_pre: Tensor) -> Tensor:
        return sum(h_pre[..., i, None] * x[i] for i in range(self.n))  # type: ignore[return-value]

    def write(self, x: Any, f: Tensor, h_post: Tensor, h_res: Tensor) -> Any:
        return [
            h_post[..., o, None] * f + sum(h_res[..., i, o, None] * x[i] for i in range(self.n)) for o in range(self.n)
        ]


def test_streams_that_are_a_list() -> None:
    outcome = check.run(ListOfStreams(4, 32, 3, 2), (torch.randn(2, 3, 4, 32),))
    check.assert_as_accurate(outcome)
    (told,) = outcome.report.declined
    assert "the new streams leave the graph as separate tensors" in str(told.reason)


@pytest.mark.parametrize("kind", [DropoutOfMixed, DropoutOfWritten, SquashedBeforeAdded])
def test_one_write_that_is_lost_is_told_once(kind: type[Sublayer]) -> None:
    report = check.run(kind(4, 6, 3, 2), (torch.randn(SHAPE),)).report
    assert [site.op for site in report.declined] == ["expand_combine"], str(report)


class StreamsOfALinearLayer(Sublayer):
    """What makes the streams is a product, too, and a norm is computed from it."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.embed = torch.nn.Parameter(torch.randn(6, 24) * 0.4)

    def pre(self, logits: Tensor) -> Tensor:
        return torch.tanh(logits) * self.embed[0, :4] + 0.5

    def forward(self, x: Tensor) -> Any:
        return super().forward((x.mean(-2) @ self.embed).unflatten(-1, (4, 6)))


def test_a_reason_is_about_the_projection_of_the_streams() -> None:
    outcome = check.run(StreamsOfALinearLayer(4, 6, 3, 2), (torch.randn(SHAPE),))
    (own,) = [site.own for site in outcome.report.rewritten if site.own.startswith("h_pre")]
    assert "is computed from tanh of the projection" in own, own
