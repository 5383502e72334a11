"""Registration of the operators with torch.library.

An operator takes flat scalars (`rms_eps=...`), because that is what a schema can hold; its Python functions
take the objects of `mhc_compile.forms` that these scalars belong to. Schemas are spelled from the same
classes, so that names and defaults exist once.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mhc_compile import compat
from mhc_compile.encoding import in_one_line
from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.ops._again import Calls, tensors_of
from mhc_compile.ops._checks import check_present
from mhc_compile.ops._transforms import CALLS, install, library, register_fake

log = logging.getLogger(__name__)

# The operators and their gradients, in the order in which they are defined.
OPERATORS: list[tuple[Any, Any]] = []

_FORMS: dict[str, type[Rms] | type[Gates] | type[Sinkhorn]] = {
    "rms": Rms,
    "gates": Gates,
    "sinkhorn": Sinkhorn,
}
_PREFIXES = {"rms": "rms_", "gates": "", "sinkhorn": "sinkhorn_"}

Scalars = dict[str, Any]

# What operators do on the two kinds of devices, by name: what lowering traces.
REFERENCES: dict[str, Callable[..., Any]] = {}
KERNELS: dict[str, Callable[..., Any]] = {}


def scalars(*forms: str, prefixed: bool = True) -> str:
    """The flat scalars of these forms as they stand in a schema, with the defaults of `mhc_compile.forms`."""
    parts = []
    for form in forms:
        for name, default in _FORMS[form]().as_kwargs().items():
            spelled = name if prefixed else name.removeprefix(_PREFIXES[form])
            text = f'"{default}"' if isinstance(default, str) else repr(default)
            parts.append(f"{type(default).__name__} {spelled}={text}")
    return ", ".join(parts)


def group(forms: Sequence[str], flat: Scalars, *, prefixed: bool = True) -> Scalars:
    """Collect flat scalars into one object per form; what belongs to no form is passed on as it is."""
    rest = dict(flat)
    grouped: Scalars = {}
    for form in forms:
        prefix = _PREFIXES[form] if prefixed else ""
        fields = {field: rest.pop(prefix + field) for field in _FORMS[form].__dataclass_fields__}
        try:
            grouped[form] = _FORMS[form](**fields)
        except ValueError as error:  # it names the field
            raise ValueError(f"{prefix}{error}") from None
    return grouped | rest


def without_autocast(tensors: Sequence[Any]) -> AbstractContextManager[Any]:
    """Keep float32 internals under torch.autocast, which would reach into the reference's matmuls."""
    return autocast_off(next(tensor.device.type for tensor in tensors if isinstance(tensor, Tensor)))


def autocast_off(device: str) -> AbstractContextManager[Any]:
    """`without_autocast` for tensors of this type of device."""
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


@functools.cache
def _load_kernel(path: str) -> Callable[..., Any]:
    module, function = path.rsplit(".", 1)
    loaded: Callable[..., Any] = getattr(importlib.import_module(f"mhc_compile.kernels.{module}"), function)
    return loaded


def _runs_kernel(args: Sequence[Any]) -> bool:
    # Not at the top of the module: operators work where Triton is missing, and import without its cost.
    from mhc_compile.kernels import supports

    return supports(*(value for value in args if isinstance(value, Tensor)))


# What of Triton compiles kernels and keeps them, and launches none.
_COMPILER = r"triton[/\\](compiler[/\\]|backends[/\\]\w+[/\\]compiler\.py|runtime[/\\](build|cache)\.py)"


def _is_of_compiler(error: Exception) -> bool:
    """Whether Triton did not compile a kernel, or could not keep it, so that nothing was launched."""
    files = (frame.filename for frame in traceback.extract_tb(error.__traceback__))
    return type(error).__module__.partition(".")[0] == "triton" or any(re.search(_COMPILER, file) for file in files)


@functools.cache
def tell_of_kernel(operator: str, failure: str) -> None:
    """Say once that the reference stands for a kernel."""
    log.warning("%s runs without its kernel, which could not be compiled: %s", operator, failure)


def define(
    name: str,
    schema: str,
    *,
    check: Callable[..., Any],
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    forms: Sequence[str] = (),
    prefixed: bool = True,
    kernel: str | None = None,
) -> Any:
    """Define `mhc::name`; `check`, `reference` and `fake` take all arguments, scalars grouped into `forms`.

    It is defined without torch.library.custom_op, which would make an autograd class for each operator: a third of the
    time that the import takes.

    kernel: "module.function" below `mhc_compile.kernels`, imported at the first CUDA call and used for all
    that `mhc_compile.kernels.supports`; the rest runs the reference.
    """

    def prepare(given: Sequence[Any], given_scalars: Scalars) -> tuple[tuple[Any, ...], Scalars]:
        # The dispatcher drops arguments that equal their default.
        args = (*given, *positional_defaults[len(given) :])
        try:
            grouped = group(forms, scalar_defaults | given_scalars, prefixed=prefixed)
            for index, argument in required:
                check_present(argument, args[index])
            check(*args, **grouped)
        except (TypeError, ValueError) as error:
            raise type(error)(f"mhc::{name}: {error}") from None
        return args, grouped

    def implementation(*given: Any, **given_scalars: Any) -> Any:
        args, grouped = prepare(given, given_scalars)
        with without_autocast(args):
            return reference(*args, **grouped)

    def fake_implementation(*given: Any, **given_scalars: Any) -> Any:
        args, grouped = prepare(given, given_scalars)
        return fake(*args, **grouped)

    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    register_fake(name, fake_implementation)
    _implement(name, implementation, "CompositeExplicitAutograd")
    operator = getattr(torch.ops.mhc, name).default
    arguments = operator._schema.arguments
    required = [(index, argument.name) for index, argument in enumerate(arguments) if str(argument.type) == "Tensor"]
    positional_defaults = tuple(argument.default_value for argument in arguments if not argument.kwarg_only)
    scalar_defaults = {argument.name: argument.default_value for argument in arguments if argument.kwarg_only}

    REFERENCES[name] = implementation
    if kernel is not None:
        calls = CALLS[name] = Calls()

        def cuda_implementation(*given: Any, asked: Mapping[str, Any] | None = None, **given_scalars: Any) -> Any:
            # asked: what lowering asks of a kernel beyond its operator.
            program = None if asked else calls.program(given, given_scalars)
            if program is not None:
                return program(tensors_of(given))
            args, grouped = prepare(given, given_scalars)
            if _runs_kernel(args):
                function = functools.partial(_load_kernel(kernel), **grouped, **(asked or {}))
                try:
                    return function(*args) if asked else calls.run(given, given_scalars, function, args)
                except Exception as error:
                    # Ranks of one job have to compute with the same roundings.
                    if asked or not _is_of_compiler(error) or compat.job_store() is not None:
                        raise
                    tell_of_kernel(name, in_one_line(error))
            with without_autocast(args):
                return reference(*args, **grouped)

        _implement(name, cuda_implementation, "CUDA")
        KERNELS[name] = cuda_implementation
    return operator


def _implement(name: str, implementation: Callable[..., Any], key: str) -> None:
    # As the gradients (`ops._transforms`).
    library.impl(name, compat.hidden_from_dynamo(implementation), key)  # type: ignore[no-untyped-call]


def differentiate(
    operator: Any,
    backward_operator: Any,
    *,
    keep: Callable[[tuple[Any, ...], Any], tuple[Tensor | None, ...]],
    tensors: int,
    rest: Callable[[tuple[Any, ...]], tuple[Any, ...]] = lambda inputs: (),
    drop: Sequence[str] = (),
    last: str | None = None,
    with_needs: bool = True,
    finish: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[bool]], Sequence[Tensor | None]] | None = None,
    reaches: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> None:
    """Register `backward_operator(*gradients, *keep, *rest, needs, **scalars)` as the backward of `operator`.

    tensors: how many leading arguments are differentiable; keep: the tensors saved, from (inputs, output);
    rest: further positional arguments of the backward, from the inputs; drop: scalars that it does not take;
    last: the name of the last tensor saved, where the backward takes it after `needs`, if there is one;
    finish: makes the gradients, where the backward's results are not these, of its results, the tensors saved but for
    the last one, and needs;
    reaches: the outputs that an argument has a part in, where these are not all. Without a gradient of one of them it
    has none, and not zeros, which an optimizer with weight decay would take for a reason to change it.
    """

    def needed(ctx: Any) -> list[bool]:
        # An omitted optional argument has no entry in needs_input_grad.
        needs = [*ctx.needs_input_grad[:tensors]]
        return needs + [False] * (tensors - len(needs))

    def set_up(ctx: Any, inputs: tuple[Any, ...], scalars: Scalars, output: Any) -> None:
        # An output that nobody used sends None, so its part of the backward is not computed.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*keep(inputs, output))
        ctx.rest = rest(inputs)
        ctx.scalars = {name: value for name, value in scalars.items() if name not in drop}
        ctx.inputs = len(inputs)
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        # What depends on no argument with a gradient has none in eager code, where it may be returned or written.
        reached = (reaches.get(at, range(len(outputs))) for at, need in enumerate(needed(ctx)) if need)
        differentiable = {at for places in reached for at in places}
        ctx.mark_non_differentiable(*(result for at, result in enumerate(outputs) if at not in differentiable))

    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = needed(ctx)
        for argument, outputs in reaches.items():
            needs[argument] = needs[argument] and any(gradients[output] is not None for output in outputs)
        if all(gradient is None for gradient in gradients) or not any(needs):
            return tuple([None] * ctx.inputs)
        saved, named = ctx.saved_tensors, {}
        if last is not None:
            *saved, optional = saved
            named = {} if optional is None else {last: optional}
        arguments = (*gradients, *saved, *ctx.rest, *([needs] if with_needs else []))
        results = backward_operator(*arguments, **named, **ctx.scalars)
        results = results if isinstance(results, (tuple, list)) else (results,)
        if finish is not None:
            results = finish(results, saved, needs)
        wanted = [result if need else None for result, need in zip(results, needs, strict=True)]
        wanted += [None] * (ctx.inputs - tensors)
        return tuple(wanted)

    def refuse(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            f"{backward_operator._schema.name} cannot be differentiated again: hyper-connection operators have first "
            "derivatives only (called with create_graph=True?)"
        )

    install(operator, backward, set_up)
    install(backward_operator, refuse, forward=operator)
    OPERATORS.append((operator, backward_operator))
