"""Fused training steps: every model of the zoo, and whatever may surround one, gives what the unfused step gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mhc_compile.passes.fuse.joint import calls
from tests.passes.fused import (
    ALL,
    Checkpointed,
    Stack,
    assert_same,
    fused_and_not,
    fused_like_eager,
    judge,
    program,
    streams,
)
from tests.zoo import ZOO, check
from tests.zoo.common import BATCH, LENGTH, WIDTH, CheapLayer

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo instantiates autograd.Function while it traces one, which torch itself warns about.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # After a graph break Dynamo looks at the .grad of the tensors that the second graph is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

# What has no operator to fuse yet: see tests/passes/test_zoo.py.
NOT_REWRITTEN = {
    *("megatron-main-recomputing", "lucidrains", "lucidrains-log", "hyper-connections", "hyper-connections-log"),
}
FORMS = [name for name in ZOO if name not in NOT_REWRITTEN]
WITHOUT_ITERATIONS = {"independent", "tilekernels", "tilekernels-weighted", "hunyuan"}


def _counts(name: str, layers: int) -> dict[str, int]:
    """What a complete fusion of a model of the zoo comes to: a head is one more reader of the streams."""
    readers = layers + len(ZOO[name].once)
    return {"accumulate": readers, "boundary": readers - 1, "boundary_backward": readers - 1}


def _x(dtype: torch.dtype = torch.float32, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=dtype)


def _small(name: str, **changes: Any) -> nn.Module:
    """Few Sinkhorn steps: they are one operator, and cost eager code and its float64 evaluation most of their time."""
    iterations = {} if name in WITHOUT_ITERATIONS else {"iterations": 3}
    return ZOO[name].build(**{"layers": 2} | iterations | changes)


@pytest.mark.parametrize("name", FORMS)
def test_float32_is_as_accurate_as_eager(name: str) -> None:
    fused = judge(_small(name), (_x(),))
    assert fused.counts == _counts(name, layers=2)
    # One read is in front of all writes. No other is computed beside its boundary.
    mixes = [node for graph in fused.graphs for node in calls(graph, "generate_mix_and_aggregate", "head")]
    assert len([node for node in mixes if node.users]) == 1


@pytest.mark.parametrize("name", ["deepseek", "transformer-engine", "megatron-dev"])
def test_fused_equals_unfused(name: str) -> None:
    fused_and_not(_small(name, layers=3), (_x(),))


@pytest.mark.parametrize("name", ["deepseek", "transformer-engine", "megatron-dev"])
def test_bfloat16_is_as_accurate_as_eager(name: str) -> None:
    fused = judge(_small(name).bfloat16(), (_x(torch.bfloat16),))
    assert fused.counts["accumulate"] == _counts(name, layers=2)["accumulate"]


@pytest.mark.parametrize("name", ["deepseek", "liger", "tilekernels"])
def test_bfloat16_streams_with_float32_parameters(name: str) -> None:
    model = _small(name)
    for module in model.modules():
        if isinstance(module, CheapLayer):
            module.bfloat16()
    if hasattr(model, "embedding"):
        model.embedding = nn.Parameter(model.embedding.detach().bfloat16())
    fused = judge(model, (_x(torch.bfloat16),))
    assert fused.counts["accumulate"] == _counts(name, layers=2)["accumulate"]


@pytest.mark.parametrize("name", ["deepseek", "megatron-main"])
@pytest.mark.parametrize("count", [2, 5])
def test_stream_counts(name: str, count: int) -> None:
    fused = fused_and_not(_small(name, streams=count), (_x(),))
    assert fused.counts == _counts(name, layers=2)


@pytest.mark.parametrize("name", ["deepseek", "transformer-engine", "megatron-dev"])
def test_dynamic_shapes(name: str) -> None:
    model = _small(name)
    fused = program(model, dynamic=True)
    for batch, length in ((2, 8), (3, 5)):
        x = _x(batch=batch, length=length)
        assert_same(check.evaluate(fused.call, model, (x,)), check.evaluate(model, model, (x,)))
    assert fused.counts["accumulate"] % _counts(name, layers=2)["accumulate"] == 0
    once = len(fused.graphs)
    assert fused.counts == {key: once * count for key, count in _counts(name, layers=2).items()}


def test_the_streams_need_no_gradient() -> None:
    model = Stack()
    x = streams()
    fused = program(model)
    results = []
    for each in (fused.call, model):
        model.zero_grad()
        (out,) = each(x)
        out.square().sum().backward()
        results.append({"out": out.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()})
    assert_same(*results)
    # There is no gradient of the first streams to accumulate.
    assert fused.counts == {"accumulate": 2, "boundary": 2, "boundary_backward": 2}


FROZEN: dict[str, Callable[[str], bool]] = {
    "biases and the last phi": lambda name: "bias" in name or name == "sublayers.2.phi",
    "all of the first sublayer": lambda name: name.startswith("sublayers.0"),
    "all of the second sublayer": lambda name: name.startswith("sublayers.1"),
    "all of the last sublayer": lambda name: name.startswith("sublayers.2"),
    "all connections": lambda name: ".layer." not in name,
    "all layers": lambda name: ".layer." in name,
    "all": lambda name: True,
}


@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_parameters(frozen: str) -> None:
    model = Stack()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[frozen](name))
    fused = fused_like_eager(model, (streams(),))
    assert fused.counts == {"accumulate": 3, "boundary": 2, "boundary_backward": 2}


OBSERVERS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "mean": lambda x: x.mean(),
    "auxiliary loss": lambda x: x.square().sum(),
    "detached": lambda x: x.detach().norm(),
    "one stream": lambda x: x[..., 0, :],
    "copy": lambda x: x + 1,
}


@pytest.mark.parametrize("observer", OBSERVERS)
def test_streams_with_another_reader(observer: str) -> None:
    fused = fused_like_eager(Stack(observe=OBSERVERS[observer]), (streams(),))
    seen = observer != "detached"
    # Its gradient is one more summand, which is there before the operators' are. A combine that adds it to its own
    # is no part of a boundary: the first one alone, whose streams nobody else reads, is.
    assert fused.counts == {"accumulate": 5 if seen else 3, "boundary": 2, "boundary_backward": 1 if seen else 2}


def _loss_of(outputs: tuple[Tensor, ...], which: tuple[int, ...]) -> Tensor:
    total = torch.zeros(())
    for index in which:
        total = total + outputs[index].square().sum()
    return total


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (1, 3), (0, 1, 2, 3)])
def test_gradients_flow_into_some_outputs_only(which: tuple[int, ...]) -> None:
    model, x = Stack(observe=lambda x: x), streams().requires_grad_()
    fused = program(model)
    results = []
    for each in (fused.call, model):
        model.zero_grad()
        x.grad = None
        _loss_of(each(x), which).backward()
        # Compiled backward passes fill in zeros where eager's stop.
        found = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}
        results.append({name: torch.zeros(()) if grad is None else grad.clone() for name, grad in found.items()})
    compiled, eager = results
    reached = {name: value for name, value in eager.items() if value.dim()}
    assert_same({name: compiled[name] for name in reached}, reached)
    assert not any(compiled[name].any() for name in eager.keys() - reached.keys())


def test_retained_graphs() -> None:
    model, x = Stack(), streams().requires_grad_()
    fused = program(model)
    (out,) = fused.call(x)
    first = torch.autograd.grad(out.square().sum(), (x, *model.parameters()), retain_graph=True)
    again = torch.autograd.grad(out.square().sum(), (x, *model.parameters()), retain_graph=True)
    twice = torch.autograd.grad(2 * out.square().sum(), (x, *model.parameters()))
    (eager,) = model(x)
    expected = torch.autograd.grad(eager.square().sum(), (x, *model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert_same(dict(enumerate(first)), dict(enumerate(expected)))  # type: ignore[arg-type]
    # A factor of two changes no mantissa.
    assert all(torch.equal(2 * a, b) for a, b in zip(first, twice, strict=True))


def test_gradients_accumulate_over_micro_batches() -> None:
    model, batches = Stack(), [streams() for _ in range(3)]
    fused = program(model)
    sums = []
    for each in (fused.call, model):
        model.zero_grad()
        for batch in batches:
            each(batch)[0].square().sum().backward()
        sums.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert_same(*sums)
    assert len(fused.graphs) == 1


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["deepseek", "megatron-main"])
def test_inference(name: str, around: Callable[[], Any]) -> None:
    model = _small(name).eval()
    fused, unfused, x = program(model), program(model, ()), _x()
    with around():
        results = [dict(enumerate(each(x))) for each in (fused.call, unfused.call, model)]
    # One operator after the other, in the same order: not a bit differs.
    assert all(torch.equal(results[0][index], results[1][index]) for index in range(2))
    assert_same(results[0], results[2])  # type: ignore[arg-type]
    assert fused.counts == {"boundary": _counts(name, layers=2)["boundary"]}


@pytest.mark.parametrize("name", ALL)
def test_each_fusion_alone(name: str) -> None:
    model, x = Stack(), streams()
    alone = program(model, (name,))
    assert_same(check.evaluate(alone.call, model, (x,)), check.evaluate(model, model, (x,)))
    # Without accumulation the gradient of the streams has two readers, and is no boundary's.
    assert alone.counts == {"accumulate": {"accumulate": 3}, "boundary": {"boundary": 2}}.get(name, {})


@pytest.mark.parametrize(
    ("where", "boundaries"),
    # What is between two checkpoint regions belongs to neither: streams that are kept.
    [("sublayers", 0), ("all", 2), ("layers", 2)],
)
def test_checkpointing(where: str, boundaries: int) -> None:
    fused = fused_like_eager(Checkpointed(where), (streams(),))
    found = fused.counts
    assert found.get("boundary", 0) == boundaries
    assert found["accumulate"] == 3
    assert found["boundary_backward"] == 2


def test_checkpointed_regions_keep_their_tags() -> None:
    fused = fused_like_eager(Checkpointed("all"), (streams(),))
    (graph,) = fused.graphs
    forward = [
        node for node in graph.nodes if str(node.target) in ("mhc.boundary.default", "mhc.expand_combine.default")
    ]
    assert len(forward) == 3
    assert all("recompute" in node.meta and "ac_graph_id" in node.meta for node in forward)
