"""Streams as DTensors: a style for plans of `torch.distributed.tensor.parallel.parallelize_module`."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.weak import WeakIdKeyDictionary

from mhc_compile import compat

log = logging.getLogger(__name__)

Layouts = Placement | tuple[Placement | None, ...] | None
_EXPECTED = "Shard of a dim of tokens, Shard(-1) for channels, or Replicate()"

# What plain parameters became, by mesh. Several modules may share one, or one module have several names for it.
_MADE = WeakIdKeyDictionary()


class HyperConnectionParallel(ParallelStyle):
    """Share out the streams of a hyper-connection over a mesh with one dimension, as DTensors.

        plan = {
            "hc": HyperConnectionParallel(Shard(1)),
            "hc.layer.up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "hc.layer.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(model, mesh["tp"], plan)

    The module's own parameters, such as phi, scale and bias, become DTensors with `Replicate`. One that several such
    modules share stays one. Those of submodules are left to other entries of the plan. Each rank's part of a gradient
    is added up as soon as a backward pass has it, with one all-reduce for each parameter. FSDP2 around the module does
    that itself. So do optimizers, at each step, if the parameters were replaced after `parallelize_module`, as by
    `to_empty`, `bfloat16` or `deepcopy`: the gradients are then DTensors with `Partial`.

    The first argument of the module is its streams [..., n, C]. Floating-point tensors [..., n] among its
    other positional arguments are gates, which are placed as the streams are, and whole if channels are shared out.

    Args:
        streams: how streams are placed inside: `Shard` of a dim of tokens, `Shard(-1)` for channels, or `Replicate()`.
        input_layouts: how the streams are placed that come in as plain local tensors; None means as `streams`.
            DTensors say so themselves. Both are redistributed to `streams`.
        output_layouts: how results are placed: one placement for all, or one for each, with None for those that stay
            as they come out. None means that all do.
        use_local_output: whether results are local tensors instead of DTensors.

    Raises, on all ranks and before they communicate:
        TypeError: an argument has another type, or the module's first one is no tensor.
        ValueError: no operator has a placement; the mesh has several dimensions; a parameter is a DTensor that is not
            whole on this mesh; streams are on another mesh; or the sharded dim's size does not divide by the mesh's.
    """

    def __init__(
        self,
        streams: Placement = Shard(1),  # noqa: B008  (a constant)
        *,
        input_layouts: Placement | None = None,
        output_layouts: Layouts = None,
        use_local_output: bool = False,
    ) -> None:
        super().__init__()
        self.streams = _checked("streams", streams)
        self.input_layouts = self.streams if input_layouts is None else _checked("input_layouts", input_layouts)
        several = output_layouts if isinstance(output_layouts, tuple) else (output_layouts,)
        for layout in several:
            if layout is not None:
                _checked("output_layouts", layout)
        self.output_layouts = output_layouts
        self.use_local_output = use_local_output

    def __repr__(self) -> str:
        return (
            f"HyperConnectionParallel({self.streams}, input_layouts={self.input_layouts}, "
            f"output_layouts={self.output_layouts}, use_local_output={self.use_local_output})"
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            raise ValueError(f"the mesh has {device_mesh.ndim} dimensions; expected one dimension, as in mesh['tp']")
        if self.streams.is_shard() and not self.streams.is_shard(0) and not compat.flattens_shards():
            _tell_what_fails(str(self.streams))
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module.register_parameter(name, self._whole(name, parameter, device_mesh))
        module.register_forward_pre_hook(lambda _, given: self._enter(given, device_mesh))
        module.register_forward_hook(lambda _, given, results: self._leave(results))
        return module

    def _whole(self, name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
        if not isinstance(parameter, DTensor):
            parameter = self._made(parameter, mesh)
        elif parameter.device_mesh != mesh or not all(each.is_replicate() for each in parameter.placements):
            raise ValueError(
                f"parameter {name} {list(parameter.shape)} is placed as {parameter.placements} on "
                f"{_ranks(parameter.device_mesh)}; expected a plain parameter, or (Replicate(),) on {_ranks(mesh)}"
            )
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_add_up)  # type: ignore[no-untyped-call]
        return parameter

    def _made(self, parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
        """What a plain parameter becomes: the same for all modules that hold it."""
        made: dict[DeviceMesh, nn.Parameter] = _MADE.setdefault(parameter, {})  # type: ignore[no-untyped-call]
        if mesh not in made:
            shared = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=self.src_data_rank)
            made[mesh] = nn.Parameter(shared, requires_grad=parameter.requires_grad)
        return made[mesh]

    def _enter(self, given: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        """The arguments of the module, as DTensors."""
        if not (given and isinstance(given[0], Tensor)):
            found = type(given[0]).__name__ if given else "missing"
            raise TypeError(f"the first argument is {found}; expected streams [..., n, C]")
        x = given[0]
        if x.dim() < 3:
            raise ValueError(f"the first argument is {list(x.shape)}; expected streams [..., n, C]")
        shape = x.shape[:-1]
        gates = [isinstance(each, Tensor) and each.is_floating_point() and each.shape == shape for each in given]
        return tuple(
            self._placed(each, x.dim(), mesh) if at == 0 or gates[at] else each for at, each in enumerate(given)
        )

    def _placed(self, tensor: Tensor, dims: int, mesh: DeviceMesh) -> Tensor:
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, mesh, [_of(self.input_layouts, tensor, dims)], run_check=False)
        elif tensor.device_mesh != mesh:
            raise ValueError(
                f"streams {list(tensor.shape)} are placed as {tensor.placements} on {_ranks(tensor.device_mesh)}; "
                f"expected {_ranks(mesh)}"
            )
        wanted = _of(self.streams, tensor, dims)
        if isinstance(wanted, Shard):
            if wanted.dim == dims - 2:
                raise ValueError(f"streams {list(tensor.shape)} are to be {wanted!r}, their n; expected {_EXPECTED}")
            size, ranks = tensor.shape[wanted.dim], mesh.size()
            if size % ranks:
                raise ValueError(
                    f"streams {list(tensor.shape)} are to be {wanted!r}, but {size} does not divide by {ranks} ranks"
                )
        return tensor.redistribute(placements=[wanted])

    def _leave(self, results: Any) -> Any:
        """The results of the module, placed as `output_layouts` says."""
        listed = results if isinstance(results, tuple) else (results,)
        layouts = (
            self.output_layouts if isinstance(self.output_layouts, tuple) else (self.output_layouts,) * len(listed)
        )
        if len(layouts) != len(listed):
            raise ValueError(f"output_layouts has {len(layouts)}; expected one for each of {len(listed)} results")
        if not self.use_local_output and all(layout is None for layout in layouts):
            return results
        made = [self._handed_on(one, layout) for one, layout in zip(listed, layouts, strict=True)]
        if not isinstance(results, tuple):
            return made[0]
        # A named tuple stays one.
        return type(results)._make(made) if hasattr(results, "_make") else tuple(made)

    def _handed_on(self, result: Any, layout: Placement | None) -> Any:
        if not isinstance(result, DTensor):
            if isinstance(result, list | dict) and (layout is not None or self.use_local_output):
                raise TypeError(f"a result is {type(result).__name__}; expected a tensor, or a tuple of tensors")
            return result
        if layout is not None:
            result = result.redistribute(placements=[_in_result(layout, result)])
        return result.to_local() if self.use_local_output else result


@functools.cache
def _tell_what_fails(streams: str) -> None:
    log.warning(
        "HyperConnectionParallel: streams are %s, but torch %s cannot flatten a sharded dim of a DTensor with dims "
        "before it, as projections of streams do; use Shard(0), or torch 2.13 or newer",
        streams,
        torch.__version__,
    )


def _ranks(mesh: DeviceMesh) -> str:
    return f"the mesh of ranks {mesh.mesh.tolist()}"


def _checked(name: str, placement: Any) -> Placement:
    if not isinstance(placement, Placement):
        raise TypeError(f"{name} is {type(placement).__name__}; expected {_EXPECTED}")
    if not (placement.is_replicate() or (type(placement) is Shard and placement.dim >= -1)):
        raise ValueError(f"{name} is {placement!r}, which no operator has; expected {_EXPECTED}")
    return placement


def _of(placement: Placement, tensor: Tensor, dims: int) -> Placement:
    """The placement of a tensor beside streams with so many dims: gates have no channels."""
    if not isinstance(placement, Shard):
        return placement
    over_channels = placement.dim in (-1, dims - 1)
    if over_channels:
        return Shard(dims - 1) if tensor.dim() == dims else Replicate()
    if placement.dim >= tensor.dim():
        raise ValueError(f"{placement!r} of a tensor {list(tensor.shape)}; expected {_EXPECTED}")
    return placement


def _in_result(placement: Placement, result: Tensor) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    if placement.dim >= result.dim():
        raise ValueError(f"output_layouts has {placement!r} for a result {list(result.shape)}, which has no such dim")
    return Shard(placement.dim % result.dim())


def _add_up(parameter: Tensor) -> None:
    """Make a gradient whole: whoever reads one that is a part of a sum adds it up each time."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and not all(each.is_replicate() for each in gradient.placements):
        parameter.grad = gradient.redistribute(placements=[Replicate()] * gradient.device_mesh.ndim)
