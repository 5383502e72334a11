"""What Dynamo keeps, where it breaks graphs or gives up on them, and which functions it compiles no more.

It is written down from before the first compilation: a break comes before the graph that it ends.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from mhc_compile.compat.graphs import compile_id, on_dynamo_reset
from mhc_compile.compat.inductor import _guard
from mhc_compile.compat.looking import Look, Looks, act, given_to_compile, in_default_stance
from mhc_compile.compat.reaching import Reached, reached
from mhc_compile.encoding import without_addresses

_RESUMED = re.compile(r"torch_dynamo_resume_in_(.*)_at_\d+$")
# Dynamo's texts are paragraphs: what happened, an explanation, hints, and what developers want to know.
_EXPLANATION = re.compile(r"^\s*Explanation: (.*)$", re.MULTILINE)
_THEN = re.compile(r"another graph break occurred: \*\*\*\s*(.*)")
# Of the hints, those that name a setting: they say what a user can do.
_SETTING = re.compile(r"^\s*Hint: Set (`?torch\._dynamo\.config\..*?)\.?$", re.MULTILINE)
_ENDS = "skipping the rest of the function"
_STEP = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.?(\w+)")
_GUARD = re.compile(r"(?:\d+/\d+: )?(.*?)(?:\s+#.*)?")


@dataclass(frozen=True)
class GraphBreak:
    """Where Dynamo broke the graph of a function, or gave up on it. frame and number are those of the compilation.

    It ends the function if Dynamo cannot resume after it: Dynamo leaves the rest of the function to Python.
    """

    frame: Any
    number: Any
    function: tuple[str, str]
    file: str
    line: int
    words: str
    ends: bool


@dataclass(frozen=True)
class GivenUp:
    """A function that Dynamo leaves to Python, or whose rest it leaves; Dynamo compiles the functions that it calls.

    Of a function that is resumed, this is the part after an earlier break. backend is what `torch.compile` was given:
    the registered function for a name, and the name for Inductor. reached are the tensors that its own lines can read.
    """

    broken: GraphBreak
    function: str
    file: str
    line: int
    resumed: bool
    backend: Any
    options: dict[str, Any]
    reached: frozenset[Reached] | None


@dataclass(frozen=True)
class RecompileLimit:
    """A function that was compiled as often as `limit` allows; changed is the guard that failed.

    The limit is a setting of Dynamo's, or, if it is given, was given to `torch.compile` under the same name.

    Of a function that is resumed, this is the part after an earlier break. Dynamo compiles nothing new that the
    function calls, either: reached has all tensors of the modules that it reaches. backend and options are as in
    `GivenUp`.
    """

    limit: str
    given: bool
    number: int
    function: str
    file: str
    line: int
    resumed: bool
    changed: str
    backend: Any
    options: dict[str, Any]
    reached: frozenset[Reached] | None


@dataclass
class Watched:
    """What Dynamo did since it was reset.

    kept has the compilations whose code it keeps, each with file, first line and name of the function.

    broken has the last break of the code that runs: that which Dynamo made, or the program's if Dynamo gave up on it.
    Code that Dynamo made may hold a dict, and has no hash then.

    strategies has what Dynamo does with code that it does not compile, by the id of the code. at_work has the functions
    that it is compiling, outermost first.

    The functions of at_limit are called with a frame that has reached a limit, those of at_given_up with a function
    that Dynamo gave up on, and those of at_compiled with the code, the compilation and the backend of a compiled
    function. at_limit and at_given_up may raise.
    """

    kept: dict[tuple[Any, Any], tuple[str, int, str]] = field(default_factory=dict)
    breaks: dict[GraphBreak, None] = field(default_factory=dict)
    broken: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    strategies: dict[int, tuple[weakref.ref[CodeType], Any]] = field(default_factory=dict)
    at_work: list[str] = field(default_factory=list)
    looks: Looks = field(default_factory=Looks)
    at_limit: list[Callable[[Any, RecompileLimit], None]] = field(default_factory=list)
    at_given_up: list[Callable[[GivenUp], None]] = field(default_factory=list)
    at_compiled: list[Callable[[CodeType, Any, Any], None]] = field(default_factory=list)

    def reset(self) -> None:
        """Forget all: Dynamo numbers its frames anew."""
        for seen in (self.kept, self.breaks, self.broken, self.strategies):
            seen.clear()
        self.looks.reset()


watched = Watched()
# The frames that Dynamo is compiling, outermost first, each with what compiles it.
_converting: ContextVar[tuple[tuple[Any, Any], ...]] = ContextVar("converting", default=())
# The breaks of the callers of the last one.
_around: ContextVar[tuple[GraphBreak | None, GraphBreak | None]] = ContextVar("around", default=(None, None))
# Why the compilations that there are do not serve, the last one first: it is asked for before each limit is looked at.
_reasons: ContextVar[list[str]] = ContextVar("reasons", default=[])  # noqa: B039  (it is only replaced)


def breaks_around() -> tuple[GraphBreak | None, GraphBreak | None]:
    """The breaks by which the graph that is being compiled begins, and ends: its own, or those of its callers."""
    frame, number, _ = compile_id()
    own = next((one for one in reversed(watched.breaks) if (one.frame, one.number) == (frame, number)), None)
    before, after = _around.get()
    return before, own or after


def _breaks_of_callers(code: CodeType, caller: FrameType | None) -> tuple[GraphBreak | None, GraphBreak | None]:
    """The last breaks before a function is called, and after it returns.

    A function that is resumed returns to no line of its first part, which calls it last.
    """
    before, after, inner = None, None, code
    while caller is not None and watched.broken:
        broken = watched.broken.get(caller.f_code)  # type: ignore[no-untyped-call]
        before = before or broken
        if not _RESUMED.match(inner.co_name):
            after = after or broken
        inner, caller = caller.f_code, caller.f_back
    return before, after


def own_name(name: str) -> str:
    """The name of the function, if this is what Dynamo calls the part of it after a break."""
    resumed = _RESUMED.match(name)
    return resumed.group(1) if resumed else name


def _named(code: Any) -> tuple[str, str]:
    """A function's name and file; the part of a function after a break has the function's name."""
    return own_name(code.co_name), code.co_filename


@functools.cache
def watch_dynamo() -> None:
    """Record in `watched` what Dynamo does, from now on.

    It has a hook for code that it keeps, and logs each break by one method. `_throw_if_in_functorch` ends a compilation
    without a break. What becomes of a frame is what `CatchErrorsWrapper` returns. `exceeds_recompile_limit` decides if
    the compilation before was the last one (torch 2.11 to 2.14).
    """
    with _guard("what Dynamo breaks and throws away is not reported"):
        from torch._dynamo import cache_size, convert_frame, guards
        from torch._dynamo.convert_frame import CatchErrorsWrapper, register_bytecode_hook
        from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase

        log, convert = InstructionTranslatorBase.log_graph_break, CatchErrorsWrapper.__call__
        exceeds, reasons = cache_size.exceeds_recompile_limit, guards.get_and_maybe_log_recompilation_reasons
        begin = InstructionTranslator._throw_if_in_functorch

        @functools.wraps(log)
        def log_and_note(self: Any, code_options: Any, reason: str, exc: Any, **known: Any) -> None:
            with _guard("a graph break is not reported"):
                if not exc.logged:
                    _note_break(self, exc, _ENDS in reason)
            log(self, code_options, reason, exc, **known)

        @functools.wraps(begin)
        def begin_and_note(self: Any) -> None:
            try:
                begin(self)
            except Exception:
                with _guard("a function that Dynamo does not compile inside torch.func is not reported"):
                    _note_functorch(self.f_code)
                raise

        @functools.wraps(convert)
        def convert_and_note(self: Any, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
            breaks, look, beside = len(watched.breaks), None, _around.get()
            with _guard("a graph is reported without the breaks around it"):
                look = watched.looks.of(given_to_compile(self)[0]) if watched.looks.lasting else None
                beside = _breaks_of_callers(frame.f_code, sys._getframe(1))
            token = _converting.set((*_converting.get(), (frame, self)))
            around = _around.set(beside)
            name = _named(frame.f_code)[0]
            watched.at_work.append(name)
            try:
                with contextlib.nullcontext() if look is None else look.with_its_sizes():
                    result = convert(self, frame, cache_entry, frame_state)
            finally:
                watched.at_work.remove(name)
                _converting.reset(token)
                _around.reset(around)
            with _guard("a function that Dynamo gives up on is not reported"):
                if result.guarded_code is None:
                    _note_strategy(frame.f_code, result)
                else:
                    _note_compiled(frame.f_code, result.guarded_code, self)
                own = [one for one in list(watched.breaks)[breaks:] if one.function == _named(frame.f_code)]
                if own:
                    made = frame.f_code if result.guarded_code is None else result.guarded_code.code
                    watched.broken[made] = own[-1]
                _note_eager(frame, own, result.guarded_code is None, self)
            return result

        @functools.wraps(reasons)
        def reasons_and_note(entries: Any, *args: Any, **kwargs: Any) -> Any:
            with _guard("a limit of Dynamo's is reported with the reason of another compilation"):
                _, look = _at_work()
                own = watched.looks.own(look, entries) if isinstance(entries, list) else entries
                if entries and not own:  # there is nothing to compile again
                    _reasons.set([])
                    return []
                entries = own
            found = reasons(entries, *args, **kwargs)
            _reasons.set(found)
            return found

        @functools.wraps(exceeds)
        def exceeds_by_its_own(made: Any, compilation: Any) -> Any:
            with _guard("a look at a model counts with the compilations beside it"):
                frame, look = _at_work()
                on_dynamo_reset(watched)
                made, compilation = watched.looks.count(look, frame, made, compilation)
            found = exceeds(made, compilation)
            changed = _reasons.get()
            _reasons.set([])
            with _guard("a function that is compiled no more is not reported"):
                if found[0]:
                    _note_limit(found[1], changed)
            return found

        CatchErrorsWrapper.__call__ = convert_and_note  # type: ignore[method-assign]
        convert_frame.exceeds_recompile_limit = exceeds_by_its_own  # type: ignore[assignment, attr-defined]
        convert_frame.get_and_maybe_log_recompilation_reasons = reasons_and_note  # type: ignore[assignment, attr-defined]
        InstructionTranslatorBase.log_graph_break = log_and_note  # type: ignore[method-assign]
        InstructionTranslator._throw_if_in_functorch = begin_and_note  # type: ignore[method-assign]
        register_bytecode_hook(_note_code)


def _note_code(code: CodeType, new_code: CodeType) -> None:
    on_dynamo_reset(watched)  # with each note: Dynamo has forgotten it after a reset
    watched.kept[compile_id()[:2]] = (code.co_filename, code.co_firstlineno, code.co_name)


def _note_break(translator: Any, error: Any, ends: bool) -> None:
    frame, number, _ = compile_id()
    stack = getattr(error, "real_stack", None) or [translator.frame_summary()]
    root = getattr(translator.output, "root_tx", None) or translator
    said = without_addresses(str(error))
    what, explanation = said.strip().partition("\n")[0], _EXPLANATION.search(said)
    words = f"{what}: {explanation.group(1)}" if explanation else what
    then = _THEN.search(said)
    if then:
        words += f" ({then.group(1)})"
    setting = _SETTING.search(said)
    if setting:
        words = f"{words.rstrip('.')}. Set {setting.group(1)}"
    on_dynamo_reset(watched)
    found = GraphBreak(frame, number, _named(root.f_code), stack[-1].filename, stack[-1].lineno or 0, words, ends)
    watched.breaks[found] = None


def _note_functorch(code: CodeType) -> None:
    """Dynamo traces what `torch.vmap`, `grad` and `jvp` call from outside of them, or not at all."""
    frame, number, _ = compile_id()
    words = "Unsupported functorch tracing attempt: a transform of torch.func calls it, which is not compiled itself"
    on_dynamo_reset(watched)
    found = GraphBreak(frame, number, _named(code), code.co_filename, code.co_firstlineno, words, True)
    watched.breaks[found] = None


def _note_compiled(code: CodeType, made: Any, compiler: Any) -> None:
    for tell in list(watched.at_compiled):
        tell(code, made.compile_id, given_to_compile(compiler)[0])


def _note_strategy(code: CodeType, result: Any) -> None:
    on_dynamo_reset(watched)
    if result.apply_to_code:
        watched.strategies[id(code)] = (weakref.ref(code), result.frame_exec_strategy)


def _note_eager(frame: Any, breaks: list[GraphBreak], whole: bool, compiler: Any) -> None:
    """Report the user's function that Dynamo gives up on for one of these breaks, as a whole or from there on."""
    code = frame.f_code
    own = [one for one in breaks if whole or one.ends]
    if own and not code.co_filename.startswith(_TORCH):
        name, file = own[-1].function
        resumed = name != code.co_name
        backend, options = given_to_compile(compiler)
        found = GivenUp(own[-1], name, file, code.co_firstlineno, resumed, backend, options, reached(frame))
        for tell in list(watched.at_given_up):
            tell(found)


_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


@contextlib.contextmanager
def apart(
    backend: Any,
    tell: Callable[[GivenUp], Any] = lambda function: None,
    tell_limit: Callable[[Any, RecompileLimit], Any] = lambda frame, limit: None,
) -> Iterator[None]:
    """Around a look at a model by a backend of its own, after which Dynamo is as it was before.

    Dynamo tries functions again that it gave up on before, and knows no sizes. It keeps what it compiled before. It
    forgets the functions that it compiles for this backend, and these alone count for its limits. tell is called with
    each function that it gives up on for the backend, tell_limit with each frame that reaches a limit. If backend is
    None, Dynamo forgets the functions that it compiles for any backend.
    """
    look = Look(backend)

    def note(code: CodeType, compilation: Any, used: Any) -> None:
        if used is backend or backend is None:
            look.compiled.append((code, compilation))

    def tell_ours(function: GivenUp) -> None:
        if function.backend is backend:
            tell(function)

    def tell_our_limit(frame: Any, limit: RecompileLimit) -> None:
        if limit.backend is backend:
            tell_limit(frame, limit)

    listening: list[tuple[list[Any], Any]] = [
        (watched.at_given_up, tell_ours),
        (watched.at_limit, tell_our_limit),
        (watched.at_compiled, note),
    ]
    watch_dynamo()
    if not watched.looks.lasting:
        watched.looks.strategies = dict(watched.strategies)
    act(watched.strategies, ordinary=True)
    watched.strategies.clear()
    for listeners, one in listening:
        listeners.append(one)
    try:
        with watched.looks.look(look), in_default_stance():
            yield
    finally:
        for listeners, one in listening:
            listeners.remove(one)
        act(watched.strategies, ordinary=True)
        watched.strategies.clear()
        if not watched.looks.lasting:
            act(watched.looks.strategies, ordinary=False)
            watched.strategies.update(watched.looks.strategies)
            watched.looks.strategies = {}


def _at_work() -> tuple[Any, Look | None]:
    """The frame that Dynamo is compiling, and the look that it is for."""
    frame, compiler = _converting.get()[-1]
    return frame, watched.looks.of(given_to_compile(compiler)[0])


def module_at(path: str) -> torch.nn.Module | None:
    """The module that a report's path names in the function that Dynamo is compiling, outermost first; None if unknown.

    A path begins at the function's own module, or with a local or global variable: "args[0].layers.1".
    """
    if not _converting.get():
        return None
    frame = _converting.get()[-1][0]
    own = next((frame.f_locals[name] for name in (own_local(), "self", "fn") if name in frame.f_locals), None)
    first = re.match(r"\w*", path)[0]  # type: ignore[index]
    named = [
        _followed(names[first], path[len(first) :]) for names in (frame.f_locals, frame.f_globals) if first in names
    ]
    found = [_followed(getattr(own, "__self__", own), path), *named]
    return next((one for one in found if isinstance(one, torch.nn.Module)), None)


def own_local() -> str | None:
    """What the method of a module that Dynamo is compiling, outermost first, calls its module; None if it is none."""
    if not _converting.get():
        return None
    frame = _converting.get()[-1][0]
    code = frame.f_code
    for name, value in frame.f_locals.items():
        if isinstance(value, torch.nn.Module):
            method: Any = getattr(type(value), own_name(code.co_name), None)
            there = getattr(inspect.unwrap(method), "__code__", None)
            if there is not None and there.co_filename == code.co_filename and there.co_varnames[:1] == (name,):
                return str(name)
    return None


def _followed(value: Any, path: str) -> Any:
    at = 0
    with contextlib.suppress(Exception):  # properties of the user's classes may raise any
        while at < len(path):
            step = _STEP.match(path, at)
            if step is None:
                return None
            key, number, name = step.groups()
            value = getattr(value, name) if name else value[key if number is None else int(number)]
            at = step.end()
        return value
    return None


def _note_limit(limit: str, reasons: list[str]) -> None:
    reason = reasons[0] if reasons else "Unable to find recompilation reasons"
    changed = _GUARD.fullmatch(reason.strip().partition("\n")[0])
    frame, compiler = _converting.get()[-1]
    code, (name, file) = frame.f_code, _named(frame.f_code)
    on_dynamo_reset(watched)
    reaching = RecompileLimit(
        limit,
        limit == "recompile_limit" and getattr(compiler, "_recompile_limit", None) is not None,
        getattr(torch._dynamo.config, limit),
        name,
        file,
        code.co_firstlineno,
        name != code.co_name,
        changed.group(1) if changed else reason,
        *given_to_compile(compiler),
        reached(frame, below=True),
    )
    for tell in list(watched.at_limit):
        tell(compile_id()[0], reaching)


@contextlib.contextmanager
def without_tracebacks() -> Iterator[None]:
    """Let Dynamo and autograd not print the stack of each graph that cannot be compiled: `watched` has it in a line."""
    log = logging.getLogger("torch._dynamo.exc")
    log.addFilter(_is_no_failure)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Error detected in ")
            yield
    finally:
        log.removeFilter(_is_no_failure)


def _is_no_failure(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Backend compiler exception")
