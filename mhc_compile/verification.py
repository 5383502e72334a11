"""Whether a model computes the same, compiled with the "mhc" backend: eager, Inductor and mhc against float64."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from mhc_compile import backend, compat, kernels, records
from mhc_compile.arguments import check_model
from mhc_compile.encoding import in_one_line
from mhc_compile.passes.report import Report
from mhc_compile.testing.draws import KeepDraws, ReplayDraws
from mhc_compile.testing.float64 import Float64Reference, widened
from mhc_compile.testing.judging import Errors, Finding, judge

RUNS = ("eager", "inductor", "mhc")
_HOW = {"float64": "in float64", "eager": "eagerly", "inductor": "compiled by Inductor", "mhc": "compiled by mhc"}
_SEED = 0
# How many more runs follow a bad verdict, and by how much their parameters are perturbed.
_REPEATS = 8
_PERTURBATION = 0.01
# Larger errors of eager code than these are no roundings: in float32, and where anything is narrower.
_LARGEST, _LARGEST_NARROW = 0.01, 0.5

Results = dict[str, torch.Tensor]


class VerificationError(RuntimeError):
    """The compiled model is less accurate than the eager one; `verification` holds the numbers."""

    def __init__(self, verification: Verification) -> None:
        super().__init__(str(verification))
        self.verification = verification


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
            shown += sorted(of_kind, key=_severity)[-1:]
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


def _severity(finding: Finding) -> float:
    return finding.error / finding.limit if finding.limit else float(not finding.ok)


def verify(
    model: nn.Module,
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
    before. Compiled code, `mhc_compile.report()` and Inductor's caches are as before, too.

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
    if any(leaf.is_meta for leaf in _tensors(module, args, kwargs)):
        raise ValueError("model: it or an argument is on meta; expected a device that has numbers")
    tell = say or (lambda line: None)
    runs = [run for run in RUNS if inductor or run != "inductor"]
    result = Verification(errors={run: Errors() for run in runs})
    usual: Results = {}
    # A cache of its own: what is found in one has no report, and what draws eager's random numbers serves no one later.
    with (
        torch.inference_mode(False),
        _kept(module),
        compat.uncompiled(module),
        compat.fresh_inductor_cache(),
        compat.inductor_config().patch(fallback_random=True),
        compat.without_tracebacks(),
        compat.apart(None),
        records.aside(),
        contextlib.ExitStack() as compilations,
    ):
        _check_memory(module)
        tell(f"verify: runs the model {', '.join(_HOW[run] for run in ('float64', *runs))}")
        if inductor:
            tell("verify: a first compilation may take minutes; inductor=False leaves out plain Inductor's")
        tell("verify: float64 ...")
        args, kwargs, draws = _first(module, args, kwargs, grad)
        exact = _exact(module, args, kwargs, grad, draws)
        for run in runs:
            tell(f"verify: {run} ...")
            begin = time.perf_counter()
            call = compilations.enter_context(_compiled(module, run, result))
            with backend.paused() if run == "inductor" else contextlib.nullcontext():
                found = _evaluate(call, module, args, kwargs, grad)
            result.seconds[run] = time.perf_counter() - begin
            usual = usual or found  # eager's
            result.errors[run].add(found, exact, usual)
            if run == "eager":
                narrow = draws.narrow or not kernels.products_are_exact()
                _check_errors(result.errors[run], narrow, module, args, kwargs)
        result.findings = _findings(result.errors, list(exact))
        if _on_any_rank(bool(result.failures), module, args, kwargs):
            more = f"{_REPEATS} runs with parameters perturbed by {_PERTURBATION:.0%} show if that is chance ..."
            tell(f"verify: {_counted(result.failures)} less accurate in one run; {more}")
            # All of them, and judged once: to stop at the first verdict that is good would make it good by chance.
            for repeat in range(_REPEATS):
                with _perturbed(module, repeat):
                    _run_again(result.errors, call, module, args, kwargs, grad)
            result.findings = _findings(result.errors, list(exact))
    tell(str(result))
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
    shared = next((leaf for leaf in _tensors(*given) if compat.is_dtensor(leaf)), None)
    if shared is None:
        return found
    from torch.distributed.tensor import DTensor, Partial

    mesh = compat.mesh_of(shared)
    local = torch.tensor([float(found)], device=mesh.device_type)
    largest = DTensor.from_local(local, mesh, [Partial("max")] * mesh.ndim, run_check=False).full_tensor()
    return bool(largest.item())


def _tensors(*given: Any) -> list[torch.Tensor]:
    """The tensors that are given, and those of modules."""
    parts = [[*g.parameters(), *g.buffers()] if isinstance(g, nn.Module) else g for g in given]
    return [leaf for leaf in tree_leaves(parts) if isinstance(leaf, torch.Tensor)]


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
        usual = _evaluate(module, module, args, kwargs, grad)
    exact = _exact(module, args, kwargs, grad, draws)
    errors["eager"].add(usual, exact, usual)
    errors["mhc"].add(_evaluate(compiled, module, args, kwargs, grad), exact, usual)


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
    if run == "eager":
        yield module
        return
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


def _first(module: nn.Module, args: Any, kwargs: Any, grad: bool) -> tuple[Any, Any, KeepDraws]:
    """The arguments, of which all require a gradient if the model takes that, and what the model draws."""

    def requiring(value: Any) -> Any:
        wide = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
        return value.detach().clone().requires_grad_() if wide else value

    if grad:
        with contextlib.suppress(Exception), KeepDraws() as draws:
            every = tree_map(requiring, (args, kwargs))
            _evaluate(module, module, every[0], every[1], grad)
            return (*every, draws)
    with KeepDraws() as draws:
        _evaluate(module, module, args, kwargs, grad)
    return args, kwargs, draws


def _check_errors(eager: Errors, narrow: bool, *given: Any) -> None:
    """Eager's errors are roundings, or there is nothing to compare with. given: what may hold DTensors."""
    if not any(eager.numbers.values()):
        raise ValueError("model: all of its results are infinite or NaN; expected some numbers to compare")
    limit = _LARGEST_NARROW if narrow else _LARGEST
    for group in ("output", "gradient"):
        names = [name for name in eager.numbers if name.startswith(group) and eager.rounding[name]]
        error = eager.relative(*names)
        if _on_any_rank(error > limit, *given):
            raise ValueError(
                f"model: eager's {group}s are {error:.2g} off those in float64, where {limit} is the most; either "
                "float64 drew other random numbers (try eval()), or the model magnifies roundings and cannot be judged"
            )


def _exact(module: nn.Module, args: Any, kwargs: Any, grad: bool, draws: KeepDraws) -> Results:
    try:
        reference = Float64Reference(module)
        # Recomputation runs in backward, which torch calls without function modes: it would leave float64.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers is about to rename it
            getattr(reference.module, "gradient_checkpointing_disable", lambda: None)()
        reference.module.zero_grad(set_to_none=True)
        with ReplayDraws(draws.draws):
            return _evaluate(reference, reference.module, args, kwargs, grad, wide=True)
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            "model: its float64 evaluation does not fit; verify a smaller one of the same code"
        ) from error
    except Exception as error:
        raise ValueError(
            f"model: it runs as it is, and its float64 evaluation does not: {in_one_line(error)}; verify one whose "
            "operators take float64"
        ) from error


def _check_memory(module: nn.Module) -> None:
    tensors = [*module.parameters(), *module.buffers()]
    for device in {tensor.device for tensor in tensors}:
        held = [tensor for tensor in tensors if tensor.device == device]
        needed = 8 * sum(tensor.numel() * (1 + tensor.requires_grad) for tensor in held)
        free = _free_memory(device)
        if needed > free:
            raise MemoryError(
                f"model: its float64 copy and gradients need {needed / 2**30:.1f} GiB on {device}, which has "
                f"{free / 2**30:.1f} GiB left; verify a smaller one of the same code"
            )


def _free_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # Windows has no such names, and macOS not this one.
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return float("inf")


@contextlib.contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """Put gradients, training mode and random numbers back in the end; values are put back after every run.

    Hooks of parameters, such as one that makes a step of an optimizer, are not called meanwhile: the float64 copy has
    none.
    """
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    training = [(part, part.training) for part in module.modules()]
    every = [hooks for p in module.parameters() for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)]
    hooks = [(of, dict(of)) for of in every if of]
    devices = sorted({p.device.index for p in module.parameters() if p.device.type == "cuda"})
    state, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=devices):
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            for of, _ in hooks:
                of.clear()
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for of, before in hooks:
                of.update(before)
            for part, mode in training:
                part.training = mode
            random.setstate(state)
            if numpy:
                numpy.random.set_state(of_numpy)


def _seed() -> None:
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(_SEED)


def _evaluate(
    call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, grad: bool, wide: bool = False
) -> Results:
    """Outputs by name, and the gradients of `module`'s parameters and of the inputs that require one.

    A module that is called itself runs as it is written: functions that it compiles on its own are not compiled.
    wide is for a copy of the module, in float64, whose values need not be put back.
    """
    held = [] if wide else [tensor for tensor in (*module.buffers(), *module.parameters()) if _can_be_written(tensor)]
    values = [(tensor, tensor.detach().clone()) for tensor in held]
    leaves: dict[str, torch.Tensor] = {}

    def given(path: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        leaf = (widened(value) if wide else value).detach().clone()  # the model may write into it
        if not (grad and value.requires_grad):
            return leaf
        leaves[keystr(path)] = leaf.requires_grad_()
        return leaf.clone()  # what is no leaf may be written

    _seed()
    try:
        stance = torch.compiler.set_stance("force_eager") if call is module else contextlib.nullcontext()
        with stance, torch.set_grad_enabled(grad), warnings.catch_warnings():
            # Dynamo looks at the .grad of its inputs, and ours are no leaves.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            inputs, structure = tree_flatten_with_path((args, kwargs))
            given_args, given_kwargs = structure.unflatten([given(path, value) for path, value in inputs])
            output = call(*given_args, **given_kwargs)
            found = _named_tensors(output)
            if grad:
                _loss(output, found).backward()  # type: ignore[no-untyped-call]
        if not found and not grad:
            raise ValueError(
                f"model: its output has nothing to compare, got {type(output).__name__}; expected tensors, in tuples, "
                "dicts or dataclasses"
            )
        results = {f"output{name}": _whole(value.detach()) for name, value in found.items()}
        leaves = {f"input{name}": leaf for name, leaf in leaves.items()} | dict(module.named_parameters())
        for name, leaf in leaves.items() if grad else ():
            if leaf.requires_grad:
                # A compiled graph gives zeros to what eager code gives no gradient, such as what met no elements.
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                results[f"gradient of {name}"] = _whole(gradient)
        results = {name: _real(value).clone() for name, value in results.items()}
    finally:
        for parameter in module.parameters():
            parameter.grad = None
        with torch.no_grad():
            for tensor, before in values:
                tensor.copy_(before)
    return results


def _can_be_written(tensor: torch.Tensor) -> bool:
    """Not parameters of subclasses, such as quantized ones, nor what is expanded, or was made in inference mode."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) or not isinstance(tensor, nn.Parameter)
    once = all(stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (plain or compat.is_dtensor(tensor)) and once and not tensor.is_inference()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor, as a plain tensor; others as they are."""
    whole: torch.Tensor = tensor.full_tensor() if compat.is_dtensor(tensor) else tensor
    return whole


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The real and imaginary parts of complex numbers; others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _named_tensors(output: Any, place: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a model's output, by their place in it."""
    found = {}
    for path, value in tree_flatten_with_path(output)[0]:
        name = place + keystr(path)
        if isinstance(value, torch.Tensor) and value.numel():
            found[name] = value
        elif is_dataclass(value) and not isinstance(value, type):  # pytree does not know it
            for part in fields(value):
                found |= _named_tensors(getattr(value, part.name), f"{name}.{part.name}")
    return found


def _loss(output: Any, found: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
        return _whole(loss)
    generator = torch.Generator().manual_seed(_SEED)
    terms = []
    for value in found.values():
        if not value.requires_grad:
            continue
        value = _real(_whole(value))
        weight = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
        terms.append((value.double() * weight).sum())
    if not terms:
        raise ValueError("model: no output requires a gradient; pass grad=False to compare outputs alone")
    return torch.stack(terms).sum()
