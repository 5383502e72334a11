"""mhc::_launch, which launches a kernel that Inductor cannot put into its graphs (`kernels.opaque` says which).

launch: text (`mhc_compile.text`) of the kernel's path, the places of the tensors and symbolic sizes among its
arguments, the dtypes of the tensors, the other arguments by place, with the number of programs as the last, and its
options. Why what is written has to be named is said in `_loops`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import os
from concurrent.futures import wait
from typing import Any

import torch

from mhc_compile import compat
from mhc_compile.ops._transforms import library
from mhc_compile.text import from_text

log = logging.getLogger(__name__)

# By the text of a launch, who compiles its kernel, and in which process that was asked for.
_jobs: dict[str, tuple[Any, int]] = {}
# Seconds to wait for another process, which takes some five.
_PATIENCE = 60.0


@functools.cache
def _read(text: str) -> Any:
    # Not at the top: operators work where Triton is missing.
    from mhc_compile.kernels.opaque import Launch

    compat.settle_triton()
    _wait_for(text)
    path, places, dtypes, rest, options = from_text(text)
    module, name = path.rsplit(".", 1)
    kernel = getattr(importlib.import_module(module), name)
    return Launch(kernel, places, dtypes, rest, options, compat.load_kernel)


def launch(text: str, read: list[torch.Tensor], sizes: list[int], *, written: list[torch.Tensor]) -> None:
    """What the operator does; Inductor's code calls it itself."""
    _read(text)([*written, *read], sizes)


@functools.cache
def compile_elsewhere(text: str) -> None:
    """Have another process compile a launch's kernel, if there is one, for the first launch, which waits for it.

    In this process kernels would be compiled one after the other, each when it is launched.
    """
    if not torch.cuda.is_available():
        return
    from triton.runtime import driver

    from mhc_compile.kernels.opaque import hash_of_triton, triton_here

    compat.settle_triton()
    target = dataclasses.astuple(driver.active.get_current_target())
    job = compat.call_in_worker(_compile, text, target, triton_here(), hash_of_triton())
    if job is not None:
        job.add_done_callback(functools.partial(_tell, text))
        _jobs[text] = job, os.getpid()


def _wait_for(text: str) -> None:
    """Until the kernel is compiled, if somebody is at it; nobody answers a process that was forked meanwhile."""
    job, asked_by = _jobs.get(text, (None, None))
    if job is None or asked_by != os.getpid():
        return
    if not wait([job], _PATIENCE).done:
        log.warning(
            "no other process has compiled %s in %.0f s; this one does, and all that are to come", text, _PATIENCE
        )
        _jobs.clear()


def _compile(text: str, target: tuple[Any, ...], environment: dict[str, str], triton_hash: str | None) -> None:
    from mhc_compile.kernels.opaque import compiling_for

    with compiling_for(target, environment, triton_hash):
        _read(text).compile()


def _tell(text: str, job: Any) -> None:
    error = None if job.cancelled() else job.exception()
    if error is not None:  # the first launch will compile it
        log.info("another process did not compile %s: %s: %s", text, type(error).__name__, error)


# With as little between call and kernel as torch allows: the time that a launch takes is the host's.
library.define(  # type: ignore[no-untyped-call]
    "_launch(str launch, Tensor[] read, SymInt[] sizes, *, Tensor(a!)[] written) -> ()",
    tags=(torch.Tag.needs_exact_strides,),
)
library.impl("_launch", launch, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake("mhc::_launch", lambda launch, read, sizes, *, written: None, lib=library)
