"""Ranks of a job change a graph in one way, or none does; a rank that fails alone hangs nobody, and is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import fx

from mhc_compile import agreement
from tests.jobs import Seen, run_job

pytestmark = pytest.mark.slow
MIX, COMBINE = "generate_mix_and_aggregate", "expand_combine"
ALL = [MIX, COMBINE, MIX, COMBINE]
# For float32 sums in another order. There is no difference if eager code runs the same operators.
CLOSE = 1e-5


def _job(folder: Path, device: str, ranks: int, *scenarios: str) -> Seen:
    return run_job("tests.ranks", folder, ranks, *scenarios, device=device)


FAILED = "MemoryError: of this rank alone"
UNLIKE = "does not come out alike on all ranks"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, job_device: str) -> Seen:
    return _job(
        tmp_path_factory.mktemp("two"),
        job_device,
        2,
        *("nothing", "plan", "one site", "one site on all", "fusing", "describing sites"),
        *("late failure", "early failure", "others instead", "different programs", "only one compiles"),
        # Last what leaves sites alone for the rest of the process.
        *("split", "wrong on none", "wrong on all", "wrong on one"),
    )


@pytest.mark.parametrize(
    ("scenario", "rewritten"),
    [
        ("nothing", ALL),
        ("plan", []),
        ("one site", []),
        ("one site on all", [MIX, MIX]),
        ("fusing", ALL),
        ("describing sites", ALL),
    ],
)
def test_all_ranks_rewrite_a_graph_alike(two: Seen, scenario: str, rewritten: list[str]) -> None:
    for seen in two[scenario]:
        assert sorted(seen["rewritten"]) == sorted(rewritten)
        assert seen["distance"] < CLOSE
    first, second = two[scenario]
    assert first["fused"] == second["fused"]
    assert (first["fused"] > 0) == (bool(rewritten) and scenario != "fusing")


def test_all_ranks_tell_why(two: Seen) -> None:
    for scenario in ("plan", "fusing", "one site"):
        healthy, failing = two[scenario]
        (error,) = healthy["errors"]
        assert UNLIKE in error
        assert FAILED in failing["errors"][0]
    for seen in two["one site on all"]:
        assert [FAILED in error for error in seen["errors"]] == [True]
    healthy, failing = two["describing sites"]
    assert not healthy["errors"]
    assert [FAILED in error for error in failing["errors"]] == [True]


def test_a_rank_that_fails_when_others_have_rewritten_stops(two: Seen) -> None:
    healthy, failing = two["late failure"]
    assert healthy == {"rewritten": [MIX, COMBINE], "new": True, "errors": []}
    assert "rank 1 cannot rewrite a graph as other ranks of this job have rewritten it" in failing["raised"]
    assert FAILED in failing["raised"]
    assert "\n" not in failing["raised"]


def test_a_rank_follows_one_that_failed_before(two: Seen) -> None:
    healthy, failing = two["early failure"]
    assert not healthy["new"]
    assert not failing["new"]
    assert UNLIKE in healthy["errors"][0]


def test_ranks_that_compile_something_else_are_not_waited_for(two: Seen) -> None:
    assert [seen["counts"] for seen in two["different programs"]] == [[2], [4, 0, 4]]
    assert [seen["rewritten"] for seen in two["only one compiles"]] == [[], [MIX, COMBINE]]


def test_ranks_that_have_other_graphs_in_the_same_place_are_not_waited_for(two: Seen) -> None:
    """As after autograd, with uneven shards of DTensors."""
    assert [seen["counts"] for seen in two["others instead"]] == [[2, 2], [2, 2]]
    assert [seen["in vain"] for seen in two["others instead"]] == [False, False]


@pytest.mark.parametrize("scenario", ["wrong on none", "wrong on all", "wrong on one"])
def test_all_ranks_leave_a_site_alone_at_one_call(two: Seen, scenario: str) -> None:
    """`mhc.check`, where an operator is wrong on some ranks; results are those of eager code before and after."""
    first, second = two[scenario]
    assert first["rewritten"] == second["rewritten"]
    assert first["reasons"] == second["reasons"]
    assert max(first["distance"], second["distance"]) < CLOSE
    left = scenario != "wrong on none"
    assert first["rewritten"][0] == sorted(ALL)
    assert first["rewritten"][-1] == ([MIX, MIX] if left else sorted(ALL))
    if scenario == "wrong on one":
        assert all(reason.startswith("on rank 1, when checked, its operator was less") for reason in first["reasons"])


def test_all_ranks_report_the_same_of_graphs_that_are_split(two: Seen) -> None:
    """At the buckets of DistributedDataParallel; and so does `explain`."""
    first, second = two["split"]
    assert first == second
    explained, reported = first["sites"]
    assert explained == reported
    assert len(explained) == len(ALL)
    assert first["cut"] == [0, 0]
    assert first["graphs"][0] == first["graphs"][1] > 1
    assert first["compiled"] == first["graphs"]


def test_four_ranks(tmp_path: Path, job_device: str) -> None:
    seen = _job(tmp_path, job_device, 4, "nothing", "plan")
    assert [sorted(rank["rewritten"]) for rank in seen["nothing"]] == [sorted(ALL)] * 4
    assert [rank["rewritten"] for rank in seen["plan"]] == [[]] * 4
    assert all(rank["distance"] < CLOSE for rank in seen["nothing"] + seen["plan"])


@pytest.mark.thorough
def test_what_fails_beside_a_graph_changes_nothing_on_any_rank(tmp_path: Path, job_device: str) -> None:
    """With Inductor: the store of reports, the trace, the hash of sources and the workers fail on one rank."""
    healthy, failing = _job(tmp_path, job_device, 2, "inductor")["inductor"]
    assert healthy["rewritten"] == failing["rewritten"]
    assert sorted(healthy["rewritten"]) == sorted(ALL)
    assert not healthy["errors"]
    assert failing["errors"]
    assert all(FAILED in error for error in failing["errors"])
    # What DistributedDataParallel has averaged is the same on both, to the last bit.
    assert healthy["norm"] == failing["norm"]
    assert max(healthy["distance"], failing["distance"]) < CLOSE


class _Store:
    """A job's store, of one process."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def add(self, key: str, count: int) -> int:
        self.values[key] = self.values.get(key, 0) + count
        return int(self.values[key])

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        if self.values.get(key, "") == expected:
            self.values[key] = value
        return str(self.values[key]).encode()


def test_one_failure_under_two_addresses_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store = _Store()
    monkeypatch.setattr(agreement.Vote, "_wait", lambda self: None)
    votes = [agreement.Vote(store, "graph") for _ in range(2)]
    for vote, text in zip(votes, ("<f at 0x7f01> on cuda:0", "<f at 0x5a> on cuda:1"), strict=True):
        assert vote.is_for_change(text, possible=True)
    with pytest.raises(agreement.FailedAlone, match="something else"):
        agreement.Vote(store, "graph").is_for_change("something else", possible=True)


def test_a_rank_that_leaves_without_a_vote_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when Dynamo traces once more."""
    store = _Store()
    store.timeout = None  # type: ignore[attr-defined]
    monkeypatch.setattr(agreement.compat, "job_store", lambda: store)
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    with pytest.raises(KeyboardInterrupt), agreement.announced("rewriting", graph):
        raise KeyboardInterrupt
    assert store.values == dict.fromkeys(store.values, 1)
    of_graph = [key for key in store.values if not key.startswith("rewriting/begun/")]
    assert sorted(key.rpartition("/")[2] for key in of_graph) == ["announced", "closed"]
    assert len(store.values) == 3


def test_a_store_that_cannot_be_reached_any_more() -> None:
    class Gone(_Store):
        def add(self, key: str, count: int) -> int:
            if not key.endswith("announced"):
                raise ConnectionError
            return super().add(key, count)

    assert agreement.Vote(Gone(), "graph").is_for_change("", possible=True)
    for possible in (True, False):
        with pytest.raises(agreement.FailedAlone, match="what failed"):
            agreement.Vote(Gone(), "graph").is_for_change("what failed", possible=possible)
