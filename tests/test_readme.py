"""What README and the documentation say holds: snippets run, links lead somewhere, and sentences are short."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

import mhc_compile

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / name for name in ("README.md", "PACKAGE.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
LONGEST_SENTENCE = 25  # words, as in our rules of style


MODEL, *OTHERS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("snippet", OTHERS, ids=["enable", "operators", "snapshot"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_each_snippet_runs_alone(snippet: str) -> None:
    exec(compile(snippet, "README.md", "exec"), {})
    assert not mhc_compile.is_enabled()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_model_is_compiled_as_readme_says() -> None:
    """Inductor compiles a model of transformers three times."""
    names: dict[str, Any] = {}
    exec(compile(MODEL, "README.md", "exec"), names)
    report = mhc_compile.report()
    assert (len(report.rewritten), report.declined, report.cut) == (9, [], [])
    assert all(parameter.grad is not None for name, parameter in names["model"].named_parameters() if "hc" in name)
    (verify,) = re.findall(r"`(mhc_compile\.verify\(.*?\))`", README)
    assert eval(verify, names).ok
    with torch.no_grad():
        ids = names["model"].eval().generate(names["ids"][:, :8], max_new_tokens=2, do_sample=False)
    assert ids.shape == (1, 10)
    assert len(mhc_compile.report().rewritten) >= 9


@pytest.mark.thorough
@pytest.mark.usefixtures("fresh_dynamo")
def test_the_quickstart_runs() -> None:
    """Inductor compiles a small model twice."""
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for snippet in re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL):
        exec(compile(snippet, "docs/index.md", "exec"), names)
    (count,) = re.findall(r"^mhc: (\d+ of \d+) hyper-connection sites", page, flags=re.MULTILINE)
    assert str(names["report"]).startswith(f"mhc: {count} ")


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_page_of_a_package_index() -> None:
    """It stands alone there: its snippet runs, and it has no links, because no other file is there."""
    page = (ROOT / "PACKAGE.md").read_text(encoding="utf-8")
    assert "](" not in page
    (snippet,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    exec(compile(snippet, "PACKAGE.md", "exec"), {})
    assert f"Version {mhc_compile.__version__} " in page


def test_it_is_short() -> None:
    assert len(README.split()) <= 900


class _Operators(TorchDispatchMode):
    """Counts ATen operators, but for those that only look at a tensor in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        looks = function.is_view or function is torch.ops.aten._unsafe_view.default
        self.count += not looks
        return function(*args, **(kwargs or {}))


def test_the_operators_of_eager_code() -> None:
    """As README counts them: those of DeepSeek-V4's hyper-connection around a sublayer that has none."""
    config = DeepseekV4Config(hidden_size=64)
    mix, x = DeepseekV4HyperConnection(config), torch.randn(2, 8, config.hc_mult, 64)
    with torch.no_grad(), _Operators() as operators:
        h_post, h_res, f = mix(x)
        h_post.unsqueeze(-1) * f.unsqueeze(-2) + torch.matmul(h_res.transpose(-1, -2), x)
    picture = (ROOT / "docs" / "images" / "before_after.svg").read_text(encoding="utf-8")
    counts = re.findall(r"(\d+) operators", README + picture)
    assert len(counts) >= 3  # in the text for those who do not see the picture, and twice in the picture
    assert set(counts) == {str(operators.count)}


def _sentences(text: str) -> list[str]:
    """Of paragraphs and items of lists. A colon or a semicolon ends a sentence as well; code is one word."""
    text = re.sub(r"^ *```.*?^ *```|`[^`]*`", "code", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(#|\||:::|!|>| {4}(?![-*] )).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    paragraphs = re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", text, flags=re.MULTILINE)
    return [sentence for one in paragraphs for sentence in re.split(r"(?<=[.?!:;])\s+", one)]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_sentences_are_short(page: Path) -> None:
    sentences = _sentences(page.read_text(encoding="utf-8"))
    assert [each for each in sentences if len(each.split()) > LONGEST_SENTENCE] == []


def test_long_sentences_are_seen() -> None:
    """But not code, tables, headings or what links lead to."""
    words = " ".join(["word"] * 26)
    for text in (f"{words}.", f"- item\n- {words}.", f"one: two.\n{words}"):
        assert max(len(each.split()) for each in _sentences(text)) == 26
    for text in (f"# {words}", f"| {words} |", f"`{words}`", f"    {words}", f"```text\n{words}\n```", f"[a]({words})"):
        assert max(len(each.split()) for each in _sentences(text)) <= 1


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target
