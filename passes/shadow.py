"""Stage 1, shadow: a record of what each Dynamo node does, in ATen. It is only read.

Dynamo's graph keeps every spelling apart: methods and functions, operators, einsum, `F.rms_norm`. Each node is run
once on the fake tensors that Dynamo left, and the ATen calls that arrive below autograd are written down. There
casts by autocast are explicit, composite functions are gone and a few dozen operators remain. The Dynamo graph itself
is not touched: a re-traced graph could lose checkpoint regions, grad modes and custom autograd functions.

A `Value` is one tensor of that record; `Value.nodes` are the Dynamo nodes that hold exactly it (none, if it lives
only inside a node). Nodes that are the same call on tensors of the same kind are run once and copied.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.guard import told
from mhc_compile.passes.aten_calls import (
    Recording,
    WritesInput,
    call_text,
    filled,
    leaves,
    map_leaves,
    name_of,
    record,
    tensors,
)
from mhc_compile.passes.report import location


@dataclass(eq=False, repr=False, slots=True)
class Value:
    """A tensor of the program: its fake tensor, the operator that makes it and those that read it."""

    meta: torch.Tensor
    shape: tuple[int, ...]
    op: Op | None = None
    nodes: list[fx.Node] = field(default_factory=list)
    users: list[Op] = field(default_factory=list)
    is_output: bool = False
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        self.numel = prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.meta.dtype


@dataclass(eq=False, repr=False, slots=True)
class Kind:
    """The common part of calls that differ only in the tensors they read: one object for all these calls."""

    # Whether a size takes part as a number; None until somebody asks.
    reads_size: bool | None = None


@dataclass(eq=False, repr=False, slots=True)
class Op:
    """One ATen call, made by a Dynamo node; sources are the tensors it reads, in the order of its arguments.

    `target` is None where the node was not looked into.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    node: fx.Node
    # ATen's operator without its overload, such as "mul"; one of others with their namespace; "" if opaque.
    name: str
    sources: tuple[Value, ...]
    kind: Kind
    state: str = ""  # that of its node in `Shadow.states`
    outs: list[Value] = field(default_factory=list)

    @property
    def out(self) -> Value:
        return self.outs[0]

    def inputs(self) -> Iterator[Value]:
        return iter(self.sources)

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)


@dataclass
class Shadow:
    """The ATen record of one graph.

    ops are in program order. states holds the grad and inference mode under which each node runs, as far as the graph
    sets them; what autocast does is in the ops. writes lists, for each node that mutates, the storages it may write.
    doubles are the nodes that hold a float64 tensor.
    """

    graph: fx.Graph
    ops: list[Op]
    values: dict[fx.Node, Any]
    position: dict[fx.Node, int]
    states: dict[fx.Node, str]
    writes: list[tuple[fx.Node, frozenset[int]]]
    doubles: set[fx.Node]

    def release(self) -> None:
        """Take the record apart: the garbage collector would need longer than all the passes for its cycles."""
        for op in self.ops:
            for value in op.outs:
                value.op = None
                value.users.clear()


def trace(graph: fx.Graph, errors: list[str] | None = None) -> Shadow:
    """Write down the ATen record of `graph`, whose nodes carry `meta["example_value"]`.

    A node that cannot be run again is not looked into; why is added to `errors`.
    """
    return _Tracer(graph, [] if errors is None else errors).run()


class SizeModel:
    """Plain integers for symbolic sizes: every symbol is given a prime of its own.

    Hints would let a batch of 4 pass for the 4 streams. With primes a dimension can only be mistaken for another
    if its size is a constant of the program.
    """

    _FIRST = 10_007

    def __init__(self) -> None:
        self._primes: dict[Any, int] = {}

    def __call__(self, size: Any) -> int:
        if isinstance(size, int):
            return size
        expr = compat.symbolic_expression(size)
        if expr is None:
            return int(size)
        symbols = sorted(expr.free_symbols, key=str)
        return int(expr.subs({symbol: self._prime(symbol) for symbol in symbols}))

    def _prime(self, symbol: Any) -> int:
        if symbol not in self._primes:
            candidate = max(self._primes.values(), default=self._FIRST) + 2
            while any(candidate % d == 0 for d in range(3, int(candidate**0.5) + 1, 2)):
                candidate += 2
            self._primes[symbol] = candidate
        return self._primes[symbol]


class _Tracer:
    def __init__(self, graph: fx.Graph, errors: list[str]) -> None:
        self.graph = graph
        self.errors = errors
        self.fake_mode = compat.common_fake_mode(map(compat.example, graph.nodes))
        self.sizes = SizeModel()
        self.ops: list[Op] = []
        self.values: dict[fx.Node, Any] = {}
        self.writes: list[tuple[fx.Node, frozenset[int]]] = []
        self.doubles: set[fx.Node] = set()
        self.wrappers: set[fx.Node] = set()
        # Tensors whose shape the program has yet to change in place: Dynamo has them in their last shape alone.
        self.reshaped: Counter[int] = Counter(
            id(tensor) for node in graph.nodes if _reshapes(node) for tensor in tensors_of(node)
        )
        self.recorded: dict[tuple[Any, ...], _Recorded | None] = {}
        self.tensor_kinds: dict[int, Kind] = {}
        self.kinds: dict[str, Kind] = {}
        # Dynamo restores at the end of a graph what it found at the beginning.
        changes = [n for n in graph.nodes if compat.changes_global_state(n) and compat.state_change(n) == "grad"]
        self.grad_mode = str(changes[-1].args) if changes else ""
        self.inference_modes = 0

    def run(self) -> Shadow:
        position = {node: i for i, node in enumerate(self.graph.nodes)}
        states: dict[fx.Node, str] = {}
        regions, quiet = compat.autocast_regions(), compat.quiet_shape_env(self.fake_mode)
        # Casts that autocast makes show up only if nodes are run under it too.
        with torch.no_grad(), regions as follow_autocast, quiet:
            self.state = self._state()
            for node in self.graph.nodes:
                if compat.changes_global_state(node):
                    self._follow(node)
                    follow_autocast(node)
                    self.state = self._state()
                states[node] = self.state
                self._visit(node)
        for value in _values(self.graph_outputs):
            value.is_output = True
        return Shadow(self.graph, self.ops, self.values, position, states, self.writes, self.doubles)

    def _state(self) -> str:
        self.autocast = compat.autocast_state()
        return f"{self.grad_mode} {self.inference_modes}"

    def _follow(self, node: fx.Node) -> None:
        """Keep track of grad and inference mode."""
        change = compat.state_change(node)
        if change == "grad":
            self.grad_mode = str(node.args)
        elif change == "enter_inference":
            self.inference_modes += 1
        elif change == "exit_inference":
            self.inference_modes -= 1

    def _visit(self, node: fx.Node) -> None:
        if node.op == "output":
            self.graph_outputs = self._resolve(node.args)
            return
        example = compat.example(node)
        held = (example,) if isinstance(example, torch.Tensor) else tuple(tensors(example))
        for tensor in held:
            if tensor.dtype is torch.float64:
                self.doubles.add(node)
            if compat.is_wrapper(tensor):
                self.wrappers.add(node)
        if node.op not in ("call_function", "call_method"):
            self._bind(node, map_leaves(self._fresh, example))
            return
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            container = self.values.get(node.args[0])
            if isinstance(container, (tuple, list)) and isinstance(node.args[1], int):
                self._bind(node, container[node.args[1]])
                return
        if compat.may_mutate(node):
            if _reshapes(node):
                self.reshaped -= Counter(map(id, held))
            self._mutating(node, example)
        elif (function := compat.autograd_function(node)) is not None:
            result = map_leaves(self._fresh, example)
            self._add(self._op(function, self._resolve(node.args[2:]), {}, node), result)
            self._bind(node, result)
        elif (
            not compat.is_plain_call(node)
            or not held
            or any(map(compat.is_batched, held))
            or self._wraps(node)
            or self._is_reshaped(node)
        ):
            self._opaque(node, example)
        else:
            self._look_into(node, held, example)

    def _wraps(self, node: fx.Node) -> bool:
        """Whether a node makes tensors of a tensor subclass, or the other way round, as `DTensor.to_local` does.

        What it makes is a value of its own: nothing outside the node holds what is in the subclass.
        """
        if not self.wrappers:
            return False
        given = {one in self.wrappers for one in node.all_input_nodes}
        return len(given) == 1 and given != {node in self.wrappers}

    def _is_reshaped(self, node: fx.Node) -> bool:
        """Whether a node makes or reads a tensor that has another shape here than Dynamo has of it."""
        if not self.reshaped:
            return False
        examples = (compat.example(node), _examples((node.args, node.kwargs)))
        return any(id(tensor) in self.reshaped for tensor in tensors(examples))

    def _mutating(self, node: fx.Node, example: Any) -> None:
        keys = (compat.storage_of(t) for t in tensors(_examples((node.args, node.kwargs))))
        self.writes.append((node, frozenset(k for k in keys if k is not None)))
        self._opaque(node, example)

    def _opaque(self, node: fx.Node, example: Any) -> None:
        op = self._op(None, self._resolve(node.args), self._resolve(node.kwargs), node)
        result = map_leaves(self._fresh, example)
        self._add(op, result)
        self._bind(node, result)

    def _look_into(self, node: fx.Node, held: Iterable[torch.Tensor], example: Any) -> None:
        inputs: dict[Value, int] = {}
        key: list[Any] = [node.op, node.target, self.autocast]
        self._describe(node.args, inputs, key)
        if node.kwargs:
            self._describe(node.kwargs, inputs, key)
        known = tuple(key)
        if known not in self.recorded:
            # What has no elements, such as the rest of a sequence of whole chunks, is no part of any operator.
            empty = not any(prod(self._shape(tensor)) for tensor in held)
            try:
                self.recorded[known] = _UNREADABLE if empty else self._record(node, list(inputs))
            except WritesInput:
                self.recorded[known] = None
            except Exception as error:  # it stays opaque, and so is never rewritten
                if not compat.depends_on_data(error):
                    told(error, f"{spelled(node)} is not looked into", self.errors, location(node).short)
                self.recorded[known] = _UNREADABLE
        found = self.recorded[known]
        if found is None:
            self._mutating(node, example)
        elif found is _UNREADABLE:
            self._opaque(node, example)
        else:
            self._bind(node, self._replay(found, node, list(inputs)))

    def _replay(self, found: _Recorded, node: fx.Node, values: list[Any]) -> Any:
        """Ops and values for one node, from the recording of an identical one; what the node returns."""
        values += [None] * (len(found.shapes) - len(values))
        for call, kind in zip(found.recording.calls, found.kinds, strict=True):
            sources = tuple([values[i] for i in call.sources])
            args, kwargs = filled(call.args, values), filled(call.kwargs, values)
            op = Op(call.target, args, kwargs, node, call.name, sources, kind, self.state)
            for slot in call.made:
                made = Value(found.recording.tensors[slot.index], found.shapes[slot.index], op)
                values[slot.index] = made
                op.outs.append(made)
            self._add_use(op)
        return filled(found.recording.result, values)

    def _record(self, node: fx.Node, inputs: list[Value]) -> _Recorded:
        """Run one node on fake tensors."""
        places = {value: i for i, value in enumerate(inputs)}

        def run(stand_ins: list[torch.Tensor]) -> Any:
            resolved = (self._resolve(node.args), self._resolve(node.kwargs))
            args, kwargs = map_leaves(
                lambda leaf: stand_ins[places[leaf]] if isinstance(leaf, Value) else leaf, resolved
            )
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return node.target(*args, **kwargs)  # type: ignore[operator]

        found = record(run, [value.meta for value in inputs], self.fake_mode or contextlib.nullcontext())
        _check_record(found, node)
        shapes = [value.shape for value in inputs]
        shapes += [self._shape(tensor) for tensor in found.tensors[len(inputs) :]]
        return _Recorded(found, [self._kind(call.text) for call in found.calls], shapes)

    def _describe(self, tree: Any, inputs: dict[Value, int], key: list[Any]) -> None:
        """Extend `key` by what distinguishes this argument of a call: a tensor's kind, and which of `inputs`."""
        leaf: Any = self.values.get(tree) if isinstance(tree, fx.Node) else tree
        kind = type(leaf)
        if kind is Value:
            key += (inputs.setdefault(leaf, len(inputs)), self._tensor_kind(leaf.meta))
        elif kind is int or kind is str or leaf is None:
            key += (kind, leaf)
        elif isinstance(leaf, (tuple, list)):
            key += (kind, len(leaf))
            for item in leaf:
                self._describe(item, inputs, key)
        elif isinstance(leaf, dict):
            key += (kind, len(leaf), *leaf)
            for item in leaf.values():
                self._describe(item, inputs, key)
        elif kind is slice:
            key.append(kind)
            for item in (leaf.start, leaf.stop, leaf.step):
                self._describe(item, inputs, key)
        else:
            key += (kind, str(leaf))

    def _tensor_kind(self, meta: torch.Tensor) -> Kind:
        # Every tensor asked for is held by a value, so that no two ever have one identity.
        found = self.tensor_kinds.get(id(meta))
        if found is None:
            strides = tuple(meta.stride()) if meta.layout == torch.strided else None
            found = self._kind(str((tuple(meta.shape), strides, meta.dtype, meta.device, type(meta))))
            self.tensor_kinds[id(meta)] = found
        return found

    def _kind(self, text: str) -> Kind:
        return self.kinds.setdefault(text, Kind())

    def _resolve(self, arguments: Any) -> Any:
        return fx.node.map_arg(arguments, lambda n: self.values.get(n, compat.example(n)))

    def _shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(self.sizes(s) for s in tensor.shape)

    def _fresh(self, leaf: Any) -> Any:
        """A value for a tensor. A DTensor's has the global shape: operators do the same however tokens are split."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        meta = compat.as_plain(leaf)
        return Value(meta, self._shape(meta))

    def _op(self, target: Any, args: Any, kwargs: Any, node: fx.Node) -> Op:
        sources = tuple(_values((args, kwargs)))
        if target is None:
            return Op(None, args, kwargs, node, "", sources, Kind(), self.state)
        kind = self._kind(call_text(target, args, kwargs, Value))
        return Op(target, args, kwargs, node, name_of(target), sources, kind, self.state)

    def _add(self, op: Op, result: Any) -> None:
        op.outs = list(_values(result))
        for value in op.outs:
            value.op = op
        self._add_use(op)

    def _add_use(self, op: Op) -> None:
        self.ops.append(op)
        for value in op.sources if len(op.sources) < 2 else dict.fromkeys(op.sources):
            value.users.append(op)

    def _bind(self, node: fx.Node, result: Any) -> None:
        self.values[node] = result
        if isinstance(result, Value):
            result.nodes.append(node)


@dataclass(frozen=True)
class _Recorded:
    """A recording, its calls' kinds and the shapes of its tensors."""

    recording: Recording
    kinds: list[Kind]
    shapes: list[tuple[int, ...]]


def _check_record(found: Recording, node: fx.Node) -> None:
    """Raise RuntimeError unless a node returns, when it is run again, what it returned to Dynamo."""
    again = filled(found.result, found.tensors)
    for one, other in zip(leaves(again), leaves(compat.example(node)), strict=True):
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            continue
        sizes = zip(one.shape, other.shape, strict=True) if one.dim() == other.dim() else [(0, 1)]
        if one.dtype != other.dtype or not all(compat.may_be_equal(a, b) for a, b in sizes):
            raise RuntimeError(
                f"run again, {spelled(node)} returns {list(one.shape)} of {one.dtype} in place of {list(other.shape)} "
                f"of {other.dtype}"
            )


# Methods that change the shape of what they are called on.
_RESHAPES = {
    *("unsqueeze_", "squeeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "as_strided_", "resize_", "resize_as_"),
}


def _reshapes(node: fx.Node) -> bool:
    """Whether a node changes the shape of what it is called on: a method, or an operator such as unsqueeze_.default."""
    return spelled(node).partition(".")[0] in _RESHAPES


_UNREADABLE = _Recorded(Recording((), None, []), [], [])


def spelled(node: fx.Node) -> str:
    """The name of what a program calls to make a node, such as "dropout"."""
    return str(getattr(node.target, "__name__", node.target))


def tensors_of(node: fx.Node) -> Iterator[torch.Tensor]:
    """The fake tensors that a Dynamo node holds."""
    return tensors(compat.example(node))


def memory_of(*nodes: fx.Node) -> set[Any]:
    """The memory of nodes, by Dynamo's example tensors: only these share memory as the program's tensors do."""
    return {key for node in nodes for tensor in tensors_of(node) if (key := compat.storage_of(tensor)) is not None}


def _examples(arguments: Any) -> Any:
    return fx.node.map_arg(arguments, lambda n: compat.example(n))


def _values(tree: Any) -> Iterator[Value]:
    return (leaf for leaf in leaves(tree) if isinstance(leaf, Value))
