"""Wrong arguments: the same message from real and fake implementation, so when compiling too."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import mhc_compile.ops as ops
from mhc_compile.forms import SINKHORN_STARTS
from tests.ops.calls import FORWARD, RARE, Sizes, arguments, call, results, tensor_names

Call = Callable[[Callable[..., Tensor]], Any]


def _mix(make: Callable[..., Tensor], **changed: Any) -> Any:
    """generate_mix_and_aggregate at n = 2, C = 3, some arguments changed; shapes stand for tensors."""
    arguments: dict[str, Any] = {"x": (5, 2, 3), "phi": (8, 6), "scale": (3,), "bias": (8,)} | changed
    arguments = {k: make(*v) if isinstance(v, tuple) else v for k, v in arguments.items()}
    return ops.generate_mix_and_aggregate(**arguments)


def _combine(make: Callable[..., Tensor], **changed: Any) -> Any:
    arguments: dict[str, Any] = {
        "f": (5, 3),
        "layer_bias": (3,),
        "h_post": (5, 2),
        "x": (5, 2, 3),
        "h_res": (5, 2, 2),
    } | changed
    return ops.expand_combine(**{k: make(*v) if isinstance(v, tuple) else v for k, v in arguments.items()})


def _boundary(make: Callable[..., Tensor], **changed: Any) -> Any:
    arguments: dict[str, Any] = {"f": (5, 3), "layer_bias": (3,), "h_post": (5, 2), "x": (5, 2, 3), "h_res": (5, 2, 2)}
    arguments |= {"phi": (8, 6), "scale": (3,), "bias": (8,)} | changed
    return ops.boundary(**{k: make(*v) if isinstance(v, tuple) else v for k, v in arguments.items()})


def _boundary_backward(make: Callable[..., Tensor], **changed: Any) -> Any:
    shapes: dict[str, Any] = {"d_x_new": (5, 2, 3), "d_layer_input": (5, 3), "d_next_post": (5, 2)}
    shapes |= {"d_next_res": (5, 2, 2), "d_h": (5, 8), "d_ms": (5,), "f": (5, 3), "layer_bias": (3,), "h_post": (5, 2)}
    shapes |= {"x": (5, 2, 3), "h_res": (5, 2, 2), "phi": (8, 6), "scale": (3,), "bias": (8,), "norm_weight": (6,)}
    shapes |= {"x_new": (5, 2, 3), "h": (5, 8), "ms": (5,), "needs": [True] * 9} | changed
    return torch.ops.mhc.boundary_backward(*(make(*v) if isinstance(v, tuple) else v for v in shapes.values()))


def _shifted(make: Callable[..., Tensor], **changed: Any) -> Any:
    arguments: dict[str, Any] = {"f": (5, 3), "layer_bias": (3,), "h_post": (5, 2), "x": (5, 2, 3), "h_res": (5, 2, 2)}
    arguments |= {"h_pre": (5, 2), "phi": (8, 6), "scale": (3,), "bias": (8,)} | changed
    return ops.shifted_boundary(**{k: make(*v) if isinstance(v, tuple) else v for k, v in arguments.items()})


def _shifted_backward(make: Callable[..., Tensor], **changed: Any) -> Any:
    shapes: dict[str, Any] = {
        "d_x_new": (5, 2, 3),
        "d_layer_input": (5, 3),
        "d_next_pre": (5, 2),
        "d_next_post": (5, 2),
    }
    shapes |= {"d_next_res": (5, 2, 2), "d_h": (5, 8), "d_ms": (5,), "f": (5, 3), "layer_bias": (3,), "h_post": (5, 2)}
    shapes |= {"x": (5, 2, 3), "h_res": (5, 2, 2), "h_pre": (5, 2), "phi": (8, 6), "scale": (3,), "bias": (8,)}
    shapes |= {"norm_weight": (6,), "x_new": (5, 2, 3), "h": (5, 8), "ms": (5,), "needs": [True] * 10} | changed
    return torch.ops.mhc.shifted_boundary_backward(*(make(*v) if isinstance(v, tuple) else v for v in shapes.values()))


def _reads(make: Callable[..., Tensor], **changed: Any) -> Any:
    arguments: dict[str, Any] = {"f": (5, 3), "layer_bias": (3,), "h_post": (5, 2), "x": (5, 2, 3), "h_res": (5, 2, 2)}
    arguments |= {"h_pre": (5, 2), "phi": (7, 6), "norm_weight": (6,)} | changed
    return ops.expand_combine_and_read(**{k: make(*v) if isinstance(v, tuple) else v for k, v in arguments.items()})


def _reads_backward(make: Callable[..., Tensor], **changed: Any) -> Any:
    shapes: dict[str, Any] = {"d_x_new": (5, 2, 3), "d_layer_input": (5, 3), "d_h": (5, 7), "d_ms": (5,), "f": (5, 3)}
    shapes |= {"layer_bias": (3,), "h_post": (5, 2), "x": (5, 2, 3), "h_res": (5, 2, 2), "h_pre": (5, 2), "phi": (7, 6)}
    shapes |= {"norm_weight": (6,), "x_new": (5, 2, 3), "needs": [True] * 8} | changed
    values = (make(*v) if isinstance(v, tuple) else v for v in shapes.values())
    return torch.ops.mhc.expand_combine_and_read_backward(*values)


CASES: dict[str, tuple[Call, type[Exception], str]] = {
    "x is a vector": (
        lambda make: _mix(make, x=(6,)),
        ValueError,
        "mhc::generate_mix_and_aggregate: x has shape [6]; expected [..., n, C]",
    ),
    "x of integers": (
        lambda make: _mix(make, x=make(5, 2, 3, dtype=torch.int32)),
        TypeError,
        "mhc::generate_mix_and_aggregate: x has dtype torch.int32; expected bfloat16, float16, float32 or float64",
    ),
    "no columns": (
        lambda make: _mix(make, x=(5, 2, 0)),
        ValueError,
        "x has shape [5, 2, 0]; expected [..., n, C] with C >= 1",
    ),
    "too many streams": (
        lambda make: _mix(make, x=(5, 32, 3)),
        ValueError,
        "x of shape [5, 32, 3] gives n = 32 streams; expected 1 to 31, so that phi has at most 1024 rows",
    ),
    "phi too wide": (
        lambda make: _mix(make, phi=(8, 7)),
        ValueError,
        "phi has shape [8, 7]; expected [K, n*C] = [K, 6] for x [..., n, C] of shape [5, 2, 3]",
    ),
    "phi with K of no form": (
        lambda make: _mix(make, phi=(7, 6)),
        ValueError,
        "phi has K = 7 rows; with n = 2 streams expected K = n = 2 (pre), 2*n = 4 (pre, post) "
        "or n*n + 2*n = 8 (pre, post, res)",
    ),
    "phi float64": (
        lambda make: _mix(make, phi=make(8, 6, dtype=torch.float64)),
        TypeError,
        "phi is float64, but x is torch.float32; expected float64 only with float64 x",
    ),
    "phi elsewhere": (
        lambda make: _mix(make, phi=make(8, 6, device="meta")),
        ValueError,
        "phi is on meta, but x is on cpu; expected the same device",
    ),
    "scale of another form": (
        lambda make: _mix(make, scale=(2,)),
        ValueError,
        "scale has shape [2]; expected [K] = [8], or [3] with one entry per group",
    ),
    "bias per group": (
        lambda make: _mix(make, bias=(3,)),
        ValueError,
        "bias has shape [3]; expected [K] = [8]",
    ),
    "bias of fewer groups than scale": (
        lambda make: _mix(make, bias=(4,)),
        ValueError,
        "bias has shape [4]; expected [K] = [8]",
    ),
    "norm_weight of one stream": (
        lambda make: _mix(make, norm_weight=(3,)),
        ValueError,
        "norm_weight has shape [3]; expected [n*C] = [6]",
    ),
    "rms_mode": (
        lambda make: _mix(make, rms_mode="before"),
        ValueError,
        "rms_mode is 'before'; expected one of 'inside', 'outside', 'clamp', 'none'",
    ),
    "rms_eps": (
        lambda make: _mix(make, rms_eps=-1e-6),
        ValueError,
        "rms_eps is -1e-06; expected a finite number >= 0",
    ),
    "post_mult": (
        lambda make: _mix(make, post_mult=float("nan")),
        ValueError,
        "post_mult is nan; expected a finite number",
    ),
    "sinkhorn_steps": (
        lambda make: _mix(make, sinkhorn_steps=-1),
        ValueError,
        "sinkhorn_steps is -1; expected a number of half-steps >= 0",
    ),
    "sinkhorn_first": (
        lambda make: _mix(make, sinkhorn_first="cols"),
        ValueError,
        "sinkhorn_first is 'cols'; expected one of 'rows', 'columns'",
    ),
    "sinkhorn start": (
        lambda make: ops.sinkhorn(make(2, 2), start="log"),
        ValueError,
        f"mhc::sinkhorn: start is 'log'; expected one of {', '.join(map(repr, SINKHORN_STARTS))}",
    ),
    "out_dtype": (
        lambda make: _mix(make, out_dtype=torch.int64),
        TypeError,
        "out_dtype is torch.int64; expected bfloat16, float16, float32, float64 or None",
    ),
    "logits not square": (
        lambda make: ops.sinkhorn(make(5, 2, 3)),
        ValueError,
        "mhc::sinkhorn: logits has shape [5, 2, 3]; expected [..., n, n]",
    ),
    "h of no form": (
        lambda make: ops.scale(make(5, 7), make(5), make(3), make(7), 2),
        ValueError,
        "mhc::scale: h of shape [5, 7] has K = 7 rows; with n = 2 streams expected",
    ),
    "ms of other tokens": (
        lambda make: ops.scale(make(5, 8), make(4), make(3), make(8), 2),
        ValueError,
        "mhc::scale: ms has shape [4]; expected the token dimensions of h = [5]",
    ),
    "h_pre of other tokens": (
        lambda make: ops.aggregate(make(5, 2, 3), make(4, 2)),
        ValueError,
        "mhc::aggregate: h_pre has shape [4, 2]; expected [..., n] = [5, 2]",
    ),
    "h of other streams": (
        lambda make: ops.mix_streams(make(5, 2, 3), make(5, 3, 2)),
        ValueError,
        "mhc::mix_streams: h has shape [5, 3, 2]; expected [..., n, m] = [5, 2, m]",
    ),
    "h without rows to make": (
        lambda make: ops.mix_streams(make(5, 2, 3), make(5, 2, 0)),
        ValueError,
        "mhc::mix_streams: h of shape [5, 2, 0] mixes n = 2 streams into m = 0; expected n, m >= 1 with n*m <= 1024",
    ),
    "h of too many": (
        lambda make: ops.mix_streams(make(5, 205, 3), make(5, 205, 5)),
        ValueError,
        "h of shape [5, 205, 5] mixes n = 205 streams into m = 5; expected n, m >= 1 with n*m <= 1024",
    ),
    "h in float64 alone": (
        lambda make: ops.mix_streams(make(5, 2, 3), make(5, 2, 2, dtype=torch.float64)),
        TypeError,
        "mhc::mix_streams: h is float64, but x is torch.float32; expected float64 only with float64 x",
    ),
    "mixed streams without columns": (
        lambda make: ops.mix_streams(make(5, 2, 0), make(5, 2, 2)),
        ValueError,
        "mhc::mix_streams: x has shape [5, 2, 0]; expected [..., n, C] with C >= 1",
    ),
    "gradient of other rows": (
        lambda make: torch.ops.mhc.mix_streams_backward(make(5, 2, 3), make(5, 2, 3), make(5, 2, 1), [True, True]),
        ValueError,
        "mhc::mix_streams_backward: d_out has shape [5, 2, 3]; expected [..., m, C] = [5, 1, 3]",
    ),
    "projection without rows": (
        lambda make: ops.projection(make(5, 2, 3), make(0, 6)),
        ValueError,
        "mhc::projection: phi has K = 0 rows; expected 1 <= K <= 1024",
    ),
    "head with all rows": (
        lambda make: ops.head(make(5, 2, 3), make(8, 6), make(8), make(8)),
        ValueError,
        "mhc::head: phi has K = 8 rows; with n = 2 streams expected K = n",
    ),
    "expand to no streams": (
        lambda make: ops.expand(make(5, 3), 0),
        ValueError,
        "mhc::expand: the argument n gives n = 0 streams; expected 1 to 31",
    ),
    "contract of a vector": (
        lambda make: ops.contract(make(3)),
        ValueError,
        "mhc::contract: x has shape [3]; expected [..., n, C]",
    ),
    "f of streams": (
        lambda make: _combine(make, f=(5, 2, 3)),
        ValueError,
        "mhc::expand_combine: f has shape [5, 2, 3]; expected [..., C] = [5, 3]",
    ),
    "layer_bias of streams": (
        lambda make: _combine(make, layer_bias=(2, 3)),
        ValueError,
        "layer_bias has shape [2, 3]; expected [C] = [3]",
    ),
    "h_post with a last dimension": (
        lambda make: _combine(make, h_post=(5, 2, 1)),
        ValueError,
        "h_post has shape [5, 2, 1]; expected [..., n] = [5, 2]",
    ),
    "h_res flattened": (
        lambda make: _combine(make, h_res=(5, 4)),
        ValueError,
        "h_res has shape [5, 4]; expected [..., n, n] = [5, 2, 2]",
    ),
    "needs too short": (
        lambda make: torch.ops.mhc.aggregate_backward(make(5, 3), make(5, 2, 3), make(5, 2), [True]),
        ValueError,
        "mhc::aggregate_backward: needs has 1 entries; expected 2, one per differentiable argument",
    ),
    "gradient of another shape": (
        lambda make: torch.ops.mhc.aggregate_backward(make(5, 2), make(5, 2, 3), make(5, 2), [True, True]),
        ValueError,
        "mhc::aggregate_backward: d_out has shape [5, 2]; expected [..., C] = [5, 3]",
    ),
    "d_x of another shape": (
        lambda make: torch.ops.mhc.aggregate_backward(
            make(5, 3), make(5, 2, 3), make(5, 2), [True, True], make(5, 3, 2)
        ),
        ValueError,
        "mhc::aggregate_backward: d_x has shape [5, 3, 2]; expected the shape of x = [5, 2, 3]",
    ),
    "d_x of integers": (
        lambda make: torch.ops.mhc.expand_combine_backward(
            make(5, 2, 3),
            make(5, 3),
            None,
            make(5, 2),
            make(5, 2, 3),
            None,
            [True, False, True, True, False],
            make(5, 2, 3, dtype=torch.int32),
        ),
        TypeError,
        "mhc::expand_combine_backward: d_x has dtype torch.int32; expected",
    ),
    "d_x that nobody wants": (
        lambda make: torch.ops.mhc.projection_backward(
            make(5, 8), make(5), make(5, 2, 3), make(8, 6), None, [False, True, False], make(5, 2, 3)
        ),
        ValueError,
        "mhc::projection_backward: d_x was given, but needs says that x needs no gradient; expected None",
    ),
    "boundary with f of streams": (
        lambda make: _boundary(make, f=(5, 2, 3)),
        ValueError,
        "mhc::boundary: f has shape [5, 2, 3]; expected [..., C] = [5, 3]",
    ),
    "boundary with phi too wide": (
        lambda make: _boundary(make, phi=(8, 7)),
        ValueError,
        "mhc::boundary: phi has shape [8, 7]; expected [K, n*C] = [K, 6] for x [..., n, C] of shape [5, 2, 3]",
    ),
    "boundary's streams_dtype": (
        lambda make: _boundary(make, streams_dtype=torch.int64),
        TypeError,
        "streams_dtype is torch.int64; expected bfloat16, float16, float32, float64 or None",
    ),
    "boundary_backward's needs": (
        lambda make: _boundary_backward(make, needs=[True] * 5),
        ValueError,
        "mhc::boundary_backward: needs has 5 entries; expected 10, one per differentiable argument",
    ),
    "boundary_backward's saved streams": (
        lambda make: _boundary_backward(make, x_new=(5, 3, 2)),
        ValueError,
        "mhc::boundary_backward: x_new has shape [5, 3, 2]; expected the shape of x = [5, 2, 3]",
    ),
    "boundary_backward's gradient of the layer's input": (
        lambda make: _boundary_backward(make, d_layer_input=(5, 2)),
        ValueError,
        "mhc::boundary_backward: d_layer_input has shape [5, 2]; expected [..., C] = [5, 3]",
    ),
    "shifted_boundary with gates of the read for each column": (
        lambda make: _shifted(make, h_pre=(5, 3)),
        ValueError,
        "mhc::shifted_boundary: h_pre has shape [5, 3]; expected [..., n] = [5, 2]",
    ),
    "shifted_boundary with gates of the read in float64": (
        lambda make: _shifted(make, h_pre=make(5, 2, dtype=torch.float64)),
        TypeError,
        "mhc::shifted_boundary: h_pre is float64, but x is torch.float32; expected float64 only with float64 x",
    ),
    "shifted_boundary without gates of the read": (
        lambda make: _shifted(make, h_pre=None),
        TypeError,
        "mhc::shifted_boundary: h_pre is None; expected a tensor",
    ),
    "shifted_boundary with h_res of the wrong side": (
        lambda make: _shifted(make, h_res=(5, 2, 3)),
        ValueError,
        "mhc::shifted_boundary: h_res has shape [5, 2, 3]; expected [..., n, n] = [5, 2, 2]",
    ),
    "shifted_boundary with rows of no gates": (
        lambda make: _shifted(make, phi=(7, 6), bias=(7,)),
        ValueError,
        "mhc::shifted_boundary: phi has K = 7 rows; with n = 2 streams expected",
    ),
    "shifted_boundary's streams_dtype": (
        lambda make: _shifted(make, streams_dtype=torch.int64),
        TypeError,
        "mhc::shifted_boundary: streams_dtype is torch.int64; expected bfloat16, float16, float32, float64 or None",
    ),
    "shifted_boundary's out_dtype": (
        lambda make: _shifted(make, out_dtype=torch.int64),
        TypeError,
        "mhc::shifted_boundary: out_dtype is torch.int64; expected bfloat16, float16, float32, float64 or None",
    ),
    "shifted_boundary_backward's needs": (
        lambda make: _shifted_backward(make, needs=[True] * 9),
        ValueError,
        "mhc::shifted_boundary_backward: needs has 9 entries; expected 10, one per differentiable argument",
    ),
    "shifted_boundary_backward's saved streams": (
        lambda make: _shifted_backward(make, x_new=(5, 3, 2)),
        ValueError,
        "mhc::shifted_boundary_backward: x_new has shape [5, 3, 2]; expected the shape of x = [5, 2, 3]",
    ),
    "shifted_boundary_backward's gradient of the next gates": (
        lambda make: _shifted_backward(make, d_next_pre=(5, 8)),
        ValueError,
        "mhc::shifted_boundary_backward: d_next_pre has shape [5, 8]; expected [..., n] = [5, 2]",
    ),
    "expand_combine_and_read of nothing": (
        lambda make: _reads(make, h_pre=None, phi=None, norm_weight=None),
        ValueError,
        "mhc::expand_combine_and_read: neither h_pre nor phi was given; expected one of them, or both",
    ),
    "expand_combine_and_read with a norm of nothing": (
        lambda make: _reads(make, phi=None),
        ValueError,
        "mhc::expand_combine_and_read: norm_weight was given without phi; expected both, or None for both",
    ),
    "expand_combine_and_read with gates for each column": (
        lambda make: _reads(make, h_pre=(5, 3)),
        ValueError,
        "mhc::expand_combine_and_read: h_pre has shape [5, 3]; expected [..., n] = [5, 2]",
    ),
    "expand_combine_and_read with phi of two channels": (
        lambda make: _reads(make, phi=(7, 2)),
        ValueError,
        "mhc::expand_combine_and_read: phi has shape [7, 2]; expected [K, n*C] = [K, 6], or [K, C] = [K, 3] for each",
    ),
    "expand_combine_and_read with a norm_weight of all streams for each alone": (
        lambda make: _reads(make, phi=(7, 3)),
        ValueError,
        "mhc::expand_combine_and_read: norm_weight has shape [6]; expected [C] = [3]",
    ),
    "expand_combine_and_read's streams_dtype": (
        lambda make: _reads(make, streams_dtype=torch.int64),
        TypeError,
        "mhc::expand_combine_and_read: streams_dtype is torch.int64; expected bfloat16, float16, float32, float64 or",
    ),
    "expand_combine_and_read's out_dtype": (
        lambda make: _reads(make, out_dtype=torch.int64),
        TypeError,
        "mhc::expand_combine_and_read: out_dtype is torch.int64; expected bfloat16, float16, float32, float64 or None",
    ),
    "expand_combine_and_read_backward's needs": (
        lambda make: _reads_backward(make, needs=[True] * 7),
        ValueError,
        "mhc::expand_combine_and_read_backward: needs has 7 entries; expected 8, one per differentiable argument",
    ),
    "expand_combine_and_read_backward's saved streams": (
        lambda make: _reads_backward(make, x_new=(5, 3, 2)),
        ValueError,
        "mhc::expand_combine_and_read_backward: x_new has shape [5, 3, 2]; expected the shape of x = [5, 2, 3]",
    ),
    "expand_combine_and_read_backward's gradient of what is not read": (
        lambda make: _reads_backward(make, h_pre=None),
        ValueError,
        "mhc::expand_combine_and_read_backward: d_layer_input has shape [5, 3]; expected [..., C] = [5, 0]",
    ),
    "expand_combine_and_read_backward's gradient of h": (
        lambda make: _reads_backward(make, d_h=(5, 6)),
        ValueError,
        "mhc::expand_combine_and_read_backward: d_h has shape [5, 6]; expected [..., K] = [5, 7]",
    ),
    "expand_combine_and_read_backward's gradient of h of each stream": (
        lambda make: _reads_backward(make, phi=(7, 3), norm_weight=(3,)),
        ValueError,
        "mhc::expand_combine_and_read_backward: d_h has shape [5, 7]; expected [..., n, K] = [5, 2, 7]",
    ),
    "gradient of streams is a vector": (
        lambda make: torch.ops.mhc.expand_backward(make(3)),
        ValueError,
        "mhc::expand_backward: d_x has shape [3]; expected [..., n, C]",
    ),
}


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_message(case: tuple[Call, type[Exception], str], fake: bool) -> None:
    call, error, message = case
    if not fake:
        # Meta tensors together with CPU tensors do not reach the CPU's implementation.
        if "device" in message:
            pytest.skip("a CPU-only machine has no second device with a real implementation")
        with pytest.raises(error, match=re.escape(message)):
            call(lambda *shape, **options: torch.zeros(*shape, **options))
        return
    with FakeTensorMode(), pytest.raises(error, match=re.escape(message)):
        call(lambda *shape, **options: torch.empty(*shape, **options))


OTHER_TYPES: dict[str, tuple[Call, str]] = {
    "no tensor": (
        lambda make: ops.aggregate(make(5, 2, 3), [1.0]),
        "aggregate: h_pre is of type list; expected a tensor",
    ),
    "no tensor, by its name": (
        lambda make: ops.expand_combine(make(5, 3), "b", h_post=make(5, 2), x=make(5, 2, 3), h_res=None),
        "expand_combine: layer_bias is of type str; expected a tensor or None",
    ),
    "no dtype": (
        lambda make: ops.mix_streams(make(5, 2, 3), make(5, 2, 2), out_dtype="bfloat16"),
        "mix_streams: out_dtype is of type str; expected a torch.dtype or None",
    ),
    "no integer": (lambda make: ops.expand(make(5, 3), 4.0), "expand: n is of type float; expected an integer"),
    "no number": (
        lambda make: ops.head(make(5, 2, 3), make(2, 6), make(1), make(2), rms_eps="small"),
        "head: rms_eps is of type str; expected a number",
    ),
    "no string": (
        lambda make: ops.sinkhorn(make(5, 2, 2), start=1),
        "sinkhorn: start is of type int; expected a string",
    ),
    "no truth value": (
        lambda make: ops.sinkhorn(make(5, 2, 2), clamp="no"),
        "sinkhorn: clamp is of type str; expected True or False",
    ),
}


@pytest.mark.parametrize("case", OTHER_TYPES.values(), ids=OTHER_TYPES)
def test_wrappers_name_an_argument_of_another_type(case: tuple[Call, str]) -> None:
    call, message = case
    with pytest.raises(TypeError) as caught:
        call(torch.zeros)
    assert str(caught.value) == f"mhc::{message}"


@pytest.mark.parametrize("name", ops.__all__)
def test_wrappers_know_what_each_argument_may_be(name: str) -> None:
    """A value of no type that there is, in the place of each argument."""
    wrapper = getattr(ops, name)
    arguments = inspect.signature(wrapper).parameters
    for wrong in arguments:
        given: dict[str, Any] = {
            name: torch.zeros(5, 2, 3) for name, one in arguments.items() if one.default is one.empty
        }
        with pytest.raises(TypeError, match=rf"^mhc::{name}: \w+ is of type (object|Tensor); expected"):
            wrapper(**given | {wrong: object()})


def test_wrappers_leave_what_the_checks_say() -> None:
    """An argument of another type is not to blame where an integer tensor is what the operator refuses."""
    message = "mhc::sinkhorn: logits has dtype torch.int32; expected bfloat16"
    with pytest.raises(TypeError, match=re.escape(message)):
        ops.sinkhorn(torch.zeros(2, 2, dtype=torch.int32), clamp=1)  # type: ignore[arg-type]
    message = "mhc::expand: n is of type float; expected an integer"
    with pytest.raises(TypeError, match=re.escape(message)) as caught:
        ops.expand(torch.zeros(2, 3, dtype=torch.int32), 4.0)  # type: ignore[arg-type]
    assert "Expected a value of type" in str(caught.value.__cause__)


def test_sparse_tensors_are_refused() -> None:
    """And not taken for dense ones of another shape."""
    layout = "has layout torch.sparse_coo; expected a dense tensor, of layout torch.strided"
    with pytest.raises(TypeError, match=re.escape(f"mhc::expand: f {layout}")):
        ops.expand(torch.randn(2, 3).to_sparse(), 4)
    with pytest.raises(TypeError, match=re.escape(f"mhc::aggregate: h_pre {layout}")):
        ops.aggregate(torch.randn(2, 3, 4), torch.rand(2, 3).to_sparse())


def test_scale_of_each_gate_is_no_scale_of_all_groups() -> None:
    """Of two streams, two entries scale the two gates of bias, or the groups that all four rows would make."""
    scale, bias = torch.ones(2), torch.zeros(2)
    made = torch.ops.mhc.generate_mix(torch.ones(5, 2, 3), torch.ones(4, 6), scale, bias)
    assert made[0].shape == (5, 2)


def test_wrappers_take_whole_numbers_and_leave_the_rest_to_python() -> None:
    logits = torch.rand(5, 2, 2)
    assert torch.equal(ops.sinkhorn(logits, eps=1), ops.sinkhorn(logits, eps=1.0))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'h_pre'"):
        ops.aggregate(logits)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'steep'"):
        ops.sinkhorn(logits, steep=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["generate_mix", "generate_mix_and_aggregate", "boundary", "shifted_boundary"])
def test_functions_that_return_no_logits_want_a_gate_for_each_row(name: str) -> None:
    """The operators return the products of rows without a gate in h, which these functions do not return."""
    given = arguments(name, Sizes(4, 6, more=4), torch.float32, without=RARE)
    assert call(name, given)[-2].shape == (5, 28)
    message = f"mhc::{name}: phi has K = 28 rows, but bias has 24 entries; expected one for each row"
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(ops, name)(*given.values())
    given |= {"phi": given["phi"][:24], "bias": given["bias"][:8], "scale": torch.ones(24)}
    with pytest.raises(ValueError, match=re.escape("bias has shape [8]; expected [K] = [24]")):
        getattr(ops, name)(*given.values())


def test_compiling_raises_the_same_message() -> None:
    compiled = torch.compile(lambda x, bias: ops.aggregate(x, bias), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=re.escape("h_pre has shape [4, 2]; expected [..., n] = [5, 2]")):
        compiled(torch.zeros(5, 2, 3), torch.zeros(4, 2))


@pytest.mark.parametrize("name", FORWARD)
def test_second_derivative_names_the_operator(name: str) -> None:
    given = arguments(name, Sizes())
    leaves = [given[argument].requires_grad_() for argument in tensor_names(name)]
    first = results(call(name, given))[0].square().sum()
    gradients = torch.autograd.grad(first, leaves, create_graph=True, allow_unused=True)
    made = [gradient for gradient in gradients if gradient is not None]
    assert made
    # The gradient of x is made by another operator's backward.
    either = "aggregate(_and_norm)?" if name == "aggregate_and_norm" else name
    for gradient in made:
        with pytest.raises(RuntimeError, match=f"mhc::{either}_backward cannot be differentiated again"):
            gradient.sum().backward(retain_graph=True)
