"""A float64 evaluation of a model that was written for lower precision."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from mhc_compile import compat

__all__ = ["Float64Reference", "KeepFloat64"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_WIDE = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64) | dict.fromkeys(
    (torch.complex64, torch.complex32), torch.complex128
)
_CASTS = {
    getattr(torch.Tensor, name): dtype
    for dtype, names in ((torch.float64, "float bfloat16 half"), (torch.complex128, "cfloat chalf"))
    for name in names.split()
}
_TYPE = re.compile(r"(torch(?:\.\w+)?)\.(?:Float|Half|BFloat16)Tensor")


class KeepFloat64(TorchFunctionMode):
    """Turn requests for lower floating point dtypes into float64, and for lower complex dtypes into complex128.

    Model code casts explicitly (`x.float()`, `x.to(torch.float32)`, `softmax(..., dtype=torch.float32)`).
    In a float64 model those would cut the most sensitive places back to float32. Inside this mode such
    casts, and factory functions with or without an explicit dtype, give float64. So do grouped products, as
    of experts.

    Activation checkpointing runs the model again during `backward()`, which torch calls with every mode off.
    Give checkpoint the mode for that time: `context_fn=lambda: (contextlib.nullcontext(), KeepFloat64())`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._default_dtypes: list[torch.dtype] = []  # one for each time that it is entered

    def __enter__(self) -> KeepFloat64:
        self._default_dtypes.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._default_dtypes.pop())

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _CASTS:
            return args[0].to(_CASTS[func])
        if func in (torch.Tensor.to, torch.Tensor.type_as):
            args, kwargs = _without_other(args, kwargs or {})
            func = torch.Tensor.to
        elif func is torch.Tensor.type:
            args = (args[0], *(_raised_type(value) for value in args[1:]))
            kwargs = {name: _raised_type(value) for name, value in (kwargs or {}).items()}
        args = tuple(_raised_dtype(value) for value in args)
        kwargs = {name: _raised_dtype(value) for name, value in (kwargs or {}).items()}
        if getattr(func, "__name__", "") == "_grouped_mm" and args[1].dim() == 3:
            return _grouped_mm(*args, **kwargs)
        return func(*args, **kwargs)


class Float64Reference(Generic[ModuleT]):
    """A float64 copy of `module` that computes in float64 throughout, whatever casts its code contains.

    Parameters and buffers are copied and widened, complex ones to complex128. That is exact, so what it computes
    differs from exact arithmetic on the original parameters by float64 rounding only. The original module is left as
    it is.

    Args:
        module: any module that can be deep-copied.

    Attributes:
        module: the float64 copy; a backward pass fills the `.grad` fields of its parameters.

    The object is called with the module's own arguments; floating point and complex tensors among them are widened.
    Parts of the module that are compiled, and functions that it calls, run as they are written.
    """

    def __init__(self, module: ModuleT) -> None:
        known: dict[torch.Tensor, Any] = {}  # one tensor that two modules hold stays one
        own = copy.deepcopy(module)
        self.module = own._apply(lambda tensor: known.setdefault(tensor, widened(tensor)))  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(widened, (args, kwargs))
        with compat.uncompiled(self.module), torch.compiler.set_stance("force_eager"), KeepFloat64():
            return self.module(*args, **kwargs)


def _grouped_mm(
    rows: torch.Tensor, matrices: torch.Tensor, offs: torch.Tensor, bias: None = None, out_dtype: Any = None
) -> torch.Tensor:
    """`torch.nn.functional.grouped_mm` of rows whose groups end at offs. torch has none for float64.

    Rows after the last group give zeros; torch writes nothing there.
    """
    ends = offs.tolist()
    groups = [rows[i:j] @ matrix for i, j, matrix in zip([0, *ends], ends, matrices, strict=False)]
    return torch.cat([*groups, rows.new_zeros(rows.shape[0] - ends[-1], matrices.shape[-1])])


def _without_other(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A cast to what another tensor is, as one to its device and dtype."""
    for name in kwargs.keys() & {"other", "tensor"}:  # as type_as and to call it
        args, kwargs = (*args, kwargs[name]), {key: value for key, value in kwargs.items() if key != name}
    if len(args) > 1 and isinstance(args[1], torch.Tensor):
        args = (args[0], args[1].device, args[1].dtype, *args[2:])
    return args, kwargs


def _raised_type(value: Any) -> Any:
    """A tensor type of float64 for one of a lower floating point dtype, by class or by name; else as it is."""
    name = value if isinstance(value, str) else f"{getattr(value, '__module__', '')}.{getattr(value, '__name__', '')}"
    found = _TYPE.fullmatch(name)
    return f"{found[1]}.DoubleTensor" if found else value


def _raised_dtype(value: Any) -> Any:
    """The widest dtype of the kind of a lower floating point or complex dtype, anything else as it is."""
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def widened(value: Any) -> Any:
    """A floating point or complex tensor in the widest dtype of its kind, anything else as it is."""
    if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
        return value.to(torch.complex128 if value.is_complex() else torch.float64)
    return value
