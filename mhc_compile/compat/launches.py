"""Triton kernels that a graph launches, and how torch launches a compiled one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_analysed_once: dict[int, Any] = {}  # by id, because a kernel's hash is that of its source


def analyse_once(node: fx.Node) -> None:
    """Have Inductor look through this launch's kernel for what it writes once, not twice for each of its launches.

    That look takes as long as a tenth of compiling the kernel, and a model launches each of them in every layer.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    kernel = triton_kernel_wrap.kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
    for one in (kernel, _jit_function(kernel)):
        _analysed_once[id(one)] = one
    for name in ("identify_accessed_tensors", "identify_mutated_tensors"):
        analyse = getattr(triton_kernel_wrap, name, None)
        if analyse is not None and not hasattr(analyse, "__wrapped__"):
            setattr(triton_kernel_wrap, name, _remembering(analyse))


def _remembering(analyse: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, Any] = {}

    @functools.wraps(analyse)
    def wrapped(kernel: Any, kwargs: dict[str, Any], *rest: Any) -> Any:
        if id(kernel) not in _analysed_once:
            return analyse(kernel, kwargs, *rest)
        function = _jit_function(kernel)
        constants = {param.name for param in function.params if param.is_constexpr}
        key = (id(function), *((name, _kind(value, name in constants)) for name, value in sorted(kwargs.items())))
        if key not in known:
            known[key] = analyse(kernel, kwargs, *rest)
        return known[key]

    return wrapped


def _jit_function(kernel: Any) -> Any:
    return kernel if hasattr(kernel, "params") else kernel.fn  # of an Autotuner, which holds num_warps


def _kind(value: Any, constant: bool) -> Any:
    """What of an argument decides what a kernel does with it: of tensors the type, of numbers nothing."""
    if constant or value is None:
        return type(value), value
    return getattr(value, "dtype", type(value))


@functools.cache
def load_kernel(compiled: Any, index: int) -> int | None:
    """The CUfunction of a kernel that Triton compiled, loaded to a GPU, the current one.

    None of an unknown Triton, and where it does not fit, of which Triton has more to say.
    """
    try:
        from triton.runtime import driver

        utils, shared = driver.active.utils, compiled.metadata.shared
        load, most = utils.load_binary, utils.get_device_properties(index)["max_shared_mem"]
    except (ImportError, AttributeError, LookupError):
        return None
    function: int | None = load(compiled.name, compiled.kernel, shared, index)[1] if shared <= most else None
    return function


def raw_stream(index: int) -> int:
    """The current CUDA stream of a GPU, as the driver knows it."""
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return stream
