"""mhc::_launch, which launches a kernel that Inductor cannot put into its graphs (`kernels.opaque` says which).

launch: text (`mhc_compile.text`) of the kernel's path, the places of the tensors and symbolic sizes among its
arguments, the dtypes of the tensors, the other arguments by place, with the number of programs as the last, and its
options. Why what is written has to be named is said in `_loops`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from typing import Any

import torch

from mhc_compile import compat
from mhc_compile.ops._transforms import library
from mhc_compile.text import from_text


@functools.cache
def _read(text: str) -> Any:
    # Not at the top: operators work where Triton is missing.
    from mhc_compile.kernels.opaque import Launch

    compat.triton_as_inductor_has_it()
    path, places, dtypes, rest, options = from_text(text)
    module, name = path.rsplit(".", 1)
    kernel = getattr(importlib.import_module(module), name)
    return Launch(kernel, places, dtypes, rest, options, compat.load_kernel)


def launch(text: str, read: list[torch.Tensor], sizes: list[int], *, written: list[torch.Tensor]) -> None:
    """What the operator does; Inductor's code calls it itself."""
    _read(text)([*written, *read], sizes)


def compile_elsewhere(text: str) -> Any:
    """Have another process compile a launch's kernel, where its first launch finds it in Triton's cache: a future.

    In this process it would wait for that launch, and then everything for it. None if there is nothing to be gained.
    """
    if not torch.cuda.is_available():
        return None
    from triton.runtime import driver

    target = driver.active.get_current_target()
    return compat.call_in_worker(_compile, text, dataclasses.astuple(target), compat.triton_as_inductor_has_it())


def _compile(text: str, target: tuple[Any, ...], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    _read(text).compile_for(target)


# With as little between call and kernel as torch allows: the time that a launch takes is the host's.
library.define(  # type: ignore[no-untyped-call]
    "_launch(str launch, Tensor[] read, SymInt[] sizes, *, Tensor(a!)[] written) -> ()",
    tags=(torch.Tag.needs_exact_strides,),
)
library.impl("_launch", launch, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake("mhc::_launch", lambda launch, read, sizes, *, written: None, lib=library)
