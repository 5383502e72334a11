"""The "mhc" backend: the passes, put into Inductor's own hooks.

One works on each Dynamo graph before autograd, one on each joint graph after it, one on each graph that Inductor is
about to compile. All are a `CustomGraphPass` with a `uuid` that covers the sources of operators, kernels and passes and
the options, so compiled graphs are cached by Inductor as ever, and cached ones go stale when any of those change.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import fx

import mhc_compile.ops  # noqa: F401  (registers the operators that the passes insert)
from mhc_compile import checking, compat, kernels, passes, records
from mhc_compile.guard import Deliberate, described, guard, told
from mhc_compile.passes.fuse import FUSIONS, check_layers
from mhc_compile.passes.report import Report

_PREFIX = "mhc."
_FUSE = "mhc.fuse."
_CHECK = "mhc.check"
_INPUT_NORM = _FUSE + "input_norm"
_SKIP = "mhc.skip"
OPTIONS: dict[str, Any] = {"mhc.strict": False, _CHECK: False} | {_FUSE + name: True for name in FUSIONS}
OPTIONS |= {_INPUT_NORM: passes.INPUT_NORMS, "mhc.recompute": None, "mhc.share_layers": True, "mhc.lower": True}
OPTIONS |= {_SKIP: ()}


class StrictError(Deliberate):
    """Hyper-connection code was found and not rewritten, and `mhc.strict` asks for it to be.

    The first call of the compiled model raises it, and `except mhc_compile.StrictError` around that call catches it.
    """


class OptionError(Deliberate, ValueError):
    """A wrong option or mode. `torch.compile` does not read them; the first call of the compiled model raises this."""


class _Configured(compat.CustomGraphPass):
    """A pass that goes by the "mhc." options, and is told from others in Inductor's caches by sources and options."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        self.options = OPTIONS | (options or {})

    def uuid(self) -> Any:
        """What Inductor's caches know the pass by; where that cannot be found out, what no cache knows."""
        try:
            return self._identity()
        except Exception as error:
            told(error, "compiled graphs are not found in caches", _errors())
            return ("unknown", secrets.token_hex())

    def _identity(self) -> tuple[Any, ...]:
        return (_sources_hash(), *((name, value) for name, value in sorted(self.options.items()) if name != _CHECK))

    def _be_strict(self, compiled: records.Compiled) -> None:
        """Raise for sites that were left. Not earlier: Dynamo may throw a graph away until autograd has traced it."""
        if self.options["mhc.strict"]:
            report = compiled.report()
            refused = [site for site in report.declined if site.reason != passes.SKIPPED]
            if refused or report.errors or report.cut:
                raise StrictError(_words(report))


def _hook(run: Callable[[Any, fx.Graph], None]) -> Callable[[Any, fx.Graph], None]:
    """A pass that Inductor calls, of which no failure reaches Inductor."""

    @functools.wraps(run)
    def guarded(self: Any, graph: fx.Graph) -> None:
        try:
            run(self, graph)
        except Exception as error:
            told(error, "a pass over a graph is left out", _errors())

    return guarded


def _errors() -> list[str] | None:
    """Where failures of the compilation in progress are told; None before there is a report."""
    try:
        compiled = records.current()
    except Exception:  # what tells of failures has to do without
        return None
    return None if compiled is None else compiled.traced.errors


class MhcPass(_Configured):
    """The pre-grad pass: rewrites one Dynamo graph in place and records the report, nested graphs included."""

    @_hook
    def __call__(self, graph: fx.Graph) -> None:
        module = graph.owning_module
        compiled = _compiled()
        compiled.loaded.clear()  # a cache that had one graph and not the other is of no use
        if _is_rewritten.get():
            compiled.traced.graphs += 1
            return
        compiled.say("Dynamo has traced it")
        new, report = None, Report(graphs=1)
        with guard("this graph is compiled as it was", report.errors):
            norms, left = self.options[_INPUT_NORM], checking.left_alone(graph)
            new, report = passes.run(graph, input_norms=norms, module=module, left=left, skipped=self.options[_SKIP])
        compiled.traced.add(report)
        _tell(compiled, report, module if new is not None else None)
        with guard("C++ is compiled when Inductor comes to it", compiled.traced.errors):
            if new is not None and _is_for_cpu(graph):
                compat.compile_beside()

    def _identity(self) -> tuple[Any, ...]:
        return (*super()._identity(), checking.all_left_alone())


def _tell(compiled: records.Compiled, report: Report, rewritten: fx.GraphModule | None) -> None:
    """Put what was done to a graph, and the graph, into the structured trace."""
    if rewritten is not None:
        with guard("the trace has no graph", compiled.traced.errors):
            compat.trace_artifact("mhc_rewritten_graph", lambda: compat.readable(rewritten))
    with guard("the trace has no report", compiled.traced.errors):
        compat.trace_artifact("mhc_report", lambda: str(report))


# Whether the graphs that Inductor compiles are parts of one that was rewritten as a whole.
_is_rewritten: ContextVar[bool] = ContextVar("is_rewritten", default=False)


@contextlib.contextmanager
def whole(module: fx.GraphModule, backend: str, options: dict[str, Any]) -> Iterator[Callable[[Any], Any]]:
    """While Dynamo splits a graph and compiles its parts: rewrite it before, where our passes are at work.

    Else the edge of a part might run through a hyper-connection. It yields what makes of the graph's compiled form the
    one that Dynamo calls.
    """
    wanted = _wanted(backend, "mhc", options)
    if wanted is None:
        yield lambda compiled: compiled
        return
    checked = _checked(module, wanted)
    with records.graph() as compiled, guard("DistributedDataParallel may cut hyper-connections"):
        rewriting = MhcPass(wanted)
        norms = rewriting.options[_INPUT_NORM]
        report = passes.run_recursively(module, input_norms=norms, left_of=checking.left_alone)
        report.graphs = 0  # the parts are counted
        compiled.traced.add(report)
        _tell(compiled, report, module if report.rewritten else None)
        rewriting._be_strict(compiled)
    token = _is_rewritten.set(True)
    try:
        yield lambda split: checked(split, compiled)
    finally:
        _is_rewritten.reset(token)


def _wanted(backend: Any, ours: Any, options: dict[str, Any]) -> dict[str, Any] | None:
    """Our options, where our passes are at work on what `torch.compile` was given: this backend, or Inductor."""
    if backend == ours:
        return {key: value for key, value in options.items() if str(key).startswith(_PREFIX)}
    return _enabled[-1]._options if backend == "inductor" and _enabled and not _paused else None


def given_up(function: compat.GivenUp, ours: Any) -> None:
    """Note a function that Dynamo gives up, and raise where strict options ask for its hyper-connections."""
    wanted = _wanted(function.backend, ours, function.options)
    if wanted is not None:
        noted, skipped = records.give_up(function), records.place(function).is_among(wanted.get(_SKIP, ()))
        if noted and wanted.get("mhc.strict") and not skipped:
            raise StrictError(str(records.report()))


def _words(report: Report) -> str:
    try:
        return str(report)
    except Exception as error:
        told(error, "the report is told in part", report.errors)
        return "; ".join([site.reason or "" for site in report.declined] + report.errors)


def _is_for_cpu(graph: fx.Graph) -> bool:
    given = [compat.example(node) for node in graph.find_nodes(op="placeholder")]
    return all(value.device.type == "cpu" for value in given if isinstance(value, torch.Tensor))


def _compiled() -> records.Compiled:
    """What is known of the graph that is being compiled."""
    with guard("the report is not kept"):
        compiled = records.current()
        if compiled is not None:
            return compiled
    return records.Compiled()


class FusePass(_Configured):
    """The joint pass: fuses operators of forward and backward, and adds to the report of the graph."""

    @_hook
    def __call__(self, graph: fx.Graph) -> None:
        module = graph.owning_module
        if module is None:
            return
        compiled = _compiled()
        compiled.loaded.clear()
        compiled.say("autograd has traced it")
        self._be_strict(compiled)
        names = [name for name in FUSIONS if self.options[_FUSE + name]]
        compiled.traced.add(passes.fuse(module, names, self.options["mhc.recompute"]))


class LowerPass(_Configured):
    """The post-grad pass: lets sublayers that are alike be one graph, takes operators apart, and reports both."""

    @_hook
    def __call__(self, graph: fx.Graph) -> None:
        report, compiled = Report(), _compiled()
        compiled.lowered.append(report)
        self._be_strict(compiled)
        compiled.say("Inductor has a graph of its own")
        self.lower(graph, report)
        compiled.say("Inductor generates its code")

    def lower(self, graph: fx.Graph, report: Report) -> None:
        """Lower a graph, and those that it calls."""
        for settle in (
            compat.keep_arguments_of_calls,  # of regions that a user marked, too
            compat.keep_order_of_writes,
            *((compat.tell_workers,) if self.options["mhc.lower"] else ()),
        ):
            with guard("Inductor is left as it is", report.errors):
                settle()
        if self.options["mhc.share_layers"] and compat.calls_graphs():
            inner = _LowerCalled(self.options | {"mhc.share_layers": False}, report)
            report.add(passes.share(graph, lambda body: compat.run_passes_after_grad(body, inner))[1])
        if self.options["mhc.lower"]:
            report.add(passes.lower(graph))
        if compat.compiles_ahead_of_time():
            with guard("AOTInductor sees operators without their defaults", report.errors):
                passes.lowering.spell_out(graph)

    def _identity(self) -> tuple[Any, ...]:
        """With what kernels are chosen by, and cut for: Inductor knows of a GPU its name alone."""
        count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
        processors = [torch.cuda.get_device_properties(i).multi_processor_count for i in range(count)]
        traced = _compiled().digest()
        return (super()._identity(), traced, kernels.communicates(), compat.makes_cuda_graphs(), *processors)


class _LowerCalled(_Configured):
    """The post-grad pass of a graph that another calls, which adds to the report of the calling graph."""

    def __init__(self, options: dict[str, Any], report: Report) -> None:
        super().__init__(options)
        self._report = report

    @_hook
    def __call__(self, graph: fx.Graph) -> None:
        LowerPass(self.options).lower(graph, self._report)


class _Chain(compat.CustomGraphPass):
    """Users' own passes, then ours. What Inductor tells passes that ask for it, whether gradients follow, goes on."""

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


_MODULES = ("agreement.py", "backend.py", "budget.py", "forms.py", "guard.py", "text.py")


def _sources() -> list[str]:
    """Every source file that has a say in what a compiled graph computes."""
    root = Path(__file__).parent
    files = [root / name for name in _MODULES]
    for folder in ("compat", "ops", "kernels", "passes"):
        files += sorted((root / folder).rglob("*.py"))
    return [str(file) for file in files]


@functools.cache
def _sources_hash() -> Any:
    return compat.hash_files(_sources())


def mhc(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor after rewriting its hyper-connections.

    Reached by `torch.compile(model, backend="mhc", mode=..., options=...)`; mode and options are Inductor's own, and
    options may also hold

    - "mhc.skip" (a list of "file.py:12"): leave the sites alone that reports show at these lines;
    - "mhc.strict" (bool): raise `StrictError` if hyper-connection code was found but not rewritten, or if Dynamo gives
      up a function before a graph of it was looked at, unless "mhc.skip" has the line of the function;
    - "mhc.check" (bool): in its first calls compare each site of a graph with the program's own code, and leave sites
      alone whose operator is less accurate (`mhc_compile.checking`);
    - "mhc.fuse.accumulate", "mhc.fuse.boundary", "mhc.fuse.boundary_backward" (bool): leave out a fusion
      (`mhc_compile.passes.fuse`);
    - "mhc.fuse.input_norm" (bool or None): take the RMS norm that reads a layer input into the operator that makes it;
      None, the default, does so on GPUs, where it is faster;
    - "mhc.recompute" ("auto", a number of layers, or None): of so many layers keep one set of streams for the backward
      pass and compute the others again there; a layer is one sublayer with its hyper-connection, "auto" takes the
      square root of n L / (n + 2) for a chain of L layers (`mhc_compile.passes.fuse.recompute`);
    - "mhc.share_layers" (bool): False compiles sublayers that are alike one by one (`mhc_compile.passes.share`);
    - "mhc.lower" (bool): False leaves operators whole in the compiled graph, each a call of its own from Python
      (`mhc_compile.passes.lower`).

    Raises ValueError for an option or a mode that there is not, and for a value that an option cannot have.
    """
    try:
        own, rest = _split(options or {})
        patches = {hook: _chained(hook, rest.pop(hook, None), make(own)) for hook, make in _HOOKS.items()}
        compiler = compat.inductor_compiler(mode, rest, patches)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise OptionError(str(error)) from error
    checked = _checked(gm, own)
    with _compiling(own) as entry:
        compiled: Callable[..., Any] = compiler(gm, example_inputs)
    return checked(compiled, entry)


def _checked(gm: fx.GraphModule, own: dict[str, Any]) -> checking.Instead:
    """What makes of a graph's compiled form the one that Dynamo calls: the same, or one that checks its sites first."""
    if own.get(_CHECK) and not _is_rewritten.get():
        with guard("sites are not checked"):
            return checking.prepare(gm, input_norms=(OPTIONS | own)[_INPUT_NORM])
    return checking.nothing


@contextlib.contextmanager
def _compiling(options: dict[str, Any]) -> Iterator[records.Compiled]:
    """Around the compilation of one graph: its report is kept, and strict options are not content with eager code."""
    with records.graph() as compiled:
        compiled.strict = bool(options.get("mhc.strict"))
        try:
            yield compiled
        except Exception as error:
            expected = isinstance(error, Deliberate) or compat.asks_to_trace_again(error)
            if compiled.strict and compiled.traced.sites and not expected:
                sites = f"{len(compiled.traced.sites)} hyper-connection sites"
                raise StrictError(f"a graph with {sites} is not compiled: {described(error)}") from error
            raise


def _left_eager(frame: Any) -> None:
    """Raise where a function with hyper-connections is not compiled any more, and strict options ask for it to be."""
    if records.is_strict(frame):
        raise StrictError(str(records.report()))


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    own = {key: value for key, value in options.items() if str(key).startswith(_PREFIX)}
    for key in options:
        if key not in OPTIONS and (key in own or _looks_like_ours(str(key))):
            raise ValueError(f"options: unknown option {key!r}; expected one of {', '.join(sorted(OPTIONS))}")
    for key in own:
        if isinstance(OPTIONS[key], bool) and not isinstance(own[key], bool):
            raise ValueError(f"options: {key!r} is {own[key]!r}; expected True or False")
        if key == _INPUT_NORM and not isinstance(own[key], bool | None):
            raise ValueError(f"options: {key!r} is {own[key]!r}; expected True, False or None")
    check_layers(own.get("mhc.recompute"), "options: 'mhc.recompute'")
    if _SKIP in own:
        own[_SKIP] = _places(own[_SKIP])
    return own, {key: value for key, value in options.items() if key not in own}


def _looks_like_ours(key: str) -> bool:
    """Whether an option of another name was to be one of ours: Inductor would list all of its own."""
    return key.startswith("mhc") or _PREFIX + key in OPTIONS


def _places(given: Any) -> tuple[str, ...]:
    """The lines of the program that an option names; a tuple, which the keys of caches take."""
    places = tuple(given) if isinstance(given, (list, tuple)) else ()
    if not isinstance(given, (list, tuple)) or not all(_is_place(place) for place in places):
        raise ValueError(f"options: {_SKIP!r} is {given!r}; expected a list of places such as 'model.py:12'")
    return places


def _is_place(place: Any) -> bool:
    return isinstance(place, str) and place.rpartition(":")[2].isdigit()


_HOOKS: dict[str, Callable[[dict[str, Any]], compat.CustomGraphPass]] = {
    "pre_grad_custom_pass": MhcPass,
    "joint_custom_pre_pass": FusePass,
    "post_grad_custom_post_pass": LowerPass,
}


def _chained(hook: str, given: Any, own: compat.CustomGraphPass) -> compat.CustomGraphPass:
    """Our pass behind those that are given, or else configured; other passes of ours among these make way."""
    configured = _passes(given if given is not None else getattr(compat.inductor_config(), hook))
    chain = (*(one for one in configured if not isinstance(one, _Configured)), own)
    if len(chain) == 1:
        return own
    kind: type[_Chain] = compat.inference_aware(_Chain) if any(map(compat.is_inference_aware, chain)) else _Chain
    return kind(*chain)


def _passes(configured: Any) -> list[Any]:
    """Every pass of a setting, those of chains included."""
    nested = [one.passes if isinstance(one, _Chain) else (one,) for one in compat.as_list(configured)]
    return [one for several in nested for one in several]


class enable:
    """Have a plain `torch.compile(model)` rewritten, in the whole process.

    For code that calls `torch.compile` on its own: trainers and serving frameworks. As a function it lasts until
    `disable()`; as a context manager, until the end of the block. It holds for all threads and asyncio tasks, whichever
    of them calls it, and for those that begin later. options are the "mhc." options of the backend. If it is called
    while it lasts, the later options count.

    It counts when a graph is compiled, which is at the first call: code that Dynamo has compiled before stays as it is
    until `torch._dynamo.reset()`. The same holds for `disable`.

    Inductor's settings are left as they are. A custom pass in one of the three that this package uses
    (`pre_grad_custom_pass`, `joint_custom_pre_pass`, `post_grad_custom_post_pass`) runs first, and ours after it,
    whether it was assigned before or after `enable` or comes in the options of `torch.compile`. `disable` leaves it.

    Raises ValueError for an option that there is not, and for a value that an option cannot have.
    """

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        self._options, rest = _split(options or {})
        if self._options.get(_CHECK):
            raise ValueError(f'options: {_CHECK!r} needs backend="mhc"; enable does not take it')
        if rest:
            names = ", ".join(map(str, rest))
            raise ValueError(f"options: {names} is not an option of mhc; expected names that begin with mhc.")
        with _switch:
            _enabled.append(self)
            compat.set_while_compiling(_settings, lambda: _compiling(_enabled[-1]._options if _enabled else {}))

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _leave(self)


_enabled: list[enable] = []
_paused: list[object] = []
_switch = threading.Lock()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """A context in which a plain `torch.compile` is Inductor's alone, in the whole process."""
    mark = object()
    _paused.append(mark)
    try:
        yield
    finally:
        _paused.remove(mark)


def disable() -> None:
    """Undo `enable`, however often it was called, in the whole process; does nothing if it is not enabled."""
    _leave(*_enabled)


def _leave(*entered: enable) -> None:
    with _switch:
        _enabled[:] = [one for one in _enabled if one not in entered]
        if not _enabled:
            compat.set_no_more()


def is_enabled() -> bool:
    """Whether a plain `torch.compile` is rewritten at present, in any thread or task of this process."""
    return bool(_enabled)


def _settings() -> dict[str, Any]:
    """What Inductor's settings are while it compiles: the passes are put behind those that are configured by then."""
    settings: dict[str, Any] = {}
    for last in () if _paused else _enabled[-1:]:
        with guard("a plain torch.compile is not rewritten"):
            for hook, make in _HOOKS.items():
                there = getattr(compat.inductor_config(), hook)
                if not any(isinstance(one, _Configured) for one in _passes(there)):
                    settings[hook] = _chained(hook, there, make(last._options))
            settings |= compat.launches_from_c()
    return settings


compat.watched.at_limit = _left_eager
importlib.import_module("mhc_compile.entry")  # which registers the backend, once, and has Dynamo watched
