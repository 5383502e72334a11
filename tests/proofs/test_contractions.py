"""Reads and writes: however a program spells these sums, they are what the operators compute, with their gradients.

One token and one or two channels stand for all: `test_no_channel_and_no_token_sees_another`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import sympy
import torch
from torch import Tensor

from mhc_compile.ops import aggregate, contract, expand, expand_combine, mix_streams
from mhc_compile.ops.aggregate import pre_gradient
from mhc_compile.ops.aggregate import reference as read_reference
from mhc_compile.ops.expand_combine import reference as write_reference
from mhc_compile.ops.expand_combine import reference_backward as write_backward
from mhc_compile.ops.mix_streams import _reference_backward as mix_backward
from mhc_compile.passes.lower import cpu
from tests.proofs.calculus import prove_gradients, renamed
from tests.proofs.equality import Refuted, prove, refute
from tests.proofs.mutants import mutated
from tests.proofs.symbols import Symbols, Terms

SIZES = (2, 4, 8)
# In float32, sums over streams go to BLAS; in float64 they are spelled out.
DTYPES = (torch.float32, torch.float64)

Write = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Read = Callable[[Tensor, Tensor], Tensor]


def _loop(f: Tensor, post: Tensor, x: Tensor, res: Tensor) -> Tensor:
    n = x.shape[-2]
    rows = [post[..., o, None] * f + sum(res[..., i, o, None] * x[..., i, :] for i in range(n)) for o in range(n)]
    return torch.stack(rows, -2)


def _one_product(f: Tensor, post: Tensor, x: Tensor, res: Tensor) -> Tensor:
    return torch.cat([res.mT, post.unsqueeze(-1)], -1) @ torch.cat([x, f.unsqueeze(-2)], -2)


WRITES: dict[str, Write] = {
    "matmul": lambda f, post, x, res: post.unsqueeze(-1) * f.unsqueeze(-2) + res.transpose(-1, -2) @ x,
    "einsum": lambda f, post, x, res: (
        torch.einsum("...o,...c->...oc", post, f) + torch.einsum("...io,...ic->...oc", res, x)
    ),
    "sum of products": lambda f, post, x, res: (
        (res.unsqueeze(-1) * x.unsqueeze(-2)).sum(-3) + post.unsqueeze(-1) * f.unsqueeze(-2)
    ),
    "loop": _loop,
    "one [n, n + 1] product": _one_product,
    "x + (H - I) x": lambda f, post, x, res: (
        x + (res - torch.eye(x.shape[-2], dtype=x.dtype)).mT @ x + post[..., None] * f[..., None, :]
    ),
    "operator": lambda f, post, x, res: expand_combine(f, None, post, x, res),
    "lowered": lambda f, post, x, res: cpu.expand_combine(f, None, post, x, res),
}
READS: dict[str, Read] = {
    "sum of products": lambda x, pre: (pre.unsqueeze(-1) * x).sum(-2),
    "matmul": lambda x, pre: (pre.unsqueeze(-2) @ x).squeeze(-2),
    "einsum": lambda x, pre: torch.einsum("...i,...ic->...c", pre, x),
    "operator": aggregate,
    "mix_streams": lambda x, pre: mix_streams(x, pre.unsqueeze(-1)).squeeze(-2),
    "lowered": cpu.aggregate,
}


# What a mistake would make of the operator, by a piece of its source.
WRITE_MUTANTS = {
    "H for its transpose": ("upcast(tokens_of(h_res), dtype).mT", "upcast(tokens_of(h_res), dtype)"),
    "no post gate": ("torch.addcmul(mixed, post[tokens],", "torch.addcmul(mixed, torch.ones_like(post[tokens]),"),
}


def _tensors(symbols: Symbols, n: int, width: int = 1, tokens: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """f, h_post, x, h_res."""
    sizes = ((width,), (n,), (n, width), (n, n))
    f, post, x, res = (symbols.tensor(name, tokens, *size) for name, size in zip("fpxh", sizes, strict=True))
    return f, post, x, res


def _wrote(symbols: Symbols, spelled: Write, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> Terms:
    with symbols:
        return symbols.terms(spelled(*tensors))


def _read(symbols: Symbols, spelled: Read, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> Terms:
    with symbols:
        return symbols.terms(spelled(tensors[2], tensors[1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_every_spelling_of_a_write_is_the_operator(n: int, dtype: torch.dtype) -> None:
    symbols = Symbols(dtype=dtype)
    tensors = _tensors(symbols, n)
    operator = _wrote(symbols, WRITES["operator"], tensors)
    for name, spelled in WRITES.items():
        prove(_wrote(symbols, spelled, tensors), operator, name)


@pytest.mark.parametrize("mutant", WRITE_MUTANTS)
def test_another_write_is_refuted(mutant: str) -> None:
    symbols = Symbols()
    tensors = _tensors(symbols, 2)
    wanted = _wrote(symbols, WRITES["matmul"], tensors)
    with mutated(write_reference, *WRITE_MUTANTS[mutant]):
        got = _wrote(symbols, WRITES["operator"], tensors)
    model = refute(got, wanted)
    # z3 shows numbers, for which the two differ by arithmetic.
    assert _at(got, model) != _at(wanted, model)


def _at(terms: Terms, model: dict[str, str]) -> list[sympy.Expr]:
    numbers = {sympy.Symbol(name, real=True): sympy.Rational(value) for name, value in model.items()}
    return [term.subs(numbers).subs(dict.fromkeys(term.free_symbols, 0)) for term in terms.flat]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_every_spelling_of_a_read_is_the_operator(n: int, dtype: torch.dtype) -> None:
    symbols = Symbols(dtype=dtype)
    tensors = _tensors(symbols, n)
    operator = _read(symbols, READS["operator"], tensors)
    for name, spelled in READS.items():
        prove(_read(symbols, spelled, tensors), operator, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_a_matrix_is_read_and_written_by_its_sums(n: int, dtype: torch.dtype) -> None:
    """The sum of rows that it mixes, and its product with n equal outputs."""
    symbols = Symbols(dtype=dtype)
    f, _, x, matrix = _tensors(symbols, n)
    with symbols:
        read, written = (matrix @ x).sum(-2), x + matrix @ f.unsqueeze(-2).expand(x.shape)
        by_rows, by_columns = aggregate(x, matrix.sum(-2)), expand_combine(f, None, matrix.sum(-1), x, None)
        transposed = aggregate(x, matrix.sum(-1))
        prove(symbols.terms(by_rows), symbols.terms(read))
        prove(symbols.terms(by_columns), symbols.terms(written))
        refute(symbols.terms(transposed), symbols.terms(read))


def test_another_read_is_refuted() -> None:
    symbols = Symbols()
    tensors = _tensors(symbols, 2)
    wanted = _read(symbols, READS["sum of products"], tensors)
    with mutated(read_reference, "weighted_sums(weights[tokens], streams[tokens])", "streams[tokens].sum(1, True)"):
        refute(_read(symbols, READS["operator"], tensors), wanted)


def test_no_channel_and_no_token_sees_another() -> None:
    """Each element is the formula for one token and one channel, with that token's and channel's symbols."""
    alone, many = Symbols(), Symbols()
    one, all_ = _tensors(alone, 4), _tensors(many, 4, width=3, tokens=2)
    write = {name: _wrote(alone, spelled, one) for name, spelled in WRITES.items()}
    read = {name: _read(alone, spelled, one) for name, spelled in READS.items()}
    old = [alone.terms(tensor) for tensor in one]
    f, post, x, res = (many.terms(tensor) for tensor in all_)
    for name, spelled in WRITES.items():
        _same_everywhere(write[name], old, _wrote(many, spelled, all_), (f, post, x, res))
    for name, spelled in READS.items():
        _same_everywhere(read[name], old, _read(many, spelled, all_), (f, post, x, res))


def _same_everywhere(one: Terms, old: list[Terms], many: Terms, new: tuple[Terms, ...]) -> None:
    f, post, x, res = new
    for t, c in np.ndindex(many.shape[0], many.shape[-1]):
        own = [f[t : t + 1, c : c + 1], post[t : t + 1], x[t : t + 1, :, c : c + 1], res[t : t + 1]]
        prove(renamed(one, old, own), many[t : t + 1, ..., c : c + 1])


@pytest.mark.parametrize("n", SIZES)
def test_gradients_of_a_write(n: int) -> None:
    """Two channels: some gradients are sums over them."""
    symbols = Symbols()
    f, post, x, res = _tensors(symbols, n, width=2)
    bias = symbols.tensor("b", 2)
    prove_gradients(symbols, lambda *given: (expand_combine(*given),), f, bias, post, x, res)
    prove_gradients(symbols, lambda f, post, x: (expand_combine(f, None, post, x, None),), f, post, x)


def _prove_gradients_of_reads(n: int) -> None:
    symbols = Symbols()
    _, post, x, res = _tensors(symbols, n, width=2)
    prove_gradients(symbols, lambda *given: (aggregate(*given),), x, post)
    prove_gradients(symbols, lambda *given: (mix_streams(*given),), x, res)


@pytest.mark.parametrize("n", SIZES)
def test_gradients_of_reads(n: int) -> None:
    _prove_gradients_of_reads(n)


@pytest.mark.parametrize("n", SIZES)
def test_gradients_of_entry_and_exit(n: int) -> None:
    symbols = Symbols()
    f, _, x, _ = _tensors(symbols, n, width=2)
    prove_gradients(symbols, lambda x: (contract(x),), x)
    prove_gradients(symbols, lambda f: (expand(f, n),), f)


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        (write_backward, "weighted_sums(res[tokens], d_new)", "weighted_sums(res[tokens].mT, d_new)"),
        (write_backward, "stream_products(streams[tokens], d_new)", "stream_products(d_new, streams[tokens])"),
        (write_backward, "stream_products(d_new, biased)", "stream_products(d_new, rows[tokens].unsqueeze(1))"),
        (write_backward, "d_layer_bias += d_rows.sum(0)", "d_layer_bias = d_rows[0]"),
    ],
    ids=["H for its transpose", "the transpose of dH", "no bias", "one token only"],
)
def test_another_gradient_of_a_write_is_refuted(function: Callable[..., object], old: str, new: str) -> None:
    symbols = Symbols()
    f, post, x, res = _tensors(symbols, 2, width=2, tokens=2)
    bias = symbols.tensor("b", 2)
    with mutated(function, old, new), pytest.raises(Refuted):
        prove_gradients(symbols, lambda *given: (expand_combine(*given),), f, bias, post, x, res)


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        (pre_gradient, "streams[tokens], d_rows[tokens]", "streams[tokens][..., :1], d_rows[tokens][..., :1]"),
        (mix_backward, "weighted_sums(weights[tokens], d_new)", "weighted_sums(weights[tokens].mT, d_new)"),
    ],
    ids=["one channel only", "H for its transpose"],
)
def test_another_gradient_of_a_read_is_refuted(function: Callable[..., object], old: str, new: str) -> None:
    with mutated(function, old, new), pytest.raises(Refuted):
        _prove_gradients_of_reads(2)
