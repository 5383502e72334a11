"""The rows of a projection's logits that the rewritten program reads.

Gates of one product can be of two kinds: an operator makes some of them from the streams itself, and the program makes
the others from the logits. The former read none of the logits any more, so their rows need not be projected.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from mhc_compile import compat

# Calls whose results have in each element what the first argument has there, and other numbers.
_POINTWISE = {"add", "sub", "mul", "div", "truediv", "to", "float", "double", "half", "bfloat16", "type"}
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "contiguous", "clone"}
_PARTS = {"split", "split_with_sizes", "chunk", "tensor_split"}


def rows_read(logits: fx.Node) -> range:
    """The rows from the first to the last that is read of a node [*, rows], as far as that is seen."""
    count = compat.example(logits).shape[-1]
    read = [row for part in _read(logits, range(count)) for row in (part.start, part.stop)]
    return range(min(read, default=0), max(read, default=0))


def _read(node: fx.Node, rows: range) -> Iterator[range]:
    """Of a node whose last dimension has these rows: those that are read, in parts."""
    shape = compat.example(node).shape
    for user in node.users:
        name = getattr(user.target, "__name__", user.target)
        if not compat.is_plain_call(user) or compat.called_operator(user) or "out" in user.kwargs:
            yield rows
        elif name in _PARTS:
            yield from _read_parts(user, rows)
        elif (name in _POINTWISE and _ends_with(user, shape)) or (name in _RESHAPES and _ends_with(user, shape[-1:])):
            yield from _read(user, rows)
        else:
            part = _part(user, rows, len(shape))
            yield from (rows,) if part is None else _read(user, part)


def _read_parts(parts: fx.Node, rows: range) -> Iterator[range]:
    """As `_read`, of a node that is taken apart, if that is along its last dimension."""
    taken = [user for user in parts.users if user.target is operator.getitem and isinstance(user.args[1], int)]
    sizes = [example.shape[-1] for example in compat.example(parts)]
    # Along another dimension, each part would have all rows.
    if len(taken) < len(parts.users) or sum(sizes) != len(rows):
        yield rows
        return
    starts = [0, *accumulate(sizes)]
    for user in taken:
        at = range(len(sizes))[user.args[1]]  # type: ignore[index]
        yield from _read(user, rows[starts[at] : starts[at + 1]])


def _part(user: fx.Node, rows: range, rank: int) -> range | None:
    """The rows that a slice of the last dimension takes; None for any other node."""
    given: Any = user.args[1:]
    if user.target in ("narrow", torch.narrow) and len(given) == 3 and all(isinstance(a, int) for a in given):
        at, start, length = given
        return rows[start : start + length] if at in (-1, rank - 1) and start >= 0 else None
    if user.target is not operator.getitem:
        return None
    index = given[0] if isinstance(given[0], tuple) else given
    *others, last = index
    to_the_end = len(index) == rank or Ellipsis in others
    if not to_the_end or not all(each in (Ellipsis, slice(None)) for each in others):
        return None
    if not isinstance(last, slice) or not all(isinstance(a, int | None) for a in (last.start, last.stop, last.step)):
        return None
    return rows[last] if last.step in (None, 1) else None


def _ends_with(node: fx.Node, shape: Sequence[Any]) -> bool:
    """Whether these are the last sizes of a node's result."""
    have = getattr(compat.example(node), "shape", ())[-len(shape) :]
    return len(have) == len(shape) and all(map(compat.same_size, have, shape))
