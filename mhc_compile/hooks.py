"""The three passes as Inductor calls them, and how they are combined with the passes of others.

One works on each Dynamo graph before autograd, one on each joint graph after it, one on each graph that Inductor is
about to compile. Each is a `CustomGraphPass`. Its `uuid` covers the options and the sources of operators, kernels and
passes. So Inductor caches compiled graphs as usual, and a cached graph is not found any more if one of these changes.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import fx

import mhc_compile.ops  # noqa: F401  (registers the operators that the passes insert)
from mhc_compile import checking, compat, kernels, passes, records
from mhc_compile.as_it_was import is_left
from mhc_compile.guard import Deliberate, guard, told
from mhc_compile.options import CHECK, FUSE, INPUT_NORM, MXFP8, OPTIONS, SKIP
from mhc_compile.passes.fuse import FUSIONS
from mhc_compile.passes.report import Report, SiteReport

# Whether the graphs that Inductor compiles are parts of one that was rewritten as a whole.
is_rewritten: ContextVar[bool] = ContextVar("is_rewritten", default=False)
# Whether Inductor compiles a graph once more, which it failed to compile with kernels and loops in place of operators.
_as_calls: ContextVar[bool] = ContextVar("_as_calls", default=False)


class StrictError(Deliberate):
    """Hyper-connection code was found and not rewritten, and the option `mhc.strict` is on.

    The first call of the compiled model raises it, and `except mhc_compile.StrictError` around that call catches it.
    """


class Configured(compat.CustomGraphPass):
    """A pass that reads the "mhc." options. Inductor's caches identify it by its sources and options."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        self.options = OPTIONS | (options or {})

    def uuid(self) -> Any:
        """The name by which Inductor's caches know the pass; a random one if the sources cannot be read."""
        try:
            return self._identity()
        except Exception as error:
            told(error, "compiled graphs are not found in caches", _errors())
            return ("unknown", secrets.token_hex())

    def _identity(self) -> tuple[Any, ...]:
        return (_sources_hash(), *((name, value) for name, value in sorted(self.options.items()) if name != CHECK))


def be_strict(compiled: records.Compiled, options: dict[str, Any]) -> None:
    """Raise for sites that were left. Not earlier: Dynamo may throw a graph away until autograd has traced it."""
    if options.get("mhc.strict"):
        report = compiled.report()
        left = lost([*report.declined, *report.torn], options)
        if left or report.errors:
            raise StrictError(strict_words(report, left, options.get(SKIP, ())))


def lost(sites: Sequence[SiteReport], options: dict[str, Any]) -> list[SiteReport]:
    """The sites that strict options raise for: `mhc.skip` does not name their lines."""
    return [site for site in sites if not site.location.is_among(options.get(SKIP, ()))]


def _hook(run: Callable[[Any, fx.Graph], None]) -> Callable[[Any, fx.Graph], None]:
    """A pass that Inductor calls. Its failures do not reach Inductor."""

    @functools.wraps(run)
    def guarded(self: Any, graph: fx.Graph) -> None:
        if is_left.get():
            return
        try:
            run(self, graph)
        except Exception as error:
            told(error, "a pass over a graph is left out", _errors())

    return guarded


def _errors() -> list[str] | None:
    """The list for failures of the compilation in progress; None before there is a report."""
    try:
        compiled = records.current()
    except Exception:  # reporting a failure must not fail
        return None
    return None if compiled is None else compiled.traced.errors


class MhcPass(Configured):
    """The pre-grad pass: rewrites one Dynamo graph in place and records the report, nested graphs included."""

    @_hook
    def __call__(self, graph: fx.Graph) -> None:
        module = graph.owning_module
        compiled = _compiled()
        compiled.loaded.clear()  # a cache that had one graph and not the other is of no use
        if is_rewritten.get():
            compiled.traced.graphs += 1
            return
        compiled.say("Dynamo has traced it")
        new, report = None, Report(graphs=1)
        with guard("this graph is compiled as it was", report.errors):
            norms, left = self.options[INPUT_NORM], checking.left_alone(graph)
            new, report = passes.run(graph, input_norms=norms, module=module, left=left, skipped=self.options[SKIP])
        compiled.traced.add(report)
        trace(compiled, report, module if new is not None else None)
        with guard("C++ loops are compiled later, when Inductor needs them", compiled.traced.errors):
            if new is not None and _is_for_cpu(graph):
                compat.compile_beside()

    def _identity(self) -> tuple[Any, ...]:
        """With the nodes of the lines to skip: other lines may stand there by now."""
        places, skipped = _compiled().places, self.options[SKIP]
        nodes = tuple(places.named(skipped)) if places is not None and skipped else ()
        return (*super()._identity(), checking.all_left_alone(), nodes)


def trace(compiled: records.Compiled, report: Report, rewritten: fx.GraphModule | None) -> None:
    """Put what was done to a graph, and the graph, into the structured trace."""
    if rewritten is not None:
        with guard("the trace has no graph", compiled.traced.errors):
            compat.trace_artifact("mhc_rewritten_graph", lambda: compat.readable(rewritten))
    with guard("the trace has no report", compiled.traced.errors):
        compat.trace_artifact("mhc_report", lambda: str(report))


# How many sites the first line of an error names, and how many letters of each reason it has.
_NAMED, _REASON = 3, 160


def strict_words(report: Report, left: Sequence[SiteReport], skipped: Sequence[str] = ()) -> str:
    """The message of a `StrictError`: what it is raised for, how to accept that, and the report.

    skipped: what `mhc.skip` has named already.
    """
    try:
        named = [
            f"{site.op} at {site.location} is {'declined' if site in report.declined else site.detail}"
            + (f" ({textwrap.shorten(site.reason, _REASON, placeholder=' ...')})" if site.reason else "")
            for site in left[:_NAMED]
        ]
        named += [f"{len(left) - _NAMED} more are left"] * (len(left) > _NAMED)
        named += ["something failed inside mhc_compile"] * bool(report.errors)
        places = ", ".join(f'"{place}"' for place in dict.fromkeys([*skipped, *(str(site.location) for site in left)]))
        skip = f'. To accept this, pass options={{"mhc.skip": [{places}]}}: no site at these lines is rewritten then'
        raised = f'options={{"mhc.strict": True}} raises: {"; ".join(named)}{skip if left else ""}'
        return f"{raised}\nThe report until then:\n{report}"
    except Exception as error:
        told(error, "the report is incomplete", report.errors)
        return "; ".join([site.reason or "" for site in report.declined] + report.errors)


def _is_for_cpu(graph: fx.Graph) -> bool:
    given = [compat.example(node) for node in graph.find_nodes(op="placeholder")]
    return all(value.device.type == "cpu" for value in given if isinstance(value, torch.Tensor))


def _compiled() -> records.Compiled:
    """The entry for the graph that is being compiled."""
    with guard("the report is not kept"):
        compiled = records.current()
        if compiled is not None:
            return compiled
    return records.Compiled()


class FusePass(Configured):
    """The joint pass: fuses operators of forward and backward, and adds to the report of the graph."""

    @_hook
    def __call__(self, graph: fx.Graph) -> None:
        module = graph.owning_module
        if module is None:
            return
        compiled = _compiled()
        compiled.loaded.clear()
        compiled.say("autograd has traced it")
        be_strict(compiled, self.options)
        names = [name for name in FUSIONS if self.options[FUSE + name]]
        compiled.traced.add(passes.fuse(module, names, self.options["mhc.recompute"]))


class LowerPass(Configured):
    """The post-grad pass: compiles identical sublayers once, takes operators apart, and reports both."""

    @_hook
    def __call__(self, graph: fx.Graph) -> None:
        report, compiled = Report(), _compiled()
        compiled.lowered.append(report)
        be_strict(compiled, self.options)
        compiled.say("Inductor has a graph of its own")
        self.lower(graph, report)
        be_strict(compiled, self.options)
        if compat.compiles_ahead_of_time():
            with guard("the package has no report", report.errors):
                compat.put_into_package(compiled.packed())
        compiled.say("Inductor generates its code")

    def lower(self, graph: fx.Graph, report: Report) -> None:
        """Lower a graph, and those that it calls."""
        for settle in (
            compat.keep_arguments_of_calls,  # of regions that a user marked, too
            compat.keep_order_of_writes,
            compat.keep_sums_in_their_memory,
            *((compat.tell_workers,) if self.options["mhc.lower"] else ()),
        ):
            with guard("Inductor is left as it is", report.errors):
                settle()
        if self.options["mhc.share_layers"] and compat.calls_graphs() and not _as_calls.get():
            inner = _LowerCalled(self.options | {"mhc.share_layers": False}, report)
            report.add(passes.share(graph, lambda body: compat.run_passes_after_grad(body, inner))[1])
        if self.options["mhc.lower"] and not _as_calls.get():
            report.add(passes.lower(graph, self.options[MXFP8]))
        if compat.compiles_ahead_of_time():
            with guard("AOTInductor sees operators without their defaults", report.errors):
                passes.lowering.spell_out(graph)

    def _identity(self) -> tuple[Any, ...]:
        """With the properties of the GPU by which kernels are chosen. Inductor's key has only the GPU's name."""
        count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
        devices = [torch.device("cuda", i) for i in range(count)]
        chosen_by = [(kernels.gpus.processors(device), kernels.gpus.bytes_per_second(device)) for device in devices]
        traced = _compiled().digest()
        return (super()._identity(), traced, kernels.communicates(), compat.makes_cuda_graphs(), *chosen_by)


_CALLED = "Inductor does not compile what operators became, and calls the operators instead"


def second_try() -> Callable[[Exception], contextlib.AbstractContextManager[None] | None] | None:
    """What `compat.compile_again` watches a compilation with: operators stay calls where what they became fails.

    Not under strict options, nor in a job of several ranks: all of these have to compute with the same roundings.
    """
    compiled = records.current()
    if compiled is None or compiled.strict:
        return None
    before = len(compiled.lowered)

    def second(error: Exception) -> contextlib.AbstractContextManager[None] | None:
        new = compiled.lowered[before:]
        if isinstance(error, Deliberate) or compat.asks_to_trace_again(error):
            return None
        if not any(report.lowered or report.shared for report in new) or compat.job_store() is not None:
            return None
        del compiled.lowered[before:]
        return _calling(error, compiled)

    return second


@contextlib.contextmanager
def _calling(error: Exception, compiled: records.Compiled) -> Iterator[None]:
    token = _as_calls.set(True)
    try:
        yield
    finally:
        _as_calls.reset(token)
    told(error, _CALLED, compiled.traced.errors)


class _LowerCalled(Configured):
    """The post-grad pass of a graph that another calls, which adds to the report of the calling graph."""

    def __init__(self, options: dict[str, Any], report: Report) -> None:
        super().__init__(options)
        self._report = report

    @_hook
    def __call__(self, graph: fx.Graph) -> None:
        LowerPass(self.options).lower(graph, self._report)


class _Chain(compat.CustomGraphPass):
    """Users' own passes, then ours. If Inductor says whether gradients follow, passes that ask for it get this, too."""

    def __init__(self, *passes: Callable[..., None]) -> None:
        self.passes = passes

    def __call__(self, graph: fx.Graph, **known: Any) -> None:
        module = graph.owning_module
        for one in self.passes:
            one(graph, **(known if compat.is_inference_aware(one) else {}))
            graph = module.graph if module is not None else graph

    def uuid(self) -> Any:
        parts = [one.uuid() if isinstance(one, compat.CustomGraphPass) else None for one in self.passes]
        return None if any(part is None for part in parts) else tuple(parts)


_MODULES = ("agreement.py", "backend.py", "budget.py", "forms.py", "guard.py", "hooks.py", "options.py", "encoding.py")


def _sources() -> list[str]:
    """Every source file that decides what a compiled graph computes."""
    root = Path(__file__).parent
    files = [root / name for name in _MODULES]
    for folder in ("compat", "ops", "kernels", "passes"):
        files += sorted((root / folder).rglob("*.py"))
    return [str(file) for file in files]


@functools.cache
def _sources_hash() -> Any:
    return compat.hash_files(_sources())


HOOKS: dict[str, Callable[[dict[str, Any]], compat.CustomGraphPass]] = {
    "pre_grad_custom_pass": MhcPass,
    "joint_custom_pre_pass": FusePass,
    "post_grad_custom_post_pass": LowerPass,
}


def chained(others: Any, own: compat.CustomGraphPass) -> compat.CustomGraphPass:
    """Our pass after those of a setting; older passes of ours among these are removed."""
    chain = (*(one for one in passes_of(others) if not isinstance(one, Configured)), own)
    if len(chain) == 1:
        return own
    kind: type[_Chain] = compat.inference_aware(_Chain) if any(map(compat.is_inference_aware, chain)) else _Chain
    return kind(*chain)


def passes_of(configured: Any) -> list[Any]:
    """Every pass of a setting, those of chains included."""
    nested = [one.passes if isinstance(one, _Chain) else (one,) for one in compat.as_list(configured)]
    return [one for several in nested for one in several]
