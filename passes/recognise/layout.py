"""Which element of which tensor: views written as nested strides.

A `Layout` says, for every index of a value, at which offset of its base tensor (taken as contiguous) the element
lies. Each dimension is a list of (size, stride) factors from major to minor, so reshapes of permuted tensors, which
have no single stride per dimension, are exact too. A stride of 0 is a broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from mhc_compile.passes.shadow import Op, Value

Factor = tuple[int, int]
Dim = tuple[Factor, ...]
Row = tuple[int, int, tuple[int, ...]]

_RESHAPES = {
    "view",
    "_unsafe_view",
    "reshape",
    "_reshape_alias",
    "unsqueeze",
    "squeeze",
    "flatten",
    "unflatten",
}
_COPIES = {"clone", "_to_copy", "alias", "contiguous", "lift_fresh", "lift_fresh_copy"}
_PARTS = {"select", "slice", "split", "split_with_sizes", "unbind"}
_MOVEMENTS = _RESHAPES | _COPIES | _PARTS | {"permute", "transpose", "t", "expand"}
# Over dimensions of size 1 they only view their input.
_REDUCTIONS = {"sum", "mean", "amax", "amin", "prod"}
_FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


class NotALayout(Exception):
    """The view has no description in nested strides."""


# A tuple, as all that is made by the ten thousand here: a frozen dataclass takes three times as long to make.
class Layout(NamedTuple):
    """One list of factors a dimension, and the offset of the first element."""

    dims: tuple[Dim, ...]
    offset: int = 0

    @staticmethod
    def contiguous(shape: Sequence[int]) -> Layout:
        return _contiguous(tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(_size(dim) for dim in self.dims)

    def is_identity(self) -> bool:
        """Whether the elements are the base's, each once and in order."""
        return self.offset == 0 and self.dims == Layout.contiguous(self.shape).dims

    def reshape(self, shape: Sequence[int]) -> Layout:
        """The same elements in row-major order, regrouped."""
        return _reshaped(self, tuple(shape))

    def permute(self, order: Sequence[int]) -> Layout:
        return Layout(tuple(self.dims[d] for d in order), self.offset)

    def expand(self, shape: Sequence[int]) -> Layout:
        """Broadcast to `shape`, new dimensions in front."""
        return _expanded(self, tuple(shape))

    def select(self, axis: int, start: int, length: int, step: int = 1) -> Layout:
        dim = self.dims[axis]
        if len(dim) > 1 and length != _size(dim):
            raise NotALayout
        stride = dim[0][1] if dim else 0
        new = dim if len(dim) > 1 else _tidy(((length, stride * step),))
        return Layout((*self.dims[:axis], new, *self.dims[axis + 1 :]), self.offset + start * stride)

    def drop(self, axis: int) -> Layout:
        return Layout((*self.dims[:axis], *self.dims[axis + 1 :]), self.offset)

    def distinct(self) -> int:
        """How many elements are reached, if none is reached in two ways other than by repetition."""
        return prod(size for dim in self.dims for size, stride in dim if stride)

    def through(self, inner: Layout) -> Layout:
        """The layout over `inner`'s base, where this one is over a contiguous tensor that `inner` describes."""
        steps = Steps.of(inner)
        extents: dict[int, int] = {}
        dims = tuple(_tidy(steps.translate(dim, extents)) for dim in self.dims)
        return Layout(dims, steps.at(self.offset, extents) + inner.offset)


# The layers of a model ask the same questions again and again.
@lru_cache(4096)
def _contiguous(shape: tuple[int, ...]) -> Layout:
    dims, stride = [], 1
    for size in reversed(shape):
        dims.append(_tidy(((size, stride),)))
        stride *= size
    return Layout(tuple(reversed(dims)))


@lru_cache(4096)
def _reshaped(layout: Layout, shape: tuple[int, ...]) -> Layout:
    pending = [factor for dim in layout.dims for factor in dim][::-1]
    dims: list[Dim] = []
    for size in shape:
        dim: list[Factor] = []
        while size > 1:
            if not pending:
                raise NotALayout
            have, stride = pending.pop()
            if not have:
                raise NotALayout
            if size % have == 0:
                dim.append((have, stride))
                size //= have
            elif have % size == 0:
                dim.append((size, stride * (have // size)))
                pending.append((have // size, stride))
                size = 1
            else:
                raise NotALayout
        if size == 0:
            raise NotALayout
        dims.append(_tidy(tuple(dim)))
    if pending:
        raise NotALayout
    return Layout(tuple(dims), layout.offset)


@lru_cache(4096)
def _expanded(layout: Layout, shape: tuple[int, ...]) -> Layout:
    missing = len(shape) - len(layout.dims)
    dims: list[Dim] = [_tidy(((size, 0),)) for size in shape[:missing]]
    for dim, size in zip(layout.dims, shape[missing:], strict=True):
        if _size(dim) == size:
            dims.append(dim)
        elif _size(dim) == 1:
            dims.append(_tidy(((size, 0),)))
        else:
            raise NotALayout
    return Layout(tuple(dims), layout.offset)


class Steps:
    """Rows of (size, own stride, other stride): how steps through one tensor are steps through another."""

    def __init__(self, rows: Sequence[tuple[int, int, int]]) -> None:
        self.rows = sorted(rows, key=lambda row: -row[1])

    @staticmethod
    def of(inner: Layout) -> Steps:
        """From contiguous offsets of a tensor with this layout to offsets in its base."""
        rows = refine(Layout.contiguous(inner.shape), inner)
        return Steps([(size, own, other) for _, size, (own, other) in rows])

    def translate(self, dim: Dim, extents: dict[int, int] | None = None) -> Dim:
        """Factors through the own tensor as factors through the other; `extents` collects how far each row is run."""
        found: list[Factor] = []
        for size, stride in dim:
            parts: list[Factor] = []
            while size > 1 and stride:
                at = next((i for i, row in enumerate(self.rows) if row[1] <= stride), None)
                if at is None or stride % self.rows[at][1]:
                    raise NotALayout
                count, own, other = self.rows[at]
                step, room = stride // own, count * own // stride
                taken = min(size, -(-count * own // stride))
                if taken < 2:
                    raise NotALayout
                if taken < size and (count * own % stride or size % room):
                    raise NotALayout
                parts.append((taken, step * other))
                if extents is not None:
                    extents[at] = extents.get(at, 0) + (taken - 1) * step
                size, stride = size // taken, stride * taken
            if size > 1:
                parts.append((size, 0))
            found += parts[::-1]
        return tuple(found)

    def at(self, offset: int, extents: dict[int, int]) -> int:
        """Where an own offset lies in the other tensor; not for steps that would carry from one row into another."""
        total = 0
        for i, (count, own, other) in enumerate(self.rows):
            digit, offset = divmod(offset, own)
            if digit + extents.get(i, 0) >= max(count, 1):
                raise NotALayout
            total += digit * other
        if offset:
            raise NotALayout
        return total


def tiles(factors: Sequence[Factor], count: int) -> bool:
    """Whether the factors together step through the offsets 0 ... count - 1, each once."""
    expected = 1
    for size, stride in sorted((f for f in factors if f[0] > 1), key=lambda factor: factor[1]):
        if stride != expected:
            return False
        expected *= size
    return expected == count


def tidy(dim: Sequence[Factor]) -> Dim:
    """Without factors of size 1, and with neighbours that make one even step joined."""
    return _tidy(tuple(dim))


@lru_cache(4096)
def refine(*layouts: Layout) -> tuple[Row, ...]:
    """Common factors of layouts of one shape: (dimension, size, stride in each), major to minor."""
    rows: list[Row] = []
    for d, dims in enumerate(zip(*(layout.dims for layout in layouts), strict=True)):
        if len({_size(dim) for dim in dims}) != 1 or _size(dims[0]) == 0:
            raise NotALayout
        pending = [list(dim) for dim in dims]
        found: list[Row] = []
        while any(pending):
            size = min(p[-1][0] for p in pending)
            strides = []
            for p in pending:
                have, stride = p.pop()
                if have % size:
                    raise NotALayout
                strides.append(stride)
                if have != size:
                    p.append((have // size, stride * size))
            found.append((d, size, tuple(strides)))
        rows.extend(found[::-1])
    return tuple(rows)


def merged(rows: Sequence[Row]) -> list[Row]:
    """Neighbouring rows of one dimension joined where every layout steps through them evenly."""
    out: list[Row] = []
    for d, size, strides in rows:
        if out and out[-1][0] == d and all(a == size * b for a, b in zip(out[-1][2], strides, strict=True)):
            out[-1] = (d, out[-1][1] * size, strides)
        else:
            out.append((d, size, strides))
    return out


Follow = Callable[[Op, Value], Value | None]


def same_elements(op: Op, value: Value) -> Value | None:
    """Follow views and float casts that keep every element once.

    Not past `expand`: streams that start as copies of one embedding are a tensor of their own.
    """
    source = next(op.inputs()) if is_movement(op) else None
    return source if source is not None and source.numel == value.numel else None


def any_view(op: Op, value: Value) -> Value | None:
    """Follow slices and broadcasts too, as far as views and float casts go."""
    return next(op.inputs()) if is_movement(op) else None


def broadcasts(op: Op, value: Value) -> Value | None:
    """Follow views that may repeat elements but leave none out."""
    return next(op.inputs()) if is_movement(op) and op.name not in _PARTS else None


def origin(value: Value, follow: Follow = same_elements) -> tuple[Value, Layout]:
    """The value that `value` is a view of, as far back as `follow` goes, and which view."""
    base, steps = walk(value, follow)
    return base, steps[-1][1] if steps else Layout.contiguous(base.shape)


def walk(value: Value, follow: Follow) -> tuple[Value, list[tuple[Value, Layout]]]:
    """As `origin`, with every value on the way from the base and its layout over the base."""
    chain: list[tuple[Op, Value]] = []
    while value.op is not None and (source := follow(value.op, value)) is not None:
        chain.append((value.op, value))
        value = source
    base, layout = value, Layout.contiguous(value.shape)
    steps: list[tuple[Value, Layout]] = []
    for op, out in reversed(chain):
        try:
            layout = move(op, out, layout) if is_movement(op) else layout.expand(out.shape)
        except NotALayout:
            base, layout, steps = out, Layout.contiguous(out.shape), []
        else:
            steps.append((out, layout))
    return base, steps


def is_pointwise(op: Op) -> bool:
    """Whether each element of the result is computed from the elements at its place alone, broadcast or not."""
    return torch.Tag.pointwise in getattr(op.target, "tags", ())


def is_movement(op: Op) -> bool:
    """Whether the operator only views or copies its input, a cast between float types included."""
    if not (op.args and isinstance(op.args[0], Value)):
        return False
    if op.name in _REDUCTIONS:
        return op.out.numel == op.args[0].numel > 0 and _is_float_cast(op)
    return op.name in _MOVEMENTS and (op.name != "_to_copy" or _is_float_cast(op))


def keeps_order(op: Op) -> bool:
    """Whether the operator only reshapes or copies: all elements come out, in the order in which they went in."""
    source = next(op.inputs(), None)
    if not is_movement(op) or source is None or source.numel != op.out.numel:
        return False
    try:
        return move(op, op.out, Layout.contiguous(source.shape)).is_identity()
    except NotALayout:
        return False


def is_shown(value: Value) -> bool:
    """Whether the program has a value, or a view of it with its elements in order; not what lives inside one node."""
    return bool(value.nodes) or any(keeps_order(op) and is_shown(op.out) for op in value.users)


def seen(value: Value) -> Value:
    """A value as the program has it: after the movements within the node that makes it."""
    while not value.nodes and len(value.users) == 1 and is_movement(value.users[0]) and len(value.users[0].outs) == 1:
        value = value.users[0].out
    return value


def _is_float_cast(op: Op) -> bool:
    """Whether floating point numbers stay such, on the device where they are."""
    values = [*op.inputs(), op.out]
    return all(v.dtype in _FLOATS for v in values) and len({v.meta.device for v in values}) == 1


def move(op: Op, out: Value, layout: Layout) -> Layout:
    """The layout of `out`, which the movement `op` makes from a value of this layout."""
    name, rank = op.name, len(layout.dims)
    if name in _COPIES:
        return layout
    if name in _RESHAPES or name in _REDUCTIONS:
        return layout.reshape(out.shape)
    if name == "expand":
        return layout.expand(out.shape)
    if name == "permute":
        return layout.permute([d % rank for d in op.args[1]])
    if name in ("t", "transpose"):
        if rank < 2:
            return layout
        a, b = (0, rank - 1) if name == "t" else (op.args[1] % rank, op.args[2] % rank)
        order = list(range(rank))
        order[a], order[b] = order[b], order[a]
        return layout.permute(order)
    return _part(op, out, layout)


def axes_of(dims: Any, rank: int) -> list[int]:
    """The axes, counted from the front, of a reduction over `dims`. A number has none, and takes 0 or -1 for one."""
    if dims is None or dims == [] or not rank:
        return list(range(rank))
    return [d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])]


def _part(op: Op, out: Value, layout: Layout) -> Layout:
    part = part_of(op, out)
    found = layout.select(part.axis, part.start, part.length, part.step)
    return found.drop(part.axis) if part.drops else found


class Part(NamedTuple):
    """Which elements along an axis a slice keeps, and whether the axis is gone then."""

    axis: int
    start: int
    length: int
    step: int = 1
    drops: bool = False


def part_of(op: Op, out: Value) -> Part:
    """What `out`, a result of `op`, keeps of what `op` reads, where that is a slice; raises NotALayout otherwise."""
    if op.name not in _PARTS:
        raise NotALayout
    source = next(op.inputs())
    axis_at = 2 if op.name in ("split", "split_with_sizes") else 1
    axis = op.arg(axis_at, "dim", 0) % len(source.shape)
    if op.name == "unbind":
        return Part(axis, op.outs.index(out), 1, drops=True)
    if op.name == "select":
        index = op.args[2]
        if not isinstance(index, int):
            raise NotALayout
        return Part(axis, index % source.shape[axis], 1, drops=True)
    if op.name in ("split", "split_with_sizes"):
        return Part(axis, sum(v.shape[axis] for v in op.outs[: op.outs.index(out)]), out.shape[axis])
    start, step = op.arg(2, "start", 0) or 0, op.arg(4, "step", 1)
    if not (isinstance(start, int) and isinstance(step, int)):
        raise NotALayout
    start = max(0, start + source.shape[axis]) if start < 0 else min(start, source.shape[axis])
    return Part(axis, start, out.shape[axis], step)


def _size(dim: Dim) -> int:
    return dim[0][0] if len(dim) == 1 else prod(size for size, _ in dim)


def _tidy(dim: Dim) -> Dim:
    out: list[Factor] = []
    for size, stride in dim:
        if size == 1:
            continue
        if out and out[-1][1] == size * stride:
            out[-1] = (out[-1][0] * size, stride)
        else:
            out.append((size, stride))
    return tuple(out)
