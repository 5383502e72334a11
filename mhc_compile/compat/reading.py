"""Inductor's settings, given for the whole process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# All functions of Inductor's that read the settings below (torch 2.11 to 2.14): one compiles a graph, one lowers what
# autograd made of it, a backward graph perhaps much later, and one computes a graph's key in caches.
_COMPILES = "_maybe_wrap_and_compile_fx_main"
_READERS = (_COMPILES, "_compile_fx_inner", "autograd_cache_key")


class _Reader:
    """A function of Inductor's, with settings that are given when it is called."""

    def __init__(
        self, function: Callable[..., Any], settings: Callable[[], dict[str, Any]], run: Callable[..., Any]
    ) -> None:
        functools.update_wrapper(self, function)
        # After that: what somebody else has made of a function of this class may have its attributes.
        self._function, self._settings, self._run = function, settings, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch._inductor import config

        def call() -> Any:
            with config.patch(self._settings()):
                return self._function(*args, **kwargs)

        return self._run(args[0] if args else None, call)

    def taken_out(self) -> Callable[..., Any]:
        return self._function


def set_while_compiling(settings: Callable[[], dict[str, Any]], run: Callable[[Any, Callable[[], Any]], Any]) -> None:
    """Have Inductor compile with the settings that `settings()` returns at the time, whoever compiles in this process.

    Each graph is compiled by `run(module, compiling)`, which calls `compiling()`. The module is None if it is not the
    first argument.

    In torch 2.12 and later an assignment to a setting holds for the thread or asyncio task that makes it. Nothing is
    assigned here: the functions that read settings are replaced, and each call patches its own context.
    """
    from torch._inductor import compile_fx

    for name in _READERS:
        function = getattr(compile_fx, name, None)
        if function is not None and not isinstance(function, _Reader):
            wrapped = run if name == _COMPILES else lambda module, call: call()
            setattr(compile_fx, name, _Reader(function, settings, wrapped))


def set_no_more() -> None:
    """Put Inductor's functions back, except those that other code has wrapped since.

    For the sake of these `settings()` has to return nothing from now on.
    """
    from torch._inductor import compile_fx

    for name in _READERS:
        function = getattr(compile_fx, name, None)
        if isinstance(function, _Reader):
            setattr(compile_fx, name, function.taken_out())
