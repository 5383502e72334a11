"""Small regions by behaviour: forms that differ only where an eps, a guard or a kink counts are kept apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.zoo import check
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, WIDTH = 4, 6


class _Guarded(Sublayer):
    """An eps of next to nothing, so that the squares of a small token count."""

    def __init__(self, mode: str, eps: float) -> None:
        super().__init__(N, WIDTH, 3, 2)
        self.mode, self.eps = mode, eps

    def rms(self, flat: Tensor) -> Tensor:
        ms = flat.square().mean(-1, keepdim=True)
        if self.mode == "inside":
            return torch.rsqrt(ms + self.eps)
        return 1 / (ms.sqrt() + self.eps if self.mode == "outside" else ms.sqrt().clamp_min(self.eps))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("mode", "eps", "size", "taken"),
    [
        ("outside", 1e-32, 1e-17, False),
        ("outside", 1e-20, 1e-17, True),
        ("outside", 1e-12, 1e-17, True),
        ("outside", 1e-10, 1e-17, True),
        ("outside", 1e-10, 1e-11, True),
        ("outside", 0.0, 1e-14, True),
        ("clamp", 1e-32, 1e-17, False),
        ("clamp", 1e-18, 1e-17, True),
        ("clamp", 1e-15, 1e-14, True),  # as F.normalize has it of 4 x 65,536 numbers
        ("clamp", 1e-15, 1e-16, True),
        ("inside", 1e-33, 1e-17, False),
        ("inside", 1e-30, 1e-15, True),
        ("inside", 1e-30, 1e-17, True),
    ],
)
def test_tokens_of_next_to_nothing(mode: str, eps: float, size: float, taken: bool) -> None:
    """The derivative of 1 / sqrt(ms) leaves float32 there, that of the normalised token does not."""
    x = torch.randn(2, 3, N, WIDTH)
    x[0, 0] *= size
    outcome = check.run(_Guarded(mode, eps), (x,), repeats=1)
    check.assert_as_accurate(outcome)
    assert ("generate_mix_and_aggregate" in outcome.operators) == taken, str(outcome.report)


class _Divided(Sublayer):
    def mixes(self, x: Tensor) -> Tensor:
        flat = self.flat(x)
        return self.project(flat / (flat.square().mean(-1, keepdim=True) + 1e-6).sqrt())


@pytest.mark.parametrize("size", [1e19, 1e25])
def test_tokens_whose_squares_overflow(size: float) -> None:
    """Their gates are those of zero, and their gradients are numbers."""
    x = torch.randn(2, 3, N, WIDTH)
    x[0, 0] *= size
    outcome = check.run(_Divided(N, WIDTH, 3, 2), (x,), repeats=1)
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"], str(outcome.report)


class _ScaledFirst(Sublayer):
    """The scale meets the RMS factor before the projection does."""

    def __init__(self, scaled: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__(N, WIDTH, 3, 2)
        self.scaled = scaled

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = self.flat(x)
        root = 1 / self.rms(flat)
        parts = self.split(self.project(flat))
        biases = self.bias.split([part.shape[-1] for part in parts])
        pre, post, res = (
            self.scaled(part, root, scale) + bias for part, scale, bias in zip(parts, self.scale, biases, strict=True)
        )
        return self.pre(pre), self.post(post), self.res(res.unflatten(-1, (N, N)))


@pytest.mark.parametrize("tokens", [(2, 3), (1, 1)])
@pytest.mark.parametrize(
    "scaled",
    [
        lambda h, root, scale: 1 / root * scale * h,
        lambda h, root, scale: h * (scale / root),
        lambda h, root, scale: h / (root / scale),
        lambda h, root, scale: h / (2 * root * (1 / scale)) * 2,
        lambda h, root, scale: h * (root.reciprocal().squeeze(-1) * scale).unsqueeze(-1),
        lambda h, root, scale: h * (scale.expand(h.shape[-1]) / root),
    ],
)
def test_scale_that_meets_the_rms_factor_first(
    scaled: Callable[[Tensor, Tensor, Tensor], Tensor], tokens: tuple[int, int]
) -> None:
    outcome = check.run(_ScaledFirst(scaled), (torch.randn(*tokens, N, WIDTH),), repeats=2)
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"], str(outcome.report)


class _Scaled(Sublayer):
    """A constant factor of the norm, in one place or another: it belongs to the scale."""

    place = ""

    def mixes(self, x: Tensor) -> Tensor:
        flat, d = self.flat(x), N * WIDTH
        r = torch.rsqrt(flat.square().sum(-1, keepdim=True) + 1e-6)
        wide = {
            "after the norm": lambda: flat * r * d**0.5,
            "before": lambda: d**0.5 * flat * r,
            "in the factor": lambda: flat * (r * d**0.5),
            "divided": lambda: flat * r / d**-0.5,
            "with the weight": lambda: F.normalize(flat, dim=-1) * d**0.5 * (self.gain + 1),
            "negative": lambda: flat * r * -1.5,
            "bare": lambda: F.normalize(flat, dim=-1),
            "on the streams": lambda: self.flat(x * 3.0) * r,
        }
        if self.place == "after the projection":
            return self.project(flat * 3.0) * r
        return self.project(wide[self.place]())

    def __init__(self) -> None:
        super().__init__(N, WIDTH, 3, 2)
        self.gain = torch.nn.Parameter(0.2 * torch.randn(N * WIDTH))
        with torch.no_grad():
            self.phi.mul_(3.0)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "place",
    [
        *("after the norm", "before", "in the factor", "divided", "with the weight", "negative", "bare"),
        *("on the streams", "after the projection"),
    ],
)
def test_constant_beside_the_norm(place: str, dynamic: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Scaled, "place", place)
    outcome = check.run(_Scaled(), (torch.randn(2, 3, N, WIDTH),), dynamic=dynamic)
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"], str(outcome.report)


class _MaximumOf(Sublayer):
    """The clamp's bound is a tensor."""

    other = 1e-6

    def rows(self, m: Tensor) -> Tensor:
        return m / torch.maximum(m.sum(-1, keepdim=True), torch.tensor(1e-6))

    def columns(self, m: Tensor) -> Tensor:
        return m / torch.maximum(m.sum(-2, keepdim=True), torch.tensor(self.other))

    def start(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)


class _MaximumOfTwo(_MaximumOf):
    other = 1e-5


@pytest.mark.parametrize(("kind", "rewritten"), [(_MaximumOf, True), (_MaximumOfTwo, False)])
def test_bound_that_is_a_tensor(kind: type[_MaximumOf], rewritten: bool) -> None:
    outcome = check.run(kind(N, WIDTH, 3, 2), (torch.randn(2, 3, N, WIDTH),))
    check.assert_as_accurate(outcome)
    assert any("eps 1e-06 clamped" in site.detail for site in outcome.report.rewritten) == rewritten


class _TwoConstants(torch.nn.Module):
    """Two layers whose constants are the same when written with four digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Sublayer(N, WIDTH, 3, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer, height in zip(self.layers, (2.00002, 2.00004), strict=True):
            layer.post = lambda logits, height=height: torch.sigmoid(logits) * torch.tensor(height)
            x = layer(x)
        return x


def test_constants_that_differ_in_the_fifth_digit() -> None:
    model, x = _TwoConstants().eval(), torch.randn(2, 3, N, WIDTH)
    outcome = check.run(model, (x,), repeats=1)
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine"] * 2 + ["generate_mix_and_aggregate"] * 2, str(outcome.report)


class _FactorOfItsOwn(Sublayer):
    """h_post times what is not computed from the projection: the program multiplies what the operator makes."""

    def __init__(self) -> None:
        super().__init__(N, WIDTH, 3, 2)
        self.register_buffer("height", torch.tensor(1.7))

    def post(self, logits: Tensor) -> Tensor:
        return self.height * torch.sigmoid(logits)


class _FactorOfStreams(_FactorOfItsOwn):
    def post(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits) / (1 + self.per_stream.square())


class _FactorOfPre(_FactorOfItsOwn):
    def pre(self, logits: Tensor) -> Tensor:
        return self.height * torch.sigmoid(logits)


class _FactorOfRes(_FactorOfItsOwn):
    def res(self, logits: Tensor) -> Tensor:
        return super().res(logits) * self.height


@pytest.mark.parametrize("kind", [_FactorOfItsOwn, _FactorOfStreams, _FactorOfPre, _FactorOfRes])
def test_gate_with_a_factor_of_its_own(kind: type[_FactorOfItsOwn]) -> None:
    outcome = check.run(kind(), (torch.randn(2, 3, N, WIDTH),))
    check.assert_as_accurate(outcome)
    assert not outcome.report.declined, str(outcome.report)
    assert any("sinkhorn softmax" in site.detail for site in outcome.report.rewritten), str(outcome.report)
    assert "expand_combine" in outcome.operators


class _Bounded(Sublayer):
    """h_pre of logits between bounds, where they are at the lower one: a norm makes the tail of the gate count."""

    def __init__(self, bound: float) -> None:
        super().__init__(N, WIDTH, 3, 2)
        self.bound = bound
        with torch.no_grad():
            self.bias[:N] = -30.0

    def pre(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits.clamp(-self.bound, self.bound))


@pytest.mark.parametrize(
    ("bound", "told"),
    [(20.0, "is not mult * sigmoid(logits)"), (28.0, "6.9e-13"), (30.0, "9.4e-14"), (80.0, "1.8e-35")],
)
def test_a_bound_of_the_logits_is_no_eps(bound: float, told: str) -> None:
    model, x = _Bounded(bound), torch.randn(2, 3, N, WIDTH)
    outcome = check.run(model, (x,))
    check.assert_as_accurate(outcome)
    assert "generate_mix_and_aggregate" not in outcome.operators
    assert told in str(outcome.report)


class _TinyEps(_Bounded):
    def pre(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits) + 1e-12


@pytest.mark.parametrize(("kind", "bound"), [(_TinyEps, 0.0), (_Bounded, 200.0)])
def test_an_eps_may_be_tiny_and_a_bound_out_of_reach(kind: type[_Bounded], bound: float) -> None:
    outcome = check.run(kind(bound), (torch.randn(2, 3, N, WIDTH),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"], str(outcome.report)
    assert outcome.reasons == [], str(outcome.report)


class _Untrained(Sublayer):
    """All logits of a mix are the same number, as phi is before training."""

    def __init__(self) -> None:
        super().__init__(N, WIDTH, 3, 2)
        with torch.no_grad():
            self.phi.zero_()
            self.bias.zero_()


class _BySign(_Untrained):
    def pre(self, logits: Tensor) -> Tensor:
        small = torch.exp(-logits.abs())
        return torch.where(logits >= 0, 1 / (1 + small), small / (1 + small))


class _BySoftplus(_Untrained):
    def post(self, logits: Tensor) -> Tensor:
        z = -logits
        return 2 * torch.exp(-(z.clamp(min=0) + torch.log1p(torch.exp(-z.abs()))))


# What clamp gives back at its bound: torch 2.13 gives the gradient that arrives, 2.14 none.
_CLAMP_HAS_A_KINK = not torch.func.grad(lambda x: x.clamp(min=0))(torch.zeros(()))


class _WithoutKink(_Untrained):
    def pre(self, logits: Tensor) -> Tensor:
        positive = 1 / (1 + torch.exp(-logits.clamp(min=0)))
        negative = logits.clamp(max=0).exp()
        return torch.where(logits >= 0, positive, negative / (1 + negative))


class _Quotient(_Untrained):
    """It is no number where logits are zero."""

    def post(self, logits: Tensor) -> Tensor:
        return 2 * F.silu(logits) / logits


class _ShiftedByOne(_Untrained):
    """The gradient of the shift goes to one of the greatest logits, amax would share it among them."""

    def top(self, logits: Tensor) -> Tensor:
        return logits.max(-1, keepdim=True).values

    def res(self, logits: Tensor) -> Tensor:
        m = torch.exp(logits - self.top(logits))
        for axis in (-1, -2, -1, -2):
            m = m / (m.sum(axis, keepdim=True) + 1e-3)
        return m


class _ShiftedByAll(_ShiftedByOne):
    def top(self, logits: Tensor) -> Tensor:
        return logits.amax(-1, keepdim=True)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (_BySign, "where logits are zero"),
        (_BySoftplus, "where logits are zero"),
        (_WithoutKink, "where logits are zero" if _CLAMP_HAS_A_KINK else ""),
        (_ShiftedByOne, ""),  # the Sinkhorn begins after the shift
        (_ShiftedByAll, ""),
    ],
)
def test_gradients_where_torch_has_to_pick_one(kind: type[_Untrained], told: str) -> None:
    outcome = check.run(kind(), (torch.randn(2, 3, N, WIDTH),))
    check.assert_as_accurate(outcome)
    assert ("generate_mix_and_aggregate" in outcome.operators) or told
    reasons = [reason for reason in outcome.reasons if reason != "what is made of the logits"]
    assert any(told in reason for reason in reasons) == bool(told), str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)


def test_a_gate_that_is_no_number_where_logits_are_zero() -> None:
    outcome = check.run(_Quotient(), (torch.randn(2, 3, N, WIDTH),), repeats=1)
    assert any("where logits are zero" in reason for reason in outcome.reasons), str(outcome.report)


class _InChunks(Sublayer):
    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = [super(_InChunks, self).gates(chunk) for chunk in x.chunk(2, 1)]
        return tuple(torch.cat(gate, 1) for gate in zip(*parts, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("length", [3, 4, 300])
def test_gates_in_chunks_of_the_sequence(length: int) -> None:
    outcome = check.run(_InChunks(N, WIDTH, 3, 2), (torch.randn(2, length, N, WIDTH),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["aggregate", "expand_combine", "generate_mix", "generate_mix"], str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)


class _Multiplied(Sublayer):
    """Logits times a number, which may say that they do not count, or be a switch."""

    def __init__(self, number: float) -> None:
        super().__init__(N, WIDTH, 3, 2)
        self.number = number

    def pre(self, logits: Tensor) -> Tensor:
        return super().pre(logits * self.number)


@pytest.mark.parametrize("number", [0.0, -2, True])
def test_logits_times_a_number(number: float) -> None:
    outcome = check.run(_Multiplied(number), (torch.randn(2, 3, N, WIDTH),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"], str(outcome.report)


class _SmallGate(Sublayer):
    """One gate of each token is near zero, and so is all that comes through it."""

    bias_of, scale_of, height = 0.0, 1.0, 1.0

    def __init__(self) -> None:
        super().__init__(N, WIDTH, 3, 2)
        with torch.no_grad():
            self.bias[N : 2 * N] = self.bias_of
            self.scale[1] = self.scale_of

    def layer(self, layer_input: Tensor, x: Tensor) -> Tensor:
        return self.height * super().layer(layer_input, x)


class _Tanh(_SmallGate):
    scale_of = 1e-3

    def post(self, logits: Tensor) -> Tensor:
        return torch.tanh(logits)


class _TanhFromHalves(_SmallGate):
    scale_of = 1e-3

    def post(self, logits: Tensor) -> Tensor:
        return 2 * torch.sigmoid(logits) - 1


class _Negative(_SmallGate):
    bias_of = -9.0

    def post(self, logits: Tensor) -> Tensor:
        return -torch.sigmoid(logits)


class _Tail(_SmallGate):
    bias_of, height = -29.0, 1e7


class _Threshold(_Tail):
    def post(self, logits: Tensor) -> Tensor:
        return F.threshold(2 * torch.sigmoid(logits), 1e-12, 0.0)


class _Masked(_Tail):
    def post(self, logits: Tensor) -> Tensor:
        return (2 * torch.sigmoid(logits)).masked_fill(logits < -27.5, 0.0) + 1e-6


class _DetachedTail(_Tail):
    def post(self, logits: Tensor) -> Tensor:
        h = torch.sigmoid(logits)
        return 2 * torch.where(logits.abs() > 18, h.detach(), h)


class _Softplus(_Tail):
    def post(self, logits: Tensor) -> Tensor:
        return 2 * torch.exp(-F.softplus(-logits))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (_Tanh, "crosses zero as a tanh does"),
        (_TanhFromHalves, ""),  # where the program's sum loses as many digits
        (_Negative, ""),
        (_Threshold, "not where that is next to nothing"),
        (_Masked, "not where that is next to nothing"),
        (_DetachedTail, "its gradient does not"),
        (_Softplus, ""),
    ],
)
def test_gates_near_zero_are_right_relative_to_themselves(kind: type[_SmallGate], told: str) -> None:
    outcome = check.run(kind(), (torch.randn(2, 3, N, WIDTH),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"], str(outcome.report)
    assert any(told in reason for reason in outcome.reasons) == bool(told), str(outcome.report)


def test_what_a_gate_is_does_not_hang_on_the_number_of_tokens() -> None:
    outcome = check.run(_TanhFromHalves(), (torch.randn(1, 1, N, WIDTH),))
    check.assert_as_accurate(outcome)
    assert outcome.reasons == [], str(outcome.report)


class _DetachedMatrix(Sublayer):
    """Where all logits of a token are large, its matrix has no gradient."""

    def __init__(self) -> None:
        super().__init__(N, WIDTH, 150, 2)
        with torch.no_grad():
            self.bias[2 * N :] += 100

    def res(self, logits: Tensor) -> Tensor:
        p = super().res(logits)
        return torch.where(logits.abs().amax((-2, -1), keepdim=True) > 80, p.detach(), p)


class _DoubledLate(_DetachedMatrix):
    def res(self, logits: Tensor) -> Tensor:
        return Sublayer.res(self, logits) * (1 + (torch.arange(150) > 100).float())[:, None, None]


class _Smoothed(_DetachedMatrix):
    def res(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) * 0.09 + 0.05


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (_DetachedMatrix, ""),  # made by the program of a projection that is one
        (_DoubledLate, "another function of its logits for other tokens"),
        (_Smoothed, "is not a Sinkhorn projection"),
    ],
)
def test_matrices_that_are_none_of_a_sinkhorn_everywhere(kind: type[_DetachedMatrix], told: str) -> None:
    outcome = check.run(kind(), (torch.randn(1, 150, N, WIDTH),), repeats=1)
    check.assert_as_accurate(outcome)
    (reason,) = [reason for reason in outcome.reasons if "h_res" in reason]
    assert told in reason


class _SummedByProduct(Sublayer):
    def rows(self, m: Tensor) -> Tensor:
        return m / (m @ torch.ones(N, 1) + 1e-6)


class _EpsInATensor(Sublayer):
    def rms(self, flat: Tensor) -> Tensor:
        return torch.rsqrt(flat.square().mean(-1, keepdim=True) + torch.full((1,), 1e-6))


@pytest.mark.parametrize("kind", [_SummedByProduct, _EpsInATensor])
def test_constants_of_the_default_dtype(kind: type[Sublayer]) -> None:
    outcome = check.run(kind(N, WIDTH, 3, 2), (torch.randn(2, 3, N, WIDTH),), repeats=1)
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"], str(outcome.report)


def _among(logits: Tensor, threshold: float) -> Tensor:
    """Where logits are next to zero, but not zero: no ordinary logits are."""
    return (logits.abs() < threshold) & (logits != 0)


class _MaskedNearZero(Sublayer):
    def pre(self, logits: Tensor) -> Tensor:
        return torch.where(_among(logits, 1e-4), 0.0, torch.sigmoid(logits))


class _DetachedNearZero(Sublayer):
    def pre(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(torch.where(_among(logits, 1e-4), logits.detach(), logits))


class _MatrixMaskedNearZero(Sublayer):
    def res(self, logits: Tensor) -> Tensor:
        return super().res(torch.where(_among(logits, 1e-4), 1.0, logits))


class _MatrixDetachedNearZero(Sublayer):
    def res(self, logits: Tensor) -> Tensor:
        return super().res(torch.where(_among(logits, 1e-4), logits.detach(), logits))


@pytest.mark.parametrize("kind", [_MaskedNearZero, _DetachedNearZero, _MatrixMaskedNearZero, _MatrixDetachedNearZero])
def test_thresholds_near_zero(kind: type[Sublayer]) -> None:
    model = kind(N, WIDTH, 3, 2)
    with torch.no_grad():
        model.phi.mul_(1e-5)
        model.bias.zero_()
    outcome = check.run(model, (torch.randn(2, 3, N, WIDTH),), repeats=1)
    check.assert_as_accurate(outcome)
