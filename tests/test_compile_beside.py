"""C++ that Inductor compiles for a CPU: begun early, once, and the same."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mhc_compile import compat
from mhc_compile.compat import cpp
from tests.e2e.deepseek_models import Stack
from tests.zoo import check

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "fresh_cache")

Begun = list[tuple[list[str], dict[str, str]]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """Every kernel that is asked for: its arguments, its text, and the file in which the code that asks for it is."""
    from torch._inductor.async_compile import AsyncCompile

    calls = []
    ask = AsyncCompile.cpp_pybinding

    def note(self: Any, arguments: list[str], source: str) -> Any:
        calls.append((str(arguments), source, sys._getframe(1).f_code.co_filename))
        return ask(self, arguments, source)

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", note)
    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: 2)
    return calls


def _step(model: Stack, dtype: torch.dtype, **compiler: str) -> list[Tensor]:
    hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = torch.compile(model.to(dtype), **compiler)(hidden)
    return [out, *torch.autograd.grad(out.sin().sum(), list(model.parameters()))]


def _step_is_right() -> None:
    torch.manual_seed(0)
    model = Stack(depth=1)
    results = _step(model, torch.float32, backend="mhc")
    for result, exact in zip(results, _step(model, torch.float64, backend="eager"), strict=True):
        assert check.error(result, exact) < 1e-5


def _is_early(file: str) -> bool:
    return file == cpp.__file__


@pytest.mark.slow
def test_kernels_are_begun_when_their_code_is_written_and_compiled_once(asked: list[tuple[str, str, str]]) -> None:
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    _step_is_right()
    early = [(arguments, source) for arguments, source, file in asked if _is_early(file)]
    by_code = [(arguments, source) for arguments, source, file in asked if not _is_early(file)]
    assert early == by_code
    assert len(CppPythonBindingsCodeCache.cache) == len(set(early))
    turns = [turn for turn, _ in itertools.groupby(_is_early(file) for *_, file in asked)]
    assert turns == [True, False, True, False]  # forward, backward: all of a graph's before its code asks for the first


@pytest.mark.slow
def test_what_cannot_be_begun_is_left_to_inductor(
    asked: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpp, "_compile", lambda kernel: 1 / 0)
    _step_is_right()
    assert {_is_early(file) for *_, file in asked} == {False}


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Begun:
    """The processes that look at compiler and CPU, each its command and environment; none is run. Nothing is known."""
    from torch._inductor import cpu_vec_isa

    processes: Begun = []

    def begin(command: list[str], env: dict[str, str], **kwargs: Any) -> Any:
        processes.append((command, env))
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr(cpp.subprocess, "Popen", begin)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", functools.cache(cpu_vec_isa.valid_vec_isa_list.__wrapped__))
    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: 2)
    monkeypatch.setattr(cpp, "_settle_first", functools.cache(cpp._settle_first.__wrapped__))
    return processes


def test_one_process_looks_where_nothing_is_known(begun: Begun) -> None:
    cpp.compile_beside()
    cpp.compile_beside()
    assert len(begun) == 1


def test_none_looks_where_files_were_compiled_before(begun: Begun) -> None:
    from torch._inductor.codecache import get_lock_dir

    Path(get_lock_dir(), "one.lock").touch()
    cpp.compile_beside()
    assert not begun


def test_none_looks_where_this_process_has(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpu_vec_isa

    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda self, code: True)
    cpu_vec_isa.valid_vec_isa_list()
    cpp.compile_beside()
    assert not begun


def test_nothing_is_begun_with_one_thread(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: 1)
    cpp.compile_beside()
    assert not begun


def test_a_process_that_cannot_be_started_is_no_error(
    begun: Begun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError

    monkeypatch.setattr(cpp.subprocess, "Popen", fail)
    cpp.compile_beside()
    assert capfd.readouterr().err == ""


def test_nothing_is_begun_without_hyper_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "compile_beside", lambda: 1 / 0)
    torch.compile(lambda x: x.sin(), backend="mhc")(torch.ones(3))


_AFTERWARDS = """
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.cpu_vec_isa import pick_vec_isa

build = CppBuilder.build
CppBuilder.build = lambda self: (print(self.get_target_file_path()), build(self))
pick_vec_isa()
for body in ("auto sum = at::vec::Vectorized<float>(1);", ""):
    source = f'#include <torch/csrc/inductor/cpp_prefix.h>\\nextern "C" void kernel() {{ {body} }} // another\\n'
    CppPythonBindingsCodeCache.load_pybinding([], source)
"""


def _first(folder: Path, parent: int) -> Path:
    """Run the process that looks, for this parent, where somebody left a file of a library's name."""
    cache = folder / "cache"
    cache.mkdir()
    (folder / "random.py").write_text("raise SystemExit(1)")
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TMPDIR": str(folder)}
    subprocess.run([sys.executable, "-c", cpp._FIRST, str(parent)], env=environment, check=True, cwd=folder)
    return cache


@pytest.mark.slow
def test_a_process_that_comes_afterwards_compiles_its_kernels_alone(tmp_path: Path) -> None:
    cache = _first(tmp_path, os.getpid())
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", _AFTERWARDS]
    ran = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    # Each header is preprocessed to see if it is the one that was compiled.
    built = [path for path in ran.stdout.split() if Path(path).suffix != ".i"]
    assert [Path(path).suffixes for path in built] == [[".main", ".so"]] * 2, ran.stdout


def test_nothing_is_built_for_a_process_that_has_ended(tmp_path: Path) -> None:
    cache = _first(tmp_path, 1 << 30)
    assert not list(cache.rglob("*.so"))


def test_the_process_is_told_whose_it_is_and_writes_no_traces(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_TRACE", "somewhere")
    cpp.compile_beside()
    ((command, environment),) = begun
    assert command[-1] == str(os.getpid())
    assert "TORCH_TRACE" not in environment
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(compat.inductor_cache_dir())
