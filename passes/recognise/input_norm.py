"""The RMS norm that reads a layer input and nothing else: out = u * r [* weight], r the RMS factor of u itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mhc_compile.passes.recognise import rms
from mhc_compile.passes.recognise.aggregate import Aggregate
from mhc_compile.passes.recognise.layout import keeps_order, origin, tidy
from mhc_compile.passes.recognise.projection import Part, Projection, further, weight_axes
from mhc_compile.passes.recognise.reader import Reader
from mhc_compile.passes.shadow import Op, Value

# What is multiplied to u: the factor, the weight, and a number or two.
_MAX_PRODUCTS = 4
# The most operators of a norm in any spelling; a weight is taken as it comes.
_MAX_OPS = 60


@dataclass(frozen=True)
class InputNorm:
    """out = weight * u / sqrt(mean(u^2) + eps), in the order of the elements of u; weight has one number a channel."""

    out: Value
    weight: Value | None
    eps: float


def input_norm(reader: Reader, aggregate: Aggregate) -> InputNorm | str | None:
    """The norm of an aggregate's result, None without one, or why it cannot be taken in."""
    u, width = aggregate.out, aggregate.streams.channels
    if width < 2 or aggregate.out_layout.dims[1] != ((width, 1),):
        return None
    reason = None
    for out in reversed(list(_products(u))):
        found = _read(reader, out, u, width)
        if found is not None and _is_closed(u, found):
            return found
        if found is not None:
            reason = "something else reads the layer input or a part of the norm"
    return reason


def _products(u: Value) -> Iterator[Value]:
    """What u is multiplied to, one factor after the other, past casts and views that keep its order."""
    pending = [(u, 0)]
    for value, depth in pending:
        for op in value.users:
            product = op.name in ("mul", "div")
            if len(op.outs) != 1 or op.out.numel != u.numel or not (product or keeps_order(op)):
                continue
            if product:
                yield op.out
            if depth + product < _MAX_PRODUCTS and len(pending) < _MAX_OPS:
                pending.append((op.out, depth + product))


def _read(reader: Reader, out: Value, u: Value, width: int) -> InputNorm | None:
    """Whether a product is u normalised: it is read as the normalised streams of a projection are."""
    tokens = tidy(((out.numel // width, width),))
    pending = [Projection(out, out, tokens, 1, width, (Part(out, 1, (), ((width, 1, 1),)),), ())]
    for reading in pending:
        if reading.x is u:
            found = _normalised(reader, reading, out)
            if found is not None:
                return found
        elif len(reading.scalings) < _MAX_PRODUCTS and len(pending) < _MAX_OPS:
            pending += further(reader, reading)
    return None


def _normalised(reader: Reader, reading: Projection, out: Value) -> InputNorm | None:
    eps, const = None, reading.const
    weight: Value | None = None
    for scaling in reading.scalings:
        factor = rms.of_scaling(scaling, reading, reader) if eps is None else None
        if isinstance(factor, rms.RmsFactor) and factor.rms.mode == "inside":
            eps, const = factor.rms.eps, const * factor.const
        elif weight is None and weight_axes(scaling, reading) == ((reading.width, 1, 1),):
            weight = origin(scaling.factor)[0]
        else:
            return None
    if eps is None or abs(const - 1.0) > 1e-12:
        return None
    return InputNorm(out, weight, eps)


def _is_closed(u: Value, norm: InputNorm) -> bool:
    """Whether nothing but the norm reads u, or what is computed from it on the way."""
    ops: dict[Op, None] = {}
    pending = [norm.out]
    while pending:
        value = pending.pop()
        if value is u or value is norm.weight or value.op is None or value.op in ops:
            continue
        ops[value.op] = None
        pending += value.op.inputs()
        if len(ops) > _MAX_OPS:
            return False
    made = [u]
    for value in made:
        if value.is_output or any(op not in ops for op in value.users):
            return False
        made += [out for op in value.users for out in op.outs if out is not norm.out and out not in made]
    return True
