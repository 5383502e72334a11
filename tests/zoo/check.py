"""Runs a model eagerly, in float64 and rewritten, and compares outputs and all gradients.

Nothing is compiled: the rewritten graphs run operator by operator, which is what `mhc_compile.explain` does too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

import mhc_compile.ops  # noqa: F401  (registers the operators that the passes insert)
from mhc_compile import passes
from mhc_compile.passes.report import Report
from mhc_compile.testing.float64 import Float64Reference

# Two programs that add the same numbers in different orders make errors of the same size, but not the same errors:
# the ratio of their root mean squares over N numbers is 1 give or take a multiple of 1 / sqrt(N). Within a tensor the
# errors are not independent, since they come through the same few gates, so N is counted in tokens' worth of numbers.
#
# A result of one number, drawn three times, goes beyond four times eager's error in one case of 40 by chance (an F
# distribution with 3 and 3 degrees of freedom); drawn twelve times in one of 10,000. So what looks wrong after REPEATS
# draws is drawn again, up to DRAWS, and judged by all of them.
REPEATS = 3
DRAWS = 12
SLACK = 1.5
FEW = 22
SLACK_FEW = 4.0
# Such results together, if there are ENOUGH: the logarithm of one ratio scatters by 0.3 after twelve draws, and what
# they have in common, their gates, keeps the mean of several from scattering much less.
SLACK_TOGETHER = 1.8
ENOUGH = 8
# Rounding of a result to its own dtype is not an error that one program can avoid and the other cannot; several
# such roundings are in any result that passes through more than one operator.
FLOOR_ROUNDINGS = 4.0
# A gradient below this part of the others' root mean square is 0 but for the rounding of float64.
VANISHING = 1e-12

Results = dict[str, Tensor]


@dataclass
class Outcome:
    report: Report
    eager: Results
    rewritten: Results
    exact: Results | None
    strides: list[str]
    more: Callable[[], Outcome] | None = None
    """The outcome of DRAWS inputs, those of this one among them."""

    @property
    def operators(self) -> list[str]:
        """The operators of the rewritten sites, sorted: block entry and exit, which are optional, left out."""
        return sorted(site.op for site in self.report.rewritten if site.op not in ("expand", "contract"))

    @property
    def reasons(self) -> list[str]:
        """Why sites are left, and why gates of others stay the program's own."""
        return [site.reason or site.own for site in self.report.sites if site.reason or site.own]


def rewriting(model: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], Report]:
    """The model with its hyper-connections rewritten, and the report, which fills when the model is called."""
    report = Report()

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        report.add(passes.run_recursively(gm))
        gm.graph.lint()
        return gm.forward

    return torch.compile(model, backend=backend, **options), report


def evaluate(program: Callable[..., Any], module: nn.Module, args: Sequence[Any], *, backward: bool = True) -> Results:
    """Outputs of `program(*args)` and, of a fixed random combination of them, the gradients.

    program computes with the parameters of module. Tensors of args that are floating point get gradients too.
    """
    torch.manual_seed(11)  # the same draws of dropout for every program
    module.zero_grad(set_to_none=True)
    args = tree_map(lambda value: _leaf(value, backward), list(args))
    outputs = [out for out in tree_leaves(program(*args)) if isinstance(out, Tensor)]
    results = {f"output {index}": out.detach() for index, out in enumerate(outputs)}
    if not backward:
        return results
    combination(outputs).backward()
    for index, arg in enumerate(args):
        if isinstance(arg, Tensor) and arg.grad is not None:
            results[f"gradient of argument {index}"] = arg.grad
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            results[f"gradient of {name}"] = parameter.grad.clone()
    return results


def combination(outputs: Sequence[Tensor]) -> Tensor:
    """A fixed random combination of all outputs that need a gradient, in float64."""
    generator = torch.Generator().manual_seed(7)
    total = torch.zeros((), dtype=torch.float64)
    for out in outputs:
        weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        if out.requires_grad:
            total = total.to(out.device) + (out.double() * weight.to(out.device)).sum()
    return total


def _leaf(value: Any, backward: bool) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_(backward)
    return value


def run(
    model: nn.Module,
    args: Sequence[Any],
    *,
    backward: bool = True,
    exact: bool = True,
    repeats: int = REPEATS,
    around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda program: program,
    **options: Any,
) -> Outcome:
    """Run all three on `args`, and on more random inputs of the same kind; results are stacked over the inputs.

    `around` wraps a program in what surrounds the call, such as autocast. options go to `torch.compile`.
    """
    torch._dynamo.reset()
    program, report = rewriting(model, **options)
    return compare(model, program, report, args, backward=backward, exact=exact, repeats=repeats, around=around)


def compare(
    model: nn.Module,
    program: Callable[..., Any],
    report: Report,
    args: Sequence[Any],
    *,
    backward: bool = True,
    exact: bool = True,
    repeats: int = REPEATS,
    around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda program: program,
) -> Outcome:
    """`run` for a program that is there already, computing with the parameters of model."""
    reference = Float64Reference(model)
    eager: list[Results] = []
    rewritten: list[Results] = []
    wide: list[Results] = []

    def draw(count: int) -> Outcome:
        for index in range(len(eager), count):
            given = args if index == 0 else tree_map(functools.partial(_another, _generator(index)), list(args))
            eager.append(evaluate(around(model), model, given, backward=backward))
            rewritten.append(evaluate(around(program), model, given, backward=backward))
            if exact:
                given = tree_map(lambda value: value.double() if _is_float(value) else value, list(given))
                wide.append(evaluate(reference, reference.module, given, backward=backward))
        strides = [
            f"{name}: strides {rewritten[0][name].stride()}, eager {value.stride()}"
            for name, value in eager[0].items()
            if name.startswith("output") and rewritten[0][name].stride() != value.stride()
        ]
        return Outcome(report, _stacked(eager), _stacked(rewritten), _stacked(wide) if exact else None, strides)

    outcome = draw(repeats)
    outcome.more = lambda: draw(DRAWS)
    return outcome


def _generator(index: int) -> torch.Generator:
    """`evaluate` seeds torch's own, which would make every draw the same."""
    return torch.Generator().manual_seed(100 + index)


def _another(generator: torch.Generator, value: Any) -> Any:
    return torch.randn(value.shape, generator=generator).to(value) if _is_float(value) else value


def _stacked(results: list[Results]) -> Results:
    assert all(one.keys() == results[0].keys() for one in results)
    return {name: torch.stack([one[name] for one in results]) for name in results[0]}


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def error(value: Tensor, exact: Tensor, least: float = 1e-30) -> float:
    """The root mean square difference, relative to the root mean square of the exact values.

    least: the size of the exact values, if they have none of their own.
    """
    difference = (value.double() - exact.double()).norm().item()
    return difference / max(exact.double().norm().item(), least)


def _least(name: str, exact: Results) -> float:
    """The size below which a result vanishes but for rounding, among the gradients or the outputs."""
    kind = [other for one, other in exact.items() if one.startswith("gradient") == name.startswith("gradient")]
    whole = sum(other.double().square().sum().item() for other in kind)
    mean = whole / max(1, sum(other.numel() for other in kind))
    return max(1e-30, VANISHING * (mean * exact[name].numel()) ** 0.5)


def assert_as_accurate(outcome: Outcome) -> None:
    """The rewritten program's error against float64 is no larger than the eager program's, result by result.

    The rounding error of a single number can be zero by chance, so that of eager counts as at least the median over
    all results of the model.
    """
    assert not outcome.report.errors, outcome.report.errors
    _assert_same_kind(outcome)
    complaints = _complaints(outcome)
    if complaints and outcome.more is not None:
        complaints = _complaints(outcome.more())
    assert not complaints, "\n".join([*complaints, str(outcome.report)])


def _complaints(outcome: Outcome) -> list[str]:
    assert outcome.exact is not None
    least = {name: _least(name, outcome.exact) for name in outcome.exact}
    errors = {name: error(value, outcome.exact[name], least[name]) for name, value in outcome.eager.items()}
    typical = median(errors.values())
    complaints = []
    ratios = []
    for name, value in outcome.rewritten.items():
        ours = error(value, outcome.exact[name], least[name])
        floor = FLOOR_ROUNDINGS * torch.finfo(value.dtype).eps
        # What is left of a gradient that vanishes comes through few numbers, however many it has.
        few = value[0].numel() < FEW or outcome.exact[name].double().norm().item() < least[name]
        slack = SLACK_FEW if few else SLACK
        allowed = slack * max(errors[name], typical) + floor
        if not ours <= allowed:
            complaints.append(f"{name}: {ours:.2e} rewritten, {errors[name]:.2e} eager, allowed {allowed:.2e}")
        if few:
            ratios.append((ours + floor) / (errors[name] + floor))
    if len(ratios) >= ENOUGH and geometric_mean(ratios) > SLACK_TOGETHER:
        complaints.append(f"{len(ratios)} results of few numbers: {geometric_mean(ratios):.1f} times eager's errors")
    return complaints


def assert_equal_to_eager(outcome: Outcome, roundings: float = 64.0) -> None:
    """Both programs give the same results to within the rounding of so many operations in the results' own dtype."""
    assert not outcome.report.errors, outcome.report.errors
    _assert_same_kind(outcome)
    complaints = []
    for name, value in outcome.rewritten.items():
        difference = error(value, outcome.eager[name])
        if not difference <= roundings * torch.finfo(value.dtype).eps:
            complaints.append(f"{name} differs by {difference:.2e}")
    assert not complaints, "\n".join([*complaints, str(outcome.report)])


def _assert_same_kind(outcome: Outcome) -> None:
    assert outcome.rewritten.keys() == outcome.eager.keys()
    assert not outcome.strides, outcome.strides
    for name, value in outcome.eager.items():
        ours = outcome.rewritten[name]
        assert ours.dtype == value.dtype, f"{name}: {ours.dtype}, eager {value.dtype}"
        assert ours.shape == value.shape, f"{name}: {tuple(ours.shape)}, eager {tuple(value.shape)}"
        assert torch.isfinite(ours).all() or not torch.isfinite(value).all(), f"{name} is not finite"
