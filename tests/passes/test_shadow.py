"""The ATen record: every spelling becomes the same few operators, and every value keeps its identity."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher

import mhc_compile
from mhc_compile import compat
from mhc_compile.passes import shadow
from mhc_compile.passes.shadow import Shadow
from tests.zoo import check
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _record(function: Callable[..., Any], *args: torch.Tensor, **options: Any) -> Shadow:
    records: list[Shadow] = []

    def look(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        records.append(shadow.trace(gm.graph))
        return gm.forward

    torch.compile(function, backend=look, **options)(*args)
    return records[-1]


def _names(record: Shadow) -> list[str]:
    return [op.name for op in record.ops]


@pytest.mark.parametrize(
    "squares",
    [lambda x: x.square(), lambda x: x**2, lambda x: torch.pow(x, 2), lambda x: x.pow(2.0)],
    ids=["square", "operator", "function", "method"],
)
def test_spellings_meet(squares: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert _names(_record(lambda x: squares(x).mean(-1), torch.randn(3, 4))) == ["pow", "mean"]


def test_composites_are_taken_apart() -> None:
    names = _names(_record(lambda x, w: F.linear(x, w), torch.randn(2, 3, 4), torch.randn(5, 4)))
    assert names == ["t", "view", "mm", "_unsafe_view"]


def test_operators_that_the_dispatcher_does_not_know_are_no_composites() -> None:
    """As aten::size is for torch 2.11."""

    class Overload:
        def name(self) -> str:
            return "mhc_test::no_such_operator"

    assert not compat.is_composite(Overload())
    assert compat.is_composite(torch.ops.aten.linear.default)


def test_equal_calls_on_different_values_are_kept_apart() -> None:
    """Calls are run once for all that look alike; what they make must not be taken for one value."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = x.view(2, 6), y.view(2, 6)
        return a.exp() - b.exp()

    record = _record(function, torch.randn(3, 4), torch.randn(3, 4))
    (sub,) = [op for op in record.ops if op.name == "sub"]
    left, right = sub.args[:2]
    assert left is not right
    origins = [next(iter(exp.op.args[0].op.inputs())).nodes[0].name for exp in (left, right)]
    assert origins == ["l_x_", "l_y_"]


def test_a_cast_that_does_nothing_is_the_same_value() -> None:
    record = _record(lambda x: x.float().contiguous() * 2, torch.randn(3))
    assert _names(record) == ["mul"]
    assert next(record.ops[0].inputs()).nodes[0].op == "placeholder"


def test_autocast_shows_its_casts() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ w

    names = _names(_record(function, torch.randn(3, 4), torch.randn(4, 5)))
    assert names.count("_to_copy") == 2


def test_states_are_those_in_force() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            a = x.exp()
        with torch.autocast("cpu", enabled=False):
            b = x.sin()
        return a + b + x.cos()

    record = _record(function, torch.randn(3, requires_grad=True))
    states = {op.name: record.states[op.node] for op in record.ops}
    assert states["exp"] != states["cos"]
    assert states["sin"] == states["cos"]


def test_writes_are_noted_with_their_memory() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[0].add_(1)
        F.relu(y, inplace=True)
        return y

    record = _record(function, torch.randn(3, 4))
    clone = next(node for node in record.graph.nodes if node.target == "clone")
    memory = compat.storage_of(clone.meta["example_value"])
    assert len(record.writes) == 2
    assert all(memory in storages for _, storages in record.writes)


class _ReadInAnotherShape(Sublayer):
    unsqueeze = staticmethod(torch.Tensor.unsqueeze_)

    def read(self, x: torch.Tensor, h_pre: torch.Tensor) -> torch.Tensor:
        twice, weights = h_pre * 2, torch.ones(6, 4) * 2
        weights.transpose_(0, 1)
        self.unsqueeze(h_pre, -1)
        return (h_pre * x).sum(2) + (twice.squeeze_().unsqueeze(-1) * x * weights).sum(2)


class _ReadInAnotherShapeByAnOperator(_ReadInAnotherShape):
    unsqueeze = staticmethod(torch.ops.aten.unsqueeze_.default)


@pytest.mark.parametrize("kind", [_ReadInAnotherShape, _ReadInAnotherShapeByAnOperator])
def test_what_changes_its_shape_in_place_is_no_error(kind: type[Sublayer]) -> None:
    """Dynamo has such a tensor in its last shape alone: what makes or reads it before is not run again."""
    outcome = check.run(kind(4, 6, 3, 2), (torch.randn(2, 3, 4, 6),), exact=False, repeats=1)
    check.assert_equal_to_eager(outcome)
    assert "expand_combine" in outcome.operators


class Halved(torch.autograd.Function):
    """An identity whose gradient is half of what it should be."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.clone(), y.clone()

    @staticmethod
    def backward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x / 2, y / 2


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_function_of_autograd_is_one_call_of_what_it_is_given() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        first, second = Halved.apply(x.sin(), x.cos())
        return torch.sub(first, second)

    record = _record(function, torch.randn(3, 4, requires_grad=True))
    sin, cos, applied, sub = record.ops
    assert (sin.name, cos.name, sub.name) == ("sin", "cos", "sub")
    assert isinstance(applied.target, compat.AutogradFunction)
    assert applied.sources == (*sin.outs, *cos.outs)
    assert sub.sources == tuple(applied.outs)


def test_symbolic_sizes_are_told_apart_from_constants() -> None:
    record = _record(lambda x: x.view(x.shape[0], 4, -1).exp(), torch.randn(4, 12), dynamic=True)
    (exp,) = [op for op in record.ops if op.name == "exp"]
    tokens, streams, width = exp.out.shape
    assert streams == 4
    assert tokens > 10_000  # a prime of its own, though the batch was 4 when it was traced
    assert width != 3


class _DropsMixed(Sublayer):
    """The mixed streams pass a dropout, and h_res is the program's own."""

    def res(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return h_post.unsqueeze(-1) * f.unsqueeze(-2) + F.dropout(h_res.mT @ x, 0.1)


def test_explain_finds_what_the_run_finds_though_inductor_takes_composites_apart_in_python() -> None:
    model, found = _DropsMixed(4, 6, 3, 2), []
    for context in (contextlib.nullcontext(), enable_python_dispatcher()):
        torch._dynamo.reset()
        with context:
            report = mhc_compile.explain(model, torch.randn(2, 3, 4, 6))
        found.append([(site.op, site.reason) for site in report.sites])
    assert found[0] == found[1]


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda s: s.sum(-1),
    "mean": lambda s: s.mean(0, keepdim=True),
    "transpose": lambda s: s.transpose(0, -1),
    "t": lambda s: s.t(),
    "index_select": lambda s: s.index_select(0, torch.arange(1)),
}


@pytest.mark.parametrize("spelling", NUMBERS)
def test_a_number_has_an_axis_as_in_torch(spelling: str) -> None:
    """It is 0 or -1, though a number has no dimensions. A loss is often reduced once more."""
    model, of = Sublayer(4, 6, 3, 2), NUMBERS[spelling]

    def program(x: Tensor) -> Tensor:
        x = model(x)
        return (of(x.square().mean()) * x).sum(-2)

    report = mhc_compile.explain(program, torch.randn(2, 3, 4, 6))
    assert report.errors == []
    assert "expand_combine" in {site.op for site in report.rewritten}
