"""A graph that Inductor fails to compile, compiled a second time in another way."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from mhc_compile.compat.graphs import Snapshot
from mhc_compile.compat.inductor import _guard, compiles_ahead_of_time, inductor_config

# Called before a graph is compiled. It returns None if there shall be no second compilation, or what is called with an
# error of the first: that returns a context for the second, or None.
Watch = Callable[[], "Callable[[Exception], contextlib.AbstractContextManager[None] | None] | None"]


@contextlib.contextmanager
def without_graph_caches() -> Iterator[None]:
    """A context in which no cache keeps what Inductor compiles, or has it."""
    import torch._functorch.config as functorch

    with (
        inductor_config().patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        functorch.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
    ):
        yield


def compile_again(watch: Watch) -> None:
    """Have Inductor compile a graph again, in a context, where it raises; from now on, in this process.

    The graph is what it was before: Inductor's passes change it in place. No cache keeps what is compiled then, so that
    another process tries the first way again. If the second compilation fails as well, the first error is raised.
    """
    from torch._inductor import compile_fx

    compile_once = compile_fx._compile_fx_inner
    if getattr(compile_once, "_mhc_again", False):
        return

    @functools.wraps(compile_once)
    def compile_twice(gm: Any, *args: Any, **kwargs: Any) -> Any:
        before: list[Snapshot] = []
        second: Any = None
        if isinstance(gm, fx.GraphModule) and not compiles_ahead_of_time():
            with _guard("this graph is not compiled again if Inductor fails to compile it"):
                if (after := watch()) is not None:
                    before = [Snapshot(part.graph) for part in gm.modules() if isinstance(part, fx.GraphModule)]
                    second = after  # only with all snapshots
        try:
            return compile_once(gm, *args, **dict(kwargs))
        except Exception as error:
            context: Any = None
            with _guard("this graph is not compiled again, which Inductor fails to compile"):
                context = None if second is None else second(error)
                for snapshot in before if context is not None else ():
                    snapshot.put_back()
            if context is None:
                raise
            try:
                with context, without_graph_caches():
                    return compile_once(gm, *args, **kwargs)
            except Exception:
                raise error from None

    compile_twice._mhc_again = True  # type: ignore[attr-defined]
    compile_fx._compile_fx_inner = compile_twice
