"""Reads whose result comes back to the streams in a way that no reading of a write knows."""

from __future__ import annotations

from collections.abc import Iterator

from mhc_compile.passes.plan.sites import AggregateSite, CombineSite, Declined, MixSite, Site
from mhc_compile.passes.recognise import Findings
from mhc_compile.passes.recognise.aggregate import Aggregate
from mhc_compile.passes.shadow import Op, Shadow, Value

_REASON = (
    "this puts a sublayer's output together with the streams that the sublayer read, but not as h_post f + h_res x "
    "in one sum"
)


def unwritten(shadow: Shadow, findings: Findings, sites: list[Site], declined: list[Declined]) -> Iterator[Declined]:
    """The places where the sublayer's output first meets the streams again, where nothing else was said of a write."""
    written = {
        read.out
        for site in sites
        if isinstance(site, CombineSite)
        for read in findings.connections.reads_before(site.combine)
    }
    refused = {shadow.position[entry.node] for entry in declined if entry.node in shadow.position}
    told: set[Op] = set()
    for read in _reads(sites):
        if read.out in written:
            continue
        met = _first_meeting(shadow, read)
        if met is None or met in told:
            continue
        first, last = shadow.position[read.op.node], shadow.position[met.node]
        if any(first < position <= last for position in refused):
            continue
        told.add(met)
        yield Declined("expand_combine", _REASON, met.node)


def _reads(sites: list[Site]) -> Iterator[Aggregate]:
    for site in sites:
        if isinstance(site, (AggregateSite, MixSite)) and site.aggregate is not None:
            yield site.aggregate


def _first_meeting(shadow: Shadow, read: Aggregate) -> Op | None:
    """The first operator that reads the streams, or others made of them, together with what is made of the read.

    None if there is none, or if the program calls an operator of ours there, or something that is not looked into.
    """
    streams: set[Value] = {read.x}
    made: set[Value] = {read.out}
    for op in shadow.ops:
        if not op.outs or read.out in op.outs:
            continue
        if not made.isdisjoint(op.sources):
            if any(source in streams and source.numel == read.x.numel for source in op.sources):
                return op if op.target is not None and getattr(op.target, "namespace", "") != "mhc" else None
            made.update(op.outs)
        elif not streams.isdisjoint(op.sources):
            streams.update(op.outs)
    return None
