"""The site of one connection's gates: rows of phi, scale and bias, and how the streams lie."""

from __future__ import annotations

from dataclasses import replace

from mhc_compile.forms import Gates, Sinkhorn
from mhc_compile.passes.plan.roles import Roles
from mhc_compile.passes.plan.sites import Decline, MixSite, Rows, Vector
from mhc_compile.passes.recognise import Findings, default_view
from mhc_compile.passes.recognise.affine import Param, Term, token_indices
from mhc_compile.passes.recognise.contraction import StreamsView
from mhc_compile.passes.recognise.gates import Gate, Mixing, Sigmoid
from mhc_compile.passes.recognise.mixtures import Mixture
from mhc_compile.passes.recognise.projection import Projection


def mix_site(roles: Roles, findings: Findings, *, read: bool = True) -> MixSite:
    """The operator for one connection; read: with the aggregate, where there is just one."""
    owners, pre, post, res = roles.owners, roles.pre, roles.post, roles.res
    gates = list(roles.gates())
    mixture = owners[gates[0].value]
    x = mixture.projection.x
    n = gates[0].size if isinstance(gates[0].kind, Sigmoid) else round(gates[0].size ** 0.5)
    aggregates = [
        a for a in findings.aggregates if a.x is x and pre is not None and a.gate is pre.value and a.has_whole_gate
    ]
    elsewhere = any(pre is not None and a.gate is pre.value and a not in aggregates for a in findings.aggregates)
    aggregate = aggregates[0] if read and not elsewhere and len({a.out for a in aggregates}) == 1 else None
    width = mixture.projection.width
    if width % n:
        raise Decline(f"the projection reads {width} elements a token, which is no multiple of {n} streams")
    const = aggregate.const if aggregate is not None else 1.0
    pre_kind = pre.kind if pre is not None and isinstance(pre.kind, Sigmoid) else Sigmoid(1.0, 1.0, 0.0)
    if abs(pre_kind.mult * const - 1.0) > 1e-12:
        raise Decline(f"the h_pre gate is {pre_kind.mult * const:g} * sigmoid; only sigmoid (+ eps) is supported")
    streams = aggregate.streams if aggregate is not None else _streams(mixture.projection, n, findings)
    if streams.n != n:
        raise Decline("the gates are for different numbers of streams")
    if any(owners[g.value].projection.tokens_at != streams.tokens for g in gates):
        raise Decline("the projection and the read use different tokens")
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
    """The layout of streams without an aggregate: as a combine reads them, or [..., n, C]."""
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
    if isinstance(gate.kind, Mixing) and gate.kind.logits_transposed:
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
