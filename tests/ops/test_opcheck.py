"""torch.library.opcheck on every operator: schema, autograd registration, fake against real, AOT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.library import opcheck

import mhc_compile.ops  # noqa: F401
from tests.ops.eager import combine_arguments, mix_arguments

Sample = tuple[str, tuple[Any, ...], dict[str, Any]]

_LOG = {"sinkhorn_eps": 0.0, "sinkhorn_start_eps": 0.0, "sinkhorn_steps": 3}
_CLAMP = {"rms_mode": "clamp", "sinkhorn_start": "exp", "sinkhorn_clamp": True, "sinkhorn_steps": 2}
_NO_RMS = {"sinkhorn_steps": 3}

# n, C, tokens, parts, dtype of x, dtype of the parameters; no token, one token, one stream, one column.
_MIXES: list[tuple[int, int, tuple[int, ...], int, torch.dtype, torch.dtype, dict[str, Any]]] = [
    (4, 8, (2, 3), 3, torch.bfloat16, torch.float32, _NO_RMS),
    (2, 5, (), 3, torch.float32, torch.bfloat16, _LOG),
    (1, 1, (1, 1), 3, torch.float32, torch.float32, _CLAMP),
    (3, 4, (0,), 2, torch.float16, torch.float16, _NO_RMS),
    (2, 3, (4,), 1, torch.float64, torch.float64, _CLAMP),
]


def _leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().requires_grad_()


def _mix_samples(requires_grad: bool) -> Iterator[Sample]:
    for index, (n, width, tokens, parts, dtype, parameter_dtype, scalars) in enumerate(_MIXES):
        x, *parameters = mix_arguments(n, width, tokens, parts=parts, per_row=index % 2 == 0)
        norm_weight = [torch.rand(n * width)] if index % 2 else []
        arguments = [x.to(dtype), *(value.to(parameter_dtype) for value in (*parameters, *norm_weight))]
        if requires_grad:
            arguments = [_leaf(value) for value in arguments]
        yield f"{n}-{width}-{tokens}-{parts}-{dtype}", tuple(arguments), scalars


def _forward_samples() -> Iterator[Sample]:
    for name, (x, phi, scale, bias, *norm_weight), scalars in _mix_samples(requires_grad=True):
        n, parts = x.shape[-2], {1: 1, 2: 2}.get(phi.shape[0] // x.shape[-2], 3)
        narrow = {key: value for key, value in scalars.items() if not key.startswith("sinkhorn_")}
        steps = {k.removeprefix("sinkhorn_"): v for k, v in scalars.items() if k.startswith("sinkhorn_")}
        h, ms = torch.ops.mhc.projection(x.detach(), phi.detach())
        yield f"projection-{name}", (x, phi, *norm_weight), {}
        yield f"scale-{name}", (_leaf(h), _leaf(ms), scale, bias, n), narrow
        yield f"sinkhorn-{name}", (_leaf(torch.rand(*x.shape[:-1], n, dtype=x.dtype)),), steps
        yield (
            f"aggregate-{name}",
            (x, torch.rand(*x.shape[:-1], requires_grad=True)),
            {"out_dtype": torch.float32},
        )
        yield f"mix_streams-{name}", (x, torch.rand(*x.shape[:-1], 3, requires_grad=True)), {"out_dtype": torch.float32}
        yield f"contract-{name}", (x,), {}
        yield f"expand-{name}", (_leaf(x[..., 0, :]), n), {}
        yield f"generate_mix-{name}", (x, phi, scale, bias, *norm_weight), scalars
        extra = {"out_dtype": torch.bfloat16} if parts == 3 else {}
        yield f"generate_mix_and_aggregate-{name}", (x, phi, scale, bias, *norm_weight), scalars | extra
        input_weight = _leaf(torch.rand(x.shape[-1])) if parts > 1 else None
        normed = (x, phi, scale, bias, *(norm_weight or [None]), input_weight)
        yield f"generate_mix_and_aggregate-{name}-norm", normed, scalars | extra | {"input_norm_eps": 1e-3}
        if parts == 1:
            yield f"head-{name}", (x, phi, scale, bias, *norm_weight), narrow
    for n, tokens, dtype in ((4, (2, 3), torch.bfloat16), (1, (), torch.float32), (2, (0, 2), torch.float64)):
        f, layer_bias, h_post, x, h_res = (_leaf(v) for v in combine_arguments(n, 6, tokens, dtype=dtype))
        yield f"expand_combine-{n}", (f, layer_bias, h_post, x, h_res), {}
        transposed = _leaf(h_res.mT)
        yield f"expand_combine-{n}-strided", (f, None, h_post, x, transposed), {"out_dtype": torch.float32}
        yield f"expand_combine-{n}-unmixed", (f, layer_bias, h_post, x, None), {}
    for name, combined, parameters, scalars in _boundaries():
        tensors = [None if value is None else _leaf(value) for value in (*combined, *parameters)]
        yield f"boundary-{name}", tuple(tensors), scalars | {"streams_dtype": combined[3].dtype}
        if name.endswith("-unmixed"):
            tensors += [None] * (9 - len(tensors)) + [_leaf(torch.rand(combined[0].shape[-1]))]
            yield f"boundary-{name}-norm", tuple(tensors), scalars | {"input_norm_eps": 1e-3}
    for name, combined, parameters, scalars in _boundaries():
        h_pre = torch.rand(combined[2].shape, dtype=combined[2].dtype)
        tensors = [None if value is None else _leaf(value) for value in (*combined, h_pre, *parameters)]
        yield f"shifted_boundary-{name}", tuple(tensors), scalars | {"streams_dtype": combined[3].dtype}


def _boundaries() -> Iterator[tuple[str, list[torch.Tensor | None], list[torch.Tensor], dict[str, Any]]]:
    """What a boundary combines, the parameters of the mix after it, and that one's form."""
    for name, (x, *parameters), scalars in _mix_samples(requires_grad=False):
        n, width, tokens = x.shape[-2], x.shape[-1], tuple(x.shape[:-2])
        f, layer_bias, h_post, _, h_res = combine_arguments(n, width, tokens, dtype=x.dtype)
        yield name, [f, layer_bias, h_post, x, h_res], parameters, scalars
        yield f"{name}-unmixed", [f, None, h_post, x, None], parameters, scalars | {"out_dtype": torch.float32}


def _backward_samples() -> Iterator[Sample]:
    for name, (x, phi, scale, bias, *rest), scalars in _mix_samples(requires_grad=False):
        norm_weight = rest[0] if rest else None
        n = x.shape[-2]
        narrow = {key: value for key, value in scalars.items() if not key.startswith("sinkhorn_")}
        steps = {k.removeprefix("sinkhorn_"): v for k, v in scalars.items() if k.startswith("sinkhorn_")}
        h_pre, h_post, h_res, h, ms = torch.ops.mhc.generate_mix(x, phi, scale, bias, norm_weight, **scalars)
        has_norm = norm_weight is not None
        saved = (x, phi, scale, bias, norm_weight, h, ms)
        d_row = torch.rand_like(x[..., 0, :])
        yield f"projection_backward-{name}", (h, ms, x, phi, norm_weight, [True, True, has_norm]), {}
        yield f"projection_backward-{name}-h only", (h, None, x, phi, norm_weight, [True, False, False]), {}
        yield (
            f"scale_backward-{name}",
            (h_pre, h_post, h_res, h, ms, scale, bias, n, [True, True, True, False]),
            narrow,
        )
        logits = torch.rand(*x.shape[:-1], n, dtype=x.dtype)
        yield f"sinkhorn_backward-{name}", (logits.clone(), logits), steps
        yield f"aggregate_backward-{name}", (d_row, x, h_pre, [True, True]), {}
        mixed = (torch.rand_like(x), x, torch.rand(*x.shape[:-1], n), [True, True])
        yield f"mix_streams_backward-{name}", mixed, {}
        yield f"contract_backward-{name}", (d_row, n), {}
        yield f"expand_backward-{name}", (x,), {}
        yield (
            f"generate_mix_backward-{name}",
            (h_pre, None, h_res, h, None, *saved, [True, True, True, True, has_norm]),
            scalars,
        )
        yield (
            f"generate_mix_and_aggregate_backward-{name}",
            (d_row, h_post, h_res, None, ms, *saved, [True, False, True, True, has_norm]),
            scalars,
        )
        yield (
            f"generate_mix_and_aggregate_backward-{name}-norm",
            (
                d_row,
                h_post,
                None,
                h,
                None,
                *saved,
                [True, True, True, False, has_norm, True],
                x.clone(),
                torch.rand(x.shape[-1]),
            ),
            scalars | {"input_norm_eps": 1e-3},
        )
        if phi.shape[0] == n:
            yield f"head_backward-{name}", (d_row, h, ms, *saved, [True, True, True, True, has_norm]), narrow
        for operator, (arguments, kept) in {
            "projection_backward": ((h, ms, x, phi, norm_weight, [True, True, has_norm]), {}),
            "aggregate_backward": ((d_row, x, h_pre, [True, True]), {}),
            "mix_streams_backward": (mixed, {}),
            "generate_mix_backward": (
                (h_pre, None, h_res, h, None, *saved, [True, True, True, True, has_norm]),
                scalars,
            ),
            "generate_mix_and_aggregate_backward": (
                (d_row, h_post, h_res, None, ms, *saved, [True, False, True, True, has_norm]),
                scalars,
            ),
        }.items():
            yield f"{operator}-{name}-accumulating", (*arguments, x.clone()), kept
        if phi.shape[0] == n:
            arguments = (d_row, h, ms, *saved, [True, True, True, True, has_norm], x.clone())
            yield f"head_backward-{name}-accumulating", arguments, narrow
    for name, (f, layer_bias, h_post, x, h_res), parameters, scalars in _boundaries():
        assert x is not None
        norm_weight = parameters[3] if len(parameters) > 3 else None
        kept = {key: value for key, value in scalars.items() if key != "out_dtype"}
        outputs = torch.ops.mhc.boundary(f, layer_bias, h_post, x, h_res, *parameters, **kept)
        x_new, layer_input, next_post, next_res, h, ms = outputs
        tensors = (f, layer_bias, h_post, x, h_res, *parameters[:3], norm_weight, x_new, h, ms)
        needs = [value is not None for value in tensors[:9]]
        yield (
            f"boundary_backward-{name}",
            (x_new.clone(), layer_input, next_post, next_res, h, ms, *tensors, needs),
            kept,
        )
        yield (
            f"boundary_backward-{name}-norm",
            (x_new.clone(), layer_input, None, next_res, h, None, *tensors, [*needs, True], torch.rand(x.shape[-1])),
            kept | {"input_norm_eps": 1e-3},
        )
        only_x = [index == 3 for index in range(9)]
        yield f"boundary_backward-{name}-x", (None, layer_input, None, None, None, None, *tensors, only_x), kept
        h_pre = torch.rand_like(h_post)
        tensors = (f, layer_bias, h_post, x, h_res, h_pre, *parameters[:3], norm_weight, x_new, h, ms)
        gates = (h_pre.clone(), next_post, next_res)
        needs = [value is not None for value in tensors[:10]]
        grads = (x_new.clone(), layer_input, *gates, h, ms)
        yield f"shifted_boundary_backward-{name}", (*grads, *tensors, needs), kept
        only_x = [index == 3 for index in range(10)]
        yield f"shifted_boundary_backward-{name}-x", (None, layer_input, *[None] * 5, *tensors, only_x), kept
        narrow = [index >= 5 and needs[index] for index in range(10)]
        yield f"shifted_boundary_backward-{name}-narrow", (None, None, *gates, None, ms, *tensors, narrow), kept
    for n, tokens, dtype in ((4, (2, 3), torch.bfloat16), (1, (), torch.float32), (2, (0, 2), torch.float64)):
        f, layer_bias, h_post, x, h_res = combine_arguments(n, 6, tokens, dtype=dtype)
        accumulating = (x, f, layer_bias, h_post, x.clone(), h_res, [True] * 5, x.clone())
        yield f"expand_combine_backward-{n}-accumulating", accumulating, {}
        yield f"expand_combine_backward-{n}", (x, f, layer_bias, h_post, x.clone(), h_res, [True] * 5), {}
        needs = [False, False, True, True, False]
        yield f"expand_combine_backward-{n}-unmixed", (x, f, None, h_post, x.clone(), None, needs), {}


_SAMPLES = [*_forward_samples(), *_backward_samples()]


@pytest.mark.parametrize("sample", _SAMPLES, ids=[name for name, _, _ in _SAMPLES])
def test_opcheck(sample: Sample) -> None:
    name, arguments, scalars = sample
    opcheck(getattr(torch.ops.mhc, name.split("-")[0]).default, arguments, scalars)


def _on_cuda(value: Any) -> Any:
    return value.detach().cuda().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


@pytest.mark.gpu
@pytest.mark.parametrize("sample", _SAMPLES, ids=[name for name, _, _ in _SAMPLES])
def test_opcheck_on_cuda(sample: Sample) -> None:
    """With the kernels where there are some, which leave the dtype and strides that the fake promises."""
    name, arguments, scalars = sample
    op = getattr(torch.ops.mhc, name.split("-")[0]).default
    opcheck(op, tuple(_on_cuda(value) for value in arguments), scalars)


@pytest.mark.gpu
@pytest.mark.parametrize("sample", _SAMPLES, ids=[name for name, _, _ in _SAMPLES])
def test_cuda_equals_cpu(sample: Sample) -> None:
    name, arguments, scalars = sample
    if name.startswith("_"):
        pytest.skip("partial sums are as many as the device has room for; tests/kernels compares what they add up to")
    op = getattr(torch.ops.mhc, name.split("-")[0]).default
    with torch.no_grad():
        expected = op(*arguments, **scalars)
        results = op(*(_on_cuda(value) for value in arguments), **scalars)
    expected, results = ([v] if isinstance(v, torch.Tensor) else v for v in (expected, results))
    for mine, true in zip(results, expected, strict=True):
        # Both accumulate few terms of order 1 in float32, then round to the dtype: an ulp of it may differ.
        tolerance = {"rtol": 2 * torch.finfo(true.dtype).eps, "atol": max(2e-5, torch.finfo(true.dtype).eps)}
        if "boundary_backward" in name:
            # The gradient of x', of order 10, is rounded to the streams' dtype on the way: what is summed over it
            # differs by an ulp of that where the two round to different sides.
            streams = op._schema.arguments.index(next(a for a in op._schema.arguments if a.name == "x"))
            tolerance["atol"] = max(2e-5, 10 * torch.finfo(arguments[streams].dtype).eps)
        if "_backward-" in name and name.endswith("-norm"):
            # So is the gradient of what the norm reads, which 1 / sqrt(eps) of the norm makes 30 times as large.
            tolerance["atol"] = max(2e-5, 30 * torch.finfo(arguments[0].dtype).eps)
        torch.testing.assert_close(mine.cpu(), true, **tolerance)


def test_every_operator_is_sampled() -> None:
    registered = {
        name.removeprefix("mhc::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("mhc::")
    }
    # These two compute nothing themselves: the tests of kernels and of loops call them.
    assert {name.split("-")[0] for name, _, _ in _SAMPLES} == registered - {"_launch", "_loop"}
