"""Sublayers that are alike become calls of one graph, and only they; nothing of a result changes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mhc_compile import backend, compat, ops, passes
from tests.passes.fused import Stack, evaluate
from tests.passes.lowering import any_number, operators
from tests.zoo import check
from tests.zoo.common import STREAMS, CheapLayer, random_parameter
from tests.zoo.common import WIDTH as ZOO_WIDTH

CALL = torch.ops.higher_order.invoke_subgraph
N, WIDTH, LAYERS = 2, 8, 4

Layer = Callable[..., Any]


@pytest.fixture(autouse=True)
def _worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sublayers of tests are short."""
    sublayers = sys.modules["mhc_compile.passes.share.sublayers"]
    monkeypatch.setattr(sublayers, "_LENGTH", 2)
    monkeypatch.setattr(sublayers, "_SAVED", 2)


def _layer(u: Tensor, w: Tensor, number: int) -> Tensor:
    return torch.tanh(u @ w) * 2 + 1


def _program(layer: Layer) -> Callable[..., list[Tensor]]:
    """Layers between hyper-connections. A layer returns its output, or that and what a backward pass would need."""

    def run(x: Tensor, post: Tensor, *weights: Tensor) -> list[Tensor]:
        saved: list[Tensor] = []
        for number, w in enumerate(weights):
            u = ops.aggregate(x, post)
            f = layer(u, w, number)
            if isinstance(f, tuple):
                f, *more = f
                saved += more
            x = ops.expand_combine(f, None, post, x, None)
        return [x, *saved]

    return run


def _inputs(tokens: int = 3) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(tokens, N, WIDTH), (tokens, N), *[(WIDTH, WIDTH)] * LAYERS]
    return [torch.randn(shape, generator=draw) for shape in shapes]


def _graph(program: Callable[..., Any], inputs: list[Tensor]) -> fx.GraphModule:
    module = make_fx(program, compat.inductor_decompositions(), tracing_mode="fake")(*inputs)
    module.graph.eliminate_dead_code()
    return module


def _share(program: Callable[..., Any], inputs: list[Tensor]) -> fx.GraphModule:
    """The program with calls, after its results were found to be what they were, to the last bit."""
    module = _graph(program, inputs)
    before = module(*inputs)
    bodies, report = passes.share(module.graph)
    assert not report.errors
    module.graph.lint()
    module.recompile()
    for result, expected in zip(module(*inputs), before, strict=True):
        assert torch.equal(result, expected)
        assert result.stride() == expected.stride()
    calls = Counter(str(node.args[1]) for node in module.graph.find_nodes(op="call_function", target=CALL))
    assert len(bodies) == len(calls)
    assert report.shared.total() == calls.total()
    for body in bodies:
        _check_memory(body)
    return module


def _shared(layer: Layer, inputs: list[Tensor] | None = None) -> list[int]:
    """How many calls there are of each sublayer, once results are what they were."""
    module = _share(_program(layer), inputs or _inputs())
    return sorted(Counter(str(node.args[1]) for node in _calls(module)).values())


def _operators(module: fx.GraphModule, name: str) -> list[str]:
    """The hyper-connections in one of its graphs."""
    return operators(getattr(module, name).graph)


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    """Those of sublayers; those of hyper-connections are a matter of their own."""
    found = module.graph.find_nodes(op="call_function", target=CALL)
    return [node for node in found if not _operators(module, str(node.args[1]))]


def _check_memory(body: fx.GraphModule) -> None:
    """Of results and arguments each has memory of its own, for all that Inductor can tell."""
    (output,) = body.graph.find_nodes(op="output")
    results = [compat.storage_of(node.meta["val"]) for node in output.args[0]]
    arguments = {compat.storage_of(node.meta["val"]) for node in body.graph.find_nodes(op="placeholder")}
    assert len(set(results)) == len(results)
    assert arguments.isdisjoint(results)
    assert output.meta["user_visible_output_idxs"] == list(range(len(results)))


def test_layers_that_are_alike() -> None:
    assert _shared(_layer) == [LAYERS]


def test_hyper_connections_are_shared_on_a_cpu() -> None:
    """Where they are compiled, too. On a GPU they stay with the graph that calls: one takes another's memory over."""
    for device, expected in (("cpu", 2 * LAYERS), ("cuda", 0)):
        with FakeTensorMode():
            inputs = [torch.empty_like(value, device=device) for value in _inputs()]
            module = make_fx(_program(_layer))(*inputs)
        passes.share(module.graph)
        assert len(_calls(module)) == LAYERS
        of_operators = len(module.graph.find_nodes(op="call_function", target=CALL)) - LAYERS
        assert of_operators == expected
        assert len(operators(module.graph)) == 2 * LAYERS - expected


def test_graphs_without_hyper_connections_are_left() -> None:
    """Those of other models, where the passes are enabled for all of a process."""

    def run(*weights: Tensor) -> list[Tensor]:
        x = weights[0]
        for number, w in enumerate(weights):
            x = _layer(x, w, number).cumsum(0)
        return [x]

    module = _graph(run, _inputs()[2:])
    before = str(module.graph)
    assert passes.share(module.graph)[0] == []
    assert str(module.graph) == before


def test_hyper_connections_alone_are_not_shared() -> None:
    """A chain of nothing else takes no time to compile, and calls take some when it runs."""
    assert _shared(lambda u, w, number: u) == []
    module = _graph(_program(lambda u, w, number: u), _inputs())
    assert passes.share(module.graph)[0] == []


def test_what_all_layers_read_is_made_before_them() -> None:
    """A table that the first layer makes, which tracing makes once."""

    def program(x: Tensor, post: Tensor, *weights: Tensor) -> list[Tensor]:
        table: list[Tensor] = []

        def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
            v = u @ w
            if not table:
                table.append((post.cos() * 3).sum(-1, keepdim=True))
            return torch.tanh(v) * table[0] + 1

        return _program(layer)(x, post, *weights)

    assert len(_calls(_share(program, _inputs()))) == LAYERS


@pytest.mark.parametrize("where", ["before", "behind"])
def test_layers_with_something_beside_them(where: str) -> None:
    """As an embedding is beside the first, and what all layers have in common beside the last to be differentiated."""

    def layer(u: Tensor, w: Tensor, number: int) -> Any:
        if number != 2:
            return _layer(u, w, number)
        if where == "before":
            return _layer(u.exp() * 3 - u.sum(), w, number)
        f = _layer(u, w, number)
        return f, f.exp() * 3 - u.sum()

    assert _shared(layer) == [LAYERS]


def test_a_layer_that_makes_what_others_are_given() -> None:
    """Of what was too cheap to be kept for the backward pass in one layer alone."""

    def program(x: Tensor, post: Tensor, *weights: Tensor) -> list[Tensor]:
        def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
            v = torch.tanh(u @ w) * 2
            return v @ (w.exp().sin() if number == 2 else weights[number - 1]) + 1

        return _program(layer)(x, post, *weights)

    assert len(_calls(_share(program, _inputs()))) == LAYERS


def test_layers_of_two_kinds() -> None:
    def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
        return torch.tanh(u @ w) * 2 + 1 if number % 2 else torch.relu(u @ w + w.sum()) * 0.5

    assert _shared(layer) == [2, 2]


@pytest.mark.parametrize(
    "numbers", [(1e-6, 1e-5, 1e-6, 1e-5), (0.0, -0.0, 0.0, -0.0), (1, 1.0, 1, 1.0), (1, True, 1, True)], ids=str
)
def test_numbers_tell_layers_apart(numbers: tuple[Any, ...]) -> None:
    """Also those that Python says are equal."""

    def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
        return torch.tanh(torch.ops.aten.add.Scalar(u @ w, numbers[number])) * 2

    assert _shared(layer) == [2, 2]


def test_layouts_tell_layers_apart() -> None:
    inputs = _inputs()
    inputs[2:] = [w.t() if i % 2 else w for i, w in enumerate(inputs[2:])]
    assert _shared(_layer, inputs) == [2, 2]


def test_dtypes_of_what_is_read_tell_layers_apart() -> None:
    inputs = _inputs()
    inputs[2:] = [w.double() if i % 2 else w for i, w in enumerate(inputs[2:])]

    def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
        return torch.tanh(u * w.sum().float() + 1) * 2

    assert _shared(layer, inputs) == [2, 2]


def test_addresses_tell_layers_apart() -> None:
    """Inductor takes it from the first call whether addresses are multiples of 16."""
    room = torch.randn(LAYERS, WIDTH * WIDTH + 1)
    inputs = _inputs()[:2] + [row[i % 2 : i % 2 + WIDTH * WIDTH].view(WIDTH, WIDTH) for i, row in enumerate(room)]

    assert _shared(_layer, inputs) == [2, 2]


@pytest.mark.parametrize("tied", range(LAYERS))
def test_one_weight_in_two_places(tied: int) -> None:
    """Of one layer alone, the first or another: others have two."""
    inputs = _inputs()
    more = [torch.randn(WIDTH, WIDTH) for _ in range(LAYERS)]

    def run(x: Tensor, post: Tensor, *weights: Tensor) -> list[Tensor]:
        first, second = weights[:LAYERS], list(weights[LAYERS:])
        second[tied] = first[tied]
        return _program(lambda u, w, number: torch.tanh(u @ w) @ second[number] + 1)(x, post, *first)

    assert len(_calls(_share(run, inputs + more))) == LAYERS


def test_what_backward_needs() -> None:
    """Views of weights, of the layer's input, of results, of each other, some twice; and a result that has its own."""

    def layer(u: Tensor, w: Tensor, number: int) -> Any:
        turned = w.t()
        v = u @ turned
        first, second = torch.tanh(v).split(WIDTH // 2, -1)
        f = torch.cat([second, first], -1) * 2
        return f.view(-1, WIDTH), turned, u.unsqueeze(0), v, v.t(), v.t()[1:], first, second, f

    assert _shared(layer) == [LAYERS]


def test_what_one_layer_alone_returns() -> None:
    kept: dict[int, Tensor] = {}

    def layer(u: Tensor, w: Tensor, number: int) -> Any:
        v = torch.tanh(u @ w)
        kept[number] = v
        # The second layer's is read by the fourth.
        return v * 2 + (kept[1] if number == 3 else w[:3])

    assert _shared(layer) == [3]


def test_one_of_several_results() -> None:
    def layer(u: Tensor, w: Tensor, number: int) -> Any:
        values, indices = (u @ w).sort(-1)
        return torch.tanh(values) * 2, indices

    assert _shared(layer) == [LAYERS]


def test_complex_numbers_stay() -> None:
    """Calls take no tensors whose conjugation is put off."""

    def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
        z = torch.view_as_complex((torch.tanh(u @ w) * 2).view(3, WIDTH // 2, 2))
        return torch.relu(torch.view_as_real(z.conj() * z * 2j).flatten(-2) * 3) @ w

    module = _share(_program(layer), _inputs())
    assert len(_calls(module)) == 2 * LAYERS
    for node in _calls(module):
        body = getattr(module, str(node.args[1]))
        assert not any(inner.meta["val"].is_complex() for inner in body.graph.nodes if inner.op != "output")


def test_what_a_dispatcher_refuses_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation does not fail because of a call."""
    outline = sys.modules["mhc_compile.passes.share.outline"]

    def refuse(*given: Any) -> Any:
        raise NotImplementedError("no kernel")

    with monkeypatch.context() as patch:
        patch.setattr(outline.torch.ops.higher_order, "invoke_subgraph", refuse)
        assert _shared(_layer) == []
    with monkeypatch.context() as patch:
        patch.setattr(outline.compat, "same_strides", lambda left, right: False)
        assert _shared(_layer) == []


def test_results_of_other_graphs_stay() -> None:
    """With the calls of those."""

    def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
        v = torch.tanh(u @ w) * 2
        (v,) = torch.cond(v.sum() > 0, lambda v: (v * 2,), lambda v: (v - 1,), (v,))
        return torch.relu(v * 3) @ w

    assert len(_calls(_share(_program(layer), _inputs()))) == 2 * LAYERS


def test_a_layer_that_returns_its_input() -> None:
    def layer(u: Tensor, w: Tensor, number: int) -> Any:
        return u.view(1, 3, WIDTH).squeeze(0), torch.tanh(u @ w) * 2

    assert _shared(layer) == [LAYERS]


def test_what_writes_stays() -> None:
    """And what is around it is shared."""

    def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
        v = torch.tanh(u @ w) * 2
        v.add_(1)
        return torch.relu(v * 3) + w[:3]

    inputs = _inputs()
    module = make_fx(_program(layer), tracing_mode="fake")(*inputs)
    before = module(*inputs)
    passes.share(module.graph)
    module.recompile()
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(torch.ops.aten.add_.Tensor) == LAYERS
    assert len(_calls(module)) == 2 * LAYERS
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

        results = _program(layer)(x, post, *weights)
        for room, keys in zip(rooms, new, strict=True):
            room.copy_(keys)
        return results

    module = _graph(run, _inputs() + caches)
    expected = run(*_inputs(), *(cache.clone() for cache in caches))
    passes.share(module.graph)
    module.graph.lint()
    module.recompile()
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(torch.ops.aten.slice_scatter.default) == LAYERS
    assert len(_calls(module)) == 2 * LAYERS
    assert torch.equal(module(*_inputs(), *caches)[0], expected[0])


def test_numbers_of_seeds_stay() -> None:
    """They differ from layer to layer; what is made of the seed need not."""
    prims = torch.ops.prims

    def run(x: Tensor, post: Tensor, *weights: Tensor) -> list[Tensor]:
        seeds = prims.inductor_seeds(LAYERS, torch.device("cpu"))

        def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
            seed = prims.inductor_lookup_seed(seeds, number)
            return torch.tanh(u @ w) * prims.inductor_random(list(u.shape), seed, "rand") + 1

        return _program(layer)(x, post, *weights)

    module = _graph(run, _inputs())
    passes.share(module.graph)
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(prims.inductor_lookup_seed.default) == LAYERS
    assert prims.inductor_random.default not in targets
    assert len(_calls(module)) == LAYERS


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

    module = _graph(_program(layer), _inputs())
    passes.share(module.graph)
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(torch.ops._c10d_functional.wait_tensor.default) == LAYERS
    assert len(_calls(module)) == 2 * LAYERS


@pytest.mark.parametrize("nodes", [60, 240])
def test_the_search_does_not_grow_faster_than_the_graph(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder before the first hyper-connection reads no streams, so that all of it could be made apart."""

    def run(x: Tensor, post: Tensor, *weights: Tensor) -> list[Tensor]:
        h = weights[0]
        for _ in range(nodes // 2):
            h = torch.sin(h) * 2
        return _program(lambda u, w, number: torch.sin(u @ w) * 2 + 1)(x + h[:3, None, :], post, *weights)

    module = _graph(run, _inputs())
    sublayers = sys.modules["mhc_compile.passes.share.sublayers"]
    seen = 0
    call = sublayers._call

    def counted(*given: Any) -> Any:
        nonlocal seen
        seen += 1
        return call(*given)

    monkeypatch.setattr(sublayers, "_call", counted)
    passes.share(module.graph)
    assert len(_calls(module)) == LAYERS
    assert seen < 4 * len(module.graph.nodes) + 100


def test_random_numbers_stay_in_order() -> None:
    def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
        return torch.relu(torch.tanh(u @ w) * 2 + torch.rand_like(u)) * 3

    module = _graph(_program(layer), _inputs())
    torch.manual_seed(1)
    before = module(*_inputs())
    passes.share(module.graph)
    module.recompile()
    torch.manual_seed(1)
    assert torch.equal(module(*_inputs())[0], before[0])
    body_of = [getattr(module, str(node.args[1])) for node in _calls(module)]
    assert body_of
    assert not any(compat.draws_random_numbers(node) for body in body_of for node in body.graph.nodes)


def test_symbolic_sizes_are_arguments() -> None:
    """The code of a graph that is called sees none of those that the calling graph knows."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    tokens = any_number(mode.shape_env)
    with mode:
        weights = [torch.empty(WIDTH, WIDTH) for _ in range(LAYERS)]
        values = [torch.empty(tokens, N, WIDTH), torch.empty(tokens, N), *weights]
        module = make_fx(lambda s, *values: _program(_layer)(*values))(tokens, *values)
    bodies, report = passes.share(module.graph)
    assert not report.errors
    body = bodies[0]
    first, *others = body.graph.find_nodes(op="placeholder")
    assert isinstance(first.meta["val"], torch.SymInt)
    assert not any(isinstance(other.meta["val"], torch.SymInt) for other in others)
    inputs = _inputs(tokens=5)
    module.recompile()
    expected = _program(_layer)(*inputs)
    assert torch.allclose(module(5, *inputs)[0], expected[0])


def test_what_was_not_traced_with_values_is_left() -> None:
    module = _graph(_program(_layer), _inputs())
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
            backend.last_report = None
            results[shared] = evaluate(call, model, x)
            report: Any = backend.last_report
            assert report is None or (report.shared.total() >= 8) == shared, str(report)
            assert report is None or not report.errors
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
    assert backend.last_report is not None
    assert backend.last_report.shared.total() >= 6
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    for name, expected in gradients(model).items():
        assert check.error(found[name], expected) < 1e-4, name
