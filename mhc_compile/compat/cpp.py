"""What Inductor's C++ code on a CPU waits for, begun earlier, so that it overlaps with other work.

Nothing is compiled in another way: the result is in Inductor's own caches when Inductor needs it.
"""

from __future__ import annotations

import ast
import functools
import logging
import os
import subprocess
import sys
import threading
from typing import Any

from mhc_compile.compat.inductor import inductor_cache_dir

log = logging.getLogger(__name__)

# Run by a process of its own, which ends with the one that waits for it, or with the cache that this one has.
_FIRST = """
import sys
sys.path = [place for place in sys.path if place]  # not the working directory, which Python puts first for this code
import os
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.cpu_vec_isa import VecISA, pick_vec_isa

def stop_if_unwanted():
    if os.getppid() != int(sys.argv[1]) or not os.path.isdir(os.environ["TORCHINDUCTOR_CACHE_DIR"]):
        sys.exit()

def check_build(isa, code):
    stop_if_unwanted()
    return build(isa, code)

build, VecISA.check_build = VecISA.check_build, check_build
pick_vec_isa()
stop_if_unwanted()
source = '#include <torch/csrc/inductor/cpp_prefix.h>\\nextern "C" void kernel() {}\\n'
CppPythonBindingsCodeCache.load_pybinding([], source)
"""


def compile_beside() -> None:
    """Let C++ compilers be at work while Python is; from now on, in this process.

    Inductor first finds out which vector instructions compiler and CPU know, by ten files that it compiles (7 to 10 s),
    and compiles the header of all kernels (4 s). Where neither this process nor Inductor's cache has an answer, another
    process looks for it while the graph is still being traced. And a kernel is compiled from when its code is written,
    not from when that of the last one is, as torch has it with Triton's.
    """
    try:
        from torch._inductor.async_compile import get_compile_threads
        from torch._inductor.codegen.wrapper import PythonWrapperCodegen as Wrapper
        from torch._inductor.cpu_vec_isa import valid_vec_isa_list

        if get_compile_threads() <= 1:
            return
        if not hasattr(Wrapper.define_kernel, "__wrapped__"):
            Wrapper.define_kernel = _early(Wrapper.define_kernel)  # type: ignore[method-assign]
        if not valid_vec_isa_list.cache_info().currsize:
            _settle_first(str(inductor_cache_dir()))
    except (ImportError, AttributeError, OSError) as error:  # a torch that goes about it in another way, or no process
        log.debug("nothing is compiled early: %s", error)


def cpp_compiler() -> str | None:
    """The command of the C++ compiler that Inductor uses on a CPU; None where it finds none."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        return str(get_cpp_compiler())  # torch 2.11 to 2.14
    except Exception as error:  # an InvalidCxxCompiler, or that of a torch that finds it in another way
        log.debug("there is no C++ compiler: %s", error)
        return None


@functools.cache
def _settle_first(cache: str) -> None:
    from torch._inductor.codecache import get_lock_dir
    from torch._inductor.utils import python_subprocess_env

    if os.listdir(get_lock_dir()):  # files were compiled before
        return
    # Its messages would be read for those of this process.
    inherited = {k: v for k, v in python_subprocess_env().items() if not k.startswith(("TORCH_LOGS", "TORCH_TRACE"))}
    environment = inherited | {"TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, "-c", _FIRST, str(os.getpid())]
    nothing = subprocess.DEVNULL
    look = subprocess.Popen(command, env=environment, stdin=nothing, stdout=nothing, stderr=nothing)
    threading.Thread(target=look.wait, daemon=True).start()


def _early(define_kernel: Any) -> Any:
    """Inductor's method that writes a kernel into its Python code; what that code will ask for is begun."""

    @functools.wraps(define_kernel)
    def define(self: Any, kernel_name: str, kernel_body: str, *args: Any, **kwargs: Any) -> None:
        define_kernel(self, kernel_name, kernel_body, *args, **kwargs)
        if kernel_body.startswith("async_compile.cpp_pybinding("):
            try:
                _compile(kernel_body)
            except Exception as error:  # Inductor will meet it, too, and say so
                log.debug("%s is not compiled early: %s", kernel_name, error)

    return define


def _compile(kernel: str) -> None:
    from torch._inductor.async_compile import AsyncCompile

    call = ast.parse(kernel, mode="eval").body
    AsyncCompile().cpp_pybinding(*map(ast.literal_eval, call.args))  # type: ignore[attr-defined]
