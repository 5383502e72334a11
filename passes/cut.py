"""Steps of a hyper-connection whose gates cross the edge of a graph: what makes them and what reads them are apart."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.fuse.joint import calls
from mhc_compile.passes.report import SiteReport, location

CUT = "cut"
MADE_ELSEWHERE = "its gates are made in another graph"
READ_ELSEWHERE = "its gates are read in another graph"

# What keeps a graph whole that is given up because of an operator, by a part of its name.
_ADVICE = {
    "grouped_mm_fallback": "on a CPU the gradient of transformers' grouped experts reads sizes on the host; "
    'model.set_experts_implementation("batched_mm") keeps the graph whole',
}

# The gates among the results of an operator, and among its arguments.
_MADE = {"generate_mix": (0, 1, 2), "generate_mix_and_aggregate": (1, 2)}
_READ = {"expand_combine": (2, 4), "aggregate": (1,), "mix_streams": (1,)}
# Calls that change nothing but the form of a tensor.
_FORMS = {"getitem", "view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "contiguous", "flatten"}
_FORMS |= {"unflatten", "to", "float", "type", "expand", "mT", "view_as", "type_as"}


def cut(graph: fx.Graph) -> list[SiteReport]:
    """The operators of a rewritten graph of which a gate comes from another graph, or is read in another one only."""
    if compat.is_called(graph):  # the calling graph makes its gates, or reads them
        return []
    found = [(node, MADE_ELSEWHERE) for node in calls(graph, *_READ) if any(map(_is_given, _gates_read(node)))]
    found += [(node, READ_ELSEWHERE) for node in calls(graph, *_MADE) if any(map(_only_leaves, _gates_made(node)))]
    return [SiteReport(str(node.target._opname), location(node), CUT, why) for node, why in found]  # type: ignore[union-attr]


def advice(graph: fx.Graph) -> list[str]:
    """What to do if the graph is given up."""
    names = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    return [words for part, words in _ADVICE.items() if any(part in name for name in names)]


def _gates_read(node: fx.Node) -> Iterator[fx.Node]:
    arguments = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    for number in _READ[node.target._opname]:  # type: ignore[union-attr]
        gate = node.args[number] if number < len(node.args) else node.kwargs.get(arguments[number])
        if isinstance(gate, fx.Node):
            yield gate


def _gates_made(node: fx.Node) -> Iterator[fx.Node]:
    numbers = _MADE[node.target._opname]  # type: ignore[union-attr]
    return (user for user in node.users if _name(user) == "getitem" and user.args[1] in numbers)


def _is_given(gate: fx.Node) -> bool:
    """Whether a gate is an input of the graph, and no parameter: those of static hyper-connections are no one's."""
    while _name(gate) in _FORMS and gate.all_input_nodes:
        gate = gate.all_input_nodes[0]
    return gate.op == "placeholder" and not isinstance(compat.example(gate), torch.nn.Parameter)


def _only_leaves(gate: fx.Node) -> bool:
    """Whether a gate is a result of the graph, and nothing else is made of it."""
    users = list(gate.users)
    return bool(users) and all(user.op == "output" or (_name(user) in _FORMS and _only_leaves(user)) for user in users)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", "")).split(".")[0]
