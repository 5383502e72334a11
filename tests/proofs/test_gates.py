"""From streams to gates: the projection, the RMS factor and the sigmoids are those of the programs, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_compile.forms import RMS_MODES, Rms
from mhc_compile.ops import projection, scale
from mhc_compile.ops.projection import gradients as projection_gradients
from mhc_compile.ops.projection import reference as projection_reference
from mhc_compile.ops.scale import _rms_factor, _rms_gradient
from mhc_compile.ops.scale import gradients as scale_gradients
from mhc_compile.ops.scale import reference as scale_reference
from tests.proofs.calculus import prove_gradients
from tests.proofs.equality import Refuted, prove, refute
from tests.proofs.mutants import mutated
from tests.proofs.symbols import Symbols, Terms

DTYPES = (torch.float32, torch.float64)
# The RMS factor's forms; a clamp holds or not.
RMS = [(mode, holds) for mode in RMS_MODES for holds in ((False, True) if mode == "clamp" else (False,))]


def _projected(symbols: Symbols, n: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, phi with rows for all gates, and the norm's weight."""
    return (
        symbols.tensor("x", 1, n, width),
        symbols.tensor("phi", n * n + 2 * n, n * width),
        symbols.tensor("w", n * width),
    )


def _spelled_projection(x: Tensor, phi: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    flat = x.flatten(-2)
    return F.linear(flat * weight, phi), flat.square().mean(-1)


def _prove_projection(n: int, width: int, dtype: torch.dtype = torch.float32) -> None:
    symbols = Symbols(dtype=dtype)
    tensors = _projected(symbols, n, width)
    with symbols:
        for got, wanted in zip(projection(*tensors), _spelled_projection(*tensors), strict=True):
            prove(symbols.terms(got), symbols.terms(wanted))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "width"), [(2, 3), (4, 2), (8, 1)])
def test_the_projection_is_a_linear_layer(n: int, width: int, dtype: torch.dtype) -> None:
    _prove_projection(n, width, dtype)


@pytest.mark.parametrize(
    ("old", "new"),
    [("flat.square().mean(-1)", "flat.square().sum(-1)"), ("weight.T", "phi.T")],
    ids=["the sum of squares", "no weight of the norm"],
)
def test_another_projection_is_refuted(old: str, new: str) -> None:
    with mutated(projection_reference, old, new), pytest.raises(Refuted):
        _prove_projection(2, 1)


@pytest.mark.parametrize(("n", "width"), [(2, 2), (4, 1), pytest.param(8, 1, marks=pytest.mark.thorough)])
def test_gradients_of_the_projection(n: int, width: int) -> None:
    symbols = Symbols()
    x, phi, weight = _projected(symbols, n, width)
    prove_gradients(symbols, projection, x, phi, weight)
    prove_gradients(symbols, projection, x, phi)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("value=2.0 / flat.shape[-1]", "value=1.0 / flat.shape[-1]"),
        ("matmul_rows(dh[tokens], weight)", "matmul_rows(dh[tokens], upcast(phi, dtype))"),
    ],
    ids=["half of the square's", "no weight of the norm"],
)
def test_another_gradient_of_the_projection_is_refuted(old: str, new: str) -> None:
    symbols = Symbols()
    with mutated(projection_gradients, old, new), pytest.raises(Refuted):
        prove_gradients(symbols, projection, *_projected(symbols, 2, 1))


def _deciding(clamp_holds: bool) -> Symbols:
    """Symbols of which a root is above the eps of a clamp, or below; roots are above 0."""
    return Symbols(above=lambda a, b: b == 0 or (b.is_Symbol != clamp_holds))


def _scaled(symbols: Symbols, n: int, groups: bool = True, parts: int = 3) -> tuple[Tensor, ...]:
    """h, ms, scale and bias for the first parts of pre, post and res."""
    k = (n, 2 * n, n * n + 2 * n)[parts - 1]
    sizes = (("h", (1, k)), ("s", (parts if groups else k,)), ("b", (k,)))
    h, weight, bias = (symbols.tensor(name, *size) for name, size in sizes)
    return h, symbols.tensor("ms", 1, positive=True), weight, bias


def _forms(symbols: Symbols, mode: str) -> dict[str, Any]:
    names = ("rms_eps", "pre_eps", "post_mult", "post_eps")
    return {name: symbols.number(name) for name in names} | {"rms_mode": mode}


def _spelled_gates(
    h: Tensor,
    ms: Tensor,
    scales: Tensor,
    bias: Tensor,
    n: int,
    *,
    rms_eps: float,
    rms_mode: str,
    pre_eps: float,
    post_mult: float,
    post_eps: float,
) -> tuple[Tensor, ...]:
    if rms_mode == "none":
        r = torch.ones_like(ms)
    elif rms_mode == "inside":
        r = torch.rsqrt(ms + rms_eps)
    else:
        r = 1 / (ms.sqrt() + rms_eps if rms_mode == "outside" else ms.sqrt().clamp_min(rms_eps))
    parts = (h * r.unsqueeze(-1)).split([n, n, n * n], -1)
    pre, post, res = (p * s + b for p, s, b in zip(parts, scales, bias.split([n, n, n * n]), strict=True))
    return pre.sigmoid() + pre_eps, post_mult * post.sigmoid() + post_eps, res.unflatten(-1, (n, n))


def _prove_gates(n: int, mode: str, clamp_holds: bool = False) -> None:
    symbols = _deciding(clamp_holds)
    tensors, forms = _scaled(symbols, n), _forms(symbols, mode)
    with symbols:
        for got, wanted in zip(scale(*tensors, n, **forms), _spelled_gates(*tensors, n, **forms), strict=True):
            prove(symbols.terms(got), symbols.terms(wanted))


@pytest.mark.parametrize(("mode", "clamp_holds"), RMS)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_gates_are_scaled_sigmoids(n: int, mode: str, clamp_holds: bool) -> None:
    _prove_gates(n, mode, clamp_holds)


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        (scale_reference, "gates.post_mult * ", ""),
        (scale_reference, "logits[:, n : 2 * n]", "logits[:, :n]"),
        (_rms_factor, "torch.rsqrt(ms + rms.eps)", "torch.reciprocal(torch.sqrt(ms) + rms.eps)"),
    ],
    ids=["no factor of the post gate", "the rows of another gate", "eps outside the root"],
)
def test_other_gates_are_refuted(function: Callable[..., Any], old: str, new: str) -> None:
    with mutated(function, old, new), pytest.raises(Refuted):
        _prove_gates(2, "inside")


def _prove_gradients_of_gates(
    n: int, mode: str, clamp_holds: bool = False, groups: bool = True, parts: int = 3
) -> None:
    symbols = _deciding(clamp_holds)
    tensors, forms = _scaled(symbols, n, groups, parts), _forms(symbols, mode)
    prove_gradients(symbols, lambda *given: scale(*given, n, **forms), *tensors)


@pytest.mark.parametrize(("mode", "clamp_holds"), RMS)
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_gradients_of_gates(n: int, mode: str, clamp_holds: bool) -> None:
    _prove_gradients_of_gates(n, mode, clamp_holds)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_gradients_of_gates_with_a_scale_for_each_row(parts: int) -> None:
    _prove_gradients_of_gates(2, "inside", groups=False, parts=parts)


@pytest.mark.parametrize(
    ("function", "old", "new", "mode"),
    [
        (scale_gradients, "slope[:, :n] * d_pre", "_sigmoid(gate_logits)[:, :n] * d_pre", "inside"),
        (scale_gradients, " * gates.post_mult", "", "inside"),
        (scale_gradients, "(d_logits * normed).sum(0)", "(d_logits * h).sum(0)", "inside"),
        (_rms_gradient, "-0.5 * (r_dr * r * r)", "-0.5 * (r_dr * r)", "inside"),
        (_rms_gradient, "-0.5 * (r_dr * r / root)", "-0.5 * (r_dr * r * r)", "outside"),
    ],
    ids=["s for s (1 - s)", "no factor of the post gate", "a scale without the norm", "r^2 for r^3", "that of inside"],
)
def test_other_gradients_of_gates_are_refuted(function: Callable[..., Any], old: str, new: str, mode: str) -> None:
    with mutated(function, old, new), pytest.raises(Refuted):
        _prove_gradients_of_gates(2, mode, parts=2)


@pytest.mark.parametrize(
    ("one", "other"), [("inside", "outside"), ("inside", "clamp"), ("outside", "clamp")], ids=lambda mode: mode
)
@pytest.mark.parametrize("clamp_holds", [False, True])
def test_eps_inside_a_root_is_not_eps_outside(one: str, other: str, clamp_holds: bool) -> None:
    """Refuted with numbers, which arithmetic confirms."""
    a, b = _factor(one, clamp_holds), _factor(other, clamp_holds)
    ms, eps = sympy.symbols("ms0 rms_eps", positive=True)
    model = refute(a, b, above=(eps**2, ms) if clamp_holds else (ms, eps**2))
    numbers = {ms: sympy.Rational(model["ms0"]), eps: sympy.Rational(model["rms_eps"])}
    assert abs(sympy.N((a[0] - b[0]).subs(numbers))) > 1e-9


def _factor(mode: str, clamp_holds: bool) -> Terms:
    symbols = _deciding(clamp_holds)
    ms, eps = symbols.tensor("ms", 1, positive=True), symbols.number("rms_eps")
    with symbols:
        return symbols.terms(_rms_factor(ms, Rms(eps, mode)))
