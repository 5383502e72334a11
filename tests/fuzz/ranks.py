"""Programs as one of several ranks runs them, in a process group all of whose ranks hold what this process holds."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import HashStore, ProcessGroup, ReduceOp
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.futures import Future
from torch.utils._pytree import tree_map

from tests.fuzz.program import Pick

# With a part that a split takes of it: the gradient of a DTensor's split needs all parts.
PARAMETER = re.compile(
    r"\bself\.(?:(?:phi|scale|bias|gain|weight|layer_bias|channel|fixed)\b|each\[[^]]*\])(?! = )"
    r"(?:\.split\(\[[^]]*\]\)\[\d\])?"
)
BACKEND = "same"
# The second name is that of torch 2.12 and older.
GATHER = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
_MESHES: list[DeviceMesh] = []


class SameGroup(ProcessGroup):
    """What any rank sends is what this one would send. So a sum over ranks is a multiple, and a gather has copies.

    torch's own fake group does not touch what is reduced: a sum of parts and a part of a sum would differ.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self._own_rank, self._ranks = rank, ranks

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def pg_name(self) -> str:
        return torch.distributed.distributed_c10d._world.pg_names[self]

    group_name = pg_name

    def size(self) -> int:
        return self._ranks

    def _reduced(self, value: Tensor, opts: Any) -> Tensor:
        return value * self._ranks if opts.reduceOp == ReduceOp.SUM else value

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return _done(tensors)

    def barrier(self, opts: Any = None) -> Any:
        return _done([])

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            tensor.copy_(self._reduced(tensor, opts))
        return _done(tensors)

    allreduce_coalesced = allreduce

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        for parts, value in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(value)
        return _done(outputs)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return self.allgather([list(output.chunk(self._ranks)) for output in outputs], inputs)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        for output, value in zip(outputs, inputs, strict=True):
            output.copy_(self._reduced(value.chunk(self._ranks)[self._own_rank], opts))
        return _done(outputs)

    def all_gather_single(self, output: Tensor, value: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [value])

    def reduce_scatter_single(self, output: Tensor, value: Tensor, opts: Any) -> Any:
        return self.reduce_scatter_single_coalesced([output], [value], opts)

    def all_to_all_single(self, output: Tensor, value: Tensor, *_: Any) -> Any:
        return self.all_gather_single(output, value.chunk(self._ranks)[self._own_rank])

    # As they were called up to torch 2.12.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


torch.distributed.Backend.register_backend(
    BACKEND, lambda store, rank, ranks, timeout: SameGroup(rank, ranks), devices=["cpu"]
)


@contextlib.contextmanager
def group(ranks: int) -> Iterator[None]:
    """This process is the first of so many ranks; with one there is no process group."""
    if ranks == 1:
        yield
        return
    torch.distributed.init_process_group(BACKEND, store=HashStore(), rank=0, world_size=ranks)
    try:
        _MESHES.append(init_device_mesh("cpu", (ranks,)))
        yield
    finally:
        _MESHES.clear()
        torch.distributed.destroy_process_group()


def shared_out(x: Tensor, axis: int) -> Tensor:
    """The streams of all ranks, of which x are this rank's tokens."""
    return DTensor.from_local(x, _MESHES[0], [Shard(axis)], run_check=False)


def on_all(parameter: Tensor) -> Tensor:
    """A parameter that every rank has whole."""
    return DTensor.from_local(parameter, _MESHES[0], [Replicate()], run_check=False)


def gathered(parameter: Tensor) -> Tensor:
    """A parameter that is gathered inside the graph, as a rank of sharded weights does it."""
    return GATHER(parameter, 0, _MESHES[0].get_group())[: parameter.shape[0]]


def local(results: Any) -> Any:
    """This rank's part of all results."""
    return tree_map(lambda value: value.to_local() if isinstance(value, DTensor) else value, results)


def put_ranks(pick: Pick, source: str, letters: tuple[str, ...], names: str) -> str:
    """A program that draws on a process group, or only has one; letters are those of the inputs called `names`."""
    form = pick(["none", "tokens", "tokens", "weights"])
    if form == "none":
        return source
    head, body, rest = source.partition("    def body(")
    if form == "weights":
        return head + body + PARAMETER.sub(r"gathered(\g<0>)", rest)
    letter = pick([letter for letter in letters[0] if letter in "bst"])
    rest = PARAMETER.sub(r"on_all(\g<0>)", rest)
    rest = re.sub(r"return ((?:checkpoint|self\.body)\(.*\))", r"return local(\1)", rest)
    for name, one in zip(names.split(", "), letters, strict=True):
        entered = f"        {name} = shared_out({name}, {one.index(letter)})\n"
        rest = re.sub(r"(    def forward\(.*\n        x = .*\n)", rf"\1{entered}", rest)
    return head + body + rest
