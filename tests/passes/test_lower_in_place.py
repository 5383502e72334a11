"""Lowering: an operator writes its gradient of the streams into one that nobody reads again, and into no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mhc_compile import passes
from tests.passes.lowering import arguments, graph_of, launches

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "fresh_cache")

mhc = torch.ops.mhc


def _gradients(layers: int, observe: Callable[[int, Tensor], list[Tensor]]) -> Callable[..., Any]:
    def function(x: Tensor, f: Tensor, post: Tensor, res: Tensor, **rest: Tensor) -> Any:
        seen, d = [], 2 * x
        for layer in range(layers):
            df, _, d_post, d, d_res = mhc.expand_combine_backward(d, f, None, post, x, res, [True] * 5)
            seen += [df, d_post, d_res, *observe(layer, d)]
        return seen, d

    return function


def _in_place(fakes: FakeTensorMode, function: Callable[..., Any], layers: int) -> list[bool]:
    graph = graph_of(function, arguments(fakes))
    report = passes.lower(graph)
    graph.lint()
    kernels = [node.kwargs["kwargs"] for node in launches(graph) if "d_out" in node.kwargs["kwargs"]]
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
    """The gradient after the second layer is read after the third: the third may not write over it."""
    kept: list[Tensor] = []

    def function(**values: Tensor) -> Any:
        kept.clear()
        gradients = _gradients(4, lambda layer, d: kept.append(d) or [] if layer == 1 else [])(**values)  # type: ignore[func-returns-value]
        return gradients, observe(kept[0])

    assert _in_place(fakes, function, 4) == [True, True, False, True]


@pytest.mark.parametrize("observed", [False, True])
def test_the_backward_of_a_boundary_takes_over_memory(fakes: FakeTensorMode, observed: bool) -> None:
    """dx' and then dx lie where the gradient of x' lay, unless that is read once more."""

    def function(**values: Tensor) -> Any:
        x, f, post, res = (values[name] for name in ("x", "f", "post", "res"))
        parameters = values["phi"], values["scale"], values["bias"]
        new, u, *gates, h, ms = mhc.boundary(f, None, post, x, res, *parameters)
        saved = (f, None, post, x, res, *parameters, None, new, h, ms, [True, False, *[True] * 6, False])
        seen, d = [], 2 * x
        for _ in range(3):
            seen.append(d)
            df, _, d_post, d, *rest = mhc.boundary_backward(d, u, *gates, None, None, *saved)
            seen += [df, d_post, *rest]
        return [t for t in seen if observed or t.dim() != 3 or t is seen[-1]], d

    graph = graph_of(function, arguments(fakes))
    report = passes.lower(graph)
    graph.lint()
    kernels = [node.kwargs["kwargs"] for node in launches(graph)]
    products = [kernel for kernel in kernels if "dphi_part" in kernel and "d_x" in kernel]
    combines = [kernel for kernel in kernels if "d_out" in kernel and "sums_part" in kernel]
    assert len(products) == len(combines) == 3
    assert [kernel["d_x"] is kernel["dx"] for kernel in products] == [not observed] * 3
    assert all(kernel["d_out"] is kernel["dx"] for kernel in combines)
    assert report.lowered["in place"] == (0 if observed else 3)


def test_the_backward_of_a_shifted_boundary_takes_over_memory(fakes: FakeTensorMode) -> None:
    """As that of a boundary."""

    def function(x: Tensor, f: Tensor, post: Tensor, res: Tensor, **rest: Tensor) -> Any:
        parameters = rest["phi"], rest["scale"], rest["bias"]
        h, ms = mhc.projection(x, rest["phi"])
        saved = (f, None, post, x, res, post, *parameters, None, x, h, ms, [True, False, *[True] * 7, False])
        return mhc.shifted_boundary_backward(2 * x, f, post, post, res, None, None, *saved)

    graph = graph_of(function, arguments(fakes))
    assert passes.lower(graph).lowered["in place"] == 1
    kernels = [node.kwargs["kwargs"] for node in launches(graph)]
    (products,) = [kernel for kernel in kernels if "dphi_part" in kernel and "d_x" in kernel]
    (combined,) = [kernel for kernel in kernels if "d_out" in kernel and "sums_part" in kernel]
    assert products["d_x"] is products["dx"] is combined["dx"]


def test_inputs_are_not_written_to(fakes: FakeTensorMode) -> None:
    def function(x: Tensor, f: Tensor, post: Tensor, res: Tensor, **rest: Tensor) -> Any:
        d = rest["phi"].view(-1).narrow(0, 0, x.numel()).view(x.shape)
        return mhc.expand_combine_backward(d, f, None, post, x, res, [True] * 5)

    values = arguments(fakes, tokens=4)
    graph = graph_of(function, values)
    assert passes.lower(graph).lowered == {"expand_combine_backward": 1}


def test_a_gradient_that_is_also_the_streams_is_not_written_to(fakes: FakeTensorMode) -> None:
    def function(x: Tensor, f: Tensor, post: Tensor, res: Tensor, **rest: Tensor) -> Any:
        d = x + 1
        return mhc.expand_combine_backward(d, f, None, post, d, res, [True] * 5)

    graph = graph_of(function, arguments(fakes))
    assert passes.lower(graph).lowered == {"expand_combine_backward": 1}
