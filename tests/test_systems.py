"""What works without Triton, without a C++ compiler, and with what Windows and macOS lack. Each is a fresh process.

The other systems are imitated on Linux: what they lack is taken away once torch is imported. Nothing was run on them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.thorough

HIDE_TRITON = """
import importlib.util, sys
find = importlib.util.find_spec

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Hidden())
importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] == "triton" else find(name, *rest)
"""
# torch, and the packages that it uses, ask for the system while they are imported. They are those of Linux here.
IMPORT_TORCH = """
import filelock, os, torch, torch._dynamo, torch._inductor.codecache, torch._inductor.compile_fx
import torch.fx.experimental.validator  # z3, where it is installed
"""
WINDOWS = """
sys.platform = "win32"
for name in ("fork", "geteuid", "getppid", "getuid", "sysconf", "sysconf_names"):
    delattr(os, name)
"""
MACOS = """
sys.platform = "darwin"
del os.sysconf_names["SC_AVPHYS_PAGES"]
"""
USE = """
import mhc_compile
from mhc_compile import ops
from mhc_compile.nn import HyperConnection
from mhc_compile.testing import capture
from mhc_compile.testing.evaluation import _free_memory

model, x = HyperConnection(torch.nn.Linear(8, 8), dim=8), torch.randn(2, 3, 4, 8)
assert "expand_combine" in str(capture(model, x))
assert len(mhc_compile.explain(model, x).rewritten) == 2
tokens = torch.randn(2, 3, 8)
assert torch.equal(ops.contract(ops.expand(tokens, 4)), tokens)
assert _free_memory(torch.device("cpu")) > 0
print("used")
"""
COMPILE = """
compiled = torch.compile(model, backend="mhc")
compiled(x).sum().backward()
torch.testing.assert_close(compiled(x), model(x))
print("compiled")
"""


def _says(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    around = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-W", "ignore", "-c", "import sys\n" + code]
    return subprocess.run(command, env=around, capture_output=True, text=True, check=False)


def test_without_triton() -> None:
    done = _says(HIDE_TRITON + IMPORT_TORCH + USE + COMPILE)
    assert done.stdout == "used\ncompiled\n", done.stderr[-2000:]


@pytest.mark.parametrize("system", [WINDOWS, MACOS], ids=["Windows", "macOS"])
def test_on_another_system(system: str) -> None:
    done = _says(HIDE_TRITON + IMPORT_TORCH + system + USE)
    assert done.stdout == "used\n", done.stderr[-2000:]


def test_without_a_compiler(tmp_path: Path) -> None:
    """Inductor says so itself, in one line; mhc_compile needs none for the rest."""
    done = _says(IMPORT_TORCH + USE + COMPILE, CXX="no-such-compiler", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert done.stdout == "used\n"
    lines = done.stderr.splitlines()
    assert any("InvalidCxxCompiler: No working C++ compiler found" in line for line in lines), done.stderr[-2000:]
