"""The tensors that the lines of a function can reach when it is called: by their names, and without running code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

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

    These are its arguments, the globals and closures that it names, attributes that it names, and items of containers.
    All parameters of a module that it reaches count if the module has no grandchildren: the function may call it. None
    if there are too many objects to find out. below: with all tensors of the modules that it reaches.
    """
    names = set(_names(frame.f_code))
    left = [*frame.f_locals.values(), *(_content(cell) for cell in getattr(frame, "closure", None) or ())]
    left += [value for name, value in frame.f_globals.items() if name in names]
    seen: dict[int, Any] = {}  # with the objects, so that no number is given twice
    found = set()
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, _NOTHING_IN_IT):
            continue
        if len(seen) == _MOST:
            return None
        seen[id(value)] = value
        if isinstance(value, Tensor):
            found |= _described(value)
        else:
            left += _parts(value, names)
            left += [*value.parameters(), *value.buffers()] if below and isinstance(value, nn.Module) else []
    return frozenset(found)


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


def _parts(value: Any, names: set[str]) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, MethodType):
        return [value.__self__]
    parts = [part for name, part in getattr(value, "__dict__", {}).items() if name in names]
    if isinstance(value, nn.Module):
        own = [*value.named_parameters(recurse=False), *value.named_buffers(recurse=False), *value.named_children()]
        parts += [part for name, part in own if name in names]
        if not any(list(child.children()) for child in value.children()):  # such as a projection, with what adapts it
            parts += value.parameters()
        if isinstance(value, (nn.ModuleList, nn.ModuleDict)):
            parts += value.children()
    return parts


def _described(value: Tensor) -> set[Reached]:
    shape = tuple(value.shape)
    if not value.is_floating_point() or not all(isinstance(size, int) for size in shape):
        return set()
    return {Reached(shape, isinstance(value, torch.nn.Parameter) or (value.requires_grad and value.is_leaf))}
