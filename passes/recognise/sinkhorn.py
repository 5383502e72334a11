"""Which Sinkhorn a region computes: every form of `forms.Sinkhorn`, half-step by half-step, against the region.

The logits are chosen so that the forms part: at small ones an added 1e-6 cannot be told from a clamp, and a 39th
half-step from a 38th; at large ones the iteration converges slowly and whole columns fall below any eps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product

import torch

from mhc_compile import compat
from mhc_compile.forms import SINKHORN_AXES, Sinkhorn
from mhc_compile.passes.recognise.region import Region, same_gradient
from mhc_compile.passes.shadow import Op

_MATRICES = 48
# Below it an entry may have come through an underflow that the log domain does not have; its row has entries near 1.
_NEGLIGIBLE = 1e-14
# Sums of positive numbers and quotients keep the relative error of n + 2 roundings a half-step: 400 of them stay
# under 1e-12, while a wrong form differs in the first digits on some of the matrices.
_TOLERANCE = 1e-11
_FAR_OFF = 1e-3
# How reasons begin that tell of an iteration over both axes.
NEARLY = "is a Sinkhorn"


@dataclass(frozen=True)
class _Start:
    start: str
    first: str
    eps: float
    start_eps: float
    clamp: bool
    column_eps: float | None = None


# Whether the logits, and the result, are transposed: mostly both, where rows and columns change their names.
_TURNS = ((False, False), (True, True), (False, True), (True, False))
# A softmax has normalised the rows, so the columns are what comes next.
_BEGINNINGS = (("softmax", "columns"), ("softmax", "rows"), ("exp", "rows"), ("exp", "columns"))


def identify(found: Region, side: int) -> tuple[Sinkhorn, bool, bool] | str:
    """The form, and whether it is that of the transposed logits and whether the result is transposed; or why none."""
    given = torch.cat(list(_logits(side, found.limits())))
    got = _run(found, given, side)
    if got is None:
        return "could not be evaluated"
    moderate = given.abs().amax((-2, -1)) <= 30
    finite = torch.isfinite(got).all(-1).all(-1)
    if not bool(finite[moderate].all()):
        return "is not finite at moderate logits"
    given, got = given[finite], got[finite]
    constants = sorted(c for c in found.constants() if c > 0)
    limit = sum(is_reduction(op) for op in found.ops) + 2
    nearest = float("inf")
    another_gradient = False
    for candidate in _starts(constants):
        for turn in _TURNS:
            logits, wanted = _turned(given, turn[0]), _turned(got, turn[1])
            steps, distance = _steps(candidate, logits, wanted, limit)
            nearest = min(nearest, distance)
            if steps is not None and steps < _least_steps(candidate):
                return "normalises one axis only, which does not make it a Sinkhorn projection"
            if steps is not None:
                form = Sinkhorn(
                    steps,
                    candidate.start,
                    candidate.first,
                    candidate.eps,
                    candidate.start_eps,
                    candidate.clamp,
                )
                if _same_gradient(found, candidate, steps, side, turn):
                    return form, *turn
                another_gradient = True
    if another_gradient:
        return "equals a Sinkhorn projection, but its gradient does not (a detach, or a scaled gradient)"
    reason = _nearly(given, got, constants, limit)
    if reason is not None:
        return reason
    small = [c for c in constants if c < 0.1]
    if len(small) > 1:
        return f"{NEARLY}-like iteration whose eps differ: {', '.join(f'{c:g}' for c in small)}"
    if nearest < _FAR_OFF:
        return f"comes near a Sinkhorn projection but differs from every known form (by {nearest:.1e})"
    return "is neither a sigmoid gate nor a Sinkhorn projection"


def _nearly(given: torch.Tensor, got: torch.Tensor, constants: list[float], limit: int) -> str | None:
    """How the region's iteration differs from the operator's, for forms that people write and it does not take."""
    candidates: list[tuple[_Start, str]] = []
    for start, first in _BEGINNINGS:
        for rows, columns, clamp in product(constants[:4], constants[:4], (False, True)):
            told = f"its column eps {columns:g} differs from its row eps {rows:g}, and the operator has one for both"
            for start_eps in sorted({0.0, rows, columns}) if rows != columns else ():
                candidates.append((_Start(start, first, rows, start_eps, clamp, columns), told))
    for first, eps, clamp in product(SINKHORN_AXES, constants[:4], (False, True)):
        told = f"it starts from exp of logits that are not shifted by their maximum, so that eps {eps:g} acts otherwise"
        candidates.append((_Start("bare", first, eps, 0.0, clamp), told))
    # What overflows without the shift says nothing.
    few = (given.abs().amax((-2, -1)) <= 30).nonzero().squeeze(-1)[:16]
    for candidate, told in candidates:
        for turn in _TURNS:
            logits, wanted = _turned(given[few], turn[0]), _turned(got[few], turn[1])
            if _steps(candidate, logits, wanted, limit)[0] is not None:
                return f"{NEARLY} projection, but {told}"
    return None


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


def _run(found: Region, given: torch.Tensor, side: int) -> torch.Tensor | None:
    shape = found.shape
    count = torch.Size(shape).numel() // (side * side)
    if count == 0:
        return None
    pieces = []
    for start in range(0, len(given), count):
        chunk = given[start : start + count]
        padded = torch.cat([chunk, torch.zeros(count - len(chunk), side, side, dtype=torch.float64)])
        try:
            result = found.run(padded.view(shape))
        except Exception:  # an operator that does not run as recorded is one we cannot judge
            return None
        if result.dtype != torch.float64 or tuple(result.shape) != shape:
            return None
        pieces.append(result.reshape(-1, side, side)[: len(chunk)])
    return torch.cat(pieces)


def _starts(constants: list[float]) -> Iterator[_Start]:
    yield from (_Start(*beginning, 0.0, 0.0, False) for beginning in _BEGINNINGS)
    for eps, (start, first) in product(constants, _BEGINNINGS):
        for clamp, start_eps in ((False, eps), (False, 0.0), (True, 0.0), (True, eps)):
            yield _Start(start, first, eps, start_eps, clamp)


def _same_gradient(found: Region, candidate: _Start, steps: int, side: int, turn: tuple[bool, bool]) -> bool:
    shape = found.shape
    generator = torch.Generator().manual_seed(1)
    points = [torch.randn(shape, generator=generator, dtype=torch.float64) * spread for spread in (1.0, 4.0, 9.0)]
    # A mask on the size of logits may do nothing until all of them are large.
    points += [points[0] + 60.0, points[0] - 60.0]
    # An eps counts where a whole row or column has sunk to its size: there the gradient of the shift shows, too.
    for eps in (c for c in found.constants() if 0.0 < c < 0.1):
        sunk = points[0].reshape(-1, side, side).clone()
        sunk[:, 0] += math.log(eps)
        sunk[:, :, -1] += math.log(eps)
        points.append(sunk.reshape(shape))

    def ours(leaf: torch.Tensor) -> torch.Tensor:
        logits = leaf.reshape(-1, side, side)
        p = next(islice(_trajectory(candidate, _turned(logits, turn[0])), steps, None))
        return _turned(p, turn[1]).reshape(shape)

    return same_gradient(ours, found.run, *points)


def is_reduction(op: Op) -> int:
    """How many half-steps an operator can be part of: no region takes more than it has sums."""
    if isinstance(op.target, compat.AutogradFunction):
        return sum(1 for _ in op.target.nodes())
    if not op.outs:  # as copy_ has, which writes into what it is given
        return False
    return "softmax" in op.name or op.out.numel < max((v.numel for v in op.inputs()), default=0)


def _least_steps(candidate: _Start) -> int:
    """Half-steps after which both axes have been normalised."""
    return 1 if candidate.start == "softmax" and candidate.first == "columns" else 2


def _steps(candidate: _Start, logits: torch.Tensor, wanted: torch.Tensor, limit: int) -> tuple[int | None, float]:
    """After how many half-steps the form equals `wanted`; and the smallest distance seen on the way."""
    nearest = float("inf")
    for steps, p in enumerate(_trajectory(candidate, logits)):
        difference = (p - wanted).abs()
        nearest = min(nearest, float(difference.nan_to_num(1.0).amax()))
        if bool((difference <= _TOLERANCE * wanted.abs() + _NEGLIGIBLE).all()):
            return steps, 0.0
        if steps == limit:
            break
    return None, nearest


def _trajectory(c: _Start, logits: torch.Tensor) -> Iterator[torch.Tensor]:
    rows = c.first == "rows"
    if c.eps == 0.0 and c.start_eps == 0.0:
        p = logits.log_softmax(-1) if c.start == "softmax" else logits - logits.amax(-1 if rows else -2, keepdim=True)
        while True:
            yield p.exp()
            p = p - p.logsumexp(-1 if rows else -2, keepdim=True)
            rows = not rows
    shifted = logits - logits.amax(-1 if rows else -2, keepdim=True)
    start = {"softmax": lambda: logits.softmax(-1), "exp": shifted.exp, "bare": logits.exp}[c.start]()
    p = start + c.start_eps
    while True:
        yield p
        total = p.sum(-1 if rows else -2, keepdim=True)
        eps = c.eps if rows or c.column_eps is None else c.column_eps
        p = p / (total.clamp_min(eps) if c.clamp else total + eps)
        rows = not rows
