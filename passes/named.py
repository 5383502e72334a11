"""Modules whose class is named as a hyper-connection, and in which no step of one was recognised.

Some forms have the structure of graph pooling or of a graph convolution. There a name is all that tells them. It has a
line in the report, and never anything rewritten.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from mhc_compile import compat
from mhc_compile.passes.places import is_within
from mhc_compile.passes.plan import Declined
from mhc_compile.passes.plan.sites import Site, WithGates
from mhc_compile.passes.plan.surroundings import between
from mhc_compile.passes.recognise.contraction import is_stream_count
from mhc_compile.passes.recognise.layout import is_movement
from mhc_compile.passes.recognise.lists import scaled_alone
from mhc_compile.passes.report import MODULE, module_path
from mhc_compile.passes.shadow import Op, Shadow, Value

# The words of a class's name, in small letters, by which it is that of a hyper-connection: whole words, one after the
# other. A word begins with a capital or after an underscore, and capitals that follow each other are one word: HCA is
# no HC.
_NAMES = re.compile(r"\b(hyper ?conn(ection)?s?|m ?hc|hc|multi ?streams? residuals?)\b")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_VERSION = re.compile(r"(?<=[A-Z])v(?=\d)")  # as in mHCv2
# How far the making of gates is followed.
_MOST = 2_000
_PRODUCTS = {"mm", "bmm", "mv", "addmm", "baddbmm"}
_SCALING = {"mul", "addcmul"}


@dataclass
class _Named:
    """A module with such a class. node is the first that multiplies streams, values are what its own code computes."""

    kind: str
    node: fx.Node
    values: set[Value] = field(default_factory=set)


def named(shadow: Shadow, sites: list[tuple[Site, fx.Node]], refused: list[fx.Node]) -> Iterator[Declined]:
    """The modules with such a class whose own code may multiply streams, where nothing else is said of them.

    sites are those of the graph, each with its node. refused: where something else is said of a step.
    """
    found: dict[str, _Named] = {}
    scaling: dict[tuple[str, str], list[Op]] = {}
    compiled: Any = type(compat.module_at(""))  # Dynamo does not name it in the graph
    for op in shadow.ops:
        if op.name in _PRODUCTS or op.name in _SCALING or op.name == "sum":
            stack = op.node.meta.get("nn_module_stack")
            kind = named_as(next(reversed(stack.values()))[1] if stack else compiled)
            if kind and op.name in _SCALING:
                scaling.setdefault((module_path(op.node), kind), []).append(op)
            elif kind and _may_mix_streams(op):
                found.setdefault(module_path(op.node), _Named(kind, op.node))
    position = {op: i for i, op in enumerate(shadow.ops)} if scaling else {}
    for (path, kind), products in scaling.items():
        first = scaled_alone(products, position) if path not in found else None
        if first is not None:
            found[path] = _Named(kind, first.node)
    if not found:
        return
    for op in shadow.ops:
        if (one := found.get(module_path(op.node))) is not None and not is_movement(op):
            one.values.update(op.outs)
    left = list(map(module_path, refused))
    placed = [(site, module_path(node)) for site, node in sites]
    inside = [*left, *(at for _, at in placed)]
    for path, one in found.items():
        own = one.values
        # The module may also be a part of a connection, which other code makes with it.
        helps = any(_has_made(site, own) or (is_within(path, at) and _has_gates_of(site, own)) for site, at in placed)
        if not (helps or any(is_within(at, path) for at in inside) or any(is_within(path, at) for at in left)):
            yield Declined(MODULE, _reason(one.kind), one.node)


def _reason(kind: str) -> str:
    return (
        f"its class is {kind}, but none of its code was recognised as a hyper-connection; docs/limits.md has forms "
        "that look like other code"
    )


@functools.lru_cache(4096)
def named_as(kind: Any) -> str:
    """A class that is named as a hyper-connection, or is made of one that is, in words; otherwise ""."""
    names = [one.__name__ for one in kind.__mro__] if isinstance(kind, type) else [str(kind).rpartition(".")[2]]
    base = next(filter(_is_named, names), "")
    return f"{names[0]}, a {base}" if base not in ("", names[0]) else base


def _is_named(name: str) -> bool:
    return bool(_NAMES.search(" ".join(_WORD.findall(_VERSION.sub("_v", name))).lower()))


def _may_mix_streams(op: Op) -> bool:
    """Whether a product, or a sum, is over as many rows as there may be streams, or makes so many, and not of gates."""
    largest = max([*op.sources, *op.outs], key=lambda value: value.numel, default=None)
    if largest is None or _is_of_gates(largest):
        return False
    if op.name in _PRODUCTS:
        sizes = {size for value in op.sources[-2:] for size in value.shape[-2:]}
        return any(size > 1 and is_stream_count(size) for size in sizes)
    summed = op.sources[0].numel // max(op.out.numel, 1)
    return summed > 1 and is_stream_count(summed) and _is_product(op.sources[0])


def _is_of_gates(value: Value) -> bool:
    """Whether a tensor is of [n, n] matrices, as in a Sinkhorn."""
    rows, columns = value.shape[-2:] if len(value.shape) > 1 else (0, 1)
    return rows == columns and is_stream_count(rows)


def _is_product(value: Value) -> bool:
    while value.op is not None and is_movement(value.op):
        value = value.op.sources[0]
    return value.op is not None and value.op.name == "mul" and len({*value.op.sources}) == 2


def _has_made(site: Site, values: set[Value]) -> bool:
    """Whether a site stands for code that makes some of these values."""
    return any(not values.isdisjoint(op.outs) for op in between(site))


def _has_gates_of(site: Site, values: set[Value]) -> bool:
    """Whether a site's gates are made of some values."""
    if not isinstance(site, WithGates):
        return False
    streams = next(site.sources())
    pending = list(site.gates())
    seen = set(pending)
    while pending and len(seen) < _MOST:
        value = pending.pop()
        if value in values:
            return True
        # Through the streams, gates are made of all connections before.
        sources = value.op.sources if value.op is not None else ()
        fresh = [source for source in sources if source not in seen and source.numel < streams.numel]
        seen.update(fresh)
        pending += fresh
    return False
