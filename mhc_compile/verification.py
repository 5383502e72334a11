"""Whether a model computes the same, compiled with the "mhc" backend: eager, Inductor and mhc against float64."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from mhc_compile import backend, compat, kernels, records
from mhc_compile.arguments import check_model
from mhc_compile.passes.report import Report
from mhc_compile.testing.draws import KeepDraws
from mhc_compile.testing.evaluation import (
    check_memory,
    evaluate,
    exact_results,
    first_results,
    kept,
    tensors_of,
)
from mhc_compile.testing.judging import Errors, Finding, judge

RUNS = ("eager", "inductor", "mhc")
_HOW = {"float64": "in float64", "eager": "eagerly", "inductor": "compiled by Inductor", "mhc": "compiled by mhc"}
# How many more runs follow a bad verdict, and by how much their parameters are perturbed.
_REPEATS = 8
_PERTURBATION = 0.01
# Larger errors of eager code than these are no roundings: in float32, and where anything is narrower.
_LARGEST, _LARGEST_NARROW = 0.01, 0.5


class VerificationError(RuntimeError):
    """The compiled model is less accurate than the eager one; `verification` holds the numbers."""

    def __init__(self, verification: Verification) -> None:
        super().__init__(verification)
        self.verification = verification

    def __str__(self) -> str:
        return str(self.verification)


@dataclass
class Verification:
    """What `verify` found.

    errors holds, for "eager", "inductor" and "mhc", the errors of every result: `errors["mhc"].relative(name)`. Names
    are those of outputs ("output.logits"), and "gradient of " a parameter or an input. findings are the comparisons of
    mhc with eager, report what was rewritten, seconds how long each run took, its compilation included.
    """

    errors: dict[str, Errors] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    report: Report = field(default_factory=Report)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def failures(self) -> list[Finding]:
        """The comparisons in which mhc's error is larger than eager's, beyond what chance explains."""
        return [finding for finding in self.findings if not finding.ok]

    @property
    def ok(self) -> bool:
        """Whether mhc is as accurate as eager in everything that was compared, and no pass failed."""
        return not self.failures and not self.report.errors

    def __str__(self) -> str:
        """A table: results together, the worst of them, and all that failed; then the verdict."""
        shown = [f for f in self.findings if len(f.names) > 1]
        alone = [f for f in self.findings if len(f.names) == 1]
        for kind in ("output", "gradient"):
            of_kind = [f for f in alone if f.what.startswith(kind)]
            shown += sorted(of_kind, key=lambda f: f.excess)[-1:]
        shown += [f for f in self.failures if f not in shown]
        width = max([len(f.what) for f in shown] + [24])
        lines = [
            f"{'relative error to float64':<{width}}" + "".join(f"{run:>11}" for run in self.errors) + "    allowed"
        ]
        for finding in shown:
            cells = [finding.measure(self.errors[run]) for run in self.errors]
            mark = "" if finding.ok else "   <-- larger than eager's"
            numbers = "".join(f"{cell:>11.2e}" for cell in (*cells, finding.limit))
            lines.append(f"{finding.what:<{width}}{numbers}{mark}")
        times = ", ".join(f"{run} {self.seconds[run]:.1f} s" for run in self.seconds)
        rewritten = len(self.report.rewritten)
        lines.append(f"{rewritten} of {self.report.found} hyper-connection sites rewritten; runs took {times}")
        lines += self.report.told_of_cut()
        lines += [f"error in the passes: {message}" for message in self.report.errors]
        return "\n".join([*lines, self._verdict()])

    def _verdict(self) -> str:
        if self.ok:
            what = "as accurate as eager" if self.report.rewritten else "right, but nothing was rewritten"
            return f"ok: {what}" + ("; what is cut or not compiled stands above" if self.report.cut else "")
        if not self.failures:
            return "FAILED: the passes failed on a graph, which was compiled as it was"
        verdict = f"FAILED: {_counted(self.failures)} less accurate than eager's"
        inductor = "inductor" in self.errors and all(
            f.measure(self.errors["inductor"]) > f.limit for f in self.failures
        )
        return verdict + (", with plain Inductor as well: the rewriting is not the cause" if inductor else "")


def _counted(findings: list[Finding]) -> str:
    return "1 result is" if len(findings) == 1 else f"{len(findings)} results are"


def verify(
    model: nn.Module,
    /,
    *args: Any,
    grad: bool = True,
    inductor: bool = True,
    raises: bool = True,
    say: Callable[[str], Any] | None = print,
    **kwargs: Any,
) -> Verification:
    """Check, before training, that `backend="mhc"` computes what `model(*args, **kwargs)` does.

    The model runs eagerly, compiled by Inductor, compiled by mhc, and in float64. The outputs of each run are compared
    with float64, and so are all gradients, of parameters and of inputs. Inputs that require no gradient get one, unless
    the model then fails. The float64 run needs memory for a copy of the model and its activations. mhc's errors may be
    as large as eager's, within a margin for chance that `mhc_compile.testing.judge` explains. If some errors are
    larger, eager and mhc run 8 more times, with parameters perturbed by 1%. All runs are then judged together: one
    unlucky run does not decide.

    Gradients are those of the output's `loss`, if it has one, and otherwise of a fixed random combination of all
    outputs that require a gradient. Random draws, such as dropout, use the same seed in each run, and the float64 run
    takes the draws of the eager run. The model may return tensors in tuples, dicts or dataclasses. Infinities and NaN
    are right where float64 or eager has the same.

    Afterwards, parameters, buffers, inputs, gradients, the training mode and the random number generators are as
    before. So are other attributes that modules assign, and generators that they hold. What a model changes inside
    other objects among its attributes, such as a list, stays changed, also from one run to the next. Compiled code,
    `mhc_compile.report()` and Inductor's caches are as before, too.

    Parameters and inputs may be DTensors. Then all ranks of their mesh call `verify`, and whole results are compared.

    Args:
        model: the module. If it went through `torch.compile`, the original module is taken, and of a
            `DistributedDataParallel` a copy of the module within: each process verifies it with its own inputs.
        grad: whether to compare gradients. If not, the model runs under `torch.no_grad()`.
        inductor: whether to run plain Inductor as well. It only shows which errors are usual, and may compile long.
        raises: whether to raise `VerificationError` if mhc is less accurate.
        say: a function that gets the progress, and the table in the end, line by line; None for silence.

    Returns:
        A `Verification`: `ok`, `failures`, `errors`, `report`; its text is the table.

    Raises:
        VerificationError: mhc is less accurate than eager, or its passes failed. The message is the table.
        MemoryError: the float64 copy of the model does not fit.
        ValueError: the model does not run in float64, or draws other random numbers there; or no output requires a
            gradient, or there is nothing to compare.
        TypeError: model is no module. A function, compiled or not, has no parameters to compare.
    """
    check_model(model)
    module = _within(model)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"model: expected a torch.nn.Module, got {type(model).__name__}: the float64 evaluation and the comparison "
            "of gradients need its parameters; pass the module whose method it is, or one whose forward calls it"
        )
    if any(leaf.is_meta for leaf in tensors_of(module, args, kwargs)):
        raise ValueError("model: it or an argument is on meta; expected a device that has numbers")
    tell = say or (lambda line: None)
    runs = [run for run in RUNS if inductor or run != "inductor"]
    result = Verification(errors={run: Errors() for run in runs})
    # A cache of its own: what is found in one has no report, and what draws eager's random numbers serves no one later.
    with (
        torch.inference_mode(False),
        kept(module),
        compat.uncompiled(module),
        compat.fresh_inductor_cache(),
        compat.inductor_config().patch(fallback_random=True),
        compat.without_tracebacks(),
        compat.apart(None),
        records.aside(),
        contextlib.ExitStack() as compilations,
    ):
        check_memory(module, grad)
        tell(f"verify: runs the model {', '.join(_HOW[run] for run in ('float64', *runs))}")
        if inductor:
            tell("verify: a first compilation may take minutes; inductor=False leaves out plain Inductor's")
        tell("verify: eager ...")
        args, kwargs, draws, usual, result.seconds["eager"] = first_results(module, args, kwargs, grad)
        tell("verify: float64 ...")
        exact = exact_results(module, args, kwargs, grad, draws)
        result.errors["eager"].add(usual, exact, usual)
        narrow = draws.narrow or not kernels.products_are_exact()
        _check_errors(result.errors["eager"], narrow, module, args, kwargs)
        for run in runs[1:]:
            tell(f"verify: {run} ...")
            begin = time.perf_counter()
            call = compilations.enter_context(_compiled(module, run, result))
            with backend.paused() if run == "inductor" else contextlib.nullcontext():
                found = evaluate(call, module, args, kwargs, grad)
            result.seconds[run] = time.perf_counter() - begin
            result.errors[run].add(found, exact, usual)
        result.findings = _findings(result.errors, list(exact))
        if _on_any_rank(bool(result.failures), module, args, kwargs):
            more = f"{_REPEATS} runs with parameters perturbed by {_PERTURBATION:.0%} show if that is chance ..."
            tell(f"verify: {_counted(result.failures)} less accurate in one run; {more}")
            # All of them, and judged once: to stop at the first verdict that is good would make it good by chance.
            for repeat in range(_REPEATS):
                with _perturbed(module, repeat):
                    _run_again(result.errors, call, module, args, kwargs, grad)
            result.findings = _findings(result.errors, list(exact))
    for line in str(result).splitlines():
        tell(line)
    if raises and not result.ok:
        raise VerificationError(result)
    return result


def _within(model: Any) -> Any:
    """The module that is compiled, or in which gradients are averaged: of the latter a copy.

    The reducer of `DistributedDataParallel` is called by every backward pass through its parameters, and fails after
    one that did not begin with its own forward pass.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return model
    return copy.deepcopy(_within(model.module))


def _on_any_rank(found: bool, *given: Any) -> bool:
    """Whether this was found on any rank of the mesh of the DTensors that are given; without any, on this one.

    Ranks run models with DTensors together: all again, or none.
    """
    shared = next((leaf for leaf in tensors_of(*given) if compat.is_dtensor(leaf)), None)
    if shared is None:
        return found
    from torch.distributed.tensor import DTensor, Partial

    mesh = compat.mesh_of(shared)
    local = torch.tensor([float(found)], device=mesh.device_type)
    largest = DTensor.from_local(local, mesh, [Partial("max")] * mesh.ndim, run_check=False).full_tensor()
    return bool(largest.item())


def _findings(errors: dict[str, Errors], names: list[str]) -> list[Finding]:
    found = []
    for group in ("outputs", "gradients"):
        members = [name for name in names if name.startswith(group[:-1])]
        if members:
            found += judge(errors["eager"], errors["mhc"], members, group, vanishing=group == "gradients")
    return found


def _run_again(
    errors: dict[str, Errors], compiled: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, grad: bool
) -> None:
    """Add one more run to the errors of eager and mhc."""
    draws = KeepDraws()
    with draws:
        usual = evaluate(module, module, args, kwargs, grad)
    exact = exact_results(module, args, kwargs, grad, draws)
    errors["eager"].add(usual, exact, usual)
    errors["mhc"].add(evaluate(compiled, module, args, kwargs, grad), exact, usual)


@contextlib.contextmanager
def _perturbed(module: nn.Module, seed: int) -> Iterator[None]:
    """Perturbed parameters meanwhile, which round differently. Those of subclasses, such as quantized ones, stay.

    Of DTensors each rank perturbs its part. Ranks with equal parts draw equal numbers.
    """
    plain = [p for p in module.parameters() if type(p) is nn.Parameter and p.is_floating_point()]
    placed = [p for p in module.parameters() if compat.is_dtensor(p) and p.is_floating_point()]
    parameters = [*plain, *(compat.local_of(p) for p in placed)]
    before = [parameter.detach().clone() for parameter in parameters]
    torch.manual_seed(seed)
    try:
        with torch.no_grad():
            for at, parameter in enumerate(parameters):
                if at >= len(plain):
                    torch.manual_seed(seed + (1 + at) * _REPEATS)  # whatever the sizes of the parts before were
                parameter.mul_(1 + _PERTURBATION * torch.randn_like(parameter))
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


@contextlib.contextmanager
def _compiled(module: nn.Module, run: str, result: Verification) -> Iterator[Callable[..., Any]]:
    """What a run calls. In the end Dynamo forgets what it compiled for the run, and `result` has the report of mhc."""
    compile_graph: Callable[..., Any] = backend.mhc if run == "mhc" else compat.compile_by_inductor

    # A backend of its own: code that the process has compiled by the backend of this name does not serve here.
    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = compile_graph(gm, example_inputs)
        return compiled

    compiler.__name__ = run  # by which `backend.whole` knows it
    with records.aside(), compat.apart(compiler, records.give_up, records.reach_limit):
        yield torch.compile(module, backend=compiler)
        if run == "mhc":
            result.report = records.report()


def _check_errors(eager: Errors, narrow: bool, *given: Any) -> None:
    """Eager's errors are roundings, or there is nothing to compare with. given: what may hold DTensors."""
    if not any(eager.numbers.values()):
        raise ValueError("model: all of its results are infinite or NaN; expected some numbers to compare")
    limit = _LARGEST_NARROW if narrow else _LARGEST
    for group in ("output", "gradient"):
        names = [name for name in eager.numbers if name.startswith(group) and eager.dtypes[name].is_floating_point]
        error = eager.relative(*names)
        if _on_any_rank(error > limit, *given):
            raise ValueError(
                f"model: eager's {group}s are {error:.2g} off those in float64, where {limit} is the most; either "
                "float64 drew other random numbers (try eval()), or the model magnifies roundings and cannot be judged"
            )
