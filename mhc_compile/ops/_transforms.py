"""The operators under autograd and torch.func: vmap, grad, and a refusal of forward mode.

torch.library would give a custom operator reverse mode only: forward mode would silently take every tangent for zero,
torch.func.grad would fail, and vmap would call the operator once per element. A call through it also takes as long as
two launches. A call with a program (`ops._again`) needs nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from mhc_compile import compat
from mhc_compile.ops._again import Calls, tensors_of

# What is a token's, for all operators; every other tensor is a parameter. A backward operator's gradients are a
# token's too.
_TOKEN_ARGUMENTS = frozenset({"x", "x_new", "f", "h", "ms", "h_pre", "h_post", "h_res", "logits"})


def is_of_tokens(argument: str) -> bool:
    """Whether an argument of this name has the tokens' dims in front."""
    return argument in _TOKEN_ARGUMENTS or argument.startswith("d_")


# The calls of those operators that have kernels, by name.
CALLS: dict[str, Calls] = {}

library = torch.library.Library("mhc", "FRAGMENT")  # type: ignore[no-untyped-call]


def register_fake(name: str, fake: Callable[..., Any]) -> None:
    """Give an operator of `library` its fake. For each file that calls it, torch looks through all modules (2 ms)."""
    torch.library.register_fake(f"mhc::{name}", fake, lib=library)


# What keeps on ctx, of all arguments, all scalars and the result, what the backward needs.
SetUp = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


def install(operator: Any, backward: Callable[..., Any], set_up: SetUp | None = None, *, forward: Any = None) -> None:
    """Register the gradient and the transforms of an operator that has a fake.

    backward: takes ctx and the gradients of the results; forward: the operator whose backward it is, if it is one.
    """
    kernel = _autograd_kernel(operator, backward, set_up)
    library.impl(operator._opname, kernel, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
    torch.library.register_vmap(operator._schema.name, _vmap_rule(operator, forward), lib=library)


def _autograd_kernel(operator: Any, backward: Callable[..., Any], set_up: SetUp | None) -> Callable[..., Any]:
    arguments = operator._schema.arguments
    positional = tuple(argument for argument in arguments if not argument.kwarg_only)
    scalar_defaults = {argument.name: argument.default_value for argument in arguments if argument.kwarg_only}
    calls = CALLS.get(operator._opname)

    def run(keyset: Any, args: Sequence[Any], scalars: dict[str, Any], program: Any) -> Any:
        if program is not None:
            return program(tensors_of(args))
        return compat.below_autograd(operator, keyset, args, scalars)

    def tracked_forward(ctx: Any, *given: Any) -> Any:
        *args, (keyset, scalars, program) = given
        result = run(keyset, args, scalars, program)
        if set_up is not None:
            # The dispatcher drops arguments that equal their default.
            args += [argument.default_value for argument in positional[len(args) :]]
            set_up(ctx, tuple(args), scalar_defaults | scalars, result)
        return result

    def forward_of_level(ctx: Any, *given: Any) -> Any:
        # The levels below track gradients and tangents of their own, which this level's Function must not turn off.
        with torch.enable_grad(), compat.forward_grad_mode():
            return tracked_forward(ctx, *given)

    def tracked_backward(ctx: Any, *gradients: Any) -> Any:
        return (*backward(ctx, *gradients), None)

    # Made at the first call: for all operators they are a tenth of the import.
    function: Any = None
    function_of_level: Any = None

    def make() -> None:
        nonlocal function, function_of_level
        # Dynamo leaves some calls to run as they are. It is not to trace what an operator does there.
        backward = staticmethod(compat.hidden_from_dynamo(tracked_backward))
        made = {"forward": staticmethod(tracked_forward), "backward": backward}
        of_level = {"forward": staticmethod(forward_of_level), "backward": backward}
        # At one level of torch.func, the level's own interpreter is already at work.
        function_of_level = type("Level", (compat.SingleLevelFunction,), of_level)
        # Anomaly detection says by this name where a NaN came from. It is the one that torch.library would give.
        function = type(f"GeneratedBackwardFor_mhc_{operator._opname}_default", (torch.autograd.Function,), made)

    def kernel(keyset: Any, *args: Any, **scalars: Any) -> Any:
        if compat.forward_mode_is_active():
            _refuse_tangents(operator, args)
        tracked = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
        if tracked and function is None:
            make()
        if tracked and compat.functorch_is_active():
            return compat.apply_at_this_level(function_of_level, (*args, (keyset, scalars, None)))
        program = calls.program(args, scalars) if calls is not None and not compat.calls_are_watched() else None
        if tracked:
            return function.apply(*args, (keyset, scalars, program))
        return run(keyset, args, scalars, program)

    return compat.hidden_from_dynamo(kernel)  # type: ignore[no-any-return]


def _refuse_tangents(overload: Any, args: Sequence[Any]) -> None:
    for argument, value in zip(overload._schema.arguments, args, strict=False):
        if not isinstance(value, Tensor):
            continue
        if forward_ad.unpack_dual(value, level=0).tangent is not None:  # type: ignore[no-untyped-call]
            raise NotImplementedError(
                f"{overload._schema.name} has no forward-mode derivative, and {argument.name} has a tangent: "
                "hyper-connection operators have gradients (reverse mode) only"
            )


def tensors_in(overload: Any) -> list[str]:
    """The names of an operator's arguments that are tensors."""
    arguments = overload._schema.arguments
    return [argument.name for argument in arguments if str(argument.type) in ("Tensor", "Optional[Tensor]")]


def _vmap_rule(overload: Any, forward: Any) -> Callable[..., Any]:
    arguments = tuple(argument for argument in overload._schema.arguments if not argument.kwarg_only)
    names = [argument.name for argument in arguments]
    of_tokens = tuple(is_of_tokens(name) for name in names)
    # The flags of a backward's needs are for the tensors that its forward takes.
    differentiable = tensors_in(forward) if forward is not None and "needs" in names else []

    def rule(info: Any, given_dims: Sequence[Any], *args: Any, **scalars: Any) -> Any:
        # A list of flags comes with a list of None.
        in_dims = tuple(dim if isinstance(dim, int) else None for dim in given_dims)
        batched = [value for value, dim in zip(args, in_dims, strict=True) if dim is not None]
        parameters = [d for d, tokens in zip(in_dims, of_tokens, strict=False) if d is not None and not tokens]
        given = dict(zip(names, args, strict=False))
        needs = zip(differentiable, given.get("needs", ()), strict=False)
        wanted = [need and given.get(name) is not None for name, need in needs]
        # Gradients of parameters, which are sums over tokens, have not a token's dimensions.
        sums = any(want and not is_of_tokens(name) for name, want in zip(differentiable, wanted, strict=False))
        if not batched or parameters or sums:
            return _loop(overload, info.batch_size, in_dims, args, scalars)
        moved = [
            _in_front(value, dim, info.batch_size, own)
            for value, dim, own in zip(args, in_dims, of_tokens, strict=False)
        ]
        result = overload(*moved, **scalars)
        if isinstance(result, Tensor):
            return result, 0
        # A gradient that was not asked for has no batch.
        asked = [*wanted, *[not differentiable] * (len(result) - len(wanted))]
        return result, tuple(0 if one else None for one in asked)

    return rule


def _in_front(value: Any, dim: int | None, size: int, of_tokens: bool) -> Any:
    if not isinstance(value, Tensor) or not of_tokens:
        return value
    return value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)


def _loop(
    overload: Any, size: int, in_dims: tuple[int | None, ...], args: Sequence[Any], scalars: dict[str, Any]
) -> Any:
    if size == 0:  # what a sample would give says which shapes there are none of
        args = [v if d is None else v.new_zeros(v.movedim(d, 0).shape[1:]) for v, d in zip(args, in_dims, strict=True)]
        made = overload(*args, **scalars)
        if isinstance(made, Tensor):
            return made.new_empty(0, *made.shape), 0
        return tuple(part.new_empty(0, *part.shape) for part in made), (0,) * len(made)
    results = [
        overload(*(v if d is None else v.select(d, i) for v, d in zip(args, in_dims, strict=True)), **scalars)
        for i in range(size)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])
