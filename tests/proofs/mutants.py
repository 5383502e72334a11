"""Mutants: the project's own functions with a piece of their source changed."""

from __future__ import annotations

import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def mutated(function: Callable[..., Any], old: str, new: str) -> Iterator[None]:
    """A function of a module is another one meanwhile, whoever holds it: `old` in its source, once there, is `new`."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{function.__qualname__} has {source.count(old)} times {old!r}"
    namespace = dict(function.__globals__)
    exec(compile(f"from __future__ import annotations\n{source.replace(old, new)}", "<mutant>", "exec"), namespace)
    own, function.__code__ = function.__code__, namespace[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = own
