"""Lowering: operators of the graph after grad become what they consist of, and nothing of a result changes."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mhc_compile import backend, compat, kernels, passes
from mhc_compile.testing.float64 import Float64Reference
from tests.passes.fused import Stack
from tests.zoo import check
from tests.zoo.common import STREAMS, WIDTH

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

mhc = torch.ops.mhc
LAUNCH = "triton_kernel_wrapper_mutation"


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakeTensorMode:
    """Fake tensors on an H100 that need not exist."""
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "_has_tensor_cores", lambda index: True)
    for name in ("common", "aggregate", "expand_combine", "mix", "projection"):
        module = importlib.import_module(f"mhc_compile.kernels.{name}")
        for function, value in (("processors", 132), ("capability", 90)):
            if hasattr(module, function):
                monkeypatch.setattr(module, function, lambda device, value=value: value)
    return FakeTensorMode()


def _arguments(mode: FakeTensorMode, tokens: int = 64, width: int = 256, device: str = "cuda") -> dict[str, Tensor]:
    n, rows = 4, 24
    with mode if device == "cuda" else contextlib.nullcontext():
        made = {"x": (tokens, n, width), "f": (tokens, width), "phi": (rows, n * width), "scale": (3,), "bias": (rows,)}
        made |= {"post": (tokens, n), "res": (tokens, n, n)}
        return {name: torch.randn(shape).to(device) if device == "cpu" else torch.empty(shape, device="cuda:0")
                for name, shape in made.items()}  # fmt: skip


def _graph(function: Callable[..., Any], values: dict[str, Tensor]) -> fx.Graph:
    """The graph of a function of these tensors, whose results are one flat tuple."""
    names = list(values)

    def flat(*tensors: Tensor) -> list[Tensor]:
        leaves = torch.utils._pytree.tree_leaves(function(**dict(zip(names, tensors, strict=True))))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    with compat.fake_mode_of(values["x"]):
        graph = make_fx(flat)(*values.values()).graph
    graph.eliminate_dead_code()
    return graph


def _operators(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if str(node.target).startswith("mhc.")]


def _launches(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if str(node.target) == LAUNCH]


def _step(x: Tensor, f: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, post: Tensor, res: Tensor) -> Any:
    u, *gates, h, ms = mhc.generate_mix_and_aggregate(x, phi, scale, bias)
    y = mhc.expand_combine(f, None, gates[0], x, gates[1])
    saved = (x, phi, scale, bias, None, h, ms, [True, True, True, True, False])
    return u, y, mhc.generate_mix_and_aggregate_backward(u, post, res, None, None, *saved)


def test_operators_become_launches(fakes: FakeTensorMode) -> None:
    graph = _graph(_step, _arguments(fakes))
    layouts = [value.meta["val"] for value in graph.find_nodes(op="output")[0].args[0]]
    report = passes.lower(graph)
    graph.lint()
    assert report.lowered == {
        "generate_mix_and_aggregate": 1, "expand_combine": 1, "generate_mix_and_aggregate_backward": 1,
    }  # fmt: skip
    assert "lowered: 1 x expand_combine" in str(report)
    assert _operators(graph) == []
    # project and mix; combine; pre_gradient, mix_backward, products and reduce
    assert len(_launches(graph)) == 7
    results = graph.find_nodes(op="output")[0].args[0]
    for result, before in zip(results, layouts, strict=True):
        value = result.meta["val"]
        assert (value.shape, value.stride(), value.dtype, value.device) == (
            before.shape, before.stride(), before.dtype, before.device
        )  # fmt: skip


def test_no_copies_are_left(fakes: FakeTensorMode) -> None:
    """Of contiguous arguments: memory, launches, and nothing beside them."""
    graph = _graph(_step, _arguments(fakes))
    passes.lower(graph)
    targets = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    assert targets == {"aten.empty.memory_format", LAUNCH}


def test_launches_get_the_strides_that_they_were_given(fakes: FakeTensorMode) -> None:
    values = _arguments(fakes)
    with fakes:
        values["x"] = torch.empty(64, 256, 4, device="cuda:0").transpose(1, 2)
    graph = _graph(_step, values)
    passes.lower(graph)
    project = _launches(graph)[0]
    given, fake = project.kwargs["kwargs"], project.meta["eager_input_vals"][1]["kwargs"]
    assert [given[f"stride_{axis}"] for axis in "mnc"] == list(fake["x"].stride()) == [1024, 1, 4]


def test_layers_that_are_alike_are_traced_once(fakes: FakeTensorMode, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[None] = []
    trace = passes.lowering._trace
    monkeypatch.setattr(passes.lowering, "_trace", lambda *given: (traced.append(None), trace(*given))[1])

    def layers(x: Tensor, f: Tensor, post: Tensor, res: Tensor, **rest: Tensor) -> Tensor:
        for _ in range(3):
            x = mhc.expand_combine(f, None, post, x, res)
        return x

    graph = _graph(layers, _arguments(fakes))
    assert passes.lower(graph).lowered == {"expand_combine": 3}
    assert len(traced) == 1
    made = graph.find_nodes(op="call_function", target=torch.ops.aten.empty.memory_format)
    assert len({compat.storage_of(node.meta["val"]) for node in made}) == 3


def _gradients(layers: int, observe: Callable[[int, Tensor], list[Tensor]]) -> Callable[..., Any]:
    def function(x: Tensor, f: Tensor, post: Tensor, res: Tensor, **rest: Tensor) -> Any:
        seen, d = [], 2 * x
        for layer in range(layers):
            df, _, d_post, d, d_res = mhc.expand_combine_backward(d, f, None, post, x, res, [True] * 5)
            seen += [df, d_post, d_res, *observe(layer, d)]
        return seen, d

    return function


def _in_place(fakes: FakeTensorMode, function: Callable[..., Any], layers: int) -> list[bool]:
    graph = _graph(function, _arguments(fakes))
    report = passes.lower(graph)
    graph.lint()
    kernels = [node.kwargs["kwargs"] for node in _launches(graph) if "d_out" in node.kwargs["kwargs"]]
    assert len(kernels) == layers
    found = [kernel["d_out"] is kernel["dx"] for kernel in kernels]
    assert report.lowered["in place"] == sum(found)
    return found


def test_gradients_of_streams_take_over_memory(fakes: FakeTensorMode) -> None:
    assert _in_place(fakes, _gradients(3, lambda layer, d: []), 3) == [True] * 3


@pytest.mark.parametrize(
    "observe",
    [
        lambda d: [d.view(-1)],  # returned, as a view
        lambda d: [d.transpose(0, 1).narrow(0, 1, 1).sum()],  # read once more, through views
        lambda d: [d + 1],
    ],
)
def test_gradients_that_are_read_again_keep_their_memory(
    fakes: FakeTensorMode, observe: Callable[[Tensor], list[Tensor]]
) -> None:
    """The gradient behind the second layer is read after the third: the third may not write over it."""
    kept: list[Tensor] = []

    def function(**values: Tensor) -> Any:
        kept.clear()
        gradients = _gradients(4, lambda layer, d: kept.append(d) or [] if layer == 1 else [])(**values)  # type: ignore[func-returns-value]
        return gradients, observe(kept[0])

    assert _in_place(fakes, function, 4) == [True, True, False, True]


def test_inputs_are_not_written_to(fakes: FakeTensorMode) -> None:
    def function(x: Tensor, f: Tensor, post: Tensor, res: Tensor, **rest: Tensor) -> Any:
        d = rest["phi"].view(-1).narrow(0, 0, x.numel()).view(x.shape)
        return mhc.expand_combine_backward(d, f, None, post, x, res, [True] * 5)

    values = _arguments(fakes, tokens=4)
    graph = _graph(function, values)
    assert passes.lower(graph).lowered == {"expand_combine_backward": 1}


def test_a_gradient_that_is_also_the_streams_is_not_written_to(fakes: FakeTensorMode) -> None:
    def function(x: Tensor, f: Tensor, post: Tensor, res: Tensor, **rest: Tensor) -> Any:
        d = x + 1
        return mhc.expand_combine_backward(d, f, None, post, d, res, [True] * 5)

    graph = _graph(function, _arguments(fakes))
    assert passes.lower(graph).lowered == {"expand_combine_backward": 1}


def test_what_cannot_be_lowered_stays(fakes: FakeTensorMode, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> None:
        raise RuntimeError("planted")

    graph = _graph(_step, _arguments(fakes))
    monkeypatch.setattr(passes.lowering, "_describe", broken)
    before = str(graph)
    assert not passes.lower(graph).lowered
    assert str(graph) == before


def test_float64_has_no_kernels(fakes: FakeTensorMode) -> None:
    with fakes:
        values = {name: value.double() for name, value in _arguments(fakes).items()}
    graph = _graph(_step, values)
    assert not passes.lower(graph).lowered


def test_symbolic_sizes_stay(fakes: FakeTensorMode) -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env)
    values = _arguments(mode, device="cpu")
    x = make_fx(lambda x: mhc.contract(x), tracing_mode="symbolic")(values["x"]).graph
    assert not passes.lower(x).lowered
    assert _operators(x) == ["mhc.contract.default"]


# On CPU, through Inductor.


def _evaluate(call: Callable[..., Any], model: torch.nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    (y, *_) = call(x)
    (y.sin().sum()).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    return {"y": y.detach(), "dx": x.grad} | gradients  # type: ignore[dict-item]


@pytest.mark.parametrize("fuse", [True, False])
def test_on_cpu(fuse: bool) -> None:
    """Outputs and gradients are as near to float64 as with operators left whole."""
    model, x = Stack(layers=3), torch.randn(2, 9, STREAMS, WIDTH)
    options = {} if fuse else {"mhc.fuse.boundary": False, "mhc.fuse.boundary_backward": False}
    reference = Float64Reference(model)
    exact = _evaluate(reference, reference.module, x.double())
    errors = {}
    for lower in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="mhc", options=options | {"mhc.lower": lower})
        values = _evaluate(compiled, model, x)
        errors[lower] = {name: check.error(values[name], exact[name]) for name in exact}
        assert backend.last_report is not None
        assert bool(backend.last_report.lowered) == lower
    for name, error in errors[True].items():
        # Other roundings of the same sums, some of few numbers; wrong terms would be of the order of 1.
        assert error <= max(4 * errors[False][name], 32 * torch.finfo(torch.float32).eps), name
