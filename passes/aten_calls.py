"""What one node of a graph does, in ATen: it is run on fake tensors, and the calls that arrive below autograd noted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mhc_compile import compat


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a recording: those that the node reads come first, then those that it makes."""

    index: int


@dataclass(frozen=True)
class Call:
    """One ATen call, with slots in the place of tensors; sources are the slots that it reads, made those it makes."""

    target: Any
    # What `name_of` says of the operator.
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sources: tuple[int, ...]
    made: tuple[Slot, ...]

    @property
    def text(self) -> str:
        """Equal for calls that differ in nothing but the tensors they read."""
        return call_text(self.target, self.args, self.kwargs)


@dataclass(frozen=True)
class Recording:
    """The calls of one node, what it returns, and the tensors of all slots."""

    calls: tuple[Call, ...]
    result: Any
    tensors: list[torch.Tensor]


class WritesInput(Exception):
    """The node writes into one of its inputs."""


def record(run: Callable[[list[torch.Tensor]], Any], inputs: list[torch.Tensor], mode: Any) -> Recording:
    """The calls that `run(inputs)` makes under the fake mode; raises WritesInput if one writes into an input."""
    # Values of nodes that were copied share a fake tensor; here each needs a value of its own.
    stand_ins = [torch.ops.aten.alias.default(tensor) for tensor in inputs]
    recorder = _Recorder(stand_ins)
    with mode, compat.composites_in_python(), recorder:
        result = run(stand_ins)
    return Recording(tuple(recorder.calls), recorder.slots(result), recorder.alive)


def call_text(target: Any, args: Any, kwargs: Any, places: type = Slot) -> str:
    """A call as text, without its tensors: objects of some type take their places."""

    def written(leaf: Any) -> Any:
        if isinstance(leaf, places):
            return "%"
        # A constant of the program: as text it would be rounded to four digits.
        return (leaf.dtype, leaf.tolist()) if type(leaf) is torch.Tensor else leaf

    return f"{target} {map_leaves(written, (args, kwargs))}"


def name_of(target: Any) -> str:
    """An operator without its overload, such as "mul"; with its namespace if that is not ATen's.

    Operators of other libraries may have the names of ATen's, and compute something else.
    """
    name, namespace = str(target._opname), getattr(target, "namespace", "aten")
    return name if namespace == "aten" else f"{namespace}::{name}"


# Matmul squeezes its own result in this way.
_VIEWS_IN_PLACE = {"squeeze_", "unsqueeze_", "t_", "transpose_"}


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down ATen calls; composite operators are taken apart, device queries left out."""

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = list(inputs)
        self.known = {id(tensor): Slot(i) for i, tensor in enumerate(inputs)}
        self.input_storages = {compat.storage_of(tensor) for tensor in inputs}
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if compat.is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        read, options = self.slots((args, kwargs))
        written = [t for a, arg in zip(args, func._schema.arguments, strict=False) if _writes(arg) for t in tensors(a)]
        if "batch_norm" in func._opname:
            written += tensors(args[3:5])  # the running statistics, which no schema says
        if any(compat.storage_of(tensor) in self.input_storages for tensor in written):
            raise WritesInput
        if func._opname in _VIEWS_IN_PLACE:
            # the tensor changes its shape; what it was before keeps its own
            (tensor,) = written
            if id(tensor) in self.known:
                self.alive[self.known[id(tensor)].index] = torch.ops.aten.alias.default(tensor)
        result = func(*args, **kwargs)
        if func._opname in _VIEWS_IN_PLACE:
            func = getattr(getattr(torch.ops.aten, func._opname[:-1]), func._overloadname)
        for tensor in written:
            # an intermediate of this node, updated in place: from here on its name means the new value
            self.known.pop(id(tensor), None)
        sources = tuple(slot.index for slot in _slots((read, options)))
        made = tuple(_slots(map_leaves(self._name, result)))
        self.calls.append(Call(func, name_of(func), read, options, sources, made))
        return result

    def slots(self, tree: Any) -> Any:
        return map_leaves(lambda t: self.known.get(id(t), t) if isinstance(t, torch.Tensor) else t, tree)

    def _name(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in self.known:
            self.known[id(leaf)] = Slot(len(self.alive))
            self.alive.append(leaf)
        return self.known[id(leaf)]


def filled(tree: Any, values: list[Any]) -> Any:
    """A tree of a recording with the slots' values in their places."""
    kind = type(tree)
    if kind is Slot:
        return values[tree.index]
    if kind is tuple:
        return tuple([filled(item, values) for item in tree])
    if kind is list:
        return [filled(item, values) for item in tree]
    if kind is dict:
        return {key: filled(item, values) for key, item in tree.items()} if tree else tree
    return tree


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply to every leaf of nested tuples, lists, dicts and slices. (pytree does more, at several times the cost.)

    A list stays a list, those of a graph (`immutable_list`) too: x[[0]] picks rows, x[(0,)] a part of x.
    """
    if isinstance(tree, (tuple, list)):
        items = [map_leaves(function, item) for item in tree]
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, dict):
        return {key: map_leaves(function, item) for key, item in tree.items()}
    if isinstance(tree, slice):
        return slice(*(map_leaves(function, part) for part in (tree.start, tree.stop, tree.step)))
    return function(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """Every leaf of nested tuples, lists and dicts."""
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from leaves(item)
    else:
        yield tree


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors among the leaves."""
    if isinstance(tree, torch.Tensor):
        return iter((tree,))
    return (leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))


def _slots(tree: Any) -> Iterator[Slot]:
    return (leaf for leaf in leaves(tree) if isinstance(leaf, Slot))


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
