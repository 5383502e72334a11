"""`mhc.check`: which calls count, when checkpointing repeats them, when they raise, and when threads make them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mhc_compile
from mhc_compile import checking, compat
from mhc_compile.nn import Form, HyperConnection
from tests.test_checking import (
    CHECK,
    COMBINE,
    MIX,
    WIDTH,
    _connection,
    _reported,
    _streams,
    _wrong_gradient,
    _wrong_streams,
    all_sites,
    without_inductor,
)

__all__ = ["all_sites", "without_inductor"]  # fixtures

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "all_sites")


class _Twice(nn.Module):
    """Two layers that Dynamo compiles one by one, to one graph, each of which is checkpointed."""

    def __init__(self, reentrant: bool, layer: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        form = Form.deepseek_v4(iterations=1)
        parts = [
            HyperConnection(nn.Sequential(nn.Linear(8, 8), layer or nn.Identity()), dim=8, form=form) for _ in range(2)
        ]
        self.layers, self.reentrant = nn.ModuleList(parts), reentrant
        for part in parts:
            part.compile(backend="mhc", options=CHECK)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x

    def train_once(self) -> None:
        self(torch.randn(2, 8, 4, 8, requires_grad=True)).square().sum().backward()


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_checkpointed(reentrant: bool) -> None:
    """The third call counts in the second step, between a layer's forward and its recomputation."""
    model = _Twice(reentrant)
    for _ in range(4):
        model.train_once()
    graphs = 1 + reentrant  # the forward pass without gradients has one of its own
    assert _reported()[1:] == ([], {MIX: graphs, COMBINE: graphs})


@pytest.mark.usefixtures("without_inductor")
def test_a_site_of_checkpointed_layers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer is compiled again between its forward and its recomputation."""
    _wrong_streams(monkeypatch)
    model = _Twice(False)
    for _ in range(6):
        model.train_once()
    assert _reported() == ([MIX], [COMBINE], {MIX: 1})


@pytest.mark.usefixtures("without_inductor")
def test_backward_passes_that_checkpointing_may_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _Twice(False)
    for _ in range(3):
        loss = model(torch.randn(2, 8, 4, 8, requires_grad=True)).sum()
        loss.backward(retain_graph=True)
        model.train_once()
        loss.backward()
    del loss
    model.train_once()
    assert _reported()[2] == {MIX: 1, COMBINE: 1}


class _InPlace(nn.Module):
    """Stochastic depth."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.new_empty(x.shape[:-1]).bernoulli_(0.5).unsqueeze(-1)


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("layer", [nn.Dropout, _InPlace])
def test_random_numbers_of_layers_whose_backward_has_a_graph_of_its_own(layer: type[nn.Module]) -> None:
    """The two graphs would not change over together, and draw other numbers meanwhile."""
    model = _Twice(True, layer())
    model.train_once()
    (reason,) = {site.reason or "" for site in mhc_compile.report().unchecked}
    assert reason.startswith("it draws random numbers inside an autograd.Function"), reason


@pytest.mark.usefixtures("without_inductor")
def test_more_layers_of_one_graph_than_calls_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls whose gradients may come do not end the check."""
    monkeypatch.setattr(checking, "MOST_CALLS", 3)
    _wrong_gradient(monkeypatch)
    part = _connection(4)
    compiled = torch.compile(part, backend="mhc", options=CHECK)
    x = _streams().requires_grad_()
    for _ in range(5):
        x = compiled(x)
    x.square().sum().backward()
    for _ in range(2):
        compiled(_streams().requires_grad_())
    assert _reported()[1] == [MIX]


@pytest.mark.usefixtures("without_inductor")
def test_calls_that_raise_do_not_count() -> None:
    """Neither three of them nor 16 end the check."""
    table, part = nn.Embedding(10, 4 * WIDTH), _connection(4)
    compiled = torch.compile(lambda ids: part(table(ids).unflatten(-1, (4, WIDTH))), backend="mhc", options=CHECK)
    wrong, right = torch.full((2, 3), 99), torch.zeros(2, 3, dtype=torch.long)
    for ids in [wrong] * (checking.MOST_CALLS + 1) + [right] * (checking.CALLS + 1):
        assert _reported()[2] == {}
        if ids is right:
            compiled(ids).square().sum().backward()
        else:
            with pytest.raises(IndexError):
                compiled(ids)
    assert (_reported()[2], mhc_compile.report().unchecked) == ({MIX: 1, COMBINE: 1}, [])


@pytest.mark.usefixtures("without_inductor")
def test_a_call_whose_error_is_kept_is_not_waited_for() -> None:
    """Hooks that save tensors may be those of checkpointing, which repeats calls; but none that raised."""
    table, part, errors = nn.Embedding(10, 4 * WIDTH), _connection(4), []
    compiled = torch.compile(lambda ids: part(table(ids).unflatten(-1, (4, WIDTH))), backend="mhc", options=CHECK)
    right = torch.zeros(2, 3, dtype=torch.long)
    for ids in [torch.full((2, 3), 99)] + [right] * (checking.CALLS + 1):
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                out = compiled(ids)
            out.square().sum().backward()
        except IndexError as error:
            errors.append(error)
    assert (len(errors), _reported()[2]) == (1, {MIX: 1, COMBINE: 1})


@pytest.mark.usefixtures("without_inductor")
def test_gradients_count_for_the_call_of_their_thread() -> None:
    """Another thread calls the graph while a call runs, and its gradients never come."""
    compiled = torch.compile(_connection(4), backend="mhc", options=CHECK)
    forward = checking.Check.forward
    with ThreadPoolExecutor(1) as other:
        for _ in range(checking.CALLS):
            with pytest.MonkeyPatch.context() as patch:

                def between(self: Any, *given: Any, patch: pytest.MonkeyPatch = patch) -> Any:
                    patch.undo()
                    other.submit(compiled, _streams()).result()
                    return forward(self, *given)

                patch.setattr(checking.Check, "forward", between)
                out = compiled(_streams())
            assert _reported()[2] == {}
            out.square().sum().backward()
    compiled(_streams())
    assert _reported()[2] == {MIX: 1, COMBINE: 1}


def test_a_graph_that_is_compiled_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing uses its operators, and the report says nothing of a check."""

    def compiler(mode: Any, options: Any, patches: Any) -> Callable[..., Any]:
        def compiled(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            patches["pre_grad_custom_pass"](module.graph)
            if any("mhc" in str(node.target) for node in module.graph.nodes):
                raise ValueError("of this test")
            return module.forward

        return compiled

    monkeypatch.setattr(compat, "inductor_compiler", compiler)
    compiled = torch.compile(_connection(4), backend="mhc", options=CHECK)
    for seed in range(checking.CALLS + 2):
        compiled(_streams(seed))
        assert _reported() == ([], [MIX, COMBINE], {})
        assert mhc_compile.report().unchecked == []
