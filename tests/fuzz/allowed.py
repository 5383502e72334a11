"""Functions that the program allows in the graph: torch.compile calls them, and nobody looks into them before that."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.compiler.allow_in_graph
def noise(x: Tensor) -> Tensor:
    """A product with random numbers."""
    return x * (0.5 + torch.rand(x.shape)).to(x)


@torch.compiler.allow_in_graph
def halve(written: Tensor) -> Tensor:
    """Half of a tensor, written in its place."""
    return written.mul_(0.5)


@torch.compiler.allow_in_graph
def first(x: Tensor, y: Tensor) -> Tensor:
    """A sum, of which the second summand gets no gradient."""
    return x + y.detach()


@torch.compiler.allow_in_graph
def added(written: Tensor, y: Tensor) -> Tensor:
    """A sum, written in the place of the first summand. Its result is a copy."""
    return written.add_(y).clone()
