"""The kinds of sites: which operator calls replace what, in terms of the record.

`surface` says where in the program a value can be replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from mhc_compile.forms import Gates, Sinkhorn
from mhc_compile.passes.recognise import Matrices, Normed
from mhc_compile.passes.recognise.aggregate import Aggregate
from mhc_compile.passes.recognise.combine import Combine
from mhc_compile.passes.recognise.contraction import StreamsView
from mhc_compile.passes.recognise.gates import Gate
from mhc_compile.passes.recognise.input_norm import InputNorm
from mhc_compile.passes.recognise.layout import keeps_order
from mhc_compile.passes.recognise.projection import Projection
from mhc_compile.passes.report import location
from mhc_compile.passes.shadow import Value


def said(node: fx.Node) -> str:
    """A node by the line of the program that made it."""
    at = location(node)
    return f"line {at.line} of {at.name} ({at.code})" if at.file else f"{node.name}, which no line is known of,"


# How reasons begin that are failures of ours, and not something that a user can act on.
INTERNAL = "an internal failure"


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
    others stand in its place, because the operator wants it. norm is the one that reads the aggregate, norm_apart why
    there is one that is not taken in.
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
    norm: InputNorm | None = None
    norm_apart: str | None = None

    @property
    def layer_input(self) -> Value | None:
        """The value that the operator's first result stands for, if that is not a gate."""
        if self.aggregate is None:
            return None
        return self.aggregate.out if self.norm is None else self.norm.out

    def targets(self) -> Iterator[Value]:
        if self.layer_input is not None:
            yield self.layer_input
        yield from (gate.value for gate in (self.pre, self.post, self.res) if gate is not None)

    def sources(self) -> Iterator[Value]:
        yield self.x
        for group in self.groups:
            yield from (part.phi for part in group.projection.parts)
            vectors = (*group.scale, *(v for term in group.bias for v in term))
            yield from (v.base for v in vectors if v.base is not None)
        if self.normed.weight is not None:
            yield self.normed.weight.value
        if self.norm is not None and self.norm.weight is not None:
            yield self.norm.weight


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


def surface(value: Value) -> Value:
    """Where a computed value comes to the Dynamo graph's surface, past a cast that nothing but it uses."""
    while not value.nodes:
        if len(value.users) != 1 or value.is_output or not keeps_order(value.users[0]):
            raise Decline("its result is not a value of its own in the program")
        value = value.users[0].out
    if len(value.users) == 1 and not value.is_output:
        (user,) = value.users
        # Operators return float64 beside float64 streams alone.
        if user.name == "_to_copy" and keeps_order(user) and user.out.nodes and user.out.dtype != torch.float64:
            return user.out
    return value


def visible(value: Value) -> Value | None:
    """A value of the program with the elements of this one, in order, possibly of another float type or shape."""
    try:
        pending = [surface(value), value]
    except Decline:
        pending = [value]
    for current in pending:
        if current.nodes:
            return current
        pending += [op.out for op in current.users if keeps_order(op)]
    return None


def outputs(site: Site) -> list[Value]:
    """The results of a site that are values of the program, by which it is placed; raises Decline without any."""
    if isinstance(site, (CombineSite, AggregateSite, SinkhornSite)):
        return [surface(next(site.targets()))]
    first = site.layer_input
    found = [surface(first)] if first is not None else []
    found += [v for v in site.targets() if v.nodes and v is not first]
    if not found:
        raise Decline("none of its gates is a value of its own in the program")
    return found
