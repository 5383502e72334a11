"""The kernels' errors for logits of any size, and where exact gradients vanish: see `tests.ops.logits`."""

from __future__ import annotations

import pytest
from torch import Tensor

from mhc_compile.forms import Sinkhorn
from mhc_compile.kernels import sinkhorn
from tests.kernels.cases import DEVICE, INTERPRETED, MARKS
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
