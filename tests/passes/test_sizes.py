"""Symbolic sizes: which of them the guards of a graph leave only one value for, and which may stay open."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch._dynamo import mark_dynamic

import mhc_compile
from mhc_compile.compat.values import _solution
from tests.zoo import check
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
N = sympy.Symbol("s0", integer=True, positive=True)
C = sympy.Symbol("s1", integer=True, positive=True)


@pytest.mark.parametrize(
    ("equation", "expected"),
    [
        (sympy.Eq(N**2 + 2 * N, 24), (N, 4)),
        (sympy.Eq(32 * N, 128), (N, 4)),
        (sympy.Eq(3 * N**2, 12), (N, 2)),
        (sympy.Eq(N * C, 128), None),
        (sympy.Eq(N**2 + 2, 3 * N, evaluate=False), None),  # 1 and 2
        (sympy.Eq(N**2, 2, evaluate=False), None),
        (sympy.Eq(sympy.Mod(N, 8), 4), None),
        (sympy.Eq(sympy.floor(N / 8), 4), None),
        (sympy.Ne(N, 4), None),
        (N <= 4, None),
        (sympy.true, None),
    ],
    ids=str,
)
def test_equations_with_one_solution(equation: Any, expected: Any) -> None:
    assert _solution(equation) == expected


class _ScaleGiven(Sublayer):
    """The scale is an argument of an open size, of which the first three numbers are used, or the last."""

    begin = 0

    def forward(self, x: Tensor, scale: Tensor) -> Any:
        pre, post, res = self.split(self.mixes(x))
        n, bias = self.n, self.bias.split((self.n, self.n, self.n**2))
        h_pre = self.pre(pre * scale[self.begin] + bias[0])
        h_post = self.post(post * scale[self.begin + 1] + bias[1])
        h_res = self.res((res * scale[self.begin + 2] + bias[2]).unflatten(-1, (n, n)))
        return self.write(x, self.layer(self.read(x, h_pre), x), h_post, h_res)


@pytest.mark.parametrize("begin", [0, -3])
@pytest.mark.parametrize("sizes", [(5,), (5, 1)])
def test_a_scale_of_symbolic_size(begin: int, sizes: tuple[int, ...]) -> None:
    model, x, scale = _ScaleGiven(4, 6, 3, 2), torch.randn(2, 3, 4, 6), torch.rand(sizes) + 0.5
    model.begin = begin
    outcome = check.run(model, (x, scale), exact=False, dynamic=True)
    check.assert_equal_to_eager(outcome)
    assert outcome.report.errors == []
    reasons = [site.reason for site in outcome.report.declined]
    assert reasons == ([] if begin == 0 else ["a scale or bias of symbolic size is read from its end"])


class _TokensCounted(nn.Module):
    """Two sizes have a known product, 6, and no known values."""

    def forward(self, gates: Tensor, x: Tensor) -> Tensor:
        tokens = gates.shape[0] * gates.shape[1]
        return torch.bmm(gates.view(tokens, 2, 2), x.view(6, 2, 6)).view(2, 3, 12)


def test_sizes_whose_product_alone_is_known() -> None:
    gates, x = torch.rand(2, 3, 2, 2), torch.randn(2, 3, 12)
    mark_dynamic(gates, (0, 1))
    assert mhc_compile.explain(_TokensCounted(), gates, x).errors == []


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torch_fails_where_a_size_is_a_constant() -> None:
    """What docs/limits.md says of torch itself, and what the fuzzer does not blame us for."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x * 2)[..., 8:]
        return y.detach(), y

    x = torch.randn(1, 24, requires_grad=True)
    with pytest.raises(AssertionError, match="incorrect out shape after application of ViewMeta sequence"):
        torch.compile(function, backend="aot_eager", dynamic=False)(x)
