"""The job that a process is a rank of."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import fx

from mhc_compile.compat.inductor import _guard
from mhc_compile.compat.looking import given_to_compile


def job_store() -> Any:
    """The store that all ranks of this job share, for this project's keys; None for a process that is alone.

    A process that only imitates the others, by torch's "fake" backend, is alone.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() < 2:
        return None
    if distributed.get_backend() == "fake":
        return None
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    return PrefixStore("mhc_compile", _get_default_store())


def rank() -> int:
    """The number of this process in its job; 0 for one that is alone."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def ranks() -> int:
    """How many processes this job has."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


Whole = Callable[[fx.GraphModule, str, dict[str, Any]], AbstractContextManager[Callable[[Any], Any]]]


# What is entered while a graph is split; and what rewrites the graphs of a look at a model, by the backend of the look.
_whole: list[Whole] = []
_looks: dict[Any, Callable[[fx.GraphModule], None]] = {}
_is_part: ContextVar[bool] = ContextVar("is_part", default=False)


def before_ddp_splits(whole: Whole) -> None:
    """Have `whole(module, backend, options)` entered while Dynamo splits a graph at the buckets of gradients.

    It yields what makes of the compiled form the one that Dynamo calls. backend and options are those of
    `given_to_compile`.
    """
    _whole[:] = [whole]
    _watch_splits()


@functools.cache
def _watch_splits() -> None:
    """The optimizer of Dynamo for `DistributedDataParallel` gives each part to the backend (torch 2.11 to 2.14)."""
    with _guard("DistributedDataParallel may cut hyper-connections"):
        if not torch.distributed.is_available():
            return
        from torch._dynamo.backends.distributed import DDPOptimizer

        split = DDPOptimizer.compile_fn

        @functools.wraps(split)
        def split_whole(self: Any, gm: fx.GraphModule, example_inputs: Any, **configs: Any) -> Any:
            compiler = self.backend_compile_fn
            rewrite = _looks.get(given_to_compile(compiler)[0])
            with _entered(gm, compiler) if rewrite is None else _split(gm, rewrite) as called:
                return called(split(self, gm, example_inputs, **configs))

        DDPOptimizer.compile_fn = split_whole  # type: ignore[method-assign]


@contextlib.contextmanager
def whole_for(backend: Any, rewrite: Callable[[fx.GraphModule], None]) -> Iterator[None]:
    """Have a graph that Dynamo splits for this backend given to `rewrite` before; `is_part` is true of its parts."""
    _watch_splits()
    _looks[backend] = rewrite
    try:
        yield
    finally:
        del _looks[backend]


def is_part() -> bool:
    """Whether the graph that is being compiled is a part of one that `rewrite` has seen."""
    return _is_part.get()


def _entered(gm: fx.GraphModule, compiler: Any) -> AbstractContextManager[Callable[[Any], Any]]:
    return _whole[0](gm, *given_to_compile(compiler)) if _whole else contextlib.nullcontext(_as_it_is)


def _as_it_is(compiled: Any) -> Any:
    return compiled


@contextlib.contextmanager
def _split(gm: fx.GraphModule, rewrite: Callable[[fx.GraphModule], None]) -> Iterator[Callable[[Any], Any]]:
    rewrite(gm)
    token = _is_part.set(True)
    try:
        yield _as_it_is
    finally:
        _is_part.reset(token)


class UnitSettings(NamedTuple):
    """Whether gradients are exchanged at the end of a backward pass, and what their sum over ranks is divided by."""

    exchanges: bool
    divisor: float


def fsdp_unit(module: Any) -> Any:
    """The parameters that FSDP2 keeps together for a module; None without any (torch 2.11 to 2.14)."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(module, FSDPModule):
        return None
    state = module._get_fsdp_state()
    # A unit has several groups if its parameters have several meshes; users set them together.
    groups = getattr(state, "_fsdp_param_groups", None)
    return state._fsdp_param_group if groups is None else next(iter(groups), None)


def unit_settings(unit: Any, ranks: int) -> UnitSettings:
    """What `set_requires_gradient_sync` and its like have set for the unit (torch 2.11 to 2.14)."""
    if unit is None:
        return UnitSettings(True, ranks)
    return UnitSettings(unit.reduce_grads and unit.all_reduce_grads, unit.gradient_divide_factor or ranks)


def flat_mesh(mesh: Any) -> Any:
    """The mesh with one dimension: sums over several, one after the other, may round differently on some ranks."""
    return mesh if mesh.ndim == 1 else mesh._flatten()


@contextlib.contextmanager
def imitated_job(rank: int, ranks: int) -> Iterator[None]:
    """Be one rank of a job that has no others, so that nothing that it sends arrives (torch 2.11 to 2.14)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def group_size(args: Sequence[Any]) -> int:
    """How many ranks take part in a collective, from the arguments of its operator (torch 2.11 to 2.14)."""
    from torch.distributed import distributed_c10d

    for each in reversed(args):
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return distributed_c10d.ProcessGroup.unbox(each).size()
        if isinstance(each, str):
            return distributed_c10d._resolve_process_group(each).size()  # type: ignore[attr-defined, arg-type]
    raise ValueError(f"no process group among {args}")


def agree_on_given_shapes(schedule: Any) -> None:
    """Have the ranks of an imitated job agree that stages know what others send them, as those of a job would."""
    from torch.distributed.pipelining._utils import InferenceMode

    def agree(stages: Any, has_backward: bool, p2p_done: bool) -> None:
        for stage in stages:
            if InferenceMode.needs_dynamic(stage._user_meta, has_backward):
                raise ValueError("a stage of an imitated job has to be given its shapes")
            stage._inference_mode = InferenceMode.STATIC

    schedule._warmup_p2p = agree
