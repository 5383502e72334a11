"""One guard around our code that a compilation calls: an error there costs a rewrite or a message, no more.

The log and the report have one line for each failure, with the place in our sources. Its traceback is logged at
debug level.
"""

from __future__ import annotations

import logging
import os
from types import TracebackType
from typing import Any

from mhc_compile import compat
from mhc_compile.encoding import in_one_line

log = logging.getLogger(__name__)

_ROOT = os.path.dirname(__file__)
# A process that runs out of these fails wherever it happens to be, and in many places.
_ANYWHERE = (RecursionError, MemoryError)
# What says of a failure that there is one.
_NO_PLACE = ("guard.py", "budget.py", "again.py", "as_it_was.py")


class Deliberate(compat.Unwrapped):
    """An error that is meant to stop a compilation. The caller of the compiled function gets it as it is."""


class guard:
    """Catch errors of the block: log each one with its consequence, and add it to `errors`.

    Errors that are meant to stop a compilation go through, and so do Dynamo's requests to trace again. A class, since
    it stands around every operation of a graph.
    """

    __slots__ = ("_errors", "_follows")

    def __init__(self, follows: str, errors: list[str] | None = None) -> None:
        self._follows, self._errors = follows, errors

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception) or _stops(error):
            return False
        told(error, self._follows, self._errors)
        return True


def told(error: Exception, follows: str, errors: list[str] | None = None, line: str = "") -> str:
    """Report a failure that was caught, once for all equal ones; returns the line of the report.

    line is the user's, if the failure is about one.
    """
    if _stops(error):
        raise error
    message = described(error)
    kind = type(error).__name__ if isinstance(error, _ANYWHERE) else message
    if line:
        message = f"{message}, at {line}"
    known = errors is not None and any(one.startswith(kind) for one in errors)
    if not known and not _was_told(kind):
        log.warning("%s: %s", follows, message)
        log.debug("where this failed", exc_info=error)
    if errors is not None and not known:
        errors.append(message)
    return message


def _stops(error: Exception) -> bool:
    """Whether an error is meant to stop a compilation."""
    return isinstance(error, Deliberate) or _asks_to_trace_again(error)


def _was_told(kind: str) -> bool:
    """Whether another graph of this compilation, such as that of the backward, reported the same failure."""
    frame, number = _compilation()
    if frame is None:
        return False
    known = (frame, number, kind) in _told
    _told.add((frame, number, kind))
    return known


def _compilation() -> tuple[Any, Any]:
    try:
        return compat.compile_id()[:2]
    except Exception:  # reporting a failure must not fail: all count as one compilation
        return "unknown", None


_told: set[Any] = set()


def forget() -> None:
    """Report all failures anew, as after a reset of Dynamo."""
    _told.clear()


def _asks_to_trace_again(error: Exception) -> bool:
    try:
        return compat.asks_to_trace_again(error)
    except Exception:  # reporting a failure must not fail
        return False


def described(error: BaseException) -> str:
    """A failure in one line: its type, what it says, and the innermost line of ours that it passed."""
    place = _place(error.__traceback__)
    return in_one_line(error) + (f" ({place})" if place else "")


def _place(trace: TracebackType | None) -> str:
    place = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith(_ROOT) and os.path.basename(file) not in _NO_PLACE:
            place = f"{os.path.basename(_ROOT)}{file.removeprefix(_ROOT)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
