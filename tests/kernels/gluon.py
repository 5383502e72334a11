"""Gluon has no interpreter: on a CPU its kernels are replaced by what they compute, the host functions stay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mhc_compile.encoding import to_text
from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.kernels import gpus
from mhc_compile.kernels.common import cdiv, recorded
from mhc_compile.kernels.opaque import Opaque
from tests.kernels.cases import DEVICE, combine, mix

# What the kernels of one pass make for each token.
_MADE = ("out", "layer_input", "next_post", "next_res", "h", "ms")
GPU = pytest.mark.skipif(DEVICE == "cpu", reason="Gluon has no interpreter")


@contextlib.contextmanager
def watched(replace: bool = DEVICE == "cpu") -> Iterator[list[str]]:
    """Yields the names of the kernels in Gluon as they are launched, or as torch computes what they would."""
    names: list[str] = []

    def start(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if isinstance(kernel, Opaque):
            names.append(kernel.kernel.__name__)
            to_text([[None if isinstance(a, Tensor) else a for a in args], options])  # as a graph has it
            if replace:
                _REPLACEMENTS[names[-1]](**dict(zip(kernel.kernel.arg_names, args, strict=False)), **options)
                return
        kernel[grid](*args, **options)

    with recorded(start), mock.patch.object(gpus, "of", return_value=gpus.TABLE[90]):
        yield names


def _boundary_gradients(
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
    dx: Tensor,
    df: Tensor,
    dphi_part: Tensor,
    sums_part: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """In float64, each sum whole in the place of its first part."""
    d_new = torch.empty_like(x, dtype=torch.float64)
    _streamed_products(x_new, d_layer_input, d_x_new, phi, norm_weight, dh, coefficient, h_pre, d_new, dphi_part)
    _mixed(d_new, f, h_post, x, h_res, dx, df, sums_part)


def _combine_gradients(
    d_x_new: Tensor,
    f: Tensor,
    h_post: Tensor,
    x: Tensor,
    h_res: Tensor,
    dx: Tensor,
    df: Tensor,
    sums_part: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """In float64, each sum whole in the place of its first part."""
    _mixed(d_x_new.double(), f, h_post, x, h_res, dx, df, sums_part)


def _mixed(
    d_new: Tensor, f: Tensor, h_post: Tensor, x: Tensor, h_res: Tensor, dx: Tensor, df: Tensor, sums_part: Tensor
) -> None:
    """Fill what the combine's backward makes of dx' in float64."""
    d_post = torch.einsum("toc,tc->ot", d_new, f.double())
    d_res = torch.einsum("tic,toc->iot", x.double(), d_new).flatten(0, 1)
    dx.copy_(torch.einsum("tio,toc->tic", h_res.double(), d_new))
    df.copy_(torch.einsum("to,toc->tc", h_post.double(), d_new))
    sums_part.zero_()[0] = torch.cat([d_post, d_res])


def _streamed_products(
    x: Tensor,
    d_out: Tensor | None,
    d_x: Tensor | None,
    phi: Tensor,
    norm_weight: Tensor | None,
    dh: Tensor,
    coefficient: Tensor,
    h_pre: Tensor | None,
    dx: Tensor,
    dphi_part: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """In float64, the sum whole in the place of its first part."""
    d_h = dh.double().sum(0)[:, : phi.shape[0]]
    weight = phi.double() if norm_weight is None else phi.double() * norm_weight.double()
    value = coefficient.view(len(x), -1, 1) * x.double() + (d_h @ weight).view(x.shape)
    if d_out is not None and h_pre is not None:
        value += h_pre.t()[:, :, None] * d_out.double()[:, None]
    if d_x is not None:
        value += d_x.double()
    dx.copy_(value)
    if dphi_part.numel():
        dphi_part.zero_()[0] = d_h.t() @ x.double().flatten(1)


def _project_of_rows(x: Tensor, phi: Tensor, h_part: Tensor, squares_part: Tensor, *_: Any, **__: Any) -> None:
    """In float64, the sums whole in the place of their first parts."""
    rows = x.double().flatten(1)
    h_part.zero_()[0] = phi.double().sum(0)[: h_part.shape[1]] @ rows.t()
    squares_part.zero_()[0] = rows.square().sum(1)


def _dx_of_rows(
    x: Tensor,
    d_out: Tensor | None,
    d_x: Tensor | None,
    tiles: Tensor,
    dh: Tensor,
    coefficient: Tensor,
    h_pre: Tensor | None,
    dx: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """In float64."""
    # From [C / 128, n, rows / 32, 32, 128], each 32 columns as [4, 4, 2] in another order, to [rows, n * C].
    weight = tiles.double().sum(3).unflatten(-1, (4, 4, 4, 2)).transpose(-3, -2).flatten(-4)
    weight = weight.permute(2, 3, 1, 0, 4).flatten(2).flatten(0, 1)
    _streamed_products(x, d_out, d_x, weight[: dh.shape[2]], None, dh, coefficient, h_pre, dx, dx.new_empty(0))


def _dphi_of_rows(x: Tensor, dh: Tensor, dphi_part: Tensor, *_: Any, **__: Any) -> None:
    """In float64, the sum whole in the place of its first part."""
    dphi_part.zero_()[0] = dh.double().sum(0)[:, : dphi_part.shape[1]].t() @ x.double().flatten(1)


def _new_streams(
    f: Tensor | None, h_post: Tensor | None, x: Tensor, h_res: Tensor | None, out: Tensor | None
) -> Tensor:
    """x', of which out is filled, or x where nothing is to be combined."""
    if f is None or h_post is None or h_res is None or out is None:
        return x
    return out.copy_(combine(f.double(), None, h_post.double(), x.double(), h_res.double()))


def _combine_project(
    f: Tensor | None,
    h_post: Tensor | None,
    x: Tensor,
    h_res: Tensor | None,
    h_pre: Tensor | None,
    phi: Tensor,
    norm_weight: Tensor | None,
    out: Tensor | None,
    layer_input: Tensor | None,
    h_part: Tensor,
    squares_part: Tensor,
    *_: Any,
    AHEAD: bool,
    **__: Any,
) -> None:
    """In float64, each sum whole in the place of its first part."""
    rows = h_part.shape[1]
    new = _new_streams(f, h_post, x, h_res, out).double()
    if h_pre is not None and layer_input is not None:
        layer_input.copy_(torch.einsum("ti,tic->tc", h_pre.double(), new))
    flat = new.flatten(1)
    weight = phi.double().sum(0)[:rows] if AHEAD else phi.double() * (1.0 if norm_weight is None else norm_weight)
    h_part.zero_()[0] = weight @ flat.t()
    squares = new.square().sum(-1).t()
    squares_part.zero_()[0] = squares if squares_part.dim() == 3 else squares.sum(0)


def _whole(rest: dict[str, Any]) -> tuple[int, str, str]:
    """Half-steps, start and first of a Sinkhorn whose first half-step may be in the start that a kernel is told."""
    steps = 2 * rest["pairs"] + rest["ODD"]
    if rest["START"] != "normalised":
        return steps, rest["START"], rest["FIRST"]
    return steps + 1, "plain_exp", "rows" if rest["FIRST"] == "columns" else "columns"


def _boundary_pass(*, parts: Tensor, flags: Tensor, DRAWN: bool, BLOCK_M: int, **given: Any) -> None:
    """In float64; where tiles are drawn, the first of them only."""
    assert not flags.any()
    _whole_boundary(**given)
    if DRAWN:
        flags[-1] = cdiv(len(given["x"]), 2 * BLOCK_M)
        for name in _MADE:
            if given[name] is not None:
                given[name][flags[-1] * BLOCK_M :] = torch.nan


def _boundary_rest(*, parts: Tensor, flags: Tensor, drawn_at: int, BLOCK_M: int, **given: Any) -> None:
    """In float64."""
    left = slice(int(flags[drawn_at]) * BLOCK_M, None)
    for name in ("f", "h_post", "x", "h_res", *_MADE):
        given[name] = None if given[name] is None else given[name][left]
    _whole_boundary(**given)


def _whole_boundary(
    f: Tensor | None,
    h_post: Tensor | None,
    x: Tensor,
    h_res: Tensor | None,
    phi: Tensor,
    norm_weight: Tensor | None,
    scale: Tensor,
    bias: Tensor,
    out: Tensor | None,
    layer_input: Tensor,
    next_post: Tensor,
    next_res: Tensor,
    h: Tensor,
    ms: Tensor,
    **rest: Any,
) -> None:
    new = _new_streams(f, h_post, x, h_res, out)
    form = (
        Rms(rest["rms_eps"], rest["RMS_MODE"]),
        Gates(rest["pre_eps"], rest["post_mult"], rest["post_eps"]),
        Sinkhorn(*_whole(rest), rest["sinkhorn_eps"], rest["start_eps"], rest["CLAMP"]),
    )
    given = (None if t is None else t.double() for t in (new, phi, scale, bias, norm_weight))
    for made, value in zip((layer_input, next_post, next_res, h, ms), mix(*given, form)[1:], strict=True):  # type: ignore[arg-type]
        made.copy_(value.view(made.shape))


_REPLACEMENTS = {
    "boundary_gradients_kernel": _boundary_gradients,
    "boundary_pass_kernel": _boundary_pass,
    "boundary_rest_kernel": _boundary_rest,
    "combine_gradients_kernel": _combine_gradients,
    "combine_project_kernel": _combine_project,
    "dphi_of_rows_kernel": _dphi_of_rows,
    "dx_of_rows_kernel": _dx_of_rows,
    "project_of_rows_kernel": _project_of_rows,
    "streamed_products_kernel": _streamed_products,
}
