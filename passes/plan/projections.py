"""Projections as operators that return logits: the gates that the program makes of them stay its code.

    out = (product of the tokens' factors) * (phi . (x * weight)) + addend

The factors are one number a token, such as that of an RMS norm. They act on the product, which is the same and leaves x
to be read once; the squares that the program sums over x for them come from the operator, too.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace

from torch import fx

from mhc_compile.ops._checks import MAX_K
from mhc_compile.passes.plan.gradients import is_reached, requires_gradient
from mhc_compile.passes.plan.sites import (
    Decline,
    MixingSite,
    MixSite,
    Product,
    ProjectionSite,
    SinkhornSite,
    Site,
    WithGates,
    visible,
)
from mhc_compile.passes.plan.surroundings import check_site
from mhc_compile.passes.recognise import Findings, default_view
from mhc_compile.passes.recognise.contraction import StreamsView
from mhc_compile.passes.recognise.mixtures import normalised_before, weight_of
from mhc_compile.passes.recognise.projection import Projection, token_factor, turned_projections
from mhc_compile.passes.recognise.reader import Reader
from mhc_compile.passes.recognise.rms import squares_of
from mhc_compile.passes.recognise.streams import behind
from mhc_compile.passes.shadow import Shadow, Value

_SUMMING = ("sum", "mean", "linalg_vector_norm")
_PRODUCTS = ("mm", "bmm", "sum", "add")


def projection_sites(
    shadow: Shadow, findings: Findings, sites: list[Site], views: dict[Value, StreamsView], reached: set[fx.Node]
) -> Iterator[ProjectionSite]:
    """The projections of streams that make gates of `sites`; those of one tensor share an operator where they can.

    views: where the streams lie in the tensors that are known to be streams.
    """
    wide = {x.numel for x in views} | {site.mixing.x.numel for site in sites if isinstance(site, MixingSite)}
    least = min(wide, default=0)
    used = _rows_of(sites)
    groups: dict[tuple[object, ...], list[Product]] = {}
    made = {value for site in sites for value in site.targets()}
    gates = (gate for site in sites if isinstance(site, WithGates) for gate in site.gates())
    read = [gate for gate in gates if gate not in made]
    read += [site.matrices.logits for site in sites if isinstance(site, SinkhornSite)]
    left = [out for out, rows in used.items() if len(rows) < findings.readings[out][0].rows and _is_read(out, made)]
    # A product with what is narrower than streams is on the way to them: the second one of a low-rank matrix.
    wide_ones = {out for out, readings in findings.readings.items() if any(r.x.numel >= least for r in readings)}
    products_of = _Products(findings.reader, views, wide_ones)
    for out in dict.fromkeys([*behind(read, products_of, views), *left]):
        readings = [r for r in (*products_of.turned(out), *findings.readings.get(out, ())) if r.x.numel in wide]
        product = next((p for p in (_product(findings, r) for r in _preferred(readings, views)) if p), None)
        if product is None or len(used.get(out, ())) == product.projection.rows:
            continue
        parameters = [part.phi for part in product.projection.parts]
        shared = is_reached(reached, out) if any(map(requires_gradient, parameters)) else None
        reading = product.projection
        groups.setdefault((reading.x, reading.tokens_at, reading.width, shared), []).append(product)
    for products in groups.values():
        reading = products[0].projection
        view = _view(reading, views)
        if view is not None:
            yield ProjectionSite(reading.x, view, products, dict(_squares(shadow, findings, reading)))


class _Products(Container[Value]):
    """Which values are projections: those of `known`, and of streams also those whose rows come before their tokens."""

    def __init__(self, reader: Reader, views: dict[Value, StreamsView], known: Container[Value]) -> None:
        self._reader, self._views, self._known = reader, views, known
        self._turned: dict[Value, list[Projection]] = {}

    def __contains__(self, value: object) -> bool:
        return value in self._known or (isinstance(value, Value) and bool(self.turned(value)))

    def turned(self, value: Value) -> list[Projection]:
        if value not in self._turned:
            product = value.op is not None and value.op.name in _PRODUCTS
            found = turned_projections(self._reader, value) if product else ()
            self._turned[value] = [reading for reading in found if reading.x in self._views]
        return self._turned[value]


def goes_beside_gates(shadow: Shadow, reached: set[fx.Node], sites: list[Site], projected: ProjectionSite) -> bool:
    """Let one of the sites that make gates of the same streams make some logits as well, if one can."""
    for at, site in enumerate(sites):
        larger = _with_logits(site, projected) if isinstance(site, MixSite) else None
        if larger is None:
            continue
        try:
            check_site(shadow, reached, larger)
        except Decline:  # then each is as before
            continue
        sites[at] = larger
        return True
    return False


def _with_logits(site: MixSite, projected: ProjectionSite) -> MixSite | None:
    """The operator that makes the gates of a site, and the logits of another site of the same streams as well.

    It has the rows of phi of both, so that the streams are read once, and gives the streams one gradient.
    """
    reading, (n, channels) = projected.products[0].projection, (site.streams.n, site.streams.channels)
    same = site.x is projected.x and reading.tokens_at == site.streams.tokens and reading.width == n * channels
    rows = sum(len(group.rows) for group in site.groups) + projected.rows
    if site.logits is not None or not same or rows > MAX_K:
        return None
    if any(product.weight != site.normed.weight for product in projected.products):
        return None
    op = "generate_mix" if site.aggregate is None else "generate_mix_and_aggregate"
    return replace(site, op=op, logits=replace(projected, streams=site.streams))


def _rows_of(sites: Iterable[Site]) -> dict[Value, set[int]]:
    """The rows of products that are in operators with known gates."""
    found: dict[Value, set[int]] = {}
    for group in (group for site in sites if isinstance(site, MixSite) for group in site.groups):
        found.setdefault(group.projection.out, set()).update(group.rows)
    return found


def _is_read(out: Value, made: set[Value]) -> bool:
    """Whether anything but the sites reads a value, or what is made of it."""
    seen, pending = {out}, [out]
    while pending:
        for op in pending.pop().users:
            if op.target is None or any(value.is_output for value in op.outs):
                return True
            fresh = [value for value in op.outs if value not in seen and value not in made]
            seen.update(fresh)
            pending += fresh
    return False


def _preferred(readings: list[Projection], views: dict[Value, StreamsView]) -> list[Projection]:
    """Readings of streams themselves come before readings of values made from streams; the simplest come first."""
    return sorted(readings, key=lambda reading: reading.x not in views)


def _product(findings: Findings, reading: Projection) -> Product | None:
    """The product of a reading, if the scalings before it can be moved after it."""
    factors: list[tuple[Value, bool]] = []
    weight = None
    for scaling in reading.scalings:
        if token_factor(scaling, reading):
            factors.append((scaling.factor, scaling.divides))
        elif weight is None:
            weight = weight_of(scaling, reading)
            if weight is None:
                return None
        else:
            return None
    normed = normalised_before(reading, findings.reader) if len(factors) == 1 else None
    if normed is not None and not isinstance(normed, str):
        return Product(reading, (), normed.rms, weight, normed.const)
    if any(visible(factor) is None for factor, _ in factors):
        return None
    return Product(reading, tuple(factors), None, weight, reading.const)


def _view(reading: Projection, views: dict[Value, StreamsView]) -> StreamsView | None:
    """Where the streams lie in what a projection reads; a projection of each stream reads one."""
    known = views.get(reading.x)
    if known is not None and known.tokens == reading.tokens_at and known.n * known.channels == reading.width:
        return known
    return default_view(reading, 1)


def _squares(shadow: Shadow, findings: Findings, reading: Projection) -> Iterator[tuple[Value, float | None]]:
    """The program's sums of the squares of every token, with what the mean is times; None is the root of the sum.

    What is summed under another grad mode, for a log say, is left: one operator has one.
    """
    product = reading.out.op
    for op in shadow.ops:
        alike = product is None or op.state == product.state
        if alike and op.name in _SUMMING and op.outs and op.out.nodes and op.out.numel == reading.tokens:
            found = squares_of(op.out, reading, findings.reader)
            if found is not None:
                yield op.out, None if found.root else found.const * reading.width
