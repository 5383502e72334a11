"""The parameters that tell one hyper-connection form from another.

Pure data, shared by operators, kernels and passes. Each class names the equation that its fields parametrise;
`as_kwargs` spells the fields as the flat keyword arguments of the registered operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RMS_MODES = ("inside", "outside", "clamp")
SINKHORN_STARTS = ("softmax", "exp", "plain_exp", "global_exp")
SINKHORN_AXES = ("rows", "columns")


@dataclass(frozen=True)
class Rms:
    """The factor r that normalises a token, from ms, the mean of its n*C squares.

    inside:  r = 1 / sqrt(ms + eps)
    outside: r = 1 / (sqrt(ms) + eps)
    clamp:   r = 1 / max(sqrt(ms), eps)
    """

    eps: float = 1e-6
    mode: str = "inside"

    def as_kwargs(self) -> dict[str, Any]:
        return {"rms_eps": self.eps, "rms_mode": self.mode}


@dataclass(frozen=True)
class Gates:
    """h_pre = sigmoid(l_pre) + pre_eps and h_post = post_mult * sigmoid(l_post) + post_eps."""

    pre_eps: float = 0.0
    post_mult: float = 2.0
    post_eps: float = 0.0

    def as_kwargs(self) -> dict[str, Any]:
        return {"pre_eps": self.pre_eps, "post_mult": self.post_mult, "post_eps": self.post_eps}


@dataclass(frozen=True)
class Sinkhorn:
    """The projection of logits [n, n] towards the doubly stochastic matrices, in `steps` half-steps.

    start "softmax": P = softmax(L, dim=-1) + start_eps
    start "exp":     P = exp(L - max of L along the axis that `first` normalises) + start_eps
    start "plain_exp":  P = exp(L) + start_eps
    start "global_exp": P = exp(L - max of L over both axes) + start_eps
    then alternately, beginning with `first` ("rows" sums over dim -1, "columns" over dim -2):
        P = P / (P.sum(axis) + eps), or with clamp P = P / max(P.sum(axis), eps)

    With eps = start_eps = 0 logits of any size neither overflow nor underflow to 0 / 0: the exponentials keep whole
    exponents of their own until both axes have been normalised. The last two starts are computed from the shifted
    exponential of "exp", with start_eps and the first half-step's eps scaled to match. The result is the same, and the
    shift prevents overflow and underflow.
    The paper's T iterations after a row softmax, columns last, are 2 T - 1 half-steps.
    """

    steps: int = 39
    start: str = "softmax"
    first: str = "columns"
    eps: float = 1e-6
    start_eps: float = 1e-6
    clamp: bool = False

    @property
    def without_eps(self) -> bool:
        return self.eps == 0.0 and self.start_eps == 0.0

    @property
    def iterated(self) -> Sinkhorn:
        """The same as it is computed: without eps the first half-step, or the softmax, is part of the start.

        start "normalised": P = exp(L) divided by its sums along the axis that `first` does not normalise
        """
        if not self.without_eps or (self.start != "softmax" and self.steps == 0):
            return self
        softmax_first = self.start == "softmax" and (self.first == "columns" or self.steps == 0)
        rows = self.start == "softmax" or self.first == "rows"
        steps = self.steps if softmax_first else self.steps - 1
        return Sinkhorn(steps, "normalised", "columns" if rows else "rows", 0.0, 0.0)

    def as_kwargs(self) -> dict[str, Any]:
        return {
            "sinkhorn_steps": self.steps,
            "sinkhorn_start": self.start,
            "sinkhorn_first": self.first,
            "sinkhorn_eps": self.eps,
            "sinkhorn_start_eps": self.start_eps,
            "sinkhorn_clamp": self.clamp,
        }


class SymbolicLayout(ValueError):
    """How a tensor lies in memory depends on a symbolic size, where a kernel has to know it."""
