"""The kernels' errors for logits of any size and where gradients vanish: see `logits` and `gates` of tests.ops."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.kernels import mix_backward, scale, sinkhorn
from mhc_compile.kernels.gates import exponential, sigmoid_and_slope, sum_of_halves
from tests.kernels.cases import DEVICE, INTERPRETED, MARKS
from tests.ops import gates as of_gates
from tests.ops.logits import PROGRAMS, TOKENS, Draw, complaints, gradients_of, nearly_equal

pytestmark = MARKS
# The interpreter takes its time over many half-steps.
STREAMS, LESS = ([4], 4) if INTERPRETED else ([2, 4, 8], 1)
LONG = pytest.mark.thorough if INTERPRETED else ()
NAMES = [pytest.param(name, marks=LONG if PROGRAMS[name].form["steps"] > 20 else ()) for name in PROGRAMS]


# Gradients of numbers that underflowed next to an eps overflow. The interpreter's numpy warns of this.
@pytest.mark.filterwarnings("ignore:overflow encountered in (multiply|cast)")
@pytest.mark.parametrize("draw", [gradients_of, nearly_equal])
@pytest.mark.parametrize("n", STREAMS)
@pytest.mark.parametrize("name", NAMES)
def test_kernels(name: str, n: int, draw: Draw) -> None:
    form = Sinkhorn(**PROGRAMS[name].form)

    def evaluate(logits: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        return sinkhorn.forward(logits, sinkhorn=form), sinkhorn.backward(d, logits, sinkhorn=form)

    assert complaints(name, n, TOKENS[n] // LESS, evaluate, DEVICE, draw) == []


@pytest.mark.parametrize("gates", of_gates.GATES)
def test_gates(gates: Gates) -> None:
    def evaluate(inputs: list[Tensor], arriving: list[Tensor]) -> dict[str, Tensor]:
        found = scale.backward(*arriving, None, *inputs, of_gates.N, [True] * 4, rms=Rms(), gates=gates)
        return dict(zip(("h", "ms", "scale", "bias"), found, strict=True))

    assert of_gates.complaints(gates, evaluate, DEVICE) == []


@pytest.mark.parametrize("gates", of_gates.GATES)
def test_gates_of_a_mix(gates: Gates) -> None:
    def evaluate(inputs: list[Tensor], arriving: list[Tensor]) -> dict[str, Tensor]:
        h, ms, alpha, bias = inputs
        x = torch.zeros(len(h), of_gates.N, 8, device=DEVICE)
        forms = {"rms": Rms(), "gates": gates, "sinkhorn": None}
        found = mix_backward.backward_gates(None, *arriving, None, None, None, x, alpha, bias, h, ms, **forms)
        return {"h": found.dh[0, :, : h.shape[1]]}

    assert of_gates.complaints(gates, evaluate, DEVICE) == []


@triton.jit
def _functions_kernel(x, out, gate, slope, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(out + at, exponential(value))
    of_value, derivative = sigmoid_and_slope(value)
    tl.store(gate + at, of_value)
    tl.store(slope + at, derivative)


def _functions(x: Tensor) -> list[Tensor]:
    found = [torch.empty_like(x) for _ in range(3)]
    _functions_kernel[(len(x) // 1024,)](x, *found, BLOCK=1024)
    return found


def test_functions() -> None:
    """exp, a sigmoid and its derivative are as accurate where their results are tiny."""
    x = torch.linspace(-104.0, 88.0, 1 << 14, device=DEVICE)
    exp, gate, slope = x.double().exp(), x.double().sigmoid(), x.double().sigmoid() * (-x.double()).sigmoid()
    # A GPU's exponential and its quotient are off by 2 units each, in a slope the quotient comes in twice.
    units = (2, 3, 5) if INTERPRETED else (3, 6, 9)
    for found, exact, unit in zip(_functions(x), (exp, gate, slope), units, strict=True):
        # Below the normal numbers, exp is rounded to a multiple of the smallest one, and the others are 0.
        least = 2.0**-149 if unit == units[0] else 2.0**-126
        assert ((found.double() - exact).abs() <= unit * 2.0**-23 * exact + least).all()


# The whole number that NaN becomes does not matter: the result is a product with NaN.
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_functions_of_no_number() -> None:
    x = torch.tensor([torch.nan, -torch.inf, torch.inf, -1e38, 1e38, 0.0] + [0.0] * 1018, device=DEVICE)
    exp, gate, slope = (found[:6].tolist() for found in _functions(x.clamp(max=88.0)))
    assert exp[0] != exp[0]
    assert gate[0] != gate[0]
    assert slope[0] != slope[0]
    assert (exp[1], exp[3], exp[5]) == (0.0, 0.0, 1.0)
    assert gate[1:] == [0.0, 1.0, 0.0, 1.0, 0.5]
    assert slope[1] == slope[3] == 0.0
    assert slope[5] == 0.25


@triton.jit
def _sums_kernel(x, first, second, N: tl.constexpr, T: tl.constexpr):
    i, o, t = tl.arange(0, N)[:, None, None], tl.arange(0, N)[None, :, None], tl.arange(0, T)[None, None, :]
    matrix = tl.load(x + (i * N + o) * T + t)
    tl.store(first + o * T + t, sum_of_halves(matrix, 0))
    tl.store(second + i * T + t, sum_of_halves(matrix, 1))


@pytest.mark.parametrize("n", [4, 8, 16])
def test_a_sum_of_equal_numbers_is_exact(n: int) -> None:
    """So a gradient that is centred on the mean of equal numbers is 0, and not next to it."""
    x = torch.linspace(0.1, 3.0, 64, device=DEVICE)
    sums = [torch.empty(n, 64, device=DEVICE) for _ in range(2)]
    _sums_kernel[(1,)](x.expand(n, n, 64).contiguous(), *sums, N=n, T=64)
    for found in sums:
        assert torch.equal(found, (n * x).expand(n, 64))
