"""What a model changes in one run, the next does not see: buffers and attributes, random generators, its inputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mhc_compile.testing.draws import KeepDraws
from mhc_compile.testing.evaluation import evaluate, exact_results, first_results


class Cache:
    """As of keys and values, which no tree of tensors shows; with what it has of the model."""

    def __init__(self, weight: Tensor | None = None) -> None:
        self.kept: list[Tensor] = []
        self.weight = weight


class Model(nn.Module):
    """`step` is what one call does to something that is not its result."""

    def __init__(self, step: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.step = step
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("unused", None)
        self.generator = torch.Generator().manual_seed(1)
        self.more = [torch.Generator().manual_seed(2)]
        self.calls = 0

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        return self.step(self, x, *given) * self.weight


def _assigns_a_buffer(model: Any, x: Tensor) -> Tensor:
    model.seen = 0.5 * model.seen + x.detach()
    return x + model.seen


def _fills_a_buffer(model: Any, x: Tensor) -> Tensor:
    first = model.unused is None
    model.unused = x.detach()
    return x if first else 2 * x


def _makes_a_buffer(model: Any, x: Tensor) -> Tensor:
    first = not hasattr(model, "made")
    model.register_buffer("made", x.detach())
    return x if first else 2 * x


def _deletes_a_buffer(model: Any, x: Tensor) -> Tensor:
    del model.seen
    return x


def _assigns_an_attribute(model: Any, x: Tensor) -> Tensor:
    model.calls, model.last = model.calls + 1, x
    return x * model.calls


def _draws(model: Any, x: Tensor) -> Tensor:
    return x + torch.randn(3, generator=model.generator) + torch.randn(3, generator=model.more[0])


def _draws_from(model: Any, x: Tensor, generator: torch.Generator) -> Tensor:
    return x + torch.randn(3, generator=generator)


def _keeps(model: Any, x: Tensor, cache: Cache) -> Tensor:
    cache.kept.append(x.detach().to(x.dtype))
    return torch.stack(cache.kept).sum(0) + (x if cache.weight is None else x * cache.weight)


@pytest.mark.parametrize(
    ("step", "more"),
    [
        (_assigns_a_buffer, ()),
        (_fills_a_buffer, ()),
        (_makes_a_buffer, ()),
        (_deletes_a_buffer, ()),
        (_assigns_an_attribute, ()),
        (_draws, ()),
        (_draws_from, (torch.Generator(),)),
        (_keeps, (Cache(),)),
    ],
)
def test_each_run_begins_as_the_first(step: Callable[..., Tensor], more: tuple[Any, ...]) -> None:
    model, x = Model(step), torch.randn(3)
    attributes = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    buffers, states = dict(model._buffers), [g.get_state() for g in (model.generator, *model.more)]
    with KeepDraws() as draws:
        first = evaluate(model, model, (x, *more), {}, grad=True)
    exact = exact_results(model, (x, *more), {}, True, draws)
    again = evaluate(model, model, (x, *more), {}, grad=True)
    assert first.keys() == again.keys() == exact.keys()
    for name, value in first.items():
        assert torch.equal(value, again[name])
        torch.testing.assert_close(value.double(), exact[name])
    assert {name: value for name, value in vars(model).items() if not name.startswith("_")} == attributes
    assert model._buffers.keys() == buffers.keys()
    assert all(value is buffers[name] for name, value in model._buffers.items())
    for generator, state in zip((model.generator, *model.more), states, strict=True):
        assert torch.equal(generator.get_state(), state)
    assert not any(one.kept for one in more if isinstance(one, Cache))


def test_an_input_holds_a_parameter_of_the_model() -> None:
    """Its gradient there is the model's."""
    model, x = Model(_keeps), torch.tensor([1.0, 2.0, 3.0])
    runs = [evaluate(model, model, (x, Cache(weight)), {}, True) for weight in (model.weight, model.weight.detach())]
    gradients = [run["gradient of weight"] for run in runs]
    assert not torch.allclose(*gradients)


def test_an_input_of_which_there_is_no_copy_is_given_itself() -> None:
    class Alone:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("of this test")

    def keeps(model: Any, x: Tensor, given: Alone) -> Tensor:
        assert given is alone
        return x

    alone, model = Alone(), Model(keeps)
    evaluate(model, model, (torch.randn(3), alone), {}, grad=False)


def test_a_first_run_that_fails_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails where an input requires a gradient, and runs once more without."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def then(_: nn.Module, given: tuple[Tensor]) -> None:
        clock[0] += 1
        if given[0].requires_grad:
            raise ValueError("it requires a gradient")

    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(then)
    args, _, _, _, seconds = first_results(model, (torch.ones(1, 2),), {}, True)
    assert not args[0].requires_grad
    assert (seconds, clock) == (1.0, [2.0])
