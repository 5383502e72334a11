"""What runs the graphs of a program: the passes, AOTAutograd, and before that a comparison in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

import mhc_compile.ops  # noqa: F401  (registers the operators that the passes insert)
from mhc_compile import compat, passes
from mhc_compile.passes.report import Report
from mhc_compile.passes.shadow import tensors_of
from mhc_compile.testing.float64 import KeepFloat64
from tests.zoo.check import combination

# In float64 the rewritten graph and the original one differ by the rounding of a few hundred operations, which a
# division by a small sum of the Sinkhorn steps may magnify: far below what any other formula would give. A program that
# magnifies more, dividing by sums that cancel, does the same to inputs that differ by their last bits: the difference
# may be so many times what that makes.
EXACT = 1e-8
MAGNIFIED = 100.0


@dataclass
class Verdict:
    """What became of one program: the operators it was rewritten to, and the complaint if a result is wrong."""

    operators: Counter[str] = field(default_factory=Counter)
    complaint: str | None = None
    invalid: str | None = None

    def note(self, report: Report) -> None:
        """Take what the passes did to one graph."""
        self.operators.update(site.op for site in report.rewritten)
        self.operators.update("input norm" for site in report.rewritten if "input norm" in site.detail)
        if report.errors:
            self.complaint = f"the passes failed: {report.errors}"


class Watch:
    """The backend: rewrites each graph, and compares it with the original one in float64 before it is run.

    It is run as AOTAutograd makes it, with what is fused in the joint graph.
    """

    def __init__(self, verdict: Verdict, rewriting: bool) -> None:
        self.verdict, self.rewriting = verdict, rewriting

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        original = gm.graph
        if self.rewriting:
            with mock.patch.object(passes, "INPUT_NORMS", True):
                self.verdict.note(passes.run_recursively(gm))
        gm.graph.lint()
        before, after = fx.GraphModule(gm, original), fx.GraphModule(gm, gm.graph)
        program: Callable[..., Any] = compat.compile_without_inductor(gm, example_inputs, self._fuse)
        if gm.graph is original:
            return program

        def run(*inputs: Any) -> Any:
            if self.verdict.complaint is None:
                with torch.random.fork_rng(range(torch.cuda.device_count())):  # the program itself draws afterwards
                    self.verdict.complaint = same_in_float64(before, after, inputs)
            return program(*inputs)

        return run

    def _fuse(self, joint: fx.GraphModule) -> None:
        if self.rewriting:
            self.verdict.note(passes.fuse(joint))


def same_in_float64(before: fx.GraphModule, after: fx.GraphModule, inputs: Sequence[Any]) -> str | None:
    try:
        wanted = _in_float64(before, inputs)
    except Exception:
        return None  # a checkpoint's recomputation leaves float64: there is nothing to compare with
    try:
        got, shaken = _in_float64(after, inputs), None
    except RuntimeError as error:
        # An operator keeps a tensor for its gradient of which eager code kept a copy. AOTAutograd, for which the write
        # is none, makes that right; results and gradients are compared in any case.
        if "modified by an inplace operation" in str(error):
            return None
        raise
    for index, (want, have) in enumerate(zip(wanted, got, strict=True)):
        if (want is None) != (have is None):
            return f"result {index} in float64: only one of the two has a gradient"
        if want is None or not want.isfinite().all():
            continue
        difference, size = (want - have).norm().item(), want.norm().item()
        largest = max(w.norm().item() for w in wanted if w is not None and w.isfinite().all())
        if not difference <= EXACT * max(size, 1e-3 * largest):
            shaken = shaken or _in_float64(before, [_shaken(value) for value in inputs])
            moved = shaken[index]
            if moved is not None and difference <= MAGNIFIED * (want - moved).norm().item():
                continue
            return f"result {index} in float64 ({tuple(want.shape)}): differs by {difference:.1e} of {size:.1e}"
    return None


def _shaken(value: Any) -> Any:
    """A tensor in float64 with other last bits."""
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return value
    wide = value.detach().double()
    wide = wide * (1 + 4 * torch.finfo(torch.float64).eps * torch.randn_like(wide))
    return wide.requires_grad_(value.requires_grad)


class _Copying(fx.Interpreter):
    """Runs a graph whose casts to float64 copy as the casts they stand for did: in place, that makes a difference."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor) and n.op in ("call_function", "call_method"):
            sources = [(node, self.env[node]) for node in n.all_input_nodes if isinstance(self.env[node], Tensor)]
            if any(compat.storage_of(v) == compat.storage_of(result) and is_cast(node, n) for node, v in sources):
                return result.clone()
        return result


def is_cast(source: fx.Node, result: fx.Node) -> bool:
    before, after = ({tensor.dtype for tensor in tensors_of(node)} for node in (source, result))
    return before != after


def _in_float64(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Tensor | None]:
    """Floating point outputs and, of a fixed combination of them, the gradients of the inputs."""
    wide, leaves = [], []
    for value in inputs:
        if isinstance(value, Tensor) and value.is_floating_point():
            needs = value.requires_grad and torch.is_grad_enabled()
            value = value.detach().double().clone()
            if needs:
                leaves.append(value.requires_grad_())
                value = value * 1.0  # a graph may write into what is no leaf
        wide.append(value)
    torch.manual_seed(11)  # both graphs draw the same numbers
    with KeepFloat64():
        outputs = [
            out
            for out in tree_leaves([_Copying(module).run(*wide), wide])  # a graph may write into its inputs
            if isinstance(out, Tensor) and out.is_floating_point()
        ]
    loss = combination(outputs)
    results: list[Tensor | None] = [out.detach().double() for out in outputs]
    if loss.requires_grad:
        results += torch.autograd.grad(loss, leaves, allow_unused=True)
    return results
