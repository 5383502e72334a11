"""One rank of a job whose operators take DTensors: `python -m tests.dtensors DEVICE RANK RANKS FILE SCENARIO...`."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from mhc_compile import compat, ops, records
from mhc_compile.ops import _sharding as sharding
from mhc_compile.testing import Errors, judge
from tests.jobs import Scenarios, device, here, run_rank
from tests.ops.calls import OPERATORS, Sizes, arguments, call, is_of_tokens, result_names, results
from tests.zoo.check import rewriting
from tests.zoo.near import Sublayer

# Over 4 ranks the first dim leaves one rank without tokens, and over 2 ranks both are uneven; so are the channels.
TOKENS = (3, 5)
SIZES = Sizes(n=2, width=5, tokens=TOKENS)
# Fewer gates, and rows of phi without any.
OTHER_ROWS = Sizes(n=2, width=5, tokens=TOKENS, parts=2, more=3)
# Sums of a few hundred float64 numbers in another order, relative to the largest result.
EXACT = 1e-13

Placements = Sequence[Any]
# Where a tensor of this name is placed.
Place = Callable[[str], Placements]


def drawn(operator: str, *given: Any, **options: Any) -> dict[str, Any]:
    """The arguments of a call, on this rank's device."""
    whole = arguments(operator, *given, **options)
    return {name: here(value) if isinstance(value, Tensor) else value for name, value in whole.items()}


def distributed(whole: Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """A DTensor of what all ranks hold, made without communication; of a pending sum each has an equal part."""
    parts = [Replicate() if placement.is_partial() else placement for placement in placements]
    local = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(placements=parts)
    share = 1.0
    for dim, placement in enumerate(placements):
        share /= mesh.size(dim) if placement.is_partial() else 1
    shape, stride = whole.shape, whole.stride()
    return DTensor.from_local(local.to_local() * share, mesh, placements, run_check=False, shape=shape, stride=stride)


def given_to(operator: str, whole: dict[str, Any], mesh: DeviceMesh, place: Place) -> Any:
    """The arguments of a call, each tensor placed as `place` says for its name."""
    return {
        name: distributed(value, mesh, place(name)) if isinstance(value, Tensor) else value
        for name, value in whole.items()
    }


def token_shards(placements: Placements) -> Place:
    """Tokens placed so, parameters whole."""
    return lambda name: placements if is_of_tokens(name) else [Replicate()] * len(placements)


class Lines(logging.Handler):
    """What the package logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logger = logging.getLogger("mhc_compile")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def same(
    operator: str, mesh: DeviceMesh, place: Place, sizes: Sizes = SIZES
) -> tuple[float, dict[str, list[str]], int]:
    """How far results are from one process's in float64, relative to the largest; their placements; collectives."""
    torch.manual_seed(0)
    whole = drawn(operator, sizes)
    expected = results(call(operator, whole))
    given = given_to(operator, whole, mesh, place)
    with CommDebugMode() as counted:
        made = results(call(operator, given))
    distance, placed = 0.0, {}
    for name, result, exact in zip(result_names(operator), made, expected, strict=True):
        assert isinstance(result, DTensor), name
        assert (result.shape, result.stride(), result.dtype) == (exact.shape, exact.stride(), exact.dtype), name
        full = result.full_tensor()
        if mesh.get_coordinate() is not None and exact.numel():
            distance = max(distance, float((full - exact).abs().max() / exact.abs().max()))
        placed[name] = [str(placement) for placement in result.placements]
    return distance, placed, counted.get_total_counts()


def every_operator(mesh: DeviceMesh, placements: Placements) -> dict[str, Any]:
    """All operators with tokens placed so: the largest distance, collectives, and wrong placements."""
    tokens = [str(placement) for placement in placements]
    sums = [str(placement if placement.is_replicate() else Partial()) for placement in placements]
    far, collectives, misplaced = {}, {}, []
    for operator in OPERATORS:
        distance, placed, count = same(operator, mesh, token_shards(placements))
        distance = max(distance, same(operator, mesh, token_shards(placements), OTHER_ROWS)[0])
        if not distance < EXACT:
            far[operator] = distance
        if count:
            collectives[operator] = count
        for name, found in placed.items():
            if found != (tokens if is_of_tokens(name) else sums):
                misplaced.append(f"{operator} {name} {found}")
    return {"far": far, "collectives": collectives, "misplaced": misplaced, "operators": len(OPERATORS)}


# Operators on gates alone have no channels.
WITH_CHANNELS = [name for name in OPERATORS if name.removesuffix("_backward") not in ("scale", "sinkhorn")]


def ends_in_channels(name: str) -> bool:
    """Whether a tensor of tokens has the channels last."""
    return name.removeprefix("d_") in ("x", "x_new", "f", "layer_input", "out")


def over(operator: str, tokens: Placements = (), dims: int = len(TOKENS)) -> Place:
    """Channels over the last dim of a mesh, tokens over the others; gates' gradients as a write's backward has them.

    dims: how many the tokens have.
    """

    def place(name: str) -> Placements:
        if not is_of_tokens(name):
            return [Replicate()] * (len(tokens) + 1)
        if not ends_in_channels(name):
            return [*tokens, Partial() if name in ("d_h_post", "d_h_res", "d_next_post") else Replicate()]
        of_streams = name in ("d_x", "x", "x_new", "d_x_new") or (name, operator) == ("d_out", "mix_streams_backward")
        return [*tokens, Shard(dims + of_streams)]

    return place


def over_channels(mesh: DeviceMesh, tokens: Placements = (), shape: tuple[int, ...] = TOKENS) -> dict[str, Any]:
    """All operators: distances, and those that communicate."""
    lines = Lines()
    far, collectives = {}, {}
    for operator in WITH_CHANNELS:
        place = over(operator, tokens, len(shape))
        distance, _, count = same(operator, mesh, place, replace(SIZES, tokens=shape))
        distance = max(distance, same(operator, mesh, place, replace(OTHER_ROWS, tokens=shape))[0])
        if not distance < EXACT:
            far[operator] = distance
        if count:
            collectives[operator] = count
    return {"far": far, "collectives": collectives, "lines": len(lines.lines)}


def not_needed(mesh: DeviceMesh) -> dict[str, Any]:
    """A backward that is called with other flags gives other results: nothing is kept of the call before."""
    shapes = []
    whole = drawn("expand_combine_backward", SIZES, without=("d_x",))
    for needs in ([True] * 5, [True, False, True, False, False], [False, False, False, True, True]):
        given = given_to("expand_combine_backward", whole | {"needs": needs}, mesh, token_shards([Shard(0)]))
        made = results(call("expand_combine_backward", given))
        shapes.append([[list(one.shape), str(one.placements[0]), list(one.full_tensor().shape)] for one in made])
    return {"shapes": shapes}


def mixed(mesh: DeviceMesh) -> dict[str, Any]:
    """Arguments that are placed in several ways: what is redistributed, and the lines that say so."""
    lines = Lines()
    places: dict[str, Place] = {
        "phi sharded": lambda name: (
            [Shard(1)] if name == "phi" else [Shard(0)] if is_of_tokens(name) else [Replicate()]
        ),
        "pending tokens": lambda name: [Partial()] if is_of_tokens(name) else [Replicate()],
        "pending f": lambda name: [Partial()] if name == "f" else [Shard(1)] if is_of_tokens(name) else [Replicate()],
        "f elsewhere": lambda name: [Shard(0)] if name == "f" else [Shard(1)] if is_of_tokens(name) else [Replicate()],
        "x whole": lambda name: [Replicate()] if name == "x" or not is_of_tokens(name) else [Shard(0)],
        "over streams": lambda name: [Shard(len(TOKENS))] if name in ("x", "h_post") else [Replicate()],
    }
    found = {}
    for what, place in places.items():
        operator = "generate_mix_and_aggregate" if what in ("phi sharded", "pending tokens") else "expand_combine"
        lines.lines.clear()
        distance, placed, count = same(operator, mesh, place)
        same(operator, mesh, place)
        found[what] = [distance < EXACT, next(iter(placed.values())), count, [*lines.lines]]
    torch.manual_seed(0)
    whole = drawn("generate_mix", SIZES)
    given = {"x": distributed(whole["x"], mesh, [Shard(0)])}
    with implicit_replication():
        made = results(call("generate_mix", whole | given))
    exact = results(call("generate_mix", whole))
    near = all(torch.allclose(a.full_tensor(), b, rtol=EXACT, atol=EXACT) for a, b in zip(made, exact, strict=True))
    found["implicit"] = [near, [str(made[0].placements[0])], 0, []]
    return found


def accuracy(mesh: DeviceMesh, place: Callable[[str], Place], operators: Sequence[str]) -> dict[str, Any]:
    """Operators in float32, judged by the rule of `verify` against one process."""
    findings = []
    for operator in operators:
        trusted, errors = Errors(), Errors()
        for seed in range(3):
            torch.manual_seed(seed)
            whole = drawn(operator, SIZES, torch.float32)
            double = {k: v.double() if isinstance(v, Tensor) else v for k, v in whole.items()}
            names = result_names(operator)
            exact = {name: one for name, one in zip(names, results(call(operator, double)), strict=True) if one.numel()}
            made = results(call(operator, given_to(operator, whole, mesh, place(operator))))
            alone, shared = results(call(operator, whole)), [one.full_tensor() for one in made]
            for seen, values in ((trusted, alone), (errors, shared)):
                seen.add({k: v for k, v in zip(names, values, strict=True) if k in exact}, exact)
        findings += [f"{operator} {one}" for one in judge(trusted, errors, list(exact), operator) if not one.ok]
    return {"findings": findings}


def autograd(mesh: DeviceMesh, placements: Placements, compiled: bool) -> dict[str, Any]:
    """Gradients through the wrappers, which are called as users call them."""
    if mesh.get_coordinate() is None and device() == "cuda":
        return {}  # torch puts the results of such a rank on the CPU, and autograd stops between two devices
    torch.manual_seed(0)
    n, width = 4, 5
    x, phi = torch.randn(*TOKENS, n, width).double(), torch.randn(n * (n + 2), n * width).double() / 8
    scale, bias = torch.rand(3).double(), torch.randn(n * (n + 2)).double()
    x, phi, scale, bias = map(here, (x, phi, scale, bias))

    def layers(x: Any, *mixing: Any) -> Any:
        for _ in range(2):
            u, post, res = ops.generate_mix_and_aggregate(x, *mixing)
            x = ops.expand_combine(torch.tanh(u), None, post, x, res)
        return x

    def step(program: Any, *given: Tensor) -> list[Any]:
        leaves = [one.detach().requires_grad_() for one in given]
        loss = program(*leaves).square().sum()
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    expected = step(layers, x, phi, scale, bias)
    whole = [distributed(one, mesh, [Replicate()] * mesh.ndim) for one in (phi, scale, bias)]
    torch._dynamo.reset()
    program = torch.compile(layers, backend="aot_eager", fullgraph=True) if compiled else layers
    # It cannot look into compiled code.
    with contextlib.nullcontext() if compiled else CommDebugMode() as counted:
        made = step(program, distributed(x, mesh, placements), *whole)
    pairs = [(_whole(a), b) for a, b in zip(made, expected, strict=True)]
    near = all(float((a - b).abs().max() / b.abs().max()) < EXACT for a, b in pairs if mesh.get_coordinate())
    placed = [[str(placement) for placement in one.placements] for one in made]
    return {"near": near, "placements": placed, "collectives": counted and counted.get_total_counts()}


def summed_numbers(mesh: DeviceMesh) -> dict[str, Any]:
    """How many numbers a token are summed over the ranks that share out the channels, in each sum."""
    found = {}
    original = sharding._Call._summed

    def summed(self: Any, plans: Any, *parts: Tensor) -> Any:
        found[what].append(sum(part.shape[-1] for part in parts))
        return original(self, plans, *parts)

    with mock.patch.object(sharding._Call, "_summed", summed):
        for operator in ("generate_mix_and_aggregate", "generate_mix_and_aggregate_backward"):
            for without in ((), ("input_norm_weight",)):
                what = f"{operator}{' without a norm' if without else ''}"
                found[what] = []
                torch.manual_seed(0)
                call(operator, given_to(operator, drawn(operator, SIZES, without=without), mesh, over(operator)))
    return found


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.up(self.norm(x))))
        return result


class Layer(Sublayer):
    """A hyper-connection around an MLP."""

    def __init__(self) -> None:
        super().__init__(n=4, width=8, length=6, batch=2)
        self.mlp = Mlp(self.width)

    def layer(self, layer_input: Tensor, x: Tensor) -> Tensor:
        result: Tensor = self.mlp(layer_input)
        return result


class Layers(nn.Module):
    """[b, s, C] -> [b, s, C] by way of streams in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        streams = x.unsqueeze(-2).expand(-1, -1, 4, -1)
        for layer in self.layers:
            streams = layer.body(streams)
        return streams.mean(-2)


def distribute_parameters(module: nn.Module, mesh: DeviceMesh, **placements: Any) -> None:
    """Make DTensors of a module's own parameters, whole on all ranks unless placements say otherwise."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placed = distributed(parameter.detach(), mesh, [placements.get(name, Replicate())])
        module.register_parameter(name, nn.Parameter(placed))


def sequence_parallel(mesh: DeviceMesh) -> dict[str, Any]:
    """Tensor and sequence parallelism as PyTorch has it, compiled by Inductor; results judged against one process."""
    torch.manual_seed(0)
    model = here(Layers())
    whole, double = copy.deepcopy(model), copy.deepcopy(model).double()
    for layer in model.layers:
        plan: dict[str, Any] = {
            "mlp.norm": SequenceParallel(use_local_output=False),
            "mlp.up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(layer, mesh, plan)
        distribute_parameters(layer, mesh)
    compiled = torch.compile(model, backend="mhc", fullgraph=True)
    trusted, errors = Errors(), Errors()
    for _ in range(3):
        x, weight = here(torch.randn(2, 6, 8)), here(torch.randn(2, 6, 8))
        exact = _gradients(double, double, x.double(), weight.double())
        trusted.add(_gradients(whole, whole, x, weight), exact)
        errors.add(_gradients(model, compiled, distributed(x, mesh, [Shard(1)]), weight), exact)
    findings = judge(trusted, errors, list(exact), "the model")
    report = records.last()
    return {
        "rewritten": sorted(site.op for site in report.rewritten),
        "fused": report.fusions.get("boundary"),
        "errors": report.errors,
        "findings": [str(one) for one in findings if not one.ok],
        "results": len(exact),
    }


def _gradients(model: nn.Module, program: Callable[[Any], Any], x: Any, weight: Tensor) -> dict[str, Tensor]:
    """The result of a program and the gradients of its model's parameters, whole."""
    model.zero_grad()
    result = _whole(program(x))
    (result * weight).sum().backward()
    named = {name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"result": result.detach(), **named}


def _whole(value: Any) -> Tensor:
    whole: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return whole


class Local(Sublayer):
    """A layer that works on this rank's part of its input, which depends on where that is placed."""

    def layer(self, layer_input: Any, x: Tensor) -> Tensor:
        local = torch.tanh(F.linear(layer_input.to_local(), self.weight.to_local()))  # type: ignore[operator]
        return DTensor.from_local(local, layer_input.device_mesh, layer_input.placements)


def as_placed(mesh: DeviceMesh) -> dict[str, Any]:
    """Rewritten programs on DTensors that are placed in many ways against their eager code: values and placements."""
    found = {}
    places = [(streams, Replicate()) for streams in (Replicate(), Shard(0), Shard(1), Partial())]
    for streams, phi in (*places, (Shard(0), Shard(0))):
        if streams == Shard(1) and not compat.flattens_shards():
            continue
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = here(Local(4, 6, 4, 2))
        distribute_parameters(model, mesh, phi=phi)
        x = distributed(here(torch.randn(2, 4, 4, 6)), mesh, [streams])
        found[f"{streams} {phi}"] = _alike(model, x)
    return found


def _alike(model: Sublayer, x: DTensor) -> list[Any]:
    program, report = rewriting(model.body)
    seen = []
    for body in (model.body, program):
        model.zero_grad()
        result: Any = body(x)
        _whole(result).square().sum().backward()
        named = {name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        seen.append(({"result": _whole(result).detach(), **named}, str(result.placements)))
    (eager, before), (rewritten, after) = seen
    # Two float32 evaluations of a few hundred sums.
    close = all(torch.allclose(rewritten[name], eager[name], rtol=1e-5, atol=1e-5) for name in eager)
    ops = sorted(site.op for site in report.rewritten)
    return [close, after == before, ops, [site.reason for site in report.declined], report.errors]


def raised_by(operator: str, given: dict[str, Any]) -> str:
    """The message of a call that fails."""
    try:
        call(operator, given)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def wrong(mesh: DeviceMesh, other: DeviceMesh) -> dict[str, Any]:
    """What is raised for arguments that do not go together; all ranks raise, and none waits."""
    torch.manual_seed(0)
    whole = drawn("generate_mix", SIZES)
    tokens = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]

    def raised(**changed: Any) -> str:
        return raised_by("generate_mix", given_to("generate_mix", whole, mesh, token_shards(tokens)) | changed)

    unknown = DTensor.from_local(whole["bias"], mesh, [Partial("sum")] * mesh.ndim, run_check=False)
    unknown._spec.placements = (Partial("nonsense"),) * mesh.ndim
    beyond = distributed(whole["bias"], mesh, [Replicate()] * mesh.ndim)
    beyond._spec.placements = (Shard(4),) * mesh.ndim
    # With 3 and 2 tokens over 4 ranks, only the third rank has parts of different shapes.
    gates = drawn("aggregate", SIZES)
    gates = given_to("aggregate", gates | {"h_pre": gates["h_pre"][:2]}, mesh, token_shards(tokens))
    return {
        "plain": raised(phi=whole["phi"]),
        "other mesh": raised(phi=distributed(whole["phi"], other, [Replicate()] * other.ndim)),
        "unknown": raised(bias=unknown),
        "beyond": raised(bias=beyond),
        "shape": raised(phi=distributed(whole["phi"][:, 1:], mesh, [Replicate()] * mesh.ndim)),
        "fewer tokens": raised_by("aggregate", gates),
    }


def scenarios(ranks: int, _folder: Path) -> Scenarios:
    line = init_device_mesh(device(), (ranks,))
    square = init_device_mesh(device(), (ranks // 2, 2))
    pair = DeviceMesh(device(), [0, 1])
    return {
        "first": lambda: every_operator(line, [Shard(0)]),
        "second": lambda: every_operator(line, [Shard(1)]),
        "whole": lambda: every_operator(line, [Replicate()]),
        "both": lambda: every_operator(square, [Shard(0), Shard(1)]),
        "first twice": lambda: every_operator(square, [Shard(0), Shard(0)]),
        "pair": lambda: every_operator(pair, [Shard(0)]),
        "channels": lambda: over_channels(pair),
        "channels on a square": lambda: over_channels(square, [Shard(0)]),
        "channels of one token": lambda: over_channels(square, [Replicate()], ()),
        "too few channels": lambda: over_channels(line),
        "not needed": lambda: not_needed(line),
        "mixed": lambda: mixed(line),
        "accuracy": lambda: accuracy(line, lambda operator: token_shards([Shard(1)]), OPERATORS),
        "accuracy over channels": lambda: accuracy(square, lambda operator: over(operator, [Shard(1)]), WITH_CHANNELS),
        "autograd": lambda: autograd(line, [Shard(1)], False),
        "autograd over channels": lambda: autograd(pair, [Shard(3)], False),
        "compiled": lambda: autograd(line, [Shard(1)], True),
        "compiled over channels": lambda: autograd(square, [Shard(1), Shard(3)], True),
        "numbers": lambda: summed_numbers(pair),
        "sequence parallel": lambda: sequence_parallel(line),
        "as placed": lambda: as_placed(line),
        "wrong": lambda: wrong(line, square),
        "wrong on a square": lambda: wrong(square, line),
    }


if __name__ == "__main__":
    run_rank(scenarios, seconds=150)
