"""`benchmarks.whole_model` measures a DeepSeek-V4, and its judge finds what is wrong. Nothing is compiled here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import whole_model
from tests.zoo.check import rewriting

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _run(monkeypatch: pytest.MonkeyPatch, mhc: Callable[..., Callable[..., Any]]) -> int:
    def compiled(module: torch.nn.Module, backend: str) -> Callable[..., Any]:
        return mhc(module) if backend == "mhc" else module

    monkeypatch.setattr(whole_model, "compiled", compiled)
    monkeypatch.setattr(whole_model, "warm_up", lambda device: None)
    monkeypatch.setattr(whole_model, "fresh_cache", contextlib.nullcontext)
    tiny = whole_model.SETUPS["tiny"]
    monkeypatch.setitem(whole_model.SETUPS, "tiny", replace(tiny, check_batches=2))
    return whole_model.main(["--steps", "1"])


def _rewritten(module: torch.nn.Module) -> Callable[..., Any]:
    program, _ = rewriting(module)
    return program


def test_it_measures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(monkeypatch, _rewritten) == 0
    told = capsys.readouterr().out
    assert "sites: 9 found, 9 rewritten\nok: " in told
    for row in ("time to first step", "training step", "error of logits", "error of all gradients"):
        assert row in told


def test_a_model_that_is_less_accurate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(module: torch.nn.Module) -> Callable[..., Any]:
        if not isinstance(module, whole_model.DeepseekV4ForCausalLM):
            return module

        def call(**batch: Any) -> Any:
            output = module(**batch)
            output.logits = output.logits * 1.001
            return output

        return call

    assert _run(monkeypatch, wrong) == 1
    assert "FAILED" in capsys.readouterr().out
