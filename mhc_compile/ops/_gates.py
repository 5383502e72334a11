"""mhc::_gates and its gradient: `scale` and `sinkhorn` in one loop over tokens, into which lowering takes operators apart.

What a token needs after its projection is some thousand sums and quotients of a few numbers: less work than calling
torch once for each of 150 operations on all tokens, and Inductor, which would fuse them, takes seconds to compile every
Sinkhorn. Written down as a loop, the compiler that Inductor has chosen takes a second, once for a number of streams and
a machine. That is for float32 without logarithms; the references do the rest, and all where there is no compiler.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mhc_compile import compat
from mhc_compile.forms import RMS_MODES, Gates, Rms, Sinkhorn
from mhc_compile.ops._checks import accumulation_dtype
from mhc_compile.ops._register import define, scalars
from mhc_compile.ops._tensors import rows_of
from mhc_compile.ops.aggregate import pre_gradient
from mhc_compile.ops.scale import fake as fake_scale
from mhc_compile.ops.scale import gradients as scale_gradients
from mhc_compile.ops.scale import group_sums
from mhc_compile.ops.scale import reference as scale_reference
from mhc_compile.ops.sinkhorn import gradient as sinkhorn_gradient
from mhc_compile.ops.sinkhorn import reference as sinkhorn_reference

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cpp")
# What a thread should have to do at least: it takes some microseconds to wake one, and one for 5 tokens.
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
    sizes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_int]
    for function, tensors in ((library.forward, 7), (library.backward, 12)):
        function.argtypes = [ctypes.POINTER(_Form), *[ctypes.c_void_p] * tensors, *sizes]
        function.restype = None
    return library


def _loops(h: Tensor, n: int, sinkhorn: Sinkhorn) -> Any:
    logarithms = sinkhorn.log_domain and h.shape[-1] > 2 * n
    suits = h.device.type == "cpu" and h.dtype == torch.float32 and h.numel() > 0 and not logarithms
    return _library(n) if suits else None


def _run(function: Any, form: _Form, tensors: list[Tensor | None], h: Tensor, scale: Tensor) -> None:
    k, tokens = h.shape[-1], h.shape[:-1].numel()
    threads = max(1, min(torch.get_num_threads(), tokens // _TOKENS_OF_A_THREAD))
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    function(form, *pointers, k, scale.numel() != k, tokens, threads)


def _plain(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.float32).contiguous()


def _forward(
    h: Tensor, ms: Tensor, scale: Tensor, bias: Tensor, n: int, *, rms: Rms, gates: Gates, sinkhorn: Sinkhorn
) -> tuple[Tensor, ...]:
    loops = _loops(h, n, sinkhorn)
    if loops is None:
        pre, post, logits = scale_reference(h, ms, scale, bias, n, rms=rms, gates=gates)
        return pre, post, sinkhorn_reference(logits, sinkhorn=sinkhorn)
    results = fake_scale(h, ms, scale, bias, n)
    arguments = [_plain(tensor) for tensor in (h, ms, scale, bias)]
    _run(loops.forward, _form(rms, gates, sinkhorn), [*arguments, *results], h, scale)
    return results


def _check_nothing(*arguments: Any, **forms: Any) -> None:
    """Lowering alone calls these operators, with what the operator that it takes apart has checked."""


def _fake_forward(h: Tensor, *rest: Any, **forms: Any) -> tuple[Tensor, ...]:
    return fake_scale(h, *rest)


def _backward(
    d_layer_input: Tensor | None,
    d_h_pre: Tensor | None,
    d_h_post: Tensor | None,
    d_h_res: Tensor | None,
    x: Tensor,
    h: Tensor,
    ms: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    rms: Rms,
    gates: Gates,
    sinkhorn: Sinkhorn,
) -> tuple[Tensor, ...]:
    """h_pre, dh, dms, dscale, dbias; at most one of d_layer_input and d_h_pre is given."""
    n = x.shape[-2]
    d_pre = d_h_pre if d_layer_input is None else pre_gradient(d_layer_input, x)
    results = _fake_backward(None, None, None, None, x, h, ms, scale, bias)
    h_pre, dh, dms, dscale, dbias = results
    loops = _loops(h, n, sinkhorn)
    if loops is None:
        pre, _, logits = scale_reference(h, ms, scale, bias, n, rms=rms, gates=gates)
        d_res = None if d_h_res is None else sinkhorn_gradient(d_h_res, logits, sinkhorn=sinkhorn).flatten(-2)
        rows = [None if d is None else rows_of(d) for d in (d_pre, d_h_post, d_res)]
        narrow = scale_gradients(*rows, h, ms, scale, bias, n, (True,) * 4, rms=rms, gates=gates)
        for result, value in zip(results, (pre, *narrow), strict=True):
            result.copy_(value.view(result.shape))
        return results
    arguments = [_plain(tensor) for tensor in (h, ms, scale, bias, d_pre, d_h_post, d_h_res)]
    # The shares of tokens in the gradients of scale and bias, [2, M, K].
    shares = h.new_empty((2, *rows_of(h).shape))
    _run(loops.backward, _form(rms, gates, sinkhorn), [*arguments, h_pre, dh, dms, *shares], h, scale)
    sums = shares.sum(1)
    dscale.copy_(group_sums(sums[0], scale, n))
    dbias.copy_(sums[1])
    return results


def _fake_backward(
    d_layer_input: Tensor | None,
    d_h_pre: Tensor | None,
    d_h_post: Tensor | None,
    d_h_res: Tensor | None,
    x: Tensor,
    *narrow: Tensor,
    **forms: Any,
) -> tuple[Tensor, ...]:
    h_pre = x.new_empty(x.shape[:-1], dtype=accumulation_dtype(x))
    return h_pre, *(x.new_empty(tensor.shape, dtype=tensor.dtype) for tensor in narrow)


_FORMS = ("rms", "gates", "sinkhorn")

define(
    "_gates",
    f"(Tensor h, Tensor ms, Tensor scale, Tensor bias, int n, *, {scalars(*_FORMS)}) -> (Tensor, Tensor, Tensor)",
    forms=_FORMS,
    check=_check_nothing,
    reference=_forward,
    fake=_fake_forward,
)
define(
    "_gates_backward",
    "(Tensor? d_layer_input, Tensor? d_h_pre, Tensor? d_h_post, Tensor? d_h_res, Tensor x, Tensor h, Tensor ms,"
    f" Tensor scale, Tensor bias, *, {scalars(*_FORMS)}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    forms=_FORMS,
    check=_check_nothing,
    reference=_backward,
    fake=_fake_backward,
)
