"""Lists of streams or gates that are left as they are, as a stack would change what the program does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mhc_compile.passes import lists
from tests.zoo import check

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WIDTH, N = 6, 4


class Gated(nn.Module):
    """A sublayer over a list of streams, in which each gate is a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.p, self.r = (nn.ParameterList(torch.randn(()) for _ in range(count)) for count in (N, N, N * N))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        for i in range(N):
            self.register_buffer(f"b{i}", torch.ones(()))

    def come(self, x: Tensor) -> list[Tensor]:
        return list(x.sin().unbind(-2))

    def pre(self) -> Sequence[Tensor]:
        return list(self.a)

    def post(self) -> Sequence[Tensor]:
        return list(self.p)

    def go(self, xs: list[Tensor]) -> Any:
        return sum(xs)

    def forward(self, x: Tensor) -> Any:
        return self.go(self.sublayer(self.come(x)))

    def sublayer(self, xs: list[Tensor]) -> list[Tensor]:
        n = range(N)
        self.read = self.pre()
        f = torch.tanh(sum(self.read[i] * xs[i] for i in n) @ self.weight)  # type: ignore[operator]
        self.written = self.post()
        return [self.written[o] * f + sum(self.r[N * o + i] * xs[i] for i in n) for o in n]

    def buffers_halved(self) -> list[Tensor]:
        held = list(self.buffers())
        for buffer in held:
            buffer.mul_(0.5)
        return held


class Decaying(Gated):
    def pre(self) -> Sequence[Tensor]:
        return self.buffers_halved()


class DecayingPost(Gated):
    def post(self) -> Sequence[Tensor]:
        return self.buffers_halved()


class Returned(Gated):
    def pre(self) -> Sequence[Tensor]:
        return [torch.sigmoid(a) for a in self.a]

    def post(self) -> Sequence[Tensor]:
        return [torch.sigmoid(p) for p in self.p[:-1]] + [torch.sigmoid(self.p[-1].detach())]

    def go(self, xs: list[Tensor]) -> Any:
        return sum(xs), self.read, self.written


class ViewsReturned(Returned):
    def go(self, xs: list[Tensor]) -> Any:
        return sum(xs), [a[None] for a in self.read], [p[None] for p in self.written]


class LastWithoutGradients(Gated):
    at = N - 1

    def some(self, gates: nn.ParameterList) -> list[Tensor]:
        made = []
        for i, gate in enumerate(gates):
            with torch.set_grad_enabled(i != self.at):
                made.append(torch.sigmoid(gate))
        return made

    def pre(self) -> Sequence[Tensor]:
        return self.some(self.a)


class FirstWithoutGradients(LastWithoutGradients):
    at = 0


class LastPostWithoutGradients(LastWithoutGradients):
    def pre(self) -> Sequence[Tensor]:
        return list(self.a)

    def post(self) -> Sequence[Tensor]:
        return self.some(self.p)


class LastStreamWithoutGradients(Gated):
    def come(self, x: Tensor) -> list[Tensor]:
        made = []
        for i, part in enumerate(x.unbind(-2)):
            with torch.set_grad_enabled(i != N - 1):
                made.append(torch.sin(self.p[i] * part))
        return made


class OneOfAnotherDtype(Gated):
    def come(self, x: Tensor) -> list[Tensor]:
        first, *others = [part.sin() for part in x.unbind(-2)]
        first = first.to(torch.bfloat16)
        self.seen = first * 1.5
        return [first, *others]

    def go(self, xs: list[Tensor]) -> Any:
        return sum(xs), self.seen


class OneNewOfAnotherDtype(Gated):
    """A stream is cast between two sublayers."""

    def go(self, xs: list[Tensor]) -> Any:
        xs = [xs[0].to(torch.bfloat16), *xs[1:]]
        return sum(self.sublayer(xs)), xs[0] * 1.5


@torch.library.custom_op("example::doubled_contiguous", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """A kernel for contiguous tensors, which asks nobody for strides."""
    return 2 * x.as_strided(x.shape, torch.empty(x.shape).stride())


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape)


class Embedded(Gated):
    """The first stream is read beside the sublayer, by one of `READERS`."""

    reader: Callable[[Tensor], Tensor] = torch.exp

    def come(self, x: Tensor) -> list[Tensor]:
        e = x.mean(-2)
        return [torch.sin(p * e) for p in self.p]

    def forward(self, x: Tensor) -> Any:
        xs = self.come(x)
        seen = type(self).reader(xs[1])
        return sum(self.sublayer(xs)), seen


class EmbeddedTransposed(Embedded):
    def come(self, x: Tensor) -> list[Tensor]:
        return super().come(x.transpose(0, 1))


class NewRead(Embedded):
    """As `Embedded`, with the reader between two sublayers."""

    def forward(self, x: Tensor) -> Any:
        xs = self.sublayer(self.come(x))
        seen = type(self).reader(xs[1])
        return sum(self.sublayer(xs)), seen


class FrozenPost(Gated):
    """Results of a gate and of a stream without a gradient, beside others with one."""

    def __init__(self) -> None:
        super().__init__()
        self.p[0].requires_grad_(False)

    def come(self, x: Tensor) -> list[Tensor]:
        streams = [torch.sin(p * x.mean(-2)) for p in self.p]
        self.seen = streams[0].exp()
        return streams

    def post(self) -> Sequence[Tensor]:
        return [torch.sigmoid(p) for p in self.p]

    def go(self, xs: list[Tensor]) -> Any:
        return sum(xs), self.seen, 3 * self.written[0]


class OneStreamUsed(Gated):
    def go(self, xs: list[Tensor]) -> Any:
        return torch.tanh(xs[0])


class OneStreamUsedOfSharedGates(OneStreamUsed):
    """One parameter has the numbers of all gates."""

    def __init__(self) -> None:
        super().__init__()
        self.r = nn.Parameter(torch.randn(N * N))  # type: ignore[assignment]
        self.p = nn.Parameter(torch.randn(N))  # type: ignore[assignment]


class OneStreamUsedOfMappedGates(OneStreamUsed):
    """Each gate of a write is made by torch.vmap from a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.r = nn.Parameter(torch.randn(N * N))  # type: ignore[assignment]

    def sublayer(self, xs: list[Tensor]) -> list[Tensor]:
        new = super().sublayer(xs)
        del self.written  # what is kept is a result of the graph
        return new

    def post(self) -> Sequence[Tensor]:
        return [torch.vmap(torch.sin)(p.view(1)).squeeze(0) for p in self.p]


def _run(kind: type[Gated]) -> tuple[list[str], list[str]]:
    """The operators in the new graph, and the reasons of what is left, of a model that does what it does eagerly."""
    x = torch.randn(2, 3, N, WIDTH)
    eager, model = kind(), kind()
    call, report = check.rewriting(model)
    expected, found = eager(x), call(x)
    torch.testing.assert_close(found, expected)
    for results in (expected, found):
        tree_leaves(results)[0].sum().backward()
    for one, other in zip(tree_leaves(expected), tree_leaves(found), strict=True):
        assert (one.stride(), one.requires_grad) == (other.stride(), other.requires_grad)
    torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
    gradients = [{name: p.grad for name, p in m.named_parameters() if p.grad is not None} for m in (model, eager)]
    torch.testing.assert_close(*gradients)
    results = tree_leaves(found)
    assert len({result.untyped_storage().data_ptr() for result in results}) == len(results)
    assert not report.errors
    return sorted(site.op for site in report.rewritten), [str(site.reason) for site in report.declined]


def test_gates_that_the_program_writes_in_place() -> None:
    assert _run(Decaying) == (["expand_combine"], [])
    assert _run(DecayingPost) == ([], [lists.GATES_WRITTEN])


def test_gates_that_leave_keep_their_memory() -> None:
    assert _run(Returned)[0] == ["aggregate", "expand_combine"]
    assert _run(ViewsReturned) == ([], [lists.GATES_LEAVE])


def test_gradients_that_are_off_where_a_list_would_be_stacked() -> None:
    assert _run(LastWithoutGradients) == (["expand_combine"], [])
    assert _run(LastPostWithoutGradients) == ([], [lists.GRADIENTS_OFF])
    assert _run(LastStreamWithoutGradients) == ([], [lists.GRADIENTS_OFF])
    assert _run(FirstWithoutGradients) == (["aggregate", "expand_combine"], [])


def test_parameters_of_streams_without_a_gradient_get_none() -> None:
    assert _run(OneStreamUsed) == ([], [lists.ZEROS])
    assert _run(OneStreamUsedOfMappedGates) == ([], [lists.ZEROS])
    assert _run(OneStreamUsedOfSharedGates) == (["aggregate", "expand_combine"], [])


def test_streams_of_different_dtypes() -> None:
    assert _run(OneOfAnotherDtype) == ([], [lists.DTYPES])
    assert _run(OneNewOfAnotherDtype) == ([], [lists.DTYPES] * 2)


READERS: list[Callable[[Tensor], Tensor]] = [
    doubled,
    lambda x: x.view(x.shape[0], -1).sin(),
    lambda x: x.contiguous().as_strided((2, WIDTH), (WIDTH, 1)).sin(),
    lambda x: doubled(x[0]),
    lambda x: x.detach().exp().view(2, -1),
    torch.exp,
    lambda x: x.view(-1, WIDTH) @ x.new_ones(WIDTH, 2),
]
# Those to which the strides of a stream are all one.
ANY_STRIDES = READERS[-3:]


@pytest.mark.parametrize("reader", READERS)
def test_readers_of_streams_find_their_strides(reader: Callable[[Tensor], Tensor], monkeypatch: Any) -> None:
    monkeypatch.setattr(Embedded, "reader", staticmethod(reader))
    assert _run(Embedded) == (["aggregate", "expand_combine"], [])
    operators, reasons = _run(NewRead)
    if reader in ANY_STRIDES:
        assert (operators, reasons) == (["aggregate"] * 2 + ["expand_combine"] * 2, [])
    else:
        assert "expand_combine" in operators
        assert all(lists.SEEN in reason for reason in reasons), reasons


def test_results_keep_the_order_of_their_dimensions() -> None:
    assert _run(EmbeddedTransposed) == (["aggregate", "expand_combine"], [])


def test_results_without_a_gradient_have_none() -> None:
    assert _run(FrozenPost) == (["aggregate", "expand_combine"], [])
