"""The same bits from run to run, and for a token whatever comes with it, on CPU and CUDA."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.calls import (
    OPERATORS,
    RARE,
    Given,
    Sizes,
    arguments,
    call,
    is_of_tokens,
    result_names,
    results,
    tensor_names,
)

M = 75
# A single token at either end and within, pieces of odd and of even length, with and without the first token.
SLICES = [
    slice(0, 1), slice(1, 2), slice(M - 1, M), slice(2, 4), slice(3, 10), slice(5, 22), slice(0, 64), slice(7, M)
]  # fmt: skip
LOG = {"sinkhorn_eps": 0.0, "sinkhorn_start_eps": 0.0, "sinkhorn_start": "exp", "sinkhorn_first": "rows"}
WITH_PHI = [operator for operator in OPERATORS if "phi" in tensor_names(operator)]

# A name for a run, the operator with its scalars, and its arguments.
Run = tuple[str, Callable[[Given], Any], Given]


def runs(
    sizes: Sizes,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    operators: Sequence[str] = OPERATORS,
    whole: bool = True,
    sums: bool = False,
) -> Iterator[Run]:
    """Every operator as models call it, with every argument, and in forms that other code computes.

    whole: also with every argument; sums: with the gradients of parameters, which are sums over tokens.
    """
    for operator in operators:
        forms: dict[str, tuple[Sizes, frozenset[str], dict[str, Any]]] = {"": (sizes, RARE, {})}
        if whole and RARE & {*tensor_names(operator)}:
            forms["whole"] = (sizes, frozenset(), {})
        if operator in ("sinkhorn", "sinkhorn_backward", "generate_mix_and_aggregate"):
            forms["log"] = (sizes, RARE, LOG)
        if operator in ("mix_streams", "mix_streams_backward"):
            forms["one row"] = (dataclasses.replace(sizes, m=1), RARE, {})
        for form, (form_sizes, without, scalars) in forms.items():
            given = arguments(operator, form_sizes, dtype, without=without, scalars=scalars, device=device)
            if "needs" in given and not sums:
                named = zip(given["needs"], result_names(operator), strict=True)
                given["needs"] = [need and is_of_tokens(name) for need, name in named]
            yield f"{operator} {form}".strip(), functools.partial(call, operator, scalars=scalars), given


def _some(given: Given, pick: Callable[[Tensor], Tensor]) -> Given:
    """The arguments of these of the tokens."""
    return {
        name: pick(value) if isinstance(value, Tensor) and is_of_tokens(name) else value
        for name, value in given.items()
    }


def _made(result: Any) -> list[Tensor]:
    return [value for value in results(result) if value.shape != (0,)]


def dependent(made: Iterable[Run], slices: Sequence[slice] = SLICES) -> set[str]:
    """The runs that give some token other bits when other tokens are left out or are other ones."""
    found = set()
    for name, function, given in made:
        whole = [result.clone() for result in _made(function(given))]
        for tokens in slices:
            part = _made(function(_some(given, lambda t, tokens=tokens: t[tokens])))
            if any(not torch.equal(a, b[tokens]) for a, b in zip(part, whole, strict=True)):
                found.add(name)
        # The same token among others: all the rest is turned around.
        turned = _made(function(_some(given, lambda t: t.flip(0))))
        if any(not torch.equal(a.flip(0), b) for a, b in zip(turned, whole, strict=True)):
            found.add(name)
    return found


@contextlib.contextmanager
def _on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SIZES = [(4, 7), (4, 64), (4, 300), (3, 96), (1, 5)]
WIDE = [1280, 4096, 5129]
DTYPES = [torch.bfloat16, torch.float32]


def _sizes(n: int, width: int, tokens: int = M) -> Sizes:
    return Sizes(n, width, (tokens,), m=n)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "width"), SIZES)
def test_operators_are_batch_invariant(n: int, width: int, dtype: torch.dtype, threads: int) -> None:
    with _on_threads(threads):
        assert dependent(runs(_sizes(n, width), dtype, whole=threads == 3)) == set()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("n", "width"), [(2, 101), (3, 101), (5, 33), (8, 101)])
def test_rows_of_odd_width_are_batch_invariant(n: int, width: int, dtype: torch.dtype, threads: int) -> None:
    """BLAS may order a sum by the alignment of a token's rows, and that follows from where the token stands."""
    with _on_threads(threads):
        assert dependent(runs(_sizes(n, width), dtype, whole=False)) == set()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("n", "m"), [(9, 9), (20, 3), (3, 20), (1024, 1), (1, 1024)])
def test_mixing_of_any_sizes_is_batch_invariant(n: int, m: int, dtype: torch.dtype) -> None:
    sizes = Sizes(n, 33, (M,), m=m)
    assert dependent(runs(sizes, dtype, operators=("mix_streams", "mix_streams_backward"))) == set()


def test_a_batch_of_several_chunks() -> None:
    """Streams so wide that the reference works on 16 tokens at a time."""
    assert dependent(runs(_sizes(4, 4100), torch.bfloat16, operators=WITH_PHI, whole=False)) == set()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize(
    ("n", "width"), [*SIZES, (8, 256), (16, 64), *(pytest.param(4, width, marks=pytest.mark.large) for width in WIDE)]
)
def test_operators_are_batch_invariant_on_cuda(n: int, width: int, dtype: torch.dtype) -> None:
    assert dependent(runs(_sizes(n, width), dtype, "cuda")) == set()


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize(
    ("n", "dtype"), [(4, torch.bfloat16), (4, torch.float32), (4, torch.float16), (8, torch.bfloat16)]
)
def test_many_tokens_are_batch_invariant_on_cuda(n: int, dtype: torch.dtype) -> None:
    """So many that partial sums are stored by groups, which for few tokens are left to the reader.

    And so few that tensor cores multiply them in smaller tiles.
    """
    slices = [slice(0, 1), slice(5, 60), slice(7, 107), slice(30, 2_530), slice(9_000, None)]
    assert dependent(runs(_sizes(n, 1280, 20_000), dtype, "cuda"), slices) == set()


def _repeated(n: int, width: int, device: str) -> None:
    """With gradients of parameters: an atomic addition would show here."""
    for name, function, given in runs(_sizes(n, width), torch.bfloat16, device, whole=device != "cpu", sums=True):
        first = [result.clone() for result in _made(function(given))]
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(_made(function(given)), first, strict=True)), name


@pytest.mark.parametrize(("n", "width"), SIZES)
def test_runs_repeat_bitwise(n: int, width: int) -> None:
    _repeated(n, width, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "width"), SIZES)
def test_runs_repeat_bitwise_on_cuda(n: int, width: int) -> None:
    _repeated(n, width, "cuda")


def test_the_check_sees_a_dependence() -> None:
    given = {"f": torch.randn(M, 8)}
    by: dict[str, Callable[[Given], Tensor]] = {
        "count": lambda t: t["f"] / len(t["f"]),
        "content": lambda t: t["f"] + t["f"].sum(0) * 0.1,
        "token": lambda t: t["f"] * 2,
    }
    assert dependent((name, function, given) for name, function in by.items()) == {"count", "content"}
