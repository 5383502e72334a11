"""DTensors: the few names of them that torch does not document, as torch 2.11 to 2.14 have them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mhc_compile.compat.values import DTENSORS, fake_mode_of, is_dtensor
from mhc_compile.compat.versions import is_older_than

log = logging.getLogger(__name__)

_with_rules: list[bool] = []


class _Import:
    """A finder of `sys.meta_path` that calls `then` after a module was imported, once.

    It stays until the module is executed: a program may ask for its spec without importing it.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        finders = list(sys.meta_path)
        later = finders[finders.index(self) + 1 :] if self in finders else finders
        asked = (one.find_spec(fullname, path, target) for one in later if hasattr(one, "find_spec"))
        spec = next((spec for spec in asked if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_then(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:  # a reload executes it again
                    sys.meta_path.remove(self)
                    self.then()

            spec.loader.exec_module = execute_then  # type: ignore[method-assign]
        return spec


def when_dtensors_exist(then: Callable[[], None]) -> None:
    """Call `then` now if the program has imported DTensors, else as soon as it does: their import takes half a second.

    A failure of `then` is told in one line. DTensors then have no rules, and nothing is rewritten in their graphs.
    """

    def guarded() -> None:
        try:
            then()
            _with_rules.append(True)
        except Exception as error:  # not in `guard`: it needs Dynamo, which may be what imports DTensors now
            log.warning("operators do not take DTensors: %s: %s", type(error).__name__, error)

    if DTENSORS in sys.modules:
        guarded()
    else:
        sys.meta_path.insert(0, _Import(DTENSORS, guarded))


def as_plain(tensor: Tensor) -> Tensor:
    """A plain fake tensor in the place of a DTensor of fake tensors, in its global shape; others as they are.

    Without rules for our operators a DTensor stays one.
    """
    if not (_with_rules and is_dtensor(tensor)):
        return tensor
    with fake_mode_of(tensor):
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(tensor.requires_grad)


def mesh_of(tensor: Any) -> Any:
    """The mesh of a DTensor."""
    return tensor.device_mesh


def has_own_shard_order(tensor: Any) -> bool:
    """Whether a dim of a DTensor is sharded by the mesh's dims in another order than that of the mesh."""
    spec = tensor._spec
    given = getattr(spec, "shard_order", None)  # torch 2.11 may not have it
    return given is not None and given != type(spec).compute_default_shard_order(spec.placements)


def flattens_shards() -> bool:
    """Whether DTensors can be flattened over a dim that is sharded and not the first (torch 2.13 and 2.14, not 2.11).

    The product of a matrix and streams [b, s, n*C] flattens b and s.
    """
    if not is_older_than("2.13"):
        return True
    from torch.distributed.tensor._ops import _view_ops

    return hasattr(_view_ops, "_ViewShardingPropagator")


def takes_plain_as_replicated() -> bool:
    """Whether `torch.distributed.tensor.experimental.implicit_replication` is entered."""
    from torch.distributed.tensor import DTensor

    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def without_modes() -> AbstractContextManager[Any]:
    """A context in which no dispatch mode sees what is called: neither fake tensors' nor a tracer's."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def has_no_placement(error: Exception) -> bool:
    """Whether torch raised this because it could not find out how the result of an operation on DTensors is placed.

    With symbolic sizes it does so for slices of a dim of known size (2.13): their cache hashes all sizes.
    """
    return isinstance(error, RuntimeError) and "Sharding propagation failed" in str(error)
