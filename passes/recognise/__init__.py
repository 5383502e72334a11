"""Stage 2, recognise: hyper-connection code in the ATen record.

Wide operations are found by structure (`contraction`, `projection`, `aggregate`, `combine`, `mixing`), the small
regions between them by behaviour (`rms`, `affine`, `gates`, `sinkhorn`), and Sinkhorns without either by
`single_sinkhorns`. Nothing here looks at names or at Dynamo's spelling.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial

from mhc_compile.guard import guard
from mhc_compile.passes.recognise import aggregate, combine, gates, single_sinkhorns
from mhc_compile.passes.recognise.aggregate import Aggregate, Reading
from mhc_compile.passes.recognise.combine import Almost, Combine
from mhc_compile.passes.recognise.concatenation import TOGETHER
from mhc_compile.passes.recognise.contraction import StreamsView, may_contract
from mhc_compile.passes.recognise.gates import Gate, Matrices, NotAGate
from mhc_compile.passes.recognise.joined_factors import taken_apart
from mhc_compile.passes.recognise.layout import Layout, NotALayout, any_view, is_movement, is_shown, origin, seen, tidy
from mhc_compile.passes.recognise.mixing import Mixing, fractions
from mhc_compile.passes.recognise.mixtures import Mixture, before_factor, candidates, understand
from mhc_compile.passes.recognise.part_writes import PartWrite, part_writes
from mhc_compile.passes.recognise.projection import Projection, projections, streams_by_rows
from mhc_compile.passes.recognise.reader import Reader, may_hold_products
from mhc_compile.passes.recognise.streams import Connections, Projected
from mhc_compile.passes.shadow import Op, Shadow, Value

# What may complete a sum of products.
_SUMS = {"add", "sub", "baddbmm", "addmm", "addcmul", "cat", "stack", "select_scatter", "slice_scatter"}
_WIDE = {
    *_SUMS,
    "sum",
    "mean",
    "mm",
    "bmm",
    "mv",
    "dot",
    "mul",
    "div",
    "select",
    "slice",
    "split_with_sizes",
    "split",
    "unbind",
}
# The ones that hold a product only if their argument does, and others that may hold one.
_READING = {"sum", "mean"}


@dataclass
class Findings:
    """Everything that was recognised in one record, not yet put together into sites.

    misses are values that are almost gates, with the reasons why they are not; almost are sums that are almost writes.
    readings are all products that may be projections of streams, whatever their rows make. The planner asks reader why
    a step was not found.
    """

    mixtures: list[Mixture]
    aggregates: list[Aggregate]
    combines: list[Combine]
    mixings: list[Mixing]
    misses: list[NotAGate]
    matrices: dict[Value, Matrices | str]
    reader: Reader
    connections: Connections
    readings: dict[Value, list[Projection]]
    part_writes: list[PartWrite]
    almost: list[Almost]


def recognise(shadow: Shadow, errors: list[str] | None = None) -> Findings:
    """Everything in the record that may be part of a hyper-connection.

    Code that cannot be looked into is not among the findings, and the reason is added to `errors`.
    """
    errors = [] if errors is None else errors
    reader = Reader()
    aggregates: list[Aggregate] = []
    combines: list[Combine] = []
    others: list[Reading] = []
    almost: list[Almost] = []
    readings: dict[Value, list[Projection]] = {}
    for op in shadow.ops:
        if op.name in _WIDE and op.outs:
            with guard("an operation is not looked into", errors):
                _read_wide(op, reader, readings, combines, aggregates, others, almost)
    aggregates = _final(aggregates)
    weighing = _weighing(aggregates, combines)
    mixtures: list[Mixture] = []
    known: gates.Identified = {}
    misses: dict[Value, NotAGate] = {}
    of_streams: dict[Value, NotAGate] = {}  # those of projections of what is read or written
    acted_on = {a.x for a in aggregates} | {c.x for c in combines}
    reading_gates = {a.gate for a in aggregates}
    # Behind new streams there is another layer, and behind a read the sublayer.
    new = {c.out for c in combines if c.streams.channels > c.streams.n}
    read: dict[int, set[Value]] = {}
    for a in aggregates:
        if a.streams.channels > a.streams.n:
            read.setdefault(a.x.numel, set()).add(a.out)
    may_mix = single_sinkhorns.has_square_exponentials(shadow.ops)
    for found in readings.values():
        # If gates act on nothing here, only those of a Sinkhorn show that streams are projected, as in no other model.
        acts = any(reading.x in acted_on for reading in found)
        if not (acts or may_mix or streams_by_rows(found[0]) is not None):
            continue
        cone = _cone(found[0].out, new | read.get(found[0].x.numel, set()))
        gated = candidates(cone, weighing)
        if not gated:
            continue
        mixture, missed = None, list[NotAGate]()
        with guard("a projection is not looked into", errors):
            mixture, missed = understand(found, cone, gated, known, reader, acted_on, reading_gates)
        if mixture is not None:
            mixtures.append(mixture)
        streams = tuple(reading.x for reading in found)
        for miss in missed:
            (of_streams if acts else misses).setdefault(miss.value, replace(miss, streams=streams))
    misses |= of_streams
    understood = {value for mixture in mixtures for value in mixture.gates}
    with guard("combines without mixing are not looked for", errors):
        combines += _residuals(shadow, reader, mixtures, [*others, *aggregates], almost)
    matrices: dict[Value, Matrices | str] = {}
    for res in dict.fromkeys(mix.res for c in combines for mix in c.mixes if mix.is_matrix and mix.res is not None):
        if res not in understood:
            with guard("a matrix is not looked into", errors):
                answer = gates.matrices(res, known)
                if answer is not None:
                    matrices[res] = answer
    explained: list[Gate | Matrices] = [gate for mixture in mixtures for gate in mixture.gates.values()]
    explained += [found for found in matrices.values() if not isinstance(found, str)]
    for value, answer in single_sinkhorns.unexplained(shadow.ops, explained, known, errors):
        if not isinstance(answer, str):  # what the program makes of it needs no reason of its own
            for made in _cone(value):
                misses.pop(made, None)
                matrices.pop(made, None)
        joined = False
        with guard("a projection is not looked into", errors):
            joined = _join(value, readings, mixtures, known, reader)
        if not joined:
            matrices[value] = answer
    matrices |= dict(single_sinkhorns.with_tokens_last(shadow.ops, errors))
    left = [m for value, m in misses.items() if not understood.intersection((value, before_factor(value, understood)))]
    connections = Connections(shadow.ops, [*aggregates, *others], reader, Projected(readings))
    mixings: list[Mixing] = []
    with guard("fractions of channels are not looked for", errors):
        written = {c.out for c in combines}
        sums = (op.out for op in shadow.ops if op.name in _SUMS and op.outs and op.out not in written)
        mixings = fractions(sums, reader, connections)
    some: list[PartWrite] = []
    with guard("writes to some of the streams are not looked for", errors):
        some = list(part_writes(shadow.ops, reader, connections, [a for a in aggregates if not a.rows]))
    return Findings(
        mixtures, aggregates, combines, mixings, left, matrices, reader, connections, readings, some, almost
    )


def _read_wide(
    op: Op,
    reader: Reader,
    readings: dict[Value, list[Projection]],
    combines: list[Combine],
    aggregates: list[Aggregate],
    others: list[Reading],
    almost: list[Almost],
) -> None:
    """Add what one operator makes to what was found."""
    if op.name in _READING and not single_sinkhorns.is_square(op.args[0]):  # a Sinkhorn has dozens of sums
        others += aggregate.other_readings(reader, op.out)
    if not may_hold_products(op, reader):
        return
    terms = reader.terms(op.out)
    if op.name == "add" and len(terms) == 1 and terms[0].summed:  # the sum of a list of streams
        others += aggregate.other_readings(reader, op.out)
    if op.name in TOGETHER or any(term.summed for term in terms):
        # A part of a projection is one, too, but the gates of its rows are reported once, for the whole projection.
        part = is_movement(op) and origin(op.args[0], any_view)[0] in readings
        found = [] if part else projections(reader, op, readings)
        if found:
            readings[op.out] = found
    if op.name in _SUMS and len(terms) > 1 and any(map(may_contract, terms)):
        combines += combine.of_sum(reader, op, partial(combine.combines, out=op.out), almost)
    if taken_apart(reader, terms):
        out = seen(op.out)  # an einsum permutes what its product makes
        written = combine.combines(reader, out, taken_apart(reader, reader.terms(out)))
        combines += (replace(c, in_one_product=True) for c in written if isinstance(c, Combine))
    for out in op.outs:
        out = out if is_shown(out) else seen(out)
        read = [a for a in aggregate.aggregates(reader, out) if isinstance(a, Aggregate)]
        aggregates += read
        # The einsum of a gate for each channel. One for each token reads so, too, if tokens lie between the channels.
        if op.name == "bmm" and not read:
            others += aggregate.other_readings(reader, out)


def _join(
    value: Value,
    readings: dict[Value, list[Projection]],
    mixtures: list[Mixture],
    known: gates.Identified,
    reader: Reader,
) -> bool:
    """Whether a Sinkhorn projection that is changed before it mixes is a gate of a projection; then it becomes one."""
    for found in readings.values():
        cone = _cone(found[0].out)
        mixture = understand(found, cone, [value], known, reader)[0] if value in cone else None
        if mixture is not None:
            same = [m for m in mixtures if (m.projection, m.normed) == (mixture.projection, mixture.normed)]
            if same:
                same[0].gates |= mixture.gates
            else:
                mixtures.append(mixture)
            return True
    return False


def _final(aggregates: list[Aggregate]) -> list[Aggregate]:
    """Without sums that only go on to be scaled, or seen, as others of the same streams.

    And without sums of such sums: pooled over tokens, they would pass for sums of tokens times n streams. And without
    views and multiples of a sum that has other readers as well: they are made of the sum, and read no streams.
    """
    counts = {(a.out, a.x): a.streams.n for a in aggregates}
    later: set[tuple[Value, Value]] = set()
    pooled: set[tuple[Value, Value]] = set()
    for a in aggregates:
        for value in a.op.inputs():
            while True:
                if (value, a.x) in pooled or counts.get((value, a.x), a.streams.n) < a.streams.n:
                    pooled.add((a.out, a.x))
                else:
                    later.add((value, a.x))
                if value.op is None or not is_movement(value.op) or len(value.users) != 1 or value.is_output:
                    break
                value = next(value.op.inputs())
    plain = [a for a in aggregates if (a.out, a.x) not in pooled]
    kept = [a for a in plain if (a.out, a.x) not in later or len(a.out.users) > 1 or a.out.is_output]
    places = {(a.out, a.x) for a in kept if a.out.nodes}
    return [a for a in kept if not any((value, a.x) in places for value in _before_multiples(a.out))]


def _before_multiples(value: Value) -> Iterator[Value]:
    """The values that this one is a view, a copy or a multiple of."""
    while value.op is not None and (is_movement(value.op) or _is_multiple(value.op)):
        value = next(value.op.inputs())
        yield value


def _is_multiple(op: Op) -> bool:
    """Whether an operator multiplies a tensor with a number, or divides it by one."""
    return op.name in ("mul", "div", "neg") and len(op.sources) == 1 and op.args[0] is op.sources[0] and not op.kwargs


def _cone(out: Value, end: Collection[Value] = ()) -> dict[Value, None]:
    """The values computed from this one, as far as they stay as small as it is, and up to those of `end`."""
    limit = out.numel
    cone, pending = {out: None}, [out]
    while pending:
        for op in pending.pop().users:
            for out in op.outs:
                if out not in cone and op.target is not None and out.numel <= limit and out not in end:
                    cone[out] = None
                    pending.append(out)
    return cone


def _weighing(aggregates: list[Aggregate], combines: list[Combine]) -> dict[Value, int]:
    """The values that something wide uses as a gate, numbered."""
    found: dict[Value, int] = {}
    for a in aggregates:
        found.setdefault(a.gate, len(found))
    for c in combines:
        for gate in c.gates():
            found.setdefault(gate, len(found))
    return found


def _residuals(
    shadow: Shadow, reader: Reader, mixtures: list[Mixture], reads: list[Reading | Aggregate], almost: list[Almost]
) -> list[Combine]:
    """Combines that do not mix the streams: too common a shape to be read where nothing says what is streams."""
    known = {value for mixture in mixtures for value in mixture.gates}
    reads = sorted(reads, key=lambda read: not read.streams.holds_tokens)  # the likelier readings of x last
    streams = {read.x: read.streams for read in reads}
    weighed = [read for read in reads if isinstance(read, Aggregate) and not read.rows]
    streams |= {read.x: read.streams for read in weighed if read.gate in known}
    for mixture in mixtures:
        sizes = {gate.size for gate in mixture.gates.values() if isinstance(gate.kind, gates.Sigmoid)}
        if mixture.projection.x not in streams and len(sizes) == 1:
            view = default_view(mixture.projection, sizes.pop())
            if view is not None:
                streams[mixture.projection.x] = view
    found: list[Combine] = []
    products = {x for x in streams if reader.is_made(x)}
    reader = Reader(whole=products) if products else reader
    # Programs read what they have normalised, and write to what it was before: a tensor of the same shape, or of one in
    # which a token's streams lie in as many dimensions as they like.
    alike = {x.shape: view for x, view in streams.items()}
    views = {view: _token_dims(x, view) for x, view in streams.items()}

    def view_of(x: Value) -> StreamsView | None:
        found = streams.get(x) or alike.get(x.shape)
        return found or next((view for view, dims in views.items() if dims and dims == _token_dims(x, view)), None)

    sizes = {x.numel for x in streams}
    for op in shadow.ops:
        if op.name in _SUMS and op.out.numel in sizes:
            found += combine.of_sum(reader, op, partial(combine.residuals, out=op.out, streams=view_of), almost)
    return found


def _token_dims(x: Value, view: StreamsView) -> tuple[int, ...] | None:
    """The dimensions in front of those that hold a token's streams; None if these hold other tokens as well."""
    width, rank = view.n * view.channels, len(x.shape)
    while rank and width % max(x.shape[rank - 1], 1) == 0 and width > 1:
        rank -= 1
        width //= x.shape[rank]
    return x.shape[:rank] if width == 1 and not view.holds_tokens else None


def default_view(projection: Projection, n: int) -> StreamsView | None:
    """Where n streams lie in what a projection reads, if they are its major elements: [..., n, C]."""
    inner = tidy([(size, stride) for size, stride, _ in projection.parts[0].inner])
    if projection.width % n:
        return None
    try:
        dims = Layout((inner,)).reshape((n, projection.width // n)).dims
    except NotALayout:
        return None
    stream = dims[0] or ((1, 0),)
    return StreamsView(projection.tokens_at, stream[0], dims[1]) if len(stream) == 1 else None


__all__ = [
    "Aggregate",
    "Combine",
    "Findings",
    "Gate",
    "Matrices",
    "Mixing",
    "Mixture",
    "Normed",
    "NotAGate",
    "Op",
    "Weight",
    "default_view",
    "recognise",
]
