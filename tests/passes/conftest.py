"""What several tests of the passes are given."""

from __future__ import annotations

import importlib

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from mhc_compile.kernels import gpus


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakeTensorMode:
    """Fake tensors on an H100 that need not exist."""
    pytest.importorskip("triton")
    monkeypatch.setattr(gpus, "runs_kernels", lambda index: True)
    monkeypatch.setattr(gpus, "of", lambda device: gpus.TABLE[90])
    monkeypatch.setattr(gpus, "processors", lambda device: 132)
    monkeypatch.setattr(gpus, "bytes_per_second", lambda device: 3.35e12)
    return FakeTensorMode()


@pytest.fixture
def short_sublayers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sublayers of tests are short, and worth a call all the same."""
    sublayers = importlib.import_module("mhc_compile.passes.share.sublayers")
    monkeypatch.setattr(sublayers, "_LENGTH", 2)
    monkeypatch.setattr(sublayers, "_SAVED", 2)
