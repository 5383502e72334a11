"""Reads whose result comes back to the streams in a way that no reading of a write knows."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from mhc_compile.passes.called import calls_ours
from mhc_compile.passes.plan.sites import AggregateSite, CombineSite, Declined, MixSite, Site
from mhc_compile.passes.recognise import Findings
from mhc_compile.passes.recognise.aggregate import Aggregate, Reading
from mhc_compile.passes.recognise.contraction import StreamsView, contractions
from mhc_compile.passes.recognise.layout import any_view, is_movement, origin, seen
from mhc_compile.passes.recognise.mixing import Mixing, mixings
from mhc_compile.passes.recognise.reader import Reader
from mhc_compile.passes.recognise.streams import behind
from mhc_compile.passes.shadow import Op, Shadow, Value

# What sums products over streams.
_PRODUCTS = {"mm", "bmm", "sum"}
_REASON = (
    "this puts a sublayer's output together with the streams that the sublayer read, but not as h_post f + h_res x "
    "in one sum"
)


@dataclass
class ComesBack:
    """Streams that are known only because what reads them comes back to them.

    read is a weighted sum, or of rows that one of the mixings makes. mixings are of the same streams.
    """

    read: Aggregate | Reading
    mixings: list[Mixing]


def come_back(shadow: Shadow, findings: Findings, claimed: Container[Value]) -> Iterator[ComesBack]:
    """The reads outside `claimed` whose results meet the streams again, where more than this shows what streams are.

    A projection of all channels makes the gates, or a matrix mixes the same streams. And what comes back has a gate for
    each stream: what comes back to all of them alike may as well be pooling, or the readout of a graph.
    """
    projected = _Projected(findings)
    mixed: dict[Value, list[tuple[StreamsView, Mixing]]] = {}
    for op in shadow.ops:
        if op.name in _PRODUCTS and op.outs:
            for m in mixings(findings.reader, seen(op.out)):
                if m.streams is not None and m.out not in claimed:
                    mixed.setdefault(m.x, []).append((m.streams, m))
    written = {origin(m.out, any_view)[0] for m in findings.mixings}
    meetings = Meetings(shadow, findings)
    for read in findings.aggregates:
        same = [m for streams, m in mixed.get(read.x, ()) if streams == read.streams and m.sizes[1] >= m.sizes[0]]
        shown = read.out not in claimed and (same or projected.makes(read.gate, read.x, read.streams))
        if shown and meetings.with_gates(read):
            row = any(origin(read.out, any_view)[0] is origin(m.out, any_view)[0] for m in same)
            yield ComesBack(Reading(read.out, read.x, read.streams) if row else read, same)
    for streams, m in (one for ones in mixed.values() for one in ones):
        rows = Reading(m.out, m.x, streams)
        fewer = m.sizes[1] < m.sizes[0] and origin(m.out, any_view)[0] not in written
        if fewer and projected.makes(m.gate, m.x, streams) and meetings.with_gates(rows):
            yield ComesBack(rows, [m])


class _Projected:
    """Which gates are made, in whatever way, from a projection of all channels of their streams."""

    def __init__(self, findings: Findings) -> None:
        self._of: dict[tuple[Value, object, int], set[Value]] = {}
        for out, readings in findings.readings.items():
            for r in readings:
                self._of.setdefault((r.x, r.tokens_at, r.width), set()).add(out)

    def makes(self, gate: Value, x: Value, streams: StreamsView) -> bool:
        own = self._of.get((x, streams.tokens, streams.n * streams.channels))
        return own is not None and bool(behind([gate], own, {x}))


def unwritten(
    shadow: Shadow,
    findings: Findings,
    sites: list[Site],
    refused: Sequence[fx.Node | None],
    evident: set[Value],
    rows: list[Reading],
) -> Iterator[Declined]:
    """The places where the sublayer's output first meets the streams again, where nothing else was said of a write.

    refused: where something else is said of a write. evident: reads by which writes were known. rows: reads of several
    rows, which `sites` read.
    """
    reads: list[Aggregate | Reading] = [*_reads(sites), *rows]
    left = [read for read in reads if read.out not in evident]
    if not left:
        return
    places = {shadow.position[node] for node in refused if node in shadow.position}
    rewritten = {site.combine.op.node for site in sites if isinstance(site, CombineSite)}
    told: set[Op] = set()
    meetings = Meetings(shadow, findings)
    for read in left:
        met = meetings.of(read)
        if met is None or met.op in told or met.op.node in rewritten:
            continue
        first = shadow.position[read.x.op.node] if read.x.op is not None else -1
        if not any(first < position <= shadow.position[met.makes.node] for position in places):
            told.add(met.op)
            yield Declined("expand_combine", _REASON, met.op.node)


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
        self._reader = findings.reader
        self._place = {op: i for i, op in enumerate(shadow.ops)}
        self._streams = {read.x for read in findings.aggregates}
        self._streams |= {projected[0].x for projected in findings.readings.values()}

    def of(self, read: Aggregate | Reading) -> Meeting | None:
        """The first operator that reads the streams with what is made of the read, if new streams come of that."""
        start = self._place[read.x.op] + 1 if read.x.op is not None else 0
        return _first_meeting(self._ops[start:], read, self._streams, self._reader)

    def with_gates(self, read: Aggregate | Reading) -> bool:
        found = self.of(read)
        return found is not None and found.gated


def _reads(sites: list[Site]) -> Iterator[Aggregate]:
    for site in sites:
        if isinstance(site, (AggregateSite, MixSite)) and site.aggregate is not None:
            yield site.aggregate


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
                gated = gated or _is_gated(reader, out, made, read)
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


def _each(op: Op, read: Aggregate | Reading, one_by_one: set[Value]) -> Iterator[Value]:
    """Which results of an operator are one of the streams, as it is or element by element something else."""
    same = is_movement(op) and any(source is read.x or source in one_by_one for source in op.sources)
    if same or (_is_pointwise(op) and not one_by_one.isdisjoint(op.sources)):
        yield from (out for out in op.outs if out.numel * read.streams.n == read.x.numel)


def _is_reduced(value: Value, n: int) -> bool:
    """Whether a sum or mean takes n numbers at a time, as that of the streams at the end of a model does."""
    views = (op.out for op in value.users if is_movement(op) and op.outs and op.out.numel == value.numel)
    reduced = any(op.name in ("sum", "mean") and op.out.numel * n == value.numel for op in value.users)
    return reduced or any(_is_reduced(view, n) for view in views)


def _is_pointwise(op: Op) -> bool:
    return torch.Tag.pointwise in getattr(op.target, "tags", ())


def _is_scaled(op: Op, made: set[Value]) -> bool:
    """Whether an operator only scales something larger by what was made."""
    if not _is_pointwise(op):
        return False
    largest = max(source.numel for source in op.sources if source in made)
    return any(source.numel > largest for source in op.sources if source not in made)
