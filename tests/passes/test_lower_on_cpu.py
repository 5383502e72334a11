"""Loops of a CPU within graphs: what is around them, and what they cannot do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mhc_compile import ops, passes, records
from mhc_compile.ops import _loops
from tests.passes.lowering import graph_of, operators
from tests.zoo import check

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "fresh_cache")

N, WIDTH, K = 4, 24, 24
SHAPES = {"f": (3, 5, WIDTH), "x": (3, 5, N, WIDTH), "phi": (K, N * WIDTH), "scale": (3,), "bias": (K,), "w": (WIDTH,)}


def _sublayer(f: Tensor, x: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, w: Tensor) -> Tensor:
    norm = {"input_norm_weight": w, "input_norm_eps": 1e-6}
    u, post, res = ops.generate_mix_and_aggregate(x, phi, scale, bias)
    x = ops.expand_combine(u * f, None, post, x, res)
    return ops.generate_mix_and_aggregate(x, phi, scale, bias, **norm)[0]


def _leaves(dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in SHAPES.values()]


def _results(function: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    out = function(*leaves)
    return [out, *torch.autograd.grad(out.sin().sum(), leaves)]


def _worst(values: list[Tensor], exact: list[Tensor]) -> float:
    return max(map(check.error, values, exact))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _loops._read.cache_clear()
    monkeypatch.setattr(_loops, "_library", lambda n: None)
    yield
    _loops._read.cache_clear()


def _by_references(dtype: torch.dtype, tolerance: float) -> None:
    leaves = _leaves(dtype)
    exact = _results(_sublayer, [leaf.detach().double().requires_grad_() for leaf in leaves])
    assert _worst(_results(torch.compile(_sublayer, backend="mhc"), leaves), exact) < tolerance
    assert set(records.last().lowered) == {
        "generate_mix_and_aggregate", "generate_mix_and_aggregate_backward", "boundary", "boundary_backward"
    }  # fmt: skip


def test_references_get_tensors_in_their_shapes() -> None:
    """The loops take addresses alone; they are not for float64."""
    _by_references(torch.float64, 1e-12)


@pytest.mark.usefixtures("no_compiler")
def test_references_stand_in_for_loops_that_cannot_be_compiled() -> None:
    _by_references(torch.float32, 3e-6)


def _shifted(f: Tensor, x: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, w: Tensor) -> Tensor:
    """Two boundaries, with logits of order 1: a gradient of x' from outside, and from both of its readers."""
    phi = phi / phi.shape[-1] ** 0.5
    h_pre, post, res = ops.generate_mix(x, phi, scale, bias)
    for _ in range(2):
        x, u, h_pre, post, res = ops.shifted_boundary(f, w, post, x, res, h_pre, phi, scale, bias)
        f = torch.tanh(f + u)
    return ops.expand_combine(f, None, post, x, res)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shifted_boundaries(dtype: torch.dtype) -> None:
    leaves = _leaves(dtype)
    exact = _results(_shifted, [leaf.detach().double().requires_grad_() for leaf in leaves])
    eager = _worst(_results(_shifted, leaves), exact)
    found = _results(torch.compile(_shifted, backend="mhc"), leaves)
    # The largest of 7 errors of a few roundings each, which are other ones in another order of sums.
    assert _worst(found, exact) < max(2 * eager, 1e-12)
    assert {name: records.last().lowered[name] for name in ("shifted_boundary", "shifted_boundary_backward")} == {
        "shifted_boundary": 2, "shifted_boundary_backward": 2,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shifted_boundaries_of_half_precision(dtype: torch.dtype) -> None:
    """As accurate as the operators one by one, to the roundings of streams and their gradients."""
    leaves = _leaves(dtype)
    exact = _results(_shifted, [leaf.detach().double().requires_grad_() for leaf in leaves])
    apart = _worst(_results(_shifted, leaves), exact)
    assert _worst(_results(torch.compile(_shifted, backend="mhc"), leaves), exact) < 1.5 * apart


@pytest.mark.slow
@pytest.mark.parametrize("needed", ["only the streams", "only parameters"])
def test_a_part_of_the_gradients_of_a_shifted_boundary(needed: str) -> None:
    leaves = _leaves(torch.float32)
    for leaf, name in zip(leaves, SHAPES, strict=True):
        leaf.requires_grad_((name == "x") == (needed == "only the streams"))

    def step(function: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
        out = function(*given)
        return [out, *torch.autograd.grad(out.sin().sum(), [leaf for leaf in given if leaf.requires_grad])]

    exact = step(_shifted, [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves])
    assert _worst(step(torch.compile(_shifted, backend="mhc"), leaves), exact) < 3e-6


def _by_own_gates(f: Tensor, x: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, w: Tensor) -> Tensor:
    """A read, a mix and one of fewer streams, with gates that no operator makes."""
    logits = F.linear(x.flatten(-2), phi[: N * N]) / phi.shape[-1] ** 0.5
    gates = torch.tanh(logits + bias[: N * N]).unflatten(-1, (N, N))
    u = ops.aggregate(x, gates[..., 0])
    x = ops.mix_streams(x, gates.transpose(-1, -2))
    fewer = ops.mix_streams(x, gates[..., :2])
    return torch.cat((x, fewer, (torch.tanh(u + w) * f * scale[0]).unsqueeze(-2)), -2)


@pytest.mark.parametrize(
    ("dtype", "lowered"), [(torch.float32, True), (torch.bfloat16, True), (torch.float16, False), (torch.float64, True)]
)
def test_reads_and_mixes_by_own_gates(dtype: torch.dtype, lowered: bool) -> None:
    leaves = _leaves(dtype)
    exact = _results(_by_own_gates, [leaf.detach().double().requires_grad_() for leaf in leaves])
    apart = _worst(_results(_by_own_gates, leaves), exact)
    torch._dynamo.reset()
    assert _worst(_results(torch.compile(_by_own_gates, backend="mhc"), leaves), exact) < max(1.5 * apart, 1e-12)
    assert records.last().lowered["aggregate_backward"] == lowered
    # That of fewer streams stays whole.
    assert records.last().lowered["mix_streams_backward"] == lowered


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 3e-6), (torch.bfloat16, 3e-2), (torch.float16, 3e-3), (torch.float64, 1e-12)],
)
def test_a_sinkhorn_alone_is_a_loop(dtype: torch.dtype, tolerance: float) -> None:
    """Of logits that are not contiguous, and whose gradient has their dtype."""

    def matrices(logits: Tensor) -> Tensor:
        return ops.sinkhorn(torch.tanh(logits).mT, steps=7)

    logits = torch.randn(5, 3, N, N, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    exact = _results(matrices, [logits.detach().double().requires_grad_()])
    found = _results(torch.compile(matrices, backend="mhc"), [logits])
    assert _worst(found, exact) < tolerance
    assert set(records.last().lowered) == {"sinkhorn", "sinkhorn_backward"}


def test_gradients_of_parameters_are_not_for_autocast_to_round() -> None:
    """Where it is on in the backward pass alone, the graph was compiled without it."""

    def results(function: Callable[..., Tensor], dtype: torch.dtype, *, autocast: bool) -> list[Tensor]:
        leaves = _leaves(dtype)
        loss = function(*leaves).sin().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return list(torch.autograd.grad(loss, leaves))

    exact = results(_sublayer, torch.float64, autocast=False)
    assert _worst(results(torch.compile(_sublayer, backend="mhc"), torch.float32, autocast=True), exact) < 3e-6


def _gates(x: Tensor, phi: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return ops.generate_mix(x, phi, scale, bias)[0]


def _either(x: Tensor, *parameters: Tensor) -> Tensor:
    branches = (lambda x: _gates(x, *parameters), lambda x: _gates(2 * x, *parameters))
    chosen: Tensor = torch.cond(x.sum() > 0, *branches, (x,))
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize(("function", "options"), [(_either, {}), (_gates, {"cpp_wrapper": True})])
def test_what_inductor_makes_of_a_loop(function: Callable[..., Tensor], options: dict[str, Any]) -> None:
    """In a branch of a graph, and in C++ in place of Python."""
    _, streams, *parameters, _ = (leaf.detach() for leaf in _leaves(torch.float32))
    compiled = torch.compile(function, backend="mhc", options=options)
    for x in (streams, -streams):
        torch.testing.assert_close(compiled(x, *parameters), function(x, *parameters))
    assert records.last().lowered


def _read_back(x: Tensor, f: Tensor, phi: Tensor, post: Tensor, res: Tensor, **rest: Tensor) -> Any:
    """The backward of a write, a read and a projection of what is written."""
    new, u, h, ms = torch.ops.mhc.expand_combine_and_read(f, None, post, x, res, 0.5 * post, phi, None)
    given = (f, None, post, x, res, 0.5 * post, phi, None, new)
    needs = [True, False, *[True] * 5, False]
    return torch.ops.mhc.expand_combine_and_read_backward(x, u, h, ms, *given, needs)


def _write_back(x: Tensor, post: Tensor, **rest: Tensor) -> Any:
    """The backward of a write that mixes nothing."""
    given = (x, x[..., 0, :], None, post, 2 * x, None, [True, False, True, True, False])
    backward = torch.ops.mhc.expand_combine_backward
    return *backward(*given), *backward(*given, 3 * x)


def _head(x: Tensor, phi: Tensor, bias: Tensor, scale: Tensor, **rest: Tensor) -> Any:
    return torch.ops.mhc.head(x, phi[:N], scale[:1], bias[:N])


@pytest.mark.parametrize("function", [_read_back, _write_back, _head])
def test_operators_in_parts(function: Callable[..., Any]) -> None:
    shapes = SHAPES | {"post": (3, 5, N), "res": (3, 5, N, N)}
    draw = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    with FakeTensorMode() as mode:
        graph = graph_of(function, {name: mode.from_tensor(value) for name, value in values.items()})
    whole = len(operators(graph))
    assert passes.lower(graph).lowered.total() == whole
    found = torch.fx.GraphModule(torch.nn.Module(), graph)(*values.values())
    exact = function(**{name: value.double() for name, value in values.items()})
    exact = [value for value in exact if value.numel()]
    found = [value for value in found if value.numel()]
    assert len(found) == len(exact)
    assert _worst(found, exact) < 3e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_streams_are_converted_in_parts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, dh = torch.randn(3, 37, N, WIDTH).to(dtype), torch.randn(3, 37, K)
    exact = dh.double().flatten(0, 1).T @ x.double().view(-1, N * WIDTH)
    for most in (1, 20 * N * WIDTH, 1 << 23):
        monkeypatch.setattr(_loops, "_CONVERTED", most)
        assert _worst([_loops.phi_gradient(dh, x)], [exact]) < 1e-6


def _straight_through(x: Tensor, phi: Tensor, w: Tensor) -> Tensor:
    """h_res with the gradient of a softmax of its logits, and with the softmax, which Inductor fuses."""
    flat = x.flatten(-2)
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
    pre, post, logits = (flat @ phi.mT).split([N, N, N * N], -1)
    logits = logits.unflatten(-1, (N, N))
    soft = logits.softmax(-1)
    res = soft
    for _ in range(4):
        res = res / res.sum(-2, keepdim=True)
        res = res / res.sum(-1, keepdim=True)
    res = soft + (res - soft).detach()
    f = torch.tanh((torch.sigmoid(pre).unsqueeze(-2) @ x).squeeze(-2) * w)
    return 2 * torch.sigmoid(post).unsqueeze(-1) * f.unsqueeze(-2) + res.mT @ x


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [(2, 4), (96,)])
def test_what_is_fused_with_other_kernels_stays_behind_the_loops_that_write_what_it_reads(
    tokens: tuple[int, ...],
) -> None:
    # Inductor gives the difference the loops of the softmax, and would forget that it reads what a loop has written.
    draw = torch.Generator().manual_seed(0)
    shapes = ((*tokens, N, WIDTH), SHAPES["phi"], SHAPES["w"])
    leaves = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    exact = _results(_straight_through, [leaf.detach().double().requires_grad_() for leaf in leaves])
    compiled = torch.compile(_straight_through, backend="mhc")
    assert _worst(_results(compiled, leaves), exact) < 1e-5
    assert "generate_mix_and_aggregate" in records.last().lowered
