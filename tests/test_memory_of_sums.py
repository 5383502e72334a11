"""A fault of torch's that is repaired: C++ kernels that store sums beyond the end of their memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mhc_compile.compat.versions import is_older_than

ROOT = Path(__file__).parent.parent
# Memory that Inductor's code makes has 64 numbers in front and behind, which nobody may change.
SCRIPT = """
import runpy, sys, torch
from mhc_compile import compat

if {repaired} is False:
    compat.keep_sums_in_their_memory = lambda: None
made = []

def empty(size, stride, dtype):
    used = 1 + sum((n - 1) * s for n, s in zip(size, stride)) if all(size) else 0
    whole = torch.full((used + 128,), 7.0, dtype=dtype)
    made.append((whole, used))
    return whole.as_strided(size, stride, 64)

torch._C._dynamo.guards._empty_strided_cpu = empty
runpy.run_path("tests/fuzz/found/sums_beyond_their_memory.txt", run_name="__main__")
changed = [bool((whole[:64] != 7).any() or (whole[64 + used :] != 7).any()) for whole, used in made]
print("changed", sum(changed), "of", bool(made))
"""


@pytest.mark.slow
@pytest.mark.parametrize("repaired", [True, False])
def test_sums_stay_in_their_memory(repaired: bool, tmp_path: Path) -> None:
    """Without the repair, they do not with the versions of torch that have the fault."""
    script = SCRIPT.replace("{repaired}", str(repaired))
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]
    whole = "changed 0 of True" in result.stdout
    assert whole == (repaired or not is_older_than("2.13")), result.stdout
