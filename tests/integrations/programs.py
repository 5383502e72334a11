"""DeepSeek-V4 in what other packages make of it, compared with eager code and with float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from mhc_compile import passes
from mhc_compile.passes.report import Report
from mhc_compile.testing.float64 import Float64Reference
from tests.zoo import check


def tokens() -> torch.Tensor:
    return torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(0))


def compare(
    model: nn.Module,
    compiled: Callable[[nn.Module, Any], Callable[..., Any]],
    *,
    backward: bool = True,
    exact: nn.Module | None = None,
) -> check.Outcome:
    """Outputs and gradients of a model and of a copy of it that `compiled(copy, backend)` has compiled.

    The backend rewrites and does not compile, which takes a second. exact: the model that is computed in float64, where
    the one that is compiled cannot be, since it is quantized.
    """
    report = Report()

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        report.add(passes.run_recursively(gm))
        return gm.forward

    torch._dynamo.reset()
    own = copy.deepcopy(model)
    program = compiled(own, backend)
    with torch.set_grad_enabled(backward):
        eager = check.evaluate(model, model, (tokens(),), backward=backward)
        ours = check.evaluate(program, own, (tokens(),), backward=backward)
        reference = Float64Reference(model if exact is None else exact)
        wide = check.evaluate(reference, reference.module, (tokens(),), backward=backward)
    return check.Outcome(report, *map(_one, (eager, ours, wide)), [])


def _one(results: check.Results) -> check.Results:
    return {name: value.unsqueeze(0) for name, value in results.items()}


def whole(model: nn.Module, backend: Any) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(model, backend=backend)
    return compiled


def assert_all_are_rewritten(report: Report, layers: int = 2) -> None:
    """A mix and a combine for each of two sublayers a layer, and the head."""
    assert (len(report.rewritten), len(report.declined)) == (4 * layers + 1, 0), str(report)
