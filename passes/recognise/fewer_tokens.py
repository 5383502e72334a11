"""A region on fewer tokens: a few dozen show what it does to each token, while training has many thousands.

Sizes occur in a record as numbers. The sizes in a reshape or an expand are written anew. If any other number is as
large as a number of tokens, such as the start of a slice or the size of a factory, the region runs on all its tokens.
It also does if an operation does not treat each token alone: a program may compare the number of tokens with 1,000.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from mhc_compile import compat
from mhc_compile.passes.aten_calls import leaves, map_leaves
from mhc_compile.passes.recognise.layout import is_pointwise
from mhc_compile.passes.recognise.region import Arguments, Region, concrete, evaluate, sample_shape
from mhc_compile.passes.recognise.token_independence import TokensAlone
from mhc_compile.passes.shadow import Op, Value

_MANY = 128
# Primes: the sizes of what tokens have been counted into, and of little else, are multiples of them.
_FEW = 61
_FEW_BESIDE = 11
_TO_THE_END = 2**63 - 1

# A dimension is a product of factors, each with its size in the program and its size here.
Factor = tuple[int, int]
Dim = tuple[Factor, ...]
Dims = tuple[Dim, ...]


class _Full(Exception):
    """The region has to run on all its tokens."""


def on_few_tokens(found: Region) -> Region:
    """The region for a few dozen tokens, or as it is, if it has no more or cannot be cut down."""
    dims = _cut(found.shape)
    if dims is None:
        return found
    counts = {here for dim in dims for old, here in dim if old != here}
    try:
        with TokensAlone(counts):
            few = replace(found, shape=_sizes(dims), arguments=_arguments(found, dims))
            if any(isinstance(op.target, compat.AutogradFunction) for op in found.ops):
                _backward(few)
        return few
    except Exception:  # an operator that does not run on fewer tokens may well run on all
        return found


def _backward(found: Region) -> None:
    """Run the backward of a user's function, which may do more than differentiate the forward."""
    leaf = torch.zeros(found.shape, dtype=torch.float64).requires_grad_()
    with torch.enable_grad():
        out = found.run(leaf)
        torch.autograd.grad(out, leaf, torch.ones_like(out))


def _cut(shape: Sequence[int]) -> Dims | None:
    """The dimensions of the leaf; None if it is small. The last is a token's own, unless it is the largest."""
    if not shape or max(shape) <= _MANY:
        return None
    largest = max(range(len(shape)), key=lambda d: shape[d])

    def here(d: int) -> int:
        if d == largest:
            return _FEW
        return _FEW_BESIDE if shape[d] > _FEW and d != len(shape) - 1 else shape[d]

    return tuple(((size, here(d)),) if size != 1 else () for d, size in enumerate(shape))


def _arguments(found: Region, dims: Dims) -> tuple[Arguments, ...]:
    known: dict[Value, torch.Tensor] = {found.leaf: torch.zeros(_sizes(dims), dtype=torch.float64)}
    structure = {found.leaf: dims}
    arguments = []
    for op, given in zip(found.ops, found.arguments, strict=True):
        args, kwargs = concrete(given)
        regrouped: Dims | None = None
        if op.name in ("view", "_unsafe_view", "reshape", "expand"):
            source, old = structure[args[0]], sample_shape(op.out)
            regrouped = _expanded(source, old) if op.name == "expand" else _reshaped(source, old)
            args = (args[0], list(_sizes(regrouped)), *args[2:])
        elif not _is_independent(op, args, kwargs):
            raise _Full
        arguments.append((args, kwargs))
        for value, tensor in evaluate(op, (args, kwargs), known):
            known[value] = tensor
            sources = [structure[source] for source in op.sources]
            structure[value] = regrouped or _matched(sample_shape(value), tensor.shape, sources)
    if structure[found.out] != dims and prod(_sizes(structure[found.out])) != prod(_sizes(dims)):
        raise _Full
    return tuple(arguments)


def _sizes(dims: Dims) -> tuple[int, ...]:
    return tuple(prod(here for _, here in dim) for dim in dims)


def _is_independent(op: Op, args: Any, kwargs: Any) -> bool:
    """Whether no number among the arguments can be a size or a place among the tokens."""
    given: list[Any] = [*args, *kwargs.values()]
    if isinstance(op.target, compat.AutogradFunction):
        given += map_leaves(lambda a: (a.start, a.stop) if isinstance(a, slice) else a, list(op.target.arguments()))
    elif is_pointwise(op):
        return True
    return all(abs(n) < _FEW or n == _TO_THE_END for n in leaves(given) if type(n) is int)


def _reshaped(dims: Dims, shape: Sequence[int]) -> Dims:
    """The same factors in other groups; a factor that is cut down stays whole."""
    rest: list[Factor] = [factor for dim in reversed(dims) for factor in reversed(dim)]
    out: list[Dim] = []
    for size in shape:
        dim: list[Factor] = []
        while size > 1:
            old, here = rest.pop()
            if size % old == 0:
                dim.append((old, here))
                size //= old
            elif old % size == 0 and old == here:
                dim.append((size, size))
                rest.append((old // size, old // size))
                size = 1
            else:
                raise _Full
        out.append(tuple(dim))
    return tuple(out)


def _expanded(dims: Dims, shape: Sequence[int]) -> Dims:
    """New dimensions in front, and others for those of size 1; none of them may be as large as one cut down."""
    aligned = [()] * (len(shape) - len(dims)) + list(dims)
    out: list[Dim] = []
    for dim, size in zip(aligned, shape, strict=True):
        if dim or size == 1:
            out.append(dim)
        elif size < _FEW:
            out.append(((size, size),))
        else:
            raise _Full
    return tuple(out)


def _matched(old: Sequence[int], here: Sequence[int], sources: Iterable[Dims]) -> Dims:
    """What the dimensions of a result consist of, by their sizes in the program and here."""
    known = {(prod(old for old, _ in dim), prod(here for _, here in dim)): dim for dims in sources for dim in dims}
    if len(old) != len(here):
        raise _Full
    out: list[Dim] = []
    for pair in zip(old, here, strict=True):
        if pair in known:
            out.append(known[pair])
        elif pair[0] == pair[1]:
            out.append((pair,) if pair[0] != 1 else ())
        else:
            raise _Full
    return tuple(out)
