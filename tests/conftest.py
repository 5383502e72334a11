"""Shared by all tests: a fixed seed for every test, and a clean compiler for those that compile."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random numbers for a test whether it runs alone, in any order or on any worker."""
    torch.manual_seed(20_512)


def pytest_collection_finish() -> None:
    """What has been imported stays, and need not be looked through for garbage again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture
def fresh_dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No compiled code from earlier tests, and none left for later ones."""
    # Not at the top: the interpreter's processes do without Dynamo, which takes longer to import than torch.
    import torch._dynamo.guards

    # It times the guards of every graph after emptying the processor's caches, for a log that nobody reads: a fifth of
    # what a small graph costs.
    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *given: 0.0, raising=False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def fresh_cache() -> Iterator[None]:
    """No graph is found in a cache, where it would not be compiled again."""
    from mhc_compile import compat

    with compat.fresh_inductor_cache():
        yield


@pytest.fixture(autouse=True)
def _gives_memory_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """A worker that keeps what a large test took leaves none to the others on its GPU."""
    yield
    if request.node.get_closest_marker("gpu") and torch.cuda.is_available():
        torch.cuda.empty_cache()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu say why they do not run where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    no_device = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_device)
