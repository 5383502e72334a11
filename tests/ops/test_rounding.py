"""Errors of Sinkhorn and gates for logits of any size, and where exact gradients vanish: see `logits` and `gates`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mhc_compile import ops
from mhc_compile.forms import Gates, Sinkhorn
from mhc_compile.ops import _loops
from tests.ops import gates as of_gates
from tests.ops.logits import PROGRAMS, TOKENS, Evaluate, complaints, differentiated, nearly_equal

STREAMS = [4, *(pytest.param(n, marks=pytest.mark.thorough) for n in (2, 8))]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# The loops have no exp with eps that no maximum was taken from.
OF_LOOPS = [name for name in PROGRAMS if name not in ("plain exp, eps", "plain exp, clamp")]


def _operator(name: str) -> Evaluate:
    return lambda logits, d: differentiated(lambda value: ops.sinkhorn(value, **PROGRAMS[name].form), logits, d)


def _loop(name: str, n: int) -> Evaluate:
    """The same by the loops of compiled programs, logits being what phi = 1 projects out of streams."""
    assert _loops._library(n) is not None  # the references would do
    k = n * n + 2 * n
    # r = 2**-60, whatever the logits.
    scalars = Sinkhorn(**PROGRAMS[name].form).as_kwargs() | {"rms_eps": 2.0**120}
    parameters = torch.eye(k), torch.full((3,), 2.0**60), torch.zeros(k), None

    def evaluate(logits: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([torch.zeros(len(logits), 2 * n), logits.flatten(1)], 1).view(-1, n, n + 2)
        *_, matrices, h, ms = _loops.mix(x, *parameters, **scalars)
        assert torch.equal(h, x.flatten(1))
        dh = _loops.mix_backward((None, None, None, d, None, None), x, *parameters[1:3], h, ms, **scalars)[1]
        return matrices, dh[:, 2 * n :].view(logits.shape)

    return evaluate


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", STREAMS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_operator(name: str, n: int, device: str) -> None:
    assert complaints(name, n, TOKENS[n], _operator(name), device) == []


@pytest.mark.parametrize("n", STREAMS)
@pytest.mark.parametrize("name", OF_LOOPS)
def test_loops(name: str, n: int) -> None:
    assert complaints(name, n, TOKENS[n], _loop(name, n)) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", STREAMS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_that_are_nearly_equal(name: str, n: int, device: str) -> None:
    """With more tokens: what is wrong here is one rounding too many."""
    assert complaints(name, n, 4 * TOKENS[n], _operator(name), device, nearly_equal) == []


@pytest.mark.parametrize("n", STREAMS)
@pytest.mark.parametrize("name", OF_LOOPS)
def test_gradients_of_loops_that_are_nearly_equal(name: str, n: int) -> None:
    assert complaints(name, n, 4 * TOKENS[n], _loop(name, n), draw=nearly_equal) == []


@pytest.mark.parametrize("steps", [1, 2, 39, 400])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_entries_that_grow(n: int, steps: int) -> None:
    """All but a row and a column are so small that no float32 holds them, and each half-step makes them n - 1 times as
    large: they come to count when the others have been shared out."""
    logits = torch.full((1, n, n), -120.0)
    logits[:, 0] = logits[:, :, 0] = 0.0
    form = {"steps": steps, "start": "plain_exp", "first": "rows", "eps": 0.0, "start_eps": 0.0}
    found = ops.sinkhorn(logits, **form)
    torch.testing.assert_close(found.double(), ops.sinkhorn(logits.double(), **form), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("start", ["softmax", "exp"])
@pytest.mark.parametrize("first", ["rows", "columns"])
def test_infinite_logits(first: str, start: str) -> None:
    """Masks hold, and where all is masked it is 0 / 0 as in eager code."""
    logits = torch.randn(3, 4, 4)
    logits[0, 0, 1:] = logits[1, 2] = logits[2, :, 1] = -torch.inf
    form = {"steps": 4, "start": start, "first": first, "eps": 0.0, "start_eps": 0.0}
    found, gradient = differentiated(lambda value: ops.sinkhorn(value, **form), logits, torch.randn(3, 4, 4))
    for masked in (found[0], gradient[0]):
        assert masked.isfinite().all()
        assert (masked[0, 1:] == 0).all()
    assert found[1:].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gates", of_gates.GATES)
def test_gates(gates: Gates, device: str) -> None:
    def evaluate(inputs: list[Tensor], arriving: list[Tensor]) -> dict[str, Tensor]:
        leaves = [value.clone().requires_grad_() for value in inputs]
        h_pre, h_post, _ = ops.scale(*leaves, of_gates.N, **gates.as_kwargs())
        found = torch.autograd.grad([h_pre, h_post], leaves, arriving)
        return dict(zip(("h", "ms", "scale", "bias"), found, strict=True))

    assert of_gates.complaints(gates, evaluate, device) == []


@pytest.mark.parametrize("gates", of_gates.GATES)
def test_gates_of_loops(gates: Gates) -> None:
    def evaluate(inputs: list[Tensor], arriving: list[Tensor]) -> dict[str, Tensor]:
        h, ms, scale, bias = inputs
        x = torch.zeros(len(h), of_gates.N, 8)
        gradients = (None, *arriving, None, None, None)
        found = _loops.mix_backward(gradients, x, scale, bias, h, ms, **gates.as_kwargs())[1:5]
        return dict(zip(("h", "ms", "scale", "bias"), found, strict=True))

    assert of_gates.complaints(gates, evaluate) == []
