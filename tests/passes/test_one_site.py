"""A failure at one site costs that site: the others are rewritten, and the failure is reported in one line."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mhc_compile import passes
from mhc_compile.passes.plan import CombineSite, MixSite
from mhc_compile.passes.report import Report
from tests.passes.fused import fused_like_eager, program
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

rewriting = importlib.import_module("mhc_compile.passes.rewrite")
recognising = importlib.import_module("mhc_compile.passes.recognise")
planning = importlib.import_module("mhc_compile.passes.plan")
surroundings = importlib.import_module("mhc_compile.passes.plan.surroundings")
budgets = importlib.import_module("mhc_compile.passes")

N, C, LENGTH, BATCH = 4, 6, 3, 2
BOTH = ["generate_mix_and_aggregate", "expand_combine"]


def _stack(layers: int = 2) -> nn.Module:
    return nn.Sequential(*(Sublayer(N, C, LENGTH, BATCH) for _ in range(layers)))


def _x(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, N, C)


def _operators(report: Report) -> list[str]:
    return [site.op for site in report.rewritten]


def _fails(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: Callable[..., bool], error: Exception | None = None
) -> None:
    """Let a function of ours raise where `at` says so of its arguments."""
    original = getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if at(*args):
            raise error or RuntimeError("planted\nin two lines")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


ERROR = r"RuntimeError: planted in two lines \(mhc_compile/passes/[\w/]+\.py:\d+\)"


@pytest.mark.parametrize("kind", [MixSite, CombineSite])
@pytest.mark.parametrize("which", [0, 1])
def test_the_other_sites_are_rewritten(monkeypatch: pytest.MonkeyPatch, kind: type, which: int) -> None:
    seen: list[Any] = []

    def at(rewriter: Any, site: Any) -> bool:
        if isinstance(site, kind) and site not in seen:
            seen.append(site)
        return isinstance(site, kind) and seen.index(site) == which

    _fails(monkeypatch, rewriting.Rewriter, "_insert", at)
    report = fused_like_eager(_stack(), (_x(),)).report
    assert len(report.rewritten) == 3, str(report)
    (declined,) = report.declined
    assert re.fullmatch(f"an internal failure: {ERROR}", str(declined.reason))
    assert len(report.errors) == 1
    assert re.fullmatch(ERROR, report.errors[0])


def test_layers_that_fail_alike_are_told_once_and_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []
    original = passes.rewrite
    monkeypatch.setattr(passes, "rewrite", lambda *given: (tries.append(1), original(*given))[1])
    _fails(monkeypatch, rewriting.Rewriter, "_combine", lambda rewriter, site: True)
    report = fused_like_eager(_stack(5), (_x(),)).report
    assert _operators(report) == ["generate_mix_and_aggregate"] * 5, str(report)
    assert len(report.declined) == 5
    assert len(report.errors) == 1
    assert len(tries) == 2


@pytest.mark.parametrize("which", range(6))
def test_a_failure_that_says_nothing_of_its_site_is_traced_to_it(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    """Where the copied graph is brought into order, all sites are in it."""
    culprits: list[Any] = []

    def at(copies: Any, calls: Any) -> bool:
        if not culprits:
            culprits.append(calls[which][1])
        return any(site is culprits[0] for _, site in calls)

    _fails(monkeypatch, rewriting, "sort", at)
    report = fused_like_eager(_stack(3), (_x(),)).report
    assert len(report.rewritten) == 5, str(report)
    assert len(report.declined) == len(report.errors) == 1


def test_sites_that_cannot_be_together(monkeypatch: pytest.MonkeyPatch) -> None:
    _fails(monkeypatch, rewriting, "sort", lambda copies, calls: len(calls) > 3)
    report = fused_like_eager(_stack(3), (_x(),)).report
    assert len(report.rewritten) == 3, str(report)
    assert len(report.declined) == 3
    assert len(report.errors) == 1


def test_tries_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "_MOST_TRIES", 3)
    _fails(monkeypatch, rewriting, "sort", lambda copies, calls: len(calls) > 1)
    report = fused_like_eager(_stack(3), (_x(),)).report
    assert not report.rewritten
    assert any("no end was found within" in error and "tries" in error for error in report.errors)


def test_a_graph_in_which_nothing_works_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    _fails(monkeypatch, rewriting, "sort", lambda copies, calls: True)
    report = fused_like_eager(_stack(1), (_x(),)).report
    assert not report.rewritten
    assert len(report.declined) == 2
    assert len(report.errors) == 1


CANDIDATES = {
    "_read_wide": recognising,
    "understand": recognising,
    "mix_site": planning,
    "check_surroundings": surroundings,
    "check_gradients": surroundings,
}


@pytest.mark.parametrize("name", CANDIDATES)
def test_one_look_that_fails_costs_what_it_looks_at(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One of two different sublayers is looked into as usual."""
    model = nn.Sequential(Sublayer(N, C, LENGTH, BATCH), Sublayer(N, C, LENGTH, BATCH))
    count = len(program_report(model).rewritten)
    assert count == 4
    calls: list[int] = []

    def at(*given: Any) -> bool:
        calls.append(1)
        return len(calls) == 1

    _fails(monkeypatch, CANDIDATES[name], name, at)
    report = fused_like_eager(model, (_x(),)).report
    # At least the sublayer that the failure is not in; what is left of the other may be sites of smaller operators.
    assert set(BOTH) <= set(_operators(report)), str(report)
    assert len(report.errors) == 1
    assert re.fullmatch(ERROR, report.errors[0])


def program_report(model: nn.Module) -> Report:
    compiled = program(model)
    compiled.call(_x())
    torch._dynamo.reset()
    return compiled.report


def test_a_failure_to_tell_of_sites_costs_no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    _fails(monkeypatch, planning, "misses", lambda *given: True)
    report = fused_like_eager(_stack(1), (_x(),)).report
    assert _operators(report) == BOTH
    assert len(report.errors) == 1


def _backwards(count: int) -> Tensor:
    return torch.arange(count).flip(0)


# Rows of [batch, tokens, n, n] or [batch, tokens, n], picked where that is all rows, some, or some twice.
PICKS: dict[str, Callable[[Tensor], Tensor]] = {
    "list": lambda m: m[[0]],
    "list-twice": lambda m: m[[0]][[0]],
    "negative": lambda m: m[[-1]],
    "mask": lambda m: m[[True]],
    "tuple": lambda m: m[(0,)].unsqueeze(0),
    "tensor": lambda m: m[torch.tensor([0])],
    "two-tensors": lambda m: m[torch.tensor([[0]]), torch.arange(m.shape[1])],
    "second-axis": lambda m: m[:, list(range(m.shape[1]))],
    "ellipsis": lambda m: m[..., [0, 1, 2, 3]],
    "permuted": lambda m: m[..., [1, 0, 3, 2]],
    "repeated": lambda m: m[[0, 0]][:1],
    "index-select": lambda m: m.index_select(0, torch.tensor([0])),
    "index-select-tokens": lambda m: m.index_select(1, torch.arange(m.shape[1])),
    "take-along": lambda m: torch.take_along_dim(m, torch.zeros_like(m, dtype=torch.long)[:1], 0),
    "gather": lambda m: m.gather(0, torch.zeros_like(m, dtype=torch.long)),
    "gather-reversed": lambda m: m.gather(
        1, torch.arange(m.shape[1]).flip(0).view(1, -1, *[1] * (m.dim() - 2)).expand_as(m)
    ),
    "none": lambda m: m[None][[0]][0],
}


class Picking(Sublayer):
    """A sublayer that picks rows of its logits of h_res, of h_pre, or of the streams."""

    def __init__(self, pick: Callable[[Tensor], Tensor], where: str, batch: int, length: int) -> None:
        super().__init__(N, C, length, batch)
        self.pick, self.where = pick, where

    def _at(self, where: str, value: Tensor) -> Tensor:
        return self.pick(value) if self.where == where else value

    def res(self, logits: Tensor) -> Tensor:
        return super().res(self._at("res", logits))

    def pre(self, logits: Tensor) -> Tensor:
        return super().pre(self._at("pre", logits))

    def mixes(self, x: Tensor) -> Tensor:
        return super().mixes(self._at("streams", x))


@pytest.mark.parametrize("where", ["res", "pre", "streams"])
@pytest.mark.parametrize("name", PICKS)
def test_rows_that_are_picked(name: str, where: str) -> None:
    for batch, length in ((1, 7), (1, 1)):
        if where == "streams" and name in ("ellipsis", "permuted"):
            continue  # of six channels
        torch.manual_seed(1)
        report = fused_like_eager(Picking(PICKS[name], where, batch, length), (_x(batch, length),)).report
        assert not report.errors, report.errors
        assert report.rewritten, str(report)


def test_a_node_that_is_run_again_and_returns_something_else_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shadow = importlib.import_module("mhc_compile.passes.shadow")
    original = shadow.record

    def other(run: Any, inputs: Any, mode: Any) -> Any:
        return original(lambda given: run(given).unsqueeze(0) if run(given).dim() == 4 else run(given), inputs, mode)

    monkeypatch.setattr(shadow, "record", other)
    report = fused_like_eager(_stack(1), (_x(),)).report
    assert any(re.search(r"run again, \w+ returns \[1, 2, 3", error) for error in report.errors), report.errors


def test_what_fails_when_it_is_run_again_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    shadow = importlib.import_module("mhc_compile.passes.shadow")
    _fails(monkeypatch, shadow, "record", lambda *given: True)
    report = fused_like_eager(_stack(1), (_x(),)).report
    assert not report.rewritten
    assert len(report.errors) == 1
    assert re.fullmatch(ERROR + r", at near\.py:\d+", report.errors[0])


def test_an_operators_own_checks_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with arguments is no failure of ours; it declines the site with what the operator says."""
    original = rewriting.Rewriter._call

    def refusing(self: Any, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        if target is torch.ops.mhc.expand_combine.default:
            raise ValueError("mhc::expand_combine: x has 17 streams, too many")
        return original(self, target, *args, **kwargs)

    monkeypatch.setattr(rewriting.Rewriter, "_call", refusing)
    report = fused_like_eager(_stack(1), (_x(),)).report
    assert not report.errors
    assert [site.reason for site in report.declined] == ["mhc::expand_combine: x has 17 streams, too many"]
