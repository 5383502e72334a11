"""Operators that the program calls itself, without those that the passes insert.

They need no rewriting: autograd and the later stages treat them like any that was inserted. They are reported.
"""

from __future__ import annotations

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.report import SiteReport, location, module_path

# What the passes note on every node that they insert: for which site, by its identity while the site lives. True: for
# none that lives.
INSERTED = "mhc_inserted"


def forget_sites(graph: fx.Graph) -> None:
    """Have nodes of an earlier run name none of its sites: a graph may come twice, and sites now may have their ids."""
    for node in graph.nodes:
        if INSERTED in node.meta:
            node.meta[INSERTED] = True


def called(graph: fx.Graph) -> list[SiteReport]:
    """The calls of this package's operators in a Dynamo graph that its program made, in program order."""
    found = []
    for node in graph.nodes:
        operator = _ours(node)
        if operator is not None and INSERTED not in node.meta:
            found.append(SiteReport(operator._opname, location(node), "", module=module_path(node)))
    return found


def calls_ours(node: fx.Node) -> bool:
    """Whether a node calls one of this package's operators."""
    return _ours(node) is not None


def _ours(node: fx.Node) -> torch._ops.OpOverload | None:
    operator = compat.called_operator(node)
    return operator if operator is not None and operator.namespace == "mhc" else None
