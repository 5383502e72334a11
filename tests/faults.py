"""Lets any function of the passes fail, wherever it is called from, while a hook of Inductor's is at work.

A function's code is replaced, and not a name: modules import each other's functions by name.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from mhc_compile import records
from mhc_compile.hooks import HOOKS

# Not the guard, which stands around the others, and not the operators, which programs call as they run.
_PARTS = ("passes", "compat", "backend", "hooks", "records", "agreement")
ERRORS: tuple[Callable[[], Exception], ...] = (
    lambda: RuntimeError("planted\nin two lines"),
    lambda: UnicodeEncodeError("utf-8", "\udcff", 0, 1, "planted"),
    lambda: KeyError("planted"),
    lambda: RecursionError("planted"),
    lambda: AssertionError("planted"),
    lambda: MemoryError("planted"),
)


def functions() -> dict[str, types.FunctionType]:
    """The functions and methods of all modules that hooks call, by their names."""
    found: dict[str, types.FunctionType] = {}
    for module in _modules():
        for name, item in _members(module):
            function = _function(item)
            own = function is not None and function.__module__ == module.__name__
            if function is not None and own and not function.__code__.co_freevars:
                found[f"{module.__name__.removeprefix('mhc_compile.')}:{name}"] = function
    return found


def forget_answers() -> None:
    """Empty the caches of functions that remember a number of answers. What is remembered cannot fail."""
    for module in _modules():
        for item in vars(module).values():
            if hasattr(item, "cache_parameters") and item.cache_parameters()["maxsize"] is not None:
                item.cache_clear()


def _members(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """What a module defines, and what its classes do."""
    for name, value in list(vars(module).items()):
        yield name, value
        if isinstance(value, type):
            yield from ((f"{name}.{key}", item) for key, item in list(vars(value).items()))


def _modules() -> Iterator[types.ModuleType]:
    for part in _PARTS:
        module = importlib.import_module(f"mhc_compile.{part}")
        yield module
        for info in pkgutil.walk_packages(getattr(module, "__path__", []), f"{module.__name__}."):
            yield importlib.import_module(info.name)


def _function(item: Any) -> types.FunctionType | None:
    if isinstance(item, property):
        item = item.fget
    if isinstance(item, (staticmethod, classmethod)):
        item = item.__func__
    item = getattr(item, "__wrapped__", item)
    return item if isinstance(item, types.FunctionType) else None


class Hooks:
    """Whether a hook is at work, and what is to fail then."""

    def __init__(self) -> None:
        self.at_work = 0
        self.calls: set[types.CodeType] = set()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        self.at_work += 1
        try:
            yield
        finally:
            self.at_work -= 1


hooks = Hooks()


@contextlib.contextmanager
def failing(function: types.FunctionType, error: Callable[[], Exception]) -> Iterator[None]:
    """Let a function raise whenever a hook is at work."""
    original = function.__code__
    copy = types.FunctionType(original, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__

    def instead(*args: Any, **kwargs: Any) -> Any:
        if hooks.at_work:
            raise error()
        return copy(*args, **kwargs)

    function.__code__ = _calling(instead, function.__name__)
    try:
        yield
    finally:
        function.__code__ = original


def _calling(function: Callable[..., Any], name: str) -> types.CodeType:
    """Code that calls this function, which is a constant in it: the code runs with the globals of another module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # a text cannot be called
        made = compile("lambda *args, **kwargs: 'function'(*args, **kwargs)", "<failing>", "eval")
    (inner,) = (const for const in made.co_consts if isinstance(const, types.CodeType))
    consts: tuple[Any, ...] = tuple(function if const == "function" else const for const in inner.co_consts)
    return inner.replace(co_consts=consts, co_name=name)


def called(run: Callable[[], Any]) -> list[str]:
    """The names of the functions that hooks call in a run."""
    codes: set[types.CodeType] = set()

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and hooks.at_work:
            codes.add(frame.f_code)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return [name for name, function in functions().items() if function.__code__ in codes]


def compiled(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend that calls what Inductor calls of ours, in its order, and runs the graphs as they then are."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_compiler
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def lowered(module: fx.GraphModule, given: Any) -> Any:
        with hooks.working():
            lowering.uuid()
            lowering(module.graph)
        module.graph.lint()
        module.recompile()
        return make_boxed_compiler(lambda module, given: module.forward)(module, given)

    def partition(joint: fx.GraphModule, given: Any, **options: Any) -> Any:
        with hooks.working():
            fusing.uuid()
            fusing(joint.graph)
        joint.graph.lint()
        return min_cut_rematerialization_partition(joint, given, **options)

    rewriting, fusing, lowering = (make({}) for make in HOOKS.values())
    with hooks.working(), records.graph():
        rewriting(gm.graph)
    gm.graph.lint()
    compilers = {"fw_compiler": lowered, "bw_compiler": lowered, "inference_compiler": lowered}
    made: Callable[..., Any] = aot_autograd(**compilers, partition_fn=partition, decompositions=select_decomp_table())(
        gm, inputs
    )
    return made
