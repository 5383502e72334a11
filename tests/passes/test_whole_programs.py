"""Sublayers written by nobody's library: other layouts, other orders of the same steps, one token alone.

Each must be rewritten completely, and be as accurate as eager.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import check
from tests.zoo.common import random_parameter, random_phi
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, WIDTH, BATCH, LENGTH = 4, 24, 2, 5
ROWS = (N, N, N * N)
FULL = ["expand_combine", "generate_mix_and_aggregate"]


class Parts(nn.Module):
    """What all of these have: a projection, scales, biases and a layer."""

    shape: tuple[int, ...] = (BATCH, LENGTH, N, WIDTH)

    def __init__(self) -> None:
        super().__init__()
        self.phi = random_phi(sum(ROWS), N * WIDTH)
        self.alpha = random_parameter(3, mean=1.0, std=0.2)
        self.beta = random_parameter(sum(ROWS), std=0.5)
        self.layer = nn.Linear(WIDTH, WIDTH)


class StreamsFirst(Parts):
    """[n, b, s, C], one einsum for projection and norm; the Sinkhorn as two scaling vectors."""

    shape = (N, BATCH, LENGTH, WIDTH)

    def forward(self, z: Tensor) -> Tensor:
        r = torch.rsqrt(torch.einsum("nbsc,nbsc->bs", z, z) / (N * WIDTH) + 1e-6)
        pre, post, res = torch.einsum("nbsc,knc,bs->bsk", z, self.phi.view(-1, N, WIDTH), r).split(ROWS, -1)
        h_pre = torch.sigmoid(self.alpha[0] * pre + self.beta[:N])
        h_post = 2 * torch.sigmoid(self.alpha[1] * post + self.beta[N : 2 * N])
        logits = (self.alpha[2] * res + self.beta[2 * N :]).unflatten(-1, (N, N))
        kernel = torch.exp(logits - logits.max(-1, keepdim=True)[0])
        v = torch.ones_like(kernel[..., 0])
        for _ in range(5):
            u = 1 / torch.einsum("...ij,...j->...i", kernel, v)
            v = 1 / torch.einsum("...ij,...i->...j", kernel, u)
        h_res = u.unsqueeze(-1) * kernel * v.unsqueeze(-2)
        f = torch.tanh(self.layer(torch.einsum("bsn,nbsc->bsc", h_pre, z)))
        return torch.einsum("bsij,ibsc->jbsc", h_res, z) + torch.einsum("bsj,bsc->jbsc", h_post, f)


class StreamsBeforeTheSequence(Parts):
    """[b, n, s, C] and tensordot; the Sinkhorn as two potentials, of which one begins as zeros like a row."""

    shape = (BATCH, N, LENGTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tensordot(x, self.phi.view(-1, N, WIDTH), dims=([1, 3], [1, 2]))
        y = y / x.pow(2).mean(dim=(1, 3)).add(1e-5).sqrt()[..., None]
        y = y * torch.cat([a.expand(rows) for a, rows in zip(self.alpha, ROWS, strict=True)]) + self.beta
        h_pre, h_post = y[..., :N].sigmoid(), y[..., N : 2 * N].sigmoid().mul(2)
        logits = y[..., 2 * N :].unflatten(-1, (N, N))
        columns = torch.zeros_like(logits[..., :1, :])
        for _ in range(6):
            rows = -torch.logsumexp(logits + columns, -1, keepdim=True)
            columns = -torch.logsumexp(logits + rows, -2, keepdim=True)
        h_res = (logits + rows + columns).exp()
        f = self.layer((h_pre.permute(0, 2, 1)[..., None] * x).sum(1)).relu()
        return torch.einsum("bsij,bisc->bjsc", h_res, x) + h_post.mT.unsqueeze(-1) * f.unsqueeze(1)


class ScaledApart(Parts):
    """The projection's parts are scaled one by one, put together for the bias, and taken apart again."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, N * WIDTH)
        r = torch.linalg.vector_norm(flat, dim=1, keepdim=True) / math.sqrt(N * WIDTH)
        y = torch.mm(flat, self.phi.t()) / (r + 1e-6)
        alpha = self.alpha.exp()
        y = torch.hstack([part * alpha[i] for i, part in enumerate(y.split(ROWS, 1))]) + self.beta
        logits = y[:, 2 * N :].reshape(-1, N, N)
        m = logits.log_softmax(-1)
        for _ in range(4):
            m = m.log_softmax(-2).log_softmax(-1)
        streams = x.view(-1, N, WIDTH)
        f = self.layer((y[:, :N].sigmoid()[:, None] @ streams)[:, 0]).sin()
        h_post = 2 * y[:, N : 2 * N].sigmoid()
        return (m.exp() @ streams + h_post[:, :, None] @ f[:, None]).view(x.shape)


class OneToken(Parts):
    """Streams [n, C], and nothing else: vectors in the place of matrices."""

    shape = (N, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        v = x.reshape(-1)
        y = self.phi @ v / torch.sqrt(v.dot(v) / v.numel() + 1e-6)
        h_pre = torch.sigmoid(y[:N] * self.alpha[0] + self.beta[:N])
        h_post = 2 * torch.sigmoid(y[N : 2 * N] * self.alpha[1] + self.beta[N : 2 * N])
        m = (y[2 * N :] * self.alpha[2] + self.beta[2 * N :]).view(N, N).softmax(1)
        for _ in range(4):
            m = m / (m.sum(0, keepdim=True) + 1e-6)
            m = m / (m.sum(1, keepdim=True) + 1e-6)
        return m @ x + torch.outer(h_post, self.layer(h_pre @ x).tanh())


class MixedByTheTranspose(Sublayer):
    """The matrices leave their function transposed, and nobody reads them otherwise."""

    def res(self, logits: Tensor) -> Tensor:
        return super().res(logits).mT


class OneTokenShifted(Sublayer):
    """One token, as in decoding: the maximum of its logits is a number a column, as a bias is."""

    def start(self, logits: Tensor) -> Tensor:
        return (logits - logits.amax(-2, keepdim=True)).exp()


class ResidualOfAddcmul(Parts):
    """The streams are not mixed; the gate is spread by addcmul."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(2)
        y = F.linear(flat, self.phi[: 2 * N]) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
        h_pre = torch.sigmoid(y[..., :N] * self.alpha[0] + self.beta[:N])
        h_post = 2 * torch.sigmoid(y[..., N:] * self.alpha[1] + self.beta[N : 2 * N])
        f = self.layer((h_pre.unsqueeze(-2) @ x).squeeze(-2)).tanh()
        return torch.addcmul(x, h_post.unsqueeze(-1), f.unsqueeze(-2))


WHOLE = [StreamsFirst, StreamsBeforeTheSequence, ScaledApart, OneToken, ResidualOfAddcmul]


@pytest.mark.parametrize("kind", WHOLE, ids=[kind.__name__ for kind in WHOLE])
def test_a_whole_program(kind: type[Parts]) -> None:
    _assert_complete(kind(), torch.randn(kind.shape))


def test_matrices_of_which_only_the_transpose_is_read() -> None:
    _assert_complete(MixedByTheTranspose(N, WIDTH, LENGTH, BATCH), torch.randn(BATCH, LENGTH, N, WIDTH))


class ReadAlone(nn.Module):
    """A head with a projection of 24 rows, of which it uses `rows`; what it reads is pooled over tokens, or not."""

    def __init__(self, pooled: str, rows: str = "unused") -> None:
        super().__init__()
        self.pooled, self.rows = pooled, rows
        self.phi, self.bias = random_phi(24, N * WIDTH), random_parameter(24, std=0.3)

    def forward(self, x: Tensor) -> Any:
        flat = x.flatten(-2)
        h = F.linear(flat, self.phi) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6) + self.bias
        pre, _, res = h.split(ROWS, -1)
        u = (pre.sigmoid().unsqueeze(-1) * x).sum(-2)
        if self.pooled:
            u = {"mean": u.mean(1), "sum": u.sum(1), "scaled": u.mean((0, 1), keepdim=True) * 0.5}[self.pooled]
        return (u, res.tanh()) if self.rows == "read" else u


@pytest.mark.parametrize("pooled", ["", "mean", "sum", "scaled"])
def test_a_head_pooled_over_tokens(pooled: str) -> None:
    """The sum over tokens after the sum over streams is not a sum over more streams."""
    outcome = check.run(ReadAlone(pooled), (torch.randn(BATCH, LENGTH, N, WIDTH),))
    assert outcome.operators == ["head"]
    check.assert_as_accurate(outcome)


@pytest.mark.parametrize("rows", ["unused", "read"])
def test_rows_that_nothing_reads_are_not_missed(rows: str) -> None:
    outcome = check.run(ReadAlone("", rows), (torch.randn(BATCH, LENGTH, N, WIDTH),))
    assert outcome.operators == ["generate_mix_and_aggregate" if rows == "read" else "head"]
    assert not outcome.report.declined


def test_the_maximum_of_one_token_is_no_bias() -> None:
    _assert_complete(OneTokenShifted(N, WIDTH, 1, 1), torch.randn(1, 1, N, WIDTH))


def _assert_complete(model: Any, x: Tensor) -> None:
    outcome = check.run(model, (x,))
    check.assert_as_accurate(outcome)
    assert outcome.operators == FULL, str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)
    mixed = not isinstance(model, ResidualOfAddcmul)
    assert any("sinkhorn" in site.detail for site in outcome.report.rewritten) == mixed, str(outcome.report)


class TokensMerged(Parts):
    """One row of tokens inside, whose number is a product; scale and bias in one call."""

    def forward(self, z: Tensor) -> Tensor:
        batch, length, n, width = z.shape
        x = z.reshape(batch * length, n, width)
        flat = x.flatten(1)
        alpha = torch.cat([a.expand(k) for a, k in zip(self.alpha, ROWS, strict=True)])
        mixes = F.linear(flat, self.phi) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
        pre, post, res = torch.addcmul(self.beta, mixes, alpha).split(ROWS, -1)
        h_res = res.unflatten(-1, (N, N)).softmax(-1) + 1e-6
        h_res = h_res / (h_res.sum(-2, keepdim=True) + 1e-6)
        f = self.layer((torch.sigmoid(pre).unsqueeze(-1) * x).sum(1))
        out = 2 * torch.sigmoid(post).unsqueeze(-1) * f.unsqueeze(1) + h_res.mT @ x
        return out.view(batch, length, n, width)


@pytest.mark.parametrize("dynamic", [False, True])
def test_tokens_merged_whatever_their_number(dynamic: bool) -> None:
    outcome = check.run(TokensMerged(), (torch.randn(TokensMerged.shape),), dynamic=dynamic)
    check.assert_as_accurate(outcome)
    assert outcome.operators == FULL, str(outcome.report)


class _SizesReadOffShapes(Sublayer):
    """All sizes come from the streams; with dynamic shapes the number of streams is a symbol that guards fix."""

    def forward(self, x: Tensor) -> Any:
        batch, length, n, width = x.shape
        mixes = F.linear(x.reshape(batch, length, n * width), self.phi) * self.rms(x.flatten(2))
        pre, post, res = mixes.split((n, n, n * n), -1)
        pre_bias, post_bias, res_bias = self.bias.split((n, n, n * n))
        h_pre = self.pre(pre * self.scale[0] + pre_bias)
        h_post = self.post(post * self.scale[1] + post_bias)
        logits = res.view(batch, length, n, n) * self.scale[2] + res_bias.view(n, n)
        f = self.layer(self.read(x, h_pre), x)
        return self.write(x, f, h_post, self.res(logits))


def test_sizes_read_off_shapes() -> None:
    model = _SizesReadOffShapes(N, WIDTH, LENGTH, BATCH)
    program, report = check.rewriting(model, dynamic=True)
    for batch, length in ((2, 5), (3, 7), (2, 4)):
        x = torch.randn(batch, length, N, WIDTH)
        rewritten = check.evaluate(program, model, (x,))
        for name, value in check.evaluate(model, model, (x,)).items():
            assert check.error(rewritten[name], value) < 1e-4, name
    assert report.graphs == 1, str(report)
    assert sorted(site.op for site in report.rewritten) == FULL, str(report)
