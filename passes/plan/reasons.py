"""Why hyper-connection code that was found is in no site: its nearest miss, and the line of the program."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from mhc_compile.passes.plan.sites import AggregateSite, CombineSite, Declined, MixSite, SinkhornSite, Site, said
from mhc_compile.passes.recognise import Findings, aggregate, combine
from mhc_compile.passes.recognise.aggregate import Aggregate
from mhc_compile.passes.recognise.gates import Matrices
from mhc_compile.passes.recognise.layout import any_view, is_movement, origin
from mhc_compile.passes.recognise.pieces import TOGETHER
from mhc_compile.passes.recognise.projection import Projection
from mhc_compile.passes.shadow import Op, Shadow, Value, spelled

# A normalisation of one axis as a program spells it, how many of them nothing but a Sinkhorn has, and how many nodes
# lie between the division and the sum: an eps, a clamp.
_NORMALISING = {"truediv", "itruediv", "div", "div_", "sub", "isub", "sub_"}
_HALF_STEPS = 4
_SCALING = {"mul", "mul_", "imul", "where", "masked_fill", "masked_fill_", "clamp", "add", "iadd", "add_"}
_BEFORE_DIVISION = 4
_AFFINE = {"add", "sub", "rsub", "mul", "div", "neg"}
# How far the use of a gate, and the source of logits, are followed through small values.
_LIMIT = 200


def unused_rows(sites: list[MixSite]) -> list[Declined]:
    """Projections of which only some rows were understood: the others are gates too, if anybody reads them."""
    made_by_sites = {value for site in sites for value in site.targets()}
    used: dict[Value, set[int]] = {}
    projections: dict[Value, Projection] = {}
    for group in (group for site in sites for group in site.groups):
        used.setdefault(group.projection.out, set()).update(group.rows)
        projections[group.projection.out] = group.projection
    found = []
    for out, projection in projections.items():
        rest = projection.rows - len(used[out])
        if rest and out.op is not None and _is_read(out, made_by_sites):
            share = f"{rest} of the projection's {projection.rows} rows"
            reason = f"{share} make gates that were not recognised; they, and what uses them, stay as they are"
            made = projection.x.op
            if made is not None and made.name in TOGETHER:
                reason += (
                    "; the streams are a list that is put together for the projection alone: keep them as one tensor"
                )
            found.append(Declined("gate", reason, out.op.node))
    return found


def _is_read(out: Value, made_by_sites: set[Value]) -> bool:
    """Whether anything but the sites reads a value, or what is made of it."""
    seen, pending = {out}, [out]
    while pending:
        for op in pending.pop().users:
            if op.target is None or any(value.is_output for value in op.outs):
                return True
            fresh = [value for value in op.outs if value not in seen and value not in made_by_sites]
            seen.update(fresh)
            pending += fresh
    return False


def near_misses(findings: Findings, aggregates: list[Aggregate], sites: list[Site]) -> Iterator[Declined]:
    """Values used as the gates of streams that come from a projection, and were still not understood.

    The projection has to be one of those streams, or the streams to be mixed by a Sinkhorn projection.
    """
    told = {value for site in sites for value in site.targets()}
    mixed = [c for c in findings.combines if c.mix and isinstance(findings.matrices.get(c.mix.res), Matrices)]
    streams = {value for c in mixed for value in (c.x, c.out)}
    for miss in findings.misses:
        known = streams.union(miss.streams)
        weighs = any(a.gate is miss.value and a.x in known for a in aggregates)
        mixes = any(
            c.mix is not None and c.x in known and miss.value in (c.outer.post, c.mix.res) for c in findings.combines
        )
        alone = findings.matrices.get(miss.value)
        sunk = isinstance(alone, Matrices)
        if (weighs or mixes) and miss.value.op is not None and (sunk or miss.value not in told):
            told.add(miss.value)
            functions = _functions_before(alone.logits) if isinstance(alone, Matrices) else []
            reason = miss.reason
            if functions:
                reason = f"is a Sinkhorn projection of {' and '.join(functions)} of projected streams, and not of these"
            yield Declined("gate", f"the value {reason}", miss.value.op.node)
    yield from _under_vmap(sites)
    viewed = {origin(value, any_view)[0] for value in told}
    for value, found in findings.matrices.items():
        if isinstance(found, str) and value not in told and value not in viewed and value.op is not None:
            yield Declined("sinkhorn", f"the value {found}", value.op.node)
        elif isinstance(found, Matrices) and all(miss.value is not value for miss in findings.misses):
            source = _wide_source(found.logits)
            if source is not None:
                reason = f"the logits of a Sinkhorn projection come from here, but this {_unlike_projection(source)}"
                yield Declined("generate_mix", reason, source.node)


def unread_gates(findings: Findings, sites: list[Site], declined: list[Declined]) -> Iterator[Declined]:
    """Gates that operators make and that something other than an operator reads."""
    refused = {entry.node for entry in declined}
    read = {gate for site in sites if isinstance(site, (CombineSite, AggregateSite)) for gate in site.gates()}
    read |= {site.aggregate.gate for site in sites if isinstance(site, MixSite) and site.aggregate is not None}
    gates: list[tuple[str, Value]] = []
    for site in sites:
        if isinstance(site, MixSite):
            roles = {"h_pre": site.pre, "h_post": site.post, "h_res": site.res}
            gates += [(role, gate.value) for role, gate in roles.items() if gate is not None]
        elif isinstance(site, SinkhornSite):
            gates.append(("h_res", site.matrices.out))
    told: set[Op] = set()
    for role, gate in sorted(gates, key=lambda pair: pair[0] == "h_post"):  # h_res tells more of a combine
        use = _wide_use(gate, read)
        if use is None:
            continue
        sums = list(_sums(use, gate, findings))
        if use.node in refused or told.intersection(sums) or any(op.node in refused for op in sums):
            continue
        told.update(sums)
        what, why = _why_unread(role, gate, use, sums, findings)
        yield Declined(what, f"this reads {role}, but {why}", use.node)


def _why_unread(role: str, gate: Value, use: Op, sums: list[Op], findings: Findings) -> tuple[str, str]:
    what = "aggregate" if role == "h_pre" else "expand_combine"
    if use.target is None:
        return what, "is not looked into: it is a nested function, or writes into a tensor"
    reader = findings.reader
    if role == "h_pre":
        return what, aggregate.why_none(reader, sums[-1].out, gate)
    return what, combine.why_none(reader, sums[-1].out, gate, mixes=role == "h_res")


def _wide_use(gate: Value, read: set[Value]) -> Op | None:
    """The first operator that brings a gate together with something larger; None if one of ours reads the gate."""
    seen = {gate}
    pending = [gate]
    for value in pending:
        if value in read:
            return None
        for op in value.users:
            # Gates of some tokens are put together with those of others.
            gathered = op.name in TOGETHER
            if not gathered and any(v.numel > value.numel for v in (*op.sources, *op.outs)):
                return op
            fresh = [out for out in op.outs if out not in seen and (gathered or out.numel == value.numel)]
            seen.update(fresh)
            pending += fresh
        if len(seen) > _LIMIT:
            break
    return None


def _sums(use: Op, gate: Value, findings: Findings) -> Iterator[Op]:
    """The operator that reads a gate, and those after it in which the product is still a term."""
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


def _under_vmap(sites: list[Site]) -> Iterator[Declined]:
    """Gates that a function of one token makes."""
    made = [gate.op for site in sites if isinstance(site, (CombineSite, AggregateSite)) for gate in site.gates()]
    for op in dict.fromkeys(op for op in made if op is not None and op.target is None):
        if "_remove_batch_dim" in str(op.node.target):
            reason = "gates are computed under vmap, which is not looked into: compute them from [..., n, C] at once"
            yield Declined("generate_mix", reason, op.node)


def iteration_under_vmap(shadow: Shadow) -> Iterator[Declined]:
    """What looks like a Sinkhorn iteration in a function of one token, where only its spelling can be seen."""
    closed = [op.node for op in shadow.ops if op.target is None]
    if not any("_remove_batch_dim" in str(node.target) for node in closed):
        return
    steps = [node for node in closed if _normalises(node)]
    if len(steps) >= _HALF_STEPS:
        reason = "what looks like a Sinkhorn iteration is under vmap, which is not looked into: compute it from"
        yield Declined("sinkhorn", f"{reason} [..., n, n] at once", steps[-1])


def broken_iterations(sites: list[Site]) -> Iterator[Declined]:
    """Sinkhorn iterations with something else between their steps, of which only those before it were found."""
    for site in sites:
        if isinstance(site, MixSite):
            made = [] if site.res is None else [site.res.value]
        else:
            made = [site.matrices.out] if isinstance(site, SinkhornSite) else []
        for value in made:
            after = _as_large_behind(value)
            steps = [node for node in after if _normalises(node)]
            if len(steps) >= _HALF_STEPS // 2:
                between = next((node for node in after if spelled(node) in _SCALING), None)
                what = f"{spelled(between)} ({said(between)})" if between is not None else "something else"
                reason = f"goes through {what} and is divided by its sums {len(steps)} times more"
                told = f"the result of a Sinkhorn projection {reason}; what comes before that is rewritten"
                yield Declined("sinkhorn", told, steps[0])


def _as_large_behind(value: Value) -> list[fx.Node]:
    """The program's steps after a value, in order, from values as large to values as large."""
    pending = [value]
    nodes: dict[fx.Node, None] = {}
    for held in pending:
        for op in held.users:
            fresh = [out for out in op.outs if out.numel == value.numel and out not in pending]
            pending += fresh
            if fresh:
                nodes[op.node] = None
        if len(pending) > _LIMIT:
            break
    return list(nodes)


def _normalises(node: fx.Node) -> bool:
    """Whether a node divides a tensor by a sum over it, or subtracts the logarithm of one."""
    if spelled(node) not in _NORMALISING or len(node.args) != 2:
        return False
    value, divisor = node.args
    for _ in range(_BEFORE_DIVISION):
        if not isinstance(divisor, fx.Node) or not divisor.args:
            return False
        if spelled(divisor) in ("sum", "logsumexp"):
            return divisor.args[0] is value
        divisor = divisor.args[0]
    return False


def _functions_before(logits: Value) -> list[str]:
    """What logits go through between the projection and the first exponential, other than scale and bias."""
    found: list[str] = []
    value = logits
    for _ in range(_LIMIT):
        op = value.op
        if op is None or op.target is None or not op.sources:
            break
        if not is_movement(op) and any(source.numel > value.numel for source in op.sources):
            break  # the projection
        if not is_movement(op) and len(op.sources) == 1 and op.name not in _AFFINE:
            found.append(op.name)
        value = max(op.sources, key=lambda source: source.numel)
    return found[::-1]


def _wide_source(logits: Value) -> Op | None:
    """The operator that made logits out of something larger; None if there is none, as for a parameter."""
    value = logits
    for _ in range(_LIMIT):
        op = value.op
        if op is None or not op.sources:
            return None
        if op.target is None or (len(op.sources) > 1 and any(source.numel > value.numel for source in op.sources)):
            return op
        value = max(op.sources, key=lambda source: source.numel)
    return None


def _unlike_projection(op: Op) -> str:
    if op.target is None:
        return "is not looked into"
    return "is not recognised as the projection of a token's streams, all of them, by one matrix"
