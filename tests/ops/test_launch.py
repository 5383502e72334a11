"""mhc::_launch in a graph that Inductor compiles: what it writes are arguments."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN
from torch._inductor.utils import run_and_get_code
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mhc_compile import compat, passes
from mhc_compile.encoding import from_text, to_text
from mhc_compile.kernels import opaque as opaque_kernels
from mhc_compile.kernels.opaque import compiling_for, hash_of_triton, opaque, triton_here
from mhc_compile.ops import _launch

OPERATOR = "torch.ops.mhc._launch.default"


@pytest.fixture(autouse=True)
def variables() -> Iterator[None]:
    """Those of the process: where Triton keeps kernels, and what it assembles them with, is set by variables."""
    from triton.backends.nvidia.compiler import get_ptxas_version

    with mock.patch.dict(os.environ), mock.patch.object(opaque_kernels, "_assembler", "another"):
        yield
        assembler = os.environ.get("TRITON_PTXAS_PATH")
    if assembler is not None:  # what Triton has found out about it, it does not forget
        os.environ["TRITON_PTXAS_PATH"] = assembler
    get_ptxas_version.cache_clear()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The operator, and the function that does its work, double and add where there are no kernels."""

    def kernel(tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
        out, changed, x, added = tensors
        assert sizes == [5]
        out.copy_(2 * x)
        changed.add_(added)

    monkeypatch.setattr(_launch, "_read", {"text": kernel}.__getitem__)
    library = torch.library.Library("mhc", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("_launch", _launch.launch, "CPU")  # type: ignore[no-untyped-call]
    yield
    library._destroy()  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("fresh_dynamo", "on_cpu")
@pytest.mark.parametrize("direct", [False, True])
def test_inductor_orders_what_reads_after_what_writes(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory, and memory of the graph's own that the launch reads as well; called by torch, and directly."""
    aten = torch.ops.aten
    monkeypatch.delitem(CUSTOM_EXTERN_KERNEL_CODEGEN, OPERATOR, raising=False)
    if direct:
        compat.call_directly(OPERATOR, "mhc_compile.ops._launch.launch")

    def insert(graph: fx.Graph) -> None:
        (sin,) = graph.find_nodes(op="call_function", target=aten.sin.default)
        (cos,) = graph.find_nodes(op="call_function", target=aten.cos.default)
        value = sin.meta["val"]
        with graph.inserting_before(sin):
            options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
            room = graph.call_function(aten.empty.memory_format, (list(value.shape),), options)
            args = "text", [sin.args[0], cos], [5]
            launch = graph.call_function(torch.ops.mhc._launch.default, args, {"written": [room, cos]})
        room.meta["val"], launch.meta["val"] = value, None
        sin.replace_all_uses_with(room)
        graph.erase_node(sin)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        cos = torch.cos(x)
        return torch.sin(x) + cos, (cos + 1).sum()

    x = torch.randn(5, 7)
    # Patched as the module offers it: what pytest's monkeypatch undoes, it hides from everyone after.
    with config.patch(post_grad_custom_post_pass=insert):
        (total, reduced), (code,) = run_and_get_code(torch.compile(function), x)
    torch.testing.assert_close(total, 2 * x + 2 * torch.cos(x))
    torch.testing.assert_close(reduced, (2 * torch.cos(x) + 1).sum())
    assert (OPERATOR in code) is not direct
    assert ("mhc_compile.ops._launch.launch('text'" in code) is direct


@pytest.mark.usefixtures("fresh_dynamo", "on_cpu")
def test_inductor_gives_the_strides_that_a_launch_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to itself it makes a contiguous copy of what was transposed in the order in which it computes it."""
    seen: list[tuple[int, ...]] = []

    def lowered(graph: fx.Graph) -> None:
        (copy,) = graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
        value = copy.meta["val"]
        options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        with graph.inserting_after(copy):
            room = graph.call_function(torch.ops.aten.empty.memory_format, (list(value.shape),), options)
        with graph.inserting_after(room):
            given = ("text", [copy], []), {"written": [room]}
            launch = graph.call_function(torch.ops.mhc._launch.default, *given)
        room.meta["val"] = torch.empty_like(value)
        copy.replace_all_uses_with(room, lambda user: user is not launch)
        passes.lowering._describe(launch, launch)

    def kernel(tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
        out, x = tensors
        seen.append(x.stride())
        out.copy_(x)

    monkeypatch.setattr(_launch, "_read", {"text": kernel}.__getitem__)
    x = torch.randn(5, 7)
    with config.patch(post_grad_custom_post_pass=lowered):
        result = torch.compile(lambda x: torch.sin(x).t().contiguous() + 1)(x)
    assert seen == [(5, 1)]
    torch.testing.assert_close(result, torch.sin(x).t() + 1)


@pytest.mark.parametrize("value", [[1, (2, 3)], {"rows": (64, 16)}, {1: 2}, ["it's"]])
def test_what_is_not_read_as_it_was_written_is_refused(value: object) -> None:
    """A kernel would be given a list in place of a tuple, for which Triton has no name."""
    assert from_text(to_text([None, 2, 0.1, True, {"name": "text"}])) == [None, 2, 0.1, True, {"name": "text"}]
    with pytest.raises(ValueError, match="Expecting" if value == ["it's"] else "not what is read"):
        to_text(value)


@gluon.jit
def _halve(x, out, factor, BLOCK: gl.constexpr):  # type: ignore[no-untyped-def]
    at = gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(out + at, gl.load(x + at) * factor)


halve = opaque("out")(_halve)
HALVE = to_text([f"{__name__}.halve", [1, 0], ["float32"] * 2, [None, None, 0.5, 3], {"BLOCK": 128}])


@pytest.mark.slow
def test_another_process_compiles_what_the_first_launch_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into Triton's cache, under the key by which this process looks for it, whatever the other has compiled with."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    compat.settle_triton()
    environment, target = triton_here(), ("cuda", 90, 32)
    assert environment["TRITON_CACHE_DIR"] == str(tmp_path)
    with config.patch(compile_threads=2):
        assert compat.call_in_worker(_remember_another_assembler).result(timeout=200) is None
        assert (
            compat.call_in_worker(_launch._compile, HALVE, target, environment, hash_of_triton()).result(timeout=200)
            is None
        )
    kept = sorted(tmp_path.iterdir())
    assert list(tmp_path.rglob("_halve.cubin"))
    with compiling_for(target, {}):
        _launch._read(HALVE).compile()
    assert sorted(tmp_path.iterdir()) == kept


def test_the_assembler_that_was_asked_before_is_forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch names its own when it first compiles a kernel here; Triton may have asked another before that."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas_version
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", opaque_kernels._Absent(GPUTarget("cuda", 90, 32)))
    for remembered in (False, True):  # the second time nobody has to be asked
        _remember_another_assembler()
        _launch._read.__wrapped__(HALVE).compile()
        assert (get_ptxas_version(90) == "another, release 13.0") is remembered


def test_a_hash_that_is_known_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import cache

    monkeypatch.setattr(cache, "triton_key", cache.triton_key)
    assert hash_of_triton() == cache.triton_key()
    with compiling_for(("cuda", 90, 32), {}, "known"):
        assert hash_of_triton() == "known"


def _remember_another_assembler() -> None:
    """As if Triton had compiled with it."""
    from triton import knobs
    from triton.backends.nvidia import compiler

    assert knobs.nvidia.ptxas.path  # Triton remembers what it says of itself, too: for which PTX it assembles
    compiler.get_ptxas_version.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler.subprocess, "check_output", lambda *_, **__: b"another, release 13.0")
        compiler.get_ptxas_version(90)


def test_variables_are_those_of_before_when_a_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")
    monkeypatch.delenv("TRITON_LIBDEVICE_PATH", raising=False)
    with compiling_for(("cuda", 90, 32), {"TRITON_CACHE_DIR": "within", "TRITON_LIBDEVICE_PATH": "within"}):
        assert os.environ["TRITON_CACHE_DIR"] == os.environ["TRITON_LIBDEVICE_PATH"] == "within"
    assert os.environ["TRITON_CACHE_DIR"] == "before"
    assert "TRITON_LIBDEVICE_PATH" not in os.environ


def test_a_kernel_that_another_process_cannot_compile_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    job: Future[None] = Future()
    job.add_done_callback(partial(_launch._tell, "text"))
    with caplog.at_level(logging.INFO, logger=_launch.__name__):
        job.set_exception(ModuleNotFoundError("No module named 'here'"))
    assert "did not compile text: ModuleNotFoundError: No module named 'here'" in caplog.text
