"""The values that stand for tensors and sizes while a graph is made: fake tensors, symbolic sizes and floats."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeGuard

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mhc_compile.budget import Steps

# How many sizes of one graph guards may settle: graphs have a few dozen symbols.
MOST_SIZES = 1000


def symbolic_expression(size: Any) -> Any:
    """The sympy expression of a SymInt or SymFloat; None for plain numbers."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat)) else None


def symbols(values: Any) -> set[Any]:
    """The symbols in the sizes, strides and offsets of some tensors, and in sizes themselves."""
    leaves = torch.utils._pytree.tree_leaves(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    numbers = [*leaves, *(n for t in tensors for n in (*t.shape, *t.stride(), t.storage_offset()))]
    found = map(symbolic_expression, numbers)
    return {symbol for expression in found if expression is not None for symbol in expression.free_symbols}


@contextlib.contextmanager
def quiet_shape_env(fake_mode: Any) -> Iterator[None]:
    """Run fake tensors for looking only: no guards are added, no unbacked symbols left pending."""
    shape_env = getattr(fake_mode, "shape_env", None)
    if shape_env is None:
        yield
        return
    with shape_env.suppress_guards(), shape_env.ignore_fresh_unbacked_symbols():
        yield


class NeedsGuard(Exception):
    """The work depends on a symbolic size, but no more guards may be added."""


@contextlib.contextmanager
def without_guards(fake_mode: Any) -> Iterator[None]:
    """Raise NeedsGuard where fake tensors ask for a guard: once a graph has all of its own, another would be lost."""
    shape_env = getattr(fake_mode, "shape_env", None)
    if shape_env is None:
        yield
        return

    def refuse(expression: Any, value: Any) -> None:
        raise NeedsGuard(f"it depends on whether {expression}")

    # Set on the instance. It is the only function that both torch 2.11 and 2.13 call before they add a guard.
    shape_env._check_frozen = refuse
    try:
        yield
    finally:
        del shape_env._check_frozen


@contextlib.contextmanager
def quiet_fakes(values: Any) -> Iterator[None]:
    """Run an operator on the fake tensors among these values, without guards."""
    from torch.utils import _pytree as pytree

    mode = common_fake_mode(pytree.tree_leaves(values))
    with quiet_shape_env(mode), mode or contextlib.nullcontext():
        yield


@contextlib.contextmanager
def without_fake_tracebacks() -> Iterator[None]:
    """Let torch not print the stack of an operator that cannot be run on fake tensors: it raises as well."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_is_no_fake_traceback)
    try:
        yield
    finally:
        log.removeFilter(_is_no_fake_traceback)


def _is_no_fake_traceback(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("failed while attempting to run meta")


# The module of DTensors, which takes half a second to import. A program without it has none.
DTENSORS = "torch.distributed.tensor"


def is_dtensor(value: object) -> TypeGuard[Any]:
    """Whether this is a DTensor."""
    module = sys.modules.get(DTENSORS)
    return module is not None and isinstance(value, module.DTensor)


def placements(value: Any) -> tuple[Any, ...]:
    """How a DTensor is placed on its mesh; nothing for others."""
    return tuple(value.placements) if is_dtensor(value) else ()


def local_of(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor, without a node of autograd."""
    local: torch.Tensor = tensor._local_tensor
    return local


def _within(value: Any) -> Any:
    """This rank's part of a DTensor; others as they are."""
    return local_of(value) if is_dtensor(value) else value


def as_dtensor(local: torch.Tensor, mesh: Any, placements: Sequence[Any], like: torch.Tensor) -> Any:
    """The DTensor of which `local` is this rank's part; `like` has its global shape, strides and dtype.

    The documented `DTensor.from_local` would make a view of `local`.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(like.shape, like.stride(), like.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local.detach() if local.requires_grad else local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def common_fake_mode(values: Iterable[Any]) -> Any:
    """The mode of the fake tensors among these values, None without any."""
    modes = (getattr(_within(value), "fake_mode", None) for value in values)
    return next((mode for mode in modes if mode is not None), None)


def fake_mode_of(tensor: Any) -> Any:
    """The mode in which factory functions make tensors like this one, which torch.func may have wrapped."""
    return getattr(_within(_unwrapped(tensor)), "fake_mode", None) or contextlib.nullcontext()


def _unwrapped(tensor: Any) -> Any:
    """The tensor that torch.func has wrapped, at all its levels; others as they are."""
    functorch = torch._C._functorch
    while isinstance(tensor, torch.Tensor) and functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether this stands for many tensors, at a level of torch.vmap that may have ended."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def requires_gradient(tensor: torch.Tensor) -> bool:
    """Whether a tensor requires a gradient, or one does that it stands for: a tensor of torch.vmap does not say so."""
    functorch = torch._C._functorch
    while not tensor.requires_grad:
        if not functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = functorch.get_unwrapped(tensor)
    return True


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether this is of a subclass that holds other tensors, such as DTensor."""
    return is_traceable_wrapper_subclass(tensor)


def no_view(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of what is a view, with its strides; other tensors as they are. What is expanded becomes whole."""
    if not tensor._is_view():
        return tensor
    if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor)


def depends_on_data(error: Exception) -> bool:
    """Whether fake tensors refused to run something: it depends on data, or has no fake implementation."""
    from torch._subclasses import fake_tensor
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    names = ("UnsupportedFakeTensorException", "DataDependentOutputException", "DynamicOutputShapeException")
    kinds = tuple(getattr(fake_tensor, name) for name in names)
    return isinstance(error, (*kinds, GuardOnDataDependentSymNode))


def another_fake(tensor: Any) -> torch.Tensor:
    """A tensor like this one, of the same fake mode, that shares no memory with it.

    Where no size is symbolic it is made without the dispatcher, which would take five times as long.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._mode_utils import no_dispatch

    made: torch.Tensor
    if is_dtensor(tensor):
        made = as_dtensor(another_fake(local_of(tensor)), tensor.device_mesh, tensor.placements, tensor)
        return made.requires_grad_(tensor.requires_grad)
    shape, strides = tensor.shape, tensor.stride()
    if isinstance(tensor, FakeTensor) and all(type(size) is int for size in (*shape, *strides)):
        with no_dispatch():
            memory = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")
            made = FakeTensor(tensor.fake_mode, memory, tensor.device)
    else:
        with fake_mode_of(tensor):
            made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(tensor.requires_grad)


def composites_in_python() -> AbstractContextManager[Any]:
    """Composite operators as torch writes them in Python, which is how Inductor takes them apart.

    In C++, dropout is made of other calls, and torch 2.11 asks for the numbers of symbolic sizes, in linear and in
    matmul for example, and so binds the graph to them.
    """
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


class FloatWatch:
    """Collects the symbolic floats whose values a decision was based on.

    With `dynamic=True`, a module's eps is an input of the graph. A form that was recognised at one value need not hold
    at another, and a compiled graph may be found again in a cache. So such a float has to become a constant of the
    program. `settle` makes Dynamo trace once more with this constant, as Inductor does for floats it cannot keep.
    """

    def __init__(self) -> None:
        self._symbols: set[str] = set()

    def value(self, number: torch.SymFloat) -> float | None:
        """The value at capture, and the float is remembered; None for one that comes from a size, which stays open."""
        symbols = {str(symbol) for symbol in number.node.expr.free_symbols}
        if not all(symbol.startswith("zf") for symbol in symbols):
            return None
        self._symbols |= symbols
        return float(number.node.hint)

    def clear(self) -> None:
        """Forget what was collected."""
        self._symbols.clear()

    def settle(self) -> None:
        """Raise Dynamo's restart if a decision depends on a symbolic float."""
        if self._symbols:
            from torch._dynamo.exc import TensorifyScalarRestartAnalysis
            from torch._dynamo.symbolic_convert import TensorifyState

            for symbol in self._symbols:
                TensorifyState.specialize(symbol)
            raise TensorifyScalarRestartAnalysis


float_watch = FloatWatch()


def settle_sizes(fake_mode: Any) -> None:
    """Make constants of the symbolic sizes that the guards of a graph leave only one value for.

    With `dynamic=True` the number of streams, read off a shape, is a symbol n; that a projection of n * n + 2 * n rows
    has 24 of them fixes it, and nothing that is found with n = 4 needs another guard.
    """
    shape_env = getattr(fake_mode, "shape_env", None)
    if shape_env is None:
        return
    import sympy

    budget = Steps("sizes that guards settle", MOST_SIZES)
    tried: set[tuple[Any, int]] = set()
    while True:
        # `replace` follows a chain of replacements to its end: of two sizes that were unified one may be fixed later.
        equations = (shape_env.replace(guard.expr) for guard in shape_env.guards)
        solved = (found for found in map(_solution, equations) if found is not None and found not in tried)
        fixed = next(solved, None)
        if fixed is None:
            return
        # Each solution is tried once. The symbols are finitely many, and each has one value that was seen at capture.
        tried.add(fixed)
        budget.take()
        shape_env.evaluate_expr(sympy.Eq(*fixed))


@functools.lru_cache(1024)
def _solution(equation: Any) -> tuple[Any, int] | None:
    """The symbol and its value, if this is a polynomial equation of one symbol with one positive root."""
    import sympy

    if not isinstance(equation, sympy.Eq) or len(equation.free_symbols) != 1:
        return None
    (symbol,) = equation.free_symbols
    difference = equation.lhs - equation.rhs
    if not difference.is_polynomial(symbol):
        return None
    roots = [root for root in sympy.Poly(difference, symbol).real_roots() if root > 0]
    return (symbol, int(roots[0])) if len(roots) == 1 and roots[0].is_integer else None


def has_hint(size: Any) -> bool:
    """Whether a size was known when the graph was captured; one that depends on data was not."""
    return not isinstance(size, torch.SymInt) or bool(size.node.has_hint())


# What stands for the first size that depends on data, and how far the next one is: odd, and no number of streams.
_STAND_IN = 37


def hint(size: Any) -> Any:
    """The value that a size had when the graph was captured; for one that depends on data, a number in its place."""
    if not isinstance(size, torch.SymInt) or has_hint(size):
        return size.node.hint if isinstance(size, torch.SymInt) else size
    expression = symbolic_expression(size)
    shape_env = size.node.shape_env
    backed = shape_env.backed_var_to_val if hasattr(shape_env, "backed_var_to_val") else shape_env.var_to_val
    numbers = {symbol: backed.get(symbol, _STAND_IN + 4 * int("".join(filter(str.isdigit, str(symbol))) or 0))
               for symbol in expression.free_symbols}  # fmt: skip
    return int(expression.subs(numbers))


def as_number(size: Any) -> Any:
    """A size as a number, where guards leave it only one value; else as it is."""
    if isinstance(size, int):
        return size
    number = size.node.maybe_as_int()
    return size if number is None else number


def with_known_sizes(tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor like this one whose sizes and strides are numbers, where guards leave them only one value.

    torch 2.14 keeps symbols in strides that guards have made numbers.
    """
    sizes = *tensor.shape, *tensor.stride()
    known = [as_number(size) for size in sizes]
    if all(isinstance(number, int) is isinstance(size, int) for number, size in zip(known, sizes, strict=True)):
        return tensor
    with fake_mode_of(tensor):
        shape, strides = known[: tensor.dim()], known[tensor.dim() :]
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)


def same_size(left: Any, right: Any) -> bool:
    """Whether two sizes are known to be equal, without a guard."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(left == right))


def may_be_equal(left: Any, right: Any) -> bool:
    """Whether two sizes were equal when the graph was captured, as far as that is known; without a guard."""
    if not (has_hint(left) and has_hint(right)):
        return True
    return bool(hint(left) == hint(right))


def same_strides(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are known to have one shape, one dtype and the same strides where these matter, without a
    guard."""
    if left.dim() != right.dim() or left.dtype != right.dtype or not all(map(same_size, left.shape, right.shape)):
        return False
    sizes = [as_number(size) for size in left.shape]
    if any(isinstance(size, int) and size == 0 for size in sizes):
        return True
    strides = zip(sizes, left.stride(), right.stride(), strict=True)
    return all((isinstance(size, int) and size <= 1) or same_size(a, b) for size, a, b in strides)


def storage_of(tensor: torch.Tensor) -> Any:
    """The storage of a tensor, also of a fake one, equal for tensors that share memory; None without plain memory.

    What torch.vmap makes of a tensor shares its memory.
    """
    tensor = _within(_unwrapped(tensor))
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else None
