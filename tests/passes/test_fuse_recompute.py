"""Recompute: which tensors a training step keeps, and that the step stays what it was."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mhc_compile.passes.fuse.joint import is_operator
from tests.passes.fused import ALL, Checkpointed, Program, Stack, assert_same, program, streams
from tests.zoo import ZOO, check
from tests.zoo.common import BATCH, LENGTH, STREAMS, WIDTH

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LAYERS = 6
# Streams that one layer hands to the next; the first are the input's, the last the output's.
INNER = LAYERS - 1


def _saved(call: Callable[..., Any], model: nn.Module, x: Tensor) -> list[Tensor]:
    """The tensors that a training step keeps for its backward pass, parameters and input left out."""
    found: list[Tensor] = []

    def pack(value: Tensor) -> Tensor:
        found.append(value)
        return value

    call(x)  # compiled now, where fake tensors would be seen too
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        call(x)
    given = {value.data_ptr() for value in (*model.parameters(), x)}
    return list({value.data_ptr(): value for value in found if value.data_ptr() not in given}.values())


def _bytes(saved: list[Tensor]) -> int:
    return sum(value.untyped_storage().nbytes() for value in saved)


def _kept_streams(saved: list[Tensor], x: Tensor) -> int:
    return sum(value.numel() == x.numel() for value in saved)


def _thorough(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.thorough)


# The streams after every k-th layer are kept, of five inner ones.
KEPT = {1: 5, 2: 2, 3: 1, 4: 1, 5: 1, 6: 0, 100: 0}


@functools.cache
def _saved_without(names: tuple[str, ...]) -> tuple[int, int]:
    """Bytes and streams that a step keeps where nothing is recomputed."""
    model, x = Stack(LAYERS), streams()
    saved = _saved(program(model, names).call, model, x)
    return _bytes(saved), _kept_streams(saved, x)


# Which streams go is decided without asking what fusion made of their readers: two lengths show that it is so.
@pytest.mark.parametrize(
    ("layers", "names"),
    [
        *((layers, ALL) for layers in KEPT),
        *((layers, ()) if layers in (2, 6) else _thorough(layers, ()) for layers in KEPT),
    ],
)
def test_only_entry_streams_are_kept(layers: int, names: tuple[str, ...]) -> None:
    model, x = Stack(LAYERS), streams()
    whole, inner = _saved_without(names)
    blocks = program(model, names, layers)
    fewer = _saved(blocks.call, model, x)
    assert (inner, _kept_streams(fewer, x)) == (INNER, KEPT[layers])
    # All that goes are the streams, and nothing comes in their place.
    assert whole - _bytes(fewer) == (INNER - KEPT[layers]) * x.nbytes
    assert blocks.counts.get("recompute", 0) == INNER - KEPT[layers]


# How long a block is does not ask whose combine it is: each length with two of the models, the rest for good measure.
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        *(("deepseek", 2), ("deepseek", "auto"), ("megatron-main", 2), ("megatron-main", 4)),
        *(("transformer-engine", 4), ("transformer-engine", "auto")),
        *(_thorough("deepseek", 4), _thorough("megatron-main", "auto"), _thorough("transformer-engine", 2)),
    ],
)
def test_results_stay(name: str, layers: int | str) -> None:
    model, x = ZOO[name].build(layers=4, iterations=3), torch.randn(BATCH, LENGTH, WIDTH)
    blocks = program(model, layers=layers)
    assert_same(check.evaluate(blocks.call, model, (x,)), check.evaluate(model, model, (x,)))


def test_forward_is_the_same_and_backward_too() -> None:
    """The combine computes the same bits again."""
    model, x = Stack(LAYERS), streams()
    expected = check.evaluate(program(model).call, model, (x,))
    results = check.evaluate(program(model, layers=3).call, model, (x,))
    assert all(torch.equal(results[name], value) for name, value in expected.items())


def _recomputed(blocks: Program) -> int:
    return blocks.counts.get("recompute", 0)


def test_off_by_default() -> None:
    model, x = Stack(LAYERS), streams()
    whole = program(model)
    check.evaluate(whole.call, model, (x,))
    assert "recompute" not in whole.counts
    assert not any("recompute" in node.meta for graph in whole.graphs for node in graph.nodes)


# Blocks of 1, 1, 2 and 3. Of ten layers with three streams, blocks would have 2.
@pytest.mark.parametrize("count", [1, 2, 5, 10])
def test_auto(count: int) -> None:
    model, x = Stack(count), streams()
    blocks = program(model, layers="auto")
    check.evaluate(blocks.call, model, (x,))
    length = max(1, round(math.sqrt(STREAMS * count / (STREAMS + 2))))
    # One in `length` is kept, and the last ones are the output.
    assert _recomputed(blocks) == (count - 1) - (count - 1) // length


def test_only_combines_run_again() -> None:
    model, x = Stack(LAYERS), streams()
    blocks = program(model, layers=3)
    check.evaluate(blocks.call, model, (x,))
    marked = [node for node in blocks.graphs[0].nodes if "recompute" in node.meta]
    assert len(marked) == _recomputed(blocks) == 4
    assert all(is_operator(node, "expand_combine") for node in marked)


@pytest.mark.slow
def test_dynamic_shapes() -> None:
    model = Stack(LAYERS)
    blocks = program(model, layers=3, dynamic=True)
    for length in (5, 8):
        x = streams(length)
        assert_same(check.evaluate(blocks.call, model, (x,)), check.evaluate(model, model, (x,)))
    assert _recomputed(blocks) == 4 * len(blocks.graphs)
    assert _kept_streams(_saved(blocks.call, model, x), x) == 1


def test_inference_computes_nothing_again() -> None:
    model, x = Stack(LAYERS), streams()
    blocks = program(model, layers=2)
    with torch.no_grad():
        torch.testing.assert_close(blocks.call(x)[0], model(x)[0], rtol=1e-4, atol=1e-4)  # float32, other orders
    assert blocks.counts == {"boundary": INNER}


def test_streams_that_are_there_anyway_are_kept() -> None:
    """What is an output, or read by other code, begins a new block."""
    for observe in (lambda x: x, lambda x: x.mean()):
        torch._dynamo.reset()
        model, x = Stack(4, observe), streams()
        blocks = program(model, layers=4)
        assert_same(check.evaluate(blocks.call, model, (x,)), check.evaluate(model, model, (x,)))
        assert _recomputed(blocks) == 0


@pytest.mark.parametrize("frozen", ["sublayers.0", "sublayers.2", "sublayers."])
def test_frozen_layers(frozen: str) -> None:
    model, x = Stack(4), streams()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    blocks = program(model, layers=4)
    assert_same(check.evaluate(blocks.call, model, (x,)), check.evaluate(model, model, (x,)))
    assert _recomputed(blocks) == 3


@pytest.mark.parametrize(
    ("where", "count"),
    # Inside the user's regions nothing is left to do; around a sublayer's own layer all inner streams are.
    [("sublayers", 0), ("all", 0), ("layers", 2)],
)
def test_on_top_of_checkpointing(where: str, count: int) -> None:
    model, x = Checkpointed(where), streams()
    blocks, whole = program(model, layers=3), program(model)
    assert_same(check.evaluate(blocks.call, model, (x,)), check.evaluate(model, model, (x,)))
    assert _recomputed(blocks) == count
    fewer, saved = _saved(blocks.call, model, x), _saved(whole.call, model, x)
    assert _bytes(fewer) <= _bytes(saved)
    assert _kept_streams(saved, x) - _kept_streams(fewer, x) == count


@pytest.mark.parametrize("count", [2, 3])
def test_what_checkpoints_hand_over_is_kept(count: int) -> None:
    """Streams that are computed again need f, and the checkpointed layers do not run once more to make it."""
    model, x = Stack(3), streams()
    for sublayer in model.sublayers[:count]:
        forward = sublayer.layer.forward
        sublayer.layer.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=False)
    blocks, whole = program(model, layers=3), program(model)
    kept, without = (
        sum(value.shape == (BATCH, LENGTH, WIDTH) for value in _saved(each.call, model, x)) for each in (blocks, whole)
    )
    assert _recomputed(blocks) == 2
    assert kept - without == 2
