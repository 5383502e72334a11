"""Stage 4, rewrite: a plan's sites become calls of the registered operators in a copy of the Dynamo graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.plan import (
    AggregateSite,
    CombineSite,
    Decline,
    MixSite,
    Plan,
    SinkhornSite,
    Site,
    outputs,
    surface,
)
from mhc_compile.passes.recognise.layout import Layout, NotALayout
from mhc_compile.passes.rewrite.copies import Copies
from mhc_compile.passes.rewrite.order import erase_dead, sort
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
    Rewriter(copies, shadow).run(plan.sites)
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

    def run(self, sites: Sequence[Site]) -> None:
        """Sites in program order, so that a later one finds the results of an earlier one in place.

        Where something goes wrong at one, the others are tried as well: alike layers fail alike, and are told at once.
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
        else:
            self._sinkhorn(site)

    def _mix(self, site: MixSite) -> None:
        first_node = min((self._node(v) for v in outputs(site)), key=self.shadow.position.__getitem__)
        self.anchor = self.copies[first_node]
        x, tokens = self._streams(site.x, site.streams)
        phi = self._phi(site)
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
        if (target.dtype == c.out.dtype or target is not c.out) and not self.aliases.is_written(self._node(target)):
            self.streams[target] = (written, new, dims)
        self._replace(target, self._laid_out(new, dims, Layout((written.tokens, written.channel)), written.stream))

    def _aggregate(self, site: AggregateSite) -> None:
        a, target = site.aggregate, surface(site.aggregate.out)
        self.anchor = self.copies[self._node(target)]
        x, dims = self._streams(a.x, a.streams)
        gate = self._gate_operand(a.gate, a.gate_layout, (*compat.example(x).shape[:-2], a.streams.n))
        new = self._operator(site.op, x, gate, **self._out_dtype(target, x))
        self.calls.append((new, site))
        self._replace(target, self._laid_out(new, dims, a.out_layout, None))

    def _sinkhorn(self, site: SinkhornSite) -> None:
        m, target = site.matrices, site.matrices.out
        self.anchor = self.copies[self._node(surface(target))]
        logits = self._visible(m.logits)
        logits = self._shaped(logits, m.logits.meta.shape)
        if m.kind.logits_transposed:
            logits = self._call("transpose", logits, -1, -2)
        form = {name.removeprefix("sinkhorn_"): value for name, value in m.kind.form.as_kwargs().items()}
        new = self._operator(site.op, logits, **form)
        self.calls.append((new, site))
        self._gate(target, new, m.kind.transposed)
        if not target.nodes:
            self._replace(surface(target), self._call("transpose", new, -1, -2) if m.kind.transposed else new)

    def _gate_operand(self, value: Value, layout: Layout, shape: Sequence[Any]) -> fx.Node:
        """A gate as [*tokens, n] or [*tokens, n, n], which `layout` says how to read from the value."""
        found = self.gates.get(value)
        if found is not None:
            node, flipped = found
            swapped = Layout((layout.dims[0], *layout.dims[1:][::-1]))
            straight = layout.is_identity()
            if straight or swapped.is_identity():
                node = self._shaped(node, shape)
                is_matrix = len(layout.dims) > 2
                return self._call("transpose", node, -1, -2) if is_matrix and straight == flipped else node
            if not value.nodes:
                raise Decline("a gate is read in an order that the operators do not make")
        return self._shaped(self._arranged(value, layout), shape)

    def _out_dtype(self, target: Value, x: fx.Node) -> dict[str, torch.dtype]:
        return {} if target.dtype == compat.example(x).dtype else {"out_dtype": target.dtype}


def replaced(site: Site) -> Iterator[Value]:
    """All values in whose place a site's results go."""
    if isinstance(site, MixSite):
        if site.layer_input is not None:
            yield surface(site.layer_input)
        for gate in (site.pre if site.aggregate is None else None, site.post, site.res):
            if gate is not None:
                yield gate.value
    elif isinstance(site, SinkhornSite) and site.matrices.out.nodes:
        yield site.matrices.out
    else:
        yield surface(next(site.targets()))
