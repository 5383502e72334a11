"""The forward of boundary with the projection in the combine's pass: on a CPU the pass is what it computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mhc_compile.kernels import boundary, boundary_pass, combine_project, expand_combine, gpus
from tests.kernels.cases import FORMS, MARKS, USUAL, draw, keywords, mix_case
from tests.kernels.gluon import GPU, watched
from tests.kernels.test_boundary import before, check

pytestmark = MARKS
BF16 = torch.bfloat16
KERNEL = "combine_project_kernel"
PASS = "boundary_pass_kernel"


@pytest.mark.parametrize(
    ("tokens", "n", "width", "parts", "norm"),
    [(270, 4, 80, 3, True), (33, 2, 48, 3, True), (20, 4, 144, 3, False), (5, 4, 64, 2, False), (16, 4, 32, 1, True)],
)
def test_shapes(tokens: int, n: int, width: int, parts: int, norm: bool, launched: list[str]) -> None:
    case = mix_case(tokens, n, width, dtype=BF16, parts=parts, norm=norm)
    check(before(tokens, n, width, BF16, bias=False), case)
    assert KERNEL in launched


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters(dtype: torch.dtype, launched: list[str]) -> None:
    """One and two parts stand for them."""
    _, phi, *rest = mix_case(5, 4, 64, dtype=BF16).parameters
    assert phi is not None
    args = before(5, 4, 64, BF16, bias=False)
    form = keywords(FORMS[USUAL])
    out = boundary.forward(*args, phi.to(dtype), *rest, **form)  # type: ignore[arg-type]
    wide = boundary.forward(*args, phi.to(dtype).float(), *rest, **form)  # type: ignore[arg-type]
    assert torch.equal(out[0], wide[0])
    assert float((out[4] - wide[4]).norm() / wide[4].norm()) < 1e-6
    assert launched == [KERNEL] * 2


def _arguments(n: int = 4, width: int = 64) -> list[Tensor | None]:
    f, x = torch.zeros(3, width, dtype=BF16), torch.zeros(3, n, width, dtype=BF16)
    return [f, None, x, torch.zeros(3, n, n), torch.zeros(n * n + 2 * n, n * width)]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, torch.zeros(3, 64)),
        (0, torch.zeros(64, 3, dtype=BF16).t()),
        (1, torch.zeros(64)),
        (2, torch.zeros(3, 64, 4, dtype=BF16).mT),
        (2, torch.zeros(0, 4, 64, dtype=BF16)),
        (3, None),
        (4, torch.zeros(40, 256)),
    ],
    ids=["f float32", "f transposed", "layer bias", "channels first", "no tokens", "unmixed", "rows"],
)
def test_what_it_is_not_for(place: int, value: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "of", lambda device: gpus.TABLE[90])
    arguments = _arguments()
    assert combine_project.fits(*arguments)  # type: ignore[arg-type]
    arguments[place] = value
    assert not combine_project.fits(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("n", "width"), [(8, 64), (3, 64), (4, 40)])
def test_sizes_that_it_is_not_for(n: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "of", lambda device: gpus.TABLE[90])
    assert not combine_project.fits(*_arguments(n, width))  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [1280, 4096, 7168, 8192, 16384])
@pytest.mark.parametrize("tokens", [1, 64, 128, 129, 1000, 4000])
def test_what_is_stored(tokens: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of columns is in one partial sum, and the reader's unrolled loop has at most 32 loads.

    Programs have fewer tokens where that leaves no more of them than there are processors.
    """
    programs: list[int] = []
    monkeypatch.setattr(combine_project, "launch", lambda kernel, grid, *args, **options: programs.append(grid[0]))
    monkeypatch.setattr(combine_project, "split_ahead", lambda phi, *args: phi)
    monkeypatch.setattr(gpus, "processors", lambda device: 132)
    x, f = torch.empty(tokens, 2, width, dtype=BF16), torch.empty(tokens, width, dtype=BF16)
    gates = torch.empty(tokens, 2), torch.empty(tokens, 2, 2)
    partials = combine_project.forward(x, torch.empty(8, 2 * width), None, (f, *gates, x))
    assert partials.stored == combine_project.GROUPS * partials.group * partials.chunk
    assert partials.group * partials.chunk <= 32
    blocks = -(-width // 64)
    few = partials.group * partials.chunk == -(-blocks // 4) and -(-tokens // 32) * partials.stored <= 132
    assert programs == [-(-tokens // (32 if few else 64)) * partials.stored]
    if tokens <= 128:
        assert partials.stored >= (blocks if blocks <= 128 else blocks // 8)
    if tokens <= 64 and width <= 4096:
        assert few
    if tokens == 4000:
        assert partials.stored == combine_project.GROUPS


@pytest.mark.memory
@GPU
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("tokens", "n", "width", "rows"),
    [(1, 4, 64, 24), (1000, 4, 1280, 24), (77, 2, 400, 8), (500, 4, 2576, 4), (8192, 4, 4096, 24), (300, 4, 7168, 24)],
)
def test_against_what_it_computes(tokens: int, n: int, width: int, rows: int, norm: bool) -> None:
    f, x = draw(tokens, width, dtype=BF16), draw(tokens, n, width, dtype=BF16)
    pre, post, res = draw(tokens, n), draw(tokens, n), draw(tokens, n, n, scale=0.5)
    phi, weight = draw(rows, n * width, scale=0.1), draw(n * width) if norm else None

    def run(replace: bool, dtype: torch.dtype | None = BF16) -> tuple[Tensor, ...]:
        """dtype: of what is read, None where nothing is."""
        out, row = torch.empty_like(x), torch.empty_like(f, dtype=dtype)
        with watched(replace):
            read = None if dtype is None else (pre, row)
            partials = combine_project.forward(x, phi, weight, (f, post, res, out), read)
        made = out, partials.h.double().sum(0), partials.squares.double().sum(0)
        return made if dtype is None else (*made, row)

    got, again, wanted = run(False), run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(got, run(False, None), strict=False))
    # What is read is the sum of the x' that is stored, rounded once.
    exact = torch.einsum("ti,tic->tc", pre.double(), got[0].double())
    in_float32 = run(False, torch.float32)[3]
    assert float((in_float32.double() - exact).norm() / exact.norm()) < 2e-7
    assert torch.equal(got[3], in_float32.bfloat16())
    given = combine_project.forward(got[0], phi, weight)
    assert torch.equal(given.h.double().sum(0), got[1])
    assert torch.equal(given.squares.double().sum(0), got[2])
    assert torch.equal(got[0], expand_combine.forward(f, None, post, x, res))
    assert all(map(torch.equal, got, again))
    assert float((got[0].double() - wanted[0]).norm() / wanted[0].norm()) < 1e-4
    # The sums are those of the x' that it stored.
    flat = got[0].double().flatten(1)
    h = (phi.double() if weight is None else phi.double() * weight.double()) @ flat.t()
    assert float((got[1] - h).norm() / h.norm()) < 6e-7
    squares = flat.square().sum(1)
    assert float((got[2] - squares).norm() / squares.norm()) < 2e-7


@GPU
@pytest.mark.parametrize("kernel", [KERNEL, PASS])
def test_a_token_does_not_depend_on_the_batch(
    kernel: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on the kernel: the batch goes through the single pass, its slices through either of the two."""
    args, case = before(7000, 4, 1280, BF16, bias=False), mix_case(7000, 4, 1280, dtype=BF16)
    form = keywords(FORMS[USUAL])

    def run(s: slice) -> tuple[Tensor, ...]:
        cut = tuple(None if t is None else t[s] for t in args)
        return boundary.forward(*cut, *case.parameters[1:], **form)

    whole = run(slice(None))
    monkeypatch.setattr(boundary_pass, "pays", lambda x: kernel == PASS)
    for s in (slice(6999, 7000), slice(5, 69), slice(17, 150), slice(1, 1001)):
        for a, b in zip(run(s), whole, strict=True):
            assert torch.equal(a, b[s])
    assert launched == [PASS, *[kernel] * 4]
