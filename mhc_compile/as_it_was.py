"""Graphs that are compiled as the program has them: where torch does not compile them rewritten, or runs no pass."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import fx

from mhc_compile import compat, passes
from mhc_compile.encoding import in_one_line
from mhc_compile.guard import Deliberate, guard, told
from mhc_compile.options import SKIP
from mhc_compile.passes.report import Report, SiteReport
from mhc_compile.records import Compiled

T = TypeVar("T")

# Whether the passes leave all graphs of this context alone.
is_left: ContextVar[bool] = ContextVar("is_left", default=False)

_NO_PASS = 'Inductor\'s use_pre_grad_passes is off, as in mode="lite": it does not run the pass that rewrites'
_WHAT = "a graph is compiled as it was, since torch does not compile it with operators"


def or_as_it_was(compiling: Callable[[], T], module: Any, compiled: Compiled) -> T:
    """What `compiling` returns for a module; where it raises after passes have rewritten the module, without them.

    If that raises as well, the first error is raised. So it is, with no second attempt, under strict options, for
    packages of AOTInductor, and in a job of several ranks, of which all have to rewrite a graph or none.
    """
    before: list[tuple[fx.GraphModule, compat.Snapshot]] = []
    with guard("if torch fails to compile this graph, it is not compiled as it was"):
        parts = module.modules() if isinstance(module, fx.GraphModule) else ()
        before = [(part, compat.Snapshot(part.graph)) for part in parts if isinstance(part, fx.GraphModule)]
    try:
        return compiling()
    except Exception as error:
        if not before or not _may_be_left(compiled, error):
            raise
        token = is_left.set(True)
        try:
            for part, graph in before:
                part.graph = graph.put_back()
            with compat.without_graph_caches():
                result = compiling()
        except Exception:
            raise error from None
        finally:
            is_left.reset(token)
        _note(compiled, error)
        return result


def look_only(module: Any, compiled: Compiled, options: dict[str, Any]) -> None:
    """Have the report say which sites a graph has, and that Inductor runs no pass that would rewrite them."""
    if not isinstance(module, fx.GraphModule):
        return
    with guard("a graph that Inductor runs no pass over is not looked at", compiled.traced.errors):
        copy = compat.module_of(compat.copy_graph(module.graph)[0], module)
        compiled.traced.add(passes.run_recursively(copy, skipped=options.get(SKIP, ())))
        compiled.traced = _declined(compiled.traced, _NO_PASS)


def _may_be_left(compiled: Compiled, error: Exception) -> bool:
    """Whether a graph was rewritten that fails to compile, and may be compiled as it was."""
    if compiled.strict or isinstance(error, Deliberate) or compat.asks_to_trace_again(error):
        return False
    with guard("a graph that torch fails to compile is not compiled as it was"):
        rewritten = bool(compiled.traced.rewritten or compiled.traced.fusions)
        return rewritten and compat.job_store() is None and not compat.compiles_ahead_of_time()
    return False


def _note(compiled: Compiled, error: Exception) -> None:
    """Have the report say that no site of the graph is rewritten, and why."""
    old = compiled.traced
    told(error, _WHAT, old.errors)
    reason = f"torch does not compile the graph with it: {in_one_line(error)}"
    compiled.discard()
    compiled.traced = _declined(old, reason)


def _declined(report: Report, reason: str) -> Report:
    """What a report says of the program itself, with this reason for each site that was rewritten."""
    sites = [
        SiteReport(site.op, site.location, "", reason, module=site.module, node=site.node) if site.rewritten else site
        for site in report.sites
    ]
    return Report(
        sites=sites,
        called=report.called,
        advice=report.advice,
        graphs=report.graphs,
        compiled=report.compiled,
        seconds=report.seconds,
        errors=report.errors,
        skipped=report.skipped,
    )
