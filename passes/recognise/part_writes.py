"""Writes to some of the streams: what a sublayer makes is added to one stream, say, and the others stay as they are.

    new = cat([(y[..., 0, :] + f).unsqueeze(-2), y[..., 1:, :]], -2)        y are the streams, mixed or as they are

No operator does this without a post gate. It is recognised so that a report can name it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mhc_compile.passes.recognise.aggregate import Aggregate
from mhc_compile.passes.recognise.concatenation import TOGETHER, put_together
from mhc_compile.passes.recognise.layout import any_view, is_movement, origin, seen
from mhc_compile.passes.recognise.mixing import Mixing, mixings
from mhc_compile.passes.recognise.reader import Reader
from mhc_compile.passes.recognise.streams import Connections
from mhc_compile.passes.shadow import Op, Value


@dataclass(frozen=True)
class PartWrite:
    """f is added to some of the streams; it depends on `read`. `mixing` mixes the streams before that or after it.

    to_all: the other streams follow, one after the other.
    """

    op: Op
    streams: Value
    mixing: Mixing | None
    read: Aggregate
    to_all: bool


def part_writes(
    ops: Sequence[Op], reader: Reader, connections: Connections, reads: Sequence[Aggregate]
) -> Iterator[PartWrite]:
    """The writes to some of the streams in a record."""
    if not reads:
        return
    for op in ops:
        if op.name in TOGETHER and op.outs:
            for base, f in _added(op):
                if f.numel < base.numel == op.out.numel:
                    found = _connected(op, base, f, reader, connections, reads)
                    if found is not None:
                        yield found
                        break


def _connected(
    op: Op, base: Value, f: Value, reader: Reader, connections: Connections, reads: Sequence[Aggregate]
) -> PartWrite | None:
    """The write, if what it adds depends on a read of the streams."""
    near = [read for read in reads if read.x.numel == base.numel and f.numel * read.streams.n == base.numel]
    for mixing in [None, *(mixings(reader, base) if near else ())]:
        streams = base if mixing is None else mixing.x
        for read in near:
            same = origin(read.x, any_view)[0] is origin(streams, any_view)[0]
            if same and read.out in connections.between(read.x, f):
                return PartWrite(op, streams, mixing or _mixed_later(op.out, reader), read, _goes_on(op))
    return None


def _goes_on(op: Op) -> bool:
    """Whether an assignment to some of the streams is one of several that together are to all of them."""
    following: Op | None = op
    while following is not None:
        op = following
        following = next((user for user in op.out.users if user.name == op.name and user.args[0] is op.out), None)
    return op.name not in ("cat", "stack") and put_together(op) is not None


def _mixed_later(value: Value, reader: Reader) -> Mixing | None:
    """The mixing of the streams in a value, if there is one."""
    pending = {value: None}
    for made in (ordered := [value]):
        for user in made.users:
            out = seen(user.out) if user.outs else made
            found = next((mixing for mixing in mixings(reader, out) if mixing.x is value), None)
            if found is not None:
                return found
            if out not in pending and (is_movement(user) or user.name == "mul"):
                pending[out] = None
                ordered.append(out)
    return None


def _added(op: Op) -> Iterator[tuple[Value, Value]]:
    """What may be the streams and what is added to some of them, where the pieces of a tensor are such sums."""
    whole = put_together(op)
    pieces = whole.pieces if whole is not None else tuple(op.args[:2]) if op.name not in ("cat", "stack") else ()
    plain = {origin(piece, any_view)[0] for piece in pieces}
    for piece in pieces:
        while piece.op is not None and is_movement(piece.op):
            piece = next(piece.op.inputs())
        if piece.op is not None and piece.op.name == "add" and not piece.op.kwargs:
            left, right = piece.op.args[:2]
            if isinstance(left, Value) and isinstance(right, Value):
                for own, f in ((left, right), (right, left)):
                    if origin(own, any_view)[0] in plain:
                        yield origin(own, any_view)[0], f
