"""The parameters in which the forms of hyper-connections differ.

Shared by operators, kernels, passes and tests. Each class names the equation that its fields parametrise;
`as_kwargs` spells the fields as the flat keyword arguments of the registered operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

RMS_MODES = ("inside", "outside", "clamp", "none")
SINKHORN_AXES = ("rows", "columns")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise ValueError for a value that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}")


def _shifted_exp(logits: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    return (logits - logits.amax(dims, keepdim=True)).exp()


# How a Sinkhorn makes its logits positive, from them and the dimension that its first half-step sums over.
SINKHORN_STARTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "softmax": lambda logits, first: logits.softmax(-1),
    "exp": _shifted_exp,
    "plain_exp": lambda logits, first: logits.exp(),
    "global_exp": lambda logits, first: _shifted_exp(logits, (-2, -1)),
}
# The start of `Sinkhorn.iterated`, which no operator takes.
_NORMALISED = "normalised"
# Those that are exp(L) but for factors of whole lines, which half-steps without eps cancel.
SINKHORN_EXPONENTIALS = ("softmax", "exp", "plain_exp", "global_exp")


@dataclass(frozen=True)
class Rms:
    """The factor r that normalises a token, from ms, the mean of its n*C squares.

    inside:  r = 1 / sqrt(ms + eps)
    outside: r = 1 / (sqrt(ms) + eps)
    clamp:   r = 1 / max(sqrt(ms), eps)
    none:    r = 1, and eps has no part
    """

    eps: float = 1e-6
    mode: str = "inside"

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, RMS_MODES)

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

    With eps = start_eps = 0, logits of any size neither overflow nor underflow to 0 / 0: each exponential is kept as a
    mantissa and an integer exponent until both axes have been normalised. "plain_exp" and "global_exp" are computed
    from the shifted exponential of "exp", with start_eps and the first half-step's eps scaled to match. The result
    equals plain exp's, and the shift prevents overflow and underflow.
    The paper's T iterations after a row softmax, columns last, are 2 T - 1 half-steps.
    """

    steps: int = 39
    start: str = "softmax"
    first: str = "columns"
    eps: float = 1e-6
    start_eps: float = 1e-6
    clamp: bool = False

    def __post_init__(self) -> None:
        if self.start != _NORMALISED:
            check_choice("start", self.start, SINKHORN_STARTS)
        check_choice("first", self.first, SINKHORN_AXES)

    def equation(self, logits: Tensor) -> Tensor:
        """The projection of logits [..., n, n] in their dtype, as a program spells it.

        Without eps it is spelled with logarithms, which hold for logits of any size.
        """
        dims = (-1, -2) if self.first == "rows" else (-2, -1)
        if self.in_logarithms:
            log_p = logits.log_softmax(-1) if self.start == "softmax" else logits
            for step in range(self.steps):
                log_p = log_p.log_softmax(dims[step % 2])
            return log_p.exp()
        p = SINKHORN_STARTS[self.start](logits, dims[0])
        p = p + self.start_eps if self.start_eps else p
        for step in range(self.steps):
            total = p.sum(dims[step % 2], keepdim=True)
            p = p / (total.clamp_min(self.eps) if self.clamp else total + self.eps)
        return p

    @property
    def without_eps(self) -> bool:
        return self.eps == 0.0 and self.start_eps == 0.0

    @property
    def in_logarithms(self) -> bool:
        """Whether half-steps without eps cancel every shift of the logits, so that logits of any size can be taken."""
        cancels = self.without_eps and self.start in SINKHORN_EXPONENTIALS
        return cancels and (self.start == "softmax" or self.steps > 0)

    @property
    def iterated(self) -> Sinkhorn:
        """The form in which it is computed: without eps, the first half-step or the softmax is part of the start.

        start "normalised": P = exp(L) divided by its sums along the axis that `first` does not normalise
        """
        if not self.in_logarithms:
            return self
        softmax_first = self.start == "softmax" and (self.first == "columns" or self.steps == 0)
        rows = self.start == "softmax" or self.first == "rows"
        steps = self.steps if softmax_first else self.steps - 1
        return Sinkhorn(steps, _NORMALISED, "columns" if rows else "rows", 0.0, 0.0)

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
    """A kernel has to know how a tensor lies in memory, but this depends on a symbolic size."""


def is_alone(x: Tensor, phi: Tensor) -> bool:
    """Whether phi projects each stream of x [..., n, C] alone."""
    return x.shape[-2] > 1 and phi.dim() == 2 and phi.shape[1] == x.shape[-1]


def as_projected(x: Tensor, phi: Tensor) -> Tensor:
    """x [..., n, C] as phi projects it: each stream a token of its own, [..., n, 1, C], if phi is for each alone."""
    return x.unsqueeze(-2) if is_alone(x, phi) else x
