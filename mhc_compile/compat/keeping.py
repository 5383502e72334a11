"""What Inductor keeps with a compiled graph."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

from mhc_compile.compat.inductor import _guard

# An attribute of Inductor's compiled graphs. They are pickled with all that they have (torch 2.11 to 2.14).
_REPORT = "_mhc_compile_report"


def carry_with_compiled_graphs(pack: Callable[[], str | None], unpack: Callable[[str], None]) -> None:
    """Have Inductor's objects for compiled graphs carry a text.

    pack() makes the text when a graph has been compiled. unpack(text) is called when a graph comes from elsewhere.
    Every cache, artifact and file holds this object, whose `after_deserialization` is called before it is used.
    """
    from torch._inductor.output_code import CompiledFxGraph

    make, load = CompiledFxGraph.__init__, CompiledFxGraph.after_deserialization
    if hasattr(make, "__wrapped__") and hasattr(load, "__wrapped__"):
        return

    @functools.wraps(make)
    def make_and_pack(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        with _guard("caches have no report of this graph"):
            text = pack()
            if text is not None:
                setattr(self, _REPORT, text)

    @functools.wraps(load)
    def load_and_unpack(self: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = load(self, *args, **kwargs)
        with _guard("the report of a graph from a cache is not known"):
            text = getattr(self, _REPORT, None)
            if text is not None:
                unpack(text)
        return loaded

    CompiledFxGraph.__init__ = make_and_pack  # type: ignore[method-assign]
    CompiledFxGraph.after_deserialization = load_and_unpack  # type: ignore[method-assign]
    for graph in gc.get_objects():  # of files that were loaded before
        if type(graph) is CompiledFxGraph and graph.current_callable is not None and hasattr(graph, _REPORT):
            unpack(getattr(graph, _REPORT))
