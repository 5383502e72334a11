"""Small regions by behaviour: the operators between two values, run in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from mhc_compile import compat
from mhc_compile.passes.aten_calls import map_leaves
from mhc_compile.passes.recognise.layout import is_movement, is_pointwise
from mhc_compile.passes.shadow import Kind, Op, Value

_LIMIT = 600
# In how many tokens a function of single elements is looked at.
_TOKENS = 8

Signature = tuple[tuple[int, ...], tuple[tuple[Kind | int, ...], ...], int]
"""The leaf's shape, each operator's kind with the numbers of the values it reads, and which value is the result."""


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Region:
    """The operators, in program order, that compute `out` from `leaf` and from constants alone.

    shape is that of the leaf in which the region runs, and arguments are what its operators are then called with.
    by_element: each element of `out` is computed alone. Then `run` takes the leaf's elements that `out` has, and views
    are left out.
    """

    leaf: Value
    out: Value
    ops: tuple[Op, ...]
    shape: tuple[int, ...]
    arguments: tuple[Arguments, ...]
    by_element: bool = False

    def constants(self, *, whole: bool = False) -> set[float]:
        """The float constants that occur in the region, and whole numbers if asked for: most are sizes and axes."""
        kinds = (float, int) if whole else (float,)
        found = {float(leaf) for leaf in self._numbers() if isinstance(leaf, kinds) or _is_scalar(leaf)}
        return {value for value in found if value == value}

    def _numbers(self) -> Iterator[Any]:
        for op in self.ops:
            yield from _leaves((op.args, op.kwargs))
            if isinstance(op.target, compat.AutogradFunction):
                for node in op.target.nodes():
                    yield from _leaves((node.args, dict(node.kwargs)))

    def limits(self) -> list[float]:
        """Numbers of the region that may be limits of a clamp far out, where no ordinary input shows them."""
        numbers = {abs(leaf) for leaf in self._numbers() if isinstance(leaf, (int, float))}
        return sorted(2.0 * number for number in numbers if 50 < number < 1e30)

    @cached_property
    def signature(self) -> Signature:
        """Equal for regions that compute the same: layers of a model need to be understood once."""
        numbers = {self.leaf: 0}
        lines: list[tuple[Kind | int, ...]] = []
        for op in self.ops:
            lines.append((op.kind, *[numbers[source] for source in op.sources]))
            for value in op.outs:
                numbers[value] = len(numbers)
        return self.shape, tuple(lines), numbers[self.out]

    def run(self, leaf: torch.Tensor) -> torch.Tensor:
        """Evaluate in float64: every float cast of the program is read as a cast to float64."""
        known: dict[Value, Any] = {self.leaf: leaf.clone()}  # an operator may update its input in place
        for op, arguments in zip(self.ops, self.arguments, strict=True):
            if self.by_element and is_movement(op):
                known.update(dict.fromkeys(op.outs, known[next(op.inputs())]))
            else:
                known.update(evaluate(op, arguments, known))
        result: torch.Tensor = known[self.out]
        return result


def evaluate(op: Op, arguments: Arguments, known: dict[Value, Any]) -> Iterator[tuple[Value, Any]]:
    """What an operator makes of these arguments and the values in them."""
    args, kwargs = map_leaves(lambda a: known[a] if isinstance(a, Value) else _number(a), arguments)
    if kwargs.get("dtype") in _FLOATS or _is_factory_of_floats(op):
        kwargs["dtype"] = torch.float64
    kwargs.pop("device", None)
    result = op.target(*args, **kwargs)
    return zip(op.outs, result if isinstance(result, (tuple, list)) else (result,), strict=True)


def _is_factory_of_floats(op: Op) -> bool:
    """Whether an operator makes floats of nothing, such as `torch.ones(4)`, which has the default dtype."""
    arguments = getattr(getattr(op.target, "_schema", None), "arguments", ())
    return not op.sources and op.out.meta.dtype in _FLOATS and any(one.name == "dtype" for one in arguments)


def region(out: Value, is_leaf: Callable[[Value], bool]) -> Region | None:
    """The region that ends in `out` and begins at one leaf; None if there are several leaves or something opaque.

    A region that reads its leaf both whole and in parts begins at the whole.
    """
    found = _between(out, is_leaf)
    if found is not None and len(found[1]) > 1:
        whole = [leaf for leaf in found[1] if not any(source in found[1] for source in _viewed(leaf))]
        if len(whole) == 1:
            found = _between(out, lambda value: value is whole[0])
    if found is None or len(found[1]) > 1:
        found = _between(out, lambda value: is_leaf(value) and not (value.op is not None and is_movement(value.op)))
    if found is None or len(found[1]) != 1:
        return None
    ops, leaves = found
    leaf = next(iter(leaves))
    if leaf.meta.device != out.meta.device:  # where an operator would not leave its result
        return None
    return Region(leaf, out, tuple(ops), sample_shape(leaf), tuple((op.args, op.kwargs) for op in ops))


def of_elements(found: Region) -> Region | None:
    """A region that computes each element of its result from one of its leaf: sigmoid(l)[..., :n], for example."""
    for op in found.ops:
        if len(op.sources) != 1 or not (is_movement(op) or is_pointwise(op)):
            return None
    return replace(found, shape=(_TOKENS, found.out.shape[-1]), by_element=True) if found.out.shape else None


def _viewed(value: Value) -> Iterator[Value]:
    """What a value is a view of, and what that is one of, and so on."""
    while value.op is not None and is_movement(value.op):
        value = next(value.op.inputs())
        yield value


def _between(out: Value, is_leaf: Callable[[Value], bool]) -> tuple[dict[Op, None], set[Value]] | None:
    """The operators that compute `out`, in program order, and the leaves at which they begin."""
    ops: dict[Op, None] = {}
    leaves: set[Value] = set()
    stack: list[tuple[Value, bool]] = [(out, False)]
    while stack:
        current, done = stack.pop()
        op = current.op
        if done:
            assert op is not None
            ops[op] = None
        elif is_leaf(current):
            leaves.add(current)
        elif op is None or op.target is None or _differs(op) or len(stack) > _LIMIT or len(ops) > _LIMIT:
            return None
        elif op not in ops:
            stack.append((current, True))
            stack += [(source, False) for source in op.sources]
    return ops, leaves


def draws_random_numbers(op: Op) -> bool:
    """Whether what an operator computes, or its gradient, is another at each run."""
    if isinstance(op.target, compat.AutogradFunction):
        return op.target.is_random()
    return torch.Tag.nondeterministic_seeded in getattr(op.target, "tags", ())


# Incoming gradients may be of any size. Torch's own backwards are linear in them. A program's own backward may clip
# them, and is linear only for gradients that it does not clip.
_COTANGENTS = (1.0, 1e-4, 1e4)
# Both are float64, with a few hundred roundings. What a lost path changes may be as small as an eps of the program.
_GRADIENT = 1e-11
# At a kink, such as abs at zero or a maximum of two equal numbers, torch picks a gradient. If the maximum is only
# subtracted in an exponent, this choice changes no more than the eps does, which float32 may not even see.
AT_KINKS = 1e-6


def same_gradient(
    ours: Callable[[torch.Tensor], torch.Tensor],
    found: Region,
    *points: torch.Tensor,
    relative: float = _GRADIENT,
    of: tuple[int, ...] = (1, -1),
    overflows: bool = False,
) -> bool:
    """Whether a function that agrees with a region in value agrees in gradient too, at all these points.

    of: the gradient's shape, first of all the parts that agree each by itself.
    overflows: the points may be so large that the region's gradient is NaN. A part of it that is may be anything.

    A detach shows only there, and what a custom `autograd.Function` makes of the gradients that it is given.
    """
    sizes = _sizes_of_cotangents(found)

    def theirs(leaf: torch.Tensor) -> torch.Tensor:
        return found.run(leaf).reshape(found.shape)

    return all(
        _agree(_gradients(ours, point, sizes), _gradients(theirs, point, sizes), relative, of, overflows)
        for point in points
    )


def same_gradient_of_each(
    ours: Callable[[torch.Tensor], torch.Tensor],
    found: Region,
    *points: torch.Tensor,
    least: torch.Tensor | float,
    relative: float = _GRADIENT,
) -> bool:
    """As `same_gradient`, but number by number: a norm over all hides the small ones.

    least: how far a number may be off in any case, for an incoming gradient of order 1.
    """
    sizes = _sizes_of_cotangents(found)

    def theirs(leaf: torch.Tensor) -> torch.Tensor:
        return found.run(leaf).reshape(found.shape)

    for point in points:
        own, other = _gradients(ours, point, sizes), _gradients(theirs, point, sizes)
        if own is None or other is None:
            return False
        for a, b, size in zip(own, other, sizes, strict=True):
            if not bool(((a - b).abs() <= relative * b.abs() + size * least).all()):
                return False
    return True


def _sizes_of_cotangents(found: Region) -> tuple[float, ...]:
    return _COTANGENTS if any(isinstance(op.target, compat.AutogradFunction) for op in found.ops) else (1.0,)


def same_beyond_numbers(ours: Callable[[torch.Tensor], torch.Tensor], found: Region) -> bool:
    """Whether a function that agrees with a region for numbers agrees for NaN and infinities, which the region may
    replace. Where it has NaN itself, overflow may have made it, and a function may do better.
    """
    numbers = torch.randn(found.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for value in (float("nan"), float("-inf"), float("inf")):
        given = numbers.clone()
        given.view(-1)[0] = value
        theirs, own = found.run(given).reshape(found.shape), ours(given)
        if not bool((theirs.isnan() | ((theirs - own).abs() <= 1e-9 * theirs.abs() + 1e-12)).all()):
            return False
    return True


def _gradients(
    function: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor, sizes: tuple[float, ...]
) -> list[torch.Tensor] | None:
    """The gradients for a gradient of each size; None where a part of the function is not differentiable."""
    leaf = at.clone().requires_grad_()
    try:
        with torch.enable_grad():
            out = function(leaf)
            # Rough: what hardly changes within a matrix has almost no gradient through a doubly stochastic projection.
            # None of them is zero: a token may have a single number.
            weights = (torch.arange(out.numel(), dtype=out.dtype) * 2.4 + 1.0).sin().view(out.shape)
            return [torch.autograd.grad(out, leaf, size * weights, retain_graph=True)[0] for size in sizes]
    except RuntimeError:
        return None


def _agree(
    ours: list[torch.Tensor] | None,
    theirs: list[torch.Tensor] | None,
    relative: float,
    of: tuple[int, ...],
    overflows: bool,
) -> bool:
    if ours is None or theirs is None:
        return False
    pairs = [(a.reshape(of).flatten(1), b.reshape(of).flatten(1)) for a, b in zip(ours, theirs, strict=True)]
    return all(
        bool(((overflows & b.isnan().any(1)) | ((a - b).norm(dim=1) <= relative * b.norm(dim=1))).all())
        for a, b in pairs
    )


def _differs(op: Op) -> bool:
    """Whether one run does not show what an operator computes. A dropout may drop nothing there."""
    return _reads_a_size(op) or draws_random_numbers(op)


_FACTORIES = {"zeros", "ones", "full", "new_zeros", "new_ones", "new_full"}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _reads_a_size(op: Op) -> bool:
    """Whether a symbolic size takes part as a number: what is computed then differs from call to call."""
    if op.kind.reads_size is None:
        arguments = [*op.args, *op.kwargs.values()]
        if op.name in _FACTORIES:
            arguments = [argument for argument in arguments if not isinstance(argument, (list, tuple))]
        sized = any(isinstance(leaf, torch.SymInt) for leaf in _leaves(arguments))
        op.kind.reads_size = sized and not is_movement(op)
    return op.kind.reads_size


def sample_shape(value: Value) -> tuple[int, ...]:
    """The shape that a value was captured with."""
    return tuple(int(compat.hint(size)) for size in value.meta.shape)


def concrete(arguments: Arguments) -> Arguments:
    """Arguments with the numbers that symbolic ones were captured with."""
    return map_leaves(_number, arguments)  # type: ignore[no-any-return]


def _number(leaf: Any) -> Any:
    if isinstance(leaf, torch.SymInt):
        return int(compat.hint(leaf))
    if isinstance(leaf, torch.SymFloat):
        value = compat.float_watch.value(leaf)
        if value is None:
            raise ValueError("a number that depends on a size")
        return value
    return leaf


def _is_scalar(leaf: Any) -> bool:
    """Whether a leaf is a tensor of one number that the program makes from a constant."""
    return type(leaf) is torch.Tensor and leaf.dim() == 0 and leaf.is_floating_point()


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _leaves(item)
    elif isinstance(tree, dict):
        yield from _leaves(list(tree.values()))
    elif isinstance(tree, torch.SymFloat):
        value = compat.float_watch.value(tree)
        if value is not None:
            yield value
    else:
        yield tree
