"""What else torch.compile does: around it, inside it and after it, hyper-connections stay rewritten and right.

Most of it happens before Inductor, so most tests run the rewritten graphs operator by operator.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.export import Dim
from transformers import DynamicCache

import mhc_compile
from mhc_compile import passes, records
from tests.e2e.deepseek_models import Stack, deepseek
from tests.zoo.check import rewriting
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

ROOT = str(Path(__file__).parents[2])
SHAPE = (2, 3, 4, 6)
BOTH = ["expand_combine", "generate_mix_and_aggregate"]


def _sublayer() -> Sublayer:
    return Sublayer(4, 6, 3, 2)


def _close(got: Tensor, want: Tensor) -> None:
    # Two float32 evaluations of a few hundred sums each: 1e-5 is some fifty roundings.
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.detach().abs().max()))


def _operators(report: Any) -> list[str]:
    assert report.errors == []
    return sorted(site.op for site in report.rewritten)


class TwoHalves(Sublayer):
    """A graph break between reading the streams and writing them."""

    def layer(self, layer_input: Tensor, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().layer(layer_input, x)


def test_a_graph_break_in_the_middle_of_a_block() -> None:
    """What is left on each side is rewritten still: the gates and the reading, and the writing."""
    model = TwoHalves(4, 6, 3, 2)
    program, report = rewriting(model)
    with torch.no_grad():
        x = torch.randn(SHAPE)
        _close(program(x), model(x))
    assert _operators(report) == BOTH
    assert report.graphs > 1


def test_marked_dynamic_dimensions_compile_once() -> None:
    model = _sublayer()
    program, report = rewriting(model)
    counters.clear()
    with torch.no_grad():
        for batch, length in ((2, 3), (5, 7), (3, 9)):
            x = torch.randn(batch, length, 4, 6)
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 1)
            _close(program(x), model(x))
    assert counters["stats"]["unique_graphs"] == 1
    assert _operators(report) == BOTH


def test_automatic_dynamic_over_batch_and_length_compiles_twice_at_most() -> None:
    model = _sublayer()
    program, report = rewriting(model)
    counters.clear()
    with torch.no_grad():
        for batch, length in ((2, 3), (5, 7), (3, 9), (8, 4)):
            x = torch.randn(batch, length, 4, 6)
            _close(program(x), model(x))
    assert counters["stats"]["unique_graphs"] <= 2
    assert report.declined == []


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    model = _sublayer()
    program, report = rewriting(model, fullgraph=True)
    with mode():
        x = torch.randn(SHAPE)
        _close(program(x), model(x))
    assert _operators(report) == BOTH


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_of_inductor(mode: str) -> None:
    """On a CPU there are no CUDA graphs and little to tune; the modes are accepted, and the results right."""
    model, x = _sublayer(), torch.randn(SHAPE)
    with torch.no_grad():
        _close(torch.compile(model, backend="mhc", mode=mode, fullgraph=True)(x), model(x))


def test_regional_compilation() -> None:
    """Each layer compiled for itself."""
    model = nn.Sequential(*(_sublayer() for _ in range(3)))
    x = torch.randn(SHAPE)
    reports = []
    with torch.no_grad():
        want = model(x)
        for layer in model:
            layer.forward, report = rewriting(layer.forward)
            reports.append(report)
        _close(model(x), want)
    assert all(_operators(report) == BOTH for report in reports)


def test_gradient_checkpointing_of_transformers() -> None:
    model = deepseek(layers=1)
    ids = torch.randint(0, 128, (2, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    want = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    program, report = rewriting(model)
    program(input_ids=ids, labels=ids).loss.backward()
    assert _operators(report) == sorted([*BOTH * 2, "head"])
    for name, gradient in want.items():
        got = dict(model.named_parameters())[name].grad
        # Float32 rounding through attention and experts, relative to the tensor's size.
        assert (got - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name


@pytest.mark.slow
def test_generation_with_a_cache() -> None:
    """Greedy decoding with transformers' KV cache chooses the tokens that eager chooses."""
    model = deepseek(layers=1).eval()
    model.config.use_cache = model.generation_config.use_cache = True
    ids = torch.randint(0, 128, (1, 6))
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, past_key_values=DynamicCache(config=model.config), **settings)
    program, report = rewriting(model.forward)
    model.forward = program
    got = model.generate(ids, past_key_values=DynamicCache(config=model.config), **settings)
    assert got.tolist() == want.tolist()
    assert report.errors == []
    assert {"expand_combine", "generate_mix_and_aggregate", "head"} <= {site.op for site in report.rewritten}
    assert report.declined == []


# Its first package is loaded before anything that makes reports is imported. The last is built after one with a report.
LOAD = """
import sys, torch, mhc_compile
for path in sys.argv[1:]:
    loaded = [torch._inductor.aoti_load_package(path) for _ in range(2)]
    print(mhc_compile.report(), "packaged", mhc_compile.report().packaged, mhc_compile.report().cached)
"""


def _check_report_of_package(path: str, built: str) -> None:
    """Where a package is loaded, its report is that of the process that built it."""
    plain = path.replace("model.pt2", "plain.pt2")
    torch._inductor.aoti_compile_and_package(
        torch.export.export(torch.nn.Tanh(), (torch.randn(3),)), package_path=plain
    )
    told = _loads(path, plain).split("packaged")
    # The rewriting took no time in this process.
    assert re.sub(r"in 1 graph \(.*? s\)", "in 1 graph from a package (0.00 s)", built) == told[0].rstrip()
    assert told[1].startswith(" 1 0\n")
    assert "2 of 2 hyper-connection sites rewritten in 1 graph from a package (" in told[1]
    assert "; 2 loaded packages without a report\n" in told[1]
    assert _loads(plain).splitlines()[0].endswith("rewritten in 0 graphs (0.00 s); 2 loaded packages without a report")


def _loads(*paths: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", LOAD, *paths]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": ROOT}
    ).stdout


# torch's own modules for packages use what its own pytree has deprecated.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")
@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_export_and_ahead_of_time_compilation(tmp_path: Path, dynamic: bool) -> None:
    """`enable` reaches AOTInductor too; the package needs the operators registered where it is loaded."""
    model, x = _sublayer().eval(), torch.randn(SHAPE)
    with torch.no_grad():
        sizes: Any = ({0: Dim("batch"), 1: Dim("length")},) if dynamic else None
        exported = torch.export.export(model, (x,), dynamic_shapes=sizes)
        with mhc_compile.enable():
            path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
        assert _operators(records.last()) == BOTH
        built = str(mhc_compile.report())
        loaded = torch._inductor.aoti_load_package(path)
        assert str(mhc_compile.report()) == built  # and no second time
        _check_report_of_package(path, built)
        for given in (x, torch.cat([x, x[:1]]), torch.cat([x, x[:, :1]], 1)) if dynamic else (x,):
            _close(loaded(given), model(given))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")
@pytest.mark.parametrize("lower", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_defaults_under_ahead_of_time_compilation(lower: bool, tmp_path: Path) -> None:
    """Numbers that operators have by default and a call does not name: DeepSeek's 39 half-steps."""
    model, x = Stack(depth=1).eval(), torch.randn(2, 3, 32)
    with torch.no_grad():
        exported = torch.export.export(model, (x,))
        with mhc_compile.enable({"mhc.lower": lower}):
            path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
        _close(torch._inductor.aoti_load_package(path)(x), model(x))


def test_an_exported_program_is_compiled_like_any_module() -> None:
    model, x = _sublayer().eval(), torch.randn(SHAPE)
    with torch.no_grad():
        program, report = rewriting(torch.export.export(model, (x,)).module())
        _close(program(x), model(x))
    assert _operators(report) == BOTH


def test_what_the_passes_cost() -> None:
    """A fraction of what Dynamo takes to trace the model; Inductor, which takes most, comes on top of that."""
    model, x = Stack(depth=8), torch.randn(2, 3, 32)
    seconds = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        begin = time.process_time()
        passes.run_recursively(gm)
        seconds.append(time.process_time() - begin)
        return gm.forward

    torch.compile(Stack(depth=1), backend=backend)(x)  # what is done once in a process is not a model's cost
    begin = time.process_time()
    torch.compile(model, backend=backend)(x)
    whole = time.process_time() - begin
    # Measured: a quarter of the whole, 30 ms a sublayer; twice that would be noticed, noise is less.
    assert seconds[1] < 0.5 * whole
