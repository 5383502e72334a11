"""The kernels' errors for logits of any size and where gradients vanish: see `logits` and `gates` of tests.ops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.kernels import mix, scale, sinkhorn
from tests.kernels.cases import DEVICE, INTERPRETED, MARKS
from tests.ops import gates as of_gates
from tests.ops.logits import PROGRAMS, TOKENS, complaints

pytestmark = MARKS
# The interpreter takes its time over many half-steps.
STREAMS, LESS = ([4], 8) if INTERPRETED else ([2, 4, 8], 1)
LONG = pytest.mark.thorough if INTERPRETED else ()
NAMES = [pytest.param(name, marks=LONG if PROGRAMS[name].form["steps"] > 20 else ()) for name in PROGRAMS]


# Gradients of what has underflowed beside an eps overflow, of which the interpreter's numpy warns.
@pytest.mark.filterwarnings("ignore:overflow encountered in multiply")
@pytest.mark.parametrize("n", STREAMS)
@pytest.mark.parametrize("name", NAMES)
def test_kernels(name: str, n: int) -> None:
    form = Sinkhorn(**PROGRAMS[name].form)

    def evaluate(logits: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        return sinkhorn.forward(logits, sinkhorn=form), sinkhorn.backward(d, logits, sinkhorn=form)

    assert complaints(name, n, TOKENS[n] // LESS, evaluate, DEVICE) == []


# A sigmoid of -100 is 1 / (1 + inf) = 0, of which the interpreter's numpy warns.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("gates", of_gates.GATES)
def test_gates(gates: Gates) -> None:
    def evaluate(inputs: list[Tensor], arriving: list[Tensor]) -> dict[str, Tensor]:
        found = scale.backward(*arriving, None, *inputs, of_gates.N, [True] * 4, rms=Rms(), gates=gates)
        return dict(zip(("h", "ms", "scale", "bias"), found, strict=True))

    assert of_gates.complaints(gates, evaluate, DEVICE) == []


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("gates", of_gates.GATES)
def test_gates_of_a_mix(gates: Gates) -> None:
    def evaluate(inputs: list[Tensor], arriving: list[Tensor]) -> dict[str, Tensor]:
        h, ms, alpha, bias = inputs
        x = torch.zeros(len(h), of_gates.N, 8, device=DEVICE)
        forms = {"rms": Rms(), "gates": gates, "sinkhorn": None}
        found = mix.backward_gates(None, *arriving, None, None, None, x, h.shape[1], alpha, bias, h, ms, **forms)
        return {"h": found.dh[0, :, : h.shape[1]]}

    assert of_gates.complaints(gates, evaluate, DEVICE) == []
