"""Operators that the program calls itself: reported with their lines, apart from sites, and fused like any others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mhc_compile
from mhc_compile import compat, ops, passes, records
from mhc_compile.nn import HyperConnection
from mhc_compile.passes.cut import MADE_ELSEWHERE
from mhc_compile.passes.report import Report, SiteReport
from tests.passes.dynamo import graph_of
from tests.passes.fused import Stack, Sublayer, assert_same, program, streams
from tests.zoo import check

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PAIR = ["generate_mix_and_aggregate", "expand_combine"]


def _names(sites: list[SiteReport]) -> list[str]:
    return [site.op for site in sites]


def test_explain_lists_them_with_the_lines_that_call_them() -> None:
    report = mhc_compile.explain(Stack(2), streams())
    assert (_names(report.called), report.sites) == (PAIR * 2, [])
    # The wrapper's own line would say nothing about the program.
    assert {site.location.name for site in report.called} == {"tests/passes/fused.py"}
    assert "ops.generate_mix_and_aggregate(x, self.phi" in report.called[0].location.code
    text = str(report)
    assert "mhc: 0 of 0 hyper-connection sites rewritten in 1 graph" in text
    assert "  called by the program: 2 x expand_combine at tests/passes/fused.py:" in text
    assert "no hyper-connection code was found" not in text


def test_they_are_counted_apart_from_sites() -> None:
    model = nn.Sequential(HyperConnection(nn.Linear(24, 24), dim=24), Sublayer())
    report = mhc_compile.explain(model, streams())
    assert (_names(report.rewritten), _names(report.called)) == (PAIR, PAIR)


def test_operators_of_others_are_none_of_ours() -> None:
    report = mhc_compile.explain(lambda x: torch.ops.aten.sin.default(x), streams())
    assert (report.called, report.sites) == ([], [])


def test_a_called_write_is_cut_with_its_line_where_one_of_its_gates_is_given() -> None:
    def write(x: Tensor, f: Tensor, post: Tensor) -> Tensor:
        res = x.mean(-1, keepdim=True).expand(*x.shape[:-1], x.shape[-2]).softmax(-1)
        return torch.ops.mhc.expand_combine.default(f, None, post, x, res)

    x = streams()
    (site,) = passes.run(graph_of(write, x, x[..., 0, :], x[..., 0]).graph)[1].cut
    assert (site.op, site.reason) == ("expand_combine", MADE_ELSEWHERE)
    assert "torch.ops.mhc.expand_combine.default(f, None, post, x, res)" in site.location.code


def test_what_was_inserted_is_not_called_by_the_program() -> None:
    """A graph may come to the passes a second time, rewritten."""
    found: list[Report] = []

    def twice(gm: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        found.extend(passes.run_recursively(gm) for _ in range(2))
        return gm.forward

    torch.compile(HyperConnection(nn.Linear(24, 24), dim=24), backend=twice)(streams())
    assert [(_names(report.rewritten), report.called) for report in found] == [(PAIR, []), ([], [])]


def test_a_residual_around_a_called_read() -> None:
    """h_post and h_res come from an operator that the program calls, and the write is its own code."""

    def write(x: Tensor, sublayer: Sublayer) -> Tensor:
        u, post, res = ops.generate_mix_and_aggregate(x, sublayer.phi, sublayer.scale, sublayer.bias)
        return post.unsqueeze(-1) * sublayer.layer(u).unsqueeze(-2) + torch.einsum("blio,blic->bloc", res, x)

    report = mhc_compile.explain(write, streams(), Sublayer())
    assert (_names(report.rewritten), _names(report.called)) == (PAIR[1:], PAIR[:1])


@pytest.mark.parametrize("mixed", [False, True])
def test_fused_training_is_that_of_the_program(mixed: bool) -> None:
    """Across sublayers that call operators, and those and recognised ones in turn."""
    recognised = HyperConnection(nn.Linear(24, 24), dim=24)
    model, x = nn.Sequential(Sublayer(), recognised if mixed else Sublayer(), Sublayer()), streams()
    fused = program(model)
    results = check.evaluate(fused.call, model, (x,))
    assert fused.counts == {"accumulate": 3, "boundary": 2, "boundary_backward": 2}
    assert len(fused.report.rewritten) == 2 * mixed
    assert_same(results, check.evaluate(model, model, (x,)))


def test_in_nested_graphs() -> None:
    first, second = Sublayer(), Sublayer()
    report = mhc_compile.explain(lambda x: second(checkpoint(first, x, use_reentrant=False)), streams())
    assert _names(report.called) == PAIR * 2


@pytest.fixture
def empty_cache() -> Iterator[None]:
    with compat.fresh_inductor_cache():
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("empty_cache")
def test_the_report_of_a_compiled_model() -> None:
    model, x = Stack(2), streams()
    results = check.evaluate(torch.compile(model, backend="mhc"), model, (x,))
    assert _names(records.last().called) == _names(mhc_compile.report().called) == PAIR * 2
    assert dict(records.last().fusions) == {"accumulate": 2, "boundary": 1, "boundary_backward": 1}
    assert_same(results, check.evaluate(model, model, (x,)))
