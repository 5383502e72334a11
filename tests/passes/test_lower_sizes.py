"""Lowering operators of symbolic sizes: no guard is added, and one graph serves all."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mhc_compile import compat, passes, records
from mhc_compile.passes.lower import cpu
from tests.passes.fused import Stack, evaluate
from tests.passes.lowering import any_number, arguments, graph_of, operators, step
from tests.zoo import check
from tests.zoo.common import STREAMS, WIDTH

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "fresh_cache")

mhc = torch.ops.mhc


def _any_number_of_tokens(device: str) -> tuple[fx.Graph, ShapeEnv]:
    """`step` as a graph of a symbolic number of tokens."""
    shape_env = ShapeEnv()
    return graph_of(
        step, arguments(FakeTensorMode(shape_env=shape_env), any_number(shape_env), device=device)
    ), shape_env


@pytest.mark.parametrize(("device", "left"), [("cpu", ["mhc._loop.default"] * 4), ("cuda:0", [])])
def test_symbolic_sizes(device: str, left: list[str], fakes: FakeTensorMode) -> None:
    """Loops and launches take any number of tokens, and no guard is added."""
    graph, shape_env = _any_number_of_tokens(device)
    guards = len(shape_env.guards)
    lowered = passes.lower(graph).lowered
    assert lowered == {"generate_mix_and_aggregate": 1, "expand_combine": 1, "generate_mix_and_aggregate_backward": 1}
    assert operators(graph) == left
    graph.lint()
    assert len(shape_env.guards) == guards


def _with_everything(
    x: Tensor,
    f: Tensor,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    post: Tensor,
    res: Tensor,
    norm: Tensor,
    weight: Tensor,
    pre_phi: Tensor,
    pre_scale: Tensor,
    pre_bias: Tensor,
) -> Any:
    """Operators with all that they may be given."""
    ones = [True] * 10
    new = mhc.boundary(f, weight, post, x, res, phi, scale, bias, norm, weight, input_norm_eps=1e-6)
    saved = (f, weight, post, x, res, phi, scale, bias, norm, new[0], new[4], new[5], ones)
    given = (f, weight, post, x, res, post, phi, scale, bias, norm)
    shifted = mhc.shifted_boundary(*given)
    return (
        new,
        mhc.boundary_backward(*new[:4], None, None, *saved, weight, input_norm_eps=1e-6),
        mhc.boundary_backward(*new[:4], None, None, f, None, *saved[2:-1], [True, False, *ones[2:9]]),
        shifted,
        mhc.shifted_boundary_backward(*shifted, *given, *shifted[:1], *shifted[5:], ones),
        mhc.generate_mix(x, phi, scale, bias, norm),
        mhc.head(x, pre_phi, pre_scale, pre_bias),
        mhc.expand_combine_backward(new[0], f, weight, post, x, res, ones[:5]),
        mhc.scale_backward(post, post, res, new[4], new[5], scale, bias, 4, ones[:4]),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_symbolic_batch_and_length_on_a_gpu(dtype: torch.dtype, fakes: FakeTensorMode) -> None:
    shape_env = ShapeEnv()
    mode, n, width = FakeTensorMode(shape_env=shape_env), 4, 256
    lead = any_number(shape_env), any_number(shape_env)
    values = arguments(mode, device="cuda:0", width=width)
    shapes = {"x": (*lead, n, width), "f": (*lead, width), "post": (*lead, n), "res": (*lead, n, n)}
    shapes |= {"norm": (n * width,), "weight": (width,), "pre_phi": (n, n * width), "pre_scale": (1,), "pre_bias": (n,)}
    with mode:
        for name, shape in shapes.items():
            values[name] = torch.empty(shape, dtype=dtype if name in "xf" else torch.float32, device="cuda:0")
    graph = graph_of(_with_everything, values)
    guards, before = len(shape_env.guards), operators(graph)
    assert passes.lower(graph).lowered.total() == len(before) == 9
    assert set(operators(graph)) <= {"mhc._launch.default"}
    graph.lint()
    assert len(shape_env.guards) == guards


def _two_sublayers(x: Tensor, f: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, post: Tensor, res: Tensor) -> Any:
    layer_input, next_post, next_res, *_ = mhc.generate_mix_and_aggregate(x, phi, scale, bias)
    return layer_input, mhc.boundary(f, None, next_post, x, next_res, phi, scale, bias)


def test_one_pass_for_any_number_of_tokens(fakes: FakeTensorMode) -> None:
    """What many tokens have, and counters of a number that is known: one kernel clears them."""
    shape_env = ShapeEnv()
    tokens = any_number(shape_env)
    values = arguments(FakeTensorMode(shape_env=shape_env), tokens, width=4096)
    values |= {name: values[name].to(torch.bfloat16) for name in "xf"}
    graph = graph_of(_two_sublayers, values)
    guards = len(shape_env.guards)
    assert passes.lower(graph).lowered.total() == 2
    launched = [str(node.args[0]) for node in graph.nodes if str(node.target) == "mhc._launch.default"]
    assert len(launched) == 2
    assert all("boundary_pass_kernel" in launch for launch in launched)
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.fill_.Scalar)) == 1
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.full.default)
    assert len(shape_env.guards) == guards


@pytest.mark.parametrize("width", [64, 4096])
def test_a_width_that_was_symbolic(width: int, fakes: FakeTensorMode) -> None:
    """With dynamic=True a width is a symbol until it meets a parameter's. torch 2.14 keeps the symbol in strides."""
    shape_env = ShapeEnv()
    tokens, columns = any_number(shape_env), any_number(shape_env, width)
    values = arguments(FakeTensorMode(shape_env=shape_env), tokens, width=width)
    with compat.fake_mode_of(values["f"]):
        values["x"] = torch.empty((tokens, STREAMS, columns), dtype=torch.bfloat16, device="cuda:0")
        values["f"] = torch.empty((tokens, columns), dtype=torch.bfloat16, device="cuda:0")
    assert columns == width  # a guard, by which the symbol is known
    assert not isinstance(columns, int)
    graph = graph_of(_two_sublayers, values)
    guards = len(shape_env.guards)
    assert passes.lower(graph).lowered.total() == 2
    launched = [str(node.args[0]) for node in graph.nodes if str(node.target) == "mhc._launch.default"]
    assert any("boundary_pass_kernel" in launch for launch in launched) == (width == 4096)
    assert len(shape_env.guards) == guards


def test_what_needs_a_guard_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    aggregate = cpu.aggregate

    def asks(x: Tensor, h_pre: Tensor, **rest: Any) -> Tensor:
        return aggregate(x, h_pre, **rest) if x.shape[0] > 5 else h_pre

    monkeypatch.setattr(cpu, "aggregate", asks)
    graph, shape_env = _any_number_of_tokens("cpu")
    guards = len(shape_env.guards)
    with caplog.at_level(logging.INFO, logger="mhc_compile"):
        lowered = passes.lower(graph).lowered
    assert lowered == {"expand_combine": 1, "generate_mix_and_aggregate_backward": 1}
    assert "generate_mix_and_aggregate is not lowered: it depends on whether" in caplog.text
    assert len(shape_env.guards) == guards


def test_streams_a_symbolic_number_apart(fakes: FakeTensorMode, caplog: pytest.LogCaptureFixture) -> None:
    """Kernels count these in 32 bits, for which there would have to be a guard."""
    shape_env = ShapeEnv()
    values = arguments(FakeTensorMode(shape_env=shape_env), any_number(shape_env), device="cuda:0")
    with compat.fake_mode_of(values["f"]):
        values["x"] = torch.empty(4, values["f"].shape[0], 256, device="cuda:0").transpose(0, 1)
    graph = graph_of(step, values)
    with caplog.at_level(logging.INFO):
        assert not passes.lower(graph).lowered
    assert "generate_mix_and_aggregate is not lowered: how far apart a token's streams lie" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_number_of_tokens_that_depends_on_data(caplog: pytest.LogCaptureFixture) -> None:
    """No program can ask whether there are any."""
    shape_env = ShapeEnv()
    with caplog.at_level(logging.INFO, logger="mhc_compile"):
        graph = graph_of(step, arguments(FakeTensorMode(shape_env=shape_env), _tokens_of_data(shape_env), device="cpu"))
        report = passes.lower(graph)
    assert report.lowered.total() == 3
    assert (report.errors, list(shape_env.guards)) == ([], [])
    assert operators(graph) == ["mhc._loop.default"] * 4
    assert "is not lowered" not in caplog.text


def _tokens_of_data(shape_env: ShapeEnv) -> Any:
    with shape_env.ignore_fresh_unbacked_symbols():  # no node of a graph makes it
        return shape_env.create_unbacked_symint()


def test_what_asks_for_data_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Which is no failure, for strict options neither."""
    aggregate = cpu.aggregate

    def asks(x: Tensor, h_pre: Tensor, **rest: Any) -> Tensor:
        return aggregate(x, h_pre, **rest) if x.shape[0] > 5 else h_pre

    monkeypatch.setattr(cpu, "aggregate", asks)
    shape_env = ShapeEnv()
    graph = graph_of(step, arguments(FakeTensorMode(shape_env=shape_env), _tokens_of_data(shape_env), device="cpu"))
    with caplog.at_level(logging.INFO, logger="mhc_compile"):
        report = passes.lower(graph)
    assert report.lowered == {"expand_combine": 1, "generate_mix_and_aggregate_backward": 1}
    assert report.errors == []
    assert "generate_mix_and_aggregate is not lowered: GuardOnDataDependentSymNode" in caplog.text


@pytest.mark.parametrize(
    ("shape", "strides", "others", "expected"),
    [
        (("u", 4, 8), (32, 8, 1), (32, 8, 1), True),
        (("u", 4, 8), (32, 8, 1), (32, 1, 4), False),
        (("u", 1, 8), (8, 8, 1), (8, 1, 1), True),
        (("u", 0, 8), (8, 8, 1), (1, 2, 3), True),
        ((1, "u", 8), (7, 8, 1), (5, 8, 1), True),
        (("u", 8), (8, 1), (9, 1), False),
    ],
    ids=str,
)
def test_strides_of_a_size_that_depends_on_data(
    shape: tuple[Any, ...], strides: tuple[int, ...], others: tuple[int, ...], expected: bool
) -> None:
    shape_env = ShapeEnv()
    tokens = _tokens_of_data(shape_env)
    sizes = [tokens if size == "u" else size for size in shape]
    with FakeTensorMode(shape_env=shape_env):
        left, right = (torch.empty_strided(sizes, given) for given in (strides, others))
    assert compat.same_strides(left, right) is expected
    assert not compat.same_strides(left, right.double())
    assert not compat.same_strides(left, right[0])
    assert list(shape_env.guards) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)])
def test_any_number_of_tokens_on_cpu(dtype: torch.dtype) -> None:
    """Compiled once for all, and a token's bits are those of a program compiled for its batch."""
    model, x = Stack(layers=2), torch.randn(2, 9, STREAMS, WIDTH, dtype=dtype)
    for sublayer in model.sublayers:
        sublayer.layer = torch.nn.Identity()  # type: ignore[assignment]  # an operator of others may choose by the batch

    def results(dynamic: bool) -> list[Any]:
        compiled = torch.compile(model, backend="mhc", dynamic=dynamic)
        return [evaluate(compiled, model, x[:, :tokens]) for tokens in (9, 4)]

    expected = results(False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for values, others in zip(results(True), expected, strict=True):
        assert values.keys() == others.keys()
        assert torch.equal(values["y"], others["y"])
        for name, value in values.items():
            if dtype == torch.float32:
                torch.testing.assert_close(value, others[name], rtol=1e-4, atol=1e-5)
            else:  # which gradients of streams are rounded between two operators is Inductor's choice
                assert check.error(value, others[name]) < 5e-3, name
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert records.last().lowered["boundary_backward"] == 1
