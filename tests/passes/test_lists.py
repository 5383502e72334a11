"""Streams that a program keeps as a Python list of n tensors [..., C]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import mhc_compile
from mhc_compile import compat, passes
from mhc_compile.passes.lists import NO_STACK
from mhc_compile.testing import capture
from tests.zoo import check
from tests.zoo.common import random_parameter, random_phi

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WIDTH, LAYERS = 6, 2
Streams = list[Tensor]


class Listed(nn.Module):
    """Streams [b, s, n, C], taken apart, in sublayers that a subclass spells."""

    def __init__(self, n: int = 4) -> None:
        super().__init__()
        self.n = n
        self.a, self.p = random_parameter(LAYERS, n, mean=0.5), random_parameter(LAYERS, n, mean=1.0)
        self.r = random_parameter(LAYERS, n, n, std=0.5)
        self.phi = nn.ParameterList(random_phi(n * n + 2 * n, n * WIDTH) for _ in range(LAYERS))
        self.of_stream = random_parameter(LAYERS, WIDTH, n + 2, std=WIDTH**-0.5)
        self.start = random_parameter(n, WIDTH, std=0.5)
        self.weight = random_parameter(LAYERS, WIDTH, WIDTH, std=WIDTH**-0.5)

    def layer(self, k: int, u: Tensor) -> Tensor:
        return torch.tanh(F.linear(u, self.weight[k]))

    def come(self, x: Tensor) -> Streams:
        return list(x.sin().unbind(-2))

    def go(self, xs: Streams) -> Any:
        return sum(xs)

    def gates(self, k: int, xs: Streams) -> tuple[Any, Any, Any]:
        """Gates from the token's streams side by side."""
        logits = F.linear(F.rms_norm(torch.cat(xs, -1), (self.n * WIDTH,)), self.phi[k])
        a, p, r = logits.split((self.n, self.n, self.n**2), -1)
        return torch.sigmoid(a), 1 + torch.tanh(p), r.unflatten(-1, (self.n, self.n)).softmax(-1)

    def read(self, xs: Streams, a: Any) -> Tensor:
        return sum(a[..., i : i + 1] * xs[i] for i in range(self.n))  # type: ignore[return-value]

    def write(self, xs: Streams, f: Tensor, p: Any, r: Any) -> Streams:
        n = range(self.n)
        return [p[..., o : o + 1] * f + sum(r[..., o, i : i + 1] * xs[i] for i in n) for o in n]

    def sublayer(self, k: int, xs: Streams) -> Streams:
        a, p, r = self.gates(k, xs)
        return self.write(xs, self.layer(k, self.read(xs, a)), p, r)

    def forward(self, x: Tensor) -> Any:
        xs = self.come(x)
        for k in range(LAYERS):
            xs = self.sublayer(k, xs)
        return self.go(xs)


class Stacked(Listed):
    def go(self, xs: Streams) -> Any:
        return torch.stack(xs, -2)


class StackedForTheProjection(Stacked):
    def gates(self, k: int, xs: Streams) -> tuple[Any, Any, Any]:
        x = torch.stack(xs, -2)
        return super().gates(k, list(x.unbind(-2)))


class Embedded(Listed):
    """The streams never were one tensor."""

    def come(self, x: Tensor) -> Streams:
        e = x.mean(-2).sin()
        return [e + start for start in self.start]


class Copied(Embedded):
    def come(self, x: Tensor) -> Streams:
        e = x.mean(-2).sin()
        return [e.clone() for _ in range(self.n)]

    def go(self, xs: Streams) -> Any:
        return torch.cat(xs, -1)


class Chunks(Listed):
    def come(self, x: Tensor) -> Streams:
        return list(x.sin().flatten(-2).chunk(self.n, -1))


class Separate(Listed):
    """Each stream comes from a product of its own, and the gates need them side by side."""

    def __init__(self, n: int = 4) -> None:
        super().__init__(n)
        self.enter = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n))

    def come(self, x: Tensor) -> Streams:
        return [enter(part) for enter, part in zip(self.enter, x.unbind(-2), strict=True)]


class Static(Listed):
    def gates(self, k: int, xs: Streams) -> tuple[Any, Any, Any]:
        return self.a[k].softmax(-1), 2 * self.p[k].sigmoid(), self.r[k].softmax(-1)


class StaticByIndex(Static):
    def read(self, xs: Streams, a: Any) -> Tensor:
        u = torch.zeros_like(xs[0])
        for i in range(self.n):
            u = u + a[i] * xs[i]
        return u

    def write(self, xs: Streams, f: Tensor, p: Any, r: Any) -> Streams:
        new = []
        for o in range(self.n):
            mixed = r[o, 0] * xs[0]
            for i in range(1, self.n):
                mixed = torch.addcmul(mixed, r[o, i], xs[i])
            new.append(mixed + p[o] * f)
        return new


class StaticGateByGate(StaticByIndex):
    """Each number of the mixing matrix is a tensor of its own."""

    def gates(self, k: int, xs: Streams) -> tuple[Any, Any, Any]:
        a, p, _ = super().gates(k, xs)
        n = range(self.n)
        return a, p, {(o, i): torch.tanh(self.r[k, o, i]) for o in n for i in n}


class StaticBackwards(StaticByIndex):
    """The last stream is read first."""

    def read(self, xs: Streams, a: Any) -> Tensor:
        return sum(a[i] * xs[i] for i in reversed(range(self.n)))  # type: ignore[return-value]


class StaticSummed(Static):
    """Read as the mean of all, and written to each stream as it is."""

    def read(self, xs: Streams, a: Any) -> Tensor:
        return sum(xs) / self.n  # type: ignore[operator]

    def write(self, xs: Streams, f: Tensor, p: Any, r: Any) -> Streams:
        return [x + p[i] * f for i, x in enumerate(xs)]


class StaticScaled(Static):
    def write(self, xs: Streams, f: Tensor, p: Any, r: Any) -> Streams:
        return [r[0, i] * x + p[i] * f for i, x in enumerate(xs)]


class StaticDiagonal(Static):
    def write(self, xs: Streams, f: Tensor, p: Any, r: Any) -> Streams:
        return [r[i, i] * x + p[i] * f for i, x in enumerate(xs)]


class PostOfOne(Listed):
    def write(self, xs: Streams, f: Tensor, p: Any, r: Any) -> Streams:
        n = range(self.n)
        return [sum(r[..., o, i, None] * xs[i] for i in n) + f for o in n]


class Tanh(Listed):
    """arXiv 2409.19606, stream by stream: each gate is a tensor of its own."""

    def gates(self, k: int, xs: Streams) -> tuple[Any, Any, Any]:
        normed = [F.layer_norm(x, (WIDTH,)) for x in xs]
        h = [torch.tanh(x @ self.of_stream[k]) for x in normed]
        alpha = [h[i][..., :-1] + torch.cat((self.a[k, i : i + 1], self.r[k, i])) for i in range(self.n)]
        return alpha, [h[i][..., -1:] + self.p[k, i] for i in range(self.n)], None

    def sublayer(self, k: int, xs: Streams) -> Streams:
        alpha, beta, _ = self.gates(k, xs)
        n = range(self.n)
        f = self.layer(k, sum(alpha[i][..., :1] * xs[i] for i in n))  # type: ignore[arg-type]
        mixed = [sum(alpha[i][..., o + 1 : o + 2] * xs[i] for i in n) for o in n]
        return [m + b * f for m, b in zip(mixed, beta, strict=True)]


class TanhStacked(Tanh):
    def forward(self, x: Tensor) -> Any:
        x = x.sin()
        for k in range(LAYERS):
            x = torch.stack(self.sublayer(k, list(x.unbind(-2))), -2)
        return x


class WrittenIntoParts(Static):
    """One tensor, whose parts are written one after the other."""

    def forward(self, x: Tensor) -> Any:
        x = x.sin()
        for k in range(LAYERS):
            _, p, _ = self.gates(k, [])
            f, x = self.layer(k, x.mean(-2)), x.clone()
            for i in range(self.n):
                x[..., i, :] = x[..., i, :] + p[i] * f
        return x


class OneReturned(Listed):
    """The program stacks the streams, and one of them also leaves by itself."""

    def go(self, xs: Streams) -> Any:
        return torch.stack(xs, -2), xs[0]


FUSED = ["expand_combine", "generate_mix_and_aggregate"]
OWN = ["aggregate", "expand_combine"]
FORMS: list[tuple[type[Listed], list[str]]] = [
    (Listed, FUSED),
    (Stacked, FUSED),
    (StackedForTheProjection, FUSED),
    (Embedded, FUSED),
    (Copied, FUSED),
    (Chunks, FUSED),
    (Separate, FUSED),
    (Static, OWN),
    (StaticByIndex, OWN),
    (StaticGateByGate, OWN),
    (StaticBackwards, OWN),
    (StaticSummed, ["expand_combine"]),
    (StaticScaled, OWN),
    (PostOfOne, FUSED),
    (Tanh, OWN),
    (TanhStacked, OWN),
    (WrittenIntoParts, ["expand_combine"]),
    (OneReturned, FUSED),
]


def _run(model: nn.Module, n: int = 4, **options: Any) -> check.Outcome:
    outcome = check.run(model, (torch.randn(2, 3, n, WIDTH),), **options)
    check.assert_as_accurate(outcome)
    return outcome


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("kind", "operators"), FORMS, ids=[kind.__name__ for kind, _ in FORMS])
def test_rewritten(kind: type[Listed], operators: list[str], n: int) -> None:
    outcome = _run(kind(n), n)
    assert outcome.operators == sorted(operators * LAYERS), str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)


def test_sizes_that_are_symbolic() -> None:
    outcome = _run(Listed(), dynamic=True)
    assert outcome.operators == sorted(FUSED * LAYERS), str(outcome.report)


def _operators(model: nn.Module, x: Tensor) -> tuple[passes.Report, torch.fx.Graph]:
    found = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append((passes.run_recursively(gm), gm.graph))
        return gm.forward

    torch.compile(model, backend=backend)(x)
    return found[0]


@pytest.mark.parametrize("kind", [Listed, Stacked, Embedded, Copied, Static])
def test_no_stack_is_left_but_those_that_begin(kind: type[Listed]) -> None:
    """A stack is a copy: there is one for streams that never were a tensor, and none of what an operator writes."""
    _, graph = _operators(kind(), torch.randn(2, 3, 4, WIDTH))
    stacks = [n for n in graph.nodes if n.target in (torch.stack, torch.cat) and n.meta["example_value"].dim() > 2]
    assert len(stacks) == (kind in (Embedded, Copied)), str(graph)


class Returned(Listed):
    """What leaves is the list: the last write is left, all else is rewritten."""

    def go(self, xs: Streams) -> Any:
        return xs


class Given(Separate):
    """The list comes from elsewhere, and its gates need no tensor of all streams."""

    gates = Static.gates


class Same(Listed):
    """The list begins as n times one tensor."""

    def come(self, x: Tensor) -> Streams:
        return [x.mean(-2).sin()] * self.n


class InPlace(Static):
    """Somebody else may see the memory of a stream that is written in place."""

    def sublayer(self, k: int, xs: Streams) -> Streams:
        new = super().sublayer(k, xs)
        self.seen = new[0].view(-1)
        new[0].view(-1).mul_(0.5)
        return new


class ToOne(Static):
    """The output is added to one stream, and the others are only mixed."""

    def write(self, xs: Streams, f: Tensor, p: Any, r: Any) -> Streams:
        n = range(self.n)
        new = [sum(r[o, i] * xs[i] for i in n) for o in n]
        new[0] = new[0] + f  # type: ignore[operator]
        return new  # type: ignore[return-value]


class ToHalf(Listed):
    """As far as the gates are known, a projection makes them."""

    def write(self, xs: Streams, f: Tensor, p: Any, r: Any) -> Streams:
        n = range(self.n)
        mixed = [sum(r[..., o, i, None] * xs[i] for i in n) for o in n]
        return [f + m if o >= self.n // 2 else m for o, m in enumerate(mixed)]  # type: ignore[misc]


TOLD: list[tuple[type[Listed], str, int]] = [
    (Returned, "leave the graph as separate tensors", LAYERS - 1),
    (Given, "enter the graph as separate tensors", LAYERS - 1),
    (Same, "all streams in the list are one tensor", LAYERS - 1),
    (StaticDiagonal, "along a diagonal", 0),
    (InPlace, "writes in place into one of the streams", 0),
    (ToOne, "to some of the 4 streams", 0),
    (ToHalf, "to some of the 4 streams", 0),
]


@pytest.mark.parametrize(("kind", "reason", "rewritten"), TOLD, ids=[kind.__name__ for kind, _, _ in TOLD])
def test_told_in_one_line(kind: type[Listed], reason: str, rewritten: int) -> None:
    outcome = _run(kind())
    assert outcome.operators.count("expand_combine") == rewritten, str(outcome.report)
    declined = outcome.report.declined
    assert declined, str(outcome.report)
    assert all(reason in str(site.reason) for site in declined), str(outcome.report)
    assert len({site.location for site in declined}) == 1, str(outcome.report)
    assert declined[0].location.file.endswith("test_lists.py")


def test_an_output_that_is_added_to_one_of_two_streams_is_told() -> None:
    outcome = _run(ToOne(2))
    assert any("to some of the 2 streams" in str(site.reason) for site in outcome.report.declined), str(outcome.report)


@pytest.mark.parametrize("missing", [torch.stack, "unbind"])
def test_what_torch_does_not_stack_or_take_apart_is_left(missing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with DTensors in torch 2.11."""
    on_examples = compat.on_examples

    def some(function: Any, *args: Any, **options: Any) -> Any:
        return None if function == missing else on_examples(function, *args, **options)

    monkeypatch.setattr(compat, "on_examples", some)
    outcome = _run(Listed())
    assert not outcome.report.errors
    # The last list is stacked by the program itself.
    assert outcome.operators.count("expand_combine") == LAYERS - 1, str(outcome.report)
    reasons = {str(site.reason) for site in outcome.report.declined}
    assert reasons == {NO_STACK}, str(outcome.report)


def test_lists_of_a_wide_model_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph without such a list is recorded once."""
    traced: list[Any] = []
    trace: Callable[..., Any] = passes.shadowing.trace
    monkeypatch.setattr(passes.shadowing, "trace", lambda *args: traced.append(args) or trace(*args))
    _operators(WrittenIntoParts(), torch.randn(2, 3, 4, WIDTH))
    assert len(traced) == 1


def test_snapshot() -> None:
    assert_expected_inline(
        str(capture(Listed(), torch.randn(2, 3, 4, WIDTH))),
        """\
%0 = generate_mix_and_aggregate(x=f32[2, 3, 4, 6], phi=f32[24, 24], scale=f32[8], bias=f32[8],
    rms_eps=1.1920928955078125e-07)
%1 = expand_combine(f=f32[2, 3, 6](%0.0), h_post=%0.1, x=f32[2, 3, 4, 6], h_res=f32[2, 3, 4,
    4](%0.3, %0.4))
%2 = generate_mix_and_aggregate(x=%1, phi=f32[24, 24], scale=f32[8], bias=f32[8],
    rms_eps=1.1920928955078125e-07)
%3 = expand_combine(f=f32[2, 3, 6](%2.0), h_post=%2.1, x=%1, h_res=f32[2, 3, 4, 4](%2.3, %2.4))
return %3""",
    )


def test_rounds_of_stacking_have_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mhc_compile.passes.lists.MOST_ROUNDS", 0)
    report, _ = _operators(Listed(), torch.randn(2, 3, 4, WIDTH))
    assert not report.errors
    (site,) = report.declined
    assert "no end was found within 0 times that lists of streams are stacked" in str(site.reason)


def _compiled_strictly(model: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="mhc", options={"mhc.strict": True})


def test_strict_options_look_at_lists() -> None:
    with pytest.raises(mhc_compile.StrictError, match="leave the graph as separate tensors"):
        _compiled_strictly(Returned())(torch.randn(2, 3, 4, WIDTH))


class OneMadeAnew(Stacked):
    """Two lists have streams in common, and one stream of the second is made of one of the first."""

    def sublayer(self, k: int, xs: Streams) -> Streams:
        first, *others = super().sublayer(k, xs)
        return [first.sin(), *others]


def test_lists_with_streams_in_common() -> None:
    outcome = check.run(OneMadeAnew(), (torch.randn(2, 3, 4, WIDTH),))
    check.assert_as_accurate(outcome)
    assert "expand_combine" in outcome.operators
    assert outcome.report.errors == []


class OneTransposed(nn.Module):
    """A near miss: the sum reads the last stream with batch and length swapped, and they are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.p = random_parameter(4, mean=0.5), random_parameter(4, 1, mean=1.0)
        self.weight = random_parameter(WIDTH, WIDTH, std=WIDTH**-0.5)

    def forward(self, x: Tensor) -> Any:
        x = x.sin()
        *xs, last = x.unbind(-2)
        u: Any = sum(self.a[i] * one for i, one in enumerate([*xs, last.transpose(0, 1)]))
        return x + self.p * torch.tanh(F.linear(u, self.weight)).unsqueeze(-2)


def test_a_stream_in_another_order_is_no_stream_of_the_list() -> None:
    outcome = check.run(OneTransposed(), (torch.randn(3, 3, 4, WIDTH),))
    check.assert_as_accurate(outcome)
    assert "aggregate" not in outcome.operators, str(outcome.report)


class Detached(Stacked):
    """The new streams leave the graph, as tensors of their own, whose gradients nobody wants."""

    def go(self, xs: Streams) -> Any:
        return super().go(xs[::-1]), [x.detach() for x in xs]


class AsData(Stacked):
    """As `Detached`, by an attribute, of which Dynamo makes a call that no dispatcher knows."""

    def go(self, xs: Streams) -> Any:
        return super().go(xs[::-1]), [x.data for x in xs]


@pytest.mark.parametrize("kind", [Detached, AsData])
def test_streams_that_leave_detached_keep_their_strides(kind: type[Listed]) -> None:
    outcome = check.run(kind(), (torch.randn(2, 3, 4, WIDTH),))
    check.assert_as_accurate(outcome)
    assert not outcome.strides, outcome.strides
    assert any("leave the graph as separate tensors" in str(site.reason) for site in outcome.report.declined)


class Heads(Listed):
    """A list with a tensor for each head, which one output projection reads."""

    def forward(self, x: Tensor) -> Any:
        heads = [torch.tanh(F.linear(part, weight)) for part in x.unbind(-2) for weight in self.weight]
        gates = self.p.flatten().sigmoid()
        return F.linear(torch.cat([gates[i] * head for i, head in enumerate(heads)], -1), self.phi[0].repeat(1, 2))


class Experts(Listed):
    """A list of what experts make of one tensor, weighed and added to that."""

    def forward(self, x: Tensor) -> Any:
        x = x.mean(-2)
        weights = F.linear(x, self.start).softmax(-1)
        for k in range(LAYERS):
            experts = [torch.tanh(F.linear(x + start, self.weight[k])) for start in self.start]
            x = x + sum(weights[..., i, None] * expert for i, expert in enumerate(experts))
        return x


class GatesOfChannels(Listed):
    """A gate for each channel, as no operator takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.of_channels = random_parameter(self.n + 2, self.n, WIDTH, std=0.5)

    def gates(self, k: int, xs: Streams) -> tuple[Any, Any, Any]:
        return self.of_channels[0], self.of_channels[1], self.of_channels[2:]

    def read(self, xs: Streams, a: Any) -> Tensor:
        return sum(gate * x for gate, x in zip(a, xs, strict=True))  # type: ignore[return-value]

    def write(self, xs: Streams, f: Tensor, p: Any, r: Any) -> Streams:
        return [p[o] * f + self.read(xs, r[o]) for o in range(self.n)]


@pytest.mark.parametrize("kind", [Heads, Experts, GatesOfChannels])
def test_lists_that_are_no_streams(kind: type[Listed]) -> None:
    x = torch.randn(2, 3, 4, WIDTH)
    report, _ = _operators(kind(), x)
    assert not report.sites, str(report)
    assert not report.errors, str(report)
    with torch.no_grad():
        _compiled_strictly(kind())(x)
