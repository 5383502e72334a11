"""A read with a gate for each channel, which no operator has: one line says so, at the read."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

import mhc_compile
from tests.passes import test_own_gates as own
from tests.zoo import check
from tests.zoo.common import random_parameter
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, WIDTH = 4, 6
SHAPE = (2, 3, N, WIDTH)
REASON = "this reads streams with a gate for each channel; the operator has one for each stream"


class Weighed(Sublayer):
    """h_pre times a weight for each stream and channel."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.of_channel = random_parameter(N, WIDTH, mean=1.0, std=0.3)
        self.up = random_parameter(N, N * WIDTH, mean=0.1, std=0.3)

    def gate(self, h_pre: Tensor) -> Tensor:
        return h_pre.unsqueeze(-1) * self.of_channel

    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        gate = self.gate(h_pre)
        return (gate * x).sum(-2)


class Outer(Weighed):
    def gate(self, h_pre: Tensor) -> Tensor:
        return torch.einsum("bsn,nc->bsnc", h_pre, self.of_channel)


class LowRank(Weighed):
    def gate(self, h_pre: Tensor) -> Tensor:
        return (h_pre @ self.up).unflatten(-1, (N, WIDTH))


class WeighedAfterwards(Weighed):
    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        return (h_pre.unsqueeze(-1) * x * self.of_channel).mean(-2)


class InEinsum(Weighed):
    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        gate = self.gate(h_pre)
        return torch.einsum("bsnc,bsnc->bsc", gate, x)


READS: list[type[Weighed]] = [Weighed, Outer, LowRank, WeighedAfterwards, InEinsum]


@pytest.mark.parametrize("kind", READS, ids=[kind.__name__ for kind in READS])
def test_the_line_is_that_of_the_read(kind: type[Weighed]) -> None:
    """The line that makes the gate out of h_pre reads no streams."""
    outcome = check.run(kind(4, 6, 3, 2), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine", "generate_mix"], str(outcome.report)
    (told,) = outcome.report.declined
    assert (told.op, told.reason) == ("aggregate", REASON), str(outcome.report)
    lines, first = inspect.getsourcelines(kind.read)
    assert told.location.line == first + len(lines) - 1


class LargestFirst(Weighed):
    """What reads h_pre is another line than that of the read, whose gates are made of it."""

    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        largest = (h_pre.unsqueeze(-1) * x).amax(-2)
        return (torch.sigmoid(largest.unsqueeze(-2) * self.of_channel) * x).sum(-2)


def test_a_line_that_reads_streams_itself_is_told() -> None:
    outcome = check.run(LargestFirst(4, 6, 3, 2), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    _, first = inspect.getsourcelines(LargestFirst.read)
    told = {site.location.line - first: site.reason for site in outcome.report.declined}
    assert told[2] == REASON, str(outcome.report)
    assert "this reads h_pre, but" in (told[1] or "")


class WriteLost(Outer):
    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return h_post.unsqueeze(-1) * f.unsqueeze(-2) + torch.tanh(h_res.mT @ x)


def test_a_read_is_told_beside_a_write_that_is_lost() -> None:
    outcome = check.run(WriteLost(4, 6, 3, 2), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert sorted(site.op for site in outcome.report.declined) == ["aggregate", "expand_combine"], str(outcome.report)
    assert [site.reason for site in outcome.report.declined if site.op == "aggregate"] == [REASON]


class OfTwoConnections(nn.Module):
    """One gate for each channel is made of both h_pre."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = WriteLost(4, 6, 3, 2), WriteLost(4, 6, 3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.sin()
        made = [(part, *part.gates(x)) for part in (self.first, self.second)]
        gates = [h_pre.unsqueeze(-1) * part.of_channel for part, h_pre, _, _ in made]
        f = torch.tanh(((gates[0] + torch.sigmoid(gates[1])) * x).sum(-2))
        first, second = (part.write(x, f, h_post, h_res) for part, _, h_post, h_res in made)
        return first, second


def test_a_read_by_gates_of_two_connections_is_told_once() -> None:
    outcome = check.run(OfTwoConnections(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert [site.reason for site in outcome.report.declined if site.op == "aggregate"] == [REASON], str(outcome.report)


class Largest(Weighed):
    """No weighted sum of streams; its line is the one that reads h_pre."""

    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        return (h_pre.unsqueeze(-1) * x).amax(2) + (self.of_channel * x).sum(2)


def test_another_read_does_not_hide_one_of_h_pre() -> None:
    outcome = check.run(Largest(4, 6, 3, 2), (torch.randn(SHAPE),))
    told = sorted(str(site.reason) for site in outcome.report.declined)
    assert len(told) == 2, str(outcome.report)
    assert told[0].startswith("this reads h_pre, but does not sum over the streams"), told
    assert told[1] == REASON


class ForAllTokens(own.Identity):
    """Nothing but the read says that the write is one."""

    def __init__(self) -> None:
        super().__init__()
        self.of_channel = random_parameter(N, WIDTH, mean=0.3, std=0.2)

    def read(self, x: Tensor, a: Tensor) -> Tensor:
        return torch.einsum("nc,bsnc->bsc", self.of_channel, x)


class ForAllTokensFlat(ForAllTokens):
    def read(self, x: Tensor, a: Tensor) -> Tensor:
        return torch.einsum("tnc,nc->tc", x.flatten(0, 1), self.of_channel).view(2, 3, WIDTH)


class ForEachToken(ForAllTokens):
    def read(self, x: Tensor, a: Tensor) -> Tensor:
        return torch.einsum("bsnc,bsnc->bsc", x.cos() * self.of_channel, x)


@pytest.mark.parametrize("kind", [ForAllTokens, ForAllTokensFlat, ForEachToken])
def test_an_einsum_shows_what_is_written(kind: type[ForAllTokens]) -> None:
    outcome = check.run(kind(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine", "projection"], str(outcome.report)
    assert [(site.op, site.reason) for site in outcome.report.declined] == [("aggregate", REASON)]


class Windows(torch.nn.Module):
    """A convolution over the last positions, each channel by itself, with gates or without."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.kernel, self.post = random_parameter(N, WIDTH), random_parameter(N)
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        windows = torch.nn.functional.pad(x, (0, 0, N - 1, 0)).unfold(1, N, 1)
        f = torch.tanh(torch.einsum("bscn,nc->bsc", windows, self.kernel))
        return x + self.post[0] * f if self.gated else x + f


@pytest.mark.parametrize("gated", [False, True])
def test_windows_are_no_streams(gated: bool) -> None:
    report = mhc_compile.explain(Windows(gated), torch.randn(2, 7, WIDTH))
    assert (report.sites, report.errors) == ([], []), str(report)
