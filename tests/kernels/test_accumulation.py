"""d_x: every backward that makes a gradient of the streams adds it to one that is there already."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mhc_compile.kernels import (
    aggregate,
    expand_combine,
    generate_mix,
    generate_mix_and_aggregate,
    head,
    mix_streams,
    projection,
)
from tests.kernels.cases import FORMS, MARKS, USUAL, assert_near, draw, keywords, mix_case

pytestmark = MARKS
FORM = keywords(FORMS[USUAL])
# The gradient of the streams as a function of d_x, from streams [5, n, 33].
Backward = Callable[[Tensor | None], Tensor]


def _mix(n: int, dtype: torch.dtype) -> Backward:
    case = mix_case(5, n, 33, dtype=dtype)
    h, ms = generate_mix_and_aggregate.forward(*case.parameters, **FORM)[3:]
    needs = [True] * 4 + [False]
    return lambda d_x: generate_mix_and_aggregate.backward(
        *case.grads, *case.parameters, h, ms, needs, d_x, **FORM
    )[0]  # fmt: skip


def _mix_without_aggregate(n: int, dtype: torch.dtype) -> Backward:
    case = mix_case(5, n, 33, dtype=dtype)
    h, ms = generate_mix.forward(*case.parameters, **FORM)[3:]
    grads, needs = [draw(5, n), *case.grads[1:]], [True] + [False] * 4
    return lambda d_x: generate_mix.backward(*grads, *case.parameters, h, ms, needs, d_x, **FORM)[0]


def _head(n: int, dtype: torch.dtype) -> Backward:
    case = mix_case(5, n, 33, dtype=dtype, parts=1)
    rms = FORM["rms"]
    h, ms = head.forward(*case.parameters, rms=rms, pre_eps=0.0)[1:]
    grads, needs = [case.grads[0], *case.grads[3:]], [True] * 4 + [False]
    return lambda d_x: head.backward(*grads, *case.parameters, h, ms, needs, d_x, rms=rms, pre_eps=0.0)[0]


def _projection(n: int, dtype: torch.dtype) -> Backward:
    case = mix_case(5, n, 33, dtype=dtype)
    grads = case.grads[3:]
    return lambda d_x: projection.backward(*grads, case.x, case.phi, None, [True, True, False], d_x)[0]


def _aggregate(n: int, dtype: torch.dtype) -> Backward:
    x, h_pre, d_out = draw(5, n, 33, dtype=dtype), draw(5, n), draw(5, 33, dtype=dtype)
    return lambda d_x: aggregate.backward(d_out, x, h_pre, [True, True], d_x)[0]


def _mixed(n: int, dtype: torch.dtype) -> Backward:
    x, h, d_out = draw(5, n, 33, dtype=dtype), draw(5, n, 3), draw(5, 3, 33, dtype=dtype)
    return lambda d_x: mix_streams.backward(d_out, x, h, [True, True], d_x)[0]


def _combine(n: int, dtype: torch.dtype) -> Backward:
    x, d_new = draw(5, n, 33, dtype=dtype), draw(5, n, 33, dtype=dtype)
    f, post, res = draw(5, 33, dtype=dtype), draw(5, n), draw(5, n, n)
    return lambda d_x: expand_combine.backward(d_new, f, None, post, x, res, [True, False, True, True, True], d_x)[3]


CASES = [_mix, _mix_without_aggregate, _head, _projection, _aggregate, _mixed, _combine]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [4, 9])
@pytest.mark.parametrize("make", CASES)
def test_gradient_is_added(make: Callable[[int, torch.dtype], Backward], n: int, dtype: torch.dtype) -> None:
    backward = make(n, dtype)
    alone = backward(None)
    for d_x in (draw(5, n, 33, dtype=dtype), draw(5, 33, n, dtype=dtype).mT):
        total = backward(d_x)
        assert total.dtype == dtype
        if dtype == torch.float32:
            assert_near(total, alone.double() + d_x.double())
        else:
            # What is compared with has been rounded before it is added.
            slack = 2.0**-7 * (alone.double().abs() + total.double().abs())
            assert bool(((total.double() - (alone.double() + d_x.double())).abs() <= slack + 1e-6).all())
    assert not torch.equal(total, alone)
