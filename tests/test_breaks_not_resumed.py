"""Functions that Dynamo compiles up to a break and does not resume: Python runs the rest, and the report says so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mhc_compile
from mhc_compile.testing import capture
from tests.test_breaks import BOTH, OneFunction, X, _names, _place
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Recurrent(Sublayer):
    """Dynamo breaks at a recurrent layer and does not resume in this function: Python writes, and no graph."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.recurrent = nn.LSTM(self.width, self.width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        pre, post, res = self.gates(x)
        u = self.read(x, pre)
        f, _ = self.recurrent(u)
        return post.unsqueeze(-1) * f.unsqueeze(2) + res @ x


RESUMES = pytest.mark.skipif(torch.__version__ >= "2.15", reason="Dynamo resumes after a recurrent layer")


@RESUMES
def test_the_rest_of_a_function_that_dynamo_does_not_resume() -> None:
    report = mhc_compile.explain(Recurrent(4, 6, 3, 2), torch.randn(X))
    assert (_names(report.rewritten), report.graphs) == (BOTH[:1], 1)
    rest, read = report.cut
    words = (
        f"{_place(Recurrent, 'self.recurrent(')}: Attempted to wrap RNN, GRU, or LSTM: Dynamo does not support RNN, "
        "GRU, or LSTM. Set torch._dynamo.config.allow_rnn=True to enable"
    )
    assert (str(rest.location), rest.detail) == (_place(Recurrent, "def forward"), "not compiled")
    assert (rest.reason or "").startswith(f"Dynamo gives up on it at {words}")
    assert ". The rest of its own lines run eagerly and were not looked at; " in (rest.reason or "")
    assert (read.op, read.detail) == (BOTH[0], "cut")
    assert (read.reason or "").startswith(f"its gates are used outside this graph: Dynamo breaks the graph at {words}")
    with torch._dynamo.config.patch(allow_rnn=True):
        report = mhc_compile.explain(Recurrent(4, 6, 3, 2), torch.randn(X))
    assert (_names(report.rewritten), report.cut) == (BOTH, [])


@RESUMES
def test_a_function_that_the_rest_calls_is_compiled() -> None:
    class Calls(Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            pre, post, res = self.gates(x)
            u = self.read(x, pre)
            f, _ = self.recurrent(u)
            return self.write(x, f, post, res)

    report = mhc_compile.explain(Calls(4, 6, 3, 2), torch.randn(X))
    assert _names(report.rewritten) == BOTH
    assert [(site.op, site.detail) for site in report.cut] == [
        ("function", "not compiled"),
        *((op, "cut") for op in BOTH),
    ]


def test_a_connection_in_the_rest_of_a_function() -> None:
    """Nothing of it is in a graph: the function is all that is known."""

    class Tried(OneFunction):
        def forward(self, x: Tensor) -> Tensor:
            x = x.sin()
            x = x.cos()
            try:
                torch._dynamo.graph_break()
            finally:
                x = self.write(x, x[:, :, 0], torch.sigmoid(x @ self.per_channel), x.new_ones(4, 4))
            return x + torch.sigmoid(x @ self.per_channel).unsqueeze(-1) * x[:, :, :1]

    model, x = Tried(4, 6, 3, 2), torch.randn(X)
    report = mhc_compile.explain(model, x)
    (site,) = report.unknown
    assert site.location.code == "forward"
    assert "The rest of its own lines run eagerly" in (site.reason or "")
    assert "not compiled: Dynamo gives up on forward" in str(capture(model, x, allow_empty=True))
    torch._dynamo.reset()
    with pytest.raises(mhc_compile.StrictError, match="1 function not looked at"):
        torch.compile(model, backend="mhc", options={"mhc.strict": True})(x)


def test_a_write_that_dynamo_is_told_to_leave() -> None:
    """It runs eagerly, in no graph. The reason holds no object's address."""

    class Left(Sublayer):
        @torch._dynamo.disable
        def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
            return super().write(x, f, h_post, h_res)

    report = mhc_compile.explain(Left(4, 6, 3, 2), torch.randn(X))
    (read,) = report.cut
    assert _names(report.rewritten) == BOTH[:1]
    assert "its gates are used outside this graph: Dynamo breaks the graph at " in (read.reason or "")
    assert "Left.write> since it was wrapped with `torch.compiler.disable`" in (read.reason or "")
