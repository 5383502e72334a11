"""What Dynamo keeps, where it breaks graphs or gives up on them, and which functions it compiles no more.

It is written down from before the first compilation: a break comes before the graph that it ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from types import CodeType, FrameType
from typing import Any

import torch

from mhc_compile.compat.graphs import compile_id, on_dynamo_reset
from mhc_compile.compat.inductor import _guard
from mhc_compile.compat.reaching import Reached, reached
from mhc_compile.encoding import without_addresses

_RESUMED = re.compile(r"torch_dynamo_resume_in_(.*)_at_\d+$")
# Dynamo's texts are paragraphs: what happened, an explanation, hints, and what developers want to know.
_EXPLANATION = re.compile(r"^\s*Explanation: (.*)$", re.MULTILINE)
_THEN = re.compile(r"another graph break occurred: \*\*\*\s*(.*)")
# Of the hints, those that name a setting: they say what a user can do.
_SETTING = re.compile(r"^\s*Hint: Set (`?torch\._dynamo\.config\..*?)\.?$", re.MULTILINE)
_ENDS = "skipping the rest of the function"
_LIMIT = "torch._dynamo hit config.%s"
_STEP = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.?(\w+)")
_ALIKE = "num_cache_entries_with_same_id_matched_objs"
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
    """A function that was compiled as often as Dynamo's setting `limit` allows; changed is the guard that failed.

    Of a function that is resumed, this is the part after an earlier break. Dynamo compiles nothing new that the
    function calls, either: reached has all tensors of the modules that it reaches. backend and options are as in
    `GivenUp`.
    """

    limit: str
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

    strategies has what Dynamo does with code that it does not compile, by the id of the code. at_work has the functions
    that it is compiling, outermost first, and looks are those that last.

    The functions of at_limit are called with a frame that has reached a limit, those of at_given_up with a function
    that Dynamo gave up on, and those of at_compiled with the code, the compilation and the backend of a compiled
    function. at_limit and at_given_up may raise.
    """

    kept: dict[tuple[Any, Any], tuple[str, int, str]] = field(default_factory=dict)
    breaks: dict[GraphBreak, None] = field(default_factory=dict)
    strategies: dict[int, tuple[weakref.ref[CodeType], Any]] = field(default_factory=dict)
    at_work: list[str] = field(default_factory=list)
    looks: list[_Look] = field(default_factory=list)
    at_limit: list[Callable[[Any, RecompileLimit], None]] = field(default_factory=list)
    at_given_up: list[Callable[[GivenUp], None]] = field(default_factory=list)
    at_compiled: list[Callable[[CodeType, Any, Any], None]] = field(default_factory=list)

    def reset(self) -> None:
        """Forget all: Dynamo numbers its frames anew."""
        for seen in (self.kept, self.breaks, self.strategies):
            seen.clear()


@dataclass
class _Look:
    """A look at a model by a backend of its own: what was compiled for it, and the first compilation of each frame."""

    backend: Any
    compiled: list[tuple[CodeType, Any]] = field(default_factory=list)
    first: dict[Any, int] = field(default_factory=dict)


watched = Watched()
# The frames that Dynamo is compiling, outermost first, each with what compiles it.
_converting: ContextVar[tuple[tuple[Any, Any], ...]] = ContextVar("converting", default=())


def breaks_around() -> tuple[GraphBreak | None, GraphBreak | None]:
    """The breaks by which the graph that is being compiled begins, and ends: its own, or those of its callers."""
    frame, number, _ = compile_id()
    at_work = _functions_at_work() if watched.breaks else set()
    own = [one for one in watched.breaks if (one.frame, one.number) == (frame, number)]
    callers = [one for one in watched.breaks if one.frame != frame and one.function in at_work]
    return next(reversed(callers or own), None), next(reversed(own or callers), None)


def _functions_at_work() -> set[tuple[str, str]]:
    def frames() -> Iterator[FrameType]:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            yield frame
            frame = frame.f_back

    return {_named(frame.f_code) for frame in frames()}


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

    It has a hook for code that it keeps. It logs each break by one method, and a function's last compilation in its log
    alone. What becomes of a frame is what `CatchErrorsWrapper` returns, and `exceeds_recompile_limit` decides if it was
    the last (torch 2.11 to 2.14).
    """
    with _guard("what Dynamo breaks and throws away is not reported"):
        from torch._dynamo import cache_size, convert_frame
        from torch._dynamo.convert_frame import CatchErrorsWrapper, register_bytecode_hook
        from torch._dynamo.symbolic_convert import InstructionTranslatorBase

        log, convert = InstructionTranslatorBase.log_graph_break, CatchErrorsWrapper.__call__
        exceeds = cache_size.exceeds_recompile_limit

        @functools.wraps(log)
        def log_and_note(self: Any, code_options: Any, reason: str, exc: Any, **known: Any) -> None:
            with _guard("a graph break is not reported"):
                if not exc.logged:
                    _note_break(self, exc, _ENDS in reason)
            log(self, code_options, reason, exc, **known)

        @functools.wraps(convert)
        def convert_and_note(self: Any, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
            breaks = len(watched.breaks)
            token = _converting.set((*_converting.get(), (frame, self)))
            name = _named(frame.f_code)[0]
            watched.at_work.append(name)
            try:
                result = convert(self, frame, cache_entry, frame_state)
            finally:
                watched.at_work.remove(name)
                _converting.reset(token)
            with _guard("a function that Dynamo gives up on is not reported"):
                if result.guarded_code is None:
                    _note_strategy(frame.f_code, result)
                else:
                    _note_compiled(frame.f_code, result.guarded_code, self)
                _note_eager(frame, list(watched.breaks)[breaks:], result.guarded_code is None, self)
            return result

        @functools.wraps(exceeds)
        def exceeds_by_its_own(made: Any, compilation: Any) -> Any:
            with _guard("a look at a model counts the compilations before it"):
                made, compilation = _as_in_a_new_process(made, compilation)
            return exceeds(made, compilation)

        CatchErrorsWrapper.__call__ = convert_and_note  # type: ignore[method-assign]
        convert_frame.exceeds_recompile_limit = exceeds_by_its_own  # type: ignore[assignment, attr-defined]
        InstructionTranslatorBase.log_graph_break = log_and_note  # type: ignore[method-assign]
        register_bytecode_hook(_note_code)
        logging.getLogger("torch._dynamo.convert_frame").addFilter(_note_limit)


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


def _given_to_compile(compiler: Any) -> tuple[Any, dict[str, Any]]:
    """The backend, as `GivenUp` has it, and the options."""
    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    backend = getattr(compiler, "compiler_fn", getattr(compiler, "compiler_name", ""))
    return backend, getattr(compiler, "kwargs", {}).get("options") or {}


def _note_compiled(code: CodeType, made: Any, compiler: Any) -> None:
    for tell in list(watched.at_compiled):
        tell(code, made.compile_id, _given_to_compile(compiler)[0])


def _note_strategy(code: CodeType, result: Any) -> None:
    on_dynamo_reset(watched)
    if result.apply_to_code:
        watched.strategies[id(code)] = (weakref.ref(code), result.frame_exec_strategy)


def _note_eager(frame: Any, breaks: list[GraphBreak], whole: bool, compiler: Any) -> None:
    """Report the user's function that Dynamo gives up on for one of these breaks, as a whole or from there on."""
    code = frame.f_code
    own = [one for one in breaks if one.function == _named(code) and (whole or one.ends)]
    if own and not code.co_filename.startswith(_TORCH):
        name, file = own[-1].function
        resumed = name != code.co_name
        backend, options = _given_to_compile(compiler)
        found = GivenUp(own[-1], name, file, code.co_firstlineno, resumed, backend, options, reached(frame))
        for tell in list(watched.at_given_up):
            tell(found)


_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


@contextlib.contextmanager
def apart(
    backend: Any, tell: Callable[[GivenUp], Any], tell_limit: Callable[[Any, RecompileLimit], Any]
) -> Iterator[None]:
    """Around a look at a model by a backend of its own, after which Dynamo is as it was before.

    Dynamo tries functions again that it gave up on before. It keeps what it compiled before. It forgets the functions
    that it compiles for this backend alone, and these alone count for its limits. tell is called with each function
    that it gives up on for the backend, tell_limit with each frame that reaches a limit.
    """
    look = _Look(backend)

    def note(code: CodeType, compilation: Any, used: Any) -> None:
        if used is backend:
            look.compiled.append((code, compilation))

    def tell_ours(function: GivenUp) -> None:
        if function.backend is backend:
            tell(function)

    def tell_our_limit(frame: Any, limit: RecompileLimit) -> None:
        if limit.backend is backend:
            tell_limit(frame, limit)

    listening: list[tuple[list[Any], Any]] = [
        (watched.looks, look),
        (watched.at_given_up, tell_ours),
        (watched.at_limit, tell_our_limit),
        (watched.at_compiled, note),
    ]
    watch_dynamo()
    before = dict(watched.strategies)
    _act(before, ordinary=True)
    watched.strategies.clear()
    for listeners, one in listening:
        listeners.append(one)
    try:
        yield
    finally:
        for listeners, one in listening:
            listeners.remove(one)
        with _guard("Dynamo keeps what was compiled for a look at a model"):
            _forget(look.compiled)
        _act(watched.strategies, ordinary=True)
        _act(before, ordinary=False)
        watched.strategies.clear()
        watched.strategies.update(before)


def _as_in_a_new_process(cache_size: Any, compilation: Any) -> tuple[Any, Any]:
    """What Dynamo compares with its limits: for a look at a model, without what was compiled before or beside it."""
    frame, compiler = _converting.get()[-1]
    backend = _given_to_compile(compiler)[0]
    look = next((one for one in watched.looks if one.backend is backend), None)
    if look is None:
        return cache_size, compilation
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.cache_size import _has_same_id_matched_objs

    ours = {number for code, number in look.compiled if code is frame.f_code}
    entries = [entry for entry in _debug_get_cache_entry_list(frame.f_code) if entry.compile_id in ours]
    alike = sum(_has_same_id_matched_objs(frame, entry) for entry in entries)
    counts = {one.name: len(entries) for one in fields(cache_size)} | {_ALIKE: alike}
    first = look.first.setdefault(compilation.frame_id, compilation.frame_compile_id)
    own = replace(compilation, frame_compile_id=compilation.frame_compile_id - first)
    return replace(cache_size, **counts), own


def module_at(path: str) -> torch.nn.Module | None:
    """The module that a report's path names in the function that Dynamo is compiling, outermost first; None if unknown.

    A path begins at the function's own module, or with a local or global variable: "L['args'][0].layers.1".
    """
    if not _converting.get():
        return None
    frame = _converting.get()[-1][0]
    scope = {"L[": frame.f_locals, "G[": frame.f_globals}.get(path[:2])
    if scope is not None:
        found: Any = _followed(scope, path[1:])
    else:
        own = next((frame.f_locals[name] for name in ("self", "fn") if name in frame.f_locals), None)
        found = _followed(getattr(own, "__self__", own), path)
    return found if isinstance(found, torch.nn.Module) else None


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


def _forget(compiled: list[tuple[CodeType, Any]]) -> None:
    """Make Dynamo forget functions without another compilation: it can drop all compilations of a function, or none."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code

    ours = {compilation for _, compilation in compiled}
    for code in {id(code): code for code, _ in compiled}.values():
        if all(entry.compile_id in ours for entry in _debug_get_cache_entry_list(code)):
            reset_code(code)


def _act(strategies: dict[int, tuple[weakref.ref[CodeType], Any]], ordinary: bool) -> None:
    """Make Dynamo treat code by its strategy, or in the ordinary way."""
    with _guard("Dynamo does not compile again what it gave up on"):
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        any_other = _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.DEFAULT)
        for ref, strategy in list(strategies.values()):
            code = ref()
            if code is not None:
                set_code_exec_strategy(code, any_other if ordinary else strategy)


def _note_limit(record: logging.LogRecord) -> bool:
    with _guard("a function that is compiled no more is not reported"):
        if str(record.msg).startswith(_LIMIT) and isinstance(record.args, tuple):
            limit, number, _, reason = map(str, record.args[:4])
            changed = _GUARD.fullmatch(reason.strip().partition("\n")[0])
            frame, compiler = _converting.get()[-1]
            code, (name, file) = frame.f_code, _named(frame.f_code)
            on_dynamo_reset(watched)
            reaching = RecompileLimit(
                limit,
                int(number),
                name,
                file,
                code.co_firstlineno,
                name != code.co_name,
                changed.group(1) if changed else reason,
                *_given_to_compile(compiler),
                reached(frame, below=True),
            )
            for tell in list(watched.at_limit):
                tell(compile_id()[0], reaching)
    return True


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
