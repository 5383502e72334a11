"""The same bits from run to run, and for a token whatever comes with it, on CPU and CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mhc_compile import ops
from tests.ops.eager import combine_arguments, mix_arguments

M = 75
# A single token at either end and within, pieces of odd and of even length, with and without the first token.
SLICES = [
    slice(0, 1), slice(1, 2), slice(M - 1, M), slice(2, 4), slice(3, 10), slice(5, 22), slice(0, 64), slice(7, M)
]  # fmt: skip
LOG = {"eps": 0.0, "start_eps": 0.0, "start": "exp", "first": "rows", "steps": 40}

Call = Callable[..., Any]


def tensors(n: int, width: int, dtype: torch.dtype, device: str, tokens: int = M) -> dict[str, Tensor]:
    """All arguments for the tokens, and gradients for all results; what begins with p is no token's."""
    x, phi, scale, bias = mix_arguments(n, width, (tokens,))
    f, layer_bias, h_post, _, h_res = combine_arguments(n, width, (tokens,))
    logits = 3 * torch.randn(tokens, n, n, dtype=torch.float64)
    d_x, d_f = torch.randn_like(x), torch.randn_like(f)
    streams = {"x": x, "f": f, "d_x": d_x, "d_f": d_f}
    narrow = {
        "h_post": h_post,
        "h_res": h_res,
        "logits": logits,
        "d_h_res": torch.randn_like(h_res),
        "p_phi": phi,
        "p_scale": scale,
        "p_bias": bias,
        "p_layer_bias": layer_bias,
    }
    made = {name: value.to(device, dtype) for name, value in streams.items()}
    made |= {name: value.to(device, torch.float32) for name, value in narrow.items()}
    made["h"], made["ms"] = ops.projection(made["x"], made["p_phi"])
    made["p_head_phi"], made["p_head_bias"] = made["p_phi"][:n], made["p_bias"][:n]
    made["head_h"] = made["h"][:, :n].contiguous()
    return made


def narrow_calls(t: dict[str, Tensor], n: int) -> dict[str, Call]:
    """The operators without the wide product; each takes the tensors of some of the tokens."""
    mhc = torch.ops.mhc
    combine_needs, p = [True, False, True, True, True], t
    return {
        "scale": lambda t: ops.scale(t["h"], t["ms"], p["p_scale"], p["p_bias"], n),
        "sinkhorn": lambda t: ops.sinkhorn(t["logits"]),
        "sinkhorn, log": lambda t: ops.sinkhorn(t["logits"], **LOG),
        "aggregate": lambda t: ops.aggregate(t["x"], t["h_post"]),
        "mix_streams": lambda t: ops.mix_streams(t["x"], t["h_res"]),
        "mix_streams, one row": lambda t: ops.mix_streams(t["x"], t["h_res"][..., :1]),
        "expand": lambda t: ops.expand(t["f"], n),
        "contract": lambda t: ops.contract(t["x"]),
        "expand_combine": lambda t: ops.expand_combine(t["f"], p["p_layer_bias"], t["h_post"], t["x"], t["h_res"]),
        "scale_backward": lambda t: mhc.scale_backward(
            t["h_post"],
            t["h_post"],
            t["d_h_res"],
            t["h"],
            t["ms"],
            p["p_scale"],
            p["p_bias"],
            n,
            [True, True, False, False],
        ),
        "sinkhorn_backward": lambda t: mhc.sinkhorn_backward(t["d_h_res"], t["logits"]),
        "sinkhorn_backward, log": lambda t: mhc.sinkhorn_backward(t["d_h_res"], t["logits"], **LOG),
        "aggregate_backward": lambda t: mhc.aggregate_backward(t["d_f"], t["x"], t["h_post"], [True, True]),
        "mix_streams_backward": lambda t: mhc.mix_streams_backward(t["d_x"], t["x"], t["h_res"], [True, True]),
        "expand_backward": lambda t: mhc.expand_backward(t["d_x"]),
        "contract_backward": lambda t: mhc.contract_backward(t["d_f"], n),
        "expand_combine_backward": lambda t: mhc.expand_combine_backward(
            t["d_x"], t["f"], None, t["h_post"], t["x"], t["h_res"], combine_needs
        ),
    }


def wide_calls(t: dict[str, Tensor], n: int) -> dict[str, Call]:
    """The operators with the wide product; gradients of x only, those of parameters being sums over tokens."""
    mhc, p = torch.ops.mhc, t
    parameters = (p["p_phi"], p["p_scale"], p["p_bias"])
    head = (p["p_head_phi"], p["p_scale"][:1], p["p_head_bias"])
    only_x = [True, False, False, False, False]
    combined = ("f", "p_layer_bias", "h_post", "x", "h_res")
    tokens_only = [True, False, True, True, True] + [False] * 4
    return {
        "projection": lambda t: ops.projection(t["x"], p["p_phi"]),
        "generate_mix": lambda t: ops.generate_mix(t["x"], *parameters),
        "generate_mix_and_aggregate": lambda t: ops.generate_mix_and_aggregate(
            t["x"], *parameters, **_log("sinkhorn_")
        ),
        "head": lambda t: ops.head(t["x"], *head),
        "projection_backward": lambda t: mhc.projection_backward(
            t["h"], t["ms"], t["x"], p["p_phi"], None, [True, False, False]
        ),
        "generate_mix_backward": lambda t: mhc.generate_mix_backward(
            t["h_post"], t["h_post"], t["d_h_res"], None, None, t["x"], *parameters, None, t["h"], t["ms"], only_x
        ),
        "generate_mix_and_aggregate_backward": lambda t: mhc.generate_mix_and_aggregate_backward(
            t["d_f"], t["h_post"], t["d_h_res"], None, None, t["x"], *parameters, None, t["h"], t["ms"], only_x
        ),
        "head_backward": lambda t: mhc.head_backward(
            t["d_f"], None, None, t["x"], *head, None, t["head_h"], t["ms"], only_x
        ),
        "projection_backward, accumulating": lambda t: mhc.projection_backward(
            t["h"], t["ms"], t["x"], p["p_phi"], None, [True, False, False], t["d_x"]
        ),
        "boundary": lambda t: ops.boundary(*(t[name] for name in combined), *parameters),
        "boundary_backward": lambda t: mhc.boundary_backward(
            t["d_x"],
            t["d_f"],
            t["h_post"],
            t["d_h_res"],
            None,
            None,
            *(t[name] for name in combined),
            *parameters,
            None,
            t["x"],
            t["h"],
            t["ms"],
            tokens_only,
        ),
        "shifted_boundary": lambda t: ops.shifted_boundary(*(t[name] for name in combined), t["h_post"], *parameters),
        "shifted_boundary_backward": lambda t: mhc.shifted_boundary_backward(
            t["d_x"],
            t["d_f"],
            t["h_post"],
            t["h_post"],
            t["d_h_res"],
            None,
            None,
            *(t[name] for name in combined),
            t["h_post"],
            *parameters,
            None,
            t["x"],
            t["h"],
            t["ms"],
            [True, False, True, True, True, True] + [False] * 4,
        ),
    }


def _log(prefix: str) -> dict[str, Any]:
    return {prefix + name: value for name, value in LOG.items()}


def _results(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [value for value in result if value.shape != (0,)]


def dependent(calls: dict[str, Call], t: dict[str, Tensor], slices: Sequence[slice] = SLICES) -> set[str]:
    """The calls that give some token other bits when other tokens are left out or are other ones."""
    found = set()
    for name, call in calls.items():
        whole = [result.clone() for result in _results(call(t))]
        for tokens in slices:
            part = {key: value if key.startswith("p_") else value[tokens] for key, value in t.items()}
            if any(not torch.equal(a, b[tokens]) for a, b in zip(_results(call(part)), whole, strict=True)):
                found.add(name)
        # The same token among others: all the rest is turned around.
        turned = {key: value if key.startswith("p_") else value.flip(0) for key, value in t.items()}
        if any(not torch.equal(a.flip(0), b) for a, b in zip(_results(call(turned)), whole, strict=True)):
            found.add(name)
    return found


SIZES = [(4, 7), (4, 64), (4, 300), (3, 96), (1, 5)]
WIDE = [1280, 4096, 5129]
DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "width"), SIZES)
def test_operators_are_batch_invariant(n: int, width: int, dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        t = tensors(n, width, dtype, "cpu")
        assert dependent(narrow_calls(t, n) | wide_calls(t, n), t) == set()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("n", "width"), [(2, 101), (3, 101), (5, 33), (8, 101)])
def test_rows_of_odd_width_are_batch_invariant(n: int, width: int, dtype: torch.dtype, threads: int) -> None:
    """BLAS may order a sum by the alignment of a token's rows, and that follows from where the token stands."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        t = tensors(n, width, dtype, "cpu")
        assert dependent(narrow_calls(t, n) | wide_calls(t, n), t) == set()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("n", "m"), [(9, 9), (20, 3), (3, 20), (1024, 1), (1, 1024)])
def test_mixing_of_any_sizes_is_batch_invariant(n: int, m: int, dtype: torch.dtype) -> None:
    mhc = torch.ops.mhc
    t = {"x": torch.randn(M, n, 33).to(dtype), "h": torch.randn(M, n, m), "d": torch.randn(M, m, 33).to(dtype)}
    calls: dict[str, Call] = {
        "forward": lambda t: ops.mix_streams(t["x"], t["h"]),
        "backward": lambda t: mhc.mix_streams_backward(t["d"], t["x"], t["h"], [True, True]),
    }
    assert dependent(calls, t) == set()


def test_a_batch_of_several_chunks() -> None:
    """Streams so wide that the reference works on 16 tokens at a time."""
    t = tensors(4, 4100, torch.bfloat16, "cpu")
    assert dependent(wide_calls(t, 4), t) == set()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize(
    ("n", "width"), [*SIZES, (8, 256), (16, 64), *(pytest.param(4, width, marks=pytest.mark.large) for width in WIDE)]
)
def test_operators_are_batch_invariant_on_cuda(n: int, width: int, dtype: torch.dtype) -> None:
    t = tensors(n, width, dtype, "cuda")
    assert dependent(narrow_calls(t, n) | wide_calls(t, n), t) == set()


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize(
    ("n", "dtype"), [(4, torch.bfloat16), (4, torch.float32), (4, torch.float16), (8, torch.bfloat16)]
)
def test_many_tokens_are_batch_invariant_on_cuda(n: int, dtype: torch.dtype) -> None:
    """So many that partial sums are stored by groups, which for few tokens are left to the reader.

    And so few that tensor cores multiply them in smaller tiles.
    """
    t = tensors(n, 1280, dtype, "cuda", tokens=20_000)
    slices = [slice(0, 1), slice(5, 60), slice(7, 107), slice(30, 2_530), slice(9_000, None)]
    assert dependent(narrow_calls(t, n) | wide_calls(t, n), t, slices) == set()


def sum_calls(t: dict[str, Tensor]) -> dict[str, Call]:
    """Gradients of parameters, which are sums over all tokens: an atomic addition would show here."""
    mhc, p = torch.ops.mhc, t
    parameters = (p["p_phi"], p["p_scale"], p["p_bias"])
    needs = [True, True, True, True, False]
    return {
        "mix": lambda t: mhc.generate_mix_and_aggregate_backward(
            t["d_f"], t["h_post"], t["d_h_res"], None, None, t["x"], *parameters, None, t["h"], t["ms"], needs
        ),
        "combine": lambda t: mhc.expand_combine_backward(
            t["d_x"], t["f"], p["p_layer_bias"], t["h_post"], t["x"], t["h_res"], [True] * 5
        ),
        "boundary": lambda t: mhc.boundary_backward(
            t["d_x"],
            t["d_f"],
            t["h_post"],
            t["d_h_res"],
            None,
            None,
            t["f"],
            p["p_layer_bias"],
            t["h_post"],
            t["x"],
            t["h_res"],
            *parameters,
            None,
            t["x"],
            t["h"],
            t["ms"],
            [True] * 8 + [False],
        ),
        "shifted boundary": lambda t: mhc.shifted_boundary_backward(
            t["d_x"],
            t["d_f"],
            t["h_post"],
            t["h_post"],
            t["d_h_res"],
            None,
            None,
            t["f"],
            p["p_layer_bias"],
            t["h_post"],
            t["x"],
            t["h_res"],
            t["h_post"],
            *parameters,
            None,
            t["x"],
            t["h"],
            t["ms"],
            [True] * 9 + [False],
        ),
    }


def _repeated(n: int, width: int, device: str) -> None:
    t = tensors(n, width, torch.bfloat16, device)
    for name, call in (narrow_calls(t, n) | wide_calls(t, n) | sum_calls(t)).items():
        first = [result.clone() for result in _results(call(t))]
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(_results(call(t)), first, strict=True)), name


@pytest.mark.parametrize(("n", "width"), SIZES)
def test_runs_repeat_bitwise(n: int, width: int) -> None:
    _repeated(n, width, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "width"), SIZES)
def test_runs_repeat_bitwise_on_cuda(n: int, width: int) -> None:
    _repeated(n, width, "cuda")


def test_the_check_sees_a_dependence() -> None:
    t = tensors(4, 8, torch.float32, "cpu")
    calls = {"by count": lambda t: t["f"] / len(t["f"]), "by content": lambda t: t["f"] + t["f"].sum(0) * 0.1}
    assert dependent(calls, t) == {"by count", "by content"}
    assert dependent({"by token": lambda t: t["f"] * 2}, t) == set()
