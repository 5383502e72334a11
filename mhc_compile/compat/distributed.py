"""The job that a process is a rank of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from mhc_compile.compat.inductor import _guard


def job_store() -> Any:
    """The store that all ranks of this job share, for this project's keys; None for a process that is alone.

    A process that only imitates the others, by torch's "fake" backend, is alone.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() < 2:
        return None
    if distributed.get_backend() == "fake":
        return None
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    return PrefixStore("mhc_compile", _get_default_store())


def rank() -> int:
    """The number of this process in its job; 0 for one that is alone."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def ranks() -> int:
    """How many processes this job has."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


Whole = Callable[[fx.GraphModule, str, dict[str, Any]], AbstractContextManager[Callable[[Any], Any]]]


@functools.cache
def before_ddp_splits(whole: Whole) -> None:
    """Have `whole(module, backend, options)` entered while Dynamo splits a graph at the buckets of gradients.

    It yields what makes of the compiled form the one that Dynamo calls.

    The optimizer of Dynamo for `DistributedDataParallel` gives each part to the backend (torch 2.11 to 2.14). backend
    and options are those that `torch.compile` was given.
    """
    with _guard("DistributedDataParallel may cut hyper-connections"):
        if not torch.distributed.is_available():
            return
        from torch._dynamo.backends.distributed import DDPOptimizer

        split = DDPOptimizer.compile_fn

        @functools.wraps(split)
        def split_whole(self: Any, gm: fx.GraphModule, example_inputs: Any, **configs: Any) -> Any:
            with whole(gm, *_backend(self.backend_compile_fn)) as called:
                return called(split(self, gm, example_inputs, **configs))

        DDPOptimizer.compile_fn = split_whole  # type: ignore[method-assign]


def _backend(compiler: Any) -> tuple[str, dict[str, Any]]:
    """The name and the options that `torch.compile` was given; no name if it was given a function."""
    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    options = getattr(compiler, "kwargs", {}).get("options") or {}
    return str(getattr(compiler, "compiler_name", "")), options
