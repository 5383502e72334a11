"""Steps that belong to streams and are in no site, and how far the recognition of each got."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from mhc_compile.passes.called import calls_ours
from mhc_compile.passes.plan import nested
from mhc_compile.passes.plan.sites import CombineSite, Declined, MixSite, SinkhornSite, Site, WithGates
from mhc_compile.passes.recognise import Findings
from mhc_compile.passes.recognise.aggregate import aggregates
from mhc_compile.passes.recognise.combine import combines, residuals
from mhc_compile.passes.recognise.concatenation import TOGETHER
from mhc_compile.passes.recognise.contraction import StreamsView
from mhc_compile.passes.recognise.iterations import broken, under_vmap
from mhc_compile.passes.recognise.layout import is_movement
from mhc_compile.passes.recognise.misses import Miss
from mhc_compile.passes.recognise.projection import too_many_rows
from mhc_compile.passes.recognise.reader import Reader
from mhc_compile.passes.recognise.sinkhorn import NEARLY
from mhc_compile.passes.shadow import Op, Shadow, Value

# How far the use of a gate, and the source of logits, are followed through small values.
_LIMIT = 200
_BY_CHANNEL = "this reads streams with a gate for each channel; the operator has one for each stream"


def misses(
    shadow: Shadow, findings: Findings, sites: list[Site], declined: list[Declined], views: dict[Value, StreamsView]
) -> Iterator[Declined]:
    """Steps of hyper-connections that are in no site, each with the reason of the reading that got furthest."""
    told = {value for site in sites for value in site.targets()}
    gates = {gate for site in sites if isinstance(site, WithGates) for gate in site.gates()}
    refused = {entry.node for entry in declined}
    # Other matrices of what may be writes are attention, for example, unless something else was said of the write.
    left = {gate for write in findings.combines if write.op.node in refused for gate in write.gates()}
    for value, found in findings.matrices.items():
        nearly = isinstance(found, str) and (found.startswith(NEARLY) or value in left)
        if nearly and value not in told and value not in gates and value.op is not None:
            yield Declined("sinkhorn", f"the value {found}", value.op.node)
    for read in findings.connections.of_channels([site.combine for site in sites if isinstance(site, CombineSite)]):
        if read.out.op is not None and read.out not in told and read.out.op.node not in refused:
            refused.add(read.out.op.node)
            yield Declined("aggregate", _BY_CHANNEL, read.out.op.node)
    yield from _unread(shadow, findings, sites, refused, views)
    yield from _unprojected(sites, told, findings)
    for site in sites:
        made = site.res.value if isinstance(site, MixSite) and site.res is not None else None
        made = site.matrices.out if isinstance(site, SinkhornSite) else made
        for miss in broken(made) if made is not None else ():
            yield Declined("sinkhorn", miss.reason, _after(miss.value))
    if not sites:
        for node, reason in under_vmap(shadow):
            yield Declined("sinkhorn", reason, node)


def _after(value: Value) -> fx.Node:
    return value.users[0].node


def _unread(
    shadow: Shadow,
    findings: Findings,
    sites: list[Site],
    refused: set[fx.Node | None],
    views: dict[Value, StreamsView],
) -> Iterator[Declined]:
    """Gates that operators make and that something other than an operator reads.

    refused: where something is said of a step already.
    """
    read = _read(sites)
    told: set[Op] = set()
    unwritten: set[int] = set()
    of_calls: dict[fx.Node, Declined] = {}
    for role, gate, site in sorted(_known(sites), key=lambda known: known[0] == "h_post"):  # h_res says more of it
        use, value = _wide_use(gate, read)
        if use is not None and use.node in of_calls:
            of_calls[use.node].called.extend(nested.inputs(use, value, shadow))
        if use is None or calls_ours(use.node) or (role == "h_post" and id(site) in unwritten):
            continue
        sums = list(_sums(use, gate, findings))
        if use.node in refused or told.intersection(sums) or any(op.node in refused for op in sums):
            continue
        told.update(sums)
        x = site.x if isinstance(site, MixSite) else None
        wider = findings.connections.made_with(use, x) if role == "h_pre" and x is not None else None
        if wider is not None:  # h_pre is no gate of this read, but a gate for each channel is made of it
            node = wider.out.op.node if wider.out.op is not None else None
            if node not in refused:
                refused.add(node)
                yield Declined("aggregate", _BY_CHANNEL, node)
            continue
        what = "aggregate" if role == "h_pre" else "expand_combine"
        if role != "h_pre":
            unwritten.add(id(site))
        called = nested.inputs(use, value, shadow)
        opaque = bool(called) or use.target is None
        why = nested.reason(use, called, "reads it") if opaque else _furthest(role, gate, sums, findings, views)
        reason = f"this reads {role}, but {why}"
        if x is not None and x.op is not None and x.op.name in TOGETHER:
            reason += "; the streams are a list that is put together for the projection alone: keep them as one tensor"
        found = Declined(what, reason, use.node, called)
        if called:  # perhaps by other gates, too
            of_calls[use.node] = found
        else:
            yield found
    yield from of_calls.values()


def _read(sites: list[Site]) -> set[Value]:
    """The gates that operators read."""
    read = {gate for site in sites if isinstance(site, WithGates) for gate in site.gates()}
    return read | {site.aggregate.gate for site in sites if isinstance(site, MixSite) and site.aggregate is not None}


def told_of_ends(shadow: Shadow, findings: Findings, sites: list[Site], declined: list[Declined]) -> nested.Told:
    """The inputs and outputs of a graph of which its report has the steps that read them as gates, or make them.

    An input that is not read as a gate is among them.
    """
    read, refused = _read(sites), {entry.node for entry in declined}
    made = {value for site in sites for value in site.targets()}
    told: nested.Told = {}
    for end, held in nested.ends(shadow):
        if end[0] == "input":
            op, value = _wide_use(held, read)
            called = nested.inputs(op, value, shadow) if op is not None else []
            known = op is None or calls_ours(op.node) or any(one.node in refused for one in _sums(op, held, findings))
        else:
            op, value = _wide_source(held, made)
            called = nested.outputs(op, value) if op is not None else []
            known = value in made
        if called or known:
            told[end] = called
    return told


def _known(sites: list[Site]) -> Iterator[tuple[str, Value, Site]]:
    """The gates that operators make, with their roles and their site, of which all gates are of one write."""
    for site in sites:
        if isinstance(site, MixSite):
            roles = {"h_pre": site.pre, "h_post": site.post, "h_res": site.res}
            yield from ((role, gate.value, site) for role, gate in roles.items() if gate is not None)
        elif isinstance(site, SinkhornSite):
            yield "h_res", site.matrices.out, site


def _furthest(role: str, gate: Value, sums: list[Op], findings: Findings, views: dict[Value, StreamsView]) -> str:
    """The reason of the reading with this gate that got furthest."""
    found: list[tuple[int, int, str]] = []
    for at, op in enumerate(sums):
        for miss in _readings(role, op.out, findings.reader, views):
            if isinstance(miss, Miss) and miss.gate in (gate, None):
                found.append((miss.depth, at, miss.reason))
    if found:
        return max(found)[2]
    return "does not multiply it by one tensor" if role == "h_post" else "does not sum over the streams that it reads"


def _readings(role: str, out: Value, reader: Reader, views: dict[Value, StreamsView]) -> Iterator[object]:
    if role == "h_pre":
        yield from aggregates(reader, out)
        return
    yield from combines(reader, out)
    if role == "h_post":
        yield from residuals(reader, out, views.get)


def _wide_use(gate: Value, read: set[Value]) -> tuple[Op | None, Value]:
    """The first operator that brings a gate together with something larger, and what it reads of the gate.

    No operator if one of ours reads the gate.
    """
    pending = [gate]
    for value in pending:
        if value in read:
            break
        for op in value.users:
            # Gates of some tokens are put together with those of others.
            gathered = op.name in TOGETHER
            if not gathered and any(v.numel > value.numel for v in (*op.sources, *op.outs)):
                return (None if any(_is_part_of(out, read) for out in op.outs) else op), value
            kept = gathered or is_movement(op)  # of a gate for each stream, a part is read at a time
            pending += [out for out in op.outs if out not in pending and (kept or out.numel == value.numel)]
        if len(pending) > _LIMIT:
            break
    return None, gate


def _is_part_of(value: Value, gates: set[Value]) -> bool:
    """Whether a value, or a view of it, is one of some gates, which may be larger than the gate that it is made of."""
    views = (out for op in value.users if is_movement(op) for out in op.outs)
    return value in gates or any(_is_part_of(out, gates) for out in views)


def _sums(use: Op, gate: Value, findings: Findings) -> Iterator[Op]:
    """The operator that reads a gate, and later ones in whose sums the product with the gate is still a term."""
    if use.target is None:
        yield use
        return
    pending = [use]
    for op in pending:
        if any(source.base is gate for term in findings.reader.terms(op.out) for f in term.factors for source in f):
            yield op
            pending += [user for user in op.out.users if user.outs and user not in pending]
        elif op is use:
            yield op
        if len(pending) > _LIMIT:
            break


def _unprojected(sites: list[Site], told: set[Value], findings: Findings) -> Iterator[Declined]:
    """Code that makes the logits of a Sinkhorn projection that mixes streams, if no operator replaces it."""
    in_operators = {group.projection.out for site in sites if isinstance(site, MixSite) for group in site.groups}
    streams = {gate: next(site.sources()) for site in sites if isinstance(site, WithGates) for gate in site.gates()}
    for site in sites:
        if not isinstance(site, SinkhornSite) or site.matrices.out not in streams:
            continue
        source, value = _wide_source(site.matrices.logits, told)
        if source is None:
            continue
        called = nested.outputs(source, value)
        if called or source.target is None:
            why = nested.reason(source, called, "makes them")
        elif in_operators.intersection(source.outs):
            why = "the operator that projects here returns other gates alone, so that this projects once more"
        else:
            unlike = "not recognised as the projection of a token's streams, all of them, by one matrix"
            of_streams = findings.connections.made_of(streams[site.matrices.out])
            why = f"this is {too_many_rows(findings.reader, value, of_streams) or unlike}"
        reason = f"the logits of a Sinkhorn projection come from here, but {why}"
        yield Declined("generate_mix", reason, source.node, called)


def _wide_source(logits: Value, told: set[Value]) -> tuple[Op | None, Value]:
    """The operator that made logits out of something larger, and what it makes.

    No operator if there is none, or if it is one of ours, which makes that value then.
    """
    value = logits
    for _ in range(_LIMIT):
        op = value.op
        if op is None or not op.sources or value in told:
            break
        if op.target is None or (len(op.sources) > 1 and any(source.numel > value.numel for source in op.sources)):
            return op, value
        value = max(op.sources, key=lambda source: source.numel)
    return None, value
