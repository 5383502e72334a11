"""Gradients of the same streams that follow each other on a CPU: one loop, where nothing else reads what is between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mhc_compile import passes
from tests.passes.lowering import graph_of
from tests.zoo import check

mhc = torch.ops.mhc
TOKENS, N, WIDTH = 7, 4, 24
SHAPES = {"x": (TOKENS, N, WIDTH), "f": (TOKENS, WIDTH), "phi": (8, N * WIDTH), "wide": (24, N * WIDTH)}
SHAPES |= {"scale": (2,), "bias": (8,), "post": (TOKENS, N), "res": (TOKENS, N, N), "h": (TOKENS, 8), "ms": (TOKENS,)}
SHAPES |= {"d_h": (TOKENS, 24), "d": (TOKENS, N, WIDTH), "other": (TOKENS, N, WIDTH)}

Given = dict[str, Tensor]


def _write(t: Given, d_x: Tensor | None = None) -> Tensor:
    """The gradient of streams that a write mixed."""
    needs = [True, False, True, True, True]
    gradient: Tensor = mhc.expand_combine_backward(t["d"], t["f"], None, t["post"], t["x"], t["res"], needs, d_x)[3]
    return gradient


def _read(t: Given, d_x: Tensor | None, x: str = "x") -> Tensor:
    saved = (t[x], t["phi"], t["scale"], t["bias"], None, t["h"], t["ms"], [True, *[False] * 4], d_x)
    gradient: Tensor = mhc.generate_mix_and_aggregate_backward(t["f"], t["post"], None, None, None, *saved)[0]
    return gradient


def _projection(t: Given, d_x: Tensor | None) -> Tensor:
    given = (t["d_h"], t["ms"], t["x"], t["wide"], None, [True, False, False], d_x)
    gradient: Tensor = mhc.projection_backward(*given)[0]
    return gradient


def _linear(t: Given, d_x: Tensor | None) -> Tensor:
    """Of a projection whose gates no norm scales, the streams themselves are not read."""
    gradient: Tensor = mhc.projection_backward(t["d_h"], None, t["x"], t["wide"], None, [True, False, False], d_x)[0]
    return gradient


def _two_without_norms(t: Given) -> Any:
    return _linear(t, _linear(t, _write(t)))


def _all(t: Given) -> Any:
    return _projection(t, _read(t, _write(t)))


def _in_another_order(t: Given) -> Any:
    return _read(t, _projection(t, _write(t, t["other"])))


def _read_twice(t: Given) -> Any:
    first = _read(t, _write(t))
    return _projection(t, first), first


def _mixture_read_twice(t: Given) -> Any:
    mixed = _write(t)
    return _read(t, mixed), mixed.sum()


def _three_projections(t: Given) -> Any:
    return _projection(t, _projection(t, _read(t, _write(t))))


def _of_other_streams(t: Given) -> Any:
    return _projection(t, _read(t, None, "other"))


def _two_writes(t: Given) -> Any:
    return _read(t, _write(t | {"res": t["res"] * 2}, _write(t)))


def _a_write_alone(t: Given) -> Any:
    return _write(t), _write(t, t["other"])


def _written_between(t: Given) -> Any:
    gradient = _write(t)
    t["d"].copy_(t["other"])
    return _read(t, gradient)


def _evaluate(function: Callable[[Given], Any], values: Given) -> list[Tensor]:
    return list(torch.utils._pytree.tree_leaves(function({k: v.clone() for k, v in values.items()})))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("function", "sums"),
    [
        (_all, 1),
        (_two_without_norms, 1),
        (_in_another_order, 1),
        (_read_twice, 2),
        (_mixture_read_twice, 1),
        (_three_projections, 2),
        (_of_other_streams, 2),
        (_two_writes, 1),
        (_a_write_alone, 0),
        (_written_between, 1),
    ],
)
def test_gradients_of_streams(function: Callable[[Given], Any], sums: int, dtype: torch.dtype) -> None:
    """How many loops compute them, and that they are right."""
    draw = torch.Generator().manual_seed(0)
    # Parameters and sums over columns are float32, streams of any dtype.
    streams = {"x", "f", "d", "other"}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = {
        name: torch.randn(shape, generator=draw).to(dtype if name in streams else wide)
        for name, shape in SHAPES.items()
    }
    values["ms"] = values["ms"].abs() + 0.5
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(value) for name, value in values.items()}
    graph = graph_of(lambda **tensors: function(tensors), fakes)
    passes.lower(graph)
    graph.lint()
    assert not graph.find_nodes(op="call_function", target=mhc._mixed.default)
    loops = graph.find_nodes(op="call_function", target=mhc._loop.default)
    found_sums = sum("'unproject'" in str(node.args[0]) for node in loops)
    if dtype != torch.float16:  # whose other terms are left to Inductor
        assert found_sums == sums
    module = fx.GraphModule(torch.nn.Module(), graph)
    found = torch.utils._pytree.tree_leaves(module(*[value.clone() for value in values.values()]))
    exact = _evaluate(function, {name: value.double() for name, value in values.items()})
    bound = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    assert len(found) == len(exact)
    assert all(check.error(value, other) < bound for value, other in zip(found, exact, strict=True))
