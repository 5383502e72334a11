"""phi, the norm's weight, scale and bias as the operators take them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.plan import Decline, MixSite, Rows, Vector
from mhc_compile.passes.recognise.contraction import StreamsView
from mhc_compile.passes.recognise.layout import Layout, Steps, tiles
from mhc_compile.passes.recognise.mixtures import Weight
from mhc_compile.passes.recognise.projection import Projection
from mhc_compile.passes.rewrite.views import Views
from mhc_compile.passes.shadow import Value


class Vectors(Views):
    """Parameters put together from what the program has, in the order of the operators' rows."""

    def _phi(self, site: MixSite, more: range) -> fx.Node:
        """phi [K, n*C] with its rows in the operator's order; more: those rows of the site's logits come after them."""
        groups = [(group.projection, list(group.rows)) for group in site.groups]
        first = 0
        for product in site.products:
            rows, first = range(first, first + product.projection.rows), first + product.projection.rows
            taken = [rows.index(row) for row in more if row in rows]
            groups += [(product.projection, taken)] if taken else []
        joined: list[tuple[Projection, list[int]]] = []
        for projection, taken in groups:
            before, rows_before = joined[-1] if joined else (projection, [])
            if before.out is projection.out and len(_runs(rows_before + taken)) == 1:
                joined[-1:] = [(projection, rows_before + taken)]
            else:
                joined.append((projection, taken))
        whole = {projection.out: projection for projection, _ in joined}
        made = {out: self._phi_of(projection, site.streams) for out, projection in whole.items()}
        parts = [self._take(made[projection.out], taken, projection.rows) for projection, taken in joined]
        return parts[0] if len(parts) == 1 else self._call(torch.cat, parts, 0)

    def _take(self, node: fx.Node, indices: Sequence[int], count: int) -> fx.Node:
        """Elements of the first dimension, of `count`, by views where these express the order."""
        if list(indices) == list(range(count)):
            return node
        found = _steps(indices)
        offset, steps = found or (0, [])
        real = sorted((step for step in steps if step[1]), key=lambda step: -step[1])
        length = prod(size for size, _ in real)
        if found is None or not tiles(real, length):
            runs = [self._call("narrow", node, 0, start, size) for start, size in _runs(indices)]
            return self._call(torch.cat, runs, 0)
        if length < count:
            if offset + length > compat.hint(compat.example(node).shape[0]):
                raise Decline("a scale or bias of symbolic size is read from its end")
            node = self._call("narrow", node, 0, offset, length)
        rest = range(len(real), len(real) + compat.example(node).dim() - 1)
        if len(real) > 1:
            node = self._call("unflatten", node, 0, [size for size, _ in real])
            kept = [step for step in steps if step[1]]
            if kept != real:
                node = self._call("permute", node, *(real.index(step) for step in kept), *rest)
        elif steps and not real:
            node = self._call("squeeze", node, 0)
        repeated = [d for d, (_, stride) in enumerate(steps) if not stride]
        for d in repeated:
            node = self._call("unsqueeze", node, d)
        if repeated:
            node = self._call("expand", node, *(size for size, _ in steps), *compat.example(node).shape[len(steps) :])
        return node if len(steps) < 2 else self._call("flatten", node, 0, len(steps) - 1)

    def _phi_of(self, projection: Projection, streams: StreamsView) -> fx.Node:
        parts = []
        for part in projection.parts:
            steps = Steps(part.inner)
            stream = (streams.stream,) if streams.n > 1 else ()
            layout = Layout((part.row, steps.translate(stream), steps.translate(streams.channel)))
            parts.append(self._shaped(self._arranged(part.phi, layout), (part.rows, projection.width)))
        return parts[0] if len(parts) == 1 else self._call(torch.cat, parts, 0)

    def _norm_weight(self, weight: Weight, streams: StreamsView) -> fx.Node:
        """The weight with one number for each element of a token; numbers for channels or streams are repeated."""
        n, channels = streams.n, streams.channels
        steps = Steps(weight.axes)
        stream = (streams.stream,) if n > 1 else ()
        dims = (steps.translate(stream), steps.translate(streams.channel))
        if weight.value.numel == n * channels:
            return self._shaped(self._arranged(weight.value, Layout(dims)), (n * channels,))
        node = self._spread(weight.value, Layout((dims[0], (), dims[1])), (n,), (n, 1, channels))
        return self._shaped(node, (n * channels,))

    def _vectors(self, site: MixSite) -> tuple[fx.Node, fx.Node]:
        """scale, with one number for each group if the program has it so, and bias [K]."""
        sizes = [len(group.rows) for group in site.groups]
        scale = self._scalars(site.groups) or self._concatenated([[g.scale] for g in site.groups], sizes, 1.0)
        return scale, self._concatenated([list(g.bias) for g in site.groups], sizes, 0.0)

    def _scalars(self, groups: Sequence[Rows]) -> fx.Node | None:
        vectors = [g.scale[0] for g in groups]
        base = vectors[0].base
        one_each = all(len(g.scale) == 1 and len(set(g.scale[0].indices)) == 1 for g in groups)
        if base is None or not one_each or any(v.base is not base or v.const != 1.0 or v.inverse for v in vectors):
            return None
        if [v.indices[0] for v in vectors] != list(range(base.numel)):
            return None
        return self._shaped(self._visible(base), (base.numel,))

    def _concatenated(self, groups: list[list[tuple[Vector, ...]]], sizes: list[int], empty: float) -> fx.Node:
        flat = [vector for terms in groups for term in terms for vector in term]
        single = all(len(terms) == 1 and len(terms[0]) == 1 for terms in groups)
        base = flat[0].base if flat else None
        if single and base is not None and all(v.base is base and v.const == 1.0 and not v.inverse for v in flat):
            indices = [i for v in flat for i in v.indices]
            if indices == list(range(base.numel)):
                return self._shaped(self._visible(base), (base.numel,))
        parts = [self._sum(terms, size, empty) for terms, size in zip(groups, sizes, strict=True)]
        return parts[0] if len(parts) == 1 else self._call(torch.cat, parts, 0)

    def _sum(self, terms: list[tuple[Vector, ...]], size: int, empty: float) -> fx.Node:
        products = [self._product(term, size) for term in terms]
        if not products:
            return self._filled(empty, size)
        if len(products) == 1:
            return products[0]
        total, *others = (self._call("float", product) for product in products)
        for other in others:
            total = self._call("add", total, other)
        return total

    def _product(self, term: tuple[Vector, ...], size: int) -> fx.Node:
        """A product in float32: the program may have multiplied bfloat16 parameters into float32 one by one."""
        const = prod(vector.const for vector in term)
        factors = [self._vector(vector, size) for vector in term if vector.base is not None]
        if not factors:
            return self._filled(const, size)
        if len(factors) == 1 and const == 1.0:
            return factors[0]
        total, *others = (self._call("float", factor) for factor in factors)
        for other in others:
            total = self._call("mul", total, other)
        return total if const == 1.0 else self._call("mul", total, const)

    def _vector(self, vector: Vector, size: int) -> fx.Node:
        assert vector.base is not None
        node = self._take(self._flat(vector.base), vector.indices, vector.base.numel)
        return self._call("reciprocal", self._call("float", node)) if vector.inverse else node

    def _flat(self, value: Value) -> fx.Node:
        """All elements of a parameter. Their number may be unknown, even if the rows that are used are known."""
        node = self._visible(value)
        example = compat.example(node)
        if all(isinstance(size, int) for size in example.shape):
            return self._shaped(node, (value.numel,))
        return node if example.dim() == 1 else self._call("reshape", node, -1)


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """A list of indices as runs (start, size) of consecutive ones."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and index == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs


def _steps(indices: Sequence[int]) -> tuple[int, list[tuple[int, int]]] | None:
    """A list of indices as an offset and nested steps (size, stride), major to minor; None where there are none."""
    found: list[tuple[int, int]] = []
    rest = list(indices)
    while len(rest) > 1:
        stride = rest[1] - rest[0]
        size = 2
        while size < len(rest) and rest[size] - rest[size - 1] == stride:
            size += 1
        even = all(
            rest[i : i + size] == list(range(rest[i], rest[i] + size * stride, stride) if stride else [rest[i]] * size)
            for i in range(0, len(rest), size)
        )
        if len(rest) % size or stride < 0 or not even:
            return None
        found.append((size, stride))
        rest = rest[::size]
    return rest[0], found[::-1]
