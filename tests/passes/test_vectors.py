"""Rows and biases in the operators' order: the elements that are taken are those that torch's index takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mhc_compile.passes import shadow
from mhc_compile.passes.rewrite.copies import Copies
from mhc_compile.passes.rewrite.vectors import Vectors
from tests.zoo import check
from tests.zoo.common import random_parameter, random_phi

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
        vectors._needs_gradients = lambda: False  # type: ignore[method-assign]  # there is no site
        result.args = ((vectors._take(given, list(order), 12),),)
        copies.graph.lint()
        names = [node.target for node in copies.graph.nodes if node.op in ("call_function", "call_method")]
        found.extend(name if isinstance(name, str) else name.__name__ for name in names)
        return fx.GraphModule(gm, copies.graph)

    taken: Tensor = torch.compile(lambda x: x.sin(), backend=take)(x)
    assert torch.equal(taken, x[list(order)])
    assert found[:-1] == calls  # and the sine, which the program had


class ScaledTwice(nn.Module):
    """Each gate has a number of `scale` and one more factor, which all gates share."""

    def __init__(self) -> None:
        super().__init__()
        self.phi, self.bias = random_phi(24, 4 * 6), random_parameter(24)
        self.scale, self.factor = random_parameter(3, mean=1.0), random_parameter(1, mean=2.0)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(-2)
        logits = F.linear(flat, self.phi) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
        parts, biases = logits.split([4, 4, 16], -1), self.bias.split([4, 4, 16])
        pre, post, res = (parts[i] * self.scale[i] * self.factor + biases[i] for i in range(3))
        h_res = res.unflatten(-1, (4, 4)).softmax(-1) + 1e-6
        h_res = h_res / (h_res.sum(-2, keepdim=True) + 1e-6)
        f = torch.tanh((torch.sigmoid(pre).unsqueeze(-1) * x).sum(-2))
        return 2 * torch.sigmoid(post).unsqueeze(-1) * f.unsqueeze(-2) + h_res.mT @ x


def test_a_factor_beside_the_scale_of_each_gate() -> None:
    outcome = check.run(ScaledTwice(), (torch.randn(2, 3, 4, 6),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"], str(outcome.report)
