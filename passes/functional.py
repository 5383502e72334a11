"""Stage 0, functional: in-place operations whose effect nobody else can see become what they compute.

    y = a @ b;  y.add_(c);  return y      is      y = a @ b;  z = y.add(c);  return z

This is done if all of these hold:

- The memory was made inside the graph, and no other view of it is read afterwards. Nothing is written through `.data`:
  autograd does not see that, and the backward pass may read what was written.
- No detached result lies beside one with a gradient that AOTAutograd would make it from wrongly (`beside`).
- Grad mode, inference mode and autocast are as when the memory was made. Under no_grad, a write keeps the gradient of
  the tensor that it writes into, but a new tensor has none.
- Autocast does not cast what the new operation computes with, as it does for `addmm`, but not for `addmm_`.
- All later views are views of the new tensor, too, so that later writes into it are seen.

Everything else stays as it is, and the later stages treat it as a write.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.aten_calls import tensors
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
    if not any(_plain_form(node) for node in graph.nodes):
        return graph
    new, _ = compat.copy_graph(graph)
    _Functional(new).run()
    return new


class _Functional:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.beside = Beside(graph)
        # What is being replaced, and the nodes made for it.
        self.current: fx.Node
        self.made: list[fx.Node] = []
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
        with compat.autocast_regions() as follow_autocast:
            for node in list(self.graph.nodes):
                follow_autocast(node)
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
        self.current, self.made = node, []
        with self.graph.inserting_before(node):
            result = self._inserted(node, target)
        views = self._views(node, target, result, back=back) if result is not None else None
        if result is None or views is None:
            for extra in reversed(self.made):
                self.graph.erase_node(extra)
            return
        here = self.position[node]
        for extra in self.made:
            self.position[extra] = here
            self.epoch[extra] = self.epoch[node]
        node.replace_all_uses_with(result)
        for user in list(target.users):
            if self.position[user] > here:
                user.replace_input_with(target, result)
        self.graph.erase_node(node)
        if back:  # the result is assigned to where it would have been written
            return
        for view, example in views.items():
            view.meta[compat.example_key(view)] = example
        key = self.memory[target]
        self.memory[result] = key
        self.holders[key] = [*(holder for holder in self.holders[key] if holder is not node), result]

    def _views(self, node: fx.Node, target: fx.Node, result: fx.Node, *, back: bool) -> dict[fx.Node, Any] | None:
        """The examples of later views once they are views of the result; None if the result or a view is not alike."""
        old, new = compat.example(target), compat.example(result)
        if not _alike(new, old, strides=not back) or compat.placements(new) != compat.placements(old):
            return None
        views: dict[fx.Node, Any] = {}
        if back:
            return views
        found = {node: new, target: new}
        for holder in self.holders[self.memory[target]]:
            if self.position[holder] <= self.position[node]:
                continue
            before = compat.example(holder)
            args, kwargs = fx.node.map_arg(
                (holder.args, holder.kwargs), lambda source: found.get(source, compat.example(source))
            )
            # In-place operations with a plain form return what they write into. There are many, and trials take time.
            made = args[0] if _plain_form(holder) else self._on_examples(before, holder.target, *args, **kwargs)
            if not _alike(made, before) or {*map(compat.storage_of, tensors(made))} != {compat.storage_of(new)}:
                return None
            found[holder] = views[holder] = made
        return views

    def _on_examples(self, like: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """What a function makes of examples, with gradients if another example has one: grad mode is the program's."""
        gradients = any(tensor.requires_grad for tensor in tensors(like))
        return compat.on_examples(function, *args, gradients=gradients, **kwargs)

    def _inserted(self, node: fx.Node, target: fx.Node) -> fx.Node | None:
        if node.target is operator.setitem:
            return self._scattered(node, target)
        function = str(node.target)[:-1] if node.op == "call_method" else _OPERATORS[node.target]
        made = self._call(function, *node.args, **node.kwargs)
        dtype = compat.example(target).dtype
        return made if made is None or compat.example(made).dtype == dtype else self._call("to", made, dtype)

    def _scattered(self, node: fx.Node, target: fx.Node) -> fx.Node | None:
        """`target[..., i, :] = value` as select_scatter, `target[:, a:b] = value` as slice_scatter."""
        whole, value = compat.example(target), cast(Any, node.args[2])
        place = _place(node.args[1], whole.dim())
        is_number = isinstance(value, (int, float))
        is_tensor = isinstance(value, fx.Node) and isinstance(compat.example(value), torch.Tensor)
        # The derivatives of the scatters that come instead do not take DTensors (torch 2.13 and 2.14).
        if place is None or not (is_number or is_tensor) or compat.is_dtensor(whole):
            return None
        axis, index = place
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
            if isinstance(index, int):
                part = self._call("select", target, axis, index)
            else:
                part = self._call("narrow", target, axis, start, shape[axis])
            value = part and self._call(torch.full_like, part, value)
            if value is None:
                return None
        have = compat.example(value).shape
        if len(have) != len(shape) or not all(compat.same_size(a, b) for a, b in zip(have, shape, strict=True)):
            return None
        if compat.example(value).dtype != whole.dtype:
            value = self._call("to", value, whole.dtype)
            if value is None:
                return None
        if isinstance(index, int):
            return self._call(torch.select_scatter, target, value, axis, index)
        return self._call(torch.slice_scatter, target, value, axis, start, stop)

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node | None:
        """A new node; None if its function does not take these arguments, or if autocast casts them."""
        like = compat.example(self.current.args[0])  # type: ignore[arg-type]
        example = self._on_examples(like, function, *args, **kwargs)
        if example is None:
            return None
        if compat.autocast_state():
            with compat.without_autocast():
                plain = self._on_examples(like, function, *args, **kwargs)
            if plain is None or plain.dtype != example.dtype:
                return None
        source = args[0]
        if isinstance(function, str):
            node = self.graph.call_method(function, args, kwargs)
        else:
            node = self.graph.call_function(function, args, kwargs)
        self.made.append(node)
        node.meta[compat.example_key(source)] = example
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in self.current.meta:
                node.meta[key] = self.current.meta[key]
        return node


def _alike(made: Any, old: Any, *, strides: bool = True) -> bool:
    """Whether two examples, tensors or tuples of tensors, differ in memory only; without strides, also in these."""
    new, before = (value if isinstance(value, (tuple, list)) else (value,) for value in (made, old))
    return len(new) == len(before) and all(
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and (a.shape, a.dtype, a.requires_grad) == (b.shape, b.dtype, b.requires_grad)
        and (not strides or a.stride() == b.stride())
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
