"""Who runs it: each provider makes one callable of a workload, with the module's arguments and results."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mhc_compile.backend  # makes "mhc" known where the package is run from its sources
from benchmarks.cases import ITERATIONS, Call, Chain, Workload
from benchmarks.own_gates import EPS
from mhc_compile import ops


class Unavailable(Exception):
    """A provider cannot run a workload, and says why."""


def eager(work: Workload, mode: str | None) -> Call:
    """The module as it is."""
    return work.module


def inductor(work: Workload, mode: str | None) -> Call:
    """torch.compile of the eager module."""
    call: Call = torch.compile(work.module, mode=mode)
    return call


def mhc(work: Workload, mode: str | None) -> Call:
    """torch.compile(backend="mhc") of the same eager module."""
    unknown = work.case.options.keys() - mhc_compile.options.OPTIONS.keys()
    if unknown:
        raise Unavailable(f"this backend has no option {', '.join(sorted(unknown))}")
    # Strict: a chain that was left as it is would be measured as Inductor's. torch.compile takes a mode or options.
    options = {"mhc.strict": True} | work.case.options if mode is None else None
    call: Call = torch.compile(work.module, backend="mhc", mode=mode, options=options)
    return call


def mhc_ops(work: Workload, mode: str | None) -> Call:
    """The registered operators, called directly, the boundary between two sublayers as one."""
    chain = _chain(work)
    form: dict[str, Any] = {"pre_eps": EPS, "sinkhorn_steps": 2 * ITERATIONS - 1}

    def run(x: Tensor) -> Tensor:
        first, *rest = chain.sublayers()
        f, post, res = ops.generate_mix_and_aggregate(x, first.fn, first.scale, first.base, **form)
        for c in rest:
            x, f, post, res = ops.boundary(f, None, post, x, res, c.fn, c.scale, c.base, **form)
        return ops.expand_combine(f, None, post, x, res)

    return run


def liger(work: Workload, mode: str | None) -> Call:
    """Liger-Kernel's functions. It wants phi transposed, which costs a small copy, and applies h_res as it is."""
    chain = _chain(work)
    peer = _peer("liger_kernel.transformers.functional")

    form: dict[str, Any] = {"tmax": ITERATIONS, "rms_eps": EPS, "pre_eps": EPS, "sinkhorn_eps": EPS, "post_mult": 2.0}
    # It takes float32 streams only when told so.
    form["allow_fp32"] = work.case.torch_dtype == torch.float32

    def run(x: Tensor) -> Tensor:
        for c in chain.sublayers():
            pre, post, res = peer.liger_mhc_coeffs(x, c.fn.t(), c.base, *c.scale.unbind(0), **form)
            x = peer.liger_mhc_post_res(x, peer.liger_mhc_pre(x, pre), post, res.transpose(-1, -2))
        return x

    return run


def tile_kernels(work: Workload, mode: str | None) -> Call:
    """DeepSeek's TileKernels. They take bfloat16 streams and float32 parameters only."""
    chain = _chain(work)
    mhc_pre = _peer("tile_kernels.modeling.mhc.functional").mhc_pre
    mhc_post = _peer("tile_kernels.modeling.mhc.ops").mhc_post
    if work.case.torch_dtype != torch.bfloat16:
        raise Unavailable("takes bfloat16 streams only")

    form = {
        "norm_eps": EPS,
        "mhc_mult": work.case.streams,
        "post_mult_value": 2.0,
        "pre_eps": EPS,
        "sinkhorn_eps": EPS,
        "sinkhorn_repeat": ITERATIONS,
    }

    def run(x: Tensor) -> Tensor:
        for c in chain.sublayers():
            f, (post, res) = mhc_pre(x, c.fn, c.scale, c.base, **form)
            x = mhc_post(f, x, post, res)
        return x

    return run


def transformer_engine(work: Workload, mode: str | None) -> Call:
    """TransformerEngine's functions, on streams that lie as [.., C, n] in memory (`channels_first`).

    phi in its order of columns costs a small copy. Its Sinkhorn and its gates have no eps, and its eps of the norm is
    float32's: one part in a million, where streams are rounded to bfloat16.
    """
    chain = _chain(work)
    peer = _peer("transformer_engine.pytorch.triton.mhc")
    n, width = work.case.streams, work.case.width
    if n != 4:
        raise Unavailable("takes 4 streams only")

    def run(x: Tensor) -> Tensor:
        x = x.mT
        for c in chain.sublayers():
            phi = c.fn.view(-1, n, width).mT.flatten(-2)
            f, post, res = peer.mhc_generate_mix_and_aggregate(x, phi, c.scale, c.base.unsqueeze(0))
            x = peer.mhc_fused_expand_combine(f, None, post, x, res, n)
        return x.mT

    return run


def _chain(work: Workload) -> Chain:
    if not isinstance(work.module, Chain):
        raise Unavailable("runs chains, not whole models")
    return work.module


def _peer(name: str) -> Any:
    """A module of another library; raises `Unavailable`, with the reason, if it cannot be imported."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:  # half installed, another version, no CUDA library
        raise Unavailable(f"cannot be imported: {type(error).__name__}: {error}") from error


PROVIDERS: dict[str, Callable[[Workload, str | None], Call]] = {
    "eager": eager,
    "inductor": inductor,
    "mhc": mhc,
    "mhc-ops": mhc_ops,
    "liger": liger,
    "transformer_engine": transformer_engine,
    "tile_kernels": tile_kernels,
}
# Other libraries' packages.
PACKAGES = {"liger": "liger_kernel", "transformer_engine": "transformer_engine", "tile_kernels": "tile_kernels"}
# These know CUDA graphs by a mode of torch.compile; the others are captured as they are.
COMPILED = ("inductor", "mhc")
# These want streams that lie as [.., C, n] in memory.
CHANNELS_FIRST = ("transformer_engine",)


def installed(provider: str) -> bool:
    """Whether there is anything to import for `provider`."""
    return provider not in PACKAGES or importlib.util.find_spec(PACKAGES[provider]) is not None
