"""The fused joint graph of two sublayers as text, and the fusions as the backend's options know them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

import mhc_compile
from mhc_compile import compat, hooks, records
from mhc_compile.passes.fuse.joint import arguments, is_backward, is_view
from mhc_compile.testing.graph_text import graph_text
from tests.passes.fused import Stack, assert_same, program, streams
from tests.zoo import check

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _fused() -> fx.Graph:
    model, x = Stack(2), streams()
    fused = program(model)
    check.evaluate(fused.call, model, (x,))
    return fused.graphs[0]


def test_two_sublayers() -> None:
    assert_expected_inline(
        graph_text(_fused()),
        """\
%0 = generate_mix_and_aggregate(x=f32[2, 3, 4, 24], phi=f32[24, 96], scale=f32[3], bias=f32[24],
    sinkhorn_steps=5)
%1 = boundary(f=f32[2, 3, 24](%0.0), layer_bias=f32[24], h_post=%0.1, x=f32[2, 3, 4, 24],
    h_res=%0.2, phi=f32[24, 96], scale=f32[3], bias=f32[24], sinkhorn_steps=5)
%2 = expand_combine(f=f32[2, 3, 24](%1.1), layer_bias=f32[24], h_post=%1.2, x=%1.0, h_res=%1.3)
%3 = expand_combine_backward(d_x_new=f32[2, 3, 4, 24], f=f32[2, 3, 24](%1.1), layer_bias=f32[24],
    h_post=%1.2, x=%1.0, h_res=%1.3, needs=[True, True, True, True, True])
%4 = boundary_backward(d_x_new=%3.3, d_layer_input=f32[2, 3, 24](%3.0, %1.1), d_next_post=%3.2,
    d_next_res=%3.4, f=f32[2, 3, 24](%0.0), layer_bias=f32[24], h_post=%0.1, x=f32[2, 3, 4, 24],
    h_res=%0.2, phi=f32[24, 96], scale=f32[3], bias=f32[24], x_new=%1.0, h=f32[2, 3, 24](%1.4),
    ms=f32[2, 3](%1.5), needs=[True, True, True, True, True, True, True, True, False, False],
    sinkhorn_steps=5)
%5 = generate_mix_and_aggregate_backward(d_layer_input=f32[2, 3, 24](%4.0, %0.0), d_h_post=%4.2,
    d_h_res=%4.4, x=f32[2, 3, 4, 24], phi=f32[24, 96], scale=f32[3], bias=f32[24], h=f32[2, 3,
    24](%0.3), ms=f32[2, 3](%0.4), d_x=%4.3, needs=[True, True, True, True, False, False],
    sinkhorn_steps=5)
return %2, %5.1, %5.2, %5.3, %5.0, %4.0, %0.0, %4.1, %4.5, %4.6, %4.7, %3.0, %1.1, %3.1""",
    )


def test_nothing_stands_between_the_gradients_of_the_streams() -> None:
    """Between the gradients of the output's streams and the input's, each one reads the previous one alone."""
    graph = _fused()
    *_, output = graph.nodes
    (gradient,) = [n for n in output.all_input_nodes if n.meta["val"].dim() == 4 and is_backward(n.args[0])]
    found = []
    while gradient.op != "placeholder":
        assert gradient.target is operator.getitem or is_view(gradient), gradient
        made = gradient.args[0]
        assert isinstance(made, fx.Node)
        if is_backward(made):
            found.append(made.target._opname)  # type: ignore[union-attr]
            first = arguments(made)["d_x"] if found[-1].startswith("generate") else made.args[0]
            assert isinstance(first, fx.Node)
            gradient = first
        else:
            gradient = made
    assert found == ["generate_mix_and_aggregate_backward", "boundary_backward", "expand_combine_backward"]


def _report() -> Any:
    assert records.last().errors == []
    return records.last()


def _kept(name: str) -> dict[str, int]:
    """What is left of three accumulations and two boundaries, forward and backward, without one of the fusions."""
    # Without accumulation the gradient of inner streams has two readers, and is no boundary's.
    gone = {name, "boundary_backward"} if name == "accumulate" else {name}
    return {key: n for key, n in {"accumulate": 3, "boundary": 2, "boundary_backward": 2}.items() if key not in gone}


@pytest.mark.parametrize("name", ["accumulate", "boundary", "boundary_backward"])
def test_a_fusion_is_left_out_by_its_name(name: str) -> None:
    fuse = hooks.FusePass({f"mhc.fuse.{name}": False})
    assert fuse.uuid() != hooks.FusePass().uuid()
    model, x = Stack(3), streams()
    names = [each for each in ("accumulate", "boundary", "boundary_backward") if fuse.options[f"mhc.fuse.{each}"]]
    fused = program(model, names)
    check.evaluate(fused.call, model, (x,))
    assert fused.counts == _kept(name)


def test_explain_counts() -> None:
    report = mhc_compile.explain(Stack(3), streams().requires_grad_())
    assert dict(report.fusions) == {"accumulate": 3, "boundary": 2, "boundary_backward": 2}
    assert "2 x boundary_backward" in str(report)


@pytest.mark.parametrize("given", [0, -1, True, 1.5, "sqrt", [2]])
def test_values_that_recompute_does_not_take(given: Any) -> None:
    with pytest.raises(ValueError, match=r"options: 'mhc.recompute' is .*; expected \"auto\", a number of layers >= 1"):
        mhc_compile.enable({"mhc.recompute": given})


@pytest.fixture
def empty_cache() -> Iterator[None]:
    """A graph that an earlier run left in Inductor's cache is found there, and has no report."""
    with compat.fresh_inductor_cache():
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("empty_cache")
def test_training_through_inductor() -> None:
    model, x = Stack(4), streams()
    options = {"mhc.recompute": 2, "mhc.fuse.boundary_backward": False}
    compiled = torch.compile(model, backend="mhc", options=options)
    records.forget()
    results = check.evaluate(compiled, model, (x,))
    assert dict(_report().fusions) == {"accumulate": 4, "boundary": 3, "recompute": 2}
    assert_same(results, check.evaluate(model, model, (x,)))


@pytest.mark.thorough
@pytest.mark.usefixtures("empty_cache")
def test_dynamic_training_through_inductor() -> None:
    model = Stack(2)
    compiled = torch.compile(model, backend="mhc", dynamic=True, options={"mhc.recompute": "auto"})
    for length in (5, 9):
        x = streams(length)
        assert_same(check.evaluate(compiled, model, (x,)), check.evaluate(model, model, (x,)))
    assert dict(_report().fusions) == {"accumulate": 2, "boundary": 1, "boundary_backward": 1}


@pytest.mark.usefixtures("empty_cache")
def test_inference_through_inductor() -> None:
    model, x = Stack(3), streams()
    compiled = torch.compile(model, backend="mhc", options={"mhc.recompute": "auto"})
    with torch.inference_mode():
        # Float32 rounding through a few dozen operations.
        torch.testing.assert_close(compiled(x)[0], model(x)[0], rtol=1e-5, atol=1e-5)
    assert dict(_report().fusions) == {"boundary": 2}
