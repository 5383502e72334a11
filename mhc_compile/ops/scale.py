"""mhc::scale, from the projection to the gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_compile.forms import Gates, Rms
from mhc_compile.ops._checks import (
    accumulation_dtype,
    check_floating,
    check_gates,
    check_needs,
    check_parts,
    check_rms,
    check_scale_and_bias,
    check_tensor,
    shape_text,
)
from mhc_compile.ops._register import define, differentiate, scalars
from mhc_compile.ops._tensors import fake_gradients, rows_of, settle, settle_gradient, upcast


def scale(
    h: Tensor,
    ms: Tensor,
    scale: Tensor,
    bias: Tensor,
    n: int,
    *,
    rms_eps: float = 1e-6,
    rms_mode: str = "inside",
    pre_eps: float = 0.0,
    post_mult: float = 2.0,
    post_eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise, scale and shift a projection, and bound its gates.

        l = r * h * scale + bias        r from ms as in `mhc_compile.forms.Rms`
        h_pre = sigmoid(l[:n]) + pre_eps;  h_post = post_mult * sigmoid(l[n:2n]) + post_eps
        res_logits = l[2n:] as [n, n]

    Args:
        h: [..., K], K = n (pre), 2*n (pre, post) or n*n + 2*n (pre, post, res), any floating dtype.
        ms: [...], the mean square of the token that h comes from.
        scale: [K], or one entry for each of these groups.
        bias: [K].
        n: the number of streams.
        rms_*, pre_eps, post_*: the forms `Rms` and `Gates` of `mhc_compile.forms`.

    Returns:
        h_pre [..., n], h_post [..., n], res_logits [..., n, n], float32 (float64 for float64 h). Parts that K
        does not hold come back without elements: [..., 0] and [..., 0, 0].

    Raises:
        TypeError, ValueError: an argument has an unexpected dtype, shape, device or value.

    Source: arXiv 2512.24880, equations 16 to 18.
    """
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.mhc.scale(
        h,
        ms,
        scale,
        bias,
        n,
        rms_eps=rms_eps,
        rms_mode=rms_mode,
        pre_eps=pre_eps,
        post_mult=post_mult,
        post_eps=post_eps,
    )
    return result


def group_sizes(k: int, n: int) -> list[int]:
    """The rows of each part of K, in order."""
    return [n, n, n * n][: 1 if k == n else 2 if k == 2 * n else 3]


def _rms_factor(ms: Tensor, rms: Rms) -> Tensor:
    if rms.mode == "none":
        return torch.ones_like(ms)
    if rms.mode == "inside":
        return torch.rsqrt(ms + rms.eps)
    root = torch.sqrt(ms)
    return torch.reciprocal(root + rms.eps if rms.mode == "outside" else root.clamp_min(rms.eps))


def _rms_gradient(r_dr: Tensor, ms: Tensor, rms: Rms, r: Tensor) -> Tensor:
    """d ms of r * dr; 0 where the root is not differentiable or below the clamp, as in torch.clamp_min.

    dr is of the size of the token and more, so that it would overflow where squares do; r * dr is of none.
    """
    if rms.mode == "none":
        return torch.zeros_like(ms)
    if rms.mode == "inside":
        return -0.5 * (r_dr * r * r)
    root = torch.sqrt(ms)
    moving = root > 0
    if rms.mode == "clamp":
        moving &= root >= rms.eps
    return torch.where(moving, -0.5 * (r_dr * r / root), 0.0)


def _sigmoid(logits: Tensor) -> Tensor:
    """As torch.sigmoid, which however rounds an element by its place in the tensor."""
    return torch.exp(-logits).add_(1).reciprocal_()


def _normalised(
    h: Tensor, ms: Tensor, scale: Tensor, bias: Tensor, n: int, rms: Rms
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """r [M, 1], r * h [M, K], the scale of every row [K], the logits [M, K], of the K rows that have gates."""
    dtype = accumulation_dtype(h)
    k = bias.shape[0]
    r = _rms_factor(upcast(ms.reshape(-1, 1), dtype), rms)
    normed = upcast(rows_of(h)[:, :k], dtype) * r
    weight = upcast(scale, dtype)
    if weight.numel() != k:
        weight = torch.cat([weight[i].expand(size) for i, size in enumerate(group_sizes(k, n))])
    return r, normed, weight, torch.addcmul(upcast(bias, dtype), normed, weight)


def reference(
    h: Tensor, ms: Tensor, scale: Tensor, bias: Tensor, n: int, *, rms: Rms, gates: Gates
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator in plain torch: its meaning, and its implementation where there is no kernel."""
    logits = _normalised(h, ms, scale, bias, n, rms)[-1]
    pre = _sigmoid(logits[:, :n]) + gates.pre_eps
    post = gates.post_mult * _sigmoid(logits[:, n : 2 * n]) + gates.post_eps
    tokens, side = h.shape[:-1], n if bias.shape[0] > 2 * n else 0
    return (
        settle(pre, (*tokens, n), logits.dtype),
        settle(post, (*tokens, post.shape[-1]), logits.dtype),
        settle(logits[:, 2 * n :], (*tokens, side, side), logits.dtype),
    )


def gradients(
    d_pre: Tensor | None,
    d_post: Tensor | None,
    d_res: Tensor | None,
    h: Tensor,
    ms: Tensor,
    scale: Tensor,
    bias: Tensor,
    n: int,
    needs: Sequence[bool],
    *,
    rms: Rms,
    gates: Gates,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """dh [M, K], dms [M], dscale and dbias in the accumulation dtype.

    d_pre [M, n], d_post [M, n] and d_res [M, n*n] may have any floating dtype. Rows of h without gates get zeros.
    """
    k = bias.shape[0]
    r, normed, weight, logits = _normalised(h, ms, scale, bias, n, rms)
    d_logits = torch.zeros_like(logits)
    gate_logits = logits[:, : 2 * n]
    # sigmoid(l) * sigmoid(-l) keeps its relative accuracy where s * (1 - s) cancels.
    slope = _sigmoid(gate_logits) * _sigmoid(-gate_logits)
    if d_pre is not None:
        d_logits[:, :n] = slope[:, :n] * d_pre
    if d_post is not None and k > n:
        d_logits[:, n : 2 * n] = slope[:, n:] * d_post * gates.post_mult
    if d_res is not None and k > 2 * n:
        d_logits[:, 2 * n :] = d_res

    dh = dms = dscale = dbias = None
    d_normed = d_logits * weight
    if needs[0]:
        dh = d_normed * r
        if h.shape[-1] > k:
            dh = F.pad(dh, (0, h.shape[-1] - k))
    if needs[1]:
        ms = upcast(ms.reshape(-1), d_normed.dtype)
        dms = _rms_gradient((d_normed * normed).sum(-1), ms, rms, r.squeeze(-1))
    if needs[2]:
        dscale = (d_logits * normed).sum(0)
        if scale.numel() != k:
            dscale = torch.stack([part.sum() for part in torch.split(dscale, group_sizes(k, n))])
    if needs[3]:
        dbias = d_logits.sum(0)
    return dh, dms, dscale, dbias


def _check(
    h: Tensor, ms: Tensor, scale: Tensor, bias: Tensor, n: int, *, rms: Rms, gates: Gates
) -> tuple[tuple[int, ...], int]:
    """Returns the token dimensions, and how many of the parts pre, post, res there are."""
    check_floating("h", h)
    if h.dim() < 1:
        raise ValueError(f"h has shape {shape_text(h.shape)}; expected [..., K]")
    *tokens, k = h.shape
    parts = check_parts(k, n, f"h of shape {shape_text(h.shape)}")
    check_tensor("ms", ms, tokens, "the token dimensions of h", h, "h")
    check_scale_and_bias(scale, bias, k, parts, h, "h")
    check_rms(rms)
    check_gates(gates)
    return tuple(tokens), parts


def fake(h: Tensor, ms: Tensor, scale: Tensor, bias: Tensor, n: int, **forms: Any) -> tuple[Tensor, ...]:
    """Tensors like the results, their elements left open."""
    dtype, tokens, k = accumulation_dtype(h), h.shape[:-1], h.shape[-1]
    side = n if k > 2 * n else 0
    return (
        h.new_empty((*tokens, n), dtype=dtype),
        h.new_empty((*tokens, n if k > n else 0), dtype=dtype),
        h.new_empty((*tokens, side, side), dtype=dtype),
    )


def _check_backward(
    d_h_pre: Tensor | None,
    d_h_post: Tensor | None,
    d_res_logits: Tensor | None,
    h: Tensor,
    ms: Tensor,
    scale: Tensor,
    bias: Tensor,
    n: int,
    needs: Sequence[bool],
    *,
    rms: Rms,
    gates: Gates,
) -> None:
    tokens, parts = _check(h, ms, scale, bias, n, rms=rms, gates=gates)
    side = n if parts == 3 else 0
    check_tensor("d_h_pre", d_h_pre, (*tokens, n), "[..., n]", h, "h")
    check_tensor("d_h_post", d_h_post, (*tokens, n if parts > 1 else 0), "that of h_post", h, "h")
    check_tensor("d_res_logits", d_res_logits, (*tokens, side, side), "that of res_logits", h, "h")
    check_needs(needs, 4)


def _reference_backward(
    d_h_pre: Tensor | None,
    d_h_post: Tensor | None,
    d_res_logits: Tensor | None,
    h: Tensor,
    ms: Tensor,
    scale: Tensor,
    bias: Tensor,
    n: int,
    needs: Sequence[bool],
    *,
    rms: Rms,
    gates: Gates,
) -> tuple[Tensor, ...]:
    d_pre = None if d_h_pre is None else rows_of(d_h_pre)
    d_post = None if d_h_post is None else rows_of(d_h_post)
    d_res = None if d_res_logits is None else rows_of(d_res_logits.flatten(-2))
    results = gradients(d_pre, d_post, d_res, h, ms, scale, bias, n, needs, rms=rms, gates=gates)
    return tuple(settle_gradient(result, like, h) for result, like in zip(results, (h, ms, scale, bias), strict=True))


def _fake_backward(*arguments: Any, **forms: Any) -> tuple[Tensor, ...]:
    *_, h, ms, scale, bias, _, needs = arguments
    return fake_gradients((h, ms, scale, bias), needs, h, streams=())


differentiate(
    define(
        "scale",
        f"(Tensor h, Tensor ms, Tensor scale, Tensor bias, SymInt n, *, {scalars('rms', 'gates')})"
        " -> (Tensor, Tensor, Tensor)",
        forms=("rms", "gates"),
        check=_check,
        reference=reference,
        fake=fake,
        kernel="scale.forward",
    ),
    define(
        "scale_backward",
        "(Tensor? d_h_pre, Tensor? d_h_post, Tensor? d_res_logits,"
        " Tensor h, Tensor ms, Tensor scale, Tensor bias,"
        f" SymInt n, bool[] needs, *, {scalars('rms', 'gates')}) -> (Tensor, Tensor, Tensor, Tensor)",
        forms=("rms", "gates"),
        check=_check_backward,
        reference=_reference_backward,
        fake=_fake_backward,
        kernel="scale.backward",
    ),
    keep=lambda inputs, output: inputs[:4],
    tensors=4,
    rest=lambda inputs: inputs[4:],
)
