"""A line on the terminal that says how far a long piece of work is."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

_SILENT = 2.0  # seconds
_PAUSE = 1.0


@contextlib.contextmanager
def progress(words: Callable[[], str]) -> Iterator[None]:
    """Show a line on the terminal, if there is one, from two seconds on, with the time that has gone by."""
    terminal = sys.stderr
    if not terminal.isatty():
        yield
        return
    begin, done = time.monotonic(), threading.Event()

    def write(line: str) -> None:
        terminal.write(f"\r{line}\x1b[K")
        terminal.flush()

    def show() -> None:
        if done.wait(_SILENT):
            return
        from mhc_compile.guard import guard  # not at the top: it imports Dynamo, which takes seconds

        with guard("progress is not shown"):
            while True:
                write(f"{words()}, {time.monotonic() - begin:.0f} s")
                if done.wait(_PAUSE):
                    break
            write("")

    shower = threading.Thread(target=show, daemon=True)
    shower.start()
    try:
        yield
    finally:
        done.set()
        shower.join()


def say(line: str) -> None:
    """Print a line that stays. The progress line that may be on the terminal makes room for it.

    If whoever reads the output has enough of it, as `head` has, what follows is not printed: the command still ends
    with its exit code.
    """
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
