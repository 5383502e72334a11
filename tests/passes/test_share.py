"""Sublayers that are alike become calls of one graph, and only they."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mhc_compile import passes
from mhc_compile.passes.fuse.joint import calls
from mhc_compile.passes.report import Report
from mhc_compile.passes.share.outline import Unsuitable
from mhc_compile.passes.share.outline import outline as outlined
from tests.passes.lowering import operators
from tests.passes.sharing import (
    CALL,
    LAYERS,
    WIDTH,
    calls_of_each,
    make_inputs,
    plain_layer,
    program_of,
    share,
    sublayer_calls,
    trace,
)

pytestmark = pytest.mark.usefixtures("short_sublayers")


def test_layers_that_are_alike() -> None:
    assert calls_of_each(plain_layer) == [LAYERS]


def test_calls_are_given_what_the_sublayer_reads() -> None:
    calls = sublayer_calls(share(program_of(plain_layer), make_inputs()))
    # A body, its name, the layer's input and weight.
    assert [len(call.args) for call in calls] == [4] * LAYERS


def test_hyper_connections_are_shared_on_a_cpu() -> None:
    """Where they are compiled, too. On a GPU they stay with the graph that calls: one takes another's memory over."""
    for device, expected in (("cpu", 2 * LAYERS), ("cuda", 0)):
        with FakeTensorMode():
            inputs = [torch.empty_like(value, device=device) for value in make_inputs()]
            module = make_fx(program_of(plain_layer))(*inputs)
        passes.share(module.graph)
        assert len(sublayer_calls(module)) == LAYERS
        of_operators = len(module.graph.find_nodes(op="call_function", target=CALL)) - LAYERS
        assert of_operators == expected
        assert len(operators(module.graph)) == 2 * LAYERS - expected


def test_graphs_without_hyper_connections_are_left() -> None:
    """Those of other models, where the passes are enabled for all of a process."""

    def run(*weights: Tensor) -> list[Tensor]:
        x = weights[0]
        for number, w in enumerate(weights):
            x = plain_layer(x, w, number).cumsum(0)
        return [x]

    module = trace(run, make_inputs()[2:])
    before = str(module.graph)
    assert passes.share(module.graph)[0] == []
    assert str(module.graph) == before


def test_hyper_connections_alone_are_not_shared() -> None:
    """A chain of nothing else takes no time to compile, and calls take some when it runs."""
    assert calls_of_each(lambda u, w, number: u) == []
    module = trace(program_of(lambda u, w, number: u), make_inputs())
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

        return program_of(layer)(x, post, *weights)

    assert len(sublayer_calls(share(program, make_inputs()))) == LAYERS


def test_what_every_other_layer_reads_is_made_before_them() -> None:
    """Two layers make a table each, so that neither stands alone."""
    tables: dict[int, Tensor] = {}

    def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
        v = u @ w
        if number < 2:
            tables[number] = (w.cos() * 3).sum(-1)
        return torch.tanh(v) * tables[number % 2] + 1

    assert calls_of_each(layer) == [LAYERS]


def test_compilations_of_one_function_count_once() -> None:
    """The graph for other shapes may have more nodes."""

    def longer(u: Tensor, w: Tensor, number: int) -> Tensor:
        return plain_layer(u, w, number) * 2

    graphs = [trace(program_of(layer), make_inputs()).graph for layer in (plain_layer, longer)]
    first, second = (passes.share(graph)[1] for graph in graphs)
    assert first.shared.total() >= LAYERS
    assert Report.joined([first, second]).shared == first.shared == second.shared


@pytest.mark.parametrize("where", ["before", "behind"])
def test_layers_with_something_beside_them(where: str) -> None:
    """As an embedding is for the first, and what all layers have in common for the last to be differentiated."""

    def layer(u: Tensor, w: Tensor, number: int) -> Any:
        if number != 2:
            return plain_layer(u, w, number)
        if where == "before":
            return plain_layer(u.exp() * 3 - u.sum(), w, number)
        f = plain_layer(u, w, number)
        return f, f.exp() * 3 - u.sum()

    assert calls_of_each(layer) == [LAYERS]


def test_a_layer_that_makes_what_others_are_given() -> None:
    """It is too cheap to be kept for the backward pass, in one layer alone."""

    def program(x: Tensor, post: Tensor, *weights: Tensor) -> list[Tensor]:
        def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
            v = torch.tanh(u @ w) * 2
            return v @ (w.exp().sin() if number == 2 else weights[number - 1]) + 1

        return program_of(layer)(x, post, *weights)

    assert len(sublayer_calls(share(program, make_inputs()))) == LAYERS


def test_a_layer_that_makes_an_argument_of_what_others_make_too() -> None:
    """That cannot be made in front of the layer, since what it reads is part of the layer."""

    def program(x: Tensor, post: Tensor, *weights: Tensor) -> list[Tensor]:
        def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
            t = w.tanh()
            return torch.tanh((u @ t) @ (t.exp() if number == 2 else weights[number - 1])) * 2 + 1

        return program_of(layer)(x, post, *weights)

    assert len(sublayer_calls(share(program, make_inputs()))) == LAYERS - 1


def test_a_graph_out_of_order_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """With words for what is wrong with it."""

    def share(graph: fx.Graph, counts: Any) -> Any:
        first, second, *_ = calls(graph)
        first.prepend(second)
        yield fx.GraphModule(torch.nn.Module(), fx.Graph())

    module = trace(program_of(plain_layer), make_inputs())
    before = str(module.graph)
    monkeypatch.setattr(passes.sharing, "share", share)
    bodies, report = passes.share(module.graph)
    assert (bodies, str(module.graph)) == ([], before)
    (error,) = report.errors
    assert "used before it has been defined" in error


def layer_of_two_kinds(u: Tensor, w: Tensor, number: int) -> Tensor:
    return torch.tanh(u @ w) * 2 + 1 if number % 2 else torch.relu(u @ w + w.sum()) * 0.5


def test_layers_of_two_kinds() -> None:
    assert calls_of_each(layer_of_two_kinds) == [2, 2]


def test_a_kind_that_cannot_be_called_keeps_no_other_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[int] = []

    def outline(graph: fx.Graph, sublayers: list[list[fx.Node]]) -> Any:
        if not refused:
            refused.append(len(sublayers))
            raise Unsuitable("planted")
        return outlined(graph, sublayers)

    monkeypatch.setattr(passes.sharing, "outline", outline)
    assert calls_of_each(layer_of_two_kinds) == refused == [2]


@pytest.mark.parametrize(
    "numbers", [(1e-6, 1e-5, 1e-6, 1e-5), (0.0, -0.0, 0.0, -0.0), (1, 1.0, 1, 1.0), (1, True, 1, True)], ids=str
)
def test_numbers_tell_layers_apart(numbers: tuple[Any, ...]) -> None:
    """Also those that Python says are equal."""

    def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
        return torch.tanh(torch.ops.aten.add.Scalar(u @ w, numbers[number])) * 2

    assert calls_of_each(layer) == [2, 2]


def test_layouts_tell_layers_apart() -> None:
    inputs = make_inputs()
    inputs[2:] = [w.t() if i % 2 else w for i, w in enumerate(inputs[2:])]
    assert calls_of_each(plain_layer, inputs) == [2, 2]


def test_dtypes_of_what_is_read_tell_layers_apart() -> None:
    inputs = make_inputs()
    inputs[2:] = [w.double() if i % 2 else w for i, w in enumerate(inputs[2:])]

    def layer(u: Tensor, w: Tensor, number: int) -> Tensor:
        return torch.tanh(u * w.sum().float() + 1) * 2

    assert calls_of_each(layer, inputs) == [2, 2]


def test_addresses_tell_layers_apart() -> None:
    """Inductor takes it from the first call whether addresses are multiples of 16."""
    room = torch.randn(LAYERS, WIDTH * WIDTH + 1)
    inputs = make_inputs()[:2] + [row[i % 2 : i % 2 + WIDTH * WIDTH].view(WIDTH, WIDTH) for i, row in enumerate(room)]

    assert calls_of_each(plain_layer, inputs) == [2, 2]


@pytest.mark.parametrize("tied", range(LAYERS))
def test_one_weight_in_two_places(tied: int) -> None:
    """One layer alone has one, the first or another: the others have two."""
    inputs = make_inputs()
    more = [torch.randn(WIDTH, WIDTH) for _ in range(LAYERS)]

    def run(x: Tensor, post: Tensor, *weights: Tensor) -> list[Tensor]:
        first, second = weights[:LAYERS], list(weights[LAYERS:])
        second[tied] = first[tied]
        return program_of(lambda u, w, number: torch.tanh(u @ w) @ second[number] + 1)(x, post, *first)

    assert len(sublayer_calls(share(run, inputs + more))) == LAYERS
