"""The GPU tests of operators and kernels, but for the large ones, under compute-sanitizer.

Run as `python -m tests.kernels.sanitize [tool]` (`make gpu-sanitize`) on a machine with a GPU; tool is memcheck unless
racecheck, initcheck or synccheck is asked for. compute-sanitizer comes with the CUDA toolkit; SANITIZER may name it.

The exit status is 0 only if the tests passed, the sanitizer had nothing to report, and it does report a kernel that
reads out of bounds. torch allocates every tensor by itself here: in a cache its neighbours are in bounds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPORTED = 99
# The sanitizer slows launches, which several processes at the same time make up for.
SUITE = ["-m", "pytest", "-q", "-n", "auto", "--durations=10", "-p", "no:cacheprovider"]
SUITE += ["-m", "gpu and not large", "tests/ops", "tests/kernels"]
# In a child process, as those of the suite are.
STRAY = ["-m", "tests.kernels.sanitize", "--stray-child"]

Run = Callable[[Sequence[str]], int]


def _run(command: Sequence[str]) -> int:
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def _sanitizer() -> str:
    named = os.environ.get("SANITIZER", "compute-sanitizer")
    found = shutil.which(named) or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if found is None:
        sys.exit(f"{named} not found; install the CUDA toolkit or set SANITIZER to the path of compute-sanitizer")
    return found


def sanitize(sanitizer: str, tool: str, run: Run = _run) -> int:
    # Errors of the API are exceptions in torch, where they matter; libraries probe for features by others.
    watched = [sanitizer, "--tool", tool, "--error-exitcode", str(REPORTED), "--report-api-errors", "no"]
    watched += ["--target-processes", "all", sys.executable]
    if tool == "memcheck" and run([*watched, *STRAY]) != REPORTED:
        sys.stderr.write(
            "compute-sanitizer did not report a kernel that reads out of bounds: its silence says nothing\n"
        )
        return 1
    return run([*watched, *SUITE])


def _stray() -> None:
    """One of the kernels, given a tensor that is shorter than it says."""
    import torch

    from mhc_compile.kernels import aggregate

    # as_strided would refuse a storage that is too short: it shrinks behind the tensor's back.
    x, h_pre = torch.ones(64, 4, 256, device="cuda"), torch.ones(64, 4, device="cuda")
    x.untyped_storage().resize_(4096)
    aggregate.forward(x, h_pre)
    torch.cuda.synchronize()


if __name__ == "__main__":
    import torch

    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    if "--stray" in sys.argv:
        _stray()
    elif "--stray-child" in sys.argv:
        subprocess.run([sys.executable, "-m", "tests.kernels.sanitize", "--stray"], cwd=ROOT)
    else:
        sys.exit(sanitize(_sanitizer(), sys.argv[1] if len(sys.argv) > 1 else "memcheck"))
