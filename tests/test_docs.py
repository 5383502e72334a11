"""Generated pages are what the code says, the code says everything, and the site is built without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mhc_compile import command_line, generated_pages, ops, options
from mhc_compile.passes.fuse import FUSIONS
from tests import walkthrough
from tests.ops.test_errors import CASES

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PATH = DOCS / "operators.md"


def test_the_committed_pages_are_the_generated_ones(tmp_path: Path) -> None:
    generated_pages.main([str(tmp_path)])
    # On a difference: make pages
    for name in generated_pages.PAGES:
        assert (tmp_path / name).read_text(encoding="utf-8") == (DOCS / name).read_text(encoding="utf-8")


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_committed_walk_through_the_stages_is_the_generated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # Reports shorten the names of files below the working directory.
    monkeypatch.chdir(ROOT)
    # On a difference: make pages
    assert walkthrough.generate() == walkthrough.PATH.read_text(encoding="utf-8")


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_report_of_the_page_is_that_of_its_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for times, and places in the sources: how much of a line is shown depends on the length of its place."""
    page = (DOCS / "reports.md").read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
    assert command_line.main(["explain", "model.py:make"]) == 0
    told = capsys.readouterr().out.replace(f"{ROOT}/", "")
    shown = page.split("```text\n")[1].split("```")[0]
    places = re.compile(r"\(\d+\.\d+ s\)|(?<=\.py):\d+|(?<=\d x )(\w+) .*")
    assert places.sub(r"\1", told) == places.sub(r"\1", shown)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Links, anchors, names of the API reference, and pages that the navigation lacks."""
    for needed in ("mkdocs", "material", "mkdocstrings_handlers"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is missing; the extra docs installs it with Python 3.11 or newer")
    around = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md")}
    built = {path.relative_to(tmp_path).with_suffix("") for path in tmp_path.rglob("*.html")}
    assert pages <= built
    assert "mhc_compile.backend.mhc" in (tmp_path / "api.html").read_text(encoding="utf-8")


def test_every_option_is_in_the_table() -> None:
    """Every fusion has one, and so has every name that the package looks up."""
    assert {f"mhc.fuse.{name}" for name in FUSIONS} <= options.OPTIONS.keys()
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "mhc_compile").glob("*.py"))
    assert set(re.findall(r'"(mhc\.[a-z_.]+[a-z])"', sources)) <= options.OPTIONS.keys()
    assert all(option.meaning.endswith(".") for option in options.TABLE)


def test_every_operator_and_argument_is_listed() -> None:
    text = PATH.read_text(encoding="utf-8")
    headings = re.findall(r"^##+ (\w+)$", text, flags=re.MULTILINE)
    registered = {
        name.removeprefix("mhc::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("mhc::") and not name.startswith("mhc::_")
    }
    assert registered <= set(headings)
    assert set(ops.__all__) <= registered
    for name in registered:
        section = text.split(f"# {name}\n")[1].split("\n## ")[0].split("\n### ")[0]
        listed = re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
        assert listed == [argument.name for argument in getattr(torch.ops.mhc, name).default._schema.arguments]


@pytest.mark.parametrize("case", CASES)
def test_every_tested_message_is_listed(case: str) -> None:
    """A message is listed where it becomes a listed one when what came is replaced by an ellipsis."""
    _, kind, message = CASES[case]
    text = PATH.read_text(encoding="utf-8")
    listed = re.findall(rf"^- {kind.__name__}: `(.*)`$", text, flags=re.MULTILINE)
    patterns = [re.escape(line).replace("…", ".*").replace(re.escape("<argument>"), r"\w+") for line in listed]
    message = re.sub(r"^mhc::\w+: ", "", message)
    # Tests may quote the beginning of a message only.
    prefixes = [pattern for pattern in patterns if _begins(pattern, message)]
    assert prefixes, message


def _begins(pattern: str, message: str) -> bool:
    pieces = pattern.split(".*")
    place = 0
    for piece in pieces:
        rest = message[place:]
        match = re.search(piece, rest)
        if match is None:
            # The message ends within this piece.
            literal = piece.replace("\\", "")
            return any(rest.endswith(literal[:size]) for size in range(len(literal), 7, -1)) and place > 0
        place += match.end()
    return True


def test_an_argument_without_a_description_is_an_error() -> None:
    with pytest.raises(ValueError, match="the docstring has no word about phi; it describes x, rms_\\*"):
        generated_pages.describe({"x": "streams", "rms_*": "the form"}, "phi")
    assert generated_pages.describe({"x": "streams", "rms_*, pre_eps": "the form"}, "rms_eps") == "the form"
