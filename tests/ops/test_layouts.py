"""Strides: x' and the gradients of x and f lie as their argument, all else contiguously, in every implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import mhc_compile.ops as ops
from tests.ops.eager import combine_arguments, mix_arguments

Call = Callable[[dict[str, Tensor]], Any]
MHC = torch.ops.mhc


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


# Of streams x [b, s, n, C]; the tokens of the last two do not collapse into one dimension.
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
# Of f [b, s, C].
ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "tokens swapped": _permuted(1, 0, 2),
    "columns first": _permuted(0, 2, 1),
    "sliced": _wider,
}
SIZES = [((2, 3), 4, 7), ((2, 3), 1, 5), ((1, 1), 3, 1), ((0, 3), 2, 5), ((3, 1), 16, 2)]


def arguments(tokens: tuple[int, int], n: int, width: int, device: str) -> dict[str, Tensor]:
    x, phi, scale, bias = mix_arguments(n, width, tokens, dtype=torch.float32)
    f, layer_bias, h_post, _, h_res = combine_arguments(n, width, tokens, dtype=torch.float32)
    made = {"x": x, "f": f, "phi": phi, "scale": scale, "bias": bias, "layer_bias": layer_bias}
    made |= {"h_post": h_post, "h_res": h_res, "head_phi": phi[:n], "head_bias": bias[:n]}
    made |= {"d_x": torch.randn_like(x), "d_f": torch.randn_like(f), "d_h_res": torch.rand_like(h_res)}
    made["h"], made["ms"] = ops.projection(x, phi)
    made["head_h"] = made["h"][..., :n].contiguous()
    return {name: value.to(device) for name, value in made.items()}


def _mix(a: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return a["x"], a["phi"], a["scale"], a["bias"], None


# Every operator that takes streams, and which of its results lie as which argument.
CALLS: dict[str, tuple[Call, dict[int, str]]] = {
    "expand_combine": (
        lambda a: MHC.expand_combine(a["f"], a["layer_bias"], a["h_post"], a["x"], a["h_res"]),
        {0: "x"},
    ),
    "expand_combine, out_dtype": (
        lambda a: MHC.expand_combine(a["f"], None, a["h_post"], a["x"], None, out_dtype=torch.bfloat16),
        {0: "x"},
    ),
    "expand_combine_backward": (
        lambda a: MHC.expand_combine_backward(
            a["d_x"], a["f"], a["layer_bias"], a["h_post"], a["x"], a["h_res"], [True] * 5
        ),
        {0: "f", 3: "x"},
    ),
    "aggregate": (lambda a: MHC.aggregate(a["x"], a["h_post"]), {}),
    "aggregate_backward": (lambda a: MHC.aggregate_backward(a["d_f"], a["x"], a["h_post"], [True] * 2), {0: "x"}),
    "mix_streams": (lambda a: MHC.mix_streams(a["x"], a["h_res"]), {}),
    "mix_streams_backward": (
        lambda a: MHC.mix_streams_backward(a["d_x"], a["x"], a["h_res"], [True] * 2),
        {0: "x"},
    ),
    "projection": (lambda a: MHC.projection(a["x"], a["phi"]), {}),
    "projection_backward": (
        lambda a: MHC.projection_backward(a["h"], a["ms"], a["x"], a["phi"], None, [True, True, False]),
        {0: "x"},
    ),
    "generate_mix": (lambda a: MHC.generate_mix(*_mix(a)), {}),
    "generate_mix_backward": (
        lambda a: MHC.generate_mix_backward(
            a["h_post"], a["h_post"], a["d_h_res"], None, None, *_mix(a), a["h"], a["ms"], [True] * 4 + [False]
        ),
        {0: "x"},
    ),
    "generate_mix_and_aggregate": (lambda a: MHC.generate_mix_and_aggregate(*_mix(a)), {}),
    "generate_mix_and_aggregate_backward": (
        lambda a: MHC.generate_mix_and_aggregate_backward(
            a["d_f"], a["h_post"], a["d_h_res"], None, None, *_mix(a), a["h"], a["ms"], [True] * 4 + [False]
        ),
        {0: "x"},
    ),
    "head": (lambda a: MHC.head(a["x"], a["head_phi"], a["scale"][:1], a["head_bias"]), {}),
    "head_backward": (
        lambda a: MHC.head_backward(
            a["d_f"], None, None, a["x"], a["head_phi"], a["scale"][:1], a["head_bias"], None, a["head_h"], a["ms"],
            [True] * 4 + [False],
        ),
        {0: "x"},
    ),
    "contract": (lambda a: MHC.contract(a["x"]), {}),
    "contract_backward": (lambda a: MHC.contract_backward(a["d_f"], a["x"].shape[-2]), {}),
    "expand": (lambda a: MHC.expand(a["f"], a["x"].shape[-2]), {}),
    "expand_backward": (lambda a: MHC.expand_backward(a["d_x"]), {}),
}  # fmt: skip


def _strides(value: Tensor) -> tuple[int, ...] | None:
    """The strides that matter: none of an empty tensor, none along a dimension of size 1."""
    if value.numel() == 0:
        return None
    return tuple(stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1)


def _results(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def check(call: Call, like: dict[int, str], plain: dict[str, Tensor], given: dict[str, Tensor]) -> None:
    expected, found = _results(call(plain)), _results(call(given))
    with FakeTensorMode() as mode:
        fake = _results(call({name: mode.from_tensor(value) for name, value in given.items()}))
    meta = _results(call({name: value.to("meta") for name, value in given.items()}))
    for index, (true, mine) in enumerate(zip(expected, found, strict=True)):
        source = given[like[index]] if index in like else torch.empty(mine.shape)
        for result in (mine, fake[index], meta[index]):
            assert result.shape == true.shape
            assert result.dtype == true.dtype
            assert _strides(result) == _strides(torch.empty_like(source)), index
        # BLAS and reductions order their sums by layout: float32, sums of up to 32 terms of order 1; bfloat16 once.
        tolerance = 1e-5 if mine.dtype == torch.float32 else 2.0**-8
        torch.testing.assert_close(mine, true, rtol=tolerance, atol=tolerance)


def _lay_out(plain: dict[str, Tensor], streams: str, rows: str) -> dict[str, Tensor]:
    moved = {name: STREAMS[streams](plain[name]) for name in ("x", "d_x")}
    return plain | moved | {name: ROWS[rows](plain[name]) for name in ("f", "d_f")}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_results_lie_as_their_arguments(name: str, size: tuple[tuple[int, int], int, int]) -> None:
    plain = arguments(*size, "cpu")
    for streams in STREAMS:
        check(*CALLS[name], plain, _lay_out(plain, streams, "contiguous"))
    for rows in ROWS:
        check(*CALLS[name], plain, _lay_out(plain, "contiguous", rows))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [SIZES[0], ((3, 40), 4, 128)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_results_lie_as_their_arguments_on_cuda(name: str, size: tuple[tuple[int, int], int, int]) -> None:
    plain = arguments(*size, "cuda")
    for streams in STREAMS:
        check(*CALLS[name], plain, _lay_out(plain, streams, "contiguous"))
    for rows in ROWS:
        check(*CALLS[name], plain, _lay_out(plain, "contiguous", rows))


def test_expanded_streams_get_dense_results() -> None:
    """All streams in one memory: what is written for them cannot be."""
    plain = arguments((2, 3), 4, 7, "cpu")
    plain["x"] = plain["f"].unsqueeze(-2).expand(-1, -1, 4, -1).contiguous()
    given = plain | {"x": plain["f"].unsqueeze(-2).expand(-1, -1, 4, -1)}
    for call, like in CALLS.values():
        check(call, like, plain, given)


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
