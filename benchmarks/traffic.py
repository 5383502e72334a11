"""Bytes moved, by count: what each provider reads and writes, whatever the time it takes for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch._inductor.compile_fx as compile_fx
import torch._inductor.metrics as metrics
import torch._inductor.scheduler as scheduler
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import units


def by_design(provider: str, mode: str, n: int, depth: int, tokens: int, width: int) -> float | None:
    """C-units of a chain of `depth` sublayers by the table of `units`; None for a provider that has no such table.

    The first mix, a boundary between any two sublayers, the last combine. A step is this and its backward.
    """
    if provider not in ("mhc", "mhc-ops"):
        return None
    names = ["generate_mix_and_aggregate", *["boundary"] * (depth - 1), "expand_combine"]
    if mode == "step":
        names += [f"{name}_backward" for name in names]
    return float(sum(units.units(name, n, many=units.are_many(tokens, width)) for name in names))


class Eager(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of every operator's tensors, read or written once each; what only makes a view costs nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = _tensors(result)
        given = {id(t): t for t in _tensors((args, kwargs))}
        memory = {t.untyped_storage().data_ptr() for t in given.values()}
        # Not only what calls itself a view: expand and detach give back their argument's memory as well.
        view = made and not func._schema.is_mutable and all(t.untyped_storage().data_ptr() in memory for t in made)
        if not view and not func.name().startswith("aten::empty"):
            self.bytes += sum(map(_bytes, (*given.values(), *made)))
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """What there is of it in memory: an expanded dimension is there once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count * tensor.itemsize


def of_eager(call: Callable[[], object]) -> int:
    """The bytes that eager operators move in `call`."""
    counter = Eager()
    with counter:
        call()
    return counter.bytes


@contextmanager
def of_inductor() -> Iterator[list[int]]:
    """Inductor's own count for what it compiles, or loads from its cache, meanwhile; empty if there is none."""
    counted: list[int] = []
    # It counts only where it would log the count. The line itself, one entry for every kernel, is for no one here, and
    # the running times that it would estimate for it cost time to compile, which is measured.
    log, before = compile_fx.inductor_metrics_log, metrics.num_bytes_accessed
    level = log.level
    log.setLevel(logging.INFO)
    log.addFilter(_drop)
    try:
        with patch.object(scheduler.BaseSchedulerNode, "get_estimated_runtime", lambda self: 0.0):
            yield counted
    finally:
        log.setLevel(level)
        log.removeFilter(_drop)
    if metrics.num_bytes_accessed > before:
        counted.append(metrics.num_bytes_accessed - before)


def _drop(record: logging.LogRecord) -> bool:
    return False
