"""Parameters of hyper-connections beside FSDP2: whole on every rank, in a dtype of their own.

    mesh = init_device_mesh("cuda", (ranks,))
    whole = mhc_compile.distributed.replicate(model, mesh)
    for layer in model.layers:
        layer.compile(backend="mhc", fullgraph=True)
        fully_shard(layer, mesh=mesh, ignored_params=whole, mp_policy=policy)
    fully_shard(model, mesh=mesh, ignored_params=whole, mp_policy=policy)

FSDP2 keeps the parameters of a unit in one dtype, but phi, scale and bias are small and need float32. If the modules
that hold them were units of their own, the hooks of these units would cut the compiled graph.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.utils._pytree import tree_leaves

from mhc_compile import compat
from mhc_compile.nn import HyperConnection, HyperHead

__all__ = ["replicate"]

Chosen = Iterable[nn.Parameter] | Callable[[str, nn.Parameter], bool] | None
_EXPECTED = "parameters of hyper-connections, or a function (name, parameter) -> bool"


def replicate(model: nn.Module, mesh: DeviceMesh, parameters: Chosen = None) -> set[nn.Parameter]:
    """Keep parameters whole on every rank of a mesh, as DTensors, and average their gradients.

    Call it on all ranks, before `fully_shard` and before the optimizer is made. Give the result to every
    `fully_shard` of the model as `ignored_params`.

    - `model.parameters()`, state dicts and optimizers see DTensors with `Replicate` on every dimension of the mesh.
      The code of the modules sees plain local tensors: an attribute such as `self.phi` is `to_local()` of its DTensor.
    - All ranks get the values of the mesh's first rank: at once, or in the first forward pass of `model` if a
      parameter is on the device "meta".
    - At the end of a backward pass from outputs of `model`, one all-reduce averages all gradients. Until then a
      gradient is a DTensor with `Partial("avg")`.
    - `set_requires_gradient_sync`, `set_requires_all_reduce` and `set_gradient_divide_factor` of the FSDP unit
      around a parameter hold for this parameter, too.
    - A parameter without a gradient on some ranks counts as zero there. Without one on any rank, its `grad` stays None.

    Args:
        model: the module that is called in training, usually the root that `fully_shard` gets last.
        mesh: the one that `fully_shard` gets, with one dimension, or two for HSDP.
        parameters: which ones: parameters of the model, or a function of a parameter's name and the parameter. None
            means those of all `mhc_compile.nn.HyperConnection` and `HyperHead`, without those of their layers.

    Returns: the new parameters. They replace those of the model.

    Raises:
        TypeError: an argument has another type.
        ValueError: there are no such parameters, one is not the model's, or one is a DTensor already; or the mesh has
            several dimensions without names.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; expected a torch.nn.Module")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is {type(mesh).__name__}; expected the DeviceMesh that fully_shard gets")
    if mesh.ndim > 1 and not mesh.mesh_dim_names:
        raise ValueError("mesh has no names of dimensions; expected mesh_dim_names, as fully_shard does for HSDP")
    is_some = parameters is None or isinstance(parameters, Iterable) or callable(parameters)
    if not is_some or isinstance(parameters, nn.Module):
        raise TypeError(f"parameters is {type(parameters).__name__}; expected {_EXPECTED}")
    chosen = _chosen(model, parameters)
    replicas = {old: _replica(old, mesh) for old in chosen}
    held = _put_in_place(model, replicas, mesh.ndim)
    _Gradients(model, mesh, held).start()
    return set(replicas.values())


def _chosen(model: nn.Module, parameters: Chosen) -> list[nn.Parameter]:
    named = dict(model.named_parameters())
    if parameters is None:
        modules = [module for module in model.modules() if isinstance(module, (HyperConnection, HyperHead))]
        found = [parameter for module in modules for parameter in module.parameters(recurse=False)]
        what = "None, and model has no HyperConnection and no HyperHead of mhc_compile.nn"
    elif callable(parameters):
        found = [parameter for name, parameter in named.items() if parameters(name, parameter)]
        what = f"a function that is true of none of the model's {len(named)}"
    else:
        found = list(parameters)
        what = "empty"
    if not found:
        raise ValueError(f"parameters is {what}; expected {_EXPECTED}")
    names = {parameter: name for name, parameter in named.items()}
    for i, parameter in enumerate(found):
        if not isinstance(parameter, nn.Parameter):
            raise TypeError(f"parameters has a {type(parameter).__name__} at {i}; expected torch.nn.Parameter")
        if parameter not in names:
            raise ValueError(f"parameters has one at {i} that is not the model's; expected some of model.parameters()")
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"parameters has {names[parameter]!r}, which is a DTensor; expected a plain parameter: "
                "call replicate once, before fully_shard"
            )
    return list(dict.fromkeys(found))


def _replica(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    local = parameter.detach()
    if not local.is_meta and local.device.type != mesh.device_type:
        local = local.to(mesh.device_type)
    whole = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    replica = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    vars(replica).update(vars(parameter))
    return replica


Held = list[tuple[nn.Module, str]]


def _put_in_place(model: nn.Module, replicas: dict[nn.Parameter, nn.Parameter], dimensions: int) -> Held:
    """Give modules the replicas; for each replica, a module that holds it, and its name there."""
    held: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for module in model.modules():
        found = {name: replicas[old] for name, old in module._parameters.items() if old in replicas}
        if not found:
            continue
        module._parameters.update(found)
        module.__class__ = _with_local_views(type(module), tuple(found), dimensions)  # type: ignore[arg-type]
        for name, replica in found.items():
            held.setdefault(replica, (module, name))
    return list(held.values())


@functools.cache
def _with_local_views(base: type, names: tuple[str, ...], dimensions: int) -> type:
    """A subclass whose attributes with these names are the local tensors of its parameters.

    Modules of one class stay so: Dynamo would compile layers of different classes one by one.
    """
    views = {name: _local_view(name, dimensions) for name in names}
    own = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), views | own)


def _local_view(name: str, dimensions: int) -> property:
    # The gradient of this rank's rows alone. Its name is what ranks have to do with it: a gradient that was
    # forgotten is no replica, and no optimizer takes it for one.
    placements = [Partial("avg")] * dimensions

    def get(module: nn.Module) -> Tensor:
        replica = cast(DTensor, module._parameters[name])
        return replica.to_local(grad_placements=placements)

    return property(get)


class _Gradients:
    """The gradients of replicas: made `Partial` when a backward pass begins, and averaged when it ends."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, held: Held) -> None:
        self.model, self.mesh, self.held = model, mesh, held
        self.group = compat.flat_mesh(mesh).get_group()
        self.backward: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Gradients:
        """Those of a copied model, on the same mesh: nobody can copy a process group."""
        made = memo[id(self)] = _Gradients.__new__(_Gradients)  # first, since the model's hooks lead here
        held = [(copy.deepcopy(module, memo), name) for module, name in self.held]
        made.__init__(copy.deepcopy(self.model, memo), self.mesh, held)  # type: ignore[misc]
        return made

    def start(self) -> None:
        """Make the values of all ranks equal, and hook into the model's forward passes."""
        if any(replica.to_local().is_meta for replica in self._replicas()):
            self.model.register_forward_pre_hook(_Hook(self, "before_forward"))
        else:
            self._equalise()
        self.model.register_forward_hook(_Hook(self, "after_forward"))

    def before_forward(self, module: nn.Module, args: Any) -> None:
        hooks = self.model._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Hook) and hook.gradients is self]:
            del hooks[key]
        self._equalise()

    def _replicas(self) -> list[DTensor]:
        # Looked up each time: `to_empty` and `load_state_dict(assign=True)` put others in place.
        return [cast(DTensor, module._parameters[name]) for module, name in self.held]

    @torch.no_grad()
    def _equalise(self) -> None:
        values = [replica.to_local() for replica in self._replicas()]
        bucket = torch.cat([value.flatten() for value in values])
        dist.broadcast(bucket, group=self.group, group_src=0)
        for value, first in zip(values, _split(bucket, values), strict=True):
            value.copy_(first.view_as(value))

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._begin)  # type: ignore[no-untyped-call]

    def _begin(self, _: Tensor) -> None:
        """At the first gradient of an output in a backward pass."""
        if self.backward == compat.current_backward():
            return
        self.backward = compat.current_backward()
        for replica, settings in zip(self._replicas(), self._settings(), strict=True):
            gradient = _gradient(replica)
            if gradient is not None and not any(placement.is_partial() for placement in gradient.placements):
                # The average of earlier backward passes, as this rank's part, to which gradients can be added.
                part = gradient.to_local() * (settings.divisor / self.mesh.size())
                replica.grad = self._as_dtensor(part, Partial("avg"))
        compat.after_backward(self._end)

    @torch.no_grad()
    def _end(self) -> None:
        """One all-reduce for each divisor, whatever gradients this rank has: other ranks may have them."""
        self.backward = None
        buckets: dict[float, list[DTensor]] = {}
        for replica, settings in zip(self._replicas(), self._settings(), strict=True):
            if replica.requires_grad and settings.exchanges:
                buckets.setdefault(settings.divisor, []).append(replica)
        for divisor, replicas in buckets.items():
            self._average(replicas, divisor)

    def _average(self, replicas: list[DTensor], divisor: float) -> None:
        exists = [replica.grad is not None for replica in replicas]
        parts = [_part(replica) for replica in replicas]
        # What follows the gradients counts the ranks that have one. It is filled on the device: for a copy of a list,
        # the host would wait until the backward pass has run.
        own = parts[0].new_ones(len(exists))
        for i, exist in enumerate(exists):
            if not exist:
                own[i].zero_()
        parts.append(own)
        bucket = torch.cat([part.flatten() for part in parts]).div_(divisor)
        dist.all_reduce(bucket, group=self.group)
        *sums, counts = _split(bucket, parts)
        # The host waits for the counts only if it needs them.
        if not all(exists):
            exists = counts.tolist()
        for replica, part, total, exist in zip(replicas, parts, sums, exists, strict=False):
            if exist:
                replica.grad = self._as_dtensor(total.view_as(part).to(part.dtype), Replicate())

    def _as_dtensor(self, local: Tensor, placement: Placement) -> DTensor:
        return DTensor.from_local(local, self.mesh, [placement] * self.mesh.ndim, run_check=False)

    def _settings(self) -> list[compat.UnitSettings]:
        return [compat.unit_settings(unit, self.mesh.size()) for unit in self._units]

    @functools.cached_property
    def _units(self) -> list[Any]:
        """The FSDP unit around each replica, or None; looked for in the first backward pass."""
        units: dict[nn.Module, Any] = {}

        def visit(module: nn.Module, unit: Any) -> None:
            units[module] = unit = compat.fsdp_unit(module) or unit
            for child in module.children():
                visit(child, unit)

        visit(self.model, None)
        return [units[module] for module, _ in self.held]


def _gradient(replica: DTensor) -> DTensor | None:
    return cast("DTensor | None", replica.grad)


def _part(replica: DTensor) -> Tensor:
    """This rank's part of a gradient; zeros if there is none."""
    gradient = _gradient(replica)
    return torch.zeros_like(replica.to_local()) if gradient is None else gradient.to_local()


def _split(bucket: Tensor, parts: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.split(bucket, [part.numel() for part in parts])


class _Hook:
    """A hook that a copied model has of its own, unlike a function. Dynamo leaves it alone.

    In a whole model, the hooks of FSDP2 cut the graph at the same places.
    """

    def __init__(self, gradients: _Gradients, name: str) -> None:
        self.gradients, self.name = gradients, name

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any) -> None:
        getattr(self.gradients, self.name)(*args)


def _tensors(output: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
