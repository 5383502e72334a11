"""Shared by all tests: a fixed seed for every test, and a clean compiler for those that compile."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import logging
import os
import platform
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") == "1" and platform.machine() == "x86_64":
    # The interpreter multiplies with NumPy, whose BLAS on AVX2 sums a row by its place in the tile. NumPy reads this
    # when it is imported.
    os.environ["OPENBLAS_CORETYPE"] = "Nehalem"

import torch

# pytest listens to every logger that does not propagate, and torch writes down all graphs where one listens to this.
logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random numbers for a test whether it runs alone, in any order or on any worker."""
    torch.manual_seed(20_512)


@pytest.fixture(autouse=True, scope="session")
def _known_by_name() -> None:
    """backend="mhc" is there in a checkout that is not installed, such as one that a GPU machine runs."""
    if os.environ.get("TRITON_INTERPRET") != "1":  # without Dynamo: see `fresh_dynamo`
        importlib.import_module("mhc_compile.entry")


@pytest.fixture(autouse=True)
def _kernels_compile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, a kernel that does not compile fails its test: no reference stands for it."""
    if request.node.get_closest_marker("gpu"):
        from mhc_compile.ops import _register

        monkeypatch.setattr(_register, "_is_of_compiler", lambda error: False)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def job_device(request: pytest.FixtureRequest) -> str:
    """Where the ranks of a job compute: on a CPU, or each on a GPU of its own."""
    return str(request.param)


@pytest.fixture
def told() -> Iterator[list[str]]:
    """The lines of mhc_compile's log that a user sees."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert record.exc_info is None, "a traceback is for debugging"
            lines.append(record.getMessage())

    listener, log = Listener(logging.WARNING), logging.getLogger("mhc_compile")
    log.addHandler(listener)
    yield lines
    log.removeHandler(listener)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thin", type=int, metavar="N", help="of each test run at most N cases, always the same ones")
    parser.addoption(
        "--whole",
        action="append",
        default=[],
        metavar="DIR",
        help="with --thin: all cases of fast tests in this folder",
    )


def _is_whole(config: pytest.Config, item: pytest.Item) -> bool:
    """Whether all cases of a test run in any case: it is fast, and in a folder that is named."""
    slow = any(item.get_closest_marker(name) for name in ("slow", "thorough"))
    return not slow and any(
        item.path.is_relative_to(config.rootpath / folder) for folder in config.getoption("--whole")
    )


def _thin_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (most := config.getoption("--thin")) is None:
        return
    if most < 1:
        raise pytest.UsageError(f"--thin {most}: expected a number of cases, 1 or more")
    tables: dict[str, list[pytest.Item]] = {}
    thinned = [item for item in items if not _is_whole(config, item)]
    for item in sorted(thinned, key=lambda item: zlib.crc32(item.nodeid.encode())):
        tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = {item for cases in tables.values() for item in cases[most:]}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


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


@pytest.fixture
def passes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's graphs go through the first pass and run as they then are."""
    from mhc_compile import compat

    def run(patches: dict[str, Any], gm: Any, inputs: Any) -> Any:
        for name in {str(node.target) for node in gm.graph.nodes if node.op == "get_attr"}:
            if isinstance(body := getattr(gm, name), torch.fx.GraphModule):
                patches["pre_grad_custom_pass"](body.graph)
        patches["pre_grad_custom_pass"](gm.graph)
        return gm.forward

    monkeypatch.setattr(compat, "inductor_compiler", lambda mode, options, patches: functools.partial(run, patches))


@contextlib.contextmanager
def _in_turn(lock: Path) -> Iterator[None]:
    """One process at a time."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(autouse=True)
def _shares_the_memory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers share a GPU: none keeps the memory of a test, and tests that take much of it run one at a time."""
    if not request.node.get_closest_marker("gpu") or not torch.cuda.is_available():
        yield
        return
    turn: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if request.node.get_closest_marker("memory") and "PYTEST_XDIST_WORKER" in os.environ:
        # The workers' temporary folders are in one folder of the run.
        turn = _in_turn(tmp_path_factory.getbasetemp().parent / "memory.lock")
    with turn:
        yield
        torch.cuda.empty_cache()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu say why they do not run where there is no CUDA device."""
    _thin_out(config, items)
    if torch.cuda.is_available():
        return
    no_device = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_device)
