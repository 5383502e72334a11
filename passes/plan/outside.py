"""Gates that leave one graph and enter another, in a program that a graph break or a framework has cut.

A read or a write whose gate comes in from outside could be that of experts or keys. It is that of streams if a gate of
this shape, made from streams of this shape, left a graph which was compiled before.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from math import prod

from mhc_compile import compat
from mhc_compile.passes.plan.sites import MixSite, Site
from mhc_compile.passes.recognise import Findings
from mhc_compile.passes.recognise.aggregate import Aggregate
from mhc_compile.passes.recognise.combine import Combine, residuals
from mhc_compile.passes.recognise.contraction import StreamsView
from mhc_compile.passes.recognise.layout import any_view, is_movement, origin, tidy
from mhc_compile.passes.shadow import Shadow, Value

# A size that depends on data is a number in another graph: here it stands as its expression, which equals any number.
_Shape = tuple[int | str, ...]


class _Left(set[tuple[_Shape, _Shape]]):
    """The shapes of streams and of gates that left a graph, in the whole process, until `torch._dynamo.reset()`.

    Graphs of one program are compiled one by one, possibly in several threads.
    """

    def note(self, x: Value, gate: Value) -> None:
        compat.on_dynamo_reset(self)  # with each note: Dynamo has forgotten it after a reset
        self.add((_shape(x), _shape(gate)))

    def has(self, x: Value, gate: Value) -> bool:
        """Whether a gate of this shape left a graph beside streams of this shape."""
        return any(_agree([left_x, left_gate], [_shape(x), _shape(gate)]) for left_x, left_gate in tuple(self))

    def has_streams(self, x: Value) -> bool:
        """Whether gates of streams of this shape left a graph."""
        return any(_agree([left_x], [_shape(x)]) for left_x, _ in tuple(self))  # another thread may add to the set

    def reset(self) -> None:
        """What Dynamo calls."""
        self.clear()


_left = _Left()


def remember(sites: Iterable[Site]) -> None:
    """Note the gates of sites that leave their graph."""
    for site in sites:
        if isinstance(site, MixSite):
            for gate in filter(lambda value: value.is_output, site.made()):
                _left.note(site.x, gate)


def came_in(read: Aggregate) -> bool:
    """Whether the gate and the streams of a read are inputs of the graph, such as were made in another one."""
    gate, x = origin(read.gate)[0], origin(read.x, any_view)[0]
    return gate.op is None and x.op is None and _left.has(x, gate)


def reads_of_torn(shadow: Shadow, findings: Findings, whole: Container[Value]) -> dict[Value, Value]:
    """The reads whose streams also make a gate that leaves the graph unread, as that of a write does; and the gate.

    whole: the reads whose write is in this graph. A gate that leaves the graph as well is kept for something else.
    Both gates come from a projection of the streams, from rows of their own. Other models that weigh what they project
    return at most the weights, or what these are made of.
    """
    outputs = [out for op in shadow.ops for out in op.outs if out.is_output and _only_leaves(out)]
    reads = [a for a in findings.aggregates if a.out not in whole]
    return {a.out: gate for a in reads for gate in outputs if _is_of_same_streams(gate, a, findings)}


def _is_of_same_streams(gate: Value, read: Aggregate, findings: Findings) -> bool:
    if gate.numel != read.gate.numel or read.streams.n not in gate.shape[-2:]:
        return False
    own, other = (findings.connections.between(read.x, value) for value in (read.gate, gate))
    projected, beside = ([v for v in way if v in findings.readings] for way in (own, other))
    return (
        read.x in own
        and read.x in other
        and gate not in own
        and read.gate not in other
        and read.out not in other
        and bool(projected and beside)
        and all(v.numel >= 2 * gate.numel for v in projected if v in other)
        and not (read.rows and any(_is_of_one_vector(v, read, findings) for v in (*projected, *beside)))
    )


def _is_of_one_vector(value: Value, read: Aggregate, findings: Findings) -> bool:
    """Whether a projection is of less than all streams of a token, as the queries and keys of attention are."""
    return all(reading.width < read.streams.n * read.streams.channels for reading in findings.readings[value])


def _only_leaves(value: Value) -> bool:
    """Whether a value is a result of the graph, and nothing else is made of it or its views."""
    return all(is_movement(op) and all(map(_only_leaves, op.outs)) for op in value.users)


def remember_torn(read: Aggregate, gate: Value) -> None:
    """Note a gate that leaves the graph with a read."""
    _left.note(read.x, gate)


def writes(shadow: Shadow, findings: Findings) -> Iterator[Combine]:
    """The writes whose streams and gate come in from outside: to streams as they are, or by a matrix, P [f, ..., f]."""
    if _left:
        yield from (write for write in findings.combines if write.outer.columns and _came_in(write))
    for op in shadow.ops if _left else ():
        if op.name in _SUMS and op.outs:
            for found in residuals(findings.reader, op.out, _streams):
                if isinstance(found, Combine) and _came_in(found):
                    yield found


def _came_in(write: Combine) -> bool:
    if write.outer.post is None:
        return False
    gate, x = origin(write.outer.post)[0], origin(write.x, any_view)[0]
    return gate.op is None and x.op is None and _left.has(x, gate)


_SUMS = {"add", "sub", "addcmul"}


def _streams(x: Value) -> StreamsView | None:
    """Where the streams lie in an input, [..., n, C], if gates of streams of its shape left a graph."""
    if x.op is not None or len(x.shape) < 2 or not _left.has_streams(x):
        return None
    n, channels = x.shape[-2:]
    tokens = [(size, prod(x.shape[i + 1 :])) for i, size in enumerate(x.shape[:-2])]
    return StreamsView(tidy(tokens), (n, channels), ((channels, 1),))


def _shape(value: Value) -> _Shape:
    sizes = value.meta.shape
    return tuple(int(compat.hint(size)) if compat.has_hint(size) else str(size) for size in sizes)


def _agree(left: list[_Shape], here: list[_Shape]) -> bool:
    """Whether shapes that left a graph are those here, with a number for each size that depended on data there."""
    numbers: dict[str, int | str] = {}
    pairs = ((a, b) for one, other in zip(left, here, strict=True) for a, b in zip(one, other, strict=True))
    same_ranks = list(map(len, left)) == list(map(len, here))
    return same_ranks and all((numbers.setdefault(a, b) if isinstance(a, str) else a) == b for a, b in pairs)
