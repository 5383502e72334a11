"""Hyper-connections whose gates nobody knows: reading and writing are recognised by their own structure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhc_compile import passes
from mhc_compile.testing import capture
from tests.passes.dynamo import graph_of
from tests.zoo import check
from tests.zoo.common import random_parameter, random_phi

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, WIDTH = 4, 6
SHAPE = (2, 3, N, WIDTH)


class Own(nn.Module):
    """Streams [b, s, n, C] -> [b, s, n, C] with gates that a subclass makes."""

    def __init__(self) -> None:
        super().__init__()
        n = N
        self.a, self.p = random_parameter(n, mean=0.5), random_parameter(n, mean=1.0)
        self.r = random_parameter(n, n, std=0.5)
        self.both = random_parameter(n, n + 1, std=0.5)
        self.phi = random_phi(n * n + 2 * n, n * WIDTH)
        self.of_stream = random_parameter(WIDTH, n + 2, std=WIDTH**-0.5)
        self.scale = random_parameter(3, mean=1.0, std=0.2)
        self.weight = random_parameter(WIDTH, WIDTH, std=WIDTH**-0.5)

    def layer(self, u: Tensor) -> Tensor:
        return torch.tanh(F.linear(u, self.weight))

    def logits(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of a projection without a norm."""
        a, p, r = F.linear(x.flatten(-2), self.phi).split((N, N, N * N), -1)
        return a, p, r.unflatten(-1, (N, N))

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def read(self, x: Tensor, a: Tensor) -> Tensor:
        return (a.unsqueeze(-1) * x).sum(-2)

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return p.unsqueeze(-1) * f.unsqueeze(-2) + r.transpose(-1, -2) @ x

    def body(self, x: Tensor) -> Any:
        a, p, r = self.gates(x)
        return self.write(x, self.layer(self.read(x, a)), p, r)

    def forward(self, x: Tensor) -> Any:
        return self.body(x.sin())


class Static(Own):
    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.a.softmax(-1), 2 * self.p.sigmoid(), self.r.softmax(-1)


class StaticInEinsum(Static):
    def read(self, x: Tensor, a: Tensor) -> Tensor:
        return torch.einsum("n,bsnc->bsc", a, x)

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return torch.einsum("io,bsic->bsoc", r, x) + torch.einsum("o,bsc->bsoc", p, f)


class StaticExpanded(Static):
    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, p, r = super().gates(x)
        t = x.shape[:-2]
        return a.expand(*t, N), p.expand(*t, N), r.expand(*t, N, N)


class StaticExpandedBefore(Own):
    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        t = x.shape[:-2]
        a, p, r = self.a.expand(*t, N), self.p.expand(*t, N), self.r.expand(*t, N, N)
        return a.softmax(-1), 2 * p.sigmoid(), r.softmax(-1)


class StaticFolded(Static):
    """Streams in the batch: [b n, s, C]."""

    def forward(self, x: Tensor) -> Any:
        b, s, n, width = x.shape
        x = x.sin().transpose(1, 2).reshape(b * n, s, width)
        a, p, r = self.gates(x)
        x = x.unflatten(0, (b, n))
        f = self.layer(torch.einsum("n,bnsc->bsc", a, x))
        return torch.einsum("io,bisc->bosc", r, x) + p[:, None, None] * f[:, None]


class StaticStreamsFirst(Static):
    """[n, b, s, C]."""

    def forward(self, x: Tensor) -> Any:
        x = x.sin().movedim(2, 0).contiguous()
        a, p, r = self.gates(x)
        f = self.layer(torch.einsum("n,nbsc->bsc", a, x))
        return torch.einsum("io,ibsc->obsc", r, x) + p[:, None, None, None] * f


class StaticChannelsFirst(Static):
    """[b, s, C, n]."""

    def forward(self, x: Tensor) -> Any:
        x = x.sin().transpose(-1, -2).contiguous()
        a, p, r = self.gates(x)
        return x @ r + self.layer(x @ a).unsqueeze(-1) * p


class Softmax(Own):
    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, p, r = self.logits(x)
        return a.softmax(-1), 1 + torch.tanh(p), (r / 0.3).softmax(-1)


class MatrixExp(Own):
    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, p, r = self.logits(x)
        return a.clamp(0.1, 0.9), p.exp(), torch.matrix_exp(r - r.mT)


class Tanh(Own):
    """arXiv 2409.19606: gates of each stream, one product for reading and mixing before the sublayer."""

    def body(self, x: Tensor) -> Any:
        h = torch.tanh(F.layer_norm(x, (WIDTH,)) @ self.of_stream)
        alpha = h[..., : N + 1] * self.scale[0] + self.both
        beta = h[..., -1] * self.scale[1] + self.p
        both = alpha.transpose(-1, -2) @ x
        f = self.layer(both[..., 0, :])
        return torch.einsum("bsn,bsc->bsnc", beta, f) + both[..., 1:, :]


class StaticTogether(Own):
    def body(self, x: Tensor) -> Any:
        both = torch.einsum("io,bsic->bsoc", self.both, x)
        return self.p[:, None] * self.layer(both[..., 0, :])[..., None, :] + both[..., 1:, :]


class Diagonal(Own):
    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, p, r = self.logits(x)
        return a.softmax(-1), torch.tanh(p), r.diagonal(dim1=-2, dim2=-1).sigmoid()

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return p.unsqueeze(-1) * f.unsqueeze(-2) + r.unsqueeze(-1) * x


class GatesAfterTheStreams(Diagonal):
    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return x * r.unsqueeze(-1) + f.unsqueeze(-2) * p.unsqueeze(-1)


class Scalar(Own):
    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, p, r = self.logits(x)
        return a.softmax(-1), torch.tanh(p), r[..., 0, :1].sigmoid()

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return p.unsqueeze(-1) * f.unsqueeze(-2) + r.unsqueeze(-1) * x


class StaticScalar(Own):
    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.a, self.p, self.scale[0]

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return p.unsqueeze(-1) * f.unsqueeze(-2) + r * x


class Identity(Own):
    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, p, r = self.logits(x)
        return a.softmax(-1), torch.tanh(p), r

    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return x + p.unsqueeze(-1) * f.unsqueeze(-2)


class StaticIdentity(Identity):
    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.a, self.p, self.r


class MinusIdentity(Softmax):
    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return x + (r - torch.eye(N)).transpose(-1, -2) @ x + p.unsqueeze(-1) * f.unsqueeze(-2)


class Blended(Softmax):
    def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return 0.25 * x + 0.75 * (r.transpose(-1, -2) @ x) + p.unsqueeze(-1) * f.unsqueeze(-2)


class FromOutside(Own):
    """Gates that another graph made."""

    def forward(self, x: Tensor, a: Tensor, p: Tensor, r: Tensor) -> Any:  # type: ignore[override]
        x = x.sin()
        return self.write(x, self.layer(self.read(x, a)), p, r)


class OfTheOutput(Softmax):
    """The post gate depends on what the sublayer made."""

    def body(self, x: Tensor) -> Any:
        a, p, r = self.gates(x)
        f = self.layer(self.read(x, a))
        return self.write(x, f, p * f.mean(-1, keepdim=True), r)


BOTH = ["aggregate", "expand_combine"]
ALL = [*BOTH, "projection"]
FORMS: list[tuple[type[Own], list[str]]] = [
    (Static, BOTH),
    (StaticInEinsum, BOTH),
    (StaticExpanded, BOTH),
    (StaticExpandedBefore, BOTH),
    (StaticFolded, BOTH),
    (StaticStreamsFirst, BOTH),
    (StaticChannelsFirst, BOTH),
    (Softmax, ALL),
    (MatrixExp, ALL),
    (Tanh, ALL),
    (StaticTogether, BOTH),
    (Diagonal, ALL),
    (GatesAfterTheStreams, ALL),
    (Scalar, ALL),
    (StaticScalar, BOTH),
    (Identity, ALL),
    (StaticIdentity, BOTH),
    (MinusIdentity, ALL),
    (Blended, ALL),
    (OfTheOutput, ALL),
]


@pytest.mark.parametrize(("kind", "operators"), FORMS, ids=[kind.__name__ for kind, _ in FORMS])
def test_rewritten_with_its_own_gates(kind: type[Own], operators: list[str]) -> None:
    outcome = check.run(kind(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == operators, str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)
    assert all(site.own for site in outcome.report.rewritten), str(outcome.report)


def test_why_no_operator_makes_a_matrix_is_told() -> None:
    outcome = check.run(Static(), (torch.randn(SHAPE),))
    (write,) = (site for site in outcome.report.rewritten if site.op == "expand_combine")
    assert "; h_res" in write.own
    assert write.own.endswith("which normalises one axis only, which does not make it a Sinkhorn projection")


@pytest.mark.parametrize(("factor", "form"), [(1.0, "x"), (2.0, "a diagonal h_res x")])
def test_whether_the_streams_are_added_as_they_are_is_told(factor: float, form: str) -> None:
    class Added(Static):
        def write(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
            return x * factor + p.unsqueeze(-1) * f.unsqueeze(-2)

    outcome = check.run(Added(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    (write,) = (site for site in outcome.report.rewritten if site.op == "expand_combine")
    assert write.detail.endswith(f"h_post f + {form}"), str(outcome.report)


class LogitsShown(Own):
    def body(self, x: Tensor) -> Any:
        logits = F.linear(x.flatten(-2), self.phi)
        a, p, r = logits.split((N, N, N * N), -1)
        f = self.layer(self.read(x, a.softmax(-1)))
        return self.write(x, f, torch.tanh(p), r.unflatten(-1, (N, N)).softmax(-1)), logits


def test_logits_in_bfloat16_stay_in_bfloat16() -> None:
    outcome = check.run(LogitsShown().bfloat16(), (torch.randn(SHAPE).bfloat16(),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ALL, str(outcome.report)
    assert {value.dtype for value in outcome.rewritten.values()} == {torch.bfloat16}


def test_gates_that_all_tokens_share_are_repeated_in_float32() -> None:
    """Their gradient is a sum over the tokens, which bfloat16 would round. Gates of each token stay as they are."""
    x = torch.randn(SHAPE, dtype=torch.bfloat16)

    def casts(kind: type[Own]) -> list[str]:
        graph, report = passes.run(graph_of(kind().bfloat16(), x).graph)
        assert graph is not None, str(report)
        repeated = [node.all_input_nodes[0] for node in graph.find_nodes(op="call_method", target="expand")]
        assert all(gate.meta["example_value"].dtype == torch.float32 for gate in repeated)
        assert bool(repeated) == (kind is Static)
        return [str(node.target) for node in graph.find_nodes(op="call_method", target="float")]

    assert casts(Static) == 3 * ["float"]
    assert casts(Softmax) == []


class InputInFloat64(Softmax):
    def layer(self, u: Tensor) -> Tensor:
        return torch.tanh(F.linear(u.double(), self.weight.double()).float())


def test_a_layer_input_that_is_taken_to_float64_is_read_in_float32() -> None:
    outcome = check.run(InputInFloat64(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ALL, str(outcome.report)


class Biased(Softmax):
    """The bias is added within the node of the product."""

    def logits(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, p, r = F.linear(x.flatten(-2), self.phi, self.phi[:, 0]).split((N, N, N * N), -1)
        return a, p, r.unflatten(-1, (N, N))


class LowRankInOneNode(Softmax):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = random_parameter(5, N * WIDTH), random_parameter(N * N + 2 * N, 5)

    def logits(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, p, r = torch.einsum("btc,rc,kr->btk", x.flatten(-2), self.down, self.up).split((N, N, N * N), -1)
        return a, p, r.unflatten(-1, (N, N))


@pytest.mark.parametrize("kind", [Biased, LowRankInOneNode])
def test_a_product_that_no_node_shows_is_left(kind: type[Own]) -> None:
    outcome = check.run(kind(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == BOTH, str(outcome.report)
    (told,) = outcome.report.declined
    assert (told.op, told.reason) == ("projection", "its result is not a value of its own in the program")


class LowRank(Softmax):
    """phi and an added low-rank matrix, as in LoRA: both read the streams."""

    def __init__(self) -> None:
        super().__init__()
        self.down = random_parameter(2, N * WIDTH, std=0.2)
        self.up = random_parameter(N * N + 2 * N, 2, std=0.2)

    def logits(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = x.flatten(-2)
        both = F.linear(flat, self.phi) + 0.5 * F.linear(F.linear(flat, self.down), self.up)
        a, p, r = both.split((N, N, N * N), -1)
        return a, p, r.unflatten(-1, (N, N))


def test_low_rank_matrices_beside_phi_read_the_streams_in_one_operator() -> None:
    outcome = check.run(LowRank(), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ALL, str(outcome.report)
    (projection,) = [site for site in outcome.report.rewritten if site.op == "projection"]
    assert f"{N * N + 2 * N + 2} logits" in projection.detail
    (read,) = [site for site in outcome.report.rewritten if site.op == "aggregate"]
    assert "another tensor, [2, 3, 24], in add" in read.own


class Proposals(Tanh):
    """The mean of several proposals of one gate, whose logits one einsum makes and permutes."""

    proposals = 3

    def __init__(self) -> None:
        super().__init__()
        self.of_proposal = random_parameter(self.proposals, WIDTH, N + 1, std=WIDTH**-0.5)

    def body(self, x: Tensor) -> Any:
        normed = F.rms_norm(x, (WIDTH,))
        logits = torch.einsum("...d,pde->p...e", normed, self.of_proposal)
        alpha = (torch.tanh(logits) * self.scale[0] + self.both).mean(0)
        both = torch.einsum("...st,...sd->...td", alpha, x)
        f = self.layer(both[..., 0, :])
        return both[..., 1:, :] + self.post(normed).unsqueeze(-1) * f.unsqueeze(-2)

    def post(self, normed: Tensor) -> Tensor:
        return self.p


class ProposalsAndAProduct(Proposals):
    def post(self, normed: Tensor) -> Tensor:
        return torch.tanh(normed @ self.of_stream[:, -1]) + self.p


@pytest.mark.parametrize(("kind", "logits"), [(Proposals, 15), (ProposalsAndAProduct, 16)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_projection_that_an_einsum_permutes(kind: type[Proposals], logits: int, dynamic: bool) -> None:
    outcome = check.run(kind(), (torch.randn(SHAPE),), dynamic=dynamic)
    check.assert_as_accurate(outcome)
    assert outcome.operators == ALL, str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)
    (projection,) = [site for site in outcome.report.rewritten if site.op == "projection"]
    assert f"{logits} logits" in projection.detail


class SinkhornOfParameters(Static):
    """A matrix for all tokens, which is expanded before it is projected."""

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, p, _ = super().gates(x)
        logits = self.logits_of_all(x)
        m = logits.softmax(-1)
        for _ in range(3):
            m = m / m.sum(-2, keepdim=True)
            m = m / m.sum(-1, keepdim=True)
        return a, p, m

    def logits_of_all(self, x: Tensor) -> Tensor:
        return self.r.expand(*x.shape[:-2], N, N)


class SinkhornOfTransposed(SinkhornOfParameters):
    def logits_of_all(self, x: Tensor) -> Tensor:
        return self.r.mT.expand(*x.shape[:-2], N, N)


class SinkhornOfEachBatch(SinkhornOfParameters):
    """One matrix for each row of the batch."""

    def logits_of_all(self, x: Tensor) -> Tensor:
        return (self.r + x.mean((1, 2, 3))[:, None, None]).unsqueeze(1).expand(*x.shape[:-2], N, N)


class SinkhornOfEachPlace(SinkhornOfParameters):
    """One matrix for each token of a sequence, the same in all rows of the batch."""

    def logits_of_all(self, x: Tensor) -> Tensor:
        return (self.r + x.mean((0, 2, 3))[:, None, None]).expand(*x.shape[:-2], N, N)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (SinkhornOfParameters, "[4, 4]"),
        (SinkhornOfTransposed, "[4, 4]"),
        (SinkhornOfEachBatch, "[2, 3, 4, 4]"),
        (SinkhornOfEachPlace, "[2, 3, 4, 4]"),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_matrix_for_all_tokens_is_projected_once(kind: type[Own], sizes: str, dynamic: bool) -> None:
    outcome = check.run(kind(), (torch.randn(SHAPE),), dynamic=dynamic)
    check.assert_as_accurate(outcome)
    assert outcome.operators == [*BOTH, "sinkhorn"], str(outcome.report)
    assert not outcome.report.declined, str(outcome.report)
    assert f"sinkhorn(logits=f32{sizes}" in str(capture(kind(), torch.randn(SHAPE)))


def test_nodes_without_examples() -> None:
    """Inductor's own passes come first, and do not say what their nodes compute."""
    reports = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in gm.graph.find_nodes(op="call_method", target="softmax"):
            del node.meta["example_value"]
        reports.append(passes.run_recursively(gm))
        return gm.forward

    torch.compile(Softmax(), backend=backend)(torch.randn(SHAPE))
    (report,) = reports
    assert not report.errors, report.errors
    assert sorted(site.op for site in report.rewritten) == ALL


def test_gates_of_no_known_line() -> None:
    """As of a graph that another tool made."""
    graph = graph_of(Softmax(), torch.randn(SHAPE)).graph
    for node in graph.nodes:
        node.meta.pop("stack_trace", None)
    _, report = passes.run(graph)
    assert {gate.partition(",")[0] for site in report.rewritten for gate in site.own.split("; ")} >= {"h_pre", "h_post"}


def test_gates_from_outside() -> None:
    gates = torch.rand(2, 3, N), torch.randn(2, 3, N), torch.randn(2, 3, N, N)
    outcome = check.run(FromOutside(), (torch.randn(SHAPE), *gates))
    check.assert_as_accurate(outcome)
    assert outcome.operators == BOTH, str(outcome.report)
