"""Jobs of several ranks, each of which prints a line of JSON for every scenario."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]

Seen = dict[str, list[dict[str, Any]]]
Scenarios = Mapping[str, Callable[[], dict[str, Any]]]


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


def run_rank(scenarios: Callable[[int, Path], Scenarios], seconds: int = 60) -> None:
    """What a module does that `run_job` starts: it prints a line of JSON for each scenario that is asked for.

    scenarios: makes them once the job has begun, from the number of ranks and a folder that all ranks share.
    seconds: how long a rank waits for others.
    """
    rank, ranks, file = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(str(file), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=seconds))
    known = scenarios(ranks, file.parent)
    for name in sys.argv[4:]:
        sys.stdout.write(json.dumps(known[name]()) + "\n")
        sys.stdout.flush()
        dist.barrier()
    dist.destroy_process_group()
