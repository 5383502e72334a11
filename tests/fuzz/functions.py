"""Functions whose backward pass is not the derivative of the forward pass, as quantisers have them, and operators.

The operators are those of a user's own library: they are registered once, where this module is imported.
"""

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


class First(torch.autograd.Function):
    """A sum, of which the second summand gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Second(torch.autograd.Function):
    """A sum, of which the first summand gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.size = y.shape
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad.sum_to_size(ctx.size)


class Stopped(torch.autograd.Function):
    """The same number, without any gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None


def _noisy(x: Tensor) -> Tensor:
    return x * (0.5 + torch.rand(x.shape)).to(x)


class Noise(torch.autograd.Function):
    """A product with random numbers, which has the gradient of its first factor alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _noisy(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 0.5 * grad


def _noise(name: str, *tags: torch.Tag) -> None:
    """A user's own operator that draws random numbers; it may not say so."""
    operator = torch.library.custom_op(
        f"fuzz::{name}", _noisy, mutates_args=(), schema="(Tensor x) -> Tensor", tags=tags
    )
    operator.register_fake(torch.empty_like)
    operator.register_autograd(lambda ctx, grad: 0.5 * grad)


_noise("noise", torch.Tag.nondeterministic_seeded)
_noise("untagged_noise")


@torch.library.custom_op("fuzz::as_it_lies", mutates_args=())
def _as_it_lies(x: Tensor) -> Tensor:
    """A user's own kernel, whose result shows how the memory lies that its caller gives it."""
    return torch.empty(x.shape).to(x).copy_(x * (2 if x.is_contiguous() else 3))


_as_it_lies.register_fake(lambda x: x.new_empty(x.shape))
_as_it_lies.register_autograd(lambda ctx, grad: 2 * grad)


@torch.library.custom_op("fuzz::halve_", mutates_args=("written",))
def _halve_(written: Tensor) -> None:
    """A user's own operator that writes into its argument."""
    written.mul_(0.5)


@torch.library.custom_op("fuzz::first", mutates_args=())
def _first(x: Tensor, y: Tensor) -> Tensor:
    """A sum, of which a library's backward pass gives the second summand no gradient."""
    return x + y


_first.register_fake(lambda x, y: x + y)
_first.register_autograd(lambda ctx, grad: (grad, None))
