"""A rewritten graph that torch fails to compile is compiled as the program has it, and the report says so."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import compile_fx
from torch.utils.checkpoint import checkpoint

import mhc_compile
from mhc_compile import as_it_was, compat
from mhc_compile.nn import Form, HyperConnection

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WIDTH = 8
WORDS = "RuntimeError: an operator that nobody knows"
HOOK = "joint_custom_pre_pass"


class Unknowing:
    """A pass of another library, which fails at operators that it does not know; at all of them if `always`."""

    def __init__(self, *, always: bool = False) -> None:
        self.always, self.times = always, 0

    def __call__(self, graph: fx.Graph) -> None:
        self.times += 1
        if self.always or any(str(node.target).startswith("mhc.") for node in graph.nodes):
            raise RuntimeError("an operator that nobody knows" + (f", {self.times}" if self.always else ""))


class Model(nn.Module):
    """Two sublayers, the second of which may be in a checkpoint region, that is a graph which the first one calls."""

    def __init__(self, *, region: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.region = region
        self.first, self.second = (
            HyperConnection(nn.Tanh(), dim=WIDTH, form=Form.deepseek_v4(iterations=2)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        return checkpoint(self.second, x, use_reentrant=False) if self.region else self.second(x)


def _is_right(model: nn.Module, compiled: Any) -> None:
    x = torch.randn(2, 3, 4, WIDTH, requires_grad=True)
    for one, other in zip(_results(compiled, model, x), _results(model, model, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)  # a few sums of some ten numbers in float32


def _results(call: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    out = call(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]


def _with(hook: Unknowing, **more: Any) -> dict[str, Any]:
    return {"backend": "mhc", "options": {HOOK: hook, **more}}


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("region", [False, True])
def test_the_graph_is_compiled_as_it_was(enabled: bool, region: bool, told: list[str]) -> None:
    model, hook = Model(region=region), Unknowing()
    with compat.fresh_inductor_cache():
        with contextlib.ExitStack() as stack:
            if enabled:
                stack.enter_context(mhc_compile.enable())
                stack.enter_context(compat.inductor_config().patch({HOOK: hook}))
            _is_right(model, torch.compile(model) if enabled else torch.compile(model, **_with(hook)))
        report = mhc_compile.report()
        assert report.graphs == 1 + region
        assert not report.rewritten
        assert not report.fusions
        assert not report.lowered
        assert len(report.declined) == 4
        assert {site.reason for site in report.declined} == {f"torch does not compile the graph with it: {WORDS}"}
        (line,) = told
        assert line.startswith("a graph is compiled as it was, since torch does not compile it with operators: ")
        assert WORDS in line
        (error,) = report.errors
        assert error.startswith(WORDS)

        # Nothing of this is in a cache: without the other pass, the model is whole again.
        torch._dynamo.reset()
        _is_right(model, torch.compile(model, backend="mhc"))
        report = mhc_compile.report()
        assert len(report.rewritten) == 4
        assert not report.errors


def test_what_fails_either_way_raises_the_first_error(told: list[str]) -> None:
    model, hook = Model(), Unknowing(always=True)
    with pytest.raises(Exception, match="nobody knows, 1"):
        torch.compile(model, **_with(hook))(torch.randn(2, 3, 4, WIDTH))
    assert (hook.times, told) == (2, [])


class OfRanks:
    """`compat` in a job of several ranks."""

    job_store = staticmethod(object)

    def __getattr__(self, name: str) -> Any:
        return getattr(compat, name)


@pytest.mark.parametrize("why", ["strict", "ranks", "nothing"])
def test_there_is_no_second_attempt(why: str, monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    """Strict options ask for an error, ranks have to agree, and what was not rewritten fails as it would anyway."""
    model: nn.Module = nn.Linear(WIDTH, WIDTH) if why == "nothing" else Model()
    hook = Unknowing(always=why == "nothing")
    if why == "ranks":
        monkeypatch.setattr(as_it_was, "compat", OfRanks())
    more = {"mhc.strict": True} if why == "strict" else {}
    with pytest.raises(Exception, match="nobody knows"):
        torch.compile(model, **_with(hook, **more))(torch.randn(2, 3, 4, WIDTH))
    assert (hook.times, told) == (1, [])


def test_sites_are_checked_that_are_not_rewritten_in_the_end() -> None:
    model, hook = Model(), Unknowing()
    compiled = torch.compile(model, **_with(hook, **{"mhc.check": True}))
    for _ in range(4):
        _is_right(model, compiled)


@pytest.mark.skipif(not hasattr(compat.inductor_config(), "use_pre_grad_passes"), reason="torch 2.11 has it not")
@pytest.mark.parametrize("enabled", [False, True])
def test_inductor_runs_no_pass(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has the sites, and strict options raise for them alone."""
    monkeypatch.setattr(compile_fx, "_compile_fx_main", lambda gm, *args, **kwargs: gm.forward)

    def compile_with(model: nn.Module, **options: Any) -> None:
        torch._dynamo.reset()
        with torch.no_grad(), mhc_compile.enable(options) if enabled else contextlib.nullcontext():
            given = {"backend": "mhc", "options": {"use_pre_grad_passes": False} | options}
            compiled = torch.compile(model, **({"mode": "lite"} if enabled else given))
            torch.testing.assert_close(compiled(x), model(x))

    model, x = Model(region=True), torch.randn(2, 3, 4, WIDTH)
    compile_with(model)
    report = mhc_compile.report()
    assert (len(report.declined), len(report.sites), report.graphs, report.errors) == (4, 4, 2, [])
    assert all("Inductor's use_pre_grad_passes is off" in (site.reason or "") for site in report.declined)
    with pytest.raises(mhc_compile.StrictError, match="use_pre_grad_passes is off"):
        compile_with(model, **{"mhc.strict": True})
    compile_with(model, **{"mhc.strict": True, "mhc.skip": [str(site.location) for site in report.declined]})
    compile_with(nn.Linear(WIDTH, 2), **{"mhc.strict": True})
