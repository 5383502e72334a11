"""Tensors of symbols: any function of torch, run on formulas in place of numbers.

Under `Symbols`, an element of a floating tensor is the number of a formula in a table. So torch itself moves elements:
views, strides, copies and writes in place are its own. Only arithmetic is done here, formula by formula.

Formulas 0 and 1 are the numbers 0 and 1, so zeros, padding and masks need nothing. An element that was never written
is NaN, and reading it is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mhc_compile.ops import _register

Terms = np.ndarray[Any, np.dtype[np.object_]]
# Besides views, operators that move elements or make some, without a look at them.
_MOVES = re.compile(
    "_reshape_alias|_to_copy|_unsafe_view|arange|cat|clone|constant_pad_nd|copy|diag_embed|eye|index|lift_fresh|new_ones|new_zeros"
    "|ones|ones_like|stack|where|zero|zeros|zeros_like|bitwise_and|bitwise_or|bitwise_not|logical_not"
)
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_FULL = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0, "fill": 1, "fill_": 1}


_exp, _log, _sqrt = (np.frompyfunc(function, 1, 1) for function in (sympy.exp, sympy.log, sympy.sqrt))


def _sum(terms: Terms, dims: Any = None, keepdim: bool = False) -> Terms:
    """One flat sum: adding one by one would sort the summands each time."""
    return _reduced(lambda line: sympy.Add(*line), terms, dims, keepdim)


def _reduced(function: Callable[[list[Any]], Any], terms: Terms, dims: Any, keepdim: bool) -> Terms:
    dims = range(terms.ndim) if dims in (None, [], ()) else [dims] if isinstance(dims, int) else dims
    axes = sorted(d % terms.ndim for d in dims)
    kept = [d for d in range(terms.ndim) if d not in axes]
    lines = terms.transpose(*kept, *axes).reshape(*[terms.shape[d] for d in kept], -1)
    out = np.empty(lines.shape[:-1], dtype=object)
    for at in np.ndindex(*out.shape):
        out[at] = function(list(lines[at]))
    return out.reshape([1 if d in axes else size for d, size in enumerate(terms.shape)]) if keepdim else out


def _matmul(a: Terms, b: Terms) -> Terms:
    return _sum(a[..., :, :, None] * b[..., None, :, :], -2)


def _softmax(terms: Terms, dim: int, half: bool = False) -> Terms:
    exps = _exp(terms)
    return exps / _sum(exps, dim, True)


def _log_softmax(terms: Terms, dim: int, half: bool = False) -> Terms:
    return terms - _logsumexp(terms, dim, True)


def _logsumexp(terms: Terms, dims: Any, keepdim: bool = False) -> Terms:
    return _log(_sum(_exp(terms), dims, keepdim))


def _mean(terms: Terms, dims: Any = None, keepdim: bool = False) -> Terms:
    total = _sum(terms, dims, keepdim)
    return total * sympy.Rational(total.size, terms.size)


_ARITHMETIC: dict[str, Callable[..., Terms]] = {
    "add": lambda a, b, alpha=1: a + alpha * b,
    "sub": lambda a, b, alpha=1: a - alpha * b,
    "rsub": lambda a, b, alpha=1: b - alpha * a,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "reciprocal": lambda a: 1 / a,
    "square": lambda a: a**2,
    "pow": lambda a, b: a**b,
    "sqrt": _sqrt,
    "rsqrt": lambda a: 1 / _sqrt(a),
    "exp": _exp,
    "log": _log,
    "sigmoid": lambda a: 1 / (1 + _exp(-a)),
    "addcmul": lambda a, b, c, value=1: a + value * b * c,
    "sum": lambda a, dims=None, keepdim=False: _sum(a, dims, keepdim),
    "mean": _mean,
    "mm": _matmul,
    "bmm": _matmul,
    "addmm": lambda a, b, c: a + _matmul(b, c),
    "baddbmm": lambda a, b, c: a + _matmul(b, c),
    "mv": lambda a, b: _matmul(a, b[:, None])[:, 0],
    "dot": lambda a, b: _sum(a * b),
    "tanh": lambda a: 1 - 2 / (1 + _exp(2 * a)),
    "sin": np.frompyfunc(sympy.sin, 1, 1),
    "cos": np.frompyfunc(sympy.cos, 1, 1),
    # No shift by a maximum: it cancels, and is there against overflow.
    "_softmax": _softmax,
    "_log_softmax": _log_softmax,
    "logsumexp": _logsumexp,
}


class Undecided(Exception):
    """A comparison that the assumptions of a proof do not decide."""


def in_range(a: Any, b: Any) -> bool:
    """Decides comparisons with bounds that keep numbers in the range of a dtype: formulas are between these."""
    return bool(a.is_number and a > 0) or bool(b.is_number and b < 0)


class Symbols(TorchDispatchMode):
    """A context in which floating tensors hold formulas.

    above: decides a > b of two formulas; without it, comparisons raise `Undecided`.
    largest: picks the maximum of some formulas; without it, or if it is None, the maximum is a symbol of its own.
    """

    def __init__(
        self,
        *,
        above: Callable[[Any, Any], bool] | None = None,
        largest: Callable[[list[Any]], Any] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._above, self._largest, self.dtype = above, largest, dtype
        self._terms: list[Any] = []
        self._places: dict[Any, int] = {}
        self._named: dict[float, sympy.Symbol] = {}
        # Symbols that are maxima, and of which formulas.
        self.maxima: dict[sympy.Symbol, frozenset[Any]] = {}
        self._maxima: dict[frozenset[Any], sympy.Symbol] = {}
        self._place(sympy.Integer(0))
        self._place(sympy.Integer(1))

    def tensor(self, name: str, *shape: int, positive: bool = False) -> Tensor:
        """A tensor of free symbols."""
        names = np.empty(shape, dtype=object)
        for at in np.ndindex(*shape):
            text = f"{name}{'_'.join(map(str, at))}"
            names[at] = sympy.Symbol(text, positive=True) if positive else sympy.Symbol(text, real=True)
        return self.of(names)

    def number(self, name: str) -> float:
        """A number that stands for a positive symbol wherever an operator is given it as a scalar."""
        # A float that no program computes: the names' places are in its last digits.
        value = 1.2345678901e-6 * (1 + len(self._named) * 2.0**-20)
        self._named[value] = sympy.Symbol(name, positive=True)
        return value

    def of(self, terms: Any, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor of these formulas."""
        terms = np.asarray(terms, dtype=object)
        places = np.empty(terms.shape, dtype=np.float64)
        for at in np.ndindex(*terms.shape):
            places[at] = self._place(sympy.sympify(terms[at]))
        return torch.from_numpy(places).to(dtype or self.dtype)

    def terms(self, tensor: Tensor) -> Terms:
        """The formulas of a tensor."""
        places = tensor.detach().to(torch.float64).numpy()
        if np.isnan(places).any():
            raise ValueError("an element is read that was never written")
        out = np.empty(places.shape, dtype=object)
        for at in np.ndindex(*places.shape):
            out[at] = self._terms[int(places[at])]
        return out

    def _place(self, term: Any) -> int:
        place = self._places.get(term)
        if place is None:
            place = self._places[term] = len(self._terms)
            self._terms.append(term)
            # The numbers that float32 can tell apart.
            assert place < 1 << 24
        return place

    def scalar(self, value: Any) -> Any:
        """A Python number as a formula."""
        if isinstance(value, float):
            if value in self._named:
                return self._named[value]
            return sympy.Rational(value) if math.isfinite(value) else sympy.oo * int(math.copysign(1, value))
        return sympy.Integer(value)

    def above(self, a: Any, b: Any) -> bool:
        """Whether a > b."""
        known = (a - b).is_positive if (a - b).is_number else None
        if known is not None:
            return bool(known)
        if self._above is None:
            raise Undecided(f"{a} > {b}")
        return self._above(a, b)

    def _maximum(self, terms: list[Any]) -> Any:
        if len(terms) == 1:
            return terms[0]
        known = self._largest(terms) if self._largest is not None else None
        if known is not None:
            return known
        name = self._maxima.setdefault(frozenset(terms), sympy.Symbol(f"max{len(self._maxima)}", real=True))
        self.maxima[name] = frozenset(terms)
        return name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._opname
        if func.namespace == "mhc":
            with self:
                return _register.REFERENCES[name](*args, **kwargs)
        with self:  # what other operators make up, such as matmul
            made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
        if name in _EMPTY:
            return func(*args, **kwargs).fill_(math.nan)
        if name in _FULL:
            return self._filled(func, args, kwargs)
        written = args[0] if name.endswith("_") and not name.startswith("_") else None
        plain = name.removesuffix("_") if written is not None else name
        if func.is_view or _MOVES.fullmatch(plain):
            return self._moved(func, args, kwargs)
        operands = [self._operand(argument) for argument in args]
        named = {key: self._operand(value) for key, value in kwargs.items() if key not in ("dtype", "device", "layout")}
        result = self._computed(plain, operands, named)
        if isinstance(result, Tensor):
            return result
        dtype = kwargs.get("dtype") or next(argument.dtype for argument in args if isinstance(argument, Tensor))
        out = self.of(self.made(result), dtype)
        return out if written is None else written.copy_(out)

    def made(self, terms: Terms) -> Terms:
        """What is kept of formulas that an operator has made."""
        return terms

    def _moved(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        source = next((a for a in args if isinstance(a, Tensor)), None)
        if (
            source is not None
            and isinstance(out, Tensor)
            and source.is_floating_point()
            and not out.is_floating_point()
        ):
            raise TypeError(f"{func} would turn formulas into {out.dtype}")
        return out

    def _filled(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        at = _FULL[func._opname]
        value = args[at]
        dtype = kwargs.get("dtype") or (args[0].dtype if isinstance(args[0], Tensor) else torch.float32)
        if not dtype.is_floating_point:
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        kwargs = kwargs | ({"dtype": dtype} if func._opname in ("full", "scalar_tensor") else {})
        place = value if isinstance(value, Tensor) else float(self._place(self.scalar(value)))
        return func(*args[:at], place, *args[at + 1 :], **kwargs)  # type: ignore[no-any-return]

    def _operand(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self.terms(argument) if argument.is_floating_point() else argument.numpy().astype(object)
        return self.scalar(argument) if isinstance(argument, float) else argument

    def _computed(self, name: str, operands: list[Any], named: dict[str, Any]) -> Any:
        if name in ("gt", "lt", "ge", "le"):
            compare = np.frompyfunc(self.above, 2, 1)
            a, b = operands if name in ("gt", "le") else operands[::-1]
            held = torch.from_numpy(np.asarray(compare(a, b), dtype=bool))
            return held if name in ("gt", "lt") else ~held
        if name in ("eq", "ne"):
            held = torch.from_numpy(np.asarray(np.frompyfunc(lambda a, b: bool(a == b), 2, 1)(*operands), dtype=bool))
            return held if name == "eq" else ~held
        if name == "amax":
            return _reduced(self._maximum, operands[0], operands[1] if len(operands) > 1 else None, bool(operands[2:]))
        if name in ("clamp_min", "clamp", "clamp_max"):
            return self._clamped(name, *operands, **named)
        if name not in _ARITHMETIC:
            raise NotImplementedError(f"{name} of symbols")
        return _ARITHMETIC[name](*operands, **named)

    def _clamped(self, name: str, a: Terms, low: Any = None, high: Any = None) -> Terms:
        low, high = (None, low) if name == "clamp_max" else (low, high)
        if low is not None:
            a = np.frompyfunc(lambda x, y: x if self.above(x, y) else y, 2, 1)(a, low)
        if high is not None:
            a = np.frompyfunc(lambda x, y: y if self.above(x, y) else x, 2, 1)(a, high)
        return a
