"""Strides: x' and the gradients of x and f lie as their argument, all else contiguously, in every implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import mhc_compile.ops as ops
from tests.ops.calls import (
    OPERATORS,
    RARE,
    Given,
    Sizes,
    arguments,
    call,
    result_names,
    results,
    scalars_of,
    tensor_names,
)
from tests.ops.eager import combine_arguments


def _wider(t: Tensor) -> Tensor:
    """t [..., n, C] between elements that are not its own, so that it is not dense."""
    n, width = t.shape[-2:]
    wide = t.new_full((*t.shape[:-2], n + 1, 2 * width + 1), torch.nan)
    wide[..., 1:, 1::2] = t
    return wide[..., 1:, 1::2]


def _permuted(*order: int) -> Callable[[Tensor], Tensor]:
    """The same tensor, stored in this order of its dimensions."""
    inverse = [order.index(d) for d in range(len(order))]
    return lambda t: t.permute(order).contiguous().permute(inverse)


# Layouts of streams x [b, s, n, C]; the tokens of the last two do not collapse into one dimension.
STREAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "channels first": _permuted(0, 1, 3, 2),
    "tokens swapped": _permuted(1, 0, 2, 3),
    "TransformerEngine": _permuted(1, 0, 3, 2),
    "streams first": _permuted(2, 0, 1, 3),
    "last first": _permuted(3, 2, 1, 0),
    "sliced": _wider,
    "sliced and channels first": lambda t: _wider(t.mT).mT,
    "streams in the batch": _permuted(0, 2, 1, 3),
}
# Layouts of f [b, s, C] and of gates.
ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "tokens swapped": _permuted(1, 0, 2),
    "columns first": _permuted(0, 2, 1),
    "sliced": _wider,
}
# Layouts of every tensor, by its number of dimensions.
LAYOUTS: dict[int, list[Callable[[Tensor], Tensor]]] = {
    4: [*STREAMS.values()],
    3: [*ROWS.values()],
    2: [lambda t: t.contiguous(), _permuted(1, 0), _wider],
    1: [lambda t: t.contiguous(), lambda t: torch.stack([t, t * torch.nan], -1)[..., 0]],
}
SIZES = [
    Sizes(4, 7, (2, 3)), Sizes(1, 5, (2, 3)), Sizes(3, 1, (1, 1)), Sizes(2, 5, (0, 3)), Sizes(16, 2, (3, 1))
]  # fmt: skip
OUT_DTYPES = {"out_dtype": torch.bfloat16, "streams_dtype": torch.bfloat16}


def _strides(value: Tensor) -> tuple[int, ...] | None:
    """The strides that matter: none of an empty tensor, none along a dimension of size 1."""
    if value.numel() == 0:
        return None
    return tuple(stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1)


def _expected_strides(name: str, result: Tensor, given: Given) -> tuple[int, ...] | None:
    """x' and the gradients of x and f lie as `torch.empty_like` of that argument, all else contiguously."""
    lies_as = given.get({"x_new": "x", "d_x": "x", "d_f": "f"}.get(name, ""))
    return _strides(torch.empty(result.shape) if lies_as is None else torch.empty_like(lies_as))


def _mapped(given: Given, function: Callable[[Tensor], Tensor]) -> Given:
    return {name: function(value) if isinstance(value, Tensor) else value for name, value in given.items()}


def check(operator: str, plain: Given, given: Given, scalars: dict[str, Any] | None = None) -> None:
    expected, found = (results(call(operator, each, scalars)) for each in (plain, given))
    with FakeTensorMode() as mode:
        fake = results(call(operator, _mapped(given, mode.from_tensor), scalars))
    meta = results(call(operator, _mapped(given, lambda t: t.to("meta")), scalars))
    for index, name in enumerate(result_names(operator)):
        true, mine = expected[index], found[index]
        for result in (mine, fake[index], meta[index]):
            assert result.shape == true.shape
            assert result.dtype == true.dtype
            assert _strides(result) == _expected_strides(name, true, given), name
        # BLAS and reductions order their sums by layout, and bfloat16 rounds once. Where the terms of a sum cancel, its
        # rounding is that of the terms, which are no larger than the largest results.
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.0**-8}[mine.dtype]
        largest = max(1.0, true.abs().max().item()) if true.numel() else 1.0
        torch.testing.assert_close(mine, true, rtol=tolerance, atol=tolerance * largest)


def check_all(operator: str, sizes: Sizes, dtype: torch.dtype | None, device: str = "cpu") -> None:
    """Every layout of the streams with every layout of the rest. Then, in dtype, every argument in one of its own."""
    for without, own in ((RARE, torch.float32), (frozenset[str](), dtype)):
        if own is None:
            continue
        plain = arguments(operator, sizes, own, without=without, device=device)
        names = [name for name, value in plain.items() if isinstance(value, Tensor)]
        for number in range(len(STREAMS)):
            given = dict(plain)
            for place, name in enumerate(names):
                value = plain[name]
                shift = 0 if without and value.dim() == 4 else place
                layouts = LAYOUTS[value.dim()]
                given[name] = layouts[(number + shift) % len(layouts)](value)
            check(operator, plain, given)


@pytest.mark.parametrize("operator", OPERATORS)
def test_results_lie_as_their_arguments(operator: str) -> None:
    for sizes in SIZES:
        check_all(operator, sizes, torch.float64 if sizes is SIZES[0] else None)


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
def test_results_lie_as_their_arguments_on_cuda(operator: str) -> None:
    for sizes in (SIZES[0], Sizes(4, 128, (3, 40))):
        check_all(operator, sizes, torch.float32, "cuda")


@pytest.mark.parametrize("operator", [operator for operator in OPERATORS if "x" in tensor_names(operator)])
def test_results_of_another_dtype_and_of_expanded_streams(operator: str) -> None:
    plain = arguments(operator, SIZES[0], torch.float32)
    if taken := scalars_of(operator, OUT_DTYPES):
        for layout in STREAMS.values():
            check(operator, plain, plain | {"x": layout(plain["x"])}, taken)
    # All streams in one memory: what is written for them cannot be.
    expanded = plain["x"][..., :1, :].expand_as(plain["x"])
    check(operator, plain | {"x": expanded.contiguous()}, plain | {"x": expanded})


@pytest.mark.parametrize("dynamic", [False, True])
def test_strides_are_known_when_compiling(dynamic: bool) -> None:
    """TransformerEngine's streams through AOTAutograd, whose code asserts the strides that it was promised."""

    def sublayer(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return ops.expand_combine(f, None, h_post, x.mT, h_res).mT.view(*x.shape[:2], -1)

    compiled = torch.compile(sublayer, backend="aot_eager", dynamic=dynamic, fullgraph=True)
    for tokens in ((2, 3), (5, 4)):
        f, _, h_post, x, h_res = combine_arguments(4, 6, tokens, dtype=torch.float32)
        leaves = [t.requires_grad_() for t in (x.mT.contiguous(), f, h_post, h_res)]
        expected, result = sublayer(*leaves), compiled(*leaves)
        assert torch.equal(expected, result)
        assert result.is_contiguous()
        upstream = torch.randn_like(result)
        pairs = zip(
            torch.autograd.grad(expected, leaves, upstream), torch.autograd.grad(result, leaves, upstream), strict=True
        )
        for true, mine in pairs:
            assert torch.equal(true, mine)
            assert true.stride() == mine.stride()
