"""Tensors put together from pieces, by `cat`, `stack` or part by part, and which piece one looks into."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

from mhc_compile.passes.recognise.layout import Layout, NotALayout, tidy
from mhc_compile.passes.recognise.sums_of_products import Factor, Source
from mhc_compile.passes.shadow import Op, Value

TOGETHER = {"cat", "stack", "select_scatter", "slice_scatter"}


@dataclass(frozen=True)
class Together:
    """Pieces that lie next to one another along `axis` of a value; stacked: each without that dimension."""

    pieces: tuple[Value, ...]
    axis: int
    stacked: bool

    def joined(self, factors: list[Factor]) -> Factor:
        """What the pieces' factors are together."""
        return _joined([self._raised(factor) for factor in factors], self.axis)

    def _raised(self, factor: Factor) -> Factor:
        if not self.stacked:
            return factor
        axis = self.axis
        return tuple(
            Source(s.base, Layout((*s.layout.dims[:axis], (), *s.layout.dims[axis:]), s.layout.offset)) for s in factor
        )


def put_together(op: Op) -> Together | None:
    """The pieces of a `cat` or `stack`, or of a tensor that is written part by part until nothing is left of it."""
    rank = len(op.out.shape)
    if op.name in ("cat", "stack"):
        # cat takes an empty vector together with pieces of any rank, as caches begin with one.
        if len({len(piece.shape) for piece in op.args[0]}) > 1:
            return None
        return Together(tuple(op.args[0]), op.arg(1, "dim", 0) % rank, op.name == "stack")
    name, axis = op.name, _axis(op)
    found: dict[int, Value] = {}
    written = 0  # a bit for each place along the axis
    current: Op | None = op
    while current is not None and current.name == name and current.arg(2, "dim", 0) % rank == axis:
        place = _place(current, axis)
        if place is None:
            return None
        start, length = place
        here = ((1 << length) - 1) << start
        if here and not written & here:
            found[start] = current.args[1]
        elif here & ~written:  # later writes cover only a part of it
            return None
        written |= here
        current = current.args[0].op
    end, pieces = 0, []
    for start in sorted(found):
        if start != end:
            return None
        pieces.append(found[start])
        end += 1 if name == "select_scatter" else found[start].shape[axis]
    whole = Together(tuple(pieces), axis, name == "select_scatter")
    return whole if end == op.out.shape[axis] else None


def _joined(pieces: list[Factor], axis: int) -> Factor:
    """What pieces of one base, next to one another along `axis`, are together."""
    found = []
    for source in pieces[0]:
        layouts = [source.layout]
        for piece in pieces[1:]:
            layouts += [other.layout for other in piece if other.base is source.base][:1]
        if len(layouts) == len(pieces) and (joined := _adjoined(layouts, axis)) is not None:
            found.append(Source(source.base, joined))
    return tuple(found)


def _adjoined(layouts: list[Layout], axis: int) -> Layout | None:
    first = layouts[0]
    if any(a.dims[:axis] != first.dims[:axis] or a.dims[axis + 1 :] != first.dims[axis + 1 :] for a in layouts):
        return None
    gaps = {b.offset - a.offset for a, b in pairwise(layouts)}
    dim = None
    if len(gaps) <= 1 and all(a.dims[axis] == first.dims[axis] for a in layouts):
        gap = gaps.pop() if gaps else 0
        dim = tidy(((len(layouts), gap), *first.dims[axis])) if gap >= 0 else None
    elif all(len(a.dims[axis]) == 1 for a in layouts) and len({a.dims[axis][0][1] for a in layouts}) == 1:
        stride = first.dims[axis][0][1]
        if all(b.offset - a.offset == a.dims[axis][0][0] * stride for a, b in pairwise(layouts)):
            dim = tidy(((sum(a.dims[axis][0][0] for a in layouts), stride),))
    return None if dim is None else Layout((*first.dims[:axis], dim, *first.dims[axis + 1 :]), first.offset)


def _axis(op: Op) -> int:
    return op.arg(2, "dim", 0) % len(op.out.shape)  # type: ignore[no-any-return]


def _place(op: Op, axis: int) -> tuple[int, int] | None:
    """Where along the axis a write begins, and how long it is; None if it leaves out places, or begins anywhere."""
    size, selects = op.out.shape[axis], op.name == "select_scatter"
    start = op.arg(3, "index" if selects else "start", 0)
    if not isinstance(start, int) or op.arg(5, "step", 1) != 1:
        return None
    return max(start + size, 0) if start < 0 else min(start, size), 1 if selects else op.args[1].shape[axis]


def _beside(op: Op, axis: int, first: int, last: int) -> Value:
    """What a tensor was before a part of it was written, where none of these elements along the axis is in the part."""
    place = _place(op, axis) if op.name not in ("cat", "stack") else None
    if place is None or (last >= place[0] and first < sum(place)):
        raise NotALayout
    return op.args[0]  # type: ignore[no-any-return]


def piece_of(op: Op, source: Source) -> tuple[Value, Layout]:
    """The piece of a value put together in which all that the layout reaches lies, and the layout over it."""
    together = put_together(op)
    shape, axis = source.base.shape, together.axis if together is not None else _axis(op)
    inner = reduce(lambda a, b: a * b, shape[axis + 1 :], 1)
    whole = shape[axis] * inner
    lowest = highest = source.layout.offset % whole
    for dim in source.layout.dims:
        highest += sum((size - 1) * stride for size, stride in dim if stride % whole)
    if together is None:
        return _beside(op, axis, lowest // inner, highest // inner), source.layout
    start = 0
    for piece in together.pieces:
        length = inner * (1 if together.stacked else piece.shape[axis])
        if start <= lowest and highest < start + length:
            dims = tuple(
                tuple((size, stride if stride % whole else stride // whole * length) for size, stride in dim)
                for dim in source.layout.dims
            )
            return piece, Layout(dims, source.layout.offset // whole * length + lowest - start)
        start += length
    raise NotALayout
