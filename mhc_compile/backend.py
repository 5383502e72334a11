"""The "mhc" backend: the passes, put into Inductor's own hooks.

One works on each Dynamo graph before autograd, one on each joint graph after it, one on each graph that Inductor is
about to compile. All are a `CustomGraphPass` with a `uuid` that covers the sources of operators, kernels and passes and
the options, so compiled graphs are cached by Inductor as ever, and cached ones go stale when any of those change.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import fx

import mhc_compile.ops  # noqa: F401  (registers the operators that the passes insert)
from mhc_compile import compat, kernels, passes, records
from mhc_compile.passes.fuse import FUSIONS, check_layers
from mhc_compile.passes.report import Report

log = logging.getLogger(__name__)

_PREFIX = "mhc."
_FUSE = "mhc.fuse."
_INPUT_NORM = _FUSE + "input_norm"
OPTIONS: dict[str, Any] = {"mhc.strict": False} | {_FUSE + name: True for name in FUSIONS}
OPTIONS |= {_INPUT_NORM: passes.INPUT_NORMS, "mhc.recompute": None, "mhc.share_layers": True, "mhc.lower": True}

last_report: Report | None = None


class StrictError(RuntimeError):
    """Hyper-connection code was found and not rewritten, and `mhc.strict` asks for it to be."""


class _Configured(compat.CustomGraphPass):
    """A pass that goes by the "mhc." options, and is told from others in Inductor's caches by sources and options."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        self.options = OPTIONS | (options or {})

    def uuid(self) -> Any:
        return (_sources_hash(), tuple(sorted(self.options.items())))


class MhcPass(_Configured):
    """The pre-grad pass: rewrites one Dynamo graph in place and records the report.

    `last_report` is that of the compilation in progress, nested graphs such as checkpoint regions included;
    `records.report()` has all of them.
    """

    def __call__(self, graph: fx.Graph) -> None:
        global last_report
        new, report = passes.run(graph, input_norms=self.options[_INPUT_NORM])
        last_report = records.add(report)
        if self.options["mhc.strict"] and (report.declined or report.errors):
            raise StrictError(str(report))
        module = graph.owning_module
        if new is not None and module is not None:
            if _is_for_cpu(graph):
                compat.compile_beside()
            module.graph = new
            module.recompile()
            compat.trace_artifact("mhc_rewritten_graph", lambda: compat.readable(module))
        compat.trace_artifact("mhc_report", lambda: str(report))


def _is_for_cpu(graph: fx.Graph) -> bool:
    given = [compat.example(node) for node in graph.find_nodes(op="placeholder")]
    return all(value.device.type == "cpu" for value in given if isinstance(value, torch.Tensor))


class FusePass(_Configured):
    """The joint pass: fuses operators of forward and backward, and adds to the report of the graph."""

    def __call__(self, graph: fx.Graph) -> None:
        module = graph.owning_module
        if module is None:
            return
        names = [name for name in FUSIONS if self.options[_FUSE + name]]
        report = passes.fuse(module, names, self.options["mhc.recompute"])
        if last_report is not None:
            last_report.add(report)


class LowerPass(_Configured):
    """The post-grad pass: lets sublayers that are alike be one graph, takes operators apart, and reports both."""

    def __call__(self, graph: fx.Graph) -> None:
        compat.keep_arguments_of_calls()  # of regions that a user marked, too
        compat.keep_order_of_writes()
        if self.options["mhc.share_layers"] and compat.calls_graphs():
            bodies, report = passes.share(graph)
            if last_report is not None:
                last_report.add(report)
            for body in bodies:
                compat.run_passes_after_grad(body, LowerPass(self.options | {"mhc.share_layers": False}))
        if self.options["mhc.lower"]:
            compat.tell_workers()
            report = passes.lower(graph)
            if last_report is not None:
                last_report.add(report)
        if compat.compiles_ahead_of_time():
            passes.lowering.spell_out(graph)

    def uuid(self) -> Any:
        """With what kernels are chosen by, and cut for: Inductor knows of a GPU its name alone."""
        count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
        processors = [torch.cuda.get_device_properties(i).multi_processor_count for i in range(count)]
        return (super().uuid(), kernels.communicates(), compat.makes_cuda_graphs(), *processors)


class _Chain(compat.CustomGraphPass):
    """A user's own pass, then ours. What Inductor tells passes that ask for it, whether gradients follow, goes on."""

    def __init__(self, first: Callable[..., None], second: compat.CustomGraphPass) -> None:
        self.passes = (first, second)

    def __call__(self, graph: fx.Graph, **known: Any) -> None:
        module = graph.owning_module
        for one in self.passes:
            one(graph, **(known if compat.is_inference_aware(one) else {}))
            graph = module.graph if module is not None else graph

    def uuid(self) -> Any:
        first, second = self.passes
        own = first.uuid() if isinstance(first, compat.CustomGraphPass) else None
        return None if own is None else (own, second.uuid())


def _sources() -> list[str]:
    """Every source file that has a say in what a compiled graph computes."""
    root = Path(__file__).parent
    files = [root / "forms.py", root / "text.py", root / "backend.py"]
    for folder in ("compat", "ops", "kernels", "passes"):
        files += sorted((root / folder).rglob("*.py"))
    return [str(file) for file in files]


@functools.cache
def _sources_hash() -> Any:
    return compat.hash_files(_sources())


def mhc(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor after rewriting its hyper-connections.

    Reached by `torch.compile(model, backend="mhc", mode=..., options=...)`; mode and options are Inductor's own, and
    options may also hold

    - "mhc.strict" (bool): raise `StrictError` if hyper-connection code was found but not rewritten;
    - "mhc.fuse.accumulate", "mhc.fuse.boundary", "mhc.fuse.boundary_backward" (bool): leave out a fusion
      (`mhc_compile.passes.fuse`);
    - "mhc.fuse.input_norm" (bool or None): take the RMS norm that reads a layer input into the operator that makes it;
      None, the default, does so on GPUs, where it is faster;
    - "mhc.recompute" ("auto", a number of layers, or None): of so many layers keep one set of streams for the backward
      pass and compute the others again there; a layer is one sublayer with its hyper-connection, "auto" takes the
      square root of n L / (n + 2) for a chain of L layers (`mhc_compile.passes.fuse.recompute`);
    - "mhc.share_layers" (bool): False compiles sublayers that are alike one by one (`mhc_compile.passes.share`);
    - "mhc.lower" (bool): False leaves operators whole in the compiled graph, each a call of its own from Python
      (`mhc_compile.passes.lower`).

    Raises ValueError for an unknown "mhc." option, and for a value that is none of these.
    """
    own, rest = _split(options or {})
    patches = {hook: _chained(hook, rest.pop(hook, None), make(own)) for hook, make in _HOOKS.items()}
    with records.stored(gm, example_inputs, MhcPass(own).uuid()):
        compiled: Callable[..., Any] = compat.compile_with_inductor(
            gm, example_inputs, mode=mode, options=rest, patches=patches
        )
    return compiled


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    own = {key: value for key, value in options.items() if key.startswith(_PREFIX)}
    for key in own:
        if key not in OPTIONS:
            raise ValueError(f"options: unknown option {key!r}; expected one of {', '.join(sorted(OPTIONS))}")
        if isinstance(OPTIONS[key], bool) and not isinstance(own[key], bool):
            raise ValueError(f"options: {key!r} is {own[key]!r}; expected True or False")
        if key == _INPUT_NORM and not isinstance(own[key], bool | None):
            raise ValueError(f"options: {key!r} is {own[key]!r}; expected True, False or None")
    check_layers(own.get("mhc.recompute"), "options: 'mhc.recompute'")
    return own, {key: value for key, value in options.items() if key not in own}


_HOOKS: dict[str, Callable[[dict[str, Any]], compat.CustomGraphPass]] = {
    "pre_grad_custom_pass": MhcPass,
    "joint_custom_pre_pass": FusePass,
    "post_grad_custom_post_pass": LowerPass,
}


def _chained(hook: str, given: Any, own: compat.CustomGraphPass) -> compat.CustomGraphPass:
    configured = given if given is not None else getattr(compat.inductor_config(), hook)
    for first in reversed(compat.as_list(configured)):
        if not isinstance(first, _Configured):
            chain = compat.inference_aware(_Chain) if any(map(compat.is_inference_aware, (first, own))) else _Chain
            own = chain(first, own)
    return own


class enable:
    """Put the passes into Inductor itself, so that a plain `torch.compile(model)` is rewritten.

    For code that calls `torch.compile` on its own: trainers and serving frameworks. As a function it lasts until
    `disable()`; as a context manager, until the end of the block. options are the "mhc." options of the backend.

    It counts when a graph is compiled, which is at the first call: code that Dynamo has compiled before stays as it is
    until `torch._dynamo.reset()`. The same holds for `disable`.
    """

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        own, rest = _split(options or {})
        if rest:
            raise ValueError(f"options: {', '.join(rest)} is not an option of mhc; expected names that begin with mhc.")
        config = compat.inductor_config()
        settings = {hook: _chained(hook, None, make(own)) for hook, make in _HOOKS.items()} | compat.launches_from_c()
        _stack.append({name: getattr(config, name) for name in settings})
        for name, value in settings.items():
            setattr(config, name, value)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        disable()


_stack: list[dict[str, Any]] = []


def disable() -> None:
    """Take out what the last `enable` put in; does nothing if it is not enabled."""
    if _stack:
        for name, before in _stack.pop().items():
            setattr(compat.inductor_config(), name, before)


def is_enabled() -> bool:
    """Whether a plain `torch.compile` is rewritten at present."""
    return bool(_stack)


if "mhc" not in torch._dynamo.list_backends():  # an installed package is found by its entry point
    torch._dynamo.register_backend(mhc, name="mhc")
