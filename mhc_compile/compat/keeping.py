"""What Inductor keeps with a compiled graph, and AOTInductor in a package."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

from mhc_compile.compat.inductor import _guard, inductor_config

# An attribute of Inductor's compiled graphs. They are pickled with all that they have (torch 2.11 to 2.14).
_REPORT = "_mhc_compile_report"
# A name among the metadata of a package.
_IN_PACKAGE = "mhc_report"
_METADATA = "aot_inductor.metadata"


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


def settings_of_packages() -> dict[str, Any]:
    """Settings with which what `put_into_package` writes is in no package that is made later.

    AOTInductor itself writes into the dictionary of its settings, which is that of the process.
    """
    return {_METADATA: dict(inductor_config().aot_inductor.metadata)}


def put_into_package(text: str) -> None:
    """Have the package that AOTInductor is making carry a text, under `settings_of_packages`."""
    inductor_config().aot_inductor.metadata[_IN_PACKAGE] = text


def watch_packages(unpack: Callable[[str | None], None]) -> None:
    """Have unpack called with the text of each package that is loaded in Python, or None if it has none."""
    from torch.export.pt2_archive._package import AOTICompiledModel

    make = AOTICompiledModel.__init__
    if hasattr(make, "__wrapped__"):
        return

    def tell(model: Any) -> None:
        with _guard("the report of a package is not known"):
            unpack(model.get_metadata().get(_IN_PACKAGE))

    @functools.wraps(make)
    def make_and_unpack(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        tell(self)

    AOTICompiledModel.__init__ = make_and_unpack  # type: ignore[method-assign]
    for model in gc.get_objects():  # of packages that were loaded before
        if type(model) is AOTICompiledModel and hasattr(model, "loader"):
            tell(model)
