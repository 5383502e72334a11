"""Lowering: operators of the graph after grad become what they consist of, and nothing of a result changes."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from mhc_compile import compat, hooks, passes, records
from mhc_compile.testing.float64 import Float64Reference
from tests.passes.fused import Stack, evaluate
from tests.passes.lowering import (
    LAUNCH,
    arguments,
    boundary_backward,
    graph_of,
    launches,
    operators,
    shifted_backward,
    step,
)
from tests.zoo import check
from tests.zoo.common import STREAMS, WIDTH

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "fresh_cache")

mhc = torch.ops.mhc
ROOT = Path(__file__).parents[2]


def test_operators_become_launches(fakes: FakeTensorMode) -> None:
    graph = graph_of(step, arguments(fakes))
    layouts = [value.meta["val"] for value in graph.find_nodes(op="output")[0].args[0]]
    report = passes.lower(graph)
    graph.lint()
    assert report.lowered == {
        "generate_mix_and_aggregate": 1, "expand_combine": 1, "generate_mix_and_aggregate_backward": 1,
    }  # fmt: skip
    assert "1 x expand_combine" in str(report)
    assert operators(graph) == []
    # project and mix; combine; pre_gradient, mix_backward, products and reduce
    assert len(launches(graph)) == 7
    results = graph.find_nodes(op="output")[0].args[0]
    for result, before in zip(results, layouts, strict=True):
        value = result.meta["val"]
        assert (value.shape, value.stride(), value.dtype, value.device) == (
            before.shape, before.stride(), before.dtype, before.device
        )  # fmt: skip


def _mixed(x: Tensor, res: Tensor, **rest: Tensor) -> Any:
    out = mhc.mix_streams(x, res)
    return out, mhc.mix_streams_backward(out, x, res, [True, True], x)


def test_mixed_streams_become_launches(fakes: FakeTensorMode) -> None:
    graph = graph_of(_mixed, arguments(fakes))
    assert passes.lower(graph).lowered == {"mix_streams": 1, "mix_streams_backward": 1}
    graph.lint()
    assert operators(graph) == []
    # One forward; one backward, and one that adds the partial sums of the gradient of h.
    assert len(launches(graph)) == 3


def test_no_copies_are_left(fakes: FakeTensorMode) -> None:
    """With contiguous arguments, there are memory, launches, and nothing else."""
    graph = graph_of(step, arguments(fakes))
    passes.lower(graph)
    targets = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    assert targets == {"aten.empty.memory_format", LAUNCH}


def test_kernels_in_gluon_are_launched_by_an_operator(fakes: FakeTensorMode) -> None:
    """Inductor compiles a user's Triton kernel, and none of Gluon."""
    values = arguments(fakes)
    with fakes:
        values |= {name: values[name].bfloat16() for name in "xf"}
    graph = graph_of(boundary_backward, values)
    report = passes.lower(graph)
    graph.lint()
    assert report.lowered == {"boundary": 1, "boundary_backward": 1}
    assert operators(graph) == ["mhc._launch.default"] * 2
    # mix; pre_gradient and mix_backward; the sums of gates and of parameters
    assert len(launches(graph)) == 5
    for node in graph.find_nodes(op="call_function", target=mhc._launch.default):
        # Which Inductor gives it exactly.
        given, demanded = map(tree_leaves, (node.args, node.meta["eager_input_vals"][0]))
        for value, fake in zip(given, demanded, strict=True):
            assert not isinstance(value, fx.Node) or value.meta["val"].stride() == fake.stride()


@pytest.mark.parametrize("communicates", [False, True])
def test_a_boundary_in_one_pass(communicates: bool, fakes: FakeTensorMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside communication, a second kernel does what the first one leaves, and both write the same tensors."""
    monkeypatch.setattr("mhc_compile.kernels.boundary_pass.communicates", lambda: communicates)
    values = arguments(fakes, tokens=512, width=4096)
    with fakes:
        values |= {name: values[name].bfloat16() for name in "xf"}
    graph = graph_of(boundary_backward, values)
    assert passes.lower(graph).lowered["boundary"] == 1
    graph.lint()
    made = graph.find_nodes(op="call_function", target=mhc._launch.default)
    names = [re.search(r"boundary_\w+_kernel", str(node.args[0])) for node in made]
    forward = ["boundary_pass_kernel", "boundary_rest_kernel"] if communicates else ["boundary_pass_kernel"]
    assert [name and name.group() for name in names] == [*forward, "boundary_gradients_kernel"]
    if communicates:
        first, second = (node.kwargs["written"] for node in made[:2])
        assert first[: len(second)] == second
        assert first[-1] in made[1].args[1]


@pytest.mark.parametrize("communicates", [False, True])
def test_boundaries_count_from_zeros_in_common(
    communicates: bool, fakes: FakeTensorMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mhc_compile.kernels.boundary_pass.communicates", lambda: communicates)
    values = arguments(fakes, tokens=512, width=4096)
    with fakes:
        values |= {name: values[name].bfloat16() for name in "xf"}

    def two(x: Tensor, f: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, post: Tensor, res: Tensor) -> Any:
        first = mhc.boundary(f, None, post, x, res, phi, scale, bias)
        return mhc.boundary(f, None, first[2], first[0], first[3], phi, scale, bias)

    graph = graph_of(two, values)
    assert passes.lower(graph).lowered["boundary"] == 2
    graph.lint()
    targets = [str(node.target) for node in graph.nodes]
    assert targets.count("aten.fill_.Scalar") == 1
    assert "aten.full.default" not in targets


def test_a_shifted_boundary_becomes_launches(fakes: FakeTensorMode) -> None:
    values = arguments(fakes)
    graph = graph_of(shifted_backward, values)
    assert passes.lower(graph).lowered == {"shifted_boundary": 1, "shifted_boundary_backward": 1}
    graph.lint()
    assert operators(graph) == []
    # combine; read; project and mix; the gradient of the read's gates and its sum; mix_backward; products, combine, and
    # what adds up the partial sums of each
    assert len(launches(graph)) == 11
    with fakes:
        values |= {name: values[name].bfloat16() for name in "xf"}
    graph = graph_of(shifted_backward, values)
    passes.lower(graph)
    graph.lint()
    assert operators(graph) == ["mhc._launch.default"] * 2
    # mix; the gradient of the read's gates and its sum; mix_backward; the sums of gates and of parameters
    assert len(launches(graph)) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_are_given_no_views(dtype: torch.dtype, fakes: FakeTensorMode) -> None:
    """Whatever the number of token dimensions: they take addresses. Results have the shapes that they had."""
    values = arguments(fakes)
    with fakes:
        values |= {name: values[name].unflatten(0, (2, 32)) for name in ("x", "f", "post", "res")}
        values |= {name: values[name].to(dtype) for name in "xf"}
    graph = graph_of(boundary_backward, values)
    before = [node.meta["val"].shape for node in graph.find_nodes(op="output")[0].args[0]]
    passes.lower(graph)
    graph.lint()
    targets = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    assert targets <= {"aten.empty.memory_format", LAUNCH, "mhc._launch.default"}
    assert [node.meta["val"].shape for node in graph.find_nodes(op="output")[0].args[0]] == before


def test_what_writes_into_a_view_stays(fakes: FakeTensorMode) -> None:
    """Though nobody reads what it returns, and it returns a view."""

    def call(x: Tensor) -> Tensor:
        room = torch.empty_like(x)
        room.view(-1).copy_(x.view(-1))
        return room

    with fakes:
        body = passes.lowering._trace(call, [torch.empty(4, 6)])
    assert body.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)


def test_what_is_called_as_a_function_is_there() -> None:
    """Otherwise generated code would find out."""
    for operator, path in passes.lowering._FUNCTIONS.items():
        module, _, name = path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))
        assert hasattr(torch.ops.mhc, operator)


def test_launches_get_the_strides_that_they_were_given(fakes: FakeTensorMode) -> None:
    values = arguments(fakes)
    with fakes:
        values["x"] = torch.empty(64, 256, 4, device="cuda:0").transpose(1, 2)
    graph = graph_of(step, values)
    passes.lower(graph)
    project = launches(graph)[0]
    given, fake = project.kwargs["kwargs"], project.meta["eager_input_vals"][1]["kwargs"]
    assert [given[f"stride_{axis}"] for axis in "mnc"] == list(fake["x"].stride()) == [1024, 1, 4]


def test_tokens_that_do_not_collapse(fakes: FakeTensorMode) -> None:
    """Streams between two dimensions of tokens have no view, for which fake tensors raise another error."""
    with fakes:
        streams = torch.empty(3, 4, 7, 8).transpose(1, 2)
        whole, rows = importlib.import_module("mhc_compile.kernels.common").room_like(streams, 2)
    assert (whole.shape, whole.stride()) == (streams.shape, streams.stride())
    assert (rows.shape, rows.is_contiguous()) == ((21, 4, 8), True)


def test_layers_that_are_alike_are_traced_once(fakes: FakeTensorMode, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[None] = []
    trace = passes.lowering._trace
    monkeypatch.setattr(passes.lowering, "_trace", lambda *given: (traced.append(None), trace(*given))[1])

    def layers(x: Tensor, f: Tensor, post: Tensor, res: Tensor, **rest: Tensor) -> Tensor:
        for _ in range(3):
            x = mhc.expand_combine(f, None, post, x, res)
        return x

    graph = graph_of(layers, arguments(fakes))
    assert passes.lower(graph).lowered == {"expand_combine": 3}
    assert len(traced) == 1
    made = graph.find_nodes(op="call_function", target=torch.ops.aten.empty.memory_format)
    assert len({compat.storage_of(node.meta["val"]) for node in made}) == 3


def test_what_cannot_be_lowered_stays(fakes: FakeTensorMode, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> None:
        raise RuntimeError("planted")

    graph = graph_of(step, arguments(fakes))
    monkeypatch.setattr(passes.lowering, "_describe", broken)
    before = str(graph)
    report = passes.lower(graph)
    assert not report.lowered
    assert str(graph) == before
    assert report.errors
    assert all("planted" in error for error in report.errors)


def test_a_failure_elsewhere_is_reported(fakes: FakeTensorMode, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(passes.lowering, "Memory", broken)
    report = passes.lower(graph_of(step, arguments(fakes)))
    (error,) = report.errors
    assert re.fullmatch(r"RuntimeError: planted \(mhc_compile/passes/lower/__init__.py:\d+\)", error)
    assert not report.lowered


def test_float64_has_no_kernels(fakes: FakeTensorMode) -> None:
    with fakes:
        values = {name: value.double() for name, value in arguments(fakes).items()}
    graph = graph_of(step, values)
    assert not passes.lower(graph).lowered


def test_what_would_lie_otherwise_stays(caplog: pytest.LogCaptureFixture) -> None:
    """Every one of those that are alike, not the first alone."""

    def function(x: Tensor, f: Tensor, post: Tensor, res: Tensor, **rest: Tensor) -> Any:
        for _ in range(3):
            x = mhc.expand_combine(f, None, post, x, res)
        return x

    mode = FakeTensorMode()
    given = arguments(mode, device="cpu")
    with mode:
        given["x"] = torch.empty(64, 256, 4).mT
    graph = graph_of(function, given)
    with caplog.at_level(logging.INFO, logger="mhc_compile"):
        assert not passes.lower(graph).lowered
    assert operators(graph) == ["mhc.expand_combine.default"] * 3
    assert caplog.text.count("its parts would return tensors laid out otherwise") == 1


def test_operators_stay_whole_ahead_of_time(fakes: FakeTensorMode) -> None:
    from torch._inductor.virtualized import V

    graph = graph_of(step, arguments(fakes))
    before = operators(graph)
    with V.set_aot_compilation(True):
        assert not passes.lower(graph).lowered
    assert operators(graph) == before
    assert passes.lower(graph).lowered


# On CPU, through Inductor.


@pytest.mark.slow
@pytest.mark.parametrize("fuse", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_on_cpu(fuse: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Outputs and gradients are as near to float64 as with operators left whole, and none is."""
    caplog.set_level(logging.INFO, logger="mhc_compile")
    # Without boundaries no sublayer is in the middle.
    model, x = Stack(layers=3 if fuse else 2), torch.randn(2, 9, STREAMS, WIDTH)
    options = {} if fuse else {"mhc.fuse.boundary": False, "mhc.fuse.boundary_backward": False}
    reference = Float64Reference(model)
    exact = evaluate(reference, reference.module, x.double())
    errors = {}
    for lower in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="mhc", options=options | {"mhc.lower": lower})
        values = evaluate(compiled, model, x)
        errors[lower] = {name: check.error(values[name], exact[name]) for name in exact}
        assert bool(records.last().lowered) == lower
    assert "is not lowered" not in caplog.text
    for name, error in errors[True].items():
        # Other roundings of the same sums, some of few numbers; wrong terms would be of the order of 1.
        assert error <= max(4 * errors[False][name], 32 * torch.finfo(torch.float32).eps), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_operators_left_on_cpu(dtype: torch.dtype) -> None:
    """What sums over columns or tokens stays an operator: a token's bits depend on no other token."""
    mode = FakeTensorMode()
    given = arguments(mode, device="cpu")
    with mode:
        given |= {name: given[name].to(dtype) for name in "xf"}

    def function(x: Tensor, f: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, **rest: Tensor) -> Any:
        u, post, res, _, _ = mhc.generate_mix_and_aggregate(x, phi, scale, bias)
        y = mhc.expand_combine(u, f[0], post, x, res)
        y = mhc.mix_streams(y, res)
        return u, y, mhc.expand_combine_backward(y, f, None, post, x, res, [True] * 5)

    graph = graph_of(function, given)
    lowered = passes.lower(graph).lowered
    graph.lint()
    # The loops do not read float16, with which the whole operator is faster.
    apart = dtype != torch.float16
    of_combine = ["mhc._loop.default"] * 2 if apart else ["mhc.expand_combine_backward.default"]
    assert operators(graph) == ["mhc._loop.default", *of_combine]
    assert lowered["expand_combine"] == lowered["mix_streams"] == lowered["generate_mix_and_aggregate"] == 1
    assert lowered["expand_combine_backward"] == apart


class _Logits(torch.nn.Module):
    """A projection of more logits than gates have, which are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = torch.nn.Parameter(torch.randn(40, STREAMS * WIDTH) * 0.1)
        self.weight = torch.nn.Parameter(torch.randn(STREAMS * WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        h, ms = mhc.projection(x, self.phi, self.weight)
        return (torch.cat([h, ms.unsqueeze(-1)], -1),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_projections_on_cpu(dtype: torch.dtype) -> None:
    """Results and gradients are as near to float64 as the operator's, and a token's bits are its own."""
    model, x = _Logits(), torch.randn(2, 9, STREAMS, WIDTH).to(dtype)
    reference = Float64Reference(model)
    exact = evaluate(reference, reference.module, x.double())
    whole = evaluate(model, model, x)
    compiled = torch.compile(model, backend="mhc", dynamic=False)
    values = evaluate(compiled, model, x)
    assert records.last().lowered == ({} if dtype == torch.float16 else {"projection": 1, "projection_backward": 1})
    for name, value in exact.items():
        limit = 2 * check.error(whole[name], value) + 8 * torch.finfo(torch.float32).eps
        assert check.error(values[name], value) <= limit, name
        assert values[name].dtype == whole[name].dtype
    with torch.no_grad():
        assert torch.equal(compiled(x[:1, :3].clone())[0], compiled(x)[0][:1, :3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, *(pytest.param(tokens, marks=pytest.mark.thorough) for tokens in (2, 7))])
def test_tokens_on_cpu_do_not_depend_on_each_other(tokens: int, dtype: torch.dtype) -> None:
    """The forward pass of some of the tokens, compiled for as many, has the bits of all of them together."""
    model, x = Stack(layers=2).requires_grad_(False), torch.randn(9, STREAMS, WIDTH, dtype=dtype)
    for sublayer in model.sublayers:
        sublayer.layer = torch.nn.Identity()  # type: ignore[assignment]  # an operator of others may choose by the batch
    compiled = torch.compile(model, backend="mhc", dynamic=False)
    (whole,) = compiled(x)
    assert records.last().lowered["boundary"] == 1
    assert torch.equal(compiled(x[:tokens].clone())[0], whole[:tokens])


def test_what_kernels_are_chosen_by_is_in_the_cache_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that Inductor has on disk was lowered for so many processors, and where nothing was communicated."""
    alone = hooks.LowerPass().uuid()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert hooks.LowerPass().uuid() != alone
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    keys = []
    for processors in (132, 114):
        properties = type("Properties", (), {"multi_processor_count": processors})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        keys.append(hooks.LowerPass().uuid())
    assert keys[0] != keys[1]


def test_option() -> None:
    assert hooks.LowerPass().uuid() != hooks.LowerPass({"mhc.lower": False}).uuid()
    with pytest.raises(Exception, match=r"'mhc.lower' is 'no'; expected True or False"):
        torch.compile(Stack(1), backend="mhc", options={"mhc.lower": "no"})(torch.randn(2, STREAMS, WIDTH))


@pytest.mark.parametrize("aware", [False, True])
def test_a_users_own_pass_comes_first(aware: bool) -> None:
    """Also one that learns from Inductor whether the graph is for inference, where there are such."""
    from torch._inductor import custom_graph_pass

    kind = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    if aware and kind is None:
        pytest.skip("this torch has no passes that are told whether a graph is for inference")
    seen: list[tuple[bool, dict[str, Any]]] = []

    def look(self: Any, graph: fx.Graph, **known: Any) -> None:
        seen.append(("mhc.boundary.default" in operators(graph), known))

    base = kind if aware else custom_graph_pass.CustomGraphPass
    own = type("Own", (base,), {"__call__": look, "uuid": lambda self: "own"})()
    with torch._inductor.config.patch(post_grad_custom_post_pass=own), torch.no_grad():
        torch.compile(Stack(2), backend="mhc")(torch.randn(2, STREAMS, WIDTH))
    assert seen == [(True, {"is_inference": True} if aware else {})]
    assert records.last().lowered["boundary"] == 1


# Compiled for a GPU that need not exist.


@pytest.mark.thorough
def test_kernels_compile_to_what_a_launch_compiles_to() -> None:
    """In Inductor's code, for many tokens, for one and for any number: no operator is left, and every kernel has the
    instructions of a launch. So neither Inductor's idea of an argument nor the number of tokens decides results' bits.
    """
    pytest.importorskip("triton")
    if torch.version.cuda is not None and not torch.cuda.is_available():
        pytest.skip("a CUDA build looks for its driver as soon as a GPU is pretended")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.passes.compile_lowered", "64", "1", "0"],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    wrappers = [row["wrapper"] for row in rows if "wrapper" in row]
    # Any number may be one that phi is split ahead for.
    for wrapper, count in zip(wrappers, (11, 11, 13), strict=True):
        assert "torch.ops.mhc" not in wrapper
        assert wrapper.count(".run(") == count
    compiled = [row for row in rows if "kernel" in row]
    assert len(compiled) == 31
    many = {row["kernel"]: row["launched"] for row in compiled if row["tokens"] == 64}
    for row in compiled:
        found = row["embedded"]
        # A float arrives in 64 bits and is rounded once; nothing else is done in them.
        found.pop("cvt.rn.f32.f64", None)
        assert found == row["launched"], row["kernel"]
        assert row["tokens"] == 0 or row["launched"] == many[row["kernel"]], row["kernel"]
