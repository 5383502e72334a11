"""Graphs as Dynamo and AOTAutograd make them: their notes on nodes, copies, order, tracing and its log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from mhc_compile.encoding import printable


def readable(module: fx.GraphModule) -> str:
    """A graph as code, with the shapes of its values."""
    return module.print_readable(print_output=False, include_stride=True)


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of a graph, and which of its nodes stands for which; names and descriptions are kept."""
    new = fx.Graph(graph.owning_module)
    copies: dict[fx.Node, fx.Node] = {}
    output = new.graph_copy(graph, copies)
    old_output = next(node for node in reversed(graph.nodes) if node.op == "output")
    copies[old_output] = new.output(output)
    copies[old_output].meta = dict(old_output.meta)
    for old, copy in copies.items():
        copy_source(old, copy)
    new.set_codegen(graph._codegen)  # an exported graph's arguments are a tree
    return new, copies


def module_of(graph: fx.Graph, root: torch.nn.Module | None) -> fx.GraphModule:
    """A module that runs a graph with the attributes of another; the graphs nested in it are copies."""
    made = fx.GraphModule(root if root is not None else {}, graph)
    for name, body in list(made.named_children()):
        if isinstance(body, fx.GraphModule):
            setattr(made, name, module_of(copy_graph(body.graph)[0], body))
    return made


class Snapshot:
    """A graph as it is now, to which it can be put back after edits in place; taking one copies no nodes."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._nodes = [(node, node.args, node.kwargs, dict(node.meta)) for node in graph.nodes]
        self._modules = set() if graph.owning_module is None else set(graph.owning_module._modules)
        self._attributes = set(vars(graph))

    def put_back(self) -> fx.Graph:
        """Make the graph what it was, of new nodes, and return it: whoever holds it holds that from now on."""
        graph = self._graph
        new = fx.Graph(graph.owning_module)
        copies: dict[fx.Node, fx.Node] = {}
        for node, args, kwargs, meta in self._nodes:
            args, kwargs = fx.node.map_arg((args, kwargs), copies.__getitem__)
            copies[node] = new.create_node(node.op, node.target, args, kwargs, node.name, node.type)
            copies[node].meta = meta
            copy_source(node, copies[node])
        new.set_codegen(graph._codegen)
        for name in set(vars(graph)) - self._attributes:  # notes about nodes that are gone, such as Inductor makes
            delattr(graph, name)
        vars(graph).update(vars(new))
        for node in (graph._root, *copies.values()):
            node.graph = graph
        for name in () if graph.owning_module is None else set(graph.owning_module._modules) - self._modules:
            delattr(graph.owning_module, name)
        return graph


def asks_to_trace_again(error: BaseException) -> bool:
    """Whether an exception is Dynamo's own, by which it traces a frame once more."""
    from torch._dynamo.exc import RestartAnalysis

    return isinstance(error, RestartAnalysis)


def sort_topologically(graph: fx.Graph) -> None:
    """Bring a graph's nodes into an order in which each follows what it reads, moving no more than is needed."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


def example_key(node: fx.Node) -> str:
    """Where a node keeps its fake value: Dynamo's graphs and exported ones use different names."""
    return "val" if "val" in node.meta and "example_value" not in node.meta else "example_value"


def example(node: fx.Node) -> Any:
    """The fake value that a node was captured with; None if it has none."""
    return node.meta.get(example_key(node))


def copy_source(old: fx.Node, new: fx.Node) -> None:
    """Dynamo notes on a placeholder where its value comes from; copies of a graph lose the note."""
    if hasattr(old, "_dynamo_source"):
        new._dynamo_source = old._dynamo_source


def is_called(graph: fx.Graph) -> bool:
    """Whether another graph calls this one: Dynamo's notes of where values come from are on the calling graph's."""
    given = graph.find_nodes(op="placeholder")
    return bool(given) and not any(hasattr(node, "_dynamo_source") for node in given)


def tensor_metadata(value: torch.Tensor) -> Any:
    """What tracing notes about a tensor under "tensor_meta"."""
    from torch.fx.passes.shape_prop import _extract_tensor_metadata

    return _extract_tensor_metadata(value)


def compile_without_inductor(gm: fx.GraphModule, example_inputs: Any, on_joint: Any) -> Any:
    """Run a graph through autograd's tracing alone.

    `on_joint` sees each joint graph before it is partitioned, and where no gradient is wanted the forward graph.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_compiler
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def boxed(module: fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_compiler(lambda m, i: m.forward)(module, inputs)

    def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        on_joint(joint)
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    def infer(module: fx.GraphModule, inputs: Any) -> Any:
        on_joint(module)
        return boxed(module, inputs)

    compilers = {"fw_compiler": boxed, "bw_compiler": boxed, "inference_compiler": infer}
    return aot_autograd(**compilers, partition_fn=partition)(gm, example_inputs)


def for_these_sizes() -> Any:
    """A context in which Dynamo compiles for the sizes that it sees, whatever it saw before, and however often."""
    return torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=1 << 30)


@contextlib.contextmanager
def without_hooks_of_saved_tensors() -> Iterator[None]:
    """Tensors that are saved for a backward pass here are none of the program's (torch 2.11 to 2.14).

    Activation checkpointing around a compiled layer counts what is saved, and its hooks are on while Dynamo compiles.
    As while torch traces, no hook is called. Hooks of ours that return what they are given would never be freed: an
    operator that saves its own result would then hold it, and be held by it, where Python does not look for cycles.
    """
    suspend: Any = torch._C._autograd._saved_tensors_hooks_set_tracing
    before = suspend(True)
    try:
        yield
    finally:
        suspend(before)


@contextlib.contextmanager
def uncompiled(call: Callable[..., Any]) -> Iterator[None]:
    """Have a module called as it is written, whatever parts of it `module.compile()` or `torch.compile` has compiled.

    call is the module, or a method of it. torch keeps the compiled call in an attribute of each module, and what
    `torch.compile` makes of a module is one around it, with a `forward` of its own (torch 2.11 to 2.14). Dynamo looks
    through other functions by itself.
    """
    from torch._dynamo.eval_frame import OptimizedModule

    module = getattr(call, "__self__", call)
    parts = list(module.modules()) if isinstance(module, torch.nn.Module) else []
    written: dict[tuple[torch.nn.Module, str], Any] = {}
    for part in parts:
        if isinstance(part, OptimizedModule):
            written[part, "forward"] = part._orig_mod.__call__
        elif getattr(part, "_compiled_call_impl", None) is not None:
            written[part, "_compiled_call_impl"] = None
    compiled = {(part, name): getattr(part, name) for part, name in written}
    try:
        for (part, name), as_written in written.items():
            setattr(part, name, as_written)
        yield
    finally:
        for (part, name), there in compiled.items():
            setattr(part, name, there)


def on_dynamo_reset(backend: Any) -> None:
    """Have `backend.reset()` called by the next `torch._dynamo.reset()`, as that of every backend in use."""
    from torch._dynamo.eval_frame import cached_backends

    cached_backends.setdefault(id(backend), backend)


def compile_id() -> tuple[Any, Any, Any]:
    """Which frame Dynamo is compiling, for the how-manieth time, and which of its own attempts this is.

    Three times None outside a compilation.
    """
    from torch._guards import CompileContext

    trace = CompileContext.current_trace_id()
    if trace is None:
        return None, None, None
    return trace.compile_id.frame_id, trace.compile_id.frame_compile_id, trace.attempt


def compilation_again() -> Callable[[], bool] | None:
    """What makes Dynamo compile the frame that it is compiling anew, the next time that it is called.

    The function drops the compiled code, which may be running, from those that Dynamo has for the frame. It returns
    whether it has found it. None for what is compiled ahead of time: Dynamo keeps no such code for the frame.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator, tls
    from torch._guards import CompileContext

    if getattr(tls, "current_tx", None) is None:
        return None
    code = InstructionTranslator.current_tx().output.root_tx.f_code
    current = CompileContext.current_compile_id()

    def drop() -> bool:
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list
        from torch._dynamo.guards import DeletedGuardManagerWrapper

        found = [entry for entry in _debug_get_cache_entry_list(code) if entry.compile_id == current]
        for entry in found:
            state: Any = entry.guard_manager.extra_state
            state.invalidate(entry, DeletedGuardManagerWrapper("a site is left alone"))
        return bool(found)

    return drop


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Put a text into the structured trace that tlparse reads (`TORCH_TRACE`); computed only if there is one."""
    torch._logging.trace_structured(  # type: ignore[attr-defined]
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: printable(payload()),
        expect_trace_id=False,
    )
