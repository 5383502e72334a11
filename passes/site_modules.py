"""Each site by itself: what the program computes there, and what the operator computes in its place, as two modules.

Both take the values that the site reads and return those that it makes. The operator's part is cut out of the graph
in which that site alone is rewritten, so it has the views and casts around the operator as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.plan import Decline, Plan, Site
from mhc_compile.passes.plan.surroundings import extent
from mhc_compile.passes.rewrite import replaced, rewritten
from mhc_compile.passes.shadow import Shadow

_MOST_ROUNDS = 8
_LONGEST_CHAIN = 8


@dataclass
class Alone:
    """One site. inputs and outputs are nodes of the program; both modules take and return these, in this order."""

    site: Site
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    program: fx.GraphModule
    operator: fx.GraphModule


def alone(shadow: Shadow, site: Site) -> Alone:
    """Cut one site out of its program. Raises Decline if it cannot be cut out."""
    copies = rewritten(shadow, Plan([site], []))
    origins = {new: old for old, new in copies.items() if new not in copies.replaced}
    outputs = [min(value.nodes, key=shadow.position.__getitem__) for value in replaced(site)]
    made = [copies.current(node) for node in outputs]
    inside = {*extent(site)[0], *outputs}
    fixed = {op.node for op in shadow.ops if op.node in copies and copies.has_effect(copies[op.node])}

    def is_end(new: fx.Node) -> bool:
        return new in origins and origins[new] not in inside

    for _ in range(_MOST_ROUNDS):
        read = _read(inside, fixed)
        slice_, ends = _slice(made, is_end)
        lacking = {origins[end] for end in ends} - read
        joined = _joined(read | lacking, fixed)
        if not joined:
            break
        inside.update(joined)
    else:
        raise Decline("what the operator reads is not what the program's own code reads")
    inputs = sorted(read | lacking, key=shadow.position.__getitem__)
    return Alone(
        site,
        inputs,
        outputs,
        _module(shadow.graph, {node: node for node in inputs}, inside, outputs),
        _module(copies.graph, {node: copies.get(node) for node in inputs}, slice_, made),
    )


def _read(inside: set[fx.Node], fixed: set[fx.Node]) -> set[fx.Node]:
    """What nodes read from outside, without nested graphs, which belong to the nodes that run them.

    What is computed from these nodes alone becomes one of them: a part of a tuple, a cast that changes nothing. But
    not what is fixed: it writes in place or draws random numbers. (A dropout of nothing does not.)
    """
    while True:
        read = {n for node in inside for n in node.all_input_nodes if n not in inside and not _body(n)}
        own = {n for n in read - fixed if n.all_input_nodes and inside.issuperset(n.all_input_nodes)}
        if not own:
            return read
        inside |= own


def _body(node: fx.Node) -> bool:
    owner = node.graph.owning_module
    return node.op == "get_attr" and isinstance(getattr(owner, str(node.target), None), fx.GraphModule)


def _slice(nodes: Iterable[fx.Node], is_end: Callable[[fx.Node], bool]) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes from which these are computed, back to `ends`; and these nodes."""
    found: set[fx.Node] = set()
    ends: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node in found or node in ends or _body(node):
            continue
        (ends if is_end(node) else found).add(node)
        if node in found:
            pending += node.all_input_nodes
    return found, ends


def _joined(values: set[fx.Node], fixed: set[fx.Node]) -> set[fx.Node]:
    """The nodes that make one of these values from another by a chain of views, casts and the like, with the result.

    As separate inputs, the two values would have separate gradients, such as streams and a cast of them.
    """
    found: set[fx.Node] = set()
    for value in values:
        chain, node = [value], value
        while len(chain) <= _LONGEST_CHAIN and node not in fixed:
            tensors = [n for n in node.all_input_nodes if isinstance(compat.example(n), torch.Tensor)]
            if len(tensors) != 1:
                break
            (node,) = tensors
            if node in values:
                found.update(chain)
                break
            chain.append(node)
    return found


def _module(
    graph: fx.Graph, inputs: dict[fx.Node, fx.Node | None], nodes: set[fx.Node], outputs: list[fx.Node]
) -> fx.GraphModule:
    """A module of some nodes of a graph, under the grad mode and autocast of the program.

    inputs are the program's, each with the node of the graph that stands for it, if there is one.
    """
    new = fx.Graph()
    copies: dict[fx.Node | None, fx.Node] = {}
    for node, here in inputs.items():
        copies[here] = new.placeholder(node.name)
        copies[here].meta = dict(node.meta)
    for node in graph.nodes:
        if (node in nodes and node not in copies) or compat.changes_global_state(node) or _body(node):
            copies[node] = new.node_copy(node, copies.__getitem__)
    new.output(tuple(copies[node] for node in outputs))
    return compat.module_of(new, graph.owning_module)
