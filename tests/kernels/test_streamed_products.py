"""The wide products for 8 streams in Gluon: on a CPU the kernel is what it computes, the host functions stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mhc_compile.kernels import generate_mix, generate_mix_and_aggregate, gpus, projection, streamed_products
from mhc_compile.kernels.streamed_products import TOKENS, fits, split_tokens
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
    project,
)
from tests.kernels.gluon import GPU, watched

pytestmark = MARKS
BF16 = torch.bfloat16
KERNEL = "streamed_products_kernel"
FORM = FORMS[USUAL]
NAMES = "dx dphi dscale dbias dnorm"


@pytest.mark.parametrize(("tokens", "width", "norm"), [(37, 48, False), (5, 144, True)])
@pytest.mark.parametrize("more", [False, True])
def test_mix(tokens: int, width: int, norm: bool, more: bool, launched: list[str]) -> None:
    """With another gradient of x, and without."""
    case = mix_case(tokens, 8, width, dtype=BF16, norm=norm)
    *_, h, ms = generate_mix_and_aggregate.forward(*case.parameters, **keywords(FORM))
    d_x = draw(tokens, 8, width, dtype=BF16) if more else None
    needs = [True] * 4 + [norm]
    got = generate_mix_and_aggregate.backward(*case.grads, *case.parameters, h, ms, needs, d_x, **keywords(FORM))
    assert launched == [KERNEL]
    expected = mix_gradients(case, FORM, case.grads)
    expected[0] = expected[0] if d_x is None else expected[0] + d_x.double()
    assert_all_near(got[: 4 + norm], expected, " ".join(NAMES.split()[: 4 + norm]))


def test_mix_without_the_layer_input(launched: list[str]) -> None:
    case = mix_case(9, 8, 48, dtype=BF16)
    *_, h, ms = generate_mix.forward(*case.parameters, **keywords(FORM))
    grads = [draw(9, 8), *case.grads[1:]]
    got = generate_mix.backward(*grads, *case.parameters, h, ms, [True] * 4 + [False], **keywords(FORM))
    assert launched == [KERNEL]
    assert_all_near(got[:4], mix_gradients(case, FORM, grads, of_h_pre=True), " ".join(NAMES.split()[:4]))


@pytest.mark.parametrize("norm", [False, True])
def test_projection(norm: bool, launched: list[str]) -> None:
    case = mix_case(9, 8, 48, dtype=BF16, norm=norm)
    x, phi, weight = case.x, case.phi, case.norm_weight
    d_h, d_ms = case.grads[3:]
    got = projection.backward(d_h, d_ms, x, phi, weight, [True, True, norm])
    assert launched == [KERNEL]
    leaves = [t.double().requires_grad_() for t in (x, phi, weight) if t is not None]
    outputs = project(leaves[0], leaves[1], leaves[2] if norm else None)
    expected = torch.autograd.grad(outputs, leaves, [d_h.double(), d_ms.double()])
    assert_all_near(got[: 2 + norm], expected, " ".join(["dx", "dphi", "dnorm"][: 2 + norm]))


def test_frozen_phi(launched: list[str]) -> None:
    """dx has the same bits."""
    case = mix_case(9, 8, 48, dtype=BF16)
    d_h, d_ms = case.grads[3:]
    dx, none, _ = projection.backward(d_h, d_ms, case.x, case.phi, None, [True, False, False])
    assert launched == [KERNEL]
    assert none.shape == (0,)
    assert torch.equal(dx, projection.backward(d_h, d_ms, case.x, case.phi, None, [True, True, False])[0])


def _streams(n: int = 8, width: int = 64, dtype: torch.dtype = BF16) -> list[Tensor | None]:
    wide, row = torch.zeros(3, n, width, dtype=dtype), torch.zeros(3, width, dtype=dtype)
    return [wide, wide, row, wide]


@pytest.mark.parametrize(
    ("streams", "rows"),
    [
        (_streams(dtype=torch.float32), 80),
        (_streams(n=4), 24),
        (_streams(n=9), 80),
        (_streams(width=40), 80),
        (_streams(), 16),
        (_streams(), 75),
        (_streams(), 88),
        ([None, *_streams()[1:]], 80),
        ([*_streams()[:3], torch.zeros(3, 64, 8, dtype=BF16).mT], 80),
        ([*_streams()[:3], torch.zeros(8, 1, 64, dtype=BF16).transpose(0, 1)], 80),
    ],
    ids=[
        "float32",
        "4 streams",
        "9 streams",
        "width",
        "few rows",
        "odd rows",
        "many rows",
        "no x",
        "channels first",
        "streams first",
    ],
)
def test_what_it_is_not_for(streams: list[Tensor | None], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "of", lambda device: gpus.TABLE[90])
    assert fits(_streams(), torch.zeros(80, 512))
    assert fits([*_streams()[:2], None, None], torch.zeros(72, 512))
    assert not fits(streams, torch.zeros(rows, 512))


@pytest.mark.parametrize("tokens", [1, 32, 33, 1000, 8192])
@pytest.mark.parametrize("groups", [4, 24, 80, 128, 224])
def test_tokens_are_split_without_a_rest(tokens: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "processors", lambda device: 132)
    splits, each = split_tokens(tokens, groups, torch.device(DEVICE))
    assert each % TOKENS == 0
    assert (splits - 1) * each < tokens <= splits * each
    assert splits * groups >= 100 or tokens < 8192


@pytest.mark.memory
@GPU
@pytest.mark.parametrize(
    ("tokens", "width", "rows", "norm", "given"),
    [
        (1, 64, 80, False, (True, True)),
        (1000, 1296, 80, True, (True, False)),
        (77, 2560, 72, False, (False, True)),
        (333, 400, 80, True, (False, False)),
        (8192, 4096, 80, False, (True, True)),
    ],
)
def test_against_the_reference(tokens: int, width: int, rows: int, norm: bool, given: tuple[bool, bool]) -> None:
    x = draw(tokens, 8, width, dtype=BF16)
    d_out = draw(tokens, width, dtype=BF16) if given[0] else None
    d_x = draw(tokens, 8, width, dtype=BF16) if given[1] else None
    phi = draw(rows, 8 * width, scale=0.1)
    weight = draw(8 * width).abs() + 0.5 if norm else None
    dh = bf16_parts(draw(tokens, rows))
    coefficient, h_pre = draw(tokens), draw(8, tokens)

    def run(s: slice, in_place: bool = False, replace: bool = False, need_dphi: bool = True) -> list[Tensor]:
        cut = [None if t is None else t[s].clone() for t in (x, d_out, d_x)]
        dx = torch.empty_like(x[s], dtype=torch.float64 if replace else BF16)
        if in_place and cut[2] is not None:
            dx = cut[2]
        with watched(replace):
            part = streamed_products.multiply(
                *cut, phi, weight, dh[:, s].contiguous(), coefficient[s], h_pre[:, s].contiguous(), dx, need_dphi
            )  # type: ignore[arg-type]
        return [dx, part.sum(0, dtype=torch.float64)]

    whole, last = slice(None), slice(tokens - 1, tokens)
    got, wanted = run(whole), run(whole, replace=True)
    assert_near(got[0], wanted[0], "dx")
    assert_near(got[1].float(), wanted[1], "dphi")
    for again in (run(whole), run(whole, in_place=True)):
        assert all(map(torch.equal, got, again))
    assert torch.equal(run(last)[0], got[0][last])
    assert torch.equal(run(whole, need_dphi=False)[0], got[0])
