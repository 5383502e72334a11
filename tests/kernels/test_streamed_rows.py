"""The products with many rows of phi in Gluon. On a CPU, what kernels compute takes their place; host functions run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mhc_compile.kernels import generate_mix_and_aggregate, gpus, projection, streamed_rows
from mhc_compile.kernels.phi_parts import split_in_tiles
from mhc_compile.kernels.streamed_rows import DX_TOKENS, fits, fits_dx, share_columns
from tests.kernels.cases import (
    DEVICE,
    FORMS,
    MARKS,
    USUAL,
    assert_all_near,
    assert_near,
    bf16_parts,
    draw,
    keywords,
    mix_case,
    mix_gradients,
)
from tests.kernels.gluon import GPU, watched

pytestmark = MARKS
BF16 = torch.bfloat16
PROJECT, DX, DPHI = "project_of_rows_kernel", "dx_of_rows_kernel", "dphi_of_rows_kernel"
FORM = FORMS[USUAL]
NAMES = "dx dphi dscale dbias dnorm"


@pytest.mark.parametrize(
    ("tokens", "n", "width", "norm", "kernels"),
    [(37, 9, 128, False, [DX, DPHI]), (5, 10, 128, True, [DX, DPHI]), (3, 9, 48, False, [DPHI])],
)
@pytest.mark.parametrize("more", [False, True])
def test_mix(tokens: int, n: int, width: int, norm: bool, kernels: list[str], more: bool, launched: list[str]) -> None:
    """With another gradient of x, and without; dx is made elsewhere if its columns are no whole tiles."""
    case = mix_case(tokens, n, width, dtype=BF16, norm=norm)
    made = generate_mix_and_aggregate.forward(*case.parameters, **keywords(FORM))
    *_, h, ms = made
    # A GPU has too many processors for so few tokens.
    assert launched == ([PROJECT] if DEVICE == "cpu" else [])
    launched.clear()
    d_x = draw(tokens, n, width, dtype=BF16) if more else None
    needs = [True] * 4 + [norm]
    got = generate_mix_and_aggregate.backward(*case.grads, *case.parameters, h, ms, needs, d_x, **keywords(FORM))
    assert launched == kernels
    expected = mix_gradients(case, FORM, case.grads)
    expected[0] = expected[0] if d_x is None else expected[0] + d_x.double()
    assert_all_near(got[: 4 + norm], expected, " ".join(NAMES.split()[: 4 + norm]))


def test_frozen_phi(launched: list[str]) -> None:
    """dx has the same bits."""
    case = mix_case(9, 9, 128, dtype=BF16)
    d_h, d_ms = case.grads[3:]
    dx, none, _ = projection.backward(d_h, d_ms, case.x, case.phi, None, [True, False, False])
    assert launched == [DX]
    assert none.shape == (0,)
    assert torch.equal(dx, projection.backward(d_h, d_ms, case.x, case.phi, None, [True, True, False])[0])


def test_frozen_streams(launched: list[str]) -> None:
    case = mix_case(9, 9, 128, dtype=BF16)
    d_h, d_ms = case.grads[3:]
    none, dphi, _ = projection.backward(d_h, d_ms, case.x, case.phi, None, [False, True, False])
    assert launched == [DPHI]
    assert none.shape == (0,)
    assert torch.equal(dphi, projection.backward(d_h, d_ms, case.x, case.phi, None, [True, True, False])[1])


@pytest.mark.parametrize("norm", [False, True])
def test_tiles_of_phi(norm: bool) -> None:
    """Each number is where the kernel looks for it, and rows that phi does not have are zero."""
    rows, n, width = 40, 3, 256
    phi = draw(rows, n * width)
    weight = draw(n * width) if norm else None
    tiles = split_in_tiles(phi, weight, n)
    assert tiles.shape == (2, n, 2, 2, 32, 128)
    whole = phi if weight is None else phi * weight
    for k, o, c in ((0, 0, 0), (1, 2, 255), (39, 1, 131), (33, 0, 7), (17, 2, 97)):
        in_32 = c % 32
        place = c % 128 // 32 * 32 + in_32 // 2 % 4 * 8 + in_32 // 8 * 2 + in_32 % 2
        high, middle = tiles[c // 128, o, k // 32, :, k % 32, place].float()
        assert abs(middle) < abs(high) * 2**-6
        assert abs(high + middle - whole[k, o * width + c]) < abs(high) * 2**-14
    assert not tiles[:, :, 1, :, 8:].any()


def _streams(n: int = 9, width: int = 128, dtype: torch.dtype = BF16) -> list[Tensor | None]:
    wide, row = torch.zeros(3, n, width, dtype=dtype), torch.zeros(3, width, dtype=dtype)
    return [wide, wide, row, wide]


@pytest.mark.parametrize(
    ("streams", "rows", "of_phi"),
    [
        (_streams(dtype=torch.float32), 99, False),
        (_streams(width=40), 99, False),
        (_streams(width=64), 99, True),
        (_streams(), 80, False),
        (_streams(), 289, True),
        ([*_streams()[:3], torch.zeros(3, 128, 9, dtype=BF16).mT], 99, True),
        ([torch.zeros(9, 1, 128, dtype=BF16).transpose(0, 1), *_streams()[1:]], 99, False),
        ([torch.zeros(3 * 9 * 128 + 1, dtype=BF16)[1:].view(3, 9, 128), *_streams()[1:]], 99, False),
    ],
    ids=[
        "float32",
        "odd width",
        "width",
        "few rows",
        "too many rows",
        "channels first",
        "streams first",
        "between copies",
    ],
)
def test_what_it_is_not_for(
    streams: list[Tensor | None], rows: int, of_phi: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "of", lambda device: gpus.TABLE[90])
    assert fits_dx(_streams(), 99)
    assert fits_dx([*_streams()[:2], None, None], 288)
    assert not fits_dx(streams, rows)
    assert streams[0] is not None
    assert fits(streams[0], rows) == of_phi


@pytest.mark.parametrize("tokens", [1, 128, 129, 1000, 8192, 100_000])
@pytest.mark.parametrize("blocks", [9, 160, 512])
def test_no_program_is_without_columns(tokens: int, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "processors", lambda device: 132)
    shares, each = share_columns(tokens, blocks, torch.device(DEVICE))
    assert (shares - 1) * each < blocks <= shares * each
    tiles = -(-tokens // DX_TOKENS)
    assert tiles * shares >= min(66, tiles * blocks)


@pytest.mark.memory
@GPU
@pytest.mark.parametrize(
    ("tokens", "n", "width", "rows", "norm", "given"),
    [
        (1, 16, 128, 288, False, (True, True)),
        (1000, 10, 1280, 120, True, (True, False)),
        (77, 12, 2560, 168, False, (False, True)),
        (333, 15, 384, 255, True, (False, False)),
        (2048, 4, 1024, 90, False, (True, True)),
        (2100, 16, 4096, 288, False, (True, True)),
    ],
)
def test_against_the_reference(
    tokens: int, n: int, width: int, rows: int, norm: bool, given: tuple[bool, bool]
) -> None:
    x = draw(tokens, n, width, dtype=BF16)
    d_out = draw(tokens, width, dtype=BF16) if given[0] else None
    d_x = draw(tokens, n, width, dtype=BF16) if given[1] else None
    phi = draw(rows, n * width, scale=0.1)
    weight = draw(n * width).abs() + 0.5 if norm else None
    # In rows of whole 16 bytes.
    dh = bf16_parts(torch.nn.functional.pad(draw(tokens, rows), (0, -rows % 8)))
    coefficient, h_pre = draw(tokens), draw(n, tokens)

    def run(s: slice, in_place: bool = False, replace: bool = False) -> list[Tensor]:
        cut = [None if t is None else t[s].clone() for t in (x, d_out, d_x)]
        assert cut[0] is not None
        dx = torch.empty_like(x[s], dtype=torch.float64 if replace else BF16)
        if in_place and cut[2] is not None:
            dx = cut[2]
        cut_dh = dh[:, s].contiguous()
        with watched(replace) as names:
            streamed_rows.gradient_of_streams(*cut, phi, weight, cut_dh, coefficient[s], h_pre[:, s].contiguous(), dx)  # type: ignore[arg-type]
            part = streamed_rows.partial_dphi(cut[0], cut_dh, rows)
        assert names == [DX, DPHI]
        return [dx, part.sum(0, dtype=torch.float64)]

    whole, last = slice(None), slice(tokens - 1, tokens)
    got, wanted = run(whole), run(whole, replace=True)
    assert_near(got[0], wanted[0], "dx")
    assert_near(got[1].float(), wanted[1], "dphi")
    for again in (run(whole), run(whole, in_place=True)):
        assert all(map(torch.equal, got, again))
    assert torch.equal(run(last)[0], got[0][last])


@GPU
@pytest.mark.parametrize(
    ("tokens", "n", "width", "norm"), [(4096, 16, 1280, False), (8192, 9, 1264, True), (5000, 12, 4096, False)]
)
def test_projections_have_the_same_bits(tokens: int, n: int, width: int, norm: bool) -> None:
    """Of many tokens, which are made here, and of few."""
    x, phi = draw(tokens, n, width, dtype=BF16), draw(n * (n + 2), n * width, scale=0.1)
    weight = draw(n * width).abs() + 0.5 if norm else None
    with watched() as names:
        h, ms = projection.forward(x, phi, weight)
        assert names == [PROJECT]
        names.clear()
        for few in (1, 130, 700):
            some = slice(tokens - few, tokens)
            h_few, ms_few = projection.forward(x[some], phi, weight)
            assert not names
            assert torch.equal(h_few, h[some])
            assert torch.equal(ms_few, ms[some])
    with watched(replace=True):
        wanted = projection.forward(x, phi, weight)
    assert_near(h, wanted[0].double(), "h")
    assert_near(ms, wanted[1].double(), "ms")
