"""Stage 8, lower: operator calls of the graph after autograd become kernels, loops and ATen operators.

On CUDA that is their kernels' launches, as nodes of the graph: Inductor plans their memory and launches them from its
own wrapper, without a dispatch through Python. On CPU it is what `cpu` says. A call that cannot be taken apart stays.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from mhc_compile import compat
from mhc_compile.forms import SymbolicLayout
from mhc_compile.guard import described, guard, told
from mhc_compile.ops._launch import compile_elsewhere
from mhc_compile.ops._register import KERNELS, REFERENCES
from mhc_compile.passes.fuse.joint import arguments, calls, items
from mhc_compile.passes.lower import cpu, cpu_steps, streams
from mhc_compile.passes.lower.mxfp8 import Quantization, quantization
from mhc_compile.passes.lower.zeros import merge_zeros
from mhc_compile.passes.memory import Memory

log = logging.getLogger(__name__)

# Operators whose first argument, d_x_new, can become the result dx.
_IN_PLACE = (
    *("expand_combine_backward", "boundary_backward", "shifted_boundary_backward"),
    "expand_combine_and_read_backward",
)
_DX = 3
# Operators that make a layer input, with its number among the results.
_LAYER_INPUTS = {"boundary": 1, "generate_mix_and_aggregate": 0}
_LAUNCH = torch.ops.mhc._launch.default

# What Inductor's code calls as functions: for few tokens a dispatch takes as long as the work.
_FUNCTIONS = {
    "_launch": "mhc_compile.ops._launch.launch",
    "_loop": "mhc_compile.ops._loops.run",
}


class LaidOutOtherwise(Exception):
    """The parts of an operator return tensors with other strides than the operator."""


Bodies = dict[Any, fx.GraphModule | None]


def lower(graph: fx.Graph, errors: list[str] | None = None, mxfp8: bool = False) -> Counter[str]:
    """Lower the operators of a graph after grad in place; returns how many of each were.

    "in place" counts the gradients of streams that took the memory of those they come from, and "in MXFP8" the layer
    inputs that kernels quantize, if mxfp8 lets them. What cannot be lowered stays as it is, and is logged; what went
    wrong is added to `errors`.
    """
    errors = [] if errors is None else errors
    counts: Counter[str] = Counter()
    bodies: Bodies = {}
    memory = Memory(graph)
    for operator, function in _FUNCTIONS.items():
        compat.call_directly(f"torch.ops.mhc.{operator}.default", function)
    for node in calls(graph):
        name = str(node.target._opname)  # type: ignore[union-attr]
        try:
            in_place = name in _IN_PLACE and node.args[0] is not None and memory.is_free_after(node, node.args[0])
            quantized = None
            with guard("an operator's result is not looked at for a quantization", errors):
                quantized = _quantization(node, name, memory) if mxfp8 else None
            mode = compat.fake_mode_of(compat.example(node.all_input_nodes[0]))
            with compat.without_guards(mode):
                body = _body(node, name, bodies, in_place, quantized)
                if body is None:
                    continue
                with mode:
                    results = _inline(node, body)
                    if quantized is not None:
                        quantized.replace(results[_LAYER_INPUTS[name]], results[-1], memory)
        except (compat.NeedsGuard, LaidOutOtherwise, SymbolicLayout) as reason:
            log.info("%s is not lowered: %s", name, reason)
            continue
        except Exception as error:  # an operator that stays costs time, never a result
            if compat.depends_on_data(error):
                log.info("%s is not lowered: %s", name, described(error))
            else:
                told(error, f"{name} is not lowered", errors)
            continue
        counts[name] += 1
        counts["in place"] += in_place and results[_DX] is node.args[0]
        counts["in MXFP8"] += quantized is not None
        _replace(node, results, memory)
    merge_zeros(graph)
    streams.join(graph, lambda node: _replace(node, _inline(node, _apart(node)), memory))
    return +counts


def _apart(node: fx.Node) -> fx.GraphModule:
    """The mixture that a node stands for, as a graph of the tensors that it takes."""
    given: Any = node.args
    inputs = node.all_input_nodes

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        by_node = dict(zip(inputs, tensors, strict=True))
        d_new, h_res, d_x = (by_node.get(each) for each in given[:3])
        assert d_new is not None
        assert h_res is not None
        return cpu_steps.mixed(d_new, h_res, d_x, given[3])

    return _trace(call, [compat.example(each) for each in inputs])


def compile_kernels(graph: fx.Graph, errors: list[str]) -> None:
    """Compile the kernels that Inductor cannot compile, while it compiles the others."""
    with guard("kernels are compiled at their first launches, and not in a worker process", errors):
        for launch in dict.fromkeys(node.args[0] for node in graph.find_nodes(op="call_function", target=_LAUNCH)):
            compile_elsewhere(launch)


def spell_out(graph: fx.Graph) -> None:
    """Write the default values of integers into operator calls, in place.

    AOTInductor's C++ passes those as well, to a description of the call that has only what was given (torch 2.13).
    """
    for node in calls(graph):
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        integers = {arg.name: arg.default_value for arg in schema if arg.kwarg_only and str(arg.type) == "int"}
        node.kwargs = integers | node.kwargs


def _quantization(node: fx.Node, name: str, memory: Memory) -> Quantization | None:
    """How an operator's layer input is quantized, if its kernel can do that. It has whole rows if there is a norm."""
    if name not in _LAYER_INPUTS or arguments(node)["input_norm_eps"] is None:
        return None
    results = [result for number, result in items(node) if number == _LAYER_INPUTS[name]]
    if len(results) != 1 or not compat.example(results[0]).is_cuda:
        return None
    from mhc_compile.kernels import gpus

    return quantization(results[0], memory) if gpus.of(compat.example(results[0]).device).float8 else None


def _body(
    node: fx.Node, name: str, bodies: Bodies, in_place: bool, quantized: Quantization | None
) -> fx.GraphModule | None:
    """The operator's implementation as a graph of the tensors among its arguments; None where it has to stay.

    Identical layers are traced once.
    """
    asked: dict[str, Any] = {"in_place": True} if in_place else {}
    if quantized is not None:
        asked = {"scaling": quantized.scaling}
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
    values = [compat.example(leaves[i]) for i in at]
    if not all(isinstance(value, torch.Tensor) and not _is_empty(value) for value in values):
        return None
    values = [compat.with_known_sizes(value) for value in values]
    scalars = tuple(None if isinstance(leaf, fx.Node) else leaf for leaf in leaves)
    key = (name, *asked.items(), tuple(map(_layout, values)), scalars, str(spec))
    if key not in bodies:
        # Until there is a body that serves: what raises an error once is not tried again.
        bodies[key] = None
        implementation, context = _implementation(node, name, values, asked)
        if implementation is None:
            return None

        def call(*tensors: torch.Tensor) -> Any:
            for i, tensor in zip(at, tensors, strict=True):
                leaves[i] = tensor
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            return implementation(*args, **kwargs)

        with context:
            body = _trace(call, values)
        _check(body, node, None if quantized is None else _LAYER_INPUTS[name])
        bodies[key] = body
    return bodies[key]


def _implementation(
    node: fx.Node, name: str, values: list[torch.Tensor], asked: dict[str, Any]
) -> tuple[Callable[..., Any] | None, Any]:
    """What to trace for an operator with these tensors, if anything, and in which context."""
    context: Any = contextlib.nullcontext()
    if name not in KERNELS:
        return torch.func.functionalize(REFERENCES[name]), context
    if all(value.device.type == "cpu" for value in values):
        given = arguments(node)
        streams = given.get("x", given.get("logits"))
        return None if streams is None else cpu.parts(name, compat.example(streams), given), context
    if compat.compiles_ahead_of_time():
        return None, context  # a package of torch 2.11 with such kernels in it crashed when it was loaded
    # Here and not above: the passes work where Triton is missing.
    from mhc_compile.kernels import common, embedded, supports

    if torch.version.hip is not None or not all(value.is_cuda for value in values) or not supports(*values):
        return None, context
    context = common.recorded(embedded.record, replayed=compat.makes_cuda_graphs())
    return functools.partial(KERNELS[name], asked=asked), context


def _trace(call: Callable[..., Any], values: list[torch.Tensor]) -> fx.GraphModule:
    with compat.fake_mode_of(values[0]), torch.no_grad(), compat.composites_in_python():
        body: fx.GraphModule = make_fx(call, compat.inductor_decompositions())(*values)
    for node in body.graph.nodes:
        if _takes_addresses(node):
            node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), _whole)
    for node in reversed(body.graph.nodes):
        if _viewed(node) and not node.users:
            body.graph.erase_node(node)
    return body


def _takes_addresses(node: fx.Node) -> bool:
    return compat.is_kernel_launch(node) or node.target is _LAUNCH


def _is_launch(node: fx.Node) -> bool:
    return _takes_addresses(node) or node.target is torch.ops.mhc._loop.default


def _viewed(node: fx.Node) -> list[fx.Node]:
    """What a node is a view of. An operator that writes returns the tensor that it wrote to, which is no view."""
    return [] if compat.may_mutate(node) else compat.aliased(node)


def _whole(node: fx.Node) -> fx.Node:
    """The tensor that this is a view of, where both begin at one place: a kernel is given an address, and to make a
    view takes as long as a third of a launch. Symbolic sizes are not compared, since this would add guards."""
    sources = _viewed(node)
    if len(sources) != 1:
        return node
    view, whole = compat.example(node), compat.example(sources[0])
    numbers = (*whole.shape, *whole.stride(), view.storage_offset(), whole.storage_offset())
    same = view.dtype == whole.dtype and all(isinstance(number, int) for number in numbers)
    return _whole(sources[0]) if same and view.storage_offset() == whole.storage_offset() else node


def _check(body: fx.GraphModule, node: fx.Node, quantized: int | None) -> None:
    """Raise LaidOutOtherwise unless body returns tensors as node does: their readers were compiled for those.

    quantized: the number of a result that is quantized, with scales as the last one.
    """
    (output,) = body.graph.find_nodes(op="output")
    results = [compat.example(result) for result in pytree.tree_leaves(output.args[0])]
    expected = pytree.tree_leaves(compat.example(node))
    if quantized is not None:
        results = results[:-1]
        del results[quantized], expected[quantized]
    if len(results) != len(expected) or not all(map(compat.same_strides, results, expected)):
        raise LaidOutOtherwise("its parts would return tensors laid out otherwise")


def _layout(value: torch.Tensor) -> Any:
    # Symbolic sizes, which have no hash, by their names.
    sizes = *value.shape, *value.stride(), value.storage_offset()
    return *map(str, sizes), value.dim(), value.dtype, value.device


def _is_empty(value: torch.Tensor) -> bool:
    """Whether there is nothing to launch a kernel for. Symbolic sizes are not compared."""
    return any(isinstance(size, int) and size == 0 for size in value.shape)


def _inline(node: fx.Node, body: fx.GraphModule) -> Any:
    """Put copies of the nodes of body, a graph of the tensors that node takes, before it; returns the results."""
    graph = node.graph
    given = iter([leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)])
    copies: dict[fx.Node, fx.Node] = {}
    made: list[fx.Node] = []
    try:
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                copies[inner] = next(given)
            elif inner.op == "call_function":
                with graph.inserting_before(node):
                    copies[inner] = graph.node_copy(inner, lambda n: copies[n])
                made.append(copies[inner])
                _describe(copies[inner], node)
    except Exception:
        for new in reversed(made):
            graph.erase_node(new)
        raise
    (output,) = body.graph.find_nodes(op="output")
    return fx.node.map_arg(output.args[0], lambda n: copies[n])


def _describe(new: fx.Node, old: fx.Node) -> None:
    """Give a copied node the notes that Inductor reads; its value is new, because it identifies memory."""
    args, kwargs = fx.node.map_arg((new.args, new.kwargs), lambda n: n.meta["val"])
    new.meta = {"stack_trace": old.meta["stack_trace"]} if "stack_trace" in old.meta else {}
    if _is_launch(new):
        # Inductor gives a kernel exactly the strides of these, which the launch has as numbers. Without them it gives
        # what it finds best, and a copy that was to be contiguous is not.
        new.meta["eager_input_vals"] = (args, kwargs)
        new.meta["val"] = None
        if compat.is_kernel_launch(new):
            compat.analyse_once(new)
    else:
        new.meta["val"] = new.target(*args, **kwargs)  # type: ignore[operator]


def _replace(node: fx.Node, results: Any, memory: Memory) -> None:
    """Let the readers of node read these results, and take node out."""
    replaced = [(node, results)] if isinstance(results, fx.Node) else [(item, results[i]) for i, item in items(node)]
    for old, new in replaced:
        memory.replace(old, new)
        old.replace_all_uses_with(new)
        if old is not node:
            node.graph.erase_node(old)
    node.graph.erase_node(node)
    for result in pytree.tree_leaves(results):
        if not result.users and result.op == "call_function":
            node.graph.erase_node(result)
