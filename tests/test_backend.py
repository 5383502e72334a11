"""The backend: Inductor's modes and options keep working, and nothing of ours can fail a compile."""

from __future__ import annotations

import functools
import logging
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import async_compile
from torch._inductor import config as inductor_config

import mhc_compile
from mhc_compile import backend, compat, passes, records
from mhc_compile.nn import HyperConnection
from mhc_compile.passes import plan as planning
from tests.e2e.deepseek_models import Stack

# What comes from a cache has no report of its own.
pytestmark = pytest.mark.usefixtures("fresh_dynamo", "fresh_cache")


@pytest.fixture
def stack() -> Stack:
    return Stack(depth=1)


def _same(compiled: Callable[..., Any], model: Stack, *shape: int) -> None:
    hidden = torch.randn(*shape, 32)
    # Two float32 evaluations of a few hundred sums each: 1e-5 is some fifty roundings.
    torch.testing.assert_close(compiled(hidden), model(hidden), rtol=1e-5, atol=1e-5)


def _rewritten() -> int:
    return len(records.last().rewritten)


@pytest.mark.slow
@pytest.mark.parametrize("kwargs", [{}, {"mode": "max-autotune-no-cudagraphs"}, {"options": {"max_fusion_size": 8}}])
def test_modes_and_options(stack: Stack, kwargs: dict[str, Any]) -> None:
    _same(torch.compile(stack, backend="mhc", fullgraph=True, **kwargs), stack, 2, 3)
    assert _rewritten() == 3


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"options": {"mhc_strict": True}},
            r"unknown option 'mhc_strict'; did you mean 'mhc.strict'\? expected one of mhc.check",
        ),
        (
            {"options": {"strict": True}},
            r"unknown option 'strict'; did you mean 'mhc.strict'\? expected one of mhc.check",
        ),
        (
            {"options": {"mhc.no_such": 1}},
            r"unknown option 'mhc.no_such'; expected one of mhc.check, mhc.fuse.accumulate, .*mhc.strict",
        ),
        ({"options": {"mhc.strct": 1}}, "did you mean 'mhc.strict'"),
        ({"options": {"MHC.Strict": 1}}, "unknown option 'MHC.Strict'; did you mean 'mhc.strict'"),
        ({"options": {"Share_Layers": 1}}, "unknown option 'Share_Layers'; did you mean 'mhc.share_layers'"),
        ({"options": {"mhc.strict": 1}}, "'mhc.strict' is 1; expected True or False"),
        ({"options": {"mhc.fuse.input_norm": "yes"}}, "'mhc.fuse.input_norm' is 'yes'; expected True, False or None"),
        ({"options": {"mhc.recompute": "most"}}, "mhc.recompute"),
        ({"options": {"mhc.skip": "model.py:12"}}, r"'mhc.skip' is 'model.py:12'; expected a list of places"),
        ({"options": {"mhc.skip": ["12"]}}, r"'mhc.skip' is \['12'\]; expected a list of places"),
        ({"options": {"mhc.skip": [":12"]}}, r"'mhc.skip' is \[':12'\]; expected a list of places"),
        ({"options": {"mhc.skip": ["model.py:²"]}}, r"'mhc.skip' is \['model.py:²'\]; expected a list of places"),
        ({"options": {"no_such_option": 1}}, "Unexpected optimization option no_such_option"),
        ({"options": {"no-such-option": 1}}, "Unexpected optimization option no-such-option"),
        ({"options": {"mhc-strict": True}}, "unknown option 'mhc-strict'; did you mean 'mhc.strict'"),
        ({"options": {"max_autotune": "yes"}}, "Unexpected type of attr max_autotune"),
        ({"options": {1: True}}, "1"),
        ({"mode": "no-such-mode"}, "Unrecognized mode=no-such-mode"),
    ],
)
@pytest.mark.parametrize("fullgraph", [True, False])
def test_wrong_options(fullgraph: bool, kwargs: dict[str, Any], message: str) -> None:
    """The first call of the compiled function raises a plain ValueError."""
    compiled = torch.compile(lambda x: x + 1, backend="mhc", fullgraph=fullgraph, **kwargs)
    with pytest.raises(ValueError, match=message):
        compiled(torch.ones(2))


@pytest.mark.slow
def test_dynamic_shapes_compile_once(stack: Stack) -> None:
    compiled = torch.compile(stack, backend="mhc", dynamic=True)
    _same(compiled, stack, 2, 3)
    counters.clear()
    for shape in ((3, 5), (4, 4), (5, 7)):
        _same(compiled, stack, *shape)
    assert counters["stats"]["unique_graphs"] == 0


@pytest.mark.slow
def test_automatic_dynamic_shapes(stack: Stack) -> None:
    compiled = torch.compile(stack, backend="mhc")
    counters.clear()
    for tokens in (3, 5, 7, 11):
        _same(compiled, stack, 2, tokens)
    # once for the first shape, once for all others
    assert counters["stats"]["unique_graphs"] == 2
    assert _rewritten() == 3


@pytest.mark.slow
def test_a_float_that_is_an_input_becomes_a_constant(stack: Stack) -> None:
    """With dynamic=True a module's eps is an input; a form recognised at one eps must not be used at another."""
    compiled = torch.compile(stack, backend="mhc", dynamic=True)
    _same(compiled, stack, 2, 3)
    assert _rewritten() == 3
    stack.mixes[0].hc_eps = 0.25
    _same(compiled, stack, 2, 3)


def test_inference_modes(stack: Stack) -> None:
    for context in (torch.no_grad, torch.inference_mode):
        torch._dynamo.reset()
        with context():
            _same(torch.compile(stack, backend="mhc"), stack, 2, 3)
        assert _rewritten() == 3


def test_autocast(stack: Stack) -> None:
    hidden = torch.randn(2, 3, 32)
    exact = stack.double()(hidden.double())
    stack.float()
    with torch.autocast("cpu", torch.bfloat16):
        eager = stack(hidden)
        compiled = torch.compile(stack, backend="mhc")(hidden)
    assert _rewritten() >= 2
    assert compiled.dtype == eager.dtype
    errors = [((got.double() - exact).norm() / exact.norm()).item() for got in (eager, compiled)]
    # Eager's gates go through bfloat16 (2^-9), ours do not; equality would still be as good.
    assert errors[1] <= 1.1 * errors[0]


@pytest.mark.slow
def test_a_checkpoint_around_a_compiled_model(stack: Stack) -> None:
    """The first call compiles while the hooks of the checkpoint are on: what the passes save is not the model's."""
    hidden = torch.randn(2, 3, 32)
    stack(hidden).sum().backward()
    eager = {name: p.grad.clone() for name, p in stack.named_parameters() if p.grad is not None}
    stack.zero_grad()
    stack.compile(backend="mhc")
    out = torch.utils.checkpoint.checkpoint(stack, hidden, use_reentrant=False)
    assert _rewritten() == 3
    assert mhc_compile.report().errors == []
    out.sum().backward()
    for name, p in stack.named_parameters():
        torch.testing.assert_close(p.grad, eager[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_checkpoint_regions_are_rewritten(stack: Stack) -> None:
    def run(hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.utils.checkpoint.checkpoint(stack, hidden, use_reentrant=False)
        return out

    hidden = torch.randn(2, 3, 32)
    assert len(mhc_compile.explain(run, hidden).rewritten) == 3
    run(hidden).sum().backward()
    eager = {name: p.grad.clone() for name, p in stack.named_parameters() if p.grad is not None}
    stack.zero_grad()
    torch.compile(run, backend="mhc")(hidden).sum().backward()
    for name, p in stack.named_parameters():
        torch.testing.assert_close(p.grad, eager[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_enable_and_disable(stack: Stack) -> None:
    compiled = torch.compile(stack)
    records.forget()
    with mhc_compile.enable():
        assert mhc_compile.is_enabled()
        _same(compiled, stack, 2, 3)
        assert _rewritten() == 3
    assert not mhc_compile.is_enabled()
    torch._dynamo.reset()
    records.forget()
    _same(torch.compile(stack), stack, 2, 3)
    assert records.last().graphs == 0
    mhc_compile.enable()
    mhc_compile.disable()
    assert not mhc_compile.is_enabled()


def test_a_users_own_pass_is_kept(stack: Stack) -> None:
    seen: list[int] = []

    def own(graph: fx.Graph) -> None:
        seen.append(len(graph.nodes))

    with torch._inductor.config.patch(pre_grad_custom_pass=own), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _same(torch.compile(stack, backend="mhc"), stack, 2, 3)
    assert len(seen) == 1
    assert _rewritten() == 3


@pytest.mark.parametrize("spelled", ["pre_grad_custom_pass", "pre-grad-custom-pass", "pre_grad-custom-pass"])
def test_a_users_own_pass_in_options_is_kept(spelled: str, stack: Stack, passes_only: None) -> None:
    """Inductor takes hyphens, too; of two spellings, the last counts."""
    seen: list[int] = []
    options = {"pre_grad_custom_pass": lambda graph: seen.append(1), spelled: lambda graph: seen.append(2)}
    torch.compile(stack, backend="mhc", options=options)(torch.randn(2, 3, 32))
    assert seen == [2]
    assert _rewritten() == 3


@pytest.mark.slow
def test_a_failure_inside_leaves_the_graph_alone(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> planning.Plan:
        raise RuntimeError("planted")

    monkeypatch.setattr(passes.planning, "plan", broken)
    _same(torch.compile(stack, backend="mhc"), stack, 2, 3)
    (error,) = records.last().errors
    assert re.fullmatch(r"RuntimeError: planted \(mhc_compile/passes/__init__.py:\d+\)", error)
    assert records.last().rewritten == []


def test_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unequal(Stack):
        """A hyper-connection that adds a function of what h_post multiplies."""

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            streams = hidden.unsqueeze(2).expand(-1, -1, 4, -1).contiguous()
            post, comb, collapsed = self.mixes[0](streams)
            outer = torch.sin(post.unsqueeze(-1) * collapsed.unsqueeze(-2))
            return outer + comb.transpose(-1, -2) @ streams

    model = Unequal(depth=1)
    model.mixes[0].hc_sinkhorn_iters = 3  # Inductor takes long for an unrolled loop
    message = r"declined: expand_combine at .*\n.*than h_post times one tensor"
    for grad, fullgraph in ((True, False), (False, True)):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="mhc", options={"mhc.strict": True}, fullgraph=fullgraph)
        with pytest.raises(mhc_compile.StrictError, match=message), torch.set_grad_enabled(grad):
            compiled(torch.randn(2, 3, 32))
    torch._dynamo.reset()
    with pytest.raises(mhc_compile.StrictError, match=message), mhc_compile.enable({"mhc.strict": True}):
        torch.compile(model)(torch.randn(2, 3, 32))
    torch._dynamo.reset()
    _same(torch.compile(model, backend="mhc"), model, 2, 3)


@pytest.mark.parametrize("stage", ["sharing.share", "lowering.lower"])
def test_strict_options_raise_at_the_first_call_for_graphs_after_autograd(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is compiled behind a failed pass, neither in inference nor before a backward pass."""

    def broken(*args: Any) -> Any:
        raise RuntimeError("planted")

    module, name = stage.split(".")
    monkeypatch.setattr(getattr(passes, module), name, broken)
    model = HyperConnection(torch.nn.Linear(8, 8), dim=8)
    for grad in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="mhc", options={"mhc.strict": True})
        with pytest.raises(mhc_compile.StrictError, match="RuntimeError: planted"), torch.set_grad_enabled(grad):
            compiled(torch.randn(2, 4, 8))


@pytest.mark.usefixtures("passes_only")
def test_strict_options_that_find_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """One warning a function, unless something was found before, or may be found behind a break."""

    def nothing(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x.cos()
        torch._dynamo.graph_break()
        return x.sin()

    def run(function: Callable[..., Any], x: torch.Tensor, strict: bool = True, reset: bool = True) -> list[str]:
        caplog.clear()
        if reset:
            torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(function, backend="mhc", options={"mhc.strict": strict})(x)
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    x = torch.ones(3)
    assert run(nothing, x, strict=False) == []
    assert run(broken, x) == []
    place = f"tests/test_backend.py:{nothing.__code__.co_firstlineno}"
    words = f"mhc.strict guards nothing: no hyper-connection was found in nothing ({place}); mhc_compile.report() has"
    assert run(nothing, x) == [f"{words} details"]
    assert run(nothing, x) == []
    assert run(Stack(depth=1), torch.randn(2, 3, 32)) == []
    backend._warn_of_nothing.cache_clear()
    assert run(nothing, x, reset=False) == []


@pytest.mark.usefixtures("fresh_cache")
def test_workers_are_told_how_to_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that Inductor compiles in other processes are launched from C++ as those are that it compiles itself."""
    jobs: list[tuple[Any, ...]] = []

    class Pool:
        def submit(self, *job: Any) -> None:
            jobs.append(job)

    @functools.cache
    def process_pool() -> Pool:
        return Pool()

    compiler, kernel = async_compile.AsyncCompile, async_compile._worker_compile_triton
    monkeypatch.setattr(compiler, "process_pool", staticmethod(process_pool))
    for _ in range(2):
        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, backend="mhc")(torch.ones(2))
    jobs.clear()
    setting = "static_launch_user_defined_triton_kernels"
    for value in (True, False):
        with inductor_config.patch({setting: value}):
            compiler.process_pool().submit(kernel, 1, {}, {"other": 2})
            compiler().process_pool().submit(print, 3)
    told = [(kernel, 1, {}, {"other": 2, setting: value}) for value in (True, False)]
    assert jobs == [told[0], (print, 3), told[1], (print, 3)]
    compiler.process_pool.cache_clear()


class Returned(torch.nn.Module):
    """A read by a product, with a dim of one more than the operator makes. It leaves the graph, detached, too."""

    def __init__(self) -> None:
        super().__init__()
        self.around = HyperConnection(torch.nn.Linear(8, 8), dim=8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h_pre, h_post, h_res = self.around.mixes(x)
        read = (x.mT @ h_pre.unsqueeze(-1)).squeeze(-1)
        written = h_post.unsqueeze(-1) * self.around.layer(read).unsqueeze(-2) + h_res.mT @ x
        return written, read, read.detach()


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_views_that_leave_a_graph_are_the_same_from_the_cache(dynamic: bool) -> None:
    """Not as `aten._unsafe_view`, of which graphs in the cache of torch up to 2.13 have forgotten the sizes."""
    model = Returned()
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(model, backend="mhc", dynamic=dynamic)
        for tokens in (5, 7):
            x = torch.randn(2, tokens, 4, 8)
            results = compiled(x)
            torch.testing.assert_close(results, model(x), rtol=1e-5, atol=1e-5)
            (results[0] + results[1].unsqueeze(-2)).sum().backward()  # without it, torch stores nothing
        assert _rewritten() == 2
    assert counters["aot_autograd"]["autograd_cache_hit"]


@pytest.mark.usefixtures("fresh_dynamo")
def test_sites_at_a_line_are_left_alone() -> None:
    """The line is written as reports show it, with or without the folders, and strict options put up with it."""
    model = HyperConnection(torch.nn.Linear(8, 8), dim=8)
    x = torch.randn(2, 3, 4, 8)
    (write,) = [site for site in mhc_compile.explain(model, x).rewritten if site.op == "expand_combine"]
    for place in (str(write.location), str(write.location).rpartition("/")[2]):
        torch._dynamo.reset()
        records.forget()
        compiled = torch.compile(model, backend="mhc", options={"mhc.skip": [place], "mhc.strict": True})
        torch.testing.assert_close(compiled(x), model(x))
        kept = mhc_compile.report()
        assert [site.op for site in kept.rewritten] == ["generate_mix_and_aggregate"]
        assert [site.reason for site in kept.declined] == [passes.SKIPPED]


class ChannelRead(HyperConnection):
    """Its read has a gate for each channel, which no operator has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, h_post, h_res = self.mixes(x)
        f = self.layer((self.weight * x).sum(-2))
        return h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res.transpose(-1, -2) @ x

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(8, 8), dim=8)
        self.weight = torch.nn.Parameter(torch.ones(4, 8))


def test_strict_options_accept_a_loss_at_a_line_that_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reason stays in the report. Other losses are errors as ever."""

    def until_joint(patches: dict[str, Any], gm: fx.GraphModule, inputs: Any) -> Any:
        patches["pre_grad_custom_pass"](gm.graph)
        joint = patches["joint_custom_pre_pass"]
        return compat.compile_without_inductor(gm, inputs, lambda module: joint(module.graph))

    monkeypatch.setattr(
        compat, "inductor_compiler", lambda mode, options, patches: functools.partial(until_joint, patches)
    )
    x = torch.randn(2, 3, 4, 8)
    (read,) = mhc_compile.explain(ChannelRead(), x).declined
    model = torch.nn.Sequential(ChannelRead(), ChannelRead())
    compiled = torch.compile(model, backend="mhc", options={"mhc.skip": [str(read.location)], "mhc.strict": True})
    compiled(x)
    assert [site.reason for site in mhc_compile.report().declined] == 2 * [read.reason]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="mhc", options={"mhc.skip": ["model.py:1"], "mhc.strict": True})
    with pytest.raises(mhc_compile.StrictError, match="each channel"):
        compiled(x)


def test_a_line_to_skip_without_a_site_is_reported(passes_only: None) -> None:
    """A list of places that is older than the program."""
    x = torch.randn(2, 3, 4, 8)
    place = str(mhc_compile.explain(ChannelRead(), x).declined[0].location)
    torch.compile(ChannelRead(), backend="mhc", options={"mhc.skip": [place, "model.py:1"]})(x)
    (line,) = [line for line in str(mhc_compile.report()).splitlines() if "mhc.skip" in line]
    assert line == "  mhc.skip names model.py:1, and no site is there"


@pytest.mark.usefixtures("passes_only")
def test_strict_options_raise_if_inductor_runs_no_pass_after_the_first() -> None:
    """Nobody else would ask."""
    with pytest.raises(mhc_compile.StrictError, match="is declined"):
        torch.compile(ChannelRead(), backend="mhc", options={"mhc.strict": True})(torch.randn(2, 3, 4, 8))


@pytest.mark.usefixtures("passes_only")
def test_layers_that_dynamo_makes_one_graph_of() -> None:
    """It notes no examples on the inputs of such a graph."""
    model, x = torch.nn.Sequential(*(HyperConnection(torch.nn.Tanh(), dim=8) for _ in range(2))), torch.randn(2, 4, 8)
    with torch._dynamo.config.patch(use_graph_deduplication=True), torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="mhc")(x), model(x), rtol=1e-4, atol=1e-5)
        for report in (mhc_compile.report(), mhc_compile.explain(model, x)):
            assert (len(report.rewritten), len(report.sites), report.errors) == (2, 2, [])
