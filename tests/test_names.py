"""What `import mhc_compile` gives: its names, whatever else is imported, and soon."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mhc_compile

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
    assert _run(code) == "backend checkpoints nn ops testing"


def test_no_module_takes_the_name_of_something_else() -> None:
    """Every module of the package is imported before the names are looked up."""
    code = """
import importlib, pkgutil, types, mhc_compile
for module in pkgutil.iter_modules(mhc_compile.__path__, "mhc_compile."):
    importlib.import_module(module.name)
for name in mhc_compile.__all__:
    value = getattr(mhc_compile, name)
    assert not isinstance(value, types.ModuleType) or name in ("backend", "checkpoints", "nn", "ops", "testing")
print(type(mhc_compile.explain).__name__)
"""
    assert _run(code) == "function"


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(AttributeError, match="module 'mhc_compile' has no attribute 'no_such'"):
        _ = mhc_compile.no_such


def test_the_version_is_the_one_of_the_changelog() -> None:
    latest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert latest is not None
    assert mhc_compile.__version__ == latest[1]


@pytest.mark.thorough
def test_how_long_the_import_takes(tmp_path: Path) -> None:
    """Beyond torch's own: less than 50 ms of a processor, with modules that are compiled to bytecode."""
    code = """
import time, torch
begin = time.process_time()
import mhc_compile
print(time.process_time() - begin)
"""
    bytecode = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    seconds = [float(_run(code, **bytecode)) for _ in range(4)]
    assert min(seconds[1:]) < 0.05
