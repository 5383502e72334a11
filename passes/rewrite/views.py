"""Tensors in the operators' order of dimensions, by views alone, and results back in the program's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.plan import Decline
from mhc_compile.passes.recognise.contraction import StreamsView
from mhc_compile.passes.recognise.layout import Dim, Layout
from mhc_compile.passes.rewrite.copies import Copies
from mhc_compile.passes.rewrite.editor import Editor
from mhc_compile.passes.shadow import Shadow, Value

# A tensor's sizes: those in the record, where symbolic ones are primes, and the actual ones.
Sizes = tuple[Sequence[int], Sequence[Any]]


class Views(Editor):
    """Tensors read by layouts."""

    def __init__(self, copies: Copies, shadow: Shadow) -> None:
        super().__init__(copies, shadow)
        # The operators' results that are streams again: how they were written, their nodes and sizes of tokens.
        self.streams: dict[Value, tuple[StreamsView, fx.Node, list[int]]] = {}

    def _streams(self, value: Value, streams: StreamsView) -> tuple[fx.Node, list[int]]:
        """The value as [*tokens, n, C], and the sizes of its token dimensions."""
        known = self.streams.get(self._surfaced(value))
        if known is not None and known[0] == streams:
            self.operands = [known[1]]
            return known[1], known[2]
        return self._rows(value, Layout((streams.tokens, (streams.stream,), streams.channel)))

    def _rows(self, value: Value, layout: Layout) -> tuple[fx.Node, list[int]]:
        """The value as [*tokens, n, C], by a layout indexed [token, stream, channel], and the sizes of the tokens."""
        held, node = self._held(value)
        self.operands = [node]
        node, groups = self._split((held.shape, held.meta.shape), node, layout.dims)
        lead = len(groups[0])
        for at, group in ((lead, groups[1]), (lead + 1, groups[2])):
            if len(group) > 1:
                node = self._call("flatten", node, at, at + len(group) - 1)
            elif not group:
                node = self._call("unsqueeze", node, at)
        inner = zip(compat.example(node).shape[-2:], layout.shape[1:], strict=True)
        if not all(compat.same_size(have, size) for have, size in inner):
            raise Decline("the number of streams or of channels is not a constant of the program")
        if self.aliases.is_written(self._node(held)):
            # New streams have the strides of the old, and AOTAutograd may give other strides to what is written, of
            # which it does not know itself: for contiguous() it would do nothing.
            node = self._call(torch.clone, node, memory_format=torch.contiguous_format)
        return node, groups[0]

    def _arranged(self, value: Value, layout: Layout) -> fx.Node:
        """The elements of a value in the order of a layout that reaches each of them once; in any shape."""
        held, node = self._held(value)
        order = [step for dim in layout.dims for step in dim]
        if order == sorted(order, key=lambda step: -step[1]):
            return node
        return self._split((held.shape, held.meta.shape), node, tuple(layout.dims))[0]

    def _block(
        self, shape: Sequence[int], actual: Sequence[Any], node: fx.Node, layout: Layout
    ) -> tuple[Sizes, fx.Node, Layout]:
        """The smallest block of a tensor in which a layout lies, its sizes, and the layout over it."""
        bounds = [prod(shape[d:]) for d in range(len(shape) + 1)]
        dims = tuple(tuple(part for step in dim for part in _cut(step, bounds)) for dim in layout.dims)
        steps = {step for dim in dims for step in dim if step[1]}
        if any(stride % next(b for b in bounds[1:] if b <= stride) for _, stride in steps):
            raise Decline("a gate is read along a diagonal of its tensor")
        lengths, kept = list(shape), list(actual)
        rest = layout.offset
        for d, (have, inner) in enumerate(zip(shape, bounds[1:], strict=True)):
            start, rest = divmod(rest, inner)
            within = [(size, stride // inner) for size, stride in steps if inner <= stride < inner * have]
            last = start + sum((size - 1) * stride for size, stride in within)
            if last >= have:
                raise Decline("a gate is read across the dimensions of its tensor")
            if last + 1 - start < have:
                lengths[d] = kept[d] = last + 1 - start
                node = self._call("narrow", node, d, start, lengths[d])
        strides = {b: prod(lengths[d + 1 :]) for d, b in enumerate(bounds[1:])}

        def moved(stride: int) -> int:
            if not stride:
                return 0
            inner = next(b for b in bounds[1:] if b <= stride)
            return stride // inner * strides[inner]

        return (lengths, kept), node, Layout(tuple(tuple((s, moved(t)) for s, t in dim) for dim in dims))

    def _spread(self, value: Value, layout: Layout, tokens: Sequence[int], shape: Sequence[Any]) -> fx.Node:
        """A gate in this shape: the tokens, of these sizes, and then its own dimensions.

        A gate that several tokens share is repeated by a view, in float32: its gradient is a sum over these tokens.
        """
        held, node = self._held(value)
        sizes, node, layout = self._block(held.shape, held.meta.shape, node, layout)
        own = _follows(layout.dims[0], tokens)
        own += [bool(dim and dim[0][1]) for dim in layout.dims[1:]]
        if any(len({bool(stride) for _, stride in dim}) > 1 for dim in layout.dims[1:]):
            raise Decline("a gate is repeated along a part of its own dimensions")
        if not all(own):
            node = self._call("float", node)
        moving = [tuple(step for step in dim if step[1]) for dim in layout.dims]
        if moving:
            node = self._split(sizes, node, moving)[0]
        node = self._shaped(node, [size if each else 1 for size, each in zip(shape, own, strict=True)])
        return node if all(own) else self._call("expand", node, *self._sizes_of(shape, own))

    def _sizes_of(self, shape: Sequence[Any], own: Sequence[bool]) -> list[Any]:
        """A shape to expand to: dimensions that are there stay."""
        return [-1 if there else self._size(size) for size, there in zip(shape, own, strict=True)]

    def _split(self, sizes_of: Sizes, node: fx.Node, dims: Sequence[Dim]) -> tuple[fx.Node, list[list[int]]]:
        """A view of one dimension for each step, ordered as in `dims`, and the sizes of these by dimension.

        A step that crosses dimensions of the tensor becomes several; dimensions of size 1 stay with the first group.
        """
        shape, actual = sizes_of
        cuts = {stride for dim in dims for size, stride in dim if size > 1}
        sizes: list[tuple[int, int]] = []  # (size, stride) of each dimension after splitting
        stride = prod(shape)
        for d, have in enumerate(shape):
            stride //= have
            inner = sorted((cut // stride for cut in cuts if stride < cut < stride * have), reverse=True)
            bounds = [have, *inner, 1]
            if any(a % b for a, b in itertools.pairwise(bounds)):
                raise Decline("the streams are not whole dimensions of their tensor")
            parts = [a // b for a, b in itertools.pairwise(bounds)]
            if len(parts) > 1:
                node = self._call("unflatten", node, len(sizes), self._actual(actual[d], parts))
            for part, bound in zip(parts, bounds[1:], strict=True):
                sizes.append((part, stride * bound))
        groups: list[list[int]] = [[] for _ in dims]
        for i, (size, at) in enumerate(sizes):
            if size == 1:
                groups[0].append(i)
                continue
            for group, dim in zip(groups, dims, strict=True):
                if any(step <= at < step * count for count, step in dim if count > 1):
                    group.append(i)
                    break
            else:
                raise Decline("a tensor is read in part only")
        for group, dim in zip(groups, dims, strict=True):
            real = [i for i in group if sizes[i][0] > 1]
            wanted = sorted(real, key=lambda i: (_step_of(sizes[i][1], dim), -sizes[i][1]))
            if wanted != real:
                group[:] = [i for i in group if i not in real] + wanted
        order = [i for group in groups for i in group]
        if order != sorted(order):
            node = self._call("permute", node, *order)
        return node, [[sizes[i][0] for i in group] for group in groups]

    def _actual(self, size: Any, parts: list[int]) -> list[int]:
        """Sizes of the parts of a dimension; if it is symbolic, the first size is inferred."""
        if isinstance(compat.as_number(size), int):
            return parts
        rest = prod(parts[1:])
        if int(compat.hint(size)) % rest:
            raise Decline("a dimension of symbolic size cannot be split")
        return [-1, *parts[1:]]

    def _laid_out(self, node: fx.Node, tokens: list[int], layout: Layout) -> fx.Node:
        """An operator's result [*tokens, n?, C] with its dimensions in the order in which the program has them.

        layout says where tokens, streams if there are any, and channels lie in the program's result.
        """
        groups: list[tuple[int, list[int]]] = []  # (stride, dimensions of the node)
        at = 0
        for size, stride in layout.dims[0]:
            taken = []
            while size > 1:
                if at >= len(tokens) or size % tokens[at]:
                    raise Decline("its result orders the tokens in a way that the operators do not produce")
                size //= tokens[at]
                taken.append(at)
                at += 1
            groups.append((stride, taken))
        ones = range(at, len(tokens))
        rank = len(tokens)
        for dim in layout.dims[1:]:
            if len(dim) > 1:
                node = self._call("unflatten", node, rank, [size for size, _ in dim])
            for _, stride in dim or ((1, 0),):
                groups.append((stride, [rank]))
                rank += 1
        order = [i for _, dims in sorted(groups, key=lambda group: -group[0]) for i in dims]
        # What is left of the tokens' dimensions is of size 1, and goes by a reshape.
        return node if order == sorted(order) else self._call("permute", node, *ones, *order)


def _step_of(stride: int, dim: Dim) -> int:
    """Which of the steps of a dimension a finer step of this stride belongs to."""
    return next(k for k, (size, step) in enumerate(dim) if step <= stride < step * size)


def _cut(step: tuple[int, int], bounds: Sequence[int]) -> list[tuple[int, int]]:
    """A step as several, none of which crosses one of the bounds."""
    size, stride = step
    found: list[tuple[int, int]] = []
    for bound in sorted(bounds):
        if stride and stride < bound < stride * size and not bound % stride and not size % (bound // stride):
            found.append((bound // stride, stride))
            size, stride = size // (bound // stride), bound
    return [(size, stride), *found[::-1]]


def _follows(dim: Dim, tokens: Sequence[int]) -> list[bool]:
    """For each dimension of tokens, whether a gate differs along it."""
    rest = list(dim)[::-1]
    found = []
    for size in tokens:
        parts: list[int] = []
        have = 1
        while have < size:
            if not rest:
                raise Decline("a gate is for fewer tokens than there are")
            count, stride = rest.pop()
            if count * have > size:
                inner = count * have // size
                if count % inner:
                    raise Decline("a gate orders the tokens in a way that the operators do not take")
                rest.append((inner, stride))
                count, stride = count // inner, stride * inner
            have *= count
            parts.append(stride)
        if have != size or len({bool(stride) for stride in parts}) > 1:
            raise Decline("a gate is repeated along a part of a dimension of tokens")
        found.append(not parts or bool(parts[0]))
    return found
