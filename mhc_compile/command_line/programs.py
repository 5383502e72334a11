"""The model that a command is about: `module:factory`, imported and called."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import operator
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mhc_compile.encoding import in_one_line

_PLACES = "module:factory or path/to/file.py:factory"
_RESULTS = "(model, args), (model, args, kwargs), or a model alone with --input"
_DTYPES = "such as bool, int32, int64, float16, bfloat16, float32 or float64"
_INPUT = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")


class UsageError(Exception):
    """What the user has to change, in one line: what was given, and what was expected. Its cause has the traceback."""


@dataclass(frozen=True)
class Input:
    """An argument of the model that the command line describes."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self, device: torch.device) -> torch.Tensor:
        """Random numbers. Integers are 0 or 1, which are tokens of any vocabulary."""
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return torch.randn(self.shape).to(device, self.dtype)
        return torch.randint(0, 2, self.shape).to(device, self.dtype)


@dataclass(frozen=True)
class Program:
    """A model with the arguments of one call."""

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def input_option(text: str) -> Input:
    """Read SHAPE[:DTYPE], such as 2x16:int64; argparse shows the error."""
    match = _INPUT.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected SHAPE[:DTYPE], such as 2x16:int64 or 4x128:bfloat16")
    dtype = getattr(torch, match[2] or "float32", None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"got the dtype {match[2]!r}; expected a dtype of torch, {_DTYPES}")
    return Input(tuple(map(int, match[1].split("x"))), dtype)


@contextlib.contextmanager
def users_code(what: str, expected: str) -> Iterator[None]:
    """Turn whatever the user's code raises into a `UsageError`."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise UsageError(f"{what} failed with {in_one_line(error)}; expected {expected}") from error


def load(place: str, inputs: Sequence[Input]) -> Program:
    """Import what `module:factory` names, call it, and check what it returns."""
    module_name, _, name = place.rpartition(":")
    if not module_name or not name:
        raise UsageError(f"got {place!r}; expected {_PLACES}")
    torch.manual_seed(0)  # a module may make its model when it is imported
    found = _attribute(_module(module_name), module_name, name)
    torch.manual_seed(0)
    if callable(found) and not isinstance(found, torch.nn.Module):
        with users_code(f"the factory {place}", f"it to return {_RESULTS}"):
            found = found()
    return _program(place, found, inputs)


def _module(name: str) -> ModuleType:
    with users_code(f"the import of {name}", _PLACES):
        return _file(Path(name)) if name.endswith(".py") else importlib.import_module(name)


def _file(path: Path) -> ModuleType:
    """Run a file as a module. Like a script, it may import files from its own folder."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    # Dynamo imports a module by its name: the name must belong to no other module.
    name = "_program_" + re.sub(r"\W", "_", path.stem)
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None  # a name that ends with .py has one
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _attribute(module: ModuleType, module_name: str, name: str) -> Any:
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        own = [key for key, value in vars(module).items() if _is_defined_in(module, key, value)]
        raise UsageError(f"{module_name} has no {name}; expected one of {', '.join(own) or 'its names'}") from None


def _is_defined_in(module: ModuleType, name: str, value: Any) -> bool:
    return not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == module.__name__


def _program(place: str, found: Any, inputs: Sequence[Input]) -> Program:
    if inputs and callable(found):
        device = _device(found)
        return Program(found, tuple(_made(one, device) for one in inputs))
    if inputs:
        raise UsageError(
            f"{place} gives {_described(found)} and --input was given; expected a model alone with --input"
        )
    if isinstance(found, tuple) and len(found) in (2, 3) and callable(found[0]):
        program = Program(*found)
        if isinstance(program.args, (tuple, list)) and isinstance(program.kwargs, dict):
            return program
    raise UsageError(f"{place} gives {_described(found)}; expected {_RESULTS}")


def _made(one: Input, device: torch.device) -> torch.Tensor:
    shape, dtype = "x".join(map(str, one.shape)), str(one.dtype).removeprefix("torch.")
    with users_code(f"--input {shape}:{dtype}", f"a size that fits in memory and a dtype {_DTYPES}"):
        return one.tensor(device)


def _described(found: Any) -> str:
    if isinstance(found, tuple):
        return f"a tuple ({', '.join(type(one).__name__ for one in found)})"
    return f"an object of type {type(found).__name__}"


def _device(model: Any) -> torch.device:
    """That of the first parameter."""
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return next((parameter.device for parameter in parameters), torch.device("cpu"))
