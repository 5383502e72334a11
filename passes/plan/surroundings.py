"""Surroundings that forbid the rewriting of a site: memory, grad mode, types.

Not autocast: its casts are in the record as any other, and the operators compute in float32 whatever it says.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, prod
from typing import Any

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.plan.gradients import check_gradients, requires_gradient
from mhc_compile.passes.plan.sites import (
    AggregateSite,
    CombineSite,
    Decline,
    MixingSite,
    MixSite,
    ProjectionSite,
    Site,
    outputs,
    visible,
)
from mhc_compile.passes.recognise.layout import Layout, NotALayout, Steps, is_movement, tidy
from mhc_compile.passes.recognise.outer import flat
from mhc_compile.passes.report import in_words
from mhc_compile.passes.shadow import Op, Shadow, Value, memory_of


def check_site(shadow: Shadow, reached: set[fx.Node], site: Site) -> None:
    """Refuse a site because of what is around it. reached: the nodes to which gradients come back."""
    check_surroundings(shadow, site)
    check_gradients(reached, site)


def check_surroundings(shadow: Shadow, site: Site) -> None:
    """Refuse a site around which memory or grad mode changes, or whose types the operators do not take."""
    shown = outputs(site)  # a site without any has no place in the program
    sources = list(site.sources())
    for value in sources:
        if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise Decline(f"an input has dtype {value.dtype}; only float32, bfloat16 and float16 are rewritten")
        if type(value.meta).__name__ not in ("FakeTensor", "Parameter", "Tensor"):
            raise Decline(f"an input is a tensor subclass, {type(value.meta).__name__}")
    _refuse_copies(site)
    nodes, showing = extent(site)
    doubles = sorted(nodes & shadow.doubles, key=shadow.position.__getitem__)
    if doubles:
        raise Decline(f"{in_words(doubles[0])} computes in float64; the operators would compute that in float32")
    if len({shadow.states[node] for node in nodes - showing}) > 1:
        raise Decline("grad mode or inference mode changes between its parts")
    if not shadow.writes:
        return
    first = min(shadow.position[node] for node in nodes)
    # An operator is put where its result is shown, which may be behind these nodes: at a cast of the sum.
    last = max(shadow.position[node] for node in nodes.union(value.nodes[0] for value in shown))
    read = memory_of(*(node for value in sources if (held := visible(value)) is not None for node in held.nodes))
    touched = read | memory_of(*(held for node in nodes for held in (node, *node.all_input_nodes)))
    _refuse_writes(shadow, touched, "a tensor that the site uses", first, last)
    results = memory_of(*(node for value in site.targets() for node in value.nodes))
    if any(map(requires_gradient, site.targets())):
        # The backward pass needs them as they are; the program may have kept copies of its own.
        _refuse_writes(shadow, read, "a tensor that the backward pass needs", first)
        # Autograd refuses a program whose backward pass needs a copy that was written, unless it was into `.data`.
        _refuse_writes(shadow, touched - results, "a tensor that the backward pass reads", first, unseen=True)
    if isinstance(site, MixSite):
        # Autograd forbids writing into one of several results of an operator.
        _refuse_writes(shadow, results, "one of its results", first)


def _refuse_copies(site: Site) -> None:
    """Refuse streams [..., n, C, tokens] where memory has them so: a copy costs more than the operator saves."""
    for what, value, layout in _wide(site):
        if not _in_rows(value, layout):
            raise Decline(
                "the gates differ along the innermost dim; the operator has the channels there and would need a copy "
                f"of {what}: make the channels the last dim"
            )


def _wide(site: Site) -> Iterator[tuple[str, Value, Layout]]:
    """The wide tensors of a site whose streams hold tokens, with layouts [token, ..., channel]."""
    if isinstance(site, CombineSite) and site.combine.streams.holds_tokens:
        c = site.combine
        yield "the streams", c.x, c.streams.layout
        yield "the sublayer's output", c.outer.f, c.outer.f_layout
        yield "its result", c.out, c.out_view.layout
    elif isinstance(site, AggregateSite) and site.aggregate.streams.holds_tokens:
        yield "the streams", site.aggregate.x, site.aggregate.streams.layout
        yield "its result", site.layer_input, site.aggregate.out_layout
    elif isinstance(site, MixingSite) and site.mixing.streams is not None and site.mixing.streams.holds_tokens:
        yield "the streams", site.mixing.x, site.mixing.x_layout
        yield "its result", site.mixing.out, site.mixing.out_layout
    elif isinstance(site, ProjectionSite) and site.streams.holds_tokens:
        yield "the streams", site.x, site.streams.layout


def _in_rows(value: Value, layout: Layout) -> bool:
    """Whether memory has the channels of a tensor side by side, and its tokens evenly apart."""
    held = visible(value) or value
    steps = [int(compat.hint(stride)) for stride in held.meta.stride()]
    rows, stride = [], 1
    for d in sorted(range(len(steps)), key=steps.__getitem__):
        rows.append((held.shape[d], prod(held.shape[d + 1 :]), stride))
        stride *= held.shape[d]
    try:
        found = [tidy(Steps([row for row in rows if row[0] > 1]).translate(flat(dim))) for dim in layout.dims]
    except NotALayout:
        return False
    token, channel = found[0], found[-1]
    return len(token) == 1 and len(channel) == 1 and channel[0][1] == 1


def _refuse_writes(
    shadow: Shadow, memory: set[Any], what: str, after: int, before: float = inf, *, unseen: bool = False
) -> None:
    """Refuse a site if the program writes into some memory between two places; unseen: without autograd's knowledge."""
    for node, written in shadow.writes:
        if after < shadow.position[node] < before and written & memory and (not unseen or _is_unseen(node, written)):
            unknown = node.op == "call_function" and compat.is_foreign(node.target)
            raise Decline(f"{in_words(node)} {'may write' if unknown else 'writes'} in place into {what}")


def _is_unseen(write: fx.Node, written: frozenset[Any]) -> bool:
    """Whether a write may be into the `.data` of a tensor."""
    seen, pending = {write}, [write]
    while pending:
        fresh = [node for node in pending.pop().all_input_nodes if node not in seen and memory_of(node) & written]
        if any(map(compat.is_data, fresh)):
            return True
        seen.update(fresh)
        pending += fresh
    return False


def extent(site: Site) -> tuple[set[fx.Node], set[fx.Node]]:
    """The Dynamo nodes between a site's sources and its targets; and of these, those that only show what they made."""
    stop = set(site.sources())
    nodes: set[fx.Node] = set()
    computing: set[fx.Node] = set()
    for op in between(site):
        nodes.add(op.node)
        # As a linear layer ends in a view of its product, which is the source.
        if not (is_movement(op) and any(s in stop and s.op and s.op.node is op.node for s in op.sources)):
            computing.add(op.node)
    return nodes, nodes - computing


def between(site: Site) -> Iterator[Op]:
    """The calls between a site's sources and its targets, each once, the last ones first."""
    stop = set(site.sources())
    seen: set[Value] = set()
    found: set[Op] = set()
    pending = list(site.targets())
    while pending:
        value = pending.pop()
        if value in seen or value.op is None:
            continue
        seen.add(value)
        if value.op not in found:
            found.add(value.op)
            yield value.op
        pending.extend(source for source in value.op.inputs() if source not in stop)
