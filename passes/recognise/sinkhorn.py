"""Which Sinkhorn a region computes: every form of `forms.Sinkhorn`, half-step by half-step, against the region.

The logits are chosen so that the forms part: at small ones an added 1e-6 cannot be told from a clamp, and a 39th
half-step from a 38th; at large ones the iteration converges slowly and whole columns fall below any eps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, permutations, product
from typing import Any

import torch

from mhc_compile import compat
from mhc_compile.forms import SINKHORN_AXES, SINKHORN_EXPONENTIALS, SINKHORN_STARTS, Sinkhorn
from mhc_compile.passes.recognise.region import AT_KINKS, Region, same_beyond_numbers, same_gradient
from mhc_compile.passes.shadow import Op

_MATRICES = 48
# Those logits on which most forms differ.
_FEW = 16
# Below it an entry may have come through an underflow that the log domain does not have; its row has entries near 1.
_NEGLIGIBLE = 1e-14
# Sums of positive numbers and quotients keep the relative error of n + 2 roundings a half-step: 400 of them stay
# under 1e-12, while a wrong form differs in the first digits on some of the matrices.
_TOLERANCE = 1e-11
# A half-step in the log domain rounds sums of logits and of potentials as large, and passes on what was rounded before
# undiminished at most: a logsumexp changes by no more than the largest change of what it is of.
_LOG_ROUNDINGS = 4 * torch.finfo(torch.float64).eps
_FAR_OFF = 1e-3
# Logits as large as that have few digits left of their differences in float32.
_MOST = 1e4
# One half-step of each axis nearly evens out all sums, if logits are small. If only one axis is normalised, they differ
# 0.7 times as much as means of as many numbers do.
_SMALL, _EVEN = 1.5, 0.4
# How many of the smallest numbers in a region are tried as an eps, if two are tried together.
_EPS = 4
# What a Sinkhorn projection may begin with, or hide.
EXPONENTIALS = {"exp", "autograd_function", "logsumexp", "_softmax", "_log_softmax"}
# The beginning of reasons about an iteration over both axes.
NEARLY = "is a Sinkhorn"


@dataclass(frozen=True)
class _Start:
    start: str
    first: str
    eps: float
    start_eps: float
    clamp: bool
    column_eps: float | None = None

    @property
    def log_domain(self) -> bool:
        exponential = self.start in (*SINKHORN_EXPONENTIALS, "crossed")
        return exponential and self.eps == 0.0 and self.start_eps == 0.0

    @property
    def divisors(self) -> tuple[float, float]:
        """The eps of the axis that is normalised first, and of the other."""
        eps = (self.eps, self.eps if self.column_eps is None else self.column_eps)
        return eps if self.first == "rows" else eps[::-1]


# Whether the logits, and the result, are transposed.
Turn = tuple[bool, bool]


def _turns(candidate: _Start) -> tuple[Turn, ...]:
    """A softmax is over the rows. Other starts treat both axes alike: to turn both is to swap `first`."""
    straight: tuple[Turn, ...] = ((False, False), (False, True))
    return (straight[0], (True, True), straight[1], (True, False)) if candidate.start == "softmax" else straight


# A softmax has normalised the rows, so the columns are what comes next.
_BEGINNINGS = sorted(product(SINKHORN_STARTS, SINKHORN_AXES), key=lambda beginning: beginning == ("softmax", "rows"))


def identify(found: Region, side: int) -> tuple[Sinkhorn, bool, bool] | str:
    """The form, and whether it is that of the transposed logits and whether the result is transposed; or why none."""
    given = torch.cat([*_logits(side, found.limits()), *_beside(found, side)])
    got = _run(found, given, side)
    if isinstance(got, str):
        return got
    moderate = given.abs().amax((-2, -1)) <= 30
    finite = torch.isfinite(got).all(-1).all(-1)
    if not bool(finite[moderate].all()):
        return "is not finite at moderate logits"
    few = moderate.nonzero().squeeze(-1)[:_FEW]
    probe = given[few], got[few]
    given, got = given[finite], got[finite]
    constants = sorted(c for c in found.constants() if c > 0)
    limit = sum(is_reduction(op) for op in found.ops) + 2
    another_gradient = at_ties = replaces = False
    near, nearest = _near(list(_starts(constants)), *probe, limit)
    if not near and len(constants) <= _EPS:  # one eps for the start, and another one for the sums
        near, least = _near(list(_starts_apart(constants)), *probe, limit)
        nearest = min(nearest, least)
    fits = [(c, turn, _steps(c, _turned(given, turn[0]), _turned(got, turn[1]), limit)) for c, turn in near]
    for candidate, turn, steps in sorted(fits, key=partial(_is_another_spelling, found)):
        if steps is None:
            continue
        if steps < _least_steps(candidate):
            return "normalises one axis only, which does not make it a Sinkhorn projection"
        form = Sinkhorn(steps, candidate.start, candidate.first, candidate.eps, candidate.start_eps, candidate.clamp)
        ours = partial(_computed, candidate, steps, side, turn)
        if not _same_gradient(found, ours, side):
            another_gradient = True
        elif not _same_gradient_at_ties(found, ours):
            at_ties = True
        elif not same_beyond_numbers(ours, found):
            replaces = True
        else:
            return form, *turn
    if replaces:
        return "equals a Sinkhorn projection, but not for logits that are NaN or infinite, which it replaces"
    if at_ties:
        return "equals a Sinkhorn projection, but its gradient does not where logits are equal (max(dim) picks one)"
    if another_gradient:
        return "equals a Sinkhorn projection, but its gradient does not (a detach, or a scaled gradient)"
    if near:
        return "equals a Sinkhorn projection at moderate logits, but not at large ones, where it rounds or overflows"
    reason = _nearly(*probe, constants, limit)
    if reason is not None:
        return reason
    small = [c for c in constants if c < 0.1]
    exponential = any(op.name in EXPONENTIALS for op in found.ops)  # another start has small numbers, too
    if len(small) > 1 and exponential and _is_nearly_doubly_stochastic(*probe):
        numbers = ", ".join(f"{c:g}" for c in small)
        return f"{NEARLY}-like matrix, but no form of the operator has its small numbers, as if eps differ: {numbers}"
    if nearest < _FAR_OFF:
        return f"comes near a Sinkhorn projection but differs from every known form (by {nearest:.1e})"
    return "is not a Sinkhorn projection of exp(logits) or softmax(logits)"


def _is_another_spelling(found: Region, fit: tuple[_Start, Turn, int | None]) -> bool:
    """Whether a form has another number of half-steps than the region is written with.

    A clamp lets a half-step over the rows that follows a softmax scale all of them alike, which the next one cancels:
    the form without it has the same values. But that half-step takes rounding errors out of the softmax's gradient.
    """
    candidate, _, steps = fit
    sums = sum(is_reduction(op) for op in found.ops if op.name not in ("amax", "max"))
    return not candidate.log_domain and steps != sums - (candidate.start == "softmax")


def _nearly(given: torch.Tensor, got: torch.Tensor, constants: list[float], limit: int) -> str | None:
    """How the region's iteration differs from the operator's, for forms that people write and it does not take.

    given are moderate logits: what overflows without a shift says nothing.
    """
    told: dict[_Start, str] = {}
    for start, first in _BEGINNINGS:
        for rows, columns, clamp in product(constants[:_EPS], constants[:_EPS], (False, True)):
            why = f"its column eps {columns:g} differs from its row eps {rows:g}, and the operator has one for both"
            for start_eps in sorted({0.0, rows, columns}) if rows != columns else ():
                told[_Start(start, first, rows, start_eps, clamp, columns)] = why
    for first, eps, clamp in product(SINKHORN_AXES, [0.0, *constants[:_EPS]], (False, True)):
        other = "columns" if first == "rows" else "rows"
        why = f"it shifts its logits by the maxima of their {other} and then normalises the {first} first"
        told[_Start("crossed", first, eps, 0.0, clamp)] = why
    near, _ = _near(list(told), given, got, limit)
    return f"{NEARLY} projection, but {told[near[0][0]]}" if near else None


def _near(
    candidates: Sequence[_Start], given: torch.Tensor, got: torch.Tensor, limit: int
) -> tuple[list[tuple[_Start, Turn]], float]:
    """The candidates, and how they are turned, that come to `got` after some half-steps; and the smallest distance.

    Forms that differ in numbers are computed at once, and on few matrices: most are far off on all of them. Whatever
    begins with the columns begins with the rows of the transposed matrix.
    """
    together: dict[tuple[bool, bool], dict[tuple[_Start, bool], torch.Tensor]] = {}
    for c in candidates:
        for turned in sorted({turn[0] for turn in _turns(c)}):
            begun = _turned(_begun(c, _turned(given, turned)), c.first == "columns")
            together.setdefault((c.clamp, c.log_domain), {})[c, turned] = begun
    near: set[tuple[_Start, Turn]] = set()
    nearest = float("inf")
    for (clamp, log_domain), group in together.items():
        forms = list(group)
        first, second = torch.tensor([c.divisors for c, _ in forms], dtype=given.dtype).T.view(2, -1, 1, 1, 1)
        steps = _iterates(torch.stack(list(group.values())), (-1, -2), (first, second), clamp, log_domain)
        for p in islice(steps, limit + 1):
            for transposed in (False, True):
                wanted = _turned(got, transposed)
                difference = (p - wanted).abs()
                nearest = min(nearest, float(difference.nan_to_num(1.0).amax((1, 2, 3)).min()))
                agree = (difference <= _allowed(wanted, given, log_domain, limit)).all(-1).all(-1).all(-1)
                for c, turned in (forms[k] for k in agree.nonzero().squeeze(-1).tolist()):
                    near.add((c, (turned, transposed != (c.first == "columns"))))
    return [(c, turn) for c in candidates for turn in _turns(c) if (c, turn) in near], nearest


def _allowed(wanted: torch.Tensor, logits: torch.Tensor, log_domain: bool, limit: int) -> torch.Tensor:
    relative: torch.Tensor | float = _TOLERANCE
    if log_domain:
        relative = _TOLERANCE + _LOG_ROUNDINGS * limit * logits.abs().amax((-2, -1), keepdim=True)
    return relative * wanted.abs() + _NEGLIGIBLE


def _turned(matrices: torch.Tensor, transposed: bool) -> torch.Tensor:
    return matrices.mT if transposed else matrices


def _logits(side: int, limits: list[float]) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    each = _MATRICES // 8
    for spread in (0.3, 1.5, 6.0, 25.0, 1e3, 3e4, *limits):
        yield torch.randn(each, side, side, generator=generator, dtype=torch.float64) * spread
    yield torch.where(torch.rand(each, side, side, generator=generator) < 0.5, -100.0, 100.0).double()
    lopsided = torch.randn(each, side, side, generator=generator, dtype=torch.float64)
    lopsided[:, :, 0] -= torch.linspace(5, 60, each, dtype=torch.float64)[:, None]
    lopsided[:, -1, :] -= torch.linspace(60, 5, each, dtype=torch.float64)[:, None]
    yield lopsided
    # A clamp that binds only where nothing is left of a whole row, or of a column.
    for low in (-80.0, -150.0, -400.0, -700.0):
        sunk = torch.randn(2, side, side, generator=generator, dtype=torch.float64)
        sunk[0, 0] += low
        sunk[1, :, -1] += low
        yield sunk


def _run(found: Region, given: torch.Tensor, side: int) -> torch.Tensor | str:
    """What a region makes of matrices; or why that cannot be said."""
    shape, unclear = found.shape, "could not be evaluated"
    count = torch.Size(shape).numel() // (side * side)
    if count == 0:
        return unclear
    pieces = []
    for start in range(0, len(given), count):
        chunk = given[start : start + count]
        places = torch.arange(count) % len(chunk)
        try:
            result = found.run(chunk[places].view(shape))
        except Exception:  # an operator that does not run as recorded is one we cannot judge
            return unclear
        if result.dtype != torch.float64 or result.shape[-2:] != (side, side) or result.numel() != count * side**2:
            return unclear
        result = result.reshape(-1, side, side)
        if not torch.allclose(result, result[places], rtol=_TOLERANCE, atol=0.0, equal_nan=True):
            return "is another function of its logits for other tokens"
        pieces.append(result[: len(chunk)])
    return torch.cat(pieces)


def _starts(constants: list[float]) -> Iterator[_Start]:
    yield from (_Start(*beginning, 0.0, 0.0, False) for beginning in _BEGINNINGS)
    for eps, (start, first) in product(constants, _BEGINNINGS):
        for clamp, start_eps in ((False, eps), (False, 0.0), (True, 0.0), (True, eps)):
            yield _Start(start, first, eps, start_eps, clamp)


def _starts_apart(constants: list[float]) -> Iterator[_Start]:
    for start_eps, eps in permutations(constants, 2):
        for (start, first), clamp in product(_BEGINNINGS, (False, True)):
            yield _Start(start, first, eps, start_eps, clamp)


def _computed(candidate: _Start, steps: int, side: int, turn: tuple[bool, bool], leaf: torch.Tensor) -> torch.Tensor:
    """What a form makes of logits, as a region does."""
    logits = leaf.reshape(-1, side, side)
    p = next(islice(_trajectory(candidate, _turned(logits, turn[0])), steps, None))
    return _turned(p, turn[1]).reshape(leaf.shape)


def _same_gradient(found: Region, ours: Callable[[torch.Tensor], torch.Tensor], side: int) -> bool:
    """Whether gradients agree, matrix by matrix: a norm over all hides those that are small."""
    given = torch.cat([*_logits_of_gradients(found, side), *_beside(found, side)])
    count = torch.Size(found.shape).numel() // (side * side)
    places = torch.arange(count * -(-len(given) // count)) % len(given)
    points = given[places].view(-1, *found.shape)
    return same_gradient(ours, found, *points, of=(-1, side, side), overflows=True)


def _logits_of_gradients(found: Region, side: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    plain = torch.randn(4, side, side, generator=generator, dtype=torch.float64)
    yield from (plain, 4 * plain[:2], 9 * plain[2:])
    # A mask on the size of logits may do nothing until all of them are large.
    for shift in (60.0, 300.0, *(limit for limit in found.limits() if limit <= _MOST)):
        yield torch.stack([plain[0] + shift, plain[1] - shift])
    # An eps counts where a whole row or column has sunk to its size: there the gradient of the shift shows, too.
    for eps in (c for c in found.constants() if 0.0 < c < 0.1):
        sunk = plain[2:].clone()
        sunk[:, 0] += math.log(eps)
        sunk[:, :, -1] += math.log(eps)
        yield sunk


def _beside(found: Region, side: int) -> Iterator[torch.Tensor]:
    """Logits on both sides of a number of the region, which may be a threshold, however small."""
    generator = torch.Generator().manual_seed(2)
    for number in sorted(found.constants(whole=True)):
        if 0.0 < abs(number) < 1.0:
            numbers = torch.randn(2, side, side, generator=generator, dtype=torch.float64)
            yield number * (1.0 + 1e-3 * numbers) * torch.tensor([1.0, -1.0], dtype=torch.float64).view(2, 1, 1)


def _same_gradient_at_ties(found: Region, ours: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether the gradients agree where all logits are equal, as in an untrained model, and where some are."""
    some = torch.randint(2, found.shape, generator=torch.Generator().manual_seed(2)).double()
    return same_gradient(ours, found, torch.zeros_like(some), some, relative=AT_KINKS)


def is_reduction(op: Op) -> int:
    """How many half-steps an operator can be part of: no region takes more than it has sums."""
    if isinstance(op.target, compat.AutogradFunction):
        return sum(1 for _ in op.target.nodes())
    if not op.outs:  # as copy_ has, which writes into what it is given
        return False
    return "softmax" in op.name or op.out.numel < max((v.numel for v in op.inputs()), default=0)


def _is_nearly_doubly_stochastic(logits: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether the sums of rows and columns differ far less than the entries do, of small logits."""
    small = got[logits.abs().amax((-2, -1)) < _SMALL]
    sums = torch.cat([small.sum(-1), small.sum(-2)], -1)
    entries = small.flatten(1)
    spreads = [values.std(-1) / values.mean(-1).abs() for values in (sums, entries)]
    return bool(spreads[0].norm() * small.shape[-1] ** 0.5 < _EVEN * spreads[1].norm())


def _least_steps(candidate: _Start) -> int:
    """Half-steps after which both axes have been normalised."""
    return 1 if candidate.start == "softmax" and candidate.first == "columns" else 2


def _steps(candidate: _Start, logits: torch.Tensor, wanted: torch.Tensor, limit: int) -> int | None:
    """After how many half-steps the form equals `wanted`."""
    allowed = _allowed(wanted, logits, candidate.log_domain, limit)
    for steps, p in enumerate(islice(_trajectory(candidate, logits), limit + 1)):
        if bool(((p - wanted).abs() <= allowed).all()):
            return steps
    return None


def _trajectory(c: _Start, logits: torch.Tensor) -> Iterator[torch.Tensor]:
    """The matrices after each number of half-steps."""
    axes = (-1, -2) if c.first == "rows" else (-2, -1)
    return _iterates(_begun(c, logits), axes, c.divisors, c.clamp, c.log_domain)


def _begun(c: _Start, logits: torch.Tensor) -> torch.Tensor:
    """The matrices before the first half-step, in the log domain their logarithms."""
    if c.log_domain:  # where no shift counts
        return logits.log_softmax(-1) if c.start == "softmax" else logits
    axis = -1 if c.first == "rows" else -2
    if c.start == "crossed":
        return SINKHORN_STARTS["exp"](logits, -3 - axis) + c.start_eps
    return SINKHORN_STARTS[c.start](logits, axis) + c.start_eps


def _iterates(
    p: torch.Tensor, axes: tuple[int, int], eps: tuple[Any, Any], clamp: bool, log_domain: bool
) -> Iterator[torch.Tensor]:
    for axis, divisor in cycle(zip(axes, eps, strict=True)):
        yield p.exp() if log_domain else p
        if log_domain:
            p = p - p.logsumexp(axis, keepdim=True)
        else:
            total = p.sum(axis, keepdim=True)
            p = p / (total.clamp_min(divisor) if clamp else total + divisor)
