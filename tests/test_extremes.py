"""Values at the edges of a dtype, no tokens, many sizes, and long runs.

What is not a number is where eager code has it, and the judge of numbers is float64.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import mhc_compile
from mhc_compile import compat, records
from mhc_compile.forms import SINKHORN_STARTS, Gates, Rms, Sinkhorn
from mhc_compile.ops import _loops, _mix
from mhc_compile.passes.report import Report
from mhc_compile.testing.float64 import Float64Reference
from tests import faults
from tests.passes.forms import GROUPS, Form
from tests.zoo import check
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FORMS = {form.text: form for forms in GROUPS.values() for form in forms}
# One for each kind of gates and of norms; the others are thorough.
FEW = (
    "DeepSeek-V4, transformers",
    "Liger",
    "[n] and [n, n], broadcast",
    "Hyper-Connections (arXiv 2409.19606): tanh, static + dynamic",
    "streams that are mixed before they are read",
    "RMS of each stream",
    "none",
    "never one tensor",
)
# Its identity matrix is in float32, so that eager code runs in float32 alone.
MIXED = ("x + (H - I) x",)
Change = Callable[[nn.Module, Sequence[Tensor]], None]


def _one(value: float) -> Change:
    """One number in the middle of the streams."""

    def change(model: nn.Module, given: Sequence[Tensor]) -> None:
        given[0].view(-1)[given[0].numel() // 2 + 1] = value

    return change


def _all(factors: dict[torch.dtype, float]) -> Change:
    def change(model: nn.Module, given: Sequence[Tensor]) -> None:
        given[0].mul_(factors[given[0].dtype])

    return change


def _logits(model: nn.Module, given: Sequence[Tensor]) -> None:
    """Logits of 1e4, by the first parameter that makes them, if there is one."""
    for name, parameter in model.named_parameters():
        if any(word in name for word in ("scale", "alpha", "phi")):
            parameter.mul_(1e4)
            return


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
EXTREMES: dict[str, Change] = {
    "nan": _one(math.nan),
    "inf": _one(math.inf),
    "-inf": _one(-math.inf),
    "zeros": _all({F32: 0.0, F16: 0.0, BF16: 0.0}),
    "denormal": _all({F32: 1e-40, F16: 1e-6, BF16: 1e-39}),
    "large": _all({F32: 1e30, F16: 6e4, BF16: 1e30}),
    "logits": _logits,
}


def _results(
    call: Any, parameters: Sequence[Tensor], given: Sequence[Tensor], scale: float = 1.0
) -> list[Tensor | None]:
    """Outputs, and gradients of a fixed random combination of them, times scale."""
    torch.manual_seed(5)
    given = [tensor.detach().clone().requires_grad_() for tensor in given]
    outputs = [out for out in tree_leaves(call(*given)) if isinstance(out, Tensor)]
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(out.shape, generator=generator, dtype=torch.float64) * scale for out in outputs]
    pairs = [(out, weight.to(out.dtype)) for out, weight in zip(outputs, weights, strict=True) if out.requires_grad]
    found = torch.autograd.grad(
        [out for out, _ in pairs], [*given, *parameters], [weight for _, weight in pairs], allow_unused=True
    )
    return [*(out.detach() for out in outputs), *found]


def _kinds(value: Tensor) -> Tensor:
    """0 for numbers, 1 and -1 for infinities, 2 for what is not a number."""
    return value.isposinf().int() - value.isneginf().int() + 2 * value.isnan().int()


def _complaint(eager: Tensor, ours: Tensor, exact: Tensor) -> str | None:
    """What is wrong with a result.

    Each value has the kind that it has in eager code, or the one that it has in float64: where eager code overflows, a
    number may stand. The error of numbers is no larger than eager code's, but for a few roundings of so few numbers.
    """
    kinds, usual = _kinds(ours), _kinds(eager)
    allowed = (kinds == usual) | (kinds == _kinds(exact)) | (kinds == _kinds(exact.to(ours.dtype)))
    if not allowed.all():
        return f"{int((~allowed).sum())} of {ours.numel()} values are of another kind"
    numbers = (kinds == 0) & (usual == 0) & (_kinds(exact) == 0)
    size, error, found = (
        value[numbers].double().norm().item() for value in (exact, eager.double() - exact, ours.double() - exact)
    )
    limit = check.SLACK_FEW * error + 2 * check.FLOOR_ROUNDINGS * torch.finfo(ours.dtype).eps * size
    return None if found <= limit else f"an error of {found:.1e}, where eager code has {error:.1e}"


def _check(form: Form, change: Change, dtype: torch.dtype, scale: float = 1.0) -> list[str]:
    """What is wrong with results.

    Behind logits of 1e4, the last bit of a number decides the errors of a whole model. If errors seem too large, those
    of inputs and parameters that differ in this bit are judged with them.
    """
    if form.text in MIXED and dtype != F32:
        with pytest.raises(RuntimeError, match="expected scalar type"):
            _judged(form, change, dtype, scale)
        return []
    results = _judged(form, change, dtype, scale)
    if not _complaints(results):
        return []
    others = [_judged(form, change, dtype, scale, seed) for seed in range(5)]
    return _complaints(
        [[torch.stack(part) for part in zip(*draws, strict=True)] for draws in zip(results, *others, strict=True)]
    )


def _complaints(results: list[list[Tensor]]) -> list[str]:
    complaints = [(number, _complaint(*values)) for number, values in enumerate(results)]
    return [f"result {number}: {complaint}" for number, complaint in complaints if complaint is not None]


def _judged(
    form: Form, change: Change, dtype: torch.dtype, scale: float, differs: int | None = None
) -> list[list[Tensor]]:
    """Each result of eager code, ours, and that in float64.

    differs: the seed of what changes the last bits of inputs and parameters, for the first two.
    """
    torch._dynamo.reset()
    torch.manual_seed(3)
    model = form.build().to(dtype)
    given = [tensor.to(dtype) for tensor in form.inputs()]
    with torch.no_grad():
        change(model, given)
    reference = Float64Reference(model)
    exact_given = [tensor.double() for tensor in given]
    if differs is not None:
        generator = torch.Generator().manual_seed(differs)
        with torch.no_grad():
            for tensor in (*given, *model.parameters()):
                tensor *= 1 + torch.finfo(dtype).eps * torch.randint(-1, 2, tensor.shape, generator=generator)
    rewritten, report = check.rewriting(model)
    eager = _results(model, [*model.parameters()], given, scale)
    ours = _results(rewritten, [*model.parameters()], given, scale)
    exact = _results(reference, [*reference.module.parameters()], exact_given, scale)
    assert bool(report.rewritten) == bool(form.operators)
    assert [value is None for value in eager] == [value is None for value in ours] == [value is None for value in exact]
    triples = ([*values] for values in zip(eager, ours, exact, strict=True))
    return [[value for value in values if value is not None] for values in triples if values[0] is not None]


@pytest.mark.parametrize("name", FEW)
def test_extremes(name: str) -> None:
    for extreme, change in EXTREMES.items():
        assert _check(FORMS[name], change, F32) == [], extreme


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("name", FORMS)
def test_extremes_in_every_form(name: str, dtype: torch.dtype) -> None:
    for extreme, change in EXTREMES.items():
        if name not in FEW or dtype != F32:
            assert _check(FORMS[name], change, dtype) == [], extreme


def test_the_judge_of_extremes_sees_what_is_wrong() -> None:
    eager = torch.tensor([1.0, math.nan, math.inf, -math.inf, math.inf])
    exact = torch.tensor([1.0 + 1e-8, math.nan, math.inf, -math.inf, 1e39], dtype=torch.float64)
    assert _complaint(eager, eager.clone(), exact) is None
    for at, value in ((0, math.nan), (0, 1.1), (1, 0.0), (2, math.nan), (3, math.inf), (4, math.nan), (4, -math.inf)):
        ours = eager.clone()
        ours[at] = value
        assert _complaint(eager, ours, exact) is not None, (at, value)


# Loops and scaled gradients.


@pytest.mark.parametrize("start", SINKHORN_STARTS)
def test_extremes_in_loops(start: str) -> None:
    """The loops in C++, forward and backward, where numbers are and where they are not as in the references."""
    flat = Sinkhorn(5, start, eps=1e-6).as_kwargs()
    forms = {"rms": Rms(), "gates": Gates(), "sinkhorn": Sinkhorn(5, start, eps=1e-6)}
    for value in (math.nan, math.inf, -math.inf, -1e4, 1e-40):
        for at in ("x", "phi", "scale", "bias"):
            generator = torch.Generator().manual_seed(0)
            x, phi = torch.randn(9, 4, 6, generator=generator), torch.randn(24, 24, generator=generator)
            given = {"x": x, "phi": phi, "scale": torch.ones(3), "bias": torch.zeros(24)}
            given[at].view(-1)[given[at].numel() // 2] = value
            wide = {name: tensor.double() for name, tensor in given.items()}
            *loops, h, ms = _loops.mix(*given.values(), **flat)
            references = _mix.narrow_forward(h, ms, given["scale"], given["bias"], 4, **forms)
            rows = wide["x"].flatten(1)
            exact = _mix.narrow_forward(
                rows @ wide["phi"].t(), rows.square().mean(-1), wide["scale"], wide["bias"], 4, **forms
            )
            for ours, eager, true in zip(loops, references, exact, strict=True):
                assert _complaint(eager.reshape(ours.shape), ours, true.reshape(ours.shape)) is None, (value, at)


def test_settings_that_let_inductor_reorder_sums_leave_the_loops() -> None:
    """The remainders of their sums would be 0. The command says so last."""
    commands: list[str] = []

    class Stop(Exception):
        pass

    def note(command: str, cwd: str) -> None:
        commands.append(command)
        raise Stop

    unsafe = {"cpp.enable_unsafe_math_opt_flag": True, "cpp.enable_floating_point_contract_flag": "fast"}
    with pytest.MonkeyPatch.context() as patch, compat.inductor_config().patch(unsafe), compat.fresh_inductor_cache():
        patch.setattr("torch._inductor.cpp_builder.run_compile_cmd", note)
        with pytest.raises(Stop):
            compat.cpp_library("// nothing")
    (command,) = commands
    for name, last in (("unsafe-math-optimizations", False), ("finite-math-only", False)):
        assert [flag.startswith("-fno-") for flag in command.split() if flag.endswith(name)][-1] is not last
    assert [flag for flag in command.split() if flag.startswith("-ffp-contract=")][-1] == "-ffp-contract=off"


@pytest.mark.parametrize(
    "name", ["DeepSeek-V4, transformers", "Liger", "one [n, n + 1] product for reading and mixing"]
)
def test_gradients_scaled_by_2_to_24(name: str) -> None:
    """In float16 most of them overflow, where eager code's do."""
    assert _check(FORMS[name], lambda model, given: None, F16, 2.0**24) == []


def _scaled_steps(call: Callable[..., Tensor], model: nn.Module, x: Tensor) -> tuple[list[float], list[Tensor]]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scales = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = call(x).square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, [parameter.detach() for parameter in model.parameters()]


def test_a_gradient_scaler_finds_the_same_scale() -> None:
    results = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model, x = Sublayer(4, 6, 3, 2), torch.randn(2, 3, 4, 6)
        call, report = check.rewriting(model) if compiles else (model, None)
        results.append(_scaled_steps(call, model, x))
        assert report is None or len(report.rewritten) == 2
    (scales, parameters), (found, others) = results
    assert scales == found
    assert scales[0] < 2.0**24
    taken = sum(scale == before for before, scale in itertools.pairwise(scales))
    assert taken > 2
    torch.manual_seed(0)
    exact, x = Sublayer(4, 6, 3, 2).double(), torch.randn(2, 3, 4, 6).double()
    optimizer = torch.optim.SGD(exact.parameters(), lr=1e-3)
    for _ in range(taken):
        optimizer.zero_grad()
        exact(x).square().sum().backward()
        optimizer.step()
    for one, other, wide in zip(parameters, others, exact.parameters(), strict=True):
        assert _complaint(one, other, wide.detach()) is None


# Tokens, and long runs.


@pytest.mark.parametrize("name", FEW)
def test_no_tokens(name: str) -> None:
    torch.manual_seed(0)
    form = FORMS[name]
    model, (given, *_) = form.build(), form.inputs()
    nothing = given[:0]
    rewritten, _ = check.rewriting(model)
    pairs = zip(
        _results(model, [*model.parameters()], [nothing]),
        _results(rewritten, [*model.parameters()], [nothing]),
        strict=True,
    )
    for one, other in pairs:
        assert (one is None) == (other is None)
        assert one is None or other is None or (one.shape == other.shape and torch.equal(one, other))


@pytest.fixture(autouse=True)
def _short_where_thinned(request: pytest.FixtureRequest) -> None:
    """Runs of minutes are for `make test-all`."""
    params = getattr(request.node, "callspec", None)
    thorough = request.node.get_closest_marker("thorough") is not None
    if request.config.getoption("--thin") and thorough and params is not None and "times" in params.params:
        pytest.skip("takes minutes, and the short case runs")


def _counts() -> dict[str, int]:
    """How many objects there are of the kinds that a graph would be held by."""
    while gc.collect():  # what weak references tell of may be freed in the next round
        pass
    kinds = (torch.Tensor, torch.fx.Graph, torch.fx.Node, FakeTensorMode, records.Compiled, Report)
    objects = [type(one) for one in gc.get_objects()]
    return {kind.__name__: sum(issubclass(one, kind) for one in objects) for kind in kinds}


def _memory() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _step(call: Callable[..., Tensor], model: nn.Module, x: Tensor) -> None:
    call(x).square().sum().backward()
    model.zero_grad()


def _after(times: int, run: Callable[[int], None]) -> tuple[dict[str, int], int]:
    for number in range(times):
        run(number)
    return _counts(), _memory()


# Allocators keep pages for later.
_ROOM = 1 << 25


def _is_flat(run: Callable[[int], None], times: int) -> None:
    counts, memory = _after(times // 4, run)
    later, more = _after(times - times // 4, run)
    assert {kind: count for kind, count in later.items() if count > counts[kind]} == {}, counts
    assert more - memory < _ROOM, f"{(more - memory) >> 20} MiB more"


@pytest.mark.slow
@pytest.mark.parametrize("times", [400, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_steps_keep_nothing(times: int) -> None:
    model, x = Sublayer(4, 6, 3, 2), torch.randn(2, 3, 4, 6)
    compiled = torch.compile(model, backend=faults.compiled)
    _is_flat(lambda number: _step(compiled, model, x), times)


@pytest.mark.slow
@pytest.mark.parametrize("times", [8, pytest.param(300, marks=pytest.mark.thorough)])
def test_recompilations_keep_nothing(times: int) -> None:
    """After a reset. Hooks on what autograd saves would keep every tensor of a record."""
    x = torch.randn(2, 3, 4, 6)

    def run(number: int) -> None:
        model = Sublayer(4, 6, 3, 2)
        _step(torch.compile(model, backend=faults.compiled), model, x)
        torch._dynamo.reset()
        gc.collect()  # tests/conftest.py lets garbage wait for longer than this test takes

    _is_flat(run, times)


@pytest.mark.slow
@pytest.mark.parametrize("times", [300, pytest.param(100_000, marks=pytest.mark.thorough)])
def test_many_token_counts(times: int) -> None:
    model = Sublayer(4, 6, 1, 1)
    compiled = torch.compile(model, backend=faults.compiled, dynamic=True)

    def run(number: int) -> None:
        x = torch.randn(2 + number, 1, 4, 2)[:, :, :, :1].expand(-1, -1, -1, 6).contiguous()
        found = compiled(x)
        if number % 50 == 0:
            torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-4)  # a few sums in float32

    with torch.no_grad():
        _is_flat(run, times)


def test_a_deleted_model_is_freed() -> None:
    model, x = Sublayer(4, 6, 3, 2), torch.randn(2, 3, 4, 6)
    compiled = torch.compile(model, backend=faults.compiled)
    _step(compiled, model, x)
    assert len(mhc_compile.report().rewritten) == 2
    gone = weakref.ref(model)
    del model, compiled
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_a_reset_leaves_nothing() -> None:
    """No graph, no report and no tensor, but for some of the last program, which torch keeps."""

    def run() -> dict[str, int]:
        model, x = Sublayer(4, 6, 3, 2), torch.randn(2, 3, 4, 6)
        _step(torch.compile(model, backend=faults.compiled), model, x)
        return _counts()

    run()
    torch._dynamo.reset()
    before = _counts()
    during = run()
    assert all(during[kind] > before[kind] for kind in ("Compiled", "Report", "Graph", "Node", "Tensor"))
    torch._dynamo.reset()
    assert {kind: count for kind, count in _counts().items() if count > before[kind]} == {}
