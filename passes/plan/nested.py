"""Graphs that a graph calls, such as checkpoint regions: what their reports say of what enters and leaves them.

Each of them is recognised and rewritten by itself, and has a report of its own. So the report of the calling graph is
silent about a step that the report of a called graph has, because a gate enters that graph, or logits leave it. A
called graph has a note of the inputs and outputs for which this is so. The note may come later than the plan of the
calling graph, which comes first when a model is explained, and last under Inductor. So notes are read when all these
graphs are done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.aten_calls import leaves
from mhc_compile.passes.shadow import Op, Shadow, Value, spelled

# An input or an output of a graph, by its number; and one of a called graph, with its name in the calling one's module.
End = tuple[Literal["input", "output"], int]
CalledEnd = tuple[str, End]
# For each end of a graph that its report has all of: the ends of further graphs for which the same has to hold.
Told = dict[End, list[CalledEnd]]

# What has the note, in the output node: the branches of a condition share what is noted on their inputs.
_TOLD = "mhc_told"


def inputs(op: Op, value: Value, shadow: Shadow) -> list[CalledEnd]:
    """The inputs of called graphs that an operator makes of a value; empty if it calls none, or none is known."""
    names = _names(op)
    given = [leaf for leaf in leaves(op.node.args) if not (isinstance(leaf, fx.Node) and leaf.target in names)]
    found: list[CalledEnd] = []
    for name in names:
        taken = _graph(op.node.graph, name).find_nodes(op="placeholder")
        # An operator's own arguments, such as the condition of a branch, come before those of its graphs.
        last = given[len(given) - len(taken) :] if len(taken) <= len(given) else []
        same = [i for i, leaf in enumerate(last) if isinstance(leaf, fx.Node) and shadow.values.get(leaf) is value]
        if not same or not all(_may_be(last[i], taken[i]) for i in same):
            return []
        found += ((name, ("input", i)) for i in same)
    return found


def outputs(op: Op, value: Value) -> list[CalledEnd]:
    """The outputs of called graphs of which an operator makes a value; empty if it calls none, or none is known."""
    at, found = op.outs.index(value), list[CalledEnd]()
    for name in _names(op):
        made = list(_returned(_graph(op.node.graph, name)))
        if at >= len(made) or not _fits(value.meta, compat.example(made[at])):
            return []
        found.append((name, ("output", at)))
    return found


def ends(shadow: Shadow) -> Iterator[tuple[End, Value]]:
    """The inputs and outputs of a graph, with what they hold."""
    for i, node in enumerate(shadow.graph.find_nodes(op="placeholder")):
        if isinstance(given := shadow.values.get(node), Value):
            yield ("input", i), given
    for i, node in enumerate(_returned(shadow.graph)):
        if isinstance(made := shadow.values.get(node), Value):
            yield ("output", i), made


def reason(op: Op, called: list[CalledEnd], what: str) -> str:
    """Why a step is not found in a node that calls graphs, or that is not looked into; what says what the step does."""
    name = spelled(op.node)
    if called:
        return (
            f"nothing that {what} was recognised in a graph that {name} calls: such a graph is looked at without the "
            "code around it"
        )
    return f"{name} is not looked into"


def note(graph: fx.Graph, told: Mapping[End, list[CalledEnd]]) -> None:
    """Note of which inputs and outputs a graph's report has all that is done with them."""
    graph.output_node().meta[_TOLD] = dict(told)


def is_told(graph: fx.Graph, called: list[CalledEnd]) -> bool:
    """Whether the reports of the graphs that a graph calls have what belongs to these inputs and outputs of theirs."""
    for name, end in called:
        body = _graph(graph, name)
        noted = body.output_node().meta.get(_TOLD, {})
        if end not in noted or not is_told(body, noted[end]):
            return False
    return True


def _names(op: Op) -> list[str]:
    names = compat.names_of_bodies(op.node)
    return names if compat.autograd_function(op.node) is None else names[:1]  # the other is its backward


def _graph(graph: fx.Graph, name: str) -> fx.Graph:
    found: fx.Graph = getattr(graph.owning_module, name).graph
    return found


def _returned(graph: fx.Graph) -> Iterator[fx.Node]:
    """The tensors that a graph returns."""
    for leaf in leaves(graph.output_node().args):
        if isinstance(leaf, fx.Node) and isinstance(compat.example(leaf), torch.Tensor):
            yield leaf


def _may_be(given: fx.Node, taken: fx.Node) -> bool:
    """Whether a called graph may have this input for what the operator is given: all of it, or an element at a time."""
    outside, inside = compat.example(given), compat.example(taken)
    return _fits(outside, inside) or _fits(outside, inside, without=1)


def _fits(outside: Any, inside: Any, without: int = 0) -> bool:
    """Whether two tensors have one shape, if the first dimensions of one do not count."""
    if not (isinstance(outside, torch.Tensor) and isinstance(inside, torch.Tensor)):
        return False
    shape = outside.shape[without:]
    return outside.dim() - without == inside.dim() and all(map(compat.may_be_equal, shape, inside.shape))
