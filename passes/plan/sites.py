"""The kinds of sites: which operator calls replace what, in terms of the record.

`surface` says where in the program a value can be replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch import fx

from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.passes.plan.nested import CalledEnd
from mhc_compile.passes.recognise import Matrices
from mhc_compile.passes.recognise.aggregate import Aggregate
from mhc_compile.passes.recognise.combine import Combine
from mhc_compile.passes.recognise.contraction import StreamsView
from mhc_compile.passes.recognise.gates import Gate
from mhc_compile.passes.recognise.input_norm import InputNorm
from mhc_compile.passes.recognise.layout import Layout, broadcasts, keeps_order, origin
from mhc_compile.passes.recognise.mixing import Mixing
from mhc_compile.passes.recognise.mixtures import Normed, Weight
from mhc_compile.passes.recognise.projection import Projection
from mhc_compile.passes.shadow import Op, Value

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

    groups are the rows for pre, post and res, as far as the form has them. If the program does not use one of them,
    other rows take its place, because the operator needs them. norm is the RMS norm that reads the aggregate.
    norm_apart says why such a norm is not part of the operator. logits are products of the same streams that the
    operator makes as well, for gates of the program's own.
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
    logits: ProjectionSite | None = None

    @property
    def layer_input(self) -> Value | None:
        """The value that the operator's first result stands for, if that is not a gate."""
        if self.aggregate is None:
            return None
        return self.aggregate.out if self.norm is None else self.norm.out

    @property
    def products(self) -> list[Product]:
        """The products that its logits are of."""
        return [] if self.logits is None else self.logits.products

    def made(self) -> Iterator[Value]:
        """The gates that the operator makes."""
        yield from (gate.value for gate in (self.pre, self.post, self.res) if gate is not None)

    def targets(self) -> Iterator[Value]:
        if self.layer_input is not None:
            yield self.layer_input
        yield from self.made()
        if self.logits is not None:
            yield from self.logits.targets()

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
        if self.logits is not None:
            yield from self.logits.sources()


@dataclass
class CombineSite:
    """expand_combine. For post and res, the gates of a MixSite are used if there is one for the value.

    own says which of its gates are the program's own, and why; it is empty where operators make all of them.
    """

    combine: Combine
    own: str = ""
    op: str = "expand_combine"

    def targets(self) -> Iterator[Value]:
        yield self.combine.out

    def gates(self) -> Iterator[Value]:
        return self.combine.gates()

    def sources(self) -> Iterator[Value]:
        c = self.combine
        yield from (c.x, c.outer.f)
        yield from self.gates()
        if c.layer_bias is not None:
            yield c.layer_bias


@dataclass
class AggregateSite:
    """aggregate, with a gate that comes from elsewhere; own says why, if it is the program's.

    norm is the RMS norm that reads it, and norm_apart says why such a norm is not part of the operator.
    """

    aggregate: Aggregate
    own: str = ""
    norm: InputNorm | None = None
    norm_apart: str | None = None

    @property
    def op(self) -> str:
        return "aggregate" if self.norm is None else "aggregate_and_norm"

    @property
    def layer_input(self) -> Value:
        """The value that the operator's result stands for."""
        return self.aggregate.out if self.norm is None else self.norm.out

    def targets(self) -> Iterator[Value]:
        yield self.layer_input

    def gates(self) -> Iterator[Value]:
        yield self.aggregate.gate

    def sources(self) -> Iterator[Value]:
        yield from (self.aggregate.x, self.aggregate.gate)
        if self.norm is not None and self.norm.weight is not None:
            yield self.norm.weight


@dataclass
class MixingSite:
    """mix_streams, several rows of the streams at once; own says why its gate is the program's, if it is."""

    mixing: Mixing
    own: str = ""
    op: str = "mix_streams"

    def targets(self) -> Iterator[Value]:
        yield self.mixing.out

    def gates(self) -> Iterator[Value]:
        yield self.mixing.gate

    def sources(self) -> Iterator[Value]:
        yield from (self.mixing.x, self.mixing.gate)


@dataclass
class SinkhornSite:
    """sinkhorn, of logits that come from elsewhere."""

    matrices: Matrices
    op: str = "sinkhorn"

    @property
    def shared(self) -> Value | None:
        """The one matrix of logits [n, n] that all tokens have in common, if they have one."""
        logits = self.matrices.logits
        size = prod(logits.shape[-2:])
        # Not beyond the first value of one matrix, which may be a transposed view of a parameter.
        base, layout = origin(logits, lambda op, value: broadcasts(op, value) if value.numel > size else None)
        rows, columns = layout.dims[-2:]
        repeated = not any(stride for dim in layout.dims[:-2] for _, stride in dim)
        whole = Layout((rows, columns), layout.offset).is_identity() and base.numel < logits.numel
        return base if repeated and whole and base.nodes else None

    def targets(self) -> Iterator[Value]:
        yield self.matrices.out

    def sources(self) -> Iterator[Value]:
        yield self.shared or self.matrices.logits


@dataclass(frozen=True)
class Product:
    """out = const * r * the factors' product * (phi . (x * weight)) + addend of one reading of a projection.

    factors are values of one number a token, each with whether it divides; r is the factor of rms.
    """

    projection: Projection
    factors: tuple[tuple[Value, bool], ...]
    rms: Rms | None
    weight: Weight | None
    const: float


@dataclass
class ProjectionSite:
    """projection, of which the logits go out: products of one tensor, and the squares that it is normalised by.

    squares are the program's sums of squares, each with what the mean square is times, or None for the root of the sum.
    rows_read says how many logits the rewritten program reads, and so the operator makes; None until that is known. Of
    those that an operator makes beside gates, rows of the gates are not counted.
    """

    x: Value
    streams: StreamsView
    products: list[Product]
    squares: dict[Value, float | None]
    own: str = "what is made of the logits"
    op: str = "projection"
    rows_read: int | None = None

    @property
    def rows(self) -> int:
        """How many logits its products have."""
        return sum(product.projection.rows for product in self.products)

    def targets(self) -> Iterator[Value]:
        yield from (product.projection.out for product in self.products)
        yield from self.squares

    def sources(self) -> Iterator[Value]:
        yield self.x
        for product in self.products:
            yield from (part.phi for part in product.projection.parts)
            yield from (factor for factor, _ in product.factors)
            if product.weight is not None:
                yield product.weight.value
            if product.projection.addend is not None:
                yield product.projection.addend


# Views that put the elements in another order, and are the same for all sizes.
TURNS = ("permute", "transpose", "t")
# What takes gates from elsewhere.
WithGates = CombineSite | AggregateSite | MixingSite
Site = MixSite | WithGates | SinkhornSite | ProjectionSite


@dataclass(frozen=True)
class Declined:
    """A site that was refused: what it would have become, why it will not, and where it is.

    called are the inputs and outputs of called graphs, by their names, that may have it in these graphs. It is refused
    only if the reports of these graphs do not have it (`nested.is_told`).
    """

    what: str
    reason: str
    node: fx.Node | None
    called: list[CalledEnd] = field(default_factory=list)


def surface(value: Value) -> Value:
    """The value that the Dynamo graph shows for a computed one: after a cast that is its only user."""
    while not value.nodes:  # so that it is no output
        if len(value.users) != 1 or not keeps_order(value.users[0]):
            raise Decline("its result is not a value of its own in the program")
        value = value.users[0].out
    if len(value.users) == 1 and not value.is_output:
        (user,) = value.users
        # Operators return float64 only with float64 streams. A cast under another grad mode is not the operator's.
        alike = value.op is None or value.op.state == user.state
        if (
            user.name == "_to_copy"
            and keeps_order(user)
            and user.out.nodes
            and user.out.dtype != torch.float64
            and alike
        ):
            return user.out
    return value


def product_shown(product: Product) -> tuple[Value, list[Op]]:
    """The value that the Dynamo graph shows for a projection's result, and the views within its node on the way there.

    An einsum may permute what its product makes.
    """
    value = product.projection.out
    try:
        return surface(value), []
    except Decline:
        moves = []
        while not value.nodes:
            if len(value.users) != 1 or not (value.users[0].name in TURNS or keeps_order(value.users[0])):
                raise
            moves.append(value.users[0])
            value = value.users[0].out
        return value, moves


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
    if isinstance(site, (WithGates, SinkhornSite)):
        return [surface(next(site.targets()))]
    if isinstance(site, ProjectionSite):
        return [*(product_shown(product)[0] for product in site.products), *site.squares]
    first = site.layer_input
    found = [surface(first)] if first is not None else []
    found += [v for v in site.made() if v.nodes and v is not first]
    if site.logits is not None:
        found += outputs(site.logits)
    if not found:
        raise Decline("none of its gates is a value of its own in the program")
    return found
