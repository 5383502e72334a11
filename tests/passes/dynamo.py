"""Dynamo's graphs of programs, as backends get them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def graph_of(program: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    """The one graph of a program without graph breaks."""
    found: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, _: object) -> Callable[..., Any]:
        found.append(module)
        return module.forward

    torch.compile(program, backend=keep, fullgraph=True)(*inputs)
    (module,) = found
    return module
