"""The outputs and gradients of a model, by name, as it is and in float64. What it draws and writes is put back."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from mhc_compile import compat
from mhc_compile.encoding import in_one_line
from mhc_compile.testing.draws import KeepDraws, ReplayDraws
from mhc_compile.testing.float64 import Float64Reference, widened

_SEED = 0

Results = dict[str, torch.Tensor]


@contextlib.contextmanager
def kept(module: nn.Module) -> Iterator[None]:
    """Put gradients, training mode and random numbers back in the end; values are put back after every run.

    Hooks of parameters, such as one that makes a step of an optimizer, are not called meanwhile: the float64 copy has
    none.
    """
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    training = [(part, part.training) for part in module.modules()]
    every = [hooks for p in module.parameters() for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)]
    hooks = [(of, dict(of)) for of in every if of]
    devices = sorted({p.device.index for p in module.parameters() if p.device.type == "cuda"})
    state, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=devices):
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            for of, _ in hooks:
                of.clear()
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for of, before in hooks:
                of.update(before)
            for part, mode in training:
                part.training = mode
            random.setstate(state)
            if numpy:
                numpy.random.set_state(of_numpy)


def first_results(module: nn.Module, args: Any, kwargs: Any, grad: bool) -> tuple[Any, Any, KeepDraws, Results, float]:
    """The arguments, of which all require a gradient if the model takes that; its draws; its results; and its seconds.

    The seconds are those of the run that gave the results.
    """

    def requiring(value: Any) -> Any:
        wide = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
        return value.detach().clone().requires_grad_() if wide else value

    def run(args: Any, kwargs: Any) -> tuple[Any, Any, KeepDraws, Results, float]:
        begin = time.perf_counter()
        with KeepDraws() as draws:
            found = evaluate(module, module, args, kwargs, grad)
        return args, kwargs, draws, found, time.perf_counter() - begin

    if grad:
        with contextlib.suppress(Exception):
            return run(*tree_map(requiring, (args, kwargs)))
    return run(args, kwargs)


def exact_results(module: nn.Module, args: Any, kwargs: Any, grad: bool, draws: KeepDraws) -> Results:
    """Those of a copy of the module in float64, which takes the draws of another run."""
    try:
        reference = Float64Reference(module)
        # Recomputation runs in backward, which torch calls without function modes: it would leave float64.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers is about to rename it
            getattr(reference.module, "gradient_checkpointing_disable", lambda: None)()
        reference.module.zero_grad(set_to_none=True)
        with ReplayDraws(draws.draws):
            return evaluate(reference, reference.module, args, kwargs, grad, wide=True)
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            "model: its float64 evaluation does not fit; verify a smaller one of the same code"
        ) from error
    except Exception as error:
        raise ValueError(
            f"model: it runs as it is, and its float64 evaluation does not: {in_one_line(error)}; verify one whose "
            "operators take float64"
        ) from error


def evaluate(
    call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, grad: bool, wide: bool = False
) -> Results:
    """Outputs by name, and the gradients of `module`'s parameters and of the inputs that require one.

    A module that is called itself runs as it is written: functions that it compiles on its own are not compiled.
    wide is for a copy of the module, in float64, whose values need not be put back.
    """
    held = [] if wide else [tensor for tensor in (*module.buffers(), *module.parameters()) if _can_be_written(tensor)]
    values = [(tensor, tensor.detach().clone()) for tensor in held]
    leaves: dict[str, torch.Tensor] = {}
    # Of what an object among the inputs has of the model there is no copy.
    copied: dict[int, Any] = {id(own): own for own in (*module.modules(), *module.parameters(), *module.buffers())}

    def given(path: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return _own_copy(value, copied)
        leaf = (widened(value) if wide else value).detach().clone()  # the model may write into it
        if not (grad and value.requires_grad):
            return leaf
        leaves[keystr(path)] = leaf.requires_grad_()
        return leaf.clone()  # what is no leaf may be written

    put_back = _attributes(module, args, kwargs)
    _seed()
    try:
        stance = torch.compiler.set_stance("force_eager") if call is module else contextlib.nullcontext()
        with stance, torch.set_grad_enabled(grad), warnings.catch_warnings():
            # Dynamo looks at the .grad of its inputs, and ours are no leaves.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            inputs, structure = tree_flatten_with_path((args, kwargs))
            given_args, given_kwargs = structure.unflatten([given(path, value) for path, value in inputs])
            output = call(*given_args, **given_kwargs)
            found = _named_tensors(output)
            if grad:
                _loss(output, found).backward()  # type: ignore[no-untyped-call]
        if not found and not grad:
            raise ValueError(
                f"model: its output has nothing to compare, got {type(output).__name__}; expected tensors, in tuples, "
                "dicts or dataclasses"
            )
        # Outputs may share memory with buffers that are put back below.
        results = {f"output{name}": _real(_whole(value.detach())).clone() for name, value in found.items()}
        leaves = {f"input{name}": leaf for name, leaf in leaves.items()} | dict(module.named_parameters())
        for name, leaf in leaves.items() if grad else ():
            if leaf.requires_grad:
                # A compiled graph gives zeros to what eager code gives no gradient, such as what met no elements.
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                results[f"gradient of {name}"] = _real(_whole(gradient))
    finally:
        for parameter in module.parameters():
            parameter.grad = None
        with torch.no_grad():
            for tensor, before in values:
                tensor.copy_(before)
        put_back()
    return results


def _attributes(module: nn.Module, *given: Any) -> Callable[[], None]:
    """A function that puts back buffers and other attributes that a model assigns, and its own random generators.

    Not parameters: sharded ones may be others as long as a pass lasts.
    """
    parts = [(part, dict(vars(part)), dict(part._buffers)) for part in module.modules()]
    leaves = tree_leaves([given, *(attributes for _, attributes, _ in parts)])
    generators = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Generator)}.values()
    states = [(generator, generator.get_state()) for generator in generators]

    def put_back() -> None:
        for generator, state in states:
            generator.set_state(state)
        for part, attributes, buffers in parts:
            for now, before in ((vars(part), attributes), (part._buffers, buffers)):
                for name in now.keys() - before.keys():
                    del now[name]
                now.update(before)

    return put_back


def _own_copy(value: Any, copied: dict[int, Any]) -> Any:
    """A copy of an object that a model may write into, such as a cache of keys and values; if it has none, itself."""
    if isinstance(value, torch.Generator):  # its state is put back
        return value
    try:
        return copy.deepcopy(value, copied)
    except Exception:
        return value


def _seed() -> None:
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(_SEED)


def _can_be_written(tensor: torch.Tensor) -> bool:
    """Not parameters of subclasses, such as quantized ones, nor what is expanded, or was made in inference mode."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) or not isinstance(tensor, nn.Parameter)
    once = all(stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (plain or compat.is_dtensor(tensor)) and once and not tensor.is_inference()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor or of a sparse tensor, as a plain tensor; others as they are."""
    whole: torch.Tensor = tensor.full_tensor() if compat.is_dtensor(tensor) else tensor
    return whole if whole.layout is torch.strided else whole.to_dense()


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The real and imaginary parts of complex numbers; others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _named_tensors(output: Any, place: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a model's output, by their place in it."""
    found = {}
    for path, value in tree_flatten_with_path(output)[0]:
        name = place + keystr(path)
        if isinstance(value, torch.Tensor) and value.numel():
            found[name] = value
        elif is_dataclass(value) and not isinstance(value, type):  # pytree does not know it
            for part in fields(value):
                found |= _named_tensors(getattr(value, part.name), f"{name}.{part.name}")
    return found


def _loss(output: Any, found: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
        return _whole(loss)
    generator = torch.Generator().manual_seed(_SEED)
    terms = []
    for value in found.values():
        if not value.requires_grad:
            continue
        value = _real(_whole(value))
        weight = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
        terms.append((value.double() * weight).sum())
    if not terms:
        raise ValueError("model: no output requires a gradient; pass grad=False to compare outputs alone")
    return torch.stack(terms).sum()


def tensors_of(*given: Any) -> list[torch.Tensor]:
    """The tensors that are given, and those of modules."""
    parts = [[*g.parameters(), *g.buffers()] if isinstance(g, nn.Module) else g for g in given]
    return [leaf for leaf in tree_leaves(parts) if isinstance(leaf, torch.Tensor)]


def check_memory(module: nn.Module, grad: bool) -> None:
    """Raise MemoryError if the least that the float64 evaluation needs is not there.

    That is the copy, with its gradients, and the gradients of eager code, with which they are compared. Activations
    come on top, and so does what later runs keep.
    """
    tensors = [*module.parameters(), *module.buffers()]
    for device in {tensor.device for tensor in tensors}:
        needed = 0
        for tensor in tensors:
            if tensor.device == device:
                wide = _itemsize_in_float64(tensor.dtype)
                needed += wide * (compat.local_of(tensor) if compat.is_dtensor(tensor) else tensor).numel()
                needed += (wide + tensor.itemsize) * tensor.numel() * (grad and tensor.requires_grad)
        free = _free_memory(device)
        if needed > free:
            raise MemoryError(
                f"model: its float64 copy and gradients need at least {needed / 2**30:.1f} GiB on {device}, which has "
                f"{free / 2**30:.1f} GiB left; verify a smaller one of the same code"
            )


def _itemsize_in_float64(dtype: torch.dtype) -> int:
    return widened(torch.empty(0, dtype=dtype)).itemsize  # type: ignore[no-any-return]


def _free_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # Windows has no such names, and macOS not this one.
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return float("inf")
