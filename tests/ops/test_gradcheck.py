"""float64 gradcheck of every operator in every form; h and ms are outputs like the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from mhc_compile.forms import SINKHORN_STARTS
from tests.ops.calls import FORWARD, RARE, Given, Sizes, arguments, call, tensor_names
from tests.ops.eager import FORMS, combine_arguments, mix_arguments

# Few half-steps: each repeats the same two, and converged ones have gradients too small to check.
SINKHORNS = {
    "additive": {},
    "additive, rows first": {"first": "rows"},
    "additive, from exp": {"start": "exp", "eps": 1e-2, "start_eps": 1e-2},
    "clamped": {"start": "exp", "first": "rows", "clamp": True, "start_eps": 0.0},
    # Sums of 4 entries that are at most 1 lie on both sides of this clamp.
    "clamp in reach": {"start": "exp", "first": "columns", "clamp": True, "eps": 1.5, "start_eps": 0.0},
    **{f"from {start}": {"start": start, "first": "rows", "eps": 0.3, "start_eps": 0.2} for start in SINKHORN_STARTS},
    **{
        f"from {start}, clamped": {"start": start, "clamp": True, "eps": 0.9, "start_eps": 0.0}
        for start in SINKHORN_STARTS
    },
    "log, from plain exp": {"start": "plain_exp", "eps": 0.0, "start_eps": 0.0},
    "log, from exp shifted by the whole matrix": {"start": "global_exp", "eps": 0.0, "start_eps": 0.0},
    "log, from softmax": {"eps": 0.0, "start_eps": 0.0},
    "log, from exp": {"start": "exp", "first": "rows", "eps": 0.0, "start_eps": 0.0},
}


def _leaves(values: list[Tensor]) -> list[Tensor]:
    return [value.requires_grad_() for value in values]


@pytest.mark.parametrize("name", FORWARD)
def test_every_operator(name: str) -> None:
    for sizes, without in (
        (Sizes(2, 3, (2,)), ()),
        (Sizes(3, 2, (2, 2), m=1), RARE),
        (Sizes(1, 3, (2,), m=3), ()),
        (Sizes(2, 3, (2,), parts=2, more=3), ()),
    ):
        given = arguments(name, sizes, without=without)
        names = [argument for argument in tensor_names(name) if given[argument] is not None]

        def function(*tensors: Tensor, given: Given = given, names: list[str] = names) -> Any:
            return call(name, given | dict(zip(names, tensors, strict=True)), {"sinkhorn_steps": 3})

        # Random projections of the Jacobian where its entries are too many to take one by one.
        assert gradcheck(function, _leaves([given[argument] for argument in names]), fast_mode=len(names) > 3)


@pytest.mark.parametrize("steps", [0, 1, 4, 5])
@pytest.mark.parametrize("form", SINKHORNS.values(), ids=SINKHORNS)
def test_sinkhorn(form: dict[str, Any], steps: int) -> None:
    for n in (1, 3):
        logits = torch.randn(2, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        assert gradcheck(lambda value: torch.ops.mhc.sinkhorn(value, steps=steps, **form), _leaves([logits]))


@pytest.mark.parametrize("mode", ["inside", "outside", "clamp", "clamp in reach", "none"])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_scale(parts: int, per_row: bool, mode: str) -> None:
    for n in (1, 2):
        x, phi, scale, bias = mix_arguments(n, 5, (4,), parts=parts, per_row=per_row)
        h, ms = torch.ops.mhc.projection(x, phi)
        eps = float(ms.sqrt().median()) + 1e-3 if mode == "clamp in reach" else 1e-2
        scalars = {
            "rms_eps": eps,
            "rms_mode": mode.split()[0],
            "pre_eps": 0.1,
            "post_mult": 1.5,
            "post_eps": 0.2,
        }
        leaves = _leaves([h, ms, scale, bias])
        assert gradcheck(lambda *a, n=n, scalars=scalars: torch.ops.mhc.scale(*a, n, **scalars), leaves)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("name", FORMS)
def test_generate_mix_and_aggregate(name: str, n: int) -> None:
    form = FORMS[name]
    scalars = form.scalars | {"sinkhorn_steps": 5}
    leaves = _leaves(mix_arguments(n, 3, (3,), per_row=form.scale_per_row))
    for op in (torch.ops.mhc.generate_mix_and_aggregate, torch.ops.mhc.generate_mix):
        # Random projections of the Jacobian for n = 4, whose entries are too many to take one by one.
        assert gradcheck(lambda *a, op=op: op(*a, **scalars), leaves, fast_mode=n == 4)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_generate_mix_and_aggregate_parts(parts: int, per_row: bool) -> None:
    leaves = _leaves([*mix_arguments(2, 3, (2,), parts=parts, per_row=per_row), torch.rand(6, dtype=torch.float64)])
    assert gradcheck(lambda *a: torch.ops.mhc.generate_mix_and_aggregate(*a, sinkhorn_steps=3), leaves)
    assert gradcheck(lambda *a: torch.ops.mhc.generate_mix(*a, sinkhorn_steps=3), leaves)
    if parts == 1:
        assert gradcheck(lambda *a: torch.ops.mhc.head(*a, pre_eps=0.1, rms_mode="outside"), leaves)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_expand_combine_with_parts_left_out(n: int) -> None:
    f, layer_bias, h_post, x, h_res = _leaves(combine_arguments(n, 2, (2,)))
    op = torch.ops.mhc.expand_combine
    assert gradcheck(op, (f, None, h_post, x, h_res))
    assert gradcheck(op, (f, layer_bias, h_post, x, None))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("name", FORMS)
def test_boundary(name: str, n: int) -> None:
    form = FORMS[name]
    f, layer_bias, h_post, x, h_res = combine_arguments(n, 3, (2,))
    _, *parameters = mix_arguments(n, 3, (2,), per_row=form.scale_per_row)
    leaves = _leaves([f, layer_bias, h_post, x, h_res, *parameters, torch.rand(n * 3, dtype=torch.float64)])
    scalars = form.scalars | {"sinkhorn_steps": 3}
    # Random projections of the Jacobian, whose entries are too many to take one by one.
    assert gradcheck(lambda *a: torch.ops.mhc.boundary(*a, **scalars), leaves, fast_mode=True)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("name", FORMS)
def test_shifted_boundary(name: str, n: int) -> None:
    form = FORMS[name]
    _, *parameters = mix_arguments(n, 3, (2,), per_row=form.scale_per_row)
    h_pre, norm_weight = torch.rand(2, n, dtype=torch.float64), torch.rand(n * 3, dtype=torch.float64)
    leaves = _leaves([*combine_arguments(n, 3, (2,)), h_pre, *parameters, norm_weight])
    scalars = form.scalars | {"sinkhorn_steps": 3}
    # Random projections of the Jacobian, as above.
    assert gradcheck(lambda *a: torch.ops.mhc.shifted_boundary(*a, **scalars), leaves, fast_mode=True)


@pytest.mark.parametrize("res", [True, False])
@pytest.mark.parametrize("reads", ["gates", "projection", "both", "each alone", "gates and each alone"])
def test_expand_combine_and_read(reads: str, res: bool) -> None:
    f, layer_bias, h_post, x, h_res = combine_arguments(2, 3, (2,))
    columns = 3 if "alone" in reads else 6
    shapes = (2, 2), (5, columns), (columns,)
    h_pre, phi, norm_weight = (torch.rand(*shape, dtype=torch.float64) for shape in shapes)
    given = {"layer_bias": layer_bias} | ({"h_res": h_res} if res else {})
    given |= {"h_pre": h_pre} if reads not in ("projection", "each alone") else {}
    given |= {"phi": phi, "norm_weight": norm_weight} if reads != "gates" else {}
    names = ("f", "h_post", "x", *given)

    def call(*values: Tensor) -> Any:
        missing = {"layer_bias": None, "h_res": None}
        return torch.ops.mhc.expand_combine_and_read(**missing | dict(zip(names, values, strict=True)))

    assert gradcheck(call, _leaves([f, h_post, x, *given.values()]))


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_shifted_boundary_with_parts_left_out(parts: int) -> None:
    f, _, h_post, x, _ = combine_arguments(2, 3, (2,))
    _, *parameters = mix_arguments(2, 3, (2,), parts=parts)
    leaves = _leaves([f, h_post, x, torch.rand(2, 2, dtype=torch.float64), *parameters])

    def call(f: Tensor, h_post: Tensor, x: Tensor, *rest: Tensor) -> Any:
        return torch.ops.mhc.shifted_boundary(f, None, h_post, x, None, *rest, sinkhorn_steps=3)

    assert gradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_boundary_with_parts_left_out(parts: int) -> None:
    f, _, h_post, x, _ = combine_arguments(2, 3, (2,))
    _, *parameters = mix_arguments(2, 3, (2,), parts=parts)
    leaves = _leaves([f, h_post, x, *parameters])

    def call(f: Tensor, h_post: Tensor, x: Tensor, *parameters: Tensor) -> Any:
        return torch.ops.mhc.boundary(f, None, h_post, x, None, *parameters, sinkhorn_steps=3)

    assert gradcheck(call, leaves, fast_mode=True)
