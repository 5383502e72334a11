"""The factor that normalises a token: r = c / sqrt(mean(x^2) + eps), or one of its other forms.

The square sum is found by structure; what is made of it, by behaviour: in float64, at squares of
all sizes that float32 has, zero included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from mhc_compile.forms import Rms
from mhc_compile.passes.recognise.contraction import exact
from mhc_compile.passes.recognise.fewer_tokens import on_few_tokens
from mhc_compile.passes.recognise.layout import Factor as Step
from mhc_compile.passes.recognise.layout import Layout, axes_of, is_movement, keeps_order, origin, tidy, walk
from mhc_compile.passes.recognise.projection import Projection, Scaling, token_factor
from mhc_compile.passes.recognise.reader import Reader
from mhc_compile.passes.recognise.region import Region, region, same_gradient_of_each
from mhc_compile.passes.shadow import Op, Value

# Evaluation and candidate are both float64 and a few operations long; a 1e-12 clamp differs from a 1e-12 summand by
# far more than this where the squares are of that size.
_TOLERANCE = 1e-13
# Squares are lost below float32's smallest normal number, 1e-38, in eager code as well. An eps inside the root has to
# be far above that. Any eps has to be so large that r times the gradients of gates stays in range for a token of zeros.
_LEAST = {"inside": 1e-31, "outside": 1e-30, "clamp": 1e-30}


# Of ten, the power that is the largest mean of squares in float32.
_GREATEST = math.log10(torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class RmsFactor:
    """const times the form's r; reciprocal says that the program divides by the value instead."""

    rms: Rms
    const: float


def of_scaling(scaling: Scaling, projection: Projection, reader: Reader) -> RmsFactor | str | None:
    """Whether x is scaled by the RMS factor of its tokens, each token by its own. A text is as in `identify`."""
    _, layout = origin(scaling.factor, _broadcast_of_tokens)
    tokens = [step for dim in layout.dims for step in dim if step[1]]
    if not token_factor(scaling, projection) or tidy(tokens) != tidy(((projection.tokens, 1),)):
        return None
    return identify(scaling.factor, projection, reader, divides=scaling.divides)


def identify(value: Value, projection: Projection, reader: Reader, *, divides: bool) -> RmsFactor | str | None:
    """Whether `value` [tokens] is the RMS factor (or, divided by, its reciprocal) of the tokens, in whatever order.

    A text says why an RMS factor is none that the operators compute.
    """
    base, _ = walk(value, _broadcast_of_tokens)
    if base.numel != projection.tokens:
        return None
    found = region(base, lambda value: squares_of(value, projection, reader) is not None)
    if found is None or not _keeps_order(found):
        return None
    squares = squares_of(found.leaf, projection, reader)
    assert squares is not None
    key = (found.signature, squares, projection.width, divides, base.dtype)
    if key not in reader.known:
        fitted = _fit(on_few_tokens(found), squares, projection.width, divides)
        if isinstance(fitted, RmsFactor) and base.dtype != torch.float64:
            fitted = replace(fitted, rms=replace(fitted.rms, eps=_as_written(fitted.rms.eps)))
        reader.known[key] = fitted
    factor: RmsFactor | str | None = reader.known[key]
    return factor


def _as_written(eps: float) -> float:
    """The short decimal that is this number in float32, to which `F.rms_norm` rounds its eps; else the number."""
    written = float(f"{eps:.6g}")
    return written if torch.tensor(written, dtype=torch.float32).item() == eps else eps


def _broadcast_of_tokens(op: Op, value: Value) -> Value | None:
    if not is_movement(op):
        return None
    source = next(op.inputs())
    return source if source.numel == value.numel or op.name == "expand" else None


@dataclass(frozen=True)
class Squares:
    """const times the sum of each token's squares, or the root of that."""

    const: float
    root: bool = False


def squares_of(value: Value, projection: Projection, reader: Reader) -> Squares | None:
    """What a value is, if it holds the square sum of every token, in order."""
    op = value.op
    if op is None or value.numel != projection.tokens:
        return None
    if op.name == "linalg_vector_norm":
        if float(op.arg(1, "ord", 2)) != 2.0 or not isinstance(op.args[0], Value):
            return None
        source = op.args[0]
        axes = axes_of(op.arg(2, "dim"), len(source.shape))
        for seen in exact(reader.views(source)):
            layout = seen.layout
            rest = tuple(dim for d, dim in enumerate(layout.dims) if d not in axes)
            inner = [step for d in axes for step in layout.dims[d]]
            if seen.base is projection.x and _are_tokens(Layout(rest), inner, projection):
                return Squares(1.0, root=True)
        return None
    terms = reader.terms(value)
    if len(terms) != 1 or len(terms[0].factors) != 2 or not terms[0].summed or terms[0].const <= 0:
        return None
    left, right = ({s.base: s.layout for s in exact(f)} for f in terms[0].factors)
    x = projection.x
    if x not in left or left[x] != right.get(x):
        return None
    rank = len(value.shape)
    inner = [step for dim in left[x].dims[rank:] for step in dim]
    return Squares(terms[0].const) if _are_tokens(Layout(left[x].dims[:rank]), inner, projection) else None


def _are_tokens(outer: Layout, inner: list[Step], projection: Projection) -> bool:
    """Whether outer goes through the tokens in the projection's order, and inner through all within one."""
    steps = tidy([step for dim in outer.dims for step in dim])
    within = [(size, stride) for size, stride, _ in projection.parts[0].inner]
    return steps == projection.tokens_at and _same_set(inner, within)


def _same_set(one: list[Step], other: list[Step]) -> bool:
    """Whether two sets of steps, in any order, reach the same elements."""
    by_stride = [tidy(sorted(steps, key=lambda step: -step[1])) for steps in (one, other)]
    return by_stride[0] == by_stride[1]


def _keeps_order(found: Region) -> bool:
    """Whether the tokens come out of the region in the order in which they went in."""
    for op in found.ops:
        if not op.sources and all(out.numel == 1 for out in op.outs):
            continue  # a number that the program makes a tensor
        source = max(op.inputs(), key=lambda value: value.numel, default=None)
        if source is None or any(out.numel != source.numel for out in op.outs):
            return False
        if is_movement(op) and not keeps_order(op):
            return False
    return True


def _fit(found: Region, squares: Squares, width: int, divides: bool) -> RmsFactor | str | None:
    mean = torch.cat([torch.zeros(1, dtype=torch.float64), torch.logspace(-46, _GREATEST, 421, dtype=torch.float64)])
    given = mean * (squares.const * width)
    given = given.sqrt() if squares.root else given
    factor = _at(found, given)
    if factor is None:
        return None
    r = factor.reciprocal() if divides else factor
    const = float(r[-1] * mean[-1].sqrt())
    wanted = r / const
    for eps in sorted({0.0, *_eps_candidates(found, width)}):
        for mode, value in (
            ("inside", (mean + eps).rsqrt()),
            ("outside", 1 / (mean.sqrt() + eps)),
            ("clamp", 1 / mean.sqrt().clamp_min(eps)),
        ):
            near = (value - wanted).abs() <= _TOLERANCE * 50 * wanted.abs()
            if bool((near | (value == wanted)).all()):  # without eps, a token of zeros is divided by nothing
                if 0.0 < eps < _LEAST[mode]:
                    least = f"the operators compute it in float32, with 0 or {_LEAST[mode]:.0e} and more"
                    return f"is normalised by an RMS norm with an eps of {eps:.2g} ({mode}); {least}"
                rms = Rms(eps, mode)
                return RmsFactor(rms, const) if _is_same(found, rms, squares, width, const, divides) else None
    return None


def _is_same(found: Region, rms: Rms, squares: Squares, width: int, const: float, divides: bool) -> bool:
    """Whether a region that has the values of r has its gradients, too, and r's values where squares are no numbers."""

    def ours(leaf: torch.Tensor) -> torch.Tensor:
        mean = (leaf**2 if squares.root else leaf) / (squares.const * width)
        root = {
            "inside": lambda: (mean + rms.eps).sqrt(),
            "outside": lambda: mean.sqrt() + rms.eps,
            "clamp": lambda: mean.sqrt().clamp_min(rms.eps),
        }[rms.mode]()
        return root / const if divides else const / root

    # Between the squares where a clamp has its kink.
    mean = torch.logspace(-45.93, _GREATEST, 61, dtype=torch.float64)
    given = mean * (squares.const * width)
    given = given.sqrt() if squares.root else given
    count = torch.Size(found.shape).numel()
    places = torch.arange(count * -(-len(given) // count)) % len(given)
    points = given[places].view(-1, *found.shape)
    if not same_gradient_of_each(ours, found, *points, least=0.0):
        return False
    for value in (float("inf"), float("nan")):
        at = torch.full(found.shape, value, dtype=torch.float64)
        if not torch.equal(found.run(at).reshape(found.shape).nan_to_num(1.0), ours(at).nan_to_num(1.0)):
            return False
    return True


def _eps_candidates(found: Region, width: int) -> set[float]:
    """The constants of the region, as they are and as they read once the sum is written as a mean."""
    constants = {abs(c) for c in found.constants(whole=True)}
    constants |= {c**0.5 for c in constants}  # ms.clamp_min(eps)
    return constants | {c / width for c in constants} | {c / width**0.5 for c in constants}


def _at(found: Region, given: torch.Tensor) -> torch.Tensor | None:
    """The region's value at each of the given squares, however few tokens the program has.

    If it has more, every token gets one of the squares, and another one in a second run; None if tokens differ.
    """
    shape = found.shape
    count = max(1, int(torch.Size(shape).numel()))
    whole = max(count, len(given))
    places = torch.arange(whole) % len(given)
    orders = (places, len(given) - 1 - places) if count > len(given) else (places,)
    result = None
    for order in orders:
        pieces = []
        for start in range(0, whole, count):
            chunk = given[order[start : start + count]]
            padded = torch.cat([chunk, chunk[-1:].expand(count - len(chunk))])
            try:
                pieces.append(found.run(padded.view(shape)).reshape(-1)[: len(chunk)])
            except Exception:  # an operator that does not run as recorded is one we cannot judge
                return None
        values = torch.cat(pieces)
        if len(values) != whole or values.dtype != torch.float64:
            return None
        result = values[: len(given)] if result is None else result
        if not torch.allclose(values, result[order], rtol=_TOLERANCE, atol=0.0, equal_nan=True):
            return None
    return result
