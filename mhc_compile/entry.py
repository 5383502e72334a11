"""What torch loads when `backend="mhc"` is first used: registers the backend, whose modules its first graph imports.

torch registers what an entry point returns. Threads that ask for the backend at the same time would all register it,
and all but the first would fail: "duplicate name: mhc". So the import of this module registers the backend, once, and
the entry point returns `REGISTERED`, which is None: `register_backend(None, name=...)` does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._dynamo
from torch import fx

from mhc_compile import compat

REGISTERED = None


def mhc(gm: fx.GraphModule, example_inputs: Sequence[Any], **given: Any) -> Callable[..., Any]:
    """Compile a Dynamo graph: `mhc_compile.backend.mhc`, imported here."""
    from mhc_compile import backend

    return backend.mhc(gm, example_inputs, **given)


def _whole(
    module: fx.GraphModule, backend: Any, options: dict[str, Any]
) -> AbstractContextManager[Callable[[Any], Any]]:
    """Rewrite a graph that `DistributedDataParallel` has Dynamo split: `mhc_compile.backend.whole`, imported here."""
    from mhc_compile.backend import whole

    return whole(module, backend, mhc, options)


def _given_up(function: compat.GivenUp) -> None:
    """Note a function that Dynamo gives up on: `mhc_compile.backend.given_up`, imported here."""
    from mhc_compile import backend

    backend.given_up(function, mhc)


def _left_eager(frame: Any, limit: compat.RecompileLimit) -> None:
    """Note a function that Dynamo compiles no more: `mhc_compile.backend.left_eager`, imported here."""
    from mhc_compile import backend

    backend.left_eager(frame, limit, mhc)


torch._dynamo.register_backend(mhc, name="mhc")
compat.watch_dynamo()
compat.watched.at_given_up.append(_given_up)
compat.watched.at_limit.append(_left_eager)
compat.before_ddp_splits(_whole)
