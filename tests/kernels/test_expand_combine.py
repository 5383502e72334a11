"""expand_combine: values and gradients against float64, layouts, determinism."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mhc_compile.kernels import combine_many, expand_combine
from tests.kernels.cases import DEVICE, MARKS, assert_all_near, assert_near, combine, draw

pytestmark = MARKS
ALL = [True] * 5
Arguments = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]


def arguments(
    tokens: int, n: int, width: int, dtype: torch.dtype, *, bias: bool = True, res: bool = True,
    gates: torch.dtype = torch.float32,
) -> Arguments:  # fmt: skip
    return (
        draw(tokens, width, dtype=dtype),
        draw(width) if bias else None,
        draw(tokens, n, dtype=gates),
        draw(tokens, n, width, dtype=dtype),
        draw(tokens, n, n, dtype=gates) if res else None,
    )


def gradients(args: Arguments, d_new: Tensor) -> list[Tensor]:
    leaves = [None if a is None else a.double().requires_grad_() for a in args]
    new = combine(*leaves)
    found = iter(torch.autograd.grad(new, [p for p in leaves if p is not None], d_new.double()))
    return [torch.empty(0, dtype=torch.float64, device=DEVICE) if p is None else next(found) for p in leaves]


def check(args: Arguments, noise: float = 4e-6) -> None:
    out = expand_combine.forward(*args)
    assert out.dtype == args[3].dtype
    assert_near(out, combine(*(None if a is None else a.double() for a in args)), "x_new", noise)
    d_new = draw(*out.shape, dtype=out.dtype)
    got = expand_combine.backward(d_new, *args, ALL)
    for gradient, argument in zip(got, args, strict=True):
        assert argument is None or gradient.dtype == argument.dtype
    assert_all_near(got, gradients(args, d_new), "df dbias dpost dx dres", noise)


@pytest.mark.parametrize(
    ("tokens", "n", "width", "dtype"),
    [
        (33, 1, 7, torch.float32),
        (33, 2, 129, torch.bfloat16),
        (1, 3, 520, torch.float16),
        (70, 4, 129, torch.bfloat16),
        (3, 5, 300, torch.bfloat16),
        (2, 8, 33, torch.float32),
        (5, 9, 40, torch.bfloat16),
        (2, 16, 7, torch.float16),
        (1, 2, 1100, torch.bfloat16),
        (5, 4, 1, torch.bfloat16),
        (3, 16, 300, torch.bfloat16),
        (2, 31, 40, torch.bfloat16),
    ],
)
def test_shapes(tokens: int, n: int, width: int, dtype: torch.dtype) -> None:
    check(arguments(tokens, n, width, dtype))


@pytest.mark.parametrize("n", [3, 9])
@pytest.mark.parametrize(("bias", "res"), [(False, True), (True, False), (False, False)])
def test_optional_arguments(n: int, bias: bool, res: bool) -> None:
    check(arguments(5, n, 40, torch.bfloat16, bias=bias, res=res))


@pytest.mark.parametrize("gates", [torch.bfloat16, torch.float16])
def test_gate_dtypes(gates: torch.dtype) -> None:
    check(arguments(5, 4, 40, torch.bfloat16, gates=gates))


def test_out_dtype() -> None:
    args = arguments(5, 4, 40, torch.bfloat16)
    out = expand_combine.forward(*args, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    assert_near(out, combine(*(None if a is None else a.double() for a in args)))
    d_new = draw(*out.shape)
    got = expand_combine.backward(d_new, *args, ALL)
    assert_all_near(got, gradients(args, d_new), "df dbias dpost dx dres")


@pytest.mark.parametrize("gates", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [9, 16, 17])
def test_many_streams_on_tensor_cores(n: int, gates: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bias of the layer; the gradient of others is added."""
    args = arguments(3, n, 520, torch.bfloat16, bias=False, gates=gates)
    check(args)
    d_new, d_x = draw(3, n, 520, dtype=torch.bfloat16), draw(3, n, 520, dtype=torch.bfloat16)
    needs = [True, False, True, True, True]
    alone, added = (expand_combine.backward(d_new, *args, needs, given)[3] for given in (None, d_x))
    assert_near(added, gradients(args, d_new)[3] + d_x.double(), "dx")
    calls = []
    plain = combine_many.backward
    monkeypatch.setattr(combine_many, "backward", lambda *given: calls.append(given) or plain(*given))
    grad = d_new.clone()
    own = expand_combine.backward(grad, *args, needs, in_place=True)[3]
    assert own.data_ptr() == grad.data_ptr()
    assert torch.equal(own, alone)
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("n", [4, 8, 9, 16, 17])
def test_an_infinite_output_is_read_as_eager_reads_it(n: int) -> None:
    """Streams that are only room in a tile have no part in a sum."""
    f, _, post, x, res = arguments(3, n, 40, torch.bfloat16, bias=False)
    f[1, 7] = torch.inf
    pre, read = post.abs() + 0.1, torch.empty_like(f)
    new = expand_combine.forward(f, None, post.abs() + 0.1, x, res, read=(pre, read))
    assert torch.equal(new.isinf().all(1), f.isinf())
    assert torch.equal(read, torch.where(f.isinf(), f, read))
    assert read.isinf().sum() == 1


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n", [4, 9])
@pytest.mark.parametrize("needed", range(5))
def test_only_what_is_needed(needed: int, n: int, bias: bool) -> None:
    args = arguments(5, n, 40, torch.bfloat16, bias=bias)
    d_new = draw(5, n, 40, dtype=torch.bfloat16)
    got = expand_combine.backward(d_new, *args, [i == needed for i in range(5)])
    for i, (gradient, expected) in enumerate(zip(got, gradients(args, d_new), strict=True)):
        if i == needed and args[i] is not None:
            assert_near(gradient, expected)
        else:
            assert gradient.shape == (0,)


@pytest.mark.parametrize("n", [4, 9])
def test_layouts(n: int) -> None:
    """Transposed h_res, channel-first x and gradient, sliced f, and two leading dimensions, one swapped."""
    f, bias, post, x, res = arguments(12, n, 40, torch.bfloat16)
    assert res is not None
    d_new = draw(12, n, 40, dtype=torch.bfloat16)
    plain = expand_combine.forward(f, bias, post, x, res)
    back = expand_combine.backward(d_new, f, bias, post, x, res, ALL)

    def channels_first(t: Tensor) -> Tensor:
        return t.mT.contiguous().mT.unflatten(0, (3, 4))

    padded = torch.full((3, 4, 43), torch.nan, dtype=f.dtype, device=DEVICE)
    padded[..., 3:] = f.unflatten(0, (3, 4))
    swapped = post.unflatten(0, (3, 4)).transpose(0, 1).contiguous().transpose(0, 1)
    args = padded[..., 3:], bias, swapped, channels_first(x), channels_first(res)
    new = expand_combine.forward(*args)
    assert new.stride() == args[3].stride()
    assert torch.equal(new.flatten(0, 1), plain)
    got = expand_combine.backward(channels_first(d_new), *args, ALL)
    assert got[3].stride() == args[3].stride()
    for a, b in zip(got, back, strict=True):
        assert_near(a, b.double().reshape(a.shape))


@pytest.mark.parametrize(
    ("order", "n"),
    [((0, 2, 1, 3), 4), ((2, 0, 1, 3), 4), ((1, 0, 3, 2), 4), ((3, 1, 0, 2), 4), ((2, 0, 1, 3), 9), ((3, 1, 0, 2), 9)],
)
def test_results_lie_as_their_arguments(order: tuple[int, ...], n: int) -> None:
    """x [b, s, n, C] stored in this order; the tokens of the first and the last do not collapse."""
    f, bias, post, x, res = arguments(12, n, 40, torch.bfloat16)
    assert res is not None
    d_new = draw(12, n, 40, dtype=torch.bfloat16)
    plain = expand_combine.forward(f, bias, post, x, res)
    back = expand_combine.backward(d_new, f, bias, post, x, res, ALL)

    def stored(t: Tensor) -> Tensor:
        inverse = [order.index(d) for d in range(4)]
        return t.unflatten(0, (3, 4)).permute(order).contiguous().permute(inverse)

    rows = f.T.contiguous().T.unflatten(0, (3, 4))
    args = rows, bias, post.unflatten(0, (3, 4)), stored(x), res.unflatten(0, (3, 4))
    new, got = expand_combine.forward(*args), expand_combine.backward(stored(d_new), *args, ALL)
    assert torch.equal(new.flatten(0, 1), plain)
    for result, argument in ((new, args[3]), (got[3], args[3]), (got[0], rows)):
        assert result.stride() == argument.stride()
    for a, b in zip(got, back, strict=True):
        # The layout of loads may change the order of the sums over columns.
        assert_near(a, b.double().reshape(a.shape))


@pytest.mark.parametrize("n", [4, 9])
def test_no_tokens(n: int) -> None:
    args = arguments(0, n, 33, torch.bfloat16)
    assert expand_combine.forward(*args).shape == (0, n, 33)
    got = expand_combine.backward(draw(0, n, 33, dtype=torch.bfloat16), *args, ALL)
    assert [g.shape for g in got] == [(0, 33), (33,), (0, n), (0, n, 33), (0, n, n)]
    assert torch.equal(got[1], torch.zeros(33, device=DEVICE))


def test_a_token_does_not_depend_on_the_batch() -> None:
    tokens, width = (40, 300) if DEVICE == "cpu" else (3000, 4096)
    args = arguments(tokens, 4, width, torch.bfloat16)
    f, bias, post, x, res = args
    assert res is not None
    d_new = draw(tokens, 4, width, dtype=torch.bfloat16)
    new, back = expand_combine.forward(*args), expand_combine.backward(d_new, *args, ALL)
    slices = [slice(tokens - 1, tokens), slice(5, 38)]
    if DEVICE == "cuda":
        slices += [slice(0, 1), slice(17, 90)]
        # The interpreter runs one program after the other: there, nothing could come out differently.
        for a, b in zip(expand_combine.backward(d_new, *args, ALL), back, strict=True):
            assert torch.equal(a, b)
    for s in slices:
        part = f[s], bias, post[s], x[s], res[s]
        assert torch.equal(expand_combine.forward(*part), new[s])
        got = expand_combine.backward(d_new[s], *part, ALL)
        for i in (0, 2, 3, 4):
            assert torch.equal(got[i], back[i][s])


@pytest.mark.memory
@pytest.mark.large
@pytest.mark.skipif(DEVICE == "cpu", reason="real sizes need a CUDA device")
@pytest.mark.parametrize(
    ("tokens", "n", "width", "dtype"),
    [
        (8192, 4, 4096, torch.bfloat16),
        (1000, 4, 5129, torch.bfloat16),
        (512, 8, 2560, torch.float16),
        (256, 16, 1280, torch.float32),
    ],
)
def test_real_sizes(tokens: int, n: int, width: int, dtype: torch.dtype) -> None:
    # Sums over 8,192 tokens: errors grow with the root of their number.
    check(arguments(tokens, n, width, dtype), noise=2e-5)


@pytest.mark.memory
@pytest.mark.large
@pytest.mark.skipif(DEVICE == "cpu", reason="more than 2^31 elements need a CUDA device")
def test_more_elements_than_int32_counts() -> None:
    tokens, n, width = 140_000, 4, 4096
    last = arguments(3, n, width, torch.bfloat16)
    whole = []
    for argument, name in zip(last, ("f", "bias", "post", "x", "res"), strict=True):
        assert argument is not None
        if name == "bias":
            whole.append(argument)
            continue
        big = torch.zeros(tokens, *argument.shape[1:], dtype=argument.dtype, device=DEVICE)
        big[-3:] = argument
        whole.append(big)
    assert torch.equal(expand_combine.forward(*whole)[-3:], expand_combine.forward(*last))
    needs = [True, False, True, True, True]
    got = expand_combine.backward(whole[3], *whole, needs)
    assert last[3] is not None
    expected = expand_combine.backward(last[3], *last, needs)
    for i in (0, 2, 3, 4):
        assert torch.equal(got[i][-3:], expected[i])


@pytest.mark.memory
@pytest.mark.large
@pytest.mark.skipif(DEVICE == "cpu", reason="more than 2^31 elements need a CUDA device")
def test_streams_further_apart_than_int32_counts() -> None:
    """Streams first in memory: x' and dx lie so as well."""
    tokens, n, width = 140_000, 5, 4096
    last = arguments(3, n, width, torch.bfloat16, bias=False)
    x = torch.zeros(n, tokens, width, dtype=torch.bfloat16, device=DEVICE).transpose(0, 1)
    assert last[3] is not None
    x[-3:] = last[3]
    f, post, res = (
        torch.zeros(tokens, *t.shape[1:], dtype=t.dtype, device=DEVICE) for t in (last[0], last[2], last[4])
    )
    for whole, part in ((f, last[0]), (post, last[2]), (res, last[4])):
        whole[-3:] = part
    new = expand_combine.forward(f, None, post, x, res)
    assert new.stride() == x.stride()
    assert torch.equal(new[-3:], expand_combine.forward(*last))
    needs = [False, False, False, True, False]
    dx = expand_combine.backward(x, f, None, post, x, res, needs)[3]
    assert dx.stride() == x.stride()
    assert torch.equal(dx[-3:], expand_combine.backward(last[3], *last, needs)[3])


@pytest.mark.large
@pytest.mark.skipif(DEVICE == "cpu", reason="millions of tokens need a CUDA device")
def test_more_tiles_than_a_grid_axis_has() -> None:
    """y and z of a grid end at 65,535; a tile has at most 64 tokens."""
    tokens, n, width = 65_536 * 64 + 3, 2, 8
    args = arguments(tokens, n, width, torch.bfloat16)
    d_new = draw(tokens, n, width, dtype=torch.bfloat16)
    new, got = expand_combine.forward(*args), expand_combine.backward(d_new, *args, ALL)
    for s in (slice(0, 5), slice(tokens - 3, tokens)):
        f, bias, post, x, res = args
        assert res is not None
        part = f[s], bias, post[s], x[s], res[s]
        assert torch.equal(expand_combine.forward(*part), new[s])
        found = expand_combine.backward(d_new[s], *part, ALL)
        for i in (0, 2, 3, 4):
            assert torch.equal(found[i], got[i][s])
