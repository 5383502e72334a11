"""transformers' DeepSeek-V4, class untouched: every site rewritten, results as good as eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4DecoderLayer

import mhc_compile
from mhc_compile import passes, records
from mhc_compile.testing import capture, graph_text
from mhc_compile.testing.float64 import Float64Reference
from mhc_compile.testing.judging import Errors, judge
from tests.e2e.deepseek_models import Stack, deepseek

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _tokens() -> torch.Tensor:
    return torch.randint(0, 128, (2, 12))


def test_every_site_is_rewritten() -> None:
    report = mhc_compile.explain(deepseek(layers=2), input_ids=_tokens())
    ops = [site.op for site in report.sites]
    assert report.declined == []
    assert report.errors == []
    assert ops == ["generate_mix_and_aggregate", "expand_combine"] * 4 + ["head"]


def test_norms_are_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "INPUT_NORMS", True)
    report = mhc_compile.explain(deepseek(layers=1), input_ids=_tokens())
    assert [("input norm eps" in site.detail) for site in report.sites] == [True, False, True, False, False]


def test_the_report_points_at_the_users_source() -> None:
    report = mhc_compile.explain(deepseek(layers=1), input_ids=_tokens())
    site = report.sites[0]
    assert site.location.file.endswith("modeling_deepseek_v4.py")
    assert "collapsed" in site.location.code
    assert "39 half-steps" in site.detail
    assert "5 of 5 hyper-connection sites rewritten" in str(report)


def test_the_rewritten_graphs() -> None:
    graphs = capture(Stack(depth=1), torch.randn(2, 3, 32))
    assert_expected_inline(
        str(graphs),
        """\
%0 = generate_mix_and_aggregate(x=f32[2, 3, 4, 32], phi=f32[24, 128], scale=f32[3], bias=f32[24],
    pre_eps=1e-06)
%1 = expand_combine(f=f32[2, 3, 32](%0.0), h_post=%0.1, x=f32[2, 3, 4, 32], h_res=%0.2)
%2 = head(x=%1, phi=f32[4, 128], scale=f32[1], bias=f32[4], pre_eps=1e-06)
return %2.0""",
    )
    assert_expected_inline(
        graph_text(graphs.joint[0]),
        """\
%0 = generate_mix_and_aggregate(x=f32[2, 3, 4, 32], phi=f32[24, 128], scale=f32[3], bias=f32[24],
    pre_eps=1e-06)
%1 = boundary(f=f32[2, 3, 32](%0.0), h_post=%0.1, x=f32[2, 3, 4, 32], h_res=%0.2, phi=f32[4, 128],
    scale=f32[1], bias=f32[4], pre_eps=1e-06)
%2 = boundary_backward(d_layer_input=f32[2, 3, 32], f=f32[2, 3, 32](%0.0), h_post=%0.1, x=f32[2, 3,
    4, 32], h_res=%0.2, phi=f32[4, 128], scale=f32[1], bias=f32[4], x_new=%1.0, h=f32[2, 3,
    4](%1.4), ms=f32[2, 3](%1.5), needs=[True, False, True, False, True, True, True, True, False,
    False], pre_eps=1e-06)
%3 = generate_mix_and_aggregate_backward(d_layer_input=f32[2, 3, 32](%2.0, %0.0), d_h_post=%2.2,
    d_h_res=%2.4, x=f32[2, 3, 4, 32], phi=f32[24, 128], scale=f32[3], bias=f32[24], h=f32[2, 3,
    24](%0.3), ms=%0.4, needs=[False, True, True, True, False, False], pre_eps=1e-06)
return %1.1, %3.1, %3.3, %3.2, %2.0, %0.0, %2.5, %2.6, %2.7""",
    )


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("regions", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_training_is_as_accurate_as_eager(regions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, loss and every gradient, through Inductor, against a float64 evaluation of the same model.

    regions: with layers that are compiled once and called twice.
    """
    model = deepseek(layers=2 if regions else 1)
    reference = Float64Reference(model)
    if regions:
        region = torch.compiler.nested_compile_region(DeepseekV4DecoderLayer.forward)
        monkeypatch.setattr(DeepseekV4DecoderLayer, "forward", region)
    runs = {"eager": model, "mhc": torch.compile(model, backend="mhc")}
    errors = {run: Errors() for run in runs}
    for _ in range(20):
        ids = _tokens()
        exact = _step(reference, reference.module, ids)
        for run, call in runs.items():
            errors[run].add(_step(call, model, ids), exact)
    assert len(records.last().rewritten) == 5
    assert records.last().declined == []
    gradients = [name for name in errors["mhc"].numbers if name not in ("logits", "loss")]
    findings = judge(errors["eager"], errors["mhc"], ["logits", "loss"], "outputs")
    findings += judge(errors["eager"], errors["mhc"], gradients, "gradients")
    assert len(gradients) > 20
    assert [str(finding) for finding in findings if not finding.ok] == []


def _step(run: Callable[..., Any], module: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits, loss and gradients of one training step."""
    module.zero_grad()
    out = run(input_ids=ids, labels=ids)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach().clone(), "loss": out.loss.detach().clone()} | grads
