"""The kernels of the norm after the aggregate, against the references of the operators in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mhc_compile.ops  # noqa: F401  (registers the operators)
from mhc_compile.kernels import boundary, generate_mix_and_aggregate
from mhc_compile.ops._register import REFERENCES
from tests.kernels.cases import FORMS, MARKS, assert_near, draw, keywords, mix_case
from tests.kernels.gluon import watched
from tests.kernels.test_boundary import before

pytestmark = MARKS
BF16 = torch.bfloat16
# Few half-steps, over which the interpreter takes its time.
FORM = FORMS["large_eps"]
EPS = 1e-3


def _scalars() -> dict[str, Any]:
    rms, gates, sinkhorn = FORM
    return rms.as_kwargs() | gates.as_kwargs() | sinkhorn.as_kwargs() | {"input_norm_eps": EPS}


def _exact(name: str, *args: Any) -> tuple[Tensor, ...]:
    wide = [a.double().cpu() if isinstance(a, Tensor) else a for a in args]
    return REFERENCES[name](*wide, **_scalars())  # type: ignore[no-any-return]


def _compare(got: Any, wanted: Any, noise: float) -> None:
    for result, value in zip(got, wanted, strict=True):
        assert tuple(result.shape) == tuple(value.shape)
        if value.numel():
            assert_near(result, value.to(result.device), noise=noise)


@pytest.mark.parametrize(
    ("tokens", "n", "width", "dtype", "weighted"),
    [
        (5, 1, 7, torch.float32, True),
        (33, 2, 129, BF16, True),
        (3, 3, 40, torch.float16, False),
        (6, 4, 520, torch.float32, True),
        (2, 9, 24, BF16, True),
        pytest.param(300, 4, 9000, BF16, True, marks=pytest.mark.gpu),
        (0, 2, 24, BF16, True),
    ],
)
def test_mix(tokens: int, n: int, width: int, dtype: torch.dtype, weighted: bool) -> None:
    case = mix_case(tokens, n, width, dtype=dtype, norm=weighted)
    weight = draw(width) + 2 if weighted else None
    form = keywords(FORM) | {"input_norm_eps": EPS}
    out = generate_mix_and_aggregate.forward(*case.parameters, weight, **form)
    _compare(out, _exact("generate_mix_and_aggregate", *case.parameters, weight), 1e-5)
    for needs in ([True] * 4 + [weighted] * 2, [False] * 5 + [weighted], [True] + [False] * 5):
        saved = (*case.grads, *case.parameters, *out[3:], needs, None, weight)
        got = generate_mix_and_aggregate.backward(*saved, **form)
        # The gradient of what the norm reads is rounded to the dtype of its own.
        noise = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
        _compare(got, _exact("generate_mix_and_aggregate_backward", *saved), noise)


def test_two_dims_of_tokens() -> None:
    """The same bits as in one."""
    case, weight = mix_case(6, 4, 40, dtype=BF16), draw(40) + 2
    form = keywords(FORM) | {"input_norm_eps": EPS}
    out = generate_mix_and_aggregate.forward(*case.parameters, weight, **form)
    needs = [True] * 4 + [False, True]

    def gradients(*tokens: int) -> tuple[Tensor, ...]:
        grads = [g.unflatten(0, tokens) for g in case.grads]
        x, *parameters = case.parameters
        saved = (x.unflatten(0, tokens), *parameters, *(s.unflatten(0, tokens) for s in out[3:]), needs, None, weight)
        return generate_mix_and_aggregate.backward(*grads, *saved, **form)

    for one, two in zip(gradients(6), gradients(2, 3), strict=True):
        assert torch.equal(one.flatten(), two.flatten())


def test_without_a_gradient_of_the_layer_input() -> None:
    case, weight = mix_case(5, 2, 24), draw(24)
    form = keywords(FORM) | {"input_norm_eps": EPS}
    out = generate_mix_and_aggregate.forward(*case.parameters, weight, **form)
    saved = (None, *case.grads[1:], *case.parameters, *out[3:], [True] * 4 + [False, True], None, weight)
    got = generate_mix_and_aggregate.backward(*saved, **form)
    assert torch.equal(got[5], torch.zeros_like(weight))
    _compare(got, _exact("generate_mix_and_aggregate_backward", *saved), 1e-5)


@pytest.mark.parametrize(("dtype", "bias"), [(torch.float32, True), (BF16, True), (BF16, False)])
@pytest.mark.parametrize("weighted", [True, False])
def test_boundary(dtype: torch.dtype, bias: bool, weighted: bool) -> None:
    """Without a bias of the layer and in bfloat16, the wide part is the one in Gluon (here its reference)."""
    args, case = before(20, 4, 64, dtype, bias=bias), mix_case(20, 4, 64, dtype=dtype)
    weight = draw(64) + 2 if weighted else None
    form = keywords(FORM) | {"input_norm_eps": EPS}
    parameters = (*case.parameters[1:],)
    with watched() as launched:
        out = boundary.forward(*args, *parameters, weight, **form)
        needs = [True, bias, *[True] * 6, False, weighted]
        saved = (draw(20, 4, 64, dtype=dtype), *case.grads, *args, *parameters, out[0], *out[4:], needs, weight)
        got = boundary.backward(*saved, **form)
    assert ("boundary_gradients_kernel" in launched) == (dtype == BF16 and not bias)
    # The gradient of x' is rounded to the streams' dtype on the way.
    _compare(got, _exact("boundary_backward", *saved), 4 * torch.finfo(dtype).eps if dtype == BF16 else 2e-5)


def test_bits_of_a_token() -> None:
    case, weight = mix_case(70, 2, 66, dtype=BF16), draw(66)
    form = keywords(FORM) | {"input_norm_eps": EPS}

    def run(s: slice) -> list[Tensor]:
        x = case.x[s]
        out = generate_mix_and_aggregate.forward(x, *case.parameters[1:], weight, **form)
        grads = [g[s] for g in case.grads]
        needs = [True] * 4 + [False, True]
        back = generate_mix_and_aggregate.backward(
            *grads, x, *case.parameters[1:], *out[3:], needs, None, weight, **form
        )
        return [*out, back[0]]

    whole = run(slice(None))
    for s in (slice(69, 70), slice(5, 60)):
        assert all(torch.equal(a, b[s]) for a, b in zip(run(s), whole, strict=True))
