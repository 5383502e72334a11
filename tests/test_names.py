"""What `import mhc_compile` gives: its names, whatever else is imported, and soon."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mhc_compile
from mhc_compile.compat import NEWEST_TESTED, tell_if_untested

ROOT = Path(__file__).resolve().parent.parent


def _run(code: str, **environment: str) -> str:
    """What a fresh process prints."""
    command = [sys.executable, "-c", code]
    around = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, env=around, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def test_names_are_found_without_their_imports() -> None:
    """One process in which nothing else is imported before."""
    code = """
import sys, types, mhc_compile
assert "torch._dynamo" not in sys.modules
missing = [name for name in mhc_compile.__all__ if name not in dir(mhc_compile)]
assert not missing, missing
modules = [name for name in mhc_compile.__all__ if isinstance(getattr(mhc_compile, name), types.ModuleType)]
print(*modules)
"""
    assert _run(code) == "backend checkpoints distributed nn ops testing"


def test_no_module_takes_the_name_of_something_else() -> None:
    """Every module of the package is imported before the names are looked up."""
    code = """
import importlib, pkgutil, types, mhc_compile
for module in pkgutil.iter_modules(mhc_compile.__path__, "mhc_compile."):
    importlib.import_module(module.name)
modules = ("backend", "checkpoints", "distributed", "nn", "ops", "testing")
for name in mhc_compile.__all__:
    assert not isinstance(getattr(mhc_compile, name), types.ModuleType) or name in modules
print(type(mhc_compile.explain).__name__)
"""
    assert _run(code) == "function"


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(AttributeError, match="module 'mhc_compile' has no attribute 'no_such'"):
        _ = mhc_compile.no_such


def test_a_name_of_the_module_for_tests() -> None:
    """The message does not import that module."""
    code = """
import sys, mhc_compile
try:
    mhc_compile.capture
except AttributeError as error:
    print(error, "mhc_compile.testing" in sys.modules)
"""
    assert _run(code) == "module 'mhc_compile' has no attribute 'capture'; it is mhc_compile.testing.capture False"
    assert set(mhc_compile._IN_TESTING) == set(mhc_compile.testing.__all__)


def test_the_version_is_the_one_of_the_changelog() -> None:
    latest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert latest is not None
    assert mhc_compile.__version__ == latest[1]


@pytest.mark.slow
def test_a_torch_that_was_not_tested_is_told_once() -> None:
    """In a fresh process that uses the package in three ways."""
    code = """
import torch
torch.__version__ = "9.0.0a0+git1234567"
import mhc_compile
for _ in range(2):
    torch.compile(lambda x: x.view(-1), backend="mhc")(torch.ones(2))
    mhc_compile.explain(lambda x: x.view(-1), torch.ones(2))
with mhc_compile.enable():
    torch.compile(lambda x: x.view(-1, 1))(torch.ones(2))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, cwd=ROOT, check=True, stderr=subprocess.PIPE, text=True)
    told = f"torch 9.0.0a0 is newer than {NEWEST_TESTED}, the newest that mhc_compile was tested with"
    assert done.stderr.splitlines().count(told) == 1


@pytest.mark.parametrize(
    ("release", "untested"),
    [("2.11.0", False), (f"{NEWEST_TESTED}.9+cu130", False), ("2.100.0", True), ("3.0.0.dev20270101+cpu", True)],
)
def test_which_torch_was_not_tested(
    release: str, untested: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.__version__", release)
    tell_if_untested()
    assert len(caplog.records) == untested


def test_the_tested_torches_are_those_of_constraints() -> None:
    """The newest of them is the constant, and no file of the package holds torch back."""
    pins = [re.findall(r"^torch==(\d+\.\d+)", path.read_text(), re.MULTILINE) for path in ROOT.glob("constraints*.txt")]
    tested = [tuple(map(int, pin.split("."))) for found in pins for pin in found]
    assert max(tested) == tuple(map(int, NEWEST_TESTED.split(".")))
    (required,) = re.findall(r'^    "torch([^a-z].*)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert re.fullmatch(r">=\d+\.\d+", required)


def test_the_numerics_version_is_the_one_of_the_changelog() -> None:
    sections = re.findall(r"^### Numerics\n(.*?)^###? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE | re.DOTALL)
    assert f"The numerics version is {mhc_compile.__numerics__}." in sections[0]


@pytest.mark.thorough
def test_how_long_the_import_takes(tmp_path: Path) -> None:
    """Beyond torch's own: 50 ms where that takes a second, with modules that are compiled to bytecode."""
    # Garbage is collected beforehand: once in a while Python looks through all that torch has loaded.
    code = """
import gc, time
begin = time.process_time()
import torch
of_torch = time.process_time() - begin
gc.collect()
begin = time.process_time()
import mhc_compile
print((time.process_time() - begin) / of_torch)
"""
    bytecode = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    # The first one compiles. Other processes on the machine only ever add to the others.
    shares = [float(_run(code, **bytecode)) for _ in range(7)]
    assert min(shares[1:]) < 0.05
