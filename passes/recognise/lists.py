"""Streams that a program keeps as a list of n tensors [..., C]: where they are written one by one.

    new[i] = post[i] * f + sum_j res[i][j] * old[j]        post may be 1, and the sum old[i] or res[i] * old[i]

No contraction is read for this. A write shows in products with a number a token: n sums add products of the same
tensors. It counts if f is computed from all the old streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mhc_compile.passes.recognise.concatenation import TOGETHER
from mhc_compile.passes.recognise.contraction import is_stream_count
from mhc_compile.passes.recognise.layout import any_view, is_movement, keeps_order, origin
from mhc_compile.passes.recognise.reader import is_nought
from mhc_compile.passes.shadow import Op, Value

Streams = tuple[Value, ...]
# Two tensors that are scaled and added are an ordinary residual with gates.
_LEAST_APART = 3
# How many values are looked at for one that a tensor is made of.
_MOST = 2_000


@dataclass(frozen=True)
class ListWrite:
    """One write. gates are lists of numbers a token along the streams: post, and for each old stream its own.

    products are the operators that multiply by a gate. to_some: only some of the new streams get f.
    """

    f: Value
    old: Streams
    new: Streams
    post: tuple[Value, ...]
    res: tuple[tuple[Value, ...], ...]
    products: frozenset[Op]
    to_some: bool = False


@dataclass(frozen=True)
class ListRead:
    """sum_j gates[j] * streams[j], which goes into one sublayer."""

    out: Value
    streams: Streams
    gates: tuple[Value, ...]


@dataclass
class _Sum:
    """A sum whose summands are products of a wide tensor and a gate, and others."""

    out: Value
    products: dict[Value, tuple[Value, Op]]
    plain: list[Value]


def list_writes(ops: Iterable[Op]) -> tuple[list[ListWrite], list[ListRead]]:
    """The writes and reads of lists of streams in a record, in the order of the program."""
    position = {op: i for i, op in enumerate(ops)}
    sums = list(_sums(position))
    groups: dict[object, list[_Sum]] = {}
    for found in sums:
        for key in _keys(found):
            groups.setdefault((key, found.out.shape), []).append(found)
    writes: dict[Streams, ListWrite] = {}
    for group in groups.values():
        if len(group) > 1 and is_stream_count(len(group)):
            write = _write(group, position)
            if write is not None:
                writes.setdefault(write.new, write)
    known = {frozenset(write.old): write.old for write in writes.values()}
    # If n results begin in the same way, structure alone does not show that they are streams.
    writes = {new: write for new, write in writes.items() if len(set(write.old)) > 1 or frozenset(new) in known}
    reads = []
    for found in sums:
        streams = known.get(frozenset(found.products))
        if streams is not None and not found.plain:
            reads.append(ListRead(found.out, streams, tuple(found.products[x][0] for x in streams)))
    for write in _to_some(sums, position, {frozenset(write.old) for write in writes.values()}):
        writes.setdefault(write.new, write)
    shown = [write for write in writes.values() if all(x.nodes for x in write.new)]
    return sorted(shown, key=lambda write: position[write.new[-1].op]), reads  # type: ignore[index]


def _keys(found: _Sum) -> Iterator[object]:
    """What the sums of one write have in common: all that they multiply, or f alone."""
    wide = list(found.products)
    if len(wide) > 1:
        yield frozenset(wide), len(found.plain)
    if len(wide) <= 2:
        yield from ((value, len(wide), len(found.plain)) for value in wide)


def _sums(position: dict[Op, int]) -> Iterator[_Sum]:
    """The sums of products, each as far as no tensor is in two of its products: those of two streams are two sums.

    But products of one tensor alone may be one sum: the streams of a list that begins with n times one tensor.
    """
    found: dict[Value, _Sum | None] = {}
    inside: set[Value] = set()

    def part(value: Value, shape: tuple[int, ...]) -> _Sum | None:
        if value in found and value.shape == shape and len(value.users) == 1 and not value.is_output:
            return found[value]
        return _Sum(value, {}, [] if is_nought(value) else [value])

    for op in position:
        factors = wide_and_narrow(op)
        summands = [v for v in op.args[:2] if isinstance(v, Value)] if op.name == "add" and not op.kwargs else []
        if op.name == "_to_copy" and keeps_order(op):
            summands = [*op.sources]
        if factors is not None:
            wide, narrow = factors
            parts: list[_Sum | None] = [_Sum(op.out, {wide: (narrow, op)}, [])]
            summands = [*op.args[:1]] if op.name == "addcmul" else []
        elif any(value in found for value in summands):
            parts = []
        else:
            continue
        parts += [part(value, op.out.shape) for value in summands]
        known = [one for one in parts if one is not None]
        products = {wide: gate for one in known for wide, gate in one.products.items()}
        once = len(products) == sum(len(one.products) for one in known)
        one_tensor = len(products) == 1 and not any(one.plain for one in known)
        if len(known) < len(parts) or not (once or one_tensor):
            found[op.out] = None
        else:
            out = known[0].out if len(known) == 1 and op.name == "add" else op.out  # sum() begins with 0
            found[op.out] = _Sum(out, products, [value for one in known for value in one.plain])
            inside.update(value for value in summands if found.get(value) in known)
    for value, one in found.items():
        if one is not None and value not in inside:
            ordered = sorted(one.products.items(), key=lambda item: position[item[1][1]])
            yield _Sum(one.out, dict(ordered), one.plain)


def wide_and_narrow(op: Op) -> tuple[Value, Value] | None:
    """The wide and the narrow factor of a product: the narrow one has one number for all channels."""
    if op.name == "mul":
        left, right = op.args[:2]
    elif op.name == "addcmul" and not op.kwargs:
        left, right = op.args[1:3]
    else:
        return None
    if not (isinstance(left, Value) and isinstance(right, Value)) or not op.outs or not op.out.shape:
        return None
    if op.out.shape[-1] > 1:
        for wide, narrow in ((left, right), (right, left)):
            if wide.shape == op.out.shape and not narrow.shape[-1:] > (1,) and narrow.numel < wide.numel:
                return wide, narrow
    return None


def _write(group: list[_Sum], position: dict[Op, int]) -> ListWrite | None:
    """The sums as the streams that one write makes."""
    group = sorted(group, key=lambda found: min(position[op] for _, op in found.products.values()))
    n, new = len(group), tuple(found.out for found in group)
    wide = dict.fromkeys(value for found in group for value in found.products)
    plain = dict.fromkeys(value for found in group for value in found.plain)
    last = max((*wide, *plain), key=lambda value: position.get(value.op, -1) if value.op is not None else -1)
    if any(value.shape != new[0].shape for value in (*wide, *plain, *new)):
        return None
    everywhere = [value for value in wide if all(value in found.products for found in group)]
    post: tuple[Value, ...] = ()
    f = last
    if f in everywhere and len(set(new)) == n:
        post = tuple(found.products[f][0] for found in group)
    elif not all(found.plain == [f] for found in group):
        return None
    res: tuple[tuple[Value, ...], ...] = ()
    mixed = [value for value in everywhere if value is not f]
    own = [[v for v in (*found.products, *found.plain) if v is not f] for found in group]
    if len(mixed) == n and all(set(streams) == set(mixed) for streams in own):
        old = tuple(mixed)
        res = tuple(tuple(found.products[x][0] for found in group) for x in old)
    elif post and all(len(streams) == 1 for streams in own):
        old = tuple(streams[0] for streams in own)
        if all(x in found.products for found, x in zip(group, old, strict=True)):
            res = (tuple(found.products[x][0] for found, x in zip(group, old, strict=True)),)
    else:
        return None
    if len(set(old)) not in (1, n) or not _depends(f, old, position):
        return None
    products = frozenset(op for found in group for _, op in found.products.values())
    return ListWrite(f, old, new, post, res, products)


def _to_some(sums: Iterable[_Sum], position: dict[Op, int], known: set[frozenset[Value]]) -> Iterator[ListWrite]:
    """Writes of which only some sums add f, and the others mix the same old streams and add nothing.

    f depends on a read, which is such a sum without f, too. Where more sums than streams are left, nothing shows which
    are new streams. They are streams if another write is of them, `known` or such a one, or if one operator puts them
    together.
    """
    groups: dict[object, list[_Sum]] = {}
    for found in sums:
        if len(found.products) > 1 and is_stream_count(len(found.products)):
            groups.setdefault((frozenset(found.products), found.out.shape), []).append(found)
    writes: list[ListWrite] = []
    for group in groups.values():
        old = tuple(group[0].products)
        mixed = [found for found in group if not found.plain]
        for f in dict.fromkeys(found.plain[0] for found in group if len(found.plain) == 1):
            some = [found for found in group if found.plain == [f]]
            behind = _behind(f, old, position)
            rest = [found for found in mixed if behind is not None and found.out not in behind]
            all_of_it = [*some, *rest]
            if behind is None or len(rest) == len(mixed) or not len(some) < len(all_of_it) == len(old):
                continue
            res = tuple(tuple(found.products[x][0] for found in all_of_it) for x in old)
            products = frozenset(op for found in all_of_it for _, op in found.products.values())
            writes.append(ListWrite(f, old, tuple(found.out for found in all_of_it), (), res, products, to_some=True))
    read = {frozenset(write.old) for write in writes} | known
    for write in writes:
        new = frozenset(write.new)
        if new in read or any(op.name in TOGETHER and new <= {*op.sources} for op in write.new[0].users):
            yield write


def scaled_alone(products: Iterable[Op], position: dict[Op, int]) -> Op | None:
    """The first of some products, if at least three tensors of one shape are scaled in them and added to something.

    Each has its own numbers, one for all channels. None of the tensors is computed from another one, as the output of
    an ordinary residual is from what it is added to. position: that of each operator in the record.
    """
    groups: dict[tuple[int, ...], dict[Value, Op]] = {}
    for op in products:
        factors = wide_and_narrow(op)
        if factors is not None and (op.name == "addcmul" or _is_added(op.out)):
            groups.setdefault(op.out.shape, {}).setdefault(factors[0], op)
    for group in groups.values():
        if len(group) < _LEAST_APART:
            continue
        apart: list[Value] = []
        for wide in sorted(group, key=lambda value: position[value.op] if value.op is not None else -1):
            if not apart or not _is_made_of(wide, apart, position):
                apart.append(wide)
        if len(apart) >= _LEAST_APART and is_stream_count(len(apart)):
            return group[apart[0]]
    return None


def _is_added(value: Value) -> bool:
    """Whether a sum reads a value, seen through views."""
    return any(op.name in ("add", "sub") or (is_movement(op) and any(map(_is_added, op.outs))) for op in value.users)


def _is_made_of(value: Value, others: list[Value], position: dict[Op, int]) -> bool:
    """Whether a value is computed from one of others, of which the first comes first; or may be, after many steps."""
    first = position[others[0].op] if others[0].op is not None else -1
    seen, pending = {value}, [value]
    while pending and len(seen) < _MOST:
        op = pending.pop().op
        if op is not None and position[op] > first:
            fresh = [source for source in op.sources if source not in seen]
            seen.update(fresh)
            pending += fresh
    return bool(pending) or not seen.isdisjoint(others)


def _depends(f: Value, streams: Streams, position: dict[Op, int]) -> bool:
    """Whether a value is computed from all of some others, and is no view of what holds them."""
    return _behind(f, streams, position) is not None


def _behind(f: Value, streams: Streams, position: dict[Op, int]) -> set[Value] | None:
    """What a value is computed from, as far back as some others; None if it is not computed from all of these.

    Or if it is a view of what holds them.
    """
    held = {origin(x, any_view)[0] for x in streams}
    if origin(f, any_view)[0] in held:
        return None
    first = min(position[x.op] if x.op is not None else -1 for x in held)
    wanted, seen, pending = set(held), {f}, [f]
    while pending:
        op = pending.pop().op
        if op is None or position[op] < first:
            continue
        fresh = [source for source in op.sources if source not in seen]
        seen.update(fresh)
        wanted.difference_update(fresh)
        pending += [source for source in fresh if source not in held]
    return None if wanted else seen
