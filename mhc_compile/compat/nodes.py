"""What the nodes of a graph do: to memory, to random numbers, to grad mode and autocast, and what they run."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from mhc_compile.compat.graphs import example
from mhc_compile.compat.values import fake_mode_of, quiet_shape_env

_STATE_CHANGES = {
    "_set_grad_enabled": "grad",
    "_enter_inference_mode": "enter_inference",
    "_exit_inference_mode": "exit_inference",
    "_enter_autocast": "enter_autocast",
    "_exit_autocast": "exit_autocast",
}

_PLAIN_MODULES = (
    *("torch", "torch.functional", "torch.nn.functional", "torch.special", "torch.linalg"),
    *("torch._C._nn", "torch._C._linalg", "torch._C._special", "_operator", "math"),
)

_IN_PLACE_OPERATORS = {  # iadd, and iand, whose other form is and_
    getattr(operator, name)
    for name in dir(operator)
    if name.startswith("i") and not {name[1:], f"{name[1:]}_"}.isdisjoint(dir(operator))
}
_IN_PLACE_OPERATORS |= {operator.setitem, operator.delitem}
_IN_PLACE_METHODS = {f"__{function.__name__}__" for function in _IN_PLACE_OPERATORS}


def changes_global_state(node: fx.Node) -> bool:
    """Whether the node sets grad mode, inference mode or autocast."""
    return node.op == "call_function" and _sets_state(node.target)


@functools.lru_cache(4096)
def _sets_state(target: Any) -> bool:
    return getattr(target, "__name__", "") in _STATE_CHANGES


def state_change(node: fx.Node) -> str:
    """Which global state a node changes, and how."""
    return _STATE_CHANGES[getattr(node.target, "__name__", "")]


def is_composite(overload: Any) -> bool:
    """Whether an ATen operator is defined by others and can be taken apart."""
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd"))
    except RuntimeError:  # the dispatcher of torch 2.11 does not know those of TorchScript alone, such as aten::size
        return False


def is_data(node: fx.Node) -> bool:
    """Whether the node is `x.data`, which shares x's memory, but not its version: autograd sees no write into it."""
    return node.op == "call_function" and node.target is torch._C._autograd._get_data_attr  # type: ignore[attr-defined]


def is_higher_order(node: fx.Node) -> bool:
    """Whether the node calls a higher-order operator, such as a checkpoint region."""
    return _is_higher_order(node.target)


@functools.lru_cache(4096)
def _is_higher_order(target: Any) -> bool:
    return isinstance(target, HigherOrderOperator)


def may_mutate(node: fx.Node) -> bool:
    """Whether a node may write into an argument, by its name or, for one with nested graphs, by what is in them."""
    if _named_as_mutating(node.op, node.target):
        return True
    if node.op == "call_function" and is_higher_order(node):
        inner = [each for body in bodies(node) for each in body.graph.nodes]
        # A backward that takes gradients itself makes leaves of its own for that, which writes no memory.
        return not inner or any(may_mutate(each) for each in inner if each.target != "requires_grad_")
    if node.op == "call_method":
        return "out" in node.kwargs
    if node.op != "call_function":
        return False
    place = _place_of_inplace(node.target)
    given = node.args[place : place + 1] if place is not None else ()
    return node.kwargs.get("out") is not None or bool(node.kwargs.get("inplace")) or any(given)


@functools.lru_cache(4096)
def _place_of_inplace(target: Any) -> int | None:
    """Which positional argument of a function says whether it works in place, as in `F.relu(x, True)`."""
    if getattr(target, "__module__", None) != "torch.nn.functional":
        return None
    try:
        names = list(inspect.signature(target).parameters)
    except ValueError:  # written in C
        return None
    return names.index("inplace") if "inplace" in names else None


@functools.lru_cache(4096)  # graphs of twenty thousand nodes hold a few dozen different targets
def _named_as_mutating(op: str, target: Any) -> bool:
    if op == "call_method":
        name = str(target)
        return name in _IN_PLACE_METHODS or (name.endswith("_") and not name.endswith("__"))
    if op != "call_function" or isinstance(target, HigherOrderOperator):
        return False
    if target in _IN_PLACE_OPERATORS:
        return True
    name = getattr(target, "__name__", "")
    if name.endswith("_") and not name.endswith("__") and getattr(target, "__module__", None) != "_operator":
        return True  # torch.sigmoid_, torch._foreach_add_
    return is_foreign(target) or any(op._schema.is_mutable for op in _overloads(target))


def _overloads(target: Any) -> list[OpOverload]:
    """All operators that a call of this target may be."""
    if isinstance(target, OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]  # type: ignore[no-untyped-call]
    return [target] if isinstance(target, OpOverload) else []


_KNOWN_PACKAGES = {"torch", "_operator", "builtins", "math", "einops"}


@functools.lru_cache(4096)
def is_foreign(target: Any) -> bool:
    """Whether nothing is known of a function: it may write, draw random numbers and stop gradients.

    Such are those that the program allows in the graph, by `torch.compiler.allow_in_graph`, and NumPy code.
    """
    if isinstance(target, (str, OpOverload, OpOverloadPacket, HigherOrderOperator)):
        return False
    module = str(getattr(target, "__module__", None) or "torch")  # functions written in C have none
    if module.startswith("torch._dynamo.variables") and getattr(target, "__name__", "").startswith("prim"):
        return False  # what torch 2.11 has for a method of DTensors, such as prim_to_local
    return module.split(".")[0] not in _KNOWN_PACKAGES or module.startswith(("torch._dynamo", "torch._numpy"))


def writes(node: fx.Node) -> bool:
    """Whether a call of a joint graph writes into an argument. Autograd's tracing leaves few of those."""
    functional = is_higher_order(node) and "functional" in str(node.target)
    return not functional and may_mutate(node)


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether a node may draw random numbers, for a result or in place.

    An operator that torch does not have itself may draw without a tag that says so.
    """
    if is_higher_order(node):
        return _any_draws(bodies(node))
    return node.op in ("call_function", "call_method") and _is_random(node.target) and not _has_dropout_of_0(node)


def _any_draws(graphs: Iterable[fx.GraphModule]) -> bool:
    return any(draws_random_numbers(node) for graph in graphs for node in graph.graph.nodes)


@functools.lru_cache(4096)
def _is_random(target: Any) -> bool:
    if is_foreign(target) or namespace_of(target) not in {"", "mhc", *_OF_TORCH}:
        return True
    overloads = [*_overloads(target), *_overloads(_of_aten(_name(target)))]
    return _any_seeded(overloads) or _names_random(target, set())


def _any_seeded(overloads: list[OpOverload]) -> bool:
    return any(torch.Tag.nondeterministic_seeded in one.tags for one in overloads)


def _names_random(function: Any, seen: set[Any]) -> bool:
    """Whether a function in Python, one that it names or one in its closure names an operator that draws."""
    if not isinstance(function, FunctionType) or function in seen:
        return False
    seen.add(function)
    named = list(_names_in(function.__code__))
    others = [function.__globals__.get(name) for name in named]
    others += [cell.cell_contents for cell in function.__closure__ or ()]
    return any(_any_seeded(_overloads(_of_aten(name))) for name in named) or any(
        _names_random(other, seen) for other in others
    )


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _of_aten(name: str) -> Any:
    """ATen's operator of this name, which a function or a method has."""
    return getattr(torch.ops.aten, name, None)


def _name(target: Any) -> str:
    return (target if isinstance(target, str) else getattr(target, "__name__", "")).split(".")[0]


def _has_dropout_of_0(node: fx.Node) -> bool:
    """Whether a node is attention that drops nothing out, as it does by default."""
    place, default = _dropout(node.target)
    if place is None:
        return False
    dropout = node.args[place] if len(node.args) > place else node.kwargs.get("dropout_p", default)
    return isinstance(dropout, (int, float)) and dropout == 0


@functools.lru_cache(4096)
def _dropout(target: Any) -> tuple[int | None, Any]:
    """Which argument of an operator for attention says how much is dropped out, and its default."""
    if isinstance(target, FunctionType):
        parameters = inspect.signature(target).parameters
        if "dropout_p" in parameters:
            return list(parameters).index("dropout_p"), parameters["dropout_p"].default
    for one in _overloads(_of_aten(_name(target))):
        for place, argument in enumerate(one._schema.arguments):
            if argument.name == "dropout_p":
                return place, argument.default_value
    return None, None


def called_operator(node: fx.Node) -> OpOverload | None:
    """The registered operator that a node calls, also where its program names it without the overload."""
    target = node.target
    if isinstance(target, OpOverloadPacket):
        overloads = target.overloads()  # type: ignore[no-untyped-call]
        return getattr(target, overloads[0]) if len(overloads) == 1 else None
    return target if isinstance(target, OpOverload) else None


def bodies(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a higher-order operator runs."""
    return [getattr(node.graph.owning_module, name) for name in names_of_bodies(node)]


def names_of_bodies(node: fx.Node) -> list[str]:
    """The names, in the module of its graph, of the graphs that a higher-order operator runs."""
    names = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    found = names if is_higher_order(node) else []
    return [name for name in found if isinstance(getattr(node.graph.owning_module, name, None), fx.GraphModule)]


def call_regions(graph: fx.Graph) -> set[str]:
    """Call the bodies of regions that are compiled once as modules: eager code cannot differentiate such an operator.

    Returns the names of all bodies that run as the code around them does, those of checkpoint regions included.
    """
    found: set[str] = set()
    for node in list(graph.nodes):
        if not is_higher_order(node) or str(node.target) not in _REGIONS:
            continue
        names = names_of_bodies(node)
        found.update(names)
        if str(node.target) == "invoke_subgraph":
            with graph.inserting_before(node):
                call = graph.call_module(names[0], node.args[2:])
            node.replace_all_uses_with(call)
            graph.erase_node(node)
    return found


_REGIONS = ("invoke_subgraph", "tag_activation_checkpoint")


class AutogradFunction:
    """A user's autograd.Function as Dynamo captured it: callable, with the backward that the user wrote."""

    _opname = "autograd_function"

    def __init__(self, node: fx.Node) -> None:
        self.bodies = bodies(node)
        self.operator = node.target
        self.kwargs = dict(node.kwargs)

    def __call__(self, *inputs: Any) -> Any:
        return self.operator(*self.bodies[:2], *inputs, **self.kwargs)  # type: ignore[operator]

    def __str__(self) -> str:
        return "\n".join([str(body.code) for body in self.bodies] + [str(self.kwargs)])

    def arguments(self) -> Iterator[Any]:
        """All arguments of calls in its forward and its backward."""
        return (argument for body in self.bodies for node in body.graph.nodes for argument in (node.args, node.kwargs))

    def nodes(self) -> Iterator[fx.Node]:
        """What the forward does."""
        yield from self.bodies[0].graph.nodes

    def gives_gradient(self, inputs: Sequence[Any]) -> list[bool]:
        """For which inputs the backward returns something other than None: torch 2.11 to 2.14 have its results so."""
        (results,) = self.bodies[1].graph.find_nodes(op="output")[0].args
        known = isinstance(results, (tuple, list)) and len(results) == len(inputs)
        return [result is not None for result in results] if known else [True] * len(inputs)

    def is_random(self) -> bool:
        """Whether its forward or its backward draws random numbers, in place or not."""
        return _any_draws(self.bodies)


def autograd_function(node: fx.Node) -> AutogradFunction | None:
    """The autograd.Function that a node applies, if it applies one and its inputs are all tensors of the graph."""
    if not is_higher_order(node) or getattr(node.target, "__name__", "") != "autograd_function_apply":
        return None
    found = AutogradFunction(node)
    plain = all(isinstance(arg, fx.Node) for arg in node.args) and len(found.bodies) == 2
    return found if plain else None


# The namespaces of torch's own operators, whose backward gives a gradient to every input that needs one.
_OF_TORCH = {"aten", "prims", "prim", "quantized", "inductor", "profiler", "symm_mem"}
_OF_TORCH |= {"c10d", "_c10d_functional", "_c10d_functional_autograd"}


def namespace_of(target: Any) -> str:
    """The namespace of a registered operator; empty for what is none."""
    packet = getattr(target, "_overloadpacket", target)
    return packet._qualified_op_name.split("::")[0] if isinstance(packet, OpOverloadPacket) else ""


def without_gradient(node: fx.Node) -> list[fx.Node]:
    """The inputs of an autograd.Function, an operator or an unknown function, to which it gives no gradient."""
    function = autograd_function(node)
    if function is not None:
        given = node.args[2:]
        gives = dict.fromkeys(given, False)
        for one, some in zip(given, function.gives_gradient(given), strict=True):
            gives[one] = gives[one] or some
        return [one for one, some in gives.items() if isinstance(one, fx.Node) and not some]
    if getattr(node.target, "__name__", "") == "tag_activation_checkpoint" and len(bodies(node)) == 1:
        return _tried(node, bodies(node)[0], node.args[1:])
    registered = isinstance(node.target, OpOverload | OpOverloadPacket) and namespace_of(node.target) not in _OF_TORCH
    unknown = registered or (node.op == "call_function" and is_foreign(node.target))
    return _tried(node, node.target, node.args, node.kwargs) if unknown else []


def _tried(node: fx.Node, function: Any, args: Any, kwargs: Any = None) -> list[fx.Node]:
    """`without_gradient` by the backward of the function that a node calls, on tensors without data."""
    leaves = {one: example(one) for one in node.all_input_nodes}
    leaves = {one: value for one, value in leaves.items() if isinstance(value, torch.Tensor) and value.requires_grad}
    if not leaves:
        return []
    try:
        mode = fake_mode_of(next(iter(leaves.values())))
        with torch.enable_grad(), quiet_shape_env(mode), mode:
            leaves = {one: value.detach().requires_grad_() for one, value in leaves.items()}
            args, kwargs = fx.node.map_arg((args, kwargs or {}), lambda one: leaves.get(one, example(one)))
            made = torch.utils._pytree.tree_leaves(function(*args, **kwargs))
            made = [value for value in made if isinstance(value, torch.Tensor) and value.requires_grad]
            gradients = [torch.ones_like(value) for value in made]
            found = torch.autograd.grad(made, [*leaves.values()], gradients, allow_unused=True)
    except Exception:  # it is not understood, and may give all of them a gradient
        return []
    return [one for one, gradient in zip(leaves, found, strict=True) if gradient is None]


def give_examples(graph: fx.Graph) -> None:
    """Give an example to each node that has none: those that Inductor's passes made, which come before custom ones.

    One of them computes `tanh(cat([a, b]))` as `cat([tanh(a), tanh(b)])` (torch 2.11 to 2.14).
    """
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or example(node) is not None:
            continue
        if is_plain_call(node) and not may_mutate(node):
            made = on_examples(node.target, *node.args, **node.kwargs)
            if made is not None:
                node.meta["example_value"] = made


def give_examples_to_bodies(module: fx.GraphModule) -> None:
    """Give examples to the inputs of graphs that others call, and to what calls return, where they have none.

    With `use_graph_deduplication` Dynamo makes such graphs of parts of its own, and notes none (torch 2.11 to 2.14).
    """
    for call in module.graph.nodes:
        if not is_higher_order(call) or str(call.target) != "invoke_subgraph":
            continue
        for body in bodies(call):
            for given, node in zip(call.args[2:], body.graph.find_nodes(op="placeholder"), strict=False):
                if isinstance(given, fx.Node) and example(node) is None and example(given) is not None:
                    node.meta["example_value"] = example(given)
            give_examples_to_bodies(body)
            (returned,) = body.graph.find_nodes(op="output")[0].args
            if example(call) is None:
                call.meta["example_value"] = fx.node.map_arg(returned, example)


def on_examples(function: Any, *args: Any, gradients: bool = True, **kwargs: Any) -> Any:
    """The result of a function, or of a method by its name, for nodes' examples; None if it does not take them.

    gradients says whether the program has gradients on there.
    """
    values, options = fx.node.map_arg((args, kwargs), example)
    leaves = torch.utils._pytree.tree_leaves((values, options))
    tensor = next((value for value in leaves if isinstance(value, torch.Tensor)), None)
    if tensor is None:
        return None
    try:
        mode = fake_mode_of(tensor)
        with torch.set_grad_enabled(gradients), quiet_shape_env(mode), mode:
            if isinstance(function, str):
                return getattr(values[0], function)(*values[1:], **options)
            return function(*values, **options)
    except Exception:  # it is not understood, and stays what it is
        return None


def is_plain_call(node: fx.Node) -> bool:
    """Whether a node may be run on fake tensors to see its ATen calls: Tensor methods and torch's own functions.

    Methods that only a subclass has, such as `DTensor.redistribute`, are none.
    """
    if node.op == "call_method":
        return hasattr(torch.Tensor, str(node.target))
    return _is_plain_function(node.target)


@functools.lru_cache(4096)
def _is_plain_function(target: Any) -> bool:
    if target is getattr or isinstance(target, (OpOverload, OpOverloadPacket)):
        return True
    if getattr(target, "__name__", "") in _STATE_CHANGES or isinstance(target, HigherOrderOperator):
        return False
    module = getattr(target, "__module__", None)
    owner = getattr(getattr(target, "__self__", None), "__name__", "")
    return module in _PLAIN_MODULES or owner.startswith("_VariableFunctions") or str(module).startswith("einops")


def is_pure(node: fx.Node) -> bool:
    """Whether a call of a joint graph may be moved: it writes nowhere and draws no random numbers."""
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, OpOverload) and not (
        node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags
    )


def is_made_here(node: fx.Node) -> bool:
    """Whether a node is the result of an operator, or one of its results: not an input, and of no nested graph."""
    if node.target is operator.getitem:
        return isinstance(node.args[0].target, OpOverload)  # type: ignore[union-attr]
    return node.op == "call_function" and isinstance(node.target, OpOverload)


def is_kernel_launch(node: fx.Node) -> bool:
    """Whether a node launches a Triton kernel."""
    return is_higher_order(node) and str(node.target) == "triton_kernel_wrapper_mutation"


def aliased(node: fx.Node) -> list[fx.Node]:
    """The arguments that an ATen call returns a view of, by its schema."""
    if not isinstance(node.target, OpOverload):
        return []
    values = zip(node.target._schema.arguments, node.args, strict=False)
    return [value for argument, value in values if argument.alias_info is not None and isinstance(value, fx.Node)]
