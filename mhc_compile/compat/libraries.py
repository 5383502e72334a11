"""Libraries of C++ source in Inductor's cache, of which none is loaded that is not whole.

Inductor takes a file that is there for a whole one. A compiler that was killed, or a full disk, may have left a part of
it: to load that part kills the process, or gives a library without some of its code. So the digest of each library that
was compiled stands beside it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Settings of Inductor's for its own kernels may allow to reorder sums and to contract products.
_FLAGS = ("-O2", "-Wno-psabi", "-fno-unsafe-math-optimizations", "-fno-finite-math-only", "-ffp-contract=off")


class _Broken(Exception):
    """A file that was there is not known to be whole."""


class _Later:
    """What Inductor takes for a compilation in another process. It is done here, once Inductor holds no lock."""

    def __init__(self, compile_now: Callable[[], None]) -> None:
        self.result = compile_now


def cpp_library(source: str) -> Any:
    """The library of C++ source, compiled as Inductor compiles its own for this machine, and kept in its cache.

    A file of it that is not whole is compiled again. One process at a time looks.
    """
    from torch._inductor.codecache import LOCK_TIMEOUT, get_lock_dir
    from torch.utils._filelock import FileLock

    name = hashlib.sha256(source.encode()).hexdigest()[:16]
    with FileLock(os.path.join(get_lock_dir(), f"mhc_{name}.lock"), timeout=LOCK_TIMEOUT):
        try:
            return _load(source)
        except _Broken as broken:
            Path(str(broken)).unlink()
            return _load(source)


def _load(source: str) -> Any:
    from torch._inductor.codecache import CppCodeCache, write_atomic

    compiled = []

    def compile_later(compile_now: Callable[[], None]) -> _Later:
        compiled.append(True)
        return _Later(compile_now)

    class Checked(CppCodeCache):
        cache: dict[str, Any] = {}  # noqa: RUF012

        @classmethod
        def _load_library_inner(cls, path: str, key: str) -> Any:
            digest, beside = hashlib.sha256(Path(path).read_bytes()).hexdigest(), Path(f"{path}.sha256")
            if compiled:
                write_atomic(str(beside), digest)
            elif not beside.is_file() or beside.read_text(encoding="utf-8") != digest:
                raise _Broken(path)
            return super()._load_library_inner(path, key)

    return Checked.load_async(source, extra_flags=_FLAGS, submit_fn=compile_later)()
