"""Runs the kernel tests under Triton's interpreter, in two processes: one for each of two workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


# Found and not listed: a module that nobody adds would never run without a GPU.
MODULES = sorted(p.stem for p in HERE.glob("test_*.py") if "\npytestmark = MARKS\n" in p.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("modules", [MODULES[::2], MODULES[1::2]], ids=",".join)
def test_in_interpreter(modules: list[str]) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # -rp lists what passed: a module whose tests were all deselected or skipped would be green as well.
    files = [f"{(HERE / module).relative_to(ROOT)}.py" for module in modules]
    result = subprocess.run([*command, "-rp", *files], cwd=ROOT, env=environment, capture_output=True, text=True)
    told = "\n".join(line for line in result.stdout.splitlines() if not line.startswith("PASSED"))
    assert result.returncode == 0, told[-5000:] + result.stderr[-2000:]
    for file in files:
        assert f"PASSED {file}::" in result.stdout, file
