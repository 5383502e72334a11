"""Compiles every kernel that the host functions launch, for a GPU that need not exist, and reports its resources.

Run as `python -m tests.kernels.compile_kernels 90 [case ...]` without TRITON_INTERPRET; prints one JSON object per
kernel. The host functions run on CPU tensors of the real dtypes and strides, with the launch replaced by a recorder.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction

from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.kernels import (
    aggregate,
    aggregate_and_norm,
    boundary_gradients,
    boundary_pass,
    combine_gradients,
    combine_project,
    expand_combine,
    expand_combine_and_read,
    generate_mix,
    generate_mix_and_aggregate,
    gpus,
    head,
    input_norm,
    mix,
    mix_streams,
    products,
    projection,
    scale,
    shifted_boundary,
    sinkhorn,
    streamed_products,
    streamed_rows,
)
from mhc_compile.kernels.common import FUSED

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64"}
TYPES |= {torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv"}
# Kernels for which a GPU needs `Gpu.streams_once`.
STREAMS_ONCE = (
    "combine_project_kernel", "boundary_pass_kernel", "boundary_rest_kernel", "streamed_products_kernel",
    "project_of_rows_kernel", "dx_of_rows_kernel", "dphi_of_rows_kernel",
)  # fmt: skip


def _calls(n: int, width: int, tokens: int, dtype: torch.dtype) -> None:
    """Every forward and backward once."""
    rows = n * n + 2 * n
    x = torch.empty(tokens, n, width, dtype=dtype)
    phi, bias = torch.empty(rows, n * width), torch.empty(rows)
    alpha, norm = torch.empty(3), torch.empty(n * width)
    forms: dict[str, Any] = {"rms": Rms(), "gates": Gates(), "sinkhorn": Sinkhorn()}
    out, post, res, h, ms = generate_mix_and_aggregate.forward(x, phi, alpha, bias, norm, **forms)
    saved = x, phi, alpha, bias, norm, h, ms
    generate_mix_and_aggregate.backward(out, post, res, None, None, *saved, [True] * 5, x, **forms)
    generate_mix.forward(x, phi, alpha, bias, norm, **forms)
    args = x, phi[:n], alpha[:1], bias[:n], norm
    out, h, ms = head.forward(*args, rms=Rms(), pre_eps=0.0)
    head.backward(out, None, None, *args, h, ms, [True] * 5, rms=Rms(), pre_eps=0.0)
    f, layer_bias = torch.empty(tokens, width, dtype=dtype), torch.empty(width)
    expand_combine.forward(f, layer_bias, post, x, res)
    expand_combine.backward(x, f, layer_bias, post, x, res, [True] * 5)
    combine = f, layer_bias, post, x, res
    expand_combine_and_read.forward(*combine, post)
    expand_combine_and_read.backward(x, f, None, None, *combine, post, None, None, x, [True] * 6 + [False] * 2)
    h, ms = projection.forward(x, phi, norm)
    projection.backward(h, ms, x, phi, norm, [True] * 3)
    gates = {"rms": Rms(), "gates": Gates()}
    pre, post, logits = scale.forward(h, ms, alpha, bias, n, **gates)
    scale.backward(pre, post, logits, h, ms, alpha, bias, n, [True] * 4, **gates)
    sinkhorn.backward(sinkhorn.forward(logits, sinkhorn=Sinkhorn()), logits, sinkhorn=Sinkhorn())
    aggregate.backward(aggregate.forward(x, pre), x, pre, [True] * 2)
    mix_streams.backward(mix_streams.forward(x, res), x, res, [True] * 2, x)
    shifted = f, layer_bias, post, x, res, pre, phi, alpha, bias, norm
    shifted_boundary.forward(*shifted, **forms)
    shifted_boundary.backward(x, f, pre, post, res, None, None, *shifted, x, h, ms, [True] * 10, **forms)
    if dtype != torch.bfloat16:
        return
    dh = products.dh_parts(x, rows)
    if n <= 8:
        combine_gradients.backward(x, f, x, f, post, x, res)
    if n == 8:
        streamed_products.multiply(x, f, x, phi, norm, dh, ms, pre.t().contiguous(), x, True)
    if n <= 4:
        combine_project.forward(x, phi, norm, (f, post, res, x))
        combine_project.forward(x, phi, norm, (f, post, res, x), (pre, f))
        combine_project.forward(x, phi, norm)
        boundary_gradients.backward(x, f, x, f, x, f, x, phi, norm, dh, ms, pre.t().contiguous(), post, res)
        # Of each stream alone.
        projection.collect(combine_project.forward(x, phi, norm, (f, post, res, x), (pre, f), True), x, rows, True)
        dh, each = projection.spread(torch.empty(tokens, n, n + 2), torch.empty(tokens, n), x, rows, True)
        boundary_gradients.backward(x, f, x, f, x, f, x, phi, norm, dh, each, pre.t().contiguous(), post, res)


def _few(n: int, width: int, dtype: torch.dtype) -> None:
    """One token on a GPU, whose processors are too many for it: partial sums are stored one by one."""
    with mock.patch.object(gpus, "processors", return_value=132):
        _calls(n, width, 1, dtype)


def _some(width: int, tokens: int) -> None:
    """A projection of some thousand tokens on Hopper, which would not be work for all processors in large tiles."""
    if not gpus.of(torch.device("cpu")).same_bits_in_small_tiles:
        return
    with mock.patch.object(gpus, "processors", return_value=132):
        for n in (4, 8):
            projection.forward(
                torch.empty(tokens, n, width, dtype=torch.bfloat16), torch.empty(n * n + 2 * n, n * width)
            )


def _pass(width: int, tokens: int) -> None:
    """The kernel whose programs, as many as a GPU runs at once, work together, and the one for what these leave.

    For usual rows of phi and gates, few and odd ones, and the most.
    """
    forms: dict[str, Any] = {"rms": Rms(), "gates": Gates(), "sinkhorn": Sinkhorn()}
    for n, rows, gates in ((4, 24, 24), (2, 8, 8), (4, 10, 8), (4, 20, 8), (2, 24, 4)):
        x, f = torch.empty(tokens, n, width, dtype=torch.bfloat16), torch.empty(tokens, width, dtype=torch.bfloat16)
        parameters = torch.empty(rows, n * width), torch.empty(3), torch.empty(gates), None
        post, res = torch.empty(tokens, n), torch.empty(tokens, n, n)
        made = mix.empty_gates(x, parameters[0], parameters[2])
        for drawn in (False, True):
            with (
                mock.patch.object(gpus, "processors", return_value=132),
                mock.patch.object(boundary_pass, "communicates", return_value=drawn),
            ):
                boundary_pass.forward(x, *parameters, f, made, (f, post, res, x), **forms)
                boundary_pass.forward(x, *parameters, f, made, **forms)


def _more_rows(n: int, width: int, tokens: int) -> None:
    """Rows of phi without gates."""
    forms: dict[str, Any] = {"rms": Rms(), "gates": Gates(), "sinkhorn": Sinkhorn()}
    x = torch.empty(tokens, n, width, dtype=torch.bfloat16)
    parameters = torch.empty(n * (n + 4), n * width), torch.empty(2), torch.empty(2 * n), None
    _, post, _, h, ms = out = generate_mix_and_aggregate.forward(x, *parameters, **forms)
    saved = x, *parameters, h, ms, [True] * 4 + [False], x
    generate_mix_and_aggregate.backward(out[0], post, None, h, ms, *saved, **forms)


def _tf32(n: int, width: int, tokens: int) -> None:
    """The dots of float32 streams below the highest precision, whose operands are rounded."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        x, phi = torch.empty(tokens, n, width), torch.empty(n * n + 2 * n, n * width)
        h, ms = projection.forward(x, phi)
        projection.backward(h, ms, x, phi, None, [True, True, False])
    finally:
        torch.set_float32_matmul_precision(before)


def _bf16_gates(n: int, width: int, tokens: int) -> None:
    """Gates that a program has rounded to the streams' dtype, in the kernels that take no strides for them.

    Of the gradients also with an odd number of rows, of which no 16 bytes would be whole.
    """
    rows = n * n + 2 * n
    x, f = torch.empty(tokens, n, width, dtype=torch.bfloat16), torch.empty(tokens, width, dtype=torch.bfloat16)
    post, res = torch.empty(tokens, n, dtype=torch.bfloat16), torch.empty(tokens, n, n, dtype=torch.bfloat16)
    phi, ms, pre = torch.empty(rows, n * width), torch.empty(tokens), torch.empty(n, tokens)
    combine_project.forward(x, phi, None, (f, post, res, x))
    combine_gradients.backward(x, f, x, f, post, x, res)
    for count in (rows, 2 * n + 1):
        dh = products.dh_parts(x, count)
        boundary_gradients.backward(x, f, x, f, x, f, x, phi[:count], None, dh, ms, pre, post, res)


def _eight(width: int, tokens: int) -> None:
    """What 8 streams have kernels of their own for, or the most registers."""
    rows = 80
    x, f = torch.empty(tokens, 8, width, dtype=torch.bfloat16), torch.empty(tokens, width, dtype=torch.bfloat16)
    post, res = torch.empty(tokens, 8), torch.empty(tokens, 8, 8)
    phi, ms, pre = torch.empty(rows, 8 * width), torch.empty(tokens), torch.empty(8, tokens)
    dh = products.dh_parts(x, rows)
    combine_gradients.backward(x, f, x, f, post, x, res)
    mix_streams.backward(mix_streams.forward(x, res), x, res, [True] * 2, x)
    streamed_products.multiply(x, f, x, phi, None, dh, ms, pre, x, True)


def _sixteen(width: int, tokens: int) -> None:
    """What more than 8 streams, and more than 128 rows of phi, have kernels of their own for, and their gates."""
    rows = 16 * 18
    x, f = torch.empty(tokens, 16, width, dtype=torch.bfloat16), torch.empty(tokens, width, dtype=torch.bfloat16)
    post, res = torch.empty(tokens, 16), torch.empty(tokens, 16, 16)
    expand_combine.forward(f, None, post, x, res)
    expand_combine.forward(f, None, post, x, res, read=(post, f))
    expand_combine.backward(x, f, None, post, x, res, [True, False, True, True, True], x)
    dh, ms, pre = products.dh_parts(x, rows), torch.empty(tokens), torch.empty(16, tokens)
    phi = torch.empty(rows, 16 * width)
    products.backward_products(x, f, phi, None, dh, ms, pre, None, (True, True, False, False, False), x, x)
    streamed_rows.gradient_of_streams(x, f, x, phi, torch.empty(16 * width), dh, ms, pre, x)
    streamed_rows.partial_dphi(x, dh, rows)
    h, squares = torch.empty(4, rows, tokens), torch.empty(4, tokens)
    streamed_rows.project(x, phi, None, h, squares, (512, 8, 128, 32))
    forms: dict[str, Any] = {"rms": Rms(), "gates": Gates(), "sinkhorn": Sinkhorn()}
    mix.forward_mix(x, phi, torch.empty(3), torch.empty(rows), None, **forms, aggregate=True)


def _norm(n: int, width: int, tokens: int, dtype: torch.dtype) -> None:
    """The kernels that take in the norm after the aggregate."""
    rows = n * n + 2 * n
    x, phi = torch.empty(tokens, n, width, dtype=dtype), torch.empty(rows, n * width)
    alpha, bias, weight = torch.empty(3), torch.empty(rows), torch.empty(width)
    forms: dict[str, Any] = {"rms": Rms(), "gates": Gates(), "sinkhorn": Sinkhorn(), "input_norm_eps": 1e-6}
    out, post, res, h, ms = generate_mix_and_aggregate.forward(x, phi, alpha, bias, None, weight, **forms)
    saved = x, phi, alpha, bias, None, h, ms, [True, True, True, True, False, True], x, weight
    generate_mix_and_aggregate.backward(out, post, res, None, None, *saved, **forms)
    aggregate_and_norm.forward(x, post, weight, input_norm_eps=1e-6)
    aggregate_and_norm.backward(out, x, post, [True] * 3, weight, input_norm_eps=1e-6)


def _mxfp8(n: int, width: int, tokens: int) -> None:
    """The read with a norm, in float8, where the GPU has it."""
    if not gpus.of(torch.device("cpu")).float8:
        return
    rows = n * n + 2 * n
    x, phi = torch.empty(tokens, n, width, dtype=torch.bfloat16), torch.empty(rows, n * width)
    alpha, bias, weight = torch.empty(3), torch.empty(rows), torch.empty(width)
    forms: dict[str, Any] = {"rms": Rms(), "gates": Gates(), "sinkhorn": Sinkhorn(), "input_norm_eps": 1e-6}
    for scaling in ("floor", "rceil"):
        generate_mix_and_aggregate.forward(x, phi, alpha, bias, None, weight, **forms, scaling=scaling)


def _narrow(n: int, width: int, tokens: int) -> None:
    """A norm of rows so short that a thread has one of their numbers."""
    rows = n * n + 2 * n
    x, d_out = torch.empty(tokens, n, width), torch.empty(tokens, width)
    logits = torch.empty(tokens, rows), torch.empty(tokens), torch.empty(3), torch.empty(rows)
    norm = input_norm.InputNorm(torch.empty(width), 1e-6)
    aggregate_and_norm.forward(x, logits[0][:, :n], norm.weight, input_norm_eps=1e-6)
    made_of = input_norm.GateLogits(*logits, Rms(), Gates())
    input_norm.norm_backward(d_out, x, norm, made_of, torch.empty(tokens, n), (n, 1), True)


def _turned(n: int, width: int, tokens: int) -> None:
    """The gradients of a projection whose phi lies as [n C, K] in memory: a thread has one of a column's numbers."""
    x, rows = torch.empty(tokens, n, width, dtype=torch.bfloat16), n * n + 2 * n
    phi = torch.empty(n * width, rows).T
    h, ms = projection.forward(x, phi, torch.empty(n * width))
    projection.backward(h, ms, x, phi, torch.empty(n * width), [True] * 3)


def _starts() -> None:
    """Sinkhorns that begin with another exponential than the one they are computed from, or have no eps."""
    logits = torch.empty(512, 4, 4)
    without_eps = Sinkhorn(40, "plain_exp", "rows", 0.0, 0.0)
    for form in (Sinkhorn(39, "plain_exp"), Sinkhorn(40, "global_exp", "rows", clamp=True), without_eps):
        sinkhorn.backward(sinkhorn.forward(logits, sinkhorn=form), logits, sinkhorn=form)


CASES: dict[str, Callable[[], None]] = {
    "bf16": lambda: _calls(4, 4096, 512, torch.bfloat16),
    "few": lambda: _few(4, 4096, torch.bfloat16),
    "some": lambda: _some(4096, 2048),
    "pass": lambda: _pass(4096, 512),
    "more": lambda: _more_rows(4, 4096, 512),
    "tf32": lambda: _tf32(4, 4096, 512),
    "starts": _starts,
    "gates": lambda: _bf16_gates(4, 4096, 512),
    "eight": lambda: _eight(4096, 512),
    "sixteen": lambda: _sixteen(4096, 512),
    "norm": lambda: _norm(4, 4096, 512, torch.bfloat16),
    "mxfp8": lambda: _mxfp8(4, 4096, 512),
    "narrow": lambda: _narrow(2, 7, 512),
    "turned": lambda: _turned(2, 64, 512),
    "norm, wide": lambda: _norm(4, 16384, 512, torch.bfloat16),
    "norm, f32": lambda: _norm(4, 8192, 512, torch.float32),
    "norm, many": lambda: _norm(16, 1280, 512, torch.bfloat16),
    "f32": lambda: _calls(4, 4096, 512, torch.float32),
    "wide": lambda: _calls(8, 4096, 512, torch.bfloat16),
    "many": lambda: _calls(16, 1280, 512, torch.bfloat16),
}


def _recorded(case: Callable[[], None]) -> Iterator[tuple[JITFunction[Any], dict[str, Any], dict[str, Any]]]:
    launches: list[tuple[JITFunction[Any], dict[str, Any], dict[str, Any]]] = []

    def record(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {key: kwargs.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in kwargs}
        kwargs.pop("launch_cooperative_grid", None)  # how it is launched, not what it is
        names = [p.name for p in kernel.params]
        launches.append((kernel, dict(zip(names, args, strict=False)) | kwargs, options))

    original = JITFunction.run
    JITFunction.run = record
    try:
        case()
    finally:
        JITFunction.run = original
    yield from launches


def _source(kernel: JITFunction[Any], bound: dict[str, Any]) -> ASTSource:
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, bound[parameter.name]
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and specialised):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if specialised and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return kind(kernel, signature, constants, attributes)


def _tool(name: str, cubin: bytes, *options: str) -> str:
    """What a tool that comes with triton says about a kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(cubin)
        return subprocess.run([tool, *options, binary], capture_output=True, text=True, check=True).stdout


def _registers(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory that spills take) as the assembler reports them."""
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", _tool("cuobjdump", cubin, "-res-usage"))[-1]
    return int(registers), int(stack)


def _unrounded_sums(cubin: bytes) -> int:
    """How many fmas add what another thread has sent: that thread has its own product unrounded, and another sum."""
    sent: set[str] = set()
    found = 0
    for line in _tool("nvdisasm", cubin, "-c").splitlines():
        instruction = re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s+(.*?);", line)
        if instruction is None:
            if line.startswith(".L"):
                sent.clear()
            continue
        name, operands = instruction.groups()
        registers = [re.sub(r"[-|~\s]|\.reuse", "", operand) for operand in operands.split(",")]
        found += name.startswith("FFMA") and registers[-1] in sent
        if name.startswith("SHFL"):
            sent.add(registers[1])
        elif registers[0].removeprefix("R").isdigit():
            first, wide = int(registers[0][1:]), re.search(r"\.(64|128)\b", name)
            sent -= {f"R{first + more}" for more in range(int(wide[1]) // 32 if wide else 1)}
    return found


def _sums_of_rows(ttgir: str) -> list[str]:
    """The layouts in which rows of 1,024 columns or more are added up, which decide the order."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    found = re.findall(r"\}\) : \(tensor<\d+x(\d+)xf32, (#\w+)>", ttgir)
    return sorted({layouts[name] for columns, name in found if int(columns) >= 1024})


def compile_cases(arch: int, names: list[str]) -> Iterator[dict[str, Any]]:
    # On a CPU no host function takes a Gluon kernel. The cases call these themselves.
    gpu = replace(gpus.TABLE[arch], streams_once=False, gradients_once=False)
    gpus.of = lambda device: gpu  # type: ignore[assignment]
    seen: set[str] = set()
    for case in names:
        for kernel, bound, options in _recorded(CASES[case]):
            if kernel.__name__ in STREAMS_ONCE and not gpus.TABLE[arch].streams_once:
                continue
            source = _source(kernel, bound)
            key = source.hash() + str(options)
            if key in seen:
                continue
            seen.add(key)
            start = time.perf_counter()
            binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=FUSED | options)
            registers, stack = _registers(binary.asm["cubin"])
            yield {
                "case": case,
                "kernel": kernel.__name__,
                "registers": registers,
                "stack": stack,
                "shared": binary.metadata.shared,
                "warps": options["num_warps"],
                "unrounded": _unrounded_sums(binary.asm["cubin"]),
                "sums": _sums_of_rows(binary.asm["ttgir"]),
                "seconds": round(time.perf_counter() - start, 2),
                "mma": sorted(set(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", binary.asm["ptx"]))),
            }


if __name__ == "__main__":
    for row in compile_cases(int(sys.argv[1]), sys.argv[2:] or list(CASES)):
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
