"""Lowers a training step of one sublayer for a GPU that need not exist, and compiles the kernels that Inductor writes.

Run as `python -m tests.passes.compile_lowered TOKENS ...`, where 0 is any number of tokens; prints one JSON object with
Inductor's wrapper, and one for each kernel with the instructions that decide its results, as Inductor's code compiles
and as a launch does.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor, fx
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import mhc_compile.ops  # noqa: F401  (registers the operators)
from mhc_compile import compat, passes
from mhc_compile.kernels import boundary_pass, embedded, gpus
from mhc_compile.kernels.common import FUSED
from tests.kernels.compile_kernels import _source
from tests.passes.lowering import any_number
from tests.passes.test_lower_mxfp8 import floor

TARGET = GPUTarget("cuda", 90, 32)
PROPERTIES = {
    "type": "cuda", "index": 0, "multi_processor_count": 132, "cc": 90, "major": 9, "regs_per_multiprocessor": 1 << 16,
    "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024, "warp_size": 32,
}  # fmt: skip


class Driver:
    """Says what GPU there is, and nothing else."""

    @staticmethod
    def get_current_target() -> GPUTarget:
        return TARGET


def pretend() -> None:
    """Let everything believe in the GPU, and leave out what Inductor does not compile, which is in Gluon."""
    boundary_pass.fits = lambda x, phi: False
    gpus.runs_kernels = lambda index: True  # type: ignore[assignment]
    triton.runtime.driver.set_active(Driver())
    DeviceProperties.create = classmethod(lambda kind, device: kind(**PROPERTIES))  # type: ignore[method-assign,assignment]
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *given: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *given: type("Properties", (), PROPERTIES | {"minor": 0})  # type: ignore[assignment]


def step(x: Tensor, f: Tensor, layer_bias: Tensor, phi: Tensor, scale: Tensor, bias: Tensor) -> list[Tensor]:
    """With a bias, without which the combine's backward is in Gluon, and another read whose result is quantized."""
    mhc = torch.ops.mhc
    u, post, res, h, ms = mhc.generate_mix_and_aggregate(x, phi, scale, bias)
    y = mhc.expand_combine(f, layer_bias, post, x, res)
    d = mhc.expand_combine_backward(y, f, layer_bias, post, x, res, [True] * 5)
    saved = (x, phi, scale, bias, None, h, ms, [True, True, True, True, False])
    v = mhc.generate_mix_and_aggregate(x, phi, scale, bias, input_norm_eps=1e-6)[0]
    return [u, y, *d, *mhc.generate_mix_and_aggregate_backward(u, d[2], d[4], None, None, *saved), *floor(v)]


def generate(tokens: int) -> tuple[str, dict[str, Any]]:
    """Inductor's code, and for each kernel what a launch would compile and with which options."""
    launched: dict[str, Any] = {}
    record = embedded.record

    def noting(kernel: Any, grid: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        special = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
        values = {name: compat.hint(value) for name, value in zip(kernel.arg_names, args, strict=False)} | options
        launched.setdefault(_name(kernel.__name__, values), (_source(kernel, values), special))
        record(kernel, grid, args, options)

    embedded.record = noting
    shape_env, n, width = ShapeEnv(), 4, 1280
    mode, count = FakeTensorMode(shape_env=shape_env), tokens or any_number(shape_env)
    shapes = {
        "x": (count, n, width), "f": (count, width), "layer_bias": (width,), "phi": (24, n * width), "scale": (3,),
        "bias": (24,),
    }  # fmt: skip
    with mode:
        values = [
            torch.empty(shape, device="cuda:0", dtype=torch.bfloat16 if name in "xf" else torch.float32)
            for name, shape in shapes.items()
        ]
        module: fx.GraphModule = make_fx(step)(*values)
    passes.lower(module.graph, mxfp8=True)
    embedded.record = record
    module.recompile()
    graph = GraphLowering(module, example_inputs=values, shape_env=shape_env)
    with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()), V.set_graph_handler(graph):
        graph.run(*values)
        code, _ = graph.codegen()
    return str(getattr(code, "value", code)), launched


def _name(kernel: str, constants: dict[str, Any]) -> str:
    return f"{kernel}, {constants['SCALING']}" if constants.get("SCALING") else kernel


def decisive(ptx: str) -> Counter[str]:
    """How often each instruction occurs that computes with floats, exchanges them or reads and writes memory."""
    names = re.findall(r"^\s+(?:@\S+ )?([\w.]+)", ptx, re.MULTILINE)
    return Counter(name for name in names if re.search(r"f32|bf16|global|shfl|mma", name))


def kernels_of(code: str, folder: Path) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """Each kernel of Inductor's code: its name, the function, and what Inductor compiles it with."""
    found: list[Any] = []

    def note(configs: list[dict[str, Any]], triton_meta: dict[str, Any], **rest: Any) -> Any:
        return lambda function: found.append((function, triton_meta, configs[0])) or function

    triton_heuristics.user_autotune = note
    for name, body in re.findall(r"(\w+) = async_compile.triton\('\w+', '''(.*?)''', device_str", code, re.DOTALL):
        path = folder / f"{name}.py"
        path.write_text(body)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        yield name.rpartition("_")[0], *found.pop()


if __name__ == "__main__":
    pretend()
    for count in map(int, sys.argv[1:]):
        text, sources = generate(count)
        sys.stdout.write(json.dumps({"tokens": count, "wrapper": text[text.index("def call(") :]}) + "\n")
        with tempfile.TemporaryDirectory() as place:
            for kernel, function, meta, options in kernels_of(text, Path(place)):
                source = ASTSource(function, meta["signature"], meta["constants"], meta["configs"][0])
                kernel = _name(kernel, meta["constants"])
                ours = triton.compile(source, target=TARGET, options=FUSED | options)
                plain = triton.compile(sources[kernel][0], target=TARGET, options=FUSED | sources[kernel][1])
                row = {"embedded": decisive(ours.asm["ptx"]), "launched": decisive(plain.asm["ptx"])}
                sys.stdout.write(json.dumps({"tokens": count, "kernel": kernel} | row) + "\n")
