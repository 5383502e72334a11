"""Connections of gates that no operator makes, torn by a graph break: both halves are rewritten and reported as cut."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mhc_compile
from mhc_compile import passes
from mhc_compile.passes.cut import MADE_ELSEWHERE, USED_ELSEWHERE
from mhc_compile.passes.report import Report
from tests.zoo import check, near

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo looks at what a graph gets from the one before it.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

N, C = 4, 16
READ = "the gates of its write are used outside this graph: Dynamo breaks the graph at "
WRITE = "its gates are made outside this graph: Dynamo breaks the graph at "


class Torn(nn.Module):
    """A sigmoid for each gate, and streams that are not mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.RMSNorm(N * C), nn.Linear(C, C)
        self.project = nn.Linear(N * C, 2 * N)
        self.pre, self.post = nn.Linear(N * C, N), nn.Linear(N * C, N)

    def gates(self, x: Tensor) -> Any:
        return torch.sigmoid(self.project(self.norm(x.flatten(-2)))).chunk(2, -1)

    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        return (h_pre.unsqueeze(-1) * x).sum(-2)

    def write(self, x: Tensor, f: Tensor, h_post: Tensor) -> Tensor:
        return x + h_post.unsqueeze(-1) * f.unsqueeze(-2)

    def forward(self, x: Tensor) -> Tensor:
        h_pre, h_post = self.gates(x)
        u = self.read(x, h_pre)
        torch._dynamo.graph_break()
        return self.write(x, self.layer(u), h_post)


class TwoProjections(Torn):
    def gates(self, x: Tensor) -> Any:
        flat = self.norm(x.flatten(-2))
        return torch.sigmoid(self.pre(flat)), 2 * torch.sigmoid(self.post(flat))


class OtherGates(Torn):
    def gates(self, x: Tensor) -> Any:
        h_pre, h_post = self.project(torch.nn.functional.layer_norm(x.flatten(-2), (N * C,))).split((N, N), -1)
        return h_pre.softmax(-1), torch.tanh(h_post)


class ByMatrices(Torn):
    """The mean of rows that a matrix mixes, and a matrix times n equal outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(N * C, 2 * N * N)

    def gates(self, x: Tensor) -> Any:
        return self.project(self.norm(x.flatten(-2))).reshape(*x.shape[:-2], 2, N, N).softmax(-1).unbind(-3)

    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        return (h_pre @ x).mean(-2)

    def write(self, x: Tensor, f: Tensor, h_post: Tensor) -> Tensor:
        return x + h_post @ f.unsqueeze(-2).expand(*x.shape)


class ByMatricesMixed(ByMatrices):
    """The write mixes the streams as well."""

    def write(self, x: Tensor, f: Tensor, h_post: Tensor) -> Tensor:
        return h_post.mT.contiguous() @ x + h_post @ f.unsqueeze(-2).expand(*x.shape)


class OtherSpelling(Torn):
    def gates(self, x: Tensor) -> Any:
        h_pre, h_post = super().gates(x)
        return h_pre, h_post.unsqueeze(-1)

    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        return torch.einsum("bsn,bsnc->bsc", h_pre, x)

    def write(self, x: Tensor, f: Tensor, h_post: Tensor) -> Tensor:
        return torch.addcmul(x, h_post, f.unsqueeze(-2))


class Streams(nn.Module):
    """A frame of its own for each connection, after another one."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.parts
        out: Tensor = second(first(x))
        return out


def _check(report: Report, read: str, modules: int = 1, broken: type[nn.Module] = Torn) -> None:
    lines, first = inspect.getsourcelines(broken)
    line = first + next(i for i, text in enumerate(lines) if "graph_break()" in text)
    told = [
        (site.op, site.detail, (site.reason or "").partition(f"tests/passes/test_torn.py:{line}: ")[0])
        for site in report.cut
    ]
    assert told == [(read, "cut", READ)] * modules + [("expand_combine", "cut", WRITE)] * modules
    assert {read, "expand_combine"} <= {site.op for site in report.rewritten}
    assert report.declined == []


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("kind", "read"),
    [
        (Torn, "generate_mix_and_aggregate"),
        (TwoProjections, "head"),
        (OtherGates, "aggregate"),
        (OtherSpelling, "generate_mix_and_aggregate"),
        (ByMatrices, "aggregate"),
        (ByMatricesMixed, "aggregate"),
    ],
)
def test_both_halves_are_told(kind: type[Torn], read: str, dynamic: bool) -> None:
    x = torch.randn(2, 3, N, C)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 1)
    _check(mhc_compile.explain(Streams(kind(), kind()), x), read, modules=2)


class Packed(nn.Module):
    """A mask chooses tokens in the graph that reads: their number depends on data there, and not in later graphs."""

    def __init__(self, part: Torn) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x[mask]
        h_pre, h_post = self.part.gates(x)
        u = self.part.read(x, h_pre)
        torch._dynamo.graph_break()
        return self.part.write(x, self.part.layer(u), h_post)


class OtherSpellingPacked(OtherSpelling):
    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        return torch.einsum("tn,tnc->tc", h_pre, x)


def _packed() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 6, N, C), torch.tensor([[1, 1, 0, 1, 1, 1], [1, 0, 0, 1, 1, 1]]).bool()


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        (Torn, "generate_mix_and_aggregate"),
        (TwoProjections, "head"),
        (OtherGates, "aggregate"),
        (OtherSpellingPacked, "generate_mix_and_aggregate"),
    ],
)
def test_both_halves_are_told_where_tokens_are_chosen(kind: type[Torn], read: str) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        _check(mhc_compile.explain(Packed(kind()), *_packed()), read, broken=Packed)


def test_both_halves_of_known_gates_are_told_where_tokens_are_chosen() -> None:
    """Views that the operator's results have taken the place of are no readers of its gates."""

    class Broken(near.Sublayer):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x = x[mask].unsqueeze(0)
            h_pre, h_post, h_res = self.gates(x)
            u = self.read(x, h_pre)
            torch._dynamo.graph_break()
            return self.write(x, torch.tanh(u), h_post, h_res)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = mhc_compile.explain(Broken(N, C, 1, 1), *_packed())
    assert [site.op for site in report.cut] == ["generate_mix_and_aggregate", "expand_combine"]
    assert [(site.reason or "").partition(":")[0] for site in report.cut] == [USED_ELSEWHERE, MADE_ELSEWHERE]


@pytest.mark.parametrize(("gates", "streams", "sites"), [(9, N, 1), (9, N + 1, 0), (1, N, 0)])
def test_a_count_that_depended_on_data_is_one_number(gates: int, streams: int, sites: int) -> None:
    """Streams come in with gates for as many tokens, and of their number. One gate for all tokens is another one."""
    x, gate, f = torch.randn(9, streams, C), torch.randn(gates, streams), torch.randn(9, C)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        mhc_compile.explain(Packed(Torn()), *_packed())
    report = mhc_compile.explain(lambda x, f, gate: x + gate.unsqueeze(-1) * f.unsqueeze(-2), x, f, gate)
    assert len(report.sites) == sites


def test_halves_compute_what_they_did() -> None:
    model, x = Streams(Torn(), TwoProjections()), torch.randn(2, 3, N, C)

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(passes.run_recursively(gm))
        return gm.forward

    found: list[Report] = []
    # Two float32 evaluations of a few hundred sums.
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x), rtol=1e-5, atol=1e-5)
    assert sum(len(report.rewritten) for report in found) >= 4


class Mixed(Torn):
    """The matrix is a gate, too, so that no gate of a read has to be remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.res = nn.Linear(N * C, N * N)

    def forward(self, x: Tensor) -> Tensor:
        h_pre, h_post = self.gates(x)
        h_res = self.res(x.flatten(-2)).unflatten(-1, (N, N)).softmax(-1)
        u = self.read(x, h_pre)
        torch._dynamo.graph_break()
        return h_post.unsqueeze(-1) * self.layer(u).unsqueeze(-2) + h_res.mT @ x


def _all_dynamic(model: Any, *args: Tensor) -> list[Report]:
    """The reports of a model's graphs whose inputs have symbolic sizes, those of streams and channels too."""

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(passes.run_recursively(gm))
        return gm.forward

    found: list[Report] = []
    torch.compile(model, backend=backend, dynamic=True)(*args)
    return found


NOT_CONSTANT = "the number of streams or of channels is not a constant of the program"


@pytest.mark.parametrize("kind", [Torn, OtherGates, OtherSpelling, Mixed])
def test_a_torn_write_of_any_number_of_streams_is_told(kind: type[Torn]) -> None:
    """No parameter says how many streams there are in its graph."""
    read, write = _all_dynamic(kind(), torch.randn(2, 3, N, C))
    assert read.rewritten
    assert [(site.op, site.reason) for site in write.declined] == [("expand_combine", NOT_CONSTANT)], str(write)


def _from_outside(x: Tensor, a: Tensor, p: Tensor, r: Tensor) -> Tensor:
    x = x.sin()
    for axis in (-1, -2, -1):
        r = r / r.sum(axis, keepdim=True)
    f = (a.unsqueeze(-1) * x).sum(-2).tanh()
    return p.unsqueeze(-1) * f.unsqueeze(-2) + r.mT @ x


@pytest.mark.parametrize(
    ("n", "told"), [(N, ["aggregate", "expand_combine"]), (31, ["aggregate", "expand_combine"]), (32, [])]
)
def test_gates_from_outside_for_any_number_of_streams(n: int, told: list[str]) -> None:
    """The matrices are not evaluated: in the record their sides are large primes."""
    given = torch.randn(2, 3, n, C), torch.rand(2, 3, n), torch.randn(2, 3, n), torch.rand(2, 3, n, n)
    (report,) = _all_dynamic(_from_outside, *given)
    assert report.errors == []
    assert [(site.op, site.reason) for site in report.sites] == [(op, NOT_CONSTANT) for op in told], str(report)


@pytest.mark.parametrize(("n", "told"), [(31, ["expand_combine"]), (32, [])])
def test_a_write_from_outside_of_any_number_of_streams(n: int, told: list[str]) -> None:
    """The operators take at most 31 streams. A sum over 32 of something is attention."""

    class Write(nn.Module):
        def forward(self, x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
            return p.unsqueeze(-1) * f.unsqueeze(-2) + r.mT @ x

    outcome = check.run(
        Write(), (torch.randn(2, 3, n, C), torch.randn(2, 3, C), torch.randn(2, 3, n), torch.rand(2, 3, n, n))
    )
    check.assert_as_accurate(outcome)
    assert [site.op for site in outcome.report.sites] == told, str(outcome.report)


@pytest.mark.parametrize("f", [(2, 3, C), (2, 3, N, C)])
def test_sums_of_products_of_any_sizes_are_no_writes(f: tuple[int, ...]) -> None:
    """Attention over a few positions, with a residual or a gate for all of them."""

    def attention(x: Tensor, f: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return p.unsqueeze(-1) * (f if f.dim() == x.dim() else f.unsqueeze(-2) * x) + r.softmax(-1) @ x

    given = torch.randn(2, 3, N, C), torch.randn(f), torch.randn(2, 3, N), torch.rand(2, 3, N, N)
    (report,) = _all_dynamic(attention, *given)
    assert (report.sites, report.errors) == ([], []), str(report)


def test_a_torn_connection_is_not_strict() -> None:
    compiled = torch.compile(Torn(), backend="mhc", options={"mhc.strict": True})
    with pytest.raises(mhc_compile.StrictError, match=READ):
        compiled(torch.randn(2, 3, N, C))


def test_a_region_that_returns_gates_is_not_cut() -> None:
    """The calling graph reads them, whatever else Dynamo breaks."""

    class Region(Torn):
        def half(self, x: Tensor) -> Any:
            h_pre, h_post = self.gates(x)
            return self.layer(self.read(x, h_pre)), h_post

        def forward(self, x: Tensor) -> Tensor:
            f, h_post = checkpoint(self.half, x, use_reentrant=False)
            out = self.write(x, f, h_post)
            torch._dynamo.graph_break()
            return out + 1.0

    assert mhc_compile.explain(Region(), torch.randn(2, 3, N, C)).cut == []


@pytest.mark.parametrize("kind", [Torn, TwoProjections, OtherGates])
def test_a_gate_that_is_kept_beside_its_write_is_not_cut(kind: type[Torn]) -> None:
    """Such as for statistics, which Dynamo breaks the graph for."""

    class Kept(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Any:
            h_pre, h_post = self.gates(x)
            out = self.write(x, self.layer(self.read(x, h_pre)), h_post)
            kept = h_post.detach()
            torch._dynamo.graph_break()
            return out, kept.mean()

    report = mhc_compile.explain(Kept(), torch.randn(2, 3, N, C))
    assert "expand_combine" in {site.op for site in report.rewritten}
    assert report.cut == []


def test_a_half_that_the_program_compiles_by_itself_is_not_cut() -> None:
    model = Torn()

    def half(x: Tensor) -> Any:
        h_pre, h_post = model.gates(x)
        return model.read(x, h_pre), h_post

    report = mhc_compile.explain(half, torch.randn(2, 3, N, C))
    assert report.cut == []


class Pooling(nn.Module):
    """Attention over a few vectors, which returns some of what it made: there are no streams."""

    def __init__(self, returned: str) -> None:
        super().__init__()
        self.returned = returned
        self.query, self.heads, self.layer = nn.Linear(N * C, N), nn.Linear(N * C, 2 * N), nn.Linear(C, C)
        self.pairs = nn.Linear(N * C, N * N)

    def forward(self, x: Tensor) -> Any:
        logits = self.query(x.flatten(-2))
        weights = logits.softmax(-1)
        if self.returned == "another head":
            weights, other = self.heads(x.flatten(-2)).softmax(-1).chunk(2, -1)
            kept = torch.einsum("bsn,bsnc->bsc", other, x)
        else:
            kept = {
                "its weights": weights,
                "its logits": logits,
                "its entropies": -(weights * logits),
                "its weights once more": logits.log_softmax(-1),
                "weights of pairs": self.pairs(x.flatten(-2)).sigmoid().unflatten(-1, (N, N)),
            }[self.returned]
        pooled = (weights.unsqueeze(-1) * x).sum(-2)
        torch._dynamo.graph_break()
        return self.layer(pooled), kept


@pytest.mark.parametrize(
    "returned",
    ["its weights", "its logits", "its entropies", "its weights once more", "weights of pairs", "another head"],
)
def test_models_without_streams_are_not_torn(returned: str) -> None:
    report = mhc_compile.explain(Pooling(returned), torch.randn(2, 3, N, C))
    assert (report.sites, report.cut, report.errors) == ([], [], []), str(report)


def test_a_residual_with_a_gate_from_outside_is_not_a_write() -> None:
    """Nothing before it said that its tensors are streams."""
    x = torch.randn(2, 3, N, C)
    report = mhc_compile.explain(lambda x, f, gate: x + gate.unsqueeze(-1) * f.unsqueeze(-2), x, x[:, :, 0], x[..., 0])
    assert (report.sites, report.cut) == ([], [])


def test_a_reset_forgets_the_gates_that_left_a_graph() -> None:
    """A sum of two inputs is no write because another model was torn before."""
    x, gate, f = torch.randn(2, 3, N, C), torch.randn(2, 3, N), torch.randn(2, 3, C)

    def addition(x: Tensor, gate: Tensor, f: Tensor) -> Tensor:
        return x + gate.unsqueeze(-1) * f.unsqueeze(-2)

    mhc_compile.explain(Torn(), x)
    assert len(mhc_compile.explain(addition, x, gate, f).sites) == 1
    torch._dynamo.reset()
    assert mhc_compile.explain(addition, x, gate, f).sites == []


@pytest.mark.parametrize(("made", "found"), [(torch.clone, ["expand_combine"]), (torch.sin, [])], ids=["given", "here"])
@pytest.mark.parametrize("kind", [ByMatrices, ByMatricesMixed])
def test_only_a_matrix_that_comes_in_is_one_that_left_a_graph(
    kind: type[ByMatrices], made: Callable[[Tensor], Tensor], found: list[str]
) -> None:
    model, x = kind(), torch.randn(2, 3, N, C)
    mhc_compile.explain(model, x)
    given = x, torch.randn(2, 3, C), torch.randn(2, 3, N, N)
    report = mhc_compile.explain(lambda x, f, matrix: model.write(x, f, made(matrix)), *given)
    assert [site.op for site in report.sites] == found, str(report)
