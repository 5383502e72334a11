"""Graphs of operators to lower, on a GPU that need not exist or on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import mhc_compile.ops  # noqa: F401  (registers the operators)
from mhc_compile import compat

mhc = torch.ops.mhc
LAUNCH = "triton_kernel_wrapper_mutation"


def arguments(mode: FakeTensorMode, tokens: int = 64, width: int = 256, device: str = "cuda:0") -> dict[str, Tensor]:
    n, rows = 4, 24
    shapes = {"x": (tokens, n, width), "f": (tokens, width), "phi": (rows, n * width), "scale": (3,), "bias": (rows,)}
    shapes |= {"post": (tokens, n), "res": (tokens, n, n)}
    with mode:
        return {name: torch.empty(shape, device=device) for name, shape in shapes.items()}


def graph_of(function: Callable[..., Any], values: dict[str, Tensor]) -> fx.Graph:
    """The graph of a function of these tensors, whose results are one flat tuple."""
    names = list(values)

    def flat(*tensors: Tensor) -> list[Tensor]:
        leaves = torch.utils._pytree.tree_leaves(function(**dict(zip(names, tensors, strict=True))))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    with compat.fake_mode_of(values["x"]):
        graph = make_fx(flat)(*values.values()).graph
    graph.eliminate_dead_code()
    return graph


def operators(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if str(node.target).startswith("mhc.")]


def launches(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if str(node.target) == LAUNCH]


def step(x: Tensor, f: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, post: Tensor, res: Tensor) -> Any:
    u, *gates, h, ms = mhc.generate_mix_and_aggregate(x, phi, scale, bias)
    y = mhc.expand_combine(f, None, gates[0], x, gates[1])
    saved = (x, phi, scale, bias, None, h, ms, [True, True, True, True, False])
    return u, y, mhc.generate_mix_and_aggregate_backward(u, post, res, None, None, *saved)


def boundary_backward(x: Tensor, f: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, post: Tensor, res: Tensor) -> Any:
    new, u, next_post, next_res, h, ms = mhc.boundary(f, None, post, x, res, phi, scale, bias)
    saved = (f, None, post, x, res, phi, scale, bias, None, new, h, ms)
    needs = [True, False, *[True] * 6, False]
    return mhc.boundary_backward(new, u, next_post, next_res, None, None, *saved, needs)


def shifted_backward(x: Tensor, f: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, post: Tensor, res: Tensor) -> Any:
    given = (f, None, post, x, res, 0.5 * post, phi, scale, bias)
    new, u, next_pre, next_post, next_res, h, ms = mhc.shifted_boundary(*given)
    needs = [True, False, *[True] * 7, False]
    gradients = (new, u, next_pre, next_post, next_res, None, None)
    return mhc.shifted_boundary_backward(*gradients, *given, None, new, h, ms, needs)


def any_number(shape_env: ShapeEnv, now: int = 64) -> Any:
    """A symbolic size, `now` when the graph was made."""
    source = ConstantSource(f"size_{len(shape_env.var_to_range)}")
    symbol = shape_env.create_symbol(now, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return shape_env.create_symintnode(symbol, hint=now)
