"""The backward of boundary with its wide part in one pass: on a CPU the part is the reference of its operator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mhc_compile.kernels import boundary, boundary_gradients, gpus
from mhc_compile.kernels.boundary_gradients import TOKENS, fits, split_tokens
from tests.kernels.cases import DEVICE, FORMS, MARKS, USUAL, bf16_parts, draw, keywords, mix_case
from tests.kernels.gluon import GPU, watched
from tests.kernels.test_boundary import before, check

pytestmark = MARKS
BF16 = torch.bfloat16
KERNEL = "boundary_gradients_kernel"


@pytest.mark.parametrize(
    ("tokens", "n", "width", "parts", "norm"),
    [(70, 4, 80, 3, False), (33, 2, 48, 3, True), (20, 4, 144, 3, True), (5, 4, 64, 2, False), (16, 4, 32, 1, True)],
)
def test_shapes(tokens: int, n: int, width: int, parts: int, norm: bool, launched: list[str]) -> None:
    case = mix_case(tokens, n, width, dtype=BF16, parts=parts, norm=norm)
    check(before(tokens, n, width, BF16, bias=False), case)
    assert KERNEL in launched


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, launched: list[str]) -> None:
    check(before(5, 4, 32, BF16, bias=False), mix_case(5, 4, 32, dtype=BF16), form)
    assert KERNEL in launched


def test_frozen_parameters(launched: list[str]) -> None:
    args, case = before(5, 4, 32, BF16, bias=False), mix_case(5, 4, 32, dtype=BF16)
    form = keywords(FORMS[USUAL])
    out = boundary.forward(*args, *case.parameters[1:], **form)
    saved = draw(5, 4, 32, dtype=BF16), *case.grads, *args, *case.parameters[1:], out[0], *out[4:]
    needs = [True, False, True, True, True, False, False, True, False]
    got = boundary.backward(*saved, needs, **form)
    assert KERNEL in launched
    needs.append(False)  # there is no input norm
    assert [g.numel() > 0 for g in got] == needs
    whole = boundary.backward(*saved, [True, False, *[True] * 6, False], **form)
    for gradient, need, other in zip(got, needs, whole, strict=True):
        assert torch.equal(gradient, other) or not need


def _streams(n: int = 4, width: int = 64, dtype: torch.dtype = BF16) -> list[Tensor | None]:
    wide, row = torch.zeros(3, n, width, dtype=dtype), torch.zeros(3, width, dtype=dtype)
    return [wide, row, wide, row, wide]


@pytest.mark.parametrize(
    ("streams", "rows"),
    [
        (_streams(dtype=torch.float32), 24),
        (_streams(n=8), 80),
        (_streams(n=3), 15),
        (_streams(width=40), 24),
        (_streams(), 40),
        ([None, *_streams()[1:]], 24),
        ([*_streams()[:4], torch.zeros(3, 64, 4, dtype=BF16).mT], 24),
        ([*_streams()[:4], torch.zeros(4, 1, 64, dtype=BF16).transpose(0, 1)], 24),
    ],
    ids=["float32", "8 streams", "3 streams", "width", "rows", "no gradient", "channels first", "streams first"],
)
def test_what_it_is_not_for(streams: list[Tensor | None], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "of", lambda device: gpus.TABLE[90])
    assert fits(_streams(), torch.zeros(24, 256))
    assert not fits(streams, torch.zeros(rows, 256))


def test_tokens_are_split_without_a_rest() -> None:
    for tokens in (1, 16, 17, 1000, 8192):
        splits, each = split_tokens(tokens, 4096, torch.device(DEVICE))
        assert each % TOKENS == 0
        assert (splits - 1) * each < tokens <= splits * each


@pytest.mark.memory
@GPU
@pytest.mark.parametrize(
    ("tokens", "n", "width", "rows"),
    [(1, 4, 64, 24), (1000, 4, 1280, 24), (77, 2, 400, 8), (500, 4, 2576, 4), (8192, 4, 4096, 24)],
)
def test_against_the_reference(tokens: int, n: int, width: int, rows: int) -> None:
    wide = [draw(tokens, n, width, dtype=BF16) for _ in range(3)]
    thin = [draw(tokens, width, dtype=BF16) for _ in range(2)]
    phi = draw(rows, n * width, scale=0.1)
    dh = bf16_parts(draw(tokens, -(-rows // 8) * 8))
    gates = draw(tokens), draw(n, tokens), draw(tokens, n), draw(tokens, n, n)
    args = thin[0], wide[1], thin[1], wide[2], phi, None, dh, *gates

    def run(in_place: bool, replace: bool = False) -> list[Tensor]:
        d_new, df = wide[0].clone(), torch.empty_like(thin[1])
        dx = d_new if in_place else torch.empty_like(wide[2])
        with watched(replace):
            parts = boundary_gradients.backward(dx, df, d_new, *args)
        return [dx, df, *(part.sum(0, dtype=torch.float64) for part in parts)]

    got, wanted = run(False), run(False, replace=True)
    for result, value, limit in zip(got, wanted, (4e-3, 4e-3, 1e-6, 1e-5), strict=True):
        assert float((result.double() - value).norm() / value.norm()) < limit
    for again in (run(False), run(True)):
        assert all(map(torch.equal, got, again))


@GPU
@pytest.mark.parametrize("width", [1280, 4096])
def test_a_token_does_not_depend_on_the_batch(width: int, launched: list[str]) -> None:
    args, case = before(3000, 4, width, BF16, bias=False), mix_case(3000, 4, width, dtype=BF16)
    form, d_new = keywords(FORMS[USUAL]), draw(3000, 4, width, dtype=BF16)

    def run(s: slice) -> list[Tensor]:
        cut = tuple(None if t is None else t[s] for t in args)
        out = boundary.forward(*cut, *case.parameters[1:], **form)
        grads = (d_new[s], *(g[s] for g in case.grads))
        needs = [True, False, *[True] * 6, False]
        back = boundary.backward(*grads, *cut, *case.parameters[1:], out[0], *out[4:], needs, **form)
        return [back[0], back[2], back[3], back[4]]

    whole = run(slice(None))
    # A program stores the sums of a block with one tile of tokens, and those of a chunk with eight.
    for s in (slice(2999, 3000), slice(5, 69), slice(17, 529)):
        for a, b in zip(run(s), whole, strict=True):
            assert torch.equal(a, b[s])
    assert launched.count(KERNEL) == 4
