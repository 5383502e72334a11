"""Stage 4, rewrite: a plan's sites become calls of the registered operators in a copy of the Dynamo graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, cast

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.forms import Rms
from mhc_compile.passes.plan import (
    TURNS,
    AggregateSite,
    CombineSite,
    Decline,
    MixingSite,
    MixSite,
    Plan,
    Product,
    ProjectionSite,
    SinkhornSite,
    Site,
    outputs,
    product_shown,
    surface,
)
from mhc_compile.passes.recognise.combine import Mix
from mhc_compile.passes.recognise.contraction import StreamsView
from mhc_compile.passes.recognise.layout import Dim, Layout, NotALayout, tiles
from mhc_compile.passes.recognise.outer import Outer
from mhc_compile.passes.rewrite.copies import Copies
from mhc_compile.passes.rewrite.order import erase_dead, erase_unused, sort
from mhc_compile.passes.rewrite.unread_rows import rows_read
from mhc_compile.passes.rewrite.unused_parts import take_one_by_one
from mhc_compile.passes.rewrite.vectors import Vectors
from mhc_compile.passes.shadow import Shadow, Value


def rewrite(shadow: Shadow, plan: Plan) -> fx.Graph:
    """A new graph in which every site of the plan is an operator call; the old one stays as it is.

    Raises SitesFailed if sites cannot be expressed after all, or something goes wrong at them.
    """
    return rewritten(shadow, plan).graph


def rewritten(shadow: Shadow, plan: Plan) -> Copies:
    """`rewrite`, with what stands for each node of the old graph."""
    targets = {node for site in plan.sites for value in replaced(site) for node in value.nodes}
    copies = Copies(shadow, targets, (node for site in plan.sites for value in site.sources() for node in value.nodes))
    rewriter = Rewriter(copies, shadow)
    rewriter.run(plan.sites)
    read = {id(site) for _, site in rewriter.calls}
    plan.sites[:] = [site for site in plan.sites if id(site) in read]  # what nothing reads is in no graph
    copies.graph.lint()
    return copies


class SitesFailed(Exception):
    """What was raised at sites of a plan: a Decline, whose message says what is missing, or any other error."""

    def __init__(self, failures: dict[int, Exception]) -> None:
        super().__init__(f"{len(failures)} sites")
        # By the identity of a site.
        self.failures = failures


class Rewriter(Vectors):
    """Puts the sites of a plan into a copy of the graph, as operator calls."""

    def __init__(self, copies: Copies, shadow: Shadow) -> None:
        super().__init__(copies, shadow)
        self.gates: dict[Value, tuple[fx.Node, bool]] = {}
        self.calls: list[tuple[fx.Node, Site]] = []
        # The logits that go out of an operator, with the site that says what they are of.
        self.made_logits: dict[fx.Node, tuple[ProjectionSite, fx.Node]] = {}

    def run(self, sites: Sequence[Site]) -> None:
        """Sites in program order, so that a later one finds the results of an earlier one in place.

        If one site fails, the others are tried as well: identical layers fail in the same way, and all are reported.
        """
        failures: dict[int, Exception] = {}
        for site in sorted(sites, key=lambda s: min(self.shadow.position[self._node(t)] for t in outputs(s))):
            self.site = site
            try:
                self._insert(site)
            except NotALayout:
                failures[id(site)] = Decline("its layout is not supported")
            except Exception as error:
                failures[id(site)] = error
        if failures:
            raise SitesFailed(failures)
        erase_dead(self.copies)
        self.calls = [(call, site) for call, site in self.calls if not call._erased]
        for at, (call, site) in enumerate(self.calls):
            if call in self.made_logits and isinstance(site, (MixSite, ProjectionSite)):
                self.calls[at] = (self._with_rows_read(call, site), site)
        take_one_by_one(self.copies)
        sort(self.copies, self.calls)
        failures = self.aliases.parted(self.copies, self.made)
        if failures:
            raise SitesFailed(failures)

    def _insert(self, site: Site) -> None:
        if isinstance(site, MixSite):
            self._mix(site)
        elif isinstance(site, CombineSite):
            self._combine(site)
        elif isinstance(site, AggregateSite):
            self._aggregate(site)
        elif isinstance(site, MixingSite):
            self._mixing(site)
        elif isinstance(site, ProjectionSite):
            self._projection(site)
        else:
            self._sinkhorn(site)

    def _mix(self, site: MixSite) -> None:
        first_node = min((self._node(v) for v in outputs(site)), key=self.shadow.position.__getitem__)
        self.anchor = self.copies[first_node]
        x, tokens = self._streams(site.x, site.streams)
        rows = range(0 if site.logits is None else site.logits.rows)
        phi = self._phi(site, _beyond_gates(site, rows)[0])
        scale, bias = self._vectors(site)
        tensors: list[fx.Node | None] = [phi, scale, bias]
        if site.normed.weight is not None:
            tensors.append(self._norm_weight(site.normed.weight, site.streams))
        kwargs = site.normed.rms.as_kwargs()
        if site.norm is not None and site.norm.weight is not None:
            tensors += [None] * (4 - len(tensors))
            tensors.append(self._shaped(self._visible(site.norm.weight), (site.streams.channels,)))
        if site.op == "head":
            kwargs["pre_eps"] = site.gates.pre_eps
        else:
            kwargs |= site.gates.as_kwargs() | site.sinkhorn.as_kwargs()
        target = None if site.layer_input is None else surface(site.layer_input)
        if target is not None:
            kwargs |= self._out_dtype(target, x)
        if site.norm is not None:
            kwargs["input_norm_eps"] = site.norm.eps
        call = self._operator(site.op, x, *tensors, **kwargs)
        self.calls.append((call, site))
        first = self._item(call, 0)
        if site.aggregate is not None and target is not None:
            self._replace(target, self._laid_out(first, tokens, site.aggregate.out_layout))
        elif site.pre is not None:
            self._gate(site.pre.value, first, False)
        if site.post is not None:
            self._gate(site.post.value, self._item(call, 1), False)
        if site.res is not None:
            transposed = getattr(site.res.kind, "transposed", False)
            self._gate(site.res.value, self._item(call, 2), transposed)
        if site.logits is not None:
            self._logits(site.logits, self._logits_of_mix(call, site, rows, rows), self._item(call, 4))

    def _gate(self, value: Value, node: fx.Node, transposed: bool) -> None:
        """Use an operator's gate output in place of the program's gate, if the graph shows that gate."""
        if not any(map(self.aliases.is_written, value.nodes)):
            self.gates[value] = (node, transposed)
        if value.nodes:
            shown = self._call("transpose", node, -1, -2) if transposed else node
            self._replace(value, shown)

    def _combine(self, site: CombineSite) -> None:
        target = surface(site.combine.out)
        self.anchor = self.copies[self._node(target)]
        c = site.combine
        x, dims = self._streams(c.x, c.streams)
        tokens, n = compat.example(x).shape[:-2], c.streams.n
        f = self._shaped(self._arranged(c.outer.f, c.outer.f_layout), (*tokens, c.streams.channels))
        post = self._times(self._post(c.outer, dims, (*tokens, n)), c.outer.const)
        res = None if c.is_plain else self._matrix([self._mixed(mix, dims, tokens, n) for mix in c.mixes])
        bias = None
        if c.layer_bias is not None:
            bias = self._shaped(self._visible(c.layer_bias), (c.streams.channels,))
        kwargs = self._out_dtype(target, x)
        new = self._operator(site.op, f, bias, post, x, res, **kwargs)
        self.calls.append((new, site))
        written = c.out_view
        if (target.dtype == c.out.dtype or target is not c.out) and not self.aliases.is_written(self._node(target)):
            self.streams[target] = (written, new, dims)
        self._replace(target, self._laid_out(new, dims, written.layout))

    def _post(self, outer: Outer, dims: list[int], shape: Sequence[Any]) -> fx.Node:
        if outer.post is not None:
            return self._gates(outer.post, outer.post_layout, outer.columns, dims, shape)
        return self._call("expand", self._filled(1.0, shape[-1]), *map(self._size, shape))

    def _mixed(self, mix: Mix, dims: list[int], tokens: Sequence[Any], n: int) -> fx.Node:
        """The matrices [*tokens, n, n] that streams are multiplied by."""
        if mix.res is None:
            made = self._filled(1.0, n, n) if mix.is_matrix else self._call(torch.diag_embed, self._filled(1.0, n))
            matrix = self._times(made, mix.const)
            return self._call("expand", matrix, *map(self._size, tokens), n, n)
        if mix.is_matrix:
            return self._times(self._gate_operand(mix.res, mix.res_layout, dims, (*tokens, n, n)), mix.const)
        diagonal = self._times(self._gate_operand(mix.res, mix.res_layout, dims, (*tokens, n)), mix.const)
        return self._call(torch.diag_embed, diagonal)

    def _matrix(self, parts: list[fx.Node]) -> fx.Node:
        """The sum of matrices, in float32."""
        total, *others = parts if len(parts) == 1 else [self._call("float", part) for part in parts]
        for other in others:
            total = self._call("add", total, other)
        return total

    def _times(self, node: fx.Node, const: float) -> fx.Node:
        return node if const == 1.0 else self._call("mul", self._call("float", node), const)

    def _aggregate(self, site: AggregateSite) -> None:
        a, target = site.aggregate, surface(site.layer_input)
        self.anchor = self.copies[self._node(target)]
        x, dims = self._streams(a.x, a.streams)
        gate = self._gates(a.gate, a.gate_layout, a.rows, dims, (*compat.example(x).shape[:-2], a.streams.n))
        tensors = [self._times(gate, a.const)]
        kwargs: dict[str, Any] = self._out_dtype(target, x)
        if site.norm is not None:
            kwargs["input_norm_eps"] = site.norm.eps
            if site.norm.weight is not None:
                tensors.append(self._shaped(self._visible(site.norm.weight), (a.streams.channels,)))
        new = self._operator(site.op, x, *tensors, **kwargs)
        self.calls.append((new, site))
        self._replace(target, self._laid_out(new, dims, a.out_layout))

    def _mixing(self, site: MixingSite) -> None:
        m, target = site.mixing, surface(site.mixing.out)
        self.anchor = self.copies[self._node(target)]
        x, dims = self._rows(m.x, m.x_layout)
        shape = (*compat.example(x).shape[:-2], *m.sizes[:2])
        gate = self._times(self._gate_operand(m.gate, m.gate_layout, dims, shape), m.const)
        new = self._operator(site.op, x, gate, **self._out_dtype(target, x))
        self.calls.append((new, site))
        self._replace(target, self._laid_out(new, dims, m.out_layout))

    def _projection(self, site: ProjectionSite) -> None:
        """One operator call. After it, for each product, comes the scaling that the program has before the product."""
        self.anchor = self.copies[min(map(self._node, outputs(site)), key=self.shadow.position.__getitem__)]
        x, _ = self._streams(site.x, site.streams)
        weights = {product.weight for product in site.products}
        weight = next(iter(weights)) if len(weights) == 1 else None
        norm = self._norm_weight(weight, site.streams) if weight is not None else None
        phis = [self._weighted_phi(product, site.streams, own=weight is None) for product in site.products]
        call = self._operator(site.op, x, phis[0] if len(phis) == 1 else self._call(torch.cat, phis, 0), norm)
        self.calls.append((call, site))
        h = self._item(call, 0)
        self.made_logits[call] = (site, h)
        self._logits(site, h, self._item(call, 1))

    def _logits(self, site: ProjectionSite, h: fx.Node, ms: fx.Node) -> None:
        """Put an operator's logits and squares in the place of the program's products and squares."""
        for value, times in site.squares.items():
            self.anchor = self.copies[self._node(value)]
            made = self._root(ms, site) if times is None else self._times(ms, times)
            # The program may have the same square twice, and each is a tensor of its own.
            if made is ms and len(site.squares) > 1 and self._is_seen(self._node(value)):
                made = self._call("clone", ms)
            self._replace(value, made)
        start = 0
        for product in site.products:
            target, moves = product_shown(product)
            self.anchor = self.copies[self._node(target)]
            rows = product.projection.rows
            part = h if len(site.products) == 1 else self._call("narrow", h, -1, start, rows)
            start += rows
            made = self._scaled(product, part, ms)
            if product.projection.turned:
                made = self._call("transpose", self._call("flatten", made, 0, -2), 0, 1)
            for op in moves:
                made = self._shaped(made, next(op.inputs()).meta.shape)
                made = self._call(op.target, made, *op.args[1:]) if op.name in TURNS else made
            self._replace(target, made)

    def _logits_of_mix(self, call: fx.Node, site: MixSite, rows: range, every: range) -> fx.Node:
        """The logits that go out of an operator of gates: those of `rows`, and zeros for others of `every`."""
        assert site.logits is not None
        h, shown = self._item(call, 3), _beyond_gates(site, rows)[1]
        made = compat.example(h).shape[-1]
        if len(shown) < made:
            h = self._call("narrow", h, -1, made - len(shown), len(shown))
        logits = self._between_zeros(h, shown.start, len(every) - shown.stop)
        self.made_logits[call] = (site.logits, logits)
        return logits

    def _with_rows_read(self, call: fx.Node, site: MixSite | ProjectionSite) -> fx.Node:
        """An operator with those of the rows that go out that are read: what read the others may have been replaced."""
        projected, logits = self.made_logits[call]
        every = range(projected.rows)
        rows = range(0) if logits._erased else rows_read(logits)
        if not rows and isinstance(site, ProjectionSite):  # its squares are read
            rows = every
        more = _beyond_gates(site, rows)[0] if isinstance(site, MixSite) else rows
        projected.rows_read = len(more)
        if rows == every:
            return call
        self.site, self.anchor = site, call
        x, phi, *others = cast(list[fx.Node], call.args)
        if isinstance(site, MixSite):
            phi = self._phi(site, more)
            site.logits = projected if rows else None
        else:
            phi = self._call("narrow", phi, 0, rows.start, len(rows))
        new = self._operator(site.op, x, phi, *others, **call.kwargs)
        made = {item: self._item(new, cast(int, item.args[1])) for item in call.users}
        if isinstance(site, ProjectionSite):
            made[logits] = self._between_zeros(self._item(new, 0), rows.start, len(every) - rows.stop)
        elif rows:
            made[logits] = self._logits_of_mix(new, site, rows, every)
        for old, instead in made.items():
            old.replace_all_uses_with(instead)
            self.copies.replaced.update((node, instead) for node, now in self.copies.replaced.items() if now is old)
        erase_unused(self.copies, made)
        return new

    def _between_zeros(self, logits: fx.Node, before: int, after: int) -> fx.Node:
        """Logits with zeros in the places of those that nothing reads. A pad would fix symbolic sizes."""
        if not before and not after:
            return logits
        zero = self._call(torch.zeros_like, self._call("narrow", logits, -1, 0, 1))
        kept = [-1] * (compat.example(logits).dim() - 1)
        sides = [self._call("expand", zero, *kept, count) if count else None for count in (before, after)]
        return self._call(torch.cat, [part for part in (sides[0], logits, sides[1]) if part is not None], -1)

    def _weighted_phi(self, product: Product, streams: StreamsView, *, own: bool) -> fx.Node:
        phi = self._phi_of(product.projection, streams)
        if not own or product.weight is None:
            return phi
        return self._call("mul", self._call("float", phi), self._norm_weight(product.weight, streams))

    def _root(self, ms: fx.Node, site: ProjectionSite) -> fx.Node:
        """The norm of all streams of a token, which is exactly zero where they are."""
        root = self._call("sqrt", self._call("mul", self._positive(ms), site.streams.n * site.streams.channels))
        return self._call("masked_fill", root, self._call("eq", ms, 0), 0.0)

    def _positive(self, ms: fx.Node) -> fx.Node:
        """Where all streams are zero, the gradient of their norm is zero in eager code; that of a root is not."""
        return self._call("clamp_min", ms, torch.finfo(torch.float32).tiny)

    def _scaled(self, product: Product, part: fx.Node, ms: fx.Node) -> fx.Node:
        """A product of the operator, times the factors of its tokens, plus the program's addend."""
        shape = compat.example(part).shape
        if product.rms is not None:
            part = self._call("mul", part, self._call("unsqueeze", self._rms_factor(product.rms, ms), -1))
        for factor, divides in product.factors:
            given = self._shaped(self._visible(factor), (*shape[:-1], 1))
            part = self._call("div" if divides else "mul", part, self._call("float", given))
        part = self._times(part, product.const)
        addend = product.projection.addend
        if addend is None:
            return part
        return self._call("add", part, self._call("float", self._shaped(self._visible(addend), (shape[-1],))))

    def _rms_factor(self, rms: Rms, ms: fx.Node) -> fx.Node:
        if rms.mode == "inside":
            return self._call("rsqrt", self._call("add", ms, rms.eps))
        root = self._call("sqrt", self._positive(ms))
        root = self._call("add", root, rms.eps) if rms.mode == "outside" else self._call("clamp_min", root, rms.eps)
        return self._call("reciprocal", root)

    def _sinkhorn(self, site: SinkhornSite) -> None:
        m, target = site.matrices, site.matrices.out
        self.anchor = self.copies[self._node(surface(target))]
        shape, shared = m.logits.meta.shape, site.shared
        logits = self._visible(shared or m.logits)
        logits = self._shaped(logits, shape if shared is None else shape[-2:])
        if m.kind.logits_transposed:
            logits = self._call("transpose", logits, -1, -2)
        form = {name.removeprefix("sinkhorn_"): value for name, value in m.kind.form.as_kwargs().items()}
        new = self._operator(site.op, logits, **form)
        self.calls.append((new, site))
        if shared is not None:
            new = self._call("expand", new, *map(self._size, shape))
        self._gate(target, new, m.kind.transposed)
        if not target.nodes:
            self._replace(surface(target), self._call("transpose", new, -1, -2) if m.kind.transposed else new)

    def _gates(self, value: Value, layout: Layout, added: Dim, tokens: Sequence[int], shape: Sequence[Any]) -> fx.Node:
        """A gate as [*tokens, n]: a value as it is, or the sums over a matrix along the steps `added`."""
        if not added:
            return self._gate_operand(value, layout, tokens, shape)
        matrix = Layout((*layout.dims, added), layout.offset)
        node = self._gate_operand(value, matrix, tokens, (*shape, prod(size for size, _ in added)))
        return self._call("sum", self._call("float", node), -1)

    def _gate_operand(self, value: Value, layout: Layout, tokens: Sequence[int], shape: Sequence[Any]) -> fx.Node:
        """A gate as [*tokens, n] or [*tokens, n, n], which `layout` says how to read from the value."""
        each = value.numel == prod(tokens) * prod(shape[len(tokens) :])
        found = self.gates.get(value)
        if found is not None:
            node, flipped = found
            swapped = Layout((layout.dims[0], *layout.dims[1:][::-1]), layout.offset)
            straight = layout.is_identity()
            if each and (straight or swapped.is_identity()):
                node = self._shaped(node, shape)
                is_matrix = len(layout.dims) > 2
                return self._call("transpose", node, -1, -2) if is_matrix and straight == flipped else node
            if not value.nodes:
                raise Decline("a gate is read in an order that the operators do not make")
        steps = [step for dim in layout.dims for step in dim]
        if each and layout.offset == 0 and tiles(steps, value.numel):
            return self._shaped(self._arranged(value, layout), shape)
        return self._spread(value, layout, tokens, shape)

    def _out_dtype(self, target: Value, x: fx.Node) -> dict[str, torch.dtype]:
        return {} if target.dtype == compat.example(x).dtype else {"out_dtype": target.dtype}


def _beyond_gates(site: MixSite, rows: range) -> tuple[range, range]:
    """Those rows of a site's logits that phi has after the rows of its gates, and with which rows h ends then.

    Gates may be made of the first rows of the same logits, which h begins with.
    """
    of_gates = [(group.projection.out, row) for group in site.groups for row in group.rows]
    gates = range(len(of_gates))
    begins = len(site.products) == 1 and of_gates == [(site.products[0].projection.out, row) for row in gates]
    if not begins or rows.start > gates.stop or not rows:
        return rows, rows
    end = max(gates.stop, rows.stop)
    return range(gates.stop, end), range(end)


def replaced(site: Site) -> list[Value]:
    """All values of the program in whose place a site's results go."""
    return [value for value in _results(site) if value.nodes]


def _results(site: Site) -> Iterator[Value]:
    if isinstance(site, MixSite):
        if site.layer_input is not None:
            yield surface(site.layer_input)
        for gate in (site.pre if site.aggregate is None else None, site.post, site.res):
            if gate is not None:
                yield gate.value
        if site.logits is not None:
            yield from outputs(site.logits)
    elif isinstance(site, ProjectionSite):
        yield from outputs(site)
    elif isinstance(site, SinkhornSite) and site.matrices.out.nodes:
        yield site.matrices.out
    else:
        yield surface(next(site.targets()))
