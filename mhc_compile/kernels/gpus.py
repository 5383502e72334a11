"""What the kernels use of each GPU: the one table by compute capability.

A new architecture is a line of `TABLE`, and a line of `LIMITS` and of `SPILLS` in tests/kernels/test_compiled.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

# Below it there is no multiplication of bf16 matrices, and operators run in plain torch.
LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Gpu:
    """What an architecture has. The defaults are what every GPU has that the kernels run on.

    streams_once: the Gluon kernels that read a boundary's streams once: `combine_project`, `boundary_pass`,
        `streamed_products`; and `streamed_rows`. They need wgmma, clusters and 227 KiB of shared memory in a block.
    gradients_once: those of its backward: `boundary_gradients`, `combine_gradients`. They need asynchronous copies and
        160 KiB of shared memory in a block.
    rows_of_phi: how many of them a program multiplies with bfloat16 streams. 128 need Hopper's shared memory.
    many_rows: whether the gradients of more of them take large tiles, which spill elsewhere.
    same_bits_in_small_tiles: whether tensor cores were seen to give tiles of 16 and 64 tokens the bits of 128. They use
        another instruction for them.
    float8: casts to float8_e4m3fn.
    """

    streams_once: bool = False
    gradients_once: bool = False
    rows_of_phi: int = 64
    many_rows: bool = False
    same_bits_in_small_tiles: bool = False
    float8: bool = False


TABLE = {
    80: Gpu(gradients_once=True),  # A100
    # H100, H200
    90: Gpu(
        streams_once=True,
        gradients_once=True,
        rows_of_phi=128,
        many_rows=True,
        same_bits_in_small_tiles=True,
        float8=True,
    ),
    100: Gpu(gradients_once=True, rows_of_phi=128, float8=True),  # B200
}
# Triton's interpreter computes as the measured GPU. It has no Gluon.
INTERPRETED = replace(TABLE[90], streams_once=False, gradients_once=False)


@functools.cache
def of(device: torch.device) -> Gpu:
    """What the GPU has that this device is. AMD's capabilities are other numbers."""
    if device.type != "cuda":
        return INTERPRETED
    major, minor = torch.cuda.get_device_capability(device)
    return Gpu() if torch.version.hip is not None else TABLE.get(10 * major + minor, Gpu())


@functools.cache
def runs_kernels(index: int) -> bool:
    """Whether a CUDA device multiplies matrices of bfloat16."""
    return torch.cuda.get_device_capability(index) >= LEAST_CAPABILITY


@functools.cache
def processors(device: torch.device) -> int:
    """The number of multiprocessors, by which grids are sized (never results); 1 where there is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def bytes_per_second(device: torch.device) -> float:
    """What the memory of the device moves at most, by its data sheet: 3.35e12 of an H100, 4.9e12 of an H200."""
    if device.type != "cuda":
        return 0.0
    properties = torch.cuda.get_device_properties(device)
    # Two transfers in a cycle, of bits.
    return float(2e3 * properties.memory_clock_rate * properties.memory_bus_width / 8)
