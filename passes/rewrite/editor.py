"""Inserting calls into the new graph, and putting them in the place of the program's values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.plan import Decline, surface
from mhc_compile.passes.recognise.layout import keeps_order
from mhc_compile.passes.record import map_leaves
from mhc_compile.passes.rewrite.copies import Copies
from mhc_compile.passes.shadow import Shadow, Value, tensors_of


class Editor:
    """Inserts calls in front of `anchor`, with the example values that later stages rely on."""

    def __init__(self, copies: Copies, shadow: Shadow) -> None:
        self.graph = copies.graph
        self.copies = copies
        self.shadow = shadow
        self.anchor: fx.Node | None = None
        self.operands: list[fx.Node] = []
        self.examples: dict[Any, Any] = {}

    def _node(self, value: Value) -> fx.Node:
        return min(value.nodes, key=self.shadow.position.__getitem__)

    def _visible(self, value: Value) -> fx.Node:
        """A node that holds the value's elements in order, possibly in another float type or shape."""
        return self._held(value)[1]

    def _held(self, value: Value) -> tuple[Value, fx.Node]:
        """As `_visible`, with the value that the node shows."""
        pending = [self._surfaced(value), value]
        while pending:
            current = pending.pop(0)
            if current.nodes:
                return current, self.copies.current(self._node(current))
            pending += [op.out for op in current.users if keeps_order(op)]
        raise Decline("an operand is not a value of its own in the program")

    def _surfaced(self, value: Value) -> Value:
        try:
            return surface(value)
        except Decline:
            return value

    def _shaped(self, node: fx.Node, shape: Sequence[Any]) -> fx.Node:
        have = compat.example(node).shape
        if len(have) == len(shape) and all(compat.same_size(a, b) for a, b in zip(have, shape, strict=True)):
            return node
        symbolic = [d for d, size in enumerate(shape) if not isinstance(size, int)]
        # One size may be left for reshape to find, and that is one that no input has: a product of symbolic sizes.
        left = next((d for d in symbolic if self._dimension(shape[d]) is None), symbolic[-1] if symbolic else None)
        sizes = [
            size if isinstance(size, int) else -1 if d == left else self._size(size) for d, size in enumerate(shape)
        ]
        return self._call("reshape", node, *sizes)

    def _size(self, size: Any) -> fx.Node:
        """A node for a symbolic size."""
        found = self._dimension(size)
        if found is None:
            raise Decline("a symbolic size is not the size of any input")
        node, d = found
        return node if d is None else self._call("size", node, d)

    def _dimension(self, size: Any) -> tuple[fx.Node, int | None] | None:
        """An input of the graph or of the site that has the size as a dimension, and which, or that is the size."""
        node: fx.Node
        for node in (*self.graph.find_nodes(op="placeholder"), *self.operands):
            example = compat.example(node)
            if isinstance(example, torch.SymInt) and compat.same_size(example, size):
                return node, None
            for d, have in enumerate(example.shape if isinstance(example, torch.Tensor) else ()):
                if not isinstance(have, int) and compat.same_size(have, size):
                    return node, d
        return None

    def _item(self, call: fx.Node, index: int) -> fx.Node:
        return self._call(operator.getitem, call, index)

    def _operator(self, name: str, first: fx.Node, /, *others: fx.Node | None, **kwargs: Any) -> fx.Node:
        """Call one of our operators. Checking its arguments takes long, so it is done once for all calls alike."""
        target = getattr(torch.ops.mhc, name).default
        args = (first, *others)
        key = (name, str(kwargs), tuple(_kind(compat.example(arg)) if arg is not None else None for arg in args))
        known = self.examples.get(key)
        if known is None:
            try:
                node = self._call(target, *args, **kwargs)
            except (TypeError, ValueError) as error:  # the operator's own checks say what a user can act on
                raise Decline(str(error)) from error
            self.examples[key] = compat.example(node)
            return node
        return self._call(target, *args, **kwargs, example=map_leaves(compat.another_fake, known))

    def _call(self, target: Callable[..., Any] | str, /, *args: Any, example: Any = None, **kwargs: Any) -> fx.Node:
        """Insert a call in front of the anchor, with the example value that later stages rely on."""
        assert self.anchor is not None
        with self.graph.inserting_before(self.anchor):
            if isinstance(target, str):
                node = self.graph.call_method(target, args, kwargs)
            else:
                node = self.graph.call_function(target, args, kwargs)
        if example is None:
            values, options = fx.node.map_arg((args, kwargs), compat.example)
            with torch.enable_grad(), compat.fake_mode_of(compat.example(self.anchor)):
                example = (
                    getattr(values[0], target)(*values[1:], **options)
                    if isinstance(target, str)
                    else target(*values, **options)
                )
        node.meta[compat.example_key(self.anchor)] = example
        self.copies.epochs[node] = self.copies.epochs[self.anchor]
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in self.anchor.meta:
                node.meta[key] = self.anchor.meta[key]
        return node

    def _replace(self, value: Value, new: fx.Node) -> None:
        """Put `new` in the place of every node that holds the value, with that value's type, shape and strides."""
        for old in value.nodes:
            node = self.copies[old]
            example = compat.example(node)
            fitted = new
            if compat.example(fitted).dtype != example.dtype:
                fitted = self._call("to", fitted, example.dtype)
            fitted = self._shaped(fitted, example.shape)
            if compat.example(fitted).stride() != example.stride():
                fitted = self._restrided(fitted, example, node)
            node.replace_all_uses_with(fitted)
            self.copies.replaced[node] = fitted

    def _restrided(self, node: fx.Node, like: torch.Tensor, old: fx.Node) -> fx.Node:
        """A copy with the strides of `like`, a tensor whose dimensions are dense in some order."""
        order = sorted(range(like.dim()), key=lambda d: (-int(compat.hint(like.stride(d))), d))
        back = [order.index(d) for d in range(like.dim())]
        if order != back or order != sorted(order):
            node = self._call("contiguous", self._call("permute", node, *order))
            node = self._call("permute", node, *back)
        else:
            node = self._call("contiguous", node)
        if compat.example(node).stride() == like.stride():
            return node
        if not like.is_contiguous() and self._leaves_the_graph(old):
            raise Decline("its result has strides that the operators do not produce")
        return self._call("contiguous", node)  # which any view of the strided tensor is a view of, too

    def _leaves_the_graph(self, old: fx.Node) -> bool:
        """Whether a tensor, or a view of it, is returned, so that its strides can be seen."""
        keys = {compat.storage_of(tensor) for tensor in tensors_of(old)}
        pending, seen = [old], {old}
        while pending:
            for user in pending.pop().users:
                if user.op == "output":
                    return True
                if user not in seen and keys & {compat.storage_of(tensor) for tensor in tensors_of(user)}:
                    seen.add(user)
                    pending.append(user)
        return False


def _kind(tensor: torch.Tensor) -> str:
    about = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, type(tensor), tensor.requires_grad)
    return str(about)
