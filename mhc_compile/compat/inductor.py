"""Inductor: its settings, caches and custom passes, and a compilation with them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from mhc_compile.compat.versions import is_older_than


def _guard(follows: str) -> Any:
    """Around what is ours within a function of Inductor's."""
    from mhc_compile.guard import guard  # which itself asks this package

    return guard(follows)


def inductor_config() -> Any:
    """Inductor's settings."""
    import torch._inductor.config as config

    return config


def hash_files(files: list[str]) -> Any:
    """Inductor's hash of source files, for a pass's uuid."""
    from torch._inductor.custom_graph_pass import get_hash_for_files

    return get_hash_for_files(tuple(files))


def runs_no_pass_before_grad(compiler: Any = None) -> bool:
    """Whether Inductor's `use_pre_grad_passes` is off, as in its mode "lite"; torch 2.11 has no such setting.

    compiler: what `inductor_compiler` returned; without one, the settings are the present ones.
    """
    name = "use_pre_grad_passes"
    given = getattr(compiler, "config", {})
    return not given.get(name, getattr(inductor_config(), name, True))


def inductor_cache_dir() -> Path:
    """The folder of Inductor's caches on disk."""
    from torch._inductor.runtime import runtime_utils

    return Path(runtime_utils.cache_dir())  # type: ignore[attr-defined]


def fresh_inductor_cache() -> Any:
    """A context in which Inductor's caches are empty; what it puts there is deleted in the end."""
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


def compiles_ahead_of_time() -> bool:
    """Whether Inductor is at work for AOTInductor."""
    from torch._inductor.virtualized import V

    return V.aot_compilation is True


def makes_cuda_graphs() -> bool:
    """Whether Inductor will record what it compiles as CUDA graphs."""
    return bool(inductor_config().triton.cudagraphs)


def calls_graphs() -> bool:
    """Whether Inductor compiles a graph once that another calls several times: in Python code, without CUDA graphs,
    for which it looks at the nodes of the calling graph alone."""
    config = inductor_config()
    return not (compiles_ahead_of_time() or config.cpp_wrapper or config.fx_wrapper or makes_cuda_graphs())


def keep_arguments_of_calls() -> None:
    """Keep graphs that are called from writing over their arguments, in everything that this process compiles.

    Of a backward graph's inputs some were saved for it alone, and it may write over them. Inductor (torch 2.11 to 2.13)
    takes the numbers that these have for numbers of the inputs of every graph that it calls, and so writes over others,
    parameters among them.
    """
    from torch._inductor.graph import SubgraphLowering

    SubgraphLowering.bw_donated_idxs = property(lambda self: None, lambda self, numbers: None)  # type: ignore[assignment]


def keep_order_of_writes() -> None:
    """Keep kernels after in-place writes of their arguments, in everything that this process compiles.

    What reads a buffer after a write depends on the write, by the name that the written buffer has from then on.
    Inductor (torch 2.11 to 2.13) may give a pointwise kernel other loops, so that it fuses with its neighbour. It then
    takes the names that the kernel reads from the kernel's source once more, and forgets to replace them: the kernel
    reads memory that nobody has written. In 2.11 it also forgets which kernels have to stay after others.
    """
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode
    from torch.utils._ordered_set import OrderedSet

    compute = SchedulerNode._compute_attrs
    if hasattr(compute, "__wrapped__"):
        return

    @functools.wraps(compute)
    def compute_and_keep(self: Any, *args: Any, **kwargs: Any) -> None:
        known = self.read_writes.reads if hasattr(self, "read_writes") else ()
        compute(self, *args, **kwargs)
        with _guard("a kernel's dependencies are those that Inductor finds"):
            added = OrderedSet(dep for dep in known if isinstance(dep, (StarDep, WeakDep)))
            self.set_read_writes(self.read_writes.with_read(added).rename(self.mutation_renames))

    SchedulerNode._compute_attrs = compute_and_keep  # type: ignore[method-assign]


def keep_sums_in_their_memory() -> None:
    """Keep C++ kernels from storing sums beyond the end of their memory, in everything that this process compiles.

    Where a loop is cut into vectors and a rest, and a loop further inside adds up, each of both parts has its own way
    to store the sums. Inductor (torch 2.11 and 2.12) looks for a sum in the next loop alone. Where that is another one,
    it stores whole vectors of the rest as well.
    """
    if not is_older_than("2.13"):
        return
    from torch._inductor.codegen.cpp import CppKernelProxy

    aggregate = CppKernelProxy.aggregate_reduction_buffers
    if hasattr(aggregate, "__wrapped__"):
        return

    @functools.wraps(aggregate)
    def aggregate_of_all_loops(self: Any, sums_in_next_loop: bool, cut_loop: Any) -> None:
        with _guard("a kernel's sums are stored as Inductor does"):
            # Of a loop that is cut there are two kernels; of two such loops, more.
            if cut_loop is not None and not cut_loop.is_reduction and len(self.kernels) == 2:
                loops = self.loop_nest.loops
                at = next(i for i, loop in enumerate(loops) if loop is cut_loop)
                sums_in_next_loop = any(loop.is_reduction for loop in loops[at + 1 :])
        aggregate(self, sums_in_next_loop, cut_loop)

    CppKernelProxy.aggregate_reduction_buffers = aggregate_of_all_loops  # type: ignore[assignment,method-assign]


def strides_to_keep(output: fx.Node) -> dict[str, Any]:
    """What is noted on the output of a graph that another calls, all of tensors, so that they keep their strides.

    With it each has memory of its own as well: what may lie anywhere is put where a concatenation wants it.
    """
    values = [result.meta["val"] for result in output.args[0]]  # type: ignore[union-attr]
    strides = [value.stride() for value in values]
    return {"user_visible_output_idxs": list(range(len(values))), "original_output_strides": strides}


def run_passes_after_grad(module: fx.GraphModule, custom: Any) -> None:
    """Run Inductor's passes on a graph after autograd, in place, with this custom pass alone."""
    from torch._inductor.fx_passes.post_grad import post_grad_passes

    nothing = {"post_grad_custom_pre_pass": None, "post_grad_custom_post_pass": custom}
    with inductor_config().patch(nothing):
        post_grad_passes(module, is_inference=False)


def call_directly(operator: str, function: str) -> None:
    """Let Inductor's Python code call this function, named with its module, wherever it would call the operator.

    It saves the dispatch, a third of what a small kernel's launch takes on the host. Where this torch does not know
    how, the operator is called.
    """
    try:
        from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen
        from torch._inductor.ir import NoneLayout
        from torch._inductor.virtualized import V
    except ImportError:
        return

    def write(node: Any, writeline: Any) -> None:
        called = operator
        with _guard("an operator is called by its dispatch"):
            wrapper = V.graph.wrapper_code
            while hasattr(wrapper, "parent_wrapper"):  # graphs within graphs, which end
                wrapper = wrapper.parent_wrapper
            wrapper.add_import_once(f"import {function.rpartition('.')[0]}")
            called = function
        result = "" if isinstance(node.layout, NoneLayout) else f"{node.get_name()} = "
        writeline(f"{result}{called}({', '.join([*node.codegen_args(), *node.codegen_kwargs()])})")

    CUSTOM_EXTERN_KERNEL_CODEGEN[operator] = CustomCodegen(python=write)


def as_list(custom_passes: Any) -> list[Any]:
    """Inductor's custom pass settings hold one pass in torch 2.11, one or several later."""
    if custom_passes is None:
        return []
    return list(custom_passes) if isinstance(custom_passes, (list, tuple)) else [custom_passes]


def is_inference_aware(custom_pass: Any) -> bool:
    """Whether Inductor lets a pass after grad know if the graph is for inference. torch 2.11 has no such passes."""
    from torch._inductor import custom_graph_pass

    return isinstance(custom_pass, getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", ()))


def inference_aware(kind: type) -> type:
    """The same class of passes, for passes that learn this from Inductor."""
    from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass

    return type(kind.__name__, (kind, CustomInferenceAwareGraphPass), {})


_STATIC = "static_launch_user_defined_triton_kernels"


def launches_from_c() -> dict[str, bool]:
    """Inductor's settings by which kernels that a graph brings along are launched from C++, as its own are.

    A quarter less time on the host, and no C function to compile for each of them. `tell_workers` belongs to it.
    """
    return {_STATIC: True} if hasattr(inductor_config(), _STATIC) else {}


def tell_workers() -> None:
    """Let the processes in which Inductor compiles kernels know of these settings; torch 2.11 to 2.13 do not."""
    from torch._inductor import async_compile

    pool_of = async_compile.AsyncCompile.process_pool
    job = getattr(async_compile, "_worker_compile_triton", None)
    if job is not None and hasattr(pool_of, "cache_clear") and not isinstance(pool_of, _PoolOf):
        async_compile.AsyncCompile.process_pool = _PoolOf(pool_of, job)  # type: ignore[assignment]


def call_in_worker(function: Callable[..., Any], *args: Any) -> Any:
    """The future of a call by one of the processes in which Inductor compiles kernels; None if there are none."""
    try:
        from torch._inductor.async_compile import AsyncCompile, get_compile_threads

        return AsyncCompile.process_pool().submit(function, *args) if get_compile_threads() > 1 else None
    except (ImportError, RuntimeError):  # the latter in a daemon, which may have no processes of its own
        return None


def settle_triton() -> None:
    """Have Triton keep kernels where Inductor has it keep the current GPU's, unless somebody has said where, and
    assemble them with what Inductor's workers do.

    Inductor sets that assembler in its own process when it first compiles a kernel there.
    """
    try:
        from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

        _set_triton_ptxas_path()
    except ImportError:  # kernels that workers compile may not be found then
        pass
    if "TRITON_CACHE_DIR" in os.environ:
        return
    try:
        from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    except ImportError:  # they are kept where Triton would
        return
    os.environ["TRITON_CACHE_DIR"] = triton_cache_dir(torch.cuda.current_device() if torch.cuda.is_available() else 0)


class _PoolOf:
    """Inductor's function that returns the pool of its workers, of which the job to compile gets a setting more."""

    def __init__(self, pool_of: Any, job: Any) -> None:
        self._pool_of, self._job, self.cache_clear = pool_of, job, pool_of.cache_clear

    def __call__(self) -> Any:
        pool = self._pool_of()
        with _guard("workers do not learn how kernels are launched"):
            if not isinstance(pool.submit, functools.partial):
                pool.submit = functools.partial(self._submit, pool.submit)
        return pool

    def _submit(self, submit: Any, job: Any, *args: Any, **kwargs: Any) -> Any:
        with _guard("workers do not learn how kernels are launched"):
            if job is self._job and isinstance(args[-1], dict):
                settings = {name: getattr(inductor_config(), name) for name in launches_from_c()}
                args = (*args[:-1], settings | args[-1])
        return submit(job, *args, **kwargs)


def compile_by_inductor(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """What `torch.compile(backend="inductor")` does with a graph."""
    compiled: Callable[..., Any] = torch._inductor.compile(gm, example_inputs)
    return compiled


def inductor_compiler(mode: str | None, options: dict[str, Any], patches: dict[str, Any]) -> Callable[..., Any]:
    """What `torch.compile(backend="inductor", mode=..., options=...)` compiles graphs with, with further settings.

    Raises what that would: RuntimeError for an unknown mode or option, or a value of another type.
    """
    wrapper = torch._TorchCompileInductorWrapper(mode, options, None)  # type: ignore[no-untyped-call]
    wrapper.config = launches_from_c() | wrapper.config | patches
    return wrapper


def inductor_decompositions() -> Any:
    """The decompositions that Inductor applies to operators before it lowers them."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()
