"""Stage 4, rewrite: a plan's sites become calls of the registered operators in a copy of the Dynamo graph."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.copies import Copies, is_barrier
from mhc_compile.passes.plan import (
    AggregateSite,
    CombineSite,
    Decline,
    MixSite,
    Plan,
    Rows,
    SinkhornSite,
    Site,
    Vector,
    said,
    surface,
)
from mhc_compile.passes.recognise import Weight
from mhc_compile.passes.recognise.contraction import StreamsView
from mhc_compile.passes.recognise.layout import Dim, Layout, NotALayout, Steps, keeps_order, tiles
from mhc_compile.passes.recognise.projection import Projection
from mhc_compile.passes.record import map_leaves, storage_key
from mhc_compile.passes.shadow import Shadow, Value, tensors_of


def rewrite(shadow: Shadow, plan: Plan) -> fx.Graph:
    """A new graph in which every site of the plan is an operator call; the old one stays as it is.

    Raises Decline if a site cannot be expressed after all; its message names what is missing.
    """
    targets = {node for site in plan.sites for value in _replaced(site) for node in value.nodes}
    copies = Copies(shadow, targets, (node for site in plan.sites for value in site.sources() for node in value.nodes))
    _Rewriter(copies, shadow).run(plan.sites)
    copies.graph.lint()
    return copies.graph


class _Rewriter:
    def __init__(self, copies: Copies, shadow: Shadow) -> None:
        self.graph = copies.graph
        self.copies = copies
        self.shadow = shadow
        self.gates: dict[Value, tuple[fx.Node, bool]] = {}
        self.streams: dict[Value, tuple[StreamsView, fx.Node, list[int]]] = {}
        self.anchor: fx.Node | None = None
        self.operands: list[fx.Node] = []
        self.calls: list[tuple[fx.Node, Site]] = []
        self.examples: dict[Any, Any] = {}

    def run(self, sites: Sequence[Site]) -> None:
        """Sites in program order, so that a later one finds the results of an earlier one in place."""
        for site in sorted(sites, key=lambda s: min(self.shadow.position[self._node(t)] for t in _outputs(s))):
            try:
                self._insert(site)
            except (Decline, TypeError, ValueError, NotALayout) as error:
                # TypeError and ValueError: the operator's own checks; what they say is what a user can act on
                reason = error if isinstance(error, Decline) else Decline(str(error) or "its layout is not supported")
                reason.site = site
                raise reason from None
        self._erase_dead()
        self._sort()

    def _insert(self, site: Site) -> None:
        if isinstance(site, MixSite):
            self._mix(site)
        elif isinstance(site, CombineSite):
            self._combine(site)
        elif isinstance(site, AggregateSite):
            self._aggregate(site)
        else:
            self._sinkhorn(site)

    def _node(self, value: Value) -> fx.Node:
        return min(value.nodes, key=self.shadow.position.__getitem__)

    def _mix(self, site: MixSite) -> None:
        outputs = _outputs(site)
        self.anchor = self.copies[min((self._node(v) for v in outputs), key=self.shadow.position.__getitem__)]
        x, tokens = self._streams(site.x, site.streams)
        phi = self._phi(site)
        scale, bias = self._vectors(site)
        tensors = [x, phi, scale, bias]
        if site.normed.weight is not None:
            tensors.append(self._norm_weight(site.normed.weight, site.streams))
        kwargs = site.normed.rms.as_kwargs()
        if site.op == "head":
            kwargs["pre_eps"] = site.gates.pre_eps
        else:
            kwargs |= site.gates.as_kwargs() | site.sinkhorn.as_kwargs()
        if site.aggregate is not None:
            kwargs |= self._out_dtype(surface(site.aggregate.out), x)
        call = self._operator(site.op, *tensors, **kwargs)
        self.calls.append((call, site))
        first = self._item(call, 0)
        if site.aggregate is not None:
            target = surface(site.aggregate.out)
            self._replace(target, self._laid_out(first, tokens, site.aggregate.out_layout, None))
        elif site.pre is not None:
            self._gate(site.pre.value, first, False)
        if site.post is not None:
            self._gate(site.post.value, self._item(call, 1), False)
        if site.res is not None:
            transposed = getattr(site.res.kind, "transposed", False)
            self._gate(site.res.value, self._item(call, 2), transposed)

    def _gate(self, value: Value, node: fx.Node, transposed: bool) -> None:
        """Use an operator's gate output for the program's gate, wherever that is visible."""
        self.gates[value] = (node, transposed)
        if value.nodes:
            shown = self._call("transpose", node, -1, -2) if transposed else node
            self._replace(value, shown)

    def _combine(self, site: CombineSite) -> None:
        target = surface(site.combine.out)
        self.anchor = self.copies[self._node(target)]
        c = site.combine
        x, dims = self._streams(c.x, c.streams)
        tokens, n = _example(x).shape[:-2], c.streams.n
        f = self._shaped(self._arranged(c.outer.f, c.outer.f_layout), (*tokens, c.streams.channels))
        post = self._gate_operand(c.outer.post, c.outer.post_layout, (*tokens, n))
        if c.outer.const != 1.0:
            post = self._call("mul", self._call("float", post), c.outer.const)
        res = None
        if c.mix is not None:
            res = self._gate_operand(c.mix.res, c.mix.res_layout, (*tokens, n, n))
            if c.mix.const != 1.0:
                res = self._call("mul", self._call("float", res), c.mix.const)
        bias = None
        if c.layer_bias is not None:
            bias = self._shaped(self._visible(c.layer_bias), (c.streams.channels,))
        kwargs = self._out_dtype(target, x)
        new = self._operator(site.op, f, bias, post, x, res, **kwargs)
        self.calls.append((new, site))
        written = c.outer.out_view
        if target.dtype == c.out.dtype or target is not c.out:
            self.streams[target] = (written, new, dims)
        self._replace(target, self._laid_out(new, dims, Layout((written.tokens, written.channel)), written.stream))

    def _aggregate(self, site: AggregateSite) -> None:
        a, target = site.aggregate, surface(site.aggregate.out)
        self.anchor = self.copies[self._node(target)]
        x, dims = self._streams(a.x, a.streams)
        gate = self._gate_operand(a.gate, a.gate_layout, (*_example(x).shape[:-2], a.streams.n))
        new = self._operator(site.op, x, gate, **self._out_dtype(target, x))
        self.calls.append((new, site))
        self._replace(target, self._laid_out(new, dims, a.out_layout, None))

    def _sinkhorn(self, site: SinkhornSite) -> None:
        m, target = site.matrices, site.matrices.out
        self.anchor = self.copies[self._node(surface(target))]
        logits = self._visible(m.logits)
        logits = self._shaped(logits, m.logits.meta.shape)
        if m.transposed:
            logits = self._call("transpose", logits, -1, -2)
        form = {name.removeprefix("sinkhorn_"): value for name, value in m.form.as_kwargs().items()}
        new = self._operator(site.op, logits, **form)
        self.calls.append((new, site))
        self._gate(target, new, m.transposed)
        if not target.nodes:
            self._replace(surface(target), self._call("transpose", new, -1, -2) if m.transposed else new)

    def _gate_operand(self, value: Value, layout: Layout, shape: Sequence[Any]) -> fx.Node:
        """A gate as [*tokens, n] or [*tokens, n, n], which `layout` says how to read from the value."""
        found = self.gates.get(value)
        if found is not None:
            node, flipped = found
            swapped = Layout((layout.dims[0], *layout.dims[1:][::-1]))
            straight = layout.is_identity()
            if straight or swapped.is_identity():
                node = self._shaped(node, shape)
                return self._call("transpose", node, -1, -2) if len(shape) > 2 and straight == flipped else node
            if not value.nodes:
                raise Decline("a gate is read in an order that the operators do not make")
        return self._shaped(self._arranged(value, layout), shape)

    def _streams(self, value: Value, streams: StreamsView) -> tuple[fx.Node, list[int]]:
        """The value as [*tokens, n, C], and the sizes of its token dimensions."""
        known = self.streams.get(self._surfaced(value))
        if known is not None and known[0] == streams:
            self.operands = [known[1]]
            return known[1], known[2]
        held, node = self._held(value)
        self.operands = [node]
        node, groups = self._split(held, node, (streams.tokens, (streams.stream,), streams.channel))
        lead = len(groups[0])
        for at, group in ((lead, groups[1]), (lead + 1, groups[2])):
            if len(group) > 1:
                node = self._call("flatten", node, at, at + len(group) - 1)
            elif not group:
                node = self._call("unsqueeze", node, at)
        inner = zip(_example(node).shape[-2:], (streams.n, streams.channels), strict=True)
        if not all(compat.same_size(have, size) for have, size in inner):
            raise Decline("the number of streams or of channels is not a constant of the program")
        return node, groups[0]

    def _arranged(self, value: Value, layout: Layout) -> fx.Node:
        """The elements of a value in the order of a layout that reaches each of them once; in any shape."""
        held, node = self._held(value)
        order = [step for dim in layout.dims for step in dim]
        if order == sorted(order, key=lambda step: -step[1]):
            return node
        return self._split(held, node, tuple(layout.dims))[0]

    def _split(self, held: Value, node: fx.Node, dims: Sequence[Dim]) -> tuple[fx.Node, list[list[int]]]:
        """A view of one dimension for each step, ordered as in `dims`, and the sizes of these by dimension.

        A step that crosses dimensions of the tensor becomes several; dimensions of size 1 stay with the first group.
        """
        cuts = {stride for dim in dims for size, stride in dim if size > 1}
        sizes: list[tuple[int, int]] = []  # (size, stride) of each dimension after splitting
        stride = prod(held.shape)
        for d, have in enumerate(held.shape):
            stride //= have
            inner = sorted((cut // stride for cut in cuts if stride < cut < stride * have), reverse=True)
            bounds = [have, *inner, 1]
            if any(a % b for a, b in itertools.pairwise(bounds)):
                raise Decline("the streams are not whole dimensions of their tensor")
            parts = [a // b for a, b in itertools.pairwise(bounds)]
            if len(parts) > 1:
                node = self._call("unflatten", node, len(sizes), self._actual(held.meta.shape[d], parts))
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
        """Sizes of the parts of a dimension; of a symbolic one the first is left open."""
        if isinstance(size, int):
            return parts
        rest = prod(parts[1:])
        if int(compat.hint(size)) % rest:
            raise Decline("a dimension of symbolic size cannot be split")
        return [-1, *parts[1:]]

    def _laid_out(self, node: fx.Node, tokens: list[int], layout: Layout, stream: tuple[int, int] | None) -> fx.Node:
        """An operator's result [*tokens, n?, C] with its dimensions in the order in which the program has them.

        layout says where [tokens, channels] lie in the program's result, stream where the streams do.
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
        ones = [i for i in range(len(tokens)) if i >= at or tokens[i] == 1]
        ones = [i for i in ones if not any(i in taken for _, taken in groups)]
        rank = len(tokens)
        if stream is not None:
            groups.append((stream[1] if stream[0] > 1 else 0, [rank]))
            rank += 1
        channel = layout.dims[1]
        if len(channel) > 1:
            node = self._call("unflatten", node, -1, [size for size, _ in channel])
        for i, (_, stride) in enumerate(channel or ((1, 0),)):
            groups.append((stride, [rank + i]))
        order = ones + [i for _, dims in sorted(groups, key=lambda group: -group[0]) for i in dims]
        return node if order == sorted(order) else self._call("permute", node, *order)

    def _phi(self, site: MixSite) -> fx.Node:
        """phi [K, n*C] with its rows in the operator's order."""
        projections = {group.projection.out: group.projection for group in site.groups}
        whole = {out: self._phi_of(projection, site.streams) for out, projection in projections.items()}
        rows = [row for group in site.groups for row in group.rows]
        if len(whole) == 1 and rows == list(range(site.groups[0].projection.rows)):
            return next(iter(whole.values()))
        parts = [self._take(whole[g.projection.out], g.rows, g.projection.rows) for g in site.groups]
        return self._call(torch.cat, parts, 0)

    def _take(self, node: fx.Node, indices: Sequence[int], count: int) -> fx.Node:
        """Elements of the first dimension, of `count`, in an order that views express."""
        if list(indices) == list(range(count)):
            return node
        offset, steps = _steps(indices)
        real = sorted((step for step in steps if step[1]), key=lambda step: -step[1])
        length = prod(size for size, _ in real)
        if not tiles(real, length):
            raise Decline("the rows of the projection, or a scale or bias, are in an order that slices do not express")
        if length < count:
            node = self._call("narrow", node, 0, offset, length)
        if steps == real and len(real) == 1:
            return node
        rest = range(len(real), len(real) + _example(node).dim() - 1)
        if len(real) > 1:
            node = self._call("unflatten", node, 0, [size for size, _ in real])
            kept = [step for step in steps if step[1]]
            if kept != real:
                node = self._call("permute", node, *(real.index(step) for step in kept), *rest)
        elif not real:
            node = self._call("squeeze", node, 0)
        repeated = [d for d, (_, stride) in enumerate(steps) if not stride]
        for d in repeated:
            node = self._call("unsqueeze", node, d)
        if repeated:
            node = self._call("expand", node, *(size for size, _ in steps), *_example(node).shape[len(steps) :])
        return node if len(steps) == 1 else self._call("flatten", node, 0, len(steps) - 1)

    def _phi_of(self, projection: Projection, streams: StreamsView) -> fx.Node:
        parts = []
        for part in projection.parts:
            steps = Steps(part.inner)
            stream = (streams.stream,) if streams.n > 1 else ()
            layout = Layout((part.row, steps.translate(stream), steps.translate(streams.channel)))
            parts.append(self._shaped(self._arranged(part.phi, layout), (part.rows, projection.width)))
        return parts[0] if len(parts) == 1 else self._call(torch.cat, parts, 0)

    def _norm_weight(self, weight: Weight, streams: StreamsView) -> fx.Node:
        steps = Steps(weight.axes)
        stream = (streams.stream,) if streams.n > 1 else ()
        layout = Layout((steps.translate(stream), steps.translate(streams.channel)))
        return self._shaped(self._arranged(weight.value, layout), (streams.n * streams.channels,))

    def _vectors(self, site: MixSite) -> tuple[fx.Node, fx.Node]:
        """scale, one number a group where the program has it so, and bias [K]."""
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
            return self._constant(empty, size)
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
            return self._constant(const, size)
        if len(factors) == 1 and const == 1.0:
            return factors[0]
        total, *others = (self._call("float", factor) for factor in factors)
        for other in others:
            total = self._call("mul", total, other)
        return total if const == 1.0 else self._call("mul", total, const)

    def _vector(self, vector: Vector, size: int) -> fx.Node:
        assert vector.base is not None
        node = self._shaped(self._visible(vector.base), (vector.base.numel,))
        node = self._take(node, vector.indices, vector.base.numel)
        return self._call("reciprocal", self._call("float", node)) if vector.inverse else node

    def _constant(self, number: float, size: int) -> fx.Node:
        assert self.anchor is not None
        device = _example(self.anchor).device
        return self._call(torch.full, (size,), number, dtype=torch.float32, device=device)

    def _out_dtype(self, target: Value, x: fx.Node) -> dict[str, torch.dtype]:
        return {} if target.dtype == _example(x).dtype else {"out_dtype": target.dtype}

    def _visible(self, value: Value) -> fx.Node:
        """A node that holds the value's elements in order, possibly in another float type or shape."""
        return self._held(value)[1]

    def _held(self, value: Value) -> tuple[Value, fx.Node]:
        """As `_visible`, with the value that the node shows."""
        pending = [self._surfaced(value), value]
        while pending:
            current = pending.pop(0)
            if current.nodes:
                return current, self.copies.current(self._node(current))
            pending += [op.out for op in current.users if keeps_order(op)]
        raise Decline("an operand is not a value of its own in the program")

    def _surfaced(self, value: Value) -> Value:
        try:
            return surface(value)
        except Decline:
            return value

    def _shaped(self, node: fx.Node, shape: Sequence[Any]) -> fx.Node:
        have = _example(node).shape
        if len(have) == len(shape) and all(compat.same_size(a, b) for a, b in zip(have, shape, strict=True)):
            return node
        symbolic = [d for d, size in enumerate(shape) if not isinstance(size, int)]
        # One size may be left for reshape to find; so products of symbolic sizes need no expression.
        sizes = [
            size if isinstance(size, int) else -1 if d == symbolic[-1] else self._size(size)
            for d, size in enumerate(shape)
        ]
        return self._call("reshape", node, *sizes)

    def _size(self, size: Any) -> fx.Node:
        """A node for a symbolic size: some dimension of an input of the graph or of the site that has it."""
        node: fx.Node
        for node in (*self.graph.find_nodes(op="placeholder"), *self.operands):
            example = compat.example(node)
            if isinstance(example, torch.SymInt) and compat.same_size(example, size):
                return node
            for d, have in enumerate(example.shape if isinstance(example, torch.Tensor) else ()):
                if not isinstance(have, int) and compat.same_size(have, size):
                    return self._call("size", node, d)
        raise Decline("a symbolic size is not the size of any input")

    def _item(self, call: fx.Node, index: int) -> fx.Node:
        return self._call(operator.getitem, call, index)

    def _operator(self, name: str, first: fx.Node, *others: fx.Node | None, **kwargs: Any) -> fx.Node:
        """Call one of our operators. Checking its arguments takes long, so it is done once for all calls alike."""
        target = getattr(torch.ops.mhc, name).default
        args = (first, *others)
        key = (name, str(kwargs), tuple(_kind(_example(arg)) if arg is not None else None for arg in args))
        known = self.examples.get(key)
        if known is None:
            node = self._call(target, *args, **kwargs)
            self.examples[key] = _example(node)
            return node
        with compat.fake_mode_of(_example(first)):
            made = map_leaves(_another, known)
        return self._call(target, *args, **kwargs, example=made)

    def _call(self, target: Callable[..., Any] | str, *args: Any, example: Any = None, **kwargs: Any) -> fx.Node:
        """Insert a call in front of the anchor, with the example value that later stages rely on."""
        assert self.anchor is not None
        with self.graph.inserting_before(self.anchor):
            if isinstance(target, str):
                node = self.graph.call_method(target, args, kwargs)
            else:
                node = self.graph.call_function(target, args, kwargs)
        if example is None:
            values, options = fx.node.map_arg((args, kwargs), _example)
            with torch.enable_grad(), compat.fake_mode_of(_example(self.anchor)):
                example = (
                    getattr(values[0], target)(*values[1:], **options)
                    if isinstance(target, str)
                    else target(*values, **options)
                )
        node.meta[compat.example_key(self.anchor)] = example
        self.copies.epochs[node] = self.copies.epochs[self.anchor]
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in self.anchor.meta:
                node.meta[key] = self.anchor.meta[key]
        return node

    def _replace(self, value: Value, new: fx.Node) -> None:
        """Put `new` in the place of every node that holds the value, with that value's type, shape and strides."""
        for old in value.nodes:
            node = self.copies[old]
            example = _example(node)
            fitted = new
            if _example(fitted).dtype != example.dtype:
                fitted = self._call("to", fitted, example.dtype)
            fitted = self._shaped(fitted, example.shape)
            if _example(fitted).stride() != example.stride():
                fitted = self._restrided(fitted, example, node)
            node.replace_all_uses_with(fitted)
            self.copies.replaced[node] = fitted

    def _restrided(self, node: fx.Node, like: torch.Tensor, old: fx.Node) -> fx.Node:
        """A copy with the strides of `like`, a tensor whose dimensions are dense in some order."""
        order = sorted(range(like.dim()), key=lambda d: (-int(compat.hint(like.stride(d))), d))
        back = [order.index(d) for d in range(like.dim())]
        if order != back or order != sorted(order):
            node = self._call("contiguous", self._call("permute", node, *order))
            node = self._call("permute", node, *back)
        else:
            node = self._call("contiguous", node)
        if _example(node).stride() == like.stride():
            return node
        if not like.is_contiguous() and self._leaves_the_graph(old):
            raise Decline("its result has strides that the operators do not produce")
        return self._call("contiguous", node)  # which any view of the strided tensor is a view of, too

    def _leaves_the_graph(self, old: fx.Node) -> bool:
        """Whether a tensor, or a view of it, is returned, so that its strides can be seen."""
        keys = {storage_key(tensor) for tensor in tensors_of(old)}
        pending, seen = [old], {old}
        while pending:
            for user in pending.pop().users:
                if user.op == "output":
                    return True
                if user not in seen and keys & {storage_key(tensor) for tensor in tensors_of(user)}:
                    seen.add(user)
                    pending.append(user)
        return False

    def _sort(self) -> None:
        """Order nodes after what they use, otherwise as they were.

        A node that would have to move past one that writes, sets global state or draws random numbers might compute
        something else there: then the site that pulls it is declined, as is one that depends on its own result.
        """
        done: set[fx.Node] = set()
        order: list[fx.Node] = []
        for root in self.graph.nodes:
            stack = [(root, iter(root.all_input_nodes))]
            path = {root}
            while stack:
                node, sources = stack[-1]
                for source in sources:
                    if source in path:
                        self._blame(source, "its operands depend on its own result")
                    if source not in done:
                        stack.append((source, iter(source.all_input_nodes)))
                        path.add(source)
                        break
                else:
                    stack.pop()
                    path.discard(node)
                    if node not in done:
                        done.add(node)
                        order.append(node)
        epoch = 0
        for node in order:
            epoch += is_barrier(node)
            if self.copies.epochs[node] != epoch:
                self._blame(
                    node,
                    f"an operand is computed at {said(node)} behind something that writes in place, sets global state "
                    "or draws random numbers",
                )
        previous = self.graph._root
        for node in order:
            previous.append(node)
            previous = node

    def _blame(self, node: fx.Node, reason: str) -> None:
        """Decline the first site whose operator needs `node`."""
        decline = Decline(reason)
        if self.calls:
            decline.site = self.calls[0][1]
        for call, site in self.calls:
            pending, seen = [call], {call}
            while pending:
                current = pending.pop()
                if current is node:
                    decline.site = site
                    raise decline
                fresh = [n for n in current.all_input_nodes if n not in seen]
                seen.update(fresh)
                pending += fresh
        raise decline

    def _erase_dead(self) -> None:
        """Remove what the replaced nodes alone needed; nothing that could have an effect of its own."""
        pending = [*self.copies.replaced, *self.copies.on_demand]
        while pending:
            node = pending.pop()
            if node.users or node.op not in ("call_function", "call_method") or node._erased:
                continue
            if is_barrier(node):
                continue
            sources = node.all_input_nodes
            self.graph.erase_node(node)
            pending.extend(sources)


def _steps(indices: Sequence[int]) -> tuple[int, list[tuple[int, int]]]:
    """A list of indices as an offset and nested steps (size, stride), major to minor."""
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
            raise Decline("the rows of the projection, or a scale or bias, are in an order that slices do not express")
        found.append((size, stride))
        rest = rest[::size]
    return rest[0], found[::-1]


def _step_of(stride: int, dim: Dim) -> int:
    """Which of the steps of a dimension a finer step of this stride belongs to."""
    return next(k for k, (size, step) in enumerate(dim) if step <= stride < step * size)


def _replaced(site: Site) -> Iterator[Value]:
    """All values in whose place a site's results go."""
    if isinstance(site, MixSite):
        if site.aggregate is not None:
            yield surface(site.aggregate.out)
        for gate in (site.pre if site.aggregate is None else None, site.post, site.res):
            if gate is not None:
                yield gate.value
    elif isinstance(site, SinkhornSite) and site.matrices.out.nodes:
        yield site.matrices.out
    else:
        yield surface(next(site.targets()))


def _outputs(site: Site) -> list[Value]:
    """The visible values that tell where a site is."""
    if isinstance(site, (CombineSite, AggregateSite, SinkhornSite)):
        return [surface(next(site.targets()))]
    found = [surface(site.aggregate.out)] if site.aggregate is not None else []
    found += [v for v in site.targets() if v.nodes and (site.aggregate is None or v is not site.aggregate.out)]
    if not found:
        raise Decline("none of its gates is a value of its own in the program")
    return found


def _kind(tensor: torch.Tensor) -> str:
    about = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, type(tensor), tensor.requires_grad)
    return str(about)


def _another(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this one that shares no memory with it."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(tensor.requires_grad)


def _example(node: fx.Node) -> Any:
    return compat.example(node)
