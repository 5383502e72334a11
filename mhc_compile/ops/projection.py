"""mhc::projection, the wide product that all gates come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mhc_compile.ops._checks import (
    MAX_K,
    accumulation_dtype,
    check_accumulated,
    check_beside,
    check_needs,
    check_tensor,
    check_x,
    shape_text,
)
from mhc_compile.ops._register import define, differentiate
from mhc_compile.ops._tensors import (
    fake_gradients,
    matmul_rows,
    rows_of,
    settle_gradient,
    settle_streams,
    token_chunks,
    tokens_of,
    upcast,
)


def projection(x: Tensor, phi: Tensor, norm_weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The projection of all streams of a token and the mean of their squares.

        flat = x.flatten(-2);  h = (flat * norm_weight) @ phi.T;  ms = mean(flat^2)

    Args:
        x: [..., n, C], bfloat16, float16, float32 or float64.
        phi: [K, n*C] with 1 <= K <= 1024, any of these dtypes; float64 only together with float64 x.
        norm_weight: [n*C], the weight of an affine RMSNorm, dtypes as phi.

    Returns:
        h [..., K] and ms [...], float32 (float64 for float64 x). The product is float32 and obeys
        `torch.get_float32_matmul_precision()`, as `torch.nn.functional.linear` does.

    Raises:
        TypeError, ValueError: an argument has an unexpected dtype, shape or device.

    Source: arXiv 2512.24880, equations 14 and 15 (ms is the square of that r).
    """
    result: tuple[Tensor, Tensor] = torch.ops.mhc.projection(x, phi, norm_weight)
    return result


def check_phi(x: Tensor, phi: Tensor, norm_weight: Tensor | None) -> tuple[tuple[int, ...], int, int]:
    """Returns the token dimensions, n and K."""
    tokens, n, width = check_x(x)
    check_beside("phi", phi, x)
    if phi.dim() != 2 or phi.shape[1] != n * width:
        raise ValueError(
            f"phi has shape {shape_text(phi.shape)}; expected [K, n*C] = [K, {n * width}] for x "
            f"[..., n, C] of shape {shape_text(x.shape)}"
        )
    if not 1 <= phi.shape[0] <= MAX_K:
        raise ValueError(f"phi has K = {phi.shape[0]} rows; expected 1 <= K <= {MAX_K}")
    check_tensor("norm_weight", norm_weight, (n * width,), "[n*C]", x)
    return tokens, n, phi.shape[0]


def reference(x: Tensor, phi: Tensor, norm_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """The operator in plain torch: its meaning, and its implementation where there is no kernel."""
    dtype = accumulation_dtype(x)
    h, ms = _fake(x, phi, norm_weight)
    h_rows, ms_rows, streams = rows_of(h), ms.view(-1), tokens_of(x)
    weight = weighted_phi(phi, norm_weight, dtype)
    for tokens in token_chunks(streams):
        flat = upcast(streams[tokens], dtype).flatten(-2)
        h_rows[tokens] = matmul_rows(flat, weight.T)
        ms_rows[tokens] = flat.square().mean(-1)
    return h, ms


def weighted_phi(phi: Tensor, norm_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """phi * norm_weight: K rows are fewer than tokens, so the norm's weight costs least there."""
    phi = upcast(phi, dtype)
    return phi if norm_weight is None else phi * upcast(norm_weight, dtype)


def gradients(
    dh: Tensor,
    dms: Tensor | None,
    x: Tensor,
    phi: Tensor,
    norm_weight: Tensor | None,
    needs: Sequence[bool],
    d_x: Tensor | None = None,
    aggregated: tuple[Tensor, Tensor] | None = None,
    dx_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx [M, n, C] in the dtype of x or dx_dtype; dphi, dnorm_weight in the accumulation dtype, as dh [M, K], dms [M].

    d_x, as x, is added to dx before it is rounded; and aggregated: the product of h_pre [M, n] and
    d_layer_input [M, C].
    """
    dtype, streams = accumulation_dtype(x), tokens_of(x)
    weight = weighted_phi(phi, norm_weight, dtype)
    dx = streams.new_empty(streams.shape, dtype=dx_dtype) if needs[0] else None
    product = torch.zeros_like(weight) if streams.shape[0] == 0 else None
    for tokens in token_chunks(streams):
        flat = upcast(streams[tokens], dtype).flatten(-2)
        if needs[1] or needs[2]:
            product = dh[tokens].T @ flat if product is None else product.addmm_(dh[tokens].T, flat)
        if dx is not None:
            part = matmul_rows(dh[tokens], weight)
            if dms is not None:
                part.addcmul_(flat, dms[tokens].unsqueeze(-1), value=2.0 / flat.shape[-1])
            part = part.view(-1, *streams.shape[1:])
            if aggregated is not None:
                h_pre, d_layer_input = aggregated
                part.addcmul_(h_pre[tokens].unsqueeze(-1), upcast(d_layer_input[tokens], dtype).unsqueeze(-2))
            if d_x is not None:
                part += tokens_of(d_x)[tokens]
            dx[tokens] = part
    return dx, *parameter_gradients(product, phi, norm_weight, needs[1:])


def parameter_gradients(
    product: Tensor | None, phi: Tensor, norm_weight: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """dphi = product * norm_weight and dnorm_weight, from product = dh^T @ x, where needs says so."""
    dphi = dnorm_weight = None
    if product is not None and needs[1] and norm_weight is not None:
        dnorm_weight = (product * upcast(phi, product.dtype)).sum(0)
    if product is not None and needs[0]:
        dphi = product if norm_weight is None else product * upcast(norm_weight, product.dtype)
    return dphi, dnorm_weight


def _fake(x: Tensor, phi: Tensor, norm_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(x)
    tokens = x.shape[:-2]
    return x.new_empty((*tokens, phi.shape[0]), dtype=dtype), x.new_empty(tokens, dtype=dtype)


def _check_backward(
    d_h: Tensor | None,
    d_ms: Tensor | None,
    x: Tensor,
    phi: Tensor,
    norm_weight: Tensor | None,
    needs: Sequence[bool],
    d_x: Tensor | None,
) -> None:
    tokens, _, k = check_phi(x, phi, norm_weight)
    check_tensor("d_h", d_h, (*tokens, k), "[..., K]", x)
    check_tensor("d_ms", d_ms, tokens, "[...]", x)
    check_needs(needs, 3)
    check_accumulated(d_x, x, needs[0])


def _reference_backward(
    d_h: Tensor | None,
    d_ms: Tensor | None,
    x: Tensor,
    phi: Tensor,
    norm_weight: Tensor | None,
    needs: Sequence[bool],
    d_x: Tensor | None,
) -> tuple[Tensor, ...]:
    dtype = accumulation_dtype(x)
    tokens = x.shape[:-2].numel()
    dh = x.new_zeros((tokens, phi.shape[0]), dtype=dtype) if d_h is None else upcast(rows_of(d_h), dtype)
    dms = None if d_ms is None else upcast(d_ms.reshape(tokens), dtype)
    dx, dphi, dnorm_weight = gradients(dh, dms, x, phi, norm_weight, needs, d_x)
    return settle_streams(dx, x), settle_gradient(dphi, phi, x), settle_gradient(dnorm_weight, norm_weight, x)


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    *_, x, phi, norm_weight, needs, _ = arguments
    return fake_gradients((x, phi, norm_weight), needs, x)


differentiate(
    define(
        "projection",
        "(Tensor x, Tensor phi, Tensor? norm_weight=None) -> (Tensor, Tensor)",
        check=check_phi,
        reference=reference,
        fake=_fake,
        kernel="projection.forward",
    ),
    define(
        "projection_backward",
        "(Tensor? d_h, Tensor? d_ms, Tensor x, Tensor phi, Tensor? norm_weight, bool[] needs,"
        " Tensor? d_x=None)"
        " -> (Tensor, Tensor, Tensor)",
        check=_check_backward,
        reference=_reference_backward,
        fake=_fake_backward,
        kernel="projection.backward",
    ),
    keep=lambda inputs, output: inputs,
    tensors=3,
    reaches={1: (0,), 2: (0,)},
)
