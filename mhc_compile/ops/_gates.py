"""What lowering makes of operators on a CPU: projections, and the work of a token after them, as loops over tokens.

These are some thousand sums and quotients of a few numbers: less work than calling torch for each of 150 operations on
all tokens, and Inductor, which would fuse them, takes seconds to compile every Sinkhorn. Written down as a loop, a
second is enough, once for a number of streams and a machine. The loops are for float32, and neither for logarithms nor
for an exp that no row's maximum was taken from; the references do the rest, and everything where there is no compiler.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mhc_compile import compat
from mhc_compile.forms import RMS_MODES, Gates, Rms, Sinkhorn
from mhc_compile.ops import _mix
from mhc_compile.ops._checks import accumulation_dtype
from mhc_compile.ops._input_norm import ARGUMENT, SCALAR, flags, input_norm
from mhc_compile.ops._register import autocast_off, group, scalars
from mhc_compile.ops._tensors import (
    fake_gradients,
    rows_of,
    settle,
    settle_gradient,
    stream_products,
    tokens_of,
)
from mhc_compile.ops._transforms import library
from mhc_compile.ops.projection import gradients as projection_gradients
from mhc_compile.ops.projection import reference as projection_reference
from mhc_compile.ops.projection import weighted_phi
from mhc_compile.ops.scale import fake as fake_scale

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cpp")
# What streams the loops read.
_STREAMS = (torch.float32, torch.bfloat16)
# What a thread should have to do at least: waking one costs as much as some ten tokens.
_TOKENS_OF_A_THREAD = 128


class _Form(ctypes.Structure):
    """Rms, Gates and Sinkhorn as the source has them."""

    _fields_ = [
        *((name, ctypes.c_float) for name in ("rms_eps", "pre_eps", "post_mult", "post_eps", "eps", "start_eps")),
        *((name, ctypes.c_int) for name in ("rms_mode", "steps", "softmax", "rows_first", "clamp")),
    ]


@functools.cache
def _form(rms: Rms, gates: Gates, sinkhorn: Sinkhorn) -> _Form:
    return _Form(
        rms_eps=rms.eps,
        rms_mode=RMS_MODES.index(rms.mode),
        pre_eps=gates.pre_eps,
        post_mult=gates.post_mult,
        post_eps=gates.post_eps,
        steps=sinkhorn.steps,
        softmax=sinkhorn.start == "softmax",
        rows_first=sinkhorn.first == "rows",
        eps=sinkhorn.eps,
        start_eps=sinkhorn.start_eps,
        clamp=sinkhorn.clamp,
    )


@functools.cache
def _library(n: int) -> Any:
    """The loops for n streams, None where they cannot be compiled."""
    try:
        library = compat.cpp_library(f"constexpr int N = {n};\n{_SOURCE.read_text(encoding='utf-8')}")
    except Exception as error:  # whatever is wrong with the compiler, the references do without
        log.warning("the gates run operator by operator, because their loop could not be compiled: %s", error)
        return None
    whole, address, flag = ctypes.c_long, ctypes.c_void_p, ctypes.c_int
    library.mix.argtypes = [ctypes.POINTER(_Form), *[address] * 9, flag, *[whole] * 5]
    library.mix_backward.argtypes = [ctypes.POINTER(_Form), *[address] * 18, *[flag] * 2, *[whole] * 5]
    library.products.argtypes = [*[address] * 3, *[flag] * 2, *[whole] * 5]
    for function in (library.mix, library.mix_backward, library.products):
        function.restype = None
    return library


def _loops(n: int, *tensors: Tensor, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> Any:
    """The loops for n streams, None where they cannot read these, or there is nothing to read."""
    for t in tensors:
        if t.dtype not in dtypes or not t.is_contiguous() or not t.is_cpu:
            return None
    return _library(n) if tensors[0].numel() > 0 else None


def _is_bf16(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype == torch.bfloat16


def _run(function: Any, form: tuple[_Form | None, ...], tensors: Sequence[Tensor | None], sizes: Sequence[int]) -> None:
    """Call a loop; the last of its sizes is the number of tokens. tensors keeps alive what pointers point to."""
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    threads = max(1, min(torch.get_num_threads(), sizes[-1] // _TOKENS_OF_A_THREAD))
    function(*form, *pointers, *sizes, threads)


def _form_of_loops(library: Any, k: int, n: int, rms: Rms, gates: Gates, sinkhorn: Sinkhorn) -> _Form | None:
    """The form as the loops have it, None where there are none for it."""
    whole = k <= 2 * n or (not sinkhorn.log_domain and sinkhorn.start in ("softmax", "exp"))
    return _form(rms, gates, sinkhorn) if whole and library is not None else None


def _plain(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous()):
        return tensor
    return tensor.to(torch.float32).contiguous()


def _stream_products(a: Tensor, b: Tensor, n: int | None = None) -> Tensor:
    """out[..., i, o] = <a[..., i], b[..., o]>, accumulated in float32 (float64); n is the library's, if not a's."""
    library = _loops(n or a.shape[-2], a, b, dtypes=_STREAMS)
    shape, dtype = (*a.shape[:-1], b.shape[-2]), accumulation_dtype(a)
    if library is None:
        return settle(stream_products(tokens_of(a), tokens_of(b)), shape, dtype)
    out = a.new_empty(shape, dtype=dtype)
    sizes = (a.shape[-2], b.shape[-2], a.shape[-1], a.shape[:-2].numel())
    _run(library.products, (), (a, b, out), (_is_bf16(a), _is_bf16(b), *sizes))
    return out


_FORMS = ("rms", "gates", "sinkhorn")


@functools.cache
def _forms(given: frozenset[tuple[str, Any]]) -> dict[str, Any]:
    defaults = Rms().as_kwargs() | Gates().as_kwargs() | Sinkhorn().as_kwargs()
    return group(_FORMS, defaults | dict(given))


def _define(name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """As `_register.define`, without what only calls by users need, which is as long as the work itself: lowering has
    every argument from an operator that checked it. Returns what the operator does, for Inductor's code to call.
    """

    def run(*arguments: Any, **given: Any) -> Any:
        with autocast_off("cpu"):
            return implementation(*arguments, **given)

    library.define(name + schema)  # type: ignore[no-untyped-call]
    library.impl(name, run, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"mhc::{name}", fake, lib=library)
    return run


def _forward(
    x: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, norm_weight: Tensor | None = None, **given: Any
) -> tuple[Tensor, ...]:
    """As generate_mix."""
    forms, n, k = _forms(frozenset(given.items())), x.shape[-2], phi.shape[0]
    streams = weight = None
    if _loops(n, x, dtypes=_STREAMS) is None:
        h, ms = projection_reference(x, phi, norm_weight)
    else:
        lead, dtype, streams = x.shape[:-2], accumulation_dtype(x), x
        h, ms = x.new_empty((*lead, k), dtype=dtype), x.new_empty(lead, dtype=dtype)
        weight = weighted_phi(phi, norm_weight, dtype).contiguous()
    library = _loops(n, h)
    form = _form_of_loops(library, k, n, **forms)
    narrow = (None, None, None) if form is None else fake_scale(h, ms, scale, bias, n)
    if library is not None:
        tensors = [streams, weight, _plain(scale), _plain(bias), h, ms, *narrow]
        _run(library.mix, (form,), tensors, (_is_bf16(x), k, scale.numel() != k, x.shape[-1], ms.numel()))
    if form is None:
        narrow = _mix.narrow_forward(h, ms, scale, bias, n, **forms)
    return *narrow, h, ms


def _backward(
    d_layer_input: Tensor | None,
    d_h_pre: Tensor | None,
    d_h_post: Tensor | None,
    d_h_res: Tensor | None,
    d_h: Tensor | None,
    d_ms: Tensor | None,
    x: Tensor,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    h: Tensor,
    ms: Tensor,
    needs: Sequence[bool],
    input_norm_weight: Tensor | None = None,
    input_norm_eps: float | None = None,
    **given: Any,
) -> tuple[Tensor, ...]:
    """dh @ phi, h_pre and dms, from which Inductor makes dx; dphi, dscale, dbias, dnorm_weight.

    Behind an input norm also the gradient of what it reads, and of its weight.
    """
    forms, needs = _forms(frozenset(given.items())), flags(needs, 6)
    n, k, tokens, dtype = x.shape[-2], phi.shape[0], ms.numel(), accumulation_dtype(x)
    norm = input_norm(input_norm_weight, input_norm_eps)
    du = d_weight = None
    if norm is not None:
        d_h_pre, du, d_weight = _mix.behind_norm(norm, d_layer_input, x, h, ms, scale, bias, needs[5], **forms)
        d_layer_input = None
    if d_layer_input is not None and _loops(n, x, d_layer_input, dtypes=_STREAMS) is None:
        d_h_pre, d_layer_input = _stream_products(x, d_layer_input.unsqueeze(-2)).squeeze(-1), None
    h = h.contiguous()
    library = _loops(n, h) if dtype == torch.float32 else None
    form = _form_of_loops(library, k, n, **forms)
    if form is None:
        gradients, narrow_needs = (d_layer_input, d_h_pre, d_h_post, d_h_res), (True, True, needs[2], needs[3])
        narrow = _mix.narrow_backward(*gradients, x, h, ms, scale, bias, narrow_needs, **forms)
        h_pre, dh, dms, dscale, dbias = narrow
        assert dh is not None
        assert dms is not None
        dh = (dh if d_h is None else dh + rows_of(d_h)).contiguous()
        dms = dms if d_ms is None else dms + d_ms.reshape(-1)
    else:
        h_pre, dh, dms = h.new_empty(x.shape[:-1]), h.new_empty(tokens, k), h.new_empty(tokens)
        dscale, dbias = h.new_empty(scale.shape), h.new_empty(k)
    dx = dh.new_empty(x.shape) if needs[0] and library is not None else None
    if library is not None:
        weight = None if dx is None else weighted_phi(phi, norm_weight, dtype).contiguous()
        arguments = [_plain(tensor) for tensor in (ms, scale, bias, d_h_pre, d_h_post, d_h_res, d_h, d_ms)]
        tensors = [x, d_layer_input, h, *arguments, weight, h_pre, dh, dms, dscale, dbias, dx]
        sizes = (k, scale.numel() != k, x.shape[-1], tokens)
        _run(library.mix_backward, (form,), tensors, (_is_bf16(x), _is_bf16(d_layer_input), *sizes))
    dphi = dnorm_weight = None
    wide_needs = (needs[0] and dx is None, needs[1], needs[4])
    if any(wide_needs):
        of_x, dphi, dnorm_weight = projection_gradients(dh, None, x, phi, norm_weight, wide_needs, dx_dtype=dtype)
        dx = of_x if dx is None else dx
    return (
        dh.new_empty(0) if dx is None else dx if dx.shape == x.shape else dx.view(x.shape),
        h_pre,
        dms.view(ms.shape),
        settle_gradient(dphi, phi, x),
        settle_gradient(dscale if needs[2] else None, scale, x),
        settle_gradient(dbias if needs[3] else None, bias, x),
        settle_gradient(dnorm_weight, norm_weight, x),
        dh.new_empty(0) if du is None else du.view(*x.shape[:-2], x.shape[-1]),
        settle_gradient(d_weight, input_norm_weight, x),
    )


def _fake_backward(*arguments: Any, **forms: Any) -> tuple[Tensor, ...]:
    x, phi, scale, bias, norm_weight, _, ms, needs = arguments[6:14]
    input_norm_weight = arguments[14] if len(arguments) > 14 else None
    normed = arguments[0] is not None and forms.get("input_norm_eps") is not None
    dtype = accumulation_dtype(x)
    dx = x.new_empty(x.shape if needs[0] else 0, dtype=dtype)
    tensors = (phi, scale, bias, norm_weight, input_norm_weight)
    *rest, d_weight = fake_gradients(tensors, flags(needs, 6)[1:], x, streams=())
    du = x.new_empty((*x.shape[:-2], x.shape[-1]) if normed else 0, dtype=dtype)
    return dx, x.new_empty(x.shape[:-1], dtype=dtype), ms.new_empty(ms.shape, dtype=dtype), *rest, du, d_weight


mix = _define(
    "_mix",
    f"({_mix.ARGUMENTS}=None, *, {scalars(*_FORMS)}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    lambda x, phi, *narrow, **forms: _mix.fake_forward(x, phi),
)
mix_backward = _define(
    "_mix_backward",
    "(Tensor? d_layer_input, Tensor? d_h_pre, Tensor? d_h_post, Tensor? d_h_res, Tensor? d_h, Tensor? d_ms,"
    f" {_mix.ARGUMENTS}, Tensor h, Tensor ms, bool[] needs, {ARGUMENT}, *, {scalars(*_FORMS)}, {SCALAR})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
products = _define(
    "_products",
    "(Tensor a, Tensor b, int? n=None) -> Tensor",
    _stream_products,
    lambda a, b, n=None: a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=accumulation_dtype(a)),
)
