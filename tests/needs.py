"""What some tests need of torch: they are skipped without it, and say what is missing."""

from __future__ import annotations

import pytest
import torch

from mhc_compile import compat


def torch_at_least(version: str, why: str) -> None:
    """For what an older torch does in another way."""
    if compat.versions.is_older_than(version):
        pytest.skip(f"torch {torch.__version__}: {why}")


def flattened_shards() -> None:
    """For eager projections of streams that are sharded over another dim than the first."""
    if not compat.flattens_shards():
        pytest.skip(
            f"torch {torch.__version__} cannot flatten a DTensor that is sharded over another dim than its first: "
            "torch.distributed.tensor._ops._view_ops has no _ViewShardingPropagator"
        )
