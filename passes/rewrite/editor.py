"""Inserting calls into the new graph, and putting them in the place of the program's values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.aten_calls import leaves, map_leaves
from mhc_compile.passes.beside import REASON, Beside
from mhc_compile.passes.called import INSERTED
from mhc_compile.passes.plan import Decline, Site, surface, visible
from mhc_compile.passes.plan.sites import outputs
from mhc_compile.passes.recognise.region import draws_random_numbers
from mhc_compile.passes.rewrite.aliases import Aliases
from mhc_compile.passes.rewrite.copies import Copies
from mhc_compile.passes.shadow import Shadow, Value


class Editor:
    """Inserts calls in front of `anchor`, with the example values that later stages rely on."""

    def __init__(self, copies: Copies, shadow: Shadow) -> None:
        self.graph = copies.graph
        self.copies = copies
        self.shadow = shadow
        self.aliases = Aliases(shadow)
        self.beside = Beside(shadow.graph)
        self.site: Site | None = None
        self.made: list[tuple[fx.Node, Site]] = []
        self.anchor: fx.Node | None = None
        self.operands: list[fx.Node] = []
        self.examples: dict[Any, Any] = {}

    def _node(self, value: Value) -> fx.Node:
        return min(value.nodes, key=self.shadow.position.__getitem__)

    def _visible(self, value: Value) -> fx.Node:
        """A node that holds the value's elements in order, possibly in another float type or shape."""
        return self._held(value)[1]

    def _held(self, value: Value) -> tuple[Value, fx.Node]:
        """As `_visible`, with the value that the node shows. What lives inside one node is computed again, if small."""
        held = visible(value)
        if held is not None:
            return held, self.copies.current(self._node(held))
        assert self.site is not None
        if value.numel >= next(iter(self.site.sources())).numel:
            raise Decline("an operand is not a value of its own in the program")
        return value, self._again(value)

    def _again(self, value: Value) -> fx.Node:
        """A value inside one node of the program, computed again by the calls that the node makes for it."""
        if value.nodes:
            return self.copies.current(self._node(value))
        op = value.op
        if op is None or not hasattr(op.target, "_schema") or any(isinstance(a, torch.SymInt) for a in leaves(op.args)):
            raise Decline("an operand is not a value of its own in the program")
        if draws_random_numbers(op):
            raise Decline("an operand is drawn at random within one call of the program")
        args, kwargs = map_leaves(lambda a: self._again(a) if isinstance(a, Value) else a, (op.args, op.kwargs))
        node = self._call(op.target, *args, **kwargs)
        return node if len(op.outs) == 1 else self._item(node, op.outs.index(value))

    def _surfaced(self, value: Value) -> Value:
        try:
            return surface(value)
        except Decline:
            return value

    def _shaped(self, node: fx.Node, shape: Sequence[Any]) -> fx.Node:
        have = compat.example(node).shape
        if len(have) == len(shape) and all(compat.same_size(a, b) for a, b in zip(have, shape, strict=True)):
            return node
        return self._call("reshape", node, self._sizes(shape))

    def _sizes(self, shape: Sequence[Any]) -> list[Any]:
        """A shape as arguments of a call: nodes for symbolic sizes. One of them at most is -1, to be inferred."""
        symbolic = [d for d, size in enumerate(shape) if not isinstance(compat.as_number(size), int)]
        # The one that is left is one that no input has: a product of symbolic sizes.
        left = next((d for d in symbolic if self._dimension(shape[d]) is None), symbolic[-1] if symbolic else None)
        return [-1 if d == left else self._size(size) for d, size in enumerate(shape)]

    def _size(self, size: Any) -> fx.Node | int:
        """A node for a symbolic size; a number where guards have fixed it.

        AOTAutograd may know a fixed size by another symbol, which Dynamo can make no guard for.
        """
        size = compat.as_number(size)
        if isinstance(size, int):
            return size
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
        """Call one of our operators. Checking arguments takes long, so it is done once for all equal calls."""
        target = getattr(torch.ops.mhc, name).default
        args = (first, *others)
        kinds = [_kind(compat.example(arg)) if arg is not None else None for arg in args]
        key = (name, str(kwargs), self._needs_gradients(), *kinds)
        known = self.examples.get(key)
        if known is None:
            try:
                node = self._call(target, *args, **kwargs)
            except (TypeError, ValueError) as error:
                if not str(error).startswith(f"mhc::{name}: "):
                    raise  # a failure of ours
                raise Decline(str(error)) from error  # the operator's own check, which says what a user can act on
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
            try:
                # A program without gradients may write into views of parameters. Autograd refuses these.
                gradients = torch.set_grad_enabled(self._needs_gradients())
                with gradients, compat.fake_mode_of(compat.example(self.anchor)):
                    example = (
                        getattr(values[0], target)(*values[1:], **options)
                        if isinstance(target, str)
                        else target(*values, **options)
                    )
            except RuntimeError as error:
                if not compat.has_no_placement(error):
                    raise
                raise Decline(f"torch does not know how to place the result of {node.name}, of DTensors") from error
        node.meta[compat.example_key(self.anchor)] = example
        node.meta[INSERTED] = id(self.site)
        self.copies.epochs[node] = self.copies.epochs[self.anchor]
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in self.anchor.meta:
                node.meta[key] = self.anchor.meta[key]
        return node

    def _filled(self, number: float, *sizes: int) -> fx.Node:
        """A constant in float32. Beside streams that are a DTensor it is one, too, and whole on all ranks."""
        assert self.anchor is not None
        streams = self.operands[0]
        if compat.is_dtensor(compat.example(streams)):
            return self._call("new_full", streams, sizes, number, dtype=torch.float32)
        device = compat.example(self.anchor).device
        return self._call(torch.full, sizes, number, dtype=torch.float32, device=device)

    def _replace(self, value: Value, new: fx.Node) -> None:
        """Put `new` in the place of the value, with that value's type, shape and strides.

        All nodes that hold the value are one tensor, so one node replaces them all.
        """
        old = self._node(value)
        if self.beside.is_made_wrongly(value.nodes):
            raise Decline(REASON)
        example = compat.example(old)
        fitted = new
        if compat.example(fitted).dtype != example.dtype:
            fitted = self._call("to", fitted, example.dtype)
        fitted = self._shaped(fitted, example.shape)
        fitted = self._placed(fitted, example)
        if compat.example(fitted).stride() != example.stride():
            fitted = self._restrided(fitted, example, old)
        if compat.example(fitted).requires_grad and not example.requires_grad:
            fitted = self._call("detach", fitted)
        first = not example._is_view() or bool(self.beside.pairs(old))
        if self._is_seen(old) and compat.example(fitted)._is_view() and first:
            # AOTAutograd makes a view that leaves the graph anew from what it views, which fails where it is detached,
            # too, and may give a dimension of size 1 another stride. A view that is written loses its strides there.
            # `_unsafe_view` is no way out: up to torch 2.13, cached graphs with it have other sizes than the program's.
            fitted = self._call("clone", fitted)
        assert self.site is not None
        self.made.append((old, self.site))
        for held in value.nodes:
            node = self.copies[held]
            node.replace_all_uses_with(fitted)
            self.copies.replaced[node] = fitted

    def _needs_gradients(self) -> bool:
        """Whether a result of the site has a gradient in the program: it is not under `no_grad`."""
        assert self.site is not None
        nodes = (node for value in outputs(self.site) for node in value.nodes)
        return any(compat.example(node).requires_grad for node in nodes)

    def _placed(self, node: fx.Node, like: torch.Tensor) -> fx.Node:
        """The same DTensor, placed as `like`: the program may go on to this rank's part, or to the placements."""
        wanted = compat.placements(like)
        if compat.placements(compat.example(node)) == wanted:
            return node
        if any(placement.is_partial() for placement in wanted):
            raise Decline(f"its result is a pending sum, {wanted}, which the operators do not leave open")
        return self._call("redistribute", node, placements=[*wanted])

    def _is_seen(self, node: fx.Node) -> bool:
        """Whether it is visible in which memory a node of the program lies."""
        return self.aliases.is_shown(node) or self.aliases.is_written(node)

    def _restrided(self, node: fx.Node, like: torch.Tensor, old: fx.Node) -> fx.Node:
        """A copy with the strides of `like`, or dense in the same order: then it has all views that `like` has."""
        order = sorted(range(like.dim()), key=lambda d: (-int(compat.hint(like.stride(d))), d))
        back = [order.index(d) for d in range(like.dim())]
        if order != sorted(order):
            node = self._call("contiguous", self._call("permute", node, *order))
            node = self._call("permute", node, *back)
        else:
            node = self._call("contiguous", node)
        made = compat.example(node)
        steps = zip(made.shape, made.stride(), like.stride(), strict=True)
        same = all(step == wanted for size, step, wanted in steps if not compat.same_size(size, 1))
        if not same and not like.is_contiguous() and self.aliases.is_shown(old):
            raise Decline("its result has strides that the operators do not produce")
        return node


def _kind(tensor: torch.Tensor) -> str:
    about = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, type(tensor), tensor.requires_grad)
    return str((*about, compat.placements(tensor)))
