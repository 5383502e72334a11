"""The "mhc" backend and `enable`: the passes, put into Inductor's own hooks (`mhc_compile.hooks`)."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, TracebackType
from typing import Any

from torch import fx

import mhc_compile.ops  # noqa: F401  (registers the operators that the passes insert)
from mhc_compile import checking, compat, passes, records
from mhc_compile.as_it_was import look_only, or_as_it_was
from mhc_compile.encoding import in_one_line
from mhc_compile.guard import Deliberate, guard
from mhc_compile.hooks import (
    HOOKS,
    Configured,
    MhcPass,
    StrictError,
    be_strict,
    chained,
    is_rewritten,
    lost,
    passes_of,
    second_try,
    strict_words,
    trace,
)
from mhc_compile.options import CHECK, INPUT_NORM, OPTIONS, PREFIX, SKIP, OptionError, split
from mhc_compile.passes.cut import can_hold
from mhc_compile.passes.places import Places
from mhc_compile.passes.report import FUNCTION, Location, function_at

log = logging.getLogger(__name__)


@contextlib.contextmanager
def whole(module: fx.GraphModule, backend: Any, ours: Any, options: dict[str, Any]) -> Iterator[Callable[[Any], Any]]:
    """Rewrite a graph before Dynamo splits it and compiles its parts, if our passes are active.

    Otherwise the edge of a part might cut a hyper-connection. It yields a function that makes of the compiled graph the
    one that Dynamo calls.
    """
    wanted = _wanted(backend, ours, options)
    if wanted is None:
        yield lambda compiled: compiled
        return
    checked = _checked(module, wanted)
    with records.graph() as compiled, guard("DistributedDataParallel may cut hyper-connections"):
        rewriting = MhcPass(wanted)
        norms = rewriting.options[INPUT_NORM]
        skipped = rewriting.options[SKIP]
        report = passes.run_recursively(module, input_norms=norms, left_of=checking.left_alone, skipped=skipped)
        report.graphs = report.compiled = 0  # the parts are counted
        compiled.traced.add(report)
        trace(compiled, report, module if report.rewritten else None)
        be_strict(compiled, wanted)
    token = is_rewritten.set(True)
    try:
        yield lambda split: checked(split, compiled)
    finally:
        is_rewritten.reset(token)


def _wanted(backend: Any, ours: Any, options: dict[str, Any]) -> dict[str, Any] | None:
    """Our options, if our passes are active for the backend that `torch.compile` was given: this one, or Inductor.

    ours is what its name stands for. A program may also give `mhc` itself.
    """
    if backend is ours or backend is mhc:
        return {key: value for key, value in options.items() if str(key).startswith(PREFIX)}
    return _of_enabled() if backend == "inductor" else None


def given_up(function: compat.GivenUp, ours: Any) -> None:
    """Note a function that Dynamo gives up on. Strict options raise if its own lines may hold a hyper-connection."""
    wanted = _wanted(function.backend, ours, function.options)
    if wanted is not None and records.give_up(function) and wanted.get("mhc.strict") and can_hold(function.reached):
        _be_strict(records.place(function), wanted)


def mhc(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor after rewriting its hyper-connections.

    Reached by `torch.compile(model, backend="mhc", mode=..., options=...)`; mode and options are Inductor's own, and
    options may also hold those of `mhc_compile.options.TABLE`, whose names begin with "mhc.".

    Raises ValueError for an unknown option or mode, and for a wrong value of an option.
    """
    try:
        own, rest = split(options or {})
        patches = {hook: chained(_take_out(hook, rest), make(own)) for hook, make in HOOKS.items()}
        compiler = compat.inductor_compiler(mode, rest, patches)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise OptionError(str(error)) from error
    checked = _checked(gm, own)
    _try_again()
    with _compiling(own, gm) as entry:
        if compat.runs_no_pass_before_grad(compiler):
            _leave_graph(gm, entry, own)
        compiled: Callable[..., Any] = or_as_it_was(functools.partial(compiler, gm, example_inputs), gm, entry)
    return checked(compiled, entry)


def _take_out(hook: str, options: dict[str, Any]) -> Any:
    """The passes for a hook, taken out of Inductor's options, whose names may have hyphens; else the configured ones.

    If the options have None for a hook, there are no passes for it.
    """
    spelled = [key for key in options if str(key).replace("-", "_") == hook]
    # As in Inductor, the last one counts.
    return [options.pop(key) for key in spelled][-1] if spelled else getattr(compat.inductor_config(), hook)


def _try_again() -> None:
    with guard("a graph is not compiled again if Inductor fails to compile kernels or loops of operators"):
        compat.compile_again(second_try)


def _checked(gm: fx.GraphModule, own: dict[str, Any]) -> checking.Instead:
    """A function that makes of a compiled graph the one that Dynamo calls: the same, or one that checks sites first."""
    if own.get(CHECK) and not is_rewritten.get():
        with guard("sites are not checked"):
            return checking.prepare(gm, input_norms=(OPTIONS | own)[INPUT_NORM])
    return checking.nothing


@contextlib.contextmanager
def _compiling(options: dict[str, Any], module: Any) -> Iterator[records.Compiled]:
    """Around the compilation of one graph: its report is kept, and strict options raise if it fails."""
    with records.graph() as compiled:
        with guard("a report from a cache has the lines that it was made of", compiled.traced.errors):
            if isinstance(module, fx.GraphModule):
                compiled.places = Places.of(module)
        with guard("sites in graphs that others call are left", compiled.traced.errors):
            if isinstance(module, fx.GraphModule):
                passes.look_at_calls(module)  # the passes see each of these by itself
        with guard("sites that mhc.check found wrong may be rewritten", compiled.traced.errors):
            if isinstance(module, fx.GraphModule):
                checking.note_left_alone(module)
        compiled.strict = bool(options.get("mhc.strict"))
        try:
            yield compiled
            be_strict(compiled, options)  # Inductor may be told not to run the passes that ask, too
        except Exception as error:
            expected = isinstance(error, Deliberate) or compat.asks_to_trace_again(error)
            sites = lost(compiled.traced.sites, options)
            if compiled.strict and sites and not expected:
                why = ". ".join([in_one_line(error).rstrip("."), *dict.fromkeys(compiled.traced.advice)])
                raise StrictError(f"a graph with {len(sites)} hyper-connection sites is not compiled: {why}") from error
            raise


def left_eager(frame: Any, limit: compat.RecompileLimit, ours: Any) -> None:
    """Note a function that is compiled no more. Strict options raise if it may hold, or call, hyper-connections."""
    wanted = _wanted(limit.backend, ours, limit.options)
    if wanted is not None and records.reach_limit(frame, limit) and wanted.get("mhc.strict"):
        _be_strict(records.place(limit), wanted)


def _be_strict(place: Location, options: dict[str, Any]) -> None:
    """Raise for a function that Dynamo does not compile, if `mhc.skip` does not name the line of its `def`."""
    report = records.report()
    left = [site for site in report.torn if site.op == FUNCTION and site.location == place]
    if lost(left, options):
        raise StrictError(strict_words(report, left, options.get(SKIP, ())))


def _tell_of_nothing(code: CodeType, compilation: Any, used: Any) -> None:
    """Warn if options are strict and there is nothing that they could guard."""
    if records.finds_nothing(compilation.frame_id, compilation.frame_compile_id):
        _warn_of_nothing(f"{code.co_name} ({function_at(code.co_filename, code.co_firstlineno, code.co_name)})")


@functools.cache
def _warn_of_nothing(function: str) -> None:
    log.warning(
        "mhc.strict guards nothing: no hyper-connection was found in %s; mhc_compile.report() has details", function
    )


def _compile_enabled(module: Any, compiling: Callable[[], Any]) -> Any:
    options = _of_enabled()
    if options is None or any(map(_is_ours, HOOKS)):  # those of backend="mhc" have options of their own
        return compiling()
    with _compiling(options, module) as entry:
        if compat.runs_no_pass_before_grad():
            _leave_graph(module, entry, options)
        return or_as_it_was(compiling, module, entry)


def _leave_graph(module: Any, entry: records.Compiled, options: dict[str, Any]) -> None:
    if is_rewritten.get():
        entry.traced.graphs += 1
    else:
        look_only(module, entry, options)


def _of_enabled() -> dict[str, Any] | None:
    """The options by which a plain `torch.compile` is rewritten at present; None if it is not."""
    last = () if _paused else _enabled[-1:]
    return last[0]._options if last else None


def _is_ours(hook: str) -> bool:
    """Whether one of our passes is in this setting of Inductor's already."""
    return any(isinstance(one, Configured) for one in passes_of(getattr(compat.inductor_config(), hook)))


class enable:
    """Rewrite hyper-connections in every plain `torch.compile(model)` of the process.

    It is for code that calls `torch.compile` on its own: trainers and serving frameworks. As a function it lasts until
    `disable()`; as a context manager, until the end of the block. It holds for all threads and asyncio tasks, also for
    those that begin later. options are the "mhc." options of the backend. A second call replaces the options of the
    first.

    `enable` and `disable` take effect when a graph is compiled, which is at the first call. Code that Dynamo compiled
    earlier stays as it is until `torch._dynamo.reset()`.

    Inductor's settings are left as they are. The package uses three hooks: `pre_grad_custom_pass`,
    `joint_custom_pre_pass` and `post_grad_custom_post_pass`. If a hook has a custom pass of yours, it runs first,
    whether you assigned it before or after `enable` or in the options of `torch.compile`. `disable` leaves it.

    Raises ValueError for an unknown option, and for a wrong value of an option.
    """

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        self._options, rest = split(options or {})
        if self._options.get(CHECK):
            raise ValueError(f'options: {CHECK!r} needs backend="mhc"; enable does not take it')
        if rest:
            names = ", ".join(map(str, rest))
            raise ValueError(f"options: {names} is not an option of mhc; expected names that begin with mhc.")
        _try_again()
        with _switch:
            _enabled.append(self)
            compat.set_while_compiling(_settings, _compile_enabled)

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
    """A context in which a plain `torch.compile` is not rewritten, in the whole process."""
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
    """Inductor's settings while it compiles: the passes are added after those that are configured by then."""
    options = _of_enabled()
    if options is None:
        return {}
    with guard("a plain torch.compile is not rewritten"):
        # One by one: where it lowers a graph, Inductor puts the hooks of `torch.compile(options=...)` over ours.
        missing = [hook for hook in HOOKS if not _is_ours(hook)]
        ours = {hook: chained(getattr(compat.inductor_config(), hook), HOOKS[hook](options)) for hook in missing}
        if ours:
            return ours | compat.launches_from_c() | compat.settings_of_packages()
    return {}


compat.watched.at_compiled.append(_tell_of_nothing)
importlib.import_module("mhc_compile.entry")  # which registers the backend, once, and has Dynamo watched
