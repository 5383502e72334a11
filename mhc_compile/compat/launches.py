"""Triton kernels that a graph launches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import fx

_analysed_once: dict[int, Any] = {}  # by id, because a kernel's hash is that of its source


def analyse_once(node: fx.Node) -> None:
    """Make Inductor analyse once what this launch's kernel writes, and not twice for each launch.

    The analysis takes as long as a tenth of compiling the kernel, and a model launches each kernel in every layer.
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
        key = _key(kernel, kwargs)
        if key is None:
            return analyse(kernel, kwargs, *rest)
        if key not in known:
            known[key] = analyse(kernel, kwargs, *rest)
        return known[key]

    return wrapped


def _key(kernel: Any, kwargs: dict[str, Any]) -> Any:
    """What is equal for launches that write the same; None for one that Inductor is to look through itself."""
    if id(kernel) not in _analysed_once:
        return None
    try:
        function = _jit_function(kernel)
        constants = {param.name for param in function.params if param.is_constexpr}
        key = (id(function), *((name, _kind(value, name in constants)) for name, value in sorted(kwargs.items())))
        hash(key)
    except (AttributeError, TypeError):  # of a Triton that describes kernels in another way
        return None
    return key


def _jit_function(kernel: Any) -> Any:
    return kernel if hasattr(kernel, "params") else kernel.fn  # of an Autotuner, which holds num_warps


def _kind(value: Any, constant: bool) -> Any:
    """The part of an argument that decides what a kernel does with it: a tensor's type; nothing for a number."""
    if constant or value is None:
        return type(value), value
    return getattr(value, "dtype", type(value))
