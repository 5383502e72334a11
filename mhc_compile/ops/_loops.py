"""mhc::_loop, which runs a loop over tokens in C++: on a CPU, what lowering does not leave to Inductor.

Between its projection and its gates, a token needs some thousand sums and quotients of a few numbers. This is less work
than calling torch for each of 150 operations on all tokens. Inductor would fuse them, but takes seconds to compile
every Sinkhorn. Projections and products over columns are loops, too, because the order of their sums must not depend on
other tokens. Compiling the loops takes a second, once for each number of streams and each machine. The loops compute in
float32. They do not compute an exp with eps and without the row's maximum. The references compute the rest, and
everything if there is no compiler.

loop is a text (`mhc_compile.encoding`) of these: the loop's name, the dtype to accumulate in, the number of streams,
the operators' scalars, the number of projections, and whatever else the loop takes before its tensors. A loop writes
its results into arguments, so that Inductor plans their memory. These arguments have to be named: in the branches of
`torch.cond`, torch 2.13 takes no list of written tensors by position.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhc_compile import compat
from mhc_compile.encoding import from_text, in_one_line, to_text
from mhc_compile.forms import RMS_MODES, Gates, Rms, Sinkhorn
from mhc_compile.ops._checks import accumulation_dtype
from mhc_compile.ops._mix import fake_forward, narrow_backward, narrow_forward
from mhc_compile.ops._register import autocast_off, group
from mhc_compile.ops._tensors import matmul_rows, rows_of, stream_products, tokens_of, upcast, weighted_sums
from mhc_compile.ops._transforms import library, register_fake
from mhc_compile.ops.projection import reference as projection_reference
from mhc_compile.ops.projection import weighted_phi
from mhc_compile.ops.sinkhorn import gradient as sinkhorn_gradient
from mhc_compile.ops.sinkhorn import reference as sinkhorn_reference

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cpp")
_FORMS = ("rms", "gates", "sinkhorn")
_DEFAULTS = Rms().as_kwargs() | Gates().as_kwargs() | Sinkhorn().as_kwargs()
# How Sinkhorns start that the loops have, in the order of the source.
_STARTS = ("softmax", "exp", "normalised")
# What streams the loops read.
_STREAMS = (torch.float32, torch.bfloat16)
# What a thread should have to do at least, in columns of tokens, since waking one takes some microseconds; the gates of
# a token count as that many.
_COLUMNS_OF_A_THREAD, _COLUMNS_OF_GATES = 1 << 15, 128
# How many numbers of streams are converted at a time for a matrix product.
_CONVERTED = 1 << 23

Tensors = Sequence[Tensor]
Given = Sequence[Any]  # tensors, some of them None


class StreamGradient(NamedTuple):
    """What the loop "unproject" reads: the terms of a gradient of streams, as tensors or as a graph's nodes.

    x is read if there is a d_ms. Of two projections of the same streams the second is `more`.
    """

    d_h: Any
    phi: Any
    d_ms: Any = None
    more_h: Any = None
    more_phi: Any = None
    more_ms: Any = None
    x: Any = None
    h_pre: Any = None
    d_out: Any = None
    h_res: Any = None
    d_new: Any = None
    d_x: Any = None

    def constants(self, out: Tensor) -> tuple[int, int, int]:
        """Of tensors: the numbers of logits, and which streams are bfloat16, a bit each."""
        narrow = sum(_is_bf16(t) << bit for bit, t in enumerate((self.x, self.d_out, self.d_new, self.d_x, out)))
        return self.phi.shape[0], 0 if self.more_phi is None else self.more_phi.shape[0], narrow


class _Form(ctypes.Structure):
    """Rms, Gates and Sinkhorn as the source has them."""

    _fields_ = [
        *((name, ctypes.c_float) for name in ("rms_eps", "pre_eps", "post_mult", "post_eps", "eps", "start_eps")),
        *((name, ctypes.c_int) for name in ("rms_mode", "steps", "start", "rows_first", "clamp")),
    ]


def _form(rms: Rms, gates: Gates, sinkhorn: Sinkhorn) -> _Form:
    """sinkhorn: as it is computed, `Sinkhorn.iterated`."""
    return _Form(
        rms_eps=rms.eps,
        rms_mode=RMS_MODES.index(rms.mode),
        pre_eps=gates.pre_eps,
        post_mult=gates.post_mult,
        post_eps=gates.post_eps,
        steps=sinkhorn.steps,
        start=_STARTS.index(sinkhorn.start) if sinkhorn.start in _STARTS else -1,
        rows_first=sinkhorn.first == "rows",
        eps=sinkhorn.eps,
        start_eps=sinkhorn.start_eps,
        clamp=sinkhorn.clamp,
    )


@functools.cache
def _library(n: int) -> Any:
    """The loops for n streams, None where they cannot be compiled."""
    try:
        compiled = compat.cpp_library(f"constexpr int N = {n};\n{_SOURCE.read_text(encoding='utf-8')}")
    except Exception as error:  # whatever is wrong with the compiler, the references do without
        _tell(in_one_line(error))
        log.debug("where this failed", exc_info=error)
        return None
    whole, address, form = ctypes.c_long, ctypes.c_void_p, ctypes.POINTER(_Form)
    compiled.mix.argtypes = [form, *[whole] * 4, *[address] * 9, *[whole] * 3]
    compiled.mix_backward.argtypes = [form, *[whole] * 5, *[address] * 16, *[whole] * 3]
    compiled.sinkhorn.argtypes = [form, *[address] * 2, *[whole] * 3]
    compiled.sinkhorn_backward.argtypes = [form, *[address] * 3, *[whole] * 3]
    compiled.products.argtypes = [*[whole] * 4, *[address] * 3, *[whole] * 3]
    compiled.project.argtypes = [*[whole] * 2, *[address] * 4, *[whole] * 3]
    compiled.unproject.argtypes = [*[whole] * 3, *[address] * 13, *[whole] * 3]
    for name in ("mix", "mix_backward", "sinkhorn", "sinkhorn_backward", "products", "project", "unproject"):
        getattr(compiled, name).restype = None
    return compiled


@functools.cache
def _tell(failure: str) -> None:
    """Once, whatever numbers of streams there are."""
    log.warning("the gates run operator by operator, because their loop could not be compiled: %s", failure)


def forget_failures() -> None:
    """Try again to compile loops that could not be compiled."""
    if _tell.cache_info().currsize:
        for known in (_library, _read, _tell):
            known.cache_clear()


class _Loop:
    """A loop as a graph calls it, again and again."""

    def __init__(self, name: str, dtype: str, n: int, scalars: dict[str, Any], *constants: int) -> None:
        self.n, self.forms = n, group(_FORMS, scalars) if scalars else {}
        self.library = _library(n) if dtype == "float32" else None
        first: tuple[_Form | None, ...] = ()
        if scalars:
            computed = self.forms | {"sinkhorn": self.forms["sinkhorn"].iterated}
            k = constants[0] if constants else n * (n + 2)  # without a projection, of a matrix alone
            first = (_form(**computed) if _has_form(k, n, computed["sinkhorn"]) else None,)
        function = getattr(self.library, name, None)
        if function is not None:
            self._function = functools.partial(function, *first, *constants)
        self._references = _REFERENCES[name] if function is None or None in first else None

    def __call__(self, written: Tensors, read: Given, sizes: Sequence[int]) -> None:
        if self._references is None:
            self.run(written, read, sizes)
        else:
            with autocast_off("cpu"):
                self._references(self, written, read, sizes)

    def run(self, written: Tensors, read: Given, sizes: Sequence[int]) -> None:
        """Call the function in C++, which leaves out the gates without a form."""
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in (*read, *written)]
        width, tokens = sizes
        most = tokens * (width + _COLUMNS_OF_GATES) // _COLUMNS_OF_A_THREAD
        self._function(*pointers, width, tokens, max(1, min(torch.get_num_threads(), most)))


def _has_form(k: int, n: int, sinkhorn: Sinkhorn) -> bool:
    """Whether the loops have the gates of k projections of this form."""
    return k <= 2 * n or sinkhorn.start in _STARTS


def _fill(written: Tensors, values: Given) -> None:
    for out, value in zip(written, values, strict=True):
        if value is not None:
            out.copy_(value.reshape(out.shape))


def _mix_by_references(loop: _Loop, written: Tensors, read: Given, sizes: Sequence[int]) -> None:
    x, phi, scale, bias = read
    h, ms, *gates = written
    if loop.library is None:
        _fill((h, ms), projection_reference(x, phi, None))
    else:
        loop.run(written, read, sizes)
    _fill(gates, narrow_forward(h, ms, scale, bias, loop.n, **loop.forms))


def _mix_backward_by_references(loop: _Loop, written: Tensors, read: Given, sizes: Sequence[int]) -> None:
    x, d_layer_input, h, ms, scale, bias, d_pre, d_post, d_res, d_h, d_ms = read
    gradients = (d_layer_input, d_pre, d_post, d_res)
    _fill(written, narrow_backward(*gradients, x, h, ms, scale, bias, [True] * 4, **loop.forms))
    for total, more in ((written[1], d_h), (written[2], d_ms)):
        if more is not None:
            total += more


def _sinkhorn_by_references(loop: _Loop, written: Tensors, read: Given, sizes: Sequence[int]) -> None:
    _fill(written, [sinkhorn_reference(*read, sinkhorn=loop.forms["sinkhorn"])])


def _sinkhorn_backward_by_references(loop: _Loop, written: Tensors, read: Given, sizes: Sequence[int]) -> None:
    _fill(written, [sinkhorn_gradient(*read, sinkhorn=loop.forms["sinkhorn"])])


def _project_by_references(loop: _Loop, written: Tensors, read: Given, sizes: Sequence[int]) -> None:
    x, phi = read
    _fill(written, projection_reference(x, phi, None))


def _unproject_by_references(loop: _Loop, written: Tensors, read: Given, sizes: Sequence[int]) -> None:
    of, n = StreamGradient(*read), loop.n
    total = torch.zeros((), dtype=of.d_h.dtype)
    if of.d_x is not None:
        total = total + of.d_x
    for d_h, phi, d_ms in ((of.d_h, of.phi, of.d_ms), (of.more_h, of.more_phi, of.more_ms)):
        if d_h is not None:
            total = total + matmul_rows(rows_of(d_h), phi).view(*d_h.shape[:-1], n, phi.shape[1] // n)
        if d_ms is not None:
            total = total + d_ms[..., None, None] * (2.0 / phi.shape[1]) * of.x
    if of.d_out is not None:
        total = total + of.h_pre[..., None] * of.d_out[..., None, :]
    if of.d_new is not None:
        total = total + weighted_sums(tokens_of(of.h_res), tokens_of(of.d_new)).view(of.d_new.shape)
    _fill(written, [total])


def _products_by_references(loop: _Loop, written: Tensors, read: Given, sizes: Sequence[int]) -> None:
    a, b = read
    _fill(written, [stream_products(tokens_of(a), tokens_of(b))])


def _phi_gradient(loop: _Loop, written: Tensors, read: Given, sizes: Sequence[int]) -> None:
    """A matrix product, which autocast would round if it were the graph's; streams are converted in parts."""
    (product,), (x, dh), tokens = written, read, sizes[-1]
    streams, gradients = x.view(tokens, product.shape[1]), dh.view(tokens, product.shape[0])
    if x.dtype == product.dtype:
        torch.mm(gradients.T, streams, out=product)
        return
    step = max(1, _CONVERTED // product.shape[1])
    torch.mm(gradients[:step].T, streams[:step].to(product.dtype), out=product)
    for start in range(step, tokens, step):
        some = slice(start, start + step)
        product.addmm_(gradients[some].T, streams[some].to(product.dtype))


_REFERENCES = {
    "mix": _mix_by_references,
    "mix_backward": _mix_backward_by_references,
    "sinkhorn": _sinkhorn_by_references,
    "sinkhorn_backward": _sinkhorn_backward_by_references,
    "products": _products_by_references,
    "project": _project_by_references,
    "unproject": _unproject_by_references,
    "phi_gradient": _phi_gradient,
}


@functools.cache
def _read(text: str) -> _Loop:
    return _Loop(*from_text(text))


def run(loop: str, read: Given, sizes: Sequence[int], *, written: Tensors) -> None:
    """What the operator does; Inductor's code calls it itself: a dispatch takes as long as the work of a token."""
    _read(loop)(written, read, sizes)


library.define(  # type: ignore[no-untyped-call]
    "_loop(str loop, Tensor?[] read, SymInt[] sizes, *, Tensor(a!)[] written) -> ()",
    tags=(torch.Tag.needs_exact_strides,),
)
library.impl("_loop", run, "CPU")  # type: ignore[no-untyped-call]
register_fake("_loop", lambda loop, read, sizes, *, written: None)
library.define("_mixed(Tensor d_new, Tensor h_res, Tensor? d_x, ScalarType dtype) -> Tensor")  # type: ignore[no-untyped-call]
register_fake("_mixed", lambda d_new, h_res, d_x, dtype: d_new.new_empty(d_new.shape, dtype=dtype))


def _call(
    name: str, x: Tensor, scalars: dict[str, Any], constants: Sequence[int], written: Tensors, read: Given, n: int = 0
) -> None:
    """Constants, what is read and what is written are in the order of the source.

    x: streams, of which the loop has tokens, columns and dtype; and the number of streams, if n does not say it.
    """
    n = n or x.shape[-2]
    # Sizes that guards have settled are numbers; of one that is open, int asks for a guard.
    numbers = [int(value) for value in (n, *constants)]
    loop = to_text([name, str(accumulation_dtype(x)).removeprefix("torch."), numbers[0], scalars, *numbers[1:]])
    torch.ops.mhc._loop(loop, read, [x.shape[-1], math.prod(x.shape[:-2])], written=written)


def _streams(x: Tensor) -> Tensor:
    """x as the loops read it."""
    return (x if x.dtype in _STREAMS else upcast(x, accumulation_dtype(x))).contiguous()


def _plain(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if value is None else upcast(value, dtype).contiguous()


def _is_bf16(tensor: Tensor | None) -> int:
    return int(tensor is not None and tensor.dtype == torch.bfloat16)


def mix(
    x: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, norm_weight: Tensor | None = None, **scalars: Any
) -> tuple[Tensor, ...]:
    """h_pre, h_post, h_res, h, ms of `generate_mix`."""
    x, k, dtype = _streams(x), bias.shape[0], accumulation_dtype(x)
    *gates, h, ms = fake_forward(x, phi, bias)
    constants = (k, phi.shape[0], int(scale.numel() != k), _is_bf16(x))
    read = (x, weighted_phi(phi, norm_weight, dtype).contiguous(), _plain(scale, dtype), _plain(bias, dtype))
    _call("mix", x, _DEFAULTS | scalars, constants, (h, ms, *gates), read)
    return *gates, h, ms


def mix_backward(
    gradients: Given,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    h: Tensor,
    ms: Tensor,
    **scalars: Any,
) -> list[Tensor]:
    """h_pre, dh, dms, dscale and dbias, all in the accumulation dtype.

    gradients: of layer_input, h_pre, h_post, h_res, h and ms, one of the first two None.
    """
    x, k, dtype = _streams(x), bias.shape[0], accumulation_dtype(x)
    d_layer_input = None if gradients[0] is None else _streams(gradients[0])
    saved, narrow = ([_plain(t, dtype) for t in some] for some in ((h, ms, scale, bias), gradients[1:]))
    shapes = (x.shape[:-1], h.shape, ms.shape, scale.shape, bias.shape)
    written = [x.new_empty(shape, dtype=dtype) for shape in shapes]
    constants = (k, h.shape[-1], int(scale.numel() != k), _is_bf16(x), _is_bf16(d_layer_input))
    read = (x, d_layer_input, *saved, *narrow)
    _call("mix_backward", x, _DEFAULTS | scalars, constants, written, read)
    return written


def sinkhorn(logits: Tensor, d_out: Tensor | None = None, **form: Any) -> Tensor:
    """The matrices of logits [..., n, n], or the gradient of logits, in the accumulation dtype."""
    dtype = accumulation_dtype(logits)
    made = logits.new_empty(logits.shape, dtype=dtype)
    loop, given = ("sinkhorn", [logits]) if d_out is None else ("sinkhorn_backward", [d_out, logits])
    flat = {f"sinkhorn_{name}": value for name, value in form.items()}
    _call(loop, made, _DEFAULTS | flat, (), [made], [_plain(value, dtype) for value in given])
    return made


def project(x: Tensor, phi: Tensor, norm_weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """h and ms of `projection`."""
    x, dtype = _streams(x), accumulation_dtype(x)
    h, ms = x.new_empty((*x.shape[:-2], phi.shape[0]), dtype=dtype), x.new_empty(x.shape[:-2], dtype=dtype)
    weight = weighted_phi(phi, norm_weight, dtype).contiguous()
    _call("project", x, {}, (phi.shape[0], _is_bf16(x)), (h, ms), (x, weight))
    return h, ms


def unproject(
    x: Tensor,
    dh: Tensor,
    phi: Tensor,
    norm_weight: Tensor | None = None,
    dms: Tensor | None = None,
    *,
    aggregated: tuple[Tensor, Tensor] | None = None,
    d_x: Tensor | None = None,
) -> Tensor:
    """dh @ (phi * norm_weight) + 2 / nC * dms * x + h_pre * d_out + d_x in the dtype of x, accumulated in float32.

    aggregated: h_pre and d_out. `can_add` says which streams it takes with more than the product; of others that is
    returned in the accumulation dtype.
    """
    dtype = accumulation_dtype(x)
    weight = weighted_phi(phi, norm_weight, dtype).contiguous()
    h_pre, d_out = aggregated or (None, None)
    of = StreamGradient(_plain(dh, dtype), weight, d_x=None if d_x is None else _streams(d_x))
    if dms is not None:
        of = of._replace(d_ms=_plain(dms, dtype), x=_streams(x))
    if d_out is not None:
        of = of._replace(h_pre=_plain(h_pre, dtype), d_out=_streams(d_out))
    out = x.new_empty(x.shape, dtype=x.dtype if can_add(x) else dtype)
    _call("unproject", x, {}, of.constants(out), [out], of)
    return out


def name_of(loop: str) -> str:
    """Of a call's text, the loop that it is about."""
    return str(from_text(loop)[0])


def with_terms(loop: str, terms: StreamGradient, out: Tensor) -> str:
    """The text of a call of "unproject" with other terms, as tensors."""
    return to_text([*from_text(loop)[:4], *map(int, terms.constants(out))])


def can_add(x: Tensor) -> bool:
    """Whether `unproject` adds all terms of the gradient of these streams."""
    return x.dtype in (*_STREAMS, torch.float64)


def mixed(d_new: Tensor, h_res: Tensor, d_x: Tensor | None, dtype: torch.dtype) -> Tensor:
    """d[i] = sum_o h_res[i, o] * d_new[o] + d_x[i]: what `unproject` takes in place of d_x, or lowering takes apart."""
    plain = _plain(h_res, accumulation_dtype(d_new))
    result: Tensor = torch.ops.mhc._mixed(_streams(d_new), plain, None if d_x is None else _streams(d_x), dtype)
    return result


def products(a: Tensor, b: Tensor, n: int | None = None) -> Tensor:
    """out[..., i, o] = <a[..., i], b[..., o]> in the accumulation dtype; n is that of the loops, if not a's."""
    a, b = _streams(a), _streams(b)
    rows, others = a.shape[-2], b.shape[-2]
    out = a.new_empty((*a.shape[:-1], others), dtype=accumulation_dtype(a))
    _call("products", a, {}, (rows, others, _is_bf16(a), _is_bf16(b)), [out], (a, b), n or rows)
    return out


def phi_gradient(dh: Tensor, x: Tensor) -> Tensor:
    """dh^T @ x [K, n*C] in the dtype of dh [..., K]."""
    if all(compat.same_size(size, 1) for size in x.shape[:-2]):
        # No sum: Inductor has this in one kernel with what is made of it.
        return dh.reshape(dh.shape[-1], 1) * x.reshape(1, x.shape[-2] * x.shape[-1]).to(dh.dtype)
    product = dh.new_empty((dh.shape[-1], x.shape[-2] * x.shape[-1]))
    _call("phi_gradient", x, {}, (), [product], (x.contiguous(), dh.contiguous()))
    return product
