"""What is around us fails: compilers, Inductor, its cache, other processes. docs/reliability.md has the same list."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import mhc_compile
from mhc_compile import compat, hooks, records
from mhc_compile.nn import Form, HyperConnection
from mhc_compile.ops import _loops, _register
from tests import test_as_it_was, test_faults

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# The rows of the table in docs/reliability.md, and what tests each.
FAULTS: dict[str, Any] = {
    "A function of mhc_compile raises": test_faults.test_a_function_that_fails,
    "torch does not compile a graph with operators": test_as_it_was.test_the_graph_is_compiled_as_it_was,
    "The stack is too low for a graph": test_faults.test_a_stack_that_is_too_low_is_told_in_one_line,
    "The sources of mhc_compile cannot be read": (
        test_faults.test_a_pass_whose_sources_cannot_be_read_is_found_in_no_cache
    ),
}


def fault(row: str) -> Callable[[Any], Any]:
    def register(test: Any) -> Any:
        assert row not in FAULTS
        FAULTS[row] = test
        return test

    return register


@pytest.fixture
def told(told: list[str]) -> Iterator[list[str]]:
    """Each of them once, and one line each."""
    yield told
    assert all("\n" not in line for line in told), told
    assert len(set(told)) == len(told), told


@pytest.fixture(autouse=True, scope="module")
def _cache() -> Iterator[None]:
    """One for all tests, with libraries that several of them need."""
    with compat.fresh_inductor_cache():
        yield


@pytest.fixture(autouse=True)
def _another_width() -> None:
    """No test finds the graphs of another."""
    global _width
    _width += 1


_width = 8


@pytest.fixture
def fresh_loops() -> Iterator[None]:
    """Loops are compiled, or found in the cache on disk, when they are needed."""
    for known in (_loops._library, _loops._read, _loops._tell):
        known.cache_clear()
    yield
    for known in (_loops._library, _loops._read, _loops._tell):
        known.cache_clear()


def _model() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = HyperConnection(nn.Tanh(), dim=_width, form=Form.deepseek_v4(iterations=2))
    return model, torch.randn(2, 3, 4, _width, requires_grad=True)


def _results(call: Callable[..., Any], model: nn.Module, x: Tensor) -> list[Tensor]:
    out = call(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]


def _compiled_is_right(backend: str = "mhc", **options: Any) -> None:
    """A training step, compiled anew, is as eager code's."""
    torch._dynamo.reset()
    counters.clear()
    model, x = _model()
    found = _results(torch.compile(model, backend=backend, **options), model, x)
    for one, other in zip(found, _results(model, model, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)  # a few sums of some ten numbers in float32


def _loops_are_right(*, whole: bool = True) -> None:
    x, phi, scale, bias = torch.randn(5, 4, 8), torch.randn(24, 32), torch.ones(3), torch.zeros(24)
    assert (_loops._library(4) is not None) == whole
    for one, other in zip(
        _loops.mix(x, phi, scale, bias), torch.ops.mhc.generate_mix(x, phi, scale, bias), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # other orders of sums


def _compiler(path: Path, script: str) -> str:
    """A C++ compiler that does as the script says with the files that define loops, whose output is $out."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    path.write_text(
        "#!/bin/bash\n"
        f'loops=no; for a in "$@"; do [ -f "$a" ] && grep -q "^constexpr int N = " "$a" && loops=yes\n'
        f'[ "$last" = -o ] && out=$a; last=$a; done\nif [ $loops = yes ]; then\n{script}\nfi\n'
        f'exec {get_cpp_compiler()} "$@"\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def _with_compiler(command: str) -> Any:
    return compat.inductor_config().patch({"cpp.cxx": (None, command)})


# The compilers.


def _failing_on_loops(monkeypatch: pytest.MonkeyPatch, *, early: bool = False) -> None:
    """As when a kernel cannot be compiled: what our operators became does not get through Inductor.

    early: before Inductor generates code, in place of after it.
    """
    from torch._inductor.graph import GraphLowering

    codegen = GraphLowering.codegen

    def fail(self: Any) -> Any:
        made = None if early else codegen(self)
        if any("_loop" in str(node.target) for node in self.graph.nodes):
            raise RuntimeError("planted\nin two lines")
        return codegen(self) if early else made

    monkeypatch.setattr(GraphLowering, "codegen", fail)


@pytest.fixture
def own_cache() -> Iterator[None]:
    with compat.fresh_inductor_cache():
        yield


@pytest.mark.slow
@fault("Inductor does not compile the kernels or loops of a graph")
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.usefixtures("own_cache")
def test_kernels_that_do_not_compile(monkeypatch: pytest.MonkeyPatch, told: list[str], early: bool) -> None:
    with monkeypatch.context() as patch:
        _failing_on_loops(patch, early=early)
        _compiled_is_right()
        (line,) = told
        assert line == (
            "Inductor does not compile what operators became, and calls the operators instead: "
            "InductorError: RuntimeError: planted in two lines"
        )
        report = mhc_compile.report()
        assert len(report.rewritten) == 2
        assert report.errors == ["InductorError: RuntimeError: planted in two lines"]
    # Later runs are whole, and nothing that was compiled meanwhile is in the caches.
    _compiled_is_right()
    assert len(told) == 1
    assert counters["aot_autograd"]["autograd_cache_hit"] == 0
    assert not mhc_compile.report().errors
    _compiled_is_right()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [True, False])
def test_kernels_that_do_not_compile_with_any_sizes(
    sizes: bool, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    _failing_on_loops(monkeypatch)
    with mhc_compile.enable() if sizes else torch.no_grad():
        model, x = _model()
        compiled = torch.compile(model, backend="inductor" if sizes else "mhc", dynamic=sizes)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)  # as above
    assert len(told) == 1


def test_a_second_try_that_fails_raises_the_first_error(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    from torch._inductor.graph import GraphLowering

    times: list[int] = []

    def fail(self: Any) -> Any:
        times.append(1)
        raise RuntimeError(f"planted {len(times)}")

    monkeypatch.setattr(GraphLowering, "codegen", fail)
    with pytest.raises(Exception, match="planted 1"):
        _compiled_is_right()
    # With loops, with calls of operators, and as the program has it.
    assert (len(times), told) == (3, [])


@pytest.mark.parametrize("options", [{"mhc.strict": True}, {"mhc.lower": False, "mhc.share_layers": False}])
def test_strict_options_and_graphs_without_kernels_are_not_tried_again(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    monkeypatch.setattr("torch._inductor.graph.GraphLowering.codegen", test_faults._broken)
    with pytest.raises(Exception, match="planted"):
        _compiled_is_right(options=options)
    assert told == []


def test_a_second_try_that_we_fail_to_make_costs_the_operators(
    monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    _failing_on_loops(monkeypatch)
    monkeypatch.setattr(hooks, "_calling", lambda *given: 1 / 0)
    _compiled_is_right()
    first, second = told
    assert "ZeroDivisionError" in first
    assert second.startswith("a graph is compiled as it was")


@fault("Triton does not compile the kernel of an operator that is called")
def test_a_kernel_that_triton_does_not_compile(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    """Here a CPU's tensors stand for a GPU's."""

    class OutOfResources(Exception):
        pass

    OutOfResources.__module__ = "triton.runtime.errors"
    errors: list[Exception] = []

    # As code in one of Triton's files raises: what compiles kernels, and what launches them.
    raising: dict[str, Any] = {}
    for file in ("triton/compiler/compiler.py", "triton/runtime/build.py", "triton/backends/nvidia/driver.py"):
        exec(compile("def raises(error): raise error", f"/site-packages/{file}", "exec"), found := {})
        raising[file] = found["raises"]
    where = [""]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if where[-1]:
            raising[where[-1]](errors[-1])
        raise errors[-1]

    x = torch.randn(3, 4, 8)
    operator, gates = _register.KERNELS["aggregate"], torch.rand(3, 4)
    monkeypatch.setattr(_register, "_runs_kernel", lambda args: True)
    monkeypatch.setattr(_register, "_load_kernel", lambda path: kernel)
    _register.tell_of_kernel.cache_clear()
    for error in (OutOfResources("shared memory\nand more"), OutOfResources("shared memory\nand more")):
        errors.append(error)
        assert torch.equal(operator(x, gates), torch.ops.mhc.aggregate(x, gates))
    assert told == [
        "aggregate runs without its kernel, which could not be compiled: OutOfResources: shared memory and more"
    ]
    for file, error in (
        ("triton/compiler/compiler.py", RuntimeError("PassManager::run failed")),
        ("triton/runtime/build.py", subprocess.CalledProcessError(1, "gcc")),
    ):
        where.append(file)
        errors.append(error)
        assert torch.equal(operator(x, gates), torch.ops.mhc.aggregate(x, gates))
    assert len(told) == 3
    for file in ("triton/backends/nvidia/driver.py", ""):
        where.append(file)
        errors.append(RuntimeError("CUDA error: an illegal memory access was encountered"))
        with pytest.raises(RuntimeError, match="illegal memory access"):
            operator(x, gates)
    where.append("triton/compiler/compiler.py")
    monkeypatch.setattr(compat, "job_store", lambda: "of several ranks")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        operator(x, gates)


@fault("The C++ compiler does not compile the loops")
@pytest.mark.usefixtures("fresh_loops")
def test_loops_that_do_not_compile(tmp_path: Path, told: list[str]) -> None:
    script = "echo internal compiler error; echo in line two; exit 4"
    with _with_compiler(_compiler(tmp_path / "c++", script)):
        _loops_are_right(whole=False)
        assert _loops._library(2) is None
    assert told == [
        "the gates run operator by operator, because their loop could not be compiled: "
        "CppCompileError: C++ compile error internal compiler error in line two"
    ]
    records.forget()  # as a reset of Dynamo does, once a graph was compiled
    _loops_are_right()


@fault("There is no C++ compiler")
def test_no_compiler(told: list[str]) -> None:
    model, x = _model()
    _loops_are_right()
    with _with_compiler("no-such-compiler"):
        for backend in ("inductor", "mhc"):
            with pytest.raises(Exception, match="InvalidCxxCompiler: No working C\\+\\+ compiler found"):
                _compiled_is_right(backend)
        assert len(mhc_compile.explain(model, x).rewritten) == 2
        _loops_are_right()
    assert told == []


# The cache.


def _damage(folder: Path) -> int:
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return len(files)


@fault("Compiled graphs in the cache are damaged")
def test_damaged_graphs(told: list[str]) -> None:
    _compiled_is_right()
    for folder in ("fxgraph", "aotautograd"):
        assert _damage(compat.inductor_cache_dir() / folder)
    _compiled_is_right()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 0
    assert len(mhc_compile.report().rewritten) == 2
    assert told == []
    _compiled_is_right()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


@fault("The report of a cached graph is damaged")
@pytest.mark.thorough
def test_damaged_reports(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    monkeypatch.setattr("mhc_compile.records.Compiled.packed", lambda self: '[{"sites": [')
    _compiled_is_right()
    monkeypatch.undo()
    _compiled_is_right()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    (line,) = told
    assert line.startswith("the report of a graph from a cache is not known: JSONDecodeError: ")


@fault("Loops in the cache are damaged")
@pytest.mark.usefixtures("fresh_loops")
def test_damaged_loops(told: list[str]) -> None:
    _loops_are_right()
    path = Path(_loops._library(4)._name)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 8], b"", bytes(len(whole))):
        path.unlink()  # not in place: this process has it in its memory
        path.write_bytes(damaged)
        _loops._library.cache_clear()
        _loops_are_right()
        assert len(path.read_bytes()) == len(whole)
    assert told == []


@fault("The cache is full while loops are compiled")
@pytest.mark.usefixtures("fresh_loops")
def test_a_full_cache(tmp_path: Path, told: list[str]) -> None:
    script = 'head -c 5000 "$BASH" > "$out"; echo "No space left on device"; exit 1'
    with _with_compiler(_compiler(tmp_path / "c++", script)):
        _loops_are_right(whole=False)
    (line,) = told
    assert line.endswith("CppCompileError: C++ compile error No space left on device")
    records.forget()  # as a reset of Dynamo does, once a graph was compiled
    _loops_are_right()


@fault("The cache cannot be written")
@pytest.mark.thorough
@pytest.mark.usefixtures("fresh_loops")
def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    """A file stands where the folder should be, which stops the superuser as well."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    for backend in ("inductor", "mhc"):
        with pytest.raises(Exception, match="Not a directory"):
            _compiled_is_right(backend)
    assert told == []
    _loops_are_right(whole=False)
    assert ["NotADirectoryError" in line for line in told] == [True]
    monkeypatch.undo()
    _compiled_is_right()
    records.forget()  # as above
    _loops_are_right()


@fault("Two versions of mhc_compile share the cache")
@pytest.mark.thorough
def test_two_versions(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    hits = []
    for version in ("one", "another", "one", "another"):
        monkeypatch.setattr(hooks, "_sources_hash", lambda version=version: version)
        _compiled_is_right()
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
        assert len(mhc_compile.report().rewritten) == 2
    assert hits == [0, 0, 1, 1]
    assert told == []


# Other processes. Without vector instructions: to find out which there are takes ten seconds.

_LOOPS = textwrap.dedent(
    """
    import sys, warnings
    warnings.simplefilter("ignore")
    import torch
    from torch._inductor import codecache, config, cpu_vec_isa
    codecache.pick_vec_isa = lambda: cpu_vec_isa.invalid_vec_isa
    if sys.argv[1:]:
        config.cpp.cxx = (None, sys.argv[1])
    from torch._inductor.cpp_builder import CppBuilder
    from mhc_compile.ops import _loops, _register
    build, built = CppBuilder.build, []
    CppBuilder.build = lambda self: (built.append(self), build(self))
    torch.manual_seed(0)
    x, phi, scale, bias = torch.randn(5, 4, 8), torch.randn(24, 32), torch.ones(3), torch.zeros(24)
    for one, other in zip(_loops.mix(x, phi, scale, bias), torch.ops.mhc.generate_mix(x, phi, scale, bias)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert _loops._library(4) is not None
    print(len(built))
    """
)


def _process(*args: str, cache: Path) -> subprocess.Popen[str]:
    around = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _LOOPS, *args]
    return subprocess.Popen(command, env=around, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@fault("A process is killed while it compiles loops")
def test_a_killed_process(tmp_path: Path) -> None:
    """With it its compiler, which leaves a part of the library."""
    compiler = _compiler(tmp_path / "c++", 'head -c 40000 "$BASH" > "$out"; kill -9 $PPID; exit 1')
    first = _process(compiler, cache=tmp_path / "cache")
    first.communicate()
    assert first.returncode == -9
    assert [path.stat().st_size for path in tmp_path.rglob("*.so")] == [40000]
    # The same command line, since that is part of a library's name.
    _compiler(tmp_path / "c++", ":")
    second = _process(compiler, cache=tmp_path / "cache")
    out, error = second.communicate()
    assert (second.returncode, out, "mhc" in error) == (0, "1\n", False), error[-2000:]


@fault("8 processes share an empty cache")
@pytest.mark.thorough
def test_eight_processes(tmp_path: Path) -> None:
    processes = [_process(cache=tmp_path) for _ in range(8)]
    said = [(*process.communicate(), process.returncode) for process in processes]
    assert [code for *_, code in said] == [0] * 8, said
    assert sorted(out for out, *_ in said) == ["0\n"] * 7 + ["1\n"]
    assert not any("could not be compiled" in error for _, error, _ in said)


def test_the_table_has_these_faults() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## Faults, and what you see\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \|", section, flags=re.MULTILINE)[1:]
    assert sorted(rows) == sorted(FAULTS)
