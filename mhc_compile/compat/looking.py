"""Looks at a model: it is compiled by a backend of its own, and afterwards Dynamo is as it was before.

Dynamo has no compilations apart. So what was compiled for a look is told from what was compiled for a run.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from types import CodeType, FunctionType
from typing import Any

import torch

from mhc_compile.compat.inductor import _guard

_ALIKE = "num_cache_entries_with_same_id_matched_objs"
_OVER = "a look at a model is over"


@dataclass
class Look:
    """What was compiled for a look: functions; how often Dynamo tried each frame; and which sizes it has seen."""

    backend: Any
    compiled: list[tuple[CodeType, Any]] = field(default_factory=list)
    tries: Counter[Any] = field(default_factory=Counter)
    sizes: dict[Any, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def with_its_sizes(self) -> Iterator[None]:
        """While Dynamo compiles for this look, it knows the sizes of this look, and of no run."""
        from torch._dynamo.convert_frame import compile_lock
        from torch._dynamo.pgo import get_code_state

        with compile_lock:
            state = get_code_state()
            others = dict(state)
            _replace(state, self.sizes)
            try:
                yield
            finally:
                self.sizes = dict(state)
                _replace(state, others)


@dataclass
class Looks:
    """Those that last, and how often Dynamo has tried to compile each frame for a look since it was reset.

    strategies has what Dynamo did with code that it does not compile before the first of those that last.
    """

    lasting: list[Look] = field(default_factory=list)
    tries: Counter[Any] = field(default_factory=Counter)
    strategies: dict[int, tuple[weakref.ref[CodeType], Any]] = field(default_factory=dict)

    def of(self, backend: Any) -> Look | None:
        return next((one for one in self.lasting if one.backend is backend), None)

    def reset(self) -> None:
        """Dynamo numbers its frames anew, and has forgotten all sizes."""
        self.tries.clear()
        self.strategies.clear()
        for one in self.lasting:
            one.sizes.clear()

    @contextlib.contextmanager
    def look(self, one: Look) -> Iterator[None]:
        """While a look lasts. Afterwards Dynamo forgets what it compiled."""
        from torch._dynamo.pgo import get_code_state

        get_code_state()  # with the profile that a file may have, which the settings below would keep from being read
        self.lasting.append(one)
        try:
            # The sizes of a look are not for the profile, either, which may be kept in a file.
            with torch._dynamo.config.patch(automatic_dynamic_local_pgo=False, automatic_dynamic_remote_pgo=False):
                yield
        finally:
            self.lasting.remove(one)
            with _guard("Dynamo keeps what was compiled for a look at a model"):
                _forget(one.compiled)

    def own(self, look: Look | None, entries: Iterable[Any]) -> list[Any]:
        """The cache entries that were compiled for this look, or without one for runs."""
        if look is not None:
            ours = {compilation for _, compilation in look.compiled}
            return [entry for entry in entries if entry.compile_id in ours]
        theirs = {compilation for one in self.lasting for _, compilation in one.compiled}
        return [entry for entry in entries if entry.compile_id not in theirs and not _is_over(entry)]

    def count(self, look: Look | None, frame: Any, cache_size: Any, compilation: Any) -> tuple[Any, Any]:
        """What Dynamo compares with its limits: for a look, what was compiled for it; for a run, without any look."""
        number = compilation.frame_id
        tries = compilation.frame_compile_id - self.tries[number] if look is None else look.tries[number]
        if look is not None:
            look.tries[number] += 1
            self.tries[number] += 1
        elif not self.tries[number]:
            return cache_size, compilation
        return self._counted(look, frame, cache_size), replace(compilation, frame_compile_id=tries)

    def _counted(self, look: Look | None, frame: Any, cache_size: Any) -> Any:
        from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
        from torch._dynamo import convert_frame
        from torch._dynamo.cache_size import _has_same_id_matched_objs

        entries = _debug_get_cache_entry_list(frame.f_code)
        own = self.own(look, entries)
        # Looks are in no region of `isolate_recompiles`; a run in one counts its own entries, and all in all.
        region = getattr(convert_frame, "get_eval_frame_isolate_recompiles_id", lambda: -1)()
        if look is None and region >= 0:
            total = "total_cache_entries_all_regions"
            return replace(cache_size, **{total: getattr(cache_size, total) - len(entries) + len(own)})
        alike = sum(_has_same_id_matched_objs(frame, entry) for entry in own)
        return replace(cache_size, **({one.name: len(own) for one in fields(cache_size)} | {_ALIKE: alike}))


def in_default_stance() -> contextlib.AbstractContextManager[Any]:
    """Meanwhile Dynamo compiles, whatever `torch.compiler.set_stance` has set.

    Inside a compiled function Dynamo does not let anybody change the stance, so that it stays.
    """
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    try:
        stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("default")
        return stance
    except RuntimeError:
        return contextlib.nullcontext()


def _replace(state: dict[Any, Any], content: dict[Any, Any]) -> None:
    state.clear()
    state.update(content)


def _is_over(entry: Any) -> bool:
    return bool(getattr(entry.guard_manager, "invalidation_reason", "") == _OVER)


def _forget(compiled: list[tuple[CodeType, Any]]) -> None:
    """Make Dynamo forget functions that it compiled for a look.

    It can drop all compilations of a function. Of one that has others, it keeps a place without any code.
    """
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    ours = {compilation for _, compilation in compiled}
    for code in {id(code): code for code, _ in compiled}.values():
        entries = _debug_get_cache_entry_list(code)
        if all(entry.compile_id in ours for entry in entries):
            reset_code(code)
            continue
        for entry in entries:
            if entry.compile_id in ours and not _is_over(entry):
                state: Any = entry.guard_manager.extra_state
                state.invalidate(entry, DeletedGuardManagerWrapper(_OVER))


def act(strategies: dict[int, tuple[weakref.ref[CodeType], Any]], ordinary: bool) -> None:
    """Make Dynamo treat code by its strategy, or in the ordinary way."""
    with _guard("Dynamo does not compile again what it gave up on"):
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        any_other = _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.DEFAULT)
        for ref, strategy in list(strategies.values()):
            code = ref()
            if code is not None:
                set_code_exec_strategy(code, any_other if ordinary else strategy)


def limit_given_to(call: Callable[..., Any]) -> dict[str, int]:
    """The `recompile_limit` that `torch.compile` was given for a compiled module or function, as its argument again.

    What compiles a module knows it, and so does the closure of a compiled function (torch 2.13 and 2.14).
    """
    compilers = [getattr(getattr(call, "dynamo_ctx", None), "callback", None)]
    for function in (call, getattr(call, "_compiled_call_impl", None)):
        if isinstance(function, FunctionType) and hasattr(function, "_torchdynamo_orig_callable"):
            compilers.append(inspect.getclosurevars(function).nonlocals.get("callback"))
    limits = [getattr(compiler, "_recompile_limit", None) for compiler in compilers]
    given = [limit for limit in limits if isinstance(limit, int)]
    return {"recompile_limit": given[0]} if given else {}


def given_to_compile(compiler: Any) -> tuple[Any, dict[str, Any]]:
    """The backend and the options that `torch.compile` was given.

    For a name, the backend is the function that is registered for it; Inductor stays a name. For a `functools.partial`,
    it is the function inside, with the options of both.
    """
    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    backend = getattr(compiler, "compiler_fn", getattr(compiler, "compiler_name", ""))
    given = getattr(compiler, "kwargs", {})
    while isinstance(backend, functools.partial):
        given = backend.keywords | given
        backend = backend.func
    return backend, given.get("options") or {}
