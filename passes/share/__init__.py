"""Stage 7, share: identical sublayers become calls of one graph, which Inductor compiles once.

A model's layers are the same program with other parameters. Inductor compiles each of them anew: the nodes, their
schedule, the code that calls the kernels. It knows calls of a graph (`invoke_subgraph`, behind
`torch.compiler.nested_compile_region`); what lies between two hyper-connections becomes one here, in the graphs after
grad. Whatever a call could change has been decided by then: gradients, what is saved and what is computed again, and
what is fused across sublayers, since hyper-connections stay with the graph that calls.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

from torch import fx

from mhc_compile.passes.share.outline import Unsuitable, outline
from mhc_compile.passes.share.sublayers import alike

log = logging.getLogger(__name__)


def share(graph: fx.Graph, counts: Counter[str]) -> Iterator[fx.GraphModule]:
    """Make identical sublayers calls of one graph, in place; yields the called graphs, and counts the calls."""
    for sublayers in alike(graph):
        try:
            body = outline(graph, sublayers)
        except Unsuitable as reason:
            log.info(
                "%d equal sublayers of %d nodes are compiled one by one: %s", len(sublayers), len(sublayers[0]), reason
            )
            continue
        log.info("%d sublayers of %d nodes are compiled once", len(sublayers), len(sublayers[0]))
        # Without the number of nodes: that of a function for other shapes differs, and its sublayers are the same.
        counts["sublayer"] += len(sublayers)
        yield body
