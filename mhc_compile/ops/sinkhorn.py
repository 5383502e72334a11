"""mhc::sinkhorn, logits to nearly doubly stochastic matrices."""

from __future__ import annotations

import math
from itertools import cycle, islice

import torch
from torch import Tensor

from mhc_compile.forms import Sinkhorn
from mhc_compile.ops._checks import (
    accumulation_dtype,
    check_floating,
    check_sinkhorn,
    check_streams,
    check_tensor,
    shape_text,
)
from mhc_compile.ops._register import define, differentiate, scalars
from mhc_compile.ops._tensors import settle

# Inside, matrices lie as planes [i, o, M]: sums over i and o then run along whole vectors of tokens.
_ROWS, _COLUMNS = 1, 0
# Two of the longest vectors of a CPU, which loops take at once, and a factor for other CPUs to come.
_VECTOR = 64
# Matrices without eps are stored divided by this power of 2. A half-step multiplies an entry by n at most, so an entry
# below the smallest float32 may matter many half-steps later.
UNIT = 2.0**-100
# ln 2 in parts. Products of whole numbers below 2^16 (float64: 2^20) and all parts but the last are exact.
_LN2 = {
    torch.float32: (0.69140625, 0.001739501953125, 1.4286068202862268e-06),
    torch.float64: (6.93147180369123816490e-01, 1.90821492927058770002e-10),
}
# A logit further than this below the largest one counts as -inf.
_LARGEST = 1e30


def sinkhorn(
    logits: Tensor,
    *,
    steps: int = 39,
    start: str = "softmax",
    first: str = "columns",
    eps: float = 1e-6,
    start_eps: float = 1e-6,
    clamp: bool = False,
) -> Tensor:
    """Alternate normalisation of rows and columns, in any of the forms of `mhc_compile.forms.Sinkhorn`.

        p = start(logits) + start_eps;  steps times, axes in turn: p = p / (p.sum(axis) + eps)

    With eps = start_eps = 0 it holds for logits of any size.

    Args:
        logits: [..., n, n], any floating dtype.
        steps, start, first, eps, start_eps, clamp: the form; steps counts half-steps.

    Returns:
        [..., n, n], float32 (float64 for float64 logits).

    Raises:
        TypeError, ValueError: an argument has an unexpected dtype, shape or value.

    Source: arXiv 2512.24880, equations 9 and 19.
    """
    result: Tensor = torch.ops.mhc.sinkhorn(
        logits, steps=steps, start=start, first=first, eps=eps, start_eps=start_eps, clamp=clamp
    )
    return result


def _planes(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    n = matrices.shape[-1]
    rows = matrices.reshape(-1, n, n)
    tokens = rows.shape[0]
    # torch.log_softmax rounds what is left over from whole vectors otherwise: pad, so that nothing is.
    planes = rows.new_zeros((n, n, -(-tokens // _VECTOR) * _VECTOR), dtype=dtype)
    planes[..., :tokens] = rows.permute(1, 2, 0)
    return planes


def _unplanes(planes: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    tokens = like.shape[:-2].numel()
    # A copy, because one token of the padded planes would keep their strides.
    rows = planes[..., :tokens].permute(2, 0, 1).clone(memory_format=torch.contiguous_format)
    return settle(rows, like.shape, dtype)


def _axes(form: Sinkhorn) -> list[int]:
    """The axis that each half-step sums over."""
    order = (_ROWS, _COLUMNS) if form.first == "rows" else (_COLUMNS, _ROWS)
    return list(islice(cycle(order), form.steps))


def _first_axis(form: Sinkhorn) -> int:
    return _ROWS if form.first == "rows" else _COLUMNS


def _other_axis(form: Sinkhorn) -> int:
    return _COLUMNS if form.first == "rows" else _ROWS


def _sum(p: Tensor, axis: int) -> Tensor:
    """The sums of P's lines, by halves.

    One entry after another, sums of 8 entries that are nearly equal are 1 less often. A half-step that changes nothing
    is one whose gradient has no rounding errors.
    """
    while (n := p.shape[axis]) > 1:
        half = n // 2
        both = p.narrow(axis, 0, half) + p.narrow(axis, n - half, half)
        p = both if n == 2 * half else torch.cat([both, p.narrow(axis, half, 1)], axis)
    return p


def _power_of_2(exponent: Tensor) -> Tensor:
    """2 to the power of a whole number, exactly; 0 for one below those of normal numbers."""
    finfo = torch.finfo(exponent.dtype)
    bits, whole = (23, torch.int32) if exponent.dtype == torch.float32 else (52, torch.int64)
    bias = 1 - round(math.log2(finfo.tiny))
    biased = (exponent + bias).clamp_min(0.0)
    return (biased.to(whole) << bits).view(exponent.dtype)


def _exponential(logits: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """exp(logits - their maximum along the axis) as m * 2**k, with m next to 1 and k whole; logits may have any size.

    The rounding error of the difference is added to its exponent. Otherwise the exp of the logits themselves, which
    eager programs take, would be more accurate.
    """
    top = logits.amax(axis, keepdim=True)
    x = logits - top
    moved = x - logits
    left = (logits - (x - moved)) - (top + moved)
    bounded = x.clamp_min(-_LARGEST)
    left = torch.where(x == bounded, left, x)  # exp(-inf) is 0
    k = torch.round(bounded * (1 / math.log(2)))
    for part in _LN2[logits.dtype]:
        bounded = bounded - k * part
    # A difference so large that it has no fraction leaves no rest either, but rounding errors above 1.
    return torch.exp(bounded.clamp(-1.0, 1.0) + left), k


def _normalised(logits: Tensor, form: Sinkhorn) -> tuple[Tensor, Tensor]:
    """The start "normalised", and the factors that its lines along `first` are divided by.

    exp(logits) is normalised along the axis that `first` does not name. Each line along `first` is then divided by a
    power of 2, so that its largest entry is about 1 / UNIT. The first half-step cancels these factors. Without them a
    line of tiny entries would underflow; with them no sum of any half-step is tiny. A factor may itself underflow to 0.
    """
    m, k = _exponential(logits, _other_axis(form))
    p = m / _sum(m * _power_of_2(k), _other_axis(form))
    top = k.amax(_first_axis(form), keepdim=True) if form.steps else torch.zeros_like(k[:1, :1])
    return p * _power_of_2(k - top - math.log2(UNIT)), _power_of_2(top)


def _shift_axes(form: Sinkhorn) -> tuple[int, ...]:
    """The axes of the maximum that logits are shifted by before exp, none for "plain_exp"."""
    return {"exp": (_first_axis(form),), "plain_exp": (), "global_exp": (_ROWS, _COLUMNS)}[form.start]


def _shift(logits: Tensor, form: Sinkhorn) -> Tensor | float:
    axes = _shift_axes(form)
    return logits.amax(axes, keepdim=True) if axes else 0.0


def _start(logits: Tensor, form: Sinkhorn) -> tuple[Tensor, Tensor | float, Tensor | float]:
    """P before the first half-step without start_eps, and start_eps and the first half-step's eps.

    All three may have a common factor along what is normalised first, for it cancels there: one by which the largest
    entries of P are 1.
    """
    if form.start == "normalised":
        return _normalised(logits, form)[0], 0.0, 0.0
    if form.start == "softmax":
        # torch.softmax rounds a token by its place in the tensor.
        p = torch.exp(logits - logits.amax(_ROWS, keepdim=True))
        return p.div_(_sum(p, _ROWS)), form.start_eps, form.eps
    shift = _shift(logits, form)
    if form.start == "exp" or form.steps == 0:
        return torch.exp(logits - shift), form.start_eps, form.eps
    top = logits.amax(_first_axis(form), keepdim=True)
    more = shift - top
    # A factor by which the larger eps does not leave the dtype. More of it would make P's largest entries 1 again.
    largest = max(form.start_eps, form.eps, 1e-30)
    most = 0.93 * math.log(torch.finfo(logits.dtype).max) - math.log(largest)
    root = torch.exp(0.5 * more.clamp_max(most))
    p = torch.exp(torch.where(more < most, logits - top, logits - shift + most))
    return p, form.start_eps * root * root, form.eps * root * root


def _centred(d: Tensor, p: Tensor, axis: int, size: Tensor | float = 1.0) -> Tensor:
    """d - size * sum(d * p) along an axis along which size * p was normalised without eps, or size is 0.

    Where all gradients are equal, or one entry is near 1, the exact result is near 0, and the first sum leaves rounding
    errors of d. A second sum removes what these have in common. What the first subtraction rounds away is kept until
    then: a result that is not near 0 would be rounded twice, where eager rounds it once.
    """
    first = size * (d * p).sum(axis, keepdim=True)
    centred = d - first
    lost = (d - centred) - first
    second = size * (centred * p + lost * p).sum(axis, keepdim=True)
    return centred + (lost - second)


def _start_gradient(d_start: Tensor, start: Tensor, logits: Tensor, form: Sinkhorn) -> Tensor:
    if form.start == "normalised":
        size, start = _normalised(logits, form)[1], start * UNIT
        return start * _centred(d_start, start, _other_axis(form), size)
    if form.start == "softmax":
        # The difference comes before the product: equal gradients of a row then cancel exactly.
        return start * (d_start - (d_start * start).sum(_ROWS, keepdim=True))
    d_logits = start * d_start
    axes = _shift_axes(form)
    if not axes:
        return d_logits
    # The shift by the maximum does not cancel where eps is added, so its gradient is part of the derivative.
    largest = (logits == _shift(logits, form)).to(logits.dtype)
    return d_logits - largest * (d_logits.sum(axes, keepdim=True) / largest.sum(axes, keepdim=True))


def _unit(form: Sinkhorn) -> float:
    """The factor that turns stored entries into those of the matrix."""
    return UNIT if form.start == "normalised" else 1.0


def _total(p: Tensor, axis: int, eps: Tensor | float, form: Sinkhorn) -> Tensor:
    total = _sum(p, axis) * _unit(form)
    return total.clamp_min_(eps) if form.clamp else total.add_(eps)


def _forward(logits: Tensor, form: Sinkhorn) -> Tensor:
    p, start_eps, eps = _start(logits, form)
    p.add_(start_eps)
    for axis in _axes(form):
        p.div_(_total(p, axis, eps, form))
        eps = form.eps
    return p.mul_(_unit(form))


def _backward(d_out: Tensor, logits: Tensor, form: Sinkhorn) -> Tensor:
    start, start_eps, eps = _start(logits, form)
    history = []
    p = start + start_eps
    for axis in _axes(form):
        total = _total(p, axis, eps, form)
        p = p / total
        history.append((axis, eps, total, p))
        eps = form.eps
    for axis, eps, total, p in reversed(history):
        if form.start == "normalised":
            d_out = _centred(d_out, p * UNIT, axis) / total
            continue
        if form.clamp:
            d_out = _centred(d_out, p, axis, (total > eps).to(d_out.dtype))
        else:
            d_out = d_out - (d_out * p).sum(axis, keepdim=True)
        # The gradient of an entry that has underflowed may overflow. Bounded, it counts as 0 and not as 0 * inf.
        largest = torch.finfo(d_out.dtype).max
        d_out = (d_out / total).clamp(-largest, largest)
    return _start_gradient(d_out, start, logits, form)


def reference(logits: Tensor, *, sinkhorn: Sinkhorn) -> Tensor:
    """The operator in plain torch: its meaning, and its implementation where there is no kernel."""
    dtype = accumulation_dtype(logits)
    if logits.numel() == 0:
        return logits.new_empty(logits.shape, dtype=dtype)
    return _unplanes(_forward(_planes(logits, dtype), sinkhorn.iterated), logits, dtype)


def gradient(d_out: Tensor, logits: Tensor, *, sinkhorn: Sinkhorn) -> Tensor:
    """d_logits [..., n, n] in the accumulation dtype."""
    dtype = accumulation_dtype(logits)
    if logits.numel() == 0:
        return logits.new_empty(logits.shape, dtype=dtype)
    return _unplanes(_backward(_planes(d_out, dtype), _planes(logits, dtype), sinkhorn.iterated), logits, dtype)


def _check(logits: Tensor, *, sinkhorn: Sinkhorn) -> None:
    check_floating("logits", logits)
    if logits.dim() < 2 or logits.shape[-1] != logits.shape[-2]:
        raise ValueError(f"logits has shape {shape_text(logits.shape)}; expected [..., n, n]")
    check_streams(logits.shape[-1], f"logits of shape {shape_text(logits.shape)}")
    check_sinkhorn(sinkhorn, prefix="")


def _fake(logits: Tensor, *, sinkhorn: Sinkhorn) -> Tensor:
    return logits.new_empty(logits.shape, dtype=accumulation_dtype(logits))


def _check_backward(d_out: Tensor, logits: Tensor, *, sinkhorn: Sinkhorn) -> None:
    _check(logits, sinkhorn=sinkhorn)
    check_tensor("d_out", d_out, logits.shape, "the shape of logits", logits, "logits")


def _reference_backward(d_out: Tensor, logits: Tensor, *, sinkhorn: Sinkhorn) -> Tensor:
    return settle(gradient(d_out, logits, sinkhorn=sinkhorn), logits.shape, logits.dtype)


def _fake_backward(d_out: Tensor, logits: Tensor, *, sinkhorn: Sinkhorn) -> Tensor:
    return logits.new_empty(logits.shape)


differentiate(
    define(
        "sinkhorn",
        f"(Tensor logits, *, {scalars('sinkhorn', prefixed=False)}) -> Tensor",
        forms=("sinkhorn",),
        prefixed=False,
        check=_check,
        reference=reference,
        fake=_fake,
        kernel="sinkhorn.forward",
    ),
    define(
        "sinkhorn_backward",
        f"(Tensor d_out, Tensor logits, *, {scalars('sinkhorn', prefixed=False)}) -> Tensor",
        forms=("sinkhorn",),
        prefixed=False,
        check=_check_backward,
        reference=_reference_backward,
        fake=_fake_backward,
        kernel="sinkhorn.backward",
    ),
    keep=lambda inputs, output: inputs,
    tensors=1,
    with_needs=False,
)
