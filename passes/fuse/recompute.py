"""Recompute: for a block of sublayers, only the streams that enter it are kept for the backward pass.

    x_1 = combine(f_0, x_0), x_2 = combine(f_1, x_1), ...      forward, as it was; x_0 and all f are kept
    x_1' = combine(f_0, x_0), x_2' = combine(f_1, x_1'), ...   once more, for backward alone

A layer, here as in the paper, is what lies between the `expand_combine`s of one chain of streams: one sublayer with its
hyper-connection. Streams are n C numbers for each token, and f is only C. So k layers keep n + k rows of C numbers
instead of k (n + 1). While a block is run backward, its k - 1 inner streams exist again. Only the combine is computed
twice: no sublayer, projection or Sinkhorn. The tags of activation checkpointing say so to the partitioner.

Source: arXiv 2512.24880, section 4.3.2.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from mhc_compile.passes.fuse.joint import (
    arguments,
    call,
    calls,
    is_backward,
    is_operator,
    is_view,
    items,
    viewed,
)

Layers = int | str | None

_FUSED = ("boundary", "shifted_boundary", "expand_combine_and_read")
_COMBINES = ("expand_combine", *_FUSED)
_ARGUMENTS = ("f", "layer_bias", "h_post", "x", "h_res")


def check_layers(given: Any, name: str) -> None:
    """Raise ValueError for what is not "auto", a number of layers or None."""
    number = isinstance(given, int) and not isinstance(given, bool) and given >= 1
    if not (given is None or given == "auto" or number):
        raise ValueError(f'{name} is {given!r}; expected "auto", a number of layers >= 1, or None')


def recompute(graph: fx.Graph, layers: Layers) -> int:
    """Keep the streams of every `layers`-th layer only; returns how many streams are computed again.

    "auto" takes the square root of n L / (n + 2), to the nearest integer, for a chain of L layers.
    """
    if layers is None or not any(is_backward(node) for node in graph.nodes):
        return 0
    # Later than any checkpoint of the user's: what those hand over, such as f, is then kept and not computed again.
    block = 1 + max(int(node.meta.get("ac_graph_id") or 0) for node in graph.nodes)
    made: list[fx.Node] = []
    for chain in _chains(graph):
        length = _best(chain) if layers == "auto" else int(layers)
        again: dict[fx.Node, fx.Node] = {}
        since = 0
        for combine in chain:
            since += 1
            if since >= length or not _may_go(combine):
                since, block, again = 0, block + 1, {}
            else:
                made.append(_again(graph, combine, again, block))
    return sum(_is_read(node) for node in reversed(made))


def _best(chain: list[fx.Node]) -> int:
    n = int(arguments(chain[0])["x"].meta["val"].shape[-2])
    return max(1, round(math.sqrt(n * len(chain) / (n + 2))))


def _chains(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Chains of combines: each combine reads the streams of the previous one."""
    combines = list(calls(graph, *_COMBINES))
    following: dict[fx.Node, fx.Node] = {}
    for combine in combines:
        before = made_by(viewed(arguments(combine)["x"])[0])
        if before is not None:
            following.setdefault(before, combine)
    later = set(following.values())
    for first in combines:
        if first not in later:
            chain = [first]
            while chain[-1] in following:
                chain.append(following[chain[-1]])
            yield chain


def made_by(streams: fx.Node) -> fx.Node | None:
    """The combine whose new streams these are."""
    if is_operator(streams, "expand_combine"):
        return streams
    source = streams.args[0] if streams.target is operator.getitem and streams.args[1] == 0 else None
    return source if isinstance(source, fx.Node) and is_operator(source, *_FUSED) else None


def _streams(combine: fx.Node) -> list[fx.Node]:
    """The nodes that are a combine's new streams."""
    if is_operator(combine, "expand_combine"):
        return [combine]
    return [node for number, node in items(combine) if number == 0]


def _may_go(combine: fx.Node) -> bool:
    """Whether nothing but operators reads the new streams, and no checkpoint of the user's holds them."""
    pending = _streams(combine)
    while pending:
        for user in pending.pop().users:
            if is_view(user):
                pending.append(user)
            elif not is_operator(user):
                return False
    return "recompute" not in combine.meta


def _again(graph: fx.Graph, combine: fx.Node, again: dict[fx.Node, fx.Node], block: int) -> fx.Node:
    """Compute a combine's streams once more and let backward read them; `again` maps old streams to these."""
    given = arguments(combine)
    source, views = viewed(given["x"])
    # Partitioners make one of two equal calls: one that would equal its original is marked itself.
    if source not in again and is_operator(combine, "expand_combine"):
        new = combine
    else:
        kind = "streams_dtype" if is_operator(combine, *_FUSED) else "out_dtype"
        with graph.inserting_after(max(_streams(combine))):
            x = again.get(source, source)
            for view in views:
                x = call(graph, view.target, (x, *view.args[1:]), dict(view.kwargs), view)
            args = tuple(x if name == "x" else given[name] for name in _ARGUMENTS)
            out_dtype = {} if given[kind] is None else {"out_dtype": given[kind]}
            new = call(graph, torch.ops.mhc.expand_combine.default, args, out_dtype, _streams(combine)[0])
        for streams in _streams(combine):
            again[streams] = new
            _redirect(graph, streams, new)
    new.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    new.meta["ac_graph_id"] = block
    return new


def _redirect(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    """Let the backward operators that read a node, or a view of it, read another one."""
    for user in list(old.users):
        if is_backward(user):
            user.replace_input_with(old, new)
        elif is_view(user) and user.args[0] is old:
            with graph.inserting_after(new):
                view = call(graph, user.target, (new, *user.args[1:]), dict(user.kwargs), user)
            _redirect(graph, user, view)
            if not view.users:
                graph.erase_node(view)


def _is_read(node: fx.Node) -> bool:
    """Whether backward needs a combine again; one that it does not need is erased."""
    if not node.users:
        views = [each for each in node.all_input_nodes if is_view(each)]
        node.graph.erase_node(node)
        for view in views:
            while is_view(view) and not view.users:
                source = view.all_input_nodes[0]
                view.graph.erase_node(view)
                view = source
        return False
    return True
