"""The operators on a rank that has a part of the channels: what is sums over channels is added up over the ranks.

A read, a write and a mix of streams work channel by channel. Only gates need sums over all channels of a token. So an
operator that makes gates inside is taken apart: the projection of this rank's channels, one sum over the ranks, gates
of the whole sum on all ranks, and the read or the write of this rank's channels.

- forward: K + 1 numbers a token, the logits and the mean square; with an input norm one more, in a sum of its own;
- backward: K + 1 numbers a token, their gradients; with an input norm two more, in a sum of their own.

Gradients of gates are linear in those of the operator's results. So they stay parts of sums up to the logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_compile.ops._checks import accumulation_dtype
from mhc_compile.ops._tensors import rows_of

# Parameters that have a number for each channel, or for each channel of each stream.
_OF_CHANNELS = frozenset({"layer_bias", "input_norm_weight"})
_OF_STREAMS = frozenset({"phi", "norm_weight"})
# Tensors of tokens whose last dim is the channels.
_LAST = frozenset({"x", "x_new", "f", "layer_input", "out"})
# Operators on gates alone, in which these names mean something else.
_NARROW = frozenset({"mhc::scale", "mhc::sinkhorn"})


def ends_in_channels(operator: str, name: str) -> bool:
    """Whether a tensor of tokens, or a gradient of one, has the channels last."""
    return name.removeprefix("d_") in _LAST and operator.removesuffix("_backward") not in _NARROW


@dataclass(frozen=True)
class Columns:
    """The channels [start, stop) of `total` that a rank has; `summed` adds up tensors [..., k] over the ranks."""

    start: int
    stop: int
    total: int
    summed: Callable[..., Sequence[Tensor]]

    @property
    def share(self) -> float:
        return (self.stop - self.start) / self.total

    def cut(self, name: str, parameter: Tensor) -> Tensor:
        """The part of a parameter for these channels."""
        if name in _OF_CHANNELS:
            return parameter[self.start : self.stop]
        if name in _OF_STREAMS:
            return _by_streams(parameter, self.total)[..., self.start : self.stop].flatten(-2)
        return parameter

    def spread(self, name: str, gradient: Tensor) -> Tensor:
        """The gradient of a parameter from that of its part: zeros for the channels of other ranks."""
        sides = (self.start, self.total - self.stop)
        if name in _OF_CHANNELS:
            return F.pad(gradient, sides)
        if name in _OF_STREAMS:
            return F.pad(_by_streams(gradient, self.stop - self.start), sides).flatten(-2)
        return gradient


def _by_streams(parameter: Tensor, width: int) -> Tensor:
    return parameter.reshape(*parameter.shape[:-1], -1, width)


Given = dict[str, Any]
Results = tuple[Tensor, ...]


def run(overload: Any, given: Given, scalars: Mapping[str, Any], columns: Columns) -> Results:
    """The results of an operator for a rank's channels."""
    name = overload._schema.name.removeprefix("mhc::")
    if name in _PROGRAMS:
        return _PROGRAMS[name](_Operators(scalars, columns), given)
    made = overload(*given.values(), **scalars)
    return made if isinstance(made, tuple) else (made,)


def has_gates_inside(operator: str) -> bool:
    """Whether an operator makes gates, or their gradients, from streams."""
    name = operator.removeprefix("mhc::")
    return name in _PROGRAMS and not name.startswith(("projection", "expand_combine", "aggregate"))


@functools.cache
def _scalar_names(operator: str) -> frozenset[str]:
    arguments = getattr(torch.ops.mhc, operator).default._schema.arguments
    return frozenset(argument.name for argument in arguments if argument.kwarg_only)


class _Operators:
    """The operators that the others are made of, with the scalars of the one that is taken apart."""

    def __init__(self, scalars: Mapping[str, Any], columns: Columns) -> None:
        self.scalars, self.columns = scalars, columns
        of_sinkhorn = {name.removeprefix("sinkhorn_"): value for name, value in scalars.items() if "sinkhorn_" in name}
        self.sinkhorn = functools.partial(torch.ops.mhc.sinkhorn, **of_sinkhorn)
        self.sinkhorn_backward = functools.partial(torch.ops.mhc.sinkhorn_backward, **of_sinkhorn)
        of_scale = {name: value for name, value in scalars.items() if name in _scalar_names("scale")}
        self.scale = functools.partial(torch.ops.mhc.scale, **of_scale)
        self.scale_backward = functools.partial(torch.ops.mhc.scale_backward, **of_scale)

    def logits(self, x: Tensor, given: Given) -> tuple[Tensor, Tensor]:
        """h and ms of all channels."""
        h, ms = torch.ops.mhc.projection(x, given["phi"], given["norm_weight"])
        h, ms = self.columns.summed(h, ms.unsqueeze(-1) * self.columns.share)
        return h, ms.squeeze(-1)

    def scaled(self, h: Tensor, ms: Tensor, given: Given, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """h_pre, h_post and the logits of h_res, of the rows that have gates."""
        results: tuple[Tensor, Tensor, Tensor] = self.scale(_with_gates(h, given), ms, given["scale"], given["bias"], n)
        return results

    def gates(self, h: Tensor, ms: Tensor, given: Given, n: int) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, logits = self.scaled(h, ms, given, n)
        return pre, post, self.sinkhorn(logits) if logits.shape[-1] else logits

    def read(self, x: Tensor, h_pre: Tensor, weight: Tensor | None) -> Tensor:
        """The sublayer's input, by its norm if there is one."""
        dtype, eps = self.scalars.get("out_dtype"), self.scalars.get("input_norm_eps")
        if eps is None:
            result: Tensor = torch.ops.mhc.aggregate(x, h_pre, out_dtype=dtype)
            return result
        u = torch.ops.mhc.aggregate(x, h_pre, out_dtype=accumulation_dtype(x))
        (squares,) = self.columns.summed(u.square().sum(-1, keepdim=True))
        normed = u * torch.rsqrt(squares / self.columns.total + eps)
        result = normed if weight is None else normed * weight
        return result.to(dtype or x.dtype)

    def before_norm(self, d_out: Tensor, x: Tensor, h_pre: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """The gradients of what the input norm reads, and of its weight."""
        eps, total, dtype = self.scalars["input_norm_eps"], self.columns.total, accumulation_dtype(x)
        u, d_out = torch.ops.mhc.aggregate(x, h_pre, out_dtype=dtype), d_out.to(dtype)
        g = d_out if weight is None else d_out * weight
        sums = (u.square().sum(-1, keepdim=True), (g * u).sum(-1, keepdim=True))
        squares, product = self.columns.summed(*sums)
        r = torch.rsqrt(squares / total + eps)
        # In this order, since r^3 alone overflows where u is small.
        return g * r - u * (product * r / total * r * r), rows_of(d_out * u * r).sum(0)

    def mix_backward(
        self, d_pre: Tensor | None, d_post: Tensor | None, d_res: Tensor | None, d_x: Tensor | None, x: Tensor,
        given: Given, needs: Sequence[bool],
    ) -> list[Tensor]:  # fmt: skip
        """The gradients of x, phi, scale, bias and norm_weight, from those of gates that are parts of sums."""
        h, ms, scale, bias, n = given["h"], given["ms"], given["scale"], given["bias"], x.shape[-2]
        if d_res is not None:
            d_res = self.sinkhorn_backward(d_res, self.scaled(h, ms, given, n)[2]) if d_res.shape[-1] else None
        if d_pre is None:
            d_pre = h.new_zeros((*h.shape[:-1], n))
        into_logits = needs[0] or needs[1] or needs[4]
        narrow = [into_logits, into_logits, needs[2], needs[3]]
        gates = (d_pre, d_post, d_res, _with_gates(h, given), ms, scale, bias, n)
        dh, dms, dscale, dbias = self.scale_backward(*gates, narrow)
        nothing = x.new_empty(0)
        if not into_logits:
            return [nothing, nothing, dscale, dbias, nothing]
        dh = F.pad(dh, (0, h.shape[-1] - dh.shape[-1]))
        dh = dh if given["d_h"] is None else dh + given["d_h"]
        dms = dms if given["d_ms"] is None else dms + given["d_ms"]
        dh, dms = self.columns.summed(dh.to(h.dtype), dms.to(h.dtype).unsqueeze(-1))
        wide = [needs[0], needs[1], needs[4]]
        d_ms, phi, weight = dms.squeeze(-1) * self.columns.share, given["phi"], given["norm_weight"]
        dx, dphi, dweight = torch.ops.mhc.projection_backward(dh, d_ms, x, phi, weight, wide, d_x if needs[0] else None)
        return [dx, dphi, dscale, dbias, dweight]

    def read_backward(
        self, d_out: Tensor | None, d_post: Tensor | None, d_res: Tensor | None, d_x: Tensor | None, x: Tensor,
        given: Given, needs: Sequence[bool],
    ) -> list[Tensor]:  # fmt: skip
        """As `mix_backward`, of gates and of a read with them; the gradient of the input norm's weight follows."""
        weight, d_pre, d_weight = given.get("input_norm_weight"), None, x.new_empty(0)
        if d_out is not None:
            h_pre = self.scaled(given["h"], given["ms"], given, x.shape[-2])[0]
            if self.scalars.get("input_norm_eps") is not None:
                d_out, d_weight = self.before_norm(d_out, x, h_pre, weight)
            made, d_pre = torch.ops.mhc.aggregate_backward(d_out, x, h_pre, [needs[0], True], d_x if needs[0] else None)
            d_x = made if needs[0] else None
        elif weight is not None:
            d_weight = torch.zeros_like(weight)
        if weight is not None:
            d_weight = d_weight.to(weight.dtype)
        return [*self.mix_backward(d_pre, d_post, d_res, d_x, x, given, needs), d_weight]


def _with_gates(h: Tensor, given: Given) -> Tensor:
    """The rows of h that have gates: the first ones."""
    return h[..., : given["bias"].shape[0]]


def _projection(on: _Operators, given: Given) -> Results:
    h, ms = torch.ops.mhc.projection(*given.values())
    return h, ms * on.columns.share


def _projection_backward(on: _Operators, given: Given) -> Results:
    d_ms = None if given["d_ms"] is None else given["d_ms"] * on.columns.share
    results: Results = torch.ops.mhc.projection_backward(*(given | {"d_ms": d_ms}).values())
    return results


def _generate_mix(on: _Operators, given: Given) -> Results:
    x = given["x"]
    h, ms = on.logits(x, given)
    return *on.gates(h, ms, given, x.shape[-2]), h, ms


def _generate_mix_backward(on: _Operators, given: Given) -> Results:
    gates = (given["d_h_pre"], given["d_h_post"], given["d_h_res"])
    return tuple(on.mix_backward(*gates, given["d_x"], given["x"], given, given["needs"]))


def _generate_mix_and_aggregate(on: _Operators, given: Given) -> Results:
    x = given["x"]
    pre, post, res, h, ms = _generate_mix(on, given)
    return on.read(x, pre, given["input_norm_weight"]), post, res, h, ms


def _generate_mix_and_aggregate_backward(on: _Operators, given: Given) -> Results:
    gates = (given["d_layer_input"], given["d_h_post"], given["d_h_res"])
    return tuple(on.read_backward(*gates, given["d_x"], given["x"], given, given["needs"]))


def _head(on: _Operators, given: Given) -> Results:
    pre, _, _, h, ms = _generate_mix(on, given)
    return on.read(given["x"], pre, None), h, ms


def _head_backward(on: _Operators, given: Given) -> Results:
    return tuple(on.read_backward(given["d_out"], None, None, given["d_x"], given["x"], given, given["needs"])[:5])


def _aggregate_and_norm(on: _Operators, given: Given) -> Results:
    return (on.read(given["x"], given["h_pre"], given["input_norm_weight"]),)


def _aggregate_and_norm_backward(on: _Operators, given: Given) -> Results:
    d_out, x, h_pre, weight = (given[name] for name in ("d_out", "x", "h_pre", "input_norm_weight"))
    du, d_weight = on.before_norm(d_out, x, h_pre, weight)
    d_pre = torch.ops.mhc.aggregate_backward(du, x, h_pre, [False, given["needs"][1]])[1]
    nothing = x.new_empty(0)
    return (
        du.to(d_out.dtype) if given["needs"][0] else nothing,
        d_pre,
        d_weight.to(weight.dtype) if weight is not None and given["needs"][2] else nothing,
    )


def _write(on: _Operators, given: Given) -> Tensor:
    tensors = (given[name] for name in ("f", "layer_bias", "h_post", "x", "h_res"))
    result: Tensor = torch.ops.mhc.expand_combine(*tensors, out_dtype=on.scalars.get("streams_dtype"))
    return result


def _write_backward(d_x_new: Tensor, given: Given, needs: Sequence[bool]) -> Results:
    if not any(needs[:5]):
        return (given["x"].new_empty(0),) * 5
    tensors = (given[name] for name in ("f", "layer_bias", "h_post", "x", "h_res"))
    results: Results = torch.ops.mhc.expand_combine_backward(d_x_new, *tensors, needs[:5])
    return results


def _boundary(on: _Operators, given: Given) -> Results:
    x_new = _write(on, given)
    return x_new, *_generate_mix_and_aggregate(on, given | {"x": x_new})


def _boundary_backward(on: _Operators, given: Given) -> Results:
    needs, gates = given["needs"], (given["d_layer_input"], given["d_next_post"], given["d_next_res"])
    into = [any(needs[:5]), *needs[5:]]
    d_new, *parameters = on.read_backward(*gates, given["d_x_new"], given["x_new"], given, into)
    return *_write_backward(d_new, given, needs), *parameters


def _shifted_boundary(on: _Operators, given: Given) -> Results:
    x_new = _write(on, given)
    return x_new, on.read(x_new, given["h_pre"], None), *_generate_mix(on, given | {"x": x_new})


def _shifted_boundary_backward(on: _Operators, given: Given) -> Results:
    needs, x_new, h_pre, d_x = given["needs"], given["x_new"], given["h_pre"], given["d_x_new"]
    into, d_pre = any(needs[:5]), x_new.new_empty(0, dtype=h_pre.dtype)
    if given["d_layer_input"] is not None:
        made, d_pre = torch.ops.mhc.aggregate_backward(
            given["d_layer_input"], x_new, h_pre, [into, needs[5]], d_x if into else None
        )
        d_x = made if into else None
    elif needs[5]:
        d_pre = torch.zeros_like(h_pre, memory_format=torch.contiguous_format)
    gates = (given["d_next_pre"], given["d_next_post"], given["d_next_res"])
    d_new, *parameters = on.mix_backward(*gates, d_x, x_new, given, [into, *needs[6:]])
    return *_write_backward(d_new, given, needs), d_pre, *parameters


def _expand_combine_and_read(on: _Operators, given: Given) -> Results:
    names = ("f", "layer_bias", "h_post", "x", "h_res", "h_pre", "phi", "norm_weight")
    x_new, layer_input, h, ms = torch.ops.mhc.expand_combine_and_read(*(given[name] for name in names), **on.scalars)
    return x_new, layer_input, h, ms * on.columns.share


def _expand_combine_and_read_backward(on: _Operators, given: Given) -> Results:
    d_ms = None if given["d_ms"] is None else given["d_ms"] * on.columns.share
    results: Results = torch.ops.mhc.expand_combine_and_read_backward(*(given | {"d_ms": d_ms}).values())
    return results


_PROGRAMS: dict[str, Callable[[_Operators, Given], Results]] = {
    "aggregate_and_norm": _aggregate_and_norm,
    "aggregate_and_norm_backward": _aggregate_and_norm_backward,
    "projection": _projection,
    "projection_backward": _projection_backward,
    "generate_mix": _generate_mix,
    "generate_mix_backward": _generate_mix_backward,
    "generate_mix_and_aggregate": _generate_mix_and_aggregate,
    "generate_mix_and_aggregate_backward": _generate_mix_and_aggregate_backward,
    "head": _head,
    "head_backward": _head_backward,
    "boundary": _boundary,
    "boundary_backward": _boundary_backward,
    "shifted_boundary": _shifted_boundary,
    "shifted_boundary_backward": _shifted_boundary_backward,
    "expand_combine_and_read": _expand_combine_and_read,
    "expand_combine_and_read_backward": _expand_combine_and_read_backward,
}
