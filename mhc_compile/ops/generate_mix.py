"""mhc::generate_mix, the gates of a token from its streams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.ops import _mix
from mhc_compile.ops._checks import check_all_make_gates, check_tensor
from mhc_compile.ops._register import define, differentiate, scalars
from mhc_compile.ops._tensors import fake_gradients


def generate_mix(
    x: Tensor,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None = None,
    *,
    rms_eps: float = 1e-6,
    rms_mode: str = "inside",
    pre_eps: float = 0.0,
    post_mult: float = 2.0,
    post_eps: float = 0.0,
    sinkhorn_steps: int = 39,
    sinkhorn_start: str = "softmax",
    sinkhorn_first: str = "columns",
    sinkhorn_eps: float = 1e-6,
    sinkhorn_start_eps: float = 1e-6,
    sinkhorn_clamp: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`projection`, `scale` and `sinkhorn` in one: the three mixes of a sublayer.

    Without `aggregate`, for orderings that apply h_pre elsewhere.

        h, ms = projection(x, phi, norm_weight)
        h_pre, h_post, logits = scale(h, ms, scale, bias);  h_res = sinkhorn(logits)

    Args:
        x: [..., n, C], bfloat16, float16, float32 or float64.
        phi: [K, n*C], K = n (pre), 2*n (pre, post) or n*n + 2*n (pre, post, res; row 2*n + i*n + o is
            res[i, o]).
        scale: [K], or one entry for each of these groups.
        bias: [K].
        norm_weight: [n*C], the weight of an affine RMSNorm.
        rms_*, pre_eps, post_*, sinkhorn_*: the forms `Rms`, `Gates`, `Sinkhorn` of `mhc_compile.forms`.

        Parameters have any floating dtype, float64 only together with float64 x.

    Returns:
        h_pre [..., n], h_post [..., n], h_res [..., n, n], float32 (float64 for float64 x). Parts that K does
        not hold come back without elements: [..., 0] and [..., 0, 0].

    Raises:
        TypeError, ValueError: an argument has an unexpected dtype, shape, device or value.

    Source: arXiv 2512.24880, equations 7 and 8, in the order of equations 14 to 19.
    """
    h_pre, h_post, h_res, h, _ = torch.ops.mhc.generate_mix(
        x,
        phi,
        scale,
        bias,
        norm_weight,
        rms_eps=rms_eps,
        rms_mode=rms_mode,
        pre_eps=pre_eps,
        post_mult=post_mult,
        post_eps=post_eps,
        sinkhorn_steps=sinkhorn_steps,
        sinkhorn_start=sinkhorn_start,
        sinkhorn_first=sinkhorn_first,
        sinkhorn_eps=sinkhorn_eps,
        sinkhorn_start_eps=sinkhorn_start_eps,
        sinkhorn_clamp=sinkhorn_clamp,
    )
    check_all_make_gates("generate_mix", h.shape[-1], bias)
    return h_pre, h_post, h_res


def reference(
    x: Tensor,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    *,
    rms: Rms,
    gates: Gates,
    sinkhorn: Sinkhorn,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operator in plain torch: its meaning, and its implementation where there is no kernel."""
    return _mix.forward(x, phi, scale, bias, norm_weight, rms=rms, gates=gates, sinkhorn=sinkhorn)


def _fake(
    x: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, norm_weight: Tensor | None, **forms: Any
) -> tuple[Tensor, ...]:
    return _mix.fake_forward(x, phi, bias)


def _check_backward(d_h_pre: Tensor | None, *rest: Any, **forms: Any) -> None:
    _mix.check_mix_backward(*rest, **forms)
    x: Tensor = rest[4]
    check_tensor("d_h_pre", d_h_pre, x.shape[:-1], "[..., n]", x)


def _reference_backward(*arguments: Any, **forms: Any) -> tuple[Tensor, ...]:
    return _mix.backward(None, *arguments, **forms)


def _fake_backward(*arguments: Any, **forms: Any) -> tuple[Tensor, ...]:
    x, phi, scale, bias, norm_weight, _, _, needs, _ = arguments[5:]
    return fake_gradients((x, phi, scale, bias, norm_weight), needs, x)


_FORMS = ("rms", "gates", "sinkhorn")

differentiate(
    define(
        "generate_mix",
        f"({_mix.ARGUMENTS}=None, *, {scalars(*_FORMS)}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        forms=_FORMS,
        check=_mix.check_mix,
        reference=reference,
        fake=_fake,
        kernel="generate_mix.forward",
    ),
    define(
        "generate_mix_backward",
        "(Tensor? d_h_pre, Tensor? d_h_post, Tensor? d_h_res, Tensor? d_h, Tensor? d_ms,"
        f" {_mix.SAVED}, *, {scalars(*_FORMS)}) -> {_mix.GRADIENTS}",
        forms=_FORMS,
        check=_check_backward,
        reference=_reference_backward,
        fake=_fake_backward,
        kernel="generate_mix.backward",
    ),
    keep=_mix.saved,
    tensors=5,
    reaches=_mix.REACHES,
)
