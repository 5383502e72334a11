"""Lists of streams or gates that are left as they are, as a stack would change what the program does."""

from __future__ import annotations

from collections.abc import Sequence
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


class OneStreamUsed(Gated):
    def go(self, xs: list[Tensor]) -> Any:
        return torch.tanh(xs[0])


class OneStreamUsedOfSharedGates(OneStreamUsed):
    """One parameter has the numbers of all gates."""

    def __init__(self) -> None:
        super().__init__()
        self.r = nn.Parameter(torch.randn(N * N))  # type: ignore[assignment]
        self.p = nn.Parameter(torch.randn(N))  # type: ignore[assignment]


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
        assert one.requires_grad == other.requires_grad
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
    assert _run(OneStreamUsedOfSharedGates) == (["aggregate", "expand_combine"], [])


def test_streams_of_different_dtypes() -> None:
    assert _run(OneOfAnotherDtype) == ([], [lists.DTYPES])
    assert _run(OneNewOfAnotherDtype) == ([], [lists.DTYPES] * 2)
