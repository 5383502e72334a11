"""Compilations return: loops until nothing changes have an end, and where that cannot be argued a budget in steps."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import mhc_compile
from mhc_compile import compat, passes
from mhc_compile.budget import OutOfSteps, Steps
from mhc_compile.compat import values
from tests.passes.dynamo import graph_of
from tests.passes.fused import Program, Stack, program, streams
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

accumulating = importlib.import_module("mhc_compile.passes.fuse.accumulate")

N, C = 4, 6
BOTH = ["generate_mix_and_aggregate", "expand_combine"]


class Skipping(Sublayer):
    """A sublayer whose layer adds other inputs, which have sizes of the streams."""

    def __init__(self) -> None:
        super().__init__(N, C, 3, 2)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        h_pre, h_post, h_res = self.gates(x)
        f = self.read(x, h_pre)
        for other in others:
            f = f + other
        return self.write(x, torch.tanh(f), h_post, h_res)


class Reversed(Skipping):
    """What has the same sizes comes before the streams."""

    def forward(self, *given: Tensor) -> Tensor:
        *others, x = given
        return super().forward(x, *others)


def _given(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, requires_grad=True) for shape in shapes)


X, SKIP, CHANNELS = (2, 3, N, C), (2, 3, C), (C,)
INPUTS: dict[str, tuple[type[Skipping], tuple[tuple[int, ...], ...]]] = {
    "two": (Skipping, (X, SKIP)),
    "three": (Skipping, (X, SKIP, SKIP)),
    "four": (Skipping, (X, SKIP, CHANNELS, SKIP)),
    "reversed": (Reversed, (SKIP, X)),
    "three-reversed": (Reversed, (CHANNELS, SKIP, X)),
    "between": (Reversed, (SKIP, CHANNELS, X)),
}


@pytest.fixture
def _no_duck_shapes() -> Iterator[None]:
    """As serving frameworks set it: sizes that are equal are symbols of their own until a guard makes them one."""
    with importlib.import_module("torch.fx.experimental._config").patch(use_duck_shape=False):
        yield


def _same_as_eager(model: nn.Module, compiled: Program, given: tuple[Tensor, ...]) -> None:
    found = []
    for call in (model, compiled.call):
        out = call(*given)
        gradients = torch.autograd.grad(out.square().sum(), [*given, *model.parameters()], allow_unused=True)
        found.append([out, *(gradient for gradient in gradients if gradient is not None)])
    # Two float32 evaluations of some hundred sums.
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.usefixtures("_no_duck_shapes")
def test_sizes_that_are_unified_and_then_fixed(name: str) -> None:
    kind, shapes = INPUTS[name]
    model, given = kind(), _given(*shapes)
    compiled = program(model, dynamic=True)
    _same_as_eager(model, compiled, given)
    assert not compiled.report.errors
    assert [site.op for site in compiled.report.rewritten] == BOTH, str(compiled.report)
    # Tokens stay symbols: the graph holds for other numbers of them.
    more = _given(*((3, 5, *shape[2:]) if len(shape) > 1 else shape for shape in shapes))
    _same_as_eager(model, compiled, more)
    assert len(compiled.graphs) <= 2  # with gradients, and no others for more tokens


@pytest.mark.usefixtures("_no_duck_shapes", "fresh_cache")
def test_operators_of_sizes_that_guards_fix_are_lowered() -> None:
    model, given = Skipping(), _given(X, SKIP)
    with torch.no_grad():
        got = torch.compile(model, backend="mhc", dynamic=True)(*given)
        torch.testing.assert_close(got, model(*given), rtol=1e-4, atol=1e-4)  # two float32 evaluations of some sums
    report = mhc_compile.report()
    assert report.errors == []
    assert sorted(report.lowered) == sorted(BOTH), str(report)


@pytest.mark.parametrize("marked", [(3,), (2,), (2, 3)], ids=["channels", "streams", "both"])
@pytest.mark.parametrize("kind", [Skipping, Reversed])
def test_sizes_that_are_marked_and_then_fixed(kind: type[Skipping], marked: tuple[int, ...]) -> None:
    model = kind()
    given = _given(X, SKIP) if kind is Skipping else _given(SKIP, X)
    x, skip = given if kind is Skipping else given[::-1]
    for axis in marked:
        torch._dynamo.maybe_mark_dynamic(x, axis)
    torch._dynamo.maybe_mark_dynamic(skip, 2)
    compiled = program(model)
    _same_as_eager(model, compiled, given)
    assert [site.op for site in compiled.report.rewritten] == BOTH, str(compiled.report)


class AndFlat(Skipping):
    """Its streams come twice: flat, and as a view of that, as the graph behind a break gets them."""

    def forward(self, flat: Tensor, *others: Tensor) -> Tensor:
        (x,) = others
        pre, post, res = self.logits(self.split(self.project(flat) * self.rms(flat)))
        f = self.layer(self.read(x, self.pre(pre)), x)
        return self.write(x, f, self.post(post), self.res(res))


@pytest.mark.parametrize("marked", [(False, True), (True, False), (True, True)], ids=["view", "flat", "both"])
def test_sizes_of_a_tensor_and_its_view_that_are_marked_and_then_fixed(marked: tuple[bool, bool]) -> None:
    """AOTAutograd knows them by other symbols than Dynamo, for which no guard can be made but that they are fixed."""
    model, leaf, found = AndFlat(), torch.randn(2, 3, N * C, requires_grad=True), []
    compiled = program(model)
    for call in (model, compiled.call):
        flat = leaf * 1.0
        given = flat, flat.unflatten(-1, (N, C))
        for tensor, mark in zip(given, marked, strict=True):
            for axis in range(2, tensor.dim()) if mark else ():
                torch._dynamo.maybe_mark_dynamic(tensor, axis)
        out = call(*given)
        found.append([out, *torch.autograd.grad(out.square().sum(), [leaf, model.phi, model.scale, model.bias])])
    # Two float32 evaluations of some hundred sums.
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    assert compiled.report.declined == []
    assert [site.op for site in compiled.report.rewritten] == ["generate_mix", "aggregate", "expand_combine"]


@pytest.mark.usefixtures("_no_duck_shapes")
def test_channels_that_nothing_fixes_stay_symbols() -> None:
    """Two inputs agree in a size that no parameter has."""

    def function(x: Tensor, f: Tensor, res: Tensor, post: Tensor) -> Tensor:
        p = res.softmax(-1) + 1e-6
        p = p / (p.sum(-2, keepdim=True) + 1e-6)
        for _ in range(2):
            p = p / (p.sum(-1, keepdim=True) + 1e-6)
            p = p / (p.sum(-2, keepdim=True) + 1e-6)
        assert x.shape[-1] == f.shape[-1]
        return post.unsqueeze(-1) * f.unsqueeze(-2) + p @ x

    given = _given(X, SKIP, (2, 3, N, N), (2, 3, N))
    compiled = program(function, dynamic=True)
    torch.testing.assert_close(compiled.call(*given), function(*given), rtol=1e-5, atol=1e-5)
    assert not compiled.report.errors


def _chain(length: int) -> tuple[Any, list[Any]]:
    """A shape environment in which sizes were made equal one after the other, the last of which has a guard left."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    environment = ShapeEnv(duck_shape=False)
    sizes = []
    for i in range(length):
        source = ConstantSource(f"size_{i}")
        symbol = environment.create_symbol(8, source, dynamic_dim=DimDynamic.DYNAMIC)
        sizes.append(environment.create_symintnode(symbol, hint=8, source=source))
    return environment, sizes


@pytest.mark.parametrize("fixed", [0, 1, 2, 3])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=str)
def test_every_size_of_a_chain_becomes_a_number(order: tuple[int, ...], fixed: int) -> None:
    environment, sizes = _chain(4)
    assert sizes[fixed] * 4 == 32
    for i in order:
        assert sizes[i] == sizes[i + 1]
    compat.settle_sizes(type("Mode", (), {"shape_env": environment}))
    assert [compat.as_number(size) for size in sizes] == [8] * 4


def test_a_budget_is_counted_in_steps() -> None:
    budget = Steps("rounds", 2)
    budget.take()
    budget.take()
    with pytest.raises(OutOfSteps, match="no end was found within 2 rounds"):
        budget.take()


@pytest.mark.usefixtures("_no_duck_shapes")
def test_a_graph_whose_sizes_do_not_settle_is_compiled_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MOST_SIZES", 0)
    model, given = Skipping(), _given(X, SKIP)
    compiled = torch.compile(model, backend="mhc", dynamic=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), model(*given), rtol=1e-5, atol=1e-5)
    report = mhc_compile.report()
    assert not report.sites
    (error,) = report.errors
    assert "no end was found within 0 sizes that guards settle (mhc_compile/compat/values.py:" in error


def test_a_graph_whose_sums_do_not_come_to_an_end_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulating, "_MOST_LOOKS", 0)
    model, x = Stack(layers=2, observe=torch.sin), streams().requires_grad_()
    fused, unfused = program(model), program(model, ())
    found = []
    for one in (fused, unfused):
        out, *seen = one.call(x)
        found.append(torch.autograd.grad(out.sum() + sum(each.square().sum() for each in seen), x))
    assert any("no end was found within 0 looks" in error for error in fused.report.errors), fused.report.errors
    assert not fused.report.fusions
    torch.testing.assert_close(*found, rtol=0, atol=0)


def _rotations(count: int) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        for _ in range(count):
            x = torch.cat((x[..., 4:], x[..., :4]), -1)
        return x.sum(-1)

    return function


def test_halves_may_change_places_any_number_of_times() -> None:
    """Each rotation is a view of each tensor before it in two ways, and so of the first in a power of two ways."""
    new, report = passes.run(graph_of(_rotations(60), torch.randn(3, 8)).graph)
    assert new is None
    assert not report.errors


def test_sums_of_any_depth_are_read() -> None:
    """A shared tensor's gradient is a sum of as many summands as it has readers, one in the other."""
    graph = fx.Graph()
    given = [graph.placeholder("a"), graph.placeholder("b")]
    for node in given:
        node.meta["val"] = torch.zeros(2)
    total = given[0]
    for _ in range(3000):
        total = graph.call_function(torch.ops.aten.add.Tensor, (total, given[1]))
        total.meta["val"] = torch.zeros(2)
    graph.output(total)
    assert len(list(accumulating._summands(total))) == 3001
