"""Every kernel compiles for the GPUs that are supported, without one: shared memory, registers and instructions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from mhc_compile.kernels import gpus
from tests.kernels.compile_kernels import STREAMS_ONCE

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent.parent
TRITON = ".".join(triton.__version__.split(".")[:2])
SNAPSHOT = Path(__file__).parent / f"resources_sm90_triton{TRITON}.txt"
# Registers are given out to a warp in steps of 256, which is 8 for each of its threads.
REGISTER_STEP = 8
# What a block may use of shared memory, in bytes, and the tensor core instruction, by compute capability.
LIMITS = {80: (163 << 10, "mma.sync"), 90: (227 << 10, "wgmma.mma_async"), 100: (227 << 10, "tcgen05.mma")}
# The most bytes of local memory a thread may use, by Triton and compute capability. sm_80 and sm_100 are unmeasured.
# On sm_90, Triton 3.8 stores two registers before the loop over tokens, and loads them after it. In a Sinkhorn's
# backward, it stores one before the loop over half-steps. `boundary_pass` with drawn tiles stores three before its
# loop, and loads two of them once a tile. Triton 3.6, with which it was measured, stores none. So does `boundary_rest`
# with few rows, which seldom has a tile. With a coefficient for each stream, `boundary_gradients` stores two more.
SPILLS: dict[str, dict[int, dict[str, int]]] = {
    "3.7": {
        80: {"products_kernel": 64, "boundary_gradients_kernel": 40},
        90: {"boundary_gradients_kernel": 16, "boundary_pass_kernel": 16, "boundary_rest_kernel": 16},
        100: {"combine_backward_kernel": 160, "boundary_gradients_kernel": 32},
    },
    "3.8": {
        80: {"products_kernel": 32, "boundary_gradients_kernel": 32},
        90: {
            "boundary_gradients_kernel": 16,
            "streamed_products_kernel": 8,
            "sinkhorn_backward_kernel": 8,
            "boundary_pass_kernel": 16,
            "boundary_rest_kernel": 16,
        },
        100: {"boundary_gradients_kernel": 24},
    },
}
# float32 and more streams take minutes.
CASES = (
    "bf16", "few", "some", "pass", "more", "tf32", "starts", "gates", "eight", "sixteen", "norm", "mxfp8", "narrow",
    "turned",
)  # fmt: skip


# The GPUs that are measured, and the others.
ARCHES = [90, *(pytest.param(arch, marks=pytest.mark.thorough) for arch in LIMITS if arch != 90)]


@pytest.fixture(scope="module", params=ARCHES)
def compiled(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_kernels", str(request.param), *CASES],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return request.param, [json.loads(line) for line in result.stdout.splitlines()]


def test_every_architecture_of_the_table_is_compiled() -> None:
    assert set(LIMITS) == set(gpus.TABLE)


def test_every_kernel_is_there(compiled: tuple[int, list[dict[str, Any]]]) -> None:
    names = {kernel["kernel"] for kernel in compiled[1]}
    assert names == {
        "split_kernel", "project_kernel", "mix_kernel", "aggregate_backward_kernel", "mix_backward_kernel",
        "products_kernel", "reduce_kernel", "combine_kernel", "combine_backward_kernel", "combine_reduce_kernel",
        "collect_kernel", "spread_kernel", "scale_kernel", "scale_backward_kernel", "affine_sum_kernel",
        "sinkhorn_kernel", "sinkhorn_backward_kernel", "aggregate_kernel", "gate_sum_kernel",
        "boundary_gradients_kernel", "combine_gradients_kernel", "input_norm_backward_kernel",
        "mix_streams_kernel", "mix_streams_backward_kernel", "aggregate_and_norm_kernel",
        "combine_many_kernel", "combine_many_backward_kernel", "many_rows_kernel", "tiles_kernel",
    } | (set(STREAMS_ONCE) if gpus.TABLE[compiled[0]].streams_once else set())  # fmt: skip


def test_resources(compiled: tuple[int, list[dict[str, Any]]]) -> None:
    arch, kernels = compiled
    shared, instruction = LIMITS[arch]
    if TRITON not in SPILLS:
        pytest.skip(f"another triton gives out registers otherwise: what may spill is known of {', '.join(SPILLS)}")
    spills = SPILLS[TRITON][arch]
    for kernel in kernels:
        name = kernel["kernel"]
        assert kernel["shared"] <= shared, kernel
        if name in ("project_kernel", "products_kernel"):
            # Hopper's own instruction takes 64 tokens, which few are not.
            small = (arch, name, kernel["case"], kernel["warps"]) == (90, "project_kernel", "few", 4)
            assert kernel["mma"] == ["mma.sync" if small else instruction], kernel
    found: dict[str, int] = {}
    for kernel in kernels:
        if kernel["stack"]:
            found[kernel["kernel"]] = max(found.get(kernel["kernel"], 0), kernel["stack"])
    more = {name: stack for name, stack in found.items() if stack > spills.get(name, 0)}
    assert not more, f"SPILLS[{TRITON!r}][{arch}] allows less than what spills: {found}"


def test_threads_find_the_same_sums(compiled: tuple[int, list[dict[str, Any]]]) -> None:
    """An fma of a thread's own product and of what another one has sent rounds what only that thread has."""
    assert not [kernel for kernel in compiled[1] if kernel["unrounded"]]


def test_quantized_rows_are_added_up_in_the_same_order(compiled: tuple[int, list[dict[str, Any]]]) -> None:
    """A norm has the same bits with MXFP8 and without."""
    arch, kernels = compiled
    if not gpus.TABLE[arch].float8:
        pytest.skip("this GPU has no float8")
    norm, *quantized = (k["sums"] for k in kernels if k["kernel"] == "mix_kernel" and k["case"] in ("norm", "mxfp8"))
    assert len(norm) == 1
    assert quantized == [norm, norm]


def test_exponentials_are_of_what_is_left() -> None:
    """A GPU's exponential of a large number is inexact: kernels take that of a rest, and shift its exponent."""
    calls = []
    for file in (ROOT / "mhc_compile" / "kernels").glob("*.py"):
        calls += re.findall(r"\b[gt]l\.(?:exp2?|sigmoid|softmax)\(.*", file.read_text(encoding="utf-8"))
    assert {call[: len("tl.exp(rest)")] for call in calls} == {"tl.exp(rest)"}


def test_two_programs_of_the_pass_share_a_processor(compiled: tuple[int, list[dict[str, Any]]]) -> None:
    """It would not start otherwise: all run at once."""
    for kernel in compiled[1]:
        if kernel["kernel"] == "boundary_pass_kernel":
            assert 2 * (kernel["shared"] + 1024) <= 228 << 10
            assert 2 * kernel["registers"] * 32 * 2 * kernel["warps"] <= 1 << 16


def test_few_tokens_need_no_other_kernels(compiled: tuple[int, list[dict[str, Any]]]) -> None:
    """A new token count compiles nothing, but for the two ways to split phi, the three to read partial sums, and the
    tiles for few tokens.
    """
    other = {kernel["kernel"] for kernel in compiled[1] if kernel["case"] == "few"}
    assert other <= {"project_kernel", "mix_kernel", "collect_kernel", "combine_project_kernel"}


def test_snapshot(compiled: tuple[int, list[dict[str, Any]]]) -> None:
    """Registers, spilled bytes and shared memory of each kernel on sm_90 are those of the file of this Triton.

    EXPECTTEST_ACCEPT=1 writes the file anew, for a change that is meant (and measured). Better counts fail as well:
    otherwise they could be lost again unseen.
    """
    arch, kernels = compiled
    if arch != 90:
        pytest.skip("the snapshot is of sm_90, where the kernels are measured")
    if TRITON not in SPILLS:
        pytest.skip(f"another triton gives out registers otherwise: there are snapshots of {', '.join(SPILLS)}")
    columns = ("case", "kernel", "warps", "registers", "stack", "shared")
    rows = [tuple(str(kernel[column]) for column in columns) for kernel in kernels]
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        SNAPSHOT.write_text("".join(" ".join(row) + "\n" for row in (columns, *rows)))
    expected = [tuple(line.split()) for line in SNAPSHOT.read_text().splitlines()[1:]]
    assert [row[:3] for row in rows] == [row[:3] for row in expected]
    different = [
        f"{' '.join(row)}, was {' '.join(before[3:])}"
        for row, before in zip(rows, expected, strict=True)
        if row[4:] != before[4:] or abs(int(row[3]) - int(before[3])) >= REGISTER_STEP
    ]
    assert not different
