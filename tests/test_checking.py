"""`mhc.check`: each site is compared with the program in the first calls, and left alone if its operator is worse."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import mhc_compile
from mhc_compile import checking, compat, hooks
from mhc_compile.nn import Form, HyperConnection, HyperHead
from tests.passes.fused import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "all_sites")

CHECK = {"mhc.check": True}
MIX, COMBINE = "generate_mix_and_aggregate", "expand_combine"
WIDTH = 24
# Roundings of float32, after a few dozen operations.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture
def all_sites() -> Iterator[None]:
    """No site is left alone because of an earlier test."""
    checking.forget()
    yield
    checking.forget()


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are rewritten, and run operator by operator."""

    def compiler(mode: Any, options: Any, patches: Any) -> Callable[..., Any]:
        def rewrite(module: torch.fx.GraphModule) -> None:
            patches["pre_grad_custom_pass"](module.graph)
            for body in module.children():
                if isinstance(body, torch.fx.GraphModule):
                    rewrite(body)

        def compiled(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            rewrite(module)
            return module.forward

        return compiled

    monkeypatch.setattr(compat, "inductor_compiler", compiler)


def _connection(streams: int) -> HyperConnection:
    form = Form.deepseek_v4(iterations=3)
    return HyperConnection(nn.Linear(WIDTH, WIDTH), dim=WIDTH, streams=streams, form=form, init="deepseek_v4")


class Model(nn.Module):
    """Two connections, of four streams and of two, and the head."""

    def __init__(self, around: Callable[[nn.Module, Tensor], Tensor] = lambda part, x: part(x)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.around = around
        self.first = _connection(4)
        self.second = _connection(2)
        self.head = HyperHead(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.around(self.first, x), 0.1)
        out: Tensor = self.head(self.around(self.second, x[..., :2, :]))
        return out


Results = dict[str, Tensor]


def _streams(seed: int = 0, length: int = 30) -> Tensor:
    return torch.randn(2, length, 4, WIDTH, generator=torch.Generator().manual_seed(seed))


def _training(call: Callable[..., Tensor], model: nn.Module, seed: int, scale: float = 1.0) -> Results:
    """Results and gradients of one step."""
    x = _streams(seed).requires_grad_()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    out = call(x)
    (out.square().sum() * scale).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {"out": out.detach(), "x": x.grad, **gradients}
    return {name: value.clone() for name, value in found.items() if value is not None}


def _same(one: Results, other: Results) -> None:
    """Equal but for the order in which gradients of a tensor that is read several times are added."""
    assert torch.equal(one["out"], other["out"])
    _close(one, other)


def _close(one: Results, other: Results) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-5 * float(other[name].abs().max()), msg=name)


def _step(compiled: Callable[..., Tensor], model: nn.Module, seed: int, compare: Callable[..., None]) -> None:
    compare(_training(compiled, model, seed), _training(model, model, seed))


def _wrong_streams(monkeypatch: pytest.MonkeyPatch, factor: float = 1.01) -> None:
    """expand_combine adds a hundredth too much of the sublayer's output."""
    module = sys.modules["mhc_compile.ops.expand_combine"]
    biased = module._biased
    monkeypatch.setattr(module, "_biased", lambda *given: biased(*given) * factor)


def _wrong_gradient(monkeypatch: pytest.MonkeyPatch, factor: float = 1.01) -> None:
    """generate_mix_and_aggregate sends a hundredth too much back to h_pre."""
    module = sys.modules["mhc_compile.ops._mix"]
    gradient = module.pre_gradient
    monkeypatch.setattr(module, "pre_gradient", lambda *given: gradient(*given) * factor)


def _reported() -> tuple[list[str], list[str], dict[str, int]]:
    report = mhc_compile.report()
    return [s.op for s in report.rewritten], [s.op for s in report.declined], dict(report.checked)


@pytest.mark.usefixtures("without_inductor")
def test_operators_that_are_right() -> None:
    model = Model()
    compiled = torch.compile(model, backend="mhc", options=CHECK)
    for seed in range(checking.CALLS):
        _step(compiled, model, seed, _same)
        assert _reported()[2] == {}
        reasons = {site.reason for site in mhc_compile.report().unchecked}
        assert reasons == {"the first calls are not over, in which the program's own code runs"}
    _step(compiled, model, checking.CALLS, _close)
    assert mhc_compile.report().unchecked == []
    assert _reported() == ([MIX, COMBINE] * 2 + ["head"], [], {MIX: 2, COMBINE: 2, "head": 1})
    told = "  checked in the first calls: 2 x generate_mix_and_aggregate, 1 x head, 2 x expand_combine\n"
    assert told in f"{mhc_compile.report()}\n"


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(
    ("plant", "wrong", "what", "code"),
    [
        (
            _wrong_streams,
            COMBINE,
            r"(output x_new|gradient of h_post\w*): error .* allowed",
            "x_new = (h_post.unsqueeze(-1)",
        ),
        (_wrong_gradient, MIX, r"gradient of l_\w+: error .* allowed", "result = self.layer((h_pre"),
    ],
)
def test_a_wrong_operator_is_found_and_left_alone(
    plant: Callable[[pytest.MonkeyPatch], None],
    wrong: str,
    what: str,
    code: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plant(monkeypatch)
    model = Model()
    compiled = torch.compile(model, backend="mhc", options=CHECK)
    for seed in range(checking.CALLS + 1):
        _step(compiled, model, seed, _same)
    # What is left of the operators is right.
    for seed in range(4, 6 + checking.CALLS):
        _step(compiled, model, seed, _close)
    rewritten, declined, checked = _reported()
    assert sorted(declined) == [wrong] * 2 + ["head"] * (wrong == MIX)
    assert wrong not in {*rewritten, *checked}
    assert sum(checked.values()) == len(rewritten) >= 2
    for site in mhc_compile.report().declined:
        if site.op == wrong:
            assert site.location.name == "mhc_compile/nn.py"
            assert site.location.code.startswith(code)
            assert re.match(f"when checked, its operator was less accurate than this code: {what}", site.reason or "")
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    told = [line for line in told if not line.startswith("head")]  # which goes by the same function
    assert len(told) == 2
    assert all(f"{wrong} at mhc_compile/nn.py:" in line and "is left alone" in line for line in told)


@pytest.mark.usefixtures("without_inductor")
def test_the_operator_is_wrong_at_one_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other site of the operator stays rewritten."""
    module = sys.modules["mhc_compile.ops.expand_combine"]
    mix = module.weighted_sums
    monkeypatch.setattr(module, "weighted_sums", lambda w, x: mix(w, x) * (1.01 if x.shape[-2] == 2 else 1.0))
    model = Model()
    compiled = torch.compile(model, backend="mhc", options=CHECK)
    for seed in range(checking.CALLS + 1):
        _step(compiled, model, seed, _same)
    _step(compiled, model, 5, _same)
    rewritten, declined, _ = _reported()
    assert (sorted(rewritten), declined) == ([COMBINE, MIX, MIX, "head"], [COMBINE])


@pytest.mark.usefixtures("without_inductor")
def test_what_is_left_alone_stays_so_without_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    _wrong_streams(monkeypatch)
    model = Model()
    compiled = torch.compile(model, backend="mhc", options=CHECK)
    for seed in range(checking.CALLS + 1):
        _training(compiled, model, seed)
    torch._dynamo.reset()
    _step(torch.compile(model, backend="mhc"), model, 9, _close)
    assert _reported()[1] == [COMBINE, COMBINE]
    # `explain` says what this process would do.
    assert mhc_compile.explain(model, _streams()).declined == mhc_compile.report().declined


@pytest.mark.usefixtures("without_inductor")
def test_a_graph_with_another_constant_is_checked_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found with one eps is not said of another."""
    with monkeypatch.context() as patch, torch.no_grad():
        _wrong_streams(patch)
        compiled = torch.compile(_connection(4), backend="mhc", options=CHECK)
        for seed in range(checking.CALLS + 2):
            compiled(_streams(seed))
    assert _reported()[1] == [COMBINE]
    torch._dynamo.reset()
    form = Form.deepseek_v4(iterations=3, norm_eps=1e-5)
    other = HyperConnection(nn.Linear(WIDTH, WIDTH), dim=WIDTH, form=form)
    with torch.no_grad():
        torch.compile(other, backend="mhc")(_streams())
    assert _reported()[:2] == ([MIX, COMBINE], [])


@pytest.mark.usefixtures("without_inductor")
def test_an_operator_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> Any:
        raise RuntimeError("of this operator")

    monkeypatch.setattr(sys.modules["mhc_compile.ops.expand_combine"], "_biased", fail)
    model = Model()
    compiled = torch.compile(model, backend="mhc", options=CHECK)
    for seed in range(checking.CALLS + 2):
        _step(compiled, model, seed, _close)
    reasons = [site.reason or "" for site in mhc_compile.report().declined]
    assert [reason.startswith("when checked, its operator raised RuntimeError: of this") for reason in reasons] == [
        True
    ] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("without_inductor")
def test_inference_and_dynamic_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for all lengths; without gradients there are none to wait for."""
    _wrong_streams(monkeypatch)
    model = Model().eval()
    model.forward = lambda x: model.head(model.second(model.first(x)[..., :2, :]))  # type: ignore[method-assign]
    compiled = torch.compile(model, backend="mhc", options=CHECK, dynamic=True)
    with torch.inference_mode():
        for length in (30, 31, 40, 17, 6):
            x = _streams(length, length)
            torch.testing.assert_close(compiled(x), model(x), **CLOSE)
    assert _reported()[:2] == ([MIX, MIX, "head"], [COMBINE, COMBINE])


def _checkpointed(part: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(part, x, use_reentrant=False)
    return out


@torch.compiler.nested_compile_region
def _compiled_once(part: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = part(x)
    return out


def _branch(part: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = torch.cond(x.sum() > -1e9, part, lambda x: x.clone(), (x,))
    return out


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("around", [_checkpointed, _compiled_once])
def test_sites_of_nested_graphs(around: Callable[[nn.Module, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    _wrong_gradient(monkeypatch)
    model = Model(around)
    if around is _compiled_once:
        # Two calls of one region.
        twice = model.first
        model.forward = lambda x: around(twice, 2 * around(twice, x))  # type: ignore[method-assign]
    compiled = torch.compile(model, backend="mhc", options=CHECK)
    for seed in range(checking.CALLS + 3):
        if around is _compiled_once and seed >= checking.CALLS:
            break  # without Inductor nothing differentiates such regions
        _step(compiled, model, seed, _close)
    if around is _checkpointed:
        assert _reported()[:2] == ([COMBINE, COMBINE], ["head", MIX, MIX])


@pytest.mark.usefixtures("without_inductor")
def test_a_graph_that_only_an_operator_runs() -> None:
    """The branches of a condition run as they are, which the report says of their sites."""
    model = Model(_branch)
    compiled = torch.compile(model, backend="mhc", options=CHECK)
    with torch.no_grad():
        for seed in range(checking.CALLS + 1):
            torch.manual_seed(seed)
            compiled(_streams(seed))
    unchecked = mhc_compile.report().unchecked
    assert sorted(site.op for site in unchecked) == [COMBINE, COMBINE, MIX, MIX]
    assert {site.reason for site in unchecked} == {"it is in a nested graph that runs as a whole"}


def _loop(x: Tensor, part: nn.Module) -> Tensor:
    out: Tensor = while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, part(x)), (torch.tensor(0), x))[1]
    return out


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("around", [_loop, lambda x, part: _branch(part, x)])
def test_a_program_whose_sites_are_all_in_such_a_graph(
    around: Callable[[Tensor, nn.Module], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    part = _connection(4).eval()
    compiled = torch.compile(lambda x: around(x, part), backend="mhc", options=CHECK)
    with torch.no_grad():
        compiled(_streams())
    report = mhc_compile.report()
    assert [site.op for site in report.unchecked] == [MIX, COMBINE]
    assert "  not checked: 1 x expand_combine at " in str(report)
    words = "hyper-connection sites are not checked: it is in a nested graph that runs as a whole"
    assert [record.getMessage() for record in caplog.records if "checked" in record.getMessage()] == [f"2 {words}"]


def test_what_is_compiled_ahead_of_time_is_not_checked(caplog: pytest.LogCaptureFixture) -> None:
    model, x = _connection(4), _streams()
    with compat.fresh_inductor_cache(), torch.no_grad():
        lazily = torch.compile(model, backend="mhc", fullgraph=True, options=CHECK)
        compiled = lazily.forward.aot_compile(((x,), {}))
        torch.testing.assert_close(compiled(model, x), model(x), **CLOSE)
    report = mhc_compile.report()
    assert (report.errors, report.checked) == ([], {})
    reason = "its function is compiled ahead of time, and has no first calls"
    assert [(site.op, site.reason) for site in report.unchecked] == [(MIX, reason), (COMBINE, reason)]
    assert f"2 hyper-connection sites are not checked: {reason}" in caplog.text


@pytest.mark.usefixtures("without_inductor")
def test_while_enable_is_at_work() -> None:
    """The option is one of the backend; a plain `torch.compile` is not checked."""
    with pytest.raises(
        ValueError, match=re.escape("options: 'mhc.check' needs backend=\"mhc\"; enable does not take it")
    ):
        mhc_compile.enable(CHECK)
    model = _connection(4)
    with mhc_compile.enable(), torch.no_grad():
        compiled = torch.compile(model, backend="mhc", options=CHECK)
        for seed in range(checking.CALLS + 1):
            compiled(_streams(seed))
    assert _reported() == ([MIX, COMBINE], [], {MIX: 1, COMBINE: 1})


@pytest.mark.usefixtures("without_inductor")
def test_gradients_that_are_not_finite_are_no_measure() -> None:
    """A loss that is scaled too far in the first steps: the check waits for gradients that can be compared."""
    model = Model()
    compiled = torch.compile(model, backend="mhc", options=CHECK)
    for seed in range(4):
        _training(compiled, model, seed, scale=float("inf"))
    assert _reported()[2] == {}
    for seed in range(4, 5 + checking.CALLS):
        _training(compiled, model, seed)
    assert _reported() == ([MIX, COMBINE] * 2 + ["head"], [], {MIX: 2, COMBINE: 2, "head": 1})


@pytest.mark.usefixtures("without_inductor")
def test_gradients_that_never_arrive() -> None:
    model = Model()
    compiled = torch.compile(model, backend="mhc", options=CHECK)
    for seed in range(checking.MOST_CALLS):
        compiled(_streams(seed))
        assert _reported()[2] == {}
    compiled(_streams())
    assert _reported()[2] == {MIX: 2, COMBINE: 2, "head": 1}


@pytest.mark.usefixtures("without_inductor")
def test_autocast_holds_in_the_backward_pass_as_well() -> None:
    """The program's products are of bfloat16 in both passes."""
    model = Model()
    compiled = torch.compile(model, backend="mhc", options=CHECK)
    for seed in range(checking.CALLS + 1):
        with torch.autocast("cpu", torch.bfloat16):
            x, out = _streams(seed), []
            for call in (compiled, model):
                model.zero_grad()
                torch.manual_seed(seed)
                out.append(call(x))
        ours, eager = (torch.autograd.grad(o.float().square().sum(), list(model.parameters())) for o in out)
        if seed < checking.CALLS:
            assert torch.equal(*out)
            # Products of float32 would make a difference of a thousandth.
            for one, other in zip(ours, eager, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
    assert _reported()[1:] == ([], {MIX: 2, COMBINE: 2, "head": 1})


@pytest.mark.usefixtures("without_inductor")
def test_memory_that_does_not_suffice_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> Any:
        raise torch.OutOfMemoryError("of this test")

    monkeypatch.setattr(checking, "_double", fail)
    model = Model()
    compiled = torch.compile(model, backend="mhc", options=CHECK)
    for seed in range(checking.CALLS + 1):
        _step(compiled, model, seed, _close)
    report = mhc_compile.report()
    assert len(report.rewritten) == len(report.unchecked) == 5
    told = str(report).split("not checked: 1 x head at mhc_compile/nn.py:249")[1]
    assert told.splitlines()[1].startswith("      OutOfMemoryError: of this test")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("without_inductor")
def test_graphs_that_distributed_data_parallel_cuts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole is checked, before Dynamo cuts it."""
    _wrong_streams(monkeypatch)
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1000)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = Model()
        distributed = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)
        compiled = torch.compile(distributed, backend="mhc", options=CHECK)
        for seed in range(2 * checking.CALLS + 2):
            _step(compiled, model, seed, _close)
    finally:
        torch.distributed.destroy_process_group()
    assert mhc_compile.report().graphs > 1
    rewritten, declined, checked = _reported()
    assert (sorted(rewritten), declined) == ([MIX, MIX, "head"], [COMBINE, COMBINE])
    assert checked == {MIX: 2, "head": 1}


@pytest.mark.usefixtures("without_inductor")
def test_checks_out_of_order_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program runs without checks, and the report has words for what was wrong."""
    watching = sys.modules["mhc_compile.passes.rewrite.watched"]._Watching
    run = watching.run

    def misplaced(self: Any, sites: Any) -> None:
        run(self, sites)
        self.copies.graph.output_node().prepend(self.calls[0][0])

    monkeypatch.setattr(watching, "run", misplaced)
    model = Model()
    _step(torch.compile(model, backend="mhc", options=CHECK), model, 0, _close)
    (error,) = mhc_compile.report().errors
    assert "used before it has been defined" in error
    assert _reported()[0] == [MIX, COMBINE] * 2 + ["head"]


@pytest.mark.usefixtures("without_inductor")
def test_a_program_without_sites_is_compiled_as_ever() -> None:
    called: list[Any] = []
    original = checking.FirstCalls.__call__
    compiled = torch.compile(Sublayer(), backend="mhc", options=CHECK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking.FirstCalls, "__call__", lambda self, *args: called.append(0) or original(self, *args))
        compiled(_streams())
    assert called == []


def test_what_a_cache_knows_a_graph_by() -> None:
    """The option changes no graph, and a site that is left alone does."""
    passes = [hooks.MhcPass(options).uuid() for options in ({}, CHECK)]
    assert passes[0] == passes[1]
    checking._left["graph"] = {"site": "reason"}
    assert hooks.MhcPass(CHECK).uuid() != passes[0]


def test_with_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    _wrong_streams(monkeypatch)
    model = _connection(4)
    with compat.fresh_inductor_cache(), torch.no_grad():
        compiled = torch.compile(model, backend="mhc", options=CHECK)
        for seed in range(2 * checking.CALLS + 2):
            torch.testing.assert_close(compiled(_streams(seed)), model(_streams(seed)), **CLOSE)
    assert _reported() == ([MIX], [COMBINE], {MIX: 1})
    assert mhc_compile.report().lowered == {MIX: 1}
