"""Sinkhorn projections that do not come from a projection of streams, and iterations with the tokens last."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import torch

from mhc_compile.guard import guard
from mhc_compile.passes.recognise import sinkhorn
from mhc_compile.passes.recognise.contraction import is_stream_count
from mhc_compile.passes.recognise.gates import Gate, Identified, Matrices, matrices
from mhc_compile.passes.recognise.layout import is_movement, keeps_order
from mhc_compile.passes.recognise.region import Region, region
from mhc_compile.passes.recognise.sinkhorn import EXPONENTIALS
from mhc_compile.passes.shadow import Op, Value

# What is looked into with the tokens last: attention of 2 heads in a batch of 2 has such a shape, too.
_HALF_STEPS = 3
_MOST_ELEMENTS = 1 << 20


def unexplained(
    ops: Iterable[Op], explained: Collection[Gate | Matrices], known: Identified, errors: list[str]
) -> Iterator[tuple[Value, Matrices | str]]:
    """Sinkhorn projections that are none of the `explained` ones nor on the way to one; and what nearly is one."""
    seen: set[Value] = set()
    values = {found.out if isinstance(found, Matrices) else found.value for found in explained}
    behind = {op for found in explained for op in found.ops}
    for op in ops:
        if op.name not in EXPONENTIALS or op in behind or not op.outs or not is_square(op.out) or op.out in seen:
            continue
        cone, sums = _made_of(op)
        seen.update(cone)
        if sums + sinkhorn.is_reduction(op) < 2 or any(value in values for value in cone):
            continue
        within: tuple[Value, Matrices] | None = None
        nearly: tuple[Value, str] | None = None
        for value in filter(is_square, _ends(cone)):
            found: Matrices | str | None = None
            with guard("a matrix is not looked into", errors):
                found = matrices(value, known)
            if isinstance(found, Matrices):
                shown = _in_program(value)
                if shown.nodes:
                    yield shown, replace(found, out=shown)
                    break
                # A view within the node that reads it. What the program has comes later among the ends.
                within = within or (shown, replace(found, out=shown))
            elif found is not None and found.startswith(sinkhorn.NEARLY):
                nearly = value, found
        else:
            if within is not None or nearly is not None:
                yield within or nearly  # type: ignore[misc]


def _in_program(value: Value) -> Value:
    """A matrix as the program has it: what reads it views it within its own node first."""
    while not value.nodes and value.op is not None and is_movement(value.op):
        source = next(value.op.inputs())
        if source.shape != value.shape or not keeps_order(value.op):
            break
        value = source
    return value


def with_tokens_last(ops: Iterable[Op], errors: list[str]) -> Iterator[tuple[Value, str]]:
    """Sinkhorn projections of [n, n, tokens], by their sums over both axes, and why no operator takes them."""
    seen: set[Value] = set()
    for op in ops:
        if op.name not in EXPONENTIALS or not op.outs or op.out in seen or not _is_square_first(op.out):
            continue
        cone, sums = _made_of(op)
        seen.update(cone)
        leaf = next(op.inputs())
        if sums + sinkhorn.is_reduction(op) < _HALF_STEPS or leaf.shape != op.out.shape or leaf.numel > _MOST_ELEMENTS:
            continue
        for value in _ends(cone):
            found: Region | None = None
            with guard("a matrix is not looked into", errors):
                found = region(value, lambda v, leaf=leaf: v is leaf) if value.shape == leaf.shape else None  # type: ignore[misc]
            if found is not None and _is_doubly_stochastic(found):
                yield value, f"{sinkhorn.NEARLY} projection of [n, n, tokens]; the operators have the tokens first"
                break


def _is_doubly_stochastic(found: Region) -> bool:
    """Whether rows and columns along the first two axes sum to 1, to a few percent, for moderate logits."""
    if sum(map(sinkhorn.is_reduction, found.ops)) < _HALF_STEPS:
        return False
    generator = torch.Generator().manual_seed(2)
    try:
        result = found.run(torch.randn(found.shape, generator=generator, dtype=torch.float64))
    except Exception:  # an operator that does not run as recorded is one we cannot judge
        return False
    return all(bool(((result.sum(axis) - 1.0).abs() < 0.1).all()) for axis in (0, 1))


def has_square_exponentials(ops: Iterable[Op]) -> bool:
    """Whether anything could be the beginning of a Sinkhorn projection."""
    return any(op.name in EXPONENTIALS and bool(op.outs) and is_square(op.out) for op in ops)


def _made_of(op: Op) -> tuple[dict[Value, None], int]:
    """The values made of what op makes that are not larger, and how many half-steps of a Sinkhorn these can hold."""
    cone = {op.out: None}
    pending, sums = [op.out], 0
    for value in pending:
        for user in value.users:
            small = user.target is not None and all(out.numel <= op.out.numel for out in user.outs)
            fresh = [out for out in user.outs if small and out not in cone]
            sums += bool(fresh) and sinkhorn.is_reduction(user)
            cone |= dict.fromkeys(fresh)
            pending += fresh
    return cone, sums


def _ends(cone: Collection[Value]) -> list[Value]:
    """The values of a cone that a Sinkhorn may end in, the last ones first."""
    return [v for v in cone if _leaves(v, cone) or not any(sinkhorn.is_reduction(user) for user in v.users)][::-1]


def _leaves(value: Value, cone: Collection[Value]) -> bool:
    """Whether a value, or a view of it, goes anywhere but into other small values."""
    for user in value.users:
        if any(out not in cone for out in user.outs):
            return True
        if is_movement(user) and any(_leaves(out, cone) for out in user.outs):
            return True
    return value.is_output


def is_square(value: Value) -> bool:
    """Whether a value holds matrices that may mix streams."""
    return _are_sides(value.shape[-2:])


def _is_square_first(value: Value) -> bool:
    return _are_sides(value.shape[:2]) and not is_square(value)


def _are_sides(sizes: tuple[int, ...]) -> bool:
    """Whether these are the sides of a matrix that mixes streams."""
    side = sizes[0] if len(sizes) == 2 else 0
    return sizes == (side, side) and side > 1 and is_stream_count(side)
