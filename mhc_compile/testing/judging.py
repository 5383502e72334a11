"""Whether one evaluation of a model is as accurate as another, both against float64."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

__all__ = ["FEW", "Errors", "Finding", "judge"]

# A tensor with fewer numbers than this is one of few.
FEW = 1000
# The result's own rounding, a few times over, is no error that one evaluation can avoid and the other cannot.
_ROUNDINGS = 4.0
# Of integers, one in 10,000, by the root of their part.
_FLIPS = 0.01
# Exact values below this part of a root mean square vanish: the float64 evaluation cannot distinguish them from 0.
_NOTHING = 1e-12
# What is off by more than this part of itself is no rounding.
_FAR = 0.5
# How many times the trusted error an error may be there: in most evaluations, and in the worst one.
_LUCK = 10.0
_WORST_LUCK = 100.0


def _kinds(values: torch.Tensor) -> torch.Tensor:
    """0 for numbers, 1 and -1 for infinities, 2 for NaN."""
    return torch.where(values.isnan(), 2, values.isinf() * values.sign()).to(torch.int8)


def _far(values: torch.Tensor, exact: torch.Tensor, finfo: torch.finfo) -> torch.Tensor:
    """Where numbers are off exact ones by more than roundings explain, whatever these went through.

    Exact numbers that the dtype does not reach count as its largest.
    """
    nearest = exact.clamp(finfo.min, finfo.max)
    reached = exact == nearest
    size = math.sqrt(exact.where(reached, 0.0).square().sum().item() / max(1, int(reached.sum())))
    allowed = _FAR * nearest.abs() + math.sqrt(finfo.eps) * size
    return values.isfinite() & exact.isfinite() & ((values - nearest).abs() > allowed)


def _quotient(difference: float, size: float) -> float:
    """A difference relative to a size; if that is 0, the difference itself."""
    return difference / (size or 1.0)


@dataclass
class Errors:
    """The L2 errors of named results against exact ones, over any number of evaluations.

    Squares are added up before they are divided: else one evaluation whose gradient happens to vanish decides the mean.
    Values that vanish, as `judge` understands it, are kept once more by themselves, evaluation by evaluation.

    Of integers and booleans, the squared difference is the number of those that differ, and the size how many they are.
    Where the values and the exact ones are the same infinity, or both NaN, nothing is added up.
    """

    difference: dict[str, float] = field(default_factory=dict)
    reference: dict[str, float] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    vanishing: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """For each evaluation with values that vanish, the sum of their squared differences, and their number."""

    def add(
        self,
        results: Mapping[str, torch.Tensor],
        exact: Mapping[str, torch.Tensor],
        usual: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Take the results of one more evaluation. Raises ValueError if the names or shapes are not those of `exact`.

        Another infinity or NaN than the exact value is an infinite error, unless the results `usual` have it there. So
        is a number that is far from the exact one where `usual` has none. A near one is left out: no other error
        measures it.
        """
        if results.keys() != exact.keys():
            raise ValueError(f"only one of the two evaluations has {sorted(results.keys() ^ exact.keys())}")
        for name, value in results.items():
            if value.shape != exact[name].shape:
                raise ValueError(f"{name}: its shape is {list(value.shape)}, and in float64 {list(exact[name].shape)}")
            if value.is_floating_point():
                self._add(name, value, exact[name], (usual or exact)[name])
            else:
                self._sum(name, float((value != exact[name]).sum()), value.numel(), value.numel())
            self.dtypes[name] = value.dtype

    def _add(self, name: str, value: torch.Tensor, exact: torch.Tensor, usual: torch.Tensor) -> None:
        finfo = torch.finfo(value.dtype)
        value, wide, usual = value.double(), exact.double(), usual.double()
        difference = value - wide
        kept = difference.isfinite() & usual.isfinite()
        if not kept.all():
            kinds, of_exact = _kinds(value), _kinds(wide)
            others = (kinds != of_exact) & (kinds != _kinds(usual))
            others |= ~usual.isfinite() & _far(value, wide, finfo)
            difference = difference.where(kept, 0.0).masked_fill(others, math.inf)
            kept |= others
            wide = wide.where(kept & (of_exact == 0), 0.0)
        squares, numbers = wide.square().sum().item(), int(kept.sum())
        self._sum(name, difference.square().sum().item(), squares, numbers)
        vanishes = kept & (wide.abs() <= _NOTHING * math.sqrt(squares / max(1, numbers)))
        if vanishes.any():
            self.vanishing.setdefault(name, []).append(
                (difference.where(vanishes, 0.0).square().sum().item(), int(vanishes.sum()))
            )

    def _sum(self, name: str, difference: float, reference: float, numbers: int) -> None:
        self.difference[name] = self.difference.get(name, 0.0) + difference
        self.reference[name] = self.reference.get(name, 0.0) + reference
        self.numbers[name] = numbers

    def relative(self, *names: str) -> float:
        """The norm of the differences of these results together, relative to that of the exact values.

        If all exact values are 0, the norm itself.
        """
        difference = math.sqrt(sum(self.difference[name] for name in names))
        reference = math.sqrt(sum(self.reference[name] for name in names))
        return _quotient(difference, reference)

    def absolute(self, name: str, size: float) -> float:
        """The root mean square of a result's differences, relative to a size."""
        return _quotient(math.sqrt(self.difference[name] / max(1, self.numbers[name])), size)

    def where_vanishing(self, name: str, size: float, quantile: float) -> float:
        """The root mean square of the differences where the exact values vanish, relative to a size.

        Each evaluation has one; quantile says which: 0.5 is their median, 1 the largest. If no values vanish, it is 0.
        """
        each = [_quotient(math.sqrt(squares / numbers), size) for squares, numbers in self.vanishing.get(name, [])]
        return torch.tensor(each or [0.0], dtype=torch.float64).quantile(quantile).item()


@dataclass(frozen=True)
class Finding:
    """One comparison: `error` is allowed to be `limit`, which comes from the trusted evaluation's error, `trusted`.

    `measure` is how both were found, for the errors of other evaluations.
    """

    what: str
    names: tuple[str, ...]
    trusted: float
    error: float
    limit: float
    measure: Callable[[Errors], float]

    @property
    def ok(self) -> bool:
        """Whether the error is within its limit. Nothing is within infinity or NaN."""
        return self.error <= self.limit < math.inf

    @property
    def excess(self) -> float:
        """The error in multiples of its limit."""
        if 0.0 < self.limit < math.inf:
            return self.error / self.limit
        return 0.0 if self.ok else math.inf

    def __str__(self) -> str:
        return f"{self.what}: error {self.error:.2e} against float64, allowed {self.limit:.2e}"


def judge(trusted: Errors, errors: Errors, names: list[str], group: str, *, vanishing: bool = True) -> list[Finding]:
    """Compare the errors of two evaluations of the same results, one by one and together.

    Both errors are sums of very many roundings, in different orders. Two equally good evaluations are two draws from
    one distribution, and one of them is always a little worse. The ratio of two root mean squares over N independent
    draws is 1, give or take a multiple of 1 / sqrt(N). The errors of a parameter's gradient went through a few gates,
    so they are not independent. The multiple is therefore 5, and a tenth is added. A tensor of N >= 1000 values, and
    all results of the group together, may have 1.1 + 5 / sqrt(N) times the trusted error.

    A tensor with few values (a scale has 3) has the error of a handful of draws, which is sometimes zero by chance.
    Such tensors are judged together, by the root of their mean squared relative errors, with at least 25% of room. A
    single one may have four times the trusted error of this tensor, or four times the median of the trusted errors.

    Relative errors mean little for gradients that vanish, but Adam moves a parameter by a tiny gradient as far as by a
    large one. A value vanishes if it is below 1e-12 of its tensor's root mean square, or if its tensor's root mean
    square is below a millionth of the group's. All such values of a tensor are judged together. The root mean square of
    their errors may be the larger of

    - 10 times the trusted one: few roundings are left there, and chance decides whether they cancel;
    - 1e-12 of the group's root mean square, which the float64 evaluation cannot distinguish from 0.

    What is left within a tensor differs by orders of magnitude from one evaluation to the next. So these limits are
    those of the median evaluation there, and the worst one may have 100 times the trusted error of the worst.

    All results of a group may be exactly 0. Then errors have no size to be relative to, and no floor: all together may
    have the trusted error with the usual room, and each tensor 10 times its own.

    No other floor applies to them, however few the values are. `vanishing=False` leaves out the values within a tensor.
    It is for outputs: a rounded input may give exactly 0 at a kink, and nothing is divided by an output's size.

    Integers and booleans are judged one tensor at a time. As many may differ from the exact ones as eager's do, with
    the usual room, and one in 10,000: between two values one rounding apart, chance decides which is larger.

    A result of another dtype than the trusted one is wrong, whatever its numbers are.
    """
    others = [name for name in names if errors.dtypes[name] != trusted.dtypes[name]]
    counted = [name for name in names if not trusted.dtypes[name].is_floating_point]
    names = [name for name in names if trusted.dtypes[name].is_floating_point]
    numbers = sum(errors.numbers[name] for name in names)
    size = math.sqrt(sum(trusted.reference[name] for name in names) / max(1, numbers))
    least = (1e-6 * size) ** 2
    sized = [name for name in names if size and trusted.reference[name] >= trusted.numbers[name] * least]
    findings = []

    def floor(name: str) -> float:
        if name in counted:
            return _FLIPS
        return _ROUNDINGS * torch.finfo(trusted.dtypes[name]).eps if size else 0.0

    def compare(
        what: str, members: list[str], room: float, measure: Callable[[Errors], float], usual: float = 0.0
    ) -> None:
        of_trusted = max(measure(trusted), usual)
        limit = max(room * of_trusted, *map(floor, members))
        findings.append(Finding(what, tuple(members), of_trusted, measure(errors), limit, measure))

    def vanish(what: str, name: str, measure: Callable[[Errors], float], luck: float = _LUCK) -> None:
        of_trusted = measure(trusted)
        limit = max(luck * of_trusted, _NOTHING if size else 0.0)
        findings.append(Finding(what, (name,), of_trusted, measure(errors), limit, measure))

    def room(members: list[str]) -> float:
        return 1.1 + 5 / math.sqrt(max(1, sum(errors.numbers[name] for name in members)))

    for name in others:
        measure = partial(_is_other, name=name, dtype=trusted.dtypes[name])
        what = f"{name}, {errors.dtypes[name]} and not {trusted.dtypes[name]}"
        findings.append(Finding(what, (name,), 0.0, measure(errors), 0.0, measure))
    for name in counted:
        compare(name, [name], math.sqrt(room([name])), partial(_mean, names=[name]))  # the root of how many
    if not names:
        return findings
    compare(f"all {group}", names, room(names), partial(_together, names=names))
    few = [name for name in sized if errors.numbers[name] < FEW]
    if len(few) > 1:
        compare(f"{len(few)} small {group}", few, max(1.25, room(few)), partial(_mean, names=few))
    typical = statistics.median(trusted.relative(name) for name in sized) if sized else 0.0
    for name in names:
        if name not in sized:
            vanish(name, name, partial(Errors.absolute, name=name, size=size))
            continue
        slack, usual = (4.0, typical) if name in few else (room([name]), 0.0)
        compare(name, [name], slack, partial(_mean, names=[name]), usual)
        if vanishing and name in errors.vanishing:
            where = partial(Errors.where_vanishing, name=name, size=size)
            vanish(f"{name}, where it vanishes", name, partial(where, quantile=0.5))
            vanish(f"{name}, where it vanishes, at worst", name, partial(where, quantile=1.0), _WORST_LUCK)
    return findings


def _is_other(errors: Errors, name: str, dtype: torch.dtype) -> float:
    return float(errors.dtypes[name] != dtype)


def _together(errors: Errors, names: list[str]) -> float:
    return errors.relative(*names)


def _mean(errors: Errors, names: list[str]) -> float:
    return math.sqrt(statistics.fmean(errors.relative(name) ** 2 for name in names))
