"""Whether the rewritten form of a program computes what the program says."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

import mhc_compile.ops  # noqa: F401  (registers the operators that the passes insert)
from mhc_compile import compat, passes
from mhc_compile.passes.shadow import tensors_of
from mhc_compile.testing.float64 import Float64Reference, KeepFloat64
from tests.fuzz.grammar import Program
from tests.zoo.check import Results, evaluate

# In float64 the rewritten graph and the original one differ by the rounding of a few hundred operations, which a
# division by a small sum of the Sinkhorn steps may magnify: far below what any other formula would give. A program that
# magnifies more, dividing by sums that cancel, does the same to inputs that differ by their last bits: the difference
# may be so many times what that makes.
EXACT = 1e-8
MAGNIFIED = 100.0
# Luck of a few numbers makes a factor of 3; what is larger is tried again on this many inputs, where luck averages out.
INPUTS = 12
FIRST, AGAIN = 3.0, 2.0
ROUNDINGS = 8.0


@dataclass
class Verdict:
    """What became of one program: the operators it was rewritten to, and the complaint if a result is wrong."""

    operators: Counter[str] = field(default_factory=Counter)
    complaint: str | None = None
    invalid: str | None = None


def check(program: Program) -> Verdict:
    """Run a program eagerly, in float64 and rewritten, and judge the results.

    Eager code that raises is no program, and not judged; nor is one that Dynamo alone does not run as eager does.
    """
    verdict = _check(program, rewriting=True)
    if verdict.complaint:
        alone = _check(program, rewriting=False)
        if alone.complaint:
            verdict = Verdict(invalid=f"Dynamo alone: {alone.complaint}")
    return verdict


def _check(program: Program, *, rewriting: bool) -> Verdict:
    verdict = Verdict()
    model, x = program.build()
    reference = Float64Reference(model)
    reference.module.checkpointing = False  # recomputation in backward would leave float64
    torch._dynamo.reset()
    backend = _Watch(verdict) if rewriting else "eager"
    compiled = torch.compile(model, backend=backend, dynamic=program.dynamic)
    state = copy.deepcopy(model.state_dict())

    def results(call: Callable[..., Any], module: nn.Module, given: Tensor) -> Results:
        module.load_state_dict(state)  # buffers as they were: a program may count in them
        return evaluate(call, module, (given,))

    errors: list[tuple[dict[str, float], ...]] = []
    inputs = [x]
    for attempt in range(INPUTS):
        try:
            eager = results(model, model, inputs[-1])
            exact = results(reference, reference.module, inputs[-1].double())
        except Exception as error:
            verdict.invalid = f"{type(error).__name__}: {error}"
            return verdict
        if not all(value.isfinite().all() for value in (*eager.values(), *exact.values())):
            verdict.invalid = "eager's results are not finite"
            return verdict
        try:
            ours = results(compiled, model, inputs[-1])
        except Exception as error:
            verdict.complaint = f"raised {type(error).__name__}: {str(error)[:2000]}"
            return verdict
        verdict.complaint = verdict.complaint or _kinds(eager, ours)
        if verdict.complaint:
            return verdict
        errors.append((_squares(exact, exact, zero=True), _squares(eager, exact), _squares(ours, exact)))
        if attempt == 0 and not _judged(errors, eager, FIRST):
            return verdict
        # With a generator of its own: `evaluate` seeds torch's, which would make every draw the same.
        inputs.append(torch.randn(x.shape, generator=torch.Generator().manual_seed(100 + attempt)).to(x.dtype))
    verdict.complaint = _judged(errors, eager, AGAIN)
    return verdict


def _kinds(eager: Results, ours: Results) -> str | None:
    if eager.keys() != ours.keys():
        return f"only one has {sorted(eager.keys() ^ ours.keys())}"
    for name, value in eager.items():
        got = ours[name]
        if got.dtype != value.dtype or got.shape != value.shape:
            return f"{name}: {got.dtype} {tuple(got.shape)}, eager {value.dtype} {tuple(value.shape)}"
    return None


def _squares(results: Results, exact: Results, zero: bool = False) -> dict[str, float]:
    return {
        name: (value.double() - (0.0 if zero else exact[name].double())).square().sum().item()
        for name, value in results.items()
    }


def _judged(errors: Sequence[tuple[dict[str, float], ...]], results: Results, slack: float) -> str | None:
    """Compare root mean squares over all inputs, relative to the exact values'."""
    sums = [{name: sum(one[run][name] for one in errors) ** 0.5 for name in results} for run in range(3)]
    norms, eager, ours = sums
    # A gradient that is nought but for rounding has no size of its own; it is a part of what made it.
    largest = max(norms.values())
    sizes = {name: max(norms[name], 1e-4 * largest) for name in results}
    relative = {name: eager[name] / sizes[name] if sizes[name] else 0.0 for name in results}
    typical = median(relative.values())
    complaints = []
    for name, value in results.items():
        floor = ROUNDINGS * torch.finfo(value.dtype).eps
        allowed = slack * max(relative[name], typical) + floor
        got = ours[name] / sizes[name] if sizes[name] else ours[name]
        if not got <= allowed:
            complaints.append(f"{name}: {got:.2e} rewritten, {relative[name]:.2e} eager, allowed {allowed:.2e}")
    return "\n".join(complaints) or None


class _Watch:
    """The backend: rewrites each graph, and compares it with the original one in float64 before it is run."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        original = gm.graph
        with mock.patch.object(passes, "INPUT_NORMS", True):
            report = passes.run_recursively(gm)
        self.verdict.operators.update(site.op for site in report.rewritten)
        self.verdict.operators.update("input norm" for site in report.rewritten if "input norm" in site.detail)
        if report.errors:
            self.verdict.complaint = f"the passes failed: {report.errors}"
        if gm.graph is original:
            return gm.forward
        gm.graph.lint()
        before = fx.GraphModule(gm, original)

        def run(*inputs: Any) -> Any:
            if self.verdict.complaint is None:
                self.verdict.complaint = _same_in_float64(before, gm, inputs)
            return gm.forward(*inputs)

        return run


def _same_in_float64(before: fx.GraphModule, after: fx.GraphModule, inputs: Sequence[Any]) -> str | None:
    try:
        wanted = _in_float64(before, inputs)
    except Exception:
        return None  # a checkpoint's recomputation leaves float64: there is nothing to compare with
    got, shaken = _in_float64(after, inputs), None
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
            if any(compat.storage_of(v) == compat.storage_of(result) and _is_cast(node, n) for node, v in sources):
                return result.clone()
        return result


def _is_cast(source: fx.Node, result: fx.Node) -> bool:
    before, after = ({tensor.dtype for tensor in tensors_of(node)} for node in (source, result))
    return before != after


def _in_float64(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Tensor | None]:
    """Floating point outputs and, of a fixed combination of them, the gradients of the inputs."""
    wide, leaves = [], []
    for value in inputs:
        if isinstance(value, Tensor) and value.is_floating_point():
            needs = value.requires_grad
            value = value.detach().double().clone()
            if needs:
                leaves.append(value.requires_grad_())
                value = value * 1.0  # a graph may write into what is no leaf
        wide.append(value)
    with KeepFloat64():
        outputs = [
            out
            for out in tree_leaves(_Copying(module).run(*wide))
            if isinstance(out, Tensor) and out.is_floating_point()
        ]
    generator = torch.Generator().manual_seed(7)
    loss = torch.zeros((), dtype=torch.float64)
    for out in outputs:
        weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        if out.requires_grad:
            loss = loss + (out.double() * weight).sum()
    results: list[Tensor | None] = [out.detach().double() for out in outputs]
    if loss.requires_grad:
        results += torch.autograd.grad(loss, leaves, allow_unused=True)
    return results
