"""Hyper-connections among the parallelisms of torch.distributed.

- `replicate`: their parameters beside FSDP2, whole on every rank, in a dtype of their own.
- `HyperConnectionParallel`: their streams as DTensors, in a plan of `parallelize_module`.
"""

from mhc_compile.distributed.replicas import replicate
from mhc_compile.distributed.style import HyperConnectionParallel

__all__ = ["HyperConnectionParallel", "replicate"]
