"""`verify` finds a wrong rewriting, passes a right one, and leaves everything as it was."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mhc_compile
from mhc_compile import backend, compat, passes, verification
from mhc_compile.testing import evaluation
from tests.fuzz.plants import planted
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SHAPE = (2, 3, 4, 6)
quietly: dict[str, Any] = {"inductor": False, "say": None}


class Model(Sublayer):
    """Dropout, a running count, and outputs in nested containers."""

    def __init__(self) -> None:
        super().__init__(4, 6, 3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        out = super().forward(F.dropout(x, 0.25, self.training))
        return {"streams": out, "more": (out.mean(), None, [x.shape[0]])}


@pytest.mark.slow
def test_a_right_model_passes_and_is_left_as_it_was() -> None:
    model = Model()
    model.weight.grad = torch.full_like(model.weight, 3.0)
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(SHAPE)
    random, lines = torch.get_rng_state(), []
    result = mhc_compile.verify(model, x, inductor=False, say=lines.append)
    assert result.ok
    assert result.failures == []
    assert {site.op for site in result.report.rewritten} == {"generate_mix_and_aggregate", "expand_combine"}
    assert set(result.errors) == {"eager", "mhc"}
    names = set(result.errors["mhc"].numbers)
    assert {"output['streams']", "output['more'][0]", "gradient of phi", "gradient of input[0][0]"} <= names
    # float32 against float64: some hundred roundings of 6e-8; dropout of other elements would be off by a half
    assert 0 < result.errors["eager"].relative("output['streams']") < 1e-5
    assert "\n".join(lines).endswith(f"\n{result}")
    assert "ok: as accurate as eager" in lines[-1]
    # as it was
    assert torch.equal(random, torch.get_rng_state())
    assert model.training
    assert torch.equal(model.weight.grad, torch.full_like(model.weight, 3.0))
    assert model.phi.grad is None
    assert x.grad is None
    assert not x.requires_grad
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    gc.collect()
    assert not [code for ref in torch._dynamo.convert_frame.output_codes.seen if (code := ref()) is not None]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transposed mixing", "gradient lost"])
def test_a_wrong_rewriting_is_caught(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "run", planted(kind))
    with pytest.raises((mhc_compile.VerificationError, ValueError)) as caught:
        mhc_compile.verify(Sublayer(4, 6, 3, 2), torch.randn(SHAPE), **quietly)
    if kind == "gradient lost":
        assert "gradient of weight" in str(caught.value)
    else:
        assert "<-- larger than eager's" in str(caught.value)
        assert "FAILED" in str(caught.value)
        assert not caught.value.verification.ok
        assert caught.value.verification.failures


@pytest.mark.slow
def test_a_compiled_model_is_verified_as_it_is_written() -> None:
    """`model.compile()` changes what a call of the model does: eager's results would be those of a compiled one."""

    def fails(gm: Any, inputs: Any) -> Any:
        raise AssertionError("called as it is compiled")

    model = Sublayer(4, 6, 3, 2)
    model.compile(backend=fails)
    assert mhc_compile.verify(model, torch.randn(2, 3, 4, 6), **quietly).ok
    compiled: Any = torch.compile(Sublayer(4, 6, 3, 2), backend=fails)
    assert mhc_compile.verify(compiled, torch.randn(2, 3, 4, 6), **quietly).ok
    with pytest.raises(Exception, match="called as it is compiled"):
        model(torch.randn(2, 3, 4, 6))


def test_no_gradient_is_as_good_as_zeros() -> None:
    """AOTAutograd gives zeros to a parameter that an index alone is made of, eager code nothing."""

    class Beside(Sublayer):
        def __init__(self) -> None:
            super().__init__(4, 6, 3, 2)
            self.unused = nn.Parameter(torch.randn(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            return out + F.linear(out, self.unused).argmax(-1, keepdim=True)

    assert mhc_compile.verify(Beside(), torch.randn(SHAPE), **quietly).ok


def test_outputs_alone() -> None:
    # One of the outputs is a single number, whose rounding is a matter of luck.
    torch.manual_seed(3)
    model = Model().eval()
    result = mhc_compile.verify(model, torch.randn(SHAPE), grad=False, **quietly)
    assert result.ok
    assert set(result.errors["mhc"].numbers) == {"output['streams']", "output['more'][0]"}
    assert not model.training


def test_a_model_without_hyper_connections_is_right() -> None:
    result = mhc_compile.verify(nn.Linear(4, 3), input=torch.randn(2, 4), say=None)
    assert result.ok
    assert set(result.errors) == {"eager", "inductor", "mhc"}
    assert "right, but nothing was rewritten" in str(result)


@pytest.fixture
def compilations() -> Iterator[list[Any]]:
    """What Dynamo compiles."""
    found: list[Any] = []

    def note(code: Any, compilation: Any, used: Any) -> None:
        found.append(compilation)

    compat.watched.at_compiled.append(note)
    yield found
    compat.watched.at_compiled.remove(note)


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_code_and_its_report_stay(inductor: bool, compilations: list[Any]) -> None:
    """Those of the same model, too, and however often it is verified."""
    model, x = Sublayer(4, 6, 3, 2), torch.randn(SHAPE)
    with torch.no_grad():
        compiled = torch.compile(model, backend="mhc")
        out, before = compiled(x), mhc_compile.report()
        reports = [mhc_compile.verify(model, x, grad=False, **quietly | {"inductor": inductor}).report for _ in "ab"]
        compilations.clear()
        assert torch.equal(compiled(x), out)
        assert compilations == []
        assert mhc_compile.report() == before
        compiled(torch.randn(3, 5, 4, 6))
        assert len(compilations) == 1
    for report in reports:
        assert report.sites == before.sites
        assert (report.graphs, report.compiled) == (1, 1)
    assert (mhc_compile.report().graphs, mhc_compile.report().compiled) == (1, 2)


@pytest.mark.usefixtures("passes_only")
def test_parts_that_are_compiled_run_as_they_are_written(compilations: list[Any]) -> None:
    """In the eager and the float64 evaluation; what mhc is compared with would be its own work otherwise."""
    part = torch.compile(Sublayer(4, 6, 3, 2), backend="mhc")
    model, x = nn.Sequential(part), torch.randn(SHAPE)
    with torch.no_grad():
        result = mhc_compile.verify(model, x, grad=False, **quietly)
        assert len(compilations) == 1
        assert result.report.rewritten
        model(x)
    assert len(compilations) == 2


class CallsCompiled(Sublayer):
    """Its sublayer is a function that is compiled, whatever calls it."""

    def __init__(self, *args: int, backend: Any) -> None:
        super().__init__(*args)
        self.compiled = [torch.compile(lambda u, weight: torch.tanh(F.linear(u, weight)), backend=backend)]

    def layer(self, layer_input: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.compiled[0](layer_input, self.weight)
        return out


@pytest.mark.usefixtures("passes_only")
@pytest.mark.parametrize("grad", [False, True])
def test_functions_that_the_model_compiles_run_as_they_are_written(grad: bool) -> None:
    """In the eager and the float64 evaluation. In that of mhc, Dynamo looks through them."""

    def fails(gm: Any, inputs: Any) -> Any:
        raise AssertionError("called as it is compiled")

    model, x = CallsCompiled(4, 6, 3, 2, backend=fails), torch.randn(SHAPE)
    result = mhc_compile.verify(model, x, grad=grad, **quietly)
    assert result.ok
    assert len(result.report.rewritten) == len(result.report.sites)
    with pytest.raises(Exception, match="called as it is compiled"):
        model(x)


@pytest.mark.usefixtures("passes_only")
@pytest.mark.parametrize("compiled", [False, True])
def test_of_data_parallel_the_module_within_is_verified(compiled: bool) -> None:
    """Its reducer counts the backward passes of its own forward passes: these do not count, and training goes on."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped: Any = nn.parallel.DistributedDataParallel(Sublayer(4, 6, 3, 2), find_unused_parameters=True)
        wrapped = torch.compile(wrapped, backend="mhc") if compiled else wrapped
        x = torch.randn(SHAPE)
        for _ in range(2):
            result = mhc_compile.verify(wrapped, x, **quietly)
            assert result.ok
            assert "gradient of phi" in result.errors["mhc"].numbers
            wrapped(x).sum().backward()
        assert any(parameter.grad is not None for parameter in wrapped.parameters())
    finally:
        torch.distributed.destroy_process_group()


class Decorated(Sublayer):
    """A model that compiles a function itself."""

    @torch.compile(backend="mhc")
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


@pytest.mark.usefixtures("passes_only")
def test_what_the_model_compiles_itself_stays(compilations: list[Any]) -> None:
    model, x = nn.Sequential(Decorated(4, 6, 3, 2)), torch.randn(SHAPE)
    with torch.no_grad():
        model(x)
        before = mhc_compile.report()
        assert before.rewritten
        mhc_compile.verify(model, x, grad=False, **quietly)
        compilations.clear()
        model(x)
    assert compilations == []
    assert mhc_compile.report() == before


class Renamed(nn.Linear):
    """A method that the library which has it is about to rename."""

    def gradient_checkpointing_disable(self) -> None:
        warnings.warn("renamed", FutureWarning, stacklevel=2)


def test_it_warns_of_nothing_that_only_it_calls() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mhc_compile.verify(Renamed(4, 3), torch.randn(2, 4), inductor=False, say=None).ok


def test_raising_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "run", planted("transposed mixing"))
    result = mhc_compile.verify(Sublayer(4, 6, 3, 2), torch.randn(SHAPE), grad=False, raises=False, **quietly)
    assert not result.ok


@pytest.mark.parametrize(("unlucky", "ok"), [(1, True), (100, False)])
def test_one_unlucky_run_does_not_decide(unlucky: int, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that is less accurate in every run is no luck."""
    model, x, lines, calls = Sublayer(4, 6, 3, 2), torch.randn(SHAPE), [], []

    def compiled(x: Tensor) -> Tensor:
        out: Tensor = model(x)
        calls.append(out)
        noise = torch.randn_like(out)
        # Allowed are four roundings, 4.8e-7.
        return out + (len(calls) <= unlucky) * 8e-7 * noise * out.norm() / noise.norm()

    monkeypatch.setattr(
        verification, "_compiled", lambda module, run, result: nullcontext(module if run == "eager" else compiled)
    )
    before = copy.deepcopy(model.state_dict())
    result = mhc_compile.verify(model, x, grad=False, inductor=False, raises=False, say=lines.append)
    assert result.ok == ok
    assert len(calls) == 9  # whatever the first of them show
    more = "8 runs with parameters perturbed by 1% show if that is chance ..."
    assert f"verify: 2 results are less accurate in one run; {more}" in lines
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(calls[0], model(x))
    assert not torch.equal(calls[0], calls[1])


@torch.library.custom_op("mhc_test::lower", mutates_args=())
def _lower(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        raise RuntimeError("got Double\nin two lines")
    return x.clone()


def test_an_operator_that_does_not_take_float64() -> None:
    class Lower(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = _lower(x)
            return out

    words = "model: it runs as it is, and its float64 evaluation does not: RuntimeError: got Double in two lines"
    with pytest.raises(ValueError, match=words):
        mhc_compile.verify(Lower(), torch.ones(2), grad=False, **quietly)


def test_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (lambda x: x, torch.compile(lambda x: x), nn.Linear(2, 2).forward):
        words = f"model: expected a torch.nn.Module, got {type(function).__name__}: .*; pass the module whose method"
        with pytest.raises(TypeError, match=words):
            mhc_compile.verify(function, torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no output requires a gradient; pass grad=False"):
        mhc_compile.verify(nn.Embedding(3, 2).requires_grad_(False), torch.tensor([1]), **quietly)
    monkeypatch.setattr("mhc_compile.testing.evaluation._free_memory", lambda device: 8.0)
    with pytest.raises(MemoryError, match=r"its float64 copy and gradients need at least .* on cpu, which has .* left"):
        mhc_compile.verify(nn.Linear(4, 3), torch.randn(2, 4), **quietly)


def test_the_least_memory_that_float64_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 15 numbers the copy in float64, its gradients and eager's; integers are copied as they are."""
    model = nn.Linear(4, 3)
    model.register_buffer("table", torch.zeros(100, dtype=torch.uint8))
    for grad, needed in ((True, 15 * (8 + 8 + 4) + 100), (False, 15 * 8 + 100)):
        monkeypatch.setattr(evaluation, "_free_memory", lambda device, needed=needed: float(needed))
        evaluation.check_memory(model, grad)
        monkeypatch.setattr(evaluation, "_free_memory", lambda device, needed=needed: needed - 1.0)
        with pytest.raises(MemoryError, match="need at least"):
            evaluation.check_memory(model, grad)


def test_inductor_alone_is_run_while_ours_is_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what will be run is said before it is."""
    at_work: list[bool] = []
    evaluate = verification.evaluate

    def watched(*args: Any, **kwargs: Any) -> Any:
        at_work.append(bool(backend._settings()))
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(verification, "evaluate", watched)
    lines: list[str] = []
    with mhc_compile.enable():
        mhc_compile.verify(nn.Linear(4, 3), input=torch.randn(2, 4), say=lines.append)
        assert backend._settings()
    # mhc after it.
    assert at_work == [False, True]
    assert lines[:2] == [
        "verify: runs the model in float64, eagerly, compiled by Inductor, compiled by mhc",
        "verify: a first compilation may take minutes; inductor=False leaves out plain Inductor's",
    ]
