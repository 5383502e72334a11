"""Writes without a post gate, residual mixing by itself, and gates that live inside one einsum."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mhc_compile.testing import capture
from tests.passes.test_own_gates import ALL, BOTH, SHAPE, WIDTH, N, Own, Softmax, Static
from tests.zoo import check
from tests.zoo.common import random_parameter
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class PostOfOne(Softmax):
    """Every stream gets the sublayer's output as it is."""

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return r.transpose(-1, -2) @ x + f.unsqueeze(-2)


class PostOfOneExpanded(PostOfOne):
    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return 0.5 * f.unsqueeze(-2).expand_as(x) + r.transpose(-1, -2) @ x


class LayerScale(PostOfOne):
    """Every stream gets the output times a weight for each channel."""

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return super().write(x, self.weight[0] * f, p, r)


class StaticPostOfOne(Static):
    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return torch.einsum("io,bsic->bsoc", r, x) + f.unsqueeze(-2)


class StaticPostOfOneStreamsFirst(Static):
    def forward(self, x: Tensor) -> Any:
        x = x.sin().movedim(2, 0).contiguous()
        a, _, r = self.gates(x)
        return torch.einsum("io,ibsc->obsc", r, x) + self.layer(torch.einsum("n,nbsc->bsc", a, x))


class MixedFirst(Softmax):
    """The streams are mixed before they are read, and nothing is added to them there."""

    def body(self, x: Tensor) -> Any:
        a, p, r = self.gates(x)
        x = r.transpose(-1, -2) @ x
        return x + p.unsqueeze(-1) * self.layer(self.read(x, a)).unsqueeze(-2)


class StaticMixedFirst(Static):
    def body(self, x: Tensor) -> Any:
        a, p, r = self.gates(x)
        x = torch.einsum("io,bsic->bsoc", r, x)
        return x + p.unsqueeze(-1) * self.layer(torch.einsum("n,bsnc->bsc", a, x)).unsqueeze(-2)


class ProductOfGates(Softmax):
    """Gates of which two are multiplied inside the einsum."""

    def read(self, x: Tensor, a: Tensor) -> Tensor:
        return torch.einsum("bsn,n,bsnc->bsc", a, self.a, x)

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return torch.einsum("bsio,o,bsic->bsoc", r, self.p, x) + torch.einsum("bso,bsc->bsoc", p, f)


class Mixture(Own):
    """A mixture of a few matrices, summed inside the einsum that mixes the streams."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = random_parameter(3, N, N, std=0.5)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, p, r = self.logits(x)
        return a.softmax(-1), torch.tanh(p), r.flatten(-2)[..., :3].softmax(-1)

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        mixed = torch.einsum("bsk,kio,bsic->bsoc", r, self.matrices, x)
        return mixed + torch.einsum("bso,bsc->bsoc", p, f)


class MixtureTogether(Mixture):
    """The same for one product that reads and mixes."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = random_parameter(3, N, N + 1, std=0.5)

    def body(self, x: Tensor) -> Any:
        _, p, r = self.gates(x)
        both = torch.einsum("bsk,kio,bsic->bsoc", r, self.matrices, x)
        f = self.layer(both[..., 0, :])
        return both[..., 1:, :] + torch.einsum("bso,bsc->bsoc", p, f)


class InOneProduct(Softmax):
    """The output is one more stream, and one [n, n + 1] matrix multiplies them all."""

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return torch.cat((r.transpose(-1, -2), p.unsqueeze(-1)), -1) @ torch.cat((x, f.unsqueeze(-2)), -2)


class OutputFirst(Softmax):
    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        gates = torch.cat((p.unsqueeze(-2), r), -2)
        return torch.einsum("bsio,bsic->bsoc", gates, torch.cat((f.unsqueeze(-2), x), -2))


class InOneProductBesideStreams(Softmax):
    """The streams are added as they are, too, by the operator that makes the product."""

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        gates = torch.cat((r.transpose(-1, -2), p.unsqueeze(-1)), -1)
        both = torch.cat((x, f.unsqueeze(-2)), -2)
        return torch.baddbmm(x.flatten(0, 1), gates.flatten(0, 1), both.flatten(0, 1), beta=0.5).view_as(x)


class StaticInOneProduct(Static):
    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return torch.einsum("io,bsoc->bsic", self.both, torch.cat((x, f.unsqueeze(-2)), -2))


class InOneSum(Softmax):
    """The same, spelled as a product and a sum."""

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        gates = torch.cat((r, p.unsqueeze(-2)), -2).unsqueeze(-1)
        return (gates * torch.cat((x, f.unsqueeze(-2)), -2).unsqueeze(-2)).sum(-3)


class OfAMean(Softmax):
    """Streams that begin as copies of a mean."""

    def forward(self, x: Tensor) -> Any:
        return self.body(x.sin().mean(-2, keepdim=True).expand_as(x))

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return x + p.unsqueeze(-1) * f.unsqueeze(-2)


class LayersOfMeans(Softmax):
    """Each layer reads the mean of the streams that the one before wrote."""

    def body(self, x: Tensor) -> Any:
        for _ in range(2):
            _, p, r = self.gates(x)
            x = self.write(x, self.layer(x.mean(-2)), p, r)
        return x


class StaticLayersOfSums(Static):
    """Nothing but these sums shows what the streams are."""

    def body(self, x: Tensor) -> Any:
        for _ in range(2):
            x = x + self.p.unsqueeze(-1) * self.layer(x.sum(-2)).unsqueeze(-2)
        return x


class MixedLast(Softmax):
    """Nothing but a matrix reads the new streams."""

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return torch.einsum("io,bsic->bsoc", self.r, super().write(x, f, p, r))


class MixedAndPooled(MixedLast):
    """The mean of the streams that are mixed last, which is a weighted sum of those before."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).mean(-2)


class FewerRowsLast(Softmax):
    """A near miss: three rows are made of four streams."""

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return self.r[:3] @ super().write(x, f, p, r)


FORMS: list[tuple[type[Own], list[str]]] = [
    (PostOfOne, ALL),
    (PostOfOneExpanded, ALL),
    (StaticPostOfOne, BOTH),
    (StaticPostOfOneStreamsFirst, BOTH),
    (MixedFirst, ["aggregate", "expand_combine", "mix_streams", "projection"]),
    (StaticMixedFirst, ["aggregate", "expand_combine", "mix_streams"]),
    (ProductOfGates, ALL),
    (Mixture, ALL),
    (MixtureTogether, ALL),
    (InOneProduct, ALL),
    (OutputFirst, ALL),
    (InOneProductBesideStreams, ALL),
    (StaticInOneProduct, BOTH),
    (InOneSum, ALL),
    (OfAMean, ALL),
    (LayersOfMeans, ["expand_combine"] * 2 + ["projection"] * 2),
    (StaticLayersOfSums, ["expand_combine"] * 2),
    (MixedLast, sorted([*ALL, "mix_streams"])),
    (MixedAndPooled, sorted([*ALL, "aggregate"])),
    (FewerRowsLast, ALL),
]


@pytest.mark.parametrize(("kind", "operators"), FORMS, ids=[kind.__name__ for kind, _ in FORMS])
def test_rewritten(kind: type[Own], operators: list[str]) -> None:
    outcome = check.run(kind(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == operators, str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)


class IntoOne(Softmax):
    """One of the streams gets the sublayer's output."""

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        x = r.transpose(-1, -2) @ x
        return torch.cat((x[..., :1, :] + f.unsqueeze(-2), x[..., 1:, :]), -2)


class IntoOneOfStacked(Softmax):
    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        x = r.transpose(-1, -2) @ x
        return torch.stack((*x[..., 1:, :].unbind(-2), x[..., 0, :] + f), -2)


class IntoOneInPlace(Softmax):
    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        x = r.transpose(-1, -2) @ x
        x[..., 0, :] += f
        return x


class IntoOneBeforeMixing(Softmax):
    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        x = torch.cat(((x[..., 0, :] + f).unsqueeze(-2), x[..., 1:, :]), -2)
        return r.transpose(-1, -2) @ x


@pytest.mark.parametrize("kind", [IntoOne, IntoOneOfStacked, IntoOneInPlace, IntoOneBeforeMixing])
def test_an_output_that_is_added_to_some_streams_is_told(kind: type[Own]) -> None:
    outcome = check.run(kind(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["aggregate", "mix_streams", "projection"], str(outcome.report)
    (told,) = outcome.report.declined
    assert "to some of the 4 streams" in str(told.reason)
    lines, first = inspect.getsourcelines(kind.write)
    assert first <= told.location.line < first + len(lines)


class NumberIntoOne(Softmax):
    """One of the streams gets a number for each token, and not the sublayer's output."""

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        x = r.transpose(-1, -2) @ x
        return torch.cat((x[..., :1, :] + f.mean(-1)[..., None, None], x[..., 1:, :]), -2)


class TwoIntoTwo(Softmax):
    """Two of the streams get an output each."""

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        x = r.transpose(-1, -2) @ x
        return torch.cat((x[..., :2, :] + torch.stack((f, f.sin()), -2), x[..., 2:, :]), -2)


@pytest.mark.parametrize("kind", [NumberIntoOne, TwoIntoTwo])
def test_what_is_no_output_and_is_added_to_some_streams_is_not_told(kind: type[Own]) -> None:
    outcome = check.run(kind(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert not outcome.report.declined, str(outcome.report)


class OneAfterTheOther(Softmax):
    """All streams get the output, but each by a line of its own."""

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        x = r.transpose(-1, -2) @ x
        for i in range(N):
            x[..., i, :] += p[..., i, None] * f
        return x


def test_an_output_that_is_added_to_one_stream_after_the_other_is_told() -> None:
    outcome = check.run(OneAfterTheOther(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    (told,) = outcome.report.declined
    assert "to the 4 streams one after the other" in str(told.reason)


class OneAfterTheOtherOfACopy(Static):
    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        x = x.clone()
        for i in range(N):
            x[..., i, :] = x[..., i, :] + p[i] * f
        return x


def test_what_one_operator_writes_is_not_told_as_left() -> None:
    outcome = check.run(OneAfterTheOtherOfACopy(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["aggregate", "expand_combine"], str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)


class SumOfDiagonals(Softmax):
    """Each stream is multiplied by several numbers, which are summed with it."""

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        diagonals = (r.unsqueeze(-2) * x.unsqueeze(-1)).sum(-1)
        return p.unsqueeze(-1) * f.unsqueeze(-2) + diagonals + x


def test_streams_that_are_summed_with_several_gates_are_not_read_with_one() -> None:
    outcome = check.run(SumOfDiagonals(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["aggregate", "projection"], str(outcome.report)


class SummedLinear(Softmax):
    """A near miss: a linear layer over a last dimension as small as n, whose results are summed, is no read."""

    def body(self, x: Tensor) -> Any:
        a, p, r = self.gates(x)
        small = nn.functional.linear(x.transpose(-1, -2).sin(), r[0, 0]).sum(-1)
        return self.write(x, self.layer(self.read(x, a)) * small.sigmoid(), p, r)


def test_a_linear_layer_whose_results_are_summed_is_no_read() -> None:
    outcome = check.run(SummedLinear(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ALL, str(outcome.report)


class KnownGateAlone(Sublayer):
    """A known gate reads the streams, and every stream gets the output."""

    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return x + f.unsqueeze(-2)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, res = self.logits(self.split(self.mixes(x)))
        return torch.sigmoid(pre), post, res


def test_streams_that_a_known_gate_reads() -> None:
    outcome = check.run(KnownGateAlone(4, 6, 3, 2), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine", "head"], str(outcome.report)


class KnownPostAlone(Sublayer):
    """A known gate writes to the streams, whose mean is read, and a static matrix mixes them."""

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = self.flat(x)
        post = nn.functional.linear(flat, self.phi[: self.n]) * self.rms(flat)
        return post, self.post(post * self.scale[1] + self.bias[: self.n]), self.phi[: self.n, : self.n].softmax(-1)

    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        return x.mean(2)


def test_streams_that_a_known_gate_writes() -> None:
    outcome = check.run(KnownPostAlone(4, 6, 3, 2), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine", "generate_mix"], str(outcome.report)


FOR_ALL: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "LayerScale": lambda m, f, p: m.weight[0] * f,
    "a gate of the output": lambda m, f, p: torch.sigmoid(f @ m.weight[0]).unsqueeze(-1) * f,
    "the sum of gates": lambda m, f, p: p.sum(-1, keepdim=True) * f,
    "masked tokens": lambda m, f, p: (f.sum(-1, keepdim=True) > 0) * f,
}


@pytest.mark.parametrize("name", FOR_ALL)
@pytest.mark.parametrize("kind", [Softmax, Static])
def test_one_product_for_all_streams(name: str, kind: type[Own]) -> None:
    """What all streams get is a product itself, and no h_post times something."""

    def write(self: Any, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return r.transpose(-1, -2) @ x + FOR_ALL[name](self, f, p).unsqueeze(-2)

    outcome = check.run(type("Model", (kind,), {"write": write})(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == (BOTH if kind is Static else ALL), str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)


@pytest.mark.parametrize("name", FOR_ALL)
def test_one_product_for_all_streams_of_a_known_gate(name: str) -> None:
    def write(self: Any, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return x + FOR_ALL[name](self, f, h_post).unsqueeze(-2)

    model = type("Model", (KnownGateAlone,), {"write": write})(4, 6, 3, 2)
    model.weight = random_parameter(6, 6)
    outcome = check.run(model, (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert {"head", "generate_mix_and_aggregate"} & set(outcome.operators), str(outcome.report)
    assert "expand_combine" in outcome.operators, str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)


class _Layer(Own):
    """Biases that Dynamo's node adds inside, after the product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bilinear = nn.Linear(WIDTH, WIDTH), nn.Bilinear(WIDTH, WIDTH, WIDTH)


LAYERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "Linear over a transposed input": lambda m, u: m.linear(u.transpose(0, 1)).transpose(0, 1),
    "Linear over columns": lambda m, u: m.linear(u.mT.contiguous().mT),
    "Linear over every other token": lambda m, u: m.linear(torch.cat((u, u), 1)[:, ::2]),
    "Bilinear": lambda m, u: m.bilinear(u, u),
    "two in a row": lambda m, u: m.linear(m.bilinear(u, u).transpose(0, 1)).transpose(0, 1),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", [Static, Softmax, PostOfOne])
def test_a_bias_that_one_node_adds_stays_in_the_sublayer(kind: type[Own], name: str) -> None:
    model = type("Model", (_Layer, kind), {"layer": LAYERS[name]})()
    outcome = check.run(model, (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == (BOTH if kind is Static else ALL), str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)


ADDED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "after": lambda m, f: f + m.weight[0],
    "before": lambda m, f: m.weight[0] + f,
}


@pytest.mark.parametrize("name", ADDED)
def test_a_bias_that_the_program_adds_goes_into_the_operator(name: str) -> None:
    class Model(Static):
        def layer(self, u: Tensor) -> Tensor:
            return ADDED[name](self, super().layer(u))

    outcome = check.run(Model(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == BOTH, str(outcome.report)
    assert "layer_bias=f32[6]" in str(capture(Model(), torch.randn(SHAPE)))


UNKNOWN: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "two outputs in one product": lambda m, x, f: (
        m.table @ torch.cat((x, f.unsqueeze(-2), f.sin().unsqueeze(-2)), dim=-2)
    ),
    "the larger of both": lambda m, x, f: torch.maximum(x, f.unsqueeze(-2)),
    "streams times a gate of each channel": lambda m, x, f: x * torch.sigmoid(f).unsqueeze(-2),
    "between both": lambda m, x, f: torch.lerp(x, f.unsqueeze(-2), 0.25),
    "where": lambda m, x, f: torch.where(x > 0, x, f.unsqueeze(-2)),
    "stream by stream": lambda m, x, f: torch.stack([torch.tanh(one) + f for one in x.unbind(-2)], -2),
    "side by side": lambda m, x, f: torch.cat([x[..., i, :].maximum(f) for i in range(4)], -1).view_as(x),
    "a product of both": lambda m, x, f: torch.einsum("bsnc,bsc,ncd->bsnd", x, f, m.cube),
}


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("flat", [False, True])
def test_an_output_that_meets_the_streams_in_another_way_is_told(name: str, flat: bool) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        pre, _, _ = self.gates(x)
        new = UNKNOWN[name](self, x, self.layer((pre.unsqueeze(-1) * x).sum(-2), x))
        return new.flatten(-2) if flat else new

    model = type("Model", (KnownGateAlone,), {"body": body})(4, 6, 3, 2)
    model.table, model.cube = random_parameter(4, 6), random_parameter(4, 6, 6)
    outcome = check.run(model, (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    (told,) = outcome.report.declined
    assert told.op == "expand_combine", str(outcome.report)
    assert "lambda" in told.location.code or "table" in told.location.code, str(outcome.report)


def test_what_is_no_write_is_not_told() -> None:
    """Statistics of the streams beside the head, and a head that reads streams that went on."""

    def body(self: Any, x: Tensor) -> Any:
        pre, _, _ = self.gates(x)
        out = (pre.unsqueeze(-1) * x).sum(-2)
        return out.tanh(), x.square().mean(-1).detach(), x.flatten(-2).sin()

    outcome = check.run(type("Model", (KnownGateAlone,), {"body": body})(4, 6, 3, 2), (torch.randn(SHAPE),))
    assert outcome.operators == ["head"], str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)


MEETINGS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "similarity": lambda m, x, h: (x, torch.cosine_similarity(x, h.unsqueeze(-2), dim=-1)),
    "beside the streams": lambda m, x, h: torch.cat((x, h.unsqueeze(-2)), -2).sin(),
    "variance": lambda m, x, h: (x - h.unsqueeze(-2)).square().mean((-1, -2)),
    "halting": lambda m, x, h: x * h.mean(-1).sigmoid()[..., None, None],
    "early exit": lambda m, x, h: torch.where((h.mean(-1) > 0)[..., None, None], x, x.tanh()),
    "depth router": lambda m, x, h: x + h.mean(-1).sigmoid()[..., None, None] * (x.tanh() - x),
    "two depths": lambda m, x, h: (g := h.mean(-1).sigmoid()[..., None, None]) * x + (1 - g) * x.detach().sin(),
    "drafted token": lambda m, x, h: x + m.table[h.argmax(-1) % 4].unsqueeze(-2),
    "second read": lambda m, x, h: ((h @ m.table.mT).softmax(-1).unsqueeze(-1) * x).sum(-2),
}


@pytest.mark.parametrize("name", MEETINGS)
def test_what_meets_the_streams_and_is_no_write_is_not_told(name: str) -> None:
    def body(self: Any, x: Tensor) -> Any:
        pre, _, _ = self.gates(x)
        return MEETINGS[name](self, x, (pre.unsqueeze(-1) * x).sum(-2))

    model = type("Model", (KnownGateAlone,), {"body": body})(4, 6, 3, 2)
    model.table = random_parameter(4, 6)
    outcome = check.run(model, (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.report.rewritten, str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)
