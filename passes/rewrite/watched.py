"""The program as it is, but each of its sites is one call of a function, which can compare its inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from mhc_compile import compat
from mhc_compile.passes.aten_calls import map_leaves
from mhc_compile.passes.plan import Site
from mhc_compile.passes.rewrite import Rewriter, replaced
from mhc_compile.passes.rewrite.copies import Copies
from mhc_compile.passes.shadow import Shadow
from mhc_compile.passes.site_modules import Alone


def watched(shadow: Shadow, parts: Mapping[int, tuple[Alone, Callable[..., Any]]]) -> fx.Graph:
    """A new graph in which each site is a call of its function, with the site's inputs, for a tuple of its outputs.

    parts has sites and functions by the identities of the former. Raises SitesFailed if some cannot be such calls.
    """
    sites = [part.site for part, _ in parts.values()]
    targets = {node for site in sites for value in replaced(site) for node in value.nodes}
    copies = Copies(shadow, targets, (node for part, _ in parts.values() for node in part.inputs))
    watching = _Watching(copies, shadow)
    watching.parts = parts
    watching.run(sites)
    copies.graph.lint()
    return copies.graph


class _Watching(Rewriter):
    parts: Mapping[int, tuple[Alone, Callable[..., Any]]]

    def _insert(self, site: Site) -> None:
        part, function = self.parts[id(site)]
        self.anchor = self.copies[min(part.outputs, key=self.shadow.position.__getitem__)]
        examples = tuple(map_leaves(compat.another_fake, compat.example(node)) for node in part.outputs)
        call = self._call(function, *map(self.copies.current, part.inputs), example=examples)
        self.calls.append((call, site))
        for index, value in enumerate(replaced(site)):
            self._replace(value, self._item(call, index))
