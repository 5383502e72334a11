"""Rows of zeros that launches alone use become parts of one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mhc_compile.ops  # noqa: F401  (registers the operators)
from mhc_compile import compat
from mhc_compile.passes.lower import lower

FULL = torch.ops.aten.full.default
LAUNCH = torch.ops.mhc._launch.default


def _launch(x: Tensor, flags: Tensor) -> None:
    torch.ops.mhc._launch("", [x], [], written=[flags])


def _graph(program: Callable[[Tensor], Tensor]) -> fx.GraphModule:
    with FakeTensorMode():
        return make_fx(program, compat.inductor_decompositions())(torch.empty(3))


def _launches(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=LAUNCH)


@pytest.mark.parametrize(
    ("dtype", "places", "length"),
    # Each part begins at a multiple of 16 bytes, and none overlap.
    [(torch.int64, [(0, 5), (6, 14), (14, 17)], 18), (torch.uint8, [(0, 5), (16, 24), (32, 35)], 48)],
    ids=str,
)
def test_rows_become_parts_of_one(dtype: torch.dtype, places: list[tuple[int, int]], length: int) -> None:
    sizes = (5, 8, 3)

    def program(x: Tensor) -> Tensor:
        for size in sizes:
            _launch(x, torch.zeros(size, dtype=dtype))
            x = x + 1
        return x

    module = _graph(program)
    assert not lower(module.graph)
    module.graph.lint()
    assert not module.graph.find_nodes(op="call_function", target=FULL)
    parts = [launch.kwargs["written"][0] for launch in _launches(module.graph)]  # type: ignore[index]
    (whole,) = {part.args[0] for part in parts}  # type: ignore[union-attr]
    assert [part.args[2:] for part in parts] == places  # type: ignore[union-attr]
    for node, size in zip([whole, *parts], [length, *sizes], strict=True):
        value = compat.example(node)
        assert (value.shape, value.dtype, value.device.type) == ((size,), dtype, "cpu")

    seen: list[Tensor] = []

    def note(text: str, read: list[Tensor], sizes: list[int], *, written: list[Tensor]) -> None:
        seen.append(written[0].clone())
        written[0].fill_(7)

    for launch in _launches(module.graph):
        launch.target = note
    module.recompile()
    # Memory that was something else before.
    for _ in range(3):
        torch.full((length,), 5, dtype=dtype)
        module(torch.ones(3))
    assert [len(row) for row in seen] == 3 * list(sizes)
    assert not any(row.any() for row in seen)


def test_rows_of_another_kind_have_their_own() -> None:
    kinds = [(torch.int64, "cpu"), (torch.int32, "cpu"), (torch.int64, "meta")]

    def program(x: Tensor) -> Tensor:
        for dtype, device in kinds * 2:
            _launch(x, torch.zeros(4, dtype=dtype, device=device))
        return x

    module = _graph(program)
    lower(module.graph)
    parts = [launch.kwargs["written"][0] for launch in _launches(module.graph)]  # type: ignore[index]
    values = [compat.example(part) for part in parts]
    assert [(value.dtype, value.device.type) for value in values] == kinds * 2
    assert len({part.args[0] for part in parts}) == 3  # type: ignore[union-attr]


def test_a_row_may_be_for_two_launches() -> None:
    """As of a boundary, where the second goes on with what the first has counted."""

    def program(x: Tensor) -> Tensor:
        for size in (4, 6):
            flags = torch.zeros(size, dtype=torch.int64)
            _launch(x, flags)
            torch.ops.mhc._launch("", [x, flags], [], written=[x])
        return x

    module = _graph(program)
    lower(module.graph)
    assert not module.graph.find_nodes(op="call_function", target=FULL)
    first, second, third, fourth = _launches(module.graph)
    for counts, goes_on in ((first, second), (third, fourth)):
        assert counts.kwargs["written"][0] is goes_on.args[1][1]  # type: ignore[index]
    assert first.kwargs["written"] != third.kwargs["written"]


def test_what_stays() -> None:
    """Others than zeros, rows with a reader that is no launch, of two dimensions, and a single one."""

    def program(x: Tensor) -> Tensor:
        _launch(x, torch.ones(4, dtype=torch.int64))
        twice = torch.zeros(4, dtype=torch.int64)
        _launch(x, twice)
        x = x + twice.sum()
        _launch(x, torch.zeros(4, 4, dtype=torch.int64))
        _launch(x, torch.zeros(4, dtype=torch.int32))
        _launch(x, torch.zeros(4, dtype=torch.int64))
        return x + torch.zeros(3)

    module = _graph(program)
    assert len(module.graph.find_nodes(op="call_function", target=FULL)) == 6
    before = str(module.graph)
    lower(module.graph)
    assert str(module.graph) == before


def test_constants_of_others_are_not_looked_at() -> None:
    """Which another pass may have written in its own way."""
    module = _graph(lambda x: x + torch.zeros(3))
    (full,) = module.graph.find_nodes(op="call_function", target=FULL)
    full.args, full.meta = (torch.Size([3]), 0), {}
    before = str(module.graph)
    lower(module.graph)
    assert str(module.graph) == before
