"""What the passes make of a model, without compiling it."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

import mhc_compile.ops  # noqa: F401  (registers the operators that the passes insert)
from mhc_compile import compat, passes, records
from mhc_compile.guard import guard
from mhc_compile.passes.report import Report


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Run `model(*args, **kwargs)` once through Dynamo and report its hyper-connections.

    Returns a `Report`: `report.sites`, `report.rewritten` and `report.declined` list the sites with operator, source
    location, detail and reason, `report.cut` what Dynamo tears apart, `report.fusions` counts what was fused;
    `str(report)` is the same for people. The rewritten graphs run operator by operator, in the caller's grad mode;
    nothing is compiled and nothing is kept. From two seconds on, a terminal shows how far it is.
    """
    ledger = records.Ledger()

    def mhc(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with ledger.graph() as graph:
            graph.traced.add(passes.run_recursively(gm))
            compiled: Callable[..., Any] = compat.compile_without_inductor(
                gm, example_inputs, lambda joint: graph.traced.add(passes.fuse(joint))
            )
        return compiled

    compat.watch_dynamo()
    # Dynamo keeps what it has compiled for earlier explanations.
    more = compat.more_compilations(1 + next(_explanations))
    with more, compat.without_tracebacks(), _progress(lambda: f"explain: {ledger.progress()}"):
        torch.compile(model, backend=mhc)(*args, **kwargs)
    return ledger.report()


_explanations = itertools.count()


_SILENT = 2.0  # seconds
_PAUSE = 1.0


@contextlib.contextmanager
def _progress(words: Callable[[], str]) -> Iterator[None]:
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
