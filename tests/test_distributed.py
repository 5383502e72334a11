"""Replicas beside FSDP2: gradients, norms and optimizers of ranks are those of one process. And models in DDP."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import mhc_compile
from mhc_compile.distributed import replicate
from mhc_compile.nn import HyperHead
from tests import sharded
from tests.jobs import Seen, run_job
from tests.sharded import LAYERS, WIDTH

LAYER = ["expand_combine", "generate_mix_and_aggregate"]
# phi, scale and bias of each layer and of the head.
REPLICAS = 3 * (LAYERS + 1)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_dynamo")]


def _job(folder: Path, device: str, ranks: int, *cases: str) -> Seen:
    return run_job("tests.sharded", folder, ranks, *cases, seconds=240, device=device)


SHARDED = {
    # The sites of a report. Layers that are compiled one by one have sites of their own.
    "eager": [],
    "offloaded": [],
    "layers": LAYER * LAYERS,
    "bfloat16": LAYER * LAYERS,
    "stored in bfloat16": [],
    "checkpointed": LAYER * LAYERS,
    "model": [*LAYER * LAYERS, "head"],
    "one unit": [*LAYER * LAYERS, "head"],
}
DDP = ("ddp", "ddp, static")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, job_device: str) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def two(folder: Path, job_device: str) -> Seen:
    others = ("accumulated", "divided", "missing", "forgotten", "foreach", "fused", "saved", "made on meta")
    return _job(folder, job_device, 2, *SHARDED, *others, *DDP)


@pytest.fixture(scope="module")
def four(folder: Path, job_device: str, two: Seen) -> Seen:
    """HSDP on a mesh of 2 copies with 2 shards; it loads the checkpoint of two."""
    return _job(folder, job_device, 4, "eager", "stored in bfloat16", "accumulated", "missing", "foreach", "loaded")


@pytest.fixture
def seen(ranks: int, request: pytest.FixtureRequest) -> Seen:
    """What so many ranks saw. With two, a test needs no more GPUs."""
    found: Seen = request.getfixturevalue({2: "two", 4: "four"}[ranks])
    return found


def _agree(seen: list[dict[str, Any]], case: str, rewritten: list[str] | None = None) -> None:
    rewritten = SHARDED[case] if rewritten is None else rewritten
    for rank in seen:
        assert rank["unlike"] == []
        assert sorted(rank["rewritten"]) == sorted(rewritten)
        assert rank["left"] == []
        assert rank["dtypes"] == ["torch.bfloat16"] * (case == "stored in bfloat16") + ["torch.float32"]
        # One broadcast in the beginning, and one all-reduce for all gradients.
        assert rank["seen"] == ["broadcast", "all_reduce"]
        assert rank["norm"] == seen[0]["norm"]


@pytest.mark.parametrize("case", SHARDED)
def test_gradients_are_those_of_one_process(two: Seen, case: str) -> None:
    _agree(two[case], case)


@pytest.mark.parametrize("case", ["eager", "stored in bfloat16"])
def test_with_hsdp(four: Seen, case: str) -> None:
    _agree(four[case], case)


@pytest.mark.thorough
def test_with_hsdp_and_compiled_layers(tmp_path: Path, job_device: str) -> None:
    job = _job(tmp_path, job_device, 4, "layers", "bfloat16")
    for case in ("layers", "bfloat16"):
        _agree(job[case], case, LAYER * LAYERS)


@pytest.mark.parametrize("case", SHARDED)
def test_the_norm_is_that_of_one_process(two: Seen, case: str) -> None:
    for rank in two[case]:
        # Both are sums of squares of some thousand float32 numbers. Gradients in bfloat16 have errors of 2^-9 each.
        assert rank["norm"] <= (2**-9 if "bfloat16" in case else 2e-6)
        assert rank["clipped"] == pytest.approx(0.01, rel=2**-9 if "bfloat16" in case else 1e-5)


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_are_accumulated_without_an_exchange(seen: Seen, ranks: int, job_device: str) -> None:
    partial, whole = [", ".join([kind] * (ranks // 2)) for kind in ("Partial(avg)", "Replicate()")]
    trailing = "," if ranks == 2 else ""
    for rank in seen["accumulated"]:
        assert rank["after 0"] == rank["after 1"] == [f"({partial}{trailing})"]
        assert rank["after 2"] == ["all_reduce", f"({whole}{trailing})"]
        assert rank["unlike"] == []
        assert rank["unlike with all exchanged"] == []


def test_the_divisor_of_gradients_is_that_of_the_unit(two: Seen) -> None:
    assert [rank["unlike"] for rank in two["divided"]] == [[], []]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_without_gradients_hold_nobody_up(seen: Seen, ranks: int, job_device: str) -> None:
    for rank in seen["missing"]:
        assert rank["seen"] == ["all_reduce", "all_reduce"]
        # Two float32 evaluations in different orders: a mean of 2 or 4 ranks.
        assert rank["distance"] < 1e-6
        assert rank["without"] == rank["of spare"] == 3


def test_gradients_that_were_not_exchanged_do_no_harm(two: Seen) -> None:
    for rank in two["forgotten"]:
        # Two float32 evaluations in different orders: a mean of 2 ranks' gradients.
        assert rank["distance"] < 1e-5


@pytest.mark.parametrize("case", ["foreach", "fused"])
def test_optimizers_take_replicas_and_shards_together(two: Seen, case: str) -> None:
    for rank in two[case]:
        assert rank == {"unlike": [], "equal": True}


def test_optimizers_with_hsdp(four: Seen) -> None:
    assert four["foreach"] == [{"unlike": [], "equal": True}] * 4


def test_values_that_ranks_draw_apart_are_made_equal(two: Seen) -> None:
    assert two["made on meta"] == [{"equal": True, "placements": "(Replicate(),)"}] * 2


def test_a_checkpoint_is_read_by_more_ranks(two: Seen, four: Seen) -> None:
    assert two["saved"] == [{"keys": True}] * 2
    assert four["loaded"] == [{"names": True, "unequal": []}] * 4


def test_a_checkpoint_is_read_by_one_process(two: Seen, folder: Path, mesh: DeviceMesh) -> None:
    assert sharded.loaded(folder) == {"names": True, "unequal": []}


@pytest.mark.parametrize("case", DDP)
def test_ddp(two: Seen, case: str) -> None:
    for rank in two[case]:
        assert rank == {"unlike": [], "rewritten": sorted([*LAYER * LAYERS, "head"]), "left": []}


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_replica_is_a_dtensor_for_optimizers_and_plain_for_the_model(mesh: DeviceMesh) -> None:
    model = sharded.Model()
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    replicas = replicate(model, mesh)
    assert len(replicas) == REPLICAS
    for name, parameter in model.named_parameters():
        assert (parameter in replicas) == (".layer." not in name and not name.startswith("out."))
        assert isinstance(parameter, DTensor) == (parameter in replicas)
    assert {name: isinstance(value, DTensor) for name, value in model.state_dict().items()} == {
        name: parameter in replicas for name, parameter in model.named_parameters()
    }
    for name, value in model.state_dict().items():
        assert torch.equal(sharded.whole(value), plain[name])
    assert not isinstance(model.head.phi, DTensor)
    assert isinstance(model.head, HyperHead)
    # Dynamo shares what it compiles between layers of one class.
    assert len({type(layer) for layer in model.layers}) == 1


def test_state_dicts_are_saved_and_models_are_not(mesh: DeviceMesh, tmp_path: Path) -> None:
    model = sharded.Model()
    replicate(model, mesh)
    torch.save(model.state_dict(), tmp_path / "state")
    for name, value in torch.load(tmp_path / "state", weights_only=False).items():
        assert torch.equal(sharded.whole(value), sharded.whole(model.state_dict()[name]))
    with pytest.raises(pickle.PicklingError):  # docs/distributed.md says so
        torch.save(model, tmp_path / "model")


def test_all_sites_of_a_model_with_replicas_are_found(mesh: DeviceMesh) -> None:
    model = sharded.Model()
    before = mhc_compile.explain(model, torch.randn(2, 5, WIDTH))
    replicate(model, mesh)
    after = mhc_compile.explain(model, torch.randn(2, 5, WIDTH))
    assert [site.op for site in after.rewritten] == [site.op for site in before.rewritten]
    assert (after.declined, after.errors) == ([], [])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_waits_for_no_average(tmp_path: Path) -> None:
    """Of gradients; where each replica has one."""
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = sharded.Model().cuda()
        replicas = replicate(model, init_device_mesh("cuda", (1,)))
        for mode in ("default", "error"):  # the first time, kernels are loaded
            loss = model(torch.randn(2, 5, WIDTH, device="cuda"))["out"].sum()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode(mode)
            loss.backward()
            torch.cuda.set_sync_debug_mode("default")
        assert all(replica.grad is not None for replica in replicas)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()


def test_parameters_are_chosen_by_a_function_or_one_by_one(mesh: DeviceMesh) -> None:
    class Own(nn.Module):
        """A parameter that two modules share, one in another dtype, and one that gets no gradient."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight
            self.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
            self.still = nn.Parameter(torch.ones(3), requires_grad=False)
            self.first.weight.mark = "kept"  # type: ignore[attr-defined]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)) * self.low.float() + self.still

    model = Own()
    exact = Own()
    exact.load_state_dict(model.state_dict())
    assert len(replicate(model, mesh, lambda name, parameter: name.endswith("weight"))) == 1
    assert len(replicate(model, mesh, [model.low, model.still])) == 2
    weight = dict(model.named_parameters())["first.weight"]
    assert weight is model.second._parameters["weight"]
    assert weight.mark == "kept"  # type: ignore[attr-defined]
    x = torch.randn(2, 3)
    model(x).sum().backward()
    exact(x).sum().backward()
    for name, parameter in model.named_parameters():
        expected = exact.get_parameter(name).grad
        if expected is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(sharded.whole(parameter.grad), expected)  # type: ignore[arg-type]


def test_a_gradient_that_nobody_has_averaged_is_partial(mesh: DeviceMesh) -> None:
    """As when the backward pass begins at an output that is not the model's."""
    model = sharded.Model()
    replicate(model, mesh)
    model.head(torch.randn(2, 4, WIDTH)).sum().backward()
    gradient = dict(model.named_parameters())["head.phi"].grad
    assert isinstance(gradient, DTensor)
    assert gradient.placements != (Replicate(),)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_copied_model_averages_gradients_of_its_own(mesh: DeviceMesh, device: str) -> None:
    """Copied before its first forward pass, or later."""
    with torch.device(device):
        model = HyperHead(WIDTH, 4)
    replicate(model, mesh)
    copied = copy.deepcopy(model)
    if device == "meta":
        for each in (model, copied):
            each.to_empty(device="cpu")
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.fill_(0.5)
    for each in (copied, copy.deepcopy(copied)):
        each(torch.randn(2, 4, WIDTH)).sum().backward()
        gradients = [parameter.grad for parameter in each.parameters()]
        assert all(isinstance(g, DTensor) and g.placements == (Replicate(),) for g in gradients)
        assert len(each._forward_pre_hooks) == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(model._forward_pre_hooks) == (device == "meta")


def test_messages(mesh: DeviceMesh) -> None:
    model = sharded.Model()
    with pytest.raises(TypeError, match=r"^model is str; expected a torch\.nn\.Module$"):
        replicate("model", mesh)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^mesh is tuple; expected the DeviceMesh that fully_shard gets$"):
        replicate(model, (1,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^mesh has no names of dimensions; expected mesh_dim_names"):
        replicate(model, init_device_mesh("cpu", (1, 1)))
    with pytest.raises(ValueError, match=r"^parameters is None, and model has no HyperConnection and no HyperHead"):
        replicate(nn.Linear(2, 2), mesh)
    with pytest.raises(ValueError, match=r"^parameters is a function that is true of none of the model's 2; expected"):
        replicate(nn.Linear(2, 2), mesh, lambda name, parameter: False)
    with pytest.raises(ValueError, match=r"^parameters is empty; expected parameters of hyper-connections"):
        replicate(model, mesh, [])
    for other in (3, model.head):
        with pytest.raises(
            TypeError, match=r"^parameters is (int|HyperHead); expected parameters of hyper-connections"
        ):
            replicate(model, mesh, other)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^parameters has a str at 0; expected torch\.nn\.Parameter$"):
        replicate(model, mesh, ["head.phi"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"^parameters has one at 1 that is not the model's"):
        replicate(model, mesh, [model.head.phi, nn.Parameter(torch.ones(2))])
    replicate(model, mesh)
    with pytest.raises(ValueError, match=r"^parameters has 'layers\.0\.phi', which is a DTensor; expected a plain"):
        replicate(model, mesh)
