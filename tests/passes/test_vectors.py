"""Rows and biases in the operators' order: the elements that are taken are those that torch's index takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from mhc_compile.passes import shadow
from mhc_compile.passes.rewrite.copies import Copies
from mhc_compile.passes.rewrite.vectors import Vectors

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# Of 12: each with the calls that it takes; none of these copies the elements, but for cat.
ORDERS: dict[str, tuple[Sequence[int], list[str]]] = {
    "all": (range(12), []),
    "some": (range(3, 7), ["narrow"]),
    "one": ([5], ["narrow"]),
    "one several times": ([5] * 3, ["narrow", "squeeze", "unsqueeze", "expand"]),
    "each several times": ([2, 2, 3, 3], ["narrow", "unsqueeze", "expand", "flatten"]),
    "the same again": ([2, 3, 2, 3], ["narrow", "unsqueeze", "expand", "flatten"]),
    "transposed": ([0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11], ["unflatten", "permute", "flatten"]),
    "every other": (range(0, 12, 2), ["narrow"] * 6 + ["cat"]),
    "backwards": ([2, 1, 0], ["narrow"] * 3 + ["cat"]),
    "with a gap": ([0, 1, 3, 4, 5], ["narrow"] * 2 + ["cat"]),
    "in any order": ([5, 0, 3, 11], ["narrow"] * 4 + ["cat"]),
}


@pytest.mark.parametrize(("order", "calls"), ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("rest", [(), (5,)], ids=["a bias", "phi"])
def test_elements_in_any_order(order: Sequence[int], calls: list[str], rest: tuple[int, ...]) -> None:
    x, found = torch.randn(12, *rest), []

    def take(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        record = shadow.trace(gm.graph)
        copies = Copies(record, (), ())
        vectors = Vectors(copies, record)
        given, result = (next(iter(copies.graph.find_nodes(op=op))) for op in ("placeholder", "output"))
        vectors.anchor = result.args[0][0]
        result.args = ((vectors._take(given, list(order), 12),),)
        copies.graph.lint()
        names = [node.target for node in copies.graph.nodes if node.op in ("call_function", "call_method")]
        found.extend(name if isinstance(name, str) else name.__name__ for name in names)
        return fx.GraphModule(gm, copies.graph)

    taken: Tensor = torch.compile(lambda x: x.sin(), backend=take)(x)
    assert torch.equal(taken, x[list(order)])
    assert found[:-1] == calls  # and the sine, which the program had
