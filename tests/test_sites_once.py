"""A site that several functions make of the same line of the same module counts once in a report."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mhc_compile
from mhc_compile import compat, sites_once
from tests.test_breaks import BOTH, X, _names
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

MODEL = nn.Sequential(Sublayer(4, 6, 3, 2), Sublayer(4, 6, 3, 2))


class Generates(nn.Module):
    """One function runs the model with a prompt, and another runs it with each token."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.other = MODEL, Sublayer(4, 6, 3, 2)

    def prefill(self, x: Tensor) -> Tensor:
        return self.model(x).mean(1, keepdim=True)

    def decode(self, x: Tensor) -> Tensor:
        return x + self.model(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.prefill(x)
        for _ in range(3):
            torch._dynamo.graph_break()
            x = self.decode(x)
        return x


def test_sites_of_two_functions_count_once() -> None:
    report = mhc_compile.explain(Generates(), torch.randn(X))
    assert _names(report.rewritten) == _names(report.sites) == BOTH * 2
    assert (report.graphs, report.fusions["accumulate"]) == (2, 2)  # of two layers
    assert str(report).startswith("mhc: 4 of 4 hyper-connection sites rewritten in 2 graphs")
    place = "(tests/test_sites_once.py:"
    told = [line for line in report.details().splitlines() if line.startswith("  in ")]
    assert [line.partition("(")[0] for line in told] == ["  in prefill ", "  in decode "]
    assert all(place in line and line.endswith("): 4 sites") for line in told)
    assert "  in " not in str(report)
    assert "  in " not in mhc_compile.explain(MODEL, torch.randn(X)).details()
    assert mhc_compile.passes.report.Report.from_dict(report.as_dict()) == report


def _in_a_dict(x: Tensor, parts: dict[str, Any]) -> Tensor:
    out: Tensor = parts["models"][0](x)
    return out


def _captured(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x)


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "a module": MODEL,
    "a method": MODEL.forward,
    "a function of it": functools.partial(MODEL),
    "a global": lambda x: MODEL(x),
    "a closure": _captured(MODEL),
    "an argument": functools.partial(_in_a_dict, parts={"models": [MODEL]}),
    "a part of a module": Generates().decode,
}


@pytest.mark.usefixtures("passes_only")
@pytest.mark.parametrize("way", WAYS)
def test_a_module_is_known_however_it_is_reached(way: str) -> None:
    with torch.no_grad():
        torch.compile(WAYS[way], backend="mhc")(torch.randn(X))
        torch.compile(lambda x: MODEL[1](MODEL[0](x)), backend="mhc")(torch.randn(X))
    report = mhc_compile.report()
    assert (_names(report.sites), report.graphs) == (BOTH * 2, 2)


@pytest.mark.usefixtures("passes_only")
def test_another_module_is_another_site() -> None:
    """Of the same class, with the same lines."""
    with torch.no_grad():
        torch.compile(lambda x: MODEL[0](x), backend="mhc")(torch.randn(X))
        torch.compile(lambda x: x + MODEL[1](x), backend="mhc")(torch.randn(X))
    assert _names(mhc_compile.report().sites) == BOTH * 2


class Numbered(Sublayer):
    """Dynamo compiles its code again for each number, and thus for each module."""

    def __init__(self, number: int) -> None:
        super().__init__(4, 6, 3, 2)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out + self.number


class ByLayers(nn.Module):
    """A break before each layer: Dynamo compiles the layers by themselves."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x)
        return x


@pytest.mark.usefixtures("passes_only")
def test_modules_of_one_class_that_are_compiled_by_themselves() -> None:
    """In each compilation the same path, "", names another module. Other sizes make no site of their own."""
    layers = [Numbered(number) for number in (1, 2, 3)]
    with torch.no_grad():
        for layer in layers:
            compiled = torch.compile(layer, backend="mhc", dynamic=False)
            compiled(torch.randn(X))
        compiled(torch.randn(X[0] + 1, *X[1:]))
    report = mhc_compile.report()
    assert _names(report.rewritten) == _names(report.sites) == BOTH * 3
    assert str(report).startswith("mhc: 6 of 6 hyper-connection sites rewritten in 3 graphs, compiled 4 times in all (")
    assert list(report.functions.values()) == [6]


def test_modules_of_one_class_between_breaks() -> None:
    report = mhc_compile.explain(ByLayers([Numbered(1), Numbered(2)]), torch.randn(X))
    assert (_names(report.rewritten), report.graphs, report.fusions["accumulate"]) == (BOTH * 2, 2, 2)


def test_compiled_code_that_several_modules_share_counts_once() -> None:
    """Nothing calls for another compilation. The passes see one module."""
    with torch.no_grad():
        report = mhc_compile.explain(ByLayers([Numbered(1), Numbered(1)]), torch.randn(X))
    assert (_names(report.rewritten), report.graphs) == (BOTH, 1)


@pytest.mark.usefixtures("passes_only")
def test_modules_of_one_class_that_another_function_runs_too() -> None:
    """A compilation of both modules, one of each alone, and one of the first with other numbers: two modules."""
    layers = [Numbered(1), Numbered(2)]
    with torch.no_grad():
        torch.compile(lambda x: layers[1](layers[0](x)), backend="mhc")(torch.randn(X))
        for layer in (*layers, layers[0]):
            torch.compile(layer, backend="mhc")(torch.randn(X))
            layer.number += 10
    report = mhc_compile.report()
    assert (_names(report.rewritten), report.compiled) == (BOTH * 2, 4)


@pytest.mark.usefixtures("passes_only")
def test_more_of_a_module_in_another_function() -> None:
    """A function that runs a line twice has two sites there."""
    with torch.no_grad():
        for function in (lambda x: MODEL[0](x), lambda x: MODEL[1](MODEL[0](MODEL[0](x))), lambda x: MODEL[0](x) * 2):
            torch.compile(function, backend="mhc")(torch.randn(X))
    assert _names(mhc_compile.report().sites) == BOTH * 3


def _write(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res @ x


class Broken(nn.Module):
    """One method makes two hyper-connections, with a break between them, or between two times the same layer."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.shared = shared
        self.layers = nn.ModuleList(Sublayer(4, 6, 3, 2) for _ in range(2))

    def connect(self, x: Tensor, layer: nn.Module) -> Tensor:
        out: Tensor = layer(x) if self.shared else _own(layer, x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = self.connect(x, self.layers[0])
        torch._dynamo.graph_break()
        return self.connect(x, self.layers[0 if self.shared else 1])


def _own(layer: Any, x: Tensor) -> Tensor:
    """The body of a layer, whose lines Dynamo counts to the module that calls."""
    out: Tensor = layer.body(x)
    return out


@pytest.mark.parametrize("shared", [False, True])
def test_parts_of_a_function_before_and_after_a_break_are_one(shared: bool) -> None:
    report = mhc_compile.explain(Broken(shared), torch.randn(X))
    assert _names(report.rewritten) == _names(report.sites) == BOTH * 2
    assert report.graphs == 2
    told = [line for line in report.details().splitlines() if line.startswith("  in ")]
    assert [line.partition(" (")[0] for line in told] == ["  in forward", "  in forward, its part after a break"]


@pytest.mark.usefixtures("passes_only")
def test_lines_of_no_module_count_for_each_function() -> None:
    """Whether two functions mean the same there, nothing can tell."""
    x = torch.randn(X)
    for function in (_write, lambda *given: _write(*given).sin()):
        torch.compile(function, backend="mhc")(x, x[:, :, 0], x[..., 0].sigmoid(), x[..., :4].softmax(-1))
    assert _names(mhc_compile.report().sites) == ["expand_combine"] * 2


@pytest.mark.usefixtures("passes_only")
def test_what_is_left_in_one_function_is_told() -> None:
    layer, x = MODEL[0], torch.randn(X)
    with torch.no_grad():
        torch.compile(lambda x: layer(x), backend="mhc")(x)
        (line,) = (str(site.location) for site in mhc_compile.report().sites if site.op == "expand_combine")
        torch.compile(lambda x: layer(x).sin(), backend="mhc", options={"mhc.skip": [line]})(x)
    report = mhc_compile.report()
    assert (_names(report.rewritten), _names(report.declined)) == (BOTH, BOTH[1:])
    assert "mhc: 2 of 3 hyper-connection sites rewritten in 2 graphs" in str(report)


def test_strict_options_do_not_put_up_with_what_is_left_in_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = Sublayer(4, 6, 3, 2), torch.randn(X)

    def run(patches: dict[str, Any], gm: Any, inputs: Any) -> Any:
        patches["pre_grad_custom_pass"](gm.graph)
        return gm.forward

    with torch.no_grad():
        with monkeypatch.context() as patched:
            patched.setattr(compat, "inductor_compiler", lambda mode, options, hooks: functools.partial(run, hooks))
            torch.compile(lambda x: layer(x), backend="mhc", options={"mhc.strict": True})(x)
        assert _names(mhc_compile.report().rewritten) == BOTH
        layer.double()
        with pytest.raises(mhc_compile.StrictError, match=r"float64"):
            torch.compile(lambda x: layer(x).sin(), backend="mhc", options={"mhc.strict": True})(x.double())


def test_the_number_of_a_module_is_its_own() -> None:
    first = sites_once.number_of(MODEL)
    seen = {sites_once.number_of(nn.Linear(1, 1)) for _ in range(10)}  # each is gone before the next
    assert (len(seen), first in seen, sites_once.number_of(MODEL)) == (10, False, first)
