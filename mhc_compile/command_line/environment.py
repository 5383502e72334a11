"""What a bug report needs: versions, compilers, GPUs, and settings."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import mhc_compile
from mhc_compile import compat, kernels

# Whose versions matter, as far as they are installed.
_LIBRARIES = ("accelerate", "numpy", "peft", "torchao", "transformers", "trl")
# Variables of the environment that change how torch, Triton or a C++ compiler work.
_PREFIXES = ("AOT_", "CUDA_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH", "TRITON_")
_NAMES = ("CC", "CXX")


def environment() -> dict[str, Any]:
    """Everything that `env` prints, as plain values."""
    settings = _settings()  # first: Inductor sets variables of its own when it is imported
    compiler = _compiler()
    gpus = _gpus()
    return {
        "mhc_compile": mhc_compile.__version__,
        "numerics": mhc_compile.__numerics__,
        "torch": {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "oldest_tested": compat.OLDEST,
            "newest_tested": compat.NEWEST_TESTED,
            "newer_than_tested": compat.is_newer_than_tested(),
        },
        "triton": _version("triton"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": {"name": processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "cpp_compiler": compiler,
        "gpus": gpus,
        "fast_path": {"cpu": _path_on_cpu(compiler), "cuda": _path_on_gpus(gpus)},
        "libraries": {name: found for name in _LIBRARIES if (found := _version(name)) is not None},
        "settings": settings,
    }


def processor() -> str:
    """The CPU's name, if the system has it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compiler() -> dict[str, str] | None:
    command = compat.cpp_compiler()
    if command is None:
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
        return {"command": command, "version": next(iter(told.splitlines()), "")}
    return {"command": command, "version": ""}


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    return [_gpu(index) for index in range(torch.cuda.device_count())]


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "kernels": kernels.supports(torch.empty(0, device=f"cuda:{index}")),
    }


def _path_on_cpu(compiler: dict[str, str] | None) -> str:
    if compiler is None:
        return "none: torch.compile needs a C++ compiler, and there is none"
    return 'C++ loops in what backend="mhc" compiles; operators that are called directly run in plain torch'


def _path_on_gpus(gpus: list[dict[str, Any]]) -> str:
    if not gpus:
        return "none: torch sees no GPU"
    if all(gpu["kernels"] for gpu in gpus):
        return "Triton kernels"
    if _version("triton") is None:
        return "none: Triton is not installed, and operators run in plain torch"
    least = "{}.{}".format(*kernels.gpus.LEAST_CAPABILITY)
    return f"Triton kernels need capability {least}; operators run in plain torch on the other GPUs"


def _settings() -> dict[str, str]:
    """What is set in the environment, and torch's own settings that change results or times."""
    names = [name for name in os.environ if name.startswith(_PREFIXES) or name in _NAMES]
    return {name: os.environ[name] for name in sorted(names)} | {
        "float32_matmul_precision": _matmul_precision(),
        "inductor_cache": str(compat.inductor_cache_dir()),
    }


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set for backends, which differ
        cpu: Any = torch.backends.mkldnn
        cuda, cpu = torch.backends.cuda.matmul, cpu.matmul
        return f"{cuda.fp32_precision} on CUDA, {cpu.fp32_precision} on a CPU"


def table(found: dict[str, Any]) -> str:
    """The same for people."""
    about, cpu, compiler = found["torch"], found["cpu"], found["cpp_compiler"]
    newer = ", which this one is newer than" if about["newer_than_tested"] else ""
    rows = [
        ("mhc_compile", f"{found['mhc_compile']}, numerics version {found['numerics']}"),
        ("torch", f"{about['version']} (tested: {about['oldest_tested']} to {about['newest_tested']}{newer})"),
        ("CUDA of torch", about["cuda"] or "none"),
        ("triton", found["triton"] or "not installed"),
        ("Python", found["python"]),
        ("system", found["system"]),
        ("CPU", f"{cpu['name']}, {cpu['cores']} cores, of which torch uses {cpu['threads']}"),
        ("C++ compiler", f"{compiler['command']}: {compiler['version']}" if compiler else "none"),
        *(("GPU", _gpu_in_words(gpu)) for gpu in found["gpus"] or [None]),
        ("fast path, CPU", found["fast_path"]["cpu"]),
        ("fast path, GPU", found["fast_path"]["cuda"]),
        ("libraries", ", ".join(f"{name} {version}" for name, version in found["libraries"].items()) or "none"),
        ("settings", ""),
        *((f"  {name}", value) for name, value in found["settings"].items()),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)


def _gpu_in_words(gpu: dict[str, Any] | None) -> str:
    if gpu is None:
        return "none"
    return f"{gpu['name']}, capability {gpu['capability']}, {gpu['memory_gib']} GiB"
