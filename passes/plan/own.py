"""Which gates of a site are the program's own, and why no operator makes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mhc_compile.passes.plan.sites import AggregateSite, CombineSite, MixingSite, MixSite, SinkhornSite, Site, WithGates
from mhc_compile.passes.recognise import Findings, NotAGate
from mhc_compile.passes.recognise.iterations import is_under_vmap
from mhc_compile.passes.recognise.layout import any_view, origin
from mhc_compile.passes.recognise.projection import too_many_rows
from mhc_compile.passes.report import location
from mhc_compile.passes.shadow import Value, spelled


def name_own_gates(sites: list[Site], findings: Findings, left: Mapping[Value, str]) -> None:
    """Note for each site which of its gates no operator makes; left: why some that could be are not."""
    made = {value for site in sites if isinstance(site, MixSite) for value in site.made()}
    made |= {site.matrices.out for site in sites if isinstance(site, SinkhornSite)}
    because = {miss.value: miss for miss in findings.misses}
    for site in sites:
        if isinstance(site, WithGates):
            own = []
            for role, gate in _roles(site):
                if gate not in made:
                    reason = _of_what(site, gate, because.get(gate), findings)
                    reason = reason or (because[gate].reason if gate in because else _reason(site, gate, findings))
                    why = f": {left[gate]}" if gate in left else reason and f", which {reason}"
                    own.append(f"{role}{_at(gate)}{why}")
            site.own = "; ".join(dict.fromkeys(own))


def _of_what(site: WithGates, gate: Value, miss: NotAGate | None, findings: Findings) -> str:
    """What a gate is made of, if not of all the streams of its site; an operator makes no such gate."""
    if isinstance(site, CombineSite):
        f = site.combine.outer.f
        if not {f, origin(f, any_view)[0]}.isdisjoint(findings.connections.between(site.combine.x, gate)):
            return "is made of the sublayer's output; the operators make gates of the streams"
    if miss is not None:
        projections = (r for found in findings.readings.values() for r in found if r.x in miss.streams)
        if {r.width for r in projections} == {_channels(site)}:
            return "is projected from C numbers of a token, and not from all n C"
    return ""


def _channels(site: WithGates) -> int | None:
    if isinstance(site, MixingSite):
        return None if site.mixing.streams is None else site.mixing.streams.channels
    return (site.combine if isinstance(site, CombineSite) else site.aggregate).streams.channels


def _at(gate: Value) -> str:
    """The line of the program that makes a gate."""
    at = location(gate.op.node) if gate.op is not None else None
    return f" ({at})" if at is not None and at.file else ""


def _roles(site: WithGates) -> Iterator[tuple[str, Value]]:
    if isinstance(site, AggregateSite):
        yield "h_pre", site.aggregate.gate
        return
    if isinstance(site, MixingSite):
        yield "h", site.mixing.gate
        return
    if site.combine.outer.post is not None:
        yield "h_post", site.combine.outer.post
    yield from (("h_res", mix.res) for mix in site.combine.mixes if mix.res is not None)


def _reason(site: WithGates, gate: Value, findings: Findings) -> str:
    """Why no operator makes a gate, if the reason is known."""
    found = findings.matrices.get(gate)
    if isinstance(found, str):
        return found
    if gate.op is None:
        return "is an input of this graph"
    if gate.op.target is not None:
        many = too_many_rows(findings.reader, gate, findings.connections.made_of(next(site.sources())))
        return f"comes from {many}" if many else ""
    if is_under_vmap(gate.op.node):
        return "is computed under vmap, which is not looked into: compute it from [..., n, C] at once"
    return f"is made by {spelled(gate.op.node)}, which is not looked into"
