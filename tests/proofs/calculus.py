"""Gradients of operators, and those that sympy finds by differentiating what the operators compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import sympy
import torch
from torch import Tensor

from tests.proofs.equality import prove
from tests.proofs.symbols import Symbols, Terms


def prove_gradients(symbols: Symbols, function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> None:
    """The gradients of a function of tensors, through autograd and the registered backward, are its derivatives.

    Each result with elements has a gradient of free symbols.
    """
    given = [tensor.requires_grad_() for tensor in tensors]
    with symbols:
        outputs = [out for out in function(*given) if out.numel() and out.requires_grad]
        incoming = [symbols.tensor(f"d{i}_", *out.shape) for i, out in enumerate(outputs)]
        found = torch.autograd.grad(outputs, given, incoming, allow_unused=True)
    pairs = zip(outputs, incoming, strict=True)
    total = sympy.Add(*[product for out, d in pairs for product in (symbols.terms(out) * symbols.terms(d)).flat])
    for i, (tensor, gradient) in enumerate(zip(given, found, strict=True)):
        assert gradient is not None, f"argument {i} has no gradient"
        prove(symbols.terms(gradient), derivatives(total, symbols.terms(tensor)), f"the gradient of argument {i}")


def derivatives(total: sympy.Expr, by: Terms) -> Terms:
    """The derivatives of a formula by each of these symbols."""
    found = np.empty(by.shape, dtype=object)
    for at in np.ndindex(*by.shape):
        found[at] = sympy.diff(total, by[at])
    return found


def renamed(terms: Terms, old: Sequence[Terms], new: Sequence[Terms]) -> Terms:
    """Formulas with other symbols in the place of some."""
    pairs = {a: b for one, other in zip(old, new, strict=True) for a, b in zip(one.flat, other.flat, strict=True)}
    return np.frompyfunc(lambda term: term.xreplace(pairs), 1, 1)(terms)  # type: ignore[no-any-return]
