"""Where a sublayer's output meets the streams again that the sublayer read, however that is written."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from math import prod

from mhc_compile.passes.called import calls_ours
from mhc_compile.passes.recognise import Findings
from mhc_compile.passes.recognise.aggregate import Aggregate, Reading
from mhc_compile.passes.recognise.contraction import contractions
from mhc_compile.passes.recognise.layout import is_movement, is_pointwise
from mhc_compile.passes.recognise.mixing import mixings
from mhc_compile.passes.recognise.reader import Reader
from mhc_compile.passes.shadow import Op, Shadow, Value


@dataclass(frozen=True)
class Meeting:
    """Where a sublayer's output meets the streams, what makes new streams of it, and whether each has a gate."""

    op: Op
    makes: Op
    gated: bool


class Meetings:
    """Where a sublayer's output meets the streams again, however it is written."""

    def __init__(self, shadow: Shadow, findings: Findings) -> None:
        self._ops = shadow.ops
        self.reader = findings.reader
        self._place = {op: i for i, op in enumerate(shadow.ops)}
        self._streams = {read.x for read in findings.aggregates}
        self._streams |= {projected[0].x for projected in findings.readings.values()}

    def of(self, read: Aggregate | Reading) -> Meeting | None:
        """The first operator that reads the streams with what is made of the read, if new streams come of that."""
        start = self._place[read.x.op] + 1 if read.x.op is not None else 0
        return _first_meeting(self._ops[start:], read, self._streams, self.reader)

    def with_gates(self, read: Aggregate | Reading) -> bool:
        found = self.of(read)
        return found is not None and found.gated


def _first_meeting(ops: Iterable[Op], read: Aggregate | Reading, streams: set[Value], reader: Reader) -> Meeting | None:
    """The first operator that reads the streams together with what is made of the read, if new streams come of that.

    ops are those after the streams. None also if the program calls an operator of ours there, or something that is not
    looked into. What is made of the read counts while it has all channels: a gate that is computed from it, or a loss,
    is no sublayer's output. The streams may also meet it one by one.
    """
    x, channels = read.x, read.streams.channels
    old: set[Value] = {x}
    one_by_one: set[Value] = set()
    made: set[Value] = {read.out}
    new: dict[Value, Op] = {}
    gated = False
    for op in ops:
        if not op.outs or read.out in op.outs:
            continue
        met = next((new[source] for source in op.sources if source in new), None)
        with_streams = any(source in old and source.numel == x.numel for source in op.sources)
        with_streams |= not is_movement(op) and not one_by_one.isdisjoint(op.sources)
        if with_streams and any(source in made and channels in source.shape for source in op.sources):
            met = met or op
        if met is not None:
            if op.target is None or calls_ours(op.node):
                return None
            for out in op.outs:
                new[out] = met
                gated = gated or _is_gated(reader, out, made, read) or _is_gated_after(reader, out, new, read)
                again = out in streams or (out.shape == x.shape and _is_reduced(out, read.streams.n))
                if out.numel == x.numel and (out.is_output or again):
                    return Meeting(met, op, gated)
        elif not with_streams and not made.isdisjoint(op.sources) and not _is_scaled(op, made):
            gated = gated or any(_is_gated(reader, out, made, read) for out in op.outs)
            made.update(out for out in op.outs if out.dtype.is_floating_point)
        elif not old.isdisjoint(op.sources):
            old.update(op.outs)
            one_by_one.update(_each(op, read, one_by_one))
    return None


def _is_gated(reader: Reader, out: Value, made: set[Value], read: Aggregate | Reading) -> bool:
    """Whether a value has a product of what was made and of a gate that differs from stream to stream."""
    x, n = read.x, read.streams.n
    if out.numel != x.numel:
        return False
    for term in reader.terms(out):
        for c in contractions(term, out, parts=True) if len(term.factors) == 2 and not term.summed else ():
            spread = prod(a.size for a in c.axes if a.left and not a.right)
            if c.right in made and spread == n and c.left.numel < x.numel:
                return True
    return any(m.sizes[1] == n and m.x in made for m in mixings(reader, out))


def _is_gated_after(reader: Reader, out: Value, new: Container[Value], read: Aggregate | Reading) -> bool:
    """Whether a value has a product of what has met the streams, such as f - x, and of a gate for each stream."""
    n, apart = read.streams.stream
    for term in reader.terms(out):
        for c in contractions(term, out, parts=True) if len(term.factors) == 2 and not term.summed else ():
            of_streams = any(a.left and a.right == apart and a.size % n == 0 for a in c.axes)
            of_channels = any(a.left and s <= a.right < s * size for a in c.axes for size, s in read.streams.channel)
            if c.right in new and c.right.shape == read.x.shape and of_streams and not of_channels:
                return True
    return False


def _each(op: Op, read: Aggregate | Reading, one_by_one: set[Value]) -> Iterator[Value]:
    """Which results of an operator are one of the streams, as it is or element by element something else."""
    same = is_movement(op) and any(source is read.x or source in one_by_one for source in op.sources)
    if same or (is_pointwise(op) and not one_by_one.isdisjoint(op.sources)):
        yield from (out for out in op.outs if out.numel * read.streams.n == read.x.numel)


def _is_reduced(value: Value, n: int) -> bool:
    """Whether a sum or mean takes n numbers at a time, as that of the streams at the end of a model does."""
    views = (op.out for op in value.users if is_movement(op) and op.outs and op.out.numel == value.numel)
    reduced = any(op.name in ("sum", "mean") and op.out.numel * n == value.numel for op in value.users)
    return reduced or any(_is_reduced(view, n) for view in views)


def _is_scaled(op: Op, made: set[Value]) -> bool:
    """Whether an operator only scales something larger by what was made."""
    if not is_pointwise(op):
        return False
    largest = max(source.numel for source in op.sources if source in made)
    return any(source.numel > largest for source in op.sources if source not in made)
