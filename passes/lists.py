"""Lists of streams become tensors: where a program keeps n tensors [..., C], the new graph stacks them to [..., n, C].

    xs = [p[i] * f + sum(h[i][j] * xs[j] ...) ...]   is   xs = stack([p[i] * f + sum(h[i][j] * xs[j] ...) ...]).unbind()

The later stages read such a stack as any other tensor of streams, and an operator writes it. Any other stack would be
a copy. So a list is stacked if that costs nothing: an operator or a pointwise kernel writes it, or the program stacks
it anyway. Otherwise the write of the list is left, and told.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.budget import OutOfSteps, Steps
from mhc_compile.guard import guard
from mhc_compile.passes.called import INSERTED
from mhc_compile.passes.other_strides import gradients_are_off, seeing
from mhc_compile.passes.plan import AggregateSite, CombineSite, Declined, Plan, surface
from mhc_compile.passes.plan.gradients import is_reached, reached_by_gradients, requires_gradient
from mhc_compile.passes.plan.part_writes import to_some
from mhc_compile.passes.recognise.concatenation import TOGETHER, Together, put_together
from mhc_compile.passes.recognise.layout import is_movement, is_pointwise, origin
from mhc_compile.passes.recognise.lists import ListRead, ListWrite, Streams, list_writes
from mhc_compile.passes.recognise.reader import Reader
from mhc_compile.passes.report import in_words
from mhc_compile.passes.shadow import Op, Shadow, Value, memory_of, tensors_of

KEEP = "keep the streams in one tensor [..., n, C]"
LEAVE = f"the new streams leave the graph as separate tensors, so stacking them would cost a copy: {KEEP}"
COME = f"the streams enter the graph as separate tensors, so stacking them would cost a copy: {KEEP}"
WRITTEN = f"the program writes in place into one of the streams in the list: {KEEP}"
GATES_WRITTEN = "the program writes in place into one of the gates in the list: keep the gates in one tensor"
GATES_LEAVE = "views of the gates in the list leave the graph, and would share memory: keep the gates in one tensor"
GRADIENTS_OFF = (
    "gradients are off where the last tensor of a list is made and on where the list is read, so a stack of the list "
    "would lose them: make the whole list in one mode"
)
SEEN = f"needs one of the new streams in the list as it is, so stacking them would cost a copy: {KEEP}"
ZEROS = (
    "gradients reach only some of the new streams in the list; parameters of the others would get zeros in place of no "
    f"gradient: {KEEP}"
)
DTYPES = f"the streams in the list have different dtypes, and a stack has one: {KEEP}"
NO_STACK = f"torch does not stack these tensors, or does not take the stack apart: {KEEP}"
SAME = "all streams in the list are one tensor, which Inductor reads once; the operator would read n copies of it"
STREAMS_AT, GATES_AT = -2, 0
# How often lists are stacked, each time without those that no operator wrote. Each time the whole graph is recorded.
MOST_ROUNDS = 4


class Lists:
    """The lists of streams in one record: which are stacked, and which writes are left, with the reasons."""

    def __init__(self, shadow: Shadow, errors: list[str]) -> None:
        self._shadow = shadow
        self._errors = errors
        self._reader = Reader()
        self._writes: list[ListWrite] = []
        self._reads: list[ListRead] = []
        with guard("lists of streams are left as they are", errors):
            self._writes, self._reads = list_writes(shadow.ops)
        self._left = {
            write: f"the streams are a list, and {to_some(len(write.old))}" for write in self._writes if write.to_some
        }
        self._rounds = Steps("times that lists of streams are stacked", MOST_ROUNDS)
        # What the writes' new streams are stacked by, and where the graph's own nodes are, in the graph made last.
        self._stacks: dict[Streams, fx.Node] = {}
        self._copies: dict[fx.Node, fx.Node] = {}
        # Behind which of the graph's own nodes, by their positions, those are that were inserted.
        self._behind: dict[fx.Node, int] = {}
        # Examples of the parts of stacks, which each choice needs.
        self._known_parts: dict[tuple[Streams, int], Any] = {}
        # The nodes that keep their tensors, and read no part of a stack.
        self._apart: set[fx.Node] = set()

    def graph(self) -> fx.Graph | None:
        """The graph in which the chosen lists are stacked; None if no list is stacked."""
        with guard("lists of streams are left as they are", self._errors):
            return self._stacked()
        self._writes, self._left, self._stacks, self._copies = [], {}, {}, {}
        return None

    def _stacked(self) -> fx.Graph | None:
        self._stacks, self._copies, self._behind = {}, {}, {}
        wanted, gates = self._chosen() if self._writes else ([], [])
        if not wanted and not gates:
            return None
        try:
            self._rounds.take()
        except OutOfSteps as error:
            reason = f"the streams are a list, and {error}: {KEEP}"
            self._left |= {write: reason for write in self._writes if write not in self._left}
            return None
        new, self._copies = compat.copy_graph(self._shadow.graph)
        self._apart = {self._copies[node] for node in self._apart}
        for streams in wanted:
            self._stacks[streams] = self._stack(new, streams, STREAMS_AT)
        for some in gates:
            self._stack(new, some, GATES_AT)
        return new

    def are_made(self, plan: Plan) -> bool:
        """Whether operators make every list that was stacked. If not, the next round leaves those lists out."""
        made = _made(plan)
        reasons = {entry.node: entry.reason for entry in plan.declined}
        places = {write: self._place(write) for write in self._writes if write not in self._left}
        failed = {write: place for write, place in places.items() if place not in made}
        for write, place in failed.items():
            reason = reasons.get(place, "this was not recognised as one write of all streams")
            self._left[write] = f"the streams are a list, and {reason}: {KEEP}"
        return not failed

    def _place(self, write: ListWrite) -> fx.Node:
        """The node that stacks the new streams of a write, in the graph made last."""
        if write.new in self._stacks:
            return self._stacks[write.new]
        return self._copy(write.new[0].users[0].node)

    def _copy(self, node: fx.Node) -> fx.Node:
        """What stands for one of the graph's own nodes in the graph made last."""
        return self._copies.get(node, node)

    def left(self) -> list[fx.Node]:
        """Where the writes that are left end, in the graph made last."""
        return [self._copy(write.new[-1].nodes[-1]) for write in self._left]

    def tell(self, plan: Plan) -> None:
        """Add the writes that are left to a plan, in place of findings about their sums and products.

        Each new stream by itself looks like a read of all old streams. An operator for each would read them n times.
        """
        made = _made(plan)
        for (write, reason), node in zip(self._left.items(), self.left(), strict=True):
            inner = {self._copy(op.node) for op in _within(write)}
            plan.declined[:] = [d for d in plan.declined if d.what == "sinkhorn" or d.node not in inner]
            plan.sites[:] = [
                s for s in plan.sites if not (isinstance(s, AggregateSite) and s.aggregate.op.node in inner)
            ]
            # Unless an operator makes a stack that the program itself has.
            if made.isdisjoint(self._copy(op.node) for op in write.new[0].users):
                plan.declined.append(Declined("expand_combine", reason, node))

    def _chosen(self) -> tuple[list[Streams], list[Streams]]:
        """The lists of streams and those of gates that are stacked. Also finds the nodes that keep their tensors.

        What they keep is in memory twice. New streams would be computed twice, so a write that makes them is left.
        """
        while True:
            wanted, gates = self._wanted(), list(self._gates())
            parts: dict[fx.Node, list[tuple[int, Any]]] = {}
            for values, at in [*((some, STREAMS_AT) for some in wanted), *((some, GATES_AT) for some in gates)]:
                last = self._shadow.position[self._last(self._nodes(values))]
                for value, part in zip(values, self._parts(values, at), strict=True):
                    for node in value.nodes:
                        parts.setdefault(node, []).append((last, part))
            self._apart = seeing(self._shadow, parts)
            new = [write for write in self._writes if write not in self._left and write.new in wanted]
            left = {write: reason for write in new if (reason := self._why_apart(write))}
            if not left:
                return wanted, gates
            self._left |= left

    def _why_apart(self, write: ListWrite) -> str:
        """Why the new streams of a write are no parts of a stack for all that read them behind it."""
        last = self._shadow.position[self._last(self._nodes(write.new))]
        users = [user for value in write.new for node in value.nodes for user in node.users if user in self._apart]
        late = next((user for user in users if self._shadow.position[user] > last), None)
        return "" if late is None else f"{in_words(late)} {SEEN}"

    def _wanted(self) -> list[Streams]:
        """The lists to be stacked, in program order; writes that this leaves get their reasons."""
        wanted: dict[Streams, None] = {}
        for write in self._writes:
            if write in self._left:
                continue
            stacked = self._is_stacked(write.new)
            reason = (
                self._why_not_old(write, wanted)
                or ("" if stacked else self._why_not_new(write))
                or next(filter(None, map(self._why_not_gates, self._gates_apart(write))), "")
            )
            if reason:
                self._left[write] = reason
                continue
            if not self._is_one_tensor(write.old):
                wanted[write.old] = None
            if not stacked:
                wanted[write.new] = None
        return list(wanted)

    def _why_not_old(self, write: ListWrite, wanted: Iterable[Streams]) -> str:
        old = write.old
        if len(set(old)) == 1:
            return f"{SAME}: expand it to one tensor [..., n, C]"
        if old in wanted or self._is_one_tensor(old):
            return ""
        if self._is_written(old):
            return WRITTEN
        if any(map(_leaves, old)) or not (all(map(_can_go_anywhere, old)) or self._is_put_together(old)):
            return COME
        return self._why_no_stack(old, STREAMS_AT)

    def _why_not_new(self, write: ListWrite) -> str:
        if self._is_written(write.new):
            return WRITTEN
        if any(map(_leaves, write.new)):
            return LEAVE
        if self._gives_zeros(write.new):
            return ZEROS
        return self._why_no_stack(write.new, STREAMS_AT)

    def _why_not_gates(self, gates: Streams) -> str:
        """What returns a gate itself keeps reading this gate, so only views of gates may not leave the graph."""
        if self._is_written(gates):
            return GATES_WRITTEN
        return GATES_LEAVE if any(map(_views_leave, gates)) else self._why_no_stack(gates, GATES_AT)

    def _why_no_stack(self, values: Streams, at: int) -> str:
        if len({value.dtype for value in values}) > 1:
            return DTYPES
        if not self._can_be_stacked(values, at):
            return NO_STACK
        return GRADIENTS_OFF if self._loses_gradients(values) else ""

    def _gives_zeros(self, values: Streams) -> bool:
        """Whether gradients come back to some values, and others are made of what gets no gradient but could."""
        pending = [node for value in values if not is_reached(self._reached, value) for node in value.nodes]
        if all(not is_reached(self._reached, value) for value in values):
            return False
        seen = set(self._reached)
        while pending:
            node = pending.pop()
            if node not in seen and any(map(compat.requires_gradient, tensors_of(node))):
                if node.op in ("placeholder", "get_attr"):
                    return True
                pending += node.all_input_nodes
            seen.add(node)
        return False

    @functools.cached_property
    def _reached(self) -> set[fx.Node]:
        return reached_by_gradients(self._shadow)

    def _loses_gradients(self, values: Streams) -> bool:
        """Whether gradients come back to values that would be stacked where gradients are off."""
        states, position = self._shadow.states, self._shadow.position
        last = self._last(self._nodes(values))
        return gradients_are_off(states[last]) and any(
            not gradients_are_off(states[reader]) and position[reader] > position[last]
            for value in filter(requires_gradient, values)
            for node in value.nodes
            for reader in node.users
        )

    def _can_be_stacked(self, values: Streams, at: int) -> bool:
        """Whether torch stacks values and takes the stack apart, which it does not for every DTensor."""
        return self._parts(values, at) is not None

    def _parts(self, values: Streams, at: int) -> Any:
        if (values, at) not in self._known_parts:
            nodes = self._nodes(values)
            on = not gradients_are_off(self._shadow.states[self._last(nodes)])
            stack = compat.on_examples(torch.stack, nodes, at, gradients=on)
            parts = None if stack is None else compat.on_examples("unbind", stack, at, gradients=on)
            self._known_parts[values, at] = parts
        return self._known_parts[values, at]

    def _nodes(self, values: Streams) -> list[fx.Node]:
        return [min(value.nodes, key=self._shadow.position.__getitem__) for value in values]

    def _is_one_tensor(self, streams: Streams) -> bool:
        """Whether the streams are parts of one tensor, evenly apart."""
        whole = Together(streams, len(streams[0].shape) - 1, True).joined([self._reader.views(x) for x in streams])
        numel = sum(x.numel for x in streams)
        return any(s.base.numel >= numel and s.layout.distinct() == numel for s in whole)

    def _is_stacked(self, streams: Streams) -> bool:
        """Whether the program itself stacks the streams, and reads them in no other way."""
        users = {op for x in streams for op in x.users}
        return len(users) == 1 and next(iter(users)).name in TOGETHER and not any(x.is_output for x in streams)

    def _is_put_together(self, streams: Streams) -> bool:
        for op in streams[0].users:
            whole = put_together(op) if op.name in TOGETHER else None
            if whole is not None and tuple(origin(piece)[0] for piece in whole.pieces) == tuple(
                origin(x)[0] for x in streams
            ):
                return True
        return False

    def _is_written(self, streams: Streams) -> bool:
        written = {key for _, keys in self._shadow.writes for key in keys}
        return bool(written) and any(not written.isdisjoint(memory_of(*x.nodes)) for x in streams)

    def _gates(self) -> Iterator[Streams]:
        """Gates of stacked streams that are tensors of their own: they are stacked, too."""
        stacked: set[Value] = set()
        some = [gates for write in self._writes if write not in self._left for gates in self._gates_apart(write)]
        some += [read.gates for read in self._reads if self._are_apart(read.gates)]
        for gates in some:
            parts = any(source.base in stacked for gate in gates for source in self._reader.views(gate))
            if not parts and not self._why_not_gates(gates):
                stacked.update(gates)
                yield gates

    def _gates_apart(self, write: ListWrite) -> Iterator[Streams]:
        """The gates of a write, as far as they are tensors of their own."""
        candidates: list[Iterable[Value | None]] = []
        columns = [self._common(gates) for gates in write.res]
        rows = [self._common(gates) for gates in zip(*write.res, strict=True)] if len(write.res) > 1 else []
        if None not in columns:
            candidates.append(columns)
        if rows and None in columns and None not in rows:
            candidates.append(rows)
        elif (rows and None in columns) or len(write.res) == 1:
            candidates.append([gate for gates in zip(*write.res, strict=True) for gate in gates])
        candidates.append(write.post)
        for candidate in candidates:
            gates = tuple(gate for gate in candidate if gate is not None)
            if gates and self._are_apart(gates):
                yield gates

    def _are_apart(self, gates: Streams) -> bool:
        """Whether gates are tensors of one kind that have no tensor in common."""
        alike = len({(gate.shape, gate.dtype) for gate in gates}) == 1 and all(gate.nodes for gate in gates)
        return alike and not set.intersection(*({x.base for x in self._reader.views(gate)} for gate in gates))

    def _common(self, gates: Iterable[Value]) -> Value | None:
        """The nearest tensor of the program that these gates are parts of."""
        first, *others = [[source.base for source in self._reader.views(gate)] for gate in gates]
        return next((base for base in first if base.nodes and all(base in other for other in others)), None)

    def _last(self, held: Iterable[fx.Node]) -> fx.Node:
        """The node behind which some others are stacked: the last of them, or what the graph begins with."""
        last = max(held, key=self._shadow.position.__getitem__)
        if last.op in ("placeholder", "get_attr"):
            last = next(n for n in self._shadow.graph.nodes if n.next.op not in ("placeholder", "get_attr"))
        return last

    def _stack(self, graph: fx.Graph, values: Streams, at: int) -> fx.Node:
        """Stack values after the last of them; later code reads the parts of the stack."""
        position = self._shadow.position
        held = self._nodes(values)
        last = self._last(held)
        nodes = [self._copies[node] for node in held]
        users = [[u for n in v.nodes for u in self._copies[n].users] for v in values]
        later = {self._copies[node] for node, place in position.items() if place > position[last]}
        with graph.inserting_after(self._copies[last]):
            stack = graph.call_function(torch.stack, (nodes, at))
        with graph.inserting_after(stack):
            parts = graph.call_method("unbind", (stack, at))
        self._describe(stack, last)
        self._describe(parts, last)
        part = parts
        for index, (value, readers) in enumerate(zip(values, users, strict=True)):
            with graph.inserting_after(part):
                part = graph.call_function(operator.getitem, (parts, index))
            self._describe(part, last)
            self._behind |= dict.fromkeys((stack, parts, part), position[last])
            for reader in dict.fromkeys(readers):
                # Of nodes inserted after the same node, the first one inserted comes last.
                if reader in self._apart:
                    continue
                if reader in later or self._behind.get(reader, -1) >= position[last]:
                    for node in value.nodes:
                        if reader is not stack and reader.op != "output":
                            reader.replace_input_with(self._copies[node], part)
        return stack

    def _describe(self, node: fx.Node, like: fx.Node) -> None:
        """Give a new node the example value that later stages rely on, and the program's line."""
        source = node.all_input_nodes[0]
        node.meta[compat.example_key(source)] = (
            compat.example(source)[node.args[1]]
            if node.target is operator.getitem
            else compat.on_examples(node.target, *node.args, gradients=not gradients_are_off(self._shadow.states[like]))
        )
        node.meta[INSERTED] = True
        node.meta |= {key: like.meta[key] for key in ("stack_trace", "nn_module_stack") if key in like.meta}


def _within(write: ListWrite) -> set[Op]:
    """The operators that make the new streams from the old ones."""
    found, pending = set(write.products), list(write.new)
    for value in pending:
        op = value.op if value not in (write.f, *write.old) else None
        if op is not None and op not in found and (op.name == "add" or is_movement(op)):
            found.add(op)
            pending += op.sources
    return found


def _can_go_anywhere(value: Value) -> bool:
    """Whether one of Inductor's kernels computes a value, so that it can write the value to any place."""
    op = value.op
    while op is not None and op.target is not None and is_movement(op) and len(op.sources) == 1:
        op = op.sources[0].op if op.name not in ("clone", "_to_copy") else op
        if op is not None and op.name in ("clone", "_to_copy"):
            return True
    return op is not None and is_pointwise(op)


def _made(plan: Plan) -> set[fx.Node]:
    """What operators write."""
    return {node for site in plan.sites if isinstance(site, CombineSite) for node in surface(site.combine.out).nodes}


def _leaves(value: Value) -> bool:
    """Whether a value, or a view of it, leaves the graph."""
    return value.is_output or _views_leave(value)


def _views_leave(value: Value) -> bool:
    views = (op for op in value.users if is_movement(op) or op.name == "detach" or _may_view(op, value))
    return any(_leaves(out) for op in views for out in op.outs)


def _may_view(op: Op, value: Value) -> bool:
    """Whether an operator that nobody knows makes a tensor in the memory of a value, as `x.data` is."""
    return op.target is None and not memory_of(op.node).isdisjoint(memory_of(*value.nodes))
