"""How graphs change: from a Dynamo graph to one with registered operators, then to fused ones, then to their kernels.

functional -> sizes -> shadow -> recognise -> plan -> rewrite -> report, before autograd; fuse, on the joint graph of
forward and backward; share -> lower, on each of the two once they are apart
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from torch import fx

from mhc_compile import compat
from mhc_compile.agreement import attempt
from mhc_compile.budget import Steps
from mhc_compile.guard import guard, told
from mhc_compile.passes import fuse as fusing
from mhc_compile.passes import lower as lowering
from mhc_compile.passes import plan as planning
from mhc_compile.passes import shadow as shadowing
from mhc_compile.passes import share as sharing
from mhc_compile.passes import sizes
from mhc_compile.passes.before_after import BeforeAfter, before_after, of_nodes
from mhc_compile.passes.called import called, forget_sites
from mhc_compile.passes.cut import WRITTEN_ELSEWHERE, advice, cut
from mhc_compile.passes.functional import functional
from mhc_compile.passes.fuse.apart import keep_apart
from mhc_compile.passes.fuse.joint import is_operator, noted_parts, operator_name
from mhc_compile.passes.lists import Lists
from mhc_compile.passes.named import named
from mhc_compile.passes.plan import (
    INTERNAL,
    AggregateSite,
    Decline,
    Declined,
    MixSite,
    Plan,
    ProjectionSite,
    Site,
    WithGates,
    nested,
    outputs,
)
from mhc_compile.passes.recognise import recognise
from mhc_compile.passes.report import CUT, Fused, Location, Report, SiteReport, location, module_path, number
from mhc_compile.passes.rewrite import SitesFailed, rewrite
from mhc_compile.passes.rewrite.watched import watched
from mhc_compile.passes.site_forms import form_of
from mhc_compile.passes.site_modules import Alone, alone
from mhc_compile.passes.stages import Stages

log = logging.getLogger(__name__)

# Here, because whatever compiles or explains a model imports this module, once in a process.
compat.tell_if_untested()

# Whether norms that read layer inputs are taken in where nobody says so. None: on GPUs, since on a CPU that costs more
# than it saves.
INPUT_NORMS: bool | None = None
# Why a site is left alone that the user does not want to be rewritten.
SKIPPED = 'options={"mhc.skip": ...} names this line'
# Why sites are left alone, by their names.
Left = Mapping[str, str]


# Sites that are declined only if no report of a called graph has them, with what enters or leaves these graphs.
Undecided = list[tuple[SiteReport, list[nested.CalledEnd]]]


@compat.without_hooks_of_saved_tensors()
def run(
    graph: fx.Graph,
    *,
    input_norms: bool | None = None,
    module: fx.GraphModule | None = None,
    left: Left = MappingProxyType({}),
    skipped: Sequence[str] = (),
    bodies: Callable[[], object] = lambda: None,
) -> tuple[fx.Graph | None, Report]:
    """Rewrite the hyper-connections of one Dynamo graph, with the norms that read layer inputs or without.

    left holds why some sites are left alone, by their names (`site_name`). skipped holds places in the program, as
    reports show them, whose sites are left alone. bodies is called after the rewriting, for the graphs that this one
    calls, if they are not done yet: what their reports have is not told in this one.

    Returns the new graph, or None where there is nothing to rewrite, and the report. The new graph is put into the
    module, if one is given; the old graph is not changed. Whatever goes wrong inside is written into the report, never
    raised. What is raised is Dynamo's request to trace again, if a form's constant was an input of the graph, and
    `agreement.FailedAlone`.
    """
    begin = time.perf_counter()
    report = Report(graphs=1, skipped=list(skipped))
    failures: list[str] = []
    places: dict[int, Location] = {}
    undecided: Undecided = []

    def change() -> fx.Graph | None:
        new = _rewritten(graph, input_norms, left, skipped, report, failures, places, undecided)
        if new is not None and module is not None:
            put(module, new)
        return new

    def undo() -> None:
        report.sites.clear()
        report.cut.clear()
        undecided.clear()
        nested.note(graph, {})
        if module is not None:
            put(module, graph)

    new = attempt("rewriting", graph, failures, change, undo)
    report.errors = failures + report.errors
    with guard("operators that the program calls are not reported", report.errors):
        report.called = called(graph)
    with guard("sites whose gates are in another graph are not reported", report.errors):
        report.cut += cut(new or graph, places)
        report.advice = advice(graph)
    report.seconds = time.perf_counter() - begin
    bodies()
    with guard("what graphs that this one calls have may be told twice", report.errors):
        told = {id(site) for site, called in undecided if nested.is_told(new or graph, called)}
        report.sites = [site for site in report.sites if id(site) not in told]
    with guard("the report is not logged", report.errors):
        log.info("%s", report)
    return new, report


def _rewritten(
    graph: fx.Graph,
    input_norms: bool | None,
    left: Left,
    skipped: Sequence[str],
    report: Report,
    failures: list[str],
    places: dict[int, Location],
    undecided: Undecided,
) -> fx.Graph | None:
    """The new graph, if any. Failures of the graph go to `failures`, those of the report to the report's errors.

    places: the places of sites, to be filled in by what the editor notes in their nodes. undecided is filled in, too.
    """
    stages = Stages()
    forget_sites(graph)
    nested.note(graph, {})
    with _planned(graph, input_norms, left, failures, stages) as (shadow, plan):
        _skip(plan, skipped)
        report.errors += plan.untold
        new = _rewrite(shadow, plan, failures) if plan.sites else None
        stages.done("rewrite")
        log.info("a graph of %d nodes: %s", len(graph.nodes), stages)
        if new is not None:
            compat.float_watch.settle()
        report.sites = [SiteReport(site.op, location(None), "") for site in plan.sites]
        shown: dict[int, BeforeAfter] = {}
        if new is not None:
            with guard("sites are reported without bytes and lines of the graph", report.errors):
                shown = before_after(shadow, plan, new)
        with guard("modules that only their names tell are not reported", report.errors):
            sites = [(site, _node(site)) for site in plan.sites]
            refused = [declined.node for declined in plan.declined if declined.node is not None]
            plan.declined += [] if failures else list(named(shadow, sites, refused))
        with guard("sites are reported without their places", report.errors):
            places |= {id(site): location(_node(site)) for site in plan.sites}
            entries = _sites(shadow, plan, shown)
            report.sites = [entry for entry, _ in entries]
            undecided += [(entry, called) for entry, called in entries if called]
            nested.note(new or graph, plan.told_of_ends)
            report.excerpts = {one.excerpt: list(one.lines) for one in shown.values()}
            # A graph that calls this one reads its gates.
            torn = [] if compat.is_called(graph) else [site for site in plan.torn if site in plan.sites]
            report.cut = [_torn(_node(site), site.op) for site in torn]
        return new


@contextlib.contextmanager
def _planned(
    graph: fx.Graph, input_norms: bool | None, left: Left, failures: list[str], stages: Stages
) -> Iterator[tuple[shadowing.Shadow, Plan]]:
    """A graph's record, which lasts for the context, and the plan for it."""
    wanted = INPUT_NORMS if input_norms is None else input_norms
    shadows: list[shadowing.Shadow] = []
    compat.float_watch.clear()
    collecting = gc.isenabled()
    gc.disable()  # looking for cycles takes a third of the time, and those of the record are taken apart in the end
    around = contextlib.ExitStack()
    try:
        around.enter_context(compat.autocast_of(graph))
        compat.settle_sizes(compat.common_fake_mode(map(compat.example, graph.nodes)))
        compat.give_examples(graph)
        sizes.put_inputs_first(graph)
        with compat.without_fake_tracebacks():
            shadows.append(shadowing.trace(sizes.from_inputs(functional(graph)), failures))
        stages.done("record")
        lists = Lists(shadows[0], failures)
        while True:
            stacked = lists.graph()
            shadow = shadows[0]
            if stacked is not None:
                with compat.without_fake_tracebacks():
                    shadow = shadowing.trace(stacked, failures)
                shadows.append(shadow)
                stages.done("record")
            findings = recognise(shadow, failures)
            stages.done("recognise")
            plan = planning.plan(shadow, findings, failures, input_norms=wanted, lists_left=lists.left())
            if lists.are_made(plan):
                break
        lists.tell(plan)
        _leave_alone(plan, left)
        stages.done("plan")
        yield shadow, plan
    finally:
        around.close()
        for shadow in shadows:
            shadow.release()
        if collecting:
            gc.enable()


def site_name(site: Site) -> str:
    """A name that identifies a site in its graph, in each compilation of one program."""
    return f"{site.op} {_node(site).name}"


def _leave_alone(plan: Plan, left: Left) -> None:
    for site in [site for site in plan.sites if site_name(site) in left]:
        plan.sites.remove(site)
        plan.declined.append(Declined(site.op, left[site_name(site)], _node(site)))


def _skip(plan: Plan, skipped: Sequence[str]) -> None:
    """Leave the sites at some places alone: `file.py:12` names them as reports do, with or without folders."""
    for site in list(plan.sites) if skipped else ():
        if location(_node(site)).is_among(skipped):
            plan.sites.remove(site)
            plan.declined.append(Declined(site.op, SKIPPED, _node(site)))


F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Apart(Generic[F]):
    """A program in which each site is a call of a function; whole are the sites that stay code, with the reasons."""

    graph: fx.Graph
    functions: list[F]
    whole: list[SiteReport]


@compat.without_hooks_of_saved_tensors()
def apart(
    graph: fx.Graph,
    function_of: Callable[[Alone], F],
    errors: list[str],
    *,
    input_norms: bool | None = None,
    left: Left = MappingProxyType({}),
) -> Apart[F] | None:
    """The sites that `run` would rewrite, each by itself, and the program that calls a function for each.

    None where there is no site.
    """
    with _planned(graph, input_norms, left, errors, Stages()) as (shadow, plan):
        if _rewrite(shadow, plan, errors) is None:
            return None
        compat.float_watch.settle()
        parts: dict[int, tuple[Alone, F]] = {}
        whole: list[SiteReport] = []

        def leave(site: Site, error: Exception) -> None:
            reason = str(error) if isinstance(error, Decline) else told(error, "a site is not looked at alone", errors)
            whole.append(SiteReport(site.op, location(_node(site)), "", reason))

        for site in plan.sites:
            try:
                part = alone(shadow, site)
                parts[id(site)] = part, function_of(part)
            except SitesFailed as failed:
                leave(site, failed.failures[id(site)])
            except Exception as error:
                leave(site, error)
        while True:
            try:
                new = watched(shadow, parts)
                return Apart(new, [function for _, function in parts.values()], whole)
            except SitesFailed as failed:
                failures = failed.failures
            except Decline as declined:
                failures = {id(declined.site): declined}
            for number, why in failures.items():
                leave(parts.pop(number)[0].site, why)


def fuse(
    module: fx.GraphModule, names: Collection[str] = tuple(fusing.FUSIONS), layers: fusing.Layers = None
) -> Report:
    """Fuse the operators of a joint or inference graph module in place; the report holds the counts.

    As with `run`, what goes wrong is reported and leaves the module as it was.
    """
    report = Report()
    with guard("this graph is compiled without fusions", report.errors):
        if any(map(is_operator, module.graph.nodes)):
            _fuse(module, names, layers, report)
    return report


def _fuse(module: fx.GraphModule, names: Collection[str], layers: fusing.Layers, report: Report) -> None:
    begin = time.perf_counter()
    old = module.graph

    def change() -> bool:
        new, _ = compat.copy_graph(old)
        report.fusions = fusing.fuse(new, names, layers)
        with guard("the report does not say what was fused with what", report.errors):
            report.fused = [Fused(operator_name(node), parts, of_nodes([node])) for node, parts in noted_parts(new)]
        if changed := bool(report.fusions.total() + keep_apart(new)):
            put(module, new)
        return changed

    def undo() -> None:
        report.fusions.clear()
        report.fused.clear()
        put(module, old)

    attempt("fusing", old, report.errors, change, undo)
    report.seconds = time.perf_counter() - begin
    log.info(
        "fused: %s", ", ".join(f"{count} x {name}" for name, count in report.fusions.items() if count) or "nothing"
    )


def put(module: fx.GraphModule, graph: fx.Graph) -> None:
    """Make this the graph of a module, with its code; if the code cannot be made, the module stays as it was."""
    before = module.graph
    if graph is before:
        return
    try:
        module.graph = graph
    except Exception:
        with contextlib.suppress(Exception):  # the code there is still that of the graph before
            module.graph = before
        raise


def share(
    graph: fx.Graph, compile_body: Callable[[fx.GraphModule], None] | None = None
) -> tuple[list[fx.GraphModule], Report]:
    """Make identical layers calls of one graph, in place; returns the graphs that are called, and the report.

    `compile_body` is given each of these graphs; what it raises is a failure to share.
    """
    report = Report()
    bodies: list[fx.GraphModule] = []

    def change() -> bool:
        for body in sharing.share(graph, report.shared):
            if compile_body is not None:
                compile_body(body)
            bodies.append(body)
        if bodies:
            graph.lint()
        return bool(bodies)

    def forget() -> None:
        bodies.clear()
        report.shared.clear()

    _in_place("sharing", graph, report, change, forget)
    return bodies, report


def lower(graph: fx.Graph, mxfp8: bool = False) -> Report:
    """Lower the operators of a graph after grad in place, those that can be; the report holds the counts.

    mxfp8: whether kernels quantize what they make, where the graph does.
    """
    report = Report()

    def change() -> bool:
        report.lowered += lowering.lower(graph, report.errors, mxfp8)
        return bool(report.lowered)

    _in_place("lowering", graph, report, change, report.lowered.clear)
    lowering.compile_kernels(graph, report.errors)
    if report.lowered:
        log.info("lowered: %s", ", ".join(f"{count} x {name}" for name, count in report.lowered.items()))
    return report


def _in_place(
    stage: str, graph: fx.Graph, report: Report, change: Callable[[], bool], forget: Callable[[], None]
) -> None:
    """Change a graph that calls our operators; if that fails, put back the graph, and forget what was counted."""
    begin = time.perf_counter()
    with guard(f"this graph is compiled without {stage}", report.errors):
        if any(map(is_operator, graph.nodes)):
            snapshot = compat.Snapshot(graph)

            def undo() -> None:
                snapshot.put_back()
                forget()

            attempt(stage, graph, report.errors, change, undo)
    report.seconds = time.perf_counter() - begin


def look_at_calls(module: fx.GraphModule) -> None:
    """Note of graphs that others call what only their calls tell, so that each can be looked at by itself."""
    compat.give_examples_to_bodies(module)
    compat.note_autocast_of_bodies(module)


def run_recursively(
    module: fx.GraphModule,
    *,
    input_norms: bool | None = None,
    left_of: Callable[[fx.Graph], Left] = lambda graph: {},
    skipped: Sequence[str] = (),
) -> Report:
    """Rewrite a graph module in place, with the bodies of its checkpoint regions and other nested graphs.

    left_of says for each graph which sites are left alone, and why; skipped holds the places of others, as for `run`.

    A graph comes before its bodies: an `autograd.Function` that computes a gate is recognised by what its bodies
    compute, as their author wrote them, and disappears with them.
    """
    bodies = Report()

    def run_bodies() -> None:
        for name in sorted({str(node.target) for node in module.graph.nodes if node.op == "get_attr" and node.users}):
            body = getattr(module, name, None)
            if isinstance(body, fx.GraphModule):
                bodies.add(run_recursively(body, input_norms=input_norms, left_of=left_of, skipped=skipped))

    options: dict[str, Any] = {"input_norms": input_norms, "left": left_of(module.graph), "skipped": skipped}
    total = Report()
    with guard("sites in graphs that others call are left", total.errors):
        look_at_calls(module)
    total.add(run(module.graph, module=module, bodies=run_bodies, **options)[1])
    total.add(bodies)
    return total


# How often one graph's sites are put in place, in addition to twice for each site. Each time, a site or its norm is
# dropped.
_MOST_TRIES = 64


def _rewrite(shadow: shadowing.Shadow, plan: Plan, errors: list[str]) -> fx.Graph | None:
    """Rewrite all sites. Sites that fail, or that cannot be expressed, are declined, and the others are tried again."""
    budget = Steps("tries to rewrite the sites of a graph", _MOST_TRIES + 2 * len(plan.sites))
    while plan.sites:
        budget.take()
        try:
            return rewrite(shadow, plan)
        except SitesFailed as failed:
            _decline(plan, failed.failures, errors)
        except Exception as error:
            site = error.site if isinstance(error, Decline) else None
            _decline(plan, {id(site or _culprit(shadow, plan, budget)): error}, errors)
    return None


def _culprit(shadow: shadowing.Shadow, plan: Plan, budget: Steps) -> Site:
    """The site to blame for an error that names none: the shortest prefix of the sites that fails ends with it."""
    works, fails = 0, len(plan.sites)
    while fails - works > 1:
        budget.take()
        middle = (works + fails) // 2
        try:
            rewrite(shadow, Plan(plan.sites[:middle], []))
            works = middle
        except Exception:
            fails = middle
    return plan.sites[fails - 1]


def _decline(plan: Plan, failures: dict[int, Exception], errors: list[str]) -> None:
    """Take the first site that failed, and those with the same failure, out of a plan; or the norm out of the site."""
    kinds = {number: (type(error), str(error)) for number, error in failures.items()}
    first = next(kinds[id(site)] for site in plan.sites if id(site) in kinds)
    for site in list(plan.sites):
        if kinds.get(id(site)) != first:
            continue
        error = failures[id(site)]
        expected = isinstance(error, Decline)
        reason = str(error) if expected else f"{INTERNAL}: {told(error, 'a site is left as it is', errors)}"
        plan.sites.remove(site)
        if isinstance(site, (AggregateSite, MixSite)) and site.norm is not None:
            plan.sites.append(replace(site, norm=None, norm_apart=reason))
        else:
            plan.declined.append(Declined(site.op, reason, _node(site)))


def _sites(
    shadow: shadowing.Shadow, plan: Plan, shown: Mapping[int, BeforeAfter]
) -> list[tuple[SiteReport, list[nested.CalledEnd]]]:
    """What there is to say of each site, in program order, with what decides on it if it is declined."""
    entries: list[tuple[int, SiteReport, list[nested.CalledEnd]]] = []
    for site in plan.sites:
        node = _node(site)
        with_own = site.logits if isinstance(site, MixSite) else site
        own = with_own.own if isinstance(with_own, (WithGates, ProjectionSite)) else ""
        entry = SiteReport(site.op, location(node), form_of(site), own=own, module=module_path(node), node=number(node))
        if (one := shown.get(id(site))) is not None:
            entry = replace(entry, before=one.before, after=one.after, excerpt=one.excerpt)
        entries.append((shadow.position[node], entry, []))
    for declined in plan.declined:
        at = shadow.position[declined.node] if declined.node is not None else 0
        entry = SiteReport(
            declined.what,
            location(declined.node),
            "",
            declined.reason,
            module=module_path(declined.node),
            node=number(declined.node),
        )
        entries.append((at, entry, declined.called))
    return [(entry, called) for _, entry, called in sorted(entries, key=lambda one: one[0])]


def _torn(node: fx.Node, op: str) -> SiteReport:
    return SiteReport(op, location(node), CUT, WRITTEN_ELSEWHERE, module=module_path(node), node=number(node))


def _node(site: Site) -> fx.Node:
    # A norm is often in a module of its own, which says less about where a site is.
    return outputs(replace(site, norm=None) if isinstance(site, (AggregateSite, MixSite)) else site)[0].nodes[0]


__all__ = ["Location", "Report", "SiteReport", "fuse", "lower", "run", "run_recursively", "share"]
