"""The operators on DTensors: values, placements and collectives, in a job of 4 ranks, or of 2 if there are 2 GPUs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

from mhc_compile import compat
from tests.jobs import Seen, run_job
from tests.ops.calls import OPERATORS

pytestmark = pytest.mark.slow
SHARDS = ["first", "second", "whole", "both", "first twice", "pair"]
CHANNELS = ["channels", "channels of one token", "channels on a square", "too few channels", "accuracy over channels"]
CHANNELS += ["autograd over channels", "compiled over channels"]
NAME = "mhc::generate_mix"


@pytest.fixture(scope="module")
def all_ranks(tmp_path_factory: pytest.TempPathFactory, job_device: str) -> Seen:
    others = ("not needed", "mixed", "accuracy", "autograd", "compiled", "wrong", "wrong on a square", "numbers")
    folder, cases = tmp_path_factory.mktemp("ranks"), (*SHARDS, *CHANNELS, *others)
    ranks = 2 if job_device == "cuda" and torch.cuda.device_count() < 4 else 4
    return run_job("tests.dtensors", folder, ranks, *cases, device=job_device)


@pytest.mark.parametrize("shards", SHARDS)
def test_shards_of_tokens_need_no_communication(all_ranks: Seen, shards: str) -> None:
    """Uneven and empty shards included; parameters' gradients are pending sums."""
    for seen in all_ranks[shards]:
        assert seen == {"far": {}, "collectives": {}, "misplaced": [], "operators": len(OPERATORS)}


def test_float32_is_as_accurate_as_in_one_process(all_ranks: Seen) -> None:
    for seen in all_ranks["accuracy"] + all_ranks["accuracy over channels"]:
        assert seen == {"findings": []}


def test_gradients_through_the_wrappers(all_ranks: Seen) -> None:
    """A loss, then the gradients of the streams and of three parameters."""
    placements = [["P(sum)"], ["S(1)"], *3 * [["P(sum)"]]]
    for seen in all_ranks["autograd"]:
        assert seen == {"near": True, "placements": placements, "collectives": 0}
    for seen in all_ranks["compiled"]:
        assert seen == {"near": True, "placements": placements, "collectives": None}


# A call of arguments that include an input norm, which has a sum of its own.
SUMS = {
    **dict.fromkeys(("generate_mix", "generate_mix_backward", "head", "head_backward"), 1),
    **dict.fromkeys(("shifted_boundary", "shifted_boundary_backward"), 1),
    **dict.fromkeys(("generate_mix_and_aggregate", "generate_mix_and_aggregate_backward"), 2),
    **dict.fromkeys(("aggregate_and_norm", "aggregate_and_norm_backward"), 1),
    **dict.fromkeys(("boundary", "boundary_backward"), 2),
}


@pytest.mark.parametrize("mesh", ["channels", "channels of one token", "channels on a square"])
def test_only_gates_of_shards_of_channels_are_summed(all_ranks: Seen, mesh: str) -> None:
    """Reads, writes and mixes communicate nothing. Shards of channels are uneven, and tokens may be sharded as well.

    A single token may have no dim of its own.
    """
    for rank, seen in enumerate(all_ranks[mesh]):
        # Two ranks have the channels of the first mesh, and the others are not in it.
        inside = mesh != "channels" or rank < 2
        assert seen == {"far": {}, "collectives": SUMS if inside else {}, "lines": 0}


def test_how_much_shards_of_channels_sum(all_ranks: Seen) -> None:
    """K = 8 logits and a square of each token, and their gradients; the input norm's one square and its two sums."""
    name = "generate_mix_and_aggregate"
    for seen in all_ranks["numbers"][:2]:
        assert seen[name] == [9, 1]
        assert seen[f"{name}_backward"] == [2, 9]
        assert seen[f"{name} without a norm"] == seen[f"{name}_backward without a norm"] == [9]


def test_gradients_through_the_wrappers_over_channels(all_ranks: Seen, job_device: str) -> None:
    """Each of two sublayers has one sum forward and one backward."""
    placements = [["P(sum)"], ["S(3)"], *3 * [["P(sum)"]]]
    for rank, seen in enumerate(all_ranks["autograd over channels"]):
        outside = {} if job_device == "cuda" else {"near": True, "placements": placements, "collectives": 0}
        assert seen == ({"near": True, "placements": placements, "collectives": 4} if rank < 2 else outside)
    both = [["P(sum)", "P(sum)"], ["S(1)", "S(3)"], *3 * [["P(sum)", "P(sum)"]]]
    for seen in all_ranks["compiled over channels"]:
        assert seen == {"near": True, "placements": both, "collectives": None}


def test_fewer_channels_than_ranks_are_gathered(all_ranks: Seen) -> None:
    if len(all_ranks["too few channels"]) < 4:
        pytest.skip("2 ranks have channels each; it takes 4 GPUs")
    for seen in all_ranks["too few channels"]:
        assert seen["far"] == {}
        assert seen["collectives"]["expand_combine"] == 2
        assert seen["lines"] > 0


def test_each_call_has_the_flags_of_its_own(all_ranks: Seen) -> None:
    none = [[0], "R", [0]]
    f, bias, post, x, res = [3, 5, 5], [5], [3, 5, 2], [3, 5, 2, 5], [3, 5, 2, 2]
    needed = [[shape, "S(0)", shape] for shape in (f, bias, post, x, res)]
    needed[1][1] = "P(sum)"
    for seen in all_ranks["not needed"]:
        first, second, third = seen["shapes"]
        assert first == needed
        assert second == [needed[0], none, needed[2], none, none]
        assert third == [none, none, none, needed[3], needed[4]]


@pytest.mark.parametrize(
    ("what", "placed", "collectives", "line"),
    [
        ("phi sharded", "S(0)", 1, "WARNING mhc::generate_mix_and_aggregate redistributes phi"),
        ("pending tokens", "R", 1, "INFO mhc::generate_mix_and_aggregate redistributes x"),
        ("pending f", "S(1)", 1, "INFO mhc::expand_combine redistributes f"),
        ("f elsewhere", "S(1)", 1, "WARNING mhc::expand_combine redistributes f"),
        ("x whole", "S(0)", 0, ""),
        ("implicit", "S(0)", 0, ""),
    ],
)
def test_what_is_placed_otherwise_is_redistributed(
    all_ranks: Seen, what: str, placed: str, collectives: int, line: str
) -> None:
    """One line of the log says so, however often the operator is called; what is whole is cut without communication."""
    for seen in all_ranks["mixed"]:
        right, first, count, lines = seen[what]
        assert (right, first, count) == (True, [placed], collectives)
        assert [told for told in lines if told.startswith(line)] == lines
        assert len(lines) == collectives


def test_shards_of_streams_are_gathered(all_ranks: Seen) -> None:
    for seen in all_ranks["mixed"]:
        right, first, count, lines = seen["over streams"]
        assert (right, first, count, len(lines)) == (True, ["R"], 2, 2)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("plain", f"TypeError: {NAME}: phi is a plain tensor of shape [8, 10], but x [3, 5, 2, 5] is placed as "),
        ("other mesh", f"ValueError: {NAME}: phi [8, 10] is placed as (Replicate()"),
        ("unknown", f"ValueError: {NAME}: bias [8] is placed as (Partial(nonsense)"),
        ("beyond", f"ValueError: {NAME}: bias [8] is placed as (Shard(dim=4)"),
        ("shape", f"ValueError: {NAME}: phi has shape [8, 9]; expected [K, n*C] = [K, 10]"),
        ("fewer tokens", "ValueError: mhc::aggregate: h_pre has shape [2, 5, 2]; expected [..., n] = [3, 5, 2]"),
    ],
)
@pytest.mark.parametrize("mesh", ["wrong", "wrong on a square"])
def test_all_ranks_refuse_wrong_arguments(all_ranks: Seen, mesh: str, what: str, told: str) -> None:
    for seen in all_ranks[mesh]:
        assert seen[what].startswith(told)
        assert what != "other mesh" or seen[what].endswith("expected one mesh for all arguments")


def test_rules_wait_for_dtensors() -> None:
    """Their import would take half a second, so rules come with it. Jobs import DTensors first."""
    code = """
import sys
import mhc_compile.ops
loaded = "torch.distributed.tensor" in sys.modules
import torch.distributed.tensor as tensors
from torch._library.simple_registry import singleton
rules = singleton.find("mhc::expand").torch_dispatch_rules
print(loaded, rules.find(tensors.DTensor) is not None)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[0] == "False True"


def test_rules_wait_until_somebody_imports_dtensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may ask before whether there are any, as often as it likes, and its import may fail."""
    name, called = "mhc_as_dtensors", list[bool]()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(compat.dtensors, "DTENSORS", name)
    before = list(sys.meta_path)
    for _ in range(2):  # two that wait for the same
        compat.when_dtensors_exist(lambda: called.append(name in sys.modules))
    assert importlib.util.find_spec(name) is None
    (tmp_path / f"{name}.py").write_text("import no_such_module")
    importlib.invalidate_caches()
    assert importlib.util.find_spec(name) is not None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)
    (tmp_path / f"{name}.py").write_text("")
    assert called == []
    importlib.invalidate_caches()
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, name, module)
    importlib.reload(module)
    assert (called, sys.meta_path) == ([True, True], before)


def test_without_rules_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise AttributeError("no such name in this torch")

    with mock.patch.dict(sys.modules, {"torch.distributed.tensor": ModuleType("tensor")}):
        compat.when_dtensors_exist(fail)
    (line,) = caplog.messages
    assert "operators do not take DTensors" in line
    assert "no such name in this torch" in line
