"""`HyperConnectionParallel` in plans of `parallelize_module`: two ranks compute what one process computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from mhc_compile.distributed import HyperConnectionParallel, style
from tests import needs
from tests.jobs import Seen, run_job
from tests.styles import BATCH, LAYERS, LENGTH, STREAMS, WIDTH

pytestmark = pytest.mark.slow
EAGER = ("rows", "tokens", "channels", "whole")
COMPILED = ("tokens, compiled", "channels, compiled")
SITES = sorted([*("expand_combine", "generate_mix_and_aggregate") * LAYERS, "head"])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, job_device: str) -> Seen:
    others = ("verified", "verified, wrong", "optimised", "handed on", "wrong")
    folder, cases = tmp_path_factory.mktemp("two"), (*EAGER, *COMPILED, *others)
    return run_job("tests.styles", folder, 2, *cases, seconds=240, device=job_device)


@pytest.mark.parametrize("case", [*EAGER, *COMPILED])
def test_two_ranks_train_as_one_process(two: Seen, case: str) -> None:
    """Results and gradients that two backward passes add up, against float64; gradients come out whole."""
    if case not in ("rows", "whole"):
        needs.flattened_shards()
    for rank in two[case]:
        assert rank["findings"] == []
        assert rank["placed"] == ["(Replicate(),) (Replicate(),)"]
        assert rank["own"] == 3 * (LAYERS + 1)
        assert rank["rewritten"] == (SITES if case in COMPILED else [])
        assert rank["left"] == []


def test_verify_compares_whole_results(two: Seen) -> None:
    """Of streams, parameters and inputs that are DTensors; and all ranks see what one rank gets wrong."""
    needs.flattened_shards()
    good, wrong = two["verified"], two["verified, wrong"]
    for rank in good + wrong:
        assert rank["rewritten"] == 2 * LAYERS
        # The streams, their gradient, and that of each parameter: three of a connection, and four of its layer.
        assert rank["compared"] == 2 + 7 * LAYERS
        assert rank["numbers"] == BATCH * LENGTH * STREAMS * WIDTH
        assert rank["changed"] == 0
    assert [(rank["ok"], rank["failures"]) for rank in good] == [(True, 0)] * 2
    assert [rank["ok"] for rank in wrong] == [False] * 2
    assert wrong[0]["failures"] == wrong[1]["failures"] > 0


def test_a_gradient_is_added_up_once(two: Seen) -> None:
    needs.flattened_shards()
    for rank in two["optimised"]:
        assert rank["backward"]["all_reduce"] == rank["parameters"]
        assert rank["step"] == 0


def test_what_comes_in_and_goes_out(two: Seen) -> None:
    for rank in two["handed on"]:
        others = ["Tensor", "int"]  # a mask and a number
        assert rank["S(0)"] == ["(Shard(dim=0),)"] * 2 + others
        assert rank["S(1)"] == ["(Shard(dim=1),)"] * 2 + others
        assert rank["S(-1)"] == ["(Shard(dim=3),)", "(Replicate(),)", *others]
        assert rank["R"] == ["(Replicate(),)"] * 2 + others
        # Plain tensors are this rank's part unless the plan says otherwise: of 2 x 6 tokens, the result has 12.
        assert rank["last"] == ["(Shard(dim=3),)", "(Shard(dim=2),)"]
        assert rank["made"] == [["Tensor", 2, 12, 4, 8], ["Tensor", 2, 6, 4]]


EXPECTED = "expected Shard of a dim of tokens, Shard(-1) for channels, or Replicate()"
MESSAGES = {
    "placement": f"ValueError: streams is Partial(sum), which no operator has; {EXPECTED}",
    "type": f"TypeError: streams is str; {EXPECTED}",
    "mesh": "ValueError: the mesh has 2 dimensions; expected one dimension, as in mesh['tp']",
    "sharded parameter": "ValueError: parameter phi [4, 8] is placed as (Shard(dim=1),) on the mesh of ranks [0, 1]; "
    "expected a plain parameter, or (Replicate(),) on the mesh of ranks [0, 1]",
    "parameter elsewhere": "ValueError: parameter phi [4, 8] is placed as (Replicate(),) on the mesh of ranks [1, 0]; "
    "expected a plain parameter, or (Replicate(),) on the mesh of ranks [0, 1]",
    "whole parameter": "nothing",
    "no streams": "TypeError: the first argument is int; expected streams [..., n, C]",
    "no arguments": "TypeError: the first argument is missing; expected streams [..., n, C]",
    "too few dims": "ValueError: the first argument is [2, 3]; expected streams [..., n, C]",
    "over n": f"ValueError: streams [2, 6, 4, 8] are to be Shard(dim=2), their n; {EXPECTED}",
    "beyond": f"ValueError: Shard(dim=7) of a tensor [2, 6, 4, 8]; {EXPECTED}",
    "sizes": "ValueError: streams [2, 5, 4, 8] are to be Shard(dim=1), but 5 does not divide by 2 ranks",
    "elsewhere": "ValueError: streams [2, 6, 4, 8] are placed as (Shard(dim=1),) on the mesh of ranks [1, 0]; "
    "expected the mesh of ranks [0, 1]",
    "dims": "ValueError: output_layouts has Shard(dim=3) for a result [2, 12, 4], which has no such dim",
    "list": "TypeError: a result is list; expected a tensor, or a tuple of tensors",
    "results": "ValueError: output_layouts has 2; expected one for each of 1 results",
}


@pytest.mark.parametrize("case", MESSAGES)
def test_messages(two: Seen, case: str) -> None:
    assert [rank[case] for rank in two["wrong"]] == [MESSAGES[case]] * 2


def test_a_plan_is_readable() -> None:
    assert str(HyperConnectionParallel()) == (
        "HyperConnectionParallel(S(1), input_layouts=S(1), output_layouts=None, use_local_output=False)"
    )


def test_all_cases_are_tested(two: Seen) -> None:
    assert MESSAGES.keys() == two["wrong"][0].keys()


def test_more_ranks_than_two(tmp_path: Path, job_device: str) -> None:
    """Three ranks share out six tokens, and no one has rows of its own."""
    needs.flattened_shards()
    for rank in run_job("tests.styles", tmp_path, 3, "tokens", device=job_device)["tokens"]:
        assert rank["findings"] == []


class Gates(NamedTuple):
    streams: Tensor
    gates: Tensor


class Named(nn.Module):
    def forward(self, x: Tensor) -> Gates:
        return Gates(x * 2, x.sum(-1))


class Tied(nn.Module):
    """One parameter has two names, and another is None."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = self.psi = nn.Parameter(torch.ones(STREAMS, WIDTH))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.phi + self.psi


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_parameter_with_two_names_stays_one(mesh: DeviceMesh) -> None:
    module = parallelize_module(Tied(), mesh, HyperConnectionParallel(Shard(1)))
    assert isinstance(module.phi, DTensor)
    assert module.phi is module.psi
    module(torch.ones(BATCH, LENGTH, STREAMS, WIDTH)).sum().backward()
    assert module.phi.grad is not None
    # Of x * phi + phi, at so many tokens.
    assert module.phi.grad.full_tensor().unique().tolist() == [2 * BATCH * LENGTH]


def test_a_parameter_of_two_modules_stays_one(mesh: DeviceMesh) -> None:
    model = nn.Sequential(Tied(), Tied())
    model[1].phi = model[1].psi = model[0].phi
    parallelize_module(model, mesh, {"*": HyperConnectionParallel(Shard(1))})
    assert isinstance(model[0].phi, DTensor)
    assert {id(module.phi) for module in model} == {id(model[0].phi)}
    model(torch.ones(BATCH, LENGTH, STREAMS, WIDTH)).sum().backward()
    assert [p.grad is not None for p in model.parameters()] == [True]


@pytest.mark.parametrize("options", [{}, {"use_local_output": True}, {"output_layouts": (Replicate(), None)}], ids=str)
def test_a_named_tuple_stays_one(options: dict[str, Any], mesh: DeviceMesh) -> None:
    module = parallelize_module(Named(), mesh, HyperConnectionParallel(Shard(1), **options))
    results = module(torch.ones(BATCH, LENGTH, STREAMS, WIDTH))
    assert isinstance(results, Gates)
    assert isinstance(results.streams, DTensor) != ("use_local_output" in options)
    assert tuple(results.gates.shape) == (BATCH, LENGTH, STREAMS)


def test_results_are_those_of_the_module_where_nothing_is_asked_for() -> None:
    results = [torch.ones(1)], {"gates": torch.ones(1)}
    assert HyperConnectionParallel()._leave(results) is results


@pytest.mark.parametrize(
    ("streams", "lines"), [(Shard(1), 1), (Shard(-1), 1), (Shard(0), 0), (Replicate(), 0)], ids=str
)
def test_what_this_torch_cannot_do_is_told(
    streams: Placement, lines: int, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(style.compat, "flattens_shards", lambda: False)
    style._tell_what_fails.cache_clear()
    for _ in range(2):
        HyperConnectionParallel(streams)._apply(nn.Identity(), SimpleNamespace(ndim=1))  # type: ignore[arg-type]
    assert [str(streams) in line and torch.__version__ in line for line in told] == [True] * lines
