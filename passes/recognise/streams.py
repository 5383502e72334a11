"""What streams are: structure alone does not distinguish them from experts, heads or the nodes of a graph.

A tensor counts as streams if it is connected:
- it is x, or x', of a write whose f depends on a read of the same x, and is not that read itself;
- or a projection of it makes a gate that acts on it: a known one, or that of a read that comes back to it somehow;
- or a sublayer reads several rows of it side by side, and what is written comes from these (`mixing`).
In a graph that was cut, f may come in from outside: then a write counts by itself if it has a matrix and a post gate
for each token, in two tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping

from mhc_compile.passes.recognise.aggregate import Aggregate, Reading
from mhc_compile.passes.recognise.combine import Combine
from mhc_compile.passes.recognise.contraction import StreamsView
from mhc_compile.passes.recognise.layout import any_view, is_movement, is_pointwise, origin
from mhc_compile.passes.recognise.projection import Projection
from mhc_compile.passes.recognise.reader import Reader
from mhc_compile.passes.shadow import Op, Value

# How many values back streams are followed, and what changes no more than the order of elements, or drops some.
_STEPS = 6
_REORDERING = {"roll", "flip", "index", "index_select", "gather", "cumsum", "native_dropout"}


class Projected:
    """Which gates are made, in whatever way, from a projection of all channels of their streams."""

    def __init__(self, readings: Mapping[Value, Iterable[Projection]]) -> None:
        self._of: dict[tuple[Value, object, int], set[Value]] = {}
        self._as_large: dict[tuple[int, int], set[Value]] = {}
        for out, found in readings.items():
            for r in found:
                self._of.setdefault((r.x, r.tokens_at, r.width), set()).add(out)
                self._as_large.setdefault((r.x.numel, r.width), set()).add(out)

    def makes(self, gate: Value, x: Value, streams: StreamsView) -> bool:
        own = self._of.get((x, streams.tokens, streams.n * streams.channels))
        return own is not None and bool(behind([gate], own, {x}))

    def may_make(self, gate: Value, x: Value, streams: StreamsView) -> bool:
        """Whether a projection makes the gate that is as wide as one of these streams, as one of normed streams is."""
        wide = self._as_large.get((x.numel, streams.n * streams.channels))
        return wide is not None and bool(behind([gate], wide, {x}))


class Connections:
    """Which writes and reads of a record belong to streams."""

    def __init__(
        self, ops: Iterable[Op], reads: Collection[Aggregate | Reading], reader: Reader, projected: Projected
    ) -> None:
        self._reader = reader
        self.projected = projected
        self._position: dict[Op | None, int] = {op: i for i, op in enumerate(ops)}
        self._reads: dict[Value, list[Aggregate | Reading]] = {}
        for read in reads:
            self._reads.setdefault(read.out, []).append(read)
        self._behind: dict[tuple[Value, Value], dict[Value, None]] = {}

    @property
    def read(self) -> set[Value]:
        """The streams of all reads."""
        return {read.x for reads in self._reads.values() for read in reads}

    def reads_before(self, write: Combine) -> list[Aggregate | Reading]:
        """The reads of the streams of a write, or of what is made of them, that its f depends on.

        And the reads of what the streams are made of alone: some are rolled or dropped out before they are written.
        """
        found: dict[int, Aggregate | Reading] = {}
        for x in self._made_of(write.x):
            for value in self.between(x, write.outer.f):
                for read in self._reads.get(value, ()):
                    if read.streams.n == write.streams.n and self._depends(read.x, x):
                        found[id(read)] = read
        # A gate for each channel reads as one for each token between channels, too. The write says which it is.
        by_channel = {read.out for read in found.values() if isinstance(read, Reading) and read.by_channel}
        excluded = by_channel if not write.streams.holds_tokens else set()
        return [read for read in found.values() if not (read.streams.holds_tokens and read.out in excluded)]

    def _made_of(self, x: Value) -> Iterator[Value]:
        """Streams, and what they are made of element by element, or in another order: one tensor of their size.

        A part that a program takes once more is made of the one that it took first.
        """
        for _ in range(_STEPS):
            yield x
            first = self._taken_first(x)
            if first is not x:
                x = first
                continue
            op = x.op
            wide = [source for source in op.sources if source.numel == x.numel] if op is not None else []
            if op is None or len(wide) != 1 or not _keeps_apart(op):
                return
            (x,) = wide

    def _taken_first(self, x: Value) -> Value:
        """The first of the values that are the same part of one tensor."""
        base, layout = origin(x, any_view)
        found, pending = [x], [base] if base is not x else []
        while pending:
            for op in pending.pop().users:
                views = op.outs if is_movement(op) else ()
                pending += views
                found += (view for view in views if origin(view, any_view) == (base, layout))
        return min(found, key=lambda value: self._position.get(value.op, -1))

    def is_write(self, write: Combine, known: Container[Value] = ()) -> bool:
        """Whether f depends on a read of the streams, or comes in from outside for a write that has all its gates.

        What is added to all streams alike also follows from pooling. It is a write if f depends on a weighted sum, and
        the streams are mixed or the weights are `known`. The mean of mixed vectors is pooling as well.
        """
        x, f = write.x, write.outer.f
        if write.outer.post is None:
            reads = [read for read in self.reads_before(write) if isinstance(read, Aggregate) and not read.rows]
            return any(write.mix is not None or read.gate in known for read in reads)
        behind = self.between(x, f)
        before = self.reads_before(write)
        if write.outer.columns:
            # Along a graph's edges, and in attention, what is made of all vectors goes to each by a matrix, too.
            matrices = {*write.gates(), *(read.gate for read in before if isinstance(read, Aggregate))}
            return bool(before) and any(
                gate in known or self.projected.may_make(gate, x, write.streams) for gate in matrices
            )
        if x not in behind and not before:
            mix = write.mix
            if write.in_one_product:  # attention over keys, and one key more, is such a product, too
                return False
            return mix is not None and _is_each(mix.res_layout.dims[0]) and _is_each(write.outer.post_layout.dims[0])
        if write.mix is None and not any(isinstance(read, Aggregate) for read in before) and self._reflects(write):
            return False
        made = origin(f)[0]
        return any(read.out is not made for read in before) or any(
            value.numel * write.streams.n == x.numel and value is not made and origin(value, any_view)[0] is x
            for value in behind
        )

    def _reflects(self, write: Combine) -> bool:
        """Whether the gate is x times f, summed over channels, so that x + gate f reflects or projects each vector.

        If f comes from a mean, the vectors are as likely to be few tokens as streams.
        """
        both = [origin(value, any_view)[0] for value in (write.x, write.outer.f)]
        pending = [write.outer.post] if write.outer.post is not None else []
        for gate in pending:
            for term in self._reader.terms(gate):
                bases = [{source.base for source in factor} for factor in term.factors]
                if term.summed and all(any(value in some for some in bases) for value in both):
                    return True
                factors = [factor[0].base for factor in term.factors if not term.summed]
                quotients = [base.op for base in factors if base.op is not None and base.op.name == "div"]
                factors += [numerator for op in quotients for numerator in op.sources[:1]]
                pending += [factor for factor in factors if factor not in pending]
        return False

    def of_channels(self, writes: Iterable[Combine]) -> list[Reading]:
        """The reads with a gate for each channel that the f of writes depend on, and that are nothing else."""
        found = {read.out: read for write in writes for read in self.reads_before(write)}
        return [read for read in found.values() if isinstance(read, Reading) and read.by_channel]

    def made_with(self, use: Op, x: Value) -> Reading | None:
        """The first read of streams x with a gate for each channel that an operator is part of.

        An operator that reads the streams itself is part of a read only if nothing is summed in between.
        """
        reads_x = any(self._depends(source, x) for source in use.sources)
        for reads in self._reads.values():
            for read in reads:
                if isinstance(read, Reading) and read.by_channel and self._depends(read.x, x):
                    within = self._as_wide(read) if reads_x else self.between(read.x, read.out)
                    if any(out in within for out in use.outs):
                        return read
        return None

    def _as_wide(self, read: Reading) -> set[Value]:
        """What a read is computed from, as far back as it is as large as the streams."""
        found: set[Value] = set()
        pending = list(read.out.op.sources) if read.out.op is not None else []
        while pending:
            value = pending.pop()
            if value not in found and value.numel >= read.x.numel:
                found.add(value)
                pending += value.op.sources if value.op is not None and value is not read.x else ()
        return found

    def _depends(self, value: Value, x: Value) -> bool:
        return value is x or (value.numel == x.numel and x in self.between(x, value))

    def made_of(self, x: Value) -> Callable[[Value], bool]:
        """Whether a value is computed from a tensor, or from what this is a view of."""
        base = origin(x, any_view)[0]
        return lambda value: base in self.between(base, value)

    def between(self, x: Value, value: Value) -> dict[Value, None]:
        """What a value is computed from, as far back as `x` was computed: x itself, if it depends on it."""
        key = (x, value)
        found = self._behind.get(key)
        if found is None:
            first = self._position.get(x.op, -1)
            found, pending = {value: None}, [value]
            while pending:
                op = pending.pop().op
                if op is None or self._position.get(op, -1) <= first:
                    continue
                fresh = [source for source in op.sources if source not in found]
                found |= dict.fromkeys(fresh)
                pending += fresh
            self._behind[key] = found
        return found


def _keeps_apart(op: Op) -> bool:
    """Whether an operator neither adds up channels nor draws on anything but its input, random numbers aside."""
    return is_movement(op) or op.name in _REORDERING or is_pointwise(op)


def _is_each(dim: tuple[tuple[int, int], ...]) -> bool:
    """Whether a gate has a number of its own for each token."""
    return all(stride for _, stride in dim)


# How many values that a gate is computed from are looked at, and how much larger than the gate they may be: factors of
# a Kronecker product are smaller.
_MOST = 2_000
_LARGER = 64


def behind(gates: Iterable[Value], known: Container[Value], streams: Container[Value]) -> list[Value]:
    """The nearest known values that gates are computed from, after the nearest streams."""
    found: dict[Value, None] = {}
    for gate in dict.fromkeys(gates):
        seen, pending = {gate}, [gate]
        while pending and len(seen) < _MOST:
            value = pending.pop()
            if value in known:
                found[value] = None
            elif value.op is not None and value not in streams:
                fresh = [s for s in value.op.sources if s not in seen and s.numel <= _LARGER * gate.numel]
                seen.update(fresh)
                pending += fresh
    return list(found)
