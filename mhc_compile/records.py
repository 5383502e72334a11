"""What the passes reported: over all graphs of this process, and beside Inductor's cache for later ones.

A compiled graph that is found in a cache skips the passes, so there is no report; then the one stored when it was
compiled is named in the log.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx

from mhc_compile import compat, guard
from mhc_compile.passes.report import Report

log = logging.getLogger(__name__)


class _Forgetful:
    """Stands among Dynamo's backends, so that a reset of Dynamo is one of ours."""

    @staticmethod
    def reset() -> None:
        forget()


_forgetful = _Forgetful()

# One report for each frame that Dynamo has compiled; a frame that is compiled anew replaces its own.
_reports: dict[Any, tuple[Any, Report]] = {}


def add(report: Report) -> Report:
    """Count a graph's report to those of the compilation in progress, all of which are returned."""
    compat.on_dynamo_reset(_forgetful)
    frame, attempt = compat.compile_id()
    known, total = _reports.get(frame, (None, None))
    if total is None or known != attempt:
        total = Report()
        _reports[frame] = (attempt, total)
    total.add(report)
    return total


def forget() -> None:
    """Forget all reports, and what was told of failures."""
    _reports.clear()
    guard.forget()


def report() -> Report:
    """All graphs that were compiled since `torch._dynamo.reset()` or `forget`, in one report.

    A function that was compiled again, for other shapes, counts once, as it was compiled last. Graphs that were found
    in Inductor's cache are not in it: the log (`TORCH_LOGS="+mhc_compile"`) names the file that has their report.
    """
    total = Report()
    for _, one in _reports.values():
        total.add(one)
    return total


@contextmanager
def stored(gm: fx.GraphModule, inputs: Sequence[Any], identity: Any) -> Iterator[None]:
    """Around the compilation of one graph: write its report to a file, or name the file if a cache had the graph.

    One frame may have several, into which `DistributedDataParallel` cuts it; then the file has those before as well.
    """
    file: Path | None = None
    graphs = 0
    with guard.guard("the report of this graph is not stored"):
        graphs = _begin()
        file = compat.inductor_cache_dir() / "mhc" / f"{_key(gm, inputs, identity)}.txt"
    yield
    with guard.guard("the report of this graph is not stored"):
        if file is not None:
            _store(file, graphs)


def _begin() -> int:
    """How many graphs of the frame that Dynamo compiles have reports; those of an earlier compilation are forgotten."""
    frame, attempt = compat.compile_id()
    known, before = _reports.get(frame, (None, None))
    if before is not None and (frame is None or known != attempt):
        del _reports[frame]
        before = None
    return 0 if before is None else before.graphs


def _store(file: Path, graphs: int) -> None:
    found = _reports.get(compat.compile_id()[0])
    if found is None or found[1].graphs == graphs:
        where = f"was written to {file}" if file.exists() else "is not known"
        log.info("found in Inductor's cache: no report is made anew, the one of its compilation %s", where)
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{found[1]}\n", encoding="utf-8")
    except OSError as error:  # a cache that cannot be written to costs a report, not a compilation
        log.info("the report could not be stored: %s", error)


def _key(gm: fx.GraphModule, inputs: Sequence[Any], identity: Any) -> str:
    kinds = [(tuple(i.shape), i.dtype, i.device) if isinstance(i, torch.Tensor) else type(i) for i in inputs]
    return hashlib.sha256(repr((gm.code, kinds, identity)).encode(errors="backslashreplace")).hexdigest()[:16]
