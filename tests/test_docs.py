"""docs/operators.md is what the code says, and the code says everything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mhc_compile import docs, ops
from tests.ops.test_errors import CASES

PATH = Path(__file__).resolve().parent.parent / "docs" / "operators.md"


def test_the_committed_file_is_the_generated_one(tmp_path: Path) -> None:
    docs.main([str(tmp_path / "operators.md")])
    # On a difference: python -m mhc_compile.docs
    assert (tmp_path / "operators.md").read_text(encoding="utf-8") == PATH.read_text(encoding="utf-8")


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
        docs.describe({"x": "streams", "rms_*": "the form"}, "phi")
    assert docs.describe({"x": "streams", "rms_*, pre_eps": "the form"}, "rms_eps") == "the form"
