"""Why hyper-connection code that was found is in no site."""

from __future__ import annotations

from collections.abc import Iterator

from mhc_compile.passes.plan.sites import Declined, MixSite, Site
from mhc_compile.passes.recognise import Findings
from mhc_compile.passes.recognise.aggregate import Aggregate
from mhc_compile.passes.recognise.projection import Projection
from mhc_compile.passes.shadow import Value


def unused_rows(sites: list[MixSite]) -> list[Declined]:
    """Projections of which only some rows were understood: the others are somebody's gates too."""
    used: dict[Value, set[int]] = {}
    projections: dict[Value, Projection] = {}
    for group in (group for site in sites for group in site.groups):
        used.setdefault(group.projection.out, set()).update(group.rows)
        projections[group.projection.out] = group.projection
    found = []
    for out, projection in projections.items():
        rest = projection.rows - len(used[out])
        if rest and out.op is not None:
            share = f"{rest} of the projection's {projection.rows} rows"
            reason = f"{share} make gates that were not recognised; they, and what uses them, stay as they are"
            found.append(Declined("gate", reason, out.op.node))
    return found


def near_misses(findings: Findings, aggregates: list[Aggregate], sites: list[Site]) -> Iterator[Declined]:
    """Values used as the gates of streams, computed from a projection of those streams, and still not understood."""
    told = {value for site in sites for value in site.targets()}
    for miss in findings.misses:
        weighs = any(a.gate is miss.value and a.x in miss.streams for a in aggregates)
        mixes = any(
            c.mix is not None and c.x in miss.streams and miss.value in (c.outer.post, c.mix.res)
            for c in findings.combines
        )
        if (weighs or mixes) and miss.value.op is not None and miss.value not in told:
            told.add(miss.value)
            yield Declined("gate", f"the value {miss.reason}", miss.value.op.node)
    for value, reason in findings.matrices.items():
        if isinstance(reason, str) and value not in told and value.op is not None:
            yield Declined("sinkhorn", f"the value {reason}", value.op.node)
