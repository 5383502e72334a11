"""One call of a program, and everything about its results that someone who calls it can observe."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.fuzz.program import Program
from tests.zoo.check import combination

Results = dict[str, Tensor]
MODES: dict[str, Callable[[], Any]] = {
    "training": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@dataclass
class Evaluation:
    """Named values and gradients of one call, and what its outputs are besides their values.

    results holds the outputs, the inputs and buffers as the call leaves them, and all gradients. kinds says of each
    output its type and strides and whether it needs a gradient. shared are the pairs of inputs and outputs that share
    memory; seen is what these hold once a number has been written into one after the other.
    """

    results: Results = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    shared: frozenset[tuple[str, str]] = frozenset()
    seen: Results = field(default_factory=dict)


def evaluate(
    call: Callable[..., Any],
    module: nn.Module,
    inputs: Sequence[Tensor],
    program: Program,
    wide: bool = False,
    flipped: bool = False,
) -> Evaluation:
    """Call a program that computes with the parameters of `module`, and take derivatives of all its outputs.

    flipped: inputs need gradients where they usually do not, and every second parameter is frozen. What a model names
    as `frozen` always is.
    """
    torch.manual_seed(11)
    module.zero_grad(set_to_none=True)
    training = program.mode == "training"
    given = [value.double() if wide else value for value in inputs]
    leaves = training and program.leaves != flipped
    given = [value.detach().clone().requires_grad_(leaves) for value in given]
    frozen = getattr(module, "frozen", ())
    for index, (name, parameter) in enumerate(module.named_parameters()):
        parameter.requires_grad_(not (name in frozen or (flipped and index % 2)))
    for index, axis in program.marked:
        torch._dynamo.maybe_mark_dynamic(given[index], axis)
    found = Evaluation()
    with MODES[program.mode](), _without_checkpoints() if wide else contextlib.nullcontext():
        outputs = [out for out in tree_leaves(call(*given)) if isinstance(out, Tensor)]
        tensors = {f"output {index}": out for index, out in enumerate(outputs)}
        found.kinds = {name: _kind(out) for name, out in tensors.items()}
        tensors |= {f"input {index}": value for index, value in enumerate(given)}
        found.results = {name: value.detach().clone() for name, value in tensors.items()}
        found.results |= {f"buffer {name} afterwards": value.clone() for name, value in module.named_buffers()}
    if training:
        _differentiate(outputs)
        gradients = {f"input {index}": value.grad for index, value in enumerate(given)}
        gradients |= {name: parameter.grad for name, parameter in module.named_parameters()}
        for name, gradient in gradients.items():
            if gradient is not None:
                found.results |= {f"gradient of {part}": value for part, value in _parts(module, name, gradient)}
    with MODES[program.mode]():
        found.shared = _shared(tensors)
        found.seen = _seen({name: tensors[name] for pair in found.shared for name in pair})
    return found


def _without_checkpoints() -> Any:
    """Nothing is computed again in the backward pass, where the casts of a program would leave float64."""

    def plain(*given: Any, **options: Any) -> Iterator[None]:
        yield

    name = "_checkpoint_without_reentrant_generator"
    newer = f"{name}_impl"  # torch 2.14
    module = torch.utils.checkpoint
    return mock.patch.object(module, newer if hasattr(module, newer) else name, plain)


def _kind(value: Tensor) -> str:
    # The stride of a dimension of one says nothing, and eager code itself is at variance about it.
    strides = [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1]
    gradient = "with a gradient" if value.requires_grad else "without gradient"
    return f"{value.dtype} {tuple(value.shape)}, strides {strides if value.numel() else None}, {gradient}"


def _differentiate(outputs: Sequence[Tensor]) -> None:
    """Backward from a fixed combination of all outputs."""
    loss = combination(outputs)
    if loss.requires_grad:
        loss.backward()


def _parts(module: nn.Module, name: str, gradient: Tensor) -> list[tuple[str, Tensor]]:
    """The gradients of each gate's own rows: that of H_res may vanish where the others do not."""
    gradient = gradient.clone()
    if name.rpartition(".")[2] == "scale":
        return [(f"{name}[{index}]", value) for index, value in enumerate(gradient)] if gradient.dim() else []
    if name not in ("phi", "bias"):
        return [(name, gradient)]
    rows = gradient.shape[0]
    n = next((n for n in (2, 3, 4) if rows in (2 * n, n * n + 2 * n)), rows)
    return [
        (f"{name} of gate {index}", part) for index, part in enumerate(gradient.tensor_split([n, 2 * n])) if len(part)
    ]


def _shared(tensors: dict[str, Tensor]) -> frozenset[tuple[str, str]]:
    memory = {name: value.untyped_storage().data_ptr() for name, value in tensors.items() if value.numel()}
    names = list(memory)
    return frozenset(
        (one, other) for index, one in enumerate(names) for other in names[index + 1 :] if memory[one] == memory[other]
    )


def _seen(tensors: dict[str, Tensor]) -> Results:
    """What tensors that share memory hold once another number has been written into each of them."""
    with torch.no_grad():
        for index, name in enumerate(sorted(tensors)):
            tensors[name].detach().fill_(index + 1)
        return {name: value.detach().clone() for name, value in tensors.items()}


def difference(eager: Evaluation, ours: Evaluation) -> str | None:
    """What a caller can observe to be otherwise, but for the numbers."""
    if eager.results.keys() != ours.results.keys():
        return f"only one has {sorted(eager.results.keys() ^ ours.results.keys())}"
    for name, kind in eager.kinds.items():
        if kind != ours.kinds[name]:
            return f"{name}: {ours.kinds[name]}; eager: {kind}"
    if eager.shared != ours.shared:
        return f"these share memory in one only: {sorted(eager.shared ^ ours.shared)}"
    for name, value in eager.seen.items():
        if not torch.equal(value, ours.seen[name]):
            return f"{name} holds something else after writes into what shares its memory"
    return None
