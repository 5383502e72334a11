"""What `verify` compares, of outputs and inputs of any kind, and what it leaves as it was. See test_verification.py."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mhc_compile
from mhc_compile import verification

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_compilation")


class Computes(nn.Module):
    """A linear layer, and what a function makes of it: of its result, of the module, and of more arguments."""

    def __init__(self, then: Callable[..., Any]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.linear, self.then = nn.Linear(8, 8), then

    def forward(self, x: Tensor, *more: Any) -> Any:
        return self.then(self.linear(x), self, *more)


@pytest.fixture
def no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a compiled module, the module; `spoil`, if it has that, changes the output."""
    from contextlib import nullcontext

    def call(module: Any, run: str) -> Any:
        spoil = getattr(module, "spoil", None)
        return nullcontext(module if run == "eager" or not spoil else lambda *a, **k: spoil(module(*a, **k)))

    monkeypatch.setattr(verification, "_compiled", lambda module, run, result: call(module, run))


def _verify(then: Callable[..., Any], *more: Any, **how: Any) -> verification.Verification:
    model, spoil = Computes(then), how.pop("spoil", None)
    model.spoil = spoil
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    return mhc_compile.verify(model, x, *more, inductor=False, raises=False, say=None, **how)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda y: F.scaled_dot_product_attention(*3 * [y.view(1, 1, 4, 8)], dropout_p=0.5),
    "gumbel_softmax": lambda y: F.gumbel_softmax(y),
    "alpha_dropout": lambda y: F.alpha_dropout(y, 0.5, True),
    "rrelu": lambda y: F.rrelu(y, training=True),
    "checkpoint": lambda y: checkpoint(lambda y: F.dropout(y, 0.5) ** 2, y, use_reentrant=False),  # type: ignore[no-any-return]
    "random": lambda y: y * random.random(),
    "numpy": lambda y: y * np.random.rand(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_after_dropout(name: str) -> None:
    """Each kind of draw is the same in float64, whatever was drawn before."""
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    result = _verify(lambda y, model: DRAWS[name](F.dropout(y, 0.5)))
    assert result.ok
    assert all(result.errors["eager"].relative(of) < 1e-5 for of in result.errors["eager"].numbers)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_draws_that_are_not_the_same() -> None:
    generator = np.random.default_rng(0)
    words = "model: eager's outputs are .* off those in float64, where 0.01 is the most; either float64 drew other"
    with pytest.raises(ValueError, match=words):
        _verify(lambda y, model: y * generator.random())
    # Roundings of narrower numbers are larger.
    assert _verify(lambda y, model: (y.bfloat16() + 4).float() - 4).errors["eager"].relative("output") > 0.01


@dataclass
class Out:
    y: Tensor
    more: Any


@pytest.mark.parametrize(
    ("then", "spoil", "name"),
    [
        (lambda y, model: y.argmax(-1), lambda out: out + 1, "output"),
        (lambda y, model: y > 0, lambda out: ~out, "output"),
        (lambda y, model: torch.view_as_complex(y.view(4, 4, 2)), lambda out: out.conj(), "output"),
        (lambda y, model: Out(y, [y.sum()]), lambda out: Out(out.y, [out.more[0] + 1]), "output.more[0]"),
        (lambda y, model: y.where(y > 0, -math.inf), lambda out: out.clamp(min=-1e9), "output"),
        (lambda y, model: y.where(y > 0, math.nan), lambda out: out.nan_to_num(), "output"),
        (lambda y, model: y.where(y > 0, -math.inf), lambda out: out * 1.001, "output"),
        (lambda y, model: y.where(y > 0, math.nan), lambda out: out.nan_to_num(-7.0), "output"),
        (
            lambda y, model: y.bfloat16().float(),
            lambda out: out.bfloat16(),
            "output, torch.bfloat16 and not torch.float32",
        ),
        (lambda y, model: y - y, lambda out: out + 5, "all outputs"),
    ],
)
def test_outputs_of_every_kind(then: Callable[..., Any], spoil: Callable[..., Any], name: str) -> None:
    assert _verify(then, grad=False).ok
    found = _verify(then, grad=False, spoil=spoil)
    assert not found.ok
    assert name in [failure.what for failure in found.failures]
    assert "<-- larger than eager's" in str(found)


def test_gradients_of_complex_numbers_and_dataclasses() -> None:
    weight = torch.randn(4, dtype=torch.complex64)
    result = _verify(lambda y, model, w: Out(torch.view_as_complex(y.view(4, 4, 2)) * w, y), weight)
    assert result.ok
    assert {"output.more", "gradient of linear.weight", "gradient of input[0][1]"} <= set(result.errors["mhc"].numbers)


def test_numbers_that_eager_code_overflows_to() -> None:
    """Infinities that eager code has, and float64 not, may stand; so may the numbers of float64."""
    then = lambda y, model: y.exp() * 3e38  # noqa: E731
    assert _verify(then, grad=False).ok
    assert _verify(then, grad=False, spoil=lambda out: out.nan_to_num(posinf=3e38)).ok
    assert not _verify(then, grad=False, spoil=lambda out: -out).ok


def test_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="model: its output has nothing to compare, got int; expected tensors"):
        _verify(lambda y, model: 3, grad=False)
    with pytest.raises(ValueError, match="model: all of its results are infinite or NaN; expected some numbers"):
        _verify(lambda y, model: y * math.nan, grad=False)


def test_inputs_that_the_model_writes() -> None:
    ids = torch.arange(4)

    def then(y: Tensor, model: Any, ids: Tensor) -> Tensor:
        ids += 1
        return y * ids[:, None]

    assert _verify(then, ids).ok
    assert ids.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "then",
    [lambda y, model, w: y * float(w.numpy().max()), lambda y, model, w: F.cross_entropy(y, torch.arange(4), weight=w)],
)
def test_inputs_that_cannot_require_a_gradient(then: Callable[..., Any]) -> None:
    numbers = _verify(then, torch.rand(8)).errors["mhc"].numbers
    assert [name for name in numbers if name.startswith("gradient")] == [
        "gradient of linear.weight",
        "gradient of linear.bias",
    ]
    x = torch.randn(4, 8, requires_grad=True)
    found = mhc_compile.verify(Computes(then), x, torch.rand(8), inductor=False, say=None)
    assert "gradient of input[0][0]" in found.errors["mhc"].numbers
    assert x.grad is None


def test_hooks_and_writes_of_parameters() -> None:
    def then(y: Tensor, model: Any) -> Tensor:
        with torch.no_grad():
            model.linear.bias += 1
        return y

    def step(parameter: Tensor) -> None:
        calls.append(parameter)
        parameter.grad = None

    model, calls = Computes(then), []
    handle = model.linear.weight.register_post_accumulate_grad_hook(step)
    before = model.linear.bias.detach().clone()
    result = mhc_compile.verify(model, torch.randn(4, 8), inductor=False, say=None)
    assert result.errors["mhc"].reference["gradient of linear.weight"] > 0
    assert torch.equal(model.linear.bias, before)
    assert calls == []
    model(torch.randn(4, 8)).sum().backward()
    assert calls == [model.linear.weight]
    handle.remove()


def test_models_that_float64_does_not_run() -> None:
    def then(y: Tensor, model: Any) -> Tensor:
        assert y.dtype == torch.float32
        return y

    with pytest.raises(
        ValueError, match="model: it runs as it is, and its float64 evaluation does not: AssertionError"
    ):
        _verify(then)
    with pytest.raises(ValueError, match="model: it or an argument is on meta; expected a device that has numbers"):
        mhc_compile.verify(nn.Linear(2, 2, device="meta"), torch.ones(2), say=None)


def test_in_inference_mode_and_pickled() -> None:
    model = nn.Linear(8, 8)
    with torch.inference_mode():
        result = mhc_compile.verify(model, torch.randn(4, 8), inductor=False, say=None)
    assert result.ok
    assert "gradient of weight" in result.errors["mhc"].numbers
    again = pickle.loads(pickle.dumps(result))
    assert again.ok
    assert str(again) == str(result)
