"""What ranks share about sites that `mhc.check` has found: all change over at one call, or one of them stops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mhc_compile import agreement


class _Store:
    """A job's store, of one process."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def add(self, key: str, count: int) -> int:
        self.values[key] = self.values.get(key, 0) + count
        return int(self.values[key])

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return str(self.values[key]).encode()

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return str(self.values.setdefault(key, value)).encode()


def _ballots(monkeypatch: pytest.MonkeyPatch, count: int) -> list[agreement.Ballot]:
    store = _Store()
    monkeypatch.setattr(agreement.compat, "job_store", lambda: store)
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    made = []
    for rank in range(count):
        monkeypatch.setattr(agreement.compat, "rank", lambda rank=rank: 1000 + rank)
        made.append(agreement.Ballot(graph, 3))
    return made


def test_ranks_change_over_at_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes first to a call decides what it does, by what was posted until then."""
    first, second = _ballots(monkeypatch, 2)
    first.post({})
    assert [ballot.outcome(3, is_last=False) for ballot in (first, second)] == [None, None]
    assert first.outcome(4, is_last=False) is None
    second.post({1: "it is wrong"})
    # The first one came before that to the fourth call.
    assert second.outcome(4, is_last=False) is None
    found = [ballot.outcome(5, is_last=False) for ballot in (second, first)]
    assert found == [{1: "on rank 1001, it is wrong"}] * 2


def test_a_rank_that_may_repeat_a_call_takes_what_others_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks before each call, but does not decide that the findings count."""
    first, second = _ballots(monkeypatch, 2)
    first.post({})
    second.post({1: "it is wrong"})
    assert [ballot.outcome(17, is_last=True, holds=ballot is second) for ballot in (second, first)] == [None, None]
    found = [ballot.outcome(18, is_last=True, holds=ballot is second) for ballot in (first, second)]
    assert found == [{1: "on rank 1001, it is wrong"}] * 2


def test_a_rank_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = _ballots(monkeypatch, 2)
    first.post({2: "it is wrong"})
    assert first.outcome(15, is_last=False) is None
    assert list(first.outcome(16, is_last=True) or {}) == [2]


def test_a_rank_that_finds_something_too_late_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = _ballots(monkeypatch, 2)
    first.post({})
    assert first.outcome(16, is_last=True) == {}
    second.post({1: "it is wrong"})
    with pytest.raises(
        agreement.FailedAlone, match="would leave a site alone that other ranks of this job rewrite: it is"
    ):
        second.outcome(16, is_last=True)
