"""Projections whose logits have the rows before the tokens, [g, b, s], as for streams that come first, [n, b, s, C]."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_compile.testing import capture
from tests.passes.test_own_gates import ALL, WIDTH, N, Own
from tests.zoo import check

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SHAPE = (N, 2, 5, WIDTH)
ROWS = N * N + 2 * N


class RowsFirst(Own):
    """Streams [n, b, s, C] and gates [n, b, s], [n, b, s] and [n, n, b, s]."""

    def by_stream(self) -> Tensor:
        return self.phi.unflatten(-1, (N, WIDTH))

    def project(self, x: Tensor) -> Tensor:
        return torch.einsum("kbsd,gkd->gbs", x, self.by_stream())

    def body(self, x: Tensor) -> Tensor:
        a, p, r = self.project(x).split((N, N, N * N), 0)
        h_res = r.unflatten(0, (N, N)).softmax(1)
        f = self.layer(torch.einsum("kbs,kbsd->bsd", a.softmax(0), x))
        return torch.einsum("kobs,kbsd->obsd", h_res, x) + torch.tanh(p).unsqueeze(-1) * f


class PhiFirst(RowsFirst):
    def project(self, x: Tensor) -> Tensor:
        return torch.einsum("gkd,kbsd->gbs", self.by_stream(), x)


class Flat(RowsFirst):
    def project(self, x: Tensor) -> Tensor:
        return torch.einsum("bsk,gk->gbs", x.permute(1, 2, 0, 3).flatten(2), self.phi)


class Multiplied(RowsFirst):
    def project(self, x: Tensor) -> Tensor:
        return (self.by_stream()[:, :, None, None] * x).sum((1, -1))


class ByStream(RowsFirst):
    def project(self, x: Tensor) -> Tensor:
        phi = self.by_stream()
        return sum(torch.einsum("bsd,gd->gbs", x[k], phi[:, k]) for k in range(N))  # type: ignore[return-value]


class Normed(RowsFirst):
    def project(self, x: Tensor) -> Tensor:
        r = torch.rsqrt(x.square().mean((0, -1), keepdim=True) + 1e-6)
        return torch.einsum("kbsd,gkd->gbs", x * r, self.by_stream())


class NormedAfter(RowsFirst):
    def project(self, x: Tensor) -> Tensor:
        return super().project(x) * torch.rsqrt(x.square().mean((0, -1)) + 1e-6)


class TwoProducts(RowsFirst):
    def project(self, x: Tensor) -> Tensor:
        phi = self.by_stream()
        one, other = torch.einsum("kbsd,gkd->gbs", x, phi[:N]), torch.einsum("kbsd,gkd->bsg", x, phi[N:])
        return torch.cat((one, other.movedim(-1, 0)))


KINDS = [RowsFirst, PhiFirst, Flat, Multiplied, ByStream, Normed, NormedAfter, TwoProducts]


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
@pytest.mark.parametrize("dynamic", [False, True])
def test_rewritten(kind: type[RowsFirst], dynamic: bool) -> None:
    outcome = check.run(kind(), (torch.randn(SHAPE),), dynamic=dynamic)
    check.assert_as_accurate(outcome)
    assert outcome.operators == ALL, str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)
    (projection,) = [site for site in outcome.report.rewritten if site.op == "projection"]
    assert f"n = {N}, C = {WIDTH}, {ROWS} logits" in projection.detail


@pytest.mark.parametrize("tokens", [(4, 6), (30, 40)])
def test_any_number_of_tokens(tokens: tuple[int, int]) -> None:
    """As many tokens as rows, and more than phi may have rows: nothing else says which of both are the tokens."""
    outcome = check.run(RowsFirst(), (torch.randn(N, *tokens, WIDTH),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ALL, str(outcome.report)


def test_bfloat16() -> None:
    outcome = check.run(RowsFirst().bfloat16(), (torch.randn(SHAPE, dtype=torch.bfloat16),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ALL, str(outcome.report)


class OtherTokens(RowsFirst):
    """The tokens of the logits are in another order than those of the streams."""

    def project(self, x: Tensor) -> Tensor:
        return torch.einsum("kbsd,gkd->gsb", x, self.by_stream()).reshape(ROWS, 2, 5)


class OfEachToken(RowsFirst):
    """A phi for each position."""

    def project(self, x: Tensor) -> Tensor:
        return torch.einsum("kbsd,sgkd->gbs", x, torch.stack([self.by_stream() * i for i in range(1, 6)]))


class OfSomeChannels(RowsFirst):
    def project(self, x: Tensor) -> Tensor:
        return torch.einsum("kbsd,gkd->gbs", x[..., 1:], self.by_stream()[..., 1:])


class OfOneStream(RowsFirst):
    def project(self, x: Tensor) -> Tensor:
        return torch.einsum("bsd,gd->gbs", x[0], self.phi[:, :WIDTH])


NEIGHBOURS = [OtherTokens, OfEachToken, OfSomeChannels, OfOneStream]


@pytest.mark.parametrize("kind", NEIGHBOURS, ids=[kind.__name__ for kind in NEIGHBOURS])
def test_other_products_stay_the_programs(kind: type[RowsFirst]) -> None:
    outcome = check.run(kind(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["aggregate", "expand_combine"], str(outcome.report)


def test_a_product_of_two_parameters_is_no_projection() -> None:
    """Streams that are read with gates for all tokens: a layer's weight times another's has as many numbers."""

    class Static(RowsFirst):
        def project(self, x: Tensor) -> Tensor:
            made = F.linear(self.phi, self.phi[: 2 * 5])
            return made.view(ROWS, 2, 5)

    outcome = check.run(Static(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["aggregate", "expand_combine"], str(outcome.report)


def test_snapshot() -> None:
    assert str(capture(RowsFirst(), torch.randn(SHAPE))) == (
        "%0 = projection(x=f32[2, 5, 4, 6], phi=f32[24, 24])\n"
        "%1 = aggregate(x=f32[2, 5, 4, 6], h_pre=f32[2, 5, 4](%0.0))\n"
        "%2 = expand_combine(f=f32[2, 5, 6](%1), h_post=f32[2, 5, 4](%0.0), x=f32[2, 5, 4, 6], h_res=f32[2,\n"
        "    5, 4, 4](%0.0))\n"
        "return %2"
    )
