"""Regions are run on a few dozen tokens, where nothing in them can depend on how many there are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mhc_compile.passes.recognise import rms, sinkhorn
from mhc_compile.passes.recognise.fewer_tokens import on_few_tokens
from mhc_compile.passes.recognise.region import Region
from tests.passes.test_forms import FunctionSinkhorn
from tests.zoo import check
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, WIDTH, BATCH, LENGTH = 4, 6, 2, 300
FULL = ["expand_combine", "generate_mix_and_aggregate"]


class _Flat(Sublayer):
    """All sequences in one row of tokens, and back."""

    def res(self, logits: Tensor) -> Tensor:
        return super().res(logits.flatten(0, 1)).unflatten(0, (BATCH, LENGTH))


class _Expanded(Sublayer):
    def columns(self, m: Tensor) -> Tensor:
        return m / (m.sum(-2, keepdim=True).expand(BATCH, LENGTH, N, N) + 1e-6)


class _SeenLater(Sublayer):
    """exp before the logits are seen as matrices."""

    def start(self, logits: Tensor) -> Tensor:
        return logits.flatten(2).exp().view(BATCH, LENGTH, self.n, self.n)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, ...]]:
    """In which shape the regions of Sinkhorn projections and of norms ran."""
    shapes: dict[str, tuple[int, ...]] = {}

    def noting(name: str, original: Callable[..., Any], found: Region, *rest: Any) -> Any:
        shapes[name] = found.shape
        return original(found, *rest)

    for module, name in ((sinkhorn, "identify"), (rms, "_fit")):
        monkeypatch.setattr(module, name, partial(noting, name, getattr(module, name)))
    return shapes


def _run(kind: type[Sublayer], length: int = LENGTH, **options: Any) -> check.Outcome:
    outcome = check.run(kind(N, WIDTH, 3, 2), (torch.randn(BATCH, length, N, WIDTH),), **options)
    check.assert_as_accurate(outcome)
    return outcome


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", [Sublayer, _Flat, _Expanded, FunctionSinkhorn])
def test_few_tokens_stand_for_all(kind: type[Sublayer], ran: dict[str, tuple[int, ...]]) -> None:
    outcome = _run(kind)
    assert outcome.operators == FULL, str(outcome.report)
    assert ran["_fit"] == (BATCH, 61, 1)
    assert ran["identify"] in ((BATCH, 61, N, N), (61, N, N)), ran


@pytest.mark.parametrize("n", [N, 9])
def test_few_tokens_are_seen_as_matrices_too(n: int, ran: dict[str, tuple[int, ...]]) -> None:
    """A matrix may have more numbers than there are few tokens: it stays whole."""
    check.assert_as_accurate(check.run(_SeenLater(n, WIDTH, 3, 2), (torch.randn(BATCH, LENGTH, n, WIDTH),)))
    assert ran["identify"] == (BATCH, 61, n * n)


def test_few_tokens_are_left_alone(ran: dict[str, tuple[int, ...]]) -> None:
    assert _run(Sublayer, 100).operators == FULL
    assert ran["identify"] == (BATCH, 100, N, N)


def _late() -> Tensor:
    return (torch.arange(LENGTH) >= 200).view(-1, 1, 1)


class _LateDetached(Sublayer):
    """The value is a Sinkhorn projection everywhere, the gradient only of the first tokens."""

    def start(self, logits: Tensor) -> Tensor:
        m = super().start(logits)
        return torch.where(_late(), m.detach(), m)


class _LateDoubled(Sublayer):
    def start(self, logits: Tensor) -> Tensor:
        m = super().start(logits)
        return torch.where(_late(), m + torch.eye(N), m)


class _LateSlice(Sublayer):
    def start(self, logits: Tensor) -> Tensor:
        m = super().start(logits).clone()
        m[:, 200:, 0] *= 2.0
        return m


class _Rolled(Sublayer):
    def start(self, logits: Tensor) -> Tensor:
        return super().start(logits).roll(1, 1)


class _Flipped(Sublayer):
    def start(self, logits: Tensor) -> Tensor:
        return super().start(logits).flip(1)


class _AllTokens(Sublayer):
    """Half of the steps sum over tokens."""

    def columns(self, m: Tensor) -> Tensor:
        return m / (m.mean(1, keepdim=True) + 1e-6)


class _Before(Sublayer):
    def start(self, logits: Tensor) -> Tensor:
        m = super().start(logits)
        return torch.cat([m[:, :1], m[:, :-1]], 1)


class _Turned(Sublayer):
    """Batch and length change places in memory and not in name."""

    def start(self, logits: Tensor) -> Tensor:
        return super().start(logits).transpose(0, 1).reshape(BATCH, LENGTH, N, N)


def _place(of: Tensor, dim: int = 1) -> Tensor:
    """1, 2, 3... for the tokens, with no number of tokens written down."""
    return torch.ones_like(of[..., :1]).cumsum(dim)


class _CountedDoubled(Sublayer):
    def start(self, logits: Tensor) -> Tensor:
        m = super().start(logits)
        return torch.where(_place(m) > 150, m + torch.eye(N), m)


class _CountedDetached(Sublayer):
    def start(self, logits: Tensor) -> Tensor:
        m = super().start(logits)
        return torch.where(_place(m) > 150, m.detach(), m)


class _ManyDoubled(Sublayer):
    """Whether there are many tokens shows in a sum over them."""

    def start(self, logits: Tensor) -> Tensor:
        m = super().start(logits)
        return torch.where(torch.ones_like(m).sum(1, keepdim=True) > 150, m + torch.eye(N), m)


class _PairsDoubled(Sublayer):
    """The place, from products of tokens with tokens."""

    def start(self, logits: Tensor) -> Tensor:
        m = super().start(logits)
        one = torch.ones_like(m[..., 0])
        before = (one @ one.mT).tril() @ one
        return torch.where(before[..., None] > 150 * N, m + torch.eye(N), m)


class _LateInBackward(torch.autograd.Function):
    """The slice is an index of the backward alone."""

    @staticmethod
    def forward(ctx: Any, m: Tensor) -> Tensor:
        return m.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.cat([grad[:, :200], grad[:, 200:] * 3], 1)


class _CountedInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, m: Tensor) -> Tensor:
        return m.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.where(_place(grad) * 0.01 > 1.5, grad * 3, grad)


class _LateGradient(Sublayer):
    def start(self, logits: Tensor) -> Tensor:
        return _LateInBackward.apply(super().start(logits))  # type: ignore[no-untyped-call, no-any-return]


class _CountedGradient(Sublayer):
    def start(self, logits: Tensor) -> Tensor:
        return _CountedInBackward.apply(super().start(logits))  # type: ignore[no-untyped-call, no-any-return]


class _LateScaled(Sublayer):
    def rms(self, flat: Tensor) -> Tensor:
        r = super().rms(flat)
        return torch.where(_late()[..., 0], r * 2, r)


class _CountedScaled(Sublayer):
    def rms(self, flat: Tensor) -> Tensor:
        r = super().rms(flat)
        return torch.where(_place(r) > 150, r * 2, r)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "kind",
    [
        *(_LateDetached, _LateDoubled, _LateSlice, _Rolled, _Flipped, _AllTokens, _Before, _Turned),
        *(_CountedDoubled, _CountedDetached, _ManyDoubled, _PairsDoubled, _LateGradient, _CountedGradient),
    ],
)
def test_a_gate_that_tells_tokens_apart_is_left(kind: type[Sublayer]) -> None:
    outcome = _run(kind)
    told = [site for site in outcome.report.rewritten if "half-steps" in site.detail]
    assert not told, str(outcome.report)


@pytest.mark.parametrize("kind", [_LateScaled, _CountedScaled])
def test_a_norm_that_tells_tokens_apart_is_left(kind: type[Sublayer]) -> None:
    assert _run(kind).operators == ["aggregate", "expand_combine", "projection", "sinkhorn"]


def test_a_region_without_tokens_is_left_alone() -> None:
    empty = Region(None, None, (), (), ())  # type: ignore[arg-type]
    assert on_few_tokens(empty) is empty
