"""Jobs of several ranks, each of which prints a line of JSON for every scenario.

The ranks of a job compute on a CPU and communicate by gloo, or each has a GPU and they communicate by NCCL.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]

# What is offloaded to the CPU is summed there.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
# How much longer a job may take on GPUs: Triton compiles the kernels of all operators first, on each rank.
LONGER = {"cpu": 1, "cuda": 2}


class Seen(dict[str, list[dict[str, Any]]]):
    """What each rank saw, by scenario. A test that looks at a scenario that raised an error fails."""

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        ranks = super().__getitem__(name)
        for rank in ranks:
            assert "error" not in rank, rank["error"]
        return ranks


Scenarios = Mapping[str, Callable[[], dict[str, Any]]]


def environment_of(device: str, ranks: int) -> dict[str, str]:
    """The environment of a job's processes, which see no GPU on a CPU. It skips the test if there are too few GPUs."""
    if device == "cuda" and torch.cuda.device_count() < ranks:
        import pytest  # not at the top: ranks do without it

        pytest.skip(f"needs {ranks} GPUs, and torch sees {torch.cuda.device_count()}")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"} | hidden


def run_job(module: str, folder: Path, ranks: int, *scenarios: str, seconds: int = 180, device: str = "cpu") -> Seen:
    """What each rank saw in each scenario; a job that hangs fails the test. Each number of ranks has its store.

    device: "cpu" or "cuda", the kind that ranks compute on; each rank has a GPU of its own.
    """
    environment = environment_of(device, ranks) | {
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
    }
    store = str(folder / f"store of {ranks}")
    jobs = [
        subprocess.Popen(
            [sys.executable, "-m", module, device, str(rank), str(ranks), store, *scenarios],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [job.communicate(timeout=seconds * LONGER[device]) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    for job, (_, errors) in zip(jobs, outputs, strict=True):
        assert job.returncode == 0, errors[-3000:]
    # Libraries print dicts of Python's, with single quotes.
    seen = [[json.loads(line) for line in out.splitlines() if line.startswith('{"')] for out, _ in outputs]
    return Seen({name: [of_rank[i] for of_rank in seen] for i, name in enumerate(scenarios)})


_kind = ["cpu"]

Value = TypeVar("Value", Tensor, nn.Module)


def device() -> str:
    """The kind of device that this rank computes on; "cpu" in a process that is no rank of a job."""
    return _kind[0]


def here(value: Value) -> Value:
    """A tensor or a module on the device of this rank. It is drawn on the CPU: jobs on CPUs and GPUs compute alike."""
    return value.to(device())


def run_rank(scenarios: Callable[[int, Path], Scenarios], seconds: int = 60) -> None:
    """What a module does that `run_job` starts: it prints a line of JSON for each scenario that is asked for.

    scenarios: makes them once the job has begun, from the number of ranks and a folder that all ranks share.
    seconds: how long a rank waits for others.
    """
    kind, rank, ranks, file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    importlib.import_module("mhc_compile.entry")  # backend="mhc" in a checkout that is not installed
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    _kind[:] = [kind]
    store, timeout = dist.FileStore(str(file), ranks), timedelta(seconds=seconds * LONGER[kind])
    dist.init_process_group(BACKENDS[kind], store=store, rank=rank, world_size=ranks, timeout=timeout)
    known = scenarios(ranks, file.parent)
    for name in sys.argv[5:]:
        try:
            seen = known[name]()
        except Exception:  # the tests that look at this scenario fail with it, and the others do not
            seen = {"error": traceback.format_exc()[-3000:]}
        sys.stdout.write(json.dumps(seen) + "\n")
        sys.stdout.flush()
        dist.barrier()
    dist.destroy_process_group()
    # Not by the end of Python: a thread of torch that was at work then aborted a process that had said everything.
    os._exit(0)
