"""In-place operations that become what they compute: what stays in place is still seen to write, and types stay.

Each program makes streams by in-place operations, reads and writes them by a hyper-connection, and writes again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

import mhc_compile.ops  # noqa: F401  (registers the operators that the passes insert)
from mhc_compile.passes.functional import functional
from tests.passes.dynamo import graph_of
from tests.zoo.check import rewriting

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
N, C = 4, 6
SHAPE = (2, 3, N, C)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


PRE, POST, RES, FACTOR = drawn(N), drawn(N), drawn(N, N), drawn(N, C)
MASK = FACTOR > 0


def read_and_mixed(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tanh((PRE.unsqueeze(-1) * x).sum(-2)), RES.mT @ x


def written(f: Tensor, mixed: Tensor) -> Tensor:
    return POST.unsqueeze(-1) * f.unsqueeze(-2) + mixed


def assert_as_eager(program: Callable[..., Any], *inputs: Tensor) -> list[str]:
    """Values and types are eager's; the operators of the rewritten sites."""
    want = program(*(x.clone() for x in inputs))
    compiled, report = rewriting(program)
    # two float32 evaluations of the same sums
    torch.testing.assert_close(compiled(*(x.clone() for x in inputs)), want, rtol=1e-5, atol=1e-5)
    assert not report.errors, str(report)
    return [site.op for site in report.rewritten]


def kept(program: Callable[..., Any], *inputs: Tensor) -> list[str]:
    """The in-place methods that stay."""
    nodes = functional(graph_of(program, *inputs).graph).nodes
    return [str(node.target) for node in nodes if node.op == "call_method" and str(node.target).endswith("_")]


def _view_without_gradients(y: Tensor) -> Tensor:
    with torch.no_grad():
        return y.unflatten(-1, (N, C))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "written": lambda y: y.unflatten(-1, (N, C)).mul_(2),
    "written by an operator": lambda y: _multiplied(y.unflatten(-1, (N, C))),
    "written twice": lambda y: y.unflatten(-1, (N, C)).mul_(2).flatten(1).add_(1).view(SHAPE),
    "written by a method without another form": lambda y: y.unflatten(-1, (N, C)).masked_fill_(MASK, 1.0),
    "written in part": lambda y: _in_part(y.unflatten(-1, (N, C))),
    "made without gradients": _view_without_gradients,
}


def _multiplied(w: Tensor) -> Tensor:
    w *= 2
    return w


def _in_part(w: Tensor) -> Tensor:
    w[..., 1:, :] = 0.5
    return w


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("gradients", [False, True])
def test_a_later_write_into_a_view_is_seen(view: str, gradients: bool) -> None:
    """The memory of the view is that of the new tensor."""

    def program(x: Tensor, scale: Tensor) -> Tensor:
        y = x.flatten(-2).sin() * scale
        y.add_(1)
        w = VIEWS[view](y)
        f, mixed = read_and_mixed(w.detach())
        with torch.no_grad():
            y.zero_()
        return written(f, mixed)

    assert_as_eager(program, drawn(*SHAPE), torch.tensor(1.5, requires_grad=gradients))


def test_what_is_written_in_place_is_rewritten() -> None:
    def program(x: Tensor) -> Tensor:
        y = x.flatten(-2).sin()
        y.add_(1)
        w = y.unflatten(-1, (N, C)).mul_(2)
        return written(*read_and_mixed(w))

    x = drawn(*SHAPE)
    assert assert_as_eager(program, x) == ["aggregate", "expand_combine"]
    assert kept(program, x) == []


LEFT, RIGHT = drawn(6, N, 50), drawn(6, 50, C)
CAST: dict[str, Callable[[Tensor], Any]] = {
    "baddbmm_": lambda y: y.baddbmm_(LEFT, RIGHT),
    "addmm_": lambda y: y.view(-1, C).addmm_(LEFT.view(-1, 50), RIGHT[0]),
}


@pytest.mark.parametrize("method", CAST)
@pytest.mark.parametrize("around", [False, True])
def test_autocast_leaves_operations_in_place_alone(method: str, around: bool) -> None:
    """It would cast what `addmm` and `baddbmm` compute with."""

    def program(x: Tensor) -> Any:
        with nullcontext() if around else torch.autocast("cpu", torch.bfloat16):
            y = x.sin().view(-1, N, C) * 1
            y = CAST[method](y).view(SHAPE)
        with torch.autocast("cpu", enabled=False):
            return written(*read_and_mixed(y)), y

    x = drawn(*SHAPE)
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        assert assert_as_eager(program, x) == ["aggregate", "expand_combine"]
        assert kept(program, x) == [method]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_autocast_does_not_cast_is_replaced(dtype: torch.dtype) -> None:
    def program(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = x.to(dtype) * 1
            y.mul_(FACTOR).add_(1).exp_()
            y[..., 0] = 2.0
            with torch.autocast("cpu", enabled=False):
                z = x.flatten(0, 2) * 1
                z.addmm_(a, b)
        return y, z.addmm(a, b)

    inputs = drawn(*SHAPE), drawn(24, 50), drawn(50, C)
    assert_as_eager(program, *inputs)
    assert kept(program, *inputs) == []


@pytest.mark.parametrize(("method", "given", "cast"), [("exp_", (), True), ("rsqrt_", (), True), ("mul_", (2,), False)])
def test_autocast_on_a_gpu(method: str, given: tuple[int, ...], cast: bool) -> None:
    """There it computes `exp` in float32, but not `exp_`. Tensors without data show that on any machine."""
    graph = fx.Graph()
    with FakeTensorMode():
        example = torch.empty(2, 3, device="cuda", dtype=torch.bfloat16)
        made = example.sin()
    x = graph.placeholder("x")
    y = graph.call_method("sin", (x,))
    z = graph.call_method(method, (y, *given))
    graph.output((z,))
    x.meta["example_value"], y.meta["example_value"], z.meta["example_value"] = example, made, made
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    try:
        targets = [node.target for node in functional(graph).nodes]
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert (method in targets) == cast


def test_gradients_are_the_programs() -> None:
    """What a new operation makes without gradients has none, and neither have its views."""

    def program(x: Tensor, scale: Tensor) -> Tensor:
        with torch.no_grad():
            y = x.sin()
            y.mul_(scale)
            return y.flatten()

    scale = torch.tensor(1.5, requires_grad=True)
    nodes = functional(graph_of(program, drawn(2, 3), scale).graph).nodes
    examples = {node.name: node.meta.get("example_value") for node in nodes}
    assert not any(isinstance(one, Tensor) and one.requires_grad for name, one in examples.items() if "l_" not in name)
    assert examples["flatten"]._base is examples["mul"]
