"""Writes to streams that are not the very tensor that was read: taken again, in another order, or with some dropped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import check
from tests.zoo.common import random_parameter, random_phi

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, WIDTH = 4, 6
Take = Callable[[Tensor], Tensor]


class Again(nn.Module):
    """Reads `first(x)`, and writes to `second(x)`, mixed by a matrix or as it is."""

    def __init__(self, first: Take, second: Take, mixed: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.mixed = first, second, mixed
        self.pre, self.post = (random_phi(N, N * WIDTH) for _ in range(2))
        self.res = random_parameter(N, N, std=0.5)
        self.weight = random_parameter(WIDTH, WIDTH, std=WIDTH**-0.5)

    def gate(self, x: Tensor, phi: Tensor) -> Tensor:
        return torch.sigmoid(F.rms_norm(x.flatten(2), (N * WIDTH,), eps=1e-6) @ phi.T)

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        streams = self.first(x)
        f = torch.tanh(torch.einsum("btn,btnc->btc", self.gate(streams, self.pre), streams) @ self.weight)
        streams = self.second(x)
        old = torch.einsum("ij,btjc->btic", self.res.softmax(-1), streams) if self.mixed else streams
        return old + self.gate(streams, self.post).unsqueeze(-1) * f.unsqueeze(2)


def _first_tokens(x: Tensor) -> Tensor:
    return x[:, :3]


def _by_chunks(x: Tensor) -> Tensor:
    return x.chunk(2, 1)[0]


def _same(x: Tensor) -> Tensor:
    return x


def _rolled(x: Tensor) -> Tensor:
    return x.roll(1, 2)


def _permuted(x: Tensor) -> Tensor:
    return x[:, :, [1, 0, 3, 2]]


def _summed_up(x: Tensor) -> Tensor:
    return x.cumsum(2)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (_first_tokens, _first_tokens),
        (_by_chunks, _by_chunks),
        (_first_tokens, _by_chunks),
        (_same, _rolled),
        (_same, _permuted),
        (_same, _summed_up),
    ],
)
@pytest.mark.parametrize("mixed", [False, True])
def test_read_and_write_are_one_hyper_connection(first: Take, second: Take, mixed: bool) -> None:
    outcome = check.run(Again(first, second, mixed), (torch.randn(2, 6, N, WIDTH),))
    check.assert_as_accurate(outcome)
    assert not outcome.report.declined, str(outcome.report)
    (read,) = [op for op in outcome.operators if op in ("generate_mix_and_aggregate", "head", "aggregate")]
    assert outcome.operators.count("expand_combine") == 1, str(outcome.report)
    assert read, str(outcome.report)


class MixedByAttention(Again):
    """The streams of a token attend to each other before they are written."""

    def __init__(self) -> None:
        super().__init__(_same, self.attended)
        self.qkv = random_parameter(WIDTH, 3 * WIDTH, std=WIDTH**-0.5)

    def attended(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(x @ self.qkv).chunk(3, -1))


def test_no_line_is_told_as_rewritten_and_as_declined() -> None:
    outcome = check.run(MixedByAttention(), (torch.randn(2, 6, N, WIDTH),))
    check.assert_as_accurate(outcome)
    rewritten = {str(site.location) for site in outcome.report.rewritten if site.op == "expand_combine"}
    assert rewritten.isdisjoint(str(site.location) for site in outcome.report.declined), str(outcome.report)
