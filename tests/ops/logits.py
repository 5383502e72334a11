"""Sinkhorn programs as people write them, logits and gradients at which rounding shows, and what errors may be there.

The rule: the L2 error against float64, over all tokens of one kind, is at most the largest of

- 1.1 + 5 / sqrt(tokens) times eager's error, as in `mhc_compile.testing.judge`. Tokens are the ones that eager's error
  is spread over: of logits that are tied at 100 a few tokens in a thousand have nearly all of it, and the ratio of two
  such errors is luck. Where the exact gradient vanishes the factor is 10: eager's error consists of few roundings
  there, which cancel or do not by chance;
- 4 roundings of the exact values, which is nothing where these vanish;
- 1e-12 of the gradient that arrives: the float64 evaluation is not more accurate.

Tokens for which eager code overflows or divides 0 by 0 are left out. A kind with less than an eighth of its tokens left
is not compared: the rounding of a few tokens is luck.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mhc_compile.forms import SINKHORN_STARTS

# Tokens of one kind: of so many some round unluckily in every program.
TOKENS = {2: 512, 4: 256, 8: 128}
_VANISHING, _ROUNDINGS, _NOTHING = 10.0, 4.0 * torch.finfo(torch.float32).eps, 1e-12

Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Draw = Callable[[int, int], Iterator[tuple[str, Tensor]]]


@dataclass(frozen=True)
class Program:
    """Eager code for n x n logits, and the operator's arguments for it."""

    eager: Callable[[Tensor], Tensor]
    form: dict[str, Any]

    @property
    def without_eps(self) -> bool:
        return bool(self.form["eps"] == 0.0 and self.form["start_eps"] == 0.0)

    def exact(self, logits: Tensor) -> Tensor:
        """The same in float64, for logits of any size if there is no eps."""
        logits = logits.double()
        if not self.without_eps:
            return self.eager(logits)
        axes = (-1, -2) if self.form["first"] == "rows" else (-2, -1)
        if self.form["start"] == "softmax":
            logits = logits.log_softmax(-1)
        for step in range(self.form["steps"]):
            logits = logits.log_softmax(axes[step % 2])
        return logits.exp()


def _form(steps: int, start: str, first: str, eps: float = 0.0, start_eps: float = 0.0, clamp: bool = False) -> Any:
    return {"steps": steps, "start": start, "first": first, "eps": eps, "start_eps": start_eps, "clamp": clamp}


def _divided(steps: int, start: str, first: str, *rest: Any) -> Program:
    """The form as it is written down: an exponential, then quotients by sums."""
    form = _form(steps, start, first, *rest)
    dims = (-1, -2) if first == "rows" else (-2, -1)

    def eager(logits: Tensor) -> Tensor:
        p = SINKHORN_STARTS[start](logits, dims[0]) + form["start_eps"]
        for step in range(steps):
            total = p.sum(dims[step % 2], keepdim=True)
            p = p / (total.clamp_min(form["eps"]) if form["clamp"] else total + form["eps"])
        return p

    return Program(eager, form)


def _logarithms(steps: int, first: str) -> Program:
    """Logarithms of the matrices, as lucidrains has them."""
    axes = (-1, -2) if first == "rows" else (-2, -1)

    def eager(logits: Tensor) -> Tensor:
        for step in range(steps):
            logits = logits.log_softmax(axes[step % 2])
        return logits.exp()

    return Program(eager, _form(steps, "plain_exp", first))


def _potentials(iterations: int) -> Program:
    """Logarithms of the factors of rows and columns, as TransformerEngine has them."""

    def eager(logits: Tensor) -> Tensor:
        u, v = torch.zeros_like(logits[..., :1]), torch.zeros_like(logits[..., :1, :])
        for _ in range(iterations):
            u = -torch.logsumexp(logits + v, -1, keepdim=True)
            v = -torch.logsumexp(logits + u, -2, keepdim=True)
        return torch.exp(logits + u + v)

    return Program(eager, _form(2 * iterations, "plain_exp", "rows"))


PROGRAMS = {
    "plain exp": _divided(40, "plain_exp", "rows"),
    "plain exp, columns": _divided(20, "plain_exp", "columns"),
    "plain exp, one step": _divided(1, "plain_exp", "rows"),
    "plain exp, two steps": _divided(2, "plain_exp", "columns"),
    "exp": _divided(41, "exp", "columns"),
    "softmax": _divided(39, "softmax", "columns"),
    "softmax, rows": _divided(4, "softmax", "rows"),
    "softmax alone": _divided(0, "softmax", "columns"),
    "global exp": _divided(40, "global_exp", "rows"),
    "logarithms": _logarithms(40, "rows"),
    "logarithms, columns": _logarithms(7, "columns"),
    "potentials": _potentials(20),
    "softmax, eps": _divided(39, "softmax", "columns", 1e-6, 1e-6),
    "softmax, clamp": _divided(39, "softmax", "columns", 1e-6, 0.0, True),
    "exp, eps": _divided(40, "exp", "rows", 1e-8),
    "plain exp, eps": _divided(40, "plain_exp", "rows", 1e-6),
    "plain exp, clamp": _divided(20, "plain_exp", "columns", 1e-12, 0.0, True),
    "global exp, eps": _divided(6, "global_exp", "columns", 1e-6, 1e-6),
}


def kinds(n: int, tokens: int) -> Iterator[tuple[str, Tensor]]:
    """Names and logits [tokens, n, n] in float32."""
    generator = torch.Generator().manual_seed(n)

    def normal() -> Tensor:
        return torch.randn(tokens, n, n, generator=generator)

    for size in (1e-6, 1e-3, 0.1, 1.0, 3.0, 10.0, 30.0):
        yield f"normal * {size:g}", normal() * size
    for size in (100.0, 1e3, 1e4):
        # Without ties next to nothing would be left to round: every matrix is a permutation, its gradients are 0.
        yield f"tied at {size:g}", size * torch.randint(-2, 3, (tokens, n, n), generator=generator) + normal()
    yield "equal", torch.zeros(tokens, n, n) + torch.randn(tokens, 1, 1, generator=generator)
    yield "of a column", normal()[:, :1].expand(-1, n, -1).clone()
    yield "opposite", torch.where(normal() < 0, -1.0, 1.0) * torch.logspace(-3, 2.5, tokens)[:, None, None]
    yield "near a permutation", (torch.eye(n) - 0.5) * torch.logspace(0, 2, tokens)[:, None, None] + normal()
    yield "a row apart", normal() - 12.0 * (torch.arange(n) == 0)[:, None]
    yield "far from 0", normal() + 60.0


def gradients_of(n: int, tokens: int) -> Iterator[tuple[str, Tensor]]:
    """Names and gradients of the matrices; of all but the first the logits' gradient vanishes with the iteration's
    convergence."""
    generator = torch.Generator().manual_seed(100 + n)
    yield "any", torch.randn(tokens, n, n, generator=generator)
    yield "one number", torch.randn(tokens, 1, 1, generator=generator).expand(-1, n, n).clone()
    yield "equal rows", torch.randn(tokens, 1, n, generator=generator).expand(-1, n, n).clone()
    yield "equal columns", torch.randn(tokens, n, 1, generator=generator).expand(-1, n, n).clone()


def nearly_equal(n: int, tokens: int) -> Iterator[tuple[str, Tensor]]:
    """Names and gradients of the matrices that have most in common with all others, or with those of a row or column.

    What they have in common drops out. What does not is as large as its roundings, and more.
    """
    generator = torch.Generator().manual_seed(200 + n)
    part = torch.logspace(-6, -4, tokens)[:, None, None]
    for name, shape in {"any number": (1, 1), "any of columns": (1, n), "any of rows": (n, 1)}.items():
        common = torch.randn(tokens, *shape, generator=generator)
        yield name, common + part * torch.randn(tokens, n, n, generator=generator)


def differentiated(function: Callable[[Tensor], Tensor], logits: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The result, and the gradient of the logits."""
    leaf = logits.clone().requires_grad_()
    result = function(leaf)
    (found,) = torch.autograd.grad(result, leaf, gradient.to(result.dtype))
    return result.detach(), found


@functools.cache
def _given(n: int, tokens: int, draw: Draw) -> tuple[list[str], Tensor, Tensor]:
    """The names of all cases; their logits, and gradients of the matrices."""
    cases = [(f"{kind}, {of}", l, d) for kind, l in kinds(n, tokens) for of, d in draw(n, tokens)]
    return [case[0] for case in cases], *(torch.cat([case[i] for case in cases]) for i in (1, 2))


@functools.cache
def _compared(name: str, n: int, tokens: int, device: str, draw: Draw) -> list[list[Tensor]]:
    """Eager's results on a device, and the exact ones."""
    logits, arriving = (value.to(device) for value in _given(n, tokens, draw)[1:])
    program = PROGRAMS[name]
    results = differentiated(program.eager, logits, arriving), differentiated(program.exact, logits, arriving.double())
    return [[result.double().cpu() for result in pair] for pair in results]


def _spread(errors: Tensor) -> float:
    """How many tokens of errors [tokens, entries] have part in their norm: all of them if all are equally wrong."""
    squares = errors.square().sum(1)
    return max(1.0, (squares.sum() ** 2 / squares.square().sum().clamp_min(1e-300)).item())


def complaints(
    name: str, n: int, tokens: int, evaluate: Evaluate, device: str = "cpu", draw: Draw = gradients_of
) -> list[str]:
    """Where `evaluate`, which returns the matrices and the logits' gradients, breaks the rule."""
    names, logits, arriving = _given(n, tokens, draw)
    found = [result.double().cpu() for result in evaluate(logits.to(device), arriving.to(device))]
    eager, exact = _compared(name, n, tokens, device, draw)
    told = []
    if PROGRAMS[name].without_eps and not all(result.isfinite().all() for result in found):
        told.append("not finite")
    for number, case in enumerate(names):
        mine = slice(number * tokens, (number + 1) * tokens)
        parts = [[result[mine].flatten(1) for result in results] for results in (found, eager, exact)]
        usable = torch.stack([part.isfinite().all(1) for part in (*parts[1], *parts[2])]).all(0)
        if int(usable.sum()) < tokens // 8:
            continue
        nothing = _NOTHING * arriving[mine][usable].double().norm().item()
        for what, (own, theirs, truth) in enumerate(zip(*parts, strict=True)):
            error, trusted, size = (v[usable].norm().item() for v in (own - truth, theirs - truth, truth))
            vanishes = what == 1 and ", any" not in case
            slack = _VANISHING if vanishes else 1.1 + 5 / _spread((theirs - truth)[usable]) ** 0.5
            if not error <= max(slack * trusted, _ROUNDINGS * size, nothing):
                what_of = f"{('matrices', 'gradients')[what]}, {case}"
                told.append(f"{what_of}: {error:.1e}, eager's {trusted:.1e} of {size:.1e}")
    return told
