"""Decoder layers of DeepSeek-V4 at its real width, on all GPUs of a job: parameters divided by FSDP2.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.divided_layers --compile mhc --out layers

Each layer is compiled by itself, as is usual with FSDP2. Parameters are float32, and gathered as bfloat16; those of
hyper-connections stay float32, whole in each process. Each process has tokens of its own. Outputs and gradients are
compared with float64 before anything is timed. `python -m benchmarks.scaling --parts layers` runs it for all ways to
compile.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import mhc_compile.backend  # makes "mhc" known where the package is run from its sources
import mhc_compile.kernels
from benchmarks.cases import Block, Case, Values, errors
from benchmarks.measure import release
from mhc_compile.distributed import replicate

# How a step saves memory: the streams of a boundary are computed again, or each layer from its input.
RECOMPUTED: dict[str, dict[str, Any]] = {"nothing": {}, "streams": {"mhc.recompute": 2}, "layers": {}}
WARM, TIMED, PROFILED = 3, 15, 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compile", choices=("eager", "inductor", "mhc"), default="mhc", help="(default %(default)s)")
    parser.add_argument("--variant", choices=("mhc", "plain"), default="mhc", help="plain: residual connections")
    parser.add_argument("--parallel", default="fsdp", help="how processes divide the work: as FSDP2 does, nothing else")
    parser.add_argument("--layers", type=int, default=2, help="(default %(default)s)")
    parser.add_argument("--tokens", type=int, default=2048, help="of each process (default %(default)s)")
    parser.add_argument("--width", type=int, default=4096, help="C (default %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder of summary.json")
    return parser.parse_args()


class Divided:
    """The layers of a process, and the step that is measured."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        plain = options.variant == "plain"
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        case = Case("plain" if plain else "block", options.tokens, options.width, depth=2 * options.layers, dtype=dtype)
        # The same weights in every process, and other tokens.
        work = Block(case, device)
        work.module.float()
        torch.manual_seed(1 + dist.get_rank())
        module: Any = work.module
        (x,) = work.arguments
        with torch.no_grad(), device:
            x.normal_()
            module.words.copy_(work.words())
            work.upstream.normal_()
        self.module, self.model, self.x, self.upstream = module, module.model, x, work.upstream
        self.compiled_by = options.compile
        # Not on the device, whose memory is measured.
        self.reference = {name: value.cpu() for name, value in _of_all(work.reference()).items()}
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        whole = set() if plain else replicate(module, mesh, lambda name, parameter: "_hc." in name)
        policy = MixedPrecisionPolicy(param_dtype=case.torch_dtype, reduce_dtype=torch.float32)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=whole)
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=whole)

    def compile(self, recomputed: str) -> None:
        release()
        if recomputed == "layers":
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.compiled_by != "eager":
            for layer in self.model.layers:
                layer.compile(backend=self.compiled_by, options=RECOMPUTED[recomputed])

    def step(self) -> Tensor:
        self.x.grad = None
        self.module.zero_grad(set_to_none=True)
        output: Tensor = self.module(self.x)
        torch.autograd.backward(output, self.upstream)
        return output

    def errors(self) -> dict[str, float]:
        values = {"output": self.step().detach().cpu()}
        gradients = {"x": self.x.grad} | {name: p.grad for name, p in self.module.named_parameters()}
        for name, gradient in gradients.items():
            if gradient is not None:
                values[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).cpu()
        return errors(values, self.reference)

    def measured(self, recomputed: str) -> dict[str, Any]:
        """Milliseconds of a step, of this process's kernels by kind, bytes, and errors relative to float64."""
        self.compile(recomputed)
        found: dict[str, Any] = {"recomputed": recomputed, "errors": self.errors()}
        for _ in range(WARM):
            self.step()
        found["step_ms"] = statistics.median(self._clocked() for _ in range(TIMED))
        if self.x.is_cuda:
            self.module.zero_grad(set_to_none=True)
            self.x.grad = None
            found["resident_bytes"] = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
            found["kernels_ms"] = self._kernels()
        return found

    def _clocked(self) -> float:
        _wait()
        begin = time.perf_counter()
        self.step()
        _wait()
        return 1000 * (time.perf_counter() - begin)

    def _kernels(self) -> dict[str, float]:
        """Those that run at the same time count each. Of communication, the time includes waiting for others."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(PROFILED):
                self.step()
            _wait()
        spent = dict.fromkeys(("mhc", "communication", "others"), 0.0)
        ours = own_kernels()
        for event in profile.key_averages():
            kind = "mhc" if ours.match(event.key) else "communication" if event.key.startswith("nccl") else "others"
            spent[kind] += event.self_device_time_total / 1000 / PROFILED
        return spent


def own_kernels() -> re.Pattern[str]:
    """Matches the names of this package's kernels, which Inductor gives a number."""
    from triton.runtime import JITFunction

    modules = (module.name for module in pkgutil.iter_modules(mhc_compile.kernels.__path__, "mhc_compile.kernels."))
    members = (member for module in modules for member in vars(importlib.import_module(module)).values())
    names = {member.fn.__name__ for member in members if isinstance(member, JITFunction)}
    return re.compile(rf"({'|'.join(sorted(names))})(_\d+)?$")


def _of_all(values: Values) -> Values:
    """Gradients of parameters as FSDP2 has them: the mean over all processes."""
    for name, value in values.items():
        if name not in ("output", "x"):
            dist.all_reduce(value)
            value /= dist.get_world_size()
    return values


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def main() -> None:
    options = arguments()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    layers = Divided(options, device)
    ways = [way for way in RECOMPUTED if way != "streams" or (options.compile, options.variant) == ("mhc", "mhc")]
    found = [layers.measured(way) for way in ways]
    if dist.get_rank() == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        said = {"processes": dist.get_world_size(), "tokens": options.tokens, "width": options.width}
        said |= {"layers": options.layers, "measured": found}
        if options.compile == "mhc" and options.variant == "mhc":
            report = mhc_compile.report()
            said |= {"rewritten": len(report.rewritten), "found": report.found}
        (options.out / "summary.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
