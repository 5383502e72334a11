"""Measure a whole DeepSeek-V4: eager, backend="inductor" and backend="mhc", in time, memory and errors against float64.

The model is `DeepseekV4ForCausalLM` of the transformers package with random weights. The run

1. prints which hyper-connections are found and rewritten (`mhc_compile.explain`);
2. times the first training step, forward and a training step;
3. compares logits, loss and every parameter's gradient with a float64 evaluation of the same model;
4. measures what compiling the hyper-connections alone costs Inductor, with and without the rewriting;
5. ends with a table. The exit status is 1 if a site was left or an error is larger than eager's.

    python -m benchmarks.whole_model                                  # CPU, float32, small
    python -m benchmarks.whole_model --device cuda --config flash     # one GPU, bfloat16, width 4096

A training step is forward and backward, without an optimizer: the optimizer is the same in all three.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.utils
import transformers
from torch import nn
from torch._inductor.utils import fresh_cache
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
    DeepseekV4TopKRouter,
)

import mhc_compile
import mhc_compile.backend  # makes "mhc" known where the package is run from its sources
from benchmarks.deepseek_v4 import SETUPS, Setup, build, randomise
from benchmarks.report import environment
from mhc_compile.passes.report import Report
from mhc_compile.testing import Errors, Float64Reference, KeepFloat64, judge

BACKENDS = ("eager", "inductor", "mhc")
START = time.perf_counter()


@dataclass
class Timing:
    """Seconds, and bytes. `compile` is the part of `first_step` that Inductor took, `peak_bytes` what a step
    needs at most in addition to the parameters: activations and gradients.
    """

    first_step: float = math.nan
    compile: float = 0.0
    forward: float = math.nan
    step: float = math.nan
    peak_bytes: int = 0


Values = dict[str, torch.Tensor]


def say(message: str) -> None:
    """Print a line with the time since the start, at once, so that progress shows through a pipe too."""
    print(f"[{time.perf_counter() - START:6.1f} s] {message}", flush=True)


def batches(setup: Setup, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """The inputs of the checked batches; the first one is also what is timed."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(setup.check_batches):
        shape = (setup.batch, setup.tokens)
        ids = torch.randint(0, setup.model["vocab_size"], shape, generator=generator).to(device)
        result.append({"input_ids": ids, "labels": ids, "use_cache": False})
    return result


def evaluate(call: Callable[..., Any], module: nn.Module, batch: dict[str, Any]) -> Values:
    """Logits, loss and the gradient of every parameter of `module` that takes part, by name, of one training step."""
    module.zero_grad(set_to_none=True)
    output = call(**batch)
    output.loss.backward()
    gradients = {f"gradient of {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return {"logits": output.logits.detach(), "loss": output.loss.detach()} | gradients


def float64_values(
    model: DeepseekV4ForCausalLM, data: list[dict[str, Any]], checkpointing: bool
) -> tuple[list[Values], float]:
    """The float64 evaluation of every batch, and the smallest margin by which a router chose its experts.

    With `checkpointing`, activations are recomputed: in float64 those of the real width would not fit a GPU.
    """
    reference = Float64Reference(model)
    # The loop over experts is the plain form and takes any dtype; grouped_mm does not take float64.
    reference.module.set_experts_implementation("eager")
    if checkpointing:
        reference.module.gradient_checkpointing_enable(
            {"use_reentrant": False, "context_fn": lambda: (contextlib.nullcontext(), KeepFloat64())}
        )
    margins = [math.inf]

    def note_margin(router: Any, _: Any, output: tuple[torch.Tensor, ...]) -> None:
        scores = router.score_fn(output[0].detach()) + router.e_score_correction_bias
        ranked = scores.topk(router.top_k + 1, dim=-1).values
        margins.append((ranked[:, -2] - ranked[:, -1]).min().item())

    for module in reference.module.modules():
        if isinstance(module, DeepseekV4TopKRouter):
            module.register_forward_hook(note_margin)
    values = [evaluate(reference, reference.module, batch) for batch in data]
    return values, min(margins)


def compare(call: Callable[..., Any], model: nn.Module, data: list[dict[str, Any]], reference: list[Values]) -> Errors:
    """The errors of `call`, which evaluates `model`, against the float64 values of the same batches."""
    errors = Errors()
    for batch, exact in zip(data, reference, strict=True):
        errors.add(evaluate(call, model, batch), exact)
    return errors


def gradients_of(errors: Errors) -> list[str]:
    return [name for name in errors.numbers if name.startswith("gradient of ")]


def larger_errors(errors: dict[str, Errors]) -> list[str]:
    """Where the error of "mhc" is larger than eager's, as sentences; `mhc_compile.testing.judge` says by what rule."""
    eager, mhc = errors["eager"], errors["mhc"]
    findings = judge(eager, mhc, ["logits", "loss"], "outputs") + judge(eager, mhc, gradients_of(mhc), "gradients")
    return [str(finding) for finding in findings if not finding.ok]


def synchronised() -> float:
    """The time, once the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def inductor_seconds() -> float:
    """What Inductor proper has taken since the metrics were cleared: lowering, code generation, compilers."""
    return sum(torch._dynamo.utils.compilation_time_metrics.get("compile_fx_inner", []))


def first_step(call: Callable[[], torch.Tensor]) -> Timing:
    """Time the first call of a freshly compiled function and its backward pass."""
    torch._dynamo.utils.compilation_time_metrics.clear()
    begun = synchronised()
    call().backward()  # type: ignore[no-untyped-call]
    return Timing(first_step=synchronised() - begun, compile=inductor_seconds())


def compiled(module: nn.Module, backend: str) -> Callable[..., Any]:
    """`module` compiled with `backend`; "eager" is the module itself."""
    return module if backend == "eager" else torch.compile(module, backend=backend)


def measure(call: Callable[..., Any], model: nn.Module, batch: dict[str, Any], steps: int, name: str) -> Timing:
    """Time to the first training step, then the medians of `steps` forward passes and training steps."""
    cuda = next(model.parameters()).is_cuda
    say(f"{name}: first training step ...")
    timing = first_step(lambda: call(**batch).loss)
    model.zero_grad(set_to_none=True)
    before = 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    forwards, whole = [], []
    for _ in range(steps + 1):
        begun = synchronised()
        loss = call(**batch).loss
        middle = synchronised()
        loss.backward()
        end = synchronised()
        forwards.append(middle - begun)
        whole.append(end - begun)
        del loss
        model.zero_grad(set_to_none=True)
    # The first of them still warms up allocators and thread pools.
    timing.forward, timing.step = statistics.median(forwards[1:]), statistics.median(whole[1:])
    timing.peak_bytes = torch.cuda.max_memory_allocated() - before if cuda else 0
    say(f"{name}: first step {timing.first_step:.1f} s, then {timing.step * 1e3:.1f} ms a step")
    return timing


class HyperConnectionStack(nn.Module):
    """A DeepSeek-V4's hyper-connections alone, combined as in its decoder layer around identity sublayers."""

    def __init__(self, config: DeepseekV4Config, depth: int) -> None:
        super().__init__()
        self.connections = nn.ModuleList(DeepseekV4HyperConnection(config) for _ in range(depth))
        self.head = DeepseekV4HyperHead(config)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, n, C] -> [batch, tokens, C]."""
        dtype = streams.dtype
        for connection in self.connections:
            post, comb, collapsed = connection(streams)
            streams = post.to(dtype).unsqueeze(-1) * collapsed.unsqueeze(-2) + torch.matmul(
                comb.to(dtype).transpose(-1, -2), streams
            )
        out: torch.Tensor = self.head(streams)
        return out


def mean_square(call: Callable[..., torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    return call(inputs).float().square().mean()


def measure_stack(setup: Setup, device: torch.device, seed: int) -> dict[str, Timing]:
    """Time to the first step of the hyper-connections alone, and what of it was Inductor's."""
    torch.manual_seed(seed)
    config = DeepseekV4Config(**setup.model)
    with device:
        stack = HyperConnectionStack(config, setup.stack_depth)
        randomise(stack)
        streams = torch.randn(setup.batch, setup.tokens, config.hc_mult, config.hidden_size, dtype=setup.dtype)
    result = {}
    for backend in ("inductor", "mhc"):
        torch._dynamo.reset()
        say(f"{backend}: {setup.stack_depth} hyper-connections alone ...")
        with fresh_cache():
            inputs = streams.clone().requires_grad_()
            result[backend] = first_step(functools.partial(mean_square, compiled(stack, backend), inputs))
        stack.zero_grad(set_to_none=True)
    torch._dynamo.reset()
    return result


def warm_up(device: torch.device) -> None:
    """Compile something trivial, so that no backend is charged for importing Inductor or starting workers."""
    with fresh_cache():
        x = torch.ones(8, device=device, requires_grad=True)
        torch.compile(lambda x: (x.sin() * x).sum(), backend="inductor")(x).backward()
    torch._dynamo.reset()


def describe(device: torch.device) -> str:
    """The hardware and the versions that the numbers belong to."""
    about = environment(device)
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "triton", "python"))
    return f"{about['hardware']}; {versions}, transformers {transformers.__version__}"


def table(timings: dict[str, Timing], errors: dict[str, Errors], stack: dict[str, Timing]) -> str:
    """The results, one column for each way to run the model."""

    def row(name: str, cell: Callable[[str], str]) -> str:
        return f"{name:<34}" + "".join(f"{cell(backend):>14}" for backend in BACKENDS)

    def stack_cell(attribute: str) -> Callable[[str], str]:
        return lambda backend: f"{getattr(stack[backend], attribute):.1f} s" if backend in stack else "-"

    lines = [
        row("", lambda b: b),
        row("time to first step", lambda b: f"{timings[b].first_step:.1f} s"),
        row("  of it Inductor", lambda b: f"{timings[b].compile:.1f} s" if b != "eager" else "-"),
        row("forward", lambda b: f"{timings[b].forward * 1e3:.2f} ms"),
        row("training step", lambda b: f"{timings[b].step * 1e3:.2f} ms"),
    ]
    if timings["eager"].peak_bytes:
        lines.append(row("peak memory of a step", lambda b: f"{timings[b].peak_bytes / 2**30:.2f} GiB"))
    lines += [
        row("error of logits", lambda b: f"{errors[b].relative('logits'):.2e}"),
        row("error of loss", lambda b: f"{errors[b].relative('loss'):.2e}"),
        row("error of all gradients", lambda b: f"{errors[b].relative(*gradients_of(errors[b])):.2e}"),
        row("largest error of a gradient", lambda b: f"{max(map(errors[b].relative, gradients_of(errors[b]))):.2e}"),
        row("hyper-connections alone, first step", stack_cell("first_step")),
        row("  of it Inductor", stack_cell("compile")),
    ]
    return "\n".join(lines)


def sites_left(report: Report, layers: int) -> list[str]:
    """What keeps the report from saying that every site was rewritten, as sentences."""
    # A layer has two sublayers, each with a generate-mix-and-aggregate and an expand-combine; then the head.
    expected = 4 * layers + 1
    problems = [f"the passes failed: {error}" for error in report.errors]
    problems += [f"{site.op} at {site.location} was left: {site.reason}" for site in report.declined]
    if len(report.rewritten) < expected:
        problems.append(f"{len(report.rewritten)} sites were rewritten, the model has {expected}")
    return problems


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.whole_model", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--config", choices=tuple(SETUPS), default="tiny")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after the first (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(given)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    return options


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    setup, device = SETUPS[options.config], torch.device(options.device)
    say(describe(device))

    model = build(setup, device, options.seed)
    data = batches(setup, device, options.seed)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    layers = model.config.num_hidden_layers
    say(
        f"DeepseekV4ForCausalLM, {layers} layers, width {model.config.hidden_size}, "
        f"{sum(sizes.values()) / 1e6:.1f} M parameters, {setup.dtype}, {setup.batch} x {setup.tokens} tokens"
    )

    report = mhc_compile.explain(model, **data[0])
    torch._dynamo.reset()
    print(report, flush=True)
    problems = sites_left(report, layers)

    say("float64 ...")
    reference, margin = float64_values(model, data, checkpointing=device.type == "cuda")
    # Rounding in float32 moves scores of about 1 by some 1e-6. With a margin near that, two correct
    # evaluations may choose different experts, and comparing them says nothing.
    if margin < 1e-5:
        raise SystemExit(f"the routers choose by a margin of only {margin:.1e}: take another --seed")

    warm_up(device)
    timings: dict[str, Timing] = {}
    errors: dict[str, Errors] = {}
    for backend in BACKENDS:
        torch._dynamo.reset()
        with fresh_cache():
            call = compiled(model, backend)
            timings[backend] = measure(call, model, data[0], options.steps, backend)
            errors[backend] = compare(call, model, data, reference)
        found = errors[backend]
        gradients = found.relative(*gradients_of(found))
        say(f"{backend}: error of logits {found.relative('logits'):.1e}, of all gradients {gradients:.1e}")
    problems += larger_errors(errors)
    del reference

    stack = measure_stack(setup, device, options.seed)

    print(f"\n{describe(device)}\n")
    print(table(timings, errors, stack))
    print(f"\nsites: {len(report.sites)} found, {len(report.rewritten)} rewritten")
    for problem in problems:
        print(f"FAILED {problem}")
    if not problems:
        print("ok: every site was rewritten, and no error against float64 is larger than eager's")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
