"""What around a site forbids to rewrite it: memory, grad mode, autocast, types."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from mhc_compile.passes.plan.sites import (
    AggregateSite,
    CombineSite,
    Decline,
    Site,
    said,
)
from mhc_compile.passes.shadow import Shadow, Value, tensors_of


def check_surroundings(shadow: Shadow, site: Site) -> None:
    """Refuse a site around which memory, grad mode or autocast changes, or whose types the operators do not take."""
    sources = list(site.sources())
    for value in sources:
        if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise Decline(f"a tensor of {value.dtype} takes part; the operators take float32, bfloat16 and float16")
        if type(value.meta).__name__ not in ("FakeTensor", "Parameter", "Tensor"):
            raise Decline(f"a {type(value.meta).__name__} takes part, a tensor subclass")
    nodes = _extent(site)
    doubles = sorted(nodes & shadow.doubles, key=shadow.position.__getitem__)
    if doubles:
        raise Decline(f"{said(doubles[0])} computes in float64; the operators would compute that in float32")
    if len({shadow.states[node] for node in nodes}) > 1:
        raise Decline("grad mode or autocast changes between its parts")
    if not shadow.writes:
        return
    first, last = min(shadow.position[n] for n in nodes), max(shadow.position[n] for n in nodes)
    touched = {compat.storage_of(t) for node in nodes for t in _held(node)}
    touched |= {compat.storage_of(t) for v in sources for node in v.nodes for t in tensors_of(node)}
    for node, storages in shadow.writes:
        if first < shadow.position[node] < last and storages & touched:
            raise Decline(f"{said(node)} writes in place into a tensor that takes part")
    # The backward pass needs them as they are; the program may have kept copies of its own.
    read = {compat.storage_of(t) for v in sources for node in v.nodes for t in tensors_of(node)}
    for node, storages in shadow.writes:
        if shadow.position[node] > first and storages & read:
            raise Decline(f"{said(node)} writes in place into a tensor that the backward pass reads")
    if isinstance(site, (CombineSite, AggregateSite)):
        # It may take a gate from the operator that makes it, so the gate must be as it was when it was made.
        for gate in (node for value in site.gates() for node in value.nodes):
            memory = {compat.storage_of(t) for t in tensors_of(gate)}
            for node, storages in shadow.writes:
                if shadow.position[gate] < shadow.position[node] < last and storages & memory:
                    raise Decline(f"{said(node)} writes in place into one of its gates")
    else:
        # Autograd forbids writing into one of several results of an operator.
        results = {compat.storage_of(t) for v in site.targets() for node in v.nodes for t in tensors_of(node)}
        for node, storages in shadow.writes:
            if shadow.position[node] > first and storages & results:
                raise Decline(f"{said(node)} writes in place into one of its results")


def _held(node: fx.Node) -> Iterator[torch.Tensor]:
    """The tensors that a node reads or makes, as Dynamo knows them: only those share memory as the program's do."""
    for held in (node, *node.all_input_nodes):
        yield from tensors_of(held)


def _extent(site: Site) -> set[fx.Node]:
    """The Dynamo nodes between a site's sources and its targets."""
    stop = set(site.sources())
    seen: set[Value] = set()
    nodes: set[fx.Node] = set()
    pending = list(site.targets())
    while pending:
        value = pending.pop()
        if value in seen or value.op is None:
            continue
        seen.add(value)
        nodes.add(value.op.node)
        pending.extend(source for source in value.op.inputs() if source not in stop)
    return nodes
