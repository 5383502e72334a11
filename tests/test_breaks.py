"""What Dynamo tears apart, throws away or does not compile any more is told, and does not count."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mhc_compile
from mhc_compile import records
from mhc_compile.passes.cut import advice
from mhc_compile.passes.report import Location, Report, SiteReport
from tests.zoo.near import Sublayer

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo looks at what a graph gets from the one before it.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

X = (2, 3, 4, 6)
BOTH = ["generate_mix_and_aggregate", "expand_combine"]


class Broken(Sublayer):
    """A sublayer in which Dynamo breaks the graph, between its read and its write."""

    def layer(self, layer_input: Tensor, x: Tensor) -> Tensor:
        f = super().layer(layer_input, x)
        torch._dynamo.graph_break()
        return f

    @classmethod
    def place(cls) -> str:
        lines, first = inspect.getsourcelines(cls)
        line = first + next(i for i, text in enumerate(lines) if "graph_break()" in text)
        return f"tests/test_breaks.py:{line}"


def _names(sites: list[SiteReport]) -> list[str]:
    return [site.op for site in sites]


def _check_cut(report: Report) -> None:
    assert _names(report.rewritten) == BOTH
    assert [(site.op, site.detail) for site in report.cut] == [(op, "cut") for op in BOTH]
    words = f"Dynamo breaks the graph at {Broken.place()}: Call to `torch._dynamo.graph_break()`"
    read, write = (site.reason or "" for site in report.cut)
    assert read.startswith(f"its gates are read in another graph: {words}")
    assert write.startswith(f"its gates are made in another graph: {words}")
    assert "2 of 2 hyper-connection sites rewritten, 1 with gates of their own, in 4 graphs" in str(report)
    assert "; 2 cut or not compiled\n" in str(report)
    assert "  cut: 1 x expand_combine at tests/zoo/near.py" in str(report)


def test_a_sublayer_that_a_break_cuts_is_explained() -> None:
    _check_cut(mhc_compile.explain(Broken(4, 6, 3, 2), torch.randn(X)))


@pytest.mark.usefixtures("passes_only")
def test_a_sublayer_that_a_break_cuts_is_reported() -> None:
    with torch.no_grad():
        torch.compile(Broken(4, 6, 3, 2), backend="mhc")(torch.randn(X))
    _check_cut(mhc_compile.report())


def test_a_sublayer_that_a_break_cuts_is_not_strict() -> None:
    compiled = torch.compile(Broken(4, 6, 3, 2), backend="mhc", options={"mhc.strict": True})
    with pytest.raises(mhc_compile.StrictError, match=f"its gates are read in another graph: .*{Broken.place()}"):
        compiled(torch.randn(X))


class InALoop(Sublayer):
    """Dynamo does not resume within a loop: it compiles the functions that are called there, one by one."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x * self.per_channel
            pre, post, res = self.gates(x)
            f = self.layer(self.read(x, pre), x)
            torch._dynamo.graph_break()
            x = self.write(x, f, post, res)
        return x


def test_functions_of_a_function_that_is_not_compiled_are_cut() -> None:
    report = mhc_compile.explain(InALoop(4, 6, 3, 2), torch.randn(X))
    assert _names(report.rewritten) == ["generate_mix", "aggregate", "expand_combine"]
    assert _names(report.cut) == _names(report.rewritten)
    assert all("in another graph" in (site.reason or "") for site in report.cut)


def test_a_region_that_gets_its_gates_is_not_cut() -> None:
    """A checkpoint region is a graph of its own, that another calls, whatever Dynamo breaks beside it."""

    class Region(Sublayer):
        def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
            out: Tensor = checkpoint(super().write, x, f, h_post, h_res, use_reentrant=False)
            return out

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            torch._dynamo.graph_break()
            return out + 1.0

    report = mhc_compile.explain(Region(4, 6, 3, 2), torch.randn(X))
    assert (sorted(_names(report.rewritten)), report.cut) == (sorted(BOTH), [])


def test_parts_that_the_program_compiles_one_by_one_are_not_cut() -> None:
    model = Sublayer(4, 6, 3, 2)
    x = torch.randn(X)
    _, post, res = model.gates(x)
    report = mhc_compile.explain(model.write, x, x.sum(2), post, res)
    assert (_names(report.rewritten), report.cut) == (["expand_combine"], [])
    report = mhc_compile.explain(model.gates, x)
    assert (_names(report.rewritten), report.cut) == (["generate_mix"], [])


@torch.library.custom_op("mhc_test::reads_in_backward", mutates_args=())
def _reads_in_backward(f: Tensor) -> Tensor:
    return f.clone()


_reads_in_backward.register_fake(torch.empty_like)
_reads_in_backward.register_autograd(lambda ctx, d_f: d_f * d_f.sum().item())


class NoBackward(Sublayer):
    def layer(self, layer_input: Tensor, x: Tensor) -> Tensor:
        out: Tensor = _reads_in_backward(super().layer(layer_input, x))
        return out


def test_a_graph_that_is_thrown_away_does_not_count(capfd: pytest.CaptureFixture[str]) -> None:
    """Autograd cannot trace it. Dynamo tries again, and in the end compiles what is called, one by one."""
    report = mhc_compile.explain(NoBackward(4, 6, 3, 2), torch.randn(X))
    assert _names(report.rewritten) == ["generate_mix", "aggregate", "expand_combine"]
    lost = [site for site in report.cut if site.detail == "not compiled"]
    assert _names(lost) == ["generate_mix_and_aggregate"]
    assert "Dynamo gives the graph up at" in (lost[0].reason or "")
    assert "Backend compiler `mhc` failed with aten._local_scalar_dense.default" in (lost[0].reason or "")
    assert "Traceback" not in "".join(capfd.readouterr())


def test_what_was_compiled_before_a_reset_is_forgotten() -> None:
    """Dynamo numbers its frames anew, whichever backends it had."""
    torch.compile(lambda x: x.sin(), backend="eager")(torch.randn(3))
    torch._dynamo.reset()
    report = mhc_compile.explain(NoBackward(4, 6, 3, 2), torch.randn(X))
    assert _names(report.rewritten) == ["generate_mix", "aggregate", "expand_combine"]


def test_advice_for_graphs_that_are_given_up() -> None:
    def grouped_mm_fallback(x: Tensor) -> Tensor:
        return x

    graph = torch.fx.Graph()
    graph.output((graph.call_function(grouped_mm_fallback, (graph.placeholder("x"),)),))
    (words,) = advice(graph)
    assert 'model.set_experts_implementation("batched_mm") keeps the graph whole' in words
    lost = records.Compiled(Report(advice=[words]), failure="RuntimeError: planted")
    assert records._Compilation(0, [lost]).failure(None, None) == f"its graph failed: RuntimeError: planted. {words}"


class Annealed(Sublayer):
    """The number of iterations changes while the model is trained."""

    iterations = 1

    def res(self, logits: Tensor) -> Tensor:
        m = self.columns(self.start(logits))
        for _ in range(self.iterations):
            m = self.columns(self.rows(m))
        return m


@pytest.mark.usefixtures("passes_only")
def test_a_function_that_is_not_compiled_any_more() -> None:
    model = Annealed(4, 6, 3, 2)
    compiled = torch.compile(model, backend="mhc")
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        for iterations in (1, 2):
            model.iterations = iterations
            compiled(torch.randn(X))
        assert mhc_compile.report().cut == []
        model.iterations = 3
        compiled(torch.randn(X))
    (site,) = mhc_compile.report().cut
    assert (site.op, site.detail, site.location.code) == ("function", "not compiled any more", "forward")
    assert site.location.name == "tests/zoo/near.py"
    words = "Dynamo compiled it 2 times (torch._dynamo.config.recompile_limit), and runs it eagerly for anything new"
    assert site.reason == f"{words}; what changed last: self.iterations == 2"


def test_strict_options_do_not_put_up_with_eager_code() -> None:
    model, strict = NoBackward(4, 6, 3, 2), {"mhc.strict": True}
    words = "a graph with 2 hyper-connection sites is not compiled: .*_local_scalar_dense"
    with pytest.raises(mhc_compile.StrictError, match=words):
        torch.compile(model, backend="mhc", options=strict)(torch.randn(X))


@pytest.mark.usefixtures("passes_only")
def test_strict_options_do_not_put_up_with_the_recompile_limit() -> None:
    model = Annealed(4, 6, 3, 2)
    compiled = torch.compile(model, backend="mhc", options={"mhc.strict": True})
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        model.iterations = 1
        compiled(torch.randn(X))
        model.iterations = 2
        with pytest.raises(mhc_compile.StrictError, match=r"what changed last: self\.iterations == 1"):
            compiled(torch.randn(X))


def test_explaining_again_and_again() -> None:
    """Each time Dynamo compiles the model anew, however often that is."""
    model = Sublayer(4, 6, 3, 2)
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(4):
            assert _names(mhc_compile.explain(model, torch.randn(X)).rewritten) == BOTH


def test_a_report_for_people_has_one_screen() -> None:
    def site(op: str, line: int, words: str = "n = 4", reason: str | None = None) -> SiteReport:
        return SiteReport(op, Location("model.py", line, "x = " + 200 * "y"), words, reason)

    report = Report(graphs=3)
    report.sites += [site("expand_combine", line // 10) for line in range(40)]
    report.sites += [site("aggregate", line, f"n = {line}") for line in range(20)]
    report.sites += [site("gate", line, "", f"reason {line}") for line in range(20)]
    report.cut += [site("aggregate", line, "cut", f"reason {line}") for line in range(20)]
    report.called += [site(f"operator{line}", line) for line in range(20)]
    report.errors += [f"error {line}" for line in range(20)]
    lines = str(report).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 160
    assert lines[1].startswith("  40 x expand_combine               model.py:0 and 3 other lines  x = yy")
    assert "  16 more kinds of sites that were declined: print(report.details())" in lines
    everything = report.details()
    for line in range(20):
        assert f"n = {line}" in everything
        assert f"reason {line}" in everything
        assert f"error {line}" in everything
    assert everything.count("x expand_combine") == 4
