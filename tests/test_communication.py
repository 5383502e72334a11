"""`benchmarks.communication` counts what ranks send; the model's sizes say what that has to be."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import communication
from benchmarks.communication import MODEL, Collectives, Config, Count, chosen, counts, table
from mhc_compile import compat

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
SMALL = Config(layers=2, width=64, heads=4, context=32)
FSDP, TP, RANKS = 2, 2, 4
FLOAT, BFLOAT16 = 4, 2


@pytest.fixture(scope="module")
def counted() -> dict[str, Count]:
    """The counts of rank 0, eager and rewritten."""
    return {each.compiled: each for each in counts(SMALL, {RANKS: (f"fsdp={FSDP},tp={TP}",)})}


def test_rewritten_code_sends_what_eager_code_sends(counted: dict[str, Count]) -> None:
    eager, rewritten = counted["eager"], counted["mhc"]
    assert (rewritten.sent, rewritten.calls) == (eager.sent, eager.calls)
    assert (eager.sites, eager.blocks) == (0, SMALL.layers)
    # Two sublayers of a block, which is compiled once for both.
    assert (rewritten.sites, rewritten.rewritten) == (4, 4)


def _units() -> tuple[int, int]:
    """How many numbers a rank's part of a block's parameters has, and of the others', padded to equal shards."""
    c, n = SMALL.width, SMALL.streams
    rows = n * n + 2 * n

    def shard(first: int, second: int = 1) -> int:
        return -(-first // FSDP) * second

    connection = shard(rows, n * c) + shard(3) + shard(rows)
    by_columns = 3 * shard(c // TP, c) + 2 * shard(4 * c // TP, c)  # q, k, v, gate, up
    by_rows = shard(c, c // TP) + shard(c, 4 * c // TP)  # out, down
    return 2 * connection + by_columns + by_rows + 2 * shard(c), 2 * shard(256, c) + shard(c)


def test_the_bytes_follow_from_the_sizes(counted: dict[str, Count]) -> None:
    """Parameters are gathered forward and backward, but those of the root once; tokens of each sublayer twice."""
    block, root = _units()
    rows = RANKS // FSDP
    tokens = rows * SMALL.context * SMALL.width * BFLOAT16
    around = (TP - 1) * tokens // TP
    sublayers = 2 * SMALL.layers
    # The embedding's gradient is in float32.
    gathered = (FSDP - 1) * FLOAT * (2 * SMALL.layers * block + root) + around * (2 * sublayers + 1) + 2 * around
    reduced = (FSDP - 1) * FLOAT * (SMALL.layers * block + root) + around * 2 * sublayers
    sent = counted["eager"].sent
    assert (sent["all-gather"], sent["reduce-scatter"]) == (gathered, reduced)
    assert counted["eager"].calls["reduce-scatter"] == SMALL.layers + 1 + 2 * sublayers


@pytest.mark.thorough
def test_stages_send_streams() -> None:
    for each in counts(SMALL, {2: ("pp=2",)}):
        streams = 2 * SMALL.context * SMALL.streams * SMALL.width * BFLOAT16
        assert each.sent["send"] == streams  # the first sends them, and the second their gradients
        assert each.blocks == SMALL.layers // 2
        assert each.rewritten == (4 if each.compiled == "mhc" else 0)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # torch is giving some of them other names
def test_every_collective_is_counted_or_refused() -> None:
    """Of a tensor that all ranks have in the end, 3 of 4 parts are sent; twice that to sum it up."""
    with compat.imitated_job(1, 4):
        with Collectives() as seen:
            whole, name, functional = torch.ones(8), dist.group.WORLD.group_name, torch.ops._c10d_functional
            for made in (
                functional.all_reduce(whole, "sum", name),
                functional.all_gather_into_tensor(whole[:2].clone(), 4, name),
                functional.reduce_scatter_tensor(whole, "sum", 4, name),
            ):
                functional.wait_tensor(made)
            dist.all_reduce(whole)
            dist.all_gather_into_tensor(whole, whole[:2].clone())
            dist.reduce_scatter_tensor(whole[:2].clone(), whole)
            dist.send(whole, 2)
            dist.recv(whole, 2)
        with Collectives(), pytest.raises(NotImplementedError, match="c10d::broadcast_ is not counted"):
            dist.broadcast(whole, 0)
    part = 8 * FLOAT * 3 // 4
    assert seen.calls == {"all-reduce": 2, "all-gather": 2, "reduce-scatter": 2, "send": 1}
    assert seen.sent == {"all-reduce": 4 * part, "all-gather": 2 * part, "reduce-scatter": 2 * part, "send": 8 * FLOAT}


def test_the_ranks_that_are_looked_at() -> None:
    assert chosen("fsdp=8", 8) == [0]
    assert chosen("pp=2", 2) == [0, 1]
    assert chosen("pp=8,fsdp=8", 64) == [0, 8, 56]


def _content(**changed: Any) -> dict[str, Any]:
    eager = Count("pp=2", 2, 0, "eager", 1, {"send": 2}, {"send": 3_000_000_000})
    other = dataclasses.replace(eager, compiled="mhc", sites=5, rewritten=4)
    least = [dataclasses.replace(each, rank=1, sent={"send": 1}) for each in (eager, other)]
    listed = [eager, dataclasses.replace(other, **changed), *least]
    return {"counts": [dataclasses.asdict(each) for each in listed]}


def test_a_row_is_of_the_rank_that_sends_most() -> None:
    assert table(_content()).splitlines()[2] == "| 2 | `pp=2` | - | - | - | 3.00 | 3.00 | 2 | 4 of 5 |"
    for changed in ({"sent": {"send": 3_000_000_001}}, {"calls": {"send": 3}}):
        with pytest.raises(ValueError, match="rank 0 of 2: mhc does not send what eager code sends"):
            table(_content(**changed))


def test_the_table_of_the_documentation_is_that_of_the_results() -> None:
    content = json.loads((ROOT / "results" / "communication.json").read_text(encoding="utf-8"))
    assert content["model"] == dataclasses.asdict(MODEL)
    assert {(each["ranks"], each["division"]) for each in content["counts"]} == {
        (ranks, division) for ranks, listed in communication.DIVISIONS.items() for division in listed
    }
    # On a difference: python -m benchmarks.communication table
    assert table(content) in (ROOT / "docs" / "measurements.md").read_text(encoding="utf-8")
    assert all(each["rewritten"] == each["sites"] == 4 for each in content["counts"] if each["compiled"] == "mhc")
