"""One small model, timed: eager, compiled by Inductor, and compiled by mhc, which take turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.benchmark import Timer

from mhc_compile import records
from mhc_compile.command_line.environment import processor
from mhc_compile.nn import Form, HyperConnection, contract, expand
from mhc_compile.progress import progress, say

ROUNDS = 15
_SECONDS = 0.05  # of each turn, in so many calls as fit
_STREAMS = 4
_HOW = {"eager": "eager", "inductor": "Inductor", "mhc": "mhc"}
_KINDS = ("forward", "step")


@dataclass(frozen=True)
class Sizes:
    """Those of the model, and of its input."""

    layers: int
    tokens: int
    width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, device: str, *, layers: int | None, tokens: int | None, width: int | None) -> Sizes:
        """Sizes with which a call takes some milliseconds on a device; given sizes replace the usual ones."""
        usual = cls(4, 4096, 2048, torch.bfloat16) if device == "cuda" else cls(2, 256, 256, torch.float32)
        return cls(layers or usual.layers, tokens or usual.tokens, width or usual.width, usual.dtype)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        layers = f"{self.layers} hyper-connection{'s' if self.layers > 1 else ''}"
        tokens = f"{self.tokens} token{'s' if self.tokens > 1 else ''}"
        return f"{layers}, n = {_STREAMS}, C = {self.width}, {dtype}, {tokens}"


class Chain(nn.Module):
    """Hyper-connections in the form of DeepSeek-V4, each around a norm and a linear layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, dtype = sizes.width, sizes.dtype
        layers = (nn.Sequential(nn.RMSNorm(width), nn.Linear(width, width)).to(dtype) for _ in range(sizes.layers))
        form = Form.deepseek_v4()
        self.sublayers = nn.ModuleList(
            HyperConnection(layer, dim=width, streams=_STREAMS, form=form) for layer in layers
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        streams = expand(tokens, _STREAMS)
        for sublayer in self.sublayers:
            streams = sublayer(streams)
        return contract(streams)


Call = Callable[[], object]


def run(sizes: Sizes, device: str, inductor: bool) -> None:
    """Compile the model, time it, and print the table."""
    providers = [name for name in _HOW if inductor or name != "inductor"]
    names = " and ".join(", ".join(_HOW[name] for name in providers).rsplit(", ", 1))
    say(f"bench: {sizes}; {_hardware(device)}; torch {torch.__version__}")
    say("bench: forward is a call without gradients, step is forward and backward, without an optimizer")
    say(f"bench: {names} take turns in {ROUNDS} rounds of about {1000 * _SECONDS:.0f} ms each; medians are shown")
    say("bench: the first compilation may take minutes" + ("; --no-inductor leaves out Inductor's" if inductor else ""))
    torch.manual_seed(0)
    model, tokens = Chain(sizes).to(device), torch.randn(1, sizes.tokens, sizes.width, device=device, dtype=sizes.dtype)
    records.forget()
    stage = ["bench"]
    with progress(lambda: stage[0]):
        calls: dict[str, dict[str, Call]] = {}
        for name in providers:
            stage[0] = f"bench: {_HOW[name]} runs for the first time"
            calls[name] = _calls(model if name == "eager" else torch.compile(model, backend=name), tokens)
        rewritten = str(records.report()).splitlines()[0]
        stage[0] = "bench: measures"
        found = {kind: _medians({name: calls[name][kind] for name in providers}) for kind in _KINDS}
    say(f"\n{'milliseconds':<14}" + "".join(f"{kind:>12}" for kind in _KINDS))
    for name in providers:
        say(f"{_HOW[name]:<14}" + "".join(f"{1000 * found[kind][name]:>12.3f}" for kind in _KINDS))
    say(f"\n{rewritten}")
    say(
        "These times are of this model, of these sizes, on this machine. Results were not compared: `verify` does that."
    )


def _hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{processor()}, {threads} thread{'s' if threads > 1 else ''}"


def _calls(model: Any, tokens: torch.Tensor) -> dict[str, Call]:
    """A forward and a step, both run once, so that everything is compiled."""

    def forward() -> object:
        with torch.no_grad():
            return model(tokens)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(tokens).square().mean().backward()

    forward()
    step()
    return {"forward": forward, "step": step}


def _medians(calls: dict[str, Call]) -> dict[str, float]:
    """Seconds of a call, the median over the rounds."""
    # Timer waits for the GPU, and uses one thread unless another number is given.
    threads = torch.get_num_threads()
    timers = {name: Timer("call()", globals={"call": call}, num_threads=threads) for name, call in calls.items()}
    number = {name: max(1, int(_SECONDS / timer.timeit(1).mean)) for name, timer in timers.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, timer in timers.items():
            times[name].append(timer.timeit(number[name]).mean)
    return {name: statistics.median(values) for name, values in times.items()}
