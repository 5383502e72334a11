"""Functions of autograd whose backward pass is not the derivative of the forward pass, as quantisers have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Halved(torch.autograd.Function):
    """The same number, with half of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 0.5 * grad


class Opposed(torch.autograd.Function):
    """A number that is rounded, with a gradient of the other sign that depends on the number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 64).round() / 64

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return -grad * x.tanh()
