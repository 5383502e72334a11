"""Triton's interpreter without the work that says nothing: most of its time goes into describing tensors.

It runs every operator of a kernel as Python, and makes the type of each operand anew. What depends on a type's name and
shape alone is kept, and checks that cannot speak are left out. Nothing here changes a value, but for the fma, which a
GPU rounds once, and casts to float8, which it rounds to even.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from triton.language import core
from triton.runtime import interpreter


def make_fast() -> None:
    """Patch the interpreter of this process."""
    _patch_language_once()
    _check_no_overflow()
    _look_up_dtypes()
    _keep_shapes()
    _round_fma_once()
    _round_float8()
    _spread_truth()


def _patch_language_once() -> None:
    """Have the interpreter replace triton.language once for each module of kernels, and leave it replaced.

    It does so whenever one jitted function calls another and takes it back after each launch.
    """
    scope = getattr(interpreter, "_LangPatchScope", None)
    if scope is None:  # a triton whose interpreter works in another way
        return
    patch, done = interpreter._patch_lang, set()

    def patch_once(function: Any) -> Any:
        module = function.__globals__["__name__"]
        if module not in done:
            done.add(module)
            patch(function)
        return scope()  # nothing to take back

    interpreter._patch_lang = patch_once


def _check_no_overflow() -> None:
    """Every sum and product of integers is taken again in 64 bits, for an assertion that only debugging makes."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _look_up_dtypes() -> None:
    """NumPy's dtype for one of Triton's: the interpreter writes down the table of all of them to look at one entry."""
    original, known = interpreter._get_np_dtype, {}

    def look_up(dtype: Any) -> np.dtype[Any]:
        name = dtype.scalar.name
        if name not in known:
            known[name] = original(dtype)
        return known[name]

    interpreter._get_np_dtype = look_up


def _round_fma_once() -> None:
    """The interpreter rounds the product as well. A product of float32 numbers is exact in float64."""
    original = interpreter.InterpreterBuilder.create_fma

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if x.data.dtype != np.float32:
            return original(self, x, y, z)
        wide = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(wide.astype(np.float32), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = fma


def _round_float8() -> None:
    """The interpreter loses what a mantissa carries into the exponent."""
    original = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source.name, target.name) != ("fp32", "fp8e4nv"):
            return original(data, source, target, rounding)
        return torch.from_numpy(np.ascontiguousarray(data)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = convert


def _spread_truth() -> None:
    """A comparison of scalars is spread over a block as int32, but Triton 3.9 takes masks of bool alone."""
    original = interpreter.InterpreterBuilder.create_splat

    def splat(self: Any, kind: Any, value: Any) -> Any:
        spread = original(self, kind, value)
        return interpreter.TensorHandle(spread.data.astype(value.data.dtype), spread.dtype)

    interpreter.InterpreterBuilder.create_splat = splat


def _keep_shapes() -> None:
    """A type of blocks and a tensor describe their shape once for each that there is."""
    describe, describe_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[tuple[str, tuple[Any, ...]], dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple([getattr(size, "value", size) for size in shape])
        if key not in blocks:
            describe(self, element_ty, shape)
            blocks[key] = {name: vars(self)[name] for name in ("shape", "numel", "name")}
        else:
            self.element_ty = element_ty
            vars(self).update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            describe_tensor(self, handle, type)
            tensors[type.name] = {name: vars(self)[name] for name in ("shape", "numel")}
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            vars(self).update(tensors[type.name])

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    # What the builder makes of a type is the type again.
    core.block_type.to_ir = lambda self, builder: self
