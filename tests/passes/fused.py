"""Runs a model with its joint graphs fused, or not, and without Inductor; for comparison, eager code and float64."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from mhc_compile import compat, ops, passes
from mhc_compile.passes.fuse import FUSIONS
from mhc_compile.passes.report import Report
from tests.zoo import check
from tests.zoo.common import BATCH, LENGTH, STREAMS, WIDTH, CheapLayer, random_parameter, random_phi

ALL = tuple(FUSIONS)

# Roundings of float32 by which two orders of the same sums differ after a few dozen operations; in a gradient of few
# numbers, which is a sum over all tokens, terms cancel to a thousandth.
ROUNDINGS = 64
ROUNDINGS_FEW = 10_000


class Sublayer(nn.Module):
    """Streams [..., n, C] to streams through the operators themselves: nothing to recognise, so quickly compiled."""

    def __init__(self, n: int = STREAMS, width: int = WIDTH) -> None:
        super().__init__()
        rows = n * n + 2 * n
        self.phi = random_phi(rows, n * width)
        self.scale = random_parameter(3, mean=1.0, std=0.2)
        self.bias = random_parameter(rows, std=0.5)
        self.layer = CheapLayer(width)
        self.layer_bias = random_parameter(width, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        u, post, res = ops.generate_mix_and_aggregate(x, self.phi, self.scale, self.bias, sinkhorn_steps=5)
        return ops.expand_combine(self.layer(u), self.layer_bias, post, x, res)


class Stack(nn.Module):
    """Sublayers one after the other, and something done with the streams between; returns the streams and that."""

    def __init__(self, layers: int = 3, observe: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.sublayers = nn.ModuleList(Sublayer() for _ in range(layers))
        self.observe = observe

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        seen = []
        for sublayer in self.sublayers:
            x = sublayer(x)
            if self.observe is not None:
                seen.append(self.observe(x))
        return (x, *seen)


class Checkpointed(nn.Module):
    """Activation checkpointing by the user: around each sublayer, around all, or around what a sublayer wraps."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.stack, self.where = Stack(), where
        if where == "layers":
            for sublayer in self.stack.sublayers:
                forward = sublayer.layer.forward
                sublayer.layer.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "all":
            (out,) = checkpoint(self.stack, x, use_reentrant=False)
            return out
        for sublayer in self.stack.sublayers:
            x = checkpoint(sublayer, x, use_reentrant=False) if self.where == "sublayers" else sublayer(x)
        return x


def streams(length: int = LENGTH) -> Tensor:
    return torch.randn(BATCH, length, STREAMS, WIDTH)


@dataclass
class Program:
    """A compiled model and what became of it: the report, and the fused graphs."""

    call: Callable[..., Any]
    report: Report = field(default_factory=Report)
    graphs: list[fx.Graph] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        assert not self.report.errors, self.report.errors
        return {name: count for name, count in self.report.fusions.items() if count}


def program(
    model: Callable[..., Any], names: Collection[str] = ALL, layers: int | str | None = None, **options: Any
) -> Program:
    """The model rewritten, with these fusions, and streams recomputed in blocks of so many layers. options go to
    `torch.compile`."""
    made = Program(model)

    def fuse(joint: fx.GraphModule) -> None:
        made.report.add(passes.fuse(joint, names, layers))
        made.graphs.append(joint.graph)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        made.report.add(passes.run_recursively(gm))
        compiled: Callable[..., Any] = compat.compile_without_inductor(gm, example_inputs, fuse)
        return compiled

    made.call = torch.compile(model, backend=backend, **options)
    return made


def assert_same(results: check.Results, expected: check.Results) -> None:
    """Equal but for float32 rounding, result by result."""
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        assert results[name].dtype == value.dtype, name
        assert results[name].stride() == value.stride(), name
        limit = (ROUNDINGS if value.numel() >= check.FEW else ROUNDINGS_FEW) * torch.finfo(torch.float32).eps
        assert check.error(results[name], value) <= limit, f"{name}: {check.error(results[name], value):.1e}"


def fused_and_not(model: nn.Module, args: Sequence[Any], **options: Any) -> Program:
    """The fused program, after its results were compared with the unfused program's and with eager's."""
    torch._dynamo.reset()
    fused, unfused = program(model, **options), program(model, (), **options)
    results = check.evaluate(fused.call, model, args)
    assert_same(results, check.evaluate(unfused.call, model, args))
    assert_same(results, check.evaluate(model, model, args))
    assert not unfused.counts
    return fused


def fused_like_eager(model: nn.Module, args: Sequence[Any], **options: Any) -> Program:
    """The fused program, after its results were compared with eager's."""
    torch._dynamo.reset()
    fused = program(model, **options)
    assert_same(check.evaluate(fused.call, model, args), check.evaluate(model, model, args))
    return fused


def judge(model: nn.Module, args: Sequence[Any], names: Collection[str] = ALL) -> Program:
    """The fused program, after its error against float64 was found to be no larger than eager's."""
    torch._dynamo.reset()
    fused = program(model, names)
    check.assert_as_accurate(check.compare(model, fused.call, fused.report, args))
    return fused


def evaluate(call: Callable[..., Any], model: torch.nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The first output of a step, and all its gradients."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    (y, *_) = call(x)
    (y.sin().sum()).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    return {"y": y.detach(), "dx": x.grad} | gradients  # type: ignore[dict-item]
