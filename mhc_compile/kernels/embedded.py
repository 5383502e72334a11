"""Kernels as parts of a graph that Inductor compiles.

Inductor writes a kernel's source into the code that it generates and compiles it there, with `@triton.jit` and nothing
else. So it also specialises on arguments that the kernel excluded from specialisation:

- An integer that is 1 becomes a constant, which has none of a value's methods.
- A multiple of 16 decides how tiles lie in registers, and so the order of sums and a token's last bits. These would
  then depend on the number of tokens in the batch.

So values that may vary with the batch pass through an instruction that says nothing about its result. Inductor also
passes a float in 64 bits, and everything computed with it would have 64 bits. With both undone, the machine code is
that of an ordinary launch.
"""

from __future__ import annotations

import ast
import functools
import re
from typing import Any

import torch
import triton
from torch.library import wrap_triton
from triton.runtime.jit import JITFunction

from mhc_compile.kernels.opaque import Opaque

_OPTIONS = ("num_warps", "num_stages")
# What parameters are called that are strides.
_STRIDE = re.compile("_stride$|_[a-z]$")
_MOVE = 'tl.inline_asm_elementwise("mov.b{bits} $0, $1;", "={letter},{letter}", [{value}], tl.int{bits}, True, 1)'


def record(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """What `launch` does while a graph is traced: the launch becomes a node of the graph."""
    if isinstance(kernel, Opaque):
        kernel.record(grid, args, options)
        return
    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {name: value for name, value in options.items() if name not in _OPTIONS}
    special = tuple((name, options[name]) for name in _OPTIONS if name in options)
    wide = frozenset(name for name, value in values.items() if type(value) is int and not -(1 << 31) <= value < 1 << 31)
    kinds = tuple((name, type(value)) for name, value in values.items() if not isinstance(value, torch.Tensor))
    wrap_triton(_embedded(kernel, kinds, wide, special))[grid](**values)


@functools.cache
def _embedded(
    kernel: Any, kinds: tuple[tuple[str, type], ...], wide: frozenset[str], options: tuple[tuple[str, Any], ...]
) -> Any:
    """kernel for arguments of these kinds, tensors where none is named; equal ones are one object, compiled once."""
    if not isinstance(kernel, JITFunction):
        raise TypeError(f"{kernel} is not compiled by Triton, but interpreted")
    lines, kind_of = [], dict(kinds)
    for param in kernel.params:
        name, kind = param.name, kind_of.get(param.name, torch.Tensor)
        if param.is_constexpr or kind is type(None):
            continue
        if kind is torch.Tensor and param.do_not_specialize_on_alignment:
            lines.append(f"{name} += {_MOVE.format(bits=32, letter='r', value='tl.full((), 0, tl.int32)')}")
        elif kind is int and param.do_not_specialize:
            bits, letter = (64, "l") if name in wide else (32, "r")
            lines.append(f"{name} = {_MOVE.format(bits=bits, letter=letter, value=name)}")
        elif kind is torch.SymInt and param.do_not_specialize:
            # Inductor passes them in 32 or 64 bits. A stride may need these; what counts tokens or programs does not.
            bits, letter = (64, "l") if _STRIDE.search(name) else (32, "r")
            value = f"tl.cast({name}, tl.int{bits})"
            lines.append(f"{name} = {_MOVE.format(bits=bits, letter=letter, value=value)}")
        elif kind is float:
            # Not a method: where torch looks for what a kernel writes, floats are constants.
            lines.append(f"{name} = tl.cast({name}, tl.float32)")
    changed = triton.jit(kernel.fn)
    changed._unsafe_update_src(_with_first_lines(kernel.src, lines))
    return triton.autotune([triton.Config({}, **dict(options))], key=[])(changed)


def _with_first_lines(source: str, lines: list[str]) -> str:
    """A function's source with these lines before its first statement, after the docstring."""
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    statement = function.body[1 if ast.get_docstring(function) is not None else 0]
    text = source.splitlines(keepends=True)
    at = statement.lineno - 1
    text[at:at] = [" " * statement.col_offset + line + "\n" for line in lines]
    return "".join(text)
