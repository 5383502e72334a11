"""What the passes cost: layers alike are understood once, and all else grows with the graph and no faster."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from mhc_compile import passes
from mhc_compile.nn import Form, HyperConnection
from mhc_compile.passes.recognise import gates, rms, sinkhorn
from mhc_compile.passes.rewrite.copies import Copies
from tests.passes.dynamo import graph_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

shadow = sys.modules["mhc_compile.passes.shadow"]

WIDTH = 8


class _Gain(nn.Module):
    """Next to nothing: what is measured is the connection."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class _FeedForward(nn.Module):
    """Its inner width is that of four streams, as in most language models."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def _graph(sublayers: int, sublayer: Callable[[], nn.Module] = _Gain, iterations: int = 4) -> fx.Graph:
    """Dynamo's graph of so many sublayers, one after the other. It takes Dynamo longer to trace than us to read."""
    form = Form.deepseek_v4(iterations=iterations)
    model = nn.Sequential(*(HyperConnection(sublayer(), dim=WIDTH, form=form) for _ in range(sublayers)))
    torch._dynamo.reset()
    return graph_of(model, torch.randn(2, 3, 4, WIDTH)).graph


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a region was identified in float64, and a node run to see what it does."""
    counts: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return counted

    for module, name in ((gates, "_kind"), (rms, "_fit"), (sinkhorn, "identify"), (shadow, "record")):
        monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    return counts


def test_layers_alike_are_understood_once(work: Counter[str]) -> None:
    _, report = passes.run(_graph(2))
    assert len(report.rewritten) == 4, str(report)
    two = Counter(work)
    assert two["identify"] == 1  # the one Sinkhorn
    assert two["_kind"] == 3  # h_pre, h_post, h_res
    assert two["_fit"] == 1
    work.clear()
    _, report = passes.run(_graph(6))
    assert len(report.rewritten) == 12, str(report)
    assert work == two


def test_the_cost_grows_with_the_graph() -> None:
    """Sixty layers of two sublayers with 20 iterations are to take 1.5 s; a machine may well be ten times slower."""
    graphs = {sublayers: _graph(sublayers) for sublayers in (6, 24)}
    seconds = {}
    for sublayers, graph in graphs.items():
        each = []
        for _ in range(3):
            begin = time.process_time()
            _, report = passes.run(graph)
            each.append(time.process_time() - begin)
            assert len(report.rewritten) == 2 * sublayers, str(report)
        seconds[sublayers] = min(each)
    # Four times the graph: a part that grew with its square would show as up to 16 times.
    assert seconds[24] < 6 * seconds[6], seconds
    assert seconds[24] < 3.0, seconds


def test_steps_of_a_sinkhorn_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be most of the nodes, and one operator comes for them."""
    copied: Counter[str] = Counter()
    copy = Copies._copy

    def counted(self: Copies, node: fx.Node) -> None:
        copied["now"] += 1
        copy(self, node)

    monkeypatch.setattr(Copies, "_copy", counted)
    each = []
    for iterations in (2, 20):
        copied.clear()
        _, report = passes.run(_graph(1, iterations=iterations))
        assert len(report.rewritten) == 2, str(report)
        each.append(copied["now"])
    few, many = each
    assert few == many > 0


def test_gates_are_looked_for_in_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not in all that come behind it, where a product of the sublayer is as large as the streams."""
    looks: Counter[str] = Counter()
    identify = gates.identify

    def counted(*given: Any) -> Any:
        looks["now"] += 1
        return identify(*given)

    monkeypatch.setattr(gates, "identify", counted)
    each = []
    for sublayers in (3, 6, 12):
        looks.clear()
        _, report = passes.run(_graph(sublayers, _FeedForward))
        assert len(report.rewritten) == 2 * sublayers, str(report)
        each.append(looks["now"])
    three, six, twelve = each
    assert twelve - six == 2 * (six - three), each
