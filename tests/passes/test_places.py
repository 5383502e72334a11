"""Reports of graphs from a cache name the lines, files and modules of the program as it is now."""

from __future__ import annotations

import importlib.util
import json
import linecache
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import einops
import pytest
import torch
from torch import nn

import mhc_compile
from mhc_compile import compat, hooks, passes, records
from mhc_compile.passes.called import INSERTED
from mhc_compile.passes.places import Places
from mhc_compile.passes.report import Fused, Location, Report, SiteReport, location
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = (2, 3, 4, 6)
PROGRAM = """
from torch import nn
from torch.utils.checkpoint import checkpoint
from tests.zoo.near import Sublayer


class Layer(Sublayer):
    def gates(self, x):
        pre, post, res = super().gates(x)
        pre = x.mean(-1).softmax(-1)
        return pre, post, res

    def read(self, x, h_pre):
        return (h_pre.unsqueeze(-1) * x).sum(2)

    def write(self, x, f, h_post, h_res):
        return h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res.transpose(-1, -2) @ x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.NAME = Layer(4, 6, 3, 2)
        self.inside = Layer(4, 6, 3, 2)

    def forward(self, x):
        return checkpoint(self.inside, self.NAME(x), use_reentrant=False)
"""


def _of_text(folder: Path, file: str, text: str) -> nn.Module:
    (folder / file).write_text(text)
    linecache.checkcache(str(folder / file))
    spec = importlib.util.spec_from_file_location(Path(file).stem, folder / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    made: nn.Module = module.Model()
    return made


def _model(folder: Path, file: str, lines_before: int = 0, name: str = "layer") -> nn.Module:
    return _of_text(folder, file, "\n" * lines_before + PROGRAM.replace("NAME", name))


def _looked_at(model: nn.Module) -> tuple[Places, Report]:
    found: list[Any] = []

    def look(gm: Any, inputs: Any) -> Callable[..., Any]:
        found.extend([Places.of(gm), passes.run_recursively(gm)])
        return lambda *given: gm(*given)

    torch._dynamo.reset()
    torch.compile(model, backend=look)(torch.randn(X))
    places, report = found
    report.seconds = 0.0
    return places, report


def _without_names(report: Report) -> Any:
    """Excerpts have names by what they hold, which are not shown."""
    return [(site, report.excerpts.get(site.excerpt)) for site in report.sites]


def test_places_move_with_the_program(tmp_path: Path) -> None:
    before, report = _looked_at(_model(tmp_path, "model.py"))
    after, expected = _looked_at(_model(tmp_path, "another.py", lines_before=5, name="renamed"))
    assert any("h_pre (" in site.own for site in report.sites)
    assert str(report) != str(expected)
    moved = Report.from_dict(*after.moved([report.as_dict()], before.told()))
    assert str(moved) == str(expected)
    assert _without_names(moved) == _without_names(expected)
    assert {site.module for site in moved.sites} == {"renamed", "inside"}


JOINED = """
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        x, p, h, m = x.sin(), x.mean(-1).softmax(-1), x.amax(-1), x @ x.mT
        {}
"""
AS_TWO = """u = (h.unsqueeze(-1) * x).sum(2)
        return p.unsqueeze(-1) * u.tanh().unsqueeze(-2) + m @ x"""
AS_ONE = AS_TWO.replace("\n        ", "; ")
RENAMED = AS_TWO.replace("u = ", "v = ").replace("u.tanh", "v.tanh")


@pytest.mark.parametrize(("old", "new"), [(AS_ONE, AS_TWO), (AS_TWO, AS_ONE)], ids=["two", "one"])
def test_sites_of_one_line_that_became_two(tmp_path: Path, old: str, new: str) -> None:
    """Each has the line of its own node, and excerpts have the code of now."""
    before, report = _looked_at(_of_text(tmp_path, "one.py", JOINED.format(old)))
    after, expected = _looked_at(_of_text(tmp_path, "two.py", JOINED.format(new)))
    assert [site.op for site in report.sites] == ["aggregate", "expand_combine"]
    (moved,) = map(Report.from_dict, after.moved([report.as_dict()], before.told()))
    assert [site.location for site in moved.sites] == [site.location for site in expected.sites]
    assert moved.sites == expected.sites


def test_excerpts_have_the_code_of_now(tmp_path: Path) -> None:
    """A variable has another name."""
    before, report = _looked_at(_of_text(tmp_path, "one.py", JOINED.format(AS_TWO)))
    after, expected = _looked_at(_of_text(tmp_path, "one.py", JOINED.format(RENAMED)))
    (moved,) = map(Report.from_dict, after.moved([report.as_dict()], before.told()))
    assert _without_names(moved) == _without_names(expected)
    assert any("v = (h.unsqueeze" in text for texts in moved.excerpts.values() for text in texts)


def test_a_fused_operator_names_its_parts_as_the_sites(tmp_path: Path) -> None:
    """In the joint graph, parts have no nodes of Dynamo's."""
    before, report = _looked_at(_of_text(tmp_path, "one.py", JOINED.format(AS_ONE)))
    after, _ = _looked_at(_of_text(tmp_path, "two.py", JOINED.format(AS_TWO)))
    parts = tuple(replace(site, node=None) for site in report.sites)
    lowered = Report(fused=[Fused("boundary", parts)])
    stored = json.loads(json.dumps([report.as_dict(), lowered.as_dict()]))
    traced, fused = map(Report.from_dict, after.moved(stored, before.told()))
    assert fused.fused == [Fused("boundary", tuple(traced.sites))]
    assert len({site.location.line for site in traced.sites}) == 2


def test_a_part_in_a_module_that_the_graph_does_not_name_has_the_line_of_now(tmp_path: Path) -> None:
    before, report = _looked_at(_of_text(tmp_path, "one.py", JOINED.format(AS_TWO)))
    after, expected = _looked_at(_of_text(tmp_path, "two.py", "\n\n" + JOINED.format(AS_TWO)))
    parts = tuple(replace(site, node=None, module="other") for site in report.sites)
    stored = json.loads(json.dumps([Report(fused=[Fused("boundary", parts)]).as_dict()]))
    (moved,) = map(Report.from_dict, after.moved(stored, before.told()))
    found = [(part.location, part.module) for fused in moved.fused for part in fused.parts]
    assert found == [(site.location, "other") for site in expected.sites]


def test_a_graph_of_other_nodes_says_nothing_about_places(tmp_path: Path) -> None:
    before, report = _looked_at(_model(tmp_path, "model.py"))
    other = Places(before.places, before.nodes[1:])
    assert other.moved([report.as_dict()], before.told()) == [report.as_dict()]


def test_sentences_name_the_new_line() -> None:
    def places(line: int) -> Places:
        return Places([(Location("/a/model.py", line, "x = y"), "")], [0])

    told = {"errors": ["line 12 of /a/model.py (x = y), model.py:12, model.py:123, my_model.py:12, line 12 of b.py"]}
    words = "line 15 of /a/model.py (x = y), model.py:15, model.py:123, my_model.py:12, line 12 of b.py"
    assert places(15).moved([told], places(12).told()) == [{"errors": [words]}]


def test_a_graph_from_a_cache_has_the_lines_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(X)
    given, options = (x, x[:, :, 0], x[..., 0].sigmoid(), x[..., :4].softmax(-1)), {"mhc.lower": False}

    def compiled(model: nn.Module) -> Report:
        torch._dynamo.reset()
        torch.compile(model.get_submodule("layer").write, backend="mhc", options=options)(*given)
        return mhc_compile.report()

    monkeypatch.delenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", raising=False)
    with torch._inductor.utils.fresh_cache(), compat.inductor_config().patch(force_disable_caches=False):
        first = compiled(_model(tmp_path, "model.py"))
        cached = compiled(_model(tmp_path, "another.py", 5))
    assert (first.cached, cached.cached) == (0, 1)
    (was,), (now,) = first.sites, cached.sites
    assert (Path(was.location.file).name, Path(now.location.file).name) == ("model.py", "another.py")
    assert now.location.line == was.location.line + 5
    assert "model.py" not in cached.details().replace("another.py", "")


def test_lines_to_skip_are_those_of_now() -> None:
    """A cache has a graph whose line was skipped. The program that asks for it has other code at this line."""

    def known(line: int, names: list[str]) -> Any:
        with records.graph() as graph:
            graph.places = Places(
                [(Location("model.py", line, "a"), ""), (Location("model.py", 9, "b"), "")], [0, 1, 0]
            )
            return hooks.MhcPass({"mhc.skip": names}).uuid()

    assert known(1, []) == known(2, [])
    assert known(1, ["model.py:1"]) != known(2, ["model.py:1"])
    assert known(1, ["model.py:9"]) == known(2, ["model.py:9"])
    records.forget()


def test_a_line_is_named_with_all_its_folders_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in (tmp_path / "models" / "block.py", tmp_path.parent / "block.py", Path("models/block.py")):
        place = Location(str(file), 12, "x = y")
        assert place.is_among([f"{file}:12"])
        assert place.is_among(["other.py:3", "block.py:12"])
        assert not place.is_among(
            [f"{file}:1", f"{file}:2", f"{tmp_path}/other/block.py:12", "lock.py:12", "other/block.py:12"]
        )
    inside = Location(str(tmp_path / "models" / "block.py"), 12, "x = y")
    for name in (
        "./models/block.py",
        "models/./block.py",
        "models/../models/block.py",
        f"../{tmp_path.name}/models/block.py",
    ):
        assert inside.is_among([f"{name}:12"])
    assert not Location("", 0, "").is_among(["unknown source:0", f"{tmp_path}:0"])


@pytest.mark.parametrize("folder", ["torch", "einops", "site-packages/torch_models"])
def test_a_folder_that_is_called_as_a_library_has_code_of_the_user(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    model = _model(tmp_path / folder, "model.py")
    _, report = _looked_at(model)
    codes = [site.location.code for site in report.sites if Path(site.location.file).parent == tmp_path / folder]
    assert "return (h_pre.unsqueeze(-1) * x).sum(2)" in codes


def test_lines_of_installed_libraries_stand_for_those_that_call_them() -> None:
    def at(*files: str) -> str:
        node = torch.fx.Graph().placeholder("x")
        node.meta["stack_trace"] = "".join(f'  File "{file}", line 3, in f\n' for file in files)
        return location(node).file

    assert at("model.py", torch.nn.functional.__file__) == "model.py"
    assert at("model.py", einops.__file__) == "model.py"
    assert at("model.py", mhc_compile.ops.__file__) == "model.py"
    assert at("model.py", "projects/torch/model.py") == "projects/torch/model.py"


class Named(nn.Module):
    """Its method calls the module by another name than self."""

    broken = False

    def __init__(this) -> None:
        super().__init__()
        this.layers = nn.ModuleList([Sublayer(4, 6, 3, 2)])

    def forward(this, x: Any) -> Any:
        if this.broken:
            x = x.sin()
            torch._dynamo.graph_break()
        return this.layers[0](x)


class NamedAndBroken(Named):
    broken = True


NAMED = Named()
BY_NAME = {"one": NAMED}
fn = NAMED  # what torch calls a module that it wraps
PATHS: dict[str, tuple[Callable[..., Any], str]] = {
    "a method": (NAMED, "layers.0"),
    "a bound method": (NAMED.forward, "layers.0"),
    "a method after a break": (NamedAndBroken(), "layers.0"),
    "a method in another module": (nn.Sequential(NAMED), "0.layers.0"),
    "a global": (lambda x: NAMED(x), "NAMED.layers.0"),
    "a global of another's name": (lambda x: fn(x), "fn.layers.0"),
    "a part of a global": (lambda x: NAMED.layers[0](x), "NAMED.layers.0"),
    "an item of a global": (lambda x: BY_NAME["one"](x), "BY_NAME['one'].layers.0"),
    "a local": (lambda x, model=NAMED: model(x), "model.layers.0"),
}


@pytest.mark.parametrize("case", PATHS)
def test_a_path_begins_at_the_compiled_module_or_with_a_variable(case: str) -> None:
    function, path = PATHS[case]
    assert {site.module for site in mhc_compile.explain(function, torch.randn(X)).sites} == {path}


def test_a_path_names_its_module_in_reports_of_several_functions() -> None:
    """A site counts once, whatever leads to its module."""
    layer = NAMED.layers[0]
    for function in (NAMED, lambda x: NAMED(x).sin(), lambda x: BY_NAME["one"](x).cos(), layer):
        torch.compile(function, backend="mhc", options={"mhc.lower": False})(torch.randn(X))
    assert len(mhc_compile.report().rewritten) == 2


def test_a_loaded_file_of_an_older_version(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("x = 1\ny = 2\n")
    text = records.Compiled(
        Report([SiteReport("aggregate", Location(str(path), 2, "y = 2"), "n = 4")], graphs=1)
    ).packed()
    ledger = records.Ledger()
    ledger.load(text)
    assert ledger.report().outdated == []
    path.write_text("x = 1\n\n# moved\ny = 2\n")
    linecache.checkcache()
    assert ledger.report().outdated == [str(path)]
    assert f"  lines of {path} are those of an older version, which was compiled" in str(ledger.report())
    path.unlink()
    linecache.checkcache()
    assert ledger.report().outdated == []


def test_nodes_of_an_earlier_run_name_no_site(tmp_path: Path) -> None:
    """A site is named by its id, which a site of a later run may have, too."""
    graphs: list[Any] = []

    def look(gm: Any, inputs: Any) -> Callable[..., Any]:
        new, _ = passes.run(gm.graph)
        again, report = passes.run(new)
        graphs.extend([new, again or new, report])
        return lambda *given: gm(*given)

    torch.compile(_model(tmp_path, "model.py").get_submodule("layer"), backend=look)(torch.randn(X))
    new, again, report = graphs
    assert len(report.called) == 0
    for graph in (new, again):
        assert {node.meta[INSERTED] for node in graph.nodes if INSERTED in node.meta} == {True}
