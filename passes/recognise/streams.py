"""What streams are: structure alone does not distinguish them from experts, heads or the nodes of a graph.

A tensor counts as streams if it is connected:
- it is x, or x', of a write whose f depends on a read of the same x, and is not that read itself;
- or a projection of it makes a known gate that acts on it;
- or a sublayer reads several rows of it side by side, and what is written comes from these (`mixing`).
In a graph that was cut, f may come in from outside: then a write counts by itself if it has a matrix and a post gate
for each token, in two tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable

from mhc_compile.passes.recognise.aggregate import Aggregate, Reading
from mhc_compile.passes.recognise.combine import Combine
from mhc_compile.passes.recognise.layout import any_view, origin
from mhc_compile.passes.shadow import Op, Value


class Connections:
    """Which writes and reads of a record belong to streams."""

    def __init__(self, ops: Iterable[Op], reads: Collection[Aggregate | Reading]) -> None:
        self._position = {op: i for i, op in enumerate(ops)}
        self._reads: dict[Value, list[Aggregate | Reading]] = {}
        for read in reads:
            self._reads.setdefault(read.out, []).append(read)
        self._behind: dict[tuple[Value, Value], dict[Value, None]] = {}

    def reads_before(self, write: Combine) -> list[Aggregate | Reading]:
        """The reads of the streams of a write, or of what is made of them, that its f depends on."""
        return [
            read
            for value in self.between(write.x, write.outer.f)
            for read in self._reads.get(value, ())
            if read.streams.n == write.streams.n and self._depends(read.x, write.x)
        ]

    def is_write(self, write: Combine, known: Container[Value] = ()) -> bool:
        """Whether f depends on a read of the streams, or comes in from outside for a write that has all its gates.

        What is added to all streams alike also follows from pooling. It is a write if f depends on a weighted sum, and
        the streams are mixed or the weights are `known`.
        """
        x, f = write.x, write.outer.f
        if write.outer.post is None:
            reads = [read for read in self.reads_before(write) if isinstance(read, Aggregate)]
            return any(write.mix is not None or read.gate in known for read in reads)
        behind = self.between(x, f)
        if x not in behind:
            mix = write.mix
            if write.in_one_product:  # attention over keys, and one key more, is such a product, too
                return False
            return mix is not None and _is_each(mix.res_layout.dims[0]) and _is_each(write.outer.post_layout.dims[0])
        made = origin(f)[0]
        return any(read.out is not made for read in self.reads_before(write)) or any(
            value.numel * write.streams.n == x.numel and value is not made and origin(value, any_view)[0] is x
            for value in behind
        )

    def of_channels(self, writes: Iterable[Combine]) -> list[Reading]:
        """The reads with a gate for each channel that the f of writes depend on, and that are nothing else."""
        found = {read.out: read for write in writes for read in self.reads_before(write)}
        return [read for read in found.values() if isinstance(read, Reading) and read.by_channel]

    def _depends(self, value: Value, x: Value) -> bool:
        return value is x or (value.numel == x.numel and x in self.between(x, value))

    def between(self, x: Value, value: Value) -> dict[Value, None]:
        """What a value is computed from, as far back as `x` was computed: x itself, if it depends on it."""
        key = (x, value)
        found = self._behind.get(key)
        if found is None:
            first = self._position.get(x.op, -1) if x.op is not None else -1
            found, pending = {value: None}, [value]
            while pending:
                op = pending.pop().op
                if op is None or self._position.get(op, -1) <= first:
                    continue
                fresh = [source for source in op.sources if source not in found]
                found |= dict.fromkeys(fresh)
                pending += [source for source in fresh if source is not x]
            self._behind[key] = found
        return found


def _is_each(dim: tuple[tuple[int, int], ...]) -> bool:
    """Whether a gate has a number of its own for each token."""
    return all(stride for _, stride in dim)


# How many values that a gate is computed from are looked at, and how much larger than the gate they may be: factors of
# a Kronecker product are smaller.
_MOST = 2_000
_LARGER = 64


def behind(gates: Iterable[Value], known: Container[Value]) -> list[Value]:
    """The nearest known values that gates are computed from."""
    found: dict[Value, None] = {}
    for gate in dict.fromkeys(gates):
        seen, pending = {gate}, [gate]
        while pending and len(seen) < _MOST:
            value = pending.pop()
            if value in known:
                found[value] = None
            elif value.op is not None:
                fresh = [s for s in value.op.sources if s not in seen and s.numel <= _LARGER * gate.numel]
                seen.update(fresh)
                pending += fresh
    return list(found)
