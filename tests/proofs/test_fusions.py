"""Fusions: the joint graph of a model, forward and backward, computes the same before and after each of them.

The passes themselves run, on models of two sublayers with n = 2 and C = 2. Then both graphs run on symbols. Operators
that do several steps in one compute what the operators of these steps compute, gradients included.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx, nn

from mhc_compile import ops
from mhc_compile.ops import _input_norm, _mix, _tensors
from mhc_compile.passes.fuse import FUSIONS, fuse
from tests.passes import shifted
from tests.passes.fused import Sublayer
from tests.proofs.calculus import derivatives
from tests.proofs.equality import Refuted, prove, refute
from tests.proofs.mutants import mutated
from tests.proofs.programs import copied, joint_graph, prove_same
from tests.proofs.short import Short
from tests.proofs.symbols import Symbols, in_range

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _module(name: str) -> Any:
    """The package has fusions under the names of their modules."""
    return importlib.import_module(f"mhc_compile.passes.fuse.{name}")


accumulating = _module("accumulate")


class _Square(nn.Module):
    """A sublayer without functions, whose derivatives would be more operators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))

    def forward(self, u: Tensor) -> Tensor:
        return self.weight * u * u


class _Stack(nn.Module):
    """Sublayers, and a head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.sublayers = nn.ModuleList(Sublayer(2, 2) for _ in range(layers))
        for sublayer in self.sublayers:
            sublayer.layer = _Square()
        self.phi, self.scale, self.bias = (nn.Parameter(torch.randn(shape)) for shape in ((2, 4), (1,), (2,)))

    def forward(self, x: Tensor) -> Tensor:
        for sublayer in self.sublayers:
            x = sublayer(x)
        return ops.head(x, self.phi, self.scale, self.bias)


class _Shifted(nn.Module):
    """Sublayers that read with gates of the boundary before; the first of these are given."""

    def __init__(self, layers: int, order: str) -> None:
        super().__init__()
        self.sublayers = nn.ModuleList(shifted.OperatorSublayer(order) for _ in range(layers))
        for sublayer in self.sublayers:
            sublayer.layer = _Square()

    def forward(self, x: Tensor, h_pre: Tensor) -> Tensor:
        for sublayer in self.sublayers:
            x, h_pre = sublayer(x, h_pre)
        return ops.aggregate(x, h_pre)


class _WithoutForms(nn.Module):
    """Sublayers whose gates are parameters, or a program's own, made of one projection."""

    def __init__(self, layers: int, own: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Square() for _ in range(layers))
        self.phi = nn.Parameter(torch.randn(4, 4)) if own else None
        self.gates = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            gates = self.gates.expand(*x.shape[:-2], -1)
            if self.phi is not None:
                h, ms = ops.projection(x, self.phi)
                gates = gates + h * ms.unsqueeze(-1)
            pre, post = gates.split(2, -1)
            res = post.unsqueeze(-1) * pre.unsqueeze(-2)
            x = ops.expand_combine(layer(ops.aggregate(x, pre)), None, post, x, res)
        return x


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> Callable[[str], fx.GraphModule]:
    """The joint graph of one of the models, by name."""
    monkeypatch.setattr(shifted, "STREAMS", 2)
    monkeypatch.setattr(shifted, "WIDTH", 2)
    x, h_pre = torch.randn(1, 2, 2, requires_grad=True), torch.randn(1, 2, requires_grad=True)

    def make(name: str) -> fx.GraphModule:
        if name in ("parameters", "own"):
            return joint_graph(_WithoutForms(2, name == "own"), x)
        return joint_graph(_Stack(2), x) if name == "stack" else joint_graph(_Shifted(2, name), x, h_pre)

    return make


def _prove(graph: fx.GraphModule, names: Collection[str], layers: int | None = None) -> Counter[str]:
    """What was fused, after the fused graph was proved to compute the same."""
    fused = copied(graph)
    counts = fuse(fused.graph, names, layers)
    prove_same(graph, fused)
    return +counts


EACH = {
    "accumulate": {"accumulate": 2},
    "boundary": {"boundary": 2},
    "boundary_backward": {"boundary_backward": 1},
}


def test_fusions_of_boundaries(graphs: Callable[[str], fx.GraphModule]) -> None:
    """A write with the next read and gates, or with the head; and x' made again in the backward pass."""
    graph = graphs("stack")
    for name, counts in EACH.items():
        assert _prove(graph, (name,)) == counts
    everything = {"accumulate": 2, "boundary": 2, "boundary_backward": 2}
    assert _prove(graph, FUSIONS) == everything
    assert _prove(graph, FUSIONS, layers=2) == everything | {"recompute": 1}


@pytest.mark.parametrize("order", shifted.ORDERS)
def test_fusions_of_shifted_boundaries(order: str, graphs: Callable[[str], fx.GraphModule]) -> None:
    """Reads with gates from the boundary before, which come before or after the gates that are made."""
    graph = graphs(order)
    counts = _prove(graph, FUSIONS)
    assert counts["shifted_boundary"] > 0
    assert counts["shifted_boundary_backward"] > 0
    assert _prove(graph, ("shifted_boundary",)) == {"shifted_boundary": counts["shifted_boundary"]}


@pytest.mark.parametrize("gates", ["parameters", "own"])
def test_fusions_of_a_write_and_what_reads_it(gates: str, graphs: Callable[[str], fx.GraphModule]) -> None:
    """A read with given gates, or a projection and later the gradients of both."""
    graph = graphs(gates)
    counts = _prove(graph, FUSIONS)
    assert (counts["combine_and_read"], counts["combine_and_read_backward"]) == (1, 1)
    assert _prove(graph, ("combine_and_read",)) == {"combine_and_read": 1}


def test_a_read_through_a_write() -> None:
    """A read of new streams needs f and the old streams alone: with one weight for f, and one for each stream."""
    symbols = Symbols()
    f, post, x, res, pre = (symbols.tensor(name, 1, *size) for name, size in zip("fpxhg", SIZES, strict=True))
    with symbols:
        read = ops.aggregate(ops.expand_combine(f, None, post, x, res), pre)
        weight_of_f, weights = ops.aggregate(post.unsqueeze(-1), pre), ops.mix_streams(pre.unsqueeze(-1), res.mT)
        through = weight_of_f * f + ops.aggregate(x, weights.squeeze(-1))
        prove(symbols.terms(read), symbols.terms(through))
        not_transposed = weight_of_f * f + ops.aggregate(x, ops.mix_streams(pre.unsqueeze(-1), res).squeeze(-1))
    refute(symbols.terms(read), symbols.terms(not_transposed))


def test_the_sum_of_squares_of_an_input_norm() -> None:
    """It is a form of the gates in the products of the streams; and the norm is F.rms_norm of the read."""
    symbols = Symbols()
    _, _, x, _, pre = (symbols.tensor(name, 1, *size) for name, size in zip("fpxhg", SIZES, strict=True))
    weight, eps = symbols.tensor("w", 3), symbols.number("eps")
    with symbols:
        u = ops.aggregate(x, pre)
        gram = _tensors.stream_products(x, x)
        form = ops.aggregate(ops.mix_streams(pre.unsqueeze(-1), gram), pre)
        prove(symbols.terms(u.square().sum(-1, keepdim=True)), symbols.terms(form))
        normed = _input_norm.reference(x, pre, _input_norm.InputNorm(weight, eps), None)
        prove(symbols.terms(normed), symbols.terms(u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps) * weight))
    with symbols, mutated(_input_norm.reference, "_squares(u) / u.shape[-1]", "_squares(u)"):
        other = _input_norm.reference(x, pre, _input_norm.InputNorm(weight, eps), None)
    refute(symbols.terms(normed), symbols.terms(other))


SIZES = ((3,), (4,), (4, 3), (4, 4), (4,))


def _prove_gradients_of_input_norm() -> None:
    symbols = Symbols()
    x, pre, d_out = symbols.tensor("x", 1, 2, 2), symbols.tensor("g", 1, 2), symbols.tensor("d", 1, 2)
    norm = _input_norm.InputNorm(symbols.tensor("w", 2), symbols.number("eps"))
    with torch.no_grad(), symbols:
        out = _input_norm.reference(x, pre, norm, None)
        d_pre, du, d_weight = _input_norm.backward(norm, d_out, x, pre, need_weight=True)
        dx = pre.unsqueeze(-1) * du.unsqueeze(-2)
    total = sympy.Add(*(symbols.terms(out) * symbols.terms(d_out)).flat)
    for got, by in ((d_pre, pre), (dx, x), (d_weight, norm.weight)):
        prove(symbols.terms(got), derivatives(total, symbols.terms(by)))


def test_gradients_of_an_input_norm() -> None:
    _prove_gradients_of_input_norm()


def test_other_gradients_of_an_input_norm_are_refuted() -> None:
    with mutated(_input_norm.backward, "g * r - u * kappa", "g * r"), pytest.raises(Refuted):
        _prove_gradients_of_input_norm()


@pytest.mark.parametrize("name", ["aggregate", "mix_streams", "expand_combine", "projection", "generate_mix", "head"])
def test_a_gradient_begins_with_that_of_others(name: str) -> None:
    """dx with d_x given is dx and d_x, for each operator that adds."""
    symbols = Short(above=in_range)
    x, d_x = symbols.tensor("x", 1, 2, 2), symbols.tensor("a", 1, 2, 2)
    phi = symbols.tensor("phi", 2 if name == "head" else 8, 4)
    scale, bias = symbols.tensor("s", 1 if name == "head" else 3), symbols.tensor("b", len(phi))
    f, pre, res, h = (symbols.tensor(k, 1, *size) for k, size in zip("fprh", ((2,), (2,), (2, 2), (8,)), strict=True))
    mix = (x, phi, scale, bias, None, h[:, : len(phi)], symbols.tensor("m", 1, positive=True))
    given: tuple[Any, ...] = {
        "aggregate": (f, x, pre, [True, False]),
        "mix_streams": (d_x, x, res, [True, False]),
        "expand_combine": (x, f, None, pre, x, res, [False, False, False, True, False]),
        "projection": (h, None, x, phi, None, [True, False, False]),
        "generate_mix": (pre, pre, res, None, None, *mix, [True, False, False, False, False]),
        "head": (f, None, None, *mix, [True, False, False, False, False]),
    }[name]
    place = accumulating._ACCUMULATORS[f"{name}_backward"]
    backward = getattr(torch.ops.mhc, f"{name}_backward")
    with torch.no_grad(), symbols:
        alone, added = backward(*given)[place], backward(*given, d_x)[place]
        symbols.prove(symbols.terms(added), symbols.terms(alone + d_x), "dx")
        with pytest.raises(Refuted):
            symbols.prove(symbols.terms(added), symbols.terms(alone), "dx")


FORMS = {"sinkhorn_steps": 3}


def _gates(x: Tensor, phi: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """`generate_mix`, operator by operator."""
    h_pre, h_post, logits = ops.scale(*ops.projection(x, phi), scale, bias, x.shape[-2])
    return (h_pre, h_post, ops.sinkhorn(logits, steps=3)) if logits.numel() else (h_pre,)


def _gates_and_read(x: Tensor, phi: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    h_pre, *rest = _gates(x, phi, scale, bias)
    return ops.aggregate(x, h_pre), *rest


TOGETHER: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[..., tuple[Tensor, ...]], int]] = {
    "generate_mix": (lambda *given: ops.generate_mix(*given, **FORMS), _gates, 8),
    "generate_mix_and_aggregate": (
        lambda *given: ops.generate_mix_and_aggregate(*given, **FORMS),
        _gates_and_read,
        8,
    ),
    "head": (lambda *given: (ops.head(*given),), _gates_and_read, 2),
}


def _prove_together(name: str) -> None:
    together, apart, rows = TOGETHER[name]
    symbols = Short(above=in_range)
    sizes = {"x": (1, 2, 2), "phi": (rows, 4), "s": (3 if rows == 8 else 1,), "b": (rows,)}
    given = [symbols.tensor(k, *size).requires_grad_() for k, size in sizes.items()]
    results = []
    with symbols:
        for function in (together, apart):
            outputs = function(*given)
            incoming = [symbols.tensor(f"d{i}_", *out.shape) for i, out in enumerate(outputs)]
            results.append((*outputs, *torch.autograd.grad(outputs, given, incoming)))
    for i, (one, other) in enumerate(zip(*results, strict=True)):
        symbols.prove(symbols.terms(one), symbols.terms(other), f"result {i}")


@pytest.mark.parametrize("name", TOGETHER)
def test_several_operators_in_one(name: str) -> None:
    """Results and gradients of what an operator consists of, each part of which is proved alone."""
    _prove_together(name)


def test_another_operator_in_one_is_refuted() -> None:
    with mutated(_mix.backward, "(rows_of(read), d_rows)", "None"), pytest.raises(Refuted):
        _prove_together("head")


_BIAS = "*(first[name] for name in TENSORS)"
_NO_BIAS = '*(None if name == "layer_bias" else first[name] for name in TENSORS)'


@pytest.mark.parametrize(
    ("function", "old", "new", "model"),
    [
        (_module("accumulate")._fold, "change(leaf.operator, d_x=shaped)", "pass", "stack"),
        (_module("boundary")._fuse, _BIAS, _NO_BIAS, "stack"),
        (_module("boundary")._fuse_backward, 'second["d_x"],', "None,", "stack"),
        (_module("shifted")._fuse, 'second["h_pre"]', 'first["h_post"]', shifted.ORDERS[1]),
        (_module("shifted")._fuse_backward, 'arguments(earlier)["d_x"]', "None", shifted.ORDERS[1]),
        (_module("reads")._fuse, 'second.get("h_pre")', 'first["h_post"]', "parameters"),
        (_module("reads")._fuse_backward, 'arguments(parts[0])["d_x"]', "None", "own"),
        (
            _module("recompute")._again,
            "given[name] for name",
            'given[name] if name != "layer_bias" else None for name',
            "stack",
        ),
    ],
    ids=[
        *("accumulate", "boundary", "boundary_backward", "shifted_boundary", "shifted_boundary_backward"),
        *("combine_and_read", "combine_and_read_backward", "recompute"),
    ],
)
def test_another_fusion_is_refuted(
    function: Callable[..., Any], old: str, new: str, model: str, graphs: Callable[[str], fx.GraphModule]
) -> None:
    """A summand, the bias, another reader's gradient, the gates of a read and the old streams are lost or mistaken."""
    graph = graphs(model)
    with mutated(function, old, new), pytest.raises(Refuted):
        _prove(graph, FUSIONS, layers=2)
