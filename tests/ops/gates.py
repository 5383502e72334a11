"""Gates at logits of any size, saturated ones among them, and what errors of their gradients may be.

The rule: the L2 error of a gradient against float64 is at most the largest of

- 1.1 + 5 / sqrt(numbers) times eager's error, as in `mhc_compile.testing.judge`; four times for scale and bias, which
  are few numbers;
- 4 roundings of the exact values;
- 1e-12 of the gradient that arrives.

Eager's error is the largest of those for `_DRAWS` inputs that are nearly the same. Around a logit of -60 one token may
be as large as all others together. The rounding of its logit, |logit| * 2^-24, decides the error then, in one program
by chance less than in another.

Sizes at which float32 has no gradient, because exp(-|logit|) underflows for all tokens, are not among the cases.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mhc_compile.forms import Gates

N, TOKENS = 4, 256
# Spread of the logits, and where their middle is.
SIZES = [(1e-3, 0.0), (1.0, 0.0), (30.0, 0.0), (1e3, 0.0), (1e4, 0.0)]
SIZES += [(1.0, middle) for middle in (-60.0, -30.0, -10.0, 10.0, 14.0)]
GATES = [Gates(), Gates(1e-6, 1.5, 1e-3)]
# The largest of so many roundings of one number is close to the largest possible.
_DRAWS = 8

Gradients = tuple[Tensor, ...]


def given(size: float, middle: float) -> tuple[list[Tensor], list[Tensor]]:
    """h, ms, scale and bias, and gradients of h_pre and h_post."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = [size * normal(TOKENS, 2 * N), normal(TOKENS).exp(), normal(2).exp(), middle + normal(2 * N)]
    return inputs, [normal(TOKENS, N), normal(TOKENS, N)]


def _gradients(inputs: list[Tensor], arriving: list[Tensor], gates: Gates) -> Gradients:
    h, ms, scale, bias = leaves = [value.clone().requires_grad_() for value in inputs]
    logits = h * torch.rsqrt(ms + 1e-6).unsqueeze(-1) * scale.repeat_interleave(N) + bias
    h_pre = logits[:, :N].sigmoid() + gates.pre_eps
    h_post = gates.post_mult * logits[:, N:].sigmoid() + gates.post_eps
    return torch.autograd.grad([h_pre, h_post], leaves, arriving)


def _exact(inputs: list[Tensor], arriving: list[Tensor], gates: Gates) -> Gradients:
    return _gradients([value.double() for value in inputs], [value.double() for value in arriving], gates)


def _errors_of_eager(inputs: list[Tensor], arriving: list[Tensor], gates: Gates) -> list[float]:
    """The largest error of each gradient, over inputs whose projections are moved by many of their roundings."""
    generator = torch.Generator().manual_seed(1)
    h, *rest = inputs
    errors = []
    for _ in range(_DRAWS):
        moved = [h * (1 + 2.0**-16 * torch.randn(h.shape, generator=generator).to(h.device)), *rest]
        pairs = zip(_gradients(moved, arriving, gates), _exact(moved, arriving, gates), strict=True)
        errors.append([(found.double() - truth).norm().item() for found, truth in pairs])
    return [max(of_gradient) for of_gradient in zip(*errors, strict=True)]


def complaints(
    gates: Gates, evaluate: Callable[[list[Tensor], list[Tensor]], dict[str, Tensor]], device: str = "cpu"
) -> list[str]:
    """Where the gradients of h, ms, scale and bias, as far as `evaluate` returns them, break the rule."""
    told = []
    for size, middle in SIZES:
        inputs, arriving = ([value.to(device) for value in values] for values in given(size, middle))
        found = evaluate(inputs, arriving)
        eager, exact = _errors_of_eager(inputs, arriving, gates), _exact(inputs, arriving, gates)
        nothing = 1e-12 * torch.stack([v.double().norm() for v in arriving]).norm().item()
        for name, trusted, truth in zip(("h", "ms", "scale", "bias"), eager, exact, strict=True):
            if name not in found:
                continue
            error = (found[name].double() - truth).norm().item()
            slack = 4.0 if name in ("scale", "bias") else 1.1 + 5 / truth.numel() ** 0.5
            rounding = 4 * torch.finfo(torch.float32).eps * truth.norm().item()
            if not error <= max(slack * trusted, rounding, nothing):
                told.append(f"{name} of {size:g} around {middle:g}: {error:.1e}, eager's {trusted:.1e}")
    return told
