"""`mhc.check`: what is around the sites. Autocast, writes in place, and what others make of the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import mhc_compile
from mhc_compile import checking, compat
from tests.test_checking import CHECK, COMBINE, MIX, _reported, _wrong_streams, all_sites, without_inductor

__all__ = ["all_sites", "without_inductor"]  # fixtures

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "all_sites")

N, C = 4, 16


def _bfloat16(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


class Layer(nn.Module):
    """A connection whose projection and whose other steps may each be under an autocast of their own."""

    def __init__(self, projection: bool | None = None, rest: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.phi = nn.Parameter(torch.randn(2 * N, N * C) * 0.1)
        self.bias = nn.Parameter(torch.randn(2 * N))
        self.autocasts = projection, rest

    def _around(self, step: int) -> contextlib.AbstractContextManager[object]:
        enabled = self.autocasts[step]
        return contextlib.nullcontext() if enabled is None else _bfloat16(enabled)

    def forward(self, x: Tensor) -> Tensor:
        with self._around(0):
            flat = x.flatten(-2)
            h = F.linear(flat, self.phi) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
        with self._around(1):
            gates = torch.sigmoid(h.float() + self.bias)
            return self.rest(gates[..., :N], 2 * gates[..., N:], x)

    def rest(self, pre: Tensor, post: Tensor, x: Tensor) -> Tensor:
        f = torch.tanh((pre.unsqueeze(-1) * x).sum(-2))
        return post.unsqueeze(-1) * f.unsqueeze(-2) + x


class Checkpointed(Layer):
    """The region itself sets no autocast: it runs under that of the code around it."""

    def forward(self, x: Tensor) -> Tensor:
        with self._around(0):
            out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


def _compare(
    model: Layer,
    forward: Callable[[], contextlib.AbstractContextManager[object]],
    backward: Callable[[], contextlib.AbstractContextManager[object]],
) -> None:
    """Results and gradients of the first calls are those of the program; a cast more would be a thousandth."""
    compiled = torch.compile(model, backend="mhc", options=CHECK)
    for seed in range(checking.CALLS + 1):
        x, found = torch.randn(6, N, C, generator=torch.Generator().manual_seed(seed)), []
        for call in (compiled, model):
            model.zero_grad()
            with forward():
                out = call(x)
            with backward():
                out.float().square().sum().backward()
            found.append([out.detach(), *(torch.as_tensor(p.grad).clone() for p in model.parameters())])
        if seed < checking.CALLS:
            for one, other in zip(*found, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize(("projection", "rest"), [(None, True), (True, None), (None, False), (False, None)])
def test_steps_of_a_site_under_different_autocasts(outside: bool, projection: bool | None, rest: bool | None) -> None:
    """The site's code begins under the autocast in which its graph begins, not in that of its last step."""
    _compare(Layer(projection, rest), lambda: _bfloat16(outside), contextlib.nullcontext)
    assert _reported() == ([MIX, COMBINE], [], {MIX: 1, COMBINE: 1})


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("kind", [Layer, Checkpointed])
@pytest.mark.parametrize("within", [False, True])
def test_a_backward_pass_under_another_autocast(kind: type[Layer], within: bool) -> None:
    """It runs under the autocasts of the forward pass, and no others."""
    _compare(kind(), lambda: _bfloat16(within), lambda: _bfloat16(not within))
    assert _reported() == ([MIX, COMBINE], [], {MIX: 1, COMBINE: 1})


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("region", [True, False])
def test_a_region_of_an_autocast(region: bool) -> None:
    """The region's graph sets none: it begins under that of its call."""
    _compare(Checkpointed(region), lambda: _bfloat16(not region), contextlib.nullcontext)
    assert mhc_compile.report().errors == []
    assert _reported() == ([MIX, COMBINE], [], {MIX: 1, COMBINE: 1})


class Writing(Layer):
    """The sublayer writes in place into what it reads, which is a view of what an operator has made."""

    def rest(self, pre: Tensor, post: Tensor, x: Tensor) -> Tensor:
        f = F.relu(torch.einsum("bn,bnc->bc", pre, x), inplace=True)
        return (post.unsqueeze(-1) * f.unsqueeze(-2) + x).relu_()


@pytest.mark.usefixtures("without_inductor")
def test_what_a_site_makes_may_be_written() -> None:
    _compare(Writing(), contextlib.nullcontext, contextlib.nullcontext)
    assert _reported() == ([MIX, COMBINE], [], {MIX: 1, COMBINE: 1})


def test_no_view_keeps_values_and_strides() -> None:
    x = torch.arange(24.0).view(4, 6)
    for view in (x[1:, ::2], x.t(), x[:, 1:].view(4, 5), torch.view_as_complex(x.view(4, 3, 2)).conj().imag):
        copy = compat.no_view(view)
        assert not copy._is_view()
        assert copy.stride() == view.stride()
        torch.testing.assert_close(copy, view, rtol=0, atol=0)
    torch.testing.assert_close(compat.no_view(x[:1].expand(3, 6)), x[:1].expand(3, 6), rtol=0, atol=0)
    own = torch.ones(2)
    assert compat.no_view(own) is own


@pytest.mark.usefixtures("without_inductor")
def test_layers_of_which_dynamo_makes_one_graph() -> None:
    """Nothing is noted of what these graphs are given, until somebody asks."""
    model = nn.Sequential(*[Layer() for _ in range(4)])
    with torch._dynamo.config.patch(use_graph_deduplication=True), torch.no_grad():
        compiled = torch.compile(model, backend="mhc", options=CHECK)
        for _ in range(checking.CALLS + 1):
            compiled(torch.randn(6, N, C))
    report = mhc_compile.report()
    assert (report.errors, report.unchecked, dict(report.checked)) == ([], [], {MIX: 1, COMBINE: 1})


def _in_place(graph: fx.Graph) -> None:
    """As Inductor's own passes do: what is around a site becomes other code."""
    for node in graph.find_nodes(op="call_function", target=torch.tanh):
        with graph.inserting_after(node):
            copy = graph.call_function(torch.clone, (node,))
        copy.meta = dict(node.meta)
        node.replace_all_uses_with(copy, lambda user, copy=copy: user is not copy)


def _in_a_copy(graph: fx.Graph) -> None:
    """As passes of users may."""
    module, (copy, _) = graph.owning_module, compat.copy_graph(graph)
    assert module is not None
    _in_place(copy)
    module.graph = copy


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("kind", [Layer, Checkpointed])
@pytest.mark.parametrize("change", [_in_place, _in_a_copy])
def test_a_pass_before_ours_changes_a_graph_with_sites_left_alone(
    change: Callable[[fx.Graph], None], kind: type[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check sees the graph without the change, and what it finds holds for the graph with it."""
    _wrong_streams(monkeypatch)
    model = kind()
    compiled = torch.compile(model, backend="mhc", options=CHECK | {"pre_grad_custom_pass": change})
    with torch.no_grad():
        for seed in range(2 * checking.CALLS + 2):
            x = torch.randn(6, N, C, generator=torch.Generator().manual_seed(seed))
            torch.testing.assert_close(compiled(x), model(x))
    assert _reported() == ([MIX], [COMBINE], {MIX: 1})
