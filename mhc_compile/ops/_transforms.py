"""The operators under autograd and torch.func: vmap, grad, and a refusal of forward mode.

torch.library gives a custom operator reverse mode only: forward mode would silently take every tangent for zero,
torch.func.grad fails on the Function that torch.library generates, and vmap calls the operator once per element.

What has a program (`ops._again`) needs nothing of torch.library either, which takes as long as two launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from mhc_compile import compat
from mhc_compile.ops._again import Calls, tensors_of

# More specific than the key that torch.library registers for, so nothing is overridden.
_KEYS = ("AutogradCPU", "AutogradCUDA", "AutogradMeta")

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
    """Give an operator of `library` its fake. For each file that does so, torch looks through all modules: 2 ms."""
    torch.library.register_fake(f"mhc::{name}", fake, lib=library)


def install(operator: Any, forward: Any = None) -> None:
    """Register the transforms of an operator that has a fake and, where there is one, a gradient already.

    forward: the operator whose backward it is, if it is one.
    """
    overload = operator._opoverload
    name = overload._schema.name.split("::")[1]
    kernel = _autograd_kernel(operator, overload)
    for key in _KEYS:
        library.impl(name, kernel, key, with_keyset=True)  # type: ignore[no-untyped-call]
    operator.register_vmap(_vmap_rule(overload, None if forward is None else forward._opoverload))


def _autograd_kernel(operator: Any, overload: Any) -> Callable[..., Any]:
    plain: Callable[..., Any] | None = None  # made at the first call: for all operators it is a fifth of the import
    positional = tuple(argument for argument in overload._schema.arguments if not argument.kwarg_only)
    scalar_defaults = {a.name: a.default_value for a in overload._schema.arguments if a.kwarg_only}

    calls = CALLS.get(overload._schema.name.split("::")[1])

    def set_up(ctx: Any, args: list[Any], scalars: dict[str, Any], result: Any) -> None:
        if operator._setup_context_fn is not None:
            args += [argument.default_value for argument in positional[len(args) :]]
            named = {"keyword_only_inputs": scalar_defaults | scalars} if scalar_defaults else {}
            operator._setup_context_fn(ctx=ctx, inputs=tuple(args), output=result, **named)

    def differentiated(ctx: Any, *gradients: Any) -> Any:
        return (*operator._backward_fn(ctx, *gradients), None)

    class Level(compat.SingleLevelFunction):  # type: ignore[misc]
        """The gradient at one level of torch.func, where the level's own interpreter is already at work."""

        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            *args, (keyset, scalars) = given
            # The levels below track gradients and tangents of their own, which this level's Function must not turn off.
            with torch.enable_grad(), compat.forward_grad_mode():
                result = compat.below_autograd(overload, keyset, args, scalars)
            set_up(ctx, args, scalars, result)
            return result

        backward = staticmethod(differentiated)

    def again(ctx: Any, *given: Any) -> Any:
        *args, (program, scalars) = given
        result = program(tensors_of(args))
        set_up(ctx, args, scalars, result)
        return result

    # The gradient of a call that has a program, by the name that torch.library gives to that of others: anomaly
    # detection says by it where a NaN came from.
    Again: Any = type(
        f"GeneratedBackwardFor_{overload._namespace}_{overload._opname}_{overload._overloadname}",
        (torch.autograd.Function,),
        {"forward": staticmethod(again), "backward": staticmethod(differentiated)},
    )

    def kernel(keyset: Any, *args: Any, **scalars: Any) -> Any:
        nonlocal plain
        if compat.forward_mode_is_active():
            _refuse_tangents(overload, args)
        tracked = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
        if tracked and operator._backward_fn is not None and compat.functorch_is_active():
            return compat.apply_at_this_level(Level, (*args, (keyset, scalars)))
        program = calls.program(args, scalars) if calls is not None and not compat.calls_are_watched() else None
        if program is not None:
            if tracked:
                return Again.apply(*args, (program, scalars))
            return program(tensors_of(args))
        if plain is None:
            plain = compat.custom_op_autograd_kernel(operator, overload)
        return plain(keyset, *args, **scalars)

    return kernel


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
