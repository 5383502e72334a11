"""Reads whose result comes back to the streams in a way that no reading of a write knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from mhc_compile.passes.called import calls_ours
from mhc_compile.passes.plan.sites import AggregateSite, CombineSite, Declined, MixSite, Site
from mhc_compile.passes.recognise import Findings
from mhc_compile.passes.recognise.aggregate import Aggregate
from mhc_compile.passes.shadow import Op, Shadow, Value

_REASON = (
    "this puts a sublayer's output together with the streams that the sublayer read, but not as h_post f + h_res x "
    "in one sum"
)


def unwritten(
    shadow: Shadow, findings: Findings, sites: list[Site], declined: list[Declined], evident: set[Value]
) -> Iterator[Declined]:
    """The places where the sublayer's output first meets the streams again, where nothing else was said of a write.

    evident: reads by which writes were known to be those of streams.
    """
    left = [read for read in _reads(sites) if read.out not in evident]
    if not left:
        return
    place = {op: i for i, op in enumerate(shadow.ops)}
    streams = {read.x for read in findings.aggregates} | {projected[0].x for projected in findings.readings.values()}
    refused = {shadow.position[entry.node] for entry in declined if entry.node in shadow.position}
    rewritten = {site.combine.op.node for site in sites if isinstance(site, CombineSite)}
    told: set[Op] = set()
    for read in left:
        start = place[read.x.op] + 1 if read.x.op is not None else 0
        met = _first_meeting(shadow.ops[start:], read, streams)
        if met is None or met in told or met.node in rewritten:
            continue
        first = shadow.position[read.x.op.node] if read.x.op is not None else -1
        if not any(first < position <= shadow.position[met.node] for position in refused):
            told.add(met)
            yield Declined("expand_combine", _REASON, met.node)


def _reads(sites: list[Site]) -> Iterator[Aggregate]:
    for site in sites:
        if isinstance(site, (AggregateSite, MixSite)) and site.aggregate is not None:
            yield site.aggregate


def _first_meeting(ops: Iterable[Op], read: Aggregate, streams: set[Value]) -> Op | None:
    """The first operator that reads the streams together with what is made of the read, if new streams come of that.

    ops are those after the streams. None also if the program calls an operator of ours there, or something that is not
    looked into. What is made of the read counts while it has all channels: a gate that is computed from it, or a loss,
    is no sublayer's output.
    """
    x, channels = read.x, read.streams.channels
    old: set[Value] = {x}
    made: set[Value] = {read.out}
    new: dict[Value, Op] = {}
    for op in ops:
        if not op.outs or read.out in op.outs:
            continue
        met = next((new[source] for source in op.sources if source in new), None)
        with_streams = any(source in old and source.numel == x.numel for source in op.sources)
        if with_streams and any(source in made and channels in source.shape for source in op.sources):
            met = met or op
        if met is not None:
            if op.target is None or calls_ours(op.node):
                return None
            for out in op.outs:
                new[out] = met
                again = out.shape == x.shape and (out in streams or _is_reduced(out, read.streams.n))
                if out.numel == x.numel and (out.is_output or again):
                    return met
        elif not with_streams and not made.isdisjoint(op.sources) and not _is_scaled(op, made):
            made.update(out for out in op.outs if out.dtype.is_floating_point)
        elif not old.isdisjoint(op.sources):
            old.update(op.outs)
    return None


def _is_reduced(value: Value, n: int) -> bool:
    """Whether a sum or mean takes n numbers at a time, as that of the streams at the end of a model does."""
    return any(op.name in ("sum", "mean") and op.out.numel * n == value.numel for op in value.users)


def _is_scaled(op: Op, made: set[Value]) -> bool:
    """Whether an operator only scales something larger by what was made."""
    if torch.Tag.pointwise not in getattr(op.target, "tags", ()):
        return False
    largest = max(source.numel for source in op.sources if source in made)
    return any(source.numel > largest for source in op.sources if source not in made)
