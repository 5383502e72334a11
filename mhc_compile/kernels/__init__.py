"""Triton kernels, one module per operator, each with a `forward` and a `backward` host function.

The arguments and results are those of the registered operators, with the flat scalars grouped into `forms`
objects. Results are bitwise deterministic, and a token's result depends on no other token.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from mhc_compile.kernels import gpus

STREAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def products_are_exact() -> bool:
    """Whether products of float32 on a GPU keep its accuracy. A user may allow tf32, by either of torch's settings."""
    return torch.backends.cuda.matmul.fp32_precision in ("none", "ieee")


def communicates() -> bool:
    """Whether kernels of torch.distributed may run at the same time as ours."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def supports(*tensors: torch.Tensor | None) -> bool:
    """Whether the kernels can take these tensors: 16 or 32 bit floats, on CUDA or interpreted by Triton."""
    present = [t for t in tensors if t is not None]
    if not present or any(t.dtype not in STREAM_DTYPES for t in present) or not _has_triton():
        return False
    if all(t.is_cuda for t in present):
        return gpus.runs_kernels(present[0].device.index)
    return os.environ.get("TRITON_INTERPRET") == "1" and all(t.device.type == "cpu" for t in present)
