"""mhc::_boundary_gradients, a part of `boundary_backward` that runs as one kernel of its own.

It is an operator because Inductor cannot put the kernel, which is written in Gluon, into its graphs. Nobody but
`kernels.boundary` calls it, so it is not among the documented ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhc_compile.ops._checks import check_tensor
from mhc_compile.ops._register import define


def _check(
    d_x_new: Tensor,
    d_layer_input: Tensor,
    x_new: Tensor,
    f: Tensor,
    x: Tensor,
    phi: Tensor,
    norm_weight: Tensor | None,
    dh: Tensor,
    coefficient: Tensor,
    h_pre: Tensor,
    h_post: Tensor,
    h_res: Tensor,
) -> None:
    tokens, n, width = x.shape
    for name, value in (("d_x_new", d_x_new), ("x_new", x_new)):
        check_tensor(name, value, x.shape, "the shape of x", x)
    for name, value in (("d_layer_input", d_layer_input), ("f", f)):
        check_tensor(name, value, (tokens, width), "[M, C]", x)
    check_tensor("coefficient", coefficient, (tokens,), "[M]", x)
    check_tensor("h_pre", h_pre, (n, tokens), "[n, M]", x)
    check_tensor("h_post", h_post, (tokens, n), "[M, n]", x)
    check_tensor("h_res", h_res, (tokens, n, n), "[M, n, n]", x)


def _reference(
    d_x_new: Tensor,
    d_layer_input: Tensor,
    x_new: Tensor,
    f: Tensor,
    x: Tensor,
    phi: Tensor,
    norm_weight: Tensor | None,
    dh: Tensor,
    coefficient: Tensor,
    h_pre: Tensor,
    h_post: Tensor,
    h_res: Tensor,
) -> tuple[Tensor, ...]:
    """What the kernel computes, each sum whole in the place of its first part."""
    tokens, n, _ = x.shape
    rows = phi.shape[0]
    weight = phi.float() if norm_weight is None else phi.float() * norm_weight.float()
    d_h = dh.float().sum(0)[:, :rows]
    d_new = d_x_new.float() + (d_h @ weight).view(x.shape) + coefficient[:, None, None] * x_new.float()
    d_new = d_new + h_pre.t()[:, :, None] * d_layer_input.float()[:, None]
    dx = torch.einsum("tio,toc->tic", h_res, d_new)
    df = torch.einsum("to,toc->tc", h_post, d_new)
    d_post = torch.einsum("toc,tc->ot", d_new, f.float())
    d_res = torch.einsum("tic,toc->iot", x.float(), d_new).reshape(n * n, tokens)
    _, _, dphi_part, sums_part = _fake(d_x_new, d_layer_input, x_new, f, x, phi)
    dphi_part.zero_()[0] = d_h.t() @ x_new.float().flatten(1)
    sums_part.zero_()[0] = torch.cat([d_post, d_res])
    return dx.to(x.dtype), df.to(f.dtype), dphi_part, sums_part


def _fake(
    d_x_new: Tensor, d_layer_input: Tensor, x_new: Tensor, f: Tensor, x: Tensor, phi: Tensor, *rest: Tensor | None
) -> tuple[Tensor, ...]:
    from mhc_compile.kernels.boundary_gradients import room  # operators load where Triton is missing

    return room(x, f, phi)


define(
    "_boundary_gradients",
    "(Tensor d_x_new, Tensor d_layer_input, Tensor x_new, Tensor f, Tensor x, Tensor phi, Tensor? norm_weight,"
    " Tensor dh, Tensor coefficient, Tensor h_pre, Tensor h_post, Tensor h_res) -> (Tensor, Tensor, Tensor, Tensor)",
    check=_check,
    reference=_reference,
    fake=_fake,
    kernel="boundary_gradients.forward",
)
