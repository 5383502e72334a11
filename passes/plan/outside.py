"""Gates that leave one graph and enter another, in a program that a graph break or a framework has cut.

A read or a write whose gate comes in from outside could be that of experts or keys. It is that of streams if a gate of
this shape, made from streams of this shape, left a graph which was compiled before.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import fx

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


@dataclass(frozen=True)
class _Pair:
    """Streams and one of their gates: their shapes, and where the streams lie in a token, (n, step of n, C).

    Dims of size one are left out: the other graph may have more of them. own says which dims of x are a token's own.
    """

    x: _Shape
    gate: _Shape
    streams: tuple[int, int, int] | None
    own: tuple[bool, ...]


class _Left(set[_Pair]):
    """The streams and gates that left a graph, in the whole process, until `torch._dynamo.reset()`.

    Graphs of one program are compiled one by one, possibly in several threads.
    """

    def note(self, x: Value, gate: Value, streams: StreamsView) -> None:
        compat.on_dynamo_reset(self)  # with each note: Dynamo has forgotten it after a reset
        lies = None if streams.holds_tokens else (*streams.stream, streams.channels)
        self.add(_Pair(_shape(x.meta), _shape(gate.meta), lies, tuple(_without_tokens(x, streams))))

    def of(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> list[_Pair]:
        """The pairs that left a graph whose streams have the shape of x, and whose gate has that of `gate`."""
        here = [_shape(x)] if gate is None else [_shape(x), _shape(gate)]
        # Another thread may add to the set.
        return [pair for pair in tuple(self) if _agree([pair.x, pair.gate][: len(here)], here)]

    def reset(self) -> None:
        """What Dynamo calls."""
        self.clear()


_left = _Left()


def settle_sizes(graph: fx.Graph) -> None:
    """Make constants of symbolic numbers of streams and channels, where gates of such streams left another graph.

    With `dynamic=True` all sizes of a graph's inputs are symbols. The graph before has fixed these two, as a phi does.
    """
    given = [compat.example(node) for node in graph.find_nodes(op="placeholder")] if _left else []
    symbolic = [t for t in given if isinstance(t, torch.Tensor) and not all(isinstance(s, int) for s in t.shape)]
    for x, gate in permutations(symbolic, 2):
        for pair in _left.of(x, gate):
            for size, is_own in zip(_sizes(x), pair.own, strict=True):
                if is_own:
                    compat.settle_size(size)


def remember(sites: Iterable[Site]) -> None:
    """Note the gates of sites that leave their graph."""
    for site in sites:
        if isinstance(site, MixSite):
            for gate in filter(lambda value: value.is_output, site.made()):
                _left.note(site.x, gate, site.streams)


def came_in(read: Aggregate) -> bool:
    """Whether the gate and the streams of a read are inputs of the graph, such as were made in another one."""
    gate, x = origin(read.gate)[0], origin(read.x, any_view)[0]
    return gate.op is None and x.op is None and bool(_left.of(x.meta, gate.meta))


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
    )


def _only_leaves(value: Value) -> bool:
    """Whether a value is a result of the graph, and nothing else is made of it or its views."""
    return all(is_movement(op) and all(map(_only_leaves, op.outs)) for op in value.users)


def remember_torn(read: Aggregate, gate: Value) -> None:
    """Note a gate that leaves the graph with a read."""
    _left.note(read.x, gate, read.streams)


def writes(shadow: Shadow, findings: Findings) -> Iterator[Combine]:
    """The writes to streams as they are, h_post f + x, whose streams and gate come in from outside."""
    for op in shadow.ops if _left else ():
        if op.name in _SUMS and op.outs:
            for found in residuals(findings.reader, op.out, _streams):
                if isinstance(found, Combine) and found.outer.post is not None:
                    gate, x = origin(found.outer.post)[0], origin(found.x, any_view)[0]
                    if gate.op is None and x.op is None and _left.of(x.meta, gate.meta):
                        yield found


_SUMS = {"add", "sub", "addcmul"}


def _streams(x: Value) -> StreamsView | None:
    """Where the streams lie in an input, [..., n, C] or flat, if gates of streams of its shape left a graph."""
    for pair in _left.of(x.meta) if x.op is None else ():
        if pair.streams is not None:
            n, step, channels = pair.streams
            if step == channels and x.numel % (n * channels) == 0:
                tokens = tidy([(x.numel // (n * channels), n * channels)])
                return StreamsView(tokens, (n, channels), ((channels, 1),))
    return None


def _without_tokens(x: Value, streams: StreamsView) -> Iterator[bool]:
    """Which dims of x have no step from token to token."""
    step = x.numel
    for actual, size in zip(x.meta.shape, x.shape, strict=True):
        larger, step = step, step // size
        known = compat.as_number(actual)
        if isinstance(known, torch.SymInt) or known != 1:
            yield not any(stride < larger and step < count * stride for count, stride in streams.tokens)


def _sizes(tensor: torch.Tensor) -> list[int | torch.SymInt]:
    """The sizes of a tensor, without those that are one."""
    known = map(compat.as_number, tensor.shape)
    return [size for size in known if isinstance(size, torch.SymInt) or size != 1]


def _shape(tensor: torch.Tensor) -> _Shape:
    return tuple(int(compat.hint(size)) if compat.has_hint(size) else str(size) for size in _sizes(tensor))


def _agree(left: list[_Shape], here: list[_Shape]) -> bool:
    """Whether shapes that left a graph are those here, with a number for each size that depended on data there."""
    if list(map(len, left)) != list(map(len, here)):
        return False
    numbers: dict[str, int | str] = {}
    pairs = ((a, b) for one, other in zip(left, here, strict=True) for a, b in zip(one, other, strict=True))
    return all((numbers.setdefault(a, b) if isinstance(a, str) else a) == b for a, b in pairs)
