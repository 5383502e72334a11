"""The RMS norm after the aggregate, as an argument of the operators: against its definition, and its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import mhc_compile.ops as ops
from tests.ops.eager import combine_arguments, mix_arguments

MHC = torch.ops.mhc
EPS = 1e-2


def _leaves(values: list[Tensor | None]) -> list[Tensor | None]:
    return [None if value is None else value.requires_grad_() for value in values]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_gradients(n: int, weighted: bool) -> None:
    weight = torch.rand(5, dtype=torch.float64) + 0.5 if weighted else None
    norm_weight = torch.rand(5 * n, dtype=torch.float64) if weighted else None
    scalars: dict[str, Any] = {"sinkhorn_steps": 2, "input_norm_eps": EPS, "pre_eps": 0.1}
    parameters = [*mix_arguments(n, 5, (2,))[1:], norm_weight, weight]
    f, layer_bias, h_post, x, h_res = combine_arguments(n, 5, (2,))
    mix = _leaves([x, *parameters])
    assert gradcheck(lambda *a: MHC.generate_mix_and_aggregate(*a, **scalars), mix, fast_mode=True)
    boundary = _leaves([f, layer_bias, h_post, x, h_res, *parameters])
    assert gradcheck(lambda *a: MHC.boundary(*a, **scalars), boundary, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "width", "tokens"), [(1, 1, ()), (2, 7, (0,)), (4, 24, (3, 2)), (3, 16, (70,))])
def test_is_a_norm_of_the_aggregate(n: int, width: int, tokens: tuple[int, ...], dtype: torch.dtype) -> None:
    x, *parameters = (value.to(dtype) for value in mix_arguments(n, width, tokens))
    weight = (torch.rand(width, dtype=torch.float64) + 0.5).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    plain, *gates = MHC.generate_mix_and_aggregate(x, *parameters, out_dtype=wide)
    for w in (weight, None):
        given = (x, *parameters, None, w)
        normed, *others = MHC.generate_mix_and_aggregate(*given, input_norm_eps=EPS, out_dtype=wide)
        expected = plain * torch.rsqrt(plain.square().mean(-1, keepdim=True) + EPS) * (1 if w is None else w)
        torch.testing.assert_close(normed, expected)
        assert all(torch.equal(a, b) for a, b in zip(gates, others, strict=True))
        rounded = MHC.generate_mix_and_aggregate(*given, input_norm_eps=EPS)[0]
        assert torch.equal(rounded, normed.to(dtype))


def test_is_the_same_in_a_boundary() -> None:
    f, layer_bias, h_post, x, h_res = combine_arguments(2, 6, (5,), dtype=torch.bfloat16)
    parameters = mix_arguments(2, 6, (5,))[1:]
    parameters, weight = [p.float() for p in parameters], torch.rand(6)
    x_new = ops.expand_combine(f, layer_bias, h_post, x, h_res)
    apart = ops.generate_mix_and_aggregate(x_new, *parameters, None, weight, input_norm_eps=EPS)
    fused = ops.boundary(f, layer_bias, h_post, x, h_res, *parameters, None, weight, input_norm_eps=EPS)
    assert all(torch.equal(a, b) for a, b in zip(fused, (x_new, *apart), strict=True))


def test_each_token_is_its_own_and_runs_repeat() -> None:
    x, *parameters = (value.float() for value in mix_arguments(4, 40, (19,)))
    weight = torch.rand(40)

    def run(part: Tensor) -> list[Tensor]:
        leaf = part.clone().requires_grad_()
        out = ops.generate_mix_and_aggregate(leaf, *parameters, None, weight, input_norm_eps=EPS)
        torch.autograd.backward([out[0]], [torch.ones_like(out[0])])
        assert leaf.grad is not None
        return [out[0].detach(), leaf.grad]

    whole = run(x)
    assert all(torch.equal(a, b) for a, b in zip(whole, run(x), strict=True))
    for part in (slice(0, 1), slice(3, 5), slice(2, 19)):
        assert all(torch.equal(a[part], b) for a, b in zip(whole, run(x[part]), strict=True))


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, *parameters = mix_arguments(2, 6, (3,))
    weight = torch.rand(6, dtype=torch.float64)
    saved = (
        x,
        *parameters,
        None,
        *MHC.generate_mix_and_aggregate(x, *parameters, None, weight, input_norm_eps=EPS)[3:],
    )
    d_input = torch.rand(3, 6, dtype=torch.float64)

    def gradients(*needs: bool) -> Any:
        flags = [True, True, True, True, False, *needs]
        return MHC.generate_mix_and_aggregate_backward(
            d_input, None, None, None, None, *saved, flags, None, weight, input_norm_eps=EPS
        )

    *whole, d_weight = gradients(True)
    *others, nothing = gradients(False)
    assert d_weight.shape == weight.shape
    assert nothing.numel() == 0
    assert all(torch.equal(a, b) for a, b in zip(whole, others, strict=True))


def test_small_and_large_inputs_overflow_nowhere() -> None:
    """r^3 is 1e45 for streams of 1e-15, which float32 does not hold."""
    for size, eps in ((1e-15, 0.0), (1e12, 1e-6)):
        x, *parameters = (value.float() for value in mix_arguments(2, 6, (3,)))
        x = (x * size).requires_grad_()
        (out, *_) = ops.generate_mix_and_aggregate(x, *parameters, input_norm_eps=eps, rms_eps=0.0)
        out.sum().backward()
        assert torch.isfinite(out).all()
        assert torch.isfinite(x.grad).all()  # type: ignore[arg-type]


def test_a_weight_needs_an_eps() -> None:
    x, *parameters = mix_arguments(2, 6, (3,))
    with pytest.raises(ValueError, match="input_norm_weight was given without input_norm_eps"):
        ops.generate_mix_and_aggregate(x, *parameters, None, torch.rand(6))
