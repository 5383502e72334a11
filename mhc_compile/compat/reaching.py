"""The tensors that the lines of a function can reach when it is called: by their names, and without running code."""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import (
    CodeType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any
from weakref import ProxyTypes

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

# A program may hold anything: after so many objects the search ends.
_MOST = 20_000
_NOTHING_IN_IT = (str, bytes, int, float, complex, type(None), type, ModuleType, FunctionType)


@dataclass(frozen=True)
class Reached:
    """A floating point tensor; learned if an optimizer may change it."""

    shape: tuple[int, ...]
    learned: bool


def reached(frame: Any, below: bool = False) -> frozenset[Reached] | None:
    """The floating point tensors that a function can read by itself, when it is about to be called.

    These are its arguments, the globals and closures that it names, attributes that it names, and items of containers
    and iterators. Names in properties, generators and the program's own methods count if it names these. All parameters
    of a module that it reaches count if the module has no grandchildren: the function may call it. None if there are
    too many objects to find out, or one does not show what it holds. below: with all tensors of the modules that it
    reaches.
    """
    names = set(_names(frame.f_code))
    while True:
        before = len(names)
        found = _search(frame, names, below)
        if found is None or len(names) == before:
            return found


def _search(frame: Any, names: set[str], below: bool) -> frozenset[Reached] | None:
    """What is reached by these names. Names in code that makes attributes are added to them."""
    left = [*frame.f_locals.values(), *(_content(cell) for cell in getattr(frame, "closure", None) or ())]
    left += [value for name, value in frame.f_globals.items() if name in names]
    seen: dict[int, Any] = {}  # with the objects, so that no number is given twice
    found = set()
    try:
        # Functions of tensors' subclasses are the program's code, too.
        with torch._C.DisableTorchFunctionSubclass():
            while left:
                value = left.pop()
                if id(value) in seen or issubclass(type(value), _NOTHING_IN_IT):
                    continue
                if len(seen) == _MOST:
                    return None
                seen[id(value)] = value
                if issubclass(type(value), Tensor):
                    found |= _described(value)
                else:
                    left += _parts(value, names, below)
    except _Hidden:
        return None
    return frozenset(found)


class _Hidden(Exception):
    """Only the program's own code could tell what an object holds."""


def _names(code: CodeType) -> Iterator[str]:
    """Every name in a function and in those written inside it; of attributes, too, that are read by a string."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names(constant)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty so far
        return None


# `isinstance` asks an object for its `__class__`, and `vars` for its `__dict__`: properties of the program may answer.
_bases, _of_class = type.__dict__["__mro__"].__get__, type.__dict__["__dict__"].__get__
# Subclasses may have methods of their own, which are not called.
_STORED: dict[type, Callable[[Any], Iterable[Any]]] = {
    dict: dict.values,
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
    deque: deque.__iter__,
}


def _parts(value: Any, names: set[str], below: bool) -> list[Any]:
    kind = type(value)
    if kind in ProxyTypes or any("__class__" in _of_class(base) for base in _bases(kind)[:-1]):
        raise _Hidden  # it stands for another object
    own = _attributes(value)
    named = [part for name, part in own.items() if name in names] + _of_class_by_name(kind, names)
    if issubclass(kind, nn.Module):
        return named + _parts_of_module(value, names, below)
    for builtin, stored in _STORED.items():
        if issubclass(kind, builtin):
            return [*stored(value), *named]
    if any(base is Collection for base in _bases(kind)):
        if not own:
            raise _Hidden  # its code makes the items
        return [*own.values()]
    if kind is GeneratorType:
        names.update(_names(value.gi_code))
    # What is not written in Python says itself what it holds, such as an iterator, a partial or a bound method.
    return named if _is_written_in_python(kind) else gc.get_referents(value)


def _is_written_in_python(kind: type) -> bool:
    return bool(kind.__flags__ & _ON_HEAP) and _of_class(kind).get("__module__") not in _WRITTEN_IN_C


_ON_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_WRITTEN_IN_C = ("functools", "itertools", "collections", "_operator")


def _of_class_by_name(kind: type, names: set[str]) -> list[Any]:
    """What the class stores under these names. Names in its properties and methods are added to them."""
    found = []
    for base in _bases(kind)[:-1]:
        there = _of_class(base)
        for member in [there[name] for name in names & there.keys()]:
            if type(member) in (property, cached_property):
                member = member.fget if type(member) is property else member.func
                if type(member) is FunctionType:
                    names.update(_names(member.__code__))
            else:
                member = member.__func__ if type(member) in (staticmethod, classmethod) else member
                if type(member) is FunctionType and not member.__code__.co_filename.startswith(_TORCH):
                    names.update(_names(member.__code__))
                found.append(member)
    return found


_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes that an object stores, those in slots included."""
    found: dict[str, Any] = {}
    stored = None
    for base in _bases(type(value)):
        there = _of_class(base)
        stored = there.get("__dict__") if stored is None else stored
        for name, member in there.items():
            if type(member) is MemberDescriptorType:
                try:
                    found[name] = member.__get__(value)
                except AttributeError:  # it is empty so far
                    continue
    return found | stored.__get__(value) if type(stored) is GetSetDescriptorType else found


def _parts_of_module(module: nn.Module, names: set[str], below: bool) -> list[Any]:
    parts = [part for table in _tables(module) for name, part in table.items() if name in names]
    if below or not any(_children(child) for child in _children(module)):  # such as a projection, with what adapts it
        for one in _with_descendants(module):
            parameters, buffers, _ = _tables(one)
            parts += [*parameters.values(), *(buffers.values() if below else ())]
    if issubclass(type(module), (nn.ModuleList, nn.ModuleDict)):
        parts += _children(module)
    return parts


def _tables(module: nn.Module) -> list[dict[str, Any]]:
    """Where a module keeps its parameters, buffers and children, whatever methods it has to list them."""
    own = _attributes(module)
    tables = [own.get(name) for name in ("_parameters", "_buffers", "_modules")]
    if not all(issubclass(type(table), dict) for table in tables):  # such as those of TorchScript
        raise _Hidden
    return [dict(dict.items(table)) for table in tables]  # type: ignore[arg-type]


def _children(module: nn.Module) -> list[nn.Module]:
    return [child for child in _tables(module)[2].values() if child is not None]


def _with_descendants(module: nn.Module) -> Iterable[nn.Module]:
    found, left = {}, [module]
    while left:
        one = left.pop()
        if id(one) not in found:
            found[id(one)] = one
            left += _children(one)
    return found.values()


# What a subclass answers to `tensor.shape` is the program's code, and some tensors have no shape.
_shape, _needs_gradient = torch._C.TensorBase.shape.__get__, torch._C.TensorBase.requires_grad.__get__  # type: ignore[attr-defined]
_is_leaf = torch._C.TensorBase.is_leaf.__get__  # type: ignore[attr-defined]


def _described(value: Tensor) -> set[Reached]:
    if not torch._C.TensorBase.is_floating_point(value):
        return set()
    if issubclass(type(value), (UninitializedParameter, UninitializedBuffer)):
        raise _Hidden
    try:
        shape = tuple(_shape(value))
    except RuntimeError as error:  # such as a nested tensor
        raise _Hidden from error
    if not all(isinstance(size, int) for size in shape):
        return set()
    is_parameter = issubclass(type(value), nn.Parameter) or _attributes(value).get("_is_param") is True
    return {Reached(shape, is_parameter or (_needs_gradient(value) and _is_leaf(value)))}
