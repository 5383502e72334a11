"""Projections with the gates that are made of them, and the norm of the streams before or after."""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import dataclass, field

from mhc_compile import compat
from mhc_compile.forms import Rms
from mhc_compile.passes.recognise import gates, rms
from mhc_compile.passes.recognise.affine import AffineWalk
from mhc_compile.passes.recognise.concatenation import TOGETHER
from mhc_compile.passes.recognise.gates import Gate, NotAGate
from mhc_compile.passes.recognise.layout import origin
from mhc_compile.passes.recognise.projection import Projection, Scaling, weight_axes
from mhc_compile.passes.recognise.reader import Reader
from mhc_compile.passes.shadow import Value

# What may spread a gate over the channels.
_WIDENING = {"mul", "addcmul", "mm", "bmm", "addmm", "baddbmm"}


@dataclass(frozen=True)
class Weight:
    """The norm's affine weight, and its steps as (size, stride in x, stride in the weight)."""

    value: Value
    axes: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Normed:
    """How the streams of a projection are normalised: r, a constant factor and the affine weight."""

    rms: Rms
    const: float
    weight: Weight | None


@dataclass
class Mixture:
    """One projection with the gates that were identified after it."""

    projection: Projection
    normed: Normed
    gates: dict[Value, Gate] = field(default_factory=dict)


def candidates(cone: dict[Value, None], weighing: dict[Value, int]) -> list[Value]:
    """The values of the cone that something wide, or the caller of the graph, uses as a gate."""
    found = dict.fromkeys(sorted((value for value in cone if value in weighing), key=weighing.__getitem__))
    for value in cone:
        if value.is_output:
            found[origin(value)[0]] = None
        size = value.numel
        for op in value.users:
            # Gates of some tokens may be put together with those of others first.
            gathered = op.name in TOGETHER and op.out in weighing
            # And what a nested function reads is as good as written out.
            closed = op.target is None or isinstance(op.target, compat.AutogradFunction)
            if gathered or closed or (op.name in _WIDENING and op.out.numel > size):
                found[origin(value)[0]] = None
    return [value for value in found if value in cone]


_NO_NORM = "comes from a projection that is not normalised by an RMS norm of the streams"


def understand(
    readings: list[Projection],
    cone: dict[Value, None],
    candidates: list[Value],
    known: gates.Identified,
    reader: Reader,
    acted_on: Container[Value] = (),
    reading_gates: Collection[Value] = (),
) -> tuple[Mixture | None, list[NotAGate]]:
    """The first reading of the projection under which a gate is normalised exactly once; else why not.

    Where no reading has a norm, the first one of what is read or written whose gates are understood without. One of
    these has to be the gate of a read. Otherwise all gates stay the program's, and the write before makes the logits.
    """
    mixture, missed = _understand_with(readings, cone, candidates, known, reader, normed=True)
    if mixture is None and any(miss.because == _NO_NORM for miss in missed):
        streams = [reading for reading in readings if reading.x in acted_on]
        plain, others = _understand_with(streams, cone, candidates, known, reader, normed=False)
        if plain is not None and not plain.gates.keys().isdisjoint(reading_gates):
            return plain, others
    return mixture, missed


def _understand_with(
    readings: list[Projection],
    cone: dict[Value, None],
    candidates: list[Value],
    known: gates.Identified,
    reader: Reader,
    *,
    normed: bool,
) -> tuple[Mixture | None, list[NotAGate]]:
    # Values that are functions of one slice, of which most can be said, and others, of the plainest reading first.
    sliced: list[NotAGate] = []
    missed: list[NotAGate] = []
    affine: AffineWalk | None = None
    for reading in readings:
        before = normalised_before(reading, reader)
        if isinstance(before, str):
            missed += [NotAGate(value, before) for value in candidates]
            continue
        found: dict[Normed, Mixture] = {}
        affine = AffineWalk(reading, cone, reader, affine)
        for value in candidates:
            gate = gates.identify(value, affine, known)
            inner = before_factor(value, cone)
            if isinstance(gate, NotAGate) and inner is not None:
                within = gates.identify(inner, affine, known)
                gate = gate if isinstance(within, NotAGate) else within
            if isinstance(gate, NotAGate):
                (sliced if isinstance(gate.because, str) else missed).append(gate)
                continue
            after = gate.logits.normed
            if after is not None and before is not None:
                sliced.append(NotAGate(value, "comes from a projection that is normalised twice"))
                continue
            if (after is None and before is None) == normed:
                sliced.append(NotAGate(value, _NO_NORM))
                continue
            factor = Rms(0.0, "none") if after is None else after.rms
            kind = before or Normed(factor, reading.const, _only_weight(reading))
            found.setdefault(kind, Mixture(reading, kind)).gates[gate.value] = gate
        if found:
            return max(found.values(), key=lambda mixture: len(mixture.gates)), [*sliced, *missed]
    return None, [*sliced, *missed]


def before_factor(value: Value, cone: Container[Value]) -> Value | None:
    """A gate before the program multiplies it by a value that does not come from its projection."""
    op = value.op
    if op is None or op.name not in ("mul", "div") or len(op.sources) != 2:
        return None
    inner = [source for source in op.sources if source in cone]
    return inner[0] if len(inner) == 1 and inner[0].numel == value.numel else None


def normalised_before(reading: Projection, reader: Reader) -> Normed | str | None:
    """The normalisation that the factors in front of the matmul make, if any, or why they are not understood."""
    factor: rms.RmsFactor | None = None
    weights: list[Weight | None] = []
    for scaling in reading.scalings:
        found = rms.of_scaling(scaling, reading, reader)
        if isinstance(found, str):
            return found
        if found is not None and factor is None:
            factor = found
        else:
            weights.append(weight_of(scaling, reading))
    if len(weights) > 1 or None in weights:
        return "comes from streams that are scaled before the projection in a way that is no RMS norm"
    weight = weights[0] if weights else None
    return None if factor is None else Normed(factor.rms, factor.const * reading.const, weight)


def weight_of(scaling: Scaling, reading: Projection) -> Weight | None:
    """The affine weight that streams are scaled by, if it is the same for all tokens."""
    axes = weight_axes(scaling, reading)
    return None if axes is None else Weight(origin(scaling.factor)[0], axes)


def _only_weight(reading: Projection) -> Weight | None:
    """The weight of a reading whose scalings are nothing else."""
    return next((weight for s in reading.scalings if (weight := weight_of(s, reading)) is not None), None)
