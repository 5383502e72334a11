"""What a report says of a site before and after: bytes, lines of the graph, and what was fused with what."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import mhc_compile
from benchmarks.traffic import of_eager
from mhc_compile import passes, records
from mhc_compile.nn import HyperConnection
from mhc_compile.page.layers import layers, with_fusion
from mhc_compile.passes.before_after import _bytes
from mhc_compile.passes.fuse import joint
from mhc_compile.passes.report import Report
from tests.passes import shifted
from tests.zoo import ZOO
from tests.zoo.common import BATCH, LENGTH, WIDTH

N, C, TOKENS = 4, 32, 16
UNIT = 4 * C * TOKENS


class Layer(nn.Module):
    def __init__(self, inner: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.attention = HyperConnection(inner(), dim=C)
        self.mlp = HyperConnection(inner(), dim=C)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x))


class Model(nn.Module):
    def __init__(self, depth: int, inner: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(inner) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def streams() -> Tensor:
    return torch.randn(2, TOKENS // 2, N, C)


@pytest.fixture(scope="module")
def report() -> Report:
    return mhc_compile.explain(Model(2, lambda: nn.Linear(C, C)), streams())


def test_a_site_knows_its_module(report: Report) -> None:
    names = [f"layers.{layer}.{inner}" for layer in range(2) for inner in ("attention", "mlp")]
    assert [site.module for site in report.sites] == [name for name in names for _ in range(2)]


fn = Model(1, lambda: nn.Linear(C, C))


def test_a_module_that_is_a_global_keeps_its_name() -> None:
    """Dynamo calls what it compiles fn, too."""
    names = {site.module for site in mhc_compile.explain(lambda x: fn(x), streams()).sites}
    assert names == {"fn.layers.0.attention", "fn.layers.0.mlp"}


def test_the_program_is_counted_as_the_benchmarks_count_it() -> None:
    """A model whose every operation belongs to a site."""
    model, x = Model(2, nn.Identity), streams()
    with torch.no_grad():
        report = mhc_compile.explain(model, x)
        expected = of_eager(lambda: model(x))
    assert report.declined == []
    assert sum(site.before.moved for site in report.sites if site.before is not None) == expected


def test_an_operator_reads_each_argument_and_writes_each_result_once(report: Report) -> None:
    mix, write = report.sites[:2]
    assert write.op == "expand_combine"
    gates = 4 * TOKENS * (N + N * N)
    assert write.after is not None
    assert (write.after.moved, write.after.made) == ((2 * N + 1) * UNIT + gates, N * UNIT)
    logits = N * N + 2 * N
    results = UNIT + gates + 4 * TOKENS * (logits + 1)
    parameters = 4 * (logits * N * C + 3 + logits)
    assert mix.after is not None
    assert (mix.after.moved, mix.after.made) == (N * UNIT + parameters + results, results)


def test_sites_that_are_alike_share_an_excerpt(report: Report) -> None:
    mixes, writes = report.sites[::2], report.sites[1::2]
    assert len({site.excerpt for site in mixes}) == len({site.excerpt for site in writes}) == 1
    assert report.excerpts.keys() == {mixes[0].excerpt, writes[0].excerpt}
    before, after = report.excerpts[writes[0].excerpt]
    assert f"# nn.py:{writes[0].location.line}  {writes[0].location.code}" in before
    assert "matmul(" in before
    assert before.count("(result)") == 1
    assert "linear(" not in before, "the sublayer is not a part of the site"
    assert "mhc.expand_combine(in0, None, in1, in2, in3)  # f32[2, 8, 4, 32]" in after
    assert "matmul(" not in after
    before, after = report.excerpts[mixes[0].excerpt]
    assert "in3: " in before
    assert "in4" not in before, "parts of what a site computes are no inputs"
    assert "sinkhorn_steps=39" in after
    lines = [line for line in before.splitlines() if line.startswith("# ")]
    assert all(line != following for line, following in pairwise(lines)), "a line of the program is shown once"


class Pyramid(nn.Module):
    """The same lines for streams of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(HyperConnection(nn.Linear(width, width), dim=width) for width in (C, 2 * C))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(z) for layer, z in zip(self.layers, (x, y), strict=True))


def test_sites_of_the_same_lines_are_counted_by_their_sizes() -> None:
    model, given = Pyramid(), (streams(), torch.randn(2, TOKENS // 4, N, 2 * C))
    alone = [mhc_compile.explain(layer, x).rewritten for layer, x in zip(model.layers, given, strict=True)]
    sites = mhc_compile.explain(model, *given).rewritten
    assert [(site.op, site.before, site.after) for site in sites] == [
        (site.op, site.before, site.after) for part in alone for site in part
    ]
    assert alone[0][0].before != alone[1][0].before


def test_a_boundary_knows_its_sites(report: Report) -> None:
    assert [(one.op, [(part.op, part.module) for part in one.parts]) for one in report.fused] == [
        ("boundary", [("expand_combine", first), ("generate_mix_and_aggregate", second)])
        for first, second in (
            ("layers.0.attention", "layers.0.mlp"),
            ("layers.0.mlp", "layers.1.attention"),
            ("layers.1.attention", "layers.1.mlp"),
        )
    ]
    write, mix = report.sites[1], report.sites[2]
    for one in report.fused:
        assert one.after is not None
        assert write.after is not None
        assert mix.after is not None
        # The new streams are not read again.
        assert one.after.moved == write.after.moved + mix.after.moved - N * UNIT
    assert report.fusions["boundary"] == 3


def test_what_has_symbolic_sizes_is_not_counted() -> None:
    x = streams()
    torch._dynamo.mark_dynamic(x, 0)
    report = mhc_compile.explain(Model(1, lambda: nn.Linear(C, C)), x)
    assert len(report.rewritten) == 4
    assert {(site.before, site.after) for site in report.rewritten} == {(None, None)}
    assert report.errors == []
    assert report.excerpts
    assert all("f32[s, 8, 4, 32]" in text for lines in report.excerpts.values() for text in lines)


def test_a_failure_to_count_costs_no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(passes, "before_after", fail)
    monkeypatch.setattr(joint, "module_path", fail)
    report = mhc_compile.explain(Model(1, lambda: nn.Linear(C, C)), streams())
    assert len(report.rewritten) == 4
    assert report.fusions["boundary"] == 1
    assert report.fused == []
    assert {(site.before, site.after, site.excerpt) for site in report.sites} == {(None, None, "")}
    assert any("planted" in error for error in report.errors)
    assert "not counted" in report.html()


def test_a_function_that_is_compiled_for_other_sizes_counts_once() -> None:
    def compiled(tokens: int) -> Report:
        return mhc_compile.explain(Model(1, lambda: nn.Linear(C, C)), torch.randn(1, tokens, N, C))

    first, second = compiled(8), compiled(24)
    assert first.sites[0].before != second.sites[0].before
    joined = Report.joined([first, second])
    assert joined.as_dict()["sites"] == first.as_dict()["sites"]
    assert joined.as_dict()["fused"] == first.as_dict()["fused"]
    assert joined.compiled == 2
    assert "the counts are of the first" in joined.html()
    assert "the counts are of the first" not in first.html()


def test_a_cache_keeps_everything(report: Report) -> None:
    told = report.as_dict()
    assert Report.from_dict(json.loads(json.dumps(told))).as_dict() == told
    loaded = records.Compiled()
    loaded.unpack(records.Compiled(traced=report).packed())
    kept = loaded.report().as_dict()
    assert {name: kept[name] for name in ("sites", "fused", "excerpts")} == {
        name: told[name] for name in ("sites", "fused", "excerpts")
    }


def test_a_report_from_before_is_read() -> None:
    """Caches may hold reports of versions that did not count bytes."""
    told = Report(graphs=1).as_dict() | {
        "sites": [
            {
                "op": "head",
                "location": {"file": "m.py", "line": 1, "code": "x"},
                "detail": "",
                "reason": None,
                "own": "",
            }
        ]
    }
    del told["fused"], told["excerpts"]
    (site,) = Report.from_dict(told).sites
    assert (site.module, site.before, site.after, site.excerpt) == ("", None, None, "")


def test_a_shifted_boundary_knows_its_three_sites() -> None:
    report = mhc_compile.explain(shifted.Model(), torch.randn(BATCH, LENGTH, WIDTH))
    last = ["expand_combine", "aggregate"]  # of streams that nothing makes gates of
    assert [[part.op for part in one.parts] for one in report.fused] == [*2 * [[*last, "generate_mix"]], last]
    assert [one.op for one in report.fused] == [*2 * ["shifted_boundary"], "expand_combine_and_read"]
    found = layers(report)
    assert sum(len(entry.fused) for layer in found for entry in layer.entries) == 8
    assert with_fusion(report, found) is not None


@pytest.mark.parametrize("name", ["deepseek", "tilekernels", "megatron-dev"])
def test_the_dtype_of_streams_is_the_program_s(name: str) -> None:
    """Each sublayer writes its streams in float32 and casts them: the next one is given what the cast made."""
    model = ZOO[name].build(layers=3).to(torch.bfloat16)
    report = mhc_compile.explain(model, torch.randn(2, 5, WIDTH, dtype=torch.bfloat16))
    told = [site.detail for site in report.rewritten if site.op in ("generate_mix_and_aggregate", "expand_combine")]
    assert len(told) >= 6
    assert all(", bfloat16, " in detail for detail in told), told


@pytest.mark.parametrize(
    ("tensor", "numbers"),
    [
        (torch.zeros(3, 8).unfold(1, 4, 1), 24),
        (torch.zeros(3, 8).unfold(1, 4, 4), 24),
        (torch.zeros(16)[::2].unfold(0, 4, 1), 8),
        (torch.zeros(3, 8)[:, :5], 15),
        (torch.zeros(3, 1, 8).expand(3, 4, 8), 24),
        (torch.zeros(0, 4), 0),
        (torch.zeros(()), 1),
    ],
)
def test_memory_counts_once_however_often_a_tensor_shows_it(tensor: Tensor, numbers: int) -> None:
    assert _bytes(tensor) == 4 * numbers
