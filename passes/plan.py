"""Stage 3, plan: which operator calls replace what, decided for the whole graph before anything is inserted.

A site is accepted whole or declined with a reason. What a plan holds is still in terms of the record; `rewrite`
turns it into nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.passes.recognise import Findings, Matrices, Mixture, Normed, Weight, default_view
from mhc_compile.passes.recognise.affine import Param, Term, token_indices
from mhc_compile.passes.recognise.aggregate import Aggregate
from mhc_compile.passes.recognise.combine import Combine
from mhc_compile.passes.recognise.contraction import StreamsView
from mhc_compile.passes.recognise.gates import Gate, Mixing, Sigmoid
from mhc_compile.passes.recognise.layout import is_movement, keeps_order
from mhc_compile.passes.recognise.projection import Projection
from mhc_compile.passes.recognise.terms import TOGETHER
from mhc_compile.passes.record import storage_key
from mhc_compile.passes.report import location
from mhc_compile.passes.shadow import Shadow, Value, tensors_of


def said(node: fx.Node) -> str:
    """A node by the line of the program that made it."""
    at = location(node)
    return f"line {at.line} of {at.name} ({at.code})" if at.file else f"{node.name}, which no line is known of,"


class Decline(Exception):
    """A site that looks like a hyper-connection and will not be rewritten; the message says why, for a user."""

    site: Site | None = None


@dataclass(frozen=True)
class Vector:
    """The elements of `base` (flattened) at `indices`, or one over them, times const; base None is a number."""

    base: Value | None
    indices: tuple[int, ...]
    const: float
    inverse: bool = False


@dataclass(frozen=True)
class Rows:
    """Rows of one projection's phi, with each row's scale (a product) and bias (a sum of products)."""

    projection: Projection
    rows: tuple[int, ...]
    scale: tuple[Vector, ...]
    bias: tuple[tuple[Vector, ...], ...]


@dataclass
class MixSite:
    """projection + scale + sinkhorn, and aggregate where the weighted sum is in the graph.

    groups are the rows for pre, post and res, as far as the form has them. Where one is not used by the program,
    others stand in its place, because the operator wants it.
    """

    op: str
    x: Value
    streams: StreamsView
    groups: list[Rows]
    normed: Normed
    gates: Gates
    sinkhorn: Sinkhorn
    pre: Gate | None
    post: Gate | None
    res: Gate | None
    aggregate: Aggregate | None

    def targets(self) -> Iterator[Value]:
        if self.aggregate is not None:
            yield self.aggregate.out
        yield from (gate.value for gate in (self.pre, self.post, self.res) if gate is not None)

    def sources(self) -> Iterator[Value]:
        yield self.x
        for group in self.groups:
            yield from (part.phi for part in group.projection.parts)
            vectors = (*group.scale, *(v for term in group.bias for v in term))
            yield from (v.base for v in vectors if v.base is not None)
        if self.normed.weight is not None:
            yield self.normed.weight.value


@dataclass
class CombineSite:
    """expand_combine; post and res are the values whose gate outputs of a MixSite are used where there is one."""

    combine: Combine
    op: str = "expand_combine"

    def targets(self) -> Iterator[Value]:
        yield self.combine.out

    def gates(self) -> Iterator[Value]:
        yield self.combine.outer.post
        if self.combine.mix is not None:
            yield self.combine.mix.res

    def sources(self) -> Iterator[Value]:
        c = self.combine
        yield from (c.x, c.outer.f)
        yield from self.gates()
        if c.layer_bias is not None:
            yield c.layer_bias


@dataclass
class AggregateSite:
    """aggregate, with a gate that comes from elsewhere."""

    aggregate: Aggregate
    op: str = "aggregate"

    def targets(self) -> Iterator[Value]:
        yield self.aggregate.out

    def gates(self) -> Iterator[Value]:
        yield self.aggregate.gate

    def sources(self) -> Iterator[Value]:
        yield from (self.aggregate.x, self.aggregate.gate)


@dataclass
class SinkhornSite:
    """sinkhorn, of logits that come from elsewhere."""

    matrices: Matrices
    op: str = "sinkhorn"

    def targets(self) -> Iterator[Value]:
        yield self.matrices.out

    def sources(self) -> Iterator[Value]:
        yield self.matrices.logits


Site = MixSite | CombineSite | AggregateSite | SinkhornSite


@dataclass(frozen=True)
class Declined:
    """A site that was refused: what it would have become, why it will not, and where it is."""

    what: str
    reason: str
    node: fx.Node | None


@dataclass
class Plan:
    """All decisions for one graph."""

    sites: list[Site]
    declined: list[Declined]


def plan(shadow: Shadow, findings: Findings) -> Plan:
    """Compose what was recognised into sites, each accepted or declined."""
    sites: list[Site] = []
    declined: list[Declined] = []

    def consider(what: str, node: fx.Node, *makers: Callable[[], Site]) -> bool:
        """Accept the first of several sites that can be; the reason against the first is the one told."""
        reasons: list[str] = []
        for make in makers:
            try:
                site = make()
                _check_surroundings(shadow, site)
            except Decline as reason:
                reasons.append(str(reason))
            else:
                sites.append(site)
                return True
        declined.append(Declined(what, reasons[0], node))
        return False

    for mixtures in _by_streams(findings.mixtures):
        if _is_hyper_connection(mixtures, findings):
            for roles in connections(mixtures, findings):
                node = next(g.value for g in roles.gates()).op.node  # type: ignore[union-attr]
                consider(
                    "generate_mix",
                    node,
                    lambda roles=roles: _mix_site(roles, findings),  # type: ignore[misc]
                    lambda roles=roles: _mix_site(roles, findings, read=False),  # type: ignore[misc]
                    lambda roles=roles: _mix_site(roles.without_pre(), findings),  # type: ignore[misc]
                )
    known = {value for site in sites if isinstance(site, MixSite) for value in site.targets()}
    claimed: set[Value] = set()
    for combine in _last_first(findings.combines):
        if combine.out in claimed:
            continue
        if combine.mix is None and combine.outer.post not in known:
            continue
        if consider("expand_combine", combine.op.node, lambda c=combine: CombineSite(c)):  # type: ignore[misc]
            claimed |= _within(combine)
    free = [a for a in findings.aggregates if a.out not in claimed]
    _single_operators(findings, free, sites, consider)
    misses = list(_near_misses(findings, free, sites))
    if not misses:
        misses = _unused_rows([site for site in sites if isinstance(site, MixSite)])
    return Plan(sites, declined + misses)


def _single_operators(
    findings: Findings, aggregates: list[Aggregate], sites: list[Site], consider: Callable[..., bool]
) -> None:
    """What no larger operator has taken: sums over streams that are mixed elsewhere, and the matrices that mix them."""
    taken = {value for site in sites for value in site.targets()}
    combined = [site.combine for site in sites if isinstance(site, CombineSite)]
    streams = {c.x for c in combined if c.mix is not None} | {c.out for c in combined if c.mix is not None}
    streams |= {site.x for site in sites if isinstance(site, MixSite)}
    for a in aggregates:
        if a.out in taken or a.x not in streams or a.const != 1.0:
            continue
        if consider("aggregate", a.op.node, lambda a=a: AggregateSite(a)):
            taken.add(a.out)
    for c in combined:
        found = findings.matrices.get(c.mix.res) if c.mix is not None else None
        if found is not None and not isinstance(found, str) and found.out not in taken:
            assert found.out.op is not None
            if consider("sinkhorn", found.out.op.node, lambda m=found: SinkhornSite(m)):
                taken.add(found.out)


def _last_first(combines: list[Combine]) -> list[Combine]:
    """Readings of later sums first, since they take in earlier ones; those of one sum in the order found."""
    outs = list(dict.fromkeys(c.out for c in combines))[::-1]
    return [c for out in outs for c in combines if c.out is out]


_SUMMING = {*TOGETHER, "add", "sub", "addcmul", "mul", "sum", "mean", "neg", "div"}


def _within(combine: Combine) -> set[Value]:
    """The result of a combine, and the partial sums and products behind it that serve it alone."""
    leaves = {combine.x, combine.outer.f, combine.outer.post, combine.layer_bias}
    if combine.mix is not None:
        leaves.add(combine.mix.res)
    found, pending = {combine.out}, [combine.out]
    while pending:
        op = pending.pop().op
        if op is not None and (op.name in _SUMMING or is_movement(op)):
            inner = (v for v in op.inputs() if v not in found and v not in leaves)
            fresh = [v for v in inner if len(v.users) == 1 and not v.is_output]
            found.update(fresh)
            pending += fresh
    return found


def _unused_rows(sites: list[MixSite]) -> list[Declined]:
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


def _is_hyper_connection(mixtures: list[Mixture], findings: Findings) -> bool:
    """Whether the gates act on the streams they come from: many layers norm, project and squash."""
    x = mixtures[0].projection.x
    gates = {value for mixture in mixtures for value in mixture.gates}
    return (
        any(a.x is x and a.gate in gates and a.gate_layout.is_identity() for a in findings.aggregates)
        or any(c.x is x and c.outer.post in gates for c in findings.combines)
        or any(isinstance(gate.kind, Mixing) for mixture in mixtures for gate in mixture.gates.values())
    )


def _near_misses(findings: Findings, aggregates: list[Aggregate], sites: list[Site]) -> Iterator[Declined]:
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


def _by_streams(mixtures: list[Mixture]) -> list[list[Mixture]]:
    """Mixtures of the same streams under the same normalisation belong together: pre, post and res projections."""
    groups: dict[tuple[Value, Rms, Weight | None], list[Mixture]] = {}
    for mixture in mixtures:
        key = (mixture.projection.x, mixture.normed.rms, mixture.normed.weight)
        groups.setdefault(key, []).append(mixture)
    return list(groups.values())


@dataclass
class Roles:
    """The gates of one connection, and the projections that each comes from."""

    owners: dict[Value, Mixture]
    pre: Gate | None = None
    post: Gate | None = None
    res: Gate | None = None

    def gates(self) -> Iterator[Gate]:
        yield from (gate for gate in (self.pre, self.post, self.res) if gate is not None)

    def without_pre(self) -> Roles:
        if self.pre is None or (self.post is None and self.res is None):
            raise Decline("nothing is left without its h_pre gate")
        return replace(self, pre=None)

    def origins(self) -> set[Value]:
        return {self.owners[gate.value].projection.out for gate in self.gates()}


def connections(mixtures: list[Mixture], findings: Findings) -> list[Roles]:
    """The gates of one tensor's streams, put together into connections.

    Any h_pre may go with any h_post and h_res: all are computed from the same streams. Those that one combine uses go
    together, then those of one projection, then the rest in the order of the program.
    """
    owners = {value: mixture for mixture in mixtures for value in mixture.gates}
    every = {value: mixture.gates[value] for value, mixture in owners.items()}
    x = mixtures[0].projection.x
    written: dict[Value, Roles] = {}
    for c in findings.combines:
        post = every.get(c.outer.post)
        res = every.get(c.mix.res) if c.mix is not None else None
        if post is None or not isinstance(post.kind, Sigmoid) or post.value in written:
            continue
        if res is not None and (not isinstance(res.kind, Mixing) or res.size != post.size**2):
            res = None
        if any(r.res is res for r in written.values() if res is not None):
            res = None
        written[post.value] = Roles(owners, post=post, res=res)
    pairs = list(written.values())
    used = {gate.value for pair in pairs for gate in pair.gates()}
    read = {a.gate for a in findings.aggregates if a.x is x and a.gate_layout.is_identity()} - used
    rest = [gate for gate in every.values() if gate.value not in used and gate.value not in read]
    squares = [gate for gate in rest if isinstance(gate.kind, Mixing)]
    loose = sorted((g for g in rest if isinstance(g.kind, Sigmoid)), key=lambda g: g.rows)
    pres = [gate for value, gate in every.items() if value in read and _may_be_pre(gate)]
    for square in squares:
        home = [p for p in pairs if p.res is None and p.post is not None and p.post.size**2 == square.size]
        target = _nearest(home, square, owners)
        if target is None:
            pairs.append(Roles(owners, res=square))
        else:
            target.res = square
    for gates, role in ((pres, "pre"), (loose, "pre"), (loose, "post")):
        for gate in list(gates):
            if role == "pre" and gates is loose and not _is_plain(gate):
                continue
            target = _nearest([p for p in pairs if getattr(p, role) is None and _fits(p, gate)], gate, owners)
            if target is not None:
                setattr(target, role, gate)
                gates.remove(gate)
    return [*pairs, *(Roles(owners, pre=gate) for gate in pres)] or [
        Roles(owners, pre=gate) for gate in loose if _is_plain(gate)
    ]


def _may_be_pre(gate: Gate) -> bool:
    return isinstance(gate.kind, Sigmoid)


def _is_plain(gate: Gate) -> bool:
    """Whether a gate is sigmoid (+ eps), as h_pre has to be."""
    return isinstance(gate.kind, Sigmoid) and abs(gate.kind.mult - 1.0) < 1e-12


def _fits(pair: Roles, gate: Gate) -> bool:
    sizes = {gate.size if isinstance(gate.kind, Sigmoid) else round(gate.size**0.5) for gate in pair.gates()}
    return sizes == {gate.size}


def _nearest(candidates: list[Roles], gate: Gate, owners: dict[Value, Mixture]) -> Roles | None:
    """The first connection with a gate of the same projection, or else the first."""
    home = owners[gate.value].projection.out
    return next((c for c in candidates if home in c.origins()), candidates[0] if candidates else None)


def _mix_site(roles: Roles, findings: Findings, *, read: bool = True) -> MixSite:
    """The operator for one connection; read: with the aggregate, where there is just one."""
    owners, pre, post, res = roles.owners, roles.pre, roles.post, roles.res
    gates = list(roles.gates())
    mixture = owners[gates[0].value]
    x = mixture.projection.x
    n = gates[0].size if isinstance(gates[0].kind, Sigmoid) else round(gates[0].size ** 0.5)
    aggregates = [
        a
        for a in findings.aggregates
        if a.x is x and pre is not None and a.gate is pre.value and a.gate_layout.is_identity()
    ]
    elsewhere = any(pre is not None and a.gate is pre.value and a not in aggregates for a in findings.aggregates)
    aggregate = aggregates[0] if read and not elsewhere and len({a.out for a in aggregates}) == 1 else None
    width = mixture.projection.width
    if width % n:
        raise Decline(f"the projection reads {width} elements a token, which {n} streams do not divide")
    const = aggregate.const if aggregate is not None else 1.0
    pre_kind = pre.kind if pre is not None and isinstance(pre.kind, Sigmoid) else Sigmoid(1.0, 1.0, 0.0)
    if abs(pre_kind.mult * const - 1.0) > 1e-12:
        raise Decline(f"the h_pre gate is {pre_kind.mult * const:g} * sigmoid; only sigmoid (+ eps) is supported")
    streams = aggregate.streams if aggregate is not None else _streams(mixture.projection, n, findings)
    if streams.n != n:
        raise Decline("the gates are of different stream counts")
    if any(owners[g.value].projection.tokens_at != streams.tokens for g in gates):
        raise Decline("the tokens of the projection are not those whose streams are read")
    post_kind = post.kind if post is not None and isinstance(post.kind, Sigmoid) else Sigmoid(2.0, 1.0, 0.0)
    form = res.kind.form if res is not None and isinstance(res.kind, Mixing) else Sinkhorn()
    groups = [_rows(owners[g.value], g) for g in gates]
    stand_in = _first_rows(groups[0], n)
    if res is not None and post is None:
        groups.insert(len(groups) - 1, stand_in)
    if pre is None:
        groups.insert(0, stand_in)
    if post is None and res is None and aggregate is not None:
        op = "head"
    else:
        op = "generate_mix_and_aggregate" if aggregate is not None else "generate_mix"
    normed = mixture.normed
    return MixSite(
        op,
        x,
        streams,
        groups,
        normed,
        Gates(pre_kind.eps * const, post_kind.mult, post_kind.eps),
        form,
        pre,
        post,
        res,
        aggregate,
    )


def _first_rows(group: Rows, n: int) -> Rows:
    """The first rows of a group, in the place of a gate that nobody reads."""

    def first(vector: Vector) -> Vector:
        return replace(vector, indices=vector.indices[:n])

    return Rows(
        group.projection,
        group.rows[:n],
        tuple(first(v) for v in group.scale),
        tuple(tuple(first(v) for v in term) for term in group.bias),
    )


def _streams(projection: Projection, n: int, findings: Findings) -> StreamsView:
    """How streams lie that no aggregate shows: as a combine reads them, or [..., n, C]."""
    views = [(c.x, c.streams) for c in findings.combines] + [(a.x, a.streams) for a in findings.aggregates]
    for x, streams in views:
        if x is projection.x and streams.n == n and streams.tokens == projection.tokens_at:
            return streams
    view = default_view(projection, n)
    if view is None:
        raise Decline(f"the {n} streams are not {n} even parts of what the projection reads")
    return view


def _rows(mixture: Mixture, gate: Gate) -> Rows:
    """The gate's rows of phi, scale and bias, in the order in which the operator's form wants them."""
    slope = gate.kind.slope if isinstance(gate.kind, Sigmoid) else 1.0
    order = list(range(gate.size))
    if isinstance(gate.kind, Mixing) and gate.kind.transposed:
        side = round(gate.size**0.5)
        order = [j * side + i for i in range(side) for j in range(side)]

    def vector(param: Param, const: float) -> Vector:
        found = token_indices(gate.logits.rows, param.layout, gate.logits.projection.rows)
        if found is None or len(found) != gate.size:
            raise Decline("a scale or bias does not line up with the projection's rows")
        return Vector(param.base, tuple(found[i] for i in order), const, param.inverse)

    def product(term: Term, const: float) -> tuple[Vector, ...]:
        if not term.params:
            return (Vector(None, tuple(0 for _ in order), term.const * const),)
        first, *rest = term.params
        return (vector(first, term.const * const), *(vector(p, 1.0) for p in rest))

    scale = product(gate.logits.scale, slope * mixture.normed.const)
    bias = tuple(product(term, slope) for term in gate.logits.bias)
    return Rows(gate.logits.projection, tuple(gate.rows[i] for i in order), scale, bias)


def _check_surroundings(shadow: Shadow, site: Site) -> None:
    """Refuse a site around which memory, grad mode or autocast changes, or whose types the operators do not take."""
    sources = list(site.sources())
    for value in sources:
        if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise Decline(f"a tensor of {value.dtype} takes part; the operators take float32, bfloat16 and float16")
        if type(value.meta).__name__ not in ("FakeTensor", "Parameter", "Tensor"):
            raise Decline(f"a {type(value.meta).__name__} takes part, a tensor subclass")
    nodes = _extent(site)
    doubles = sorted(nodes & shadow.doubles, key=shadow.position.__getitem__)
    if doubles:
        raise Decline(f"{said(doubles[0])} computes in float64; the operators would compute that in float32")
    if len({shadow.states[node] for node in nodes}) > 1:
        raise Decline("grad mode or autocast changes between its parts")
    if not shadow.writes:
        return
    first, last = min(shadow.position[n] for n in nodes), max(shadow.position[n] for n in nodes)
    touched = {storage_key(t) for node in nodes for t in _held(node)}
    touched |= {storage_key(t) for v in sources for node in v.nodes for t in tensors_of(node)}
    for node, storages in shadow.writes:
        if first < shadow.position[node] < last and storages & touched:
            raise Decline(f"{said(node)} writes in place into a tensor that takes part")
    if isinstance(site, (CombineSite, AggregateSite)):
        # It may take a gate from the operator that makes it, so the gate must be as it was when it was made.
        for gate in (node for value in site.gates() for node in value.nodes):
            memory = {storage_key(t) for t in tensors_of(gate)}
            for node, storages in shadow.writes:
                if shadow.position[gate] < shadow.position[node] < last and storages & memory:
                    raise Decline(f"{said(node)} writes in place into one of its gates")
    else:
        # Autograd forbids writing into one of several results of an operator.
        results = {storage_key(t) for v in site.targets() for node in v.nodes for t in tensors_of(node)}
        for node, storages in shadow.writes:
            if shadow.position[node] > first and storages & results:
                raise Decline(f"{said(node)} writes in place into one of its results")


def _held(node: fx.Node) -> Iterator[torch.Tensor]:
    """The tensors that a node reads or makes, as Dynamo knows them: only those share memory as the program's do."""
    for held in (node, *node.all_input_nodes):
        yield from tensors_of(held)


def _extent(site: Site) -> set[fx.Node]:
    """The Dynamo nodes between a site's sources and its targets."""
    stop = set(site.sources())
    seen: set[Value] = set()
    nodes: set[fx.Node] = set()
    pending = list(site.targets())
    while pending:
        value = pending.pop()
        if value in seen or value.op is None:
            continue
        seen.add(value)
        nodes.add(value.op.node)
        pending.extend(source for source in value.op.inputs() if source not in stop)
    return nodes


def surface(value: Value) -> Value:
    """Where a computed value comes to the Dynamo graph's surface, past a cast that nothing but it uses."""
    while not value.nodes:
        if len(value.users) != 1 or value.is_output or not keeps_order(value.users[0]):
            raise Decline("its result is not a value of its own in the program")
        value = value.users[0].out
    if len(value.users) == 1 and not value.is_output:
        (user,) = value.users
        if user.name == "_to_copy" and keeps_order(user) and user.out.nodes:
            return user.out
    return value
