"""What a call of a shared sublayer takes and returns, and what stays where it is; nothing of a result changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mhc_compile import compat, passes, records
from tests.passes.fused import Stack, evaluate
from tests.passes.lowering import any_number
from tests.passes.sharing import (
    LAYERS,
    WIDTH,
    N,
    calls_of_each,
    make_inputs,
    plain_layer,
    program_of,
    share,
    sublayer_calls,
    trace,
)
from tests.zoo import check
from tests.zoo.common import STREAMS, CheapLayer, random_parameter
from tests.zoo.common import WIDTH as ZOO_WIDTH

pytestmark = pytest.mark.usefixtures("short_sublayers")


def test_what_backward_needs() -> None:
    """Views of weights, of the layer's input, of results, of each other, some twice; and a result that has its own."""

    def layer(u: Tensor, w: Tensor, number: int) -> Any:
        turned = w.t()
        v = u @ turned
        first, second = torch.tanh(v).split(WIDTH // 2, -1)
        f = torch.cat([second, first], -1) * 2
        return f.view(-1, WIDTH), turned, u.unsqueeze(0), v, v.t(), v.t()[1:], first, second, f

    assert calls_of_each(layer) == [LAYERS]


def test_what_one_layer_alone_returns() -> None:
    kept: dict[int, Tensor] = {}

    def layer(u: Tensor, w: Tensor, number: int) -> Any:
        v = torch.tanh(u @ w)
        kept[number] = v
        # The second layer's is read by the fourth.
        return v * 2 + (kept[1] if number == 3 else w[:3])

    assert calls_of_each(layer) == [3]


def test_one_of_several_results() -> None:
    def layer(u: Tensor, w: Tensor, number: int) -> Any:
        values, indices = (u @ w).sort(-1)
        return torch.tanh(values) * 2, indices

    assert calls_of_each(layer) == [LAYERS]


def test_complex_numbers_stay() -> None:
    """Calls take no tensors whose conjugation is put off."""

    def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
        z = torch.view_as_complex((torch.tanh(u @ w) * 2).view(3, WIDTH // 2, 2))
        return torch.relu(torch.view_as_real(z.conj() * z * 2j).flatten(-2) * 3) @ w

    module = share(program_of(layer), make_inputs())
    assert len(sublayer_calls(module)) == 2 * LAYERS
    for node in sublayer_calls(module):
        body = getattr(module, str(node.args[1]))
        assert not any(inner.meta["val"].is_complex() for inner in body.graph.nodes if inner.op != "output")


def test_what_a_dispatcher_refuses_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation does not fail because of a call."""
    outline = sys.modules["mhc_compile.passes.share.outline"]

    def refuse(*given: Any) -> Any:
        raise NotImplementedError("no kernel")

    with monkeypatch.context() as patch:
        patch.setattr(outline.torch.ops.higher_order, "invoke_subgraph", refuse)
        assert calls_of_each(plain_layer) == []
    with monkeypatch.context() as patch:
        patch.setattr(outline.compat, "same_strides", lambda left, right: False)
        assert calls_of_each(plain_layer) == []


def test_results_of_other_graphs_stay() -> None:
    """With the calls of those."""

    def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
        v = torch.tanh(u @ w) * 2
        (v,) = torch.cond(v.sum() > 0, lambda v: (v * 2,), lambda v: (v - 1,), (v,))
        return torch.relu(v * 3) @ w

    assert len(sublayer_calls(share(program_of(layer), make_inputs()))) == 2 * LAYERS


def test_a_layer_that_returns_its_input() -> None:
    def layer(u: Tensor, w: Tensor, number: int) -> Any:
        return u.view(1, 3, WIDTH).squeeze(0), torch.tanh(u @ w) * 2

    assert calls_of_each(layer) == [LAYERS]


def test_what_writes_stays() -> None:
    """And what is around it is shared."""

    def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
        v = torch.tanh(u @ w) * 2
        v.add_(1)
        return torch.relu(v * 3) + w[:3]

    inputs = make_inputs()
    module = make_fx(program_of(layer), tracing_mode="fake")(*inputs)
    before = module(*inputs)
    passes.share(module.graph)
    module.recompile()
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(torch.ops.aten.add_.Tensor) == LAYERS
    assert len(sublayer_calls(module)) == 2 * LAYERS
    assert torch.equal(module(*inputs)[0], before[0])


def test_a_cache_is_written_in_place() -> None:
    """What an input becomes stays with it, and what is around that is shared. Else all of the cache would be copied."""
    caches = [torch.randn(8, WIDTH) for _ in range(LAYERS)]

    def run(x: Tensor, post: Tensor, *tensors: Tensor) -> list[Tensor]:
        weights, rooms = tensors[:LAYERS], tensors[LAYERS:]
        new = []

        def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
            keys = torch.slice_scatter(rooms[number], torch.tanh(u @ w) * 2, 0, 2, 5)
            new.append(keys)
            return torch.relu(u @ keys.t() * 3) @ keys

        results = program_of(layer)(x, post, *weights)
        for room, keys in zip(rooms, new, strict=True):
            room.copy_(keys)
        return results

    module = trace(run, make_inputs() + caches)
    expected = run(*make_inputs(), *(cache.clone() for cache in caches))
    passes.share(module.graph)
    module.graph.lint()
    module.recompile()
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(torch.ops.aten.slice_scatter.default) == LAYERS
    assert len(sublayer_calls(module)) == 2 * LAYERS
    assert torch.equal(module(*make_inputs(), *caches)[0], expected[0])


def test_numbers_of_seeds_stay() -> None:
    """They differ from layer to layer; what is made of the seed need not."""
    prims = torch.ops.prims

    def run(x: Tensor, post: Tensor, *weights: Tensor) -> list[Tensor]:
        seeds = prims.inductor_seeds(LAYERS, torch.device("cpu"))

        def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
            seed = prims.inductor_lookup_seed(seeds, number)
            return torch.tanh(u @ w) * prims.inductor_random(list(u.shape), seed, "rand") + 1

        return program_of(layer)(x, post, *weights)

    module = trace(run, make_inputs())
    passes.share(module.graph)
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(prims.inductor_lookup_seed.default) == LAYERS
    assert prims.inductor_random.default not in targets
    assert len(sublayer_calls(module)) == LAYERS


@pytest.mark.parametrize("setting", ["cpp_wrapper", "fx_wrapper", "triton.cudagraphs"])
def test_where_inductor_cannot_call_graphs(setting: str) -> None:
    assert compat.calls_graphs()
    with compat.inductor_config().patch({setting: True}):
        assert not compat.calls_graphs()


def test_communication_stays() -> None:
    """Inductor moves it, and joins some."""

    def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
        v = torch.ops._c10d_functional.wait_tensor(torch.tanh(u @ w) * 2)
        return torch.relu(v * 3) @ w

    module = trace(program_of(layer), make_inputs())
    passes.share(module.graph)
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(torch.ops._c10d_functional.wait_tensor.default) == LAYERS
    assert len(sublayer_calls(module)) == 2 * LAYERS


@pytest.mark.parametrize("nodes", [60, 240])
def test_the_search_does_not_grow_faster_than_the_graph(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder before the first hyper-connection reads no streams, so that all of it could be made apart."""

    def run(x: Tensor, post: Tensor, *weights: Tensor) -> list[Tensor]:
        h = weights[0]
        for _ in range(nodes // 2):
            h = torch.sin(h) * 2
        return program_of(lambda u, w, number: torch.sin(u @ w) * 2 + 1)(x + h[:3, None, :], post, *weights)

    module = trace(run, make_inputs())
    sublayers = sys.modules["mhc_compile.passes.share.sublayers"]
    seen = 0
    call = sublayers._call

    def counted(*given: Any) -> Any:
        nonlocal seen
        seen += 1
        return call(*given)

    monkeypatch.setattr(sublayers, "_call", counted)
    passes.share(module.graph)
    assert len(sublayer_calls(module)) == LAYERS
    assert seen < 4 * len(module.graph.nodes) + 100


def test_random_numbers_stay_in_order() -> None:
    def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
        return torch.relu(torch.tanh(u @ w) * 2 + torch.rand_like(u)) * 3

    module = trace(program_of(layer), make_inputs())
    torch.manual_seed(1)
    before = module(*make_inputs())
    passes.share(module.graph)
    module.recompile()
    torch.manual_seed(1)
    assert torch.equal(module(*make_inputs())[0], before[0])
    body_of = [getattr(module, str(node.args[1])) for node in sublayer_calls(module)]
    assert body_of
    assert not any(compat.draws_random_numbers(node) for body in body_of for node in body.graph.nodes)


def test_symbolic_sizes_are_arguments() -> None:
    """The code of a graph that is called sees none of those that the calling graph knows."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    tokens = any_number(mode.shape_env)
    with mode:
        weights = [torch.empty(WIDTH, WIDTH) for _ in range(LAYERS)]
        values = [torch.empty(tokens, N, WIDTH), torch.empty(tokens, N), *weights]
        module = make_fx(lambda s, *values: program_of(plain_layer)(*values))(tokens, *values)
    bodies, report = passes.share(module.graph)
    assert not report.errors
    body = bodies[0]
    first, *others = body.graph.find_nodes(op="placeholder")
    assert isinstance(first.meta["val"], torch.SymInt)
    assert not any(isinstance(other.meta["val"], torch.SymInt) for other in others)
    inputs = make_inputs(tokens=5)
    module.recompile()
    expected = program_of(plain_layer)(*inputs)
    assert torch.allclose(module(5, *inputs)[0], expected[0])


def test_what_was_not_traced_with_values_is_left() -> None:
    module = trace(program_of(plain_layer), make_inputs())
    for node in module.graph.nodes:
        node.meta.pop("val", None)
    bodies, report = passes.share(module.graph)
    assert not bodies
    assert not report.errors


class _Gated(nn.Module):
    """A layer of several kernels, and a second norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = CheapLayer(width), random_parameter(width, width, std=width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(F.linear(self.first(x), self.second)) * F.rms_norm(x, (x.shape[-1],))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo", "fresh_cache")
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_compiled_programs_agree(dynamic: bool) -> None:
    """Forward and all gradients, with float64 as the judge; and a second number of tokens."""
    model = Stack(layers=4)
    for sublayer in model.sublayers:
        sublayer.layer = _Gated(ZOO_WIDTH)
    calls = {
        shared: torch.compile(model, backend="mhc", dynamic=dynamic, options={"mhc.share_layers": shared})
        for shared in (True, False)
    }
    for tokens in (6, 10):
        x = torch.randn(2, tokens, STREAMS, ZOO_WIDTH)
        results = {}
        for shared, call in calls.items():
            records.forget()
            results[shared] = evaluate(call, model, x)
            report: Any = records.last()
            # A graph for all numbers of tokens is compiled once.
            assert not report.graphs or (report.shared.total() >= 8) == shared, str(report)
            assert not report.errors
        exact = evaluate(model.double(), model, x.double())
        model.float()
        for name, value in exact.items():
            errors = {shared: check.error(results[shared][name], value) for shared in calls}
            assert errors[True] <= 2 * errors[False] + 1e-7, (name, errors)


class _Tied(nn.Module):
    """A layer of parameters as large as what it is given, which backward could overwrite if they were its own."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList(random_parameter(*shape) for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            x = torch.tanh(x * factor)
        return x


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo", "fresh_cache")
def test_calls_overwrite_none_of_their_arguments() -> None:
    """Inductor has the numbers of the calling graph's inputs that backward may overwrite, and takes them for those of
    every graph. Where layers share parameters, there are few inputs that it may not."""
    model = Stack(layers=4)
    first, *others = model.sublayers
    first.layer = _Tied(2, 6, ZOO_WIDTH)
    for sublayer in others:
        for name in ("phi", "scale", "bias", "layer_bias", "layer"):
            setattr(sublayer, name, getattr(first, name))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    x = torch.randn(2, 6, STREAMS, ZOO_WIDTH)

    def gradients(call: Callable[..., Any]) -> dict[str, Tensor]:
        model.zero_grad()
        call(x)[0].sin().sum().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]

    found = gradients(torch.compile(model, backend="mhc"))
    assert records.last().shared.total() >= 6
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    for name, expected in gradients(model).items():
        assert check.error(found[name], expected) < 1e-4, name
