"""Whether one evaluation of a model is as accurate as another, both against float64."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

__all__ = ["FEW", "Errors", "Finding", "judge"]

# A tensor with fewer numbers than this is one of few.
FEW = 1000
# The result's own rounding, a few times over, is no error that one evaluation can avoid and the other cannot.
_ROUNDINGS = 4.0


@dataclass
class Errors:
    """The L2 errors of named results against exact ones, over any number of evaluations.

    Squares are added up before they are divided: else one evaluation whose gradient happens to vanish decides the mean.
    """

    difference: dict[str, float] = field(default_factory=dict)
    reference: dict[str, float] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    rounding: dict[str, float] = field(default_factory=dict)

    def add(self, results: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> None:
        """Take the results of one more evaluation. Raises ValueError if the names are not those of `exact`."""
        if results.keys() != exact.keys():
            raise ValueError(f"only one of the two evaluations has {sorted(results.keys() ^ exact.keys())}")
        for name, value in results.items():
            wide = exact[name].double()
            difference = (value.double() - wide).square().sum().item()
            self.difference[name] = self.difference.get(name, 0.0) + difference
            self.reference[name] = self.reference.get(name, 0.0) + wide.square().sum().item()
            self.numbers[name] = value.numel()
            self.rounding[name] = torch.finfo(value.dtype).eps

    def relative(self, *names: str, least: float = 0.0) -> float:
        """The norm of the differences of these results together, relative to that of the exact values.

        Exact values whose root mean square is below `least` count as being of that size.
        """
        difference = math.sqrt(sum(self.difference[name] for name in names))
        numbers = sum(self.numbers[name] for name in names)
        reference = math.sqrt(max(sum(self.reference[name] for name in names), numbers * least**2))
        return difference / reference if reference else math.inf if difference else 0.0


@dataclass(frozen=True)
class Finding:
    """One comparison: `error` is allowed to be `limit`, which comes from the trusted evaluation's error, `trusted`."""

    what: str
    names: tuple[str, ...]
    trusted: float
    error: float
    limit: float
    least: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the error is within its limit; NaN is not."""
        return self.error <= self.limit

    def __str__(self) -> str:
        return f"{self.what}: error {self.error:.2e} against float64, allowed {self.limit:.2e}"


def judge(trusted: Errors, errors: Errors, names: list[str], group: str) -> list[Finding]:
    """Compare the errors of two evaluations of the same results, one by one and together.

    Both errors are sums of very many roundings in a different order: equally good evaluations are two draws from one
    distribution, and one of them is always the larger. The ratio of two root mean squares over N independent draws is 1
    give or take a multiple of 1 / sqrt(N); what reaches a parameter has come through a few gates, so its draws are not
    independent, and the multiple is taken as 5, on top of a tenth: a tensor of N >= 1000 numbers, and all results of
    the group together, may be 1.1 + 5 / sqrt(N) times the trusted error.

    Of few numbers (a scale has 3) the error is a handful of draws, and nought by luck now and then. Such tensors are
    judged together, by the root of their mean squared relative errors, with at least 25% of room; one alone may be four
    times what the trusted error is there or usually is, whichever is larger.

    A gradient that vanishes but for rounding has no size of its own: beneath a millionth of the group's root mean
    square, errors are relative to that, and such a tensor is judged alone.
    """
    numbers = sum(errors.numbers[name] for name in names)
    least = 1e-6 * math.sqrt(sum(trusted.reference[name] for name in names) / max(1, numbers))
    typical = statistics.median(trusted.relative(name, least=least) for name in names)
    findings = []

    def compare(what: str, members: list[str], of_trusted: float, own: float, room: float) -> None:
        floor = _ROUNDINGS * max(errors.rounding[name] for name in members)
        findings.append(Finding(what, tuple(members), of_trusted, own, max(room * of_trusted, floor), least))

    def room(members: list[str]) -> float:
        return 1.1 + 5 / math.sqrt(max(1, sum(errors.numbers[name] for name in members)))

    compare(f"all {group}", names, trusted.relative(*names), errors.relative(*names), room(names))
    few = [name for name in names if errors.numbers[name] < FEW]
    sized = [name for name in few if trusted.reference[name] >= trusted.numbers[name] * least**2]
    if len(sized) > 1:
        wanted, found = _mean(trusted, sized, least), _mean(errors, sized, least)
        compare(f"{len(sized)} small {group}", sized, wanted, found, max(1.25, room(sized)))
    for name in names:
        alone = trusted.relative(name, least=least)
        if name in few:
            alone, factor = max(alone, typical), 4.0
        else:
            factor = room([name])
        compare(name, [name], alone, errors.relative(name, least=least), factor)
    return findings


def _mean(errors: Errors, names: list[str], least: float) -> float:
    return math.sqrt(statistics.fmean(errors.relative(name, least=least) ** 2 for name in names))
