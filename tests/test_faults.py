"""Errors in our code must not fail a compilation: each function raises in turn, and one line reports the failure."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import mhc_compile
from mhc_compile import compat, guard, hooks, passes, records
from mhc_compile.compat import inductor, launches
from mhc_compile.passes.report import Location, Report, SiteReport
from tests import faults
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "_traced")

# What a hook calls, and what these functions do. Each of them fails in `make test`, and in `make test-all` all others.
HOOKS = (
    *("hooks:MhcPass.__call__", "hooks:FusePass.__call__", "hooks:LowerPass.__call__"),
    *("hooks:Configured._identity", "hooks:_is_for_cpu"),
    *("hooks:_sources", "hooks:_sources_hash", "records:Ledger._enter"),
    *("records:Ledger.current", "records:Compiled.digest", "compat.inductor:hash_files"),
    *("compat.inductor:tell_workers", "compat.graphs:trace_artifact"),
    *("compat.inductor:keep_order_of_writes", "compat.inductor:keep_arguments_of_calls", "compat.cpp:compile_beside"),
    "compat.inductor:keep_sums_in_their_memory",
    *("compat.inductor:calls_graphs", "compat.inductor:compiles_ahead_of_time", "compat.graphs:compile_id"),
    *("compat.graphs:copy_graph", "compat.graphs:example"),
    *("compat.values:settle_sizes", "compat.values:FloatWatch.settle", "compat.values:FloatWatch.clear"),
    *("compat.distributed:job_store", "agreement:attempt", "agreement:Vote.is_for_change", "agreement:Vote.close"),
    *(
        "passes:run",
        "passes:fuse",
        "passes:share",
        "passes:lower",
        "passes:put",
        "passes:_rewritten",
        "passes:_rewrite",
    ),
    *("passes:_sites", "passes:_node", "passes.site_forms:form_of", "passes:_in_place", "passes.functional:functional"),
    *("passes.sizes:from_inputs", "passes.shadow:trace", "passes.shadow:Shadow.release", "passes.aten_calls:record"),
    *("passes.recognise:recognise", "passes.recognise:_final", "passes.plan:plan", "passes.plan:_derivatives_beyond"),
    *("passes.rewrite:rewrite", "passes.rewrite.order:sort", "passes.rewrite.editor:Editor._call"),
    *("passes.fuse:fuse", "passes.fuse.joint:is_operator", "passes.fuse.joint:calls", "passes.share:share"),
    *("passes.called:called", "compat.nodes:called_operator"),
    *("passes.lower:lower", "passes.lower:_inline", "passes.lower:_replace", "passes.lower.zeros:merge_zeros"),
    *(
        "passes.memory:Memory.__init__",
        "passes.report:location",
        "passes.report:Report.__str__",
        "passes.report:Report.add",
    ),
)
# What stands around the others.
GUARDS = {"hooks:_errors", "hooks:Configured.uuid", "records:Ledger.graph", "records:graph"}
# What operators ask as they run. A ValueError there is an operator's own check, which declines a site without a line.
OPERATORS = {"compat.operators:functorch_is_active", "compat.operators:forward_mode_is_active"}
# A function that is only asked whether something can be done, where failing means that it cannot.
ASKED = ("passes.recognise", "passes.functional", "compat.values:depends_on_data")

X = (2, 3, 4, 6)


@pytest.fixture
def _traced() -> Iterator[None]:
    """A report is put into words for torch's trace, if anyone listens."""
    log, listener = logging.getLogger("torch.__trace"), logging.NullHandler()
    log.addHandler(listener)
    yield
    log.removeHandler(listener)


def _model() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    return nn.Sequential(*(Sublayer(4, 6, 3, 2) for _ in range(2))), torch.randn(X, requires_grad=True)


def _step(call: Callable[..., Any], model: nn.Module, x: Tensor) -> list[Tensor | None]:
    out = call(x)
    gradients = torch.autograd.grad(out.square().sum(), [x, *model.parameters()], allow_unused=True)
    return [out.detach(), *gradients]


def _compiled_step(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    torch._dynamo.reset()
    guard.forget()
    hooks._sources_hash.cache_clear()
    faults.forget_answers()
    return _step(torch.compile(model, backend=faults.compiled), model, x)


def _check(name: str, error: Callable[[], Exception], lines: list[str]) -> None:
    """Let a function fail during a training step; it is as eager code's, and the failure is told."""
    model, x = _model()
    expected = _step(model, model, x)
    lines.clear()
    with faults.failing(faults.functions()[name], error):
        found = _compiled_step(model, x)
    for one, other in zip(found, expected, strict=True):
        # Float32 evaluations of a few hundred sums, rewritten or not.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=name)
    assert all("\n" not in line for line in lines), lines
    assert len(set(lines)) == len(lines), lines
    if not name.startswith(ASKED):
        assert lines, f"{name} fails, and nobody is told"


@pytest.mark.parametrize("name", HOOKS)
def test_a_function_that_fails(name: str, told: list[str]) -> None:
    _check(name, faults.ERRORS[HOOKS.index(name) % len(faults.ERRORS)], told)


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(12))
def test_every_function_that_fails(part: int, told: list[str]) -> None:
    model, x = _model()
    _compiled_step(model, x)  # what a process asks once, for all its compilations
    called = faults.called(lambda: _compiled_step(model, x))
    names = [name for name in called if name not in GUARDS.union(HOOKS, OPERATORS)]
    assert len(names) > 300
    for name, error in zip(names[part::12], itertools.cycle(faults.ERRORS), strict=False):
        _check(name, error, told)


def test_the_functions_that_fail_are_called() -> None:
    model, x = _model()
    assert set(HOOKS) <= set(faults.called(lambda: _compiled_step(model, x)))


@pytest.mark.parametrize("depth", [40, 60, 80])
def test_a_stack_that_is_too_low_is_told_in_one_line(
    depth: int, told: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It runs out in many places, with other words in each."""
    working, limit = faults.hooks.working, sys.getrecursionlimit()

    @contextlib.contextmanager
    def low() -> Iterator[None]:
        sys.setrecursionlimit(len(inspect.stack(0)) + depth)
        try:
            with working():
                yield
        finally:
            sys.setrecursionlimit(limit)

    monkeypatch.setattr(faults.hooks, "working", low)
    model, x = _model()
    expected = _step(model, model, x)
    for one, other in zip(_compiled_step(model, x), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # as above
    assert len(told) <= 1
    assert all("RecursionError: maximum recursion depth exceeded" in line for line in told)
    assert "Traceback" not in "".join(capfd.readouterr())


def test_what_cannot_be_looked_into_is_told_with_the_users_line(told: list[str]) -> None:
    def broken(*args: Any) -> Any:
        raise ValueError(f"planted in {object()}")

    model, x = _model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes.shadowing, "record", broken)
        report = mhc_compile.explain(model, x)
    (line,) = told
    message = r"ValueError: planted in <object> \(mhc_compile/passes/shadow.py:\d+\), at near.py:\d+"
    assert re.fullmatch(rf"mul is not looked into: {message}", line)
    assert report.errors == [line.removeprefix("mul is not looked into: ")]


def test_a_failure_that_says_nothing_of_itself_is_told(told: list[str]) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    with guard.guard("nothing is done"):
        raise Mute
    assert told == ["nothing is done: Mute"]


def test_what_is_meant_to_stop_a_compilation_goes_through() -> None:
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis

    for error in (hooks.StrictError("declined"), TensorifyScalarRestartAnalysis(), KeyboardInterrupt()):
        with pytest.raises(type(error)), guard.guard("nothing is done"):
            raise error


def test_strict_raises_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_rewrite", _broken)
    model, x = _model()
    with pytest.raises(Exception, match=r"RuntimeError: planted \(mhc_compile/passes/__init__.py:\d+\)"):
        torch.compile(model, backend="mhc", options={"mhc.strict": True})(x)


def _broken(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("planted")


def test_a_users_own_pass_that_fails_is_the_users() -> None:
    def own(graph: fx.Graph) -> None:
        raise RuntimeError("of the user")

    module = fx.symbolic_trace(lambda x: x + 1)
    chain = hooks.chained(own, hooks.MhcPass())
    with pytest.raises(RuntimeError, match="of the user"):
        chain(module.graph)


def test_a_pass_whose_sources_cannot_be_read_is_found_in_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_sources_hash", _broken)
    one = hooks.MhcPass()
    assert one.uuid() != one.uuid()
    assert one.uuid()  # with an empty one, Inductor would bypass its cache


def _graph() -> tuple[fx.GraphModule, fx.Graph]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(torch.add, (x, 1.0))
    graph.call_function(torch.mul, (total, 2.0))
    graph.output((graph.call_function(torch.sub, (total, x)),))
    module = fx.GraphModule(nn.Module(), graph)
    return module, module.graph


def test_a_graph_is_put_back(told: list[str]) -> None:
    module, graph = _graph()
    for node in graph.nodes:
        node.meta["name"] = node.name
    before, x = str(graph), torch.randn(3)
    snapshot = compat.Snapshot(graph)
    add, sub = (graph.find_nodes(op="call_function", target=target)[0] for target in (torch.add, torch.sub))
    add.replace_all_uses_with(graph.find_nodes(op="placeholder")[0])
    graph.erase_node(add)
    sub.meta["name"] = "another"
    module.add_submodule("made", nn.Identity())
    snapshot.put_back()
    graph.lint()
    module.recompile()
    assert str(graph) == before
    assert module.graph is graph
    assert [node.meta["name"] for node in graph.nodes] == [node.name for node in graph.nodes]
    assert len(graph.find_nodes(op="call_function", target=torch.add)) == 1
    assert not hasattr(module, "made")
    torch.testing.assert_close(module(x)[0], torch.ones(3))
    # It can be edited as any other.
    with graph.inserting_before(graph.output_node()):
        graph.call_function(torch.neg, (graph.find_nodes(op="placeholder")[0],))
    graph.lint()


def test_code_that_cannot_be_made_leaves_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module, graph = _graph()
    other = fx.Graph()
    other.output((other.placeholder("x"),))
    monkeypatch.setattr(fx.GraphModule, "recompile", _broken)
    with pytest.raises(RuntimeError, match="planted"):
        passes.put(module, other)
    assert module.graph is graph


# What Inductor calls of ours, where it works without.


def test_a_patch_of_inductor_that_fails_is_as_if_it_were_not_there(
    monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    jobs: list[tuple[Any, ...]] = []

    class Pool:
        def submit(self, *job: Any) -> None:
            jobs.append(job)

    monkeypatch.setattr(inductor, "launches_from_c", _broken)
    pool_of = type("PoolOf", (), {"__call__": lambda self: Pool(), "cache_clear": lambda self: None})()
    job = object()
    inductor._PoolOf(pool_of, job)().submit(job, 1, {})
    assert jobs == [(job, 1, {})]
    assert len(told) == 1


def test_a_kernel_that_is_unlike_others_is_analysed_by_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = object()  # without parameters
    monkeypatch.setitem(launches._analysed_once, id(kernel), kernel)
    assert launches._remembering(lambda kernel, kwargs: "analysed")(kernel, {}) == "analysed"


# What a process has for itself.


def test_a_folder_whose_name_is_no_text() -> None:
    site = SiteReport("expand_combine", Location("/folder\udcff/model.py", 1, "x = \udcfe"), "")
    report = Report([site], graphs=1)
    str(report).encode()
    assert "folder\\udcff/model.py:1" in str(report)
    compiled = records.Compiled(report)
    compiled.unpack(compiled.packed())
    assert list(compiled.loaded.values()) == [(report, Report())]


def test_a_working_directory_that_was_deleted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert Location("/folder/model.py", 3, "").name == "/folder/model.py"


def test_a_float_that_is_settled_restarts_tracing_and_nothing_is_told(told: list[str]) -> None:
    model = Sublayer(4, 6, 3, 2)
    x = torch.randn(X)
    compiled = torch.compile(model, backend="mhc", dynamic=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    assert not mhc_compile.report().errors
    assert not told
