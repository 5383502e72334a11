"""Steps of a hyper-connection whose gates cross the edge of a graph: one side makes them, and the other reads them.

The other side is another graph, or code that Dynamo does not compile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.called import INSERTED
from mhc_compile.passes.fuse.joint import calls
from mhc_compile.passes.report import CUT, Location, SiteReport, location, module_path

MADE_ELSEWHERE = "its gates are made outside this graph"
USED_ELSEWHERE = "its gates are used outside this graph"
WRITTEN_ELSEWHERE = "the gates of its write are used outside this graph"

# How to keep a graph that Dynamo gives up on because of an operator, by a part of the operator's name: in sentences.
_ADVICE = {
    "grouped_mm_fallback": "On a CPU, the backward of transformers' grouped experts calls tolist(), which cannot be "
    'traced; model.set_experts_implementation("batched_mm") keeps the graph whole',
}

# The gates among the results of an operator; and among its arguments, with how many dimensions each token's have.
_MADE = {"generate_mix": (0, 1, 2), "generate_mix_and_aggregate": (1, 2)}
_READ = {"expand_combine": {2: 1, 4: 2}, "aggregate": {1: 1}, "aggregate_and_norm": {1: 1}, "mix_streams": {1: 2}}
# Calls that change nothing but the form of a tensor, or its sign.
_FORMS = {"getitem", "view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "contiguous", "flatten"}
_FORMS |= {"_unsafe_view", "clone", "unflatten", "to", "float", "type", "expand", "mT", "view_as", "type_as", "neg"}


def cut(graph: fx.Graph, places: Mapping[int, Location]) -> list[SiteReport]:
    """The operators of a rewritten graph with a gate that comes from outside of it, or that is read there alone.

    places: where sites are, by what their nodes have in `INSERTED`.
    """
    if compat.is_called(graph):  # the calling graph makes its gates, or reads them
        return []
    found = [
        (node, MADE_ELSEWHERE) for node in calls(graph, *_READ) if any(_is_given(*gate) for gate in _gates_read(node))
    ]
    found += [(node, USED_ELSEWHERE) for node in calls(graph, *_MADE) if any(map(_only_leaves, _gates_made(node)))]
    return [
        SiteReport(
            str(node.target._opname),  # type: ignore[union-attr]
            places.get(node.meta.get(INSERTED, 0)) or location(node),
            CUT,
            why,
            module=module_path(node),
        )
        for node, why in found
    ]


def advice(graph: fx.Graph) -> list[str]:
    """What to do if Dynamo gives up on the graph."""
    names = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    return [words for part, words in _ADVICE.items() if any(part in name for name in names)]


# The most streams that operators take.
_MOST_STREAMS = 31
_COUNTS = range(2, _MOST_STREAMS + 1)
# How many rows a phi may have: for one kind of gates, for n + 1 as in arXiv 2409.19606, for reads and writes (and a
# number, or n, to mix by), for a matrix and writes, for all.
_ROWS = {rows for n in _COUNTS for rows in (n, n + 1, 2 * n, 2 * n + 1, 3 * n, n * n + n, n * n + 2 * n)}
# Those of matrices alone are often the widths of other layers, such as 64: they count beside n streams.
_MATRICES = {rows: n for n in _COUNTS for rows in (n * n, 3 * n * n)}


def can_hold(tensors: Iterable[compat.Reached] | None) -> bool:
    """Whether lines that can read these tensors, and no others, may be those of a hyper-connection.

    Its gates are made of a phi or of static gates, or they are given together with the streams. Lines without either
    have nothing to weigh streams with. In doubt it is True: a small learned tensor of another kind looks like a phi.
    None are tensors that are not known.
    """
    if tensors is None:
        return True
    given = set(tensors)
    shapes = {one.shape for one in given}
    return (
        any(one.learned and (_makes_gates(one.shape) or _makes_matrices(one.shape, shapes)) for one in given)
        or any(_projects(shape, shapes) for shape in shapes)
        or any(_has_gates(shape, shapes) for shape in shapes)
    )


def _makes_gates(shape: tuple[int, ...]) -> bool:
    """phi has a row for each gate, or a column; static gates are [n], or a matrix of few rows."""
    return shape[0] in _COUNTS if len(shape) == 1 else len(shape) == 2 and not _ROWS.isdisjoint(shape)


def _makes_matrices(phi: tuple[int, ...], shapes: set[tuple[int, ...]]) -> bool:
    """Whether a phi has the rows, or columns, of matrices alone, and one of the other tensors is its n streams."""
    sides = [(_MATRICES.get(rows), width) for rows, width in (phi, phi[::-1])] if len(phi) == 2 else []
    beside = [shape[-2:] for shape in shapes if len(shape) >= 3]
    return any(shape[0] == n and math.prod(shape) == width for n, width in sides for shape in beside)


def _projects(phi: tuple[int, ...], shapes: set[tuple[int, ...]]) -> bool:
    """Whether a matrix, learned or not, has few rows and may multiply one of the other tensors, flat or not."""
    beside = [shape for shape in shapes if len(shape) >= 3]
    widths = {shape[-1] for shape in beside} | {shape[-2] * shape[-1] for shape in beside}
    return len(phi) == 2 and any(rows in _ROWS and width in widths for rows, width in (phi, phi[::-1]))


def _has_gates(streams: tuple[int, ...], shapes: set[tuple[int, ...]]) -> bool:
    """Whether [..., n, C] comes with gates [..., n] or [..., n, n]."""
    if len(streams) < 3 or streams[-2] not in _COUNTS:
        return False
    gates = streams[:-1]
    return gates in shapes or (*gates, gates[-1]) in shapes - {streams}


def _gates_read(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    arguments = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    for number, dims in _READ[node.target._opname].items():  # type: ignore[union-attr]
        gate = node.args[number] if number < len(node.args) else node.kwargs.get(arguments[number])
        if isinstance(gate, fx.Node):
            yield gate, dims


def _gates_made(node: fx.Node) -> Iterator[fx.Node]:
    numbers = _MADE[node.target._opname]  # type: ignore[union-attr]
    return (user for user in node.users if _name(user) == "getitem" and user.args[1] in numbers)


def _is_given(gate: fx.Node, dims: int) -> bool:
    """Whether a gate of each token is an input of the graph. Static gates are those of any graph.

    dims: how many dimensions of the gate are not those of tokens.
    """
    *tokens, each = _shapes(gate, dims)
    while not _is_static(gate, tokens, each):
        # A matrix as a gate is summed over its rows or columns for the operator.
        summed = _name(gate) == "sum" and INSERTED in gate.meta
        if not (summed or _name(gate) in _FORMS) or not gate.all_input_nodes:
            break
        gate = gate.all_input_nodes[0]
        if summed:
            *tokens, each = _shapes(gate, dims + 1)
    else:
        return False
    return gate.op == "placeholder" and not isinstance(compat.example(gate), torch.nn.Parameter)


def _shapes(gate: fx.Node, dims: int) -> tuple[Any, ...]:
    """The sizes of a gate's tokens, and then the shape of each token's part."""
    shape = tuple(getattr(compat.example(gate), "shape", ()))
    return *shape[:-dims], shape[-dims:]


def _is_static(gate: fx.Node, tokens: Sequence[Any], each: tuple[Any, ...]) -> bool:
    """Whether a gate is the same for all tokens. With one token it is only if it has no dimension for tokens."""
    shape = getattr(compat.example(gate), "shape", None)
    if shape is None or not all(isinstance(size, int) for size in (*shape, *each)):
        return False
    several = any(not isinstance(size, int) or size > 1 for size in tokens)
    return tuple(shape) == each or (several and math.prod(shape) <= math.prod(each))


def _only_leaves(gate: fx.Node) -> bool:
    """Whether a gate is a result of the graph, and nothing else is made of it.

    The views that an operator's result has taken the place of may still be there, and nothing reads them.
    """
    users = [user for user in gate.users if user.users or user.op == "output"]
    return bool(users) and all(user.op == "output" or (_name(user) in _FORMS and _only_leaves(user)) for user in users)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", "")).split(".")[0]
