"""Operators of other libraries may have the names of torch's. They compute something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zoo import check
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SHAPE = (2, 3, 4, 6)
_library = torch.library.Library("tests_names", "DEF")


def _define(signature: str, function: Any) -> Any:
    """An operator of the namespace, with the derivatives of what it is made of."""
    name = signature.partition("(")[0]
    _library.define(signature)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_autograd(
        f"tests_names::{name}",
        lambda ctx, grad: _gradients(function, ctx.given, grad),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "given", inputs),
        lib=_library,
    )
    torch.library.register_fake(f"tests_names::{name}", function, lib=_library)
    return getattr(torch.ops.tests_names, name)


def _gradients(function: Any, given: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    with torch.enable_grad():
        leaves = [a.detach().requires_grad_() if isinstance(a, Tensor) else a for a in given]
        tensors = [a for a in leaves if isinstance(a, Tensor)]
        found = dict(zip(map(id, tensors), torch.autograd.grad(function(*leaves), tensors, grad), strict=True))
    return tuple(found.get(id(a)) for a in leaves)


mul = _define("mul(Tensor a, Tensor b) -> Tensor", lambda a, b: a * b * 2)
add = _define("add(Tensor a, Tensor b) -> Tensor", lambda a, b: a - b)
sum_of = _define("sum(Tensor a, int[] dim) -> Tensor", lambda a, dim: a.sum(dim) + 1)
mm = _define("mm(Tensor a, Tensor b) -> Tensor", lambda a, b: (a @ b).tanh())
sigmoid = _define("sigmoid(Tensor a) -> Tensor", lambda a: torch.sigmoid(a) ** 2)
clone = _define("clone(Tensor a) -> Tensor", lambda a: a * 3)


class Product(Sublayer):
    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        return mul(h_pre.unsqueeze(-1), x).sum(2)


class SumOfStreams(Sublayer):
    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        return sum_of(h_pre.unsqueeze(-1) * x, [2])


class SumOfTerms(Sublayer):
    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return add(h_post.unsqueeze(-1) * f.unsqueeze(-2), h_res.mT @ x)


class ProductOfPhi(Sublayer):
    def project(self, flat: Tensor) -> Tensor:
        return mm(flat.flatten(0, 1), self.phi.T).unflatten(0, flat.shape[:2])


class Squashed(Sublayer):
    def pre(self, logits: Tensor) -> Tensor:
        return sigmoid(logits)


class Copied(Sublayer):
    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        return (h_pre.unsqueeze(-1) * clone(x)).sum(2)


@pytest.mark.parametrize("kind", [Product, SumOfStreams, SumOfTerms, ProductOfPhi, Squashed, Copied])
def test_an_operator_is_not_known_by_its_name_alone(kind: type[nn.Module]) -> None:
    outcome = check.run(kind(4, 6, 3, 2), (torch.randn(SHAPE),), exact=False)
    assert not outcome.report.errors, outcome.report.errors
    for name, value in outcome.eager.items():
        torch.testing.assert_close(outcome.rewritten[name], value, rtol=1e-4, atol=1e-5)
