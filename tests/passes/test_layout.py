"""Layouts against torch: the offsets they give are the elements that the same views of an arange hold."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhc_compile.passes.recognise.layout import Layout, NotALayout, merged, refine


def _offsets(layout: Layout) -> torch.Tensor:
    """Every element's offset, by brute force."""
    dims = []
    for dim in layout.dims:
        sizes = [range(size) for size, _ in dim]
        dims.append([sum(i * s for i, (_, s) in zip(index, dim, strict=True)) for index in product(*sizes)])
    flat = [layout.offset + sum(index) for index in product(*dims)]
    return torch.tensor(flat).reshape(layout.shape)


@st.composite
def _view(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    kind = draw(st.sampled_from(["permute", "reshape", "select", "expand"]))
    if kind == "permute":
        return kind, tuple(draw(st.permutations(range(len(shape)))))
    if kind == "reshape":
        merged = draw(st.integers(0, max(0, len(shape) - 2)))
        if draw(st.booleans()) and len(shape) > 1:
            return kind, (*shape[:merged], shape[merged] * shape[merged + 1], *shape[merged + 2 :])
        at = draw(st.integers(0, len(shape) - 1))
        divisor = draw(st.sampled_from([d for d in range(1, shape[at] + 1) if shape[at] % d == 0]))
        return kind, (*shape[:at], divisor, shape[at] // divisor, *shape[at + 1 :])
    if kind == "select":
        axis = draw(st.integers(0, len(shape) - 1))
        start = draw(st.integers(0, shape[axis] - 1))
        return kind, (axis, start, draw(st.integers(1, shape[axis] - start)))
    return kind, (draw(st.integers(1, 3)), *shape)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_views_hold_the_elements_that_torch_says(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    layout, tensor = Layout.contiguous(shape), torch.arange(prod(shape)).reshape(shape)
    for _ in range(data.draw(st.integers(1, 5))):
        kind, argument = data.draw(_view(tuple(tensor.shape)))
        if kind == "select":
            axis, start, length = argument
            tensor = tensor.narrow(axis, start, length)
            try:
                layout = layout.select(axis, start, length)
            except NotALayout:
                return  # a slice of a dimension that is made of several: allowed to have no description
        else:
            tensor = getattr(tensor, kind)(argument)
            try:
                layout = getattr(layout, kind)(argument)
            except NotALayout:
                assert kind == "reshape"
                return  # sizes that cut a repeated dimension within a repetition
        assert layout.shape == tuple(tensor.shape)
        assert torch.equal(_offsets(layout), tensor)
    assert layout.is_identity() == torch.equal(tensor.flatten(), torch.arange(tensor.numel()))


def test_refine_finds_common_factors() -> None:
    streams = Layout.contiguous((2, 12)).reshape((2, 3, 4)).permute((0, 2, 1)).reshape((2, 12))
    flat = Layout.contiguous((2, 12))
    assert refine(flat, streams) == ((0, 2, (12, 12)), (1, 4, (3, 1)), (1, 3, (1, 4)))


def test_refine_refuses_other_shapes() -> None:
    with pytest.raises(NotALayout):
        refine(Layout.contiguous((6, 2)), Layout.contiguous((4, 3)))


def test_merged_joins_even_steps_within_a_dimension() -> None:
    """Not across dimensions, and not where one of the layouts does not go on evenly."""
    assert merged([(0, 2, (12, 24)), (0, 3, (4, 8)), (1, 4, (1, 2))]) == [(0, 6, (4, 8)), (1, 4, (1, 2))]
    assert merged([(1, 2, (3, 1)), (1, 3, (1, 2))]) == [(1, 2, (3, 1)), (1, 3, (1, 2))]
