"""What Dynamo keeps, where it breaks graphs or gives them up, and which functions it compiles no more.

It is written down from before the first compilation: a break comes before the graph that it ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from mhc_compile.compat.graphs import compile_id, on_dynamo_reset
from mhc_compile.compat.inductor import _guard

_RESUMED = re.compile(r"torch_dynamo_resume_in_(.*)_at_\d+$")
# Dynamo's texts are paragraphs: what happened, an explanation, hints, and what developers want to know.
_EXPLANATION = re.compile(r"^\s*Explanation: (.*)$", re.MULTILINE)
_LIMIT = "torch._dynamo hit config.%s"
_FUNCTION = re.compile(r"'(.*)' \((.*):(\d+)\)")
_GUARD = re.compile(r"(?:\d+/\d+: )?(.*?)(?:\s+#.*)?")


@dataclass(frozen=True)
class GraphBreak:
    """Where Dynamo broke the graph of a function, or gave it up. frame and number are those of the compilation."""

    frame: Any
    number: Any
    function: tuple[str, str]
    file: str
    line: int
    words: str


@dataclass(frozen=True)
class RecompileLimit:
    """A function that was compiled as often as Dynamo's setting `limit` allows; changed is the guard that failed."""

    limit: str
    number: int
    function: str
    file: str
    line: int
    changed: str


@dataclass
class Watched:
    """What Dynamo did since it was reset. kept has the compilations whose code it keeps, limits are by frame.

    at_limit is called with a frame that has reached a limit, and may raise.
    """

    kept: set[tuple[Any, Any]] = field(default_factory=set)
    breaks: dict[GraphBreak, None] = field(default_factory=dict)
    limits: dict[Any, RecompileLimit] = field(default_factory=dict)
    at_limit: Callable[[Any], None] = lambda frame: None

    def reset(self) -> None:
        """Forget all: Dynamo numbers its frames anew."""
        for seen in (self.kept, self.breaks, self.limits):
            seen.clear()


watched = Watched()


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


def _named(code: Any) -> tuple[str, str]:
    """A function's name and file; that of the part of a function behind a break is the function's."""
    resumed = _RESUMED.match(code.co_name)
    return (resumed.group(1) if resumed else code.co_name, code.co_filename)


@functools.cache
def watch_dynamo() -> None:
    """Have Dynamo's doings written into `watched`, from now on.

    It has a hook for code that it keeps. It logs each break by one method, and a function's last compilation in its log
    alone (torch 2.11 to 2.14).
    """
    with _guard("what Dynamo breaks and throws away is not told"):
        from torch._dynamo.convert_frame import register_bytecode_hook
        from torch._dynamo.symbolic_convert import InstructionTranslatorBase

        log = InstructionTranslatorBase.log_graph_break

        @functools.wraps(log)
        def log_and_note(self: Any, code_options: Any, reason: str, exc: Any, **known: Any) -> None:
            with _guard("a graph break is not told"):
                if not exc.logged:
                    _note_break(self, exc)
            log(self, code_options, reason, exc, **known)

        InstructionTranslatorBase.log_graph_break = log_and_note  # type: ignore[method-assign]
        register_bytecode_hook(_note_code)
        logging.getLogger("torch._dynamo.convert_frame").addFilter(_note_limit)


def _note_code(code: CodeType, new_code: CodeType) -> None:
    on_dynamo_reset(watched)  # with each note: Dynamo has forgotten it after a reset
    watched.kept.add(compile_id()[:2])


def _note_break(translator: Any, error: Any) -> None:
    frame, number, _ = compile_id()
    stack = getattr(error, "real_stack", None) or [translator.frame_summary()]
    root = getattr(translator.output, "root_tx", None) or translator
    said = str(error)
    what, explanation = said.strip().partition("\n")[0], _EXPLANATION.search(said)
    words = f"{what}: {explanation.group(1)}" if explanation else what
    on_dynamo_reset(watched)
    found = GraphBreak(frame, number, _named(root.f_code), stack[-1].filename, stack[-1].lineno or 0, words)
    watched.breaks[found] = None


def _note_limit(record: logging.LogRecord) -> bool:
    with _guard("a function that is compiled no more is not told"):
        if str(record.msg).startswith(_LIMIT) and isinstance(record.args, tuple):
            limit, number, function, reason = map(str, record.args[:4])
            name, file, line = (_FUNCTION.fullmatch(function) or re.match("()()(0?)", "")).groups()  # type: ignore[union-attr]
            changed = _GUARD.fullmatch(reason.strip().partition("\n")[0])
            frame = compile_id()[0]
            on_dynamo_reset(watched)
            watched.limits[frame] = RecompileLimit(
                limit, int(number), name or function, file, int(line or 0), changed.group(1) if changed else reason
            )
            watched.at_limit(frame)
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
