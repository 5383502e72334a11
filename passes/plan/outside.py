"""Gates that leave one graph and come into another: a program that a graph break or a framework has cut.

A read whose gate comes in from outside could be that of experts or keys. It is that of streams if an operator made a
gate of this shape, from streams of this shape, that left a graph which was compiled before.
"""

from __future__ import annotations

from collections.abc import Iterable

from mhc_compile import compat
from mhc_compile.passes.plan.sites import MixSite, Site
from mhc_compile.passes.recognise.aggregate import Aggregate
from mhc_compile.passes.recognise.layout import any_view, origin
from mhc_compile.passes.shadow import Value

_Shape = tuple[int, ...]
# The shapes of streams and of gates that left a graph, in the whole process: graphs of one program are compiled one by
# one, possibly in several threads.
_left: set[tuple[_Shape, _Shape]] = set()


def remember(sites: Iterable[Site]) -> None:
    """Note the gates of sites that leave their graph."""
    for site in sites:
        if isinstance(site, MixSite):
            _left.update((_shape(site.x), _shape(gate)) for gate in site.made() if gate.is_output)


def came_in(read: Aggregate) -> bool:
    """Whether the gate and the streams of a read are inputs of the graph, such as were made in another one."""
    gate, x = origin(read.gate)[0], origin(read.x, any_view)[0]
    return gate.op is None and x.op is None and (_shape(x), _shape(gate)) in _left


def _shape(value: Value) -> _Shape:
    return tuple(int(compat.hint(size)) for size in value.meta.shape)
