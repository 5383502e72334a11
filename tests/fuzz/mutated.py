"""Models of the zoo with one place of their source changed: a constant, an axis, an operator, a step more."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from tests.mutation.mutants import Mutant, mutants
from tests.zoo import (
    deepseek,
    hunyuan,
    independent,
    liger,
    lucidrains,
    megatron,
    paper,
    tilekernels,
    transformer_engine,
)

# By name: where the model is, its class, and arguments. Sinkhorns are short, since length shows nothing more.
MODELS: dict[str, tuple[ModuleType, str, dict[str, Any]]] = {
    "paper": (paper, "Paper", {"iterations": 3}),
    "deepseek": (deepseek, "DeepSeek", {"iterations": 3}),
    "deepseek-mean": (deepseek, "DeepSeek", {"iterations": 3, "head": "mean"}),
    "tilekernels": (tilekernels, "TileKernels", {"repeat": 3}),
    "transformer-engine": (transformer_engine, "TransformerEngine", {}),
    "liger": (liger, "Liger", {"iterations": 3, "pre_eps": 1e-4}),
    "megatron": (megatron, "Megatron", {"iterations": 3, "sinkhorn": "recomputing"}),
    "megatron-dev": (megatron, "Megatron", {"iterations": 3, "branch": "dev"}),
    "einops": (paper, "Einops", {"iterations": 3}),
    "independent": (independent, "Independent", {}),
    "hunyuan": (hunyuan, "Hunyuan", {}),
    "lucidrains": (lucidrains, "Lucidrains", {"iterations": 3}),
    "lucidrains-log": (lucidrains, "Lucidrains", {"iterations": 3, "log_domain": True}),
}
# These leave no model that computes anything.
IDLE = {"return None", "pass", "break", "continue"}


@functools.cache
def places(name: str) -> list[Mutant]:
    """All changes of a model's source."""
    file = str(MODELS[name][0].__file__)
    found = mutants(file, Path(file).read_bytes())
    # A division that rounds has no derivative.
    return [mutant for mutant in found if mutant.new not in IDLE and mutant.new.count("//") <= mutant.old.count("//")]


@functools.cache
def mutated(name: str, place: int) -> type[nn.Module]:
    """A model whose source has the change of this number; 0 is none. Raises SyntaxError if Python does not take it."""
    module, model, _ = MODELS[name]
    source = Path(str(module.__file__)).read_bytes()
    if place:
        source = places(name)[place - 1].applied(source)
    made = ModuleType(f"{module.__name__}_{name.replace('-', '_')}_{place}")
    sys.modules[made.__name__] = made  # classes look for their own
    exec(compile(source, f"<{made.__name__}>", "exec"), made.__dict__)
    found: type[nn.Module] = getattr(made, model)
    return found


def told(name: str, place: int) -> str:
    """What is changed, in a line."""
    if not place:
        return "nothing is changed"
    mutant = places(name)[place - 1]
    return f"{Path(mutant.file).name}:{mutant.line}: {' '.join(mutant.old.split())} -> {' '.join(mutant.new.split())}"
