"""What README says holds: its snippets run as they stand, its links lead somewhere, and it is short."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import mhc_compile

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)


def _snippets(heading: str) -> list[str]:
    """The Python snippets of a section."""
    section = README.split(f"### {heading}")[1].partition("\n## ")[0].partition("\n### ")[0]
    return re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("heading", ["2. Call the operators", "3. Snapshot-test"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_snippets_run(heading: str) -> None:
    (snippet,) = _snippets(heading)
    exec(compile(snippet, "README.md", "exec"), {})


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_model_is_compiled_as_readme_says() -> None:
    """Inductor compiles a model of transformers three times."""
    names: dict[str, Any] = {}
    first, *others = _snippets("1. Compile a model")
    exec(compile(first, "README.md", "exec"), names)
    report = mhc_compile.report()
    assert (len(report.rewritten), report.declined, report.cut) == (9, [], [])
    assert all(parameter.grad is not None for name, parameter in names["model"].named_parameters() if "hc" in name)
    for snippet in others:
        exec(compile(snippet, "README.md", "exec"), names)
    assert not mhc_compile.is_enabled()
    with torch.no_grad():
        ids = names["model"].eval().generate(names["ids"][:, :8], max_new_tokens=2, do_sample=False)
    assert ids.shape == (1, 10)
    assert len(mhc_compile.report().rewritten) >= 9


def test_it_is_short() -> None:
    assert len(README.split()) <= 900


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target
