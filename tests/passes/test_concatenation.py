"""Tensors put together from pieces, against torch: what they are views of has the elements that torch puts there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from mhc_compile.passes import shadow
from mhc_compile.passes.recognise.layout import Layout
from mhc_compile.passes.recognise.reader import Reader

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Program = Callable[[Tensor], Tensor]


def _elements(layout: Layout) -> Tensor:
    """The offset of every element."""
    steps = [[sum(i * s for i, (_, s) in zip(at, dim, strict=True)) for at in _indices(dim)] for dim in layout.dims]
    return torch.tensor([layout.offset + sum(at) for at in product(*steps)]).reshape([len(step) for step in steps])


def _indices(dim: tuple[tuple[int, int], ...]) -> Any:
    return product(*(range(size) for size, _ in dim))


def _views(program: Program, x: Tensor) -> list[Layout]:
    """How the result looks into x, and into nothing else."""
    found: list[Layout] = []

    def look(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        record = shadow.trace(gm.graph)
        given, result = (next(iter(gm.graph.find_nodes(op=op))) for op in ("placeholder", "output"))
        value = record.values[result.args[0][0]]
        found.extend(s.layout for s in Reader().views(value) if s.base is record.values[given])
        return gm.forward

    torch.compile(program, backend=look)(x)
    return found


def _scattered(x: Tensor) -> Tensor:
    """Written part by part, until nothing is left of the tensor that was there first."""
    part = torch.slice_scatter(torch.zeros(2, 6), x[0, :, 3:], 1, 3, 6)
    return torch.slice_scatter(part, x[0, :, :3], 1, 0, 3)


SEEN: dict[str, Program] = {
    "alike": lambda x: torch.cat([x[:, 0], x[:, 1]], 0),
    "stacked": lambda x: torch.stack([x[0, 1], x[2, 1], x[4, 1]], 1),
    "of several lengths": lambda x: torch.cat([x[..., :2], x[..., 2:6]], -1),
    "from the middle": lambda x: torch.cat([x[..., 1:3], x[..., 3:6]], -1),
    "every other row": lambda x: torch.cat([x[1:4:2, 0], x[5:12:2, 0]]),
    "of several steps": lambda x: torch.cat([x[:2, 0, :3].reshape(6), x[2:4, 0, :3].reshape(6)]),
    "written part by part": _scattered,
    "written at once": lambda x: torch.slice_scatter(torch.zeros(12, 2, 6), x, 1, 0, 2),
    "before what is written": lambda x: torch.slice_scatter(x, torch.zeros(12, 2, 2), 2, 4, 6)[..., 1:4],
    "behind what is written": lambda x: torch.slice_scatter(x, torch.zeros(12, 2, 2), 2, 0, 2)[..., 2:5],
    "row behind what is written": lambda x: torch.select_scatter(x, torch.zeros(2, 6), 0, 3)[4],
}
NOT_SEEN: dict[str, Program] = {
    "twice": lambda x: torch.cat([x[..., 1:3], x[..., 1:4]], -1),
    "with a gap": lambda x: torch.cat([x[..., :2], x[..., 3:6]], -1),
    "backwards": lambda x: torch.stack([x[2], x[1]]),
    "of several lengths and steps": lambda x: torch.cat([x[:2, 0, :3].reshape(6), x[2:5, 0, :3].reshape(9)]),
    "side by side in the first row alone": lambda x: torch.cat([x[:2, 0, :3], x[:4:2, 0, 3:]], 1),
    "above each other in the first column alone": lambda x: torch.cat([x[:2, 0, :2], x[2:4, 0, :4:2]], 0),
    "of several lengths, and one step": lambda x: torch.cat([x[0, 0, :1], x[0, 0, 1:4]]),
    "part of what is written": lambda x: torch.slice_scatter(x, torch.zeros(12, 2, 2), 2, 2, 4)[..., 3:5],
}


@pytest.mark.parametrize("program", [*SEEN.values(), *NOT_SEEN.values()], ids=[*SEEN, *NOT_SEEN])
def test_pieces_hold_the_elements_that_torch_says(program: Program) -> None:
    x = torch.arange(144).reshape(12, 2, 6)
    layouts = _views(program, x.float())
    assert bool(layouts) == (program in SEEN.values())
    for layout in layouts:
        assert torch.equal(_elements(layout), program(x))
