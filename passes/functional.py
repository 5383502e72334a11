"""Stage 0, functional: in-place operations whose effect nobody else can see become what they compute.

    y = a @ b;  y.add_(c);  return y      is      y = a @ b;  z = y.add(c);  return z

This is done if all of these hold:

- The memory was made inside the graph, and no other view of it is read afterwards. Nothing is written through `.data`:
  autograd does not see that, and the backward pass may read what was written.
- No detached result lies beside one with a gradient that AOTAutograd would make it from wrongly (`beside`).
- Grad mode, inference mode and autocast are as when the memory was made. Under no_grad, a write keeps the gradient of
  the tensor that it writes into, but a new tensor has none. Autocast chooses types for new tensors only.

Everything else stays as it is, and the later stages treat it as a write.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.beside import Beside
from mhc_compile.passes.shadow import tensors_of

_METHODS = {
    *("add_", "sub_", "mul_", "div_", "addcmul_", "addcdiv_", "neg_", "pow_", "square_", "sqrt_", "rsqrt_"),
    *("reciprocal_", "exp_", "log_", "sigmoid_", "tanh_", "abs_", "clamp_", "clamp_min_", "clamp_max_", "lerp_"),
    *("baddbmm_", "addmm_", "multiply_", "divide_", "subtract_", "true_divide_"),
}
_OPERATORS: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
# A product keeps what it multiplies for its gradient, so that this must not be written afterwards.
_SUMS = {operator.iadd, operator.isub}


def functional(graph: fx.Graph) -> fx.Graph:
    """The graph itself, or a copy in which in-place operations are replaced as far as that is provably the same."""
    if compat.autocast_state() or not any(_plain_form(node) for node in graph.nodes):
        return graph
    new, _ = compat.copy_graph(graph)
    _Functional(new).run()
    return new


class _Functional:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.beside = Beside(graph)
        self.current: fx.Node
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        # How often grad mode, inference mode or autocast have changed before a node.
        self.epoch: dict[fx.Node, int] = {}
        changes = 0
        for node in graph.nodes:
            changes += compat.changes_global_state(node)
            self.epoch[node] = changes
        # Nodes by the memory they had in the program, also once they have been given memory of their own.
        self.holders: dict[int, list[fx.Node]] = {}
        self.memory: dict[fx.Node, int] = {}
        for node in graph.nodes:
            for tensor in tensors_of(node):
                key = compat.storage_of(tensor)
                if key is not None:
                    self.holders.setdefault(key, []).append(node)
                    self.memory.setdefault(node, key)

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if _goes_back(node):
                self._replace(node, back=True)
            elif _plain_form(node) and self._is_private(node):
                self._replace(node)

    def _is_private(self, node: fx.Node) -> bool:
        """Whether the memory written was made in the graph, and is read afterwards through the written tensor only."""
        target = node.args[0]
        if not isinstance(target, fx.Node) or not isinstance(compat.example(target), torch.Tensor):
            return False
        key = self.memory.get(target)
        if key is None:
            return False
        here = self.position[node]
        if any(self.epoch[holder] != self.epoch[node] for holder in self.holders[key] if self.position[holder] <= here):
            return False
        for holder in self.holders[key]:
            if holder.op not in ("call_function", "call_method") or compat.is_higher_order(holder):
                return False
            if compat.is_data(holder):
                return False
            if holder in (target, node) or self.position[holder] > here:
                continue
            if any(self.position[user] >= here for user in holder.users):
                return False
        return not self.beside.is_made_wrongly((node, target))

    def _replace(self, node: fx.Node, *, back: bool = False) -> None:
        """Replace a node, if the new node has the same strides; back: also if the next node assigns it."""
        target = node.args[0]
        assert isinstance(target, fx.Node)
        self.current = node
        with self.graph.inserting_before(node):
            made = self._inserted(node, target)
        if made is None:
            return
        old, new = compat.example(target), compat.example(made[-1])
        alike = (new.shape, new.dtype, compat.placements(new)) == (old.shape, old.dtype, compat.placements(old))
        if not alike or (not back and new.stride() != old.stride()):
            for extra in reversed(made):
                self.graph.erase_node(extra)
            return
        result, here = made[-1], self.position[node]
        for extra in made:
            self.position[extra] = here
            self.epoch[extra] = self.epoch[node]
        node.replace_all_uses_with(result)
        for user in list(target.users):
            if self.position[user] > here:
                user.replace_input_with(target, result)
        if back:  # the result is assigned to where it would have been written
            self.graph.erase_node(node)
            return
        key = self.memory[target]
        self.memory[result] = key
        self.holders[key].append(result)
        self.graph.erase_node(node)
        self.holders[key] = [holder for holder in self.holders[key] if holder is not node]
        for holder in self.holders[key]:
            if self.position.get(holder, here) > here:
                self._view_again(holder)

    def _view_again(self, node: fx.Node) -> None:
        """Let the example of a view share memory with the new base of the view."""
        key = compat.example_key(node)
        old = node.meta[key]
        made = compat.on_examples(node.target, *node.args, **node.kwargs) if not _plain_form(node) else None
        if _alike(made, old):
            node.meta[key] = made

    def _inserted(self, node: fx.Node, target: fx.Node) -> list[fx.Node] | None:
        if node.target is operator.setitem:
            return self._scattered(node, target)
        if node.op == "call_method":
            made = self._call(str(node.target)[:-1], *node.args, **node.kwargs)
        else:
            made = self._call(_OPERATORS[node.target], *node.args)
        if made is None:
            return None
        dtype = compat.example(target).dtype
        if compat.example(made).dtype == dtype:
            return [made]
        cast = self._call("to", made, dtype)
        return [made] if cast is None else [made, cast]

    def _scattered(self, node: fx.Node, target: fx.Node) -> list[fx.Node] | None:
        """`target[..., i, :] = value` as select_scatter, `target[:, a:b] = value` as slice_scatter."""
        whole, value = compat.example(target), cast(Any, node.args[2])
        place = _place(node.args[1], whole.dim())
        is_number = isinstance(value, (int, float))
        is_tensor = isinstance(value, fx.Node) and isinstance(compat.example(value), torch.Tensor)
        # The derivatives of the scatters that come instead do not take DTensors (torch 2.13 and 2.14).
        if place is None or not (is_number or is_tensor) or compat.is_dtensor(whole):
            return None
        axis, index = place
        made: list[fx.Node] = []

        def call(*args: Any) -> bool:
            found = self._call(*args)
            made.extend([found] if found is not None else [])
            return found is not None

        shape = list(whole.shape)
        if isinstance(index, int):
            shape.pop(axis)
        else:
            if not isinstance(shape[axis], int):
                return None
            start, stop, step = index.indices(shape[axis])
            if step != 1 or stop <= start:
                return None
            shape[axis] = stop - start
        if is_number:
            part = (
                ("select", target, axis, index)
                if isinstance(index, int)
                else ("narrow", target, axis, start, shape[axis])
            )
            if not call(*part) or not call(torch.full_like, made[-1], value):
                return None
            value = made[-1]
        have = compat.example(value).shape
        if len(have) != len(shape) or not all(compat.same_size(a, b) for a, b in zip(have, shape, strict=True)):
            return None
        if compat.example(value).dtype != whole.dtype:
            if not call("to", value, whole.dtype):
                return None
            value = made[-1]
        if isinstance(index, int):
            done = call(torch.select_scatter, target, value, axis, index)
        else:
            done = call(torch.slice_scatter, target, value, axis, start, stop)
        return made if done else None

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node | None:
        example = compat.on_examples(function, *args, **kwargs)
        if example is None:
            return None
        source = args[0]
        if isinstance(function, str):
            node = self.graph.call_method(function, args, kwargs)
        else:
            node = self.graph.call_function(function, args, kwargs)
        node.meta[compat.example_key(source)] = example
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in self.current.meta:
                node.meta[key] = self.current.meta[key]
        return node


def _alike(made: Any, old: Any) -> bool:
    """Whether two examples, tensors or tuples of tensors, differ in memory only."""
    new, before = (value if isinstance(value, (tuple, list)) else (value,) for value in (made, old))
    return len(new) == len(before) and all(
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and (a.shape, a.stride(), a.dtype, a.requires_grad) == (b.shape, b.stride(), b.dtype, b.requires_grad)
        for a, b in zip(new, before, strict=True)
    )


def _plain_form(node: fx.Node) -> bool:
    """Whether a node is an in-place operation that has a form that returns a new tensor."""
    if node.op == "call_method":
        return node.target in _METHODS and "out" not in node.kwargs
    return node.op == "call_function" and (node.target in _OPERATORS or node.target is operator.setitem)


def _goes_back(node: fx.Node) -> bool:
    """Whether a node adds to a view, and the next one assigns that to the place of the view: y[i] += f."""
    back, view = node.next, node.args[0] if node.args else None
    return (
        node.target in _SUMS
        and back.target is operator.setitem
        and isinstance(view, fx.Node)
        and view.target is operator.getitem
        and list(view.users) == list(back.args[2:]) == [node]
        and list(node.users) == [back]
        and view.args == back.args[:2]
    )


def _place(index: Any, rank: int) -> tuple[int, int | slice] | None:
    """The one dimension that an index singles out, and where."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is None or isinstance(part, bool) for part in parts):
        return None
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    at = parts.index(Ellipsis)
    parts[at : at + 1] = [slice(None)] * (rank - len(parts) + 1)
    chosen = [(axis, part) for axis, part in enumerate(parts) if part != slice(None)]
    if len(parts) != rank or len(chosen) != 1:
        return None
    axis, part = chosen[0]
    plain = isinstance(part, int) or (
        isinstance(part, slice) and all(p is None or isinstance(p, int) for p in (part.start, part.stop, part.step))
    )
    return (axis, part) if plain else None
