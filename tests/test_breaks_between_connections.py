"""A graph break between two hyper-connections cuts no site, and is told all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mhc_compile
from mhc_compile.passes.report import Report
from tests.test_breaks import X, _place
from tests.zoo.near import Sublayer

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo looks at what a graph gets from the one before it.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class BetweenConnections(nn.Module):
    """Two hyper-connections, which Dynamo compiles one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sublayer(4, 6, 3, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()  # before all of them
        x = self.layers[0](x)
        torch._dynamo.graph_break()  # between two
        return self.layers[1](x).mean(-2)


@pytest.mark.usefixtures("passes_only")
@pytest.mark.parametrize("look", [mhc_compile.explain, None])
def test_a_break_between_connections_is_told(look: Callable[..., Report] | None) -> None:
    """It cuts no site, and costs the fusion of a write with the next read."""
    model, x = BetweenConnections(), torch.randn(X)
    with torch.no_grad():
        report = look(model, x) if look else (torch.compile(model, backend="mhc")(x), mhc_compile.report())[1]
    assert "4 of 4 hyper-connection sites rewritten in 2 graphs" in str(report)
    assert not report.cut
    (told,) = report.breaks
    assert told.startswith(f"{_place(BetweenConnections, '# between two')}: Call to `torch._dynamo.graph_break()`")
    assert f"\n  nothing is fused across the graph break at {told}\n" in f"{report}\n"
    assert report.as_dict()["breaks"] == [told]


class OneConnection(nn.Module):
    """A hyper-connection with a break before it, one behind it, or one in what it calls first."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.layer = where, Sublayer(4, 6, 3, 2)

    def called(self, x: Tensor) -> Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "in a call":
            return self.called(x.cos()).mean(-2)
        if self.where == "before":
            torch._dynamo.graph_break()
        x = self.layer(x)
        if self.where == "behind":
            torch._dynamo.graph_break()
        return x.mean(-2)


@pytest.mark.parametrize("where", ["before", "behind", "in a call"])
def test_a_break_beside_the_only_connection_is_not_told(where: str) -> None:
    """There is nothing on its other side that could be fused."""
    report = mhc_compile.explain(OneConnection(where), torch.randn(X))
    assert (len(report.rewritten), report.cut, report.breaks) == (2, [], [])


def test_gates_of_a_write_are_not_made_before_a_break_behind_it() -> None:
    """A break behind the write is none that its gates come from: here they are given to the model."""

    def write(x: Tensor, f: Tensor, post: Tensor, mix: Tensor) -> Tensor:
        out = post.unsqueeze(-1) * f.unsqueeze(-2) + mix.transpose(-1, -2) @ x
        torch._dynamo.graph_break()
        return out * 2

    x = torch.randn(X)
    report = mhc_compile.explain(write, x, x.mean(-2), x.mean(-1), torch.rand(*X[:2], 4, 4))
    assert ([site.op for site in report.rewritten], report.cut) == (["expand_combine"], [])


class InTheMiddle(OneConnection):
    """The graph of the rest of a called function begins by its own break and ends by the one of its caller."""

    def __init__(self) -> None:
        super().__init__("in a call")
        self.last = Sublayer(4, 6, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()  # before all of them
        return self.last(self.called(x)).mean(-2)


def test_a_break_of_the_caller_is_told() -> None:
    report = mhc_compile.explain(InTheMiddle(), torch.randn(X))
    assert (len(report.rewritten), report.cut) == (4, [])
    (told,) = report.breaks
    assert told.startswith(f"{_place(OneConnection)}: ")
