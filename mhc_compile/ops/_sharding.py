"""The operators on DTensors: one generator of rules for all of them, from their schemas.

All work is a token's. So a dim of the mesh may share out the tokens: every tensor of tokens is sharded over one of its
token dims, and every parameter is whole on all ranks. Nothing is communicated, and

- results of tokens are sharded as the arguments are;
- gradients of parameters, which are sums over tokens, are `Partial`: whoever wants the sum takes it.

A dim of the mesh may also share out the channels: `_channels` says what a rank does then, and what is summed.

Each dim of the mesh has one plan for all arguments, the one that moves the fewest numbers. An argument that is placed
otherwise is redistributed first, and one line of the log says so.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from mhc_compile import compat
from mhc_compile.ops import _channels
from mhc_compile.ops._checks import shape_text
from mhc_compile.ops._register import OPERATORS
from mhc_compile.ops._transforms import is_of_tokens, library, tensors_in

log = logging.getLogger(__name__)

# The first of these that an operator takes tells how many dims tokens have: so many dims are behind them.
_BEHIND_TOKENS = {"x": 2, "logits": 2, "h": 1, "f": 1, "d_out": 1, "d_x": 2}
_REDUCTIONS = ("sum", "avg", "max", "min", "product")


# A plan in the place of a placement: each rank has a part of the channels of all tokens.
CHANNELS = "channels"


def register_rules() -> None:
    """Register the rules of all operators. The program has DTensors by now."""
    from torch.distributed.tensor import DTensor

    for forward, backward in OPERATORS:
        for each in (forward, backward):
            rule = functools.partial(_dispatched, _described(each, forward, backward))
            torch.library.register_torch_dispatch(each._schema.name, DTensor, rule, lib=library)


@dataclass(frozen=True)
class _Operator:
    """What schemas say of an operator: its positional arguments, and what its results are, or are gradients of."""

    overload: Any
    arguments: tuple[Any, ...]
    results: tuple[str, ...]
    is_backward: bool

    @property
    def name(self) -> str:
        return str(self.overload._schema.name)

    def named(self, given: Sequence[Any]) -> dict[str, Any]:
        """The positional arguments by name: the dispatcher drops those that equal their default."""
        values = (*given, *(argument.default_value for argument in self.arguments[len(given) :]))
        return {argument.name: value for argument, value in zip(self.arguments, values, strict=True)}


def _described(overload: Any, forward: Any, backward: Any) -> _Operator:
    is_backward = overload is backward
    # The first arguments of a backward are the gradients of all results.
    results = tensors_in(forward) if is_backward else [name.removeprefix("d_") for name in tensors_in(backward)]
    arguments = tuple(argument for argument in overload._schema.arguments if not argument.kwarg_only)
    return _Operator(overload, arguments, tuple(results[: len(overload._schema.returns)]), is_backward)


def _dispatched(
    operator: _Operator, cls: type, overload: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """An operator that was called with a DTensor."""
    with torch.no_grad():
        return _Call(operator, operator.named(args), kwargs or {}).run()


class _Call:
    """One call of an operator with DTensors."""

    def __init__(self, operator: _Operator, given: dict[str, Any], scalars: Mapping[str, Any]) -> None:
        self.operator, self.given, self.scalars = operator, given, scalars
        self.tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        self.mesh = self._mesh()
        # Raises what the operator raises for wrong arguments, on all ranks alike, before any rank waits for another.
        self.like = self._globally()
        anchor = next(name for name in _BEHIND_TOKENS if name in self.tensors)
        self.tokens = self.tensors[anchor].dim() - _BEHIND_TOKENS[anchor]

    def _mesh(self) -> Any:
        """The mesh of all arguments."""
        first = next(name for name, tensor in self.tensors.items() if compat.is_dtensor(tensor))
        mesh = compat.mesh_of(self.tensors[first])
        for name, tensor in self.tensors.items():
            if not compat.is_dtensor(tensor):
                if not compat.takes_plain_as_replicated():
                    raise TypeError(
                        f"{self.operator.name}: {name} is a plain tensor of shape {shape_text(tensor.shape)}, but "
                        f"{_placed(first, self.tensors[first])}; expected DTensors on one mesh: "
                        f"distribute_tensor({name}, mesh, ...)"
                    )
            elif tensor.device_mesh != mesh:
                raise ValueError(
                    f"{self.operator.name}: {_placed(name, tensor)}, but {_placed(first, self.tensors[first])}; "
                    "expected one mesh for all arguments"
                )
            else:
                self._check_placements(name, tensor)
        return mesh

    def _check_placements(self, name: str, tensor: Any) -> None:
        for placement in tensor.placements:
            known = placement.is_replicate() or _is_sum(placement)
            if not known and not (_dim(placement) is not None and 0 <= _dim(placement) < tensor.dim()):
                raise ValueError(
                    f"{self.operator.name}: {_placed(name, tensor)}; no operator takes {placement} of a tensor with "
                    f"{tensor.dim()} dims"
                )
        if compat.has_own_shard_order(tensor):
            raise ValueError(
                f"{self.operator.name}: {_placed(name, tensor)} in a shard order of its own; expected the order of "
                "the mesh's dims"
            )

    def _globally(self) -> tuple[Tensor, ...]:
        """The results without data, in their global shapes."""
        with compat.without_modes():
            given = {name: _without_data(value) for name, value in self.given.items()}
            made = self.operator.overload(*given.values(), **self.scalars)
        return made if isinstance(made, tuple) else (made,)

    def run(self) -> Any:
        """The results, as DTensors."""
        from torch.distributed.tensor import Replicate

        plans = [self._plan(dim) for dim in range(self.mesh.ndim)]
        if not self._all_have_columns(plans):
            plans = [Replicate() if plan is CHANNELS else plan for plan in plans]
        results: Sequence[Tensor]
        if self.mesh.get_coordinate() is None:  # this rank is not in the mesh, and has nothing of any tensor
            results = [torch.empty(0, dtype=like.dtype, device=self.mesh.device_type) for like in self.like]
        else:
            results = self._computed(plans)
        wrapped = tuple(
            compat.as_dtensor(result, self.mesh, [self._result(at, plan) for plan in plans], like)
            for at, (result, like) in enumerate(zip(results, self.like, strict=True))
        )
        return wrapped if len(self.operator.overload._schema.returns) > 1 else wrapped[0]

    def _computed(self, plans: Sequence[Any]) -> Sequence[Tensor]:
        """This rank's parts of the results."""
        local = {name: self._placed_as(name, value, plans) for name, value in self.given.items()}
        if CHANNELS not in plans:
            made = self.operator.overload(*local.values(), **self.scalars)
            return made if isinstance(made, tuple) else (made,)
        columns = self._columns(plans)
        local = {
            name: columns.cut(name, value) if isinstance(value, Tensor) and not is_of_tokens(name) else value
            for name, value in local.items()
        }
        results = _channels.run(self.operator.overload, local, self.scalars, columns)
        if not self.operator.is_backward:
            return results
        return [
            result if self._is_unneeded(at) else columns.spread(name, result)
            for at, (name, result) in enumerate(zip(self.operator.results, results, strict=True))
        ]

    def _width(self) -> int | None:
        """How many channels there are, if their number is known, and if the operator has any."""
        found = (tensor.shape[-1] for name, tensor in self.tensors.items() if self._ends_in_channels(name))
        number = next(found, None)
        return number if isinstance(number, int) else None

    def _ends_in_channels(self, name: str) -> bool:
        return _channels.ends_in_channels(self.operator.name, name)

    def _all_have_columns(self, plans: Sequence[Any]) -> bool:
        """Whether all ranks of the mesh have some channels."""
        sizes = {self._width() or 0}
        for dim, plan in enumerate(plans):
            if plan is CHANNELS:
                sizes = {stop - start for size in sizes for start, stop in _chunks(size, self.mesh.size(dim))}
        return CHANNELS not in plans or 0 not in sizes

    def _columns(self, plans: Sequence[Any]) -> _channels.Columns:
        """The channels of this rank."""
        total = self._width()
        assert total is not None
        first, last = 0, total
        for dim, (plan, at) in enumerate(zip(plans, self.mesh.get_coordinate(), strict=True)):
            if plan is CHANNELS:
                start, stop = _chunks(last - first, self.mesh.size(dim))[at]
                first, last = first + start, first + stop
        return _channels.Columns(first, last, total, functools.partial(self._summed, plans))

    def _summed(self, plans: Sequence[Any], *parts: Tensor) -> Sequence[Tensor]:
        """Tensors [..., k] added up over the dims of the mesh that share out the channels, in one sum."""
        from torch.distributed.tensor import Partial, Replicate

        joined = torch.cat(parts, -1)
        tokens = next(t for name, t in self.tensors.items() if self._ends_in_channels(name)).shape[: self.tokens]
        with compat.without_modes():
            like = torch.empty((*tokens, joined.shape[-1]), dtype=joined.dtype, device="meta")
        now = [Partial() if plan is CHANNELS else plan for plan in plans]
        then = [Replicate() if plan is CHANNELS else plan for plan in plans]
        total = compat.as_dtensor(joined, self.mesh, now, like).redistribute(placements=then)
        return torch.split(compat.local_of(total), [part.shape[-1] for part in parts], -1)

    def _plan(self, mesh_dim: int) -> Any:
        """How this dim of the mesh shares out the work: the plan that moves the fewest numbers."""
        from torch.distributed.tensor import Replicate

        plans = dict.fromkeys((*self._plans(mesh_dim), Replicate()))
        return min(plans, key=lambda plan: sum(self._moved(mesh_dim, plan)))

    def _plans(self, mesh_dim: int) -> Iterator[Any]:
        """The plans by which an argument is placed already."""
        from torch.distributed.tensor import Shard

        for name, tensor in self.tensors.items():
            placement = _placement(tensor, mesh_dim)
            if not is_of_tokens(name) or not isinstance(placement, Shard):
                continue
            if placement.dim < self.tokens:
                yield placement
            elif self._ends_in_channels(name) and placement.dim == tensor.dim() - 1:
                plans = [CHANNELS if dim == mesh_dim else None for dim in range(self.mesh.ndim)]
                if self._all_have_columns(plans):
                    yield CHANNELS

    def _moved(self, mesh_dim: int, plan: Any) -> Iterator[float]:
        """How many numbers a plan moves for each argument."""
        for name, tensor in self.tensors.items():
            now = _placement(tensor, mesh_dim)
            yield _distance(now, self._argument(name, now, plan)) * tensor.numel()

    def _argument(self, name: str, now: Any, plan: Any) -> Any:
        """Where a plan wants an argument."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        if not is_of_tokens(name):
            return Replicate()
        if plan is not CHANNELS:
            return plan
        if self._ends_in_channels(name):
            return Shard(self.tensors[name].dim() - 1)
        # Gradients of gates may stay parts of sums.
        return now if self._takes_parts(name) and now == Partial() else Replicate()

    def _takes_parts(self, name: str) -> bool:
        return name.startswith("d_") and _channels.has_gates_inside(self.operator.name)

    def _result(self, at: int, plan: Any) -> Any:
        """Where a plan leaves a result."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        name, is_backward = self.operator.results[at], self.operator.is_backward
        if is_backward and self._is_unneeded(at):
            return Replicate()  # it has no elements
        if plan is CHANNELS:
            if self._ends_in_channels(name):
                return Shard(self.like[at].dim() - 1)
            # Gates are made from whole sums; logits alone, and gradients, are parts of sums.
            return Replicate() if not is_backward and _channels.has_gates_inside(self.operator.name) else Partial()
        return plan if not is_backward or is_of_tokens(name) or plan.is_replicate() else Partial()

    def _is_unneeded(self, at: int) -> bool:
        """Whether nobody asked for this result of a backward."""
        needs = self.given.get("needs")
        return needs is not None and not (
            at < len(needs) and needs[at] and self.given[self.operator.results[at]] is not None
        )

    def _placed_as(self, name: str, value: Any, plans: Sequence[Any]) -> Any:
        """This rank's part of an argument, placed as the plans want it."""
        if not isinstance(value, Tensor):
            return value
        now = [_placement(value, dim) for dim in range(self.mesh.ndim)]
        wanted = tuple(self._argument(name, one, plan) for one, plan in zip(now, plans, strict=True))
        local = self._part_of_plain(value, wanted) if not compat.is_dtensor(value) else self._part(name, value, wanted)
        # Of what is whole beside parts of sums, each rank has an equal part.
        shares = [
            self.mesh.size(dim)
            for dim, (plan, then) in enumerate(zip(plans, wanted, strict=True))
            if plan is CHANNELS and self._takes_parts(name) and then.is_replicate()
        ]
        return local / prod(shares) if shares else local

    def _part(self, name: str, value: Any, wanted: tuple[Any, ...]) -> Tensor:
        if value.placements != wanted:
            if any(_distance(now, then) for now, then in zip(value.placements, wanted, strict=True)):
                _tell(self.operator.name, name, str(tuple(value.placements)), str(wanted), _is_pending(value))
            # In torch 2.11, one that needs a gradient cannot be placed anew where no gradient is recorded.
            value = compat.as_dtensor(compat.local_of(value), self.mesh, value.placements, value)
            value = value.redistribute(placements=wanted)
        return compat.local_of(value)

    def _part_of_plain(self, value: Tensor, wanted: Sequence[Any]) -> Tensor:
        from torch.distributed.tensor import Replicate

        whole = compat.as_dtensor(value, self.mesh, [Replicate()] * self.mesh.ndim, value)
        return compat.local_of(whole.redistribute(placements=wanted))


def _without_data(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _placement(tensor: Tensor, mesh_dim: int) -> Any:
    from torch.distributed.tensor import Replicate

    placements = compat.placements(tensor)
    return placements[mesh_dim] if placements else Replicate()


def _dim(placement: Any) -> Any:
    """The dim that a placement shards, None for others. `is_shard` is not true of a dim that FSDP has sharded, too."""
    return getattr(placement, "dim", None)


def _is_sum(placement: Any) -> bool:
    """Whether ranks hold parts of a sum, or of another reduction that all torch can do."""
    from torch.distributed.tensor import Partial

    return type(placement) is Partial and placement.reduce_op in _REDUCTIONS


def _is_pending(tensor: Any) -> bool:
    return any(placement.is_partial() for placement in tensor.placements)


def _distance(now: Any, then: Any) -> float:
    """How many numbers a redistribution moves, for each of the tensor's: what is whole is cut without any."""
    if now == then or now.is_replicate():
        return 0.0
    if now.is_partial():
        return 2.0 if then.is_replicate() else 1.0
    return 1.0 if then.is_replicate() else 0.5


def _chunks(size: int, parts: int) -> list[tuple[int, int]]:
    """Where the parts of a dim begin and end."""
    step = -(-size // parts)
    return [(min(at * step, size), min((at + 1) * step, size)) for at in range(parts)]


def _placed(name: str, tensor: Any) -> str:
    return f"{name} {shape_text(tensor.shape)} is placed as {tuple(tensor.placements)} on {tensor.device_mesh}"


@functools.lru_cache(1024)
def _tell(operator: str, name: str, now: str, then: str, pending: bool) -> None:
    """Say once that an argument is communicated; a pending sum has to be, at one operator or another."""
    level = logging.INFO if pending else logging.WARNING
    log.log(level, "%s redistributes %s from %s to %s at each call", operator, name, now, then)
