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
