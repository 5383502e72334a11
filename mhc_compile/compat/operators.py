"""Registered operators, and what they run under: autograd, torch.func and autocast."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from mhc_compile.compat.nodes import bodies, changes_global_state, state_change


def registered_operators(namespace: str) -> set[str]:
    """The names of all public operators in a namespace, without overloads."""
    names = torch._C._dispatch_get_all_op_names()
    found = {name.split("::")[1].split(".")[0] for name in names if name.startswith(f"{namespace}::")}
    return {name for name in found if not name.startswith("_")}


def hidden_from_dynamo(function: Any) -> Any:
    """The function, which Dynamo does not trace. Unlike torch.compiler.disable it imports Dynamo when it is called.

    torch 2.11 to 2.14 have the decorator.
    """
    return torch._compile._disable_dynamo(function)


def below_autograd(overload: Any, keyset: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator's implementation, past the keys that autograd handles."""
    with torch._C._AutoDispatchBelowAutograd():
        return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)


def functorch_is_active() -> bool:
    """Whether a transform of torch.func is at work."""
    return bool(torch._C._are_functorch_transforms_active())


def calls_are_watched() -> bool:
    """Whether something below autograd is to see calls of operators: a mode, or a transform of torch.func."""
    return torch._C._len_torch_dispatch_stack() > 0 or functorch_is_active()


# An autograd.Function that torch.func asks for no transforms. It serves the level at work, as torch's own rules do.
# torch 2.11 to 2.14 have the class; in 2.14 the C++ of `apply` asks every other subclass.
SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction


def apply_at_this_level(function: Any, args: Any) -> Any:
    """Apply a SingleLevelFunction."""
    from torch._functorch.utils import enable_single_level_autograd_function

    with enable_single_level_autograd_function():
        return function.apply(*args)


def forward_mode_is_active() -> bool:
    """Whether a level of forward-mode differentiation is open."""
    return torch.autograd.forward_ad._current_level >= 0


def forward_grad_mode() -> Any:
    """A context in which tangents are seen, which an autograd.Function hides from its forward.

    torch 2.13 and 2.14 have this class.
    """
    return torch.autograd.forward_ad._set_fwd_grad_enabled(True)


_AUTOCAST_DEVICES = ("cpu", "cuda")


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """The autocasts that are on: switching one off that is off is no change."""
    return tuple(
        (device, torch.get_autocast_dtype(device)) for device in _AUTOCAST_DEVICES if torch.is_autocast_enabled(device)
    )


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """A context in which no autocast is on."""
    with contextlib.ExitStack() as stack:
        for device, _ in autocast_state():
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextlib.contextmanager
def under_autocast(state: Iterable[tuple[str, torch.dtype]]) -> Iterator[None]:
    """A context in which the autocasts of an `autocast_state` are on, and no others."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_autocast())
        for device, dtype in state:
            stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
        yield


_AUTOCAST = "mhc_autocast"


def note_autocast_of_bodies(module: fx.GraphModule) -> None:
    """Note of each graph that others call what autocasts are on at its first call, of which Dynamo's examples are.

    Such a graph sets only what changes within it. It may be looked at before the graph that calls it, or alone.
    """
    noted: dict[fx.GraphModule, tuple[tuple[str, torch.dtype], ...]] = {}
    with autocast_of(module.graph), autocast_regions() as follow_autocast:
        for node in module.graph.nodes:
            follow_autocast(node)
            for body in bodies(node):
                noted.setdefault(body, autocast_state())
    for body, state in noted.items():
        body.meta[_AUTOCAST] = state
        note_autocast_of_bodies(body)


def autocast_of(graph: fx.Graph) -> contextlib.AbstractContextManager[None]:
    """A context with the autocasts that are on where a graph is called; as things are, if they were not noted."""
    noted = getattr(graph.owning_module, "meta", {}).get(_AUTOCAST)
    return contextlib.nullcontext() if noted is None else under_autocast(noted)


@contextlib.contextmanager
def autocast_regions() -> Iterator[Callable[[fx.Node], None]]:
    """A function that enters or leaves the autocast that a node enters or leaves; all are left with the context.

    Autocast keeps its casts of parameters, but here each node has to show its own.
    """
    entered: list[Any] = []

    def follow(node: fx.Node) -> None:
        change = state_change(node) if changes_global_state(node) else ""
        if change == "enter_autocast":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # for a device that this machine lacks it warns, and is off
                entered.append(torch.autocast(*node.args))  # type: ignore[arg-type]
            entered[-1].__enter__()
        elif change == "exit_autocast" and entered:
            entered.pop().__exit__(None, None, None)

    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield follow
    finally:
        while entered:
            entered.pop().__exit__(None, None, None)
        torch.set_autocast_cache_enabled(before)
