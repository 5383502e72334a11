"""Stage 3, plan: which operator calls replace what, decided for the whole graph before anything is inserted.

A site is accepted whole or declined with a reason. A plan is still expressed in values of the record; `rewrite`
turns it into nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from torch import fx

from mhc_compile import compat
from mhc_compile.forms import Rms
from mhc_compile.guard import guard, told
from mhc_compile.passes.called import calls_ours
from mhc_compile.passes.plan import nested
from mhc_compile.passes.plan.beside_own import leave_beside_own
from mhc_compile.passes.plan.gradients import (
    derives_again,
    reached_by_gradients,
    takes_forward_derivatives,
)
from mhc_compile.passes.plan.meetings import Meetings
from mhc_compile.passes.plan.misses import misses, told_of_ends
from mhc_compile.passes.plan.mix import mix_site
from mhc_compile.passes.plan.outside import came_in, reads_of_torn, remember, remember_torn, writes
from mhc_compile.passes.plan.own import name_own_gates
from mhc_compile.passes.plan.part_writes import why_left
from mhc_compile.passes.plan.projections import goes_beside_gates, projection_sites
from mhc_compile.passes.plan.roles import connections
from mhc_compile.passes.plan.sites import (
    INTERNAL,
    TURNS,
    AggregateSite,
    CombineSite,
    Decline,
    Declined,
    MixingSite,
    MixSite,
    Product,
    ProjectionSite,
    Rows,
    SinkhornSite,
    Site,
    Vector,
    WithGates,
    outputs,
    product_shown,
    surface,
    visible,
)
from mhc_compile.passes.plan.surroundings import between, check_site, check_surroundings
from mhc_compile.passes.plan.unwritten import come_back, unwritten
from mhc_compile.passes.recognise import Findings
from mhc_compile.passes.recognise.aggregate import Aggregate, Reading
from mhc_compile.passes.recognise.combine import Combine
from mhc_compile.passes.recognise.concatenation import TOGETHER
from mhc_compile.passes.recognise.contraction import StreamsView
from mhc_compile.passes.recognise.gates import Matrices, Mixing, Sigmoid
from mhc_compile.passes.recognise.input_norm import InputNorm, input_norm
from mhc_compile.passes.recognise.layout import any_view, is_movement, origin
from mhc_compile.passes.recognise.mixing import Mixing as StreamsMixing
from mhc_compile.passes.recognise.mixing import mixed_alone, mixed_last
from mhc_compile.passes.recognise.mixtures import Mixture, Weight
from mhc_compile.passes.recognise.part_writes import PartWrite
from mhc_compile.passes.recognise.projection import streams_by_rows
from mhc_compile.passes.shadow import Shadow, Value


@dataclass
class Plan:
    """All decisions for one graph; untold are failures to find out why something is in no site.

    torn are the reads of connections that write in another graph, where no operator makes the gates of the write.
    told_of_ends is for the report of a graph that calls this one (`nested.note`).
    """

    sites: list[Site]
    declined: list[Declined]
    untold: list[str] = field(default_factory=list)
    torn: list[AggregateSite | MixSite] = field(default_factory=list)
    told_of_ends: nested.Told = field(default_factory=dict)


def plan(
    shadow: Shadow,
    findings: Findings,
    errors: list[str] | None = None,
    *,
    input_norms: bool | None,
    lists_left: Sequence[fx.Node] = (),
) -> Plan:
    """Compose what was recognised into sites, each accepted or declined.

    input_norms: whether with the norms that read layer inputs; None is yes on a GPU. What goes wrong costs the site at
    which it does, and is added to `errors`. lists_left: where writes of lists end that are told elsewhere.
    """
    planner = _Planner(shadow, findings, [] if errors is None else errors)
    for step, what_if_it_fails in (
        (planner.gates, "gates are left as they are"),
        (planner.writes, "writes are left as they are"),
        (planner.cut_connections, "connections that a graph break cuts are not looked for"),
        (planner.part_writes, "writes to some of the streams are not looked for"),
        (planner.unknown_writes, "reads that are written in an unknown way are not looked for"),
        (planner.single_operators, "single operators are not looked for"),
        (planner.mixed_alone, "streams that are mixed alone are not looked for"),
        (planner.gates_beside_own, "gates beside those of the program's own stay in operators"),
        (planner.projections, "projections are not looked for"),
    ):
        with guard(what_if_it_fails, planner.errors):
            step()
    return planner.plan(input_norms, lists_left)


class _Planner:
    """The sites of one graph, step by step: larger ones first, and smaller ones of what these leave."""

    def __init__(self, shadow: Shadow, findings: Findings, errors: list[str]) -> None:
        self.shadow, self.findings, self.errors = shadow, findings, errors
        self.sites: list[Site] = []
        self.declined: list[Declined] = []
        self.reached = reached_by_gradients(shadow) if findings.readings else set()
        self.beyond = _derivatives_beyond(shadow)
        # What is in a write, and the reads by which a write was known to be one of streams.
        self.claimed: set[Value] = set()
        self.evident: set[Value] = set()
        # Reads whose result comes back to their streams in an unknown way.
        self.unwritten: list[Aggregate | Reading] = []
        # Reads of connections that write in another graph, with their gates.
        self.torn: dict[Value, Value] = {}
        # Why gates that were recognised are left to the program.
        self.left: dict[Value, str] = {}

    def consider(self, what: str, node: fx.Node, *makers: Callable[[], Site]) -> list[str] | None:
        """Accept the first of several sites that can be, and return why those before it were refused.

        If all are refused, this is declined with the reason against the first, and None is returned.
        """
        reasons: list[str] = []
        for make in makers:
            try:
                site = make()
                if self.beyond:
                    raise Decline(self.beyond)
                check_site(self.shadow, self.reached, site)
            except Decline as reason:
                reasons.append(str(reason))
            except Exception as error:
                reasons.append(f"{INTERNAL}: {told(error, 'a site is left as it is', self.errors)}")
            else:
                self.sites.append(site)
                return reasons
        self.declined.append(Declined(what, reasons[0], node))
        return None

    def gates(self) -> None:
        """The gates of each set of streams, with the read where they make one."""
        for mixtures in _by_streams(self.findings.mixtures):
            with guard("gates are left as they are", self.errors):
                self.left |= _consider_gates(mixtures, self.findings, self.consider)

    @cached_property
    def meetings(self) -> Meetings:
        """Where what sublayers make of reads meets the streams again."""
        return Meetings(self.shadow, self.findings)

    @cached_property
    def known(self) -> set[Value]:
        """Values that are certainly gates: an operator makes them, or they are Sinkhorn projections."""
        known = {value for site in self.sites if isinstance(site, MixSite) for value in site.made()}
        known |= {value for value, found in self.findings.matrices.items() if isinstance(found, Matrices)}
        return known | {out for op in self.shadow.ops if calls_ours(op.node) for out in op.outs}

    def writes(self) -> None:
        """Writes with a gate that is known, or of a connection."""
        known, connections = self.known, self.findings.connections
        for readings in _by_result(self.findings.combines)[::-1]:  # later sums first, since they take in earlier ones
            readings = [c for c in readings if _has_gates_of(c, known) or connections.is_write(c, known)]
            if not readings or readings[0].out in self.claimed:
                continue
            self._note_reads(readings[0])
            self._consider_write(*readings)

        for miss in self.findings.almost[::-1]:
            before, within = connections.reads_before(miss.combine), _within(miss.combine)
            # What is added to a write that an operator makes is no part of it.
            if before and self.claimed.isdisjoint(within) and connections.is_write(miss.combine, known):
                self.claimed |= within
                self.evident |= {read.out for read in before}
                self.declined.append(Declined("expand_combine", f"this {miss.reason}", miss.combine.op.node))

    def _note_reads(self, write: Combine) -> None:
        reads = self.findings.connections.reads_before(write)
        self.evident |= {read.out for read in reads if isinstance(read, Aggregate)}

    def _consider_write(self, *readings: Combine) -> None:
        made = [lambda c=combine: CombineSite(c) for combine in readings]
        if self.consider("expand_combine", readings[0].op.node, *made) is not None:
            accepted = self.sites[-1]
            assert isinstance(accepted, CombineSite)
            self.claimed |= _within(accepted.combine)
            self._note_reads(accepted.combine)

    def cut_connections(self) -> None:
        """Reads and writes that are in different graphs."""
        torn = reads_of_torn(self.shadow, self.findings, self.evident)
        self.torn = {read: gate for read, gate in torn.items() if gate not in self.known}
        self.evident |= self.torn.keys()
        for write in writes(self.shadow, self.findings):
            if write.out not in self.claimed:
                self._consider_write(write)

    def part_writes(self) -> None:
        """Writes to some of the streams, which no operator makes, and mixes of all streams in these writes or alone."""
        made = {op for site in self.sites if isinstance(site, CombineSite) for op in between(site)}
        found = [w for w in _part_writes(self.findings, self.known, _views(self.sites)) if w.op not in made]
        self.evident |= {write.read.out for write in found}
        self.declined += (Declined("expand_combine", why_left(write), write.op.node) for write in found)
        mixings = [*self.findings.mixings, *(write.mixing for write in found if write.mixing is not None)]
        self._consider_mixings([mixing for mixing in mixings if mixing.out not in self.claimed])

    def _consider_mixings(self, mixings: list[StreamsMixing]) -> None:
        made = {_whole(site.mixing) for site in self.sites if isinstance(site, MixingSite)}
        for alike in _by_result([mixing for mixing in mixings if _whole(mixing) not in made]):
            self.consider("mix_streams", alike[0].op.node, *[lambda m=mixing: MixingSite(m) for mixing in alike])

    def unknown_writes(self) -> None:
        """Reads that come back to their streams in an unknown way, and mixes of the same streams."""
        taken = {value for site in self.sites for value in site.targets()}
        for found in list(come_back(self.shadow, self.findings, self.meetings, taken | self.claimed | self.evident)):
            self.unwritten.append(found.read)
            self._consider_mixings(found.mixings)

    def single_operators(self) -> None:
        """Reads and Sinkhorn projections that are in no larger site."""
        free = [a for a in self.findings.aggregates if a.out not in self.claimed]
        evident = self.evident | {read.out for read in self.unwritten if isinstance(read, Aggregate)}
        _single_operators(self.findings, free, self.sites, self.known, evident, self.consider)

    def mixed_alone(self) -> None:
        """Streams that are mixed without a write."""
        self._consider_mixings(list(mixed_alone(self.findings.reader, _views(self.sites))))
        read = self.findings.connections.read | {value for site in self.sites for value in site.sources()}
        written = [site.combine for site in self.sites if isinstance(site, CombineSite)]
        last = {c.out: c.out_view for c in written if c.out not in read}
        self._consider_mixings(list(mixed_last(self.shadow.ops, self.findings.reader, last)))

    def gates_beside_own(self) -> None:
        """Gates that stay the program's, because those of the read are."""
        self.left |= leave_beside_own(self.shadow, self.findings, self.reached, self.sites)

    def projections(self) -> None:
        """Projections whose logits the program makes into gates itself."""
        views = _views(self.sites)
        for projected in list(projection_sites(self.shadow, self.findings, self.sites, views, self.reached)):
            if not goes_beside_gates(self.shadow, self.reached, self.sites, projected):
                node = projected.products[0].projection.out.op.node  # type: ignore[union-attr]
                self.consider("projection", node, lambda site=projected: site)  # type: ignore[misc]

    def plan(self, input_norms: bool | None, lists_left: Sequence[fx.Node]) -> Plan:
        """All decisions, and the reasons for a report."""
        remember(self.sites)
        torn = _torn_reads(self.sites, self.torn)
        untold: list[str] = []
        ends: nested.Told = {}
        with guard("what else there is of hyper-connections is not reported", untold):
            name_own_gates(self.sites, self.findings, self.left)
            views = _views(self.sites)
            self.declined += list(misses(self.shadow, self.findings, self.sites, self.declined, views))
            rows = [read for read in self.unwritten if isinstance(read, Reading)]
            writes = [d.node for d in self.declined if d.what in ("expand_combine", "mix_streams")]
            told = unwritten(self.shadow, self.meetings, self.sites, [*writes, *lists_left], self.evident, rows)
            self.declined += list(told)
            if compat.is_called(self.shadow.graph):
                ends = told_of_ends(self.shadow, self.findings, self.sites, self.declined)
        sites = self.sites
        if input_norms is not False:
            written = {origin(site.combine.out, any_view)[0] for site in sites if isinstance(site, CombineSite)}
            sites = [self._with_norm(site, written, input_norms) for site in sites]
        return Plan(sites, self.declined, untold, torn, ends)

    def _with_norm(self, site: Site, written: set[Value], wanted: bool | None) -> Site:
        """A site with the norm of its layer input, if the operator can include it and should; else the site as it is.

        A read of streams just written, with gates that are not made of them, becomes a part of the write instead.
        """
        if not isinstance(site, (AggregateSite, MixSite)) or site.aggregate is None or site.op == "head":
            return site
        a = site.aggregate
        if wanted is None and a.x.meta.device.type == "cpu":
            return site
        try:
            norm = input_norm(self.findings.reader, a)
            if isinstance(norm, InputNorm) and isinstance(site, AggregateSite) and self._joins_write(a, written):
                norm = "h_pre is not made of these streams, so that the read is fused with the write before it"
            if not isinstance(norm, InputNorm):
                return replace(site, norm_apart=norm)
            larger = replace(site, norm=norm)
            check_surroundings(self.shadow, larger)
        except Decline as reason:
            return replace(site, norm_apart=str(reason))
        except Exception as error:  # whatever is strange about a norm, the site without it was accepted
            told(error, "a norm is not looked into", self.errors)
            return site
        return larger

    def _joins_write(self, read: Aggregate, written: set[Value]) -> bool:
        waits = read.x in self.findings.connections.between(read.x, read.gate)
        return not waits and origin(read.x, any_view)[0] in written


def _whole(mixing: StreamsMixing) -> tuple[Value, int]:
    """What a mixing makes, whichever of its views the mixing was found by."""
    return origin(mixing.out, any_view)[0], mixing.out.numel


def _part_writes(findings: Findings, known: set[Value], views: dict[Value, StreamsView]) -> Iterator[PartWrite]:
    """The writes to some of the streams. Pooling also adds to one row, but has no known gate and mixes nothing."""
    for write in findings.part_writes:
        if write.mixing is not None or write.read.gate in known or write.streams in views or write.op.out in views:
            yield write


def _torn_reads(sites: list[Site], torn: dict[Value, Value]) -> list[AggregateSite | MixSite]:
    """The sites of the reads whose write is in another graph, which will know its streams by their gates."""
    found: list[AggregateSite | MixSite] = []
    for site in sites:
        if isinstance(site, (AggregateSite, MixSite)) and site.aggregate is not None and site.aggregate.out in torn:
            found.append(site)
            remember_torn(site.aggregate, torn[site.aggregate.out])
    return found


def _consider_gates(
    mixtures: list[Mixture], findings: Findings, consider: Callable[..., list[str] | None]
) -> dict[Value, str]:
    """The gates of one set of streams: of each connection with the aggregate, or without, or without h_pre.

    Returns why an h_pre is left to the program.
    """
    left: dict[Value, str] = {}
    if not _is_hyper_connection(mixtures, findings):
        return left
    for roles in connections(mixtures, findings):
        refused = consider(
            "generate_mix",
            next(g.value for g in roles.gates()).op.node,  # type: ignore[union-attr]
            lambda roles=roles: mix_site(roles, findings),
            lambda roles=roles: mix_site(roles, findings, read=False),
            lambda roles=roles: mix_site(roles.without_pre(), findings),
        )
        if refused is not None and len(refused) == 2 and roles.pre is not None:
            left[roles.pre.value] = refused[0]
    return left


def _derivatives_beyond(shadow: Shadow) -> str:
    """Why no site of a program can be rewritten: the program takes derivatives that the operators do not have."""
    if takes_forward_derivatives(shadow):
        return "forward-mode derivatives are taken (torch.func.jvp), and the operators have none"
    if derives_again(shadow):
        return (
            "derivatives are taken within the program (torch.func.grad, vjp or jacrev) and differentiated again, and "
            "the operators have first derivatives only: detach the results or what is not trained"
        )
    return ""


def _single_operators(
    findings: Findings,
    aggregates: list[Aggregate],
    sites: list[Site],
    known: set[Value],
    evident: set[Value],
    consider: Callable[..., list[str] | None],
) -> None:
    """Steps that are in no larger operator: sums over streams that are mixed elsewhere, and the matrices that mix them.

    evident: reads by which writes were known to be those of streams.
    """
    taken = {value for site in sites for value in site.targets()}
    views = _views(sites)
    mixed = {origin(site.mixing.out, any_view)[0] for site in sites if isinstance(site, MixingSite)}
    for alike in _by_result([a for a in aggregates if a.out not in taken]):
        out = alike[0].out
        if origin(out, any_view)[0] in mixed:  # a row of what another operator makes
            continue
        reads = [a for a in alike if out in evident or _is_view(a, views) or _has_gate_of_streams(a, known)]
        made = [lambda a=a: AggregateSite(a) for a in reads]
        if reads and consider("aggregate", reads[0].op.node, *made) is not None:
            taken.add(out)
    for found in findings.matrices.values():
        if not isinstance(found, str) and found.out not in taken:
            assert found.out.op is not None
            if consider("sinkhorn", found.out.op.node, lambda m=found: SinkhornSite(m)) is not None:
                taken.add(found.out)


def _has_gates_of(write: Combine, known: set[Value]) -> bool:
    """Whether gates show that it is a write. A known matrix may as well mix streams that are n copies of one tensor."""
    return not write.outer.columns and not known.isdisjoint(write.gates())


def _has_gate_of_streams(read: Aggregate, known: set[Value]) -> bool:
    """Whether the gate shows that a read is one of streams. Attention and graphs also pool what a matrix mixes."""
    return not read.rows and (read.gate in known or came_in(read))


def _is_view(read: Aggregate, views: dict[Value, StreamsView]) -> bool:
    """Whether a read is of streams that are known, stream by stream."""
    view = views.get(read.x)
    if view is None or (read.streams.n, read.streams.stream) != (view.n, view.stream):
        return False
    return view.holds_tokens or not read.streams.holds_tokens


def _views(sites: list[Site]) -> dict[Value, StreamsView]:
    """Where the streams lie in the tensors that are streams."""
    found: dict[Value, StreamsView] = {}
    for site in sites:
        if isinstance(site, CombineSite):
            c = site.combine
            found |= {c.out: c.out_view, c.x: c.streams}
        elif isinstance(site, AggregateSite):
            found[site.aggregate.x] = site.aggregate.streams
        elif isinstance(site, MixingSite) and site.mixing.streams is not None:
            found[site.mixing.x] = site.mixing.streams
        elif isinstance(site, MixSite):
            found[site.x] = site.streams
    return found


S = TypeVar("S", Aggregate, Combine, StreamsMixing)


def _by_result(steps: list[S]) -> list[list[S]]:
    """The readings of each value, in the order found: a value that is read in several ways is one site."""
    found: dict[Value, list[S]] = {}
    for step in steps:
        found.setdefault(step.out, []).append(step)
    return list(found.values())


_SUMMING = {*TOGETHER, "add", "sub", "addcmul", "mul", "sum", "mean", "neg", "div"}


def _within(combine: Combine) -> set[Value]:
    """The result of a combine, and the partial sums and products that are made for it alone."""
    leaves = {combine.x, combine.outer.f, combine.layer_bias, *combine.gates()}
    found, pending = {combine.out}, [combine.out]
    while pending:
        op = pending.pop().op
        if op is not None and (op.name in _SUMMING or is_movement(op)):
            inner = (v for v in op.inputs() if v not in found and v not in leaves)
            fresh = [v for v in inner if len(v.users) == 1 and not v.is_output]
            found.update(fresh)
            pending += fresh
    return found


def _is_hyper_connection(mixtures: list[Mixture], findings: Findings) -> bool:
    """Whether the gates act on the streams that they come from. Many other layers norm, project and squash."""
    x = mixtures[0].projection.x
    gates = {value for mixture in mixtures for value in mixture.gates}
    return (
        any(a.x is x and a.gate in gates and a.has_whole_gate for a in findings.aggregates)
        or any(c.x is x and c.outer.post in gates and not c.outer.columns for c in findings.combines)
        or any(isinstance(gate.kind, Mixing) for mixture in mixtures for gate in mixture.gates.values())
        or any(map(_splits_as_gates, mixtures))
    )


def _splits_as_gates(mixture: Mixture) -> bool:
    """Whether the rows of a projection are those of h_pre, h_post and h_res: in a graph that was cut, all go out."""
    n = streams_by_rows(mixture.projection)
    sigmoids = {gate.rows for gate in mixture.gates.values() if isinstance(gate.kind, Sigmoid)}
    return n is not None and {tuple(range(n)), tuple(range(n, 2 * n))} <= sigmoids


def _by_streams(mixtures: list[Mixture]) -> list[list[Mixture]]:
    """Mixtures of the same streams under the same normalisation belong together: pre, post and res projections."""
    groups: dict[tuple[Value, Rms, Weight | None], list[Mixture]] = {}
    for mixture in mixtures:
        key = (mixture.projection.x, mixture.normed.rms, mixture.normed.weight)
        groups.setdefault(key, []).append(mixture)
    return list(groups.values())


__all__ = [
    "INTERNAL",
    "TURNS",
    "AggregateSite",
    "CombineSite",
    "Decline",
    "Declined",
    "MixSite",
    "MixingSite",
    "Plan",
    "Product",
    "ProjectionSite",
    "Rows",
    "SinkhornSite",
    "Site",
    "Vector",
    "WithGates",
    "outputs",
    "plan",
    "product_shown",
    "surface",
    "visible",
]
