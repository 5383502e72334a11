"""Gradients of streams on a CPU: sums that follow each other become one loop, which reads and writes streams once.

The gradient of streams is a sum of terms, and several operators have some of them each: a write mixes the gradients of
the streams that it made, a read and each projection add theirs. As loops of their own they would each write all streams
and read them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.ops._loops import StreamGradient, name_of, with_terms

_LOOP = torch.ops.mhc._loop.default
_MIXED = torch.ops.mhc._mixed.default


def join(graph: fx.Graph, take_apart: Callable[[fx.Node], Any]) -> None:
    """Join the sums of a lowered graph; take_apart replaces the mixtures that no loop takes."""
    for node in graph.find_nodes(op="call_function", target=_LOOP):
        while _is_sum(node) and _take_in(graph, node):
            pass
    for node in graph.find_nodes(op="call_function", target=_MIXED):
        take_apart(node)


def _is_sum(node: fx.Node) -> bool:
    return node.target is _LOOP and name_of(str(node.args[0])) == "unproject"


def _take_in(graph: fx.Graph, node: fx.Node) -> bool:
    """Put the terms of the sum that a loop is given as d_x among the loop's own, where nothing else reads this sum."""
    read: Any = node.args[1]
    own = StreamGradient(*read)
    if not isinstance(own.d_x, fx.Node):
        return False
    written: Any = node.kwargs["written"]
    if own.d_x.target is _MIXED:
        source = own.d_x
        d_new, h_res, d_x, _ = source.args
        joined = own._replace(d_new=d_new, h_res=h_res, d_x=d_x)
        fits = own.d_new is None and list(source.users) == [node]
    else:
        others = [user for user in own.d_x.users if user is not node]
        if len(others) != 1 or not _is_sum(others[0]) or others[0].kwargs["written"] != [own.d_x]:
            return False
        source = others[0]
        given: Any = source.args[1]
        joined, fits = _both(own, StreamGradient(*given))
    if not fits or not _is_still_there(source, node):
        return False
    values = StreamGradient(*[None if term is None else compat.example(term) for term in joined])
    text = with_terms(str(node.args[0]), values, compat.example(written[0]))
    node.args = (text, list(joined), *node.args[2:])
    ((_, _, sizes), kwargs) = node.meta["eager_input_vals"]
    node.meta["eager_input_vals"] = ((text, list(values), sizes), kwargs)
    graph.erase_node(source)
    if source is not own.d_x:
        graph.erase_node(own.d_x)
    return True


def _both(own: StreamGradient, given: StreamGradient) -> tuple[StreamGradient, bool]:
    """The terms of two sums, and whether one loop has room for them."""
    second = {"more_h": given.d_h, "more_phi": given.phi, "more_ms": given.d_ms}
    rest = {name: getattr(given, name) for name in ("x", "h_pre", "d_out", "h_res", "d_new")}
    clashes = [name for name in rest if rest[name] is not None and getattr(own, name) is not None]
    fits = own.more_h is None and given.more_h is None and (not clashes or (clashes == ["x"] and own.x is given.x))
    added = {name: term for name, term in rest.items() if term is not None}
    return own._replace(**second, **added, d_x=given.d_x), fits


def _is_still_there(source: fx.Node, node: fx.Node) -> bool:
    """Whether what a node reads is the same at a later one. Loops write what was made for them."""
    between = source.next
    while between is not node:
        if between.op == "call_function" and between.target is not _LOOP and compat.may_mutate(between):
            return False
        between = between.next
    return True
