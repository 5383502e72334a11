"""Streams in other hands: a list of tensors, one stream alone, recomputed in backward, or under vmap.

Whatever is done with such code, results and gradients are eager's, with float64 as the judge.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.zoo import check
from tests.zoo.near import Sublayer

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo instantiates autograd.Function while it traces one, which torch itself warns about.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

N, WIDTH = 4, 6
FULL = ["expand_combine", "generate_mix_and_aggregate"]


class _ListOfStreams(Sublayer):
    """[x0, x1, ...] between two sublayers: each is computed by itself, and all are together only to be projected."""

    def connect(self, streams: list[Tensor]) -> list[Tensor]:
        flat = torch.cat(streams, -1)
        pre, post, res = self.logits(self.split(self.project(flat) * self.rms(flat)))
        h_pre, h_post, h_res = self.pre(pre), self.post(post), self.res(res)
        read: Any = sum(h_pre[..., i, None] * stream for i, stream in enumerate(streams))
        f = self.layer(read, read)
        return [
            h_post[..., o, None] * f + sum(h_res[..., i, o, None] * stream for i, stream in enumerate(streams))
            for o in range(self.n)
        ]

    def forward(self, x: Tensor) -> Any:
        return tuple(self.connect(self.connect(list(x.unbind(2)))))


class _ListStackedInTheEnd(_ListOfStreams):
    def forward(self, x: Tensor) -> Any:
        return torch.stack(self.connect(list(x.unbind(2))), 2)


@pytest.mark.parametrize("kind", [_ListOfStreams, _ListStackedInTheEnd])
def test_a_list_of_streams(kind: type[Sublayer]) -> None:
    model = kind(N, WIDTH, 3, 2)
    check.assert_as_accurate(check.run(model, (torch.randn(2, 3, N, WIDTH),)))


class _ScaledCopies(Sublayer):
    """Streams that begin as copies of an embedding, each times its own number, and a residual that is not mixed."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.numbers = torch.nn.Parameter(torch.randn(self.n, 1))

    def connect(self, x: Tensor) -> Tensor:
        flat = x.flatten(-2)
        pre, post, _ = self.logits(self.split(self.project(flat) * self.rms(flat)))
        read = (self.pre(pre).unsqueeze(-1) * x).sum(-2)
        return x + self.post(post).unsqueeze(-1) * self.layer(read, read).unsqueeze(-2)

    def forward(self, embedded: Tensor) -> Any:
        x = embedded.unsqueeze(-2).expand(*embedded.shape[:-1], self.n, embedded.shape[-1]) * self.numbers
        return self.connect(self.connect(x))


def test_streams_that_are_a_product() -> None:
    """The sum that the first combine writes is not taken for one of the copies and two factors."""
    outcome = check.run(_ScaledCopies(N, WIDTH, 3, 2), (torch.randn(2, 3, WIDTH),))
    check.assert_as_accurate(outcome)
    assert sorted(site.op for site in outcome.report.rewritten) == sorted(2 * FULL)


def test_one_stream() -> None:
    """Sinkhorn of one number is 1, and every dimension of size 1 could be the streams'."""
    outcome = check.run(Sublayer(1, WIDTH, 3, 2), (torch.randn(2, 3, 1, WIDTH),))
    check.assert_as_accurate(outcome)


class _Recompute(torch.autograd.Function):
    """Forgets what a function computed and computes it again in backward, as Megatron's checkpoints do."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return _post(logits.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        gate = torch.sigmoid(logits)
        return grad * 2 * gate * (1 - gate)


def _post(logits: Tensor) -> Tensor:
    return 2 * torch.sigmoid(logits)


class _RecomputedGate(Sublayer):
    def post(self, logits: Tensor) -> Tensor:
        return _Recompute.apply(logits)  # type: ignore[no-any-return]


class _RecomputeWrongly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return _post(logits.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return grad * torch.sigmoid(logits)


class _WronglyRecomputedGate(Sublayer):
    """What a user's backward says counts, whatever the forward computes."""

    def post(self, logits: Tensor) -> Tensor:
        return _RecomputeWrongly.apply(logits)  # type: ignore[no-any-return]


def test_a_gate_recomputed_in_backward() -> None:
    outcome = check.run(_RecomputedGate(N, WIDTH, 3, 2), (torch.randn(2, 3, N, WIDTH),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == FULL, str(outcome.report)


def test_a_gate_whose_backward_is_another() -> None:
    outcome = check.run(_WronglyRecomputedGate(N, WIDTH, 3, 2), (torch.randn(2, 3, N, WIDTH),))
    check.assert_as_accurate(outcome)
    told = [site.own for site in outcome.report.rewritten]
    assert any("equals a sigmoid gate, but its gradient does not" in own for own in told), str(outcome.report)


class _RecomputedCombine(torch.autograd.Function):
    """All of the combine in one function that keeps its inputs alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        ctx.save_for_backward(x, f, h_post, h_res)
        return h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res.mT @ x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, f, h_post, h_res = ctx.saved_tensors
        d_post = (grad * f.unsqueeze(-2)).sum(-1)
        return h_res @ grad, (grad * h_post.unsqueeze(-1)).sum(-2), d_post, x @ grad.mT


class _WritesInAFunction(Sublayer):
    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return _RecomputedCombine.apply(x, f, h_post, h_res)  # type: ignore[no-any-return]


def test_a_combine_recomputed_in_backward() -> None:
    outcome = check.run(_WritesInAFunction(N, WIDTH, 3, 2), (torch.randn(2, 3, N, WIDTH),))
    check.assert_as_accurate(outcome)
    # The function's forward is a graph of its own, and its backward stays the user's.
    assert outcome.operators == FULL, str(outcome.report)
    assert outcome.report.declined == [], str(outcome.report)


class _Mapped(Sublayer):
    """The block is written for one sequence, and mapped over the batch."""

    def flat(self, x: Tensor) -> Tensor:
        return x.flatten(-2)

    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        return (h_pre.unsqueeze(-1) * x).sum(-2)

    def forward(self, x: Tensor) -> Any:
        return torch.vmap(self.body)(x)


def test_a_mapped_block() -> None:
    check.assert_as_accurate(check.run(_Mapped(N, WIDTH, 3, 2), (torch.randn(2, 3, N, WIDTH),)))
