"""What the passes make of a model, without compiling it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

import mhc_compile.ops  # noqa: F401  (registers the operators that the passes insert)
from mhc_compile import checking, compat, passes, records
from mhc_compile.arguments import check_model
from mhc_compile.passes.places import Places
from mhc_compile.passes.report import Report
from mhc_compile.progress import progress


def explain(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Run `model(*args, **kwargs)` once through Dynamo and report its hyper-connections.

    Returns a `Report`. `report.sites`, `report.rewritten` and `report.declined` list the sites with operator, source
    location, detail and reason. `report.cut` lists what Dynamo cuts, and `report.fusions` counts fusions. `str(report)`
    is the same for people. The rewritten graphs run operator by operator, in the caller's grad mode. Nothing is
    compiled and nothing is kept. If the model is compiled, its original code is looked at, with the `recompile_limit`
    that `torch.compile` was given for it. After two seconds, a terminal shows the progress.
    `TORCH_LOGS="mhc_compile"` logs each graph with its time, with or without a terminal.

    Dynamo begins as in a new process: what was compiled before does not count for its recompile limit, sizes that it
    has seen before do not matter, and functions that it gave up on are tried again. Afterwards Dynamo is as it was
    before, except that it numbers later compilations from where explain ends.

    Buffers, such as those of a batch norm, change as in any call.

    Raises TypeError if model is a class, or cannot be called.
    """
    check_model(model)
    ledger = records.Ledger()

    def look(gm: fx.GraphModule) -> Report:
        Places.of(gm)  # which numbers the nodes, for `SiteReport.node`
        return passes.run_recursively(gm, left_of=checking.left_alone)

    def mhc(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with ledger.graph() as graph:
            graph.traced.add(Report(graphs=1) if compat.is_part() else look(gm))
            compiled: Callable[..., Any] = compat.compile_without_inductor(
                gm, example_inputs, lambda joint: graph.traced.add(passes.fuse(joint))
            )
        return compiled

    def rewrite(gm: fx.GraphModule) -> None:
        with ledger.graph() as graph:
            report = look(gm)
            report.graphs = report.compiled = 0  # the parts are counted
            graph.traced.add(report)

    limit: Any = compat.limit_given_to(model)
    with (
        compat.apart(mhc, ledger.give_up, ledger.reach_limit),
        compat.uncompiled(model),
        compat.whole_for(mhc, rewrite),
        compat.without_tracebacks(),
        progress(lambda: f"explain: {ledger.progress()}"),
    ):
        torch.compile(model, backend=mhc, **limit)(*args, **kwargs)
    return ledger.report()
