"""What graphs that a graph calls have in their reports is not told as missed in that of the calling graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mhc_compile
from mhc_compile import passes
from mhc_compile.passes.report import Report
from tests.passes.dynamo import graph_of
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = (2, 3, 4, 6)
READ, WRITE = "generate_mix_and_aggregate", "expand_combine"
UNKNOWN = "but nothing that reads it was recognised in a graph that"


def _region(function: Callable[..., Any], *given: Any) -> Any:
    return checkpoint(function, *given, use_reentrant=False)


def _write(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res.transpose(-1, -2) @ x


def _nearly(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return torch.tanh(h_post.unsqueeze(-1) * f.unsqueeze(-2)) + h_res.transpose(-1, -2) @ x


class Writes(Sublayer):
    def write(self, *given: Tensor) -> Tensor:
        out: Tensor = _region(_write, *given)
        return out


class WritesInTwoRegions(Sublayer):
    def write(self, *given: Tensor) -> Tensor:
        out: Tensor = _region(lambda *inner: 2.0 * _region(_write, *inner), *given)
        return out


class Reads(Sublayer):
    def read(self, x: Tensor, h_pre: Tensor) -> Tensor:
        out: Tensor = _region(super().read, x, h_pre)
        return out


class ReadsAndWrites(Sublayer):
    def body(self, x: Tensor) -> Any:
        def rest(x: Tensor, h_pre: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
            return self.write(x, self.layer(self.read(x, h_pre), x), h_post, h_res)

        return _region(rest, x, *self.gates(x))


class NearlyWrites(Sublayer):
    def write(self, *given: Tensor) -> Tensor:
        out: Tensor = _region(_nearly, *given)
        return out


class NearlyWritesInTwoRegions(Sublayer):
    def write(self, *given: Tensor) -> Tensor:
        out: Tensor = _region(lambda *inner: 2.0 * _region(_nearly, *inner), *given)
        return out


class HalfWithoutGradient(Sublayer):
    def write(self, *given: Tensor) -> Tensor:
        def half(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
            with torch.no_grad():
                mixed = h_res.transpose(-1, -2) @ x
            return h_post.unsqueeze(-1) * f.unsqueeze(-2) + mixed

        out: Tensor = _region(half, *given)
        return out


class Looks(Sublayer):
    """A region reads the matrix for a statistic, beside streams."""

    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        x, mean = _region(lambda x, res: (x * 1.5, res.square().mean()), x, h_res)
        return _write(x, f, h_post, h_res) * mean


class Logits(Sublayer):
    """A region projects and reads; the Sinkhorn projection is outside."""

    def body(self, x: Tensor) -> Any:
        def first(x: Tensor) -> tuple[Tensor, ...]:
            pre, post, res = self.logits(self.split(self.mixes(x)))
            return self.layer(self.read(x, self.pre(pre)), x), self.post(post), res

        f, h_post, res = _region(first, x)
        return _write(x, f, h_post, self.res(res))


class Projects(Sublayer):
    """A region projects, and nothing in it shows what the logits are for."""

    def mixes(self, x: Tensor) -> Tensor:
        out: Tensor = _region(super().mixes, x)
        return out


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*given)
        return _write(*given)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        x, f, h_post, h_res = ctx.saved_tensors
        by_stream, by_channel = h_post.unsqueeze(-1) * g, g * f.unsqueeze(-2)
        return h_res @ g, by_stream.sum(-2), by_channel.sum(-1), x @ g.transpose(-1, -2)


class OwnFunction(Sublayer):
    def write(self, *given: Tensor) -> Tensor:
        out: Tensor = _Write.apply(*given)
        return out


class Branches(Sublayer):
    one, other = staticmethod(_write), staticmethod(_write)

    def write(self, *given: Tensor) -> Tensor:
        one, other = self.one, self.other
        out: Tensor = torch.cond(
            given[0].sum() > 0, lambda *a: one(*a).contiguous(), lambda *a: other(*a).contiguous(), given
        )
        return out


class OneBranch(Branches):
    other = staticmethod(lambda x, f, h_post, h_res: x + 1.0)


class OneNearly(Branches):
    other = staticmethod(_nearly)


class Loop(Sublayer):
    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        def step(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, _write(x, f, h_post, h_res)

        start = torch.zeros((), dtype=torch.int64)
        out: Tensor = torch._higher_order_ops.while_loop(lambda i, x: i < 2, step, (start, x.clone()))[1]
        return out


@torch.compiler.allow_in_graph
def _mixed(x: Tensor, h_res: Tensor) -> Tensor:
    return h_res.transpose(-1, -2) @ x


class Allowed(Sublayer):
    def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return _mixed(x, h_res) + h_post.unsqueeze(-1) * f.unsqueeze(-2)


def _graph_first(gm: torch.fx.GraphModule) -> Report:
    """As for `explain`."""
    return passes.run_recursively(gm)


def _bodies_first(gm: torch.fx.GraphModule) -> Report:
    """As Inductor runs the pass."""
    report = Report()
    for name in sorted({str(node.target) for node in gm.graph.nodes if node.op == "get_attr"}):
        if isinstance(body := getattr(gm, name), torch.fx.GraphModule):
            report.add(_bodies_first(body))
    report.add(passes.run(gm.graph, module=gm)[1])
    return report


def _report(kind: type[Sublayer], run: Callable[[torch.fx.GraphModule], Report]) -> Report:
    reports: list[Report] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        reports.append(run(gm))
        return gm

    model, x = kind(4, 6, 3, 2), torch.randn(X)
    # Dynamo traces through an autograd.Function where there are no gradients; eager loops and branches have none.
    with torch.set_grad_enabled(not issubclass(kind, (Branches, Loop))):
        torch.testing.assert_close(torch.compile(model, backend=backend, fullgraph=True)(x), model(x))
    (report,) = reports
    assert report.errors == []
    return report


ORDERS = pytest.mark.parametrize("run", [_graph_first, _bodies_first])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@ORDERS
@pytest.mark.parametrize(
    ("kind", "rewritten"),
    [
        (Writes, [READ, WRITE]),
        (WritesInTwoRegions, [READ, WRITE]),
        (ReadsAndWrites, ["aggregate", WRITE, "generate_mix"]),
        (Looks, [READ, WRITE]),
        (Logits, [READ, WRITE, "sinkhorn"]),
        (OwnFunction, [READ, WRITE]),
        (Branches, [READ, WRITE, WRITE]),
        (OneBranch, [READ, WRITE]),
        (Loop, [READ, WRITE]),
    ],
)
def test_what_is_rewritten_in_a_called_graph_is_not_missed(
    kind: type[Sublayer], rewritten: list[str], run: Callable[..., Report]
) -> None:
    report = _report(kind, run)
    assert (sorted(site.op for site in report.rewritten), report.declined) == (sorted(rewritten), [])


@ORDERS
@pytest.mark.parametrize(
    ("kind", "op", "reason"),
    [
        (Reads, "aggregate", f"this reads h_pre, {UNKNOWN} tag_activation_checkpoint calls"),
        (NearlyWrites, WRITE, f"this reads h_res, {UNKNOWN} tag_activation_checkpoint calls"),
        (NearlyWritesInTwoRegions, WRITE, f"this reads h_res, {UNKNOWN} tag_activation_checkpoint calls"),
        (OneNearly, WRITE, f"this reads h_res, {UNKNOWN} cond calls"),
        (Projects, "generate_mix", "but nothing that makes them was recognised in a graph that tag_activation_check"),
    ],
)
def test_what_is_not_rewritten_in_a_called_graph_is_missed(
    kind: type[Sublayer], op: str, reason: str, run: Callable[..., Report]
) -> None:
    (told,) = _report(kind, run).declined
    assert told.op == op
    assert reason in (told.reason or "")


def test_a_function_that_nobody_looks_into_may_write() -> None:
    report = _report(Allowed, _graph_first)
    assert [site.op for site in report.declined] == ["generate_mix", "aggregate"]
    assert all("may write in place into a tensor that the backward pass" in str(s.reason) for s in report.declined)


@ORDERS
def test_what_a_called_graph_declines_is_told_once(run: Callable[..., Report]) -> None:
    """With the reason that the called graph has."""
    (told,) = _report(HalfWithoutGradient, run).declined
    assert (told.op, told.reason) == (WRITE, "grad mode or inference mode changes between its parts")


@ORDERS
def test_what_a_called_graph_skips_is_told_once(run: Callable[..., Report], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_skip", _skip_writes)
    (told,) = _report(Writes, run).declined
    assert (told.op, told.reason) == (WRITE, passes.SKIPPED)


def _skip_writes(plan: Any, skipped: Any) -> None:
    for site in [site for site in plan.sites if site.op == WRITE]:
        plan.sites.remove(site)
        plan.declined.append(passes.Declined(site.op, passes.SKIPPED, passes._node(site)))


def test_a_called_graph_whose_rewriting_fails_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its report has no sites, so that the calling graph tells what it reads."""
    put = passes.put

    def fail(module: torch.fx.GraphModule, graph: torch.fx.Graph) -> None:
        if graph is not module.graph and not any("phi" in node.name for node in graph.nodes):
            raise RuntimeError("no")
        put(module, graph)

    monkeypatch.setattr(passes, "put", fail)
    reports: list[Report] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        reports.append(passes.run_recursively(gm))
        return gm

    with torch.no_grad():
        torch.compile(Writes(4, 6, 3, 2), backend=backend)(torch.randn(X))
    assert [site.op for site in reports[0].rewritten] == [READ]
    assert [site.op for site in reports[0].declined] == [WRITE]
    assert reports[0].errors


@pytest.mark.usefixtures("passes_only")
def test_strict_options_accept_a_write_in_a_region() -> None:
    model, x = Writes(4, 6, 3, 2), torch.randn(X)
    torch.compile(model, backend="mhc", options={"mhc.strict": True})(x)
    assert "mhc: 2 of 2 hyper-connection sites rewritten" in str(mhc_compile.report())


def _in_bfloat16(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


@torch.compiler.nested_compile_region
def _compiled_once(part: Sublayer, x: Tensor) -> Tensor:
    out: Tensor = part(x)
    return out


def _of_autocast(part: Sublayer, x: Tensor) -> Tensor:
    with _in_bfloat16():
        out: Tensor = _region(part, x)
    return out


def _compiled_once_of_autocast(part: Sublayer, x: Tensor) -> Tensor:
    with _in_bfloat16():
        return _compiled_once(part, _compiled_once(part, x))


def _within_a_region_of_autocast(part: Sublayer, x: Tensor) -> Tensor:
    def outer(x: Tensor) -> Tensor:
        with _in_bfloat16(False):
            x = x + 1.0
        out: Tensor = _region(part, x)
        return out

    with _in_bfloat16():
        return _region(outer, x)  # type: ignore[no-any-return]


def _without_autocast_in_autocast(part: Sublayer, x: Tensor) -> Tensor:
    with _in_bfloat16():
        x = _region(part, x)
        with _in_bfloat16(False):
            out: Tensor = _region(part, x)
    return out


def _branch_of_autocast(part: Sublayer, x: Tensor) -> Tensor:
    with _in_bfloat16():
        out: Tensor = torch.cond(x.sum() > -1e9, part, lambda x: x.clone(), (x,))
    return out


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize(
    ("program", "parts"),
    [
        (_of_autocast, 1),
        (_compiled_once_of_autocast, 1),
        (_within_a_region_of_autocast, 1),
        (_without_autocast_in_autocast, 2),
        (_branch_of_autocast, 1),
    ],
)
def test_a_region_of_an_autocast(program: Callable[[Sublayer, Tensor], Tensor], parts: int, outside: bool) -> None:
    """It is recorded under the autocasts of its call, which it does not set itself, before its caller and after it."""
    torch.manual_seed(0)
    part, x = Sublayer(4, 6, 3, 2), torch.randn(*X)
    for alone in (False, True):
        torch._dynamo.reset()
        with torch.no_grad(), _in_bfloat16(outside):
            module = graph_of(lambda x: program(part, x), x)
            passes.look_at_calls(module)
            bodies = [one for one in module.modules() if isinstance(one, torch.fx.GraphModule)]
            one_by_one = (passes.run(body.graph, module=body)[1] for body in reversed(bodies))
            reports = list(one_by_one) if alone else [passes.run_recursively(module)]
        assert [error for report in reports for error in report.errors] == []
        assert [site.op for report in reports for site in report.rewritten] == [READ, WRITE] * parts
