"""Reads whose result comes back to the streams in a way that no reading of a write knows."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from mhc_compile.passes.plan.meetings import Meetings
from mhc_compile.passes.plan.sites import AggregateSite, CombineSite, Declined, MixSite, Site
from mhc_compile.passes.recognise import Findings
from mhc_compile.passes.recognise.aggregate import Aggregate, Reading
from mhc_compile.passes.recognise.combine import ADDED, Combine, combines
from mhc_compile.passes.recognise.contraction import StreamsView
from mhc_compile.passes.recognise.layout import any_view, origin, seen
from mhc_compile.passes.recognise.misses import Miss
from mhc_compile.passes.recognise.mixing import PRODUCTS, Mixing, mixings
from mhc_compile.passes.recognise.reader import Reader, may_hold_products
from mhc_compile.passes.shadow import Op, Shadow, Value

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


def come_back(shadow: Shadow, findings: Findings, meetings: Meetings, claimed: Container[Value]) -> Iterator[ComesBack]:
    """The reads outside `claimed` whose results meet the streams again, where more than this shows what streams are.

    A projection of all channels makes the gates, or a matrix mixes the same streams. And what comes back has a gate for
    each stream: what comes back to all of them alike may as well be pooling, or the readout of a graph.
    """
    projected = findings.connections.projected
    mixed: dict[Value, list[tuple[StreamsView, Mixing]]] = {}
    for op in shadow.ops:
        if op.name in PRODUCTS and op.outs and may_hold_products(op, findings.reader):
            for m in mixings(findings.reader, seen(op.out)):
                if m.streams is not None and m.out not in claimed:
                    mixed.setdefault(m.x, []).append((m.streams, m))
    written = {origin(m.out, any_view)[0] for m in findings.mixings}
    for read in findings.aggregates:
        same = [m for streams, m in mixed.get(read.x, ()) if streams == read.streams and m.sizes[1] >= m.sizes[0]]
        if read.rows:  # layers for graphs, and attention, also pool what a matrix mixes
            same = [m for m in same if m.gate is not read.gate]  # that is the read itself
            shown = any(projected.may_make(gate, read.x, read.streams) for gate in (read.gate, *(m.gate for m in same)))
        else:
            shown = bool(same) or projected.makes(read.gate, read.x, read.streams)
        if shown and read.out not in claimed and meetings.with_gates(read):
            row = any(origin(read.out, any_view)[0] is origin(m.out, any_view)[0] for m in same)
            yield ComesBack(Reading(read.out, read.x, read.streams) if row else read, same)
    for streams, m in (one for ones in mixed.values() for one in ones):
        rows = Reading(m.out, m.x, streams)
        fewer = m.sizes[1] < m.sizes[0] and origin(m.out, any_view)[0] not in written
        if fewer and projected.makes(m.gate, m.x, streams) and meetings.with_gates(rows):
            yield ComesBack(rows, [m])


def unwritten(
    shadow: Shadow,
    meetings: Meetings,
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
    for read in left:
        met = meetings.of(read)
        if met is None or met.op in told or met.op.node in rewritten:
            continue
        first = shadow.position[read.x.op.node] if read.x.op is not None else -1
        if not any(first < position <= shadow.position[met.makes.node] for position in places):
            told.add(met.op)
            yield Declined("expand_combine", _why(met.op, read, meetings.reader), met.op.node)


def _why(op: Op, read: Aggregate | Reading, reader: Reader) -> str:
    """What stopped the reading of a sum as a write: that of the streams mixed, and something else added."""
    here, there = op.out.meta.device, read.x.meta.device
    if here != there:
        return f"this is computed on {here}, but the streams that the sublayer read are on {there}"
    found = list(combines(reader, op.out)) if op.out.numel == read.x.numel else []
    written = [origin(one.outer.f)[0] for one in found if isinstance(one, Combine)]
    if written:  # which is not enough
        back = origin(read.out)[0] in written
        return "this writes back what was read, without a sublayer in between" if back else _REASON
    stopped = [one for one in found if isinstance(one, Miss) and one.depth == ADDED]
    return f"this {stopped[0].reason}" if stopped else _REASON


def _reads(sites: list[Site]) -> Iterator[Aggregate]:
    for site in sites:
        if isinstance(site, (AggregateSite, MixSite)) and site.aggregate is not None:
            yield site.aggregate
