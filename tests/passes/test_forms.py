"""One sublayer in forms that no code base of the zoo has: each becomes the operators named, and stays accurate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import check
from tests.zoo.common import random_parameter
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FULL = ["expand_combine", "generate_mix_and_aggregate"]
N, WIDTH = 4, 6
X = (2, 3, N, WIDTH)

FORMS: dict[str, tuple[type[Sublayer], list[str], tuple[int, ...]]] = {}
Piece = Callable[..., Any]


def form(*operators: str, shape: tuple[int, ...] = X) -> Callable[[type[Sublayer]], type[Sublayer]]:
    """Register a sublayer, the operators expected of it, and the shape of its streams."""

    def register(kind: type[Sublayer]) -> type[Sublayer]:
        FORMS[kind.__name__] = (kind, sorted(operators or FULL), shape)
        return kind

    return register


class _Seen(Sublayer):
    """Streams that lie in some other order in memory: `seen` is [b, s, n, C] of them, `stored` the way back."""

    def seen(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def stored(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Any:
        for _ in range(2):
            x = self.stored(self.body(self.seen(x)))
        return x


@form(*FULL * 2, shape=(N, 2, 3, WIDTH))
class StreamsFirst(_Seen):
    def seen(self, x: Tensor) -> Tensor:
        return x.permute(1, 2, 0, 3)

    def stored(self, x: Tensor) -> Tensor:
        return x.permute(2, 0, 1, 3).contiguous()


@form(*FULL * 2, shape=(2 * N, 3, WIDTH))
class FoldedIntoBatch(_Seen):
    def seen(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, N)).transpose(1, 2)

    def stored(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1)


@form(*FULL * 2, shape=(2, N, 3, WIDTH))
class StreamsBeforeLength(_Seen):
    def seen(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)

    def stored(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


@form(*FULL * 2, shape=(2, 3, WIDTH, N))
class StreamsLast(_Seen):
    def seen(self, x: Tensor) -> Tensor:
        return x.mT

    def stored(self, x: Tensor) -> Tensor:
        return x.mT.contiguous()


@form()
class LearnableTemperature(Sublayer):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.tau = random_parameter(mean=1.5, std=0.1)

    def start(self, logits: Tensor) -> Tensor:
        return (logits / self.tau).softmax(-1) + 1e-6


@form()
class TemperatureOfEachRow(Sublayer):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.tau = random_parameter(self.n, 1, mean=1.5, std=0.1)

    def start(self, logits: Tensor) -> Tensor:
        return (logits / self.tau).softmax(-1) + 1e-6


@form()
class ClampedMeanSquare(Sublayer):
    def rms(self, flat: Tensor) -> Tensor:
        return torch.rsqrt(flat.square().mean(-1, keepdim=True).clamp_min(1e-6))


@form()
class ProjectionWithBias(Sublayer):
    def mixes(self, x: Tensor) -> Tensor:
        flat = self.flat(x)
        return F.linear(flat * self.rms(flat), self.phi, self.bias)


@form()
class CastsAnywhere(Sublayer):
    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        return (h_pre.float().unsqueeze(-1) * x.float()).sum(2).to(x.dtype)

    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        mixed = (h_res.to(x.dtype).mT @ x.float()).float()
        return (h_post.to(x.dtype).unsqueeze(-1) * f.float().unsqueeze(-2) + mixed).to(x.dtype)


@form()
class SquaresStreamByStream(Sublayer):
    def rms(self, flat: Tensor) -> Tensor:
        total = sum(part.square().sum(-1, keepdim=True) for part in flat.chunk(self.n, -1))
        return torch.rsqrt(total / flat.shape[-1] + 1e-6)  # type: ignore[operator]


@form()
class ProjectionStreamByStream(Sublayer):
    def project(self, flat: Tensor) -> Tensor:
        parts = zip(flat.chunk(self.n, -1), self.phi.chunk(self.n, -1), strict=True)
        total: Tensor = sum(x @ phi.T for x, phi in parts)  # type: ignore[assignment]
        return total


@form()
class ThreeParameters(Sublayer):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        pre, post, res = self.phi.detach().split([self.n, self.n, self.n**2])
        self.parts = nn.ParameterList([pre.clone(), post.clone(), res.clone()])

    def project(self, flat: Tensor) -> Tensor:
        return torch.cat([F.linear(flat, part) for part in self.parts], -1)


@form()
class TwoParameters(Sublayer):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        vectors, matrices = self.phi.detach().split([2 * self.n, self.n**2])
        self.vectors, self.matrices = nn.Parameter(vectors.clone()), nn.Parameter(matrices.clone())

    def project(self, flat: Tensor) -> Tensor:
        return torch.cat([F.linear(flat, self.vectors), F.linear(flat, self.matrices)], -1)


@form()
class LastStreamFirst(Sublayer):
    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        return sum(h_pre[..., i, None] * x[:, :, i] for i in reversed(range(self.n)))  # type: ignore[return-value]


@form()
class WrittenIntoEmpty(Sublayer):
    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for o in range(self.n):
            out[:, :, o] = h_post[..., o, None] * f + (h_res[..., :, o, None] * x).sum(2)
        return out


@form()
class AccumulatedInPlace(Sublayer):
    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        total = torch.zeros_like(x[:, :, 0])
        for i in range(self.n):
            total += h_pre[..., i : i + 1] * x[..., i, :]
        return total

    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        out = h_res.mT @ x
        out.addcmul_(h_post.unsqueeze(-1), f.unsqueeze(-2))
        return out


@form()
class GatesFinishedInPlace(Sublayer):
    def pre(self, logits: Tensor) -> Tensor:
        gate = 1.0 * torch.sigmoid(logits)
        gate += 1e-6
        return gate


@form(*FULL * 2)
class TwoOnTheSameStreams(Sublayer):
    """Attention and MLP in parallel, each with a connection of its own, written one after the other."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.other = Sublayer(*args)

    def body(self, x: Tensor) -> Any:
        return 0.5 * super().body(x) + 0.5 * self.other.body(x)


@form(*["expand_combine", "generate_mix", "aggregate"] * 2)
class GatesOfTheLayerBefore(Sublayer):
    """Each sublayer reads with the gates that the streams before it gave."""

    def forward(self, x: Tensor) -> Any:
        pre, post, res = self.gates(x)
        for _ in range(2):
            f = self.layer(self.read(x, pre), x)
            new = self.write(x, f, post, res)
            if _ == 0:
                # the next sublayer's reading gate is that of the streams before this write
                _, post, res = self.gates(new)
            x = new
        return x


@form("aggregate", "expand_combine", "sinkhorn")
class ForeignLogits(Sublayer):
    """No projection of the streams: the logits are read from something else."""

    def mixes(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x.mean(2), self.low[:, : self.width])) @ self.high.T


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        m = torch.exp(logits - logits.amax(-1, keepdim=True))
        history = [m]
        for axis in (-1, -2, -1, -2):
            m = m / m.sum(axis, keepdim=True).clamp(min=1e-6)
            history.append(m)
        ctx.save_for_backward(*history)
        return m

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        start, *history = ctx.saved_tensors
        before = [start, *history[:-1]]
        for m, after, axis in reversed(list(zip(before, history, (-1, -2, -1, -2), strict=True))):
            total = m.sum(axis, keepdim=True)
            through = (grad * after).sum(axis, keepdim=True) * (total > 1e-6)
            grad = (grad - through) / total.clamp(min=1e-6)
        return grad * start


@form()
class FunctionSinkhorn(Sublayer):
    def res(self, logits: Tensor) -> Tensor:
        return _Sinkhorn.apply(logits)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", FORMS)
def test_operators(name: str) -> None:
    kind, operators, shape = FORMS[name]
    model = kind(N, WIDTH, 3, 2)
    if isinstance(model, _Seen):
        model.per_channel.requires_grad_(False)  # not used
    outcome = check.run(model, (torch.randn(shape),), repeats=2)
    check.assert_as_accurate(outcome)
    assert outcome.operators == operators, str(outcome.report)
