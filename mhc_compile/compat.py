"""Every private torch API that the project touches, for torch 2.11 to 2.13.

Dynamo and Inductor are imported where they are needed: the operators import this module too, and need neither.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

_STATE_CHANGES = {
    "_set_grad_enabled": "grad",
    "_enter_inference_mode": "enter_inference",
    "_exit_inference_mode": "exit_inference",
    "_enter_autocast": "enter_autocast",
    "_exit_autocast": "exit_autocast",
}
_PLAIN_MODULES = (
    "torch",
    "torch.functional",
    "torch.nn.functional",
    "torch.special",
    "torch.linalg",
    "_operator",
    "math",
)
_IN_PLACE_OPERATORS = {
    getattr(operator, name) for name in dir(operator) if name.startswith("i") and name[1:] in dir(operator)
}
_IN_PLACE_OPERATORS |= {operator.setitem, operator.delitem, operator.iconcat}
_IN_PLACE_OPERATORS -= {operator.is_, operator.is_not, operator.index, operator.inv, operator.invert}


if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass


def __getattr__(name: str) -> Any:
    if name == "CustomGraphPass":
        from torch._inductor.custom_graph_pass import CustomGraphPass

        return CustomGraphPass
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def symbolic_expression(size: Any) -> Any:
    """The sympy expression of a SymInt or SymFloat; None for plain numbers."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat)) else None


@contextlib.contextmanager
def quiet_shape_env(fake_mode: Any) -> Iterator[None]:
    """Run fake tensors for looking only: no guards are added, no unbacked symbols left pending."""
    shape_env = getattr(fake_mode, "shape_env", None)
    if shape_env is None:
        yield
        return
    with shape_env.suppress_guards(), shape_env.ignore_fresh_unbacked_symbols():
        yield


def _function_name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def changes_global_state(node: fx.Node) -> bool:
    """Whether the node sets grad mode, inference mode or autocast."""
    return _function_name(node) in _STATE_CHANGES


def state_change(node: fx.Node) -> str:
    """Which global state a node changes, and how."""
    return _STATE_CHANGES[_function_name(node)]


_AUTOCAST_DEVICES = ("cpu", "cuda")


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """The autocasts in force: switching off what is off is no change."""
    return tuple(
        (device, torch.get_autocast_dtype(device)) for device in _AUTOCAST_DEVICES if torch.is_autocast_enabled(device)
    )


def autocast_like(node: fx.Node) -> Any:
    """The context that an `_enter_autocast` node enters; for a device this machine lacks it warns, and is off."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.autocast(*node.args)  # type: ignore[arg-type]


@contextlib.contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Autocast keeps its casts of parameters; each node has to show its own."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def is_composite(overload: Any) -> bool:
    """Whether an ATen operator is defined by others and can be taken apart."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd"))


def registered_operators(namespace: str) -> set[str]:
    """The names of all operators in a namespace, without overloads."""
    names = torch._C._dispatch_get_all_op_names()
    return {name.split("::")[1].split(".")[0] for name in names if name.startswith(f"{namespace}::")}


def is_higher_order(node: fx.Node) -> bool:
    """Whether the node calls a higher-order operator, such as a checkpoint region."""
    return _is_higher_order(node.target)


@lru_cache(4096)
def _is_higher_order(target: Any) -> bool:
    return isinstance(target, HigherOrderOperator)


def may_mutate(node: fx.Node) -> bool:
    """Whether a node may write into an argument, by its name or, for one with nested graphs, by what is in them."""
    if _named_as_mutating(node.op, node.target):
        return True
    if node.op == "call_function" and is_higher_order(node):
        bodies = _bodies(node)
        return not bodies or any(may_mutate(inner) for body in bodies for inner in body.graph.nodes)
    kwargs = node.kwargs
    if not kwargs or node.op not in ("call_function", "call_method"):
        return False
    return "out" in kwargs if node.op == "call_method" else kwargs.get("out") is not None or bool(kwargs.get("inplace"))


@lru_cache(4096)  # graphs of twenty thousand nodes hold a few dozen different targets
def _named_as_mutating(op: str, target: Any) -> bool:
    if op == "call_method":
        name = str(target)
        return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if op != "call_function" or isinstance(target, HigherOrderOperator):
        return False
    if target in _IN_PLACE_OPERATORS:
        return True
    name = getattr(target, "__name__", "")
    if name.endswith("_") and not name.endswith("__") and getattr(target, "__module__", None) != "_operator":
        return True  # torch.sigmoid_, torch._foreach_add_
    if str(getattr(target, "__module__", "")).startswith(("torch._dynamo", "numpy", "torch._numpy")):
        return True  # NumPy code, of which nothing is known here
    overloads = [target] if isinstance(target, OpOverload) else []
    if isinstance(target, OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]  # type: ignore[no-untyped-call]
    return any(op._schema.is_mutable for op in overloads)


_RANDOM = {
    *("bernoulli", "multinomial", "normal", "poisson", "rrelu", "gumbel_softmax", "scaled_dot_product_attention"),
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "native_dropout", "alpha_dropout", "feature_dropout"),
    *("feature_alpha_dropout", "fractional_max_pool2d", "fractional_max_pool3d"),
}


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether a node's result depends on where it stands among those that draw random numbers."""
    name = str(node.target) if node.op == "call_method" else _function_name(node)
    return name.split(".")[0] in _RANDOM


def _bodies(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a higher-order operator runs."""
    owner = node.graph.owning_module
    names = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    found = [getattr(owner, name, None) for name in names]
    return [body for body in found if isinstance(body, fx.GraphModule)]


class AutogradFunction:
    """A user's autograd.Function as Dynamo captured it: callable, with the backward that the user wrote."""

    _opname = "autograd_function"

    def __init__(self, node: fx.Node) -> None:
        self.bodies = _bodies(node)
        self.operator = node.target
        self.kwargs = dict(node.kwargs)

    def __call__(self, *inputs: Any) -> Any:
        return self.operator(*self.bodies[:2], *inputs, **self.kwargs)  # type: ignore[operator]

    def __str__(self) -> str:
        return "\n".join([str(body.code) for body in self.bodies] + [str(self.kwargs)])

    def nodes(self) -> Iterator[fx.Node]:
        """What the forward does."""
        yield from self.bodies[0].graph.nodes


def autograd_function(node: fx.Node) -> AutogradFunction | None:
    """The autograd.Function that a node applies, if it applies one and its inputs are all tensors of the graph."""
    if not is_higher_order(node) or getattr(node.target, "__name__", "") != "autograd_function_apply":
        return None
    found = AutogradFunction(node)
    plain = all(isinstance(arg, fx.Node) for arg in node.args) and len(found.bodies) == 2
    return found if plain else None


def is_plain_call(node: fx.Node) -> bool:
    """Whether a node may be run on fake tensors to see its ATen calls: Tensor methods and torch's own functions."""
    return node.op == "call_method" or _is_plain_function(node.target)


@lru_cache(4096)
def _is_plain_function(target: Any) -> bool:
    if target is getattr or isinstance(target, (OpOverload, OpOverloadPacket)):
        return True
    if getattr(target, "__name__", "") in _STATE_CHANGES or isinstance(target, HigherOrderOperator):
        return False
    module = getattr(target, "__module__", None)
    owner = getattr(getattr(target, "__self__", None), "__name__", "")
    return (
        module in _PLAIN_MODULES
        or owner.startswith("_VariableFunctions")
        or str(module).startswith("einops")
        or module
        in (
            "torch._C._nn",
            "torch._C._linalg",
            "torch._C._special",
        )
    )


class FloatWatch:
    """Collects the symbolic floats whose values a decision was based on.

    With `dynamic=True` a module's eps is an input of the graph. What was recognised at one value need not hold at
    another, and a compiled graph may be found again in a cache, so such a float has to become a constant of the
    program: `settle` makes Dynamo trace once more with it as one, as Inductor does for floats it cannot keep.
    """

    def __init__(self) -> None:
        self._symbols: set[str] = set()

    def value(self, number: torch.SymFloat) -> float | None:
        """The value at capture, and the float is remembered; None for one that comes from a size, which stays open."""
        symbols = {str(symbol) for symbol in number.node.expr.free_symbols}
        if not all(symbol.startswith("zf") for symbol in symbols):
            return None
        self._symbols |= symbols
        return float(number.node.hint)

    def clear(self) -> None:
        """Forget what was collected."""
        self._symbols.clear()

    def settle(self) -> None:
        """Raise Dynamo's restart if a decision depends on a symbolic float."""
        if self._symbols:
            from torch._dynamo.exc import TensorifyScalarRestartAnalysis
            from torch._dynamo.symbolic_convert import TensorifyState

            for symbol in self._symbols:
                TensorifyState.specialize(symbol)
            raise TensorifyScalarRestartAnalysis


float_watch = FloatWatch()


def fake_mode_of(tensor: Any) -> Any:
    """The mode in which factory functions make tensors like this one."""
    return getattr(tensor, "fake_mode", None) or contextlib.nullcontext()


def has_hint(size: Any) -> bool:
    """Whether a size was known when the graph was captured; one that depends on data was not."""
    return not isinstance(size, torch.SymInt) or bool(size.node.has_hint())


def hint(size: Any) -> Any:
    """The value that a size had when the graph was captured."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def same_size(left: Any, right: Any) -> bool:
    """Whether two sizes are known to be equal, without a guard."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(left == right))


def inductor_config() -> Any:
    """Inductor's settings."""
    import torch._inductor.config as config

    return config


def hash_files(files: list[str]) -> Any:
    """Inductor's hash of source files, for a pass's uuid."""
    from torch._inductor.custom_graph_pass import get_hash_for_files

    return get_hash_for_files(tuple(files))


def inductor_cache_dir() -> Path:
    """The folder of Inductor's caches on disk."""
    from torch._inductor.runtime import runtime_utils

    return Path(runtime_utils.cache_dir())  # type: ignore[attr-defined]


def on_dynamo_reset(backend: Any) -> None:
    """Have `backend.reset()` called by the next `torch._dynamo.reset()`, as that of every backend in use."""
    from torch._dynamo.eval_frame import cached_backends

    cached_backends.setdefault(id(backend), backend)


def fresh_inductor_cache() -> Any:
    """A context in which Inductor's caches are empty; what it puts there is deleted in the end."""
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


def compiles_ahead_of_time() -> bool:
    """Whether Inductor is at work for AOTInductor."""
    from torch._inductor.virtualized import V

    return V.aot_compilation is True


def compile_id() -> tuple[Any, Any]:
    """Which frame Dynamo is compiling, and for the how-manieth time; None and None outside a compilation."""
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    return (None, None) if current is None else (current.frame_id, current.frame_compile_id)


def readable(module: fx.GraphModule) -> str:
    """A graph as code, with the shapes of its values."""
    return module.print_readable(print_output=False, include_stride=True)


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Put a text into the structured trace that tlparse reads (`TORCH_TRACE`); computed only if there is one."""
    torch._logging.trace_structured(  # type: ignore[attr-defined]
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=payload,
        expect_trace_id=False,
    )


def as_list(custom_passes: Any) -> list[Any]:
    """Inductor's custom pass settings hold one pass in torch 2.11, one or several later."""
    if custom_passes is None:
        return []
    return list(custom_passes) if isinstance(custom_passes, (list, tuple)) else [custom_passes]


def is_inference_aware(custom_pass: Any) -> bool:
    """Whether Inductor tells a pass after grad if the graph is for inference. torch 2.11 has no such passes."""
    from torch._inductor import custom_graph_pass

    return isinstance(custom_pass, getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", ()))


def inference_aware(kind: type) -> type:
    """The same class of passes, of those that Inductor tells."""
    from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass

    return type(kind.__name__, (kind, CustomInferenceAwareGraphPass), {})


def compile_with_inductor(
    gm: fx.GraphModule,
    example_inputs: Any,
    *,
    mode: str | None,
    options: dict[str, Any],
    patches: dict[str, Any],
) -> Any:
    """What `torch.compile(backend="inductor", mode=..., options=...)` does with a graph, with further settings."""
    wrapper = torch._TorchCompileInductorWrapper(mode, options, None)  # type: ignore[no-untyped-call]
    wrapper.config |= patches
    # Kernels that a graph brings along are launched from C++, too: a quarter less time on the host.
    if hasattr(inductor_config(), "static_launch_user_defined_triton_kernels"):
        wrapper.config.setdefault("static_launch_user_defined_triton_kernels", True)
    return wrapper(gm, example_inputs)


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


def custom_op_autograd_kernel(operator: Any, overload: Any) -> Any:
    """The kernel that torch.library itself makes for a custom operator's gradient."""
    from torch._library import autograd as library_autograd

    return library_autograd.make_autograd_impl(overload, operator)


def below_autograd(overload: Any, keyset: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator's implementation, past the keys that autograd handles."""
    with torch._C._AutoDispatchBelowAutograd():
        return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)


def functorch_is_active() -> bool:
    """Whether a transform of torch.func is at work."""
    return bool(torch._C._are_functorch_transforms_active())


def apply_at_this_level(function: Any, args: Any) -> Any:
    """Apply an autograd.Function at the present level of torch.func alone, without asking it for other transforms."""
    from torch._functorch.utils import enable_single_level_autograd_function

    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(*args)


def forward_mode_is_active() -> bool:
    """Whether a level of forward-mode differentiation is open."""
    return torch.autograd.forward_ad._current_level >= 0


@contextlib.contextmanager
def quiet_fakes(values: Any) -> Iterator[None]:
    """Run an operator on the fake tensors among these values, without guards."""
    from torch.utils import _pytree as pytree

    modes = (getattr(value, "fake_mode", None) for value in pytree.tree_leaves(values))
    mode = next((mode for mode in modes if mode is not None), None)
    with quiet_shape_env(mode), mode or contextlib.nullcontext():
        yield


def is_pure(node: fx.Node) -> bool:
    """Whether a call of a joint graph may be moved: it writes nowhere and draws no random numbers."""
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, OpOverload) and not (
        node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags
    )


def tensor_metadata(value: torch.Tensor) -> Any:
    """What tracing notes about a tensor under "tensor_meta"."""
    from torch.fx.passes.shape_prop import _extract_tensor_metadata

    return _extract_tensor_metadata(value)


def writes(node: fx.Node) -> bool:
    """Whether a call of a joint graph writes into an argument. Autograd's tracing leaves few of those."""
    functional = is_higher_order(node) and "functional" in str(node.target)
    return not functional and may_mutate(node)


def sort_topologically(graph: fx.Graph) -> None:
    """Bring a graph's nodes into an order in which each follows what it reads, moving no more than is needed."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


def inductor_decompositions() -> Any:
    """What Inductor takes operators apart with before it lowers them."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def is_kernel_launch(node: fx.Node) -> bool:
    """Whether a node launches a Triton kernel."""
    return is_higher_order(node) and str(node.target) == "triton_kernel_wrapper_mutation"


def storage_of(tensor: torch.Tensor) -> Any:
    """What tensors that share memory have in common, fake ones too; None for those without plain memory."""
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else None


def is_made_here(node: fx.Node) -> bool:
    """Whether a node is the result of an operator, or one of its results: not an input, and of no nested graph."""
    if node.target is operator.getitem:
        return isinstance(node.args[0].target, OpOverload)  # type: ignore[union-attr]
    return node.op == "call_function" and isinstance(node.target, OpOverload)


def same_strides(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and the same strides where these matter."""
    alike = left.shape == right.shape and left.dtype == right.dtype
    strides = zip(left.shape, left.stride(), right.stride(), strict=False)
    return alike and (left.numel() == 0 or all(a == b for size, a, b in strides if size > 1))


def aliased(node: fx.Node) -> list[fx.Node]:
    """The arguments that an ATen call returns a view of, by its schema."""
    if not isinstance(node.target, OpOverload):
        return []
    values = zip(node.target._schema.arguments, node.args, strict=False)
    return [value for argument, value in values if argument.alias_info is not None and isinstance(value, fx.Node)]


_analysed_once: dict[int, Any] = {}  # by id, because a kernel's hash is that of its source


def analyse_once(node: fx.Node) -> None:
    """Have Inductor look through this launch's kernel for what it writes once, not twice for each of its launches.

    That look takes as long as a tenth of compiling the kernel, and a model launches each of them in every layer.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    kernel = triton_kernel_wrap.kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
    for one in (kernel, _jit_function(kernel)):
        _analysed_once[id(one)] = one
    for name in ("identify_accessed_tensors", "identify_mutated_tensors"):
        analyse = getattr(triton_kernel_wrap, name, None)
        if analyse is not None and not hasattr(analyse, "__wrapped__"):
            setattr(triton_kernel_wrap, name, _remembering(analyse))


def _remembering(analyse: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, Any] = {}

    @functools.wraps(analyse)
    def wrapped(kernel: Any, kwargs: dict[str, Any], *rest: Any) -> Any:
        if id(kernel) not in _analysed_once:
            return analyse(kernel, kwargs, *rest)
        function = _jit_function(kernel)
        constants = {param.name for param in function.params if param.is_constexpr}
        key = (id(function), *((name, _kind(value, name in constants)) for name, value in sorted(kwargs.items())))
        if key not in known:
            known[key] = analyse(kernel, kwargs, *rest)
        return known[key]

    return wrapped


def _jit_function(kernel: Any) -> Any:
    return kernel if hasattr(kernel, "params") else kernel.fn  # of an Autotuner, which holds num_warps


def _kind(value: Any, constant: bool) -> Any:
    """What of an argument decides what a kernel does with it: of tensors the type, of numbers nothing."""
    if constant or value is None:
        return type(value), value
    return getattr(value, "dtype", type(value))
