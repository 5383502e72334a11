"""Jobs of several ranks, each of which prints a line of JSON for every scenario."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

Seen = dict[str, list[dict[str, Any]]]


def run_job(module: str, folder: Path, ranks: int, *scenarios: str, seconds: int = 180) -> Seen:
    """What each rank saw in each scenario; a job that hangs fails the test. Each number of ranks has its store."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
    }
    store = str(folder / f"store of {ranks}")
    jobs = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(ranks), store, *scenarios],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [job.communicate(timeout=seconds) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    for job, (_, errors) in zip(jobs, outputs, strict=True):
        assert job.returncode == 0, errors[-3000:]
    # Libraries print dicts of Python's, with single quotes.
    seen = [[json.loads(line) for line in out.splitlines() if line.startswith('{"')] for out, _ in outputs]
    return {name: [of_rank[i] for of_rank in seen] for i, name in enumerate(scenarios)}
