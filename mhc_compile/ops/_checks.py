"""Argument checks, shared by real and fake implementations, so that compiling raises what running would."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from mhc_compile.forms import RMS_MODES, SINKHORN_AXES, SINKHORN_STARTS, Gates, Rms, Sinkhorn, check_choice

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MAX_K = 1024


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64, otherwise float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def shape_text(shape: Sequence[object]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


_P = ParamSpec("_P")
_R = TypeVar("_R")
_EXPECTED = {Tensor: "a tensor", float: "a number", int: "an integer", bool: "True or False", str: "a string"}
_EXPECTED |= {torch.dtype: "a torch.dtype", type(None): "None"}
_ALSO: dict[Any, tuple[type, ...]] = {
    float: (int, torch.SymFloat, torch.SymInt),
    int: (torch.SymInt,),
    bool: (torch.SymBool,),
}


def typed(wrapper: Callable[_P, _R]) -> Callable[_P, _R]:
    """An operator's wrapper that names the argument where torch would print the schema. It costs nothing before."""

    @functools.wraps(wrapper)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():  # Dynamo says it, and would trace what follows
            return wrapper(*args, **kwargs)
        try:
            return wrapper(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            if not _may_be_of_types(error):
                raise
            wrong = _of_another_type(wrapper, args, kwargs)
            if wrong is None:
                raise
            raise TypeError(f"mhc::{wrapper.__name__}: {wrong}") from error

    return call


def _may_be_of_types(error: Exception) -> bool:
    """Whether this may be torch's or Python's word on an argument's type: the checks' own errors say what is wrong."""
    text = str(error)
    return "Expected a value of type" in text or (isinstance(error, TypeError) and not text.startswith("mhc::"))


def _of_another_type(wrapper: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """What is said of the first argument that is not what the wrapper's annotation says."""
    hints = get_type_hints(wrapper)
    try:
        given = signature(wrapper).bind(*args, **kwargs).arguments
    except TypeError:  # Python says which argument is missing or unknown
        return None
    for name, value in given.items():
        kinds = get_args(hints[name]) or (hints[name],)
        if not any(isinstance(value, (kind, *_ALSO.get(kind, ()))) for kind in kinds):
            what = "None" if value is None else f"of type {type(value).__name__}"
            return f"{name} is {what}; expected {' or '.join(_EXPECTED[kind] for kind in kinds)}"
    return None


def check_present(name: str, value: Tensor | None) -> None:
    """Check an argument that is not optional: a schema lets None through where it says Tensor."""
    if value is None:
        raise TypeError(f"{name} is None; expected a tensor")


def check_floating(name: str, value: Tensor) -> None:
    if value.dtype not in FLOATS:
        raise TypeError(f"{name} has dtype {value.dtype}; expected bfloat16, float16, float32 or float64")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} has layout {value.layout}; expected a dense tensor, of layout torch.strided")


def check_beside(name: str, value: Tensor, x: Tensor, x_name: str = "x") -> None:
    """Dtype and device of an argument that goes together with x."""
    check_floating(name, value)
    if value.dtype == torch.float64 and x.dtype != torch.float64:
        raise TypeError(f"{name} is float64, but {x_name} is {x.dtype}; expected float64 only with float64 {x_name}")
    if value.device != x.device:
        raise ValueError(f"{name} is on {value.device}, but {x_name} is on {x.device}; expected the same device")


def check_tensor(
    name: str, value: Tensor | None, shape: Sequence[int], meaning: str, x: Tensor, x_name: str = "x"
) -> None:
    """An optional argument of exactly this shape; `meaning` spells it in letters."""
    if value is None:
        return
    check_beside(name, value, x, x_name)
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {shape_text(value.shape)}; expected {meaning} = {shape_text(shape)}")


def check_accumulated(d_x: Tensor | None, x: Tensor, needed: bool) -> None:
    """d_x, a gradient that x has from elsewhere and that its new gradient is added to."""
    check_tensor("d_x", d_x, x.shape, "the shape of x", x)
    if d_x is not None and not needed:
        raise ValueError("d_x was given, but needs says that x needs no gradient; expected None")


def check_streams(n: int, source: str) -> None:
    if n < 1 or n * n + 2 * n > MAX_K:
        raise ValueError(f"{source} gives n = {n} streams; expected 1 to 31, so that phi has at most {MAX_K} rows")


def check_mixed(n: int, m: int, source: str) -> None:
    """The sizes of a matrix that makes m rows of n streams."""
    if n < 1 or m < 1 or n * m > MAX_K:
        raise ValueError(f"{source} mixes n = {n} streams into m = {m}; expected n, m >= 1 with n*m <= {MAX_K}")


def streams_shape(x: Tensor) -> tuple[tuple[int, ...], int, int]:
    """The token dimensions, n and C of x [..., n, C], neither of which is checked."""
    check_floating("x", x)
    if x.dim() < 2:
        raise ValueError(f"x has shape {shape_text(x.shape)}; expected [..., n, C]")
    *tokens, n, width = x.shape
    return tuple(tokens), n, width


def check_width(x: Tensor) -> None:
    """Streams without columns have no sums over them."""
    if x.shape[-1] < 1:
        raise ValueError(f"x has shape {shape_text(x.shape)}; expected [..., n, C] with C >= 1")


def check_x(x: Tensor) -> tuple[tuple[int, ...], int, int]:
    """Returns the token dimensions, n and C of x [..., n, C]."""
    tokens, n, width = streams_shape(x)
    check_streams(n, f"x of shape {shape_text(x.shape)}")
    check_width(x)
    return tokens, n, width


def part_ends(n: int) -> tuple[int, int, int]:
    """How many rows there are up to the end of each part: pre, post and res."""
    return n, 2 * n, n * n + 2 * n


def check_parts(k: int, n: int, source: str) -> int:
    """How many parts (pre; pre and post; pre, post and res) K rows stand for."""
    check_streams(n, "the argument")
    if k in part_ends(n):
        return part_ends(n).index(k) + 1
    raise ValueError(
        f"{source} has K = {k} rows; with n = {n} streams expected "
        f"K = n = {n} (pre), 2*n = {2 * n} (pre, post) or n*n + 2*n = {n * n + 2 * n} (pre, post, res)"
    )


def check_gate_rows(scale: Tensor, bias: Tensor, k: int, n: int, x: Tensor) -> int:
    """Check scale and bias beside K rows of phi; returns how many of the parts pre, post, res there are.

    As many rows as bias has entries make gates. What is beyond these is projected, and nothing else.
    """
    rows, ends = k, part_ends(n)
    # A scale for all rows of phi, or for all their groups, says that bias is the one that is wrong.
    given, whole = tuple(scale.shape), ((k,), (ends.index(k) + 1,) if k in ends else (k,))
    is_of_bias = given == tuple(bias.shape) or given not in whole
    if bias.dim() == 1 and bias.shape[0] < k and bias.shape[0] in ends and is_of_bias:
        rows = bias.shape[0]
    parts = check_parts(rows, n, "phi")
    check_scale_and_bias(scale, bias, rows, parts, x)
    return parts


def check_all_make_gates(operator: str, k: int, bias: Tensor) -> None:
    """What a function asks that returns gates and no products: no row of phi beyond those with gates."""
    if k != bias.shape[0]:
        raise ValueError(
            f"mhc::{operator}: phi has K = {k} rows, but bias has {bias.shape[0]} entries; expected one for each row"
        )


def check_scale_and_bias(scale: Tensor, bias: Tensor, k: int, parts: int, x: Tensor, x_name: str = "x") -> None:
    check_beside("scale", scale, x, x_name)
    if tuple(scale.shape) not in ((k,), (parts,)):
        raise ValueError(
            f"scale has shape {shape_text(scale.shape)}; expected [K] = [{k}], or [{parts}] with one entry per group"
        )
    check_beside("bias", bias, x, x_name)
    check_tensor("bias", bias, (k,), "[K]", x, x_name)


def check_needs(needs: Sequence[bool], count: int) -> None:
    if len(needs) != count:
        raise ValueError(f"needs has {len(needs)} entries; expected {count}, one per differentiable argument")


def check_out_dtype(out_dtype: torch.dtype | None, x: Tensor, name: str = "out_dtype") -> None:
    """A float64 result has float64 gradients, which a narrower x does not take."""
    if out_dtype is not None and out_dtype not in FLOATS:
        raise TypeError(f"{name} is {out_dtype}; expected bfloat16, float16, float32, float64 or None")
    if out_dtype == torch.float64 != x.dtype:
        raise TypeError(f"{name} is float64, but x is {x.dtype}; expected float64 only with float64 x")


def _check_eps(name: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{name} is {value}; expected a finite number >= 0")


def check_rms(rms: Rms) -> None:
    check_choice("rms_mode", rms.mode, RMS_MODES)
    _check_eps("rms_eps", rms.eps)


def check_gates(gates: Gates) -> None:
    for name, value in gates.as_kwargs().items():
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}; expected a finite number")


def check_sinkhorn(sinkhorn: Sinkhorn, prefix: str = "sinkhorn_") -> None:
    if sinkhorn.steps < 0:
        raise ValueError(f"{prefix}steps is {sinkhorn.steps}; expected a number of half-steps >= 0")
    check_choice(f"{prefix}start", sinkhorn.start, SINKHORN_STARTS)
    check_choice(f"{prefix}first", sinkhorn.first, SINKHORN_AXES)
    _check_eps(f"{prefix}eps", sinkhorn.eps)
    _check_eps(f"{prefix}start_eps", sinkhorn.start_eps)
