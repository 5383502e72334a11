"""Reports of everything that was compiled, in this process and, through Inductor's cache, for later ones."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mhc_compile
from mhc_compile import compat, hooks, progress, records
from mhc_compile.passes.report import Location, Report, SiteReport
from mhc_compile.testing import capture
from tests.zoo.near import Sublayer

ROOT = Path(__file__).parents[1]
SHAPE = (2, 3, 4, 6)
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _operators() -> list[str]:
    return sorted(site.op for site in mhc_compile.report().rewritten)


BOTH = ["expand_combine", "generate_mix_and_aggregate"]


@pytest.mark.usefixtures("passes_only")
def test_graphs_add_up_until_dynamo_is_reset() -> None:
    first, second = Sublayer(4, 6, 3, 2), Sublayer(4, 6, 3, 2)
    second.__class__ = type("Other", (Sublayer,), {"forward": lambda self, x: self.body(x + 1.0)})
    torch.compile(first, backend="mhc")(torch.randn(SHAPE))
    assert _operators() == BOTH
    torch.compile(second, backend="mhc")(torch.randn(SHAPE))
    assert _operators() == sorted(BOTH * 2)
    assert mhc_compile.report().graphs == 2
    torch._dynamo.reset()
    assert mhc_compile.report().graphs == 0


@pytest.mark.usefixtures("passes_only")
def test_a_report_is_made_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread's frame comes while the report goes over the frames."""
    torch.compile(Sublayer(4, 6, 3, 2), backend="mhc")(torch.randn(SHAPE))
    report = records._Compilation.report

    def entered_meanwhile(*args: Any) -> Report:
        records._process._frames[object()] = {}
        return report(*args)

    monkeypatch.setattr(records._Compilation, "report", entered_meanwhile)
    assert _operators() == BOTH


def test_reports_are_put_aside_while_another_thread_compiles() -> None:
    """The other thread begins a graph before, and ends it meanwhile."""
    aside = records.aside()
    with records.graph() as graph:
        aside.__enter__()
        assert records.current() is graph
    aside.__exit__(None, None, None)
    assert records.current() is not graph
    assert records._process._without_frame == [graph]
    records.forget()


def test_breaks_may_come_while_failures_are_told() -> None:
    class Meanwhile:
        def __eq__(self, other: object) -> bool:
            compat.watched.breaks[replace(first, line=2)] = None
            return False

        __hash__ = object.__hash__

    first = compat.GraphBreak(Meanwhile(), 0, ("f", "a.py"), "a.py", 1, "", False)
    compat.watched.breaks[first] = None
    compilation = records._Compilation(0, [records.Compiled(failure="out of memory")])
    assert compilation.failure(0, 0) == "its graph failed: out of memory"
    compat.watched.reset()


class Around(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(Sublayer(4, 6, 3, 2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def _in_place(model: torch.nn.Module) -> Any:
    model.compile(backend="mhc")
    return model


@pytest.mark.usefixtures("passes_only")
@pytest.mark.parametrize(
    ("compiled", "module"),
    [
        (lambda model: _in_place(model), "layers.0"),
        (lambda model: torch.compile(model, backend="mhc"), "layers.0"),
        (lambda model: torch.compile(model.forward, backend="mhc"), "layers.0"),
        (lambda model: torch.compile(model.layers, backend="mhc"), "0"),
        # Before 2.14, Dynamo compiles none of torch's modules in place, but their children.
        (lambda model: _in_place(model.layers), "0" if torch.__version__ >= "2.14" else ""),
    ],
)
def test_modules_of_sites(compiled: Callable[[Any], Any], module: str) -> None:
    with torch.no_grad():
        compiled(Around())(torch.randn(SHAPE))
    assert [(site.op, site.module) for site in mhc_compile.report().sites] == [(op, module) for op in BOTH[::-1]]


@pytest.mark.usefixtures("passes_only")
def test_a_function_that_is_compiled_again_counts_once() -> None:
    compiled = torch.compile(Sublayer(4, 6, 3, 2), backend="mhc", dynamic=False)
    for length in (3, 5):
        compiled(torch.randn(2, length, 4, 6))
    assert _operators() == BOTH
    assert "2 of 2 hyper-connection sites rewritten in 1 graph, compiled 2 times in all (" in str(mhc_compile.report())


@pytest.mark.usefixtures("passes_only")
def test_nested_graphs_belong_to_the_graph_around_them() -> None:
    inside, outside = Sublayer(4, 6, 3, 2), Sublayer(4, 6, 3, 2)
    torch.compile(lambda x: outside(checkpoint(inside, x, use_reentrant=False)), backend="mhc")(torch.randn(SHAPE))
    assert _operators() == sorted(BOTH * 2)
    assert len(records.last().rewritten) == 4


@pytest.mark.usefixtures("passes_only")
def test_graphs_on_both_sides_of_a_break_are_all_reported() -> None:
    first, second = Sublayer(4, 6, 3, 2), Sublayer(4, 6, 3, 2)

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = first(x)
        torch._dynamo.graph_break()
        return second(x)

    with torch.no_grad():
        torch.compile(broken, backend="mhc")(torch.randn(SHAPE))
    assert _operators() == sorted(BOTH * 2)


@pytest.fixture
def _alone_in_a_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("passes_only", "_alone_in_a_group")
def test_graphs_that_one_frame_is_cut_into_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """`DistributedDataParallel` has Dynamo cut a frame where a bucket of gradients is full, but not a sublayer."""
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1000)
    distributed = torch.nn.parallel.DistributedDataParallel(Sublayer(4, 6, 3, 2), bucket_cap_mb=0.002)
    torch.compile(distributed, backend="mhc")(torch.randn(SHAPE))
    assert mhc_compile.report().graphs > 1
    assert _operators() == BOTH
    assert mhc_compile.report().cut == []
    explained = mhc_compile.explain(distributed, torch.randn(SHAPE))
    assert explained.sites == mhc_compile.report().sites
    assert (explained.cut, explained.called, explained.graphs) == ([], [], mhc_compile.report().graphs)
    lines = str(capture(distributed, torch.randn(SHAPE))).splitlines()
    while lines[0].startswith("cut: Dynamo breaks the graph in "):  # before the model, in the module around it
        lines.pop(0)
    assert lines == str(capture(distributed.module, torch.randn(SHAPE))).splitlines()
    (write,) = [str(site.location) for site in mhc_compile.report().sites if site.op == "expand_combine"]
    torch._dynamo.reset()
    torch.compile(distributed, backend="mhc", options={"mhc.skip": [write]})(torch.randn(SHAPE))
    assert _operators() == ["generate_mix_and_aggregate"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("_alone_in_a_group")
def test_graphs_that_a_plain_compile_cuts_are_rewritten_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    parts: list[torch.fx.GraphModule] = []

    def compile_nothing(gm: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        parts.append(gm)
        return gm.forward

    monkeypatch.setattr(compile_fx, "compile_fx", compile_nothing)
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1000)
    model, x = Sublayer(4, 6, 3, 2), torch.randn(SHAPE)
    distributed = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)
    with mhc_compile.enable():
        out = torch.compile(distributed)(x)
    assert len(parts) > 1
    assert _operators() == BOTH
    # Two float32 evaluations of a few hundred sums.
    torch.testing.assert_close(out, model(x), rtol=1e-5, atol=1e-5)


def test_no_graph_is_not_nothing_found() -> None:
    assert "no graph was looked at" in str(Report())
    assert "no hyper-connection code was found" in str(Report(graphs=1))


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_explain_shows_that_it_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before two seconds, and on a terminal only; in the end the line is gone."""
    shown: list[str] = []
    for terminal, silent in ((_Terminal(), 0.0), (_Terminal(), 60.0), (io.StringIO(), 0.0)):
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr(progress, "_SILENT", silent)
        monkeypatch.setattr(progress, "_PAUSE", 0.01)
        torch._dynamo.reset()
        mhc_compile.explain(Sublayer(4, 6, 3, 2), torch.randn(SHAPE))
        shown.append(terminal.getvalue())
    assert re.match(r"\rexplain: 0 graphs traced, with 0 sites(; Dynamo is at \w+)?, \d+ s\x1b\[K", shown[0])
    assert "; Dynamo is at forward, " in shown[0]
    assert not compat.watched.at_work
    assert shown[0].endswith("\r\x1b[K")
    assert shown[1:] == ["", ""]


PROGRAM = textwrap.dedent(
    """
    import warnings
    warnings.simplefilter("ignore")
    import torch
    from tests.zoo.near import Sublayer

    with torch.no_grad():
        torch.compile(Sublayer(4, 6, 3, 2), backend="mhc")(torch.randn(2, 3, 4, 6))
    """
)


@pytest.mark.slow
def test_logs_and_traces(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=environment(tmp_path / "cache") | {"TORCH_LOGS": "mhc_compile", "TORCH_TRACE": str(tmp_path / "trace")},
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    trace = "".join(file.read_text() for file in (tmp_path / "trace").iterdir())
    sentence = "2 of 2 hyper-connection sites rewritten"
    assert sentence in done.stderr
    assert sentence in trace
    for stage in (
        r"graph 0/0, [\d.]+ s: Dynamo has traced it",
        r"a graph of \d+ nodes: record [\d.]+ s, recognise [\d.]+ s, plan [\d.]+ s, rewrite [\d.]+ s",
        r"graph 0/0, [\d.]+ s: autograd has traced it",
        r"graph 0/0, [\d.]+ s: Inductor has a graph of its own",
        r"lowered: 1 x generate_mix_and_aggregate",
        r"graph 0/0, [\d.]+ s: Inductor generates its code",
        r"graph 0/0, [\d.]+ s: Inductor has compiled one of its graphs",
        r"graph 0/0, [\d.]+ s: done",
    ):
        assert re.search(stage, done.stderr), stage
    assert '"name": "mhc_report"' in trace
    assert '"name": "mhc_rewritten_graph"' in trace
    assert "torch.ops.mhc.expand_combine" in trace


# What the first process compiles. The others find it in the cache, in artifacts, or in a file.
WARM = textwrap.dedent(
    """
    import json, shutil, sys, warnings
    from pathlib import Path
    warnings.simplefilter("ignore")
    import torch
    from tests.zoo.near import Sublayer

    what, shared = sys.argv[1], Path(sys.argv[2])
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(Sublayer(4, 6, 3, 2), Sublayer(4, 6, 3, 2)), torch.randn(2, 3, 4, 6)

    def tell(**found):
        import mhc_compile
        report = mhc_compile.report()
        print(json.dumps({"report": str(report), "cached": report.cached, "graphs": report.graphs} | found))

    def step():
        from torch._dynamo.utils import counters
        torch._dynamo.reset()
        counters.clear()
        torch.compile(model, backend="mhc")(x).sum().backward()
        tell(autograd=counters["aot_autograd"]["autograd_cache_hit"], graph=counters["inductor"]["fxgraph_cache_hit"])

    if what == "first":
        step()
        model.zero_grad()  # what has a gradient cannot be put into a file
        (shared / "artifacts").write_bytes(torch.compiler.save_cache_artifacts()[0])
        with torch.no_grad():
            compiled = torch.compile(model[0], backend="mhc", fullgraph=True).forward.aot_compile(((x,), {}))
        compiled.save_compiled_function(str(shared / "function"))
    if what == "same cache":
        step()
        shutil.rmtree(Path(torch._inductor.runtime.runtime_utils.cache_dir()) / "aotautograd")
        step()
    if what == "no cache":
        with (shared / "function").open("rb") as file, torch.no_grad():
            torch.compiler.load_compiled_function(file)(model[0], x)
        tell()
        step()
        torch.compiler.load_cache_artifacts((shared / "artifacts").read_bytes())
        step()
    """
)


def environment(cache: Path) -> dict[str, str]:
    given = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_FORCE_DISABLE_CACHES"} | given


def _run(what: str, cache: Path, shared: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", WARM, what, str(shared)],
        capture_output=True,
        text=True,
        env=environment(cache),
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _without_time(text: str) -> str:
    return re.sub(r"\([\d.]+ s\)", "", text)


@pytest.mark.slow
def test_a_compiled_graph_has_its_report_wherever_it_is_kept(tmp_path: Path) -> None:
    (first,) = _run("first", tmp_path / "cache", tmp_path)
    assert "4 of 4 hyper-connection sites rewritten in 1 graph (" in first["report"]
    assert "fused: " in first["report"]
    assert "lowered: 2 x generate_mix_and_aggregate, 2 x expand_combine, 2 x " in first["report"]
    assert (first["cached"], first["graphs"]) == (0, 1)
    assert (first["autograd"], first["graph"]) == (0, 0)
    expected = _without_time(first["report"]).replace("1 graph", "1 graph from the cache")

    by_autograd, by_graph = _run("same cache", tmp_path / "cache", tmp_path)
    assert (by_autograd["autograd"], by_graph["autograd"], by_graph["graph"]) == (1, 0, 2)
    file, gone, artifacts = _run("no cache", tmp_path / "another", tmp_path)
    assert artifacts["autograd"] == 1
    for warm in (by_autograd, by_graph, artifacts):
        assert _without_time(warm["report"]) == expected
        assert (warm["cached"], warm["graphs"]) == (1, 1)
    # The time is that of this process. Inductor's cache of graphs comes after two of the passes.
    assert [" (0.00 s)" in warm["report"] for warm in (first, by_autograd, by_graph, artifacts, file, gone)] == [
        *(False, True, False),
        *(True, True, False),
    ]
    # The function is one sublayer, compiled without gradients.
    assert "2 of 2 hyper-connection sites rewritten in 1 graph from the cache" in file["report"]
    assert "backward" not in file["report"]
    # Without the cache there is neither the graph nor its report.
    assert _without_time(gone["report"]) == _without_time(first["report"])
    assert (gone["autograd"], gone["graph"], gone["cached"]) == (0, 0, 0)


def test_graphs_of_which_other_things_are_told_are_not_one_in_a_cache() -> None:
    """Two programs may become one graph, and the cache has one report for it."""

    def known(report: Report) -> Any:
        with records.graph() as graph:
            graph.traced.add(report)
            return hooks.LowerPass().uuid()

    def site(code: str, line: int, module: str = "") -> Report:
        return Report([SiteReport("aggregate", Location("model.py", line, code), "", module=module)], graphs=1)

    assert known(site("a", 1)) == known(site("a", 2))
    assert known(site("a", 1)) != known(site("b", 1))
    assert known(site("a", 1)) != known(site("a", 1, "layers.0"))
    assert known(site("a", 1)) != known(Report(graphs=1))
    records.forget()
