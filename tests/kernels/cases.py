"""What the kernel tests share: the eager reference in any dtype, drawn arguments and the comparison."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mhc_compile.forms import SINKHORN_STARTS, Gates, Rms, Sinkhorn

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
MARKS = [] if INTERPRETED else [pytest.mark.gpu]
CAPTURES = pytest.mark.skipif(
    "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ, reason="a graph that is captured takes memory from torch's cache"
)

FORMS = {
    "deepseek": (Rms(), Gates(pre_eps=1e-6), Sinkhorn()),
    "transformer_engine": (
        Rms(eps=1.2e-7), Gates(), Sinkhorn(steps=40, start="exp", first="rows", eps=0.0, start_eps=0.0),
    ),
    "megatron": (
        Rms(1e-6, "outside"), Gates(pre_eps=1e-6),
        Sinkhorn(steps=40, start="exp", first="rows", eps=1e-6, start_eps=0.0, clamp=True),
    ),
    "columns_first_exp": (
        Rms(eps=1e-12, mode="clamp"), Gates(post_mult=1.0, post_eps=1e-3),
        Sinkhorn(steps=20, start="exp", first="columns", eps=1e-12, start_eps=0.0, clamp=True),
    ),
    "log_softmax": (Rms(), Gates(), Sinkhorn(steps=1, first="columns", eps=0.0, start_eps=0.0)),
    "log_columns": (Rms(), Gates(), Sinkhorn(steps=7, start="exp", first="columns", eps=0.0, start_eps=0.0)),
    # Clamps that bind and epsilons as large as the sums show which of the two was meant.
    "binding_clamp": (Rms(0.7, "clamp"), Gates(), Sinkhorn(steps=5, first="rows", eps=0.9, clamp=True)),
    "large_eps": (
        Rms(0.5, "outside"), Gates(), Sinkhorn(steps=4, start="exp", first="columns", eps=0.3, start_eps=0.2)
    ),
    **{start: (Rms(), Gates(), Sinkhorn(5, start, "rows", eps=0.3, start_eps=0.2)) for start in SINKHORN_STARTS},
    "plain_exp_clamped": (
        Rms(), Gates(), Sinkhorn(steps=4, start="plain_exp", first="columns", eps=2.0, start_eps=0.0, clamp=True)
    ),
    "no_norm": (Rms(mode="none"), Gates(), Sinkhorn(steps=5)),
    "no_steps": (Rms(), Gates(), Sinkhorn(steps=0)),
    "no_steps_exp": (Rms(), Gates(), Sinkhorn(steps=0, start="exp", first="rows", start_eps=0.0)),
}  # fmt: skip
# What a test uses to which the form is all the same. The interpreter takes its time over 39 half-steps; after fewer
# than 5 the matrix is so far from its limit that gradients of single arguments may nearly cancel.
USUAL = "few_steps" if INTERPRETED else "deepseek"
if INTERPRETED:
    FORMS[USUAL] = (Rms(), Gates(pre_eps=1e-6), Sinkhorn(steps=5))


def project(x: Tensor, phi: Tensor, norm_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """h and ms of x [M, n, C] in the dtype of the arguments, differentiable, as all that follows."""
    flat = x.flatten(-2)
    return (flat if norm_weight is None else flat * norm_weight) @ phi.T, flat.square().mean(-1)


def gate(
    h: Tensor, ms: Tensor, scale: Tensor, bias: Tensor, n: int, form: tuple[Rms, Gates, Sinkhorn]
) -> tuple[Tensor, Tensor, Tensor]:
    """h_pre, h_post and the logits [M, n, n], without elements where bias has none for them."""
    rms, gates, _ = form
    rows = bias.numel()
    h = h[..., :rows]
    root = ms.sqrt()
    r = {
        "inside": lambda: 1 / (ms + rms.eps).sqrt(),
        "outside": lambda: 1 / (root + rms.eps),
        "none": lambda: torch.ones_like(root),
        "clamp": lambda: 1 / root.clamp_min(rms.eps),
    }[rms.mode]()
    if scale.numel() != rows:
        widths = (n, n, rows - 2 * n)[: scale.numel()]
        scale = torch.cat([scale[i].expand(width) for i, width in enumerate(widths)])
    l = r[..., None] * h * scale + bias
    h_pre = l[..., :n].sigmoid() + gates.pre_eps
    h_post = gates.post_mult * l[..., n : 2 * n].sigmoid() + gates.post_eps
    logits = l[..., 2 * n :].unflatten(-1, (n, n)) if rows > 2 * n else l.new_empty(*l.shape[:-1], 0, 0)
    return h_pre, h_post, logits


def mix(
    x: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, norm_weight: Tensor | None, form: tuple[Rms, Gates, Sinkhorn]
) -> tuple[Tensor, ...]:
    """(h_pre, layer_input, h_post, h_res, h, ms) of x [M, n, C]."""
    h, ms = project(x, phi, norm_weight)
    h_pre, h_post, logits = gate(h, ms, scale, bias, x.shape[-2], form)
    h_res = form[2].equation(logits) if logits.numel() else logits
    return h_pre, (h_pre[..., None] * x).sum(-2), h_post, h_res, h, ms


def combine(f: Tensor, bias: Tensor | None, h_post: Tensor, x: Tensor, h_res: Tensor | None) -> Tensor:
    mixed = x if h_res is None else torch.einsum("...io,...ic->...oc", h_res, x)
    return h_post[..., None] * (f if bias is None else f + bias).unsqueeze(-2) + mixed


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Normal values of a CPU generator, the same on every device."""
    return (torch.randn(*shape) * scale).to(dtype).to(DEVICE)


def bf16_parts(t: Tensor) -> Tensor:
    """Three bf16 tensors whose sum is t, the largest first."""
    high = t.bfloat16()
    middle = (t - high).bfloat16()
    return torch.stack([high, middle, (t - high - middle).bfloat16()])


@dataclass
class MixCase:
    """Arguments of a mix and gradients of its outputs (layer_input, h_post, h_res, h, ms)."""

    x: Tensor
    phi: Tensor
    scale: Tensor
    bias: Tensor
    norm_weight: Tensor | None
    grads: list[Tensor]

    @property
    def parameters(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        return self.x, self.phi, self.scale, self.bias, self.norm_weight


def mix_case(
    tokens: int, n: int, width: int, *, dtype: torch.dtype = torch.float32, parts: int = 3, grouped: bool = True,
    norm: bool = False, phi_dtype: torch.dtype = torch.float32, small_dtype: torch.dtype = torch.float32,
    more: int = 0,
) -> MixCase:  # fmt: skip
    """more: rows of phi without gates."""
    rows = (n, 2 * n, n * n + 2 * n)[parts - 1]
    side = n if parts == 3 else 0
    return MixCase(
        x=draw(tokens, n, width, dtype=dtype),
        phi=draw(rows + more, n * width, dtype=phi_dtype, scale=(n * width) ** -0.5),
        scale=(draw(parts if grouped else rows).abs() + 0.5).to(small_dtype),
        bias=draw(rows, dtype=small_dtype),
        norm_weight=draw(n * width).abs() + 0.5 if norm else None,
        grads=[
            draw(tokens, width, dtype=dtype), draw(tokens, n if parts > 1 else 0), draw(tokens, side, side),
            draw(tokens, rows + more), draw(tokens),
        ],
    )  # fmt: skip


def mix_gradients(
    case: MixCase, form: tuple[Rms, Gates, Sinkhorn], grads: Sequence[Tensor | None], *, of_h_pre: bool = False
) -> list[Tensor]:
    """float64 gradients of x, phi, scale, bias (and norm_weight) for `grads` of (layer_input or h_pre, ...)."""
    leaves = [p.double().requires_grad_() for p in case.parameters if p is not None]
    h_pre, layer_input, *rest = mix(*leaves[:4], leaves[4] if len(leaves) > 4 else None, form)
    outputs = [h_pre if of_h_pre else layer_input, *rest]
    used = [(o, g.double()) for o, g in zip(outputs, grads, strict=True) if g is not None and o.numel()]
    found = torch.autograd.grad([o for o, _ in used], leaves, [g for _, g in used], allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, leaves, strict=True)]


def roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to dtype. The interpreter truncates to bf16: twice as much."""
    if dtype == torch.bfloat16:
        return 2.0**-7 if INTERPRETED else 2.0**-8
    return {torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 0.0}[dtype]


def assert_near(actual: Tensor, expected: Tensor, name: str = "", noise: float = 4e-6) -> None:
    """One rounding to actual's dtype on top of float32 arithmetic.

    noise: float32 errors relative to the largest expected value. The longest chains here (a projection, 40 half-steps
    forth and back, a sum over tokens) were measured at 1e-6; 4e-6 leaves room for other orders of summation. A bf16
    gradient of x also leaves out products below 2^-16 of its terms.
    """
    assert actual.shape == expected.shape, (name, actual.shape, expected.shape)
    if not actual.numel():
        return
    if actual.dtype == torch.bfloat16:
        noise = max(noise, 2.0**-15)
    bound = roundoff(actual.dtype) * expected.abs() + noise * expected.abs().amax()
    # A subnormal f16 is rounded to a multiple of the smallest one.
    bound = bound + (2.0**-25 if actual.dtype == torch.float16 else 0.0)
    excess = (actual.double() - expected).abs() / bound.clamp_min(1e-300)
    worst = excess.amax().item()
    assert worst <= 1.0, f"{name}: {worst:.3g} times the allowed error"


def assert_all_near(actual: Sequence[Tensor], expected: Sequence[Tensor], names: str, noise: float = 4e-6) -> None:
    for a, e, name in zip(actual, expected, names.split(), strict=True):
        assert_near(a, e, name, noise)


def keywords(form: tuple[Rms, Gates, Sinkhorn]) -> dict[str, Any]:
    return {"rms": form[0], "gates": form[1], "sinkhorn": form[2]}
