"""`benchmarks.whole_model` measures a DeepSeek-V4, and its judge finds what is wrong. Nothing is compiled here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import whole_model
from mhc_compile.passes.report import Report
from mhc_compile.testing import Errors
from tests.zoo.check import rewriting

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


ONE_LAYER = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "layer_types": ["compressed_sparse_attention"],
    "mlp_layer_types": ["hash_moe"],
}


@pytest.mark.thorough
def test_it_measures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def compiled(module: torch.nn.Module, backend: str) -> Callable[..., Any]:
        return rewriting(module)[0] if backend == "mhc" else module

    monkeypatch.setattr(whole_model, "compiled", compiled)
    monkeypatch.setattr(whole_model, "warm_up", lambda device: None)
    monkeypatch.setattr(whole_model, "fresh_cache", contextlib.nullcontext)
    tiny = whole_model.SETUPS["tiny"]
    monkeypatch.setitem(
        whole_model.SETUPS, "tiny", replace(tiny, model=tiny.model | ONE_LAYER, check_batches=2, stack_depth=1)
    )
    assert whole_model.main(["--steps", "1"]) == 0
    told = capsys.readouterr().out
    assert "sites: 5 found, 5 rewritten\nok: " in told
    for row in ("time to first step", "training step", "error of logits", "error of all gradients"):
        assert row in told


@pytest.mark.parametrize(("error", "worse"), [(1e-7, False), (1e-5, True)])
def test_errors_that_are_larger_than_those_of_eager_code(error: float, worse: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    errors = {"eager": Errors(), "mhc": Errors()}
    for run, size in (("eager", 1e-7), ("mhc", error)):
        for _ in range(4):
            exact = {name: torch.ones(64).double() for name in ("logits", "loss", "gradient of weight")}
            found = {name: one + size * torch.randn(64, generator=generator) for name, one in exact.items()}
            errors[run].add(found, exact)
    assert bool(whole_model.larger_errors(errors)) == worse


def test_sites_that_are_left() -> None:
    assert whole_model.sites_left(Report(), layers=2) == ["0 sites were rewritten, the model has 9"]
