"""mhc::_launch, which launches a kernel that Inductor cannot put into its graphs (`kernels.opaque` says which).

launch is a text (`mhc_compile.encoding`) of these: the kernel's path, the places of tensors and symbolic sizes among
its arguments, the dtypes of the tensors, the other arguments by place with the number of programs as the last, and the
kernel's options. `_loops` says why tensors that are written have to be named.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import sys
from typing import Any

import torch

from mhc_compile import compat
from mhc_compile.encoding import from_text
from mhc_compile.ops._transforms import library, register_fake

log = logging.getLogger(__name__)


@functools.cache
def _read(text: str) -> Any:
    # Not at the top: operators work where Triton is missing.
    from mhc_compile.kernels.opaque import Launch, Opaque

    compat.settle_triton()
    path, places, dtypes, rest, options = from_text(text)
    module, name = path.rsplit(".", 1)
    # A cached graph has the text. It is no way to import or call anything else.
    if module not in sys.modules and not module.startswith("mhc_compile.kernels."):
        raise ValueError(f"mhc::_launch: {path} is no kernel of mhc_compile")
    kernel = getattr(importlib.import_module(module), name)
    if not isinstance(kernel, Opaque):
        raise ValueError(f"mhc::_launch: {path} is no kernel of mhc_compile")
    return Launch(kernel, places, dtypes, rest, options, compat.load_kernel)


def launch(text: str, read: list[torch.Tensor], sizes: list[int], *, written: list[torch.Tensor]) -> None:
    """What the operator does; Inductor's code calls it itself."""
    _read(text)([*written, *read], sizes)


@functools.cache
def compile_elsewhere(text: str) -> None:
    """Have another process compile a launch's kernel, if there is one, so that the first launch finds it.

    In this process it would wait for that launch, and then everything for it. A launch that comes before the kernel is
    there compiles it once more: a process that has done nothing yet takes longer than that.
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


def _compile(text: str, target: tuple[Any, ...], environment: dict[str, str], triton_hash: str | None) -> None:
    from mhc_compile.kernels.opaque import compiling_for

    with compiling_for(target, environment, triton_hash):
        importlib.import_module(from_text(text)[0].rpartition(".")[0])  # the process that asks has made the text itself
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
register_fake("_launch", lambda launch, read, sizes, *, written: None)
