"""The backward of the combine in Gluon: on a CPU the kernel is what it computes, the host functions stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mhc_compile.kernels import combine_gradients, expand_combine
from tests.kernels.cases import MARKS, assert_near, draw
from tests.kernels.gluon import GPU, watched
from tests.kernels.test_expand_combine import ALL, arguments, check

pytestmark = MARKS
BF16 = torch.bfloat16
KERNEL = "combine_gradients_kernel"
NEEDED = [True, False, True, True, True]


@pytest.mark.parametrize(
    ("tokens", "n", "width", "gates"),
    [(33, 2, 48, torch.float32), (70, 4, 144, torch.float32), (5, 8, 80, torch.float32), (9, 8, 1040, BF16)],
)
def test_shapes(tokens: int, n: int, width: int, gates: torch.dtype, launched: list[str]) -> None:
    check(arguments(tokens, n, width, BF16, bias=False, gates=gates))
    assert launched == [KERNEL]


@pytest.mark.parametrize("n", [4, 8])
def test_in_place(n: int, launched: list[str]) -> None:
    """The same bits, in the memory of the gradient of x'."""
    args, d_new = arguments(37, n, 48, BF16, bias=False), draw(37, n, 48, dtype=BF16)
    expected = expand_combine.backward(d_new.clone(), *args, NEEDED)
    got = expand_combine.backward(d_new, *args, NEEDED, in_place=True)
    assert got[3].data_ptr() == d_new.data_ptr()
    assert launched == [KERNEL, KERNEL]
    assert all(map(torch.equal, got, expected))


def test_leading_dimensions_of_the_sublayer(launched: list[str]) -> None:
    """df has the strides of f, whose tokens do not lie one after the other: the kernel fills rows that are copied."""
    f, _, post, x, res = arguments(12, 4, 48, BF16, bias=False)
    assert res is not None
    d_new = draw(12, 4, 48, dtype=BF16)
    expected = expand_combine.backward(d_new, f, None, post, x, res, NEEDED)
    turned = f.unflatten(0, (3, 4)).transpose(0, 1).contiguous().transpose(0, 1)
    leading = (post.unflatten(0, (3, 4)), x.unflatten(0, (3, 4)), res.unflatten(0, (3, 4)))
    got = expand_combine.backward(d_new.unflatten(0, (3, 4)), turned, None, *leading, NEEDED)
    assert launched == [KERNEL, KERNEL]
    assert got[0].stride() == turned.stride()
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.flatten(0, 1) if a.numel() else a, b)


def _channels_first(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT


@pytest.mark.parametrize(
    ("tokens", "n", "width", "dtype", "bias", "res", "needs", "more"),
    [
        (3, 4, 48, torch.float32, False, True, NEEDED, False),
        (3, 3, 48, BF16, False, True, NEEDED, False),
        (3, 4, 40, BF16, False, True, NEEDED, False),
        (3, 4, 48, BF16, True, True, ALL, False),
        (3, 4, 48, BF16, False, False, NEEDED, False),
        (3, 4, 48, BF16, False, True, [True, False, True, True, False], False),
        (3, 4, 48, BF16, False, True, NEEDED, True),
        (0, 4, 48, BF16, False, True, NEEDED, False),
    ],
    ids=["float32", "3 streams", "width", "bias", "identity", "frozen", "another gradient", "no tokens"],
)
def test_what_it_is_not_for(
    tokens: int, n: int, width: int, dtype: torch.dtype, bias: bool, res: bool, needs: list[bool], more: bool,
    launched: list[str],
) -> None:  # fmt: skip
    args = arguments(tokens, n, width, dtype, bias=bias, res=res)
    expand_combine.backward(torch.zeros_like(args[3]), *args, needs, args[3] if more else None)
    assert launched == []


def test_it_is_not_for_channels_first(launched: list[str]) -> None:
    f, _, post, x, res = arguments(3, 4, 48, BF16, bias=False)
    expand_combine.backward(_channels_first(x), f, None, post, _channels_first(x), res, NEEDED)
    assert launched == []


@pytest.mark.parametrize("tokens", [1, 2])
def test_it_is_not_for_streams_first(tokens: int, launched: list[str]) -> None:
    """A single token lies as in a contiguous tensor, and takes the kernel that it takes among others."""
    f, _, post, x, res = arguments(tokens, 4, 48, BF16, bias=False)
    x = torch.zeros(4, tokens, 48, dtype=BF16, device=x.device).transpose(0, 1)
    expand_combine.backward(torch.zeros_like(x), f, None, post, x, res, NEEDED)
    assert launched == []


@pytest.mark.memory
@GPU
@pytest.mark.parametrize(("tokens", "n", "width"), [(1, 8, 64), (1000, 8, 1296), (500, 4, 2576), (4096, 8, 4096)])
def test_against_the_reference(tokens: int, n: int, width: int) -> None:
    f, _, post, x, res = arguments(tokens, n, width, BF16, bias=False)
    assert res is not None
    d_new = draw(tokens, n, width, dtype=BF16)

    def run(s: slice, replace: bool = False) -> list[Tensor]:
        dx, df = (torch.empty_like(t[s], dtype=torch.float64 if replace else BF16) for t in (x, f))
        with watched(replace):
            sums = combine_gradients.backward(dx, df, d_new[s], f[s], post[s], x[s], res[s])
        return [dx, df, sums.sum(0, dtype=torch.float64).t()]

    whole, last = slice(None), slice(tokens - 1, tokens)
    got, wanted = run(whole), run(whole, replace=True)
    for result, value in zip((*got[:2], got[2].float()), wanted, strict=True):
        assert_near(result, value)
    assert all(map(torch.equal, got, run(whole)))
    assert all(torch.equal(a, b[last]) for a, b in zip(run(last), got, strict=True))
