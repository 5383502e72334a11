"""The job that a process is a rank of."""

from __future__ import annotations

from typing import Any

import torch


def job_store() -> Any:
    """The store that all ranks of this job share, for this project's keys; None for a process that is alone.

    A process that only imitates the others, by torch's "fake" backend, is alone.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() < 2:
        return None
    if distributed.get_backend() == "fake":
        return None
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    return PrefixStore("mhc_compile", _get_default_store())


def rank() -> int:
    """The number of this process in its job; 0 for one that is alone."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def ranks() -> int:
    """How many processes this job has."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
