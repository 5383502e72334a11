"""Lowering on a GPU, through Inductor: a step of a chain as its operators would compute it, in no more memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import async_compile
from torch._inductor import config as inductor_config
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import run_and_get_code

from mhc_compile import ops, records
from mhc_compile.testing.float64 import Float64Reference
from tests.passes.fused import Sublayer, evaluate
from tests.passes.test_lower_mxfp8 import Quantize, floor, rceil
from tests.zoo import check
from tests.zoo.common import STREAMS, random_phi

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo", "fresh_cache")]


class Chain(torch.nn.Module):
    """Sublayers whose layer is an identity: with the operators' kernels deterministic, so is all of it."""

    def __init__(self, layers: int, streams: int, width: int, bias: bool) -> None:
        super().__init__()
        self.sublayers = torch.nn.ModuleList(Sublayer(streams, width) for _ in range(layers))
        for sublayer in self.sublayers:
            sublayer.layer = torch.nn.Identity()  # type: ignore[assignment]
            if not bias:
                sublayer.layer_bias = None  # type: ignore[assignment]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        for sublayer in self.sublayers:
            x = sublayer(x)
        return (x,)


def _chain(dtype: torch.dtype, tokens: int = 200, width: int = 256, streams: int = STREAMS) -> tuple[Chain, Tensor]:
    # With a bias nothing is made in a single pass over the streams.
    model = Chain(4, streams, width, bias=dtype == torch.float32).cuda()
    return model, torch.randn(tokens, streams, width, device="cuda", dtype=dtype)


# Streams with which other kernels are at work.
KINDS = pytest.mark.parametrize(
    ("dtype", "streams"), [(torch.float32, STREAMS), (torch.bfloat16, STREAMS), (torch.bfloat16, 8)], ids=str
)


@pytest.mark.parametrize("tokens", [1, 37, 256, 4096])
@KINDS
def test_bitwise_as_whole_operators(dtype: torch.dtype, streams: int, tokens: int) -> None:
    _as_whole_operators(*_chain(dtype, tokens, streams=streams))


def test_boundaries_in_one_pass() -> None:
    """And the first sublayer's gates. Each counts from zero, in its part of one tensor."""
    code = _as_whole_operators(*_chain(torch.bfloat16, 2048, 4096))
    assert code.count("boundary_pass_kernel") == 4


def _as_whole_operators(model: Chain, x: Tensor) -> str:
    """Compare a step's bits with and without lowering; returns the code of the former."""
    whole = evaluate(torch.compile(model, backend="mhc", options={"mhc.lower": False}, dynamic=False), model, x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="mhc", dynamic=False)
    values, code = run_and_get_code(evaluate, compiled, model, x)
    assert records.last().lowered["boundary"] == 3
    for name, value in values.items():
        assert torch.equal(value, whole[name]), name
    return "\n".join(code)


class Quantized(Sublayer):
    """A product of a normed input in MXFP8, with numbers and scales as torch multiplies them again."""

    def __init__(self, quantize: Quantize, width: int) -> None:
        super().__init__(STREAMS, width)
        self.quantize = quantize
        self.weight = torch.nn.Parameter(torch.randn(width, width, dtype=torch.bfloat16) * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        u, post, res = ops.generate_mix_and_aggregate(x, self.phi, self.scale, self.bias, input_norm_eps=1e-6)
        numbers, exponents = self.quantize(u)
        scales = torch.exp2(exponents.view(torch.uint8).float() - 127).unsqueeze(-1)
        f = (numbers.float().unflatten(-1, (-1, 32)) * scales).flatten(-2).bfloat16() @ self.weight
        return ops.expand_combine(f, None, post, x, res)


@pytest.mark.parametrize("tokens", [1, 200, 4096])
@pytest.mark.parametrize("quantize", [floor, rceil])
def test_inputs_in_mxfp8(quantize: Quantize, tokens: int) -> None:
    """To the bits of the program's own quantization, which Inductor compiles."""
    model, x = _chain(torch.bfloat16, tokens, 2048)
    model.sublayers = torch.nn.ModuleList(Quantized(quantize, 2048) for _ in range(4)).cuda()
    results = []
    for on in (False, True):
        torch._dynamo.reset()
        options = {"mhc.fuse.mxfp8": on, "mhc.share_layers": False}
        compiled = torch.compile(model, backend="mhc", options=options, dynamic=False)
        with torch.no_grad():
            results.append(compiled(x)[0])
        assert records.last().lowered["in MXFP8"] == (4 if on else 0)
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("dtype", "streams", "width"),
    [
        (torch.float32, STREAMS, 256),
        (torch.bfloat16, STREAMS, 256),
        (torch.bfloat16, 8, 256),
        (torch.bfloat16, STREAMS, 2048),
        (torch.bfloat16, 2, 1024),
    ],
    ids=str,
)
def test_any_number_of_tokens(dtype: torch.dtype, streams: int, width: int) -> None:
    """Compiled once for all, without a call of an operator, and to the bits of a program compiled for its batch."""
    model, x = _chain(dtype, 4096, width, streams)
    expected = {}
    for tokens in (37, 4096, 200, 2):
        torch._dynamo.reset()
        expected[tokens] = evaluate(torch.compile(model, backend="mhc", dynamic=False), model, x[:tokens])
    compiled = torch.compile(model, backend="mhc", dynamic=True)
    _, code = run_and_get_code(evaluate, compiled, model, x)  # from an empty cache
    assert not any(call in text for text in code for call in ("torch.ops.mhc.boundary", "torch.ops.mhc.generate"))
    assert any("boundary_pass_kernel" in text for text in code) == (width >= 1024)
    torch._dynamo.utils.counters.clear()
    for tokens, values in expected.items():
        found = evaluate(compiled, model, x[:tokens])
        for name, value in found.items():
            # Sums over tokens are split by their number.
            if name in ("y", "dx"):
                assert torch.equal(value, values[name]), (tokens, name)
            else:
                assert check.error(value, values[name].double()) <= 2e-6, (tokens, name)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    assert records.last().lowered["boundary_backward"] == 3


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_on_a_gpu(mode: str | None) -> None:
    """A training step against float64, with two token counts, the mode's in CUDA graphs; no operator is called."""
    model, x = _chain(torch.float32)
    reference = Float64Reference(model)
    compiled = torch.compile(model, backend="mhc", mode=mode, dynamic=False)
    for part in (x, x[:77]):
        exact = evaluate(reference, reference.module, part.double())
        eager = evaluate(model, model, part)
        _, code = run_and_get_code(evaluate, compiled, model, part)
        assert code
        assert not any("torch.ops.mhc" in text for text in code)
        for _ in range(3):  # CUDA graphs warm up, record and replay
            torch.compiler.cudagraph_mark_step_begin()
            values = evaluate(compiled, model, part)
        for name, value in exact.items():
            error, limit = check.error(values[name], value), check.error(eager[name], value)
            assert error <= max(2 * limit, 32 * torch.finfo(torch.float32).eps), name


def test_gradients_of_streams_save_memory() -> None:
    """Without the fused boundary, a chain's backward keeps one gradient of streams fewer than it would."""
    width, tokens = 1024, 4096
    options = {"mhc.fuse.boundary": False, "mhc.fuse.boundary_backward": False}
    peaks = []
    for lower in (False, True):
        torch._dynamo.reset()
        model, x = _chain(torch.bfloat16, tokens, width)
        compiled = torch.compile(model, backend="mhc", options=options | {"mhc.lower": lower}, dynamic=False)
        evaluate(compiled, model, x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        evaluate(compiled, model, x)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= peaks[0]


@pytest.mark.parametrize("shape", [(700,), (2, 350)])
def test_what_is_computed_transposed(shape: tuple[int, ...]) -> None:
    """A sublayer's output and gates that Inductor would rather leave as it made them."""
    n, width, device = STREAMS, 256, torch.device("cuda")
    *lead, tokens = shape
    leaves = {
        "x": torch.randn(*shape, n, width, device=device, dtype=torch.bfloat16),
        "f": torch.randn(*lead, width, tokens, device=device, dtype=torch.bfloat16),
        "post": torch.randn(*lead, n, tokens, device=device),
        "res": torch.rand(*shape, n, n, device=device) / n,
        "phi": random_phi(n * n + 2 * n, n * width).to(device),
        "scale": torch.ones(3, device=device),
        "bias": torch.randn(n * n + 2 * n, device=device),
    }

    def function(x: Tensor, f: Tensor, post: Tensor, res: Tensor, **parameters: Tensor) -> tuple[Tensor, ...]:
        rows, gates = torch.nn.functional.gelu(f).mT.contiguous(), torch.sigmoid(post).mT
        x = ops.expand_combine(rows, None, gates, x, res)
        return (x, *ops.generate_mix_and_aggregate(x, **parameters))

    results = []
    for lower in (False, True):
        torch._dynamo.reset()
        given = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
        out = torch.compile(function, backend="mhc", options={"mhc.lower": lower}, dynamic=False)(**given)
        gradients = torch.autograd.grad([value.float().square().sum() for value in out], list(given.values()))
        results.append((*out, *gradients))
    assert records.last().lowered["boundary"] == records.last().lowered["boundary_backward"] == 1
    for whole, lowered in zip(*results, strict=True):
        assert torch.equal(whole, lowered)


@pytest.mark.parametrize("workers", [1, 2])
def test_kernels_are_launched_from_c(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever Inductor compiles them."""
    launched = set()
    run = CachingAutotuner.run

    def watched(self: CachingAutotuner, *args: Any, **kwargs: Any) -> Any:
        result = run(self, *args, **kwargs)
        name = self.inductor_meta["kernel_name"]
        launched.update((name, getattr(launcher, "_is_static", False)) for launcher in self.launchers)
        return result

    monkeypatch.setattr(CachingAutotuner, "run", watched)
    model, x = _chain(torch.bfloat16, 5)
    with inductor_config.patch(compile_threads=workers):
        if workers > 1:
            async_compile.AsyncCompile.wait_pool_ready()
        evaluate(torch.compile(model, backend="mhc", dynamic=False), model, x)
    assert {"mix_kernel", "mix_backward_kernel"} <= {name.rpartition("_")[0] for name, _ in launched}
    assert all(static for _, static in launched)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("tokens", "width"), [(5, 256), (2048, 4096)])
def test_on_another_gpu_than_the_current_one(tokens: int, width: int) -> None:
    model, x = _chain(torch.bfloat16, tokens, width)
    expected = evaluate(torch.compile(model, backend="mhc", dynamic=False), model, x)
    other = x.to("cuda:1")
    for name, value in evaluate(torch.compile(model.to("cuda:1"), backend="mhc", dynamic=False), model, other).items():
        assert value.device == other.device
        assert torch.equal(value.to(expected[name].device), expected[name]), name


def test_a_thread_that_has_not_called_cuda() -> None:
    model, x = _chain(torch.bfloat16, 5)
    compiled = torch.compile(model, backend="mhc", dynamic=False)
    with torch.no_grad():
        (expected,) = compiled(x)
        results = []
        thread = threading.Thread(target=torch.no_grad()(lambda: results.extend(compiled(x))))
        thread.start()
        thread.join()
    assert torch.equal(results[0], expected)
