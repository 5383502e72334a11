"""No code is made of a model's content, and no file of ours can hold code: read from the syntax tree of each file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import mhc_compile.ops  # noqa: F401  (registers the operators)
from mhc_compile.encoding import to_text
from mhc_compile.ops import _launch
from tests import lock

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("mhc_compile", "benchmarks", "examples")
# What runs text as code, and what reads files that can hold code, by the module that has it.
CALLS = {"eval", "exec", "compile", "__import__", "breakpoint"}
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "code",
    "codeop",
    "yaml",
}
ATTRIBUTES = {("torch", "load"), ("torch", "save"), ("os", "system"), ("os", "popen"), ("builtins", "eval")}
ATTRIBUTES |= {("builtins", "exec"), ("torch.serialization", "load"), ("torch.serialization", "save")}
NETWORK = {"socket", "urllib", "http", "requests", "httpx", "ftplib", "smtplib", "aiohttp"}


def _files() -> list[Path]:
    found = {path.resolve() for folder in SHIPPED for path in (ROOT / folder).rglob("*.py")}
    return sorted(found | {path.resolve() for path in (ROOT / "mhc_compile" / "passes").rglob("*.py")})


def _names(tree: ast.Module) -> dict[str, str]:
    """What a name stands for, if it was imported: `import torch as t` makes `t` "torch"."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {
                one.asname or one.name.partition(".")[0]: one.name if one.asname else one.name.partition(".")[0]
                for one in node.names
            }
        elif isinstance(node, ast.ImportFrom) and not node.level:
            known |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return known


def _full(node: ast.expr, known: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_full(node.value, known)}.{node.attr}"
    return known.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def complaints(source: str) -> Iterator[str]:
    """What a source file does that it should not."""
    tree = ast.parse(source)
    known = _names(tree)
    # A program's own functions and arguments may have such a name.
    own = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        imported = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            imported = [f"{node.module}.{one.name}" for one in node.names]
        for name in imported:
            if name.partition(".")[0] in MODULES | NETWORK:
                yield f"line {node.lineno} imports {name}"
        if isinstance(node, ast.Name) and node.id in CALLS - own and node.id not in known:
            yield f"line {node.lineno} uses {node.id}"
        if isinstance(node, (ast.Attribute, ast.Name)):
            full = _full(node, known)
            if tuple(full.rpartition(".")[::2]) in ATTRIBUTES:
                yield f"line {node.lineno} uses {full}"
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                true = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg == "shell" and not true:
                    yield f"line {node.lineno} starts a shell"


def test_no_code_is_made_of_text_and_no_file_can_hold_code() -> None:
    found = {str(path.relative_to(ROOT)): list(complaints(path.read_text(encoding="utf-8"))) for path in _files()}
    assert {file: lines for file, lines in found.items() if lines} == {}
    assert len(found) > 150


@pytest.mark.parametrize(
    "source",
    [
        "eval(text)",
        "run = exec",
        "def f():\n    import pickle as p",
        "from pickle import loads",
        "import torch as t\nt.load(file)",
        "from torch import load as l\nl(file)",
        "import builtins\nbuiltins.eval(text)",
        "from builtins import exec as run\nrun(text)",
        "import subprocess\nsubprocess.run(text, shell=True)",
        "compile(text, name, 'exec')",
        "import urllib.request",
        "from os import system\nsystem(text)",
    ],
)
def test_the_check_finds(source: str) -> None:
    assert list(complaints(source))


def test_the_check_lets_pass() -> None:
    assert list(complaints("model.eval()\nre.compile(text)\ntorch.compile(model)\nast.literal_eval(text)")) == []


@pytest.mark.parametrize("path", ["os.system", "shutil.rmtree", "antigravity.webbrowser", "mhc_compile.ops.sinkhorn"])
def test_a_launch_names_a_kernel_or_nothing_is_imported(path: str) -> None:
    text = to_text([path, [0], ["float32"], [None, 1], {}])
    with pytest.raises(ValueError, match=f"{path} is no kernel of mhc_compile"):
        _launch.launch(text, [torch.ones(1)], [], written=[])


@pytest.mark.parametrize("version", ["2.13", "2.14"])
def test_what_is_locked_is_what_is_pinned(version: str) -> None:
    """`make lock` was run after the last change of the constraints, and each file has a hash."""
    pinned = {}
    for name in ("constraints.txt", f"constraints-torch{version}.txt"):
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
            requirement, _, marker = line.partition(";")
            if "==" in requirement and marker.strip() in ("", 'python_version >= "3.11"'):
                package, _, number = requirement.strip().partition("==")
                pinned[package] = number
    text = (ROOT / f"locked-torch{version}.txt").read_text(encoding="utf-8")
    locked = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            found = re.fullmatch(r"([a-z0-9.-]+)==([^ ]+) --hash=sha256:[0-9a-f]{64}", line)
            assert found, line
            locked[found[1]] = found[2].partition("+")[0]
    assert len(locked) > 100
    assert {name: locked.get(name, number) for name, number in pinned.items()} == pinned
    assert {"torch", "transformers", "pytest", "setuptools"} <= locked.keys()


def test_a_package_without_a_hash_is_not_locked() -> None:
    source = {"url": "file:///a.whl", "archive_info": {"hashes": {"sha256": "0" * 64}}}
    package = {"metadata": {"name": "A_b", "version": "1"}, "download_info": source}
    own = {"metadata": {"name": "mhc-compile", "version": "1"}, "download_info": {"dir_info": {}}}
    assert lock.lines({"install": [package, own]}) == [f"a-b==1 --hash=sha256:{'0' * 64}"]
    source["archive_info"] = {}
    with pytest.raises(ValueError, match="A_b 1 comes without a sha256"):
        lock.lines({"install": [package]})
