"""Which cases are run, part after part in order of importance: what a bounded run has no time for comes last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from benchmarks.cases import Case
from benchmarks.own_gates import KINDS

OURS = ("eager", "mhc", "mhc-ops")
SWEEP = ("eager", "inductor", "mhc")
PEERS = ("liger", "transformer_engine", "tile_kernels")
COMPILERS = ("inductor", "mhc")
BLOCK = ("block", "plain")
SHIFTED = ("single-pass", "single-pass-normed")
# Measured in processes of their own, so never together with anything else.
FIRST = ("first",)
PROCESS = ("process",)

Plan = Mapping[str, Sequence[Case]]

# What each part of a plan answers.
PARTS = {
    "main": "a chain of 4 at 8,192 tokens, C = 4,096, n = 4: everyone",
    "tokens": "the same chain from 1 to 32,768 tokens",
    "width": "the same chain at other C",
    "streams": "the same chain at other n",
    "decode": "1, 8 and 64 tokens in a CUDA graph: everyone",
    "block": "a DeepSeek-V4 decoder layer of real width, and the same layer with plain residuals",
    "norm": "the same chain with an RMS norm as each sublayer, also for few tokens in a CUDA graph",
    "gates": "chains whose gates are the program's own: Kronecker products, permutations, tanh, static, softmax",
    "unnormed": "a chain whose gates are made of the streams without a norm",
    "single-pass": "chains that read by the gates of the boundary before, with and without a norm, also in a graph",
    "serving": "1, 8 and 64 tokens in a CUDA graph through 60 layers, with 100 MB of weights between two boundaries",
    "first": "a first step in a fresh process, with empty and with full caches; whole processes beside sin(2 * x)",
    "long": "32 sublayers, with and without recomputation",
    "sublayer": "a single sublayer: everyone",
    "peers": "other libraries at the sizes of the sweeps",
    "launches": "how many kernels a forward is; last, as a profiler that has run may slow down what comes after it",
}


def plan(device: torch.device, *, quick: bool, recompute: bool) -> Plan:
    """The cases of every part. On a CPU, a quick run is of the same programs, tiny."""
    if device.type == "cpu":
        return _tiny(recompute) if quick else _on_cpu()
    return _quick(recompute) if quick else _full(recompute)


def _full(recompute: bool) -> Plan:
    """Every size that results are published for."""
    main = Case("chain", 8192, 4096)
    sweep = replace(main, providers=SWEEP)
    block = Case("block", 2048, 4096, depth=2, providers=SWEEP)
    first = replace(main, modes=FIRST, providers=COMPILERS)
    sine = replace(main, name="sine", providers=("inductor",))
    long = replace(main, name="long", tokens=2048, depth=32, modes=("step",))
    sizes = {
        "tokens": [replace(sweep, tokens=tokens) for tokens in (32768, 512, 64, 4096, 1, 8, 2048)],
        "width": [replace(sweep, width=width) for width in (7168, 2560, 1280)],
        "streams": [replace(sweep, streams=n) for n in (8, 2, 16)],
    }
    few = [replace(sweep, tokens=tokens, modes=("graph",)) for tokens in (1, 64, 8)]
    return {
        "main": [main],
        **sizes,
        "decode": [replace(main, tokens=tokens, modes=("graph",)) for tokens in (1, 64, 8)],
        "block": [replace(block, name=name) for name in BLOCK],
        "norm": [
            replace(sweep, name="normed"),
            *(replace(case, name="normed") for case in few),
        ],
        "gates": [replace(sweep, name=name) for name in KINDS],
        "unnormed": [replace(sweep, name="unnormed")],
        "single-pass": [replace(case, name=name) for name in SHIFTED for case in (sweep, *few)],
        # Without a boundary, there is nothing for this backend.
        "serving": [
            replace(case, name=name, depth=60, providers=(provider,))
            for name, provider in (("served", "mhc"), ("served-alone", "inductor"))
            for case in few
        ],
        "first": [
            *(replace(case, modes=PROCESS) for case in (replace(main, providers=("mhc",)), sine)),
            first,
            replace(block, modes=FIRST, providers=COMPILERS),
            # 8 layers of the model.
            replace(first, name="model", tokens=2048, depth=16),
            replace(first, providers=("mhc-ops", *PEERS)),
        ],
        "long": _long(replace(long, providers=("eager", "mhc")), recompute),
        "sublayer": [replace(main, name="sublayer", depth=1)],
        "peers": [replace(case, providers=("mhc-ops", *PEERS)) for part in sizes.values() for case in part],
        "launches": [replace(main, tokens=64, modes=("launches",))],
    }


def _quick(recompute: bool) -> Plan:
    """The main shape for every provider, a few others around it for ours: nothing that Inductor needs long for."""
    main = Case("chain", 8192, 4096)
    ours = replace(main, providers=OURS)
    long = replace(main, name="long", tokens=2048, depth=32, modes=("step",), providers=("mhc",))
    return {
        "main": [main],
        "tokens": [replace(ours, tokens=tokens) for tokens in (64, 2048)],
        "width": [replace(ours, width=width, providers=("mhc",)) for width in (2560, 7168)],
        "streams": [replace(ours, streams=n, providers=("mhc",)) for n in (2, 8)],
        "decode": [replace(ours, tokens=tokens, modes=("graph",)) for tokens in (1, 64)],
        "first": [replace(main, providers=("mhc",), modes=FIRST)],
        "long": _long(long, recompute),
        "launches": [replace(ours, tokens=64, modes=("launches",))],
    }


def _on_cpu() -> Plan:
    """What a CPU is asked to do: small models, few tokens, and to be compiled for."""
    main = Case("chain", 512, 1280, depth=2, dtype="float32", providers=SWEEP)
    first = replace(main, modes=FIRST, providers=COMPILERS)
    return {
        "main": [main, replace(main, dtype="bfloat16")],
        "tokens": [replace(main, tokens=tokens) for tokens in (1, 8, 64)],
        "width": [replace(main, tokens=128, width=256), replace(main, tokens=8, width=4096)],
        "streams": [replace(main, tokens=64, streams=n) for n in (2, 8)],
        "norm": [replace(main, name="normed")],
        "gates": [replace(main, width=1024, name=name) for name in KINDS],
        "unnormed": [replace(main, name="unnormed")],
        "single-pass": [replace(main, name=name) for name in SHIFTED],
        # 8 layers of the model.
        "first": [first, replace(first, name="model", tokens=64, width=256, depth=16)],
    }


def _tiny(recompute: bool) -> Plan:
    main = Case("chain", 6, 32, depth=2, dtype="float32")
    ours = replace(main, providers=OURS)
    block = Case("block", 16, 32, depth=2, dtype="float32", modes=("step",), providers=SWEEP)
    return {
        "main": [main],
        "tokens": [replace(ours, tokens=tokens) for tokens in (1, 24)],
        "width": [replace(ours, width=64)],
        "streams": [replace(ours, streams=2)],
        "decode": [replace(ours, tokens=1, modes=("graph",))],
        "block": [replace(block, name=name) for name in BLOCK],
        "norm": [replace(main, name="normed", providers=SWEEP)],
        "gates": [replace(main, name=name, providers=SWEEP) for name in KINDS],
        "unnormed": [replace(main, name="unnormed", providers=SWEEP)],
        "single-pass": [replace(main, name=name, providers=SWEEP) for name in SHIFTED],
        "serving": [replace(main, name="served", providers=("mhc",))],
        "first": [
            replace(main, providers=COMPILERS, modes=FIRST),
            replace(main, name="sine", providers=("inductor",), modes=PROCESS),
        ],
        "long": _long(replace(main, name="long", depth=4, modes=("step",), providers=("mhc",)), recompute),
        "sublayer": [replace(ours, name="sublayer", depth=1)],
    }


def _long(case: Case, recompute: bool) -> list[Case]:
    """The long chain as it is, and with recomputation where the backend has it."""
    return [case, replace(case, providers=("mhc",), options={"mhc.recompute": "auto"})] if recompute else [case]
