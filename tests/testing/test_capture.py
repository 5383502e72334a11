"""`capture`: operators however a program calls them, nested graphs, and captures without any operator."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mhc_compile
from mhc_compile import ops
from mhc_compile.nn import HyperConnection
from mhc_compile.testing import EmptyCaptureError, capture, graph_text
from tests.passes.fused import Stack, Sublayer, streams
from tests.zoo import near

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SUBLAYER = """\
%0 = generate_mix_and_aggregate(x=f32[2, 3, 4, 24], phi=f32[24, 96], scale=f32[3], bias=f32[24])
%1 = expand_combine(f=f32[2, 3, 24](%0.0), h_post=%0.1, x=f32[2, 3, 4, 24], h_res=%0.2)
return %1"""


class Called(Sublayer):
    """A sublayer that calls the operators in one of the ways there are."""

    def __init__(self, how: Callable[..., Tensor]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.layer, x, self.phi, self.scale, self.bias)


def _wrappers(layer: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
    u, post, res = ops.generate_mix_and_aggregate(x, *parameters)
    return ops.expand_combine(layer(u), None, post, x, res)


def _packets(layer: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
    u, post, res, *_ = torch.ops.mhc.generate_mix_and_aggregate(x, *parameters)
    return torch.ops.mhc.expand_combine(layer(u), None, h_res=res, x=x, h_post=post)


def _overloads(layer: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
    u, post, res, *_ = torch.ops.mhc.generate_mix_and_aggregate.default(x, *parameters)
    return torch.ops.mhc.expand_combine.default(layer(u), None, post, x, res)


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", [_wrappers, _packets, _overloads])
def test_operators_that_the_program_calls(how: Callable[..., Tensor], grad: Callable[[], Any]) -> None:
    with grad():
        assert str(capture(Called(how), streams())) == SUBLAYER


def test_called_operators_beside_recognised_code() -> None:
    """The text of the two is the same, and so are the fusions."""
    width, x = 24, streams()
    model = nn.Sequential(HyperConnection(nn.Linear(width, width), dim=width), Called(_wrappers))
    graphs = capture(model, x)
    assert_expected_inline(
        str(graphs),
        """\
%0 = generate_mix_and_aggregate(x=f32[2, 3, 4, 24], phi=f32[24, 96], scale=f32[3], bias=f32[24],
    pre_eps=1e-06)
%1 = expand_combine(f=f32[2, 3, 24](%0.0), h_post=%0.1, x=f32[2, 3, 4, 24], h_res=%0.2)
%2 = generate_mix_and_aggregate(x=%1, phi=f32[24, 96], scale=f32[3], bias=f32[24])
%3 = expand_combine(f=f32[2, 3, 24](%2.0), h_post=%2.1, x=%1, h_res=%2.2)
return %3""",
    )
    assert [line.split("(")[0] for line in graph_text(graphs.joint[0]).splitlines() if line.startswith("%")] == [
        "%0 = generate_mix_and_aggregate",
        "%1 = boundary",
        "%2 = expand_combine",
        "%3 = expand_combine_backward",
        "%4 = boundary_backward",
        "%5 = generate_mix_and_aggregate_backward",
    ]


def test_symbolic_sizes() -> None:
    x = streams()
    torch._dynamo.mark_dynamic(x, 1)
    assert str(capture(Called(_packets), x)) == SUBLAYER.replace("[2, 3, ", "[2, s, ")


class Regions(Stack):
    """Two sublayers, each in a nested graph that `around` makes, and then one that is in none."""

    def __init__(self, around: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.around = around

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        first, second, third = self.sublayers
        out: Tensor = third(self.around(second, 2 * self.around(first, x)))
        return out


def _checkpointed(sublayer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(sublayer, x, use_reentrant=False)
    return out


@torch.compiler.nested_compile_region
def _compiled_once(sublayer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = sublayer(x)
    return out


REGIONS = """\
%0 = region():
    %1 = generate_mix_and_aggregate(x=f32[2, 3, 4, 24], phi=f32[24, 96], scale=f32[3], bias=f32[24],
        sinkhorn_steps=5)
    %2 = expand_combine(f=f32[2, 3, 24](%1.0), layer_bias=f32[24], h_post=%1.1, x=f32[2, 3, 4, 24],
        h_res=%1.2)
    return %2
%3 = region(%0.0):
    %4 = generate_mix_and_aggregate(x=f32[2, 3, 4, 24], phi=f32[24, 96], scale=f32[3], bias=f32[24],
        sinkhorn_steps=5)
    %5 = expand_combine(f=f32[2, 3, 24](%4.0), layer_bias=f32[24], h_post=%4.1, x=f32[2, 3, 4, 24],
        h_res=%4.2)
    return %5
%6 = generate_mix_and_aggregate(x=%3.0, phi=f32[24, 96], scale=f32[3], bias=f32[24],
    sinkhorn_steps=5)
%7 = expand_combine(f=f32[2, 3, 24](%6.0), layer_bias=f32[24], h_post=%6.1, x=%3.0, h_res=%6.2)
return %7"""


@pytest.mark.parametrize("around", [_checkpointed, _compiled_once])
def test_nested_graphs(around: Callable[[nn.Module, Tensor], Tensor]) -> None:
    # Dynamo takes two calls for calls of one region if the inputs of both require gradients.
    assert str(capture(Regions(around), streams().requires_grad_())) == REGIONS


def test_recognised_code_in_nested_graphs_alone() -> None:
    connection = HyperConnection(nn.Linear(24, 24), dim=24)
    text = str(capture(lambda x: _checkpointed(connection, x), streams()))
    assert [line.split("(")[0].strip() for line in text.splitlines()][:3] == [
        "%0 = region",
        "%1 = generate_mix_and_aggregate",
        "pre_eps=1e-06)",
    ]


def test_an_empty_capture_is_an_error() -> None:
    told = "pass allow_empty=True if that is meant\nmhc: 0 of 0 hyper-conn"
    with pytest.raises(EmptyCaptureError, match=told) as caught:
        capture(nn.Linear(24, 24), streams())
    assert str(copy.copy(caught.value)) == str(caught.value)
    assert str(capture(nn.Linear(24, 24), streams(), allow_empty=True)) == "return"


class Twice(nn.Module):
    """Two sublayers, and something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.between = Called(_wrappers), Called(_wrappers), between

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.between(x)
        out: Tensor = self.second(x).sin()
        return out


def _broken(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


def test_a_break_has_the_code_of_its_line() -> None:
    """Without its number, which other lines of the file change."""
    assert str(capture(Twice(_broken), streams())) == "\n".join(
        [
            *[SUBLAYER, "cut: Dynamo breaks the graph in forward, at torch._dynamo.graph_break()"],
            SUBLAYER,
        ]
    )


def test_code_of_torch_is_not_in_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes with torch's version."""
    monkeypatch.setitem(graph_text.__globals__, "_TORCH", __file__)
    assert "cut: Dynamo breaks the graph in forward\n%0" in str(capture(Twice(_broken), streams()))


def test_a_function_that_is_given_up_has_the_code_of_the_break() -> None:
    def loop(x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = x.sin()
        return x

    lines = str(capture(loop, streams(), allow_empty=True)).splitlines()
    assert lines == ["not compiled: Dynamo gives up on loop, at torch._dynamo.graph_break()"]


def _one_stream() -> tuple[nn.Module, Tensor]:
    return near.Sublayer(1, 24, 3, 2), torch.randn(2, 3, 1, 24)


def _gate_for_each_channel() -> tuple[nn.Module, Tensor]:
    class PerChannel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            return (torch.sigmoid(self.gate(x)) * x).sum(2).tanh()

    return PerChannel(), streams()


@pytest.mark.parametrize("build", [_one_stream, _gate_for_each_channel])
def test_where_nothing_is_found_it_is_said_what_was_looked_for(build: Callable[[], tuple[nn.Module, Any]]) -> None:
    with pytest.raises(EmptyCaptureError) as caught:
        capture(*build())
    text = str(caught.value)
    assert "  no hyper-connection code was found. Searched: code with n >= 2 streams, x[..., n, C] or a list of" in text
    assert "\n  Not searched: n = 1, reads with a gate for each channel, and inputs without elements" in text
    assert text.endswith(str(mhc_compile.explain(*build())).partition("\n")[2])


def test_an_empty_capture_says_what_was_declined() -> None:
    connection = HyperConnection(nn.Linear(24, 24), dim=24).double()
    with pytest.raises(EmptyCaptureError, match=r"declined: .* at mhc_compile/nn.py:\d+(.|\n)*float64"):
        capture(connection, streams().double())


def test_a_capture_without_any_graph() -> None:
    """Dynamo compiles nothing where there is no tensor."""
    with pytest.raises(EmptyCaptureError, match="no graph was looked at"):
        capture(lambda number: number + 1, 1)


def test_a_module_that_is_compiled_already() -> None:
    assert str(capture(torch.compile(Called(_wrappers)), streams())) == SUBLAYER
    assert len(mhc_compile.explain(torch.compile(Called(_wrappers)), streams()).called) == 2


def test_the_text_of_what_is_no_graph() -> None:
    graphs = capture(Called(_wrappers), streams())
    assert graph_text(graphs.dynamo[0]) == str(graphs)
    with pytest.raises(TypeError, match=r"graph: expected a torch.fx.Graph, got Graphs; str\(\.\.\.\) is the text"):
        graph_text(graphs)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"graph: expected a torch.fx.Graph, got GraphModule$"):
        graph_text(graphs.dynamo[0].owning_module)  # type: ignore[arg-type]


@pytest.mark.parametrize("run", [capture, mhc_compile.explain, mhc_compile.verify])
def test_what_is_no_model_is_refused_before_dynamo_sees_it(run: Callable[..., Any]) -> None:
    """The instances of a class that was given can still be compiled."""
    with pytest.raises(
        TypeError, match=r"model: got the class Sublayer; expected an instance, such as Sublayer\(\.\.\.\)"
    ):
        run(near.Sublayer, streams())
    for wrong in ((nn.Linear(24, 24), streams()), "model.py:make"):
        words = f"model: expected a callable such as an nn.Module, got {type(wrong).__name__}$"
        with pytest.raises(TypeError, match=words):
            run(wrong)
    assert "generate_mix_and_aggregate" in str(capture(near.Sublayer(4, 24, 3, 2), streams()))
