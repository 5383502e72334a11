"""expand_combine_and_read: values and gradients against float64, in one pass over the streams and in several."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mhc_compile.kernels import aggregate, expand_combine, expand_combine_and_read, projection
from tests.kernels.cases import DEVICE, MARKS, assert_near, combine, draw, roundoff
from tests.kernels.test_boundary import before

pytestmark = MARKS
BF16 = torch.bfloat16
NAMES = ["df", "dlayer_bias", "dpost", "dx", "dres", "dpre", "dphi", "dnorm"]
READS = ["gates", "projection", "both", "each", "gates and each"]

Arguments = tuple[Tensor | None, ...]


def _arguments(
    tokens: int,
    n: int,
    width: int,
    dtype: torch.dtype,
    reads: str,
    *,
    bias: bool = True,
    res: bool = True,
    rows: int = 6,
) -> Arguments:
    """The eight arguments of a write and of what `reads` names: "each" is a projection of each stream alone."""
    columns = width if "each" in reads else n * width
    h_pre = draw(tokens, n) if reads not in ("projection", "each") else None
    phi = draw(rows, columns) / columns**0.5 if reads != "gates" else None
    norm = draw(columns) if reads in ("both", "gates and each") else None
    return (*before(tokens, n, width, dtype, bias=bias, res=res), h_pre, phi, norm)


def _outputs(arguments: Sequence[Tensor | None], x_new: Tensor) -> list[Tensor]:
    """layer_input, h and ms of the new streams, those that there are."""
    h_pre, phi, norm = arguments[5:]
    outputs = [] if h_pre is None else [(h_pre[..., None] * x_new).sum(-2)]
    if phi is not None:
        alone = phi.shape[1] == x_new.shape[-1] and x_new.shape[-2] > 1
        flat = x_new if alone else x_new.flatten(-2)
        outputs += [(flat if norm is None else flat * norm) @ phi.T, flat.square().mean(-1)]
    return outputs


def _draw_gradients(out: Sequence[Tensor]) -> list[Tensor | None]:
    """Of x', layer_input, h and ms, those that have elements."""
    return [draw(*t.shape, dtype=t.dtype) if t.numel() else None for t in out]


def _exact(
    arguments: Arguments, x_new: Tensor, grads: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The outputs after x' and all gradients in float64, x' rounded where it is read."""
    leaves = [None if t is None else t.double().requires_grad_() for t in arguments]
    new = combine(*leaves[:5])
    rounded = x_new.double() + (new - new.detach())
    outputs = _outputs(leaves, rounded)
    given = [grads[0], *(g for g in grads[1:] if g is not None)]
    used = [(o, g.double()) for o, g in zip([rounded, *outputs], given, strict=True) if g is not None]
    present = [t for t in leaves if t is not None]
    found = iter(torch.autograd.grad([o for o, _ in used], present, [g for _, g in used], allow_unused=True))
    return [o.detach() for o in outputs], [None if leaf is None else next(found) for leaf in leaves]


def check(arguments: Arguments, noise: float = 4e-6) -> None:
    out = expand_combine_and_read.forward(*arguments)
    grads = _draw_gradients(out)
    outputs, gradients = _exact(arguments, out[0], grads)
    assert_near(out[0], combine(*(None if t is None else t.double() for t in arguments[:5])), "x_new", noise)
    for value, exact in zip([t for t in out[1:] if t.numel()], outputs, strict=True):
        assert_near(value, exact, "a result", noise)
    needs = [t is not None for t in arguments]
    got = expand_combine_and_read.backward(*grads, *arguments, out[0], needs)
    # The gradient of x' is rounded to the streams' dtype before it is summed over, where it is not kept in registers,
    # and that of h_pre may come from what x' was before it was rounded.
    noise = max(noise, 4 * roundoff(out[0].dtype))
    for gradient, like, value, name in zip(got, arguments, gradients, NAMES, strict=True):
        if like is None:
            assert gradient.shape == (0,), name
        else:
            assert value is not None
            assert gradient.dtype == like.dtype, name
            assert_near(gradient, value, name, noise)


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize(
    ("tokens", "n", "width", "dtype"),
    [
        (33, 1, 7, torch.float32),
        (1, 3, 70, torch.float16),
        (70, 4, 129, BF16),
        (70, 4, 66, torch.float32),
        (5, 5, 40, BF16),
        (3, 9, 33, torch.float32),
    ],
)
def test_shapes(tokens: int, n: int, width: int, dtype: torch.dtype, reads: str) -> None:
    check(_arguments(tokens, n, width, dtype, reads))


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("n", [4, 9])
@pytest.mark.parametrize(("bias", "res"), [(False, True), (True, False)])
def test_optional_parts(n: int, bias: bool, res: bool, reads: str) -> None:
    check(_arguments(5, n, 40, torch.float32, reads, bias=bias, res=res))


@pytest.mark.parametrize(
    ("tokens", "n", "width", "rows", "reads"),
    [
        (270, 4, 80, 10, "both"),
        (33, 2, 48, 24, "both"),
        (20, 4, 144, 32, "both"),
        (270, 4, 80, 6, "gates and each"),
        (33, 2, 48, 4, "gates and each"),
        (20, 4, 144, 8, "gates and each"),
    ],
)
def test_one_pass(tokens: int, n: int, width: int, rows: int, reads: str, launched: list[str]) -> None:
    """Of a projection with a read that was made from it, as where gates are a program's own."""
    check(_arguments(tokens, n, width, BF16, reads, bias=False, rows=rows))
    assert launched == ["combine_project_kernel", "boundary_gradients_kernel"]


def test_each_stream_alone_has_the_bits_of_a_phi_with_zeros() -> None:
    """In one pass, which multiplies the rows of one stream by zeros for the others."""
    alone = _arguments(40, 4, 80, BF16, "gates and each", bias=False)
    phi, norm = alone[6:]
    assert phi is not None
    assert norm is not None
    of_all = (*alone[:6], torch.block_diag(phi, phi, phi, phi), norm.repeat(4))
    x_new, layer_input, h, ms = expand_combine_and_read.forward(*alone)
    whole = expand_combine_and_read.forward(*of_all)
    assert torch.equal(x_new, whole[0])
    assert torch.equal(layer_input, whole[1])
    assert_near(h.flatten(-2), whole[2].double(), "h", 1e-6)
    assert_near(ms.mean(-1), whole[3].double(), "ms", 1e-6)


def test_a_read_with_given_gates_takes_one_launch(launched: list[str]) -> None:
    arguments = _arguments(16, 4, 64, BF16, "gates", bias=False)
    out = expand_combine_and_read.forward(*arguments)
    needs = [t is not None for t in arguments]
    expand_combine_and_read.backward(*_draw_gradients(out), *arguments, out[0], needs)
    assert launched == []
    assert torch.equal(out[0], expand_combine.forward(*arguments[:5]))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_what_is_read_is_what_is_stored(dtype: torch.dtype) -> None:
    """The read and the projection of x' as it was rounded, in other dtypes than the streams', too."""
    arguments = _arguments(33, 3, 40, dtype, "both")
    for streams_dtype in (None, torch.float32):
        out = expand_combine_and_read.forward(*arguments, streams_dtype=streams_dtype, out_dtype=torch.float32)
        assert (out[0].dtype, out[1].dtype) == (streams_dtype or dtype, torch.float32)
        h_pre, phi, norm = arguments[5:]
        assert h_pre is not None
        assert phi is not None
        assert_near(out[1], aggregate.forward(out[0], h_pre, out_dtype=torch.float32).double(), "layer_input", 1e-6)
        for value, expected in zip(out[2:], projection.forward(out[0], phi, norm), strict=True):
            assert torch.equal(value, expected)


@pytest.mark.parametrize("reads", READS)
def test_only_what_is_needed(reads: str) -> None:
    arguments = _arguments(5, 4, 40, torch.float32, reads)
    out = expand_combine_and_read.forward(*arguments)
    saved = (*_draw_gradients(out), *arguments, out[0])
    whole = expand_combine_and_read.backward(*saved, [t is not None for t in arguments])
    for needed, argument in enumerate(arguments):
        got = expand_combine_and_read.backward(*saved, [i == needed and argument is not None for i in range(8)])
        for i, (gradient, among_all) in enumerate(zip(got, whole, strict=True)):
            if i == needed:
                # Rounding inside fused multiply-adds may differ between the two programs.
                assert_near(gradient, among_all.double(), f"{NAMES[i]} alone")
            else:
                assert gradient.shape == (0,), (needed, i)


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("absent", range(4))
def test_gradients_that_did_not_come(absent: int, reads: str) -> None:
    arguments = _arguments(5, 4, 40, torch.float32, reads)
    out = expand_combine_and_read.forward(*arguments)
    grads = _draw_gradients(out)
    grads[absent] = None
    got = expand_combine_and_read.backward(*grads, *arguments, out[0], [t is not None for t in arguments])
    filled = [torch.zeros_like(t) if g is None and t.numel() else g for g, t in zip(grads, out, strict=True)]
    _, expected = _exact(arguments, out[0], filled)
    for gradient, value, name in zip(got, expected, NAMES, strict=True):
        if value is not None:
            assert_near(gradient, value, name)


@pytest.mark.parametrize(("n", "dtype"), [(4, BF16), (2, torch.float32), (8, BF16), (9, BF16)])
@pytest.mark.parametrize("reads", READS)
def test_in_place(n: int, dtype: torch.dtype, reads: str) -> None:
    """The same bits, in the memory of the gradient of x'."""
    arguments = _arguments(37, n, 40, dtype, reads, bias=False)
    out = expand_combine_and_read.forward(*arguments)
    d_new, *others = _draw_gradients(out)
    assert d_new is not None
    saved = (*others, *arguments, out[0], [t is not None for t in arguments])
    expected = expand_combine_and_read.backward(d_new, *saved)
    given = d_new.clone()
    got = expand_combine_and_read.backward(given, *saved, in_place=True)
    # A kernel that reads streams again from cache must not overwrite them; one operator after the other may not either.
    again = n > expand_combine.MAX_UNROLLED and reads == "gates"
    taken = not again and "each" not in reads
    assert (got[3].data_ptr() == given.data_ptr()) == taken
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("reads", READS)
def test_layouts(reads: str) -> None:
    """Channels first, as TransformerEngine has it: old and new streams and the gradient alike."""
    arguments = _arguments(12, 4, 40, BF16, reads)
    f, bias, post, x, res, *others = arguments
    assert x is not None
    turned = (f, bias, post, x.mT.contiguous().mT, res, *others)
    expected, out = (expand_combine_and_read.forward(*given) for given in (arguments, turned))
    assert out[0].stride() == turned[3].stride()
    grads, needs = _draw_gradients(out), [t is not None for t in arguments]
    back = expand_combine_and_read.backward(*grads, *arguments, expected[0], needs)
    got = expand_combine_and_read.backward(*grads, *turned, out[0], needs)
    assert got[3].stride() == turned[3].stride()
    for a, b in zip((*out, *got), (*expected, *back), strict=True):
        assert_near(a, b.double(), noise=4 * roundoff(BF16))


@pytest.mark.parametrize("reads", READS)
def test_no_tokens(reads: str) -> None:
    arguments = _arguments(0, 4, 33, BF16, reads)
    out = expand_combine_and_read.forward(*arguments)
    assert out[0].shape == (0, 4, 33)
    grads = [draw(*t.shape, dtype=t.dtype) for t in out]
    needs = [t is not None for t in arguments]
    got = expand_combine_and_read.backward(*grads, *arguments, out[0], needs)
    for gradient, like in zip(got, arguments, strict=True):
        if like is not None:
            assert torch.equal(gradient, torch.zeros_like(like))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter runs one program after the other")
@pytest.mark.parametrize("reads", READS)
def test_a_token_does_not_depend_on_the_batch(reads: str) -> None:
    """Bitwise: slices of a batch, and a repeated run."""
    arguments = _arguments(3000, 4, 1280, BF16, reads, bias=False)
    *tokens, phi, norm = arguments
    d_new, *gradients = _draw_gradients(expand_combine_and_read.forward(*arguments))
    assert d_new is not None

    def run(s: slice) -> list[Tensor]:
        cut = (*(None if t is None else t[s] for t in tokens), phi, norm)
        out = expand_combine_and_read.forward(*cut)
        grads = [d_new[s], *(None if g is None else g[s] for g in gradients)]
        back = expand_combine_and_read.backward(*grads, *cut, out[0], [t is not None for t in cut])
        return [t for t in (*out, *back[:6]) if t.numel()]

    whole = run(slice(None))
    assert all(map(torch.equal, run(slice(None)), whole))
    for s in (slice(2999, 3000), slice(5, 69), slice(17, 150)):
        for a, b in zip(run(s), whole, strict=True):
            assert torch.equal(a, b[s])


@pytest.mark.memory
@pytest.mark.large
@pytest.mark.skipif(DEVICE == "cpu", reason="real sizes need a CUDA device")
@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize(
    ("tokens", "n", "width", "dtype", "bias"),
    [(8192, 4, 4096, BF16, False), (1000, 4, 5129, BF16, True), (512, 8, 2560, torch.float32, True)],
)
def test_real_sizes(tokens: int, n: int, width: int, dtype: torch.dtype, bias: bool, reads: str) -> None:
    # Sums over 8,192 tokens: errors grow with their roots.
    check(_arguments(tokens, n, width, dtype, reads, bias=bias, rows=24), noise=2e-5)


@pytest.mark.parametrize("reads", ["gates", "projection"])
def test_the_gradient_of_a_gate_is_asked_for_in_vain(reads: str) -> None:
    """needs says that h_pre has a gradient, but nothing gives one; over 512 columns have two partial sums."""
    arguments = _arguments(5, 2, 700, torch.float32, reads)
    x_new = combine(*arguments[:5])
    gradient = draw(*x_new.shape)
    saved = (gradient, None, None, None, *arguments, x_new)
    found = expand_combine_and_read.backward(*saved, [True] * 8)
    wanted = expand_combine_and_read.backward(*saved, [True] * 5 + [False, True, True])
    for name, ours, theirs in zip(NAMES, found, wanted, strict=True):
        if name == "dpre":
            assert not ours.any()
        else:
            assert torch.equal(ours, theirs), name
