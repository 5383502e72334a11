"""Each site by itself: what both of its modules are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_compile import compat, passes
from mhc_compile.passes.site_modules import Alone
from mhc_compile.passes.widened import widened
from tests.passes.dynamo import graph_of
from tests.passes.test_surroundings import C, Layer, N, sinkhorn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Cast(Layer):
    """The program reads a cast of its streams, twice, and the operators read the streams."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class CastAgainAndAgain(Layer):
    """The program reads the streams as a cast of casts, which it makes after it has written random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.project(x)
        pre, post, res = self.pre(h), self.post(h), sinkhorn(self.logits(h))
        noise = torch.empty(C).uniform_()
        for _ in range(10):
            x = x.float()
        return self.write(torch.tanh(self.read(pre, x)) + noise, post, x, res)


def _parts(model: Layer, x: Tensor, *reasons: str) -> list[Alone]:
    """The sites that can be looked at alone; the others have these reasons."""
    found: list[Alone] = []

    def function_of(part: Alone) -> Callable[..., Any]:
        found.append(part)
        return lambda *given: None

    errors: list[str] = []
    apart = passes.apart(graph_of(model, x).graph, function_of, errors)
    assert apart is not None
    assert errors == []
    assert len(apart.whole) == len(reasons)
    assert all(reason in str(site.reason) for reason, site in zip(reasons, apart.whole, strict=True))
    return [part for part in found if part.site.op not in {site.op for site in apart.whole}]


class Factory(Layer):
    """A gate's code makes numbers of no tensor."""

    def read(self, pre: Tensor, x: Tensor) -> Tensor:
        return super().read(pre * torch.full((N,), 1.0), x)


@pytest.mark.parametrize("kind", [Layer, Factory])
def test_the_program_in_float64(kind: type[Layer]) -> None:
    """What a site reads is known to be tensors: only what reads none takes the default dtype."""
    x = torch.randn(2, 5, N, C)
    for part in _parts(kind(), x):
        given = [compat.example(node) for node in part.inputs]
        values = [torch.randn(tuple(one.shape), dtype=torch.float64) for one in given]
        assert {out.dtype for out in widened(part.program)(*values)} == {torch.float64}


@pytest.mark.parametrize(("kind", "dtype"), [(Layer, torch.float32), (Cast, torch.float32), (Cast, torch.bfloat16)])
def test_streams_and_a_cast_of_them_are_one_input(kind: type[Layer], dtype: torch.dtype) -> None:
    """As two inputs they would have two gradients, of which each module has the sum at another one."""
    mix, _ = _parts(kind(), torch.randn(2, 5, N, C, dtype=dtype))
    given = [compat.example(node) for node in mix.inputs]
    rows = N * N + 2 * N
    assert [tuple(value.shape) for value in given] == [(2, 5, N, C), (rows, N * C), (3,), (rows,)]
    assert given[0].dtype == dtype
    assert len(list(mix.program.graph.find_nodes(op="placeholder"))) == len(given)


class FirstStream(Layer):
    """The output is made of one stream, and a view on the way has symbolic sizes."""

    def forward(self, x: Tensor) -> Tensor:
        h, f = self.project(x), torch.tanh(x[..., 0, :].reshape(2, x.shape[1], C))
        return self.write(f, self.post(h), x, sinkhorn(self.logits(h)))


def test_an_output_that_is_made_of_the_streams_alone_is_no_input() -> None:
    x = torch.randn(2, 5, N, C)
    torch._dynamo.mark_dynamic(x, 1)
    (*_, write) = _parts(FirstStream(), x)
    given = [compat.example(node) for node in write.inputs]
    assert [value.dim() for value in given if isinstance(value, Tensor)] == [4, 3, 4]  # x, h_post and h_res


class FirstStreamDropped(Layer):
    """The output is made of one stream, and of random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        h, f = self.project(x), F.dropout(x[..., 0, :], 0.5)
        return self.write(f, self.post(h), x, sinkhorn(self.logits(h)))


def test_what_is_drawn_is_an_input() -> None:
    (*_, write) = _parts(FirstStreamDropped(), torch.randn(2, 5, N, C))
    assert [compat.example(node).dim() for node in write.inputs] == [4, 3, 3, 4]  # x, f, h_post and h_res
    assert not any(node.target is F.dropout for node in write.program.graph.nodes)


def test_a_site_whose_inputs_come_too_late_stays_whole() -> None:
    """Its function would be called after the draw, where the program made the first results before."""
    (write,) = _parts(CastAgainAndAgain(), torch.randn(2, 5, N, C), "after an operation that writes in place")
    assert write.site.op == "expand_combine"
