"""Rows of zeros that launches alone use become parts of one; `tests.passes.test_lower_on_cuda` runs such programs."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mhc_compile.ops  # noqa: F401  (registers the operators)
from mhc_compile import compat
from mhc_compile.passes.lower.zeros import merge_zeros

FULL = torch.ops.aten.full.default


def _launch(x: Tensor, flags: Tensor) -> None:
    torch.ops.mhc._launch("", [x], [], written=[flags])


def _graph(program: object) -> fx.GraphModule:
    with FakeTensorMode():
        module: fx.GraphModule = make_fx(program, compat.inductor_decompositions())(torch.empty(3))  # type: ignore[arg-type]
    return module


def _launched(graph: fx.Graph) -> list[fx.Node]:
    launches = graph.find_nodes(op="call_function", target=torch.ops.mhc._launch.default)
    return [launch.kwargs["written"][0] for launch in launches]


def test_rows_become_parts_of_one() -> None:
    def program(x: Tensor) -> Tensor:
        sizes = (5, 8, 3)
        for size in sizes:
            _launch(x, torch.zeros(size, dtype=torch.int64))
            x = x + 1
        return x

    module = _graph(program)
    merge_zeros(module.graph)
    module.graph.lint()
    parts = _launched(module.graph)
    assert not module.graph.find_nodes(op="call_function", target=FULL)
    assert len({part.args[0] for part in parts}) == 1
    # Each begins at a multiple of 16 bytes, and none overlap.
    assert [(part.args[2], part.args[3]) for part in parts] == [(0, 5), (6, 14), (14, 17)]
    assert [len(part.meta["val"]) for part in parts] == [5, 8, 3]
    (whole,) = {part.args[0] for part in parts}
    assert len(whole.meta["val"]) == 18  # type: ignore[union-attr]
    filled: list[Tensor] = []
    for part in parts:
        part.meta["val"] = None
    for launch in module.graph.find_nodes(op="call_function", target=torch.ops.mhc._launch.default):
        launch.target = lambda text, read, sizes, *, written: filled.append(written[0].clone())
    module.recompile()
    module(torch.ones(3))
    assert [len(row) for row in filled] == [5, 8, 3]
    assert all(torch.equal(row, torch.zeros_like(row)) for row in filled)


def test_what_stays() -> None:
    """Others than zeros, rows with two readers or with one that is no launch, of two dimensions, and a single one."""

    def program(x: Tensor) -> Tensor:
        _launch(x, torch.ones(4, dtype=torch.int64))
        twice = torch.zeros(4, dtype=torch.int64)
        _launch(x, twice)
        _launch(x, twice)
        _launch(x, torch.zeros(4, 4, dtype=torch.int64))
        _launch(x, torch.zeros(4, dtype=torch.int32))
        _launch(x, torch.zeros(4, dtype=torch.int64))
        return x + torch.zeros(3)

    module = _graph(program)
    assert len(module.graph.find_nodes(op="call_function", target=FULL)) == 6
    before = str(module.graph)
    merge_zeros(module.graph)
    assert str(module.graph) == before
