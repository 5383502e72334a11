"""Gates: small values made from one projection, identified by what they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from mhc_compile.forms import Sinkhorn
from mhc_compile.passes.recognise import sinkhorn
from mhc_compile.passes.recognise.affine import Affine, AffineWalk
from mhc_compile.passes.recognise.contraction import is_stream_count
from mhc_compile.passes.recognise.fewer_tokens import on_few_tokens
from mhc_compile.passes.recognise.layout import NotALayout, is_movement, move
from mhc_compile.passes.recognise.region import (
    AT_KINKS,
    Region,
    Signature,
    draws_random_numbers,
    of_elements,
    region,
    same_beyond_numbers,
    same_gradient,
    same_gradient_of_each,
)
from mhc_compile.passes.shadow import Op, Value

# Region and candidate are float64 and at most a few operations long.
_TOLERANCE = 1e-13
# At how many logits at least a gate is looked at from one end to the other.
_POINTS = 64
# Where a gate is small, it has to be right relative to itself: softplus is linear from 20 on, which is 2e-9 too little.
_OF_TAIL = 1e-8
# exp(-_LAST), which is no number of float32.
_LAST, _NOTHING = 138.0, 1e-60
# Values looked at that make a matrix: 40 half-steps of a handful of operators each.
_LIMIT = 600
_ANOTHER_NUMBER = (
    "has fewer or more elements than the logits that it is made of, as a sum or mean has; the operators make one gate "
    "of each logit"
)


@dataclass(frozen=True)
class Sigmoid:
    """gate = mult * sigmoid(slope * l) + eps."""

    mult: float
    slope: float
    eps: float


@dataclass(frozen=True)
class Mixing:
    """gate = Sinkhorn(l); of the transposed logits, and with the form's matrix transposed, where these say so."""

    form: Sinkhorn
    logits_transposed: bool
    transposed: bool


@dataclass(frozen=True)
class Gate:
    """A value of `size` elements a token, made by ops. rows are the projection's rows that they come from, in order."""

    value: Value
    logits: Affine
    rows: tuple[int, ...]
    kind: Sigmoid | Mixing
    ops: tuple[Op, ...]

    @property
    def size(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class NotAGate:
    """Why a value that comes from a projection was not understood; streams are what the projection may have read."""

    value: Value
    # Or what finds it out, where that takes long: most are never asked for.
    because: str | Callable[[], str]
    streams: tuple[Value, ...] = ()

    @property
    def reason(self) -> str:
        return self.because if isinstance(self.because, str) else self.because()


Identified = dict[Signature, "Sigmoid | Mixing | str"]


def identify(value: Value, walk: AffineWalk, known: Identified) -> Gate | NotAGate:
    """The gate that `value` holds; `known` remembers what regions compute, or the reason why that is unclear."""
    found = walk.region(value)
    if found is None:
        return NotAGate(value, partial(_unlike_one_slice, value, walk))
    logits = walk.describe(found.leaf)
    assert logits is not None
    each = of_elements(found) if found.leaf.numel != value.numel else None
    viewed = _viewed(logits, found) if each is not None else None
    if each is not None and viewed is not None:
        found, logits = each, viewed
    rows = _rows(logits)
    if not found.ops:
        return NotAGate(value, "is the projection itself, before any gate")
    if rows is None and _has_tokens_last(logits):
        return NotAGate(value, "is computed with the tokens last, as [..., tokens]; the operators have them first")
    if not found.by_element and found.leaf.numel != value.numel:
        return NotAGate(value, _ANOTHER_NUMBER)
    size = logits.projection.tokens * len(rows or ()) if found.by_element else found.leaf.numel
    if rows is None or len(set(rows)) != len(rows) or size != value.numel:
        return NotAGate(value, "has the projection's elements repeated, left out, or its tokens in another order")
    signature = found.signature
    if signature not in known:
        known[signature] = _kind(on_few_tokens(found), len(rows))
    kind = known[signature]
    return NotAGate(value, kind) if isinstance(kind, str) else Gate(value, logits, tuple(rows), kind, found.ops)


def _viewed(logits: Affine, found: Region) -> Affine | None:
    """The logits of the elements that a region of single elements keeps; None if its views have no layout."""
    ops: list[tuple[Op, Value]] = []
    value = found.out
    while value is not found.leaf:
        assert value.op is not None
        ops.append((value.op, value))
        (value,) = value.op.sources
    try:
        for op, out in reversed(ops):
            if is_movement(op):
                logits = logits.map(partial(move, op, out))
    except NotALayout:
        return None
    return logits


def _unlike_one_slice(value: Value, walk: AffineWalk) -> str:
    """Why a value is not one function of one slice: what the projection goes through before other tensors join it."""
    functions: dict[str, None] = {}
    joined = ""
    pending = {value: None}
    for current in (ordered := list(pending)):
        op = current.op
        if current in walk.reasons:
            return walk.reasons[current]
        if op is not None and draws_random_numbers(op):
            return "draws random numbers, as a dropout does; the operators compute a gate from the logits alone"
        if op is None or op.target is None or len(ordered) > _LIMIT:
            continue
        sources = [source for source in op.sources if source in walk.cone]
        if len(op.sources) == 1 and not is_movement(op) and walk.describe(op.sources[0]) is not None:
            functions[op.name] = None
        further = [source for source in sources if walk.describe(source) is None]
        for other in op.sources:
            if other not in walk.cone and not joined and not further:  # what joins further on may be a bias
                joined = f", but also from another tensor, {list(other.shape)}, in {op.name}"
        fresh = [source for source in further if source not in pending]
        pending |= dict.fromkeys(fresh)
        ordered += fresh
    if not functions:
        return f"is not computed from one slice of the projection alone{joined}"
    return (
        f"is computed from {' and '.join(functions)} of the projection and from other tensors; in the operators scale "
        "and bias act on the projection itself"
    )


def _has_tokens_last(logits: Affine) -> bool:
    steps = [stride for dim in logits.rows.dims for _, stride in dim]
    of_tokens = [stride >= logits.projection.rows for stride in steps]
    return len(steps) > 1 and of_tokens == sorted(of_tokens)


def _kind(found: Region, size: int) -> Sigmoid | Mixing | str:
    fitted = _fit_sigmoid(found)
    if fitted is not None:
        return fitted
    side = round(size**0.5)
    square = found.leaf.shape[-2:] == (side, side) or found.leaf.shape[-1:] == (size,)
    if side * side == size and square and found.out.shape[-2:] == (side, side):
        answer = sinkhorn.identify(found, side)
        return answer if isinstance(answer, str) else Mixing(*answer)
    return "is not mult * sigmoid(logits) + eps"


@dataclass(frozen=True)
class Matrices:
    """out = Sinkhorn(logits), as `kind` says, made by ops."""

    out: Value
    logits: Value
    kind: Mixing
    ops: tuple[Op, ...]


_BEFORE_EXPONENTIAL = 4


def matrices(value: Value, known: Identified) -> Matrices | str | None:
    """Whether `value` is a Sinkhorn projection of some logits: those before its first exponential, or what they are
    made of. None where there is no exponential, so that nothing was normalised in the first place."""
    side = value.shape[-1] if value.shape else 0
    first = _first_exponential(value) if value.shape[-2:] == (side, side) and is_stream_count(side) else None
    reason: str | None = None
    leaf = next(first.inputs()) if first is not None else None
    for _ in range(_BEFORE_EXPONENTIAL):
        if leaf is None or leaf.shape[-2:] != (side, side) or leaf.numel != value.numel:
            break
        found = region(value, lambda v, leaf=leaf: v is leaf)  # type: ignore[misc]
        if found is not None and found.leaf is leaf and tuple(leaf.shape) == tuple(value.shape):
            signature = found.signature
            if signature not in known:
                answer = sinkhorn.identify(on_few_tokens(found), side)
                known[signature] = answer if isinstance(answer, str) else Mixing(*answer)
            kind = known[signature]
            if isinstance(kind, Mixing):
                return Matrices(value, leaf, kind, found.ops)
            reason = reason or (kind if isinstance(kind, str) else None)
        sources = [v for v in leaf.op.inputs() if v.numel == leaf.numel] if leaf.op is not None else []
        leaf = sources[0] if sources else None
    return reason


def _first_exponential(value: Value) -> Op | None:
    """The first exponential on the way to a value: no other is computed before it."""
    seen: set[Value] = set()
    stack: list[tuple[Value, bool]] = [(value, False)]
    while stack:
        current, done = stack.pop()
        op = current.op
        if op is None or op.target is None or (current in seen and not done):
            continue
        if done:
            if op.name in sinkhorn.EXPONENTIALS:
                return op
            continue
        seen.add(current)
        if len(seen) > _LIMIT:
            return None
        stack.append((current, True))
        stack.extend((source, False) for source in op.inputs() if source.numel <= value.numel)
    return None


def _rows(logits: Affine) -> list[int] | None:
    """The projection rows of the elements of one token, if the tokens follow one another in order."""
    rows, expected = [0], logits.projection.tokens * logits.projection.rows
    inner = False
    for dim in logits.rows.dims:
        for size, stride in dim:
            if stride >= logits.projection.rows:
                expected //= size
                if inner or stride != expected:
                    return None
            elif stride == 0:
                return None
            else:
                inner = True
                rows = [row + i * stride for row in rows for i in range(size)]
    return [row + logits.rows.offset for row in rows]


def _fit_sigmoid(found: Region) -> Sigmoid | str | None:
    """Read mult, slope and eps off the limits and one point, then hold them against the region everywhere."""
    shape = found.shape
    points = [_run(found, torch.full(shape, at, dtype=torch.float64)) for at in (-800.0, 800.0, 0.5)]
    if any(point is None or point.numel() == 0 for point in points):
        return None
    bottom, top, near = (float(point.reshape(-1)[0]) for point in points if point is not None)
    height = abs(top - bottom)
    if not 0 < height < float("inf") or not 0 < (near - bottom) / (top - bottom) < 1:
        return None
    ratio = (near - bottom) / (top - bottom)
    slope = _short(2 * torch.tensor(ratio, dtype=torch.float64).logit().item())
    # The sum of a sigmoid and of the limit nearer to zero cancels least.
    eps, far = sorted((bottom, top), key=abs)
    rises = eps == bottom
    eps = eps if abs(eps) > height * _NOTHING else 0.0
    kind = Sigmoid(_short(far - eps), slope if rises else -slope, eps)
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(shape, generator=generator, dtype=torch.float64) * spread for spread in (0.1, 3.0, 40.0, 400.0)
    ]
    given += [ramp / slope for ramp in _ramps(found, -_LAST, _LAST)]
    thresholds = [number for number in sorted(found.constants(whole=True)) if 0 < abs(number * slope) < 1]
    beside = [at for number in thresholds for at in _beside(found, number)]
    given += beside
    pairs = [(at, value) for at in given if (value := _run(found, at)) is not None]
    if len(pairs) < len(given) or not all(_is_near(kind, *pair, 0.0) for pair in pairs):
        return None
    cancels = _cancels(kind, found)
    same_tail = all(_is_near(kind, *pair, _OF_TAIL) for pair in pairs)
    if 0 < abs(eps) <= _TOLERANCE * 10 * height and (cancels or not same_tail):
        # It comes from a clamp at -30, say, and is no eps: as an eps, it would double a gate in the tail.
        return f"is a sigmoid gate that does not fall below {eps:.2g}, as if its logits were clamped"
    if _keeps_digits(kind, found):
        return "crosses zero as a tanh does, with more digits than a sigmoid and a number added have there"
    if not cancels and not same_tail:
        return "equals a sigmoid gate, but not where that is next to nothing (a threshold, or a mask)"
    sigmoid = partial(_sigmoid, kind)
    places = [torch.randn(shape, generator=generator, dtype=torch.float64) * spread for spread in (1.0, 6.0)]
    same = same_gradient(sigmoid, found, *places, *beside)
    for ramp in _ramps(found, -40.0, 40.0):
        # Where a sigmoid is near 1, its gradient is rounded as much as 1 is.
        least = torch.where(ramp < 0, 0.0 if not cancels else 1.0, 1.0) * height * slope * 1e-14 + height * _NOTHING
        at = ramp / kind.slope
        same = same and same_gradient_of_each(sigmoid, found, at, least=least, relative=_OF_TAIL)
    if not same:
        return "equals a sigmoid gate, but its gradient does not (a detach, or a scaled gradient)"
    if not same_gradient(sigmoid, found, torch.zeros(shape, dtype=torch.float64), relative=AT_KINKS):
        return "equals a sigmoid gate, but its gradient does not where logits are zero (as that of abs or clamp there)"
    if not same_beyond_numbers(sigmoid, found):
        return "equals a sigmoid gate, but not for logits that are NaN or infinite, which it replaces"
    return kind


def _sigmoid(kind: Sigmoid, given: torch.Tensor) -> torch.Tensor:
    return kind.mult * torch.sigmoid(kind.slope * given) + kind.eps


def _ramps(found: Region, first: float, last: float) -> torch.Tensor:
    """What a region is given one after the other, so that many logits are seen, however few it has itself."""
    count = torch.Size(found.shape).numel()
    runs = -(-_POINTS // count)
    return torch.linspace(first, last, runs * count, dtype=torch.float64).view(runs, *found.shape)


def _beside(found: Region, number: float) -> torch.Tensor:
    """Logits on both sides of a number of the region: it may be a threshold, however small."""
    count = torch.Size(found.shape).numel()
    sides = number * torch.tensor([0.999, 1.001, -0.999, -1.001], dtype=torch.float64)
    runs = -(-len(sides) // count)
    return sides[torch.arange(runs * count) % len(sides)].view(runs, *found.shape)


def _is_near(kind: Sigmoid, given: torch.Tensor, got: torch.Tensor, relative: float) -> bool:
    """Whether values are the gate's: relative to its height, or to each of them, if a number says how near."""
    wanted, height = _sigmoid(kind, given), abs(kind.mult)
    allowed = torch.full_like(wanted, _TOLERANCE * 10 * height)
    if relative:
        crosses = kind.eps * (kind.eps + kind.mult) < 0
        allowed = relative * wanted.abs() + height * (1e-15 if crosses else _NOTHING)
    return bool(((got.reshape(given.shape) - wanted).abs() <= allowed).all())


def _cancels(kind: Sigmoid, found: Region) -> bool:
    """Whether what a region computes has few digits in the tail, as 1 + tanh has: what it does there hides in them."""
    for ramp in _ramps(found, -26.0, -24.0):
        given = ramp / kind.slope
        got, tail = _run(found, given), _sigmoid(replace(kind, eps=0.0), given)
        if got is None or ((got.reshape(given.shape) - kind.eps - tail).abs() > _OF_TAIL * tail.abs()).any():
            return True
    return False


def _keeps_digits(kind: Sigmoid, found: Region) -> bool:
    """Whether a region crosses zero where its logits do, almost, and is computed without a sum that cancels there."""
    half, middle = kind.mult / 2, kind.mult / 2 + kind.eps
    if abs(middle) >= abs(half) / 4:
        return False
    given = _ramps(found, -1e-9, 1e-9) / kind.slope
    got = [value for at in given if (value := _run(found, at)) is not None]
    if len(got) < len(given):
        return False
    rounded = torch.stack(got).reshape(given.shape) - half * torch.tanh(kind.slope * given / 2)
    return bool(rounded.max() - rounded.min() < 0.25 * torch.finfo(torch.float64).eps * abs(kind.mult))


def _run(found: Region, given: torch.Tensor) -> torch.Tensor | None:
    try:
        got = found.run(given)
    except Exception:  # an operator that does not run as recorded is one we cannot judge
        return None
    return got if got.dtype == torch.float64 and got.numel() == given.numel() else None


def _short(number: float) -> float:
    """The number as it was probably written, without the last digits that subtraction left."""
    return float(f"{number:.12g}")
