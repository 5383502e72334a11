"""How graphs change: from a Dynamo graph to one with registered operators, then to fused ones, then to their kernels.

functional -> sizes -> shadow -> recognise -> plan -> rewrite -> report, before autograd; fuse, on the joint graph of
forward and backward; share -> lower, on each of the two once they are apart
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Collection
from dataclasses import replace

from torch import fx

from mhc_compile import compat
from mhc_compile.forms import Sinkhorn
from mhc_compile.passes import fuse as fusing
from mhc_compile.passes import lower as lowering
from mhc_compile.passes import plan as planning
from mhc_compile.passes import shadow as shadowing
from mhc_compile.passes import share as sharing
from mhc_compile.passes import sizes
from mhc_compile.passes.functional import functional
from mhc_compile.passes.fuse.joint import is_operator
from mhc_compile.passes.plan import (
    AggregateSite,
    CombineSite,
    Decline,
    Declined,
    MixSite,
    Plan,
    SinkhornSite,
    Site,
    outputs,
)
from mhc_compile.passes.recognise import recognise
from mhc_compile.passes.report import Location, Report, SiteReport, location
from mhc_compile.passes.rewrite import rewrite

log = logging.getLogger(__name__)

# Whether norms that read layer inputs are taken in where nobody says so. None: on GPUs, since on a CPU that costs more
# than it saves.
INPUT_NORMS: bool | None = None


def run(graph: fx.Graph, *, input_norms: bool | None = None) -> tuple[fx.Graph | None, Report]:
    """Rewrite the hyper-connections of one Dynamo graph, with the norms that read layer inputs or without.

    Returns the new graph, or None where there is nothing to rewrite, and the report. The given graph is not
    changed, and whatever goes wrong inside is written into the report, never raised. What is raised is Dynamo's
    request to trace again, if a form's constant was an input of the graph.
    """
    begin = time.perf_counter()
    report = Report(graphs=1)
    new: fx.Graph | None = None
    shadow: shadowing.Shadow | None = None
    compat.float_watch.clear()
    collecting = gc.isenabled()
    gc.disable()  # looking for cycles takes a third of the time, and those of the record are taken apart in the end
    try:
        compat.settle_sizes(compat.common_fake_mode(map(compat.example, graph.nodes)))
        shadow = shadowing.trace(sizes.from_inputs(functional(graph)))
        plan = planning.plan(shadow, recognise(shadow), input_norms=INPUT_NORMS if input_norms is None else input_norms)
        new = _rewrite(shadow, plan) if plan.sites else None
        report.sites = _sites(shadow, plan)
    except Exception as error:  # a compile must never fail because of us; the user's graph is still whole
        log.exception("the passes failed; this graph is compiled as it was")
        report.errors.append(f"{type(error).__name__}: {error}")
        new = None
    finally:
        if shadow is not None:
            shadow.release()
        if collecting:
            gc.enable()
    if new is not None:
        compat.float_watch.settle()
    report.seconds = time.perf_counter() - begin
    log.info("%s", report)
    return new, report


def fuse(
    module: fx.GraphModule, names: Collection[str] = tuple(fusing.FUSIONS), layers: fusing.Layers = None
) -> Report:
    """Fuse the operators of a joint or inference graph module in place; the report holds the counts.

    As with `run`, what goes wrong is reported and leaves the module as it was.
    """
    report = Report()
    if not any(is_operator(node) for node in module.graph.nodes):
        return report
    begin = time.perf_counter()
    try:
        new, _ = compat.copy_graph(module.graph)
        report.fusions = fusing.fuse(new, names, layers)
    except Exception as error:  # a compile must never fail because of us; the user's graph is still whole
        log.exception("fusing failed; this graph is compiled without")
        report.errors.append(f"{type(error).__name__}: {error}")
    if report.fusions.total():
        module.graph = new
        module.recompile()
    report.seconds = time.perf_counter() - begin
    log.info("fused: %s", ", ".join(f"{count} x {name}" for name, count in report.fusions.items()) or "nothing")
    return report


def share(graph: fx.Graph) -> tuple[list[fx.GraphModule], Report]:
    """Let layers that are alike be calls of one graph, in place; returns the graphs that are called, and the report."""
    begin = time.perf_counter()
    report = Report()
    bodies: list[fx.GraphModule] = []
    try:
        for body in sharing.share(graph, report.shared):
            bodies.append(body)
    except Exception as error:  # a compile must never fail because of us; sublayers that are no calls yet are whole
        log.exception("sharing failed; each of the other sublayers is compiled")
        report.errors.append(f"{type(error).__name__}: {error}")
    report.seconds = time.perf_counter() - begin
    return bodies, report


def lower(graph: fx.Graph) -> Report:
    """Lower the operators of a graph after grad in place, those that can be; the report holds the counts."""
    begin = time.perf_counter()
    report = Report()
    try:
        report.lowered = lowering.lower(graph)
    except Exception as error:  # a compile must never fail because of us; operators that are left still run
        log.exception("lowering failed; operators are left as they are")
        report.errors.append(f"{type(error).__name__}: {error}")
    report.seconds = time.perf_counter() - begin
    if report.lowered:
        log.info("lowered: %s", ", ".join(f"{count} x {name}" for name, count in report.lowered.items()))
    return report


def run_recursively(module: fx.GraphModule) -> Report:
    """Rewrite a graph module in place, with the bodies of its checkpoint regions and other nested graphs.

    A graph comes before its bodies: an `autograd.Function` that computes a gate is recognised by what its bodies
    compute, as their author wrote them, and disappears with them.
    """
    total = Report()
    new, report = run(module.graph)
    total.add(report)
    if new is not None:
        module.graph = new
        module.recompile()
    for name in sorted({str(node.target) for node in module.graph.nodes if node.op == "get_attr" and node.users}):
        body = getattr(module, name, None)
        if isinstance(body, fx.GraphModule):
            total.add(run_recursively(body))
    return total


def _rewrite(shadow: shadowing.Shadow, plan: Plan) -> fx.Graph | None:
    """Rewrite all sites; one that turns out not to be expressible is declined, and the rest tried again."""
    while plan.sites:
        try:
            return rewrite(shadow, plan)
        except Decline as reason:
            site = reason.site
            if site is None:
                raise
            plan.sites.remove(site)
            if isinstance(site, MixSite) and site.norm is not None:
                plan.sites.append(replace(site, norm=None, norm_apart=str(reason)))
                continue
            plan.declined.append(Declined(site.op, str(reason), _node(site)))
    return None


def _sites(shadow: shadowing.Shadow, plan: Plan) -> list[SiteReport]:
    entries: list[tuple[int, SiteReport]] = []
    for site in plan.sites:
        node = _node(site)
        entries.append((shadow.position[node], SiteReport(site.op, location(node), _detail(site))))
    for declined in plan.declined:
        at = shadow.position[declined.node] if declined.node is not None else 0
        entries.append((at, SiteReport(declined.what, location(declined.node), "", declined.reason)))
    return [entry for _, entry in sorted(entries, key=lambda pair: pair[0])]


def _node(site: Site) -> fx.Node:
    # A norm is often in a module of its own, which says less about where a site is.
    return outputs(replace(site, norm=None) if isinstance(site, MixSite) else site)[0].nodes[0]


def _detail(site: Site) -> str:
    if isinstance(site, CombineSite):
        c = site.combine
        kind = "x" if c.mix is None else "h_res^T x" if c.mix.is_transposed else "h_res x"
        return (
            f"n = {c.streams.n}, C = {c.streams.channels}, {str(c.x.dtype).removeprefix('torch.')}, h_post f + {kind}"
        )
    if isinstance(site, AggregateSite):
        return f"n = {site.aggregate.streams.n}, C = {site.aggregate.streams.channels}, a gate of its own"
    if isinstance(site, SinkhornSite):
        return _sinkhorn(site.matrices.kind.form)
    parts = [f"n = {site.streams.n}, C = {site.streams.channels}, {str(site.x.dtype).removeprefix('torch.')}"]
    parts.append(f"rms eps {site.normed.rms.eps:g} {site.normed.rms.mode}")
    if site.res is not None:
        parts.append(_sinkhorn(site.sinkhorn))
    if site.norm is not None:
        parts.append(f"input norm eps {site.norm.eps:g}")
    if site.norm_apart:
        parts.append(f"RMS norm behind it stays apart: {site.norm_apart}")
    return ", ".join(parts)


def _sinkhorn(form: Sinkhorn) -> str:
    steps = f"sinkhorn {form.start}, {form.first} first, {form.steps} half-steps"
    return steps + (", log domain" if form.log_domain else f", eps {form.eps:g}{' clamped' if form.clamp else ''}")


__all__ = ["Location", "Report", "SiteReport", "fuse", "lower", "run", "run_recursively", "share"]
